"""What a run leaves to be looked at: each request's figures, how far rankings are from the logged one, examples."""

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
from ultr.checkpoint import read_json, read_metrics, write_json
from ultr.errors import DataError
from ultr.log import Log
from ultr.outcomes import COMPARED_ITEMS, LOGGED, _chosen, _moves, agreements, ranks, read_outcome, write_outcome
from ultr.preparing import RunConfig, split_log
from ultr.runs import run_training
from ultr.simulate import User, simulate_log
from ultr.training import TrainingOptions


def listed(lengths) -> Log:
    rows = int(np.sum(lengths))
    return Log(
        features=np.zeros((rows, 1), np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        request_ids=pa.array(range(len(lengths))),
        feature_names=("x",),
    )


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(0, 2**31))
def test_agreement_is_kendalls(lengths, seed):
    log, rng = listed(lengths), np.random.default_rng(seed)
    before, after = (ranks(log, rng.normal(size=log.rows)) for _ in range(2))
    found = agreements(log, before, after)
    for i, (first, last) in enumerate(zip(log.offsets[:-1], log.offsets[1:], strict=True)):
        assert sorted(before[first:last]) == list(range(last - first))
        if last - first < 2:
            assert np.isnan(found[i])
        else:
            assert found[i] == pytest.approx(kendalltau(before[first:last], after[first:last]).statistic)


def test_ties_keep_the_order_of_the_rows():
    log = listed([3, 2])
    assert ranks(log, np.array([1.0, 2, 1, 0, 0])).tolist() == [1, 0, 2, 0, 1]


def test_of_long_requests_the_first_items_are_compared():
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
def test_examples_are_requests_with_an_order_each_once(agreement):
    chosen = _chosen(np.array(agreement))
    numbers = [number for number, _ in chosen]
    known = int(np.isfinite(agreement).sum()) if agreement else 0
    assert len(set(numbers)) == len(numbers) == min(known, len(numbers))
    assert all(np.isfinite(agreement[number]) for number in numbers)
    assert bool(numbers) == bool(known)
    if known:
        assert agreement[numbers[0]] == np.nanmin(agreement)


@pytest.fixture(scope="module")
def log() -> Log:
    return replace(simulate_log(make_shown_log(requests=80), User(), seed=1, sessions=300)[0], relevance=None)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    training = TrainingOptions(steps=4, batch=16, evaluate_every=2, bias_steps=10, device="cpu")
    return RunConfig(data="log.parquet", ranker_options={"hidden": [4]}, training=training)


@pytest.fixture(scope="module")
def run(log, config, tmp_path_factory):
    return run_training(config, tmp_path_factory.mktemp("outcomes") / "run", log=log)


def test_the_mean_over_requests_is_the_metric_of_the_step_that_was_kept(run, log, config):
    outcome = read_outcome(run)
    best = max(line[config.selection] for line in read_metrics(run))
    assert np.average(outcome.figures[config.selection], weights=outcome.weights) == pytest.approx(best, rel=1e-5)
    held_out = split_log(log, config).validation
    assert outcome.requests == [str(i) for i in held_out.request_ids.to_pylist()]
    assert set(outcome.figures) == {config.selection, LOGGED + config.selection}


def test_facts_are_those_of_the_log(run, log, config):
    facts = read_outcome(run).about["data"]
    learned = split_log(log, config).train
    assert (facts["requests"], facts["rows"], facts["features"]) == (len(learned), learned.rows, 3)
    clicks, at_first = learned.actions["click"], learned.positions == 1
    assert facts["by_position"]["positions"][0] == "1"
    assert facts["by_position"]["rates"]["click"][0] == pytest.approx(clicks[at_first].mean())


def test_a_ranking_that_is_the_logged_one_differs_nowhere(log, config, tmp_path):
    prepared = split_log(log, replace(config, select="feedback-ndcg@10"))
    chosen = replace(config, select="feedback-ndcg@10")
    write_outcome(chosen, prepared, prepared.logged_scores() * 3 - 5, None, tmp_path)
    outcome = read_outcome(tmp_path)
    assert np.nanmin(outcome.agreement) == 1
    assert outcome.about["moves"]["first_kept"] == 1
    metric = chosen.selection
    np.testing.assert_array_equal(outcome.figures[metric], outcome.figures[LOGGED + metric])
    assert all(item["before"] == item["after"] for e in outcome.about["examples"] for item in e["items"])


def test_true_labels_and_rewards_are_kept_where_users_are_simulated(tmp_path):
    training = TrainingOptions(steps=2, batch=16, evaluate_every=2, bias_steps=5, device="cpu")
    users = RunConfig(
        data="synthetic",
        users="pbm",
        method="pointwise",
        ranker_options={"hidden": [2]},
        select="ndcg@10",
        training=training,
    )
    outcome = read_outcome(run_training(users, tmp_path / "run"))
    assert outcome.about["metrics"] == ["ndcg@10", "reward@10"]
    assert outcome.about["data"]["true_theta"][0] > outcome.about["data"]["true_theta"][-1]
    assert LOGGED + "reward@10" in outcome.figures  # by the ranker that showed the data
    assert "relevance" in outcome.about["examples"][0]["items"][0]


def test_runs_that_left_nothing_and_damage(run, tmp_path):
    assert read_outcome(tmp_path) is None
    damaged = tmp_path / "run"
    shutil.copytree(run, damaged)
    table = pq.read_table(damaged / "outcome" / "requests.parquet")
    pq.write_table(table.drop_columns(["weight"]), damaged / "outcome" / "requests.parquet")
    with pytest.raises(DataError, match="not as it was written"):
        read_outcome(damaged)
    about = read_json(damaged / "outcome" / "outcome.json")
    del about["sum"]  # as of older runs
    write_json(damaged / "outcome" / "outcome.json", about)
    with pytest.raises(DataError, match="cannot be read"):
        read_outcome(damaged)
    (damaged / "outcome" / "requests.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="train again"):
        read_outcome(damaged)
    write_json(damaged / "outcome" / "outcome.json", {**about, "format": 0})
    with pytest.raises(DataError, match="another version"):
        read_outcome(damaged)
