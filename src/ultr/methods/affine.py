"""Affine correction of clicks for examination and trust by position (Vardasbi 2020, after Agarwal et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.methods.base import MethodInputs, one_of, weight_limit
from ultr.methods.losses import pointwise_loss
from ultr.methods.position_model import MAX_WEIGHT, PositionModel, WeightedClicks, numbers


class Affine(WeightedClicks):
    """Least squares Σ_i (s_i - (c_i - ζ_k)/α_k)²: if P(click) = α_k β + ζ_k, this target has mean β at all positions.

    α and ζ are estimated from the log before training, up to an affine map of relevance β, which does not change the
    order of items. 1/α is at most `max_weight`.
    """

    LEARNS_ALONE = True
    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        "theta": one_of("theta", "auto", "strata", "items"),
        "max_weight": weight_limit,
    }

    def __init__(self, inputs: MethodInputs, *, theta: str = "auto", max_weight: float | str = MAX_WEIGHT) -> None:
        if inputs.propensities is not None:
            what = "the method affine estimates clicks on irrelevant items as well, so it cannot use known propensities"
            raise OptionError(what, hint="remove --propensities or --bias, or use --method ipw-pointwise")
        positions = PositionModel(inputs, theta_from=theta, trust_in_clicks=True)
        super().__init__(inputs, positions, max_weight=max_weight)

    def loss(self, lists: Lists) -> Tensor:
        positions, place = self.positions, self.positions.index(lists.shown_positions)
        weights = (positions.theta - positions.zeta).reciprocal().clamp(0, self.max_weight)
        corrected = (self.clicks(lists) - positions.zeta[place]) * weights[place]
        return pointwise_loss(self.score(lists.features), corrected, where=lists.where, weights=lists.weights)

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return {**self.positions.report(), "alpha": numbers(self.positions.theta - self.positions.zeta)}
