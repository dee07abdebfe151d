"""Intervals, tests of agreement, links between positions and verdicts, on draws and tables made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultr.propensity.identification import (
    CARE,
    IDENTIFIED,
    NORMAL,
    NOT,
    Agreement,
    Estimate,
    _requests_needed,
    agreement,
    estimate,
    links,
    verdict,
)

POSITIONS = np.array([1, 2, 3, 4])


def drawn(theta, spread=0.1, *, name="harvest", replicates=100, seed=0, common=None) -> Estimate:
    """An estimator whose log has normal errors, and whose replicates have them about what it found."""
    rng = np.random.default_rng(seed)
    logs = np.log(theta) + np.zeros((1 + replicates, len(theta)))
    noise = rng.normal(size=logs.shape) * spread + (0 if common is None else common)
    noise[:, 0] = 0
    logs[0] += noise[0]
    logs[1:] = logs[0] + noise[1:]
    return estimate(name, np.exp(logs), 0)


@given(seed=st.integers(0, 10**6), scale=st.floats(0.01, 100), reference=st.integers(0, 3))
def test_intervals_are_normal_in_log_theta_whatever_the_scale(seed, scale, reference):
    draws = np.exp(np.random.default_rng(seed).normal(size=(30, 4)))
    found = estimate("harvest", scale * draws, reference)
    logs = np.log(draws / draws[:, [reference]])
    spread = logs[1:].std(0, ddof=1)
    np.testing.assert_allclose(found.theta, draws[0] / draws[0, reference])
    np.testing.assert_allclose(found.low, np.exp(logs[0] - 1.959964 * spread))
    np.testing.assert_allclose(found.high, np.exp(logs[0] + 1.959964 * spread))
    np.testing.assert_allclose(found.half_width, np.exp(1.959964 * spread) - 1, rtol=1e-6)


def test_there_is_no_interval_where_replicates_mostly_do_not_tell():
    draws = np.exp(np.random.default_rng(0).normal(size=(11, 4)))
    draws[1:4, 1] = np.nan  # three of ten
    draws[1:3, 2] = np.nan  # two of ten
    draws[0, 3] = 0
    found = estimate("harvest", draws, 0)
    np.testing.assert_array_equal(np.isfinite(found.theta), [True, True, True, False])
    np.testing.assert_array_equal(np.isfinite(found.low), [True, False, True, False])
    np.testing.assert_array_equal(np.isinf(found.half_width), [False, True, False, True])
    assert found.low[0] == found.high[0] == 1


def test_there_is_no_interval_without_replicates():
    found = estimate("harvest", np.array([[0.5, 0.25]]), 0)
    np.testing.assert_allclose(found.theta, [1, 0.5])
    assert np.isinf(found.half_width).all()


def test_nothing_is_told_relative_to_a_position_that_is_not_told():
    assert np.isnan(estimate("harvest", np.array([[np.nan, 0.25, 0.5]] * 3), 0).theta).all()


THETA = np.array([1, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("common", [0.0, 0.5])
def test_estimators_that_err_by_chance_are_said_to_differ_once_in_a_hundred_times(common):
    """Errors that both share do not tell them apart, and are no excuse for a difference."""
    differ = []
    for seed in range(400):
        shared = common * np.random.default_rng(10_000 + seed).normal(size=(101, 4))
        pair = [drawn(THETA, 0.15, seed=2 * seed + i, common=shared) for i in range(2)]
        differ.append(not agreement(*pair, POSITIONS).agree)
    assert 0 < np.mean(differ) <= 0.03


def test_estimators_that_are_far_apart_differ_and_the_largest_difference_is_said():
    a, b = drawn(THETA, 0.02, name="harvest"), drawn(THETA * [1, 1, 1.5, 1.1], 0.02, name="items", seed=1)
    found = agreement(a, b, POSITIONS)
    assert not found.agree
    assert (found.first, found.second, found.position) == ("harvest", "items", 3)
    assert found.largest == pytest.approx(0.5, abs=0.1)


def test_a_common_error_hides_no_difference():
    shared = 0.5 * np.random.default_rng(0).normal(size=(101, 4))
    a, b = (drawn(theta, 0.02, seed=i, common=shared) for i, theta in enumerate((THETA, THETA * [1, 1.2, 1.2, 1.2])))
    assert not agreement(a, b, POSITIONS).agree


def test_estimators_within_five_percent_agree_however_sure_they_are():
    a, b = drawn(THETA, 1e-6), drawn(THETA * [1, 1.04, 0.97, 1], 1e-6, seed=1)
    assert agreement(a, b, POSITIONS).agree
    assert not agreement(a, drawn(THETA * [1, 1.06, 1, 1], 1e-6, seed=1), POSITIONS).agree


def test_there_is_no_agreement_without_two_positions_in_common():
    a, b = (estimate("a", np.tile(theta, (5, 1)), 0) for theta in ([1, 0.5, np.nan], [1, np.nan, 0.5]))
    assert agreement(a, b, POSITIONS[:3]) is None


def test_replicates_that_tell_nothing_are_left_out():
    a, b = drawn(THETA, 0.1), drawn(THETA * [1, 2, 1, 1], 0.1, name="items", seed=1)
    draws = np.exp(a.logs)
    draws[5] = np.nan
    assert not agreement(estimate("harvest", draws, 0), b, POSITIONS).agree


def test_a_position_that_no_replicate_tells_decides_nothing():
    a, b = drawn(THETA, 0.1), drawn(THETA, 0.1, name="items", seed=1)
    draws = np.exp(a.logs)
    draws[1:, 2] = np.nan
    assert agreement(estimate("harvest", draws, 0), b, POSITIONS).agree


def test_positions_hang_together_through_links_of_ten_clicks_on_either_side():
    wins = np.zeros((4, 4))
    wins[0, 1], wins[1, 0] = 50, 30
    wins[1, 2], wins[2, 1] = 12, 40
    wins[0, 2], wins[2, 0] = 11, 20  # weaker, but there is a better way round
    wins[2, 3], wins[3, 2] = 90, 9
    found = links(wins, np.array([1, 2, 5, 8]))
    assert found["components"] == [[1, 2, 5], [8]]
    assert found["weakest"] == {"positions": [2, 5], "clicks": 12}
    wins[3, 2] = 10
    found = links(wins, np.array([1, 2, 5, 8]))
    assert found["components"] == [[1, 2, 5, 8]]
    assert found["weakest"] == {"positions": [5, 8], "clicks": 10}


def test_positions_without_links_are_each_alone():
    found = links(np.zeros((3, 3)), np.array([1, 2, 3]))
    assert found == {"components": [[1], [2], [3]], "weakest": None}


RATE = 0.3 * THETA


def judged(estimates, agreements=(), *, explained=None, tells=False, impressions=(100, 100, 100, 100)):
    named = {found.name: found for found in estimates}
    shown = np.array(impressions, float)
    asked = {"explained": explained, "features_tell": tells}
    return verdict(named, list(agreements), impressions=shown, requests=100, rate=RATE, **asked)


def wide(name="harvest", *, at=(1, 2, 3)):
    spread = np.full(4, 0.02)
    spread[list(at)] = 1.0
    return drawn(THETA, spread, name=name)


def sharp(name="harvest"):
    return drawn(THETA, 0.02, name=name)


def features(name="strata"):
    return drawn(THETA, 0.02, name=name)


def test_known_propensities_are_gone_by():
    known = estimate("known", np.tile(THETA, (11, 1)), 0)
    found = judged([known, wide()])
    assert (found.status, found.anchor, found.advice) == (IDENTIFIED, "known", "correct for it")
    assert "known" in found.reasons[0]


def test_random_order_goes_before_items_that_recur():
    found = judged([sharp("randomised"), sharp("harvest"), sharp("items")])
    assert (found.status, found.anchor) == (IDENTIFIED, "randomised")
    assert "random order" in found.reasons[0]


def test_harvesting_that_is_sharp_identifies():
    found = judged([sharp("harvest"), sharp("items")])
    assert (found.status, found.anchor) == (IDENTIFIED, "items")
    assert found.reasons == ("items were shown at several positions",)


def test_wide_intervals_at_positions_that_are_hardly_shown_do_not_matter():
    found = judged([wide(at=(3,))], impressions=(100, 100, 100, 10))
    assert found.status == IDENTIFIED


def test_harvesting_that_is_wide_is_to_be_used_with_care():
    found = judged([wide(at=(3,))])
    assert (found.status, found.anchor, found.advice) == (CARE, "harvest", "correct for it with care")
    assert "only 75% of impressions" in found.reasons[1]


def test_disagreement_of_interventions_calls_for_care_and_that_of_features_does_not():
    apart = Agreement("harvest", "items", 0.4, 3, agree=False)
    found = judged([sharp("harvest"), sharp("items")], [apart])
    assert found.status == CARE
    assert "harvest and items differ by 40% at position 3" in found.reasons
    other = Agreement("harvest", "regression", 0.4, 3, agree=False)
    assert judged([sharp("harvest"), features("regression")], [other]).status == IDENTIFIED


def test_interventions_that_tell_few_impressions_are_no_anchor():
    half = estimate("harvest", np.tile([1, 0.5, np.nan, np.nan], (11, 1)), 0)
    assert judged([half]).anchor is None
    assert judged([half], impressions=(100, 100, 10, 10)).anchor == "harvest"


def test_an_estimate_that_tells_nothing_is_never_gone_by():
    nothing = estimate("harvest", np.full((11, 4), np.nan), 0)
    found = judged([nothing, sharp("items")])
    assert found.anchor != "harvest"


def test_features_that_tell_clicks_and_nothing_of_the_order_identify():
    found = judged([features("strata"), features("regression")], explained=0.01, tells=True)
    assert (found.status, found.anchor) == (IDENTIFIED, "strata")
    assert "as good as random" in found.reasons[0]


def test_features_that_leave_the_order_open_are_to_be_used_with_care():
    found = judged([features("strata")], explained=0.3, tells=True)
    assert (found.status, found.anchor) == (CARE, "strata")


def test_features_that_tell_neither_the_order_nor_clicks_identify_nothing():
    assert judged([features("strata")], explained=0.01, tells=False).status == NOT


def test_an_order_that_features_explain_does_not_identify():
    found = judged([features("strata")], explained=0.9, tells=True)
    assert (found.status, found.advice) == (NOT, "collect a little randomisation first")
    assert "features explain 90% of the order" in found.reasons[0]


def test_nothing_identifies_where_there_is_nothing():
    found = judged([])
    assert (found.status, found.anchor) == (NOT, None)
    assert found.requests_needed > 0


def test_requests_needed_are_those_of_two_binomial_rates():
    """Var(log p̂) = (1 - p) / (n p) at the worst position and at the best."""
    theta, beta = np.array([0.8, 0.5, 0.2]), 0.3
    best, worst = (1 - 0.24) / 0.24, (1 - 0.06) / 0.06
    expected = (best + worst) * (NORMAL / np.log(1.1)) ** 2
    assert _requests_needed(theta, theta * beta, np.ones(3)) == int(np.ceil(expected))
    assert _requests_needed(theta / 0.8, theta * beta, np.ones(3)) == int(np.ceil(expected))
    seldom = (best + worst / 0.1) * (NORMAL / np.log(1.1)) ** 2
    assert _requests_needed(theta, theta * beta, np.array([1, 1, 0.1])) == int(np.ceil(seldom))


def test_requests_needed_leave_out_positions_that_are_not_told_or_never_clicked():
    assert _requests_needed(np.array([0.8, 0.2, np.nan]), np.array([0.24, 0.06, 0.1]), np.ones(3)) == _requests_needed(
        np.array([0.8, 0.2]), np.array([0.24, 0.06]), np.ones(2)
    )
    assert _requests_needed(np.array([1.0, np.nan]), np.array([0.3, 0.1]), np.ones(2)) == 0


def test_as_many_requests_as_are_needed_tell_theta_to_within_ten_percent():
    theta, beta, rng = np.array([0.9, 0.6, 0.3]), 0.4, np.random.default_rng(0)
    number = _requests_needed(theta, beta * theta, np.ones(3))
    found = rng.binomial(number, beta * theta, (4000, 3)) / number
    errors = np.log(found / found[:, [0]]) - np.log(theta / theta[0])
    within = (np.abs(errors) <= np.log(1.1)).mean(0)
    assert within[2] == pytest.approx(0.95, abs=0.015)  # the position that asks for most
    assert within[1] > 0.97
