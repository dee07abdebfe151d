"""How well examination is told by a log, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree
from scipy.stats import norm

TOLD = 0.8  # share of replicates that must tell a position for it to have an interval
NORMAL = 1.959964  # of a 95% interval
DIFFERENT = 0.01  # level of the test over all positions that they differ
ALIKE = 0.05  # estimators that differ by less need no test
SHARP = 0.3  # relative half-width of an interval that is good enough to correct by
WANTED = 0.10  # that a randomised slice should give
MOST_IMPRESSIONS = 0.9  # of all impressions must be at positions that are known so well
FEW_LINKS = 10.0  # clicks on either side of a link between positions
OPEN_ORDER = 0.5  # share of the order that features may explain where they are to be told from position
RANDOM_ORDER = 0.02
IDENTIFIED, CARE, NOT = "identified", "identified with care", "not identified"
ADVICE = {
    IDENTIFIED: "correct for it",
    CARE: "correct for it with care",
    NOT: "collect a little randomisation first",
}
INTERVENED = ("known", "randomised", "items", "harvest")  # in order of trust; others rest on features alone


@dataclass(frozen=True, eq=False)
class Estimate:
    """θ relative to the reference position, with 95% intervals, and what it rests on."""

    name: str
    theta: np.ndarray  # [positions], NaN where it is not told
    low: np.ndarray
    high: np.ndarray
    logs: np.ndarray  # [1 + replicates, positions]
    held_out: float | None = None  # log-likelihood of a held-out impression

    @property
    def half_width(self) -> np.ndarray:
        """Of the interval, relatively; infinite where there is none."""
        width = np.expm1((np.log(self.high) - np.log(self.low)) / 2)
        return np.where(np.isfinite(width), width, np.inf)


def estimate(name: str, draws: np.ndarray, reference: int, held_out: float | None = None) -> Estimate:
    """From θ of the log and of its bootstrap replicates, up to their scales; intervals are normal in log θ."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(draws) - np.log(draws[:, [reference]])
    logs[~np.isfinite(logs)] = np.nan
    point = logs[0]
    told = np.isfinite(logs[1:]).mean(0) >= TOLD if len(logs) > 2 else np.zeros(len(point), bool)
    spread = np.full(len(point), np.nan)
    if told.any():
        spread[told] = np.nanstd(logs[1:, told], axis=0, ddof=1)
    return Estimate(
        name,
        np.exp(point),
        np.exp(point - NORMAL * spread),
        np.exp(point + NORMAL * spread),
        logs,
        held_out,
    )


@dataclass(frozen=True)
class Agreement:
    """Whether two estimators say the same of θ, as far as their common sampling error tells."""

    first: str
    second: str
    largest: float  # relative difference
    position: int
    agree: bool


def agreement(a: Estimate, b: Estimate, positions: np.ndarray) -> Agreement | None:
    """A simultaneous test over positions by the differences between replicates.

    Those of estimates from counts were drawn alike, so that errors which both share cancel; those from features were
    drawn apart, so that the test errs towards agreement.
    """
    number = min(len(a.logs), len(b.logs))
    difference = a.logs[:number] - b.logs[:number]
    both = np.isfinite(difference[0]) & (np.isfinite(difference).mean(0) >= TOLD)
    if both.sum() < 2:
        return None
    difference = difference[:, both]
    whole = np.isfinite(difference).all(1)
    whole[0] = True
    difference = difference[whole]  # replicates that tell all positions
    point = difference[0]
    largest = int(np.abs(point).argmax())
    found = float(np.expm1(np.abs(point[largest])))
    spread = difference[1:].std(0, ddof=1) if len(difference) > 2 else np.zeros(len(point))
    sure = spread > 0
    agree = found <= ALIKE
    if sure.any() and not agree:
        critical = float(norm.isf(DIFFERENT / 2 / sure.sum()))
        agree = bool((np.abs(point[sure]) <= np.maximum(critical * spread[sure], np.log1p(ALIKE))).all())
    return Agreement(a.name, b.name, found, int(positions[both][largest]), agree)


def links(wins: np.ndarray, positions: np.ndarray) -> dict[str, Any]:
    """How positions hang together through items that were shown at both of two: components, and the weakest link."""
    strength = np.minimum(wins, wins.T)
    linked = strength >= FEW_LINKS
    number, part = connected_components(linked, directed=False)
    tree = minimum_spanning_tree(np.where(linked, -strength, 0)).tocoo()
    weakest = int(tree.data.argmax()) if len(tree.data) else None
    return {
        "components": [positions[part == i].tolist() for i in range(number)],
        "weakest": None
        if weakest is None
        else {
            "positions": sorted(int(positions[i]) for i in (tree.row[weakest], tree.col[weakest])),
            "clicks": float(-tree.data[weakest]),
        },
    }


@dataclass(frozen=True)
class Verdict:
    """What can be done with the log as it is, why, and what randomisation would give."""

    status: str
    anchor: str | None  # the estimator to go by
    reasons: tuple[str, ...]
    requests_needed: int  # in random order

    @property
    def advice(self) -> str:
        return ADVICE[self.status]


def verdict(
    estimates: Mapping[str, Estimate],
    agreements: list[Agreement],
    *,
    impressions: np.ndarray,
    requests: float,
    rate: np.ndarray,
    explained: float | None,
    features_tell: bool,
) -> Verdict:
    """By what is best identified: interventions first, features alone only where they leave the order open."""
    share = impressions / impressions.sum()
    told = [name for name in INTERVENED if name in estimates and _told(estimates[name], share) > 0.5]
    sharp_of = {name: float(share[estimates[name].half_width <= SHARP].sum()) for name in told}
    anchor = next((name for name in told if sharp_of[name] >= MOST_IMPRESSIONS), told[0] if told else None)
    reasons = []
    if anchor is not None:
        sharp = sharp_of[anchor]
        status = IDENTIFIED if sharp >= MOST_IMPRESSIONS else CARE
        reasons.append(_words(anchor))
        if status == CARE:
            wide = f"but only {sharp:.0%} of impressions are at positions where it is known to within {SHARP:.0%}"
            reasons.append(wide)
        against = [
            a
            for a in agreements
            if anchor in (a.first, a.second) and {a.first, a.second} <= {*INTERVENED} and not a.agree
        ]
        for a in against:
            status = CARE
            reasons.append(f"{a.first} and {a.second} differ by {a.largest:.0%} at position {a.position}")
    elif explained is None or (explained < RANDOM_ORDER and not features_tell):
        status = NOT
        reasons.append(f"{_lacking(estimates)}, and no features tell of relevance")
    elif explained < RANDOM_ORDER:
        status, anchor = IDENTIFIED, _best_of_features(estimates)
        reasons.append(
            "features tell clicks but nothing of the order: it is as good as random, unless something that is no "
            "feature decided it"
        )
    elif explained < OPEN_ORDER:
        status, anchor = CARE, _best_of_features(estimates)
        reasons.append(f"it rests on features alone, which explain {explained:.0%} of the order that was shown")
    else:
        status, anchor = NOT, _best_of_features(estimates)
        reasons.append(
            f"features explain {explained:.0%} of the order, and {_lacking(estimates)}: "
            "what stands higher may be seen more or be better, and nothing tells which"
        )
    theta = estimates[anchor].theta if anchor is not None else rate / rate.max()
    return Verdict(status, anchor, tuple(reasons), _requests_needed(theta, rate, impressions / requests))


def _told(found: Estimate, share: np.ndarray) -> float:
    return float(share[np.isfinite(found.theta)].sum())


def _words(anchor: str) -> str:
    return {
        "known": "propensities are known",
        "randomised": "some of the traffic was in random order",
        "harvest": "items were shown at several positions",
        "items": "items were shown at several positions",
    }[anchor]


def _lacking(estimates: Mapping[str, Estimate]) -> str:
    if "harvest" in estimates:
        return "the items that were shown at several positions do not link most of them"
    return "no item was shown at several positions and no order was random"


def _best_of_features(estimates: Mapping[str, Estimate]) -> str | None:
    return next((name for name in ("strata", "regression") if name in estimates), None)


def _requests_needed(theta: np.ndarray, rate: np.ndarray, shown: np.ndarray) -> int:
    """Requests in random order that would tell θ_k/θ_ref to within `WANTED` at every position that is clicked."""
    known = np.isfinite(theta) & (theta > 0) & (rate > 0)
    if known.sum() < 2:
        return 0
    relevance = float(np.mean(rate[known] / theta[known]))
    chance = np.clip(theta[known] * relevance, 1e-6, 1)
    variance = (1 - chance) / chance / np.minimum(shown[known], 1)  # not every request shows every position
    return int(np.ceil((variance.max() + variance[theta[known].argmax()]) / np.log1p(WANTED) ** 2 * NORMAL**2))
