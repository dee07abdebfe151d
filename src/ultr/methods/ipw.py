"""Inverse propensity weighting (Joachims et al. 2017): clicks are divided by the probability of examination."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ultr.evaluation.metrics import batch_innermost, discounts_at, ranks_of
from ultr.lists import Lists
from ultr.methods.base import MethodInputs, one_of, weight_limit
from ultr.methods.losses import gaps, pairwise_loss, pointwise_loss, softmax_loss
from ultr.methods.position_model import MAX_WEIGHT, PositionModel, WeightedClicks


class IPW(WeightedClicks):
    """Clicks divided by examination θ, which is known (`--propensities`) or estimated from the log before training.

    1/θ is at most `max_weight`. With `labels=values`, the label itself is divided instead of clicks.
    """

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        "theta": one_of("theta", "auto", "strata", "items"),
        "labels": one_of("labels", "clicks", "values"),
        "max_weight": weight_limit,
    }

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        theta: str = "auto",
        labels: str = "clicks",
        max_weight: float | str = MAX_WEIGHT,
    ) -> None:
        super().__init__(inputs, PositionModel(inputs, theta_from=theta), max_weight=max_weight)
        self.values = labels == "values"

    def weighted(self, lists: Lists) -> Tensor:
        """Return c/θ_k by item, whose mean is that of the label c if every item were examined."""
        theta = self.positions.theta[self.positions.index(lists.shown_positions)]
        labels = self.labels(lists) if self.values else self.clicks(lists)
        return labels * theta.reciprocal().clamp(max=self.max_weight)


class IPWLambdaLoss(IPW):
    """Σ_i c_i/θ_k Σ_j |D_i - D_j| log(1 + exp(-(s_i - s_j))) over all other items j, with D = 1/log2(1 + rank).

    |D_i - D_j| is the change of DCG if i and j are swapped and only i has a gain of 1. Ranks are those of the current
    scores. LambdaRank, and LambdaLoss (Wang et al. 2018), sum G_i - G_j over pairs with G_i > G_j; which pairs these
    are depends on both labels, so that IPW would not be unbiased. This sum is linear in the label, as in Oosterhuis and
    de Rijke (2020), and therefore unbiased. It is not divided by the ideal DCG, which biased labels do not give.
    """

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        with torch.no_grad():
            ranks = ranks_of(scores, where=lists.where)
            change = gaps(discounts_at(ranks, scores.dtype)).abs() * batch_innermost(self.weighted(lists))[..., None]
            both = lists.where[..., :, None] & lists.where[..., None, :]
        pair_weights = torch.where(both, change, 0.0)
        return pairwise_loss(scores, pair_weights, where=lists.where, weights=lists.weights)


class IPWPointwise(IPW):
    """Σ_i (s_i - c_i/θ_k)²: least squares on an unbiased label."""

    LEARNS_ALONE = True

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        return pointwise_loss(scores, self.weighted(lists), where=lists.where, weights=lists.weights)


class IPWListwise(IPW):
    """Σ_i c_i/θ_k · -log softmax(s)_i: the softmax loss, which is linear in the label and therefore unbiased."""

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        return softmax_loss(scores, self.weighted(lists), where=lists.where, weights=lists.weights)
