"""The paper's claims, judged by paired tests over runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultr.compare import Comparison, Row
from ultr.evaluation import PairedTest

HELD, DIRECTION, NOT, REVERSED = "held", "in direction only", "did not hold", "reversed"


@dataclass(frozen=True)
class Claim:
    """What was claimed, on which data, whether it held, and by what figures."""

    text: str
    data: str
    verdict: str
    evidence: str


def verdict_of(test: PairedTest) -> str:
    """Whether a difference that should be above zero is, and significantly."""
    if test.difference > 0:
        return HELD if test.significant else DIRECTION
    return REVERSED if test.significant else NOT


def difference(result: Comparison, above: str, below: str, metric: str) -> tuple[PairedTest, str]:
    """One method less another, run by run, and that in words."""
    test = row_of(result, above).tested(row_of(result, below))[metric]
    return test, f"{above} less {below} {test.difference:+.4f} [{test.low:+.4f}, {test.high:+.4f}], p = {test.p:.2g}"


def claim_above(text: str, data: str, result: Comparison, above: str, below: str, metric: str) -> Claim:
    """That one method stands above another."""
    test, words = difference(result, above, below, metric)
    return Claim(text, data, verdict_of(test), words)


def claim_above_all(text: str, data: str, result: Comparison, above: str, others: Sequence[str], metric: str) -> Claim:
    """That one method stands above each of the others: as true as for the nearest of them."""
    found = {other: difference(result, above, other, metric) for other in others}
    verdicts = [verdict_of(test) for test, _ in found.values()]
    worst = max(verdicts, key=(HELD, DIRECTION, NOT, REVERSED).index)
    nearest = min(found, key=lambda other: found[other][0].difference)
    short = [other for other, verdict in zip(found, verdicts, strict=True) if verdict != HELD]
    words = f"nearest: {found[nearest][1]}"
    if short:
        words += f"; not significantly above: {', '.join(short)}"
    return Claim(text, data, worst, words)


def claim_level(text: str, data: str, result: Comparison, method: str, others: Sequence[str], metric: str) -> Claim:
    """That a method is not significantly below the best of others."""
    best = max(others, key=lambda other: float(np.mean(row_of(result, other).figures[metric])))
    test, words = difference(result, method, best, metric)
    below = test.difference < 0 and test.significant
    return Claim(text, data, REVERSED if below else HELD, words)


def row_of(result: Comparison, entry: str) -> Row:
    return next(row for row in result.rows if row.entry == entry)


def claims_text(claims: Sequence[Claim]) -> str:
    """The claims as a Markdown list, by what was claimed."""
    lines = ["## Claims"]
    for text in dict.fromkeys(claim.text for claim in claims):
        lines.append(f"\n{text}:\n")
        lines += [f"- {c.data}: **{c.verdict}**. {c.evidence}" for c in claims if c.text == text]
    return "\n".join(lines)
