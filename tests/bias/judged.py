"""Logs of queries and items whose relevance is known: users examine by position, and click what attracts them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from scipy.special import polygamma

from ultr.bias.relevance import Pairs
from ultr.log import Log

SHOWN = 8


@dataclass(frozen=True, eq=False)
class JudgedWorld:
    """A log, and the relevance of each pair of a query and an item; the numbers of items and queries are their ids."""

    log: Log
    relevance: np.ndarray  # [queries, items]

    def truth(self, pairs: Pairs) -> np.ndarray:
        """Return the relevance of pairs."""
        return self.relevance[pairs.queries.to_numpy(), pairs.items.to_numpy()]


def judged_world(
    seed: int,
    *,
    queries: int = 200,
    items: int = 12,
    most: int = 40,
    shape: float = 1.2,
    spread: float = 0.5,
    weight: float = 1.0,
    severity: float = 0.8,
) -> JudgedWorld:
    """Make a world in which production ranks by the quality of items and noise, in up to `most` requests of a query.

    The items of each query have the same qualities. Attraction is exp(-3.5 + 0.6 quality), times exp(`spread` z) of the
    query, times Gamma(`shape`, `shape`) of the pair. Relevance is the share `weight` of the logarithm of the last two
    factors, and has the mean and the variance of `bias.relevance`.
    """
    random = np.random.default_rng(seed)
    quality = random.permuted(np.tile(np.linspace(1.5, -1.5, items), (queries, 1)), axis=1)
    predicted = np.exp(-3.5 + 0.6 * quality + spread**2 / 2)
    of_query = np.exp(spread * random.normal(size=(queries, 1)))
    attraction = np.exp(-3.5 + 0.6 * quality) * of_query * random.gamma(shape, 1 / shape, (queries, items))
    noise = np.sqrt(weight * (1 - weight) * (polygamma(1, shape) + spread**2)) * random.normal(size=quality.shape)
    relevance = predicted * (attraction / predicted) ** weight * np.exp(noise)
    query = np.repeat(np.arange(queries), random.integers(2, most, queries))
    score = quality[query] + 0.7 * random.normal(size=(len(query), items))
    item = np.argsort(-score, axis=1)[:, :SHOWN]
    theta = np.arange(1, SHOWN + 1) ** -severity
    clicked = random.random(item.shape) < theta * np.minimum(attraction[query[:, None], item], 1)
    rows = item.size
    log = Log(
        features=np.empty((rows, 0), np.float32),
        offsets=np.arange(0, rows + 1, SHOWN),
        request_ids=pa.array(np.arange(len(query))),
        feature_names=(),
        positions=np.tile(np.arange(1, SHOWN + 1), len(query)),
        actions={"click": clicked.ravel().astype(np.float32)},
        item_ids=pa.array(item.ravel()),
        context={"query": pa.array(query)},
    )
    return JudgedWorld(log, relevance)
