"""What a simulated world gives: a log as a table, and the truth about each row of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class World:
    """A log and its truth; rows of a request are together, in the order in which they were shown."""

    log: pa.Table
    features: tuple[str, ...]
    categorical: tuple[str, ...]
    truth: np.ndarray  # what a row is worth if it is seen
    examination: np.ndarray  # the true probability that the row was seen
    lengths: np.ndarray  # rows by request
    expected: Callable[[np.ndarray], np.ndarray]  # from positions of the rows, in any order: their expected feedback

    def reward(self, scores: np.ndarray, k: int = 10) -> float:
        """Return the expected feedback on the first k rows of the ranking by `scores`, as a mean over requests."""
        request = np.repeat(np.arange(len(self.lengths)), self.lengths)
        position = np.empty(len(scores), np.int64)
        position[np.lexsort((-scores, request))] = positions(self.lengths)
        return float(self.expected(position)[position <= k].sum() / len(self.lengths))

    def ndcg(self, scores: np.ndarray, k: int = 10) -> float:
        """Return the mean NDCG@k over requests of the ranking by `scores`, with the truth as gain."""
        request = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return float((self._dcg(request, scores, k) / self._dcg(request, self.truth, k)).mean())

    def _dcg(self, request: np.ndarray, scores: np.ndarray, k: int) -> np.ndarray:
        order = np.lexsort((-scores, request))
        rank = np.arange(len(scores)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        discount = np.where(rank < k, 1 / np.log2(rank + 2), 0)
        return np.bincount(request[order], self.truth[order] * discount)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def positions(lengths: np.ndarray) -> np.ndarray:
    """Return the positions 1, 2, ... of the rows of each request."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1


def ranked(request: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Return the order of rows in which requests stay in place and the rows of each are sorted by score, best first."""
    return np.lexsort((-score, request))
