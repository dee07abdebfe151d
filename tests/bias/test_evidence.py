"""The choice of the evidence about examination, on a shop with known truth, and by training and `ultr bias` alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bias.shop import SHOWN, THETA, error_of, shop
from bias.worlds import THETA as THETA_OF_WORLD
from bias.worlds import seen_in, world
from ultr.bias import logging_policy
from ultr.bias.audit import audit
from ultr.bias.counts import counted_random, log_counts
from ultr.bias.estimators import best_source, fill_gaps, fit_conditional, items_comparable
from ultr.bias.examination import Examination, estimate_examination
from ultr.errors import DataError
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.table import by_segment

SEEDS = range(5)


@pytest.fixture(autouse=True)
def linear_logging_score(monkeypatch):
    """Do not try a network in estimates by strata, which takes long."""
    monkeypatch.setattr(logging_policy, "MUCH_OPEN", np.inf)


def estimated(log: Log, **options: Any) -> Examination:
    return estimate_examination(log, Label("click"), **options)


def error_by_source(log: Log) -> dict[str, float]:
    """Return the mean relative error of θ by each source of a log, and by all of them together."""
    sources = log_counts(seen_in(log)).sources
    fits = {name: fit_conditional(counts.total()).theta for name, counts in sources.items()}
    return {name: error_of(fill_gaps(theta)) for name, theta in {**fits, "auto": estimated(log).theta}.items()}


def mean_errors(**options: Any) -> dict[str, float]:
    errors = [error_by_source(shop(seed=seed, **options)) for seed in SEEDS]
    return {name: float(np.mean([error[name] for error in errors])) for name in errors[0]}


def test_recurring_items_of_a_query_give_theta_within_a_few_percent():
    errors = mean_errors()
    assert errors["auto"] < 0.04
    assert errors["auto"] < 1.1 * errors["items"] < errors["randomised"] / 3


def test_items_make_few_requests_in_random_order_more_precise_and_the_error_does_not_hide_a_bias():
    log = shop(5000, seed=1)
    found = estimated(log)
    assert " requests in random order, and " in found.source
    assert found.confirmed
    assert error_of(found.theta) < 0.2
    assert found.error > 0.15  # a hundred requests cannot exclude that items are off by so much


def test_items_that_move_because_of_the_query_do_not_mislead_requests_in_random_order():
    """Without the query, an item has another relevance each time it moves, and its θ falls too fast."""
    errors = mean_errors(columns=("item", "randomised"), random_share=0.1)
    assert errors["items"] > 0.2
    assert errors["auto"] < errors["randomised"] < 0.1


@pytest.mark.parametrize("columns", [("item", "query", "randomised"), ("item", "randomised")])
def test_intervals_of_theta_contain_the_truth_whether_items_are_right_or_wrong(columns):
    truth, inside = np.log(THETA[1:] / THETA[0]), []
    for seed in range(20):
        found = estimated(shop(6000, seed=seed, columns=columns, random_share=0.05))
        draws = np.log(found.draws(200, seed=seed))
        low, high = np.quantile(draws[:, 1:] - draws[:, :1], [0.025, 0.975], axis=0)
        inside.append((low <= truth) & (truth <= high))
    assert np.mean(inside) > 0.85


def test_draws_have_the_covariance_of_the_estimate():
    found = estimated(shop(4000, seed=3))
    assert found.covariance is not None
    draws = np.log(found.draws(20_000) / found.theta)
    np.testing.assert_allclose(np.cov(draws.T), found.covariance, atol=0.05 * found.covariance.max())
    assert found.draws(0).shape == (0, len(found.positions))
    assert len(Examination.known({1: 1.0, 2: 0.5}).draws(5)) == 0


def test_requests_in_random_order_give_theta_of_each_segment():
    """The larger segment has 80% of the impressions, and would be estimated without the other."""
    log, rng = world("fresh", requests=8000), np.random.default_rng(0)
    phone = rng.random(8000) < 0.2
    kept = rng.random((8000, 5)) < np.where(phone[:, None], [1, 0.8, 0.7, 0.6, 0.6], 1)
    context = {"randomised": pa.array(np.ones(8000, bool)), "segment": pa.array(np.where(phone, "phone", "desk"))}
    clicks = {"click": log.actions["click"] * kept.ravel()}
    found = estimated(by_segment(replace(log, item_ids=None, context=context, actions=clicks))[0])
    assert found.source == "8,000 requests in random order"
    truth = np.concatenate([THETA_OF_WORLD, THETA_OF_WORLD * [1, 0.8, 0.7, 0.6, 0.6]]) / THETA_OF_WORLD[0]
    np.testing.assert_allclose(found.theta, truth, rtol=0.25)


def test_items_are_used_alone_if_there_is_nothing_better():
    errors = [error_of(estimated(shop(seed=seed, columns=("item",))).theta) for seed in SEEDS]
    raw = [error_of(shop(seed=seed).actions["click"].reshape(-1, SHOWN).mean(0)) for seed in SEEDS]
    assert np.mean(errors) < 0.65 * np.mean(raw)
    assert error_of(estimated(shop(columns=("item",), match=0.1)).theta) < 0.06


def test_the_standard_error_is_about_the_error():
    errors = []
    for seed in range(10):
        found = estimated(shop(4000, seed=seed, columns=("item", "query")))
        ratio = found.theta / found.theta[0] / THETA
        errors.append((float(np.sqrt((np.log(ratio[1:]) ** 2).mean())), found.error))
    actual, stated = np.mean(errors, axis=0)
    assert stated == pytest.approx(actual, rel=0.35)


def test_lists_of_different_lengths_in_random_order_are_compared_within_their_length():
    """Short lists have more relevant items, so that click rates fall too fast."""
    rng = np.random.default_rng(0)
    lengths = rng.choice([2, 5], 20_000)
    positions = np.concatenate([np.arange(1, n + 1) for n in lengths])
    theta, beta = THETA[positions - 1], np.repeat(np.where(lengths == 2, 0.8, 0.2), lengths)
    log = Log(
        features=np.empty((len(positions), 0), np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        request_ids=pa.array(np.arange(20_000)),
        feature_names=(),
        positions=positions,
        actions={"click": (rng.random(len(positions)) < theta * beta).astype(np.float32)},
        context={"randomised": pa.array(np.ones(20_000, bool))},
    )
    seen = seen_in(log)
    clicks, shown = np.bincount(seen.place, seen.clicked), np.bincount(seen.place)
    assert error_of(clicks / shown, THETA[:5]) > 0.2
    assert error_of(estimated(log).theta, THETA[:5]) < 0.04
    assert estimated(log).source == "20,000 requests in random order"


def test_random_order_of_equal_lists_gives_ratios_of_click_rates():
    log = shop(3000, random_share=1.0, columns=("randomised",))
    seen = seen_in(log)
    counts = counted_random(seen)
    assert counts is not None
    theta = fit_conditional(counts.total()).theta
    rate = log.actions["click"].reshape(-1, SHOWN).mean(0)
    np.testing.assert_allclose(theta / theta[0], rate / rate[0], rtol=1e-6)


@pytest.mark.parametrize(
    "log",
    [
        shop(600, rankers=1, random_share=0.0),  # each item of a query has one position
        shop(600, columns=()),
        shop(600, columns=("randomised",), random_share=0.01),  # six requests
        shop(600, columns=("item", "query"), queries=100_000),
    ],
)
def test_strata_remain_where_there_is_too_little_evidence(log):
    auto, strata = estimated(log), estimated(log, theta_from="strata")
    assert auto.source == "features alone (rows with similar scores of the logging ranker)"
    assert auto.error is None
    np.testing.assert_array_equal(auto.theta, strata.theta)


def test_one_linked_position_is_no_evidence_even_if_it_has_most_impressions():
    """Of six requests in random order, one was clicked, at position 1. Most requests have only this position."""
    lengths = np.repeat([3, 1], [6, 200])
    clicked = np.zeros(lengths.sum(), np.float32)
    clicked[0] = 1
    log = Log(
        features=np.empty((len(clicked), 0), np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        request_ids=pa.array(np.arange(len(lengths))),
        feature_names=(),
        positions=np.concatenate([np.arange(1, n + 1) for n in lengths]),
        actions={"click": clicked},
        context={"randomised": pa.array(lengths == 3)},
    )
    assert best_source(log_counts(seen_in(log))) is None


def test_items_whose_features_change_are_not_compared():
    log = shop(500, columns=("item",), queries=20)
    noise = np.random.default_rng(0).normal(size=log.features.shape).astype(np.float32)
    personal = replace(log, features=log.features + noise)
    assert items_comparable(log, by_query=False)
    assert not items_comparable(personal, by_query=False)
    assert items_comparable(None, by_query=False)
    assert estimated(personal).source == estimated(personal, theta_from="strata").source


def test_training_and_the_audit_have_the_same_curve():
    for requests, columns, name in ((2000, ("item", "query"), "items"), (8000, ("randomised",), "randomised")):
        log = shop(requests, columns=columns, random_share=0.2)
        theta = estimated(log.without_features()).theta
        report = audit(log.without_features(), bootstrap=10)
        assert report.verdict.anchor == name
        np.testing.assert_allclose(list(report.propensities().values()), 0.7 * theta, rtol=1e-6)


def test_request_weights_count():
    log = shop(4000, columns=("item", "query"))
    weighted = replace(log, weights=np.full(4000, 3.0, np.float32))
    a, b = estimated(log), estimated(weighted)
    np.testing.assert_allclose(a.theta, b.theta)
    np.testing.assert_allclose(3 * a.clicks, b.clicks)
    assert b.error < a.error


def test_theta_from_items_needs_item_ids():
    with pytest.raises(DataError, match="item ids"):
        estimated(shop(100, columns=()), theta_from="items")
