"""What a log looks like from a distance, before any model: feedback by position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultr.errors import DataError
from ultr.log.table import Log


@dataclass(frozen=True, eq=False)
class ByPosition:
    """For each position that occurs, in order: how often it was shown, and what each action came to."""

    positions: np.ndarray
    impressions: np.ndarray
    rates: dict[str, np.ndarray]  # share of impressions with the action
    means: dict[str, np.ndarray]  # mean of the action over all impressions


def by_position(log: Log) -> ByPosition:
    """Feedback by position; requests count with their weights."""
    if log.positions is None:
        raise DataError("the log has no positions", mend="name their column with --position")
    positions, place = np.unique(log.positions, return_inverse=True)
    weights = np.ones(log.rows) if log.weights is None else np.repeat(log.weights, log.lengths).astype(np.float64)
    shown = np.bincount(place, weights)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.asarray(np.bincount(place, weights * values) / shown)

    return ByPosition(
        positions=positions,
        impressions=np.bincount(place),
        rates={name: mean(values > 0) for name, values in log.actions.items()},
        means={name: mean(values) for name, values in log.actions.items()},
    )
