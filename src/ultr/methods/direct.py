"""The direct method: the likelihood of feedback, in which examination by position is a known factor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ultr.lists import Lists
from ultr.log.labels import Label
from ultr.methods.base import MethodInputs, at_least_single, one_of
from ultr.methods.losses import product_logistic_loss, reduced
from ultr.methods.position_model import LEAST_THETA, PositionModel, WithPositions
from ultr.rankers import Hurdle

POWER = 1.5  # of Tweedie's distribution: variance = mean^1.5, between Poisson (1) and gamma (2)
LARGEST_LOG_RATE = 20.0  # largest |log| of a predicted mean


def is_binary(label: Label, binary: tuple[str, ...]) -> bool:
    """Return whether a label is one action that is 0 or 1."""
    return label.expression in binary


class Direct(WithPositions):
    """E[c | x, k] = θ_k β(x) μ(x), fitted by `likelihood` with θ known or estimated before; the score is β μ.

        hurdle    P(c>0) = θ_k β by cross-entropy, E[c | c>0] = μ by the gamma deviance: the default for values
        binary    P(c>0) = θ_k sigmoid(s): the default for a label that is 0 or 1
        poisson   E[c] = θ_k exp(s), by θ_k exp(s) - c s
        tweedie   the same mean, with variance mean^1.5: many zeros and a continuous rest

    It is what a practitioner writes by hand: log θ is an offset of the regression.
    """

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        "likelihood": one_of("likelihood", "hurdle", "binary", "poisson", "tweedie"),
        "theta": one_of("theta", "strata", "items"),
    }

    def __init__(self, inputs: MethodInputs, *, likelihood: str | None = None, theta: str = "strata") -> None:
        super().__init__(inputs)
        self.likelihood = likelihood or ("binary" if is_binary(inputs.label, inputs.binary) else "hurdle")
        self.positions = PositionModel(inputs, theta_from=theta)
        if self.likelihood == "hurdle":
            self.ranker = Hurdle(inputs.make_ranker(outputs=2))

    def loss(self, lists: Lists) -> Tensor:
        labels, where = self.labels(lists), lists.where
        theta = self.positions.theta[self.positions.index(lists.shown_positions)].clamp(LEAST_THETA, 1 - 1e-6)
        if self.likelihood in ("poisson", "tweedie"):
            return _mean_deviance(
                self.score(lists.features), labels, theta, where=where, weights=lists.weights, kind=self.likelihood
            )
        clicked = (labels > 0).to(theta.dtype)
        if self.likelihood == "binary":
            logit = self.score(lists.features)
            return product_logistic_loss(logit, theta.logit(), clicked, where=where, weights=lists.weights)
        assert isinstance(self.ranker, Hurdle)  # noqa: S101 - made in the constructor
        logit, log_value = map(at_least_single, self.ranker.outputs(lists.features))
        clicks = product_logistic_loss(logit, theta.logit(), clicked, where=where, weights=lists.weights)
        deviance = torch.where(where & (labels > 0), labels * torch.exp(-log_value) + log_value, 0.0)
        return clicks + reduced(deviance.sum(-1), lists.weights)


def _mean_deviance(
    scores: Tensor, labels: Tensor, theta: Tensor, *, where: Tensor, weights: Tensor, kind: str
) -> Tensor:
    """Return the deviance, up to a constant, of labels with the mean θ exp(s), by Poisson or Tweedie."""
    log_mean = scores.masked_fill(~where, 0.0).clamp(-LARGEST_LOG_RATE, LARGEST_LOG_RATE) + theta.log()
    if kind == "poisson":
        terms = log_mean.exp() - labels * log_mean
    else:
        terms = ((2 - POWER) * log_mean).exp() / (2 - POWER) - labels * ((1 - POWER) * log_mean).exp() / (1 - POWER)
    return reduced(torch.where(where, terms, 0.0).sum(-1), weights)
