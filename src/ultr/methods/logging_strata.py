"""Strata of items that the logging ranker found equally good, and their positions, for the loss of a method.

The logging ranker is recovered from the log (`bias.logging_policy`). A stratum is a range of its score, less the mean
score of the list: within a list, only differences of scores decide about positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ultr.bias.logging_policy import STRATA, logging_score, policy_network
from ultr.lists import ListBatches, Lists
from ultr.log import Log
from ultr.methods.base import MethodInputs, PositionIndex
from ultr.rankers import FeatureEncoder, LinearRanker

ROWS_IN_CELL = 20  # mean number of rows that a position of a stratum should have
UNUSED = 1e30  # the edge of a stratum that no score reaches
PRIOR_IMPRESSIONS = 10.0  # weight of the stratum in the positions of an item, in impressions
PROPENSITY = "propensity of items"  # name of ρ among the actions of a log


class LoggingStrata(nn.Module):
    """A module from lists to the stratum of each item, 0 to STRATA - 1; all items are in stratum 0 before `fit`.

    The model of the logging ranker is a part of it, as buffers, so that no optimizer changes it.
    """

    edges: Tensor
    by_network: Tensor

    def __init__(self, inputs: MethodInputs) -> None:
        super().__init__()
        self.index = PositionIndex(inputs.positions)
        self.linear = _fixed(LinearRanker(FeatureEncoder(inputs.features, inputs.categories)))
        self.network = _fixed(policy_network(inputs.features, inputs.categories))
        self.register_buffer("by_network", torch.zeros(()))  # 1 if the network is the model, and not the linear score
        self.register_buffer("edges", torch.full((STRATA - 1,), UNUSED))
        self.eval()

    def train(self, mode: bool = True) -> LoggingStrata:
        """Keep the module in evaluation mode: the score of the logging ranker has no dropout."""
        return super().train(False)

    @property
    def several(self) -> Tensor:
        """Whether there is more than one stratum: a single one explains nothing, and its gradients are rounding."""
        return self.edges[0] < UNUSED / 2

    @torch.no_grad()
    def forward(self, lists: Lists) -> Tensor:
        score = torch.where(self.by_network > 0, self.network(lists.features), self.linear(lists.features))
        score = torch.where(lists.where, score, 0.0)
        mean = score.sum(-1, keepdim=True) / lists.where.sum(-1, keepdim=True).clamp(min=1)
        return ((score - mean)[..., None] > self.edges).sum(-1)

    def fit(self, log: Log, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Recover the logging ranker and set the strata to quantiles; return the stratum and place of each row.

        The place is the index of the position. There are fewer strata if the log is small.
        """
        positions = log.shown_positions("the policy of the logging ranker")
        logged = logging_score(log, seed=seed, device=self.edges.device)
        linear = isinstance(logged.ranker, LinearRanker)
        (self.linear if linear else self.network).load_state_dict(logged.ranker.state_dict())
        self.by_network.fill_(not linear)
        request = log.request_of_row
        score = logged.score.astype(np.float64)
        score -= (np.bincount(request, score) / np.maximum(1, log.lengths))[request]
        count = int(np.clip(log.rows // (ROWS_IN_CELL * len(self.index)), 1, STRATA))
        ordered, cuts = np.sort(score), np.arange(1, count) * log.rows // count
        edges = torch.from_numpy((ordered[cuts - 1] + ordered[cuts]) / 2)  # between two scores, so that none is on it
        self.edges.fill_(UNUSED)[: count - 1] = edges.to(self.edges)
        places = self.index(torch.from_numpy(np.ascontiguousarray(positions)).to(self.index.ids.device))
        return np.searchsorted(self.edges.cpu().numpy(), score), places.cpu().numpy()


class LoggingPositions(nn.Module):
    """The positions at which the logging ranker shows the items of each stratum: rows of the log by both."""

    counts: Tensor

    def __init__(self, inputs: MethodInputs) -> None:
        super().__init__()
        self.strata = LoggingStrata(inputs)
        self.register_buffer("counts", torch.ones(STRATA, len(self.strata.index)))

    def fit(self, log: Log, *, seed: int) -> None:
        """Count the rows of a log by stratum and position."""
        stratum, place = self.strata.fit(log, seed=seed)
        cells = np.bincount(stratum * self.counts.shape[1] + place, _row_weights(log), self.counts.numel())
        self.counts.copy_(torch.from_numpy(cells.reshape(self.counts.shape)))

    def propensity(self, lists: Lists, alpha: Tensor) -> Tensor:
        """Return ρ = E[α_k | stratum] of each item, given α by position."""
        return (self.counts @ alpha / self.counts.sum(1).clamp(min=1e-9))[self.strata(lists)]

    @torch.no_grad()
    def by_item(self, log: Log, items: np.ndarray, alpha: Tensor) -> np.ndarray:
        """Return ρ of each row: that of its stratum, times the ratio of α and ρ over other impressions of the item.

        `items` are codes 0, 1, ... of rows. The ratio is drawn to 1 as by `PRIOR_IMPRESSIONS` average impressions, so
        that an item that occurs once has the ρ of its stratum.
        """
        batches, weights = ListBatches(log, device=alpha.device), _row_weights(log)
        weights = weights / max(weights.mean(), 1e-9)
        here, mean = np.zeros((2, log.rows))
        for requests, lists in batches.by_length():
            rows = batches.rows(requests, lists.where)[lists.where].cpu().numpy()
            here[rows] = alpha[self.strata.index(lists.shown_positions)][lists.where].cpu().numpy()
            mean[rows] = self.propensity(lists, alpha)[lists.where].cpu().numpy()
        others = [np.bincount(items, weights * each)[items] - weights * each for each in (here, mean)]
        prior = PRIOR_IMPRESSIONS * np.average(mean, weights=weights)
        ratio = (others[0] + prior) / np.maximum(others[1] + prior, 1e-9)
        return np.asarray(mean * ratio, np.float32)


class LoggingWeights(LoggingPositions):
    """Weights of items that make the position independent of the stratum, as if positions were given by chance:

    w = min(P(k) / P(k | stratum), `max_weight`), divided by its mean over the rows of the log
    """

    def __init__(self, inputs: MethodInputs, *, max_weight: float) -> None:
        super().__init__(inputs)
        self.max_weight = max_weight

    def forward(self, lists: Lists) -> Tensor:
        shares = self.counts / self.counts.sum()
        independent = shares.sum(1, keepdim=True) * shares.sum(0)
        ratios = torch.where(shares > 0, independent / shares, 1.0).clamp(max=self.max_weight)
        table = ratios / (shares * ratios).sum()
        return table[self.strata(lists), self.strata.index(lists.shown_positions)]


def _row_weights(log: Log) -> np.ndarray:
    return np.ones(log.rows) if log.weights is None else np.repeat(log.weights, log.lengths).astype(np.float64)


def _fixed(module: nn.Module) -> nn.Module:
    """Turn the parameters of a module into buffers."""
    for part in module.modules():
        values: dict[str, Any] = dict(part.named_parameters(recurse=False))
        for name, value in values.items():
            delattr(part, name)
            part.register_buffer(name, value.detach().clone())
    return module
