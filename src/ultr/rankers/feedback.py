"""Rankers that predict feedback: the score is a function of the predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear, softplus

from ultr.log.labels import Label

LARGEST_LOG_VALUE = 10.0  # largest |log μ|
THRESHOLDS = 32  # of ordinal regression


class Hurdle(nn.Module):
    """A ranker with score = β(x) μ(x). A network's first output is the logit of β; the others determine μ.

    If `ranker` has several networks, each has these outputs, and their mean counts. β is the probability of some
    feedback, and μ its expected value if there is some: subclasses differ in μ.
    Here μ is the exponential of the second output, fitted by the gamma deviance c/μ + log μ.
    """

    KIND: ClassVar[str] = "gamma"
    OUTPUTS: ClassVar[int] = 2

    def __init__(self, ranker: nn.Module) -> None:
        super().__init__()
        self.ranker = ranker

    def by_network(self, features: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of each network: the logit of β, and the outputs for the value."""
        return of_networks(self.ranker(features), self.OUTPUTS)

    def value(self, outputs: Tensor) -> Tensor:
        """Return the expected value μ of items with some feedback."""
        return _log_value(outputs).exp()

    def value_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the value by item; it counts only where the label is positive."""
        log_value = _log_value(outputs)
        return labels * torch.exp(-log_value) + log_value

    def fit_values(self, labels: np.ndarray) -> None:
        """Fit what depends on the distribution of positive labels."""

    def forward(self, features: Tensor) -> Tensor:
        outputs = mean_of(self.by_network(features))
        return torch.sigmoid(outputs[..., 0]) * self.value(outputs[..., 1:])


def of_networks(outputs: Tensor, size: int) -> tuple[Tensor, ...]:
    """Return the outputs of each network, of which so many stand next to each other."""
    return tuple(outputs[..., first : first + size] for first in range(0, outputs.shape[-1], size))


def mean_of(by_network: Sequence[Tensor]) -> Tensor:
    return by_network[0] if len(by_network) == 1 else torch.stack(tuple(by_network)).mean(0)


def _log_value(outputs: Tensor) -> Tensor:
    return outputs[..., 0].clamp(-LARGEST_LOG_VALUE, LARGEST_LOG_VALUE)


def _sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums over the last dimension, as a layer, which ONNX Runtime computes for no rows, too."""
    return linear(values, weights[None]).squeeze(-1)


class OrdinalHurdle(Hurdle):
    """The value by ordinal regression: P(c > t_m | c > 0) for quantiles t_m of positive labels, each by cross-entropy.

        μ = v_0 + Σ_m (v_m - v_{m-1}) P(c > t_m)          v_m = mean label between t_m and t_{m+1}

    No distribution is assumed, and a few very long dwell times cannot dominate the loss. It is the classification and
    restoration of CREAD (Sun et al. 2024), with thresholds at quantiles.
    """

    KIND = "ordinal"
    OUTPUTS = 1 + THRESHOLDS
    thresholds: Tensor
    means: Tensor

    def __init__(self, ranker: nn.Module) -> None:
        super().__init__(ranker)
        self.register_buffer("thresholds", torch.zeros(THRESHOLDS))
        self.register_buffer("means", torch.ones(THRESHOLDS + 1))

    def value(self, outputs: Tensor) -> Tensor:
        return self.means[0] + _sum(outputs.sigmoid(), self.means[1:] - self.means[:-1])

    def value_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        above = (labels[..., None] > self.thresholds).to(outputs.dtype)
        return binary_cross_entropy_with_logits(outputs, above, reduction="none").mean(-1)

    def fit_values(self, labels: np.ndarray) -> None:
        if not len(labels):
            return
        thresholds = np.quantile(labels, np.arange(1, THRESHOLDS + 1) / (THRESHOLDS + 1))
        between = np.searchsorted(thresholds, labels)  # thresholds below each label
        counts, sums = (np.bincount(between, w, minlength=THRESHOLDS + 1) for w in (None, labels))
        edges = np.append(thresholds, thresholds[-1])  # equal thresholds have no labels between them
        self.thresholds.copy_(torch.from_numpy(thresholds))
        self.means.copy_(torch.from_numpy(np.where(counts > 0, sums / np.maximum(counts, 1), edges)))


HURDLES: dict[str, type[Hurdle]] = {kind.KIND: kind for kind in (Hurdle, OrdinalHurdle)}


class Product(nn.Module):
    """A ranker with score = log(a(x) s(x)), from a network with two outputs: the logits of a and of s.

    These are two probabilities, such as that of a click and of a satisfied user.
    The logarithm ranks as the product does, and does not become constant where both probabilities are near 1.
    """

    def __init__(self, ranker: nn.Module) -> None:
        super().__init__()
        self.ranker = ranker

    def outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of a and of s of each item."""
        outputs: Tensor = self.ranker(features)
        return outputs[..., 0], outputs[..., 1]

    def forward(self, features: Tensor) -> Tensor:
        first, second = self.outputs(features)
        return -softplus(-first) - softplus(-second)  # not logsigmoid: in ONNX it would have few digits


class Synthesised(nn.Module):
    """A ranker with score = Φ(predicted actions: click, dwell, ...), where Φ is the expression of the label.

    `ranker` has an output for each action of the label; if it has several networks, each has, and their mean counts.
    For actions that are 0 or 1 (`binary`) it is a logit. For other actions the prediction is `scale` ·
    softplus(output), because actions are not negative.
    """

    scale: Tensor
    is_binary: Tensor

    def __init__(self, ranker: nn.Module, label: Label, binary: Sequence[str]) -> None:
        super().__init__()
        self.ranker, self.label = ranker, label
        self.binary = tuple(name for name in label.actions if name in binary)
        self.register_buffer("scale", torch.ones(len(label.actions)))
        is_binary = torch.tensor([name in self.binary for name in label.actions])
        self.register_buffer("is_binary", is_binary, persistent=False)

    def outputs(self, features: Tensor) -> Tensor:
        """Return the output of each network for each action: [..., networks, actions]."""
        return torch.stack(self._by_network(features), -2)

    def _by_network(self, features: Tensor) -> tuple[Tensor, ...]:
        outputs: Tensor = self.ranker(features)
        if outputs.dim() < features.dim():  # one network with one output
            outputs = outputs[..., None]
        return of_networks(outputs, len(self.scale))

    def forward(self, features: Tensor) -> Tensor:
        outputs = mean_of(self._by_network(features))
        predicted = torch.where(self.is_binary, outputs.sigmoid(), self.scale * softplus(outputs))
        scores: Tensor = self.label(dict(zip(self.label.actions, predicted.unbind(-1), strict=True)), check=False)
        return scores
