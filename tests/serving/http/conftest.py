"""A network, trees and their exported folders, trained once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from conftest import make_shown_log
from serving.http.client import MAX_ROWS, NUMBERS, SHOPS
from ultr.datasets.users import User, simulate_log
from ultr.serving.export import export_run
from ultr.serving.http import ServerOptions
from ultr.serving.http.app import App
from ultr.serving.http.served import Served
from ultr.training.config import make_config
from ultr.training.run import run_training


def train(log: Path, out: Path, *, ranker: str = "mlp", seed: int = 0, overwrite: bool = False) -> Path:
    few = {"steps": 4, "evaluate_every": 4, "batch": 16, "hidden": (8,), "select": "feedback-ndcg@10"}
    few |= {"tree_parameters": {"min_data_in_leaf": 5}, "categorical": ("shop",), "device": "cpu"}
    config = make_config(str(log), method="pointwise", ranker=ranker, seed=seed, **few)
    return run_training(config, out, overwrite=overwrite)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> SimpleNamespace:
    """The runs `network` and `trees` of one log, and their exported folders."""
    folder = tmp_path_factory.mktemp("serving")
    log, _ = simulate_log(make_shown_log(requests=60, features=NUMBERS), User())
    shops = np.random.default_rng(0).choice(SHOPS, log.rows)
    pq.write_table(log.to_table().drop(["relevance"]).append_column("shop", [shops.tolist()]), folder / "log.parquet")
    made = SimpleNamespace(log=folder / "log.parquet")
    made.network = train(made.log, folder / "network")
    made.trees = train(made.log, folder / "trees", ranker="lightgbm")
    made.exported = export_run(made.network, folder / "exported").folder
    made.exported_trees = export_run(made.trees, folder / "exported-trees").folder
    return made


@pytest.fixture(scope="session")
def network(folders):
    app = App(Served(folders.network), ServerOptions("ranker", max_rows=MAX_ROWS))
    yield app
    app.close()


@pytest.fixture(scope="session")
def trees(folders):
    app = App(Served(folders.trees), ServerOptions("trees", max_rows=MAX_ROWS))
    yield app
    app.close()
