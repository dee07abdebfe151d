from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ultr.datasets.users import User
from ultr.errors import DataError, OptionError
from ultr.evaluation.metrics import METRICS, parse_metric
from ultr.evaluation.scores import ScoreMetrics, evaluate_scores, holm, mean_with_interval, paired_test


def test_metrics_of_a_log_are_in_the_order_of_its_requests(shown_log):
    scores = np.random.default_rng(0).normal(size=shown_log.rows)
    results = evaluate_scores(shown_log, scores, ["precision@1", "mrr", "reward@3"], user=User())
    for i in range(len(shown_log)):
        rows = slice(shown_log.offsets[i], shown_log.offsets[i + 1])
        ranked = shown_log.relevance[rows][np.argsort(-scores[rows])]
        assert results["precision@1"][i] == float(ranked[0] > 0)
        first = np.flatnonzero(ranked > 0)
        assert results["mrr"][i] == pytest.approx(1 / (first[0] + 1) if len(first) else 0)


def test_every_metric_of_a_log_equals_a_loop_over_its_requests(shown_log):
    scores = np.round(np.random.default_rng(1).normal(size=shown_log.rows), 1)
    user, label = User(eta=0.5, epsilon=0.3), "click + 2 * (dwell > 20)"
    names = ["ndcg@3", "dcg", "arp", "mrr@2", "precision@2", "reward@3"]
    results = evaluate_scores(shown_log, scores, names, user=user, label=label)
    for i in range(len(shown_log)):
        rows = slice(shown_log.offsets[i], shown_log.offsets[i + 1])
        s, y = torch.from_numpy(scores[rows]), torch.from_numpy(shown_log.relevance[rows]).double()
        for name in names:
            metric, k = parse_metric(name)
            extra = {"user": user, "label": label} if metric == "reward" else {}
            assert results[name][i] == pytest.approx(METRICS[metric](s, y, k=k, **extra).item(), rel=1e-5), name


@pytest.mark.parametrize("weighted", [False, True])
def test_means_on_a_device_are_those_of_the_requests(shown_log, weighted):
    rng = np.random.default_rng(0)
    weights = rng.uniform(0, 2, len(shown_log)).astype(np.float32) if weighted else None
    log, scores = replace(shown_log, weights=weights), rng.normal(size=shown_log.rows).astype(np.float32)
    metrics = ["ndcg@5", "reward@10", "mrr"]
    means = ScoreMetrics(log, metrics, user=User(), keep=True)
    for values in (scores, scores.round()):  # with ties
        found = means.means(torch.from_numpy(values))
        for name, expected in evaluate_scores(log, values, metrics, user=User()).items():
            assert float(found[name]) == pytest.approx(np.average(expected, weights=weights), rel=1e-6)
    scores[3] = np.nan
    assert all(torch.isnan(value) for value in means.means(torch.from_numpy(scores)).values())


def test_feedback_metrics_use_the_label_of_the_logged_actions(shown_log):
    clicks = (np.random.default_rng(2).random(shown_log.rows) < 0.3).astype(np.float32)
    log = replace(shown_log, actions={"click": clicks}, relevance=None)
    scores = np.random.default_rng(3).normal(size=log.rows)
    results = evaluate_scores(log, scores, "feedback-ndcg@5,feedback-mrr", label="3 * click")
    as_truth = evaluate_scores(replace(log, relevance=clicks), scores, ["ndcg@5", "mrr"])
    np.testing.assert_allclose(results["feedback-ndcg@5"], as_truth["ndcg@5"], atol=1e-6)
    np.testing.assert_allclose(results["feedback-mrr"], as_truth["mrr"], atol=1e-6)
    with pytest.raises(OptionError, match="feedback-reward does not exist"):
        evaluate_scores(log, scores, "feedback-reward@3", label="click")


def test_weights_and_confidence_affect_tests_and_intervals():
    rng = np.random.default_rng(5)
    a, b, weights = rng.normal(size=40), rng.normal(0.3, 1, size=40), rng.uniform(1, 5, 40)
    assert paired_test(a, b, weights).difference == pytest.approx(np.average(a - b, weights=weights))
    assert paired_test(a, b, weights).p != pytest.approx(paired_test(a, b).p)
    wide, narrow = (mean_with_interval(a, confidence=c) for c in (0.99, 0.8))
    assert wide.high > narrow.high
    for wrong in (0.0, 95):
        with pytest.raises(OptionError, match="between 0 and 1"):
            mean_with_interval(a, confidence=wrong)
    with pytest.raises(DataError, match="at least one must be positive"):
        mean_with_interval(a, np.zeros(40))
    assert mean_with_interval(a[:1]).high == np.inf


def test_scores_and_metrics_that_do_not_fit_are_rejected(shown_log):
    scores = np.zeros(shown_log.rows)
    with pytest.raises(DataError, match="scores must be numbers, one for each"):
        evaluate_scores(shown_log, scores[1:])
    with pytest.raises(DataError, match="1 NaN"):
        evaluate_scores(shown_log, np.where(np.arange(shown_log.rows) == 3, np.nan, 0))
    with pytest.raises(DataError, match="no true labels"):
        evaluate_scores(replace(shown_log, relevance=None), scores)
    with pytest.raises(OptionError, match="needs a simulated user"):
        evaluate_scores(shown_log, scores, ["reward@10"])


def test_the_interval_is_students():
    values = np.random.default_rng(1).normal(3, 2, 50)
    result = mean_with_interval(values)
    low, high = stats.t.interval(0.95, 49, values.mean(), stats.sem(values))
    assert (result.mean, result.low, result.high) == pytest.approx((values.mean(), low, high), rel=1e-12)
    assert str(result) == f"{values.mean():.4f} [{low:.4f}, {high:.4f}]"


def test_the_interval_covers_the_mean_with_its_confidence():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(2000):
        weights = rng.choice([1.0, 4.0], 60)
        result = mean_with_interval(rng.exponential(size=60) * np.ones(60), weights)
        covered += result.low <= 1.0 <= result.high
    assert 0.90 < covered / 2000 < 0.97  # skewed values, unequal weights, 60 requests


def test_whole_weights_count_like_repeated_requests_for_the_mean():
    values, weights = np.array([1.0, 5.0, 2.0]), np.array([2.0, 1.0, 3.0])
    assert mean_with_interval(values, weights).mean == pytest.approx(np.repeat(values, [2, 1, 3]).mean())


def test_holms_method_agrees_with_a_calculation_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holms_method_rejects_what_its_definition_rejects(p):
    order, rejected = sorted(range(len(p)), key=lambda i: p[i]), set()
    for rank, i in enumerate(order):
        if p[i] * (len(p) - rank) >= 0.05:
            break
        rejected.add(i)
    assert {i for i, value in enumerate(holm(p)) if value < 0.05} == rejected


def test_the_paired_test_is_students():
    rng = np.random.default_rng(3)
    a = rng.normal(size=80)
    b = a + rng.normal(0.2, 0.5, size=80)
    result, other = paired_test(a, b), stats.ttest_rel(a, b)
    assert result.p == pytest.approx(other.pvalue, rel=1e-9)
    assert (result.low, result.high) == pytest.approx(tuple(other.confidence_interval(0.95)), rel=1e-9)
    assert result.significant
    assert result.difference == pytest.approx((a - b).mean())


def test_constant_differences_do_not_divide_by_zero():
    a = np.array([1.0, 2.0, 3.0])
    assert paired_test(a, a).p == 1.0
    assert paired_test(a + 1, a).p == 0.0
    assert paired_test(a[:1] + 1, a[:1]).p == 1.0
    with pytest.raises(DataError, match="same requests"):
        paired_test(a, a[1:])
    with pytest.raises(DataError):
        mean_with_interval(np.array([]))
