"""Features that follow feedback are found, and features that only predict it are not."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import rankdata

from ultr.checks.leaks import find_leaks, mean_ranks
from ultr.log import Log

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
