"""Summaries of a log: impressions, and the rate and mean of each action, by position; features with missing values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultr.log.table import Log

ROWS_AT_ONCE = 1 << 14  # rows in which missing values are counted at once


@dataclass(frozen=True, eq=False)
class ByPosition:
    """The positions in increasing order, their numbers of impressions, and the rate and mean of each action there."""

    positions: np.ndarray
    impressions: np.ndarray
    rates: dict[str, np.ndarray]  # share of impressions with the action
    means: dict[str, np.ndarray]  # mean of the action over the impressions


def missing_values(log: Log, most: int = 5) -> str | None:
    """Return the features with missing values, and the share of rows without a value, in words; None without any."""
    counts = np.zeros(len(log.feature_names), np.int64)
    for first in range(0, log.rows, ROWS_AT_ONCE):  # rows are contiguous in memory, columns are not
        counts += np.isnan(log.features[first : first + ROWS_AT_ONCE]).sum(0)
    shares = zip(log.feature_names, counts / max(1, log.rows), strict=True)
    missing = [f"{name} ({share:.1%})" for name, share in shares if share]
    more = f" and {len(missing) - most} more" if len(missing) > most else ""
    return ", ".join(missing[:most]) + more if missing else None


def by_position(log: Log) -> ByPosition:
    """Return impressions and feedback by position; rates and means use the weights of requests."""
    positions, place = np.unique(log.shown_positions("a summary"), return_inverse=True)
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
