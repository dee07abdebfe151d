"""Doubly robust estimation (Oosterhuis 2023): a model of relevance, corrected by the feedback it does not explain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ultr.bias.estimators import SCALE
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.methods.base import MethodInputs, as_limit, one_of, weight_limit
from ultr.methods.bias_model import BiasModel
from ultr.methods.losses import pointwise_loss
from ultr.methods.position_model import MAX_WEIGHT, PositionModel, WithPositions


class DoublyRobust(WithPositions):
    """Least squares Σ_i (s_i - r̂_i)² on an estimate of relevance by `estimator`, with α_k = θ_k - ζ_k:

        dr    r̂ = m + (c - α_k m - ζ_k μ) / max(α_k, τ)       m = β(x) μ(x) of the bias model
        dm    r̂ = m                                          the direct method: the model alone
        ips   r̂ = c / max(θ_k, τ)                            inverse propensities alone

    In the mean, r̂ of `dr` is the relevance of an item wherever α_k >= τ, whatever m is, and everywhere if m is right.
    τ = 1 / `max_weight`. ζ is 0 unless `trust=clicks`. In the paper labels are clicks (μ = 1), and a policy is
    optimised; least squares has the same optimum, because it is linear in r̂ but for a constant.
    """

    LEARNS_ALONE = True
    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        "estimator": one_of("estimator", "dr", "dm", "ips"),
        "theta": one_of("theta", "auto", "strata", "items"),
        "trust": one_of("trust", "none", "clicks"),
        "max_weight": weight_limit,
    }

    @classmethod
    def has_bias_stage(cls, options: Mapping[str, Any]) -> bool:
        return options.get("estimator") != "ips"

    @classmethod
    def limits_weights(cls, options: Mapping[str, Any]) -> bool:
        return super().limits_weights(options) and options.get("estimator") != "dm"

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        estimator: str = "dr",
        theta: str = "auto",
        trust: str = "none",
        max_weight: float | str = MAX_WEIGHT,
    ) -> None:
        super().__init__(inputs)
        self.estimator, self.max_weight = estimator, as_limit(max_weight)
        if estimator == "ips":
            if trust == "clicks":
                hint = "use the method affine, or estimator=dr"
                raise OptionError("trust=clicks cannot be used with estimator=ips", hint=hint)
            self.positions = PositionModel(inputs, theta_from=theta)
        else:
            self.positions = BiasModel(inputs, scale=SCALE, theta_from=theta, trust_in_clicks=trust == "clicks")
        self.train()

    def train(self, mode: bool = True) -> DoublyRobust:
        super().train(mode)
        self.positions.eval()  # it is fixed while the ranker is trained
        return self

    def relevance(self, lists: Lists) -> Tensor:
        """Return r̂ of each item."""
        labels, model = self.labels(lists), self.positions
        place = model.index(lists.shown_positions)
        zeta, slope = model.zeta[place], (model.theta - model.zeta)[place]
        weights = slope.reciprocal().clamp(0, self.max_weight)
        if not isinstance(model, BiasModel):
            return labels * weights
        logit, log_value, _ = model.of_lists(lists)
        value = log_value.exp()
        predicted = logit.sigmoid() * value
        if self.estimator == "dm":
            return predicted
        return predicted + weights * (labels - slope * predicted - zeta * value)

    def loss(self, lists: Lists) -> Tensor:
        with torch.no_grad():
            relevance = self.relevance(lists)
        return pointwise_loss(self.score(lists.features), relevance, where=lists.where, weights=lists.weights)
