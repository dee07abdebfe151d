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


def test_runs_are_compared_on_requests_that_none_was_trained_on(folder):
    log = read_log(folder / "log.parquet")
    trained = []
    for seed in (0, 1):
        data = load_run_data(read_config(folder / f"run-{seed}"))
        trained.append(np.isin(log.request_ids, data.train.request_ids))
    fresh, warnings = fresh_requests({f"run-{i}": (folder / f"run-{i}", log) for i in (0, 1)}, None)
    np.testing.assert_array_equal(fresh, ~trained[0] & ~trained[1])
    assert 0 < fresh.sum() < 20
    text = "\n".join(warnings)
    assert "run-0 was trained on 80 of the 100 requests." in text
    assert f"on the other {fresh.sum()} requests." in text
    assert f"{fresh.sum()} of the test requests selected the best step of run-1" in text
    unselected, warnings = fresh_requests({"run-0": (folder / "run-0", log)}, None, unselected=True)
    assert (unselected.all(), len(warnings)) == (True, 1)  # all others selected its best step


def test_new_requests_need_no_warning_even_if_their_ids_are_the_same(folder):
    log = simulate_log(make_shown_log(requests=30, features=4, seed=9), User())[0]
    fresh, warnings = fresh_requests({"run": (folder / "run-0", log)}, None)
    assert fresh.all()
    assert not warnings


def test_a_warning_says_if_all_requests_were_trained_on_or_if_it_is_not_known(folder, tmp_path):
    log = read_log(folder / "log.parquet")
    trained = log.select(np.isin(request_hashes(log), read_outcome(folder / "run-0").used["trained"]))
    fresh, warnings = fresh_requests({"run": (folder / "run-0", trained)}, None)
    assert fresh.all()
    assert "No other requests are left, so the values of the runs are too high" in warnings[-1]
    unknown = shutil.copytree(folder / "run-0", tmp_path / "unknown")
    (unknown / "outcome" / USED).unlink()
    fresh, warnings = fresh_requests({"unknown": (unknown, log)}, None)
    assert fresh.all()
    assert warnings == [warnings[0]]
    assert warnings[0].startswith("unknown does not record the requests it was trained on")


def test_the_splits_of_the_training_data_say_what_a_run_was_trained_on(folder):
    log = read_log(folder / "log.parquet")
    fingerprint = read_outcome(folder / "run-0").about["data"]["fingerprint"]
    runs = {"run": (folder / "run-0", log)}
    fresh, warnings = fresh_requests(runs, Split(fingerprint, "test"))
    assert (fresh.all(), warnings) == (True, [])
    assert "No other requests are left" in fresh_requests(runs, Split(fingerprint, "train"))[1][-1]
    assert "selected the best step of run" in fresh_requests(runs, Split(fingerprint, "validation"))[1][0]
