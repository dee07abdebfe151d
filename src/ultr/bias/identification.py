"""Check how well a log determines examination: intervals, agreement of estimators, links of positions, a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree

MIN_ESTIMATED = 0.8  # a position has an interval if this share of the replicates has an estimate for it
NORMAL = 1.959964  # half-width of a 95% interval, in standard deviations
SIGNIFICANCE = 0.01  # level of the test, over all positions together, that two estimators differ
NEGLIGIBLE = 0.05  # estimators whose relative difference is smaller agree without a test
PRECISE = 0.3  # relative half-width of an interval that is good enough to correct the bias
TARGET = 0.10  # relative half-width that the suggested number of requests in random order would reach
MOST_IMPRESSIONS = 0.9  # share of the impressions that must be at positions with a precise estimate
MIN_LINK_CLICKS = 10.0  # two positions are linked if each has this many clicks on the items they share
SOME_ORDER = 0.02  # features that explain less of the order than this say nothing about it
IDENTIFIED, CARE, NOT = "identified", "identified with care", "not identified"
ADVICE = {
    IDENTIFIED: "correct for position bias",
    CARE: "correct for position bias with care",
    NOT: "show some requests in random order first",
}
INTERVALS = "95% intervals cover sampling error only; they do not cover wrong assumptions of an estimator."
HELP = (
    "One of these would identify examination: random order in some requests (marked by the column of --randomised), "
    "ids of items that were shown at several positions (--item), or known examination (--propensities)."
)
INTERVENED = ("known", "randomised", "items", "harvest")  # most trusted first; only these can identify examination
EVIDENCE = {
    "known": "The propensities are known.",
    "randomised": "Some requests were in random order.",
    "items": "Items were shown at several positions.",
    "harvest": "Items were shown at several positions.",
}


@dataclass(frozen=True, eq=False)
class Estimate:
    """Examination θ relative to a reference position, with 95% intervals and the bootstrap replicates behind them."""

    name: str
    theta: np.ndarray  # [positions], NaN where there is no estimate
    low: np.ndarray
    high: np.ndarray
    logs: np.ndarray  # [1 + replicates, positions] log θ of the log, then of each replicate
    held_out: float | None = None  # mean log-likelihood of an impression in held-out requests

    @property
    def half_width(self) -> np.ndarray:
        """The half-width of the interval of each position, relative to θ; infinite where there is no interval."""
        width = np.expm1((np.log(self.high) - np.log(self.low)) / 2)
        return np.where(np.isfinite(width), width, np.inf)

    @property
    def precision(self) -> np.ndarray:
        """1 / Var(log θ) of each position: about the number of clicks behind θ. It is near 0 if θ has no interval."""
        spread = (np.log(self.high) - np.log(self.low)) / (2 * NORMAL)
        return np.where(np.isfinite(spread), 1 / np.maximum(spread, 1e-6) ** 2, 1e-6)

    def text(self, place: int) -> str:
        """Return θ of a position, by its index, with its interval if there is one."""
        theta, low, high = self.theta[place], self.low[place], self.high[place]
        interval = f" [{low:.3f}, {high:.3f}]" if low < high else ""
        return f"{theta:.3f}{interval}" if np.isfinite(theta) else "-"


def estimate(name: str, draws: np.ndarray, reference: int, held_out: float | None = None) -> Estimate:
    """Return an estimate from `draws`, θ [1 + replicates, positions] at any scale; intervals are normal in log θ."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(draws) - np.log(draws[:, [reference]])
    logs[~np.isfinite(logs)] = np.nan
    point = logs[0]
    estimated = np.isfinite(logs[1:]).mean(0) >= MIN_ESTIMATED if len(logs) > 2 else np.zeros(len(point), bool)
    spread = np.full(len(point), np.nan)
    if estimated.any():
        spread[estimated] = np.nanstd(logs[1:, estimated], axis=0, ddof=1)
    low, high = np.exp(point - NORMAL * spread), np.exp(point + NORMAL * spread)
    return Estimate(name, np.exp(point), low, high, logs, held_out)


@dataclass(frozen=True)
class Agreement:
    """The result of a test of whether two estimators of θ agree, given their sampling error."""

    first: str
    second: str
    largest: float  # the largest relative difference of θ
    position: int  # where that difference is
    agree: bool


def agreement(a: Estimate, b: Estimate, positions: np.ndarray) -> Agreement | None:
    """Test whether two estimates agree at all positions, by the differences between their replicates.

    Estimates from counts use the same replicates, so that errors of both cancel. Estimates from features use other
    replicates, so that the test errs towards agreement. Return None if fewer than two positions have both estimates.
    """
    from scipy.stats import norm

    number = min(len(a.logs), len(b.logs))
    difference = a.logs[:number] - b.logs[:number]
    both = np.isfinite(difference[0]) & (np.isfinite(difference).mean(0) >= MIN_ESTIMATED)
    if both.sum() < 2:
        return None
    difference = difference[:, both]
    complete = np.isfinite(difference).all(1)
    complete[0] = True
    difference = difference[complete]  # replicates with an estimate at all of these positions
    point = difference[0]
    largest = int(np.abs(point).argmax())
    largest_difference = float(np.expm1(np.abs(point[largest])))
    spread = difference[1:].std(0, ddof=1) if len(difference) > 2 else np.zeros(len(point))
    varies = spread > 0
    agree = largest_difference <= NEGLIGIBLE
    if varies.any() and not agree:
        critical = float(norm.isf(SIGNIFICANCE / 2 / varies.sum()))
        agree = bool((np.abs(point[varies]) <= np.maximum(critical * spread[varies], np.log1p(NEGLIGIBLE))).all())
    return Agreement(a.name, b.name, largest_difference, int(positions[both][largest]), agree)


def links(wins: np.ndarray, positions: np.ndarray) -> dict[str, Any]:
    """Return the groups of linked positions, and the weakest link; `wins` is the result of `estimators.pair_clicks`."""
    strength = np.minimum(wins, wins.T)
    linked = strength >= MIN_LINK_CLICKS
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
    """The verdict on a log: how well it identifies examination, why, and how many requests in random order suffice."""

    status: str
    anchor: str | None  # name of the estimator to use
    reasons: tuple[str, ...]  # full sentences
    requests_needed: int  # requests in random order that would estimate examination to within 10%

    @property
    def advice(self) -> str:
        return ADVICE[self.status]


def verdict(
    estimates: Mapping[str, Estimate],
    agreements: list[Agreement],
    *,
    best: str | None,
    impressions: np.ndarray,
    requests: float,
    rate: np.ndarray,
    explained: float | None,
    features_explain_clicks: bool,
    no_links: str,
    suspicious: int = 0,
) -> Verdict:
    """Return a verdict on estimates of examination; `no_links` says why items give no estimate, if they do not.

    Only known propensities, random order and items at several positions can identify examination; of the last two,
    `best` is the better one (`evidence.best_source`). Features alone cannot: the rest of the order may be chance, or
    may follow something that also makes items better. These two cases look the same in a log. `suspicious` is the
    number of suspicious requests behind the estimates.
    """
    share = impressions / impressions.sum()
    candidates = [name for name in ("known", best) if name is not None and name in estimates]
    anchor = next((name for name in candidates if share[np.isfinite(estimates[name].theta)].sum() > 0.5), None)
    reasons = []
    if anchor is not None:
        precise = float(share[estimates[anchor].half_width <= PRECISE].sum())
        status = IDENTIFIED if precise >= MOST_IMPRESSIONS else CARE
        reasons.append(EVIDENCE[anchor])
        if status == CARE:
            where = f"at positions where examination is known to within {PRECISE:.0%}"
            reasons.append(f"Only {precise:.0%} of the impressions are {where}.")
        for a in agreements:
            if anchor in (a.first, a.second) and {a.first, a.second} <= {*INTERVENED} and not a.agree:
                status, names = CARE, f"{a.first} and {a.second}"
                reasons.append(f"The estimators {names} differ by {a.largest:.0%} at position {a.position}.")
        if suspicious:
            status = CARE
            reasons.append(f"The estimates use {suspicious:,} suspicious requests (see the warnings).")
    elif explained is None or (explained < SOME_ORDER and not features_explain_clicks):
        status = NOT
        reasons += [_sentence(*_missing(estimates, no_links), "no features explain clicks"), HELP]
    else:
        status, anchor = NOT, _best_of_features(estimates)
        share_explained = f"features explain {max(0, explained):.0%} of the logged order"
        reasons += [
            _sentence(share_explained, *_missing(estimates, no_links)),
            "Higher positions may be seen more or may hold better items; this log cannot separate the two.",
            "Estimates from features are right only if nothing but these features and chance decided the order.",
            HELP,
        ]
    theta = estimates[anchor].theta if anchor is not None else rate / rate.max()
    return Verdict(status, anchor, tuple(reasons), _requests_needed(theta, rate, impressions / requests))


def _missing(estimates: Mapping[str, Estimate], no_links: str) -> tuple[str, ...]:
    if "items" in estimates:
        no_links = "the items shown at several positions link too few positions or have too few clicks"
    few = "the requests in random order have too few clicks"
    return no_links, few if "randomised" in estimates else "no request was in random order"


def _sentence(*parts: str) -> str:
    text = f"{', '.join(parts[:-1])}, and {parts[-1]}."
    return text[0].upper() + text[1:]


def _best_of_features(estimates: Mapping[str, Estimate]) -> str | None:
    return next((name for name in ("strata", "regression") if name in estimates), None)


def _requests_needed(theta: np.ndarray, rate: np.ndarray, shown: np.ndarray) -> int:
    """Return how many requests in random order estimate θ, relative to its largest value, to within `TARGET`."""
    usable = np.isfinite(theta) & (theta > 0) & (rate > 0)
    if usable.sum() < 2:
        return 0
    relevance = float(np.mean(rate[usable] / theta[usable]))
    chance = np.clip(theta[usable] * relevance, 1e-6, 1)
    variance = (1 - chance) / chance / np.minimum(shown[usable], 1)  # not every request shows every position
    return int(np.ceil((variance.max() + variance[theta[usable].argmax()]) / np.log1p(TARGET) ** 2 * NORMAL**2))
