"""The result of an audit in a few sentences: how biased the log is, how sure that is, and for which positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ultr.bias.identification import NOT, PRECISE

if TYPE_CHECKING:
    from ultr.bias.audit import BiasReport

NAMED_POSITIONS = (2, 3, 5, 10, 20, 50)  # the positions, by their order in the list, whose θ a summary has


def summary(report: BiasReport) -> dict[str, str]:
    """Return sentences by name: how biased, verdict, positions, to be safe."""
    verdict = report.verdict
    reasons = " ".join(verdict.reasons)
    return {
        "how biased": _how_biased(report),
        "verdict": f"{verdict.status} - {verdict.advice}. {reasons}",
        "positions": _positions(report),
        "to be safe": verdict.to_be_safe,
    }


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
    first, *others = [f"{anchor.theta[i]:.2f}{{}} at {report.positions[i]}" for i in known]
    times = ", ".join([first.format(" times as often"), *(each.format("") for each in others)])
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
