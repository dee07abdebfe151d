"""Check how well a log determines examination: intervals, agreement of estimators, links of positions, a verdict.

The verdict has three parts: the evidence, the assumption that makes it evidence, and the tests of this assumption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree
from scipy.special import ndtri

from ultr.bias.counts import Counts, Impressions, LogCounts, counted
from ultr.bias.estimators import CONFIRMED, RANDOM
from ultr.log.table import as_shown

MIN_ESTIMATED = 0.8  # a position has an interval if this share of the replicates has an estimate for it
NORMAL = 1.959964  # half-width of a 95% interval, in standard deviations
SIGNIFICANCE = 0.01  # level of the test, over all positions together, that two estimators differ
NEGLIGIBLE = 0.05  # estimators whose relative difference is smaller agree without a test
PRECISE = 0.3  # relative half-width of an interval that is good enough to correct the bias
MARGIN = 1.25  # the suggested number of requests in random order is this many times what would just be enough
MOST_IMPRESSIONS = 0.9  # share of the impressions that must be at positions with a precise estimate
MIN_LINK_CLICKS = 10.0  # two positions are linked if each has this many clicks on the items they share
SOME_ORDER = 0.02  # features that explain less of the order than this say nothing about it
IDENTIFIED, CONDITIONAL = "identified", "identified under an assumption"
CARE, NOT = "identified with care", "not identified"
STATUSES = (IDENTIFIED, CONDITIONAL, CARE, NOT)  # the surest first
ADVICE = {
    IDENTIFIED: "correct for position bias",
    CONDITIONAL: "correct for position bias if the assumption holds",
    CARE: "correct for position bias with care",
    NOT: "show some requests in random order first",
}
INTERVALS = "95% intervals cover sampling error only; they do not cover wrong assumptions of an estimator."
OTHERWISE = "or pass known examination (--propensities)"
NO_ITEM_IDS = "the log has no item ids"
ITEM_IDS = "or pass ids of items that were shown at several positions (--item)"
SHARED = "shared"  # the estimate of a segment that shares strength with the others
INTERVENED = (*CONFIRMED, "items", "harvest")  # most trusted first; these can identify examination
EVIDENCE = {
    "known": "The propensities are known.",
    "randomised": "Some requests were in random order.",
    "swaps": "Some requests had swapped positions, drawn at random.",
    "items": "Items were shown at several positions.",
    "harvest": "Items were shown at several positions.",
}
CHECKS = {
    "known": "check that the known propensities belong to this log",
    "randomised": "check that the requests that --randomised marks were in random order",
    "swaps": "check that the column of --swaps has the drawn arm of each request, and that the service applied it",
    "items": "name the query with --query if items were shown for different queries",
}


_OF_ITEMS = "an item's position does not depend on its relevance to this request"
_OF_FEATURES = "nothing but these features and chance decided the order"
ASSUMPTIONS = {"items": _OF_ITEMS, "harvest": _OF_ITEMS, "strata": _OF_FEATURES, "regression": _OF_FEATURES}
EXPLORE = "plan random swaps of positions with ultr explore LOG, which cost the least"


@dataclass(frozen=True)
class Refutation:
    """The result of a test that fails if the assumption of an estimate is wrong; a passed test proves nothing."""

    name: str
    passed: bool
    value: float  # the number that was tested: a difference of estimates, or a share
    text: str  # a sentence with the number
    severe: bool = False  # whether the estimate is likely to be far off


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
    position: int | str  # where that difference is
    agree: bool
    typical: float = 0.0  # the mean relative difference of θ over impressions


def agreement(
    a: Estimate, b: Estimate, positions: np.ndarray, *, shown: np.ndarray, pool: np.ndarray
) -> Agreement | None:
    """Test whether two estimates agree at all positions, by the differences between their replicates.

    Estimates from counts use the same replicates, so that errors of both cancel. Estimates from features use other
    replicates, so that the test errs towards agreement. Return None if fewer than two positions have both estimates.
    Positions of one `pool` have one estimate, and count once; `shown` are the impressions of positions.
    """
    number = min(len(a.logs), len(b.logs))
    difference = a.logs[:number] - b.logs[:number]
    shown, first = np.bincount(pool, shown), np.unique(pool, return_index=True)[1]
    difference, positions = difference[:, first], positions[first]
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
    typical = float(np.average(np.expm1(np.abs(point)), weights=shown[both]))
    spread = difference[1:].std(0, ddof=1) if len(difference) > 2 else np.zeros(len(point))
    varies = spread > 0
    agree = largest_difference <= NEGLIGIBLE
    if varies.any() and not agree:
        critical = float(-ndtri(SIGNIFICANCE / 2 / varies.sum()))
        agree = bool((np.abs(point[varies]) <= np.maximum(critical * spread[varies], np.log1p(NEGLIGIBLE))).all())
    return Agreement(a.name, b.name, largest_difference, as_shown(int(positions[both][largest])), agree, typical)


def links(wins: np.ndarray, positions: np.ndarray, pool: np.ndarray) -> dict[str, Any]:
    """Return the groups of linked positions, and the weakest link; `wins` is the result of `estimators.pair_clicks`.

    `pool` has the row of each position in `wins`, which positions may share.
    """
    strength = np.minimum(wins, wins.T)
    linked = strength >= MIN_LINK_CLICKS
    number, part = connected_components(linked, directed=False)
    tree = minimum_spanning_tree(np.where(linked, -strength, 0)).tocoo()
    weakest = int(tree.data.argmax()) if len(tree.data) else None
    return {
        "components": [[*map(as_shown, positions[part[pool] == i].tolist())] for i in range(number)],
        "weakest": None
        if weakest is None
        else {
            "positions": [
                as_shown(int(positions[pool == i][0])) for i in sorted((tree.row[weakest], tree.col[weakest]))
            ],
            "clicks": float(-tree.data[weakest]),
        },
    }


@dataclass(frozen=True)
class Verdict:
    """The verdict on a log: how well it identifies examination, under which assumption, and what to do next."""

    status: str
    anchor: str | None  # name of the estimator to use
    reasons: tuple[str, ...]  # full sentences
    requests_needed: int  # requests in random order that would identify examination; 0 if it is identified
    next_step: str = "none"
    assumption: str = ""  # what the estimate is right under; empty if chance or the user decided the order

    @property
    def advice(self) -> str:
        return ADVICE[self.status]


def verdict(
    estimates: Mapping[str, Estimate],
    agreements: list[Agreement],
    log: LogCounts,
    *,
    best: str | None,
    source: str | None,
    explained: float | None,
    features_explain_clicks: bool,
    no_links: str,
    pool: np.ndarray,
    refutations: Sequence[Refutation] = (),
) -> Verdict:
    """Return a verdict on the estimates of a log; `no_links` says why items give no estimate, if they do not.

    Positions of one `pool` have one estimate.

    Only known propensities, random order and random swaps identify examination (`CONFIRMED`). Items at several
    positions do so under an assumption, which `refutations` test; `best` is the name of the best estimate, and `source`
    that of its evidence (`estimators.best_source`). Features alone cannot: the rest of the order may be chance, or may
    follow something that also makes items better. These two cases look the same in a log.
    """
    share = log.shown / log.shown.sum()
    candidates = [name for name in ("known", best) if name is not None and name in estimates]
    anchor = next((name for name in candidates if share[np.isfinite(estimates[name].theta)].sum() > 0.5), None)
    found = _Findings(IDENTIFIED)
    source = source if anchor == best else anchor
    few = source not in CONFIRMED  # whether more requests in random order would help
    if anchor is not None and source is not None:
        precise = float(share[estimates[anchor].half_width <= PRECISE].sum())
        found.add(EVIDENCE[source], CONDITIONAL if few else IDENTIFIED)
        if precise < MOST_IMPRESSIONS:
            few = True
            where = f"at positions where examination is known to within {PRECISE:.0%}"
            found.add(f"Only {precise:.0%} of the impressions are {where}.", CARE)
        _compare(found, source, agreements)
        _refute(found, source, refutations)
        if log.suspicious:
            found.add(f"The estimates use {log.suspicious:,} suspicious requests (see the warnings).", CARE)
            found.remedies.append("leave out --keep-suspicious")
    elif explained is None or (explained < SOME_ORDER and not features_explain_clicks):
        found.add(_sentence(*_missing(estimates, no_links), "no features explain clicks"), NOT)
    else:
        anchor = next((name for name in (SHARED, "strata", "regression") if name in estimates), None)
        source = "strata" if anchor == SHARED else anchor
        share_explained = f"features explain {max(0, explained):.0%} of the logged order"
        found.add(_sentence(share_explained, *_missing(estimates, no_links)), NOT)
        found.add("Higher positions may be seen more or may hold better items; this log cannot separate the two.")
        found.add(f"Estimates from features are right only if {_OF_FEATURES}.")
    needed = 0
    if few:
        theta = estimates[anchor].theta if anchor is not None else log.rate / log.rate.max()
        needed = _requests_needed(theta, log.rate, log.shown, log.weight, pool)
        many = f"about {needed:,} requests in random order ({_size(needed / log.weight)})"
        random = many if needed else "some requests in random order"
        found.remedies.insert(0, f"{EXPLORE}, or show {random}, marked by the column of --randomised")
    if found.status == NOT:
        found.remedies += [ITEM_IDS] * (no_links == NO_ITEM_IDS) + [OTHERWISE]
    assumption = ASSUMPTIONS.get(source or "", "")
    next_step = "; ".join(found.remedies) or "none"
    return Verdict(found.status, anchor, tuple(found.reasons), needed, next_step, assumption)


@dataclass
class _Findings:
    """The status of a verdict so far, the reasons for it, and what would help."""

    status: str
    reasons: list[str] = field(default_factory=list)
    remedies: list[str] = field(default_factory=list)

    def add(self, reason: str, status: str = IDENTIFIED) -> None:
        """Add a reason; the status is the least sure one of all reasons."""
        self.reasons.append(reason)
        self.status = max(self.status, status, key=STATUSES.index)


def _compare(found: _Findings, anchor: str, agreements: list[Agreement]) -> None:
    """Add the estimates that differ from the anchor; items that differ from random requests are a refutation."""
    others = CONFIRMED if anchor in RANDOM else INTERVENED
    differ = [
        each for each in agreements if anchor in (each.first, each.second) and {each.first, each.second} <= {*others}
    ]
    differ = [each for each in differ if not each.agree]
    if differ:
        worst = max(differ, key=lambda each: each.typical)
        other = worst.second if worst.first == anchor else worst.first
        found.add(f"The estimates {anchor} and {other} differ, by {worst.typical:.0%} on average.", CARE)
        found.remedies.append(CHECKS["items" if {anchor, other} <= {"items", "harvest"} else anchor])


def _refute(found: _Findings, anchor: str, refutations: Sequence[Refutation]) -> None:
    """Add the results of the tests of an estimate. The order of random requests is tested too, where it is declared."""
    if anchor in CONFIRMED:
        refutations = [each for each in refutations if anchor == "randomised" and each.name == "random order"]
    elif not refutations:
        found.add("No test of the assumption could be run, because there are too few clicks or replicates.")
    failed = [each for each in refutations if not each.passed]
    for each in failed:
        found.add(f"The test '{each.name}' failed: {each.text}", NOT if each.severe else CARE)
    if failed and anchor in CONFIRMED:
        found.remedies.append(CHECKS[anchor])
    if refutations and not failed and anchor not in CONFIRMED:
        found.add("No test of the assumption failed.")


def _size(ratio: float) -> str:
    return f"{ratio:.1%} of the size of this log" if ratio < 1 else f"{ratio:.1f} times the size of this log"


def _missing(estimates: Mapping[str, Estimate], no_links: str) -> tuple[str, ...]:
    if "items" in estimates:
        no_links = "the items shown at several positions link too few positions or have too few clicks"
    few = "the requests in random order have too few clicks"
    return no_links, few if "randomised" in estimates else "no request was in random order"


def _sentence(*parts: str) -> str:
    text = f"{', '.join(parts[:-1])}, and {parts[-1]}."
    return text[0].upper() + text[1:]


def _requests_needed(
    theta: np.ndarray, rate: np.ndarray, impressions: np.ndarray, requests: float, pool: np.ndarray
) -> int:
    """Return how many requests in random order identify θ: they estimate it well enough where most impressions are.

    So rare positions do not matter. The number has two significant digits, rounded up. θ is relative to its largest
    value, and positions of one `pool` are estimated together.
    """
    seen, first = np.bincount(pool, impressions), np.unique(pool, return_index=True)[1]
    theta, rate = theta[first], np.bincount(pool, impressions * rate) / seen
    usable = np.isfinite(theta) & (theta > 0) & (rate > 0)
    if usable.sum() < 2:
        return 0
    theta, rate, seen = theta[usable], rate[usable], seen[usable]
    chance = np.clip(theta * np.mean(rate / theta), 1e-6, 1 - 1e-6)
    variance = (1 - chance) / chance / (seen / requests)  # not every request shows every position
    best = theta.argmax()
    enough = (variance + variance[best]) * (NORMAL / np.log1p(PRECISE)) ** 2
    enough[best] = 0
    order = np.argsort(enough)
    covered = np.cumsum(seen[order]) >= MOST_IMPRESSIONS * impressions.sum()
    return rounded_up(MARGIN * float(enough[order][covered.argmax() if covered.any() else -1]))


def rounded_up(number: float, digits: int = 2) -> int:
    """Return a number rounded up to a whole one with a number of significant digits."""
    unit: int = 10 ** max(0, math.floor(math.log10(max(number, 1.0))) + 1 - digits)
    return math.ceil(number / unit - 1e-9) * unit


# --- Likelihood of held-out clicks ------------------------------------------------------------------------------------
# The held-out likelihood: how well an estimate of examination θ predicts clicks that it was not fitted to.

ROWS, CELLS = 2_000_000, 100_000  # about the most rows and cells that are used; a sample has whole strata
TRAINED, TUNED = 0.7, 0.8  # the first 70% of the requests fit β, the next 10% choose the prior, the rest validate θ
STRENGTHS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)  # candidates for the strength of β's prior, in impressions
EM_STEPS = 30


class HeldOut:
    """Clicks of held-out requests under P(c>0) = θ_k β_s, with β of each stratum estimated from the other requests.

    β has a Beta prior around its mean, so that an item without a click does not count as certainly irrelevant. A part
    of the other requests chooses the strength of the prior.
    """

    def __init__(self, seen: Impressions, strata: np.ndarray, *, seed: int = 0) -> None:
        rows: np.ndarray | slice = slice(None)
        if len(strata) > ROWS:
            sampled = np.random.default_rng(seed).random(int(strata.max()) + 1) < ROWS / len(strata)
            rows = np.flatnonzero(sampled[strata])
        counts = counted(seen, strata[rows], rows)
        if len(counts.strata) > CELLS:
            sampled = np.random.default_rng(seed).random(counts.size[0]) < CELLS / len(counts.strata)
            counts = counts.select(sampled[counts.strata])
        groups = counts.shown.shape[1]
        part = np.digitize(np.arange(groups), [TRAINED * groups, TUNED * groups])
        self.parts = [counts.weighted(in_part.astype(float)) for in_part in (part == 0, part == 1, part < 2, part == 2)]

    def score(self, theta: np.ndarray) -> float:
        """Return the mean log-likelihood of an impression in held-out requests; rows where θ is NaN are ignored."""
        if not np.isfinite(theta).any():
            return float("nan")
        estimated = np.isfinite(theta)[self.parts[0].places]
        first, second, others, held_out = (part.select(estimated) for part in self.parts)
        theta = (theta / np.nanmax(theta))[held_out.places]
        strength = max(STRENGTHS, key=lambda strength: _mean_likelihood(theta, first, second, strength))
        return _mean_likelihood(theta, others, held_out, strength)


def _mean_likelihood(theta: np.ndarray, fitted: Counts, held_out: Counts, strength: float) -> float:
    """Return the mean log-likelihood of held-out impressions, with β from others in the same cells; θ is by cell."""
    if not held_out.shown.sum() or not fitted.shown.sum():
        return float("nan")
    shown, clicked, strata, size = fitted.shown, fitted.clicked, fitted.strata, fitted.size[0]
    mean = np.clip(clicked.sum() / (shown * theta).sum(), 1e-6, 1 - 1e-6)
    total = np.bincount(strata, shown, size)
    beta = np.full(size, mean)
    for _ in range(EM_STEPS):
        here = beta[strata]
        unseen = (1 - theta) * here / (1 - theta * here)
        relevant = np.bincount(strata, clicked + (shown - clicked) * unseen, size)
        beta = np.clip((relevant + strength * mean) / (total + strength), 1e-9, 1 - 1e-9)
    chance = np.clip(theta * beta[strata], 1e-12, 1 - 1e-12)
    missed = held_out.shown - held_out.clicked
    return float((held_out.clicked * np.log(chance) + missed * np.log1p(-chance)).sum() / held_out.shown.sum())
