"""Small finished runs for the tests of pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import make_shown_log
from ultr.datasets.simulate import simulate_log
from ultr.datasets.users import User
from ultr.log import write_log
from ultr.training.config import RunConfig, TrainingOptions
from ultr.training.run import run_training

QUICK = TrainingOptions(steps=4, batch=16, lr=0.05, evaluate_every=2, bias_steps=20, device="cpu")
RUNS = {
    "em": {"method": "pairwise-em"},
    "trust": {"method": "pairwise-em", "method_options": {"loss": "bayes-ipw"}},
    "towers": {"method": "pal-click-dwell"},
    "affine": {"method": "affine"},
    "plain": {"method": "lambdarank"},
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
        config = RunConfig(data=str(log_path), ranker_options={"hidden": [4]}, training=QUICK, **options)
        folders[name] = run_training(config, folder / name, shared=folder / "shared")
    return folders
