"""Inverse propensity weighting (Joachims et al. 2017): a click counts as many as were not seen for each that was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from ultr.lists import Lists
from ultr.losses import pointwise_loss, softmax_loss
from ultr.methods.base import MethodInputs, at_least, one_of
from ultr.methods.position_model import MAX_WEIGHT, PositionModel, WeighedClicks


class _IPW(WeighedClicks):
    """Clicks over θ, which is known (`--propensities`) or estimated from the log as for `pairwise-em`.

    1/θ is at most `max_weight`. `labels=values` weighs the label itself in place of clicks.
    """

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        "theta": one_of("theta", "strata", "items"),
        "labels": one_of("labels", "clicks", "values"),
        "max_weight": at_least("max_weight", 1),
    }

    def __init__(
        self, inputs: MethodInputs, *, theta: str = "strata", labels: str = "clicks", max_weight: float = MAX_WEIGHT
    ) -> None:
        super().__init__(inputs, PositionModel(inputs, theta_from=theta), max_weight=max_weight)
        self.values = labels == "values"

    def weighed(self, lists: Lists) -> Tensor:
        """c/θ_k, which has the mean of what was there to be found, whatever θ is."""
        theta = self.positions.theta[self.positions.index(lists.shown_positions)]
        labels = self.labels(lists) if self.values else self.clicks(lists)
        return labels * theta.reciprocal().clamp(max=self.max_weight)


class IPWPointwise(_IPW):
    """Σ_i (s_i - c_i/θ_k)²: least squares on a label without bias."""

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        return pointwise_loss(scores, self.weighed(lists), where=lists.where, weights=lists.weights)


class IPWListwise(_IPW):
    """Σ_i c_i/θ_k · -log softmax(s)_i: the softmax loss, linear in the label and so without bias."""

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        return softmax_loss(scores, self.weighed(lists), where=lists.where, weights=lists.weights)
