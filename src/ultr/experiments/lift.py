"""The lift of one bucket of traffic over another, with its interval and test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from ultr.errors import DataError
from ultr.evaluation import mean_with_interval

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Arm:
    """The mean of a bucket's live metric, and the variance of that mean."""

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
    """The lift between independent buckets: interval by the delta method for a ratio, p by the test of Welch.

    Buckets have too many sessions for Student's t to differ from the normal distribution.
    """
    if not control.mean > 0:
        raise DataError("the control had no feedback to be compared with", mend="serve more sessions")
    ratio = treated.mean / control.mean
    margin = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    margin *= math.sqrt(treated.variance + ratio**2 * control.variance) / control.mean
    error = math.sqrt(treated.variance + control.variance)
    difference = abs(treated.mean - control.mean)
    p = math.erfc(difference / error / math.sqrt(2)) if error else float(difference == 0)
    return Lift(ratio - 1, ratio - 1 - margin, ratio - 1 + margin, p)


def arm_of(days: Sequence[Mapping[str, Any]]) -> Arm:
    """The mean over days, each counting alike, of what became of them."""
    means, variances = zip(*((day["mean"], day["variance"] / day["sessions"]) for day in days), strict=True)
    return Arm(sum(means) / len(days), sum(variances) / len(days) ** 2)


def lifts_between(treated: list[dict[str, Any]], control: list[dict[str, Any]]) -> dict[str, Any]:
    """Lifts of all days but day 0, on which the buckets are the same, and of each day."""

    def lift(of: slice) -> dict[str, float]:
        ours, theirs = (sum(day["expected"] for day in days[of]) for days in (treated, control))
        return {**asdict(lift_of(arm_of(treated[of]), arm_of(control[of]))), "expected": ours / theirs - 1}

    return {**lift(slice(1, None)), "by_day": [lift(slice(day, day + 1)) for day in range(len(control))]}


def over_runs(lifts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean lift over runs with Student's interval, which has no ends if there is one run."""
    found = {}
    for kind, key in (("sampled", "lift"), ("expected", "expected")):
        mean = mean_with_interval(np.array([lift[key] for lift in lifts]), confidence=CONFIDENCE)
        low, high = (end if math.isfinite(end) else None for end in (mean.low, mean.high))
        found[kind] = {"mean": mean.mean, "low": low, "high": high, "runs": mean.requests}
    return found
