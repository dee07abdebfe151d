"""Delayed actions, such as purchases days after an impression: requests that are too young to know, and their weights.

    age = end of the log - time of the request,   F(age) = share of the actions that have arrived at this age

Of an action with a known delay, requests younger than this are left out. If the times of the action are known too, F is
estimated from older requests, and a young request stays with its actions divided by F(age): for each item, the
expectation is that of an old request. Arrivals must not depend on the item, nor change with time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import numpy as np
import pyarrow as pa
from pydantic import Field

from ultr.errors import DataError, OptionError, nearest
from ultr.log.conditions import utc_time
from ultr.log.readers import first_rows, read_log
from ultr.log.table import Log
from ultr.log.watch import NORMAL, extra_column

UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}  # seconds
DURATION = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhdw])\s*", re.ASCII)
KNOTS = 1001  # steps of a curve
LEAST = 100  # arrivals that a curve is estimated from
LEAST_SHARE = 0.2  # requests at whose age fewer of the actions have arrived are left out
LEAST_ORDERED = 0.99  # share of the actions that must not be before their request

Share = Annotated[float, Field(ge=0, le=1)]


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 7d, 12h or 30m; raise OptionError for another text."""
    match = DURATION.fullmatch(text)
    seconds = 0.0 if match is None else float(match[1]) * UNITS[match[2]]
    if not seconds:
        hint = "write a number above 0 and a unit: s, m, h, d or w"
        raise OptionError("a delay must be a duration such as 7d or 12h", got=f"'{text[:100]}'", hint=hint)
    return seconds


def parse_pairs(texts: Iterable[str], what: str, example: str) -> dict[str, str]:
    """Return name -> value of texts NAME=VALUE; raise OptionError if one has another form, or a name is given twice."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.rpartition("="))
        if not (name and value):
            raise OptionError(f"{what} must have the form NAME=VALUE", got=f"'{text[:100]}'", hint=f"pass {example}")
        if pairs.setdefault(name, value) != value:
            raise OptionError(f"'{name}' is given twice in {what}", got=f"{pairs[name]} and {value}")
    return pairs


def parse_time(text: str) -> float:
    """Return a time as seconds since 1970, or a number as it is; raise OptionError for another text."""
    try:
        return (
            float(text)
            if re.fullmatch(r"-?\d+(\.\d+)?", text)
            else (utc_time(text) - utc_time("1970-01-01")).total_seconds()
        )
    except ValueError as error:
        hint = "write a time such as 2026-05-31T12:00, or a number if the times of the log are numbers"
        raise OptionError("the end of the actions must be a time", got=f"'{text[:100]}'", hint=hint) from error


@dataclass(frozen=True)
class Arrival:
    """How an action arrives: its delay in seconds, and the share of the actions that arrive up to some ages."""

    action: str
    delay: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    column: str | None = None  # of the times of the action
    ages: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = ()
    shares: tuple[Share, ...] = ()
    count: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # effective number of arrivals behind the shares

    def __post_init__(self) -> None:
        if len(self.ages) != len(self.shares) or (np.diff(self.ages) <= 0).any() or (np.diff(self.shares) < 0).any():
            raise ValueError("ages and shares of an arrival curve must increase")

    def share(self, age: np.ndarray) -> np.ndarray:
        """Return the share of the actions that have arrived at an age; it is 0 if the curve is not known."""
        steps = np.array([0.0, *self.shares])
        return np.where(age >= self.delay, 1.0, steps[np.searchsorted(self.ages, age, "right")])

    def interval(self, age: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the 95% interval of the share at an age, which is that of a binomial share."""
        share = self.share(age)
        error = NORMAL * np.sqrt(share * (1 - share) / max(self.count, 1.0))
        return np.maximum(share - error, 0.0), np.minimum(share + error, 1.0)

    def fit(self, log: Log, age: np.ndarray) -> Arrival:
        """Return the arrival with a curve from the requests that are old enough; without one, if there are too few."""
        if self.column is None:
            return self
        elapsed = self.elapsed(log)
        weights = np.ones(len(log)) if log.weights is None else log.weights.astype(np.float64)
        counted = np.repeat(age >= self.delay, log.lengths) & (elapsed <= self.delay)
        values = (log.actions[self.action] * np.repeat(weights, log.lengths))[counted]
        if len(values) < LEAST:
            return self
        order = np.argsort(elapsed[counted])
        sorted_ages, total = elapsed[counted][order], np.cumsum(values[order])
        last = np.append(np.flatnonzero(np.diff(sorted_ages)), len(values) - 1)  # of equal ages
        ages, shares = sorted_ages[last], total[last] / total[-1]
        chosen = np.unique(np.searchsorted(shares, np.linspace(shares[0], 1, KNOTS)).clip(0, len(shares) - 1))
        count = total[-1] ** 2 / (values**2).sum()
        return replace(
            self, ages=tuple(ages[chosen].tolist()), shares=tuple(shares[chosen].tolist()), count=float(count)
        )

    def elapsed(self, log: Log) -> np.ndarray:
        """Return the seconds from the request to the action by row; infinite where there was no action."""
        times = extra_column(log, str(self.column))
        happened = log.actions[self.action] > 0
        if (missing := int((happened & ~np.isfinite(times)).sum())) > 0:
            what = f"column '{self.column}' has no time for {missing:,} rows with the action '{self.action}'"
            raise DataError(what, hint="fill in the times, or drop those rows with --where")
        requested = np.repeat(request_times(log), log.lengths)
        elapsed = np.where(happened, times - requested, np.inf)
        if happened.any() and (elapsed[happened] > -1).mean() < LEAST_ORDERED:
            what = f"times in '{self.column}' are before the request"
            got = f"{(elapsed[happened] <= -1).mean():.1%} of the actions '{self.action}'"
            raise DataError(what, got=got, hint="check that both times have the same zone and unit")
        return np.maximum(elapsed, 0.0)


def arrivals(delays: Mapping[str, str], times: Mapping[str, str]) -> tuple[Arrival, ...]:
    """Return the arrivals that options describe, by action; raise OptionError if one has a time and no delay."""
    if unknown := next((name for name in times if name not in delays), None):
        what = f"the times of '{unknown}' are given without its delay"
        raise OptionError(what, hint=f"pass --action-delay {unknown}=7d too")
    return tuple(Arrival(name, parse_duration(text), times.get(name)) for name, text in delays.items())


def old_enough(source: str, delays: Mapping[str, str], *, time: str, **reading: Any) -> str:
    """Return the condition on rows of files, for `where`, that their requests are old enough for all delays."""
    light = read_log(source, **{**reading, "features": [], "categorical": [], "actions": [], "time": time})
    last = float(request_times(light).max()) - max(each.delay for each in arrivals(delays, {}))
    kind = first_rows(source).schema.field(time).type
    by_clock = not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
    text = datetime.fromtimestamp(last, UTC).replace(tzinfo=None).isoformat() if by_clock else f"{last:.0f}"
    return f"{time} <= {text}"


def request_times(log: Log) -> np.ndarray:
    if "time" not in log.context:
        raise DataError("action delays need the times of requests", hint="pass time= to read_log (--set time=COLUMN)")
    return np.asarray(log.context["time"].to_numpy(zero_copy_only=False), np.float64)


def with_arrived(log: Log, given: Sequence[Arrival], until: float | None = None) -> tuple[Log, tuple[Arrival, ...]]:
    """Return the log without requests that are too young, with the actions of others by what has arrived; and curves.

    A curve that is known stays as it is. `until` is the end of the actions in the log; None: its last request.
    """
    times = request_times(log)
    for arrival in given:
        if arrival.action not in log.actions:
            hint = nearest(arrival.action, log.actions)
            raise DataError(f"the log has no action '{arrival.action}', whose delay is given", hint=hint)
    until = float(times.max()) if until is None else until
    age = until - times
    fitted = tuple(each if each.ages else each.fit(log, age) for each in given)
    shares = {each.action: each.share(age) for each in fitted}
    kept = np.min(list(shares.values()), axis=0) >= LEAST_SHARE
    if not kept.any():
        what = f"no request is old enough for the delays of {', '.join(shares)}"
        got = f"the oldest is {_in_words(float(age.max()))} old"
        hint = "pass older days too; times that are numbers must be seconds"
        raise DataError(what, got=got, hint=hint)
    actions = dict(log.actions)
    for each in fitted:
        values = np.array(actions[each.action], np.float64)
        if each.column is not None:
            values[each.elapsed(log) > np.repeat(np.minimum(age, each.delay), log.lengths)] = 0.0
        actions[each.action] = (values / np.repeat(np.maximum(shares[each.action], LEAST_SHARE), log.lengths)).astype(
            np.float32
        )
    notes = [*log.notes, *_notes(fitted, shares, kept)]
    log = replace(log, actions=actions, notes=tuple(notes))
    return (log if kept.all() else log.select(kept)), fitted


def _in_words(seconds: float) -> str:
    """Return a duration such as `7 days` or `1 day, 12:00:00`."""
    return str(timedelta(seconds=round(seconds))).removesuffix(", 0:00:00")


def _notes(fitted: Sequence[Arrival], shares: Mapping[str, np.ndarray], kept: np.ndarray) -> list[str]:
    delays = ", ".join(f"{each.action}={_in_words(each.delay)}" for each in fitted)
    notes = [f"{int((~kept).sum()):,} of {len(kept):,} requests are too young for their actions and left out: {delays}"]
    for each in fitted:
        young = int((kept & (shares[each.action] < 1)).sum())
        if each.ages:
            half = np.array([each.delay / 2])
            (share,), ((low,), (high,)) = each.share(half), each.interval(half)
            arrives = f"{share:.0%} arrive in half of the delay (95% interval {low:.0%} to {high:.0%})"
            notes.append(
                f"'{each.action}' is divided by the share that has arrived in {young:,} young requests; {arrives}"
            )
        elif each.column is not None:
            notes.append(f"fewer than {LEAST} '{each.action}' are old enough to estimate how they arrive")
    return notes
