"""Requests of one query are on one side of every split of a log."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ultr.bias.logging_policy
from conftest import make_shown_log
from ultr.bias.examination import estimate_examination
from ultr.bias.logging_policy import recovered_score
from ultr.datasets import load_dataset, ranking_svm, show
from ultr.datasets.users import EYE_TRACKING, User, simulate_log
from ultr.errors import DataError
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.shards import concatenate_logs
from ultr.log.splits import queries_of, split_by_query
from ultr.training.biases import held_out_requests
from ultr.training.config import make_config
from ultr.training.data import split_log


def repeated(queries: int = 40, sessions: int = 300, *, named: bool = True) -> tuple[Log, np.ndarray]:
    """Return a log in which queries recur under many request ids, and the query of each request."""
    log, _ = simulate_log(make_shown_log(requests=queries, features=4), User(), seed=0, sessions=sessions)
    query = np.asarray(log.context["query"])
    return (log if named else replace(log, context={})), query


def sides(query: np.ndarray, parts: list[np.ndarray]) -> None:
    """Check that parts have all requests, and that no query is in two of them."""
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(query)))
    for i, part in enumerate(parts):
        for other in parts[:i]:
            assert not set(query[part]) & set(query[other])


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=60),
    st.lists(st.integers(0, 20), min_size=1, max_size=2),
    st.integers(0, 99),
)
def test_parts_of_a_split_have_whole_queries_and_about_the_wanted_size(queries, wanted, seed):
    log = make_shown_log(requests=len(queries), features=2)
    log = replace(log, context={"query": pa.array([f"q{n}" for n in queries])})
    query = np.array(queries)
    if np.bincount(query).max() > max(1, len(query) / 2):  # the column cannot divide the log, and is not used
        query = np.arange(len(query))
    parts = split_by_query(log, wanted, seed=seed)
    sides(query, parts)
    largest = np.bincount(query).max()
    for end, stop in zip(np.cumsum(wanted), np.cumsum([len(part) for part in parts[:-1]]), strict=True):
        assert min(end, len(query)) <= stop < end + largest or stop == len(query)
    assert all((np.diff(part) > 0).all() for part in parts)


def test_a_log_of_different_queries_is_split_at_random():
    log = make_shown_log(requests=50, features=2)
    order = np.random.default_rng(7).permutation(50)
    validation, test, learned = split_by_query(log, [5, 10], seed=7)
    assert validation.tolist() == sorted(order[:5].tolist())
    assert test.tolist() == sorted(order[5:15].tolist())
    assert learned.tolist() == sorted(order[15:].tolist())


@pytest.mark.parametrize("named", [True, False])
def test_queries_are_known_by_their_column_or_by_their_items(named):
    log, query = repeated(named=named)
    found = queries_of(log)
    assert len({*zip(found.tolist(), query.tolist(), strict=True)}) == len(set(found)) == len(set(query))
    shuffled = log.select(np.random.default_rng(0).permutation(len(log)))
    assert len(set(queries_of(shuffled))) == len(set(query))


def test_the_order_of_items_does_not_make_another_query():
    log = make_shown_log(requests=20, features=3)
    rows = np.concatenate([np.arange(a, b)[::-1] for a, b in zip(log.offsets, log.offsets[1:], strict=False)])
    turned = replace(log.regroup(rows, log.offsets), request_ids=pa.array([f"turned {n}" for n in range(20)]))
    both = concatenate_logs([log, turned])
    found = queries_of(both)
    assert (found[:20] == found[20:]).all()
    assert len(set(found)) == 20


def test_requests_with_one_id_are_one_query_and_equal_features_of_most_requests_are_not():
    log = make_shown_log(requests=30, features=3)
    ids = pa.array(np.arange(30) // 3)
    assert len(set(queries_of(replace(log, request_ids=ids)))) == 10
    empty = replace(log, features=np.zeros_like(log.features))
    assert len(set(queries_of(empty))) == 30
    assert len(set(queries_of(log.without_features()))) == 30
    with pytest.raises(DataError, match="must be numbers or strings"):
        queries_of(replace(log, context={"query": pa.array([{"a": 1}] * 30)}))


def test_a_feed_with_one_query_for_all_is_split_and_learned_from():
    log, _ = simulate_log(make_shown_log(requests=60, features=4), User(), seed=0)
    feed = replace(log, relevance=None, context={"query": pa.array(["home"] * 60)})
    run_data = split_log(feed, make_config(label="click"))
    assert (len(run_data.validation), len(run_data.test), len(run_data.train)) == (9, 6, 45)
    assert len(recovered_score(feed).score) == feed.rows


@pytest.mark.parametrize("named", [True, False])
def test_no_query_is_on_both_sides_of_a_split(named, monkeypatch):
    log, query = repeated(named=named)
    sides(query, list(held_out_requests(log, 3)))
    run_data = split_log(replace(log, relevance=None), make_config(test=0.2, label="click"))
    parts = [run_data.train, run_data.validation, run_data.test]
    sides(query, [np.asarray(part.request_ids) for part in parts])
    seen = []
    split = split_by_query
    monkeypatch.setattr(
        ultr.bias.logging_policy, "split_by_query", lambda *args, **kw: seen.append(split(*args, **kw)) or seen[-1]
    )
    recovered_score(log)
    sides(query, list(seen[0]))


@pytest.mark.long
def test_examination_is_found_where_queries_recur():
    """A network that recovers the logging ranker must not learn the order of held-out queries by heart."""
    data, errors = load_dataset("synthetic"), []
    features = data.train.features
    standard = (features - features.mean(0)) / (features.std(0) + 1e-9)
    true = np.array(EYE_TRACKING) / EYE_TRACKING[0]
    for seed in range(5):
        rng = np.random.default_rng(seed)
        first, last = rng.normal(size=(features.shape[1], 16)) / features.shape[1] ** 0.5, rng.normal(size=16)
        logged = np.tanh(2 * standard @ first) @ last + ranking_svm(data.train, seed=seed)(features)
        shown = show(data.train, logged)
        some = shown.select(np.sort(rng.permutation(len(shown))[:600]))
        log, _ = simulate_log(some, User(), seed=seed, sessions=20_000)
        torch.manual_seed(seed)
        found = estimate_examination(log, Label("click"), seed=seed).theta
        errors.append(found / found[0] / true - 1)
    assert np.abs(np.mean(errors, 0)).max() < 0.1
