"""Rankers that add up scores: those of several rankers, or several views of the same items in one network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from ultr.rankers.feedback import LARGEST_LOG_VALUE
from ultr.rankers.networks import MLPRanker

# --- Sums of rankers --------------------------------------------------------------------------------------------------

LINKS = ("identity", "log-sigmoid")


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a blend: weight · link(score + shift)."""

    ranker: nn.Module
    name: str  # of the kind of ranker: mlp, lightgbm, ...
    options: Mapping[str, Any] = field(default_factory=dict)  # of the ranker, if it is a network
    link: str = "identity"
    shift: float = 0.0
    weight: float = 1.0
    indicators: tuple[int, ...] | None = None  # features whose missing values a network recognises; None: takes none

    def __call__(self, features: Tensor) -> Tensor:
        score = self.ranker(features) + self.shift
        if self.link == "log-sigmoid":
            score = logsigmoid(score)
        return torch.as_tensor(self.weight * score)

    def to_json(self) -> dict[str, Any]:
        return {"ranker": self.name, "link": self.link, "shift": self.shift, "weight": self.weight}


class Blend(nn.Module):
    """A ranker whose score is the sum of its parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.rankers = nn.ModuleList([part.ranker for part in parts])

    def forward(self, features: Tensor) -> Tensor:
        return torch.stack([part(features) for part in self.parts]).sum(0)


# --- Sums of the outputs of a network ---------------------------------------------------------------------------------
# A ranker with several views of the same items: a score learned from pairs, the likelihood, and a linear anchor.

ITERATIONS = 20  # of Newton's method
RIDGE = 1.0  # of the weights of the terms
LARGEST_LOG_RATE = 20.0
SHARES = 21  # of one of two rankers in their sum, that are tried


class Combined(nn.Module):
    """A ranker with score = w_f f(x) + w_βμ log(β(x) μ(x)) + w_a a(x).

    The inner ranker has the outputs f, which is learned from pairs, the logit of β, and the log of μ, which are learned
    by the likelihood. a is the linear function that it started at, if it has one.
    """

    OUTPUTS = 3
    weights: Tensor

    def __init__(self, ranker: nn.Module) -> None:
        super().__init__()
        self.ranker = ranker
        self.register_buffer("weights", torch.tensor([1.0, 1.0, 0.0]))

    def outputs(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return f, the logit of β and the log of μ of each item."""
        outputs: Tensor = self.ranker(features)
        return outputs[..., 0], outputs[..., 1], outputs[..., 2].clamp(-LARGEST_LOG_VALUE, LARGEST_LOG_VALUE)

    def terms(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return f, log(β μ) and a."""
        score, logit, log_value = self.outputs(features)
        anchor = self.ranker.anchor(features)[..., 0] if isinstance(self.ranker, MLPRanker) else torch.zeros_like(score)
        # The logarithm of a sigmoid; torch's own becomes one of few digits in ONNX.
        return score, log_value - softplus(-logit), anchor

    def forward(self, features: Tensor) -> Tensor:
        by_pairs, by_likelihood, anchor = self.terms(features)
        return self.weights[0] * by_pairs + self.weights[1] * by_likelihood + self.weights[2] * anchor

    @torch.no_grad()
    def balance(self, features: Tensor, request: Tensor, labels: Tensor | None, log_theta: Tensor | None) -> None:
        """Set the weights from rows that were not learned from; `request` has the number of the request of each.

        f and log(β μ), each divided by its deviation within requests, have the same weight u. If the feedback of the
        rows is known, u and the weight v of a are those with the largest likelihood: E[c] = θ exp(const + u s + v a),
        neither below 0. So a network that has learned nothing that lasts leaves the order to its anchor.
        """
        terms = self.terms(features)
        spreads = [spread_within(term, request) for term in terms]
        learned = (terms[0] / spreads[0] + terms[1] / spreads[1]) / 2
        shares = torch.tensor([1.0, 0.0], dtype=torch.float64, device=features.device)
        if labels is not None and log_theta is not None and bool(terms[2].any()):
            columns = torch.stack([learned, terms[2] / spreads[2]], -1).double()
            shares = likely_weights(columns, labels.double(), log_theta.double())
        weights = torch.stack([shares[0] / spreads[0] / 2, shares[0] / spreads[1] / 2, shares[1] / spreads[2]])
        self.weights.copy_(weights)


def likely_weights(columns: Tensor, labels: Tensor, log_theta: Tensor) -> Tensor:
    """Return the weights of two columns, at least 0, by Poisson regression with the offset log θ."""
    columns = columns - columns.mean(0)
    both, value = _regressed(columns, labels, log_theta)
    found, best = both, torch.where((both >= 0).all(), value, -torch.inf)
    for i in range(2):
        (slope,), value = _regressed(columns[:, i : i + 1], labels, log_theta)
        value = torch.where(slope > 0, value, -torch.inf)
        alone = torch.zeros_like(both)
        alone[i] = slope
        better = value > best
        found, best = torch.where(better, alone, found), torch.where(better, value, best)
    return torch.where(best > -torch.inf, found, torch.tensor([0.0, 1.0]).to(both))


def likely_share(first: Tensor, second: Tensor, labels: Tensor, log_theta: Tensor) -> float:
    """Return the share of the first of two columns in their sum: its mean under the likelihood of the labels.

    All shares from 0 to 1 are equally likely before. E[c] = θ exp(const + u (share first + (1 - share) second)), with
    the best const and the best u >= 0 for each share. A few labels leave the share near a half; many decide it.
    """
    if not bool((labels > 0).any()):
        return 0.5
    shares = torch.linspace(0, 1, SHARES, dtype=torch.float64)
    _, without = _regressed(torch.zeros_like(first)[:, None], labels, log_theta)  # u = 0
    values = []
    for share in shares.tolist():
        column = share * first + (1 - share) * second
        (slope,), value = _regressed((column - column.mean())[:, None], labels, log_theta)
        values.append(torch.where(slope > 0, value, without))
    return float((torch.stack(values).cpu().softmax(0) * shares).sum())


def _regressed(columns: Tensor, labels: Tensor, log_theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slopes of a Poisson regression by Newton's method, and its log-likelihood with them."""
    inputs = torch.cat([torch.ones_like(columns[:, :1]), columns], -1)
    labels = labels / labels.mean().clamp(min=torch.finfo(labels.dtype).tiny)  # the slopes do not depend on their scale
    dispersion = labels.square().sum() / labels.sum().clamp(min=1e-9)
    ridge = RIDGE * torch.diag(torch.tensor([0.0] + [1.0] * columns.shape[1]).to(inputs))
    values = torch.zeros(inputs.shape[1]).to(inputs)
    values[0] = (labels.sum().clamp(min=1e-9) / log_theta.exp().sum()).log()

    def mean() -> Tensor:
        return (inputs @ values + log_theta).clamp(max=LARGEST_LOG_RATE).exp()

    for _ in range(ITERATIONS):
        rate = mean()
        slope = inputs.T @ (labels - rate) / dispersion - ridge @ values
        curvature = (inputs * rate[:, None]).T @ inputs / dispersion + ridge
        curvature = curvature + 1e-9 * torch.eye(len(values)).to(inputs)
        values = values + torch.linalg.solve(curvature, slope).clamp(-2, 2)
    rate = mean()
    likelihood = (labels * rate.clamp(min=1e-30).log() - rate).sum() / dispersion - values @ ridge @ values / 2
    return values[1:], likelihood


def spread_within(scores: Tensor, request: Tensor) -> Tensor:
    """Return the standard deviation of scores around the mean of their request; 1 if they do not vary."""
    values = scores.double()
    zeros = torch.zeros(len(request), dtype=values.dtype, device=values.device)
    sums, counts = (zeros.index_add(0, request, each) for each in (values, torch.ones_like(values)))
    spread = (values - (sums / counts.clamp(min=1))[request]).square().mean().sqrt()
    return torch.where(spread.isfinite() & (spread > 1e-12), spread, 1.0)
