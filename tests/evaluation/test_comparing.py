"""Several rankers under one θ: their true order, which requests θ is estimated from, and the tests between them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from bias.worlds import THETA, world
from ultr.datasets.users import make_user
from ultr.errors import DataError, OptionError
from ultr.evaluation import comparing
from ultr.evaluation.comparing import LOGGED_RANKING, compare_rankers, logged_scores, other_examinations
from ultr.evaluation.scores import evaluate_scores, holm

METRIC = "off-policy-reward@5"
KNOWN = {str(k + 1): float(theta) for k, theta in enumerate(THETA)}


def _benchmark():
    path = Path(__file__).parents[2] / "benchmarks" / "judgement.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_comparisons", path)
    module = importlib.util.module_from_spec(spec)
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
    log, rankers = benchmark.world(4000, user, seed=5)
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
    assert found.known
    assert other_examinations(found) == {}  # θ is not in doubt
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
        "source": "estimated from the log",
        "confirmed": found.confirmed,
    }


def test_an_examination_from_features_alone_has_alternatives(log, rankers):
    found = compare_rankers(log, rankers, [METRIC], label="click")
    assert not found.confirmed
    less, more = other_examinations(found).values()
    for slot, theta in found.theta.items():
        assert less[slot] == pytest.approx(theta**0.5)
        assert more[slot] == pytest.approx(theta**1.5)


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
        expected += model.value(of_part, rankers["first"][rows], METRIC, label="click").per_request.sum()
    assert found.rankers["first"][METRIC].mean.mean == pytest.approx(expected / test)
    assert found.theta["3"] == pytest.approx(np.mean([model.theta["3"] for _, model in made]))


def test_impossible_comparisons_are_errors(log, rankers):
    with pytest.raises(OptionError, match="'best' is not among the rankers"):
        compare_rankers(log, rankers, [METRIC], label="click", against="best")
    with pytest.raises(DataError, match="no test requests"):
        compare_rankers(log, rankers, [METRIC], label="click", test=np.zeros(len(log), bool))
    with pytest.raises(DataError, match="needs at least two requests"):
        compare_rankers(log.select([0]), {"zero": np.zeros(5)}, [METRIC], label="click")
