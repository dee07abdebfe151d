"""Check claims of the paper behind pairwise-em (CIKM 2022) with paired tests over runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ultr.evaluation.scores import holm
from ultr.report.parts import Heading, Notes, Part
from ultr.training.comparison import Comparison, Difference, Row

HELD, DIRECTION, NOT, REVERSED = "held", "in direction only", "did not hold", "reversed"


@dataclass(frozen=True)
class Claim:
    """A claim on one data set, the verdict on it, and the test results behind the verdict."""

    text: str
    data: str
    verdict: str
    evidence: str
    difference: float | None = None  # that the claim says is positive; None: the verdict is not by one difference
    p: float = 1.0  # the larger of the p values over runs and over requests
    is_level: bool = False  # the claim says only that the difference is not negative


def verdict_of(difference: float, p: float, *, is_level: bool = False) -> str:
    """Return the verdict on the claim that a difference with this p value is positive, or not negative."""
    if is_level:
        return REVERSED if difference < 0 and p < 0.05 else HELD
    if difference > 0:
        return HELD if p < 0.05 else DIRECTION
    return REVERSED if p < 0.05 else NOT


def corrected(claims: Sequence[Claim]) -> list[Claim]:
    """Return claims with verdicts by p values that Holm's method corrects for the number of claims on a data set."""
    result = list(claims)
    for data in dict.fromkeys(claim.data for claim in claims):
        where = [i for i, claim in enumerate(claims) if claim.data == data and claim.difference is not None]
        for i, p in zip(where, holm([claims[i].p for i in where]), strict=True):
            claim, difference = claims[i], claims[i].difference or 0.0
            verdict = verdict_of(difference, p, is_level=claim.is_level)
            evidence = f"{claim.evidence}; corrected for {len(where)} claim{'s' * (len(where) > 1)} p = {p:.2g}"
            result[i] = replace(claim, verdict=verdict, evidence=evidence)
    return result


def difference(result: Comparison, above: str, below: str, metric: str) -> tuple[Difference, str]:
    """Return the paired tests of a metric of `above` minus that of `below`, and a text about the result."""
    tests = row_of(result, above).tested(row_of(result, below))[metric]
    test, p = tests.seeds, f"p = {tests.seeds.p:.2g}"
    if tests.requests is not None:
        p += f" over runs, {tests.requests.p:.2g} over requests"
    return tests, f"{above} minus {below} {test.difference:+.4f} [{test.low:+.4f}, {test.high:+.4f}], {p}"


def claim_above(text: str, data: str, result: Comparison, above: str, below: str, metric: str) -> Claim:
    """Check the claim that the method `above` is better than the method `below`."""
    test, evidence = difference(result, above, below, metric)
    gap = test.seeds.difference
    return Claim(text, data, verdict_of(gap, test.p), evidence, gap, test.p)


def claim_above_all(text: str, data: str, result: Comparison, above: str, others: Sequence[str], metric: str) -> Claim:
    """Check the claim that the method `above` is better than each of the others; the worst verdict counts."""
    tests = {other: difference(result, above, other, metric) for other in others}
    gaps = {other: test.seeds.difference for other, (test, _) in tests.items()}
    verdicts = [verdict_of(gaps[other], test.p) for other, (test, _) in tests.items()]
    worst = max(verdicts, key=(HELD, DIRECTION, NOT, REVERSED).index)
    nearest = min(gaps, key=lambda other: gaps[other])
    not_below = [other for other, verdict in zip(tests, verdicts, strict=True) if verdict != HELD]
    evidence = f"nearest: {tests[nearest][1]}"
    if not_below:
        evidence += f"; not significantly above: {', '.join(not_below)}"
    p = tests[nearest][0].p if gaps[nearest] <= 0 else max(test.p for test, _ in tests.values())  # it needs all of them
    return Claim(text, data, worst, evidence, gaps[nearest], p)


def claim_level(text: str, data: str, result: Comparison, method: str, others: Sequence[str], metric: str) -> Claim:
    """Check the claim that a method is not significantly worse than the best of the others."""
    best = max(others, key=lambda other: float(np.mean(row_of(result, other).results[metric])))
    test, evidence = difference(result, method, best, metric)
    gap = test.seeds.difference
    return Claim(text, data, verdict_of(gap, test.p, is_level=True), evidence, gap, test.p, is_level=True)


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
