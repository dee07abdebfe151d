"""The likelihood of feedback, given scores, that chooses steps: against a search over the slope, request by request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from conftest import make_shown_log
from ultr.errors import OptionError
from ultr.evaluation.comparing import plausible_estimators
from ultr.evaluation.off_policy import Likelihood
from ultr.evaluation.scores import LIKELIHOOD, judging_metric, parse_any_metric

THETA = {k: 1 / k for k in range(1, 21)}


def feedback(seed: int, *, requests: int = 40, weighted: bool = False, slope: float = 1.0):
    """Return a log whose clicks and dwell times follow scores, and these scores."""
    rng = np.random.default_rng(seed)
    log = make_shown_log(requests=requests, features=3, longest=8)
    scores = rng.normal(size=log.rows)
    theta = np.array([THETA[k] for k in log.positions])
    click = rng.random(log.rows) < np.minimum(1, theta * np.exp(slope * scores - 1))
    dwell = np.where(click, rng.gamma(2.0, 10.0, log.rows), 0).astype(np.float32)
    weights = rng.uniform(0.2, 3, len(log)).astype(np.float32) if weighted else None
    return replace(log, actions={"click": click.astype(np.float32), "dwell": dwell}, weights=weights), scores


def by_search(log, scores, label: str) -> np.ndarray:
    """Return the value of each request, by loops and a search for the slope."""
    c = np.asarray(log.actions[label], float)
    weights = np.ones(len(log)) if log.weights is None else log.weights.astype(float)

    def values(slope: float) -> np.ndarray:
        found = np.zeros(len(log))
        for request, (first, last) in enumerate(zip(log.offsets[:-1], log.offsets[1:], strict=True)):
            theta = np.array([THETA[k] for k in log.positions[first:last]])
            shares = theta * np.exp(slope * scores[first:last])
            shares, before = shares / shares.sum(), theta / theta.sum()
            found[request] = (c[first:last] * np.log(shares / before)).sum()
        return found

    best = minimize_scalar(lambda slope: -(weights * values(slope)).sum(), bounds=(0, 20), method="bounded").x
    size = (c**2).sum() / max(c.sum(), 1e-300)
    return values(best) / size if c.any() else np.zeros(len(log))


@given(seed=st.integers(0, 10**6), label=st.sampled_from(["click", "dwell"]), weighted=st.booleans())
@settings(max_examples=15)
def test_the_value_is_that_of_the_best_slope(seed, label, weighted):
    log, scores = feedback(seed, weighted=weighted)
    value = Likelihood(log, theta=THETA, label=label)
    found, expected = value.per_request(scores), by_search(log, scores, label)
    weights = np.ones(len(log)) if log.weights is None else log.weights
    assert np.average(found, weights=weights) == pytest.approx(np.average(expected, weights=weights), abs=1e-4)
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert float(value.mean(torch.from_numpy(scores))) == pytest.approx(np.average(found, weights=weights), abs=1e-9)


def test_neither_scale_nor_level_of_scores_matters():
    log, scores = feedback(0)
    value = Likelihood(log, theta=THETA, label="dwell")
    levels = np.random.default_rng(1).normal(size=len(log))[log.request_of_row] * 5
    expected = float(value.mean(torch.from_numpy(scores)))
    assert float(value.mean(torch.from_numpy(0.01 * scores + levels))) == pytest.approx(expected, abs=1e-6)


def test_scores_that_tell_nothing_or_the_opposite_have_no_value():
    log, scores = feedback(0, requests=200, slope=2.0)
    value = Likelihood(log, theta=THETA, label="click")
    for useless in (np.zeros(log.rows), -scores):
        assert float(value.mean(torch.from_numpy(useless))) == 0
    rng = np.random.default_rng(0)
    worse = [float(value.mean(torch.from_numpy(scores + noise * rng.normal(size=log.rows)))) for noise in (0, 1, 3)]
    assert worse[0] > worse[1] > worse[2] >= 0


def test_examination_explains_clicks_that_scores_need_not():
    """Scores of the position alone have a value only if examination is thought to be flat."""
    log, _ = feedback(0, requests=400, slope=0.0)
    by_position = torch.from_numpy(-np.log(log.positions.astype(float)))
    flat = Likelihood(log, theta=dict.fromkeys(THETA, 1.0), label="click").mean(by_position)
    known = Likelihood(log, theta=THETA, label="click").mean(by_position)
    assert float(known) < 0.02
    assert float(flat) > 0.1


def test_missing_scores_and_no_feedback():
    log, scores = feedback(0)
    scores[3] = np.nan
    assert np.isnan(float(Likelihood(log, theta=THETA, label="click").mean(torch.from_numpy(scores))))
    none = replace(log, actions={"click": np.zeros(log.rows, np.float32)})
    assert float(Likelihood(none, theta=THETA, label="click").mean(torch.zeros(log.rows))) == 0


def test_a_ranker_whose_step_it_chose_is_judged_by_its_reward():
    assert parse_any_metric(LIKELIHOOD) == ("likelihood", None)
    assert judging_metric(LIKELIHOOD) == "off-policy-reward@10"


def test_it_is_no_value_of_a_ranking():
    log, scores = feedback(0)
    with pytest.raises(OptionError, match=r"not a value of a ranking.*use off-policy-reward@10"):
        plausible_estimators(log, LIKELIHOOD, THETA, scores, draws=[], doubt=0, label="click")
