"""Intervals of off-policy values: sampling error, the error of clipping weights, and that of estimated examination."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ultr.bias.identification import NORMAL
from ultr.evaluation.scores import Mean, PairedTest

TINY = 1e-300  # almost 0, for denominators


def widened_test(test: PairedTest, unclipped: float, replicates: Sequence[float] | np.ndarray = ()) -> PairedTest:
    """Return a test of two off-policy values with the error of clipping: the difference would be `unclipped` without.

    `replicates` are differences under other estimates of examination.
    """
    from scipy.special import ndtr

    moved = np.asarray(replicates, np.float64) - test.difference
    margin = margin_of(test.high - test.difference, test.difference - unclipped, moved)
    p = float(2 * ndtr(-NORMAL * abs(test.difference) / max(margin, TINY)))
    return PairedTest(test.difference, test.difference - margin, test.difference + margin, p, test.requests)


def widened_mean(mean: Mean, unclipped: float) -> Mean:
    """Return the mean of an off-policy value with the error of clipping in its interval."""
    margin = margin_of(mean.high - mean.mean, mean.mean - unclipped, np.zeros(0))
    return Mean(mean.mean, mean.mean - margin, mean.mean + margin, mean.requests)


def margin_of(of_requests: float, changed: float, moved: np.ndarray) -> float:
    """Return half of the width of a 95% interval: sampling error, the error of clipping, and that of examination."""
    return float(np.sqrt(of_requests**2 + NORMAL**2 * (changed**2 + moved @ moved / max(1, len(moved)))))
