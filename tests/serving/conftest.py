"""Two networks, trees and exported folders, trained once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from conftest import make_shown_log
from serving.asking import MAX_ROWS, NUMBERS, SHOPS
from ultr.export import export_run
from ultr.preparing import RunConfig
from ultr.runs import run_training
from ultr.serving.app import App
from ultr.serving.served import Served
from ultr.simulate import User, simulate_log
from ultr.training import TrainingOptions


def train(log: Path, out: Path, *, ranker: str = "mlp", seed: int = 0, overwrite: bool = False) -> Path:
    config = RunConfig(
        data=str(log),
        method="pointwise",
        ranker=ranker,
        ranker_options={"hidden": [8]} if ranker == "mlp" else {"min_data_in_leaf": 5},
        columns={"categorical": ["shop"]},
        select="feedback-ndcg@10",
        training=TrainingOptions(steps=4, batch=16, evaluate_every=4, seed=seed, device="cpu"),
    )
    return run_training(config, out, overwrite=overwrite)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> SimpleNamespace:
    """Runs `network` and `trees` of one log, and what they are exported to."""
    folder = tmp_path_factory.mktemp("serving")
    log, _ = simulate_log(make_shown_log(requests=60, features=NUMBERS), User())
    shops = np.random.default_rng(0).choice(SHOPS, log.rows)
    pq.write_table(log.to_table().drop(["relevance"]).append_column("shop", [shops.tolist()]), folder / "log.parquet")
    found = SimpleNamespace(log=folder / "log.parquet")
    found.network = train(found.log, folder / "network")
    found.trees = train(found.log, folder / "trees", ranker="lightgbm")
    found.exported = export_run(found.network, folder / "exported").folder
    found.exported_trees = export_run(found.trees, folder / "exported-trees").folder
    return found


@pytest.fixture(scope="session")
def network(folders):
    app = App(Served(folders.network), name="ranker", max_rows=MAX_ROWS)
    yield app
    app.close()


@pytest.fixture(scope="session")
def trees(folders):
    app = App(Served(folders.trees), name="trees", max_rows=MAX_ROWS)
    yield app
    app.close()
