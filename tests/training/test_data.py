"""The data of runs: splits, simulated sessions, and what a process keeps for its next runs."""

from __future__ import annotations

import numpy as np
import pytest

import ultr.training.data
from runs import feedback_log, quick
from ultr.errors import DataError, OptionError
from ultr.training.config import make_config
from ultr.training.data import Data, cached_run_data, load_run_data


@pytest.fixture
def made(monkeypatch, small_synthetic) -> list[int]:
    """Return the seeds of the runs whose data was made, in this order."""
    seeds: list[int] = []
    load = ultr.training.data.load_run_data
    monkeypatch.setattr(
        ultr.training.data, "load_run_data", lambda config: (seeds.append(config.seed), load(config))[1]
    )
    monkeypatch.setattr(ultr.training.data, "_RUN_DATA", {})
    return seeds


def get(seed: int, **options) -> Data:
    return cached_run_data(make_config("synthetic", users="pbm", seed=seed, **options))


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


def test_train_validation_and_test_requests_of_a_log_are_disjoint():
    parts = load_run_data(quick("", held_out=0.2, test=0.3), feedback_log(80))
    ids = [set(part.request_ids.to_pylist()) for part in (parts.train, parts.validation, parts.test)]
    assert [len(each) for each in ids] == [40, 16, 24]
    assert len(set.union(*ids)) == 80
    other = load_run_data(quick("", held_out=0.2, test=0.3, seed=1), feedback_log(80))
    assert set(other.test.request_ids.to_pylist()) == ids[2]  # the same for all seeds
    assert set(other.validation.request_ids.to_pylist()) != ids[1]
    assert load_run_data(quick("", test=0.0), feedback_log(80)).test is None
    usual = load_run_data(quick(""), feedback_log(80))
    assert (len(usual.train), len(usual.validation), len(usual.test)) == (60, 12, 8)


def test_a_log_needs_more_requests_than_are_held_out():
    with pytest.raises(DataError, match="more than 1 requests"):
        load_run_data(quick(""), feedback_log(1))


@pytest.mark.parametrize("name", ["synthetic", "istella-s"])
def test_data_sets_need_simulated_users(name):
    with pytest.raises(OptionError) as raised:
        load_run_data(quick(name))
    assert "--users pbm" in raised.value.hint


def test_sessions_are_drawn_once_with_every_request_about_equally_often(small_synthetic):
    chosen = quick("synthetic", users="pbm", ranker="lightgbm", sessions=600)
    data = load_run_data(chosen)
    assert len(data.train) == 600
    assert data.feeding_user is None
    times = np.unique(np.asarray(data.train.request_ids), return_counts=True)[1]
    assert set(times) == {1, 2}
    assert len(load_run_data(chosen.with_options(sessions=0)).train) == 20_000  # the default
    assert load_run_data(chosen.with_options(ranker="mlp", sessions=0)).feeding_user is not None


@pytest.mark.parametrize("label", ["click * 0", "click * 1e13"])
def test_labels_that_nothing_can_be_learned_from_are_errors(label):
    with pytest.raises(DataError, match="label"):
        load_run_data(quick("", label=label), feedback_log(20))
