"""Counts by stratum, position and group of requests, compared with loops over the rows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bias.shop import shop
from bias.worlds import seen_in, small_log, world
from ultr.bias import counts
from ultr.bias.counts import counted, counted_items, counted_random, impressions, item_codes, replicates
from ultr.errors import DataError

seeds = st.integers(0, 10**6)


def by_hand(log, strata, group_weights, seen):
    """Count impressions and clicks by stratum and position id in a loop over rows."""
    shown, clicked = defaultdict(float), defaultdict(float)
    for row, request in enumerate(log.request_of_row):
        weight = 1.0 if log.weights is None else float(log.weights[request])
        weight *= group_weights[seen.group[request]]
        shown[int(strata[row]), int(log.positions[row])] += weight
        clicked[int(strata[row]), int(log.positions[row])] += weight * (log.actions["click"][row] > 0)
    return shown, clicked


def both(cells):
    return cells.shown, cells.clicked


@given(seed=seeds, requests=st.integers(1, 30), weights=st.booleans())
def test_weighted_counts_equal_a_loop_over_the_rows(seed, requests, weights):
    log = small_log(seed, requests=requests, weights=weights)
    seen, rng = seen_in(log, seed), np.random.default_rng(seed)
    strata = rng.integers(0, 4, log.rows)
    group_weights = rng.integers(0, 4, requests).astype(float)
    found = counted(seen, strata)
    shown, clicked = by_hand(log, strata, group_weights, seen)
    assert found.size == (strata.max() + 1, len(np.unique(log.positions)))
    cells = list(zip(found.strata.tolist(), seen.positions[found.places].tolist(), strict=True))
    assert sorted(cells) == sorted(shown)
    for values, expected in zip(both(found.weighted(group_weights)), (shown, clicked), strict=True):
        np.testing.assert_allclose(values, [expected[cell] for cell in cells])


@given(seed=seeds, queries=st.booleans(), weights=st.booleans())
def test_only_items_that_were_clicked_and_shown_at_several_positions_are_counted(seed, queries, weights):
    log = small_log(seed, requests=20, queries=queries, weights=weights)
    seen = seen_in(log)
    places, clicks = defaultdict(set), defaultdict(float)
    for item, place, click in zip(seen.items, seen.place, seen.clicked, strict=True):
        places[item].add(place)
        clicks[item] += click
    telling = sorted(item for item in places if clicks[item] and len(places[item]) > 1)
    found = counted_items(seen)
    if not telling:
        assert found is None
        return
    assert found.share == 1
    assert found.size[0] == len(telling)
    shown, clicked = by_hand(log, seen.items, np.ones(20), seen)
    cells = [(telling[s], int(seen.positions[k])) for s, k in zip(found.strata, found.places, strict=True)]
    assert sorted(cells) == sorted(cell for cell in shown if cell[0] in telling)
    for values, expected in zip(both(found.total()), (shown, clicked), strict=True):
        np.testing.assert_allclose(values, [expected[cell] for cell in cells])


def test_the_same_item_under_another_query_is_another_item():
    log = replace(small_log(0, requests=40), context={"query": pa.array(["a", "b"] * 20)})
    seen = seen_in(log)
    queries = np.repeat(np.arange(40) % 2, log.lengths)
    pairs = set(zip(seen.items.tolist(), queries.tolist(), log.item_ids.to_pylist(), strict=True))
    codes, names = {code for code, _, _ in pairs}, {(query, item) for _, query, item in pairs}
    assert len(codes) == len(names) == len(pairs)
    assert len(set(seen_in(replace(log, context={})).items.tolist())) < len(pairs)


def test_a_log_without_item_ids_has_no_items_to_count():
    assert counted_items(seen_in(replace(small_log(0), item_ids=None))) is None


def test_items_without_an_id_are_not_one_item():
    log = small_log(1, requests=40)
    assert counted_items(seen_in(replace(log, item_ids=pa.nulls(log.rows, pa.int64())))) is None


def test_too_many_items_are_sampled_and_the_share_is_recorded(monkeypatch):
    log = world("random", requests=300)
    seen = seen_in(log)
    every = counted_items(seen)
    monkeypatch.setattr(counts, "CELLS", 200)
    some, others = (counted_items(seen, seed=seed) for seed in (0, 1))
    assert every.share == 1
    assert 0 < some.share < 1
    assert some.share == some.size[0] / every.size[0]
    assert 190 < len(some.strata) <= 200
    assert some.shown.sum() != others.shown.sum()
    assert some.shown.sum() == counted_items(seen, seed=0).shown.sum()
    whole = set(map(tuple, cells_of(every)))
    assert set(map(tuple, cells_of(some))) <= whole  # sampled items are counted in full


def cells_of(found):
    """Impressions and clicks of each item at all positions."""
    table = np.zeros((*found.size, 2))
    for i, values in enumerate(both(found.total())):
        table[found.strata, found.places, i] = values
    return table.reshape(len(table), -1).tolist()


@given(groups=st.integers(1, 300), number=st.integers(0, 20), seed=seeds)
def test_replicates_draw_as_many_groups_as_exist(groups, number, seed):
    found = replicates(groups, number, seed=seed)
    assert found.shape == (groups, 1 + number)
    assert (found[:, 0] == 1).all()
    assert (found.sum(0) == groups).all()
    assert (found >= 0).all()
    np.testing.assert_array_equal(found, replicates(groups, number, seed=seed))


@pytest.mark.parametrize("requests", [1, 7, 200, 450])
def test_requests_are_assigned_to_groups_at_random(requests):
    log = small_log(0, requests=requests)
    sizes = np.bincount(seen_in(log).group)
    assert len(sizes) == min(requests, counts.GROUPS)
    assert sizes.max() - sizes.min() <= 1
    np.testing.assert_array_equal(seen_in(log, 5).group, seen_in(log, 5).group)
    if requests > 1:
        assert (seen_in(log, 5).group != seen_in(log, 6).group).any()


def test_marks_of_random_order_are_kept_by_request():
    log = small_log(0, requests=4)
    marked = replace(log, context={"randomised": pa.array([True, False, False, True])})
    seen = seen_in(marked)
    np.testing.assert_array_equal(seen.of_rows(seen.randomised), np.isin(log.request_of_row, [0, 3]))
    assert not seen_in(log).randomised.any()


def test_a_log_without_positions_is_rejected():
    log = replace(small_log(0), positions=None)
    with pytest.raises(DataError, match="needs positions"):
        impressions(log, log.actions["click"] > 0)


@given(seed=seeds, weights=st.booleans())
def test_requests_in_random_order_are_counted_by_their_set_of_positions(seed, weights):
    log = small_log(seed, requests=20, weights=weights)
    marked = np.random.default_rng(seed).random(20) < 0.6
    seen = seen_in(replace(log, context={"randomised": pa.array(marked)}))
    found = counted_random(seen)
    shown, clicked = defaultdict(float), defaultdict(float)
    for request in np.flatnonzero(marked):
        rows = slice(log.offsets[request], log.offsets[request + 1])
        weight = 1.0 if log.weights is None else float(log.weights[request])
        for position, click in zip(log.positions[rows], log.actions["click"][rows], strict=True):
            cell = tuple(log.positions[rows].tolist()), int(position)
            shown[cell] += weight
            clicked[cell] += weight * click
    if not any(clicked.values()):
        assert found is None
        return
    cells = found.total()
    assert sorted(cells.shown) == sorted(shown.values())
    assert sorted(cells.clicked) == sorted(clicked.values())
    sets = {positions for positions, _ in shown}
    assert len(set(found.strata.tolist())) == len(sets)


def test_an_item_differs_by_query_only_if_queries_recur():
    log = replace(small_log(0, requests=4), context={"query": pa.array([7, 7, 8, 9])})
    items, requests = np.asarray(log.item_ids), log.request_of_row
    codes = item_codes(log)
    queries = np.array([7, 7, 8, 9])[requests]
    assert len(set(codes.tolist())) == len(set(zip(queries.tolist(), items.tolist(), strict=True)))
    distinct = item_codes(replace(log, context={"query": pa.array([6, 7, 8, 9])}))
    assert len(set(distinct.tolist())) == len(set(items.tolist()))
    assert not seen_in(replace(log, context={"query": pa.array([6, 7, 8, 9])})).by_query


def test_impressions_of_some_requests_are_those_of_their_log():
    log = shop(60)
    log = replace(log, weights=np.linspace(1, 2, 60).astype(np.float32))
    chosen = np.arange(60) % 3 == 0
    clicked = log.actions["click"] > 0
    whole, part = impressions(log, clicked).select(chosen), log.select(chosen)
    expected = impressions(part, part.actions["click"] > 0)
    for name in ("lengths", "weights", "randomised"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(expected, name))
    np.testing.assert_array_equal(whole.positions[whole.place], expected.positions[expected.place])
    np.testing.assert_array_equal(whole.row_weights, expected.row_weights)
    np.testing.assert_array_equal(whole.clicked, expected.clicked)
