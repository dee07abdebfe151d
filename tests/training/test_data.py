"""The data of runs, which a process keeps for its next runs."""

from __future__ import annotations

import pytest

import ultr.training.data
from ultr.training.config import RunConfig, TrainingOptions
from ultr.training.data import cached_run_data


@pytest.fixture
def made(monkeypatch, small_synthetic) -> list[int]:
    """Return the seeds of the runs whose data was made, in this order."""
    seeds: list[int] = []
    load = ultr.training.data.load_run_data
    monkeypatch.setattr(
        ultr.training.data, "load_run_data", lambda config: (seeds.append(config.training.seed), load(config))[1]
    )
    monkeypatch.setattr(ultr.training.data, "_RUN_DATA", {})
    return seeds


def get(seed: int, lr: float = 0.02, method: str = "pairwise-em") -> ultr.training.data.RunData:
    return cached_run_data(RunConfig("synthetic", method, users="pbm", training=TrainingOptions(seed=seed, lr=lr)))


def test_runs_of_other_methods_and_rates_share_the_data(made):
    assert get(1) is get(1, lr=0.5) is get(1, method="direct")
    assert get(2) is not get(1)
    assert made == [1, 2]


def test_the_data_that_was_not_used_for_longest_is_dropped_when_it_is_too_large(made, monkeypatch):
    monkeypatch.setattr(ultr.training.data, "CACHED_NUMBERS", 2 * get(1).train.features.size)
    get(2)
    get(1)
    get(3)
    get(1)
    assert made == [1, 2, 3]
    get(2)
    assert made == [1, 2, 3, 2]
    monkeypatch.setattr(ultr.training.data, "CACHED_NUMBERS", 0)
    assert get(4) is get(4)  # the last one stays, however large
