"""Lift: the relative difference between the means of two buckets (random parts of the traffic), with a test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from ultr.errors import DataError
from ultr.evaluation.scores import mean_with_interval

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Arm:
    """The mean of a metric over the sessions of a bucket, and the variance of this mean."""

    mean: float
    variance: float


@dataclass(frozen=True)
class Lift:
    """The relative difference of a bucket's mean from the control's, its 95% interval and two-sided p value."""

    lift: float
    low: float
    high: float
    p: float


def lift_of(treated: Arm, control: Arm) -> Lift:
    """Return the lift between independent buckets: the interval by the delta method, p by Welch's test.

    Buckets have so many sessions that the normal distribution can replace Student's t.
    """
    if not control.mean > 0:
        raise DataError(
            "the control bucket has no feedback", got=f"a mean of {control.mean:g}", hint="raise 'sessions'"
        )
    ratio = treated.mean / control.mean
    margin = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    margin *= math.sqrt(treated.variance + ratio**2 * control.variance) / control.mean
    error = math.sqrt(treated.variance + control.variance)
    difference = abs(treated.mean - control.mean)
    p = math.erfc(difference / error / math.sqrt(2)) if error else float(difference == 0)
    return Lift(ratio - 1, ratio - 1 - margin, ratio - 1 + margin, p)


def arm_of(days: Sequence[Mapping[str, Any]]) -> Arm:
    """Return the mean of a bucket over days, each day with the same weight, and the variance of this mean."""
    means, variances = zip(*((day["mean"], day["variance"] / day["sessions"]) for day in days), strict=True)
    return Arm(sum(means) / len(days), sum(variances) / len(days) ** 2)


def lifts_between(treated: list[dict[str, Any]], control: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the lift over all days but day 0, when all buckets have the same ranker, and the lift of each day."""

    def lift(of: slice) -> dict[str, float]:
        expected, base = (sum(day["expected"] for day in days[of]) for days in (treated, control))
        return {**asdict(lift_of(arm_of(treated[of]), arm_of(control[of]))), "expected": expected / base - 1}

    return {**lift(slice(1, None)), "by_day": [lift(slice(day, day + 1)) for day in range(len(control))]}


def over_runs(lifts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean lift over runs with its 95% interval (Student's t); one run has no interval."""
    means = {}
    for kind, key in (("sampled", "lift"), ("expected", "expected")):
        mean = mean_with_interval(np.array([lift[key] for lift in lifts]), confidence=CONFIDENCE)
        low, high = (end if math.isfinite(end) else None for end in (mean.low, mean.high))
        means[kind] = {"mean": mean.mean, "low": low, "high": high, "runs": mean.requests}
    return means
