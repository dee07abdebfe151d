"""Compare several rankers on the same test requests of a log, under one θ.

A ranker that is evaluated under another θ, or on other requests, can get a higher value for that reason alone. Here θ
and the direct model come from requests that are not test requests. Where there are too few of these, the test requests
are halved: each half is evaluated by a model of the other half (*cross-fitting*).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ultr.bias.examination import SOURCES, Examination, estimate_examination
from ultr.bias.propensities import theta_by_id
from ultr.datasets.users import User
from ultr.errors import DataError, OptionError, nearest
from ultr.evaluation.off_policy import OffPolicy, check_finite, compare_values, fit_off_policy_model
from ultr.evaluation.scores import (
    OFF_POLICY,
    Mean,
    PairedTest,
    ScoreMetrics,
    holm,
    mean_with_interval,
    paired_test,
    parse_any_metric,
)
from ultr.log import Log
from ultr.log.labels import DEFAULT_LABEL, Label
from ultr.log.sampling import LogParts
from ultr.log.splits import split_by_query
from ultr.log.table import slot

LOGGED_RANKING = "the logged ranking"
OTHER_BIAS = {"half": 0.5, "one and a half times": 1.5}  # name -> power of θ
FOLD = 1 << 40  # position ids of two halves that have different models differ by this number


@dataclass(frozen=True)
class RankerValue:
    """The value of a ranker, and its difference to the reference, tested over requests."""

    mean: Mean
    effective_clicks: float | None = None  # see `OffPolicyValue`; None for metrics that are not estimated off policy
    difference: PairedTest | None = None  # minus the reference; None for the reference itself
    holm: float | None = None  # the p value, corrected by Holm's method for the number of rankers that are tested


@dataclass(frozen=True, eq=False)
class RankerComparison:
    """The values of several rankers on the same requests, and paired tests of each against one of them."""

    rankers: Mapping[str, Mapping[str, RankerValue]]  # by ranker and metric
    against: str
    requests: int
    theta: Mapping[str, float] = field(default_factory=dict)  # by position; empty if no metric needs it
    known: bool = False  # whether θ was given, or else estimated from the log
    confirmed: bool = True  # whether the log can confirm θ: not if it was estimated from features alone

    def to_json(self) -> dict[str, Any]:
        rankers = {
            name: {metric: {**asdict(value), **asdict(value.mean)} for metric, value in values.items()}
            for name, values in self.rankers.items()
        }
        how = "given" if self.known else "estimated from the log"
        examination = {"theta": dict(self.theta), "source": how, "confirmed": self.confirmed} if self.theta else None
        return {"requests": self.requests, "against": self.against, "examination": examination, "rankers": rankers}


def other_examinations(found: RankerComparison) -> dict[str, dict[str, float]]:
    """Return θ with less and with more position bias than estimated, by name; empty if the log confirms the estimate.

    A comparison under each of them shows how much the first one depends on what the log cannot confirm.
    """
    if found.known or found.confirmed:
        return {}
    return {name: {slot: value**power for slot, value in found.theta.items()} for name, power in OTHER_BIAS.items()}


def logged_scores(log: Log) -> np.ndarray | None:
    """Return scores of the rows that reproduce the logged order; None if the log has no positions."""
    if log.positions is None:  # else rows are sorted by position
        return None
    return np.repeat(log.offsets[:-1], log.lengths) - np.arange(log.rows, dtype=np.float64)


def compare_rankers(
    log: Log,
    rankers: Mapping[str, np.ndarray],
    metrics: Sequence[str],
    *,
    label: str = DEFAULT_LABEL,
    test: np.ndarray | None = None,
    known: Mapping[str, float] | None = None,
    segments: Sequence[str] = (),
    user: User | None = None,
    against: str | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    parts: LogParts | None = None,
) -> RankerComparison:
    """Compare rankers by their scores [rows], on the requests of a log or on those that the mask `test` [requests] has.

    The logged ranking is evaluated next to them, if the log has positions. The others are tested against it, or against
    the ranker `against`. All have one θ: `known`, examination by position (`3`, or `3@phone`), or else the estimate of
    the log. `user` is the simulated user of reward@k. `parts` has the features, if those of the log are not in memory.
    """
    chosen = np.ones(len(log), bool) if test is None else test
    rows, on = np.repeat(chosen, log.lengths), log.select(chosen)
    if not len(on):
        raise DataError("there are no test requests", hint="pass other requests with --data")
    logged = logged_scores(on)
    scores = {} if logged is None else {LOGGED_RANKING: logged}
    scores |= {name: log.check_scores(values)[rows] for name, values in rankers.items()}
    against = against or next(iter(scores))
    if against not in scores:
        raise OptionError(f"'{against}' is not among the rankers", hint=nearest(against, scores))
    parts = parts or LogParts.of(log)
    models = _CrossFitted(log, parts, chosen, label, known, segments, seed, device) if _off_policy(metrics) else None
    values: dict[str, dict[str, RankerValue]] = {name: {} for name in scores}
    for metric in metrics:
        if models is not None and _off_policy([metric]):
            estimator = models.estimator(metric)
            found = {name: estimator(each) for name, each in scores.items()}
            check_finite({metric: np.concatenate([value.per_request for value in found.values()])})
            by_ranker = {
                name: RankerValue(Mean(value.value, value.low, value.high, len(on)), value.effective_clicks)
                for name, value in found.items()
            }
            tests = {name: compare_values(value, found[against]) for name, value in found.items()}
        else:
            measure = ScoreMetrics(on, metric, user=user, label=label, device=device)
            plain = {name: check_finite(measure(each))[metric] for name, each in scores.items()}
            by_ranker = {name: RankerValue(mean_with_interval(each, on.weights)) for name, each in plain.items()}
            tests = {name: paired_test(each, plain[against], on.weights) for name, each in plain.items()}
        del tests[against]
        corrected = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
        for name, value in by_ranker.items():
            values[name][metric] = replace(value, difference=tests.get(name), holm=corrected.get(name))
    theta, confirmed = ({}, True) if models is None else (models.theta_by_slot, models.confirmed)
    return RankerComparison(values, against, len(on), theta, known is not None, confirmed)


def _off_policy(metrics: Sequence[str]) -> bool:
    return any(metric.startswith(OFF_POLICY) for metric in metrics)


class _CrossFitted:
    """A model of the test requests, or one of each half; each was fitted to other requests than it evaluates."""

    def __init__(
        self,
        log: Log,
        parts: LogParts,
        chosen: np.ndarray,
        label: str,
        known: Mapping[str, float] | None,
        segments: Sequence[str],
        seed: int,
        device: torch.device | str,
    ) -> None:
        positions = log.shown_positions("an off-policy metric")
        ids = np.unique(positions).tolist()
        given = None if known is None else Examination.known(theta_by_id(known, tuple(ids), tuple(segments)))
        theta: dict[int, float] = {}
        sources = set[str]()
        by_slot: dict[str, list[float]] = {}
        places, direct = positions.copy(), np.zeros(log.rows)
        for number, part in enumerate(_parts(log, chosen, seed)):
            in_part = np.isin(np.arange(len(log)), part)
            others = parts.sample(~in_part, seed=seed)
            examination = given or estimate_examination(others, Label(label), seed=seed, device=device)
            model = fit_off_policy_model(others, label=label, examination=examination, segments=segments, seed=seed)
            sources.add(examination.source)
            of_part = np.repeat(in_part, log.lengths)
            places[of_part] += number * FOLD
            direct[of_part] = parts.mapped(model.direct, in_part)
            for position, value in model.theta_of(ids, segments).items():
                theta[number * FOLD + position] = value
                by_slot.setdefault(slot(position, segments), []).append(value)
        rows = np.repeat(chosen, log.lengths)
        self._log, self._direct = replace(log, positions=places).select(chosen), direct[rows]
        self._label, self._theta, self._device = label, theta, device
        self.confirmed = SOURCES["strata"] not in sources
        self.theta_by_slot = {name: float(np.mean(values)) for name, values in by_slot.items()}

    def estimator(self, metric: str) -> OffPolicy:
        kind, k = parse_any_metric(metric)
        options: dict[str, Any] = {"theta": self._theta, "label": self._label, "direct": self._direct}
        return OffPolicy(self._log, kind=kind, k=k or 10, device=self._device, **options)


def _parts(log: Log, chosen: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return the chosen requests as one part, or as two if fewer than half as many other requests are left."""
    requests = np.flatnonzero(chosen)
    if 2 * (len(log) - len(requests)) >= len(requests):
        return [requests]
    halves = [requests[half] for half in split_by_query(log.select(requests), [len(requests) // 2], seed=seed)]
    if min(map(len, halves)) == 0:
        what = "an off-policy metric needs at least two requests, with different queries"
        raise DataError(what, got=len(requests), hint="pass more requests with --data")
    return halves
