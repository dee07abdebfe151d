"""Watch times: what a watch that was cut would have been, and its quantile among items of similar duration.

Watches are cut by the end of a session (a column says which), and by the end of the item, if its duration is known.
Both are right-censored: the time that a user wanted to watch is longer than the logged one. In each group of items of
similar duration, watch times are log-normal for a cut watch's expectation, and have any distribution for quantiles.
Cuts by the end of the session must be independent of the watch time within a group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Final

import numpy as np
from pydantic import Field
from scipy.special import log_ndtr

from ultr.errors import DataError, nearest
from ultr.log.table import Log

GROUPS = 10  # of durations, with equally many watches in each
KNOTS = 129  # points of a distribution function
LEAST = 30  # watches of a group that were not cut; a group with fewer has the estimates of all watches
REACHED = 0.99  # a watch of this share of the duration has come to the end of the item
BEYOND = 0.05  # share of watches longer than the duration, above which items do not end there: they are repeated
NORMAL = 1.959964  # quantile of 95% intervals
ITERATIONS: Final = 50

Finite = Annotated[float, Field(allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class WatchGroup:
    """The estimates of a group: log T has this mean and deviation; `levels` of the quantiles are at `times`."""

    mean: Finite
    deviation: Above0
    covariance: tuple[Finite, Finite, Finite]  # of the mean and log deviation: var, cov, var
    times: tuple[Above0, ...]
    levels: tuple[Annotated[float, Field(gt=0, le=1)], ...]

    def __post_init__(self) -> None:
        if not self.times or len(self.times) != len(self.levels):
            raise ValueError("a group of watch times needs as many levels as times")
        if (np.diff(self.times) <= 0).any() or (np.diff(self.levels) < 0).any():
            raise ValueError("times and levels of watch times must increase")

    @property
    def expected(self) -> tuple[float, float, float]:
        """Return E[T] = exp(mean + deviation² / 2) with its 95% interval."""
        square = self.deviation**2
        var, cov, var_log = self.covariance
        error = NORMAL * max(var + 2 * square * cov + square**2 * var_log, 0.0) ** 0.5
        log_expected = self.mean + square / 2
        value, low, high = np.exp([log_expected, log_expected - error, log_expected + error]).tolist()
        return value, low, high

    def quantile(self, times: np.ndarray) -> np.ndarray:
        """Return the level of watch times; it never falls with the time."""
        return np.asarray(np.interp(times, self.times, self.levels))

    def beyond(self, cut: np.ndarray, end: np.ndarray | float = np.inf) -> np.ndarray:
        """Return E[min(T, end) | T > cut]: the time of a watch that was cut, had it not been."""
        log_cut, log_end = np.log(cut), np.log(end)
        mean, deviation = self.mean, self.deviation
        survives = log_ndtr((mean - log_cut) / deviation)
        tails = (
            np.exp(mean + deviation**2 / 2 + log_ndtr((mean + deviation**2 - at) / deviation) - survives)
            for at in (log_cut, log_end)
        )
        finite = np.where(np.isfinite(end), end, 0.0)
        reaches = finite * np.exp(log_ndtr((mean - log_end) / deviation) - survives)
        return np.asarray(np.clip(next(tails) - next(tails) + reaches, cut, np.maximum(cut, end)))


@dataclass(frozen=True)
class WatchModel:
    """The watch times of the training requests, by group of durations. Call it with a log to transform its watches."""

    action: str
    duration: str | None = None  # column
    censored: str | None = None  # column
    capped: bool = False  # whether a watch to the end of the item counts as cut
    quantiles: bool = False  # whether watch times become quantiles
    ends: bool = False  # whether items end at their duration
    limits: tuple[Finite, ...] = ()  # of the durations of groups
    groups: tuple[WatchGroup, ...] = ()

    def __post_init__(self) -> None:
        if len(self.groups) not in (0, len(self.limits) + 1):
            raise ValueError("watch times need one group more than limits")

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in (self.duration, self.censored) if name is not None)

    def like(self, other: WatchModel) -> bool:
        """Return whether another model has the same options."""
        options = ("action", "duration", "censored", "capped", "quantiles")
        return all(getattr(self, name) == getattr(other, name) for name in options)

    def fit(self, log: Log) -> WatchModel:
        """Return the model fitted to the watches of a log, which should be the training requests."""
        watches = self._watches(log)
        rest = watches.rows(~watches.session_cut)
        known = self.duration is not None and len(rest.times)
        ends = bool(known and (rest.times > rest.durations / REACHED).mean() <= BEYOND)
        if self.capped and not ends:
            what = f"more than {BEYOND:.0%} of the watches are longer than the duration '{self.duration}'"
            hint = "give both in the same unit; if items are repeated, leave out data.capped"
            raise DataError(what, hint=hint)
        fitted = replace(self, ends=ends)
        limits = np.quantile(watches.durations, np.arange(1, GROUPS) / GROUPS) if self.duration and known else []
        fitted = replace(fitted, limits=tuple(np.unique(limits).tolist()))
        watches = fitted._watches(log)
        everything = _fit_group(watches, fitted.capped)
        if everything is None:
            what = f"too few watches in '{self.action}' were not cut"
            hint = f"at least {LEAST} with different times are needed; check the columns of --set duration and censored"
            raise DataError(what, got=int((~watches.fit_cut).sum()), hint=hint)
        parts = (watches.rows(watches.group == g) for g in range(len(fitted.limits) + 1))
        return replace(fitted, groups=tuple(_fit_group(part, fitted.capped) or everything for part in parts))

    def __call__(self, log: Log) -> Log:
        """Return a log whose watch times are continued where they were cut, or quantiles."""
        watches = self._watches(log)
        values = watches.times.copy()
        for g, group in enumerate(self.groups):
            rows = np.flatnonzero(watches.group == g)
            part = watches.rows(rows)
            cut = part.cut(self.capped)
            if self.quantiles:
                level = group.quantile(part.times)
                values[rows] = np.where(cut, (1 + level) / 2, level)  # F(T), given T > cut, is uniform above F(cut)
            else:
                end = part.durations[cut] if self.ends and not self.capped else np.inf
                values[rows[cut]] = group.beyond(part.times[cut], end)
        new = np.array(log.actions[self.action], np.float64)
        new[watches.index] = values
        return replace(log, actions={**log.actions, self.action: new.astype(np.float32)})

    def describe(self, log: Log) -> str:
        """Return a sentence about the watches of a log that was not transformed."""
        watches = self._watches(log)
        cut, ended = watches.session_cut.mean(), watches.ended.mean()
        parts = [f"{len(watches.times):,} watches in '{self.action}'"]
        parts += [f"{cut:.1%} cut by the end of the session"] * (self.censored is not None)
        parts += [f"{ended:.1%} watched to the end"] * self.ends
        if self.quantiles:
            return f"{', '.join(parts)}; they count as quantiles among items of similar duration"
        share = np.bincount(watches.group, minlength=len(self.groups)) / len(watches.times)
        means = np.array([group.expected for group in self.groups])
        value = float(share @ means[:, 0])
        error = float(np.sqrt(((share * (means[:, 2] - means[:, 1])) ** 2).sum()) / 2)
        until = "were items endless" if self.ends else "without cuts"
        whole = f"{value:.4g} {until} (95% interval {value - error:.4g} to {value + error:.4g})"
        return f"{', '.join(parts)}; mean {watches.times.mean():.4g} as logged, {whole}"

    def _watches(self, log: Log) -> _Watches:
        if self.action not in log.actions:
            hint = f"{nearest(self.action, log.actions)}; --actions names the columns of actions"
            raise DataError(f"the log has no action '{self.action}' with the watch time", hint=hint)
        times = np.asarray(log.actions[self.action], np.float64)
        index = np.flatnonzero(times > 0)
        durations = np.full(len(index), np.inf)
        if self.duration is not None:
            durations = extra_column(log, self.duration)[index]
            if bad := int((~((durations > 0) & np.isfinite(durations))).sum()):
                what = f"the duration '{self.duration}' must be a positive number for each item that was watched"
                raise DataError(what, got=f"{bad:,} other values", hint="fill them, or drop those rows with --where")
        cut = np.zeros(len(index), bool)
        if self.censored is not None:
            marks = extra_column(log, self.censored)[index]
            if not np.isin(marks, (0, 1)).all():
                what = f"the column '{self.censored}' must be 1 for a watch that was cut by the end, else 0"
                raise DataError(what, got=float(marks[~np.isin(marks, (0, 1))][0]), hint="write 0 and 1 into it")
            cut = marks > 0
        ended = self.ends & (times[index] >= REACHED * durations)
        group = np.searchsorted(self.limits, durations) if self.limits else np.zeros(len(index), np.int64)
        return _Watches(index, times[index], durations, cut & ~ended, ended, group)


@dataclass(frozen=True, eq=False)
class _Watches:
    """The rows of a log with a watch time."""

    index: np.ndarray
    times: np.ndarray
    durations: np.ndarray
    session_cut: np.ndarray
    ended: np.ndarray
    group: np.ndarray

    @property
    def fit_cut(self) -> np.ndarray:
        return np.asarray(self.session_cut | self.ended)

    def cut(self, capped: bool) -> np.ndarray:
        return np.asarray(self.fit_cut if capped else self.session_cut)

    def rows(self, chosen: np.ndarray) -> _Watches:
        return _Watches(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def extra_column(log: Log, name: str) -> np.ndarray:
    """Return a further column of a log by row; raise DataError if it was not read."""
    if name not in log.extra:
        hint = f"pass extra=['{name}'] to read_log, which made it"
        raise DataError(f"the log has no column '{name}'", hint=hint)
    return np.asarray(log.extra[name])


def _fit_group(watches: _Watches, capped: bool) -> WatchGroup | None:
    """Return the estimates of a group; None if too few of its watches were not cut."""
    logs, cut = np.log(watches.times), watches.fit_cut
    if (~cut).sum() < LEAST or np.ptp(logs[~cut]) == 0:
        return None
    mean, deviation, covariance = fit_log_normal(logs, cut)
    times, levels = distribution(watches.times, watches.cut(capped))
    return WatchGroup(mean, deviation, covariance, tuple(times.tolist()), tuple(levels.tolist()))


def fit_log_normal(logs: np.ndarray, cut: np.ndarray) -> tuple[float, float, tuple[float, float, float]]:
    """Return mean and deviation of normal values, of which some are only known to be larger (`cut`), and covariance.

        Σ_seen [log h - (h y - b)² / 2] + Σ_cut log Φ(b - h y),   b = mean / deviation,   h = 1 / deviation

    is concave in b and h (Olsen 1978), so Newton's method finds its maximum. The covariance of the mean and the log
    deviation is the inverse information.
    """
    shift, scale = logs[~cut].mean(), max(logs[~cut].std(), 1e-12)
    y = (logs - shift) / scale
    seen, later = y[~cut], y[cut]

    def likelihood(b: float, h: float) -> float:
        return float(len(seen) * np.log(h) - ((h * seen - b) ** 2).sum() / 2 + log_ndtr(b - h * later).sum())

    b, h = 0.0, 1.0
    value = likelihood(b, h)
    for _ in range(ITERATIONS):
        gradient, information = _derivatives(seen, later, b, h)
        step, size = np.linalg.solve(information, gradient), 1.0
        while h + size * step[1] <= 0 or (new := likelihood(b + size * step[0], h + size * step[1])) < value - 1e-9:
            size /= 2
        b, h = b + size * float(step[0]), h + size * float(step[1])
        if new - value < 1e-10 * len(y):
            break
        value = new
    inverse = np.linalg.inv(_derivatives(seen, later, b, h)[1])
    jacobian = np.array([[scale / h, -scale * b / h**2], [0.0, -1 / h]])  # of the mean and the log deviation
    spread = jacobian @ inverse @ jacobian.T
    return float(shift + scale * b / h), float(scale / h), (spread[0, 0], spread[0, 1], spread[1, 1])


def _derivatives(seen: np.ndarray, later: np.ndarray, b: float, h: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradient of the likelihood by b and h, and minus its Hessian."""
    residual, z = h * seen - b, b - h * later
    hazard = np.exp(-(z**2) / 2 - log_ndtr(z)) / np.sqrt(2 * np.pi)
    weight = hazard * (hazard + z)
    gradient = np.array([residual.sum() + hazard.sum(), (1 / h - residual * seen).sum() - (hazard * later).sum()])
    cross = -seen.sum() - (weight * later).sum()
    second = (1 / h**2 + seen**2).sum() + (weight * later**2).sum()
    return gradient, np.array([[len(seen) + weight.sum(), cross], [cross, second]])


def distribution(times: np.ndarray, cut: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distribution function of watch times by Kaplan and Meier: times, and the levels there.

    The level is (F(t-) + F(t)) / 2, so that its mean is 1/2 even if many times are equal.
    """
    unique, place = np.unique(times, return_inverse=True)
    ends = np.bincount(place, ~cut)
    at_risk = len(times) - np.searchsorted(np.sort(times), unique)
    survival = np.cumprod(1 - ends / at_risk)
    after = 1 - survival
    before = np.append(0.0, after[:-1])
    happens = ends > 0
    unique, levels = unique[happens], ((before + after) / 2)[happens]
    wanted = np.linspace(levels[0], levels[-1], KNOTS)
    chosen = np.unique(np.append(np.searchsorted(levels, wanted).clip(0, len(levels) - 1), [0, len(levels) - 1]))
    return unique[chosen], levels[chosen]
