"""Counterfactual methods: estimates of relevance from clicks and the probability of examination."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ultr.bias.estimators import SCALE
from ultr.errors import OptionError
from ultr.evaluation.metrics import batch_innermost, discounts_at, ranks_of
from ultr.lists import Lists
from ultr.methods.base import MaxWeight, MethodInputs, ThetaFrom, as_limit
from ultr.methods.bias_model import BiasModel
from ultr.methods.losses import gaps, pairwise_loss, pointwise_loss, softmax_loss
from ultr.methods.position_model import MAX_WEIGHT, PositionModel, WeightedClicks, WithPositions, numbers

# --- Inverse propensity weighting -------------------------------------------------------------------------------------
# Inverse propensity weighting (Joachims et al. 2017): clicks are divided by the probability of examination.


class IPW(WeightedClicks):
    """Clicks divided by examination θ, which is known (`--propensities`) or estimated from the log before training.

    1/θ is at most `max_weight`. With `labels=values`, the label itself is divided instead of clicks.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {
        "theta": ThetaFrom,
        "labels": Literal["clicks", "values"],
        "max_weight": MaxWeight,
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


# --- Affine correction ------------------------------------------------------------------------------------------------
# Affine correction of clicks for examination and trust by position (Vardasbi 2020, after Agarwal et al. 2019).


class Affine(WeightedClicks):
    """Least squares Σ_i (s_i - (c_i - ζ_k)/α_k)²: if P(click) = α_k β + ζ_k, this target has mean β at all positions.

    α and ζ are estimated from the log before training, up to an affine map of relevance β, which does not change the
    order of items. 1/α is at most `max_weight`.
    """

    LEARNS_ALONE = True
    OPTIONS: ClassVar[Mapping[str, Any]] = {
        "theta": ThetaFrom,
        "max_weight": MaxWeight,
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


# --- Doubly robust estimation -----------------------------------------------------------------------------------------
# Doubly robust estimation (Oosterhuis 2023): a model of relevance, corrected by the feedback it does not explain.


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
    OPTIONS: ClassVar[Mapping[str, Any]] = {
        "estimator": Literal["dr", "dm", "ips"],
        "theta": ThetaFrom,
        "trust": Literal["none", "clicks"],
        "max_weight": MaxWeight,
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
