"""Inverse propensity weighting (Joachims et al. 2017): clicks are divided by the probability of examination."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from ultr.lists import Lists
from ultr.methods.base import MethodInputs, one_of, weight_limit
from ultr.methods.losses import pointwise_loss, softmax_loss
from ultr.methods.position_model import MAX_WEIGHT, PositionModel, WeightedClicks


class _IPW(WeightedClicks):
    """Clicks divided by examination θ, which is known (`--propensities`) or estimated from the log before training.

    1/θ is at most `max_weight`. With `labels=values`, the label itself is divided instead of clicks.
    """

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        "theta": one_of("theta", "strata", "items"),
        "labels": one_of("labels", "clicks", "values"),
        "max_weight": weight_limit,
    }

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        theta: str = "strata",
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


class IPWPointwise(_IPW):
    """Σ_i (s_i - c_i/θ_k)²: least squares on an unbiased label."""

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        return pointwise_loss(scores, self.weighted(lists), where=lists.where, weights=lists.weights)


class IPWListwise(_IPW):
    """Σ_i c_i/θ_k · -log softmax(s)_i: the softmax loss, which is linear in the label and therefore unbiased."""

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        return softmax_loss(scores, self.weighted(lists), where=lists.where, weights=lists.weights)
