"""PL-Rank: its gradient against the enumeration of all rankings, and the losses of methods that use it."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log.labels import Label
from ultr.methods import METHODS, Method, MethodInputs, make_method
from ultr.methods.plackett_luce import PlackettLuce, gains_at, pl_rank

IDS = (3, 70, 500, 1200)
THETA = dict(zip(IDS, (0.8, 0.5, 0.3, 0.1), strict=True))
NAMES = [name for name, method in METHODS.items() if issubclass(method, PlackettLuce)]


class FirstFeature(nn.Module):
    """A ranker whose score is a feature, so that a test can set it and compute its gradient."""

    def forward(self, features: Tensor) -> Tensor:
        return features[..., 0]


def make(name: str, **options) -> Method:
    """Make a method in double precision that scores by the first feature, with known examination."""
    inputs = MethodInputs(Label("click"), features=1, positions=IDS, propensities=THETA, binary=("click",))
    method = make_method(name, inputs, **{"max_weight": "none", **options})
    method.ranker = FirstFeature()
    method.double().positions.theta.copy_(numbers(list(THETA.values())))
    return method


def numbers(values) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def lists_of(scores, positions, clicks, *, where=None, weights=None) -> Lists:
    scores = numbers(scores)
    return Lists(
        features=scores[..., None],
        where=torch.ones_like(scores, dtype=torch.bool) if where is None else torch.as_tensor(where),
        weights=numbers([1.0] * len(scores) if weights is None else weights),
        positions=torch.as_tensor(positions).expand(scores.shape).clone(),
        actions={"click": numbers(clicks)},
    )


def all_ranks(items: int) -> Tensor:
    """Return the ranks of all rankings of some items [rankings, items]."""
    return torch.tensor([[order.index(i) + 1 for i in range(items)] for order in permutations(range(items))])


def log_chances(scores: Tensor, ranks: Tensor) -> Tensor:
    """Return log P of each ranking by the Plackett-Luce model, as the sum over ranks of log softmax."""
    total = []
    for ranking in ranks.tolist():
        order = sorted(range(len(ranking)), key=ranking.__getitem__)
        total.append(sum(scores[i] - scores[order[k:]].logsumexp(0) for k, i in enumerate(order)))
    return torch.stack(total)


def gain_of(gains: Tensor, ranks: Tensor) -> Tensor:
    """Return Σ_i G_i(rank_i) of each ranking, summed by hand."""
    cutoff = gains.shape[-1]
    sums = [sum(gains[i, r - 1] for i, r in enumerate(row) if r <= cutoff) for row in ranks.tolist()]
    return torch.stack([torch.as_tensor(total, dtype=gains.dtype) for total in sums])


def exact_gradient(scores: Tensor, gains: Tensor) -> Tensor:
    """Return the gradient of the expected gain, by enumeration of all rankings."""
    scores, ranks = scores.detach().requires_grad_(), all_ranks(len(scores))
    expected = (log_chances(scores, ranks).exp() * gain_of(gains, ranks)).sum()
    return torch.autograd.grad(expected, scores)[0]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_the_mean_of_the_gradient_over_all_rankings_is_exact(seed, items, cutoff, baseline):
    rng = np.random.default_rng(seed)
    scores, gains = numbers(2 * rng.normal(size=items)), numbers(rng.normal(size=(items, min(cutoff, items))))
    ranks, where = all_ranks(items), torch.ones(items, dtype=torch.bool)
    slopes = pl_rank(scores, ranks, gains, where=where, baseline=baseline)
    mean = (log_chances(scores, ranks).exp()[:, None] * slopes).sum(0)
    torch.testing.assert_close(mean, exact_gradient(scores, gains), rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6))
def test_without_a_baseline_it_is_the_sum_that_the_paper_states(seed, items, cutoff):
    rng = np.random.default_rng(seed)
    cutoff = min(cutoff, items)
    scores, value = rng.normal(size=items), rng.random(items)
    discount = 1 / np.log2(1 + np.arange(1, cutoff + 1))
    order = rng.permutation(items)
    ranks = np.argsort(order) + 1
    placed = [discount[k] * value[order[k]] for k in range(cutoff)]
    expected = []
    for i in range(items):
        total = sum(placed[ranks[i] :])  # the items after this one
        for k in range(min(ranks[i], cutoff)):
            chance = np.exp(scores[i]) / np.exp(scores[order[k:]]).sum()
            total += chance * (discount[k] * value[i] - sum(placed[k:]))
        expected.append(total)
    gains = numbers(discount * value[:, None])
    where = torch.ones(items, dtype=torch.bool)
    slopes = pl_rank(numbers(scores), torch.tensor(ranks)[None], gains, where=where, baseline=False)[0]
    torch.testing.assert_close(slopes, numbers(expected))


def test_the_variance_is_below_that_of_reinforce_and_lower_with_a_baseline():
    rng = np.random.default_rng(0)
    ranks, where = all_ranks(4), torch.ones(4, dtype=torch.bool)
    for _ in range(5):
        scores = numbers(rng.normal(size=4)).requires_grad_()
        gains = numbers(rng.random((4, 1)) / np.log2(1 + np.arange(1, 5)))
        logs = log_chances(scores, ranks)
        rows = [torch.autograd.grad(log, scores, retain_graph=True)[0] for log in logs]
        chance, fixed = logs.detach().exp()[:, None], scores.detach()
        estimates = [torch.stack(rows) * gain_of(gains, ranks)[:, None]]  # REINFORCE: gradient of log P times gain
        estimates += [pl_rank(fixed, ranks, gains, where=where, baseline=baseline) for baseline in (False, True)]
        means = [(chance * each).sum(0) for each in estimates]
        reinforce, plain, lowest = (
            float((chance * (each - mean).square()).sum()) for each, mean in zip(estimates, means, strict=True)
        )
        assert lowest < plain < reinforce


def test_scores_of_any_size_give_finite_gradients():
    scores = torch.tensor([3e4, -3e4, 0.0, 100.0, 99.0])
    gains = torch.rand(5, 5, generator=torch.Generator().manual_seed(0))
    slopes = pl_rank(scores, all_ranks(5), gains, where=torch.ones(5, dtype=torch.bool))
    assert torch.isfinite(slopes).all()
    in_double = pl_rank(scores.double(), all_ranks(5), gains.double(), where=torch.ones(5, dtype=torch.bool))
    torch.testing.assert_close(slopes.double(), in_double, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_padding_of_lists_has_no_gradient_and_changes_no_other(name):
    scores, positions, clicks = [[0.3, -0.4, 1.1]], [70, 3, 500], [[1.0, 0.0, 1.0]]
    ranks = all_ranks(3)[:, None]
    method = make(name)
    lists = lists_of(scores, positions, clicks)
    gains, objective = method.gains(lists, ranks)
    slopes = pl_rank(lists.features[..., 0], ranks, gains, where=lists.where)
    wide = lists_of([[0.3, torch.nan, -0.4, 1.1, 7.0]], [70, 3, 3, 500, 70], [[1.0, 1.0, 0.0, 1.0, 1.0]])
    wide = replace(wide, where=torch.tensor([[True, False, True, True, False]]))
    padded = torch.full((6, 1, 5), 4)
    padded[..., [0, 2, 3]], padded[..., 4] = ranks, 5
    more, same = method.gains(wide, padded)
    clean = wide.features[..., 0].masked_fill(~wide.where, 0.0)
    wider = pl_rank(clean, padded, more, where=wide.where)
    torch.testing.assert_close(wider[..., [0, 2, 3]], slopes)
    torch.testing.assert_close(same, objective)
    assert not wider[..., [1, 4]].any()


def sampled_gradient(method: Method, lists: Lists) -> tuple[Tensor, float]:
    """Return the gradient of the scores in training mode, and the loss."""
    torch.manual_seed(0)
    features = lists.features.clone().requires_grad_()
    loss = method.train().loss(replace(lists, features=features))
    loss.backward()
    return features.grad[..., 0], float(loss.detach())


@pytest.mark.parametrize("discount", ["dcg", "theta"])
def test_the_loss_is_minus_the_expected_gain_and_has_its_gradient(discount):
    """Expected DCG, or expected clicks, of c/θ by enumeration; two requests with weights 1 and 3."""
    scores, clicks = [[0.5, -0.3, 1.2], [0.1, 0.0, -0.2]], [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    lists = lists_of(scores, [500, 3, 70], clicks, weights=[1.0, 3.0])
    method = make("pl-rank", samples=20_000, discount=discount, cutoff=2)
    gradient, loss = sampled_gradient(method, lists)
    by_rank = numbers([0.8, 0.5]) if discount == "theta" else 1 / torch.log2(numbers([2, 3]))
    total = 0.0
    for u, weight in enumerate((0.25, 0.75)):
        value = numbers(clicks[u]) / numbers([THETA[k] for k in (500, 3, 70)])
        gains = by_rank * value[:, None]
        exact = exact_gradient(numbers(scores[u]), gains)
        torch.testing.assert_close(gradient[u], -weight * exact, rtol=0, atol=0.02)
        ranks = all_ranks(3)
        total += weight * float((log_chances(numbers(scores[u]), ranks).exp() * gain_of(gains, ranks)).sum())
    assert loss == pytest.approx(-total, abs=0.02)


def test_rankings_are_drawn_from_the_plackett_luce_model():
    scores, draws = numbers([0.7, -0.5, 0.0]), 60_000
    noise = make("pl-rank", samples=draws).noise.train()
    torch.manual_seed(1)
    drawn = (scores + noise(torch.ones(1, 3, dtype=torch.bool))[:, 0]).argsort(-1, descending=True).argsort(-1) + 1
    for ranks, chance in zip(all_ranks(3), log_chances(scores, all_ranks(3)).exp().tolist(), strict=True):
        share = float((drawn == ranks).all(-1).float().mean())
        assert abs(share - chance) < 3.9 * (chance * (1 - chance) / draws) ** 0.5


@pytest.mark.parametrize("name", NAMES)
def test_no_clicks_move_nothing_but_the_penalty(name):
    lists = lists_of([[0.5, -0.3, 1.2]], [500, 3, 70], [[0.0, 0.0, 0.0]])
    gradient, loss = sampled_gradient(make(name), lists)
    if name == "safe-ipw":
        assert gradient[0, 1] < 0  # the first item of the logged ranking moves up
        assert loss > 0
    else:
        assert not gradient.any()
        assert loss == 0


@pytest.mark.parametrize("name", NAMES)
def test_without_training_the_ranking_by_score_replaces_the_samples(name):
    lists = lists_of([[0.5, -0.3, 1.2]], [500, 3, 70], [[1.0, 0.0, 1.0]])
    method = make(name).eval()
    assert torch.equal(method.loss(lists), method.loss(lists))
    assert torch.equal(method.noise(lists.where), torch.zeros(16, 1, 3))
    if name == "pl-rank":
        expected = 1 / THETA[70] + 1 / THETA[500] / np.log2(3)
        assert float(method.loss(lists)) == pytest.approx(-expected)


def test_gains_below_the_cut_off_are_zero():
    gains = numbers([[3.0, 2.0], [5.0, 4.0], [7.0, 6.0]])
    assert gains_at(gains, torch.tensor([3, 1, 2])).tolist() == [0.0, 5.0, 6.0]


def test_options_are_checked():
    for options, match in (
        ({"samples": "2.5"}, "whole number"),
        ({"samples": "0"}, "at least 1"),
        ({"cutoff": "0"}, "at least 1"),
        ({"discount": "none"}, "must be one of"),
        ({"clip": "0.5"}, "no option 'clip'"),
    ):
        with pytest.raises(OptionError, match=match):
            make("pl-rank", **options)
    assert make("pl-rank", cutoff="none").cutoff == float("inf")


# --- IPW-LambdaLoss ---------------------------------------------------------------------------------------------------


def lambdaloss(scores: list[float], values: list[float]) -> float:
    """Return Σ_i v_i Σ_j |D_i - D_j| log(1 + exp(-(s_i - s_j))) in loops."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    discount = [1 / np.log2(2 + order.index(i)) for i in range(len(scores))]
    total = 0.0
    for i, value in enumerate(values):
        for j in range(len(scores)):
            total += value * abs(discount[i] - discount[j]) * np.log1p(np.exp(scores[j] - scores[i]))
    return total


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6))
def test_the_lambdaloss_is_its_explicit_sum(seed):
    rng = np.random.default_rng(seed)
    shape = 3, 4
    where = rng.random(shape) < 0.7
    scores, clicks = np.where(where, rng.normal(size=shape), np.nan), (rng.random(shape) < 0.5).astype(float)
    positions, weights = np.stack([rng.permutation(IDS) for _ in range(3)]), rng.uniform(0.5, 2, 3)
    expected = 0.0
    for u in range(3):
        kept = np.flatnonzero(where[u])
        values = [clicks[u, i] / THETA[int(positions[u, i])] for i in kept]
        expected += weights[u] * lambdaloss(scores[u, kept].tolist(), values) / weights.sum()
    lists = lists_of(scores, positions, clicks, where=where, weights=weights)
    assert float(make("ipw-lambdaloss").loss(lists)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_mean_lambdaloss_over_examination_is_that_of_true_labels():
    """Three items with relevance 1, 0, 1 at their positions: every pattern of examination, with its probability."""
    scores, positions, relevance = [0.2, -0.1, 0.6], [70, 3, 1200], [1.0, 0.0, 1.0]
    method, mean = make("ipw-lambdaloss"), 0.0
    for examined in product([0, 1], repeat=3):
        chance = np.prod([THETA[k] if e else 1 - THETA[k] for k, e in zip(positions, examined, strict=True)])
        clicks = [r * e for r, e in zip(relevance, examined, strict=True)]
        mean += chance * float(method.loss(lists_of([scores], positions, [clicks])))
    assert mean == pytest.approx(lambdaloss(scores, relevance), rel=1e-9)


def test_the_weight_of_a_pair_is_the_change_of_dcg_if_only_the_first_has_a_gain():
    from ultr.evaluation.metrics import dcg_metric

    scores = numbers([0.9, 0.1, 0.5])
    gradient = sampled_gradient(make("ipw-lambdaloss", max_weight=1), lists_of([[0.9, 0.1, 0.5]], 3, [[0, 1.0, 0]]))[0]
    slope = 0.0
    for j in (0, 2):
        swapped = scores.clone()
        swapped[[1, j]] = scores[[j, 1]]
        gain = numbers([0.0, 1.0, 0.0])
        change = abs(float(dcg_metric(swapped, gain, gain="linear") - dcg_metric(scores, gain, gain="linear")))
        slope -= change / (1 + np.exp(float(scores[1] - scores[j])))
    assert float(gradient[0, 1]) == pytest.approx(slope)
