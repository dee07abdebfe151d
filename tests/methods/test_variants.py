"""Doubly robust estimation, and the variants of other toolboxes, against sums written out and by enumeration."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from conftest import make_shown_log
from ultr.datasets.users import User, simulate_log
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log.labels import Label
from ultr.methods import MethodInputs, make_method

POSITIONS = tuple(range(1, 13))


def inputs(**changes) -> MethodInputs:
    given = {"label": Label("click"), "features": 3, "positions": POSITIONS, "ranker_options": {"hidden": (4,)}}
    return MethodInputs(**{**given, "binary": ("click",), **changes})


def lists_of(seed: int = 0, requests: int = 30) -> Lists:
    log, _ = simulate_log(make_shown_log(requests=requests, seed=seed), User(eta=0.5), seed=seed)
    return Lists.from_log(log)


# --- Doubly robust ------------------------------------------------------------------------------------------------


class Given(nn.Module):
    """A network whose outputs are given: the logit of beta, the log of mu, and g."""

    def __init__(self, beta: float, value: float) -> None:
        super().__init__()
        self.register_buffer("given", torch.tensor([math.log(beta / (1 - beta)), math.log(value), 0.0]))

    def forward(self, features: Tensor) -> Tensor:
        return self.given.expand(*features.shape[:-1], 3)


def relevance_of(theta: float, zeta: float, beta: float, value: float, label: float, **options) -> float:
    """Return the estimate for one item with this label, if the model of relevance says beta and value."""
    given = inputs(positions=(1,), label=Label("dwell"), binary=())
    method = make_method("doubly-robust", given, **options)
    method.positions.theta.fill_(theta)
    method.positions.zeta.fill_(zeta)
    if hasattr(method.positions, "network"):
        method.positions.network = Given(beta, value)
    one = torch.ones(1, 1)
    lists = Lists(
        features=torch.zeros(1, 1, 3),
        where=one.bool(),
        weights=torch.ones(1),
        positions=one.long(),
        actions={"dwell": label * one},
    )
    return float(method.relevance(lists))


def mean_relevance(theta: float, zeta: float, true: float, model: float, **options) -> float:
    """Return the mean over clicks with P(c) = theta r + zeta (1 - r) of the estimate, if the model says `model`."""
    click = theta * true + zeta * (1 - true)
    with_click, without = (relevance_of(theta, zeta, model, 1.0, c, **options) for c in (1.0, 0.0))
    return click * with_click + (1 - click) * without


@pytest.mark.parametrize("zeta", [0.0, 0.2])
@pytest.mark.parametrize("model", [0.1, 0.3, 0.9])
def test_the_mean_of_the_estimate_is_relevance_whatever_the_model_is(zeta, model):
    trust = "clicks" if zeta else "none"
    found = mean_relevance(0.6, zeta, true=0.3, model=model, trust=trust)
    assert found == pytest.approx(0.3, rel=1e-5)


def test_with_limited_weights_the_mean_is_relevance_only_if_the_model_is_right():
    assert mean_relevance(0.05, 0.0, true=0.3, model=0.3, max_weight=2) == pytest.approx(0.3, rel=1e-5)
    model, true, theta, weight = 0.9, 0.3, 0.05, 2
    expected = model + weight * theta * (true - model)
    assert mean_relevance(theta, 0.0, true=true, model=model, max_weight=weight) == pytest.approx(expected, rel=1e-5)


def test_the_ends_are_the_model_alone_and_inverse_propensities_alone():
    for label in (0.0, 2.5):
        assert relevance_of(0.2, 0.0, 0.4, 3.0, label, estimator="dm") == pytest.approx(0.4 * 3.0)
        assert relevance_of(0.2, 0.0, 0.4, 3.0, label, estimator="ips") == pytest.approx(label / 0.2)
        expected = 1.2 + (label - 0.2 * 1.2) / 0.2
        assert relevance_of(0.2, 0.0, 0.4, 3.0, label) == pytest.approx(expected, rel=1e-5)
    assert relevance_of(0.01, 0.0, 0.4, 3.0, 2.5, estimator="ips") == pytest.approx(2.5 * 20)


def test_the_loss_is_least_squares_on_the_estimate():
    torch.manual_seed(0)
    lists, method = lists_of(), make_method("doubly-robust", inputs()).eval()
    with torch.no_grad():
        errors = torch.where(lists.where, method.score(lists.features) - method.relevance(lists), 0.0)
        expected = (lists.weights * errors.square().sum(-1)).sum() / lists.weights.sum()
        assert float(method.loss(lists)) == pytest.approx(float(expected), rel=1e-5)


def test_the_model_is_fixed_while_the_ranker_is_trained():
    method = make_method("doubly-robust", inputs()).train()
    assert method.ranker.training
    assert not method.positions.training
    method.loss(lists_of()).backward()
    assert all(parameter.grad is None for parameter in method.positions.parameters())


def test_inverse_propensities_have_no_trust():
    with pytest.raises(OptionError, match="estimator=ips"):
        make_method("doubly-robust", inputs(), estimator="ips", trust="clicks")


# --- Variants of other toolboxes ----------------------------------------------------------------------------------


def test_regression_em_of_ultra_moves_theta_by_a_twentieth_of_the_mean_posterior():
    torch.manual_seed(0)
    method = make_method("regression-em", inputs(), variant="ultra").eval()
    assert method.sampled
    assert method.positions.theta.tolist() == pytest.approx([0.9] * len(POSITIONS))
    before = method.positions.theta.tolist()
    for seed in (0, 1):
        lists = lists_of(seed)
        clicks, beta = method.clicks(lists), method.score(lists.features).sigmoid().detach()
        posteriors: dict[int, list[float]] = {k: [] for k in POSITIONS}
        for u, i in lists.where.nonzero().tolist():
            k, b = int(lists.positions[u, i]), float(beta[u, i])
            examined = 1.0 if clicks[u, i] else before[k - 1] * (1 - b) / (1 - before[k - 1] * b)
            posteriors[k].append(examined)
        method.update(lists)
        before = [
            t + 0.05 * (sum(posteriors[k]) / len(posteriors[k]) - t) for k, t in zip(POSITIONS, before, strict=True)
        ]
        assert method.positions.theta.tolist() == pytest.approx(before, rel=1e-4)


def test_regression_em_of_ultra_does_not_scale_theta():
    with pytest.raises(OptionError, match="variant=ultra"):
        make_method("regression-em", inputs(), variant="ultra", scale=0.5)


def test_released_pairwise_debiasing_moves_ratios_by_a_twentieth_of_those_of_a_batch():
    torch.manual_seed(0)
    method = make_method("pairwise-debias", inputs(), variant="released").eval()
    plus, minus = [1.0] * len(POSITIONS), [1.0] * len(POSITIONS)
    for seed in (0, 1):
        lists = lists_of(seed, requests=80)
        clicks, scores = method.clicks(lists), method.score(lists.features).detach()
        of_click, of_none, shown = ([0.0] * len(POSITIONS) for _ in range(3))
        loss = 0.0
        for u in range(len(lists)):
            items = lists.where[u].nonzero().flatten().tolist()
            for i in items:
                shown[int(lists.positions[u, i]) - 1] += 1
            for i in items:
                for j in items:
                    if clicks[u, i] and not clicks[u, j]:
                        a, b = int(lists.positions[u, i]) - 1, int(lists.positions[u, j]) - 1
                        pair = math.log1p(math.exp(-float(scores[u, i] - scores[u, j])))
                        loss += pair / (plus[a] * minus[b])
                        of_click[a] += pair / minus[b]
                        of_none[b] += pair / plus[a]
        assert float(method.loss(lists).detach()) == pytest.approx(loss / len(lists), rel=1e-4)
        method.update(lists)
        for sums, ratios, found in ((of_click, plus, method.plus), (of_none, minus, method.minus)):
            for k in range(len(POSITIONS)):
                if sums[k] > 0:
                    ratio = math.sqrt(sums[k] / shown[k] / (sums[0] / shown[0]))
                    ratios[k] = min(max(ratios[k] + 0.05 * (ratio - ratios[k]), 0.01), 100)
            assert found.tolist() == pytest.approx(ratios, rel=1e-4)
