"""Requests that no run was trained on: runs record theirs, and rankers are compared on others."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from conftest import make_shown_log
from runs import PLAIN, quick
from ultr.datasets.users import User, simulate_log
from ultr.log import read_log, write_log
from ultr.log.splits import request_hashes
from ultr.training.data import USED, load_run_data
from ultr.training.folder import read_config
from ultr.training.outcome import Split, fresh_requests, read_outcome
from ultr.training.run import run_training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_log(simulate_log(make_shown_log(requests=100, features=4), User())[0], folder / "log.parquet")
    for seed in (0, 1):
        chosen = quick(folder / "log.parquet", ranker="linear", seed=seed, steps=2, evaluate_every=2, **PLAIN)
        run_training(chosen, folder / f"run-{seed}")
    return folder


def test_hashes_depend_on_the_id_and_on_the_features(folder):
    log = read_log(folder / "log.parquet")
    hashes = request_hashes(log)
    assert len(set(hashes.tolist())) == len(log)
    np.testing.assert_array_equal(request_hashes(log.select([7, 3])), hashes[[7, 3]])
    as_text = replace(log, request_ids=log.request_ids.cast(pa.string()))
    np.testing.assert_array_equal(request_hashes(as_text), hashes)
    assert not set(request_hashes(replace(log, features=log.features + 1)).tolist()) & set(hashes.tolist())
    shifted = replace(log, request_ids=pa.array([f"{i}{i}" for i in range(len(log))]))
    assert not set(request_hashes(shifted)[1:].tolist()) & set(hashes[1:].tolist())
    empty = replace(log.select([0, 1]), request_ids=pa.array(["", "a"]))
    assert len(set(request_hashes(empty).tolist())) == 2


def used_by(folder, name):
    data = load_run_data(read_config(folder / name))
    return [set(part.request_ids.to_pylist()) for part in (data.train, data.validation, data.test)]


def test_runs_are_compared_on_requests_that_none_was_trained_on_or_chosen_by(folder):
    log = read_log(folder / "log.parquet")
    (trained, chose, tested), (_, _, other_tested) = (used_by(folder, f"run-{seed}") for seed in (0, 1))
    assert tested == other_tested  # no seed can choose a setting by them
    assert (len(trained), len(chose), len(tested)) == (75, 15, 10)
    fresh = fresh_requests({f"run-{i}": (folder / f"run-{i}", log) for i in (0, 1)}, None)
    assert set(log.request_ids.filter(pa.array(fresh.mask)).to_pylist()) == tested
    assert fresh.chosen_on is None
    assert fresh.warnings == [
        "90 of the 100 requests trained a run or chose its step. All rankers are evaluated on the other 10 requests."
    ]


def test_new_requests_need_no_warning_even_if_their_ids_are_the_same(folder):
    log = simulate_log(make_shown_log(requests=30, features=4, seed=9), User())[0]
    fresh = fresh_requests({"run": (folder / "run-0", log)}, None)
    assert fresh.mask.all()
    assert (fresh.warnings, fresh.chosen_on) == ([], None)


def test_requests_that_trained_a_run_or_chose_its_step_cannot_judge(folder, tmp_path):
    log = read_log(folder / "log.parquet")
    used = read_outcome(folder / "run-0").used
    trained, chose = (np.isin(request_hashes(log), used[name]) for name in ("trained", "selected"))
    fresh = fresh_requests({"run": (folder / "run-0", log.select(trained))}, None)
    assert fresh.mask.all()
    assert "the requests trained the run" in fresh.chosen_on
    part = log.select(trained | chose)
    fresh = fresh_requests({"run": (folder / "run-0", part)}, None)
    np.testing.assert_array_equal(fresh.mask, chose[trained | chose])
    assert "the requests chose the best step of a run" in fresh.chosen_on
    unknown = shutil.copytree(folder / "run-0", tmp_path / "unknown")
    (unknown / "outcome" / USED).unlink()
    fresh = fresh_requests({"unknown": (unknown, log)}, None)
    assert fresh.mask.all()
    assert len(fresh.warnings) == 1
    assert fresh.warnings[0].startswith("unknown does not record the requests it was trained on")


def test_the_splits_of_the_training_data_say_what_a_run_was_trained_on(folder):
    log = read_log(folder / "log.parquet")
    fingerprint = read_outcome(folder / "run-0").about["data"]["fingerprint"]
    runs = {"run": (folder / "run-0", log)}
    fresh = fresh_requests(runs, Split(fingerprint, "test"))
    assert (fresh.mask.all(), fresh.warnings, fresh.chosen_on) == (True, [], None)
    assert "trained the run" in fresh_requests(runs, Split(fingerprint, "train")).chosen_on
    assert "chose the best step" in fresh_requests(runs, Split(fingerprint, "validation")).chosen_on
