"""The outcome of a run: metrics by request, agreement with the logged ranking, and examples."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from conftest import make_shown_log
from runs import FEEDBACK, quick
from ultr.datasets.users import User, simulate_log
from ultr.errors import DataError
from ultr.evaluation.scores import ranks
from ultr.log import Log
from ultr.rankers import make_ranker
from ultr.rankers.networks import FeatureEncoder
from ultr.training.combining import Ranker
from ultr.training.config import Config
from ultr.training.data import split_log
from ultr.training.examining import Examined
from ultr.training.folder import read_metrics
from ultr.training.outcome import (
    COMPARED_ITEMS,
    LOGGED,
    _example_requests,
    _moves,
    agreements,
    judge,
    read_outcome,
    value_of_run,
)
from ultr.training.run import run_training
from ultr.utils.jsonfiles import read_json, write_json


def listed(lengths) -> Log:
    rows = int(np.sum(lengths))
    return Log(
        features=np.zeros((rows, 1), np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        request_ids=pa.array(range(len(lengths))),
        feature_names=("x",),
    )


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(0, 2**31))
def test_agreement_is_kendalls_tau(lengths, seed):
    log, rng = listed(lengths), np.random.default_rng(seed)
    before, after = (ranks(log, rng.normal(size=log.rows)) for _ in range(2))
    tau = agreements(log, before, after)
    for i, (first, last) in enumerate(zip(log.offsets[:-1], log.offsets[1:], strict=True)):
        assert sorted(before[first:last]) == list(range(last - first))
        if last - first < 2:
            assert np.isnan(tau[i])
        else:
            assert tau[i] == pytest.approx(kendalltau(before[first:last], after[first:last]).statistic)


def test_ties_keep_the_order_of_the_rows():
    log = listed([3, 2])
    assert ranks(log, np.array([1.0, 2, 1, 0, 0])).tolist() == [1, 0, 2, 0, 1]


def test_only_the_first_items_of_long_requests_are_compared():
    log = listed([COMPARED_ITEMS + 30])
    before = np.arange(log.rows)
    after = np.concatenate([np.arange(COMPARED_ITEMS), COMPARED_ITEMS + np.arange(30)[::-1]])
    assert agreements(log, before, after) == [1.0]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 2**31))
def test_moves_are_shares_of_each_logged_rank(lengths, seed):
    log, rng = listed(lengths), np.random.default_rng(seed)
    before, after = (ranks(log, rng.normal(size=log.rows)) for _ in range(2))
    moves = _moves(before, after)
    assert len(moves["shares"]) == moves["deepest"] == min(20, max(lengths))
    for rank, row in enumerate(moves["shares"]):
        at = after[before == rank]
        assert sum(row) == pytest.approx(1, abs=0.01)
        assert row[-1] == pytest.approx(np.mean(at >= moves["deepest"]), abs=1e-3)
        assert row[0] == pytest.approx(np.mean(at == 0), abs=1e-3)


@given(st.lists(st.floats(-1, 1) | st.just(np.nan), max_size=30))
def test_examples_are_different_requests_with_two_items_or_more(agreement):
    numbers = [number for number, _ in _example_requests(np.array(agreement))]
    finite = int(np.isfinite(agreement).sum()) if agreement else 0
    assert len(set(numbers)) == len(numbers) == min(finite, len(numbers))
    assert all(np.isfinite(agreement[number]) for number in numbers)
    assert bool(numbers) == bool(finite)
    if finite:
        assert agreement[numbers[0]] == np.nanmin(agreement)


@pytest.fixture(scope="module")
def log() -> Log:
    return replace(simulate_log(make_shown_log(requests=80), User(), seed=1, sessions=300)[0], relevance=None)


@pytest.fixture(scope="module")
def config() -> Config:
    return quick("log.parquet", steps=4, evaluate_every=2)


@pytest.fixture(scope="module")
def run(log, config, tmp_path_factory):
    return run_training(config, tmp_path_factory.mktemp("outcomes") / "run", source=log)


def test_test_requests_judge_the_run_and_did_not_choose_its_step(run, log, config):
    outcome = read_outcome(run)
    best = max(line[config.selection] for line in read_metrics(run))
    name, value, step = value_of_run(run)
    assert step in [line["step"] for line in read_metrics(run) if line[config.selection] == best]
    assert (config.selection, name, outcome.split) == ("off-policy-likelihood", "off-policy-reward@10", "test")
    assert value == np.average(outcome.results[name], weights=outcome.weights) != pytest.approx(best, rel=1e-3)
    held_out = split_log(log, config).test
    assert outcome.requests == [str(i) for i in held_out.request_ids.to_pylist()]
    assert set(outcome.results) == {name, LOGGED + name}  # the likelihood chooses, and does not judge


def test_facts_are_those_of_the_log(run, log, config):
    facts = read_outcome(run).about["data"]
    train = split_log(log, config).train
    assert (facts["requests"], facts["rows"], facts["features"]) == (len(train), train.rows, 3)
    clicks, at_first = train.actions["click"], train.positions == 1
    assert facts["by_position"]["positions"][0] == "1"
    assert facts["by_position"]["rates"]["click"][0] == pytest.approx(clicks[at_first].mean())


def test_a_ranking_equal_to_the_logged_one_has_no_changes(log, config, tmp_path):
    chosen = config.with_options(select=FEEDBACK, test=0.0)
    data = split_log(log, chosen)
    ranker = Ranker(make_ranker("linear", FeatureEncoder(3)), data.logged_scores(data.validation) * 3 - 5)
    judge(chosen, data, ranker, Examined(), [], tmp_path)
    outcome = read_outcome(tmp_path)
    assert np.nanmin(outcome.agreement) == 1
    assert outcome.about["moves"]["first_kept"] == 1
    metric = chosen.selection
    np.testing.assert_array_equal(outcome.results[metric], outcome.results[LOGGED + metric])
    assert all(item["before"] == item["after"] for e in outcome.about["examples"] for item in e["items"])


def test_simulated_users_give_metrics_of_true_labels_and_rewards(small_synthetic, tmp_path):
    chosen = quick("synthetic", users="pbm", method="pointwise", select="ndcg@10", steps=2, evaluate_every=2)
    outcome = read_outcome(run_training(chosen, tmp_path / "run"))
    assert outcome.about["metrics"] == ["ndcg@10", "reward@10"]
    assert outcome.about["data"]["true_theta"][0] > outcome.about["data"]["true_theta"][-1]
    assert LOGGED + "reward@10" in outcome.results  # of the ranker that showed the data
    assert "relevance" in outcome.about["examples"][0]["items"][0]


def test_runs_without_an_outcome_and_damaged_outcomes(run, tmp_path):
    assert read_outcome(tmp_path) is None
    damaged = tmp_path / "run"
    shutil.copytree(run, damaged)
    table = pq.read_table(damaged / "outcome" / "requests.parquet")
    pq.write_table(table.drop_columns(["weight"]), damaged / "outcome" / "requests.parquet")
    with pytest.raises(DataError, match="changed since it was written"):
        read_outcome(damaged)
    about = read_json(damaged / "outcome" / "outcome.json")
    del about["sum"]
    write_json(damaged / "outcome" / "outcome.json", about)
    with pytest.raises(DataError, match="cannot be read"):
        read_outcome(damaged)
    (damaged / "outcome" / "requests.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="train again"):
        read_outcome(damaged)
    write_json(damaged / "outcome" / "outcome.json", {**about, "format": 0})
    with pytest.raises(DataError, match="a different format"):
        read_outcome(damaged)
