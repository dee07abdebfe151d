"""Features that follow feedback are found, and features that only predict it are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import rankdata

from ultr.checks.leaks import find_leaks, find_noisy_leaks, mean_ranks
from ultr.log import Log, read_log
from worlds.clips import clips
from worlds.feed import feed
from worlds.news import news
from worlds.shop import shop

REQUESTS, ITEMS = 600, 8


def log_with(share: float = 0.2, seed: int = 0, **planted) -> Log:
    """A log of clicks and dwell times; `planted` maps names of features to functions of (rng, click, dwell)."""
    rng = np.random.default_rng(seed)
    rows = REQUESTS * ITEMS
    a, b = rng.normal(size=(2, rows))
    positions = np.tile(np.arange(1, ITEMS + 1), REQUESTS)
    click = (rng.random(rows) < share * np.exp(a) / np.sqrt(positions)).astype(np.float32)
    dwell = (click * rng.gamma(2, 10, rows)).astype(np.float32)
    features = {"a": a, "b": b, **{name: make(rng, click, dwell) for name, make in planted.items()}}
    return Log(
        features=np.column_stack([*features.values()]).astype(np.float32),
        offsets=np.arange(REQUESTS + 1) * ITEMS,
        request_ids=pa.array(np.arange(REQUESTS)),
        feature_names=tuple(features),
        positions=positions,
        actions={"click": click, "dwell": dwell},
    )


@pytest.mark.parametrize("share", [0.01, 0.2, 0.6])
@pytest.mark.parametrize(
    "planted",
    [
        lambda rng, click, dwell: dwell,
        lambda rng, click, dwell: np.log1p(dwell),
        lambda rng, click, dwell: click,
        lambda rng, click, dwell: 1 - click,
        lambda rng, click, dwell: np.where(click > 0, dwell, np.nan),
        lambda rng, click, dwell: np.where(click > 0, rng.normal(size=len(click)), -1),
        lambda rng, click, dwell: click * (rng.random(len(click)) < 0.5),
    ],
    ids=["dwell", "log dwell", "click", "no click", "missing without click", "drawn after a click", "half of clicks"],
)
def test_a_feature_that_follows_a_click_is_a_clear_leak(planted, share):
    (leak,), likely = find_leaks(log_with(share, planted=planted))
    assert leak.what.startswith("'planted' ")
    assert "--features" in leak.hint
    assert not likely


def test_a_feature_that_equals_an_action_of_every_row_is_a_clear_leak():
    log = log_with(watched=lambda rng, click, dwell: 5 + dwell)
    watched = Log(**{**log.__dict__, "actions": {"watch": log.features[:, 2]}})
    (leak,), _ = find_leaks(watched)
    assert leak.what == "'watched' equals 'watch'"


def test_a_feature_that_is_nearly_a_function_of_an_action_is_a_likely_leak():
    planted = lambda rng, click, dwell: 10 * click + rng.normal(size=len(click))  # noqa: E731
    clear, (leak,) = find_leaks(log_with(planted=planted))
    assert not clear
    assert leak.what == "'planted' is nearly a function of 'click'"


def test_a_feature_with_the_name_of_an_action_is_a_likely_leak():
    clear, (leak,) = find_leaks(log_with(Purchase=lambda rng, click, dwell: rng.random(len(click))))
    assert not clear
    assert leak.what == "'Purchase' has the name of an action"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.01, 0.2, 0.9])
def test_honest_features_are_no_leaks(share, seed):
    honest = {
        "rare": lambda rng, click, dwell: rng.random(len(click)) < 0.002,
        "constant": lambda rng, click, dwell: np.ones(len(click)),
        "sparse": lambda rng, click, dwell: np.where(rng.random(len(click)) < 0.05, rng.random(len(click)), 0),
        "missing": lambda rng, click, dwell: np.where(rng.random(len(click)) < 0.5, np.nan, 1),
        "strong": lambda rng, click, dwell: 2 * click + rng.normal(size=len(click)),
        "often clicked": lambda rng, click, dwell: rng.random(len(click)) < np.where(click > 0, 0.3, 0.005),
    }
    assert find_leaks(log_with(share, seed, **honest)) == ([], [])


def test_a_log_without_actions_or_features_has_no_leaks():
    log = log_with()
    assert find_leaks(log.without_features()) == ([], [])
    assert find_leaks(Log(**{**log.__dict__, "actions": {}})) == ([], [])


@pytest.mark.parametrize("shape", [(40, 3), (40,), (1, 2)])
def test_equal_values_have_their_mean_rank(shape):
    values = np.random.default_rng(0).integers(0, 6, shape).astype(float)
    np.testing.assert_array_equal(mean_ranks(values), rankdata(values, axis=0))


# --- Noisy leaks ------------------------------------------------------------------------------------------------------

LEAKED = 3.0  # the mean of log1p(watch) of watched rows is about this


class Shown:
    """A log in which items recur, in the order of time: clicks depend on the item, the viewer and the position."""

    def __init__(self, seed: int = 0, requests: int = 1500, items: int = 400) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.item = np.concatenate([rng.choice(items, ITEMS, replace=False) for _ in range(requests)])
        rows, self.quality = len(self.item), rng.normal(size=items)[self.item]
        self.affinity = rng.normal(size=rows)
        self.position = np.tile(np.arange(1, ITEMS + 1), requests)
        attraction = 1 / (1 + np.exp(1 - self.quality - 1.5 * self.affinity))
        self.click = (rng.random(rows) < attraction / np.sqrt(self.position)).astype(float)
        self.watch = self.click * rng.lognormal(3 + 0.3 * self.quality, 0.8)
        self.count = np.bincount(self.item)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of values over the rows of an item."""
        return (np.bincount(self.item, values) / self.count)[self.item]

    def so_far(self, values: np.ndarray, *, with_own: bool) -> np.ndarray:
        """Return sums over the rows of an item until each row."""
        order = np.argsort(self.item, kind="stable")
        sums = np.cumsum(values[order])
        first = np.cumsum(self.count) - self.count
        before = sums - values[order]
        found = np.empty(len(values))
        found[order] = (sums if with_own else before) - before[first][self.item[order]]
        return found

    def rate_so_far(self, *, with_own: bool) -> np.ndarray:
        shown = self.so_far(np.ones(len(self.item)), with_own=with_own)
        return (self.so_far(self.click, with_own=with_own) + 1) / (shown + 4)

    def noise(self, size: float) -> np.ndarray:
        return self.rng.normal(0, size, len(self.item))

    def log(self, **planted: np.ndarray) -> Log:
        requests = len(self.item) // ITEMS
        features = {"affinity": self.affinity + self.noise(0.5), "quality": self.quality, **planted}
        return Log(
            features=np.column_stack([*features.values()]).astype(np.float32),
            offsets=np.arange(requests + 1) * ITEMS,
            request_ids=pa.array(np.arange(requests)),
            feature_names=tuple(features),
            positions=self.position,
            actions={"click": self.click, "watch": self.watch},
            item_ids=pa.array(self.item),
        )


LEAKS = {
    "watch with noise": lambda s: np.log1p(s.watch) + s.noise(LEAKED / 2),
    "no watch, with noise": lambda s: s.noise(LEAKED / 2) - np.log1p(s.watch),
    "item mean of clicks": lambda s: s.mean(s.click),
    "item mean of watch": lambda s: s.mean(np.log1p(s.watch)),
    "logarithm of an item mean": lambda s: np.log(s.mean(s.click) + 0.05),
    "item mean of half of the rows": lambda s: s.mean(s.click * (np.arange(len(s.click)) % 2 == 0)),
    "rate so far with this row": lambda s: s.rate_so_far(with_own=True),
    "clicks so far with this row": lambda s: s.so_far(s.click, with_own=True),
}
HONEST = {
    "true attraction": lambda s: s.quality + 1.5 * s.affinity,
    "item mean of another log": lambda s: Shown.mean(s, np.clip(s.quality, -1, 1)) + (s.item * 7919 % 101) / 200,
    "mean position": lambda s: s.mean(s.position),
    "times shown": lambda s: s.count[s.item],
    "duration": lambda s: (s.item * 7919 % 101).astype(float),
    "rate so far": lambda s: s.rate_so_far(with_own=False),
    "clicks so far": lambda s: s.so_far(s.click, with_own=False),
    "stock left": lambda s: -s.so_far(s.click, with_own=False),
    "often missing": lambda s: np.where(s.noise(1) > 0, np.nan, s.quality),
}


@pytest.mark.parametrize("name", LEAKS)
def test_noise_does_not_hide_that_a_feature_follows_the_feedback_of_its_row(name):
    shown = Shown()
    log = shown.log(planted=LEAKS[name](shown))
    (leak,) = find_noisy_leaks(log)
    assert leak.features == ("planted",)
    assert "ignore this warning" in leak.hint
    assert find_noisy_leaks(log, ["planted"]) == []  # a known leak is not named twice


@pytest.mark.parametrize("seed", range(3))
def test_what_is_known_before_ranking_is_no_noisy_leak(seed):
    shown = Shown(seed)
    assert find_noisy_leaks(shown.log(**{name: make(shown) for name, make in HONEST.items()})) == []


def test_the_feedback_of_the_row_is_found_within_requests_without_items_that_recur():
    shown = Shown()
    honest = {name: make(shown) for name, make in HONEST.items()}
    log = shown.log(**honest, planted=np.log1p(shown.watch) + shown.noise(LEAKED / 3))
    for ids in (None, pa.array(np.arange(log.rows))):
        (leak,) = find_noisy_leaks(replace(log, item_ids=ids))
        assert leak.features == ("planted",)
        assert "rows of one request with 'click'" in leak.what


def test_a_match_of_query_and_item_that_decides_on_clicks_is_no_leak():
    rng = np.random.default_rng(0)
    shown = Shown()
    query = rng.integers(0, 60, len(shown.item) // ITEMS)
    match = rng.random((60, shown.item.max() + 1)) < 0.2
    matches = match[np.repeat(query, ITEMS), shown.item]
    shown.click = (rng.random(len(matches)) < np.where(matches, 0.95, 0.02)).astype(float)
    log = replace(shown.log(match=matches), actions={"click": shown.click})
    assert [leak.features for leak in find_noisy_leaks(log)] == [("match",)]
    assert find_noisy_leaks(replace(log, context={"query": pa.array(query)})) == []


def test_items_that_leave_after_their_sale_make_no_leak_of_what_is_known_of_them():
    rng = np.random.default_rng(0)
    price = rng.normal(size=3000)
    shown = rng.geometric(1 / (1 + 3 * np.exp(0.3 * price))) + 1
    item = np.repeat(np.arange(3000), shown)
    sold = np.zeros(len(item))
    sold[np.cumsum(shown) - 1] = 1
    log = Log(
        features=price[item][:, None],
        offsets=np.arange(len(item) + 1),
        request_ids=pa.array(np.arange(len(item))),
        feature_names=("price",),
        actions={"sold": sold},
        item_ids=pa.array(item),
    )
    assert find_noisy_leaks(log) == []


@pytest.mark.parametrize("seed", [100, 101])
@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (shop, {"features": "shop", "item": "item_id", "query": "query"}),
        (feed, {"request": "session", "item": "video", "position": "rank", "actions": ["click", "watch_ratio"]}),
        (news, {"item": "article_id", "actions": ["click"]}),
        (clips, {"request": "list_id", "item": "clip", "position": "slot", "actions": ["watch_seconds"]}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_no_feature_of_a_simulated_world_is_a_noisy_leak(make, columns, seed):
    world = make(700, seed=seed)
    log = read_log(world.log, **{**columns, "features": list(world.features)}, missing="keep")
    assert log.item_ids is not None
    assert find_noisy_leaks(log) == find_noisy_leaks(replace(log, item_ids=None)) == []


@settings(max_examples=60, deadline=None)
@given(data=st.data(), lengths=st.lists(st.integers(1, 5), min_size=1, max_size=60), with_items=st.booleans())
def test_any_log_can_be_checked_for_noisy_leaks(data, lengths, with_items):
    rows = sum(lengths)
    numbers = st.sampled_from([0.0, 1.0, -2.5, 1e30, float("nan"), float("inf")])
    items = data.draw(st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=rows, max_size=rows))
    log = Log(
        features=data.draw(arrays(np.float32, (rows, 2), elements=numbers)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        request_ids=pa.array(np.arange(len(lengths))),
        feature_names=("a", "b"),
        actions={"watch": data.draw(arrays(np.float32, rows, elements=st.sampled_from([0.0, 0.0, 1.0, 30.0])))},
        item_ids=pa.array(items, pa.int64()) if with_items else None,
        context={"time": pa.array(np.arange(len(lengths))[::-1])},
    )
    assert len(find_noisy_leaks(log)) <= 1


def test_only_some_items_of_a_large_log_are_checked_with_all_their_rows(monkeypatch):
    monkeypatch.setattr("ultr.checks.leaks.COUNTED_ROWS", 5000)
    shown = Shown()
    (leak,) = find_noisy_leaks(shown.log(planted=LEAKS["item mean of clicks"](shown)))
    assert leak.features == ("planted",)
