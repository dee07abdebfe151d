"""The gate of an update: whether a new log may be learned from, and whether the new ranker may replace the old one.

Both are judged by the reference of the old run too: a log on which something broke is no judge of what was learned from
it. The reference has requests of the last good logs, which the run was not trained on. Each log has a file,
`reference/1.parquet` the newest one.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from ultr.bias.counts import queries_recur
from ultr.bias.examination import Examination
from ultr.bias.propensities import theta_by_id
from ultr.checks.drift import find_drift
from ultr.checks.pitfalls import Pitfall
from ultr.evaluation.comparing import FEW_CLICKS, RankerComparison, compare_rankers
from ultr.evaluation.off_policy import Likelihood
from ultr.evaluation.scores import paired_test
from ultr.log import Log, read_log, write_log
from ultr.log.labels import Label
from ultr.log.splits import codes
from ultr.log.table import by_segment, slot, without_segments
from ultr.training.checking import find_problems
from ultr.training.data import Decisions
from ultr.training.folder import EXAMINATION
from ultr.utils.files import atomic_path

ACCEPTED, WORSE, QUARANTINED, UNCLEAR = "accepted", "worse", "quarantined", "not enough evidence"
ALL = "all"
OLD, NEW = "the old run", "the new run"
REFERENCE_LOG, NEW_LOG = "the reference", "the new log"
LEAST_LOSS = 0.005  # of the value of the old ranker; a smaller loss is no reason to stop
MOST_FORGOTTEN = 0.1  # of what the old ranker explains of the clicks; a good ranker of a new day forgets up to this
UNEXPLAINED = 0.5  # share of what the old ranker explained before
SIGMAS = 4.0


@dataclass(frozen=True)
class Gate:
    """The limits that a new log and a new ranker have to keep."""

    confidence: float = 0.95
    min_evidence: float = FEW_CLICKS  # effective clicks of the requests of the new log that judge
    allow: tuple[str, ...] = ()  # names of findings about the new log that do not stop the update; all: none does


@dataclass(frozen=True, eq=False)
class Known:
    """The label of the old run, and its θ by position, which is 1 everywhere if the run has estimated none."""

    label: str
    theta: Mapping[str, float]

    @staticmethod
    def of(run: Path) -> Known:
        decisions = Decisions.load(run)
        theta = {"1": 1.0}
        if (run / EXAMINATION).is_file():
            by_position = Examination.load(run / EXAMINATION).by_position()
            theta = {slot(position, decisions.segments): value for position, value in by_position.items()}
        return Known(decisions.label, theta)

    def click_gains(self, log: Log, scores: np.ndarray) -> np.ndarray:
        """Return how much scores explain of which items of a request are clicked, by request (see `Likelihood`)."""
        clicked = np.asarray(Label(self.label)(log.actions)) > 0
        coded, segments = by_segment(log) if "segment" in log.context else (log, ())
        ids = tuple(np.unique(coded.shown_positions("the gate of an update")).tolist())
        theta = theta_by_id(self.theta, ids, segments, nearest=True)
        coded = replace(coded, actions={"click": clicked.astype(np.float32)})
        return Likelihood(coded, theta=theta, label="click").per_request(scores)


def check_log(
    known: Known, logs: Sequence[Log], new: Log, scores: Mapping[str, np.ndarray], *, by_value: bool = False
) -> list[Pitfall]:
    """Return what is wrong with a new log, and was not with the logs of the reference, the newest first.

    All have the features of the old ranker. Its `scores` of the rows are by the names of the two logs. `by_value` is
    that of `find_drift`.
    """
    label = Label(known.label)
    newest = logs[0]
    found = find_drift(logs, new, label, by_value=by_value)
    before = {each.name for part in find_problems(newest, label) for each in part}
    found += [each for part in find_problems(new, label) for each in part if each.name not in before]
    if new.positions is not None and not found:
        found += _unexplained(known, newest, new, scores)
    return found


def _unexplained(known: Known, before: Log, after: Log, scores: Mapping[str, np.ndarray]) -> list[Pitfall]:
    gains, errors = [], []
    for name, log in ((REFERENCE_LOG, before), (NEW_LOG, after)):
        clicks = max(float((np.asarray(Label(known.label)(log.actions)) > 0).sum()), 1.0) / len(log)
        values = known.click_gains(log, scores[name]) / clicks
        gains.append(float(values.mean()))
        errors.append(float(values.std()) / len(values) ** 0.5)
    if gains[1] >= UNEXPLAINED * gains[0] or gains[0] - gains[1] < SIGMAS * float(np.hypot(*errors)):
        return []
    what = f"the old ranker explains {max(gains[1], 0):.3f} of a click's log-likelihood, {gains[0]:.3f} before"
    hint = "check the ids that join features and feedback; if users have changed, pass --allow with this name"
    return [Pitfall("feedback that does not follow the ranker", what, hint)]


def compare_on(
    log: Log,
    scores: Mapping[str, np.ndarray],
    metric: str,
    label: str,
    *,
    test: np.ndarray,
    known: Mapping[str, float] | None,
    chosen_on: str | None = None,
) -> RankerComparison:
    """Compare the old ranker and the new one by their scores [rows] on requests of a log."""
    log, segments = by_segment(log) if "segment" in log.context else (log, ())
    return compare_rankers(
        log, scores, [metric], label=label, test=test, known=known, segments=segments, against=OLD, chosen_on=chosen_on
    )


def judge_new(
    gate: Gate,
    known: Known,
    comparisons: Mapping[str, RankerComparison],
    reference: tuple[Log, Mapping[str, np.ndarray]] | None,
    metric: str,
) -> tuple[str, list[Pitfall]]:
    """Return the status of a new ranker, with reasons, from its comparisons with the old one on the two logs."""
    worse = []
    tests = len(comparisons) + (reference is not None)
    least_p = (1 - gate.confidence) / tests
    for where, comparison in comparisons.items():
        value = comparison.rankers[NEW][metric]
        test = value.difference
        if test is None:
            continue
        loss = -test.difference / max(value.mean.mean - test.difference, 1e-12)
        if loss > LEAST_LOSS and test.p < least_p:
            about = f"difference of {metric} {test.difference:+.4f}, 95% interval {test.low:+.4f} to {test.high:+.4f}"
            worse.append(Pitfall(f"worse on {where}", about, "look for what has changed in the new log"))
    if reference is not None and not worse:
        worse += _explains_less(least_p, known, *reference)
    if worse:
        return WORSE, worse
    clicks = comparisons[NEW_LOG].rankers[NEW][metric].effective_clicks
    if clicks is not None and clicks < gate.min_evidence:
        return UNCLEAR, [few_clicks(gate, clicks)]
    return ACCEPTED, []


def _explains_less(least_p: float, known: Known, log: Log, scores: Mapping[str, np.ndarray]) -> list[Pitfall]:
    if log.positions is None:
        return []
    old, new = (known.click_gains(log, scores[name]) for name in (OLD, NEW))
    groups = codes(log.context["query"]) if queries_recur(log) else None
    test = paired_test(new, (1 - MOST_FORGOTTEN) * old, log.weights, groups=groups)
    if test.difference >= 0 or test.p >= least_p:
        return []
    loss = 1 - np.average(new, weights=log.weights) / np.average(old, weights=log.weights)
    what = f"it explains clicks of the reference {loss:.0%} less well (p = {test.p:.2g})"
    return [Pitfall(f"worse on {REFERENCE_LOG}", what, "look for what has changed in the new log")]


def few_clicks(gate: Gate, clicks: float) -> Pitfall:
    what = f"the test requests have {clicks:.0f} effective clicks; at least {gate.min_evidence:g} are needed"
    hint = "pass the logs of several days (--log DAY1 --log DAY2), or a lower --min-evidence"
    return Pitfall(UNCLEAR, what, hint)


def stopping(found: Collection[Pitfall], gate: Gate) -> list[Pitfall]:
    """Return the findings that the user does not allow."""
    return [] if ALL in gate.allow else [each for each in found if each.name not in gate.allow]


# --- The reference ----------------------------------------------------------------------------------------------------

REFERENCE = "reference"  # folder of a run
MOST_LOGS = 8
MOST_REQUESTS, MOST_NUMBERS = 5_000, 2_000_000  # requests, and rows times features, of a log
NEEDED = ("segment", "query", "randomised")  # columns of requests that judging uses


def write_reference(run: Path, log: Log) -> None:
    """Write requests of the log of a run that chose nothing as its reference."""
    if log.positions is None or not len(log):
        return
    numbers = np.cumsum(log.lengths) * max(1, len(log.feature_names))
    count = min(MOST_REQUESTS, int(np.searchsorted(numbers, MOST_NUMBERS, "right")), len(log))
    chosen = np.sort(np.random.default_rng(0).permutation(len(log))[: max(1, count)])
    kept = without_segments(log.select(chosen))
    context = {name: values for name, values in kept.context.items() if name in NEEDED}
    write_log(replace(kept, context=context), run / REFERENCE / "1.parquet", overwrite=True)


def extend_reference(run: Path, before: Path) -> None:
    """Add the newest logs of the run `before` to the reference of a run."""
    for number, file in enumerate(_reference_files(before)[: MOST_LOGS - 1], start=2):
        with atomic_path(run / REFERENCE / f"{number}.parquet", overwrite=True) as temporary:
            shutil.copyfile(file, temporary)


def read_reference(run: Path) -> list[Log]:
    """Return the logs of the reference of a run, the newest first."""
    logs = []
    for file in _reference_files(run):
        names = {*pq.read_schema(file).names}
        columns: dict[str, Any] = {name: name for name in NEEDED if name in names}
        logs.append(read_log(file, missing="keep", **columns))
    return logs


def _reference_files(run: Path) -> list[Path]:
    numbers = (int(file.stem) for file in (run / REFERENCE).glob("*.parquet") if file.stem.isdigit())
    return [run / REFERENCE / f"{number}.parquet" for number in sorted(numbers)]
