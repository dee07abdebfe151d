"""Drift of a log: what has changed is found by its name, and quiet days and trends are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultr.checks.drift import find_drift, stability_index
from ultr.log import Log, read_log
from ultr.log.labels import Label

SECONDS = Label("seconds")


def make_log(seed: int, *, requests: int = 800, first_day: float = 0.0) -> Log:
    """Return the log of a day: lists of 4 to 8 items, seconds watched, and the age of items, which rises."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 9, requests)
    request = np.repeat(np.arange(requests), lengths)
    position = np.concatenate([np.arange(1, n + 1) for n in lengths])
    match = rng.normal(size=len(request))
    clicked = rng.random(len(request)) < 0.5 / position / (1 + np.exp(-match))
    table = {
        "request": request,
        "position": position,
        "seconds": np.where(clicked, rng.lognormal(3, 1, len(request)), 0.0),
        "device": np.where(rng.random(requests) < 0.6, "phone", "desk")[request],
        "match": match,
        "stars": rng.integers(1, 6, len(request)).astype(float),
        "rating": np.where(rng.random(len(request)) < 0.1, np.nan, rng.normal(size=len(request))),
        "age": first_day + rng.exponential(30, len(request)) + rng.random(len(request)),
        "shop": rng.choice(["a", "b", "c"], len(request), p=[0.5, 0.3, 0.2]),
    }
    names = {"features": ["match", "stars", "rating", "age"], "categorical": ["shop"], "actions": ["seconds"]}
    return read_log(pa.table(table), segment="device", **names)


def changed(log: Log, name: str, change) -> Log:
    features = log.features.copy()
    column = log.feature_names.index(name)
    features[:, column] = change(features[:, column])
    return replace(log, features=features)


def names(before: Log, after: Log, *older: Log) -> list[str]:
    return [each.name for each in find_drift([before, *older], after, SECONDS)]


def test_the_index_is_the_sum_of_its_definition():
    p, q = np.array([10.5, 20.5, 30.5]) / 61.5, np.array([20.5, 20.5, 20.5]) / 61.5
    expected = sum((b - a) * np.log(b / a) for a, b in zip(p, q, strict=True))
    assert stability_index(np.array([10, 20, 30]), np.array([20, 20, 20])) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=20))
def test_the_index_is_finite_symmetric_and_not_negative(counts):
    a, b = np.array(counts).T
    assert np.isfinite(stability_index(a, b))
    assert stability_index(a, b) == pytest.approx(stability_index(b, a))
    assert stability_index(a, b) >= 0
    assert stability_index(a, 3 * a + 1) < 0.7 or a.sum() < 60  # half a count is added


def test_quiet_days_are_not_found_whatever_their_size():
    found = [
        name
        for seed in range(60)
        for name in names(
            make_log(seed, requests=60 + 740 * (seed % 2)), make_log(1000 + seed, requests=[20, 100, 800][seed % 3])
        )
    ]
    assert found == []


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("match", lambda x: 1000 * x, "the values of match have changed"),
        ("match", np.zeros_like, "the values of match have changed (median 0, "),
        ("stars", lambda x: x / 5, "median 0.6, 3 before"),
        ("stars", lambda x: np.full_like(x, np.nan), "100% of the values of stars are missing, 0% before"),
        ("rating", lambda x: np.where(np.arange(len(x)) % 2, np.nan, x), "of the values of rating are missing, 1"),
        ("age", lambda x: 24 * x, "the values of age have changed"),
        ("shop", np.zeros_like, "100% of the rows have an unknown category"),
        ("shop", np.ones_like, "the categories of shop have changed"),
    ],
)
def test_a_changed_feature_is_found_by_its_name(name, change, said):
    (found,) = find_drift([make_log(0)], changed(make_log(1), name, change), SECONDS)
    assert (found.name, found.features) == (f"feature {name}", (name,))
    assert said in found.what
    assert "--allow" in found.hint


def test_a_trend_is_not_found_and_other_units_of_it_are():
    first, second, today = (changed(make_log(day), "age", lambda x, day=day: x / 8 + 3 * day) for day in range(3))
    assert names(second, today, first) == []
    assert names(second, changed(today, "age", lambda x: 24 * x), first) == ["feature age"]
    assert names(second, today) == ["feature age"]  # nothing says that it moves
    quiet = [make_log(seed) for seed in range(3, 8)]
    assert names(*quiet[:2], *quiet[2:]) == []


def test_a_feature_that_moved_once_may_move_again_as_far():
    days = [changed(make_log(day), "match", lambda x, day=day: x + (day == 2)) for day in range(4)]
    assert names(days[0], days[2]) == ["feature match"]
    assert names(days[3], changed(make_log(9), "match", lambda x: x - 1), *days[2::-1]) == []


def test_lists_and_segments_are_compared():
    before, after = make_log(0), make_log(1)
    short = after.select(after.lengths <= 5)
    assert "lengths of lists" in names(before, short)
    other = replace(after, context={**after.context, "segment": pa.array(["tv"] * len(after))})
    (found,) = find_drift([before], other, SECONDS)
    assert found.name == "segments"
    assert "tv among them" in found.what
    assert names(before, replace(after, positions=after.positions + 4)) == ["positions", "feedback by position"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda c, k: np.where(c > 0, 1000 * c, 0), ["size of the label"]),
        (lambda c, k: np.where(k == 1, 20.0, 0), ["size of the label", "feedback by position", "amount of feedback"]),
        (lambda c, k: np.where(np.arange(len(c)) % 4, 0, c), ["amount of feedback"]),
        (lambda c, k: np.zeros_like(c), ["amount of feedback"]),
    ],
)
def test_feedback_is_compared(change, found):
    before, after = make_log(0), make_log(1)
    seconds = change(after.actions["seconds"], after.positions).astype(np.float32)
    assert names(before, replace(after, actions={"seconds": seconds})) == found


def test_a_log_without_positions_is_compared_by_its_features():
    before, after = (replace(make_log(seed), positions=None) for seed in (0, 1))
    assert names(before, after) == []
    assert names(before, changed(after, "match", lambda x: 9 * x)) == ["feature match"]
