"""Rankers that add up scores: those of several rankers, or several views of the same items in one network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ultr.rankers.feedback import LARGEST_LOG_VALUE
from ultr.rankers.networks import MLPRanker


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a blend: weight · score."""

    ranker: nn.Module
    name: str  # of the kind of ranker: mlp, lightgbm, ...
    options: Mapping[str, Any] = field(default_factory=dict)  # of the ranker, if it is a network
    weight: float = 1.0
    indicators: tuple[int, ...] | None = None  # features whose missing values a network recognises; None: takes none

    def __call__(self, features: Tensor) -> Tensor:
        return torch.as_tensor(self.weight * self.ranker(features))

    def to_json(self) -> dict[str, Any]:
        return {"ranker": self.name, "weight": self.weight}


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
CONVERGED = 1e-7  # the last step of Newton's method
RIDGE = 1.0  # of the differences of the weights of the terms


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
        rows is known, u and the weight v of a are the `likely_weights`; with none above 0, the order is the anchor's.
        """
        terms = self.terms(features)
        spreads = [spread_within(term, request) for term in terms]
        learned = (terms[0] / spreads[0] + terms[1] / spreads[1]) / 2
        shares = torch.tensor([1.0, 0.0], dtype=torch.float64, device=features.device)
        if labels is not None and log_theta is not None and bool(terms[2].any()):
            columns = torch.stack([learned, terms[2] / spreads[2]], -1).double()
            found = likely_weights(columns, request, labels.double(), log_theta.double())
            shares = torch.where(found.any(), found, shares.flip(0))
        weights = torch.stack([shares[0] / spreads[0] / 2, shares[0] / spreads[1] / 2, shares[1] / spreads[2]])
        self.weights.copy_(weights)


def likely_weights(
    columns: Tensor, request: Tensor, labels: Tensor, log_theta: Tensor, *, ridge: float = RIDGE
) -> Tensor:
    """Return the weights u >= 0 of scores [rows, columns] that make the feedback most likely, given each request.

    The likelihood is that of which items of a request have the feedback, Σ c_i log(θ_i e^{u·s_i} / Σ_j θ_j e^{u·s_j}),
    so the feedback that a request has in all does not matter: no ranking needs it. A normal prior of precision `ridge`
    pulls the weights towards each other, so that few labels leave equal weights. All are 0 if no weights above 0 are
    better than none.
    """
    found = columns.new_zeros(columns.shape[1])
    best = conditional_fit(columns[:, :0], request, labels, log_theta)[1]
    for count in range(columns.shape[1], 0, -1):
        for used in combinations(range(columns.shape[1]), count):
            chosen = columns[:, list(used)]
            weights, value = conditional_fit(chosen, request, labels, log_theta, of=columns.shape[1], ridge=ridge)
            better = (weights >= 0).all() & (value > best)
            all_weights = columns.new_zeros(columns.shape[1]).index_copy(
                0, torch.tensor(used, device=columns.device), weights
            )
            found, best = torch.where(better, all_weights, found), torch.where(better, value, best)
    return found


def conditional_fit(
    columns: Tensor,
    request: Tensor,
    labels: Tensor,
    log_theta: Tensor,
    *,
    of: int = 0,
    ridge: float = RIDGE,
) -> tuple[Tensor, Tensor]:
    """Return the weights of the columns, by Newton's method, and the log-likelihood with them less their penalty.

    The penalty is ridge/2 times the squared deviation of the weights from their mean over all `of` columns; those that
    are not among the `columns` have weight 0.
    """
    count, requests = columns.shape[1], len(request)
    weights = columns.new_zeros(count)
    penalty = ridge * (torch.eye(count) - 1 / max(1, of)).to(columns)
    dispersion = labels.square().sum() / labels.sum().clamp(min=torch.finfo(labels.dtype).tiny)
    labels = labels / dispersion.clamp(min=torch.finfo(labels.dtype).tiny)

    def by_request(values: Tensor) -> Tensor:
        return values.new_zeros(requests, *values.shape[1:]).index_add(0, request, values)

    totals = by_request(labels)

    def fitted() -> tuple[Tensor, Tensor]:
        scores = columns @ weights + log_theta
        top = torch.full_like(scores, -torch.inf).scatter_reduce(0, request, scores, "amax")
        rate = (scores - top[request]).exp()
        sums = by_request(rate)
        level = top + sums.clamp(min=1e-300).log()
        likelihood = (labels * scores).sum() - torch.where(totals > 0, totals * level, 0.0).sum()
        return rate / sums[request], likelihood - weights @ penalty @ weights / 2

    share, value = fitted()
    for _ in range(ITERATIONS if count else 0):
        mean = by_request(share[:, None] * columns)
        expected = totals[request] * share
        slope = columns.T @ (labels - expected) - penalty @ weights
        curvature = (columns * expected[:, None]).T @ columns - (mean * totals[:, None]).T @ mean + penalty
        step = torch.linalg.solve(curvature + 1e-9 * torch.eye(count).to(columns), slope).clamp(-2, 2)
        weights = weights + step
        share, value = fitted()
        if float(step.abs().max()) < CONVERGED:  # a GPU waits for the number, but less than for further steps
            break
    return weights, value


def spread_within(scores: Tensor, request: Tensor) -> Tensor:
    """Return the standard deviation of scores around the mean of their request; 1 if they do not vary."""
    values = scores.double()
    zeros = torch.zeros(len(request), dtype=values.dtype, device=values.device)
    sums, counts = (zeros.index_add(0, request, each) for each in (values, torch.ones_like(values)))
    spread = (values - (sums / counts.clamp(min=1))[request]).square().mean().sqrt()
    return torch.where(spread.isfinite() & (spread > 1e-12), spread, 1.0)
