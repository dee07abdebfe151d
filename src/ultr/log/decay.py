"""Weights of requests that decay with their age: a request counts half as much as one a half-life later."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ultr.log.build import MIN_WEIGHT
from ultr.log.table import Log

DAY = 86_400  # seconds


def decayed(log: Log, ages: np.ndarray | float, half_life: float) -> Log:
    """Return the log with the weights of its requests multiplied by 2^(-age / half-life), both in days."""
    weights = np.exp2(-np.broadcast_to(ages, len(log)) / half_life)
    weights = np.maximum(weights if log.weights is None else weights * log.weights, MIN_WEIGHT)
    return replace(log, weights=weights.astype(np.float32))


def decayed_by_time(log: Log, half_life: float) -> Log:
    """Return the log with weights that decay with the age of requests, by their `context["time"]` in seconds."""
    times = np.asarray(log.context["time"].to_numpy(zero_copy_only=False), np.float64)
    return decayed(log, (times.max() - times) / DAY, half_life)
