"""PL-Rank (Oosterhuis 2021): policy gradients of a ranker whose scores are the logits of a Plackett-Luce model.

The gradient is PL-Rank-2, by default with a baseline that lowers its variance. PL-Rank-3 (Oosterhuis 2022) is the same
estimate, computed by cumulative sums over ranks; the sums are written out here, because gains need not be products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ultr.evaluation.metrics import discounts_at, ranks_of
from ultr.lists import Lists
from ultr.methods.base import MethodInputs, one_of, whole
from ultr.methods.ipw import IPW
from ultr.methods.losses import reduced
from ultr.rankers import Gumbel

SAMPLES = 16  # rankings that are sampled for each list
CUT_OFF = 10  # ranks with a discount above zero


def cut_off(text: str) -> int | str:
    """Parse the option `cutoff`: a whole number of at least 1, or `none`."""
    return text if text == "none" else whole("cutoff", 1)(text)


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

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        **IPW.OPTIONS,
        "samples": whole("samples", 1),
        "baseline": one_of("baseline", "mean", "none"),
        "discount": one_of("discount", "dcg", "theta"),
    }

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        samples: int = SAMPLES,
        baseline: str = "mean",
        discount: str = "dcg",
        cutoff: int | str = "none",
        **options: Any,
    ) -> None:
        super().__init__(inputs, **options)
        self.noise, self.baseline, self.by_theta = Gumbel(samples), baseline == "mean", discount == "theta"
        self.cutoff = math.inf if cutoff == "none" else int(cutoff)

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
        last = torch.iinfo(torch.int64).max
        shown = torch.where(lists.where, lists.shown_positions, last).sort(dim=-1).values[..., :size]
        return torch.where(shown < last, self.positions.theta[self.positions.index(shown)], 0.0)

    def logged_discounts(self, lists: Lists) -> Tensor:
        """Return the discount of each item in the logged ranking; 0 below the cut-off and for padding."""
        ranks, discounts = ranks_of(-lists.shown_positions, where=lists.where), self.discounts(lists)
        return torch.where(lists.where, gains_at(discounts[..., None, :], ranks), 0.0)

    def item_values(self, lists: Lists) -> Tensor:
        """Return c/θ_k by item; 0 for padding."""
        return self.weighted(lists).masked_fill(~lists.where, 0.0)


class PLRank(PlackettLuce):
    """Maximise E[Σ_i D(rank_i) c_i/θ_k], the IPW estimate of expected DCG, with D(r) = 1/log2(1 + r) for r <= `cutoff`.

    With `discount=theta`, D(r) is θ of the r-th position of the list, which gives expected clicks.
    """

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {**PlackettLuce.OPTIONS, "cutoff": cut_off}

    def __init__(self, inputs: MethodInputs, *, cutoff: int | str = CUT_OFF, **options: Any) -> None:
        super().__init__(inputs, cutoff=cutoff, **options)

    def gains(self, lists: Lists, ranks: Tensor) -> tuple[Tensor, Tensor]:
        gains = self.discounts(lists)[..., None, :] * self.item_values(lists)[..., None]
        return gains, mean_gain(gains, ranks, lists)


def mean_gain(gains: Tensor, ranks: Tensor, lists: Lists) -> Tensor:
    """Return the mean over samples and requests of Σ_i G_i(rank_i)."""
    return reduced(gains_at(gains, ranks).sum(-1).mean(0), lists.weights)
