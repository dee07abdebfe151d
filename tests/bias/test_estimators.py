"""Estimators, compared with brute force if possible, and with the examination of simulated users."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.sparse import csr_matrix

from bias.worlds import THETA, seen_in, world
from ultr.bias import estimators
from ultr.bias.counts import Counts, counted_items, replicates
from ultr.bias.estimators import (
    bradley_terry,
    fitted_regression,
    harvest,
    largest_one,
    pair_clicks,
    pools,
    position_based,
    regression,
)

RELATIVE = THETA / THETA[0]
seeds = st.integers(0, 10**6)


def test_neighbouring_positions_are_pooled_until_they_have_25_clicks():
    clicks = np.array([90, 25, 10, 10, 10, 30, 0, 2])
    np.testing.assert_array_equal(pools(clicks, np.arange(1, 9)), [0, 1, 2, 2, 2, 3, 3, 3])
    np.testing.assert_array_equal(pools(np.array([3, 2, 0]), np.arange(3)), [0, 0, 0])
    np.testing.assert_array_equal(pools(np.array([5]), np.array([1])), [0])


def test_positions_of_different_segments_are_not_pooled():
    phone = 1 << 20
    positions = np.array([1, 2, 3, phone + 1, phone + 2])
    np.testing.assert_array_equal(pools(np.array([90, 5, 5, 5, 5]), positions), [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(pools(np.array([5, 5, 90, 5, 30]), positions), [0, 0, 0, 1, 1])


@given(clicks=st.lists(st.integers(0, 60), min_size=1, max_size=20))
def test_pools_are_neighbours_with_enough_clicks(clicks):
    pool = pools(np.array(clicks), np.arange(len(clicks)))
    assert pool[0] == 0
    assert set(np.diff(pool)) <= {0, 1}
    assert len(set(pool)) == 1 or np.bincount(pool, clicks).min() >= 25


def test_the_largest_theta_with_enough_clicks_is_one():
    theta = np.array([0.5, np.nan, 0.25, 2.0])
    np.testing.assert_allclose(largest_one(theta, np.array([100, 0, 30, 3])), [1, 0.5**0.5, 0.5, 1])
    np.testing.assert_allclose(largest_one(theta, np.array([10, 0, 9, 3])), [1, 0.5**0.5, 0.5, 1])
    np.testing.assert_allclose(largest_one(np.full(2, np.nan), np.zeros(2)), [1, 1])


def table(shown: np.ndarray, clicked: np.ndarray) -> Counts:
    """Counts of a table [strata, positions], all in one group of requests."""
    strata, places = np.nonzero(shown)
    cells = [csr_matrix(values[strata, places].astype(float)[:, None]) for values in (shown, clicked)]
    return Counts(strata, places, shown.shape, *cells)


def expected_wins(theta: np.ndarray, games: np.ndarray) -> np.ndarray:
    wins = games * theta[:, None] / (theta[:, None] + theta)
    np.fill_diagonal(wins, 0)
    return wins


@given(seed=seeds, size=st.integers(2, 8))
def test_strengths_are_exact_if_wins_equal_their_expectation(seed, size):
    rng = np.random.default_rng(seed)
    theta, games = np.exp(rng.normal(size=size)), rng.uniform(1, 100, (size, size))
    found = bradley_terry(expected_wins(theta, games + games.T))
    np.testing.assert_allclose(found / found[0], theta / theta[0], rtol=1e-6)


@settings(max_examples=40)
@given(seed=seeds, size=st.integers(2, 5))
def test_strengths_are_the_maximum_of_the_likelihood(seed, size):
    rng = np.random.default_rng(seed)
    wins = rng.integers(0, 8, (size, size)).astype(float)
    np.fill_diagonal(wins, 0)
    found = bradley_terry(wins)
    assume(np.isfinite(found).all())

    def loss(rest):
        log_theta = np.concatenate([[0], rest])
        return (wins * np.logaddexp(0, log_theta[None, :] - log_theta[:, None])).sum()

    best = minimize(loss, np.zeros(size - 1), method="BFGS", options={"gtol": 1e-8})
    log_found = np.log(found / found[0])[1:]
    assert loss(log_found) <= best.fun + 1e-9
    np.testing.assert_allclose(log_found, best.x, atol=1e-3)


@given(seed=seeds, size=st.integers(1, 7))
def test_strengths_exist_for_the_set_that_is_linked_to_the_anchor_both_ways(seed, size):
    wins = np.random.default_rng(seed).poisson(0.5, (size, size)).astype(float)
    np.fill_diagonal(wins, 0)
    reach = wins > 0
    for k in range(size):  # Warshall
        reach |= reach[:, [k]] & reach[[k], :]
    anchor = seed % size
    linked = reach[anchor] & reach[:, anchor]
    estimated = np.isfinite(bradley_terry(wins, anchor))
    np.testing.assert_array_equal(estimated, linked if linked.sum() > 1 else False)


def test_positions_outside_the_linked_set_have_no_strength():
    wins = np.zeros((5, 5))
    wins[0, 1], wins[1, 0] = 6, 3
    wins[1, 2], wins[2, 1] = 4, 4
    wins[3, 4] = wins[4, 3] = 9  # a smaller linked set
    wins[0, 3] = 5  # which never won against the others
    np.testing.assert_allclose(bradley_terry(wins) / bradley_terry(wins)[0], [1, 0.5, 0.5, np.nan, np.nan])


@given(seed=seeds)
def test_pair_clicks_equal_a_loop_over_items_and_pairs(seed):
    rng = np.random.default_rng(seed)
    shown = rng.integers(0, 4, (5, 4)) * rng.integers(0, 2, (5, 4))
    clicked = rng.binomial(shown, 0.5)
    assume(shown.any())
    expected = np.zeros((4, 4))
    for n, c in zip(shown, clicked, strict=True):
        for k in range(4):
            for other in range(4):
                if k != other and n[k] and n[other]:
                    expected[k, other] += c[k] / n[k] * n[k] * n[other] / (n[k] + n[other])
    np.testing.assert_allclose(pair_clicks(table(shown, clicked), np.ones(1)), expected)


def test_pairs_of_too_many_items_are_sampled(monkeypatch):
    counts = table(np.full((300, 3), 4), np.tile([3, 2, 1], (300, 1)))
    whole = pair_clicks(counts, np.ones(1))
    monkeypatch.setattr(estimators, "PAIR_WORK", 0)
    np.testing.assert_allclose(pair_clicks(counts, np.ones(1)), whole / 3)  # 100 of 300 equal items


@pytest.mark.parametrize("estimator", [harvest, position_based])
def test_the_relevance_of_items_does_not_matter(estimator):
    """Items differ in relevance and in how often each position shows them; clicks equal their expectation."""
    rng = np.random.default_rng(0)
    shown = rng.integers(0, 50, (30, 5))
    clicks = shown * THETA * rng.uniform(0.01, 1, (30, 1))
    found = estimator(table(shown, clicks), np.ones((1, 1)))[0]
    np.testing.assert_allclose(found / found[0], RELATIVE, rtol=1e-6)


@pytest.mark.parametrize("kind", ["random", "rankers"])
@pytest.mark.parametrize("estimator", [harvest, position_based])
def test_items_that_recur_identify_examination(kind, estimator):
    counts = counted_items(seen_in(world(kind, requests=6000)))
    found = estimator(counts, np.ones((200, 1)))[0]
    np.testing.assert_allclose(found / found[0], RELATIVE, rtol=0.12)


@pytest.mark.parametrize("estimator", [harvest, position_based])
def test_items_shown_a_few_times_identify_examination_on_average(estimator):
    """Each item is shown two or three times: errors that do not fall with the number of items would be visible."""
    rng = np.random.default_rng(0)
    shown = rng.multinomial(3, np.full(5, 0.2), size=60_000)
    clicked = rng.binomial(shown, THETA * rng.uniform(0.1, 1, (60_000, 1)))
    found = estimator(table(shown, clicked), np.ones((1, 1)))[0]
    np.testing.assert_allclose(found / found[0], RELATIVE, rtol=0.06)


def test_click_rates_do_not_estimate_examination_if_rankers_set_the_order():
    log = world("rankers", requests=6000)
    naive = log.actions["click"].reshape(-1, 5).mean(0)
    assert np.abs(naive / naive[0] / RELATIVE - 1).max() > 0.25


def test_the_covariance_of_examination_equals_the_spread_of_repeated_samples():
    rng = np.random.default_rng(0)
    shown, beta = rng.integers(0, 40, (100, 5)), rng.uniform(0.02, 0.2, (100, 1))
    fits = [
        estimators.fit_conditional(table(shown, rng.binomial(shown, THETA * beta)).weighted(np.ones(1)))
        for _ in range(150)
    ]
    logs = np.log([fit.theta / fit.theta[fit.anchor] for fit in fits])
    assert {fit.anchor for fit in fits} == {0}
    covariance = np.mean([fit.covariance() for fit in fits], axis=0)
    np.testing.assert_allclose(np.sqrt(covariance.diagonal()), logs.std(0), rtol=0.15)
    np.testing.assert_allclose(covariance[1, 2], np.cov(logs[:, 1], logs[:, 2])[0, 1], rtol=0.4)


@settings(max_examples=40)
@given(seed=seeds, strata=st.integers(1, 6), places=st.integers(2, 4))
def test_the_position_based_model_maximises_the_likelihood_given_the_clicks_of_each_item(seed, strata, places):
    rng = np.random.default_rng(seed)
    shown = rng.integers(1, 30, (strata, places))
    clicked = rng.binomial(shown, rng.uniform(0.2, 0.8, places) * rng.uniform(0.3, 1, (strata, 1)))
    assume((clicked.sum(0) > 0).all())

    def loss(rest):
        expected = shown * np.exp(np.concatenate([[0], rest]))
        return -(clicked * np.log(expected / expected.sum(1, keepdims=True))).sum()

    best = minimize(loss, np.zeros(places - 1), method="BFGS", options={"gtol": 1e-7})
    found = position_based(table(shown, clicked), np.ones((1, 1)))[0]
    np.testing.assert_allclose(np.log(found[1:] / found[0]), best.x, atol=1e-3)


def test_replicates_equal_separate_fits():
    counts = counted_items(seen_in(world("rankers", requests=1000)))
    weights = replicates(200, 4)
    for estimator in (harvest, position_based):
        found = estimator(counts, weights)
        alone = np.array([estimator(counts, column[:, None])[0] for column in weights.T])
        np.testing.assert_allclose(found / found[:, :1], alone / alone[:, :1], rtol=1e-5)
        assert len(np.unique(found[:, 1].round(9))) == 5


def test_positions_without_a_click_have_no_estimate():
    shown = np.full((3, 3), 20)
    clicked = np.array([[9, 0, 5], [12, 0, 8], [4, 0, 2]])
    for estimator in (harvest, position_based):
        found = estimator(table(shown, clicked), np.ones((1, 1)))[0]
        np.testing.assert_allclose(found / found[0], [1, np.nan, 15 / 25])  # shown equally often, so that rates compare


def test_positions_that_no_item_links_are_not_compared():
    shown = np.kron(np.eye(2), np.full((5, 2), 100)).astype(int)  # five items at 1 and 2, five others at 3 and 4
    clicked = np.kron(np.diag([4, 1]), np.tile([20, 10], (5, 1)))
    for estimator in (harvest, position_based):
        found = estimator(table(shown, clicked), np.ones((1, 1)))[0]
        np.testing.assert_allclose(found / found[0], [1, 0.5, np.nan, np.nan])


def test_positions_that_items_link_only_one_way_are_not_compared():
    shown = np.array([[10, 10, 0], [0, 10, 10]])
    clicked = np.array([[8, 0, 0], [0, 5, 4]])  # of the items at 1 and at 2, none was clicked at 2
    found = position_based(table(shown, clicked), np.ones((1, 1)))[0]
    assert np.isfinite(found).sum() < 3


def test_regression_estimates_examination_if_relevance_is_logistic_in_the_features():
    log = world("random", requests=3000, features=3, noise=0)
    theta = regression(seen_in(log), log.features, np.ones((200, 1)))
    assert theta.shape == (1, 5)
    _, logit = fitted_regression(seen_in(log), log.features, np.ones(200))
    np.testing.assert_allclose(theta[0] / theta[0, 0], RELATIVE, rtol=0.15)
    assert np.corrcoef(logit, log.features @ np.array([1.0, -0.8, 0.5]))[0, 1] > 0.98


def test_replicates_of_the_regression_are_close_to_separate_fits():
    log = world("random", requests=3000, features=3, noise=0)
    seen, weights = seen_in(log), replicates(200, 5)
    found = regression(seen, log.features, weights)
    logs = np.log(found / found[:, :1])
    whole = []
    for column in weights.T:
        theta = regression(replace(seen, weights=column[seen.group]), log.features, np.ones((200, 1)))
        whole.append(np.log(theta[0] / theta[0, 0]))
    np.testing.assert_allclose(logs[0], whole[0], atol=1e-6)
    apart, moved = logs[1:] - whole[1:], np.array(whole[1:]) - whole[0]
    assert np.abs(apart).max() < 0.3 * np.abs(moved).max()


def test_regression_estimates_examination_if_a_ranker_set_the_order():
    log = world("deterministic", requests=4000, features=3, noise=0)
    theta = regression(seen_in(log), log.features, np.ones((200, 1)))
    naive = log.actions["click"].reshape(-1, 5).mean(0)
    errors = [np.abs(values / values[0] / RELATIVE - 1).max() for values in (theta[0], naive)]
    assert errors[0] < 0.2 < errors[1]
