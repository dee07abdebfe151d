"""Rankers as Plackett-Luce policies: PL-Rank, and safe learning, which stays near the logged ranking."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Unpack

import torch
from pydantic import Field
from torch import Tensor

from ultr.evaluation.metrics import discounts_at, ranks_of
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.base import AtLeastOne, BiasInputs, MethodInputs, options_of, sortable_positions
from ultr.methods.counterfactual import IPW
from ultr.methods.losses import reduced
from ultr.methods.position_model import LEAST_THETA, means_of_all
from ultr.rankers import Gumbel

# --- PL-Rank ----------------------------------------------------------------------------------------------------------
# PL-Rank (Oosterhuis 2021): policy gradients of a ranker whose scores are the logits of a Plackett-Luce model.
#
# The gradient is PL-Rank-2, by default with a baseline that lowers its variance. PL-Rank-3 (Oosterhuis 2022) is the
# same estimate, computed by cumulative sums over ranks; the sums are written out here, because gains need not be
# products.

SAMPLES = 16  # rankings that are sampled for each list
CUT_OFF = 10  # ranks with a discount above zero


def pl_rank(scores: Tensor, ranks: Tensor, gains: Tensor, *, where: Tensor, baseline: bool = True) -> Tensor:
    """Return PL-Rank-2's gradient of E[Σ_i G_i(rank_i)] by the scores, from each sampled ranking (Oosterhuis 2021):

        R_{r+1} - B_r + Σ_{k <= r} P_k(i) (G_i(k) - R_k + B_k),   r = rank_i,   R_k = Σ of G_j(rank_j) over rank_j >= k

    P_k is the softmax of the scores over the items at rank k or below. In the paper, G_i(k) is a discount of rank k
    times a value of item i, and B is 0. Here the baseline B_k is the mean of R_k over all orders of the items at rank k
    or below. The estimate stays unbiased, because B_k does not depend on which of them is at rank k.

    `scores` are [..., items], `ranks` [samples, ..., items], from 1, and `gains` [..., items, cut-off], 0 for padding.
    """
    cutoff = gains.shape[-1]
    places = torch.arange(1, cutoff + 1, device=ranks.device)
    left = ((ranks[..., None] >= places) & where[..., None]).to(scores.dtype)
    highest = torch.where(left > 0, scores[..., None], torch.finfo(scores.dtype).min).amax(-2, keepdim=True)
    odds = left * (scores[..., None] - highest).clamp(max=0).exp()
    chance = odds / odds.sum(-2, keepdim=True).clamp(min=1)
    to_go = (left * gains_at(gains, ranks)[..., None]).sum(-2)
    after = torch.cat([to_go[..., 1:], torch.zeros_like(to_go[..., :1])], dim=-1)
    if baseline:
        reached = gains * (places <= where.sum(-1, keepdim=True))[..., None, :]  # no item is at a rank of padding
        total = reached.flip(-1).cumsum(-1).flip(-1)  # over rank k and those below
        mean = (left * total).sum(-2) / left.sum(-2).clamp(min=1)
        to_go, after = to_go - mean, after - mean
    placed = torch.where(ranks <= cutoff, after.gather(-1, (ranks - 1).clamp(max=cutoff - 1)), 0.0)
    slopes = placed + (chance * (gains - to_go[..., None, :])).sum(-1)
    return torch.where(where, slopes, 0.0)


def gains_at(gains: Tensor, ranks: Tensor) -> Tensor:
    """Return the gain of each item at its rank, from gains [..., items, cut-off]; 0 below the cut-off."""
    places = torch.arange(1, gains.shape[-1] + 1, device=ranks.device)
    return (gains * (ranks[..., None] == places)).sum(-1)


class PlackettLuce(IPW):
    """The base class of methods that maximise E[Σ_i G_i(rank_i)] of rankings by the Plackett-Luce model of the scores.

    The gradient is the mean of `pl_rank` over `samples` rankings. The loss is minus the mean gain of these rankings. If
    the module is not in training mode, the ranking by score replaces the samples, as a network without dropout
    replaces one with dropout.
    """

    cutoff = math.inf  # the last rank with a discount above zero

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        samples: AtLeastOne = SAMPLES,
        baseline: Literal["mean", "none"] = "mean",
        discount: Literal["dcg", "theta"] = "dcg",
        **options: Any,
    ) -> None:
        super().__init__(inputs, **options)
        self.noise, self.baseline, self.by_theta = Gumbel(samples), baseline == "mean", discount == "theta"

    OPTIONS = IPW.OPTIONS | options_of(__init__)

    def gains(self, lists: Lists, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gains [..., items, cut-off], given sampled ranks, and the estimated objective, a number.

        The gradient of the objective is that of the expected gain. If the objective is not linear in the exposure of
        items, the gains contain its derivative.
        """
        raise NotImplementedError

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features).masked_fill(~lists.where, 0.0)
        with torch.no_grad():
            drawn = scores + self.noise(lists.where).to(scores.dtype)
            ranks = ranks_of(drawn, where=lists.where.expand(drawn.shape))
            gains, objective = self.gains(lists, ranks)
            slopes = pl_rank(scores, ranks, gains, where=lists.where, baseline=self.baseline).mean(0)
        climbed = (slopes * scores).sum(-1)
        return reduced(climbed.detach() - climbed, lists.weights) - objective

    def discounts(self, lists: Lists) -> Tensor:
        """Return the discounts [requests, cut-off] of the ranks of a list: 1/log2(1 + k), or θ of its k-th position."""
        length = lists.where.shape[-1]
        size = int(min(length, self.cutoff))
        if not self.by_theta:
            places = torch.arange(1, size + 1, device=lists.where.device)
            return discounts_at(places, self.positions.theta.dtype).expand(len(lists.where), size)
        shown = sortable_positions(lists).sort(dim=-1).values[..., :size]
        return torch.where(shown < torch.iinfo(shown.dtype).max, self.positions.theta[self.positions.index(shown)], 0.0)

    def logged_discounts(self, lists: Lists) -> Tensor:
        """Return the discount of each item in the logged ranking; 0 below the cut-off and for padding."""
        ranks, discounts = ranks_of(-lists.shown_positions, where=lists.where), self.discounts(lists)
        return torch.where(lists.where, gains_at(discounts[..., None, :], ranks), 0.0)


class PLRank(PlackettLuce):
    """Maximise E[Σ_i D(rank_i) r̂_i], an estimate of expected DCG, with D(r) = 1/log2(1 + r) for r <= `cutoff`.

    With `discount=theta`, D(r) is θ of the r-th position of the list, which gives expected clicks.
    """

    def __init__(self, inputs: MethodInputs, *, cutoff: Literal["none"] | AtLeastOne = CUT_OFF, **options: Any) -> None:
        super().__init__(inputs, **options)
        self.cutoff = math.inf if cutoff == "none" else cutoff

    OPTIONS = PlackettLuce.OPTIONS | options_of(__init__)

    def gains(self, lists: Lists, ranks: Tensor) -> tuple[Tensor, Tensor]:
        gains = self.discounts(lists)[..., None, :] * self.relevance(lists)[..., None]
        return gains, mean_gain(gains, ranks, lists)


def mean_gain(gains: Tensor, ranks: Tensor, lists: Lists) -> Tensor:
    """Return the mean over samples and requests of Σ_i G_i(rank_i)."""
    return reduced(gains_at(gains, ranks).sum(-1).mean(0), lists.weights)


# --- Safe learning ----------------------------------------------------------------------------------------------------
# Safe counterfactual learning: rankers that leave the logged ranking only as far as the feedback supports it.
#
# Gupta, Oosterhuis and de Rijke bound the risk by the divergence of exposure (2023, "Safe deployment for counterfactual
# learning to rank with exposure-based risk minimization"), or clip the gain of each item (2024, "Practical and robust
# safety guarantees for advanced counterfactual learning to rank": PRPO). The logged ranking is the order of positions.

CLIP = 2.0  # default of ε⁺
DELTA = 0.05  # the bound holds with probability 1 - δ


class PRPO(PLRank):
    """Maximise E[Σ_i f(D(rank_i)/D⁰_i, D⁰_i c_i/θ_k)]: proximal ranking policy optimisation.

        f(x, r) = min(x, ε⁺) r  if r >= 0,  else max(x, ε⁻) r

    D⁰_i is the discount of item i in the logged ranking. ε⁺ is `clip`, and ε⁻ = 1/ε⁺. An item gains nothing more if its
    discount exceeds ε⁺ times the logged one, whatever its feedback. With `clip=1` no ranking is better than the logged
    one; a large `clip` gives `pl-rank`. An item that was logged below the cut-off never gains.

    r is the estimate r̂ by `estimator`. That of `ips` is never negative; that of `dr` is if a click was expected and did
    not come, so that an item with this feedback loses no more by a higher rank than ε⁻ allows.
    """

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        clip: Annotated[float, Field(ge=1, allow_inf_nan=False)] = CLIP,
        **options: Any,
    ) -> None:
        super().__init__(inputs, **options)
        self.clip = clip

    OPTIONS = PLRank.OPTIONS | options_of(__init__)

    def gains(self, lists: Lists, ranks: Tensor) -> tuple[Tensor, Tensor]:
        discounts, values = self.discounts(lists)[..., None, :], self.relevance(lists)[..., None]
        logged = self.logged_discounts(lists)[..., None]
        above, below = torch.minimum(discounts, self.clip * logged), torch.maximum(discounts, logged / self.clip)
        gains = torch.where(values >= 0, above, below) * values
        return gains, mean_gain(gains, ranks, lists)


class SafeIPW(PlackettLuce):
    """Maximise a lower bound of utility, which holds with probability 1 - δ if N requests were logged:

        Σ_i ω_i c_i/θ_k  -  sqrt(Z/N · (1-δ)/δ · d₂)         d₂ = Σ_i (ω_i/ω⁰_i)² ω⁰_i/Z,    Z = Σ_i ω⁰_i

    with means over requests of the first sum and of Z d₂. ω_i = E[D(rank_i)] is the exposure of item i by the learned
    policy, and ω⁰_i = D(logged rank) that of the logged ranking. d₂ is 1 if both are the same and larger otherwise.

    The bound is that of the paper if the discount D is θ (`discount=theta`). The default is that of DCG, for which the
    penalty is the same function of the exposure by DCG, without the guarantee. Each ω_i of a sample's gradient is the
    mean over the other samples, so that the gradient of d₂ is unbiased. N is the number of logged requests, or of
    simulated sessions; 1 before `estimate_bias`.
    """

    logged_requests: Tensor

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        samples: Annotated[int, Field(ge=2)] = SAMPLES,
        delta: Annotated[float, Field(gt=0, lt=1)] = DELTA,
        **options: Any,
    ) -> None:
        super().__init__(inputs, samples=samples, **options)
        self.delta = delta
        self.register_buffer("logged_requests", torch.ones(()))

    OPTIONS: ClassVar[dict[str, Any]] = {
        **{name: kind for name, kind in PlackettLuce.OPTIONS.items() if name not in ("estimator", "trust")},
        **options_of(__init__),
    }

    def estimate_bias(self, log: Log, **given: Unpack[BiasInputs]) -> None:
        super().estimate_bias(log, **given)
        logged = len(log) if log.weights is None else float(log.weights.sum())
        self.logged_requests.fill_(logged if given["user"] is None else given["sessions"])

    def gains(self, lists: Lists, ranks: Tensor) -> tuple[Tensor, Tensor]:
        discounts, values = self.discounts(lists)[..., None, :], self.relevance(lists)
        logged = self.logged_discounts(lists).clamp(min=LEAST_THETA)
        exposure, samples = gains_at(discounts, ranks), len(ranks)
        exposure = torch.where(lists.where, exposure, 0.0)
        others = (exposure.sum(0) - exposure) / (samples - 1)
        spread = (exposure * others / logged).mean(0).sum(-1)  # Z d₂, unbiased because samples are independent
        weights = lists.weights
        (mean,) = means_of_all(((weights * spread).sum().view(1), weights))
        factor = (1 - self.delta) / (self.delta * self.logged_requests)
        mean = mean[0]
        slope = torch.sqrt(factor / mean.clamp(min=1e-9))
        gains = discounts * (values - slope * others / logged)[..., None]
        utility = mean_gain(discounts * values[..., None], ranks, lists)
        return gains, utility - torch.sqrt(factor * mean.clamp(min=0))
