"""Examination from a log: EM on tables, strata that remove confounding, and known propensities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bias.worlds import THETA as WORLD_THETA
from bias.worlds import with_rare_positions, world
from ultr.bias import examination, logging_policy
from ultr.bias.counts import Counts
from ultr.bias.estimators import fit_conditional, fit_trust
from ultr.bias.examination import Examination, estimate_examination
from ultr.bias.logging_policy import logging_score, recovered_score, share_logging_score
from ultr.datasets.users import EYE_TRACKING, TrustUser, User, simulate_log
from ultr.errors import DataError
from ultr.log import Log
from ultr.log.labels import Label
from ultr.rankers import score_rows

THETA = torch.tensor(EYE_TRACKING, dtype=torch.float64)
RELATIVE = (THETA / THETA[0]).numpy()


def binomial(shown: torch.Tensor, probability: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.binomial(shown, probability, generator=torch.Generator().manual_seed(seed))


def uneven_counts(strata: int = 200, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return impressions with relevant strata at higher positions, and the relevance of each stratum."""
    generator = torch.Generator().manual_seed(seed)
    beta = 0.05 + 0.6 * torch.rand(strata, generator=generator, dtype=torch.float64) ** 2
    tilt = torch.exp(-2 * beta[:, None] * torch.linspace(0, 1, 10, dtype=torch.float64))
    return (20_000 * tilt).round(), beta


def table(shown: torch.Tensor, clicked: torch.Tensor) -> Counts:
    """Return the cells of a table of strata by positions, without those that were never shown."""
    strata, places = shown.numpy().nonzero()
    counts = (values.numpy()[strata, places] for values in (shown, clicked))
    return Counts(strata, places, tuple(shown.shape), *counts)


def test_theta_is_estimated_if_positions_follow_relevance():
    shown, beta = uneven_counts()
    clicked = binomial(shown, THETA * beta[:, None])
    naive = clicked.sum(0) / shown.sum(0)
    fit = fit_conditional(table(shown, clicked))
    assert np.abs(fit.theta / RELATIVE - 1).max() < 0.02
    assert np.abs((naive / naive[0]).numpy() / RELATIVE - 1).max() > 0.15
    assert fit.moved < 1e-5


def test_theta_is_estimated_if_every_stratum_is_shown_a_few_times():
    """The binomial likelihood is biased here by its bound of relevance at 1; the conditional one is not."""
    generator = torch.Generator().manual_seed(0)
    strata = 40_000
    beta = 0.3 + 0.6 * torch.rand(strata, generator=generator, dtype=torch.float64)
    shown = torch.randint(0, 2, (strata, 10), generator=generator).double()
    fit = fit_conditional(table(shown, binomial(shown, THETA * beta[:, None])))
    assert np.abs(fit.theta / RELATIVE - 1).max() < 0.05


def test_trust_is_recovered_up_to_an_affine_map_of_relevance():
    """P = α_k β + ζ_k is invariant to an affine map of β: α is identified up to scale, ζ/α up to shift and scale."""
    shown, beta = uneven_counts()
    shown = 20 * shown
    k = torch.arange(1.0, 11, dtype=torch.float64)
    user = TrustUser()
    plus, minus = THETA * user.trust(k), THETA * user.mistrust(k)
    found = fit_trust(table(shown, binomial(shown, plus * beta[:, None] + minus * (1 - beta[:, None]))))
    slope, true_slope = found.theta - found.zeta, (plus - minus).numpy()
    np.testing.assert_allclose(slope / slope[0], true_slope / true_slope[0], rtol=0.05)

    def standardised(values):
        return (values - values[-1]) / (values[0] - values[-1])

    np.testing.assert_allclose(standardised(found.zeta / slope), standardised(minus.numpy() / true_slope), atol=0.01)
    assert found.zeta.min() == pytest.approx(0, abs=1e-9)
    assert found.theta.max() == pytest.approx(1)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), strata=st.integers(1, 6), positions=st.integers(1, 5), most=st.integers(0, 50))
def test_any_table_gives_probabilities(seed, strata, positions, most):
    generator = torch.Generator().manual_seed(seed)
    shown = torch.randint(0, most + 1, (strata, positions), generator=generator).double()
    clicked = (torch.rand(strata, positions, generator=generator) * (shown + 1)).floor().minimum(shown)
    found = fit_trust(table(shown, clicked), iterations=300)
    for values in (found.theta, found.zeta, found.beta):
        assert np.isfinite(values).all()
        assert ((values >= 0) & (values <= 1)).all()
    assert (found.theta[shown.sum(0).numpy() == 0] == 1).all()
    theta = fit_conditional(table(shown, clicked)).theta
    assert (theta[np.isfinite(theta)] > 0).all()


def confounded_log(requests: int = 3000, seed: int = 0, *, linear: bool = True):
    """A log of ten items in the order of a ranker that knows half of the relevance, linear in the features or not."""
    rng = np.random.default_rng(seed)
    log = Log(
        features=rng.normal(size=(10 * requests, 4)).astype(np.float32),
        offsets=10 * np.arange(requests + 1),
        request_ids=pa.array([f"r{i}" for i in range(requests)]),
        feature_names=("f0", "f1", "f2", "f3"),
    )
    known = log.features[:, 0] if linear else log.features[:, 0] * log.features[:, 3]
    worth = known + log.features[:, 1]
    grades = np.clip(np.round(1.5 + 1.2 * worth + 0.5 * rng.normal(size=len(worth))), 0, 4).astype(np.float32)
    logged = known + 0.3 * log.features[:, 2]
    order = np.argsort(-logged.reshape(requests, 10), axis=1).argsort(axis=1) + 1
    return replace(log, relevance=grades, positions=order.reshape(-1).astype(np.int64)), logged


def largest_error(log: Log, seed: int = 0) -> float:
    found = estimate_examination(log, Label("click"), user=User(dwell=None), sessions=500_000, seed=seed)
    return float(np.abs(found.theta / found.theta[0] / RELATIVE - 1).max())


def test_the_logging_score_is_recovered_from_the_order_alone(monkeypatch):
    log, logged = confounded_log()
    monkeypatch.setattr(logging_policy, "_network_score", lambda *_: pytest.fail("a linear order needs no network"))
    found = recovered_score(log)
    assert np.corrcoef(found.score, logged)[0, 1] > 0.99
    assert found.explained > 0.9


@pytest.mark.long
def test_an_order_that_is_not_linear_is_recovered_by_a_network(monkeypatch):
    log, logged = confounded_log(linear=False)
    score = recovered_score(log)
    assert np.corrcoef(score.score, logged)[0, 1] > 0.9
    monkeypatch.setattr(examination, "logging_score", lambda *_, **__: score)
    error = largest_error(log)
    assert error < 0.15
    monkeypatch.undo()
    monkeypatch.setattr(logging_policy, "MUCH_OPEN", np.inf)
    assert abs(np.corrcoef(recovered_score(log).score, logged)[0, 1]) < 0.5
    assert largest_error(log) > 2 * error


def test_a_network_that_explains_no_more_is_not_used(monkeypatch):
    log, _ = confounded_log(requests=800)
    rng = np.random.default_rng(1)
    shuffled = replace(log, positions=np.concatenate([rng.permutation(10) + 1 for _ in range(len(log))]))
    tried = []
    original = logging_policy._network_score
    monkeypatch.setattr(logging_policy, "NETWORK_STEPS", 100)
    monkeypatch.setattr(logging_policy, "_network_score", lambda *given: tried.append(original(*given)) or tried[-1])
    found = recovered_score(shuffled)
    assert len(tried) == 1  # no score explains a random order
    monkeypatch.setattr(logging_policy, "MUCH_OPEN", np.inf)
    assert abs(found.explained) < 0.05
    np.testing.assert_array_equal(found.score, recovered_score(shuffled).score)


@pytest.mark.parametrize("network", [False, True])
def test_a_shared_logging_score_is_read_back_and_only_for_the_same_log(tmp_path, monkeypatch, network):
    log, _ = confounded_log(requests=800, linear=not network)
    monkeypatch.setattr(logging_policy, "NETWORK_STEPS", 100)
    monkeypatch.setattr(logging_policy, "CLEARLY_MORE", -10.0 if network else 10.0)
    share_logging_score(log, tmp_path)
    made = logging_score(log)
    again, other = replace(log), replace(log, positions=log.positions[::-1].copy())
    for each in (again, other):
        share_logging_score(each, tmp_path)
    monkeypatch.setattr(logging_policy, "recovered_score", lambda *_, **__: pytest.fail("it was made before"))
    found = logging_score(again)
    np.testing.assert_array_equal(found.score, made.score)
    assert found.explained == made.explained
    assert type(found.ranker) is type(made.ranker)
    np.testing.assert_array_equal(score_rows(found.ranker, log.features), made.score)
    with pytest.raises(pytest.fail.Exception):
        logging_score(other)


@pytest.mark.long
@pytest.mark.parametrize("shuffled", [False, True])
def test_theta_is_recovered_from_lists_in_a_rankers_order_and_in_random_order(shuffled):
    log, _ = confounded_log(requests=5000)
    if shuffled:
        rng = np.random.default_rng(1)
        log = replace(log, positions=np.concatenate([rng.permutation(10) + 1 for _ in range(len(log))]))
    errors = [largest_error(log, seed) for seed in range(3 if shuffled else 5)]
    assert np.mean(errors) < (0.05 if shuffled else 0.15), errors


def test_clicks_of_a_log_and_items_that_recur_are_used():
    log, _ = confounded_log(requests=4000)
    drawn, _ = simulate_log(log, User(), seed=3)
    found = estimate_examination(drawn, Label("click"))
    assert float(found.impressions.sum()) == drawn.rows
    assert float(found.clicks.sum()) == drawn.actions["click"].sum()
    items = np.random.default_rng(0).integers(0, 50, drawn.rows)
    by_item = estimate_examination(replace(drawn, item_ids=items), Label("click"), theta_from="items")
    assert by_item.strata == 50
    with pytest.raises(DataError, match="item ids"):
        estimate_examination(replace(drawn, item_ids=None), Label("click"), theta_from="items")
    with pytest.raises(DataError, match="needs positions"):
        estimate_examination(replace(drawn, positions=None), Label("click"))


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("weight", [None, 0.001])
def test_positions_with_two_impressions_do_not_rule_theta(trust, weight, monkeypatch):
    """Their clicks made θ largest at position 41, so that θ was below 0.4 at position 1."""
    monkeypatch.setattr(logging_policy, "MUCH_OPEN", np.inf)
    log = with_rare_positions(world("random", requests=3000, features=3))
    weights = None if weight is None else np.full(len(log), weight, np.float32)
    found = estimate_examination(replace(log, weights=weights), Label("click"), trust=trust)
    assert found.positions == tuple(range(1, 42))
    assert found.theta[0] == pytest.approx(1)
    np.testing.assert_allclose(found.theta[5:], found.theta[4], rtol=1e-6)
    slope = (found.theta - found.zeta)[:5]
    np.testing.assert_allclose(slope / slope[0], WORLD_THETA / WORLD_THETA[0], rtol=0.25)


def test_rare_items_at_a_position_are_pooled_by_item_too():
    """Position 5 has clicks, but hardly any on items that were shown elsewhere."""
    log = world("random", requests=3000)
    items = np.array(log.item_ids)
    alone = (log.positions == 5) & (np.arange(log.rows) > 400)
    items[alone] = items.max() + 1 + np.arange(alone.sum())
    found = estimate_examination(replace(log, item_ids=items, context={}), Label("click"), theta_from="items")
    assert found.theta[4] == found.theta[3]


def test_request_weights_count_like_repeated_requests():
    log, _ = confounded_log(requests=400)
    drawn, _ = simulate_log(log, User(), seed=3)
    twice = drawn.select(np.repeat(np.arange(400), 2))
    weighted = replace(drawn, weights=np.full(400, 2.0, np.float32))
    a, b = (estimate_examination(x, Label("click")) for x in (twice, weighted))
    np.testing.assert_allclose(a.clicks, b.clicks)
    np.testing.assert_allclose(a.theta, b.theta, rtol=0.3)  # the score is learned from other rows


# --- The θ that a ranker corrects by ----------------------------------------------------------------------------------


def estimated(theta, covariance) -> Examination:
    zeros = np.zeros(len(theta))
    places = tuple(range(1, len(theta) + 1))
    given = {"moved": 0.0, "strata": 1, "covariance": covariance}
    return Examination(places, np.array(theta), zeros, zeros, zeros, **given)


def test_a_ranker_corrects_less_by_what_is_less_sure():
    """log θ has the posterior mean with the prior N(0, 1), here by draws of the prior, weighted by their fit."""
    theta, errors = np.array([0.8, 0.4, 0.08, 0.08]), np.array([0.0, 0.0, 0.3, 1.0])
    found = estimated(theta, np.diag(errors**2)).cautious().theta
    np.testing.assert_allclose(found[:2], theta[:2])
    drawn = np.random.default_rng(0).normal(size=400_000)
    for place in (2, 3):
        fit = np.exp(-0.5 * ((np.log(theta[place] / theta[0]) - drawn) / errors[place]) ** 2)
        assert found[place] == pytest.approx(theta[0] * np.exp((drawn * fit).sum() / fit.sum()), rel=0.02)
    assert theta[2] < found[2] < found[3] < theta[0]


def test_the_error_is_that_relative_to_the_largest_theta():
    common = 0.5 * np.ones((3, 3))  # all move together, which changes no ratio
    estimate = estimated([0.9, 0.5, 0.1], common)
    np.testing.assert_allclose(estimate.cautious().theta, estimate.theta)
    assert estimated([0.9, 0.5, 0.1], None).cautious().theta[2] == 0.1
    assert np.isfinite(estimated([0.9, 0.0, 0.1], np.eye(3)).cautious().theta).all()
    known = Examination.known({1: 1.0, 2: 0.3})
    assert known.cautious() is known
