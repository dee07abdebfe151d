"""Small finished runs for the tests of pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import make_shown_log
from ultr.datasets.users import User, simulate_log
from ultr.log import write_log
from ultr.training.config import make_config
from ultr.training.run import run_training

QUICK = {"steps": 4, "batch": 16, "network.lr": 0.05, "network.evaluate_every": 2, "bias_steps": 20, "hidden": (4,)}
TREES = {"trees.rounds": 4, "trees.evaluate_every": 2}
RUNS = {
    "em": {"method": "pairwise-em", "ranker": "mlp"},
    "trust": {"method": "pairwise-em", "ranker": "mlp", "method_options": {"loss": "bayes-ipw"}},
    "towers": {"method": "pal-click-dwell"},
    "affine": {"method": "affine"},
    "plain": {"method": "lambdarank"},
    "both": {},
}


@pytest.fixture(scope="session")
def log_path(tmp_path_factory) -> Path:
    log, _ = simulate_log(make_shown_log(requests=150, features=4), User(), seed=0, sessions=400)
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    write_log(log, path)
    return path


@pytest.fixture(scope="session")
def runs(log_path, tmp_path_factory) -> dict[str, Path]:
    """Runs of the same log, by name."""
    folder = tmp_path_factory.mktemp("runs")
    folders = {}
    for name, options in RUNS.items():
        config = make_config(str(log_path), device="cpu", **QUICK, **TREES, **options)
        folders[name] = run_training(config, folder / name, shared=folder / "shared")
    return folders
