"""Safe learning: the objectives against enumeration, and rankings that stay near the logged one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from conftest import make_shown_log
from methods.test_plackett_luce import all_ranks, lists_of, log_chances, make, numbers, sampled_gradient
from ultr.datasets.users import User
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log.labels import Label
from ultr.methods import Method, MethodInputs, make_method
from ultr.methods.plackett_luce import pl_rank

POSITIONS = [500, 3, 70]  # the second item was shown first
EXPOSURE = numbers([0.3, 0.8, 0.5])  # θ of these positions
BY_RANK = numbers([0.8, 0.5, 0.3])


# --- PRPO -------------------------------------------------------------------------------------------------------------


def clipped(ratio: float, reward: float, clip: float) -> float:
    return min(ratio, clip) * reward if reward >= 0 else max(ratio, 1 / clip) * reward


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 1.3, 2.0]), st.sampled_from(["dcg", "theta"]))
def test_prpo_clips_the_ratio_of_weights_and_has_the_gradient_of_all_rankings(seed, clip, discount):
    rng = np.random.default_rng(seed)
    scores, values = numbers(rng.normal(size=3)), numbers(rng.normal(size=3))
    by_rank = BY_RANK if discount == "theta" else 1 / torch.log2(numbers([2, 3, 4]))
    logged = by_rank[[2, 0, 1]]
    gains = [
        [clipped(float(by_rank[k] / logged[i]), float(logged[i] * values[i] / EXPOSURE[i]), clip) for k in range(3)]
        for i in range(3)
    ]
    method = make("prpo", clip=clip, discount=discount, labels="values")
    lists, ranks = lists_of([scores.tolist()], POSITIONS, values[None]), all_ranks(3)
    found, _ = method.gains(lists, ranks[:, None])
    torch.testing.assert_close(found[0], numbers(gains))
    slopes = pl_rank(scores, ranks, found[0], where=lists.where[0])
    mean = (log_chances(scores, ranks).exp()[:, None] * slopes).sum(0)
    torch.testing.assert_close(mean, finite_differences(scores, numbers(gains)), rtol=1e-6, atol=1e-8)


def finite_differences(scores: Tensor, gains: Tensor) -> Tensor:
    """Return the gradient of the expected gain by differences of its enumeration over all rankings."""
    ranks, slopes = all_ranks(3), []
    of_ranking = numbers([sum(float(gains[i, r - 1]) for i, r in enumerate(row)) for row in ranks.tolist()])
    for i in range(3):
        step = 1e-5 * torch.eye(3, dtype=torch.float64)[i]
        up, down = ((log_chances(scores + sign * step, ranks).exp() * of_ranking).sum() for sign in (1, -1))
        slopes.append((up - down) / 2e-5)
    return torch.stack(slopes)


def test_prpo_with_a_wide_clip_is_pl_rank():
    lists = lists_of([[0.4, -0.2, 0.1]], POSITIONS, [[1.0, 0.0, 1.0]])
    clipped_gradient, clipped_loss = sampled_gradient(make("prpo", clip=100), lists)
    gradient, loss = sampled_gradient(make("pl-rank"), lists)
    torch.testing.assert_close(clipped_gradient, gradient)
    assert clipped_loss == loss


def test_no_ranking_is_better_than_the_logged_one_if_the_clip_is_one():
    rng = np.random.default_rng(0)
    for _ in range(20):
        method, values = make("prpo", clip=1, labels="values"), numbers(rng.normal(size=(1, 3)))
        lists = lists_of([[0.0] * 3], POSITIONS, values)
        objectives = [float(method.gains(lists, ranks[None, None])[1]) for ranks in all_ranks(3)]
        logged = float(method.gains(lists, torch.tensor([[[3, 1, 2]]]))[1])
        assert logged == pytest.approx(max(objectives))
        if bool((values > 0).all()):
            assert sum(objective > logged - 1e-9 for objective in objectives) == 1


# --- The bound on risk ------------------------------------------------------------------------------------------------


def bound(scores: Tensor, values: Tensor, *, delta: float, requests: float) -> Tensor:
    """Return utility minus penalty, from the exposure of each item by enumeration of all rankings."""
    ranks = all_ranks(3)
    exposure = (log_chances(scores, ranks).exp()[:, None] * BY_RANK[ranks - 1]).sum(0)
    total = EXPOSURE.sum()
    new, old = exposure / exposure.sum(), EXPOSURE / total
    divergence = (old * (new / old).square()).sum()
    penalty = torch.sqrt(total / requests * (1 - delta) / delta * divergence)
    return (exposure * values / EXPOSURE).sum() - penalty


@pytest.mark.parametrize("requests", [3.0, 1000.0])
def test_the_loss_is_minus_the_bound_and_has_its_gradient(requests):
    scores, clicks = numbers([0.5, -0.3, 0.8]), numbers([1.0, 0.0, 1.0])
    method = make("safe-ipw", discount="theta", samples=40_000, delta=0.1)
    method.logged_requests.fill_(requests)
    gradient, loss = sampled_gradient(method, lists_of([scores.tolist()], POSITIONS, clicks[None]))
    scores.requires_grad_()
    exact = bound(scores, clicks, delta=0.1, requests=requests)
    torch.testing.assert_close(gradient[0], -torch.autograd.grad(exact, scores)[0], rtol=0, atol=0.02)
    assert loss == pytest.approx(-float(exact.detach()), abs=0.02)


def test_the_penalty_of_the_logged_ranking_is_that_of_no_divergence():
    method = make("safe-ipw", discount="theta", delta=0.1, samples=2)
    method.logged_requests.fill_(50.0)
    lists = lists_of([[0.0, 60.0, 30.0]], POSITIONS, [[0.0] * 3])  # the logged ranking, with certainty
    _, loss = sampled_gradient(method, lists)
    assert loss == pytest.approx((1.6 / 50 * 0.9 / 0.1) ** 0.5)


def test_the_number_of_logged_requests_is_that_of_the_log_or_of_simulated_sessions():
    log = make_shown_log(requests=30)
    ids = tuple(range(1, 13))
    inputs = MethodInputs(Label("click"), features=3, positions=ids, propensities=dict.fromkeys(ids, 0.5))
    method = make_method("safe-ipw", inputs)
    method.estimate_bias(log, user=None, sessions=7, seed=0)
    assert float(method.logged_requests) == 30
    method.estimate_bias(replace(log, weights=np.full(30, 2.0, np.float32)), user=None, sessions=7, seed=0)
    assert float(method.logged_requests) == 60
    method.estimate_bias(log, user=User(), sessions=7, seed=0)
    assert float(method.logged_requests) == 7


# --- Learning ---------------------------------------------------------------------------------------------------------


def learned_order(name: str, lists: Lists, *, requests: float = 1, **options) -> list[int]:
    """Return the order of the items of a list, first to last, by scores that are learned one by one."""
    torch.manual_seed(0)
    method: Method = make(name, **options).train()
    scores = Parameter(lists.features.clone())
    optimizer = torch.optim.Adagrad([scores], lr=0.5)
    if name == "safe-ipw":
        method.logged_requests.fill_(requests)
    for _ in range(80):
        optimizer.zero_grad()
        method.loss(replace(lists, features=scores)).backward()
        optimizer.step()
    return scores[0, :, 0].detach().argsort(descending=True).tolist()


def test_one_click_at_the_bottom_moves_a_plain_ranker_and_not_a_safe_one():
    """The first two positions have one click each, the third (θ = 0.3) one, of value 1/0.3: the largest by chance."""
    lists = lists_of([[0.0, 0.0, 0.0]], POSITIONS, [[1.0, 1.0, 1.0]])
    assert learned_order("pl-rank", lists) == [0, 2, 1]
    assert learned_order("prpo", lists, clip=1) == [1, 2, 0]
    assert learned_order("safe-ipw", lists, discount="theta") == [1, 2, 0]
    assert learned_order("safe-ipw", lists, discount="theta", requests=1e6) == [0, 2, 1]


def test_with_much_feedback_the_bound_has_the_gradient_of_ipw():
    lists = lists_of([[0.0, 0.0, 0.0]], POSITIONS, [[1.0, 1.0, 1.0]])
    method = make("safe-ipw", discount="theta")
    method.logged_requests.fill_(1e9)
    gradient, _ = sampled_gradient(method, lists)
    plain, _ = sampled_gradient(make("pl-rank", discount="theta"), lists)
    torch.testing.assert_close(gradient, plain, rtol=0, atol=1e-4)


def test_options_are_checked():
    for name, options, match in (
        ("prpo", {"clip": "0.9"}, "at least 1"),
        ("safe-ipw", {"delta": "0"}, "above 0"),
        ("safe-ipw", {"delta": "1"}, "below 1"),
        ("safe-ipw", {"samples": "1"}, "at least 2"),
        ("safe-ipw", {"cutoff": "5"}, "no option 'cutoff'"),
    ):
        with pytest.raises(OptionError, match=match):
            make(name, **options)
