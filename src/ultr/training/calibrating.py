"""The stage `calibrate`: expected feedback from scores, and how far it is off on test requests.

The expected feedback on an item with the score s at the position k is θ_k a_k g(s). g is the isotonic fit to the
feedback. The factor a_k is near 1: it corrects θ_k where the feedback at a position disagrees, given the scores.
If actions after the click depend on the position, θ_k is multiplied by how much less is left of the label at k.

Few validation requests would leave g noisy, so that train rows are used too. Their scores flatter the ranker that
learned from them. The validation rows therefore correct the level and the slope of log g, if they show a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ultr.bias.after_click import Trust, corrected, trust_of
from ultr.bias.examination import Examination
from ultr.bias.identification import NORMAL
from ultr.bias.propensities import known_slots
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.sampling import sample_log
from ultr.log.splits import queries_of
from ultr.log.table import IN_LIST, SHIFT, slot
from ultr.methods.base import PositionIndex
from ultr.methods.position_model import LEAST_THETA
from ultr.training.combining import Ranker
from ultr.training.data import Data
from ultr.training.fitting import scores_of
from ultr.utils.calibration import LEAST, Calibration

TRAIN_ROWS = 200_000  # train rows that are scored, at most
PASSES = 4  # over g and the factors of positions
SURE = 3.84  # of a change divided by its standard error, squared: the 95% quantile of χ²
LEAST_CHANGE, NEWTON = 0.05, 30  # the smallest slope of log g relative to train rows; steps of Newton's method
BINS = 15  # of a reliability plot
MOST_OFF = 0.05  # a group of requests whose feedback is further off is reported, if chance does not explain it


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows that a calibration is fitted to."""

    scores: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    places: np.ndarray  # index of the position
    groups: np.ndarray  # queries, or else requests: rows of a group have common errors

    @classmethod
    def of(cls, log: Log, scores: np.ndarray, label: Label, index: PositionIndex | None) -> _Rows:
        weights = np.ones(log.rows) if log.weights is None else np.repeat(log.weights, log.lengths).astype(np.float64)
        places = np.zeros(log.rows, np.int64)
        if index is not None and log.positions is not None:
            places = index(torch.from_numpy(log.positions)).numpy()
        labels = np.asarray(label(log.actions), np.float64)
        return cls(np.asarray(scores, np.float64), labels, weights, places, queries_of(log)[log.request_of_row])

    def and_also(self, other: _Rows) -> _Rows:
        both = {name: np.concatenate([values, getattr(other, name)]) for name, values in vars(self).items()}
        return _Rows(**{**both, "groups": np.concatenate([self.groups, other.groups + self.groups.max() + 1])})


def calibrate(ranker: Ranker, data: Data, examination: Examination | None) -> Calibration | None:
    """Return the calibration of a ranker; None if the feedback on the validation requests is not known."""
    label, log = Label(data.label), data.validation
    if not set(label.actions) <= set(log.actions):
        return None
    positions: tuple[int, ...] = ()
    theta = np.ones(1)
    if log.positions is not None and data.positions:
        positions = data.positions if examination is None else examination.positions
        theta = np.ones(len(positions)) if examination is None else examination.cautious().theta
        theta = np.maximum(theta, LEAST_THETA)
    index = PositionIndex(positions) if positions else None
    held_out = _Rows.of(log, ranker.scores, label, index)
    if not held_out.labels.any():
        return None
    rows = held_out
    if set(label.actions) <= set(data.train.actions):
        log = sample_log(data.train, TRAIN_ROWS)
        rows = rows.and_also(_Rows.of(log, scores_of(ranker.ranker, log.features), label, index))
    if examination is not None and (trust := trust_of(examination.actions, positions)):
        theta = theta * _trusted(log, label, trust, positions)
    scores, values, factors = fit_calibration(rows, theta)
    values = _corrected(scores, values, factors, held_out)
    binary = label.expression in data.binary
    most = 1 / factors.max() if binary else np.inf
    return Calibration.of(scores, values, _by_slot(rows, positions, factors, data.segments), most=most)


def _trusted(log: Log, label: Label, trust: Trust, positions: tuple[int, ...]) -> np.ndarray:
    """Return the label after a click at each position over that after a click in the first one: Σ_j τ_jk share_j.

    share_j is the share of the label that comes from action j, if it is clicked in the first position.
    """
    times = np.ones(len(positions))
    actions = corrected(log, trust).actions
    total = np.asarray(label(actions, check=False), np.float64).sum()
    for name in trust.keys() & set(label.actions):
        without = np.asarray(label({**actions, name: 0 * actions[name]}, check=False), np.float64).sum()
        times += (1 - without / total) * (np.array([trust[name][k] for k in positions]) - 1)
    return times


def fit_calibration(rows: _Rows, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the knots of g, the values there, and the factor θ_k a_k of each position, fitted in turns."""
    factors = theta
    for number in range(PASSES):
        scores, values = _isotonic(rows, factors)
        if len(theta) > 1 and number < PASSES - 1:
            factors = theta * _agreement(rows, theta, np.interp(rows.scores, scores, values))
    return scores, values, factors


def _isotonic(rows: _Rows, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the blocks of the isotonic fit, whose values are Σ w c / Σ w θ."""
    from sklearn.isotonic import IsotonicRegression

    seen = factors[rows.places]
    fit = IsotonicRegression().fit(rows.scores, rows.labels / seen, sample_weight=rows.weights * seen)
    return np.asarray(fit.X_thresholds_, np.float64), np.asarray(fit.y_thresholds_, np.float64)


def _agreement(rows: _Rows, theta: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Return a_k: feedback over that expected with θ_k, nearer to 1 the noisier it is, by empirical Bayes."""
    weighted = rows.weights * rows.labels
    feedback = np.bincount(rows.places, weighted, len(theta))
    expected = np.maximum(np.bincount(rows.places, rows.weights * theta[rows.places] * g, len(theta)), 1e-300)
    ratio, variance = feedback / expected, (weighted**2).sum() / weighted.sum() / expected
    sure = 1 / variance
    spare = sure.sum() - (sure**2).sum() / sure.sum()
    mean = (sure * ratio).sum() / sure.sum()
    between = max(0.0, ((sure * (ratio - mean) ** 2).sum() - len(theta) + 1) / spare) if spare > 0 else 0.0
    return np.asarray((ratio * between + variance) / (between + variance))


def _corrected(scores: np.ndarray, values: np.ndarray, factors: np.ndarray, rows: _Rows) -> np.ndarray:
    """Return values whose level and slope are nearer to those of held-out rows, the surer these are different.

    A Poisson regression of their feedback on log g has a level and a slope. Errors of both are by query or request.
    """
    floor = LEAST * values.max()
    logs = np.log(np.maximum(values, floor))
    log_g = np.log(np.maximum(np.interp(rows.scores, scores, values), floor))
    weights = rows.weights * factors[rows.places]
    middle = float(np.average(log_g, weights=weights * np.exp(log_g)))
    features = np.column_stack([np.ones(len(log_g)), log_g - middle])
    change = np.zeros(2)
    if np.ptp(log_g) < 1e-9:
        return values
    for _ in range(NEWTON):
        mean = weights * np.exp(middle + change[0] + (1 + change[1]) * features[:, 1])
        hessian, rest = (features * mean[:, None]).T @ features, rows.weights * rows.labels - mean
        step = np.linalg.solve(hessian, features.T @ rest)
        change = change + np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-10:
            break
    by_group = np.column_stack([np.bincount(rows.groups, rest * column) for column in features.T])
    inverse = np.linalg.inv(hessian)
    covariance = inverse @ by_group.T @ by_group @ inverse
    # Train scores flatter the ranker, so that a slope below 1 is likely; other changes must be sure.
    slope = _sure(change[1], covariance[1, 1], 1.0 if change[1] < 0 else SURE)
    flatter = np.exp(middle + max(LEAST_CHANGE, 1 + slope) * (logs - middle)) if slope else values
    before, after = (float(weights @ np.interp(rows.scores, scores, each)) for each in (values, flatter))
    feedback = float(rows.weights @ rows.labels)
    rest = rows.weights * rows.labels - feedback / before * weights * np.interp(rows.scores, scores, values)
    level = _sure(np.log(feedback / before), (np.bincount(rows.groups, rest) ** 2).sum() / feedback**2, SURE)
    return values if not (slope or level) else np.asarray(flatter * np.exp(level) * before / after)


def _sure(change: float, variance: float, doubt: float) -> float:
    """Return a change, nearer to 0 the larger its variance is, and 0 if its square is below `doubt` variances."""
    return float(change * max(0.0, 1 - doubt * variance / max(change**2, 1e-300)))


def _by_slot(
    rows: _Rows, positions: tuple[int, ...], factors: np.ndarray, segments: tuple[str, ...]
) -> dict[str, float]:
    """Return the factors by the texts of positions: first those of positions, which are means over segments."""
    shown = np.maximum(np.bincount(rows.places, rows.weights, len(factors)), 1e-9)
    in_list = np.array([position & IN_LIST if segments else position for position in positions], np.int64)
    found = {}
    for position in np.unique(in_list).tolist():
        here = in_list == position
        found[slot(position)] = float(np.average(factors[here], weights=shown[here]))
    return found | {slot(k, segments): float(factor) for k, factor in zip(positions, factors, strict=False)}


# --- Reliability ------------------------------------------------------------------------------------------------------


def reliability(
    calibration: Calibration, scores: np.ndarray, log: Log, label: Label, segments: tuple[str, ...]
) -> dict[str, Any]:
    """Return expected and mean feedback in bins of rows at their logged positions, and the calibration error.

    The error is the mean over rows of |mean feedback of the bin - its expected feedback|, relative to the mean
    feedback. `chance` is that of feedback which is as expected. Intervals and `chance` are by query or request.
    """
    rows = _Rows.of(log, scores, label, None)
    expected = calibration.g(scores)
    if log.positions is not None and calibration.factors:
        ids, place = np.unique(log.positions, return_inverse=True)
        names = known_slots(calibration.factors, tuple(ids.tolist()), segments, nearest=True)
        expected = expected * np.array([calibration.factors[names[k]] for k in ids.tolist()])[place]
    order = np.argsort(expected, kind="stable")
    total = float((rows.weights * rows.labels).sum())
    bins: dict[str, list[float]] = {name: [] for name in ("expected", "mean", "low", "high")}
    off = chance = 0.0
    share = np.cumsum(rows.weights[order])
    for chosen in np.split(order, np.searchsorted(share, share[-1] * np.arange(1, BINS) / BINS)):
        if not len(chosen):
            continue
        difference, error = _difference(rows, chosen, expected[chosen])
        weight = rows.weights[chosen].sum()
        mean = float(np.average(rows.labels[chosen], weights=rows.weights[chosen]))
        margin = NORMAL * _difference(rows, chosen, np.full(len(chosen), mean))[1] / weight
        values = (
            np.average(expected[chosen], weights=rows.weights[chosen]),
            mean,
            max(0.0, mean - margin),
            mean + margin,
        )
        for name, value in zip(bins, values, strict=True):
            bins[name].append(float(value))
        off, chance = off + abs(difference), chance + error * np.sqrt(2 / np.pi)
    return {
        "bins": bins,
        "error": off / total if total else None,
        "chance": chance / total if total else None,
        "groups": [*_groups_off(rows, expected, log, segments)],
    }


def _difference(rows: _Rows, chosen: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return the feedback on the `chosen` rows minus that `expected`, and its standard error by query or request."""
    rest = rows.weights[chosen] * (rows.labels[chosen] - expected)
    _, group = np.unique(rows.groups[chosen], return_inverse=True)
    variance = ((by_group := np.bincount(group, rest)) ** 2).sum() - rest.sum() ** 2 / len(by_group)
    return float(rest.sum()), float(np.sqrt(max(0.0, variance)))


def _groups_off(rows: _Rows, expected: np.ndarray, log: Log, segments: tuple[str, ...]) -> Iterator[str]:
    """Yield a sentence for each group of requests whose feedback is not as expected from the scores alone."""
    lengths = log.lengths[log.request_of_row]
    edges = np.unique(np.quantile(log.lengths, [1 / 3, 2 / 3], method="lower"))
    groups = {}
    for low, high in zip([0, *edges], [*edges, lengths.max()], strict=True):
        if 0 < ((lengths > low) & (lengths <= high)).sum() < len(lengths):
            groups[f"requests with {low + 1:.0f} to {high:.0f} items"] = (lengths > low) & (lengths <= high)
    if segments and log.positions is not None:
        groups |= {f"segment {name}": log.positions >> SHIFT == code for code, name in enumerate(segments)}
    for name, mask in groups.items():
        if (of_group := float((rows.weights * expected)[mask].sum())) > 0:
            chosen = np.flatnonzero(mask)
            difference, error = _difference(rows, chosen, expected[chosen])
            if abs(difference) > max(3 * error, MOST_OFF * of_group):
                yield f"{name}: feedback is {difference / of_group:+.0%} of that expected from scores and positions"
