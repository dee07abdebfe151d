"""The result of an audit: estimates of examination, a verdict, and a summary of both in a few sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ultr.bias.estimators import SCALE, SMALLEST, largest_one, pools
from ultr.bias.identification import CARE, IDENTIFIED, INTERVALS, NOT, PRECISE, Agreement, Estimate, Verdict
from ultr.bias.pitfalls import Pitfall
from ultr.utils.html import facts_html, table_html

NAMED_POSITIONS = (2, 3, 5, 10, 20, 50)  # the positions, by their order in the list, whose θ a summary has


@dataclass(frozen=True, eq=False)
class BiasReport:
    """The result of an audit: estimates of examination by position, a verdict, and problems of the log."""

    label: str
    requests: int
    positions: np.ndarray
    impressions: np.ndarray
    clicks: np.ndarray  # number of rows with positive feedback at each position
    rate: np.ndarray  # share of the impressions at each position with positive feedback
    reference: int  # the position that θ is relative to: θ is 1 there
    estimates: Mapping[str, Estimate]
    agreements: list[Agreement]
    verdict: Verdict
    pitfalls: list[Pitfall]
    links: Mapping[str, Any] | None = None  # groups of positions that shared items link (`identification.links`)
    explained: float | None = None  # share of the logged order that features explain
    sampled_requests: int = 0  # number of requests that estimates from features use
    left_out: int = 0  # number of suspicious requests that no estimate uses
    pool: np.ndarray = field(default_factory=lambda: np.arange(0))  # of each position; those of a pool share one θ
    notes: tuple[str, ...] = ()
    segments: Mapping[str, BiasReport] = field(default_factory=dict)

    @property
    def anchor(self) -> Estimate | None:
        """The estimate that the verdict recommends, or None."""
        return None if self.verdict.anchor is None else self.estimates[self.verdict.anchor]

    def propensities(self) -> dict[int, float]:
        """Return examination by position, at most 0.7; {} if no estimate is recommended.

        Pools of positions with imprecise estimates share one with their neighbours (`estimators.pools`). It is
        Σn / Σ(n/θ), where n is the precision of log θ, but at most the number of clicks. Where θ is unknown, it is
        interpolated.
        """
        if self.anchor is None or not np.isfinite(self.anchor.theta).any():
            return {}
        theta, clicks = self.anchor.theta.copy(), np.full(len(self.positions), np.inf)
        if self.verdict.anchor != "known":
            first, of_pool = np.unique(self.pool, return_index=True)[1], np.bincount(self.pool, self.clicks)
            theta, clicks = theta[first], np.full(len(first), np.inf)
            precision = self.anchor.precision[first] if np.isfinite(self.anchor.low).any() else of_pool
            estimated = np.isfinite(theta)
            n = np.minimum(precision, np.maximum(of_pool, 1))[estimated]
            joined = pools(n, self.positions[first][estimated])
            theta[estimated] = (np.bincount(joined, n) / np.bincount(joined, n / theta[estimated]))[joined]
            clicks[estimated] = np.bincount(joined, n)[joined]
            theta, clicks = theta[self.pool], clicks[self.pool]
        scaled = np.maximum(SCALE * largest_one(theta, clicks), SMALLEST)
        return {int(k): float(v) for k, v in zip(self.positions, scaled, strict=True)}

    def _repr_html_(self) -> str:
        names = list(self.estimates)
        rows = []
        for i, position in enumerate(self.positions.tolist()):
            cells = [self.estimates[name].text(i) for name in names]
            rows.append([str(position), f"{self.impressions[i]:,.0f}", f"{self.rate[i]:.2%}", *cells])
        table = table_html(["position", "shown", "rate", *names], rows, f"θ relative to position {self.reference}")
        facts = {"verdict": f"{self.verdict.status}: {self.verdict.advice}", "requests": f"{self.requests:,}"}
        warnings = [f"{p.name}: {p.what}; {p.hint}" for p in self.pitfalls]
        return facts_html("Position bias", facts, [*self.verdict.reasons, *warnings]) + table

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dictionary for bias.json, where `ultr train --bias` reads `positions` and `theta`."""
        theta = self.propensities()
        return {
            "label": self.label,
            "summary": summary(self),
            "requests": self.requests,
            "positions": self.positions.tolist(),
            "theta": [theta.get(position) for position in self.positions.tolist()],
            "impressions": self.impressions.tolist(),
            "rate": self.rate.tolist(),
            "reference": self.reference,
            "pools": self.pool.tolist(),
            "estimates": {name: _estimate_json(result) for name, result in self.estimates.items()},
            "intervals": INTERVALS,
            "left_out": self.left_out,
            "agreements": [asdict(test) for test in self.agreements],
            "links": self.links,
            "order_explained_by_features": self.explained,
            "sampled_requests": self.sampled_requests,
            "verdict": {**asdict(self.verdict), "advice": self.verdict.advice},
            "pitfalls": [asdict(pitfall) for pitfall in self.pitfalls],
            "notes": list(self.notes),
            "segments": {name: report.to_json() for name, report in self.segments.items()},
        }


def _estimate_json(result: Estimate) -> dict[str, Any]:
    def plain(values: np.ndarray) -> list[float | None]:
        return [float(v) if np.isfinite(v) else None for v in values]

    return {
        "theta": plain(result.theta),
        "low": plain(result.low),
        "high": plain(result.high),
        "held_out_log_likelihood": None if result.held_out is None else plain(np.array([result.held_out]))[0],
    }


def summary(report: BiasReport) -> dict[str, str]:
    """Return sentences by name: how biased, verdict, positions, to be safe."""
    verdict = report.verdict
    reasons = " ".join(verdict.reasons)
    return {
        "how biased": _how_biased(report),
        "verdict": f"{verdict.status} - {verdict.advice}. {reasons}",
        "positions": _positions(report),
        "to be safe": _to_be_safe(report),
    }


def _to_be_safe(report: BiasReport) -> str:
    """Return what would make the verdict safe, or those of the segments that are less sure than all requests together.

    A ranker uses the examination of each segment.
    """
    order = (IDENTIFIED, CARE, NOT)
    surest = order.index(report.verdict.status)
    weaker = {name: each for name, each in report.segments.items() if order.index(each.verdict.status) > surest}
    if not weaker:
        return report.verdict.to_be_safe
    return "; ".join(f"for segment '{name}', {each.verdict.to_be_safe}" for name, each in list(weaker.items())[:2])


@dataclass(frozen=True)
class Row:
    """Positions that share one estimate, as a row of a table; `at` is the index of the first of them."""

    positions: str
    at: int
    shown: float
    rate: float


def rows_of(report: BiasReport) -> list[Row]:
    """Return a row for each position, or for each group of positions that share one estimate."""
    shown = np.bincount(report.pool, report.impressions)
    rate = np.bincount(report.pool, report.impressions * report.rate) / shown
    first = np.unique(report.pool, return_index=True)[1]
    names = [ranges(report.positions[report.pool == i], report.positions) for i in range(len(first))]
    return [Row(*row) for row in zip(names, first.tolist(), shown.tolist(), rate.tolist(), strict=True)]


def times_as_often(ratios: Mapping[str, float]) -> str:
    """Return position -> ratio in words, such as `0.51 times as often at 2, 0.34 at 3`."""
    text = ", ".join(f"{ratio:.2f} at {position}" for position, ratio in ratios.items())
    return text.replace(" at", " times as often at", 1)


def _how_biased(report: BiasReport) -> str:
    places = [i - 1 for i in NAMED_POSITIONS if i <= len(report.positions)]
    anchor = report.anchor
    if anchor is None:
        at = {report.reference: report.rate.max()} | {int(report.positions[i]): report.rate[i] for i in places}
        rates = ", ".join(f"{rate:.1%} at {position}" for position, rate in at.items())
        return f"unknown: the feedback rate is {rates}, because of position, relevance or both"
    known = [i for i in places if np.isfinite(anchor.theta[i]) and report.positions[i] != report.reference]
    if not known:
        return "unknown: only one position has an estimate"
    times = times_as_often({str(report.positions[i]): float(anchor.theta[i]) for i in known})
    if_right = ", if the estimate from features is right" if report.verdict.status == NOT else ""
    return f"compared with position {report.reference}, users look {times}{if_right}"


def _positions(report: BiasReport) -> str:
    parts = []
    share = report.impressions / report.impressions.sum()
    if (anchor := report.anchor) is not None and report.verdict.status != NOT:
        precise = anchor.half_width <= PRECISE
        without = ~np.isfinite(anchor.theta)
        for mask, what in (
            (precise, f"known to within {PRECISE:.0%}"),
            (~precise & ~without, "known less exactly"),
            (without, "without an estimate"),
        ):
            if mask.any():
                some = ranges(report.positions[mask], report.positions)
                parts.append(f"{some} {what} ({share[mask].sum():.1%} of rows)")
    else:
        parts.append("none is identified")
    shared = [report.positions[report.pool == i] for i in np.flatnonzero(np.bincount(report.pool) > 1)]
    if shared:
        pooled = ", ".join(ranges(each, report.positions) for each in shared[-3:])
        more = f" and {len(shared) - 3} more groups" if len(shared) > 3 else ""
        parts.append(f"positions with few clicks share one estimate: {pooled}{more}")
    return "; ".join(parts)


def ranges(some: np.ndarray, positions: np.ndarray) -> str:
    """Return some of the positions in words, such as `1 to 8 and 11`; neighbours in `positions` form a range."""
    place = np.searchsorted(positions, some)
    starts = np.flatnonzero(np.diff(place, prepend=-2) > 1)
    ends = np.append(starts[1:], len(some)) - 1
    texts = [f"{some[a]} to {some[b]}" if b > a else f"{some[a]}" for a, b in zip(starts, ends, strict=True)]
    if len(texts) > 4:
        texts = [*texts[:3], f"{len(texts) - 3} more ranges"]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
