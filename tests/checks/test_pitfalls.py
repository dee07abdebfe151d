"""Each pitfall is planted into a clean simulated log and found there; clean logs have none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ultr.checks.pitfalls
from ultr.checks.pitfalls import CHECKS, Pitfall, find_pitfalls, suspicious_requests
from ultr.datasets.users import make_user, simulate_log
from ultr.errors import DataError
from ultr.log import Log, read_log
from worlds.feed import feed
from worlds.shop import shop

SPARSE = {"attraction": (0.01, 0.02, 0.04, 0.06, 0.1)}
DENSE = {"attraction": (0.3, 0.4, 0.5, 0.7, 0.9), "eta": 0.5}


def show(requests: int = 3000, seed: int = 0, *, ranked: bool = True, shortest: int = 4, longest: int = 12) -> Log:
    """A log of requests that differ in length and relevance, in the order of a fair ranker or in random order."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest, requests, endpoint=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    request_of_row, rows = np.repeat(np.arange(requests), lengths), int(offsets[-1])
    features = rng.normal(size=(rows, 5)).astype(np.float32)
    worth = features @ [1, -0.5, 0.5, 0.2, 0] + rng.normal(size=requests)[request_of_row]
    scores = rng.normal(size=rows) + (worth if ranked else 0)
    order = np.lexsort((-scores, request_of_row))
    return Log(
        features=features[order],
        offsets=offsets,
        request_ids=pa.array(np.arange(requests)),
        feature_names=("a", "b", "c", "d", "e"),
        positions=ranks_of(offsets) + 1,
        relevance=np.clip(np.floor(worth + 1), 0, 4).astype(np.float32)[order],
        item_ids=pa.array(rng.permutation(rows)),
        came_in_order=True,
    )


def ranks_of(offsets: np.ndarray) -> np.ndarray:
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))


def clicked(shown: Log | None = None, user: str = "pbm", seed: int = 0, **options: object) -> Log:
    return simulate_log(show() if shown is None else shown, make_user(user, **options), seed=seed)[0]


def found(log: Log, **options: Log) -> dict[str, Pitfall]:
    pitfalls = find_pitfalls(log.without_features(), log.actions["click"] > 0, **options)
    assert all(isinstance(pitfall, Pitfall) and pitfall.what and pitfall.hint for pitfall in pitfalls)
    return {pitfall.name: pitfall for pitfall in pitfalls}


def names(log: Log, **options: Log) -> set[str]:
    return set(found(log, **options))


def with_clicks(log: Log, click: np.ndarray) -> Log:
    return replace(log, actions={"click": click.astype(np.float32)})


def only(log: Log, rows: np.ndarray) -> Log:
    """Return the log with the rows of a mask; every request keeps at least one row."""
    kept = np.add.reduceat(rows.astype(np.int64), log.offsets[:-1])
    return log.regroup(np.flatnonzero(rows), np.concatenate([[0], np.cumsum(kept)]))


def clicks_of(log: Log) -> np.ndarray:
    return np.add.reduceat(log.actions["click"], log.offsets[:-1])


def with_feature(log: Log, values: np.ndarray) -> Log:
    features = np.column_stack([log.features, values]).astype(np.float32)
    return replace(log, features=features, feature_names=(*log.feature_names, "planted"))


CLEAN = list(product(range(5), (True, False), (SPARSE, DENSE)))


@pytest.mark.parametrize(("seed", "ranked", "options"), CLEAN)
def test_a_clean_log_has_no_pitfalls(seed, ranked, options):
    log = clicked(show(seed=seed, ranked=ranked, longest=6 + 3 * seed), seed=seed, **options)
    assert log.actions["dwell"].max() > 1
    assert names(log, sample=log) == set()


@pytest.mark.parametrize("ranked", [True, False])
@pytest.mark.parametrize(
    ("user", "options"),
    [
        ("trust", {}),
        ("clickbait", {}),
        ("cascade", {}),
        ("cascade", {"stop": (1.0,), "patience": 1.0}),  # exactly one click: the smallest share of clickless requests
        ("pbm", {"eta": 3}),
        ("pbm", {"attraction": (0, 0, 0, 1, 1), "eta": 0.2}),  # the largest difference between requests
        ("pbm", {"further": {"like": (0, 0.1, 0.2, 0.3, 0.4)}}),
    ],
)
def test_logs_of_all_kinds_of_users_have_no_pitfalls(user, options, ranked):
    log = clicked(show(ranked=ranked), user, **options)
    assert names(log, sample=log) == set()


def test_dropped_clickless_requests_are_noticed():
    log = clicked()
    assert "clickless requests dropped" in names(log.select(clicks_of(log) > 0))


def test_weights_can_represent_dropped_clickless_requests():
    log = clicked(show(6000))
    clickless = clicks_of(log) == 0
    weights = np.where(clickless, 50, 1).astype(np.float32)
    kept = ~clickless | (np.random.default_rng(0).random(len(log)) < 0.02)
    sampled = replace(log, weights=weights).select(kept)
    assert names(sampled) == set()
    assert names(replace(sampled, weights=None)) == {"clickless requests dropped"}


def test_few_requests_are_not_checked_for_dropped_ones():
    log = clicked(show(90))
    assert "clickless requests dropped" not in names(log.select(clicks_of(log) > 0))


def test_rows_numbered_in_any_order_are_noticed():
    log = clicked(**DENSE)
    order = np.lexsort((np.random.default_rng(0).random(log.rows), log.request_of_row))
    for start in (0, 1):
        numbered = replace(log.regroup(order, log.offsets), positions=ranks_of(log.offsets) + start)
        assert names(numbered) == {"position equal to row order"}
        assert names(replace(numbered, came_in_order=False)) == set()
    assert names(numbered.select(np.arange(200))) == set()  # too few to call it flat


def test_rows_sorted_by_label_before_they_were_numbered_are_noticed():
    for requests, options in ((3000, {}), (40_000, SPARSE), (3000, DENSE)):
        log = clicked(show(requests), **options)
        order = np.lexsort((-log.actions["click"], log.request_of_row))
        numbered = replace(log.regroup(order, log.offsets), positions=log.positions)
        assert "rows sorted by label" in names(numbered), options


@pytest.mark.parametrize(
    "value",
    [
        lambda k: k,
        lambda k: 3 - 0.5 * k,
        lambda k: 1 / np.log2(k + 1),
        lambda k: k == 2,
        lambda k: (7 * k) % 5,
        lambda k: np.where(k == 3, np.nan, 0),
    ],
    ids=["position", "affine", "monotone", "one position", "not monotone", "missing"],
)
def test_features_that_encode_position_are_named(value):
    log = clicked()
    planted = with_feature(log, value(log.positions))
    pitfalls = found(log, sample=planted)
    assert set(pitfalls) == {"features that encode position"}
    assert pitfalls["features that encode position"].what.endswith(": planted")


def test_features_that_nearly_always_encode_position_are_named():
    log = clicked()
    sometimes = np.random.default_rng(0).random(log.rows) < 0.005
    assert names(log, sample=with_feature(log, np.where(sometimes, 0, log.positions))) == {
        "features that encode position"
    }


def test_scores_of_the_logging_ranker_are_named():
    rng = np.random.default_rng(0)
    log = clicked()
    scores = np.repeat(rng.normal(size=len(log)), log.lengths) - log.positions * np.repeat(
        rng.uniform(0.5, 2, len(log)), log.lengths
    )
    assert names(log, sample=with_feature(log, scores)) == {"features that order as positions do"}
    assert names(log, sample=with_feature(log, log.positions / np.repeat(log.lengths, log.lengths))) == {
        "features that order as positions do"
    }
    assert names(log, sample=with_feature(log, scores + 2 * rng.normal(size=log.rows))) == set()


def test_features_of_requests_and_sparse_features_are_fine():
    rng = np.random.default_rng(0)
    log = clicked()
    for values in (
        np.ones(log.rows),
        np.repeat(rng.normal(size=len(log)), log.lengths),
        rng.random(log.rows) < 0.002,
        log.positions == log.positions.max() * (rng.random(log.rows) < 0.01),
        rng.integers(0, 2, log.rows),
    ):
        assert names(log, sample=with_feature(log, values)) == set()


def test_codes_of_items_that_do_not_recur_are_fine():
    log = clicked()
    coded = with_feature(log, np.arange(1, log.rows + 1))
    assert names(log, sample=coded) == {"features that order as positions do"}
    ids = pa.array(np.arange(log.rows).astype(str))
    assert names(log, sample=replace(coded, vocabularies={"planted": ids})) == set()


def test_rows_filtered_after_ranking_leave_gaps():
    log = clicked()
    kept = np.random.default_rng(0).random(log.rows) > 0.15
    kept[log.offsets[:-1]] = True
    assert names(only(log, kept)) == {"positions with gaps"}


def test_slots_that_are_rarely_filled_are_not_gaps():
    log = clicked()
    assert names(only(log, (log.positions != 3) | (np.arange(log.rows) % 10 == 0))) == set()
    spread = np.array([0, 10, 17, 20, 30, 41, 50, 60, 70, 80, 90, 100, 110])
    assert names(replace(log, positions=spread[log.positions])) == set()


def test_positions_numbered_from_the_bottom_are_noticed():
    log = clicked(show(shortest=8, longest=8))
    rows = np.repeat(log.offsets[1:], log.lengths) - 1 - ranks_of(log.offsets)
    upside_down = replace(log.regroup(rows, log.offsets), positions=log.positions)
    assert names(upside_down) == {"click rates rise with position"}
    assert names(replace(upside_down, positions=10 * log.positions)) == set()  # slots have no order


def test_requests_with_everything_clicked_are_noticed():
    log = clicked(show(shortest=8))
    bot = np.random.default_rng(0).random(len(log)) < 0.01
    planted = with_clicks(log, (log.actions["click"] > 0) | np.repeat(bot, log.lengths))
    assert names(planted) == {"impossible click rates"}
    assert f"{bot.sum()} requests" in found(planted)["impossible click rates"].what
    np.testing.assert_array_equal(suspicious_requests(planted, planted.actions["click"] > 0), bot)
    assert not suspicious_requests(log, log.actions["click"] > 0).any()
    assert suspicious_requests(log.select([]), np.zeros(0, bool)).shape == (0,)


@pytest.mark.parametrize(("a", "b"), [(0.1, 1.9), (0.1, 0.9), (0.02, 0.98), (0.5, 2), (2, 2)])
def test_eager_users_are_not_bots(a, b):
    rng = np.random.default_rng(0)
    log = show(20_000)
    theta = 1 / np.sqrt(log.positions)
    keen = np.repeat(rng.beta(a, b, len(log)), log.lengths)
    assert names(with_clicks(log, rng.random(log.rows) < theta * keen)) == set()


def test_dwell_without_click_is_noticed():
    log = clicked()
    dwell = np.where(np.arange(log.rows) % 50 == 0, 3, log.actions["dwell"]).astype(np.float32)
    for name in ("dwell", "Watch_Time", "revenue"):
        actions = {"click": log.actions["click"], name: dwell}
        assert names(replace(log, actions=actions)) == {f"{name} without click"}
    assert names(replace(log, actions={**log.actions, "like": np.float32(dwell > 0)})) == set()


def test_clicks_without_dwell_are_noticed():
    log = clicked()
    click = log.actions["click"]
    assert names(replace(log, actions={"click": click, "dwell": 0 * click})) == {"clicks without dwell"}
    other = np.where(click > 0, 0, 2).astype(np.float32)
    assert names(replace(log, actions={"click": click, "dwell": other})) == {
        "dwell without click",
        "clicks without dwell",
    }


def test_one_position_and_one_item_are_noticed():
    log = clicked()
    first = only(log, log.positions == 1)
    assert names(first) == {"one position only"}
    places = np.random.default_rng(0).integers(1, 5, len(log))
    assert names(replace(first, positions=places)) == {"one item per request"}


@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.large_string(), pa.float64()])
def test_items_shown_twice_are_noticed(kind):
    log = clicked()
    items = np.arange(log.rows)
    assert names(replace(log, item_ids=pa.array(items % 97).cast(kind))) == set()
    twice = log.offsets[:-1][::50]
    items[twice] = items[twice + 2]
    assert names(replace(log, item_ids=pa.array(items).cast(kind))) == {"items twice in a request"}


def test_items_without_an_id_or_with_ids_of_an_odd_type_are_ignored():
    log = clicked()
    assert names(replace(log, item_ids=pa.nulls(log.rows, pa.int64()))) == set()
    assert names(replace(log, item_ids=pa.nulls(log.rows))) == set()
    assert names(replace(log, item_ids=pa.array([[1, 2]] * log.rows))) == set()


def test_a_log_from_a_table_has_the_same_pitfalls():
    log = clicked()
    table = log.select(clicks_of(log) > 0).to_table().drop_columns(["relevance"])
    read = read_log(table)
    assert read.came_in_order
    assert names(read, sample=read) == {"clickless requests dropped"}


def test_large_position_ids_give_the_same_result(monkeypatch):
    log = clicked(show(6000))
    log = log.select((clicks_of(log) > 0) | (np.arange(len(log)) % 40 == 0))
    order = np.lexsort((-log.actions["click"], log.request_of_row))
    log = replace(log.regroup(order, log.offsets), positions=log.positions)
    small = found(log)
    assert small
    monkeypatch.setattr(ultr.checks.pitfalls, "LARGEST_TABLE", 2)
    assert found(log) == small


def test_equal_weights_change_nothing():
    log = clicked()
    log = log.select(clicks_of(log) > 0)
    assert found(replace(log, weights=np.full(len(log), 3, np.float32))) == found(log)


def test_a_log_without_positions_or_clicks_is_rejected():
    log = clicked()
    with pytest.raises(DataError, match="no positions"):
        find_pitfalls(replace(log, positions=None), log.actions["click"] > 0)
    with pytest.raises(DataError, match="'clicked' must have"):
        find_pitfalls(log, log.actions["click"][1:] > 0)
    assert find_pitfalls(log.select([]), np.zeros(0, bool)) == []


@st.composite
def small_logs(draw) -> Log:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8)) * draw(st.sampled_from([1, 1, 30]))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rng, rows = np.random.default_rng(draw(st.integers(0, 2**32))), int(offsets[-1])
    step = draw(st.sampled_from([1, 3, 10**6, 10**17]))
    start = draw(st.integers(0, 1))
    gaps = draw(st.booleans())
    positions = [np.sort(rng.choice(2 * n if gaps else n, n, replace=False)) * step + start for n in lengths]
    share = draw(st.sampled_from([0, 0.1, 0.5, 1]))
    click = (rng.random(rows) < share).astype(np.float32)
    features = rng.choice(np.float32([0, 1, 3e38, -3e38, np.nan]), (rows, 2))
    return Log(
        features=features,
        offsets=offsets,
        request_ids=pa.array(np.arange(len(lengths))),
        feature_names=("a", "b"),
        positions=np.concatenate(positions),
        actions=draw(st.sampled_from([{}, {"click": click}, {"click": click, "dwell": 3 * click}])),
        weights=draw(st.sampled_from([None, rng.uniform(1e-30, 1e30, len(lengths)).astype(np.float32)])),
        item_ids=draw(st.sampled_from([None, pa.array(rng.integers(0, 9, rows)), pa.nulls(rows)])),
        came_in_order=draw(st.booleans()),
    )


@given(small_logs(), st.sampled_from([0, 0.3, 1]), st.booleans())
def test_any_small_log_can_be_checked(log, share, with_sample):
    marks = np.random.default_rng(0).random(log.rows) < share
    pitfalls = find_pitfalls(log.without_features(), marks, sample=log if with_sample else None)
    assert len({pitfall.name for pitfall in pitfalls}) == len(pitfalls)
    assert len(CHECKS) == 8


@pytest.mark.parametrize("requests", [15, 40, 400, 4000])
def test_a_noisy_score_of_the_logging_ranker_is_named_whatever_the_size_of_the_log(requests):
    rng = np.random.default_rng(0)
    log = clicked(show(requests, shortest=8))
    noisy = -log.positions + 0.5 * rng.normal(size=log.rows)
    assert "features that order as positions do" in names(log, sample=with_feature(log, noisy))
    weaker = -log.positions + 2.5 * rng.normal(size=log.rows)
    assert "features that order as positions do" not in names(log, sample=with_feature(log, weaker))


def test_suspicious_requests_are_those_of_the_warning():
    log = clicked(show(shortest=8))
    bot = np.random.default_rng(0).random(len(log)) < 0.01
    planted = (log.actions["click"] > 0) | np.repeat(bot, log.lengths)
    np.testing.assert_array_equal(suspicious_requests(log, planted), bot)
    assert not suspicious_requests(log, log.actions["click"] > 0).any()
    assert len(suspicious_requests(log.select([]), np.zeros(0, bool))) == 0


def log_of(world):
    features = {*world.features, *world.categorical}
    return read_log(world.log.select([name for name in world.log.column_names if name not in features]))


@pytest.mark.parametrize(("make", "found"), [(partial(shop, bots=0), 0.95), (feed, 0.6)])
@pytest.mark.parametrize("share", [0.01, 0.06])
def test_bots_that_click_on_everything_are_found_although_users_click_on_most_of_short_lists(make, found, share):
    log = log_of(make(4000, seed=41))
    clicks = log.actions["click"] > 0
    assert not suspicious_requests(log, clicks).any()
    bot = np.random.default_rng(0).random(len(log)) < share
    marked = suspicious_requests(log, clicks | np.repeat(bot, log.lengths))
    assert marked[bot & (log.lengths >= 8)].mean() >= found
    assert marked[~bot].mean() <= 0.001
    random = np.random.default_rng(1).random(log.rows) < 0.9  # bots that click on nine items in ten
    marked = suspicious_requests(log, np.where(np.repeat(bot, log.lengths), random, clicks))
    assert marked[~bot].mean() <= 0.001


@pytest.mark.parametrize("decay", [0.3, 0.5, 1])
@pytest.mark.parametrize(("a", "b"), [(0.1, 1.9), (0.1, 0.9), (0.02, 0.98), (0.01, 0.1), (0.5, 2), (1, 1)])
def test_eager_users_are_not_bots_whatever_the_length_of_lists_and_the_fall_of_examination(a, b, decay):
    rng = np.random.default_rng(0)
    log = show(20_000, shortest=5)
    keen = np.repeat(rng.beta(a, b, len(log)), log.lengths)
    clicks = rng.random(log.rows) < keen * log.positions.astype(float) ** -decay
    assert not suspicious_requests(log, clicks).any()
