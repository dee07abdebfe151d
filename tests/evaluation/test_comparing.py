"""Several rankers under one θ: their true order, which requests θ is estimated from, and the tests between them."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from bias.worlds import THETA, world
from ultr.bias.examination import Examination
from ultr.datasets.users import make_user
from ultr.errors import DataError, OptionError
from ultr.evaluation import comparing
from ultr.evaluation.comparing import (
    DEPLOY,
    LOGGED_RANKING,
    REJECT,
    TEST,
    UNCLEAR,
    RankerComparison,
    RankerValue,
    compare_rankers,
    logged_scores,
    requests_needed,
)
from ultr.evaluation.scores import Mean, PairedTest, evaluate_scores, holm
from ultr.log import Log

METRIC = "off-policy-reward@5"
KNOWN = {str(k + 1): float(theta) for k, theta in enumerate(THETA)}


def _benchmark():
    path = Path(__file__).parents[2] / "benchmarks" / "judgement.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_comparisons", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def log():
    return world("deterministic", requests=400, features=3)


@pytest.fixture(scope="module")
def rankers(log):
    return {"random": np.random.default_rng(0).random(log.rows), "first": log.features[:, 0].astype(float)}


@pytest.mark.parametrize(("users", "eta", "seed"), [("pbm", 1.5, 2), ("trust", 1.0, 3)])
def test_five_rankers_are_in_their_true_order_and_a_naive_one_is_not_the_best(users, eta, seed):
    found = _benchmark().replication(users, eta, 4000, 0.0, seed)
    assert found["order"]
    assert not found["clicks"]  # the order by clicks as they are is wrong


def test_a_wrong_examination_of_its_own_would_favour_the_naive_ranker():
    benchmark = _benchmark()
    user = make_user("pbm", dwell=None)
    case = benchmark.simulated(4000, user, seed=5)
    log, rankers = case.log, case.rankers
    chosen = {name: rankers[name] for name in ("naive", "fair")}
    truth = {
        name: evaluate_scores(log, scores, "reward@10", user=user, label="click")["reward@10"].mean()
        for name, scores in chosen.items()
    }
    assert truth["fair"] > truth["naive"]
    one = compare_rankers(log, chosen, ["off-policy-reward@10"], label="click")
    values = {name: value["off-policy-reward@10"].mean.mean for name, value in one.rankers.items()}
    assert values["fair"] > values["naive"]
    theta = {str(k): float(user.theta(torch.tensor([k]))[0]) ** 0.3 for k in range(1, 11)}
    own = compare_rankers(log, {"fair": chosen["fair"]}, ["off-policy-reward@10"], label="click", known=theta)
    assert own.rankers["fair"]["off-policy-reward@10"].mean.mean < values["naive"]


def test_the_logged_ranking_is_evaluated_next_to_the_others_by_its_feedback(log, rankers):
    found = compare_rankers(log, rankers, [METRIC], label="click", known=KNOWN)
    assert list(found.rankers) == [LOGGED_RANKING, "random", "first"]
    clicks = log.actions["click"].sum() / len(log)
    assert found.rankers[LOGGED_RANKING][METRIC].mean.mean == pytest.approx(clicks)
    assert found.against == LOGGED_RANKING
    assert found.theta == pytest.approx(KNOWN)
    assert (found.evidence, found.confirmed) == ("known propensities", True)
    np.testing.assert_array_equal(logged_scores(log)[:7], [0, -1, -2, -3, -4, 0, -1])


def test_differences_are_of_the_same_requests_and_corrected_for_the_number_of_rankers(log, rankers):
    metrics = [METRIC, "feedback-ndcg@5"]
    found = compare_rankers(log, rankers, metrics, label="click", against="first")
    for metric in metrics:
        values = {name: value[metric] for name, value in found.rankers.items()}
        assert values["first"].difference is None
        others = [values[LOGGED_RANKING], values["random"]]
        assert [value.holm for value in others] == holm([value.difference.p for value in others])
        for value in others:
            assert value.difference.difference == pytest.approx(value.mean.mean - values["first"].mean.mean)
            assert value.mean.low < value.mean.mean < value.mean.high
    content = found.to_json()
    assert content["rankers"]["random"][METRIC]["low"] == found.rankers["random"][METRIC].mean.low
    assert content["rankers"]["random"][METRIC]["difference"]["p"] == found.rankers["random"][METRIC].difference.p
    assert content["examination"] == {
        "theta": found.theta,
        "source": found.evidence,
        "confirmed": found.confirmed,
    }


def test_without_confirmation_an_interval_has_those_of_less_and_more_position_bias(log, rankers, monkeypatch):
    """The interval of an estimate from features alone, against those under known θ, half and one and a half of it."""
    found = compare_rankers(log, rankers, [METRIC], label="click")
    assert not found.confirmed
    value = found.rankers["first"][METRIC]
    monkeypatch.setattr(comparing, "POWERS", 3 * ((1.0,),))
    alone = compare_rankers(log, rankers, [METRIC], label="click").rankers["first"][METRIC]
    assert alone.mean.mean == value.mean.mean
    assert value.mean.low <= alone.mean.low < alone.mean.high < value.mean.high
    monkeypatch.setattr(comparing, "POWERS", 3 * ((0.5,),))
    less = compare_rankers(log, rankers, [METRIC], label="click").rankers["first"][METRIC]
    assert less.mean.low >= value.mean.low
    assert less.mean.high <= value.mean.high
    assert value.difference.low <= less.difference.low
    assert value.difference.high >= less.difference.high


def test_the_error_of_examination_is_in_the_intervals():
    """Few requests in random order: nearly all of the error of a value is that of θ, which draws of it show."""
    covered = widths = alone = 0
    for seed in range(12):
        on, taste = world_with_random_requests(seed)
        truth = exact_value(on, taste)
        with_error = compare_rankers(on, {"taste": taste}, [METRIC], label="click", seed=seed)
        assert with_error.confirmed
        mean = with_error.rankers["taste"][METRIC].mean
        without = compare_rankers(on, {"taste": taste}, [METRIC], label="click", seed=seed, known=with_error.theta)
        known = without.rankers["taste"][METRIC].mean
        covered += mean.low <= truth <= mean.high
        by_chance = with_error.rankers["taste"][METRIC].random_order  # needs no examination
        alone += by_chance.low <= truth <= by_chance.high
        widths += (mean.high - mean.low) / (known.high - known.low) / 12
    assert covered >= 10
    assert alone >= 10
    assert widths > 1.5


def world_with_random_requests(seed, requests=4000):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(requests, 5, 2))
    marked = rng.random(requests) < 0.08
    order = np.argsort(-np.where(marked[:, None], rng.random((requests, 5)), features[:, :, 1]), axis=1)
    features = np.take_along_axis(features, order[:, :, None], 1)
    beta = 1 / (1 + np.exp(1 - features[:, :, 0]))
    clicked = rng.random((requests, 5)) < THETA * beta
    log = Log(
        features=features.reshape(-1, 2).astype(np.float32),
        offsets=np.arange(requests + 1) * 5,
        request_ids=pa.array(np.arange(requests)),
        feature_names=("taste", "production"),
        positions=np.tile(np.arange(1, 6), requests),
        actions={"click": clicked.reshape(-1).astype(np.float32)},
        context={"randomised": pa.array(marked)},
    )
    return log, features[:, :, 0].reshape(-1)


def exact_value(log, taste):
    ranked = -np.sort(-taste.reshape(-1, 5), axis=1)
    return float((THETA / (1 + np.exp(1 - ranked))).sum(1).mean())


def value(difference, low, high, *, p=0.001, worse=0.0, clicks=500.0):
    return RankerValue(Mean(1 + difference, 0, 2, 400), clicks, PairedTest(difference, low, high, p, 400), p, worse)


@pytest.mark.parametrize(
    ("found", "confirmed", "action", "requests"),
    [
        (value(0.1, 0.05, 0.15), True, DEPLOY, None),
        (value(0.1, 0.05, 0.15), False, TEST, None),  # better under all plausible θ, but nothing confirms it
        (value(0.1, -0.01, 0.21, p=0.07, worse=0.04), True, TEST, None),
        (value(0.1, -0.2, 0.4, p=0.5, worse=0.25), True, UNCLEAR, 3600),  # 400 requests times 3², rounded up
        (value(0.001, -0.2, 0.2, p=0.99, worse=0.49), True, UNCLEAR, None),  # nobody collects so many
        (value(-0.1, -0.15, -0.05, worse=1.0), True, REJECT, None),
        (value(-0.1, -0.15, -0.05, worse=1.0), False, REJECT, None),
        (value(0.1, 0.05, 0.15, clicks=10.0), True, UNCLEAR, 1200),  # three times as many for 30 clicks
    ],
)
def test_the_decision_follows_from_interval_and_evidence(found, confirmed, action, requests):
    rankers = {"it": {METRIC: RankerValue(Mean(1, 0, 2, 400))}, "new": {METRIC: found}}
    comparison = RankerComparison(rankers, "it", 400, {"1": 1.0}, "three letters", confirmed)
    decision = comparison.decision("new")
    assert (decision.action, decision.requests) == (action, requests)
    assert ("three letters" in decision.reason) == (not confirmed and action != REJECT)
    assert comparison.decision("it") is None
    assert comparison.to_json()["decisions"]["new"]["action"] == action
    chosen = replace(comparison, chosen_on="the requests chose its step")
    assert chosen.decision("new").action == UNCLEAR


@pytest.mark.parametrize(("gain", "said"), [(0.39, False), (0.41, True)])
def test_a_gain_over_the_logged_ranking_that_is_hardly_possible_is_to_be_checked(gain, said):
    def reason(against=LOGGED_RANKING, metric=METRIC, **options):
        found = value(gain, gain - 0.05, gain + 0.05, **options)
        rankers = {against: {metric: RankerValue(Mean(1, 0, 2, 400))}, "new": {metric: found}}
        return RankerComparison(rankers, against, 400).decision("new").reason

    assert ("a feature knows the feedback" in reason()) == said
    assert ("ultr describe" in reason(p=0.07, worse=0.04)) == said
    assert "knows" not in reason(against="another ranker") + reason(metric="ndcg@10")
    assert "knows" not in reason(clicks=10.0)  # nothing is decided


def test_rankers_that_do_not_differ_need_no_requests():
    same = PairedTest(0.0, 0.0, 0.0, 1.0, 400)
    assert requests_needed(same, 400) is None
    rankers = {"it": {METRIC: RankerValue(Mean(1, 0, 2, 400))}, "new": {METRIC: value(0, 0, 0, p=1.0, worse=0.5)}}
    assert "no difference was found" in RankerComparison(rankers, "it", 400).decision("new").reason


def test_the_examination_of_a_run_is_used_where_the_log_confirms_none(log, rankers):
    run = Examination.known({k + 1: float(theta) for k, theta in enumerate(THETA)})
    others = [(tuple(str(k + 1) for k in range(len(THETA))), run)]
    found = compare_rankers(log, rankers, [METRIC], label="click", others=others)
    known = compare_rankers(log, rankers, [METRIC], label="click", known=KNOWN)
    assert found.confirmed
    assert found.rankers["first"][METRIC].mean == known.rankers["first"][METRIC].mean
    few = [(others[0][0][:3], run.at(others[0][0], {1: "1", 2: "2", 3: "3"}))]
    assert not compare_rankers(log, rankers, [METRIC], label="click", others=few).confirmed


@pytest.mark.parametrize(("test", "halves"), [(400, 2), (300, 2), (200, 1)])
def test_no_request_is_evaluated_by_a_model_that_was_fitted_to_it(log, rankers, monkeypatch, test, halves):
    made, fit = [], comparing.fit_off_policy_model

    def recorded(train, **options):
        model = fit(train, **options)
        made.append((set(train.request_ids.to_pylist()), model))
        return model

    monkeypatch.setattr(comparing, "fit_off_policy_model", recorded)
    chosen = np.arange(len(log)) < test
    found = compare_rankers(log, rankers, [METRIC], label="click", test=chosen)
    assert found.requests == test
    assert len(made) == halves
    parts = [set(range(len(log))) - fitted for fitted, _ in made]
    assert set.union(*parts) == set(range(test))
    assert sum(map(len, parts)) == test
    expected = 0.0
    for part, (_, model) in zip(parts, made, strict=True):
        of_part = log.select(sorted(part))
        rows = np.repeat(np.isin(np.arange(len(log)), sorted(part)), log.lengths)
        expected += model.estimator(of_part, METRIC, label="click").per_request(rankers["first"][rows]).sum()
    assert found.rankers["first"][METRIC].mean.mean == pytest.approx(expected / test)
    assert found.theta["3"] == pytest.approx(np.mean([model.theta["3"] for _, model in made]))


def test_impossible_comparisons_are_errors(log, rankers):
    with pytest.raises(OptionError, match="'best' is not among the rankers"):
        compare_rankers(log, rankers, [METRIC], label="click", against="best")
    with pytest.raises(DataError, match="no test requests"):
        compare_rankers(log, rankers, [METRIC], label="click", test=np.zeros(len(log), bool))
    with pytest.raises(DataError, match="needs at least two requests"):
        compare_rankers(log.select([0]), {"zero": np.zeros(5)}, [METRIC], label="click")
