"""Compare several rankers on the same test requests of a log, under one θ, and say what to do.

A ranker that is evaluated under another θ, or on other requests, can get a higher value for that reason alone. Here θ
and the direct model come from requests that are not test requests. Where there are too few of these, the test requests
are halved: each half is evaluated by a model of the other half (*cross-fitting*).

Intervals have the errors of the requests and of θ: values are computed again under draws of θ. If neither known
propensities nor chance confirm θ, no standard error tells how wrong it may be. Then the intervals are those of all θ
that are plausible, `POWERS` of the estimate, together. A test shows if one curve θ does not describe the users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr

from ultr.bias.after_click import estimate_after_click, trust_of
from ultr.bias.counts import clicked_rows, count_cells, queries_recur
from ultr.bias.estimators import fit_conditional, pools, slope_apart
from ultr.bias.examination import Examination, estimate_examination
from ultr.bias.identification import NORMAL, rounded_up
from ultr.bias.propensities import theta_by_id
from ultr.datasets.users import User
from ultr.errors import DataError, OptionError, nearest
from ultr.evaluation.off_policy import (
    OffPolicy,
    OffPolicyModel,
    OffPolicyValue,
    check_finite,
    compare_values,
    fit_off_policy_model,
)
from ultr.evaluation.scores import (
    FEEDBACK,
    LIKELIHOOD,
    OFF_POLICY,
    Mean,
    PairedTest,
    ScoreMetrics,
    holm,
    less_is_better,
    mean_with_interval,
    paired_test,
    parse_any_metric,
    ranks,
)
from ultr.log import Log
from ultr.log.labels import DEFAULT_LABEL, Label
from ultr.log.sampling import LogParts
from ultr.log.splits import codes, split_by_query
from ultr.log.table import slot
from ultr.utils.jsonfiles import finite

LOGGED_RANKING = "the logged ranking"
# The powers of θ that are plausible, the estimate first: if it is confirmed; if nothing confirms it; if one curve does
# not describe the users, so that the order may not matter at all.
POWERS = ((1.0,), (1.0, 0.5, 1.5), (1.0, 0.0, 1.5))
CONFIRMED, PLAUSIBLE, MISFIT = range(3)
DRAWS = 30  # of θ, whose spread is its error
FOLD = 1 << 40  # position ids of two halves that have different models differ by this number
SIGNIFICANT = 0.05  # a p value below this makes a difference clear
TOO_GOOD = 0.4  # a gain above this over a logged ranking is more often an error than a better ranker
PROBABLE = 0.1  # a ranker that is worse with a lower probability is worth a test
FEW_CLICKS = 30.0  # with fewer effective clicks nothing is decided
MOST_REQUESTS = 100  # times the test requests: nobody collects more
DEPLOY, TEST, UNCLEAR, REJECT = "deploy", "test it on a part of the users", "not enough evidence", "do not deploy"
DECISIONS = {"deploy": DEPLOY, "test": TEST, "unclear": UNCLEAR, "reject": REJECT}  # names in options


@dataclass(frozen=True)
class RankerValue:
    """The value of a ranker, and its difference to the reference, tested over requests."""

    mean: Mean
    effective_clicks: float | None = None  # see `OffPolicyValue`; None for metrics that are not estimated off policy
    difference: PairedTest | None = None  # minus the reference; None for the reference itself
    holm: float | None = None  # the p value, corrected by Holm's method for the number of rankers that are tested
    worse: float | None = None  # the probability that it is worse than the reference, under the worst plausible θ
    random_order: Mean | None = None  # the value that requests in random order alone give, without examination


@dataclass(frozen=True)
class Decision:
    """A decision on a ranker, with its reason."""

    action: str  # one of `DECISIONS`
    reason: str
    worse: float  # the probability that it is worse than the reference
    requests: int | None = None  # about the number of test requests that would decide; None: no number would

    def __str__(self) -> str:
        return f"{self.action}: {self.reason}"


@dataclass(frozen=True, eq=False)
class RankerComparison:
    """The values of several rankers on the same requests, and paired tests of each against one of them."""

    rankers: Mapping[str, Mapping[str, RankerValue]]  # by ranker and metric
    against: str
    requests: int
    theta: Mapping[str, float] = field(default_factory=dict)  # by position; empty if no metric needs it
    evidence: str = "true labels"  # that θ comes from, in words
    confirmed: bool = True  # whether chance or the user confirms θ: if not, intervals are those of all plausible θ
    chosen_on: str | None = None  # why these requests do not judge: they trained a ranker, or chose its step

    def decision(self, ranker: str) -> Decision | None:
        """Return what to do with a ranker, by the first metric; None for the reference, or if the metric is biased."""
        metric, value = next(iter(self.rankers[ranker].items()))
        test = value.difference
        if test is None or value.worse is None or value.holm is None or metric.startswith(FEEDBACK):
            return None
        sign = -1 if less_is_better(metric) else 1
        low, high = sorted((sign * test.low, sign * test.high))
        better, clear = sign * test.difference > 0, value.holm < SIGNIFICANT
        confirmed = self.confirmed or not metric.startswith(OFF_POLICY)
        about = f"{_change(value.mean.mean, test)} by {metric} against {self.against}"
        doubt = "" if confirmed else f", but the only evidence of examination is {self.evidence}"
        if self.chosen_on is not None:
            return Decision(UNCLEAR, self.chosen_on, value.worse)
        if not np.isfinite((low, high)).all():
            return Decision(UNCLEAR, "one request, or one query, gives no interval", value.worse)
        if value.effective_clicks is not None and value.effective_clicks < FEW_CLICKS:
            few = f"the test requests have {value.effective_clicks:.0f} effective clicks"
            needed = rounded_up(self.requests * FEW_CLICKS / max(value.effective_clicks, 1))
            return Decision(UNCLEAR, f"{few}; it needs about {needed:,} requests", value.worse, needed)
        if high < 0 and clear:
            return Decision(REJECT, f"it is worse: {about}", value.worse)
        check = _check_of_gain(metric, self.against, value.mean.mean, test)
        if low > 0 and clear:
            return Decision(DEPLOY if confirmed else TEST, f"it is better: {about}{doubt}{check}", value.worse)
        if better and value.worse < PROBABLE:
            return Decision(TEST, f"it is probably better: {about}{doubt}{check}", value.worse)
        many = requests_needed(test, self.requests)
        if many is None or (not confirmed and low < 0 < high and value.worse > 0.5):
            return Decision(UNCLEAR, f"no difference was found: {about}{doubt}", value.worse)
        return Decision(UNCLEAR, f"{about}{doubt}; it needs about {many:,} requests", value.worse, many)

    def to_json(self) -> dict[str, Any]:
        rankers = {
            name: {metric: {**asdict(value), **asdict(value.mean)} for metric, value in values.items()}
            for name, values in self.rankers.items()
        }
        decisions = {name: asdict(found) for name in self.rankers if (found := self.decision(name)) is not None}
        about = {"theta": dict(self.theta), "source": self.evidence, "confirmed": self.confirmed}
        content = {
            "requests": self.requests,
            "against": self.against,
            "decisions": decisions,
            "examination": about if self.theta else None,
            "rankers": rankers,
        }
        return dict(finite(content))


def _change(value: float, test: PairedTest) -> str:
    """Return the difference of a value to the reference and its interval, in % of the reference if it is above 0."""
    reference = value - test.difference
    numbers = (test.difference, test.low, test.high)
    texts = [f"{each / reference:+.1%}" if reference > 0 else f"{each:+.4g}" for each in numbers]
    return f"{texts[0]} ({texts[1]} to {texts[2]})"


def _check_of_gain(metric: str, against: str, value: float, test: PairedTest) -> str:
    """Return what to check if a gain over the logged ranking is too large to be likely; else an empty text."""
    if against != LOGGED_RANKING or not metric.startswith(OFF_POLICY):
        return ""
    if less_is_better(metric) or not test.difference > TOO_GOOD * (value - test.difference) >= 0:
        return ""
    what = f"a gain above {TOO_GOOD:.0%} usually means that a feature knows the feedback, or that positions are wrong"
    return (
        f". Check this first: {what}. Read the warnings of ultr describe, and train without the most important feature"
    )


def requests_needed(test: PairedTest, requests: int) -> int | None:
    """Return about how many requests make the interval as narrow as the difference is; None if nobody collects them.

    It is None for rankers that do not differ at all, too.
    """
    if test.difference == 0:
        return None
    enough = requests * (max(test.high - test.low, 0.0) / 2 / max(abs(test.difference), 1e-12)) ** 2
    return None if enough > MOST_REQUESTS * requests else rounded_up(enough)


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
    others: Sequence[tuple[Sequence[str], Examination]] = (),
    segments: Sequence[str] = (),
    user: User | None = None,
    against: str | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    parts: LogParts | None = None,
    chosen_on: str | None = None,
) -> RankerComparison:
    """Compare rankers by their scores [rows], on the requests of a log or on those that the mask `test` [requests] has.

    The logged ranking is evaluated next to them, if the log has positions. The others are tested against it, or against
    the ranker `against`. All have one θ: `known`, examination by position (`3`, or `3@phone`), or else the estimate of
    the log; or, if nothing confirms that, the first of `others` that is confirmed, each with the texts of its
    positions. `user` is the simulated user of reward@k. `parts` has the features, if those of the log are not in
    memory. `chosen_on` says why the requests cannot judge.
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
    groups = codes(on.context["query"]) if queries_recur(on) else None
    models = None
    if any(metric.startswith(OFF_POLICY) for metric in metrics):
        parts = parts or LogParts.of(log)
        models = _cross_fitted(log, parts, chosen, label, known, others, segments, seed, device)
    values: dict[str, dict[str, RankerValue]] = {name: {} for name in scores}
    for metric in metrics:
        if models is not None and metric.startswith(OFF_POLICY):
            estimators = plausible_estimators(
                models.log,
                metric,
                models.theta,
                models.direct,
                draws=models.draws,
                doubt=models.doubt,
                trust=models.trust,
                label=label,
                groups=groups,
                device=device,
            )
            by_ranker, tests = off_policy_values(estimators, scores, metric, against)
        else:
            measure = ScoreMetrics(on, metric, user=user, label=label, device=device)
            plain = {name: check_finite(measure(each))[metric] for name, each in scores.items()}
            by_ranker = {
                name: RankerValue(mean_with_interval(each, on.weights, groups=groups)) for name, each in plain.items()
            }
            tests = {name: [paired_test(v, plain[against], on.weights, groups=groups)] for name, v in plain.items()}
        for name, value in tested_values(by_ranker, tests, metric, against).items():
            alone = in_random_order(on, scores[name], metric, label) if name != LOGGED_RANKING else None
            values[name][metric] = replace(value, random_order=alone)
    found = RankerComparison(values, against, len(on), chosen_on=chosen_on)
    if models is None:
        return found
    confirmed = models.doubt == CONFIRMED
    return replace(found, theta=models.theta_by_slot, evidence=models.evidence, confirmed=confirmed)


def in_random_order(log: Log, scores: np.ndarray, metric: str, label: str) -> Mean | None:
    """Return the value of a ranker from the requests in random order alone; None if there are none, or fewer than two.

    An item of n is at its place in the new ranking in one of n requests by chance, and its feedback there counts n
    times. This needs no examination, and no model of users.
    """
    marked = log.context.get("randomised")
    if marked is None or not metric.startswith(f"{OFF_POLICY}reward"):
        return None
    chosen = np.asarray(marked.to_numpy(zero_copy_only=False), bool)
    if chosen.sum() < 2:
        return None
    rows, part = np.repeat(chosen, log.lengths), log.select(chosen)
    place = np.arange(part.rows) - np.repeat(part.offsets[:-1], part.lengths)  # rows are sorted by position
    k = parse_any_metric(metric)[1] or 10
    counted = (ranks(part, scores[rows]) == place) & (place < k)
    feedback = np.asarray(Label(label)(part.actions), np.float64) * counted * np.repeat(part.lengths, part.lengths)
    return mean_with_interval(np.add.reduceat(feedback, part.offsets[:-1]), part.weights)


def off_policy_values(
    estimators: Sequence[OffPolicy], scores: Mapping[str, np.ndarray], metric: str, against: str
) -> tuple[dict[str, RankerValue], dict[str, list[PairedTest]]]:
    """Return the value of each ranker, and its tests against one of them under each plausible θ."""
    found = {name: [estimator(each) for estimator in estimators] for name, each in scores.items()}
    check_finite({metric: np.concatenate([each.per_request for under in found.values() for each in under])})
    tests = {
        name: _with_error_of_first([compare_values(a, b) for a, b in zip(under, found[against], strict=True)])
        for name, under in found.items()
    }
    return {name: RankerValue(_mean(under), under[0].effective_clicks) for name, under in found.items()}, tests


def tested_values(
    values: Mapping[str, RankerValue], tests: Mapping[str, Sequence[PairedTest]], metric: str, against: str
) -> dict[str, RankerValue]:
    """Return the values of rankers with their differences to one of them, tested under each plausible θ."""
    tests = {name: each for name, each in tests.items() if name != against}
    together = {name: under_all(each) for name, each in tests.items()}
    corrected = dict(zip(together, holm([test.p for test in together.values()]), strict=True))
    sign = -1 if less_is_better(metric) else 1
    worse = {name: max(_worse(test, sign) for test in each) for name, each in tests.items()}
    return {
        name: replace(value, difference=together.get(name), holm=corrected.get(name), worse=worse.get(name))
        for name, value in values.items()
    }


def _mean(under: Sequence[OffPolicyValue]) -> Mean:
    """Return the first of several values, with the interval that has all of theirs; errors are as in their tests."""
    most = under[0].high - under[0].value
    margins = [min(most, value.high - value.value) for value in under]
    low = min(value.value - margin for value, margin in zip(under, margins, strict=True))
    high = max(value.value + margin for value, margin in zip(under, margins, strict=True))
    return Mean(under[0].value, low, high, len(under[0].per_request))


def _with_error_of_first(tests: Sequence[PairedTest]) -> list[PairedTest]:
    """Return tests under several θ, with at most the error of the first.

    With more position bias than the estimate has, the errors of a few rare clicks would hide what the others show.
    """
    most = tests[0].high - tests[0].difference
    return [tests[0], *(test.with_margin(min(most, test.high - test.difference)) for test in tests[1:])]


def under_all(tests: Sequence[PairedTest]) -> PairedTest:
    """Return the first of several tests with the interval that has all of theirs; p is 1 if their signs differ."""
    low, high = min(test.low for test in tests), max(test.high for test in tests)
    one_sign = len({np.sign(test.difference) for test in tests}) == 1
    return replace(tests[0], low=low, high=high, p=max(test.p for test in tests) if one_sign else 1.0)


def _worse(test: PairedTest, sign: int) -> float:
    """Return the probability that the difference is below 0 (above, if `sign` is -1), given its interval."""
    error = (test.high - test.low) / (2 * NORMAL)
    return float(ndtr(-sign * test.difference / max(error, 1e-300))) if error < np.inf else 0.5


def doubt_about(
    log: Log, examination: Examination, model: OffPolicyModel, *, label: str, segments: Sequence[str]
) -> tuple[Examination, int]:
    """Return which `POWERS` of an estimate are plausible, by a test on the requests that it was fitted to.

    If one curve does not describe the users, the examination that is returned says so, and is not confirmed.
    """
    theta = model.theta_of(np.unique(log.shown_positions("a test of examination")).tolist(), segments)
    why = misfit(log, clicked_rows(log, label), theta, model.direct(log))
    if why is None:
        return examination, CONFIRMED if examination.confirmed else PLAUSIBLE
    doubted = replace(examination, evidence="misfit", source=f"{examination.source}, but {why}")
    return doubted, MISFIT


@dataclass(frozen=True, eq=False)
class _CrossFitted:
    """The test requests with a model of them, or of each half; each was fitted to other requests than it evaluates."""

    log: Log  # the test requests; the positions of the two halves differ by `FOLD`
    theta: Mapping[int, float]
    direct: np.ndarray  # [rows]
    draws: Sequence[Mapping[int, float]]  # of θ
    trust: Mapping[str, Mapping[int, float]]  # τ of actions after the click, by position id
    doubt: int
    evidence: str
    theta_by_slot: Mapping[str, float]


def _cross_fitted(
    log: Log,
    parts: LogParts,
    chosen: np.ndarray,
    label: str,
    known: Mapping[str, float] | None,
    others: Sequence[tuple[Sequence[str], Examination]],
    segments: Sequence[str],
    seed: int,
    device: torch.device | str,
) -> _CrossFitted:
    """Return the `chosen` test requests of a log with θ and the direct model from other requests."""
    positions = log.shown_positions("an off-policy metric")
    ids = np.unique(positions).tolist()
    slots = {position: slot(position, segments) for position in ids}
    given = None if known is None else Examination.known(theta_by_id(known, tuple(ids), tuple(segments)))
    other = next((at for names, each in others if each.confirmed and (at := each.at(names, slots))), None)
    places, direct = positions.copy(), np.zeros(log.rows)
    theta: dict[int, float] = {}
    draws: list[dict[int, float]] = [{} for _ in range(DRAWS)]
    trust: dict[str, dict[int, float]] = {}
    used: list[Examination] = []
    doubt = CONFIRMED
    for number, part in enumerate(_parts(log, chosen, seed)):
        in_part = np.isin(np.arange(len(log)), part)
        rest = parts.sample(~in_part, seed=seed)
        own = given or estimate_examination(rest, Label(label), segments=segments, seed=seed, device=device)
        if other is not None and not own.confirmed:
            examination = other
        else:
            examination = replace(own, actions=estimate_after_click(rest, Label(label), seed=seed))
        for name, tau in trust_of(examination.actions, ids).items():
            trust.setdefault(name, {}).update({number * FOLD + position: value for position, value in tau.items()})
        model = fit_off_policy_model(rest, label=label, examination=examination, segments=segments, seed=seed)
        doubted, why = doubt_about(rest, examination, model, label=label, segments=segments)
        used.append(doubted)
        doubt = max(doubt, why)
        of_part = np.repeat(in_part, log.lengths)
        places[of_part] += number * FOLD
        direct[of_part] = parts.mapped(model.direct, in_part)
        of_model = model.theta_of(ids, segments)
        theta |= {number * FOLD + position: value for position, value in of_model.items()}
        same = 0 if examination is other else number  # one examination of a run has the same error in both halves
        for draw, moved in zip(draws, drawn(examination, of_model, same), strict=False):
            draw |= {number * FOLD + position: value for position, value in moved.items()}
    mean = {
        name: float(np.mean([theta[number * FOLD + position] for number in range(len(used))]))
        for position, name in slots.items()
    }
    return _CrossFitted(
        log=replace(log, positions=places).select(chosen),
        theta=theta,
        direct=direct[np.repeat(chosen, log.lengths)],
        draws=[draw for draw in draws if len(draw) == len(theta)],
        trust=trust,
        doubt=doubt,
        evidence=next((each.source for each in used if not each.confirmed), used[0].source),
        theta_by_slot=mean,
    )


def plausible_estimators(
    log: Log,
    metric: str,
    theta: Mapping[int, float],
    direct: np.ndarray,
    *,
    draws: Sequence[Mapping[int, float]],
    doubt: int,
    **options: Any,
) -> list[OffPolicy]:
    """Return the estimators of a metric under each plausible θ by position id; the first is that of the estimate.

    The `doubt` about θ says which `POWERS` of it are plausible; `draws` have its sampling error. `options` are those of
    `OffPolicy`.
    """
    kind, k = parse_any_metric(metric)
    if metric == LIKELIHOOD:
        what = "the likelihood of feedback can select steps, but it is not a value of a ranking"
        raise OptionError(what, got=f"'{metric}'", hint="use off-policy-reward@10")
    ids, place = np.unique(log.shown_positions("an off-policy metric"), return_inverse=True)
    old = np.array([theta[position] for position in ids.tolist()])[place]
    return [
        OffPolicy(
            log,
            theta=_power(theta, power),
            kind=kind,
            k=k or 10,
            direct=direct * old ** (1 - power),  # the expected label where it was shown stays the same
            replicates=[_power(draw, power) for draw in draws],
            **options,
        )
        for power in POWERS[doubt]
    ]


def drawn(examination: Examination, theta: Mapping[int, float], seed: int = 0) -> list[dict[int, float]]:
    """Return draws of θ by position id, from the estimate that `theta` comes from; none if it has no error."""
    by_id = {position: i for i, position in enumerate(examination.positions)}
    changes = examination.draws(DRAWS, seed=seed) / examination.theta
    factors = [{position: float(change[i]) for position, i in by_id.items()} for change in changes]
    return [{position: value * factor.get(position, 1.0) for position, value in theta.items()} for factor in factors]


def _power(theta: Mapping[int, float], power: float) -> dict[int, float]:
    return {position: value**power for position, value in theta.items()}


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


# --- Does one curve of examination describe the users? ----------------------------------------------------------------

SURE = 3.0  # standard errors by which the feedback must differ from what one curve predicts
FEW_PAIRS = 0.8  # share of the expected pairs of clicks below which clicks of a request exclude one another
STEEPER = 0.18  # difference of two curves, as a share of the fall of the click rate, that matters
STRATA = 20  # groups of rows with similar expected feedback
STOPS = "users look less often below a click, so no curve of examination by position is right"
TRUSTS = "clicks on worse items fall faster with position, as if users trusted high positions"


def misfit(log: Log, clicked: np.ndarray, theta: Mapping[int, float], relevance: np.ndarray) -> str | None:
    """Return why one curve of examination is wrong for a log, or None if the log does not show that it is.

    `clicked` and `relevance`, the expected feedback of an examined item, have a value for each row; `theta` is
    examination by position id. Two consequences of one curve are tested:

    - clicks on the items of a request are independent, given the items. Differences between requests can only add
      pairs of clicks;
    - the click rates of worse items do not fall faster with position than those of better items.
    """
    ids, place = np.unique(log.shown_positions("a test of examination"), return_inverse=True)
    expected = np.array([theta[position] for position in ids.tolist()])[place] * relevance
    chance = _mean_by_stratum(clicked, _strata(expected))
    apart = _pairs(log, clicked) - _pairs(log, chance)
    pairs = float(_pairs(log, chance).sum())
    if apart.sum() < -(1 - FEW_PAIRS) * pairs and apart.sum() < -SURE * np.sqrt((apart**2).sum()):
        return STOPS
    return TRUSTS if _curves_differ(place, clicked, relevance, ids) else None


def _pairs(log: Log, values: np.ndarray) -> np.ndarray:
    """Return the sum of the products of all pairs of values of each request."""
    values = values.astype(float)
    sums, squares = (np.add.reduceat(each, log.offsets[:-1]) for each in (values, values**2))
    return np.asarray((sums**2 - squares) / 2)


def _curves_differ(place: np.ndarray, clicked: np.ndarray, relevance: np.ndarray, ids: np.ndarray) -> bool:
    if not clicked.any():
        return False
    strata = _strata(relevance)
    better = strata >= (strata.max() + 1) // 2
    rows, clicks, width = np.ones(len(place)), clicked.astype(float), len(ids)
    halves = [
        count_cells(strata[half], place[half], rows[half], clicks[half], width=width) for half in (better, ~better)
    ]
    pool = pools(np.minimum(*(cells.compared_clicks() for cells in halves)), ids)
    better_ones, others = (fit_conditional(cells.pooled(pool)) for cells in halves)
    rate = np.bincount(pool[place], clicked) / np.bincount(pool[place])
    found = slope_apart(better_ones, others, rate)
    return found is not None and found[0] > max(STEEPER, SURE * np.sqrt(found[1]))


def _strata(values: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.quantile(values, np.linspace(0, 1, STRATA + 1)[1:-1]), values)


def _mean_by_stratum(values: np.ndarray, strata: np.ndarray) -> np.ndarray:
    return np.asarray((np.bincount(strata, values) / np.maximum(1, np.bincount(strata)))[strata])
