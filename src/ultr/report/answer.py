"""The answer at the top of a report, in words: is the new ranker better, by how much, how sure, and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ultr.evaluation.judgement import LOGGED_RANKING
from ultr.evaluation.scores import FEEDBACK, OFF_POLICY, PairedTest
from ultr.report.parts import Notes
from ultr.report.run import Run
from ultr.training.outcome import LOGGED
from ultr.training.selection import less_is_better
from ultr.training.summary import NOT_CONFIRMED

UNSURE = 0.2  # standard error of θ above which an off-policy estimate is called uncertain


def answer(runs: Sequence[Run], why_not: str | None) -> Notes | None:
    """Return the answer for runs; `why_not` says why they cannot be compared with each other, if they cannot.

    The best run is compared with the logged ranking, or with the next best run if there is no logged ranking. Return
    None if neither can be compared.
    """
    metric = runs[0].selected[0]
    evaluated = [run for run in runs if run.outcome is not None and metric in run.outcome.results]
    if not evaluated:
        return None
    if why_not is not None:
        label = ["--label", "LABEL"] if len({run.config.label for run in evaluated}) > 1 else []
        command = shlex.join(["ultr", "evaluate", *(str(run.folder) for run in evaluated), "--data", "LOG", *label])
        alone = [sentence for run in evaluated if (sentence := _against_logged_text(run)) is not None]
        return Notes([*alone, f"Which run is better? Not known here: {why_not}.", f"What to do? Run: {command}"])
    sign = -1 if less_is_better(metric) else 1
    ranked = sorted(evaluated, key=lambda run: -sign * _mean(run, metric))
    best = ranked[0]
    against = against_logged(best, metric)
    other, before = LOGGED_RANKING, _mean(best, LOGGED + metric) if against is not None else np.nan
    if against is None:
        if len(ranked) == 1:
            return None
        other, before = ranked[1].name, _mean(ranked[1], metric)
        against = _test(best, ranked[1], metric)
    verdict, better, worse = _verdict(best, metric, against)
    means = f"{metric}: {_mean(best, metric):.4f} instead of {before:.4f}"
    change = change_text(against.difference, before)
    what = f"With {best.name}, {_quantity(metric)} is {change} than with {other} ({means})."
    sentences = [f"Is it better? {verdict}. {what}"]
    if len(ranked) > 1 and other == LOGGED_RANKING:
        test = _test(best, ranked[1], metric)
        change = change_text(test.difference, _mean(ranked[1], metric))
        sure = "" if test.significant else ", which may be chance"
        than = f"{_quantity(metric)} is {change} than with {ranked[1].name}"
        sentences.append(f"Which run is best? {best.name}: {than}{sure}.")
    sentences.append(_how_sure(best, metric, against, before))
    sentences.append(f"What to do? {_what_to_do(best, better=better, worse=worse)}")
    return Notes(sentences, good=better and _is_confirmed(best, metric))


def _verdict(run: Run, metric: str, against: PairedTest) -> tuple[str, bool, bool]:
    """Return whether a run is better in a test, in words; and whether it is clearly better, or clearly worse."""
    sign = -1 if less_is_better(metric) else 1
    better = sign * against.low > 0 and sign * against.high > 0
    worse = sign * against.high < 0 and sign * against.low < 0
    if better and not _is_confirmed(run, metric):
        return "Probably, if the estimated examination is right", better, worse
    return ("Yes" if better else "No") if better or worse else "Not clear", better, worse


def _against_logged_text(run: Run) -> str | None:
    """Return a sentence that compares a run with the logged ranking, by the run's own label, metric and judge."""
    metric = run.selected[0]
    if (against := against_logged(run, metric)) is None:
        return None
    before = _mean(run, LOGGED + metric)
    low, high = (_relative(value, before) for value in (against.low, against.high))
    what = f"{_quantity(metric)} ({run.config.label}) is {change_text(against.difference, before)}"
    verdict = _verdict(run, metric, against)[0]
    return f"Is {run.name} better than {LOGGED_RANKING}? {verdict}: {what} (95% interval {low} to {high})."


def against_logged(run: Run, metric: str) -> PairedTest | None:
    """Return the paired test of a run's ranking against the logged ranking; None if one was not evaluated."""
    if run.outcome is None or not {metric, LOGGED + metric} <= set(run.outcome.results):
        return None
    return run.outcome.test(metric, run.outcome, LOGGED + metric)


def _test(first: Run, second: Run, metric: str) -> PairedTest:
    assert first.outcome is not None and second.outcome is not None  # noqa: S101, PT018  # only such runs are compared
    return first.outcome.test(metric, second.outcome, metric)


def _mean(run: Run, name: str) -> float:
    assert run.outcome is not None  # noqa: S101  # only runs with results are compared
    return float(np.average(run.outcome.results[name], weights=run.outcome.weights))


def _quantity(metric: str) -> str:
    name, _, first = metric.removeprefix(OFF_POLICY).removeprefix(FEEDBACK).partition("@")
    if name not in ("reward", "gain"):
        return "the quality of the ranking"
    return f"the expected feedback on the first {first} items" if first else "the expected feedback"


def change_text(difference: float, before: float) -> str:
    size = f"{abs(difference / before):.1%}" if before else f"{abs(difference):.4f}"
    return f"{size} {'higher' if difference > 0 else 'lower'}"


def _relative(difference: float, before: float) -> str:
    return f"{difference / before:+.1%}" if before else f"{difference:+.4f}"


def _how_sure(run: Run, metric: str, test: PairedTest, before: float) -> str:
    low, high = (_relative(value, before) for value in (test.low, test.high))
    parts = [f"The 95% interval is {low} to {high}, over {test.requests:,} validation requests, which chose the step"]
    if metric.startswith(OFF_POLICY):
        bias: Mapping[str, Any] = run.bias or {}
        error = bias.get("theta_standard_error")
        known = f" (standard error {error:.0%})" if error is not None else ""
        source = f", from {bias['theta_from']}{known}" if "theta_from" in bias else ""
        parts.append(f"it is an estimate from logged feedback, and depends on the estimated examination{source}")
        if not _is_confirmed(run, metric):
            parts.append(
                "the log cannot confirm it, because it has no random order and no items that can be compared across "
                "positions, so the interval is too narrow: show some requests in random order (ultr bias says how many)"
            )
        if error is not None and error > UNSURE:
            parts.append("examination is uncertain, so the true interval is wider")
    elif metric.startswith(FEEDBACK):
        parts.append("it uses logged feedback with its position bias, and favours the logged ranking")
    if run.warnings:
        number = len(run.warnings)
        parts.append(f"read the {number} warnings below" if number > 1 else "read the warning below")
    return f"How sure? {'; '.join(parts)}."


def _is_confirmed(run: Run, metric: str) -> bool:
    """Return whether the log can confirm the examination that a metric depends on: not if it is from features alone."""
    return not (metric.startswith(OFF_POLICY) and (run.bias or {}).get("theta_from") in NOT_CONFIRMED)


def _what_to_do(run: Run, *, better: bool, worse: bool) -> str:
    folder = shlex.quote(str(run.folder))
    if better:
        check = f"Judge it on a later log (ultr evaluate {folder} --data LATER_LOG)"
        return f"{check}; if it stays better, test it with a part of the users (ultr export {folder} --out model)."
    if worse:
        return "Keep the ranker in production. Look for missing features, and compare methods with ultr compare."
    return "Collect more requests before you decide, or compare methods with ultr compare."
