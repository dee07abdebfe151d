"""Intervals, tests of agreement, links between positions and verdicts, on small examples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultr.bias import identification
from ultr.bias.counts import LogCounts
from ultr.bias.identification import (
    CARE,
    CONDITIONAL,
    IDENTIFIED,
    NORMAL,
    NOT,
    Agreement,
    Estimate,
    Refutation,
    _requests_needed,
    estimate,
    links,
    verdict,
)

POSITIONS = np.array([1, 2, 3, 4])


def agreement(a, b, positions, **options):
    """Test agreement at positions that were shown equally often, each with an estimate of its own."""
    alone = {"shown": np.ones(len(positions)), "pool": np.arange(len(positions))}
    return identification.agreement(a, b, positions, **{**alone, **options})


def drawn(theta, spread=0.1, *, name="harvest", replicates=100, seed=0, common=None) -> Estimate:
    """Return an estimate with normal errors, whose replicates have normal errors around the estimate."""
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


def test_there_is_no_interval_if_too_few_replicates_have_an_estimate():
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


def test_there_is_no_estimate_relative_to_a_position_without_one():
    assert np.isnan(estimate("harvest", np.array([[np.nan, 0.25, 0.5]] * 3), 0).theta).all()


THETA = np.array([1, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("common", [0.0, 0.5])
def test_estimators_that_agree_are_said_to_differ_once_in_a_hundred_times(common):
    """Errors that both estimators share do not affect the test."""
    differ = []
    for seed in range(400):
        shared = common * np.random.default_rng(10_000 + seed).normal(size=(101, 4))
        pair = [drawn(THETA, 0.15, seed=2 * seed + i, common=shared) for i in range(2)]
        differ.append(not agreement(*pair, POSITIONS).agree)
    assert 0 < np.mean(differ) <= 0.03


def test_estimators_that_are_far_apart_differ_and_the_largest_difference_is_reported():
    a, b = drawn(THETA, 0.02, name="harvest"), drawn(THETA * [1, 1, 1.5, 1.1], 0.02, name="items", seed=1)
    found = agreement(a, b, POSITIONS)
    assert not found.agree
    assert (found.first, found.second, found.position) == ("harvest", "items", 3)
    assert found.largest == pytest.approx(0.5, abs=0.1)


def test_a_common_error_does_not_hide_a_difference():
    shared = 0.5 * np.random.default_rng(0).normal(size=(101, 4))
    a, b = (drawn(theta, 0.02, seed=i, common=shared) for i, theta in enumerate((THETA, THETA * [1, 1.2, 1.2, 1.2])))
    assert not agreement(a, b, POSITIONS).agree


def test_estimators_within_five_percent_agree_even_if_both_are_precise():
    a, b = drawn(THETA, 1e-6), drawn(THETA * [1, 1.04, 0.97, 1], 1e-6, seed=1)
    assert agreement(a, b, POSITIONS).agree
    assert not agreement(a, drawn(THETA * [1, 1.06, 1, 1], 1e-6, seed=1), POSITIONS).agree


def test_there_is_no_agreement_without_two_positions_in_common():
    a, b = (estimate("a", np.tile(theta, (5, 1)), 0) for theta in ([1, 0.5, np.nan], [1, np.nan, 0.5]))
    assert agreement(a, b, POSITIONS[:3]) is None


def test_replicates_without_an_estimate_are_left_out():
    a, b = drawn(THETA, 0.1), drawn(THETA * [1, 2, 1, 1], 0.1, name="items", seed=1)
    draws = np.exp(a.logs)
    draws[5] = np.nan
    assert not agreement(estimate("harvest", draws, 0), b, POSITIONS).agree


def test_a_position_without_replicates_does_not_affect_agreement():
    a, b = drawn(THETA, 0.1), drawn(THETA, 0.1, name="items", seed=1)
    draws = np.exp(a.logs)
    draws[1:, 2] = np.nan
    assert agreement(estimate("harvest", draws, 0), b, POSITIONS).agree


def test_positions_are_linked_by_ten_clicks_on_either_side():
    wins = np.zeros((4, 4))
    wins[0, 1], wins[1, 0] = 50, 30
    wins[1, 2], wins[2, 1] = 12, 40
    wins[0, 2], wins[2, 0] = 11, 20  # weaker, but there is a stronger path
    wins[2, 3], wins[3, 2] = 90, 9
    found = links(wins, np.array([1, 2, 5, 8]), np.arange(4))
    assert found["components"] == [[1, 2, 5], [8]]
    assert found["weakest"] == {"positions": [2, 5], "clicks": 12}
    wins[3, 2] = 10
    found = links(wins, np.array([1, 2, 5, 8]), np.arange(4))
    assert found["components"] == [[1, 2, 5, 8]]
    assert found["weakest"] == {"positions": [5, 8], "clicks": 10}


def test_positions_without_links_are_separate_groups():
    found = links(np.zeros((3, 3)), np.array([1, 2, 3]), np.arange(3))
    assert found == {"components": [[1], [2], [3]], "weakest": None}


RATE = 0.3 * THETA


def judge(
    estimates, agreements=(), *, explained=None, explain_clicks=False, impressions=(100, 100, 100, 100), refutations=()
):
    named = {result.name: result for result in estimates}
    options = {"explained": explained, "features_explain_clicks": explain_clicks, "no_links": "the log has no item ids"}
    options |= {"pool": np.arange(4), "refutations": refutations}
    best = next((name for name in ("randomised", "swaps", "items", "harvest") if name in named), None)
    return verdict(named, list(agreements), counts_of(impressions), best=best, source=best, **options)


def counts_of(impressions, suspicious=0) -> LogCounts:
    """Return the counts of a log of 100 requests with click rates `RATE`."""
    shown = np.array(impressions, float)
    return LogCounts(
        positions=POSITIONS,
        shown=shown,
        clicked=RATE * shown,
        clicks=RATE * shown,
        requests=100,
        weight=100.0,
        groups=1,
        sources={},
        has_items=True,
        suspicious=suspicious,
    )


def wide(name="harvest", *, at=(1, 2, 3)):
    spread = np.full(4, 0.02)
    spread[list(at)] = 1.0
    return drawn(THETA, spread, name=name)


def precise(name="harvest"):
    return drawn(THETA, 0.02, name=name)


def features(name="strata"):
    return drawn(THETA, 0.02, name=name)


def test_known_propensities_are_preferred():
    known = estimate("known", np.tile(THETA, (11, 1)), 0)
    found = judge([known, wide()])
    assert (found.status, found.anchor, found.advice) == (IDENTIFIED, "known", "correct for position bias")
    assert "known" in found.reasons[0]


@pytest.mark.parametrize(("name", "what"), [("randomised", "random order"), ("swaps", "drawn at random")])
def test_random_order_and_swaps_identify_without_an_assumption(name, what):
    found = judge([precise(name), precise("harvest"), precise("items")])
    assert (found.status, found.anchor, found.assumption) == (IDENTIFIED, name, "")
    assert (found.next_step, found.requests_needed) == ("none", 0)
    assert what in found.reasons[0]


PASSED = Refutation("other items", True, 0.01, "They agree.")


def test_items_identify_under_an_assumption():
    found = judge([precise("harvest"), precise("items")], refutations=[PASSED])
    assert (found.status, found.anchor) == (CONDITIONAL, "items")
    assert found.assumption == "an item's position does not depend on its relevance to this request"
    assert found.reasons == ("Items were shown at several positions.", "No test of the assumption failed.")
    assert found.requests_needed > 0
    assert "ultr explore LOG" in found.next_step
    assert f"{found.requests_needed:,} requests in random order" in found.next_step


def test_agreement_of_estimates_from_the_same_counts_is_no_check():
    alike = Agreement("harvest", "items", 0.01, 3, agree=True)
    assert judge([precise("harvest"), precise("items")], [alike]).status == CONDITIONAL


def test_a_test_that_could_not_be_run_is_not_passed():
    reasons = judge([precise("items")]).reasons
    assert "No test of the assumption could be run" in reasons[1]
    assert not any("failed" in reason for reason in reasons)


@pytest.mark.parametrize(("severe", "status"), [(False, CARE), (True, NOT)])
def test_a_failed_test_of_items_lowers_the_status_and_is_named(severe, status):
    failed = Refutation("halves of time", False, 0.2, "They differ.", severe)
    found = judge([precise("items")], refutations=[PASSED, failed])
    assert (found.status, found.anchor) == (status, "items")
    assert "The test 'halves of time' failed: They differ." in found.reasons
    assert "ultr explore" in found.next_step


def test_tests_of_items_do_not_concern_random_requests():
    failed = [Refutation(name, False, 0.5, "No.", True) for name in ("other items", "random requests")]
    found = judge([precise("randomised"), precise("items")], refutations=failed)
    assert (found.status, found.reasons) == (IDENTIFIED, ("Some requests were in random order.",))


def test_a_declared_random_order_that_is_not_random_needs_care():
    failed = Refutation("random order", False, 0.4, "The correlation is 0.400.")
    assert judge([precise("swaps"), precise("items")], refutations=[failed]).status == IDENTIFIED
    found = judge([precise("randomised"), precise("items")], refutations=[failed])
    assert found.status == CARE
    assert "--randomised" in found.next_step


def test_wide_intervals_at_rarely_shown_positions_do_not_matter():
    found = judge([wide(at=(3,))], impressions=(100, 100, 100, 10))
    assert found.status == CONDITIONAL


def test_harvesting_with_wide_intervals_needs_care():
    found = judge([wide(at=(3,))])
    assert (found.status, found.anchor, found.advice) == (CARE, "harvest", "correct for position bias with care")
    assert "Only 75% of the impressions" in found.reasons[1]


def test_disagreement_of_interventions_needs_care_and_that_of_features_does_not():
    apart = Agreement("harvest", "items", 4.3, 3, agree=False, typical=0.4)
    found = judge([precise("harvest"), precise("items")], [apart])
    assert found.status == CARE
    assert "The estimates items and harvest differ, by 40% on average." in found.reasons
    assert "--query" in found.next_step
    other = Agreement("harvest", "regression", 0.4, 3, agree=False)
    assert judge([precise("harvest"), features("regression")], [other]).status == CONDITIONAL


def test_interventions_that_cover_few_impressions_are_not_an_anchor():
    half = estimate("harvest", np.tile([1, 0.5, np.nan, np.nan], (11, 1)), 0)
    assert judge([half]).anchor is None
    assert judge([half], impressions=(100, 100, 10, 10)).anchor == "harvest"


def test_an_estimate_without_values_is_never_an_anchor():
    nothing = estimate("harvest", np.full((11, 4), np.nan), 0)
    found = judge([nothing, precise("items")])
    assert found.anchor != "harvest"


@pytest.mark.parametrize("explained", [-0.1, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("explain_clicks", [False, True])
def test_features_alone_never_identify(explained, explain_clicks):
    """The rest of the order may be chance, or may follow something that is not a feature; a log cannot tell which."""
    options = {"explained": explained, "explain_clicks": explain_clicks}
    found = judge([features("strata"), features("regression")], **options)
    assert (found.status, found.advice) == (NOT, "show some requests in random order first")
    assert found.anchor == ("strata" if explained > 0.02 or explain_clicks else None)
    assert all(what in found.next_step for what in ("ultr explore", "--randomised", "--item", "--propensities"))
    assert bool(found.assumption) == (found.anchor is not None)


def test_the_reason_says_how_much_of_the_order_features_explain():
    reasons = judge([features("strata")], explained=0.9, explain_clicks=True).reasons
    assert reasons[0].startswith("Features explain 90% of the logged order, the log has no item ids")
    assert "this log cannot separate the two" in reasons[1]
    assert "nothing but these features and chance decided the order" in reasons[2]


def test_suspicious_requests_in_the_estimates_need_care():
    found = verdict(
        {"items": precise("items")},
        [],
        counts_of(np.full(4, 100.0), suspicious=1200),
        explained=None,
        features_explain_clicks=False,
        no_links="",
        pool=np.arange(4),
        best="items",
        source="items",
    )
    assert found.status == CARE
    assert "The estimates use 1,200 suspicious requests (see the warnings)." in found.reasons


def test_no_estimates_identify_nothing():
    found = judge([])
    assert (found.status, found.anchor) == (NOT, None)
    assert found.reasons[0].startswith("The log has no item ids, no request was in random order, and no features")
    assert found.requests_needed > 0


def needed(theta, rate, shown=None, pool=None):
    """Return the requests needed for positions that were shown in all of 1,000 requests, or in this share of them."""
    shown = np.ones(len(theta)) if shown is None else np.array(shown)
    return _requests_needed(theta, rate, 1000 * shown, 1000, np.arange(len(theta)) if pool is None else np.array(pool))


def rounded_up(number):
    """Round up to two digits, after the margin."""
    return int(np.ceil(1.25 * number / 10 ** (digits := int(np.log10(1.25 * number)) - 1))) * 10**digits


def test_requests_needed_are_those_of_two_binomial_rates():
    """Var(log p̂) = (1 - p) / (n p) at the worst position and at the best."""
    theta, beta = np.array([0.8, 0.5, 0.2]), 0.3
    best, worst = (1 - 0.24) / 0.24, (1 - 0.06) / 0.06
    expected = rounded_up((best + worst) * (NORMAL / np.log(1.3)) ** 2)
    assert needed(theta, theta * beta) == expected
    assert needed(theta / 0.8, theta * beta) == expected
    seldom = (best + worst / 0.5) * (NORMAL / np.log(1.3)) ** 2
    assert needed(theta, theta * beta, [1, 1, 0.5]) == rounded_up(seldom)


def test_a_position_that_is_nearly_never_shown_does_not_raise_the_requests_needed():
    theta, beta = np.array([0.8, 0.5, 0.2, 0.1]), 0.3
    assert needed(theta, theta * beta, [1, 1, 1, 1e-4]) < 1.3 * needed(theta[:3], theta[:3] * beta)
    assert needed(theta, theta * beta, [1, 1, 1, 1]) > 1.7 * needed(theta[:3], theta[:3] * beta)


def test_positions_of_a_pool_are_estimated_together():
    theta = np.array([0.8, 0.2, 0.2])
    assert needed(theta, 0.3 * theta, pool=[0, 1, 1]) < 0.7 * needed(theta, 0.3 * theta)


def test_requests_needed_ignore_positions_without_an_estimate_or_click():
    rate = np.array([0.24, 0.06, 0.0])
    assert needed(np.array([0.8, 0.2, np.nan]), rate, [1, 1, 0.1]) == needed(np.array([0.8, 0.2]), rate[:2])
    assert needed(np.array([1.0, np.nan]), np.array([0.3, 0.1])) == 0


def test_the_requests_needed_estimate_theta_well_enough():
    theta, beta, rng = np.array([0.9, 0.6, 0.3]), 0.4, np.random.default_rng(0)
    number = needed(theta, beta * theta)
    found = rng.binomial(number, beta * theta, (4000, 3)) / number
    errors = np.log(found / found[:, [0]]) - np.log(theta / theta[0])
    within = (np.abs(errors) <= np.log(1.3)).mean(0)
    assert 0.95 < within[2] < 0.99  # the position that needs the most requests
    assert within[1] > 0.97


def test_positions_of_a_pool_count_once_in_a_test_of_agreement():
    a, b = drawn(THETA, 0.02, name="harvest"), drawn(THETA * [1, 1, 1.5, 1.5], 0.02, name="items", seed=1)
    pooled = agreement(a, b, POSITIONS, pool=np.array([0, 1, 2, 2]), shown=np.array([70, 20, 5, 5]))
    assert not pooled.agree
    assert pooled.position == 3
    assert pooled.typical == pytest.approx(0.05, abs=0.02)  # a tenth of the impressions differs by half
