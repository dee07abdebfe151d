"""Check claims of the paper behind pairwise-em (CIKM 2022) with paired tests over runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultr.evaluation.scores import PairedTest
from ultr.report.parts import Heading, Notes, Part
from ultr.training.compare import Comparison, Row

HELD, DIRECTION, NOT, REVERSED = "held", "in direction only", "did not hold", "reversed"


@dataclass(frozen=True)
class Claim:
    """A claim on one data set, the verdict on it, and the test results behind the verdict."""

    text: str
    data: str
    verdict: str
    evidence: str


def verdict_of(test: PairedTest) -> str:
    """Return the verdict on the claim that the difference of a paired test is positive."""
    if test.difference > 0:
        return HELD if test.significant else DIRECTION
    return REVERSED if test.significant else NOT


def difference(result: Comparison, above: str, below: str, metric: str) -> tuple[PairedTest, str]:
    """Return the paired test over runs of a metric of `above` minus that of `below`, and a text about the result."""
    test = row_of(result, above).tested(row_of(result, below))[metric]
    return test, f"{above} minus {below} {test.difference:+.4f} [{test.low:+.4f}, {test.high:+.4f}], p = {test.p:.2g}"


def claim_above(text: str, data: str, result: Comparison, above: str, below: str, metric: str) -> Claim:
    """Check the claim that the method `above` is better than the method `below`."""
    test, evidence = difference(result, above, below, metric)
    return Claim(text, data, verdict_of(test), evidence)


def claim_above_all(text: str, data: str, result: Comparison, above: str, others: Sequence[str], metric: str) -> Claim:
    """Check the claim that the method `above` is better than each of the others; the worst verdict counts."""
    tests = {other: difference(result, above, other, metric) for other in others}
    verdicts = [verdict_of(test) for test, _ in tests.values()]
    worst = max(verdicts, key=(HELD, DIRECTION, NOT, REVERSED).index)
    nearest = min(tests, key=lambda other: tests[other][0].difference)
    not_below = [other for other, verdict in zip(tests, verdicts, strict=True) if verdict != HELD]
    evidence = f"nearest: {tests[nearest][1]}"
    if not_below:
        evidence += f"; not significantly above: {', '.join(not_below)}"
    return Claim(text, data, worst, evidence)


def claim_level(text: str, data: str, result: Comparison, method: str, others: Sequence[str], metric: str) -> Claim:
    """Check the claim that a method is not significantly worse than the best of the others."""
    best = max(others, key=lambda other: float(np.mean(row_of(result, other).results[metric])))
    test, evidence = difference(result, method, best, metric)
    worse = test.difference < 0 and test.significant
    return Claim(text, data, REVERSED if worse else HELD, evidence)


def row_of(result: Comparison, entry: str) -> Row:
    """Return the row of a comparison with the text `entry`, a method and its options."""
    return next(row for row in result.rows if row.entry == entry)


def claims_text(claims: Sequence[Claim]) -> str:
    """Return the claims as Markdown: under each claim, a list with the verdict on each data set."""
    lines = ["## Claims"]
    for text in dict.fromkeys(claim.text for claim in claims):
        lines.append(f"\n{text}:\n")
        lines += [f"- {c.data}: **{c.verdict}**. {c.evidence}" for c in claims if c.text == text]
    return "\n".join(lines)


def claim_parts(claims: Sequence[Claim]) -> list[Part]:
    """Return the claims as parts of a page: under each claim, a note with the verdict on each data set."""
    parts: list[Part] = []
    for text in dict.fromkeys(claim.text for claim in claims):
        parts.append(Heading(text))
        same = (c for c in claims if c.text == text)
        parts += [Notes([f"{c.data}: {c.verdict}. {c.evidence}"], good=c.verdict == HELD) for c in same]
    return parts
