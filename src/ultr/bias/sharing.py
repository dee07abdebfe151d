"""Examination in several contexts, such as devices and surfaces, whose estimates share strength.

log θ of position k in a context is a sum of curves over log k:

    log θ(k, context) = a(k) + o(context) + Σ_j b_j(k, value of column j) + d(k, context)

a is the curve that all contexts share, and o a level. b_j says how the curve of each value of a column deviates, and d
how that of a combination of values does. b_j and d are normal around 0, so that a context with few clicks has nearly
the curve that its values suggest. How much they vary is what makes the estimates of the contexts, with their errors,
most likely. A column on which examination does not depend has little or no part, and combinations have one only if they
make the estimates much more likely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import linalg

from ultr.bias.estimators import ConditionalFit
from ultr.log.table import SEPARATOR

FREE = 100.0  # variance of what all contexts share: its mean and its slope over log k
ROUGH = 1.0  # variance of the shared curve around its slope, by log k
LEVEL = 1.0  # variance of the level of a context; clicks compare levels only if contexts show the same items
BEND = 0.25  # variance of a deviation around its slope, by log k, relative to that of the slope
SIZES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)  # standard deviations of the slopes of deviations that are tried
LEAST_GAIN = 2.0  # of the log-likelihood, for combinations of values to have curves of their own
ROUNDS = 3
MOST_SLOTS = 1_000  # with more, segments do not share strength: matrices have an entry for each pair
FLOOR = 1e-6  # variance of an estimate beside its error
SHOWN_POSITION = 5.0  # deviations are told for this position, relative to the first
Z = 1.96


@dataclass(frozen=True)
class Slots:
    """Positions in contexts: the log of each position (or the mean of a pool), and the code of each column's value."""

    log_position: np.ndarray  # [slots]
    codes: np.ndarray  # [slots, columns]
    values: tuple[tuple[str, ...], ...]  # the values of each column

    @staticmethod
    def of(positions: np.ndarray, contexts: np.ndarray, names: Sequence[str]) -> Slots:
        """Return the slots at positions, 1 the first, in contexts, which are indices of names such as `phone + search`.

        A name has the values of columns with ` + ` between them.
        """
        parts = [text.split(SEPARATOR) for text in names]
        if len({*map(len, parts)}) > 1:  # a value has the separator in it
            parts = [[text] for text in names]
        columns = [np.unique(column, return_inverse=True) for column in np.array(parts).T]
        codes = np.column_stack([codes for _, codes in columns])[contexts]
        return Slots(np.log(positions), codes, tuple(tuple(map(str, values)) for values, _ in columns))

    def pooled(self, pool: np.ndarray, weights: np.ndarray) -> Slots:
        """Return the slots of pools; `pool` has the pool of each slot, all of one context."""
        places = np.bincount(pool, weights * self.log_position) / np.bincount(pool, weights)
        return replace(self, log_position=places, codes=self.codes[np.unique(pool, return_index=True)[1]])


@dataclass(frozen=True)
class Deviation:
    """How the values of a column look further or less far down the list than average, at position 5."""

    size: float  # standard deviation of the slopes of log θ over log k; 0: examination does not depend on the column
    ratios: dict[str, tuple[float, float, float]]  # value -> θ(5)/θ(1) over the average, and its 95% interval

    @staticmethod
    def of(content: Mapping[str, Any]) -> Deviation:
        ratios = {str(value): tuple(map(float, three)) for value, three in content["ratios"].items()}
        if any(len(three) != 3 for three in ratios.values()):
            raise ValueError("a ratio must have an interval")
        return Deviation(float(content["size"]), ratios)  # type: ignore[arg-type]


def share_strength(
    fit: ConditionalFit, slots: Slots, wanted: Slots, *, anchor: int = 0
) -> tuple[ConditionalFit, tuple[Deviation, ...]]:
    """Return θ at the `wanted` slots, relative to the `anchor`, from estimates at `slots`, and columns' deviations.

    The estimates are taken as normal around log θ, with their covariance; slots may lack one. A bias that is possible
    but not probable widens intervals. It does not decide on the weights of slots: all of them would share the bias, so
    that they would count for little against the smoothness of curves.
    """
    seen = np.flatnonzero(np.isfinite(fit.theta))
    known = replace(slots, log_position=slots.log_position[seen], codes=slots.codes[seen])
    y, all_errors = np.log(fit.theta[seen]), fit.covariance()[np.ix_(seen, seen)]
    errors = all_errors if fit.probable is None else fit.probable[np.ix_(seen, seen)]
    shared, kernels = _shared(known, known) + FLOOR * np.eye(len(y)) + errors, _kernels(known, known)
    sizes = _likeliest(y, shared, kernels)
    covariance = _sum(shared, kernels, sizes)
    across = _sum(_shared(wanted, known), _kernels(wanted, known), sizes)
    gain = linalg.solve(covariance, across.T, assume_a="pos").T
    possible = all_errors - errors
    left = _sum(_shared(wanted, wanted), _kernels(wanted, wanted), sizes) - gain @ across.T
    log_theta, spread = gain @ y, left + gain @ possible @ gain.T
    log_theta = log_theta - log_theta[anchor]
    spread = spread - spread[anchor] - spread[:, [anchor]] + spread[anchor, anchor]
    deviations = (_deviation(known, j, sizes[j], y, covariance, possible) for j in range(len(slots.values)))
    return ConditionalFit(np.exp(log_theta), fit.moved, fit.information, anchor, spread), tuple(deviations)


def _shared(a: Slots, b: Slots) -> np.ndarray:
    """Return the covariance of log θ between slots that contexts share: one curve, and the levels of contexts."""
    (line, bend), same = _lines(a, b), _same(a, b).all(0)
    return np.asarray(FREE * (1 + line) + ROUGH * bend + LEVEL * same)


def _kernels(a: Slots, b: Slots) -> np.ndarray:
    """Return the covariance of deviations of size 1, for each column and for combinations [columns + 1, a, b]."""
    line, bend = _lines(a, b)
    same = _same(a, b)
    together = np.asarray(same.all(0))[None]
    return np.asarray((line + BEND * bend) * np.concatenate([same, together]))


def _lines(a: Slots, b: Slots) -> tuple[np.ndarray, np.ndarray]:
    return np.outer(a.log_position, b.log_position), np.minimum.outer(a.log_position, b.log_position)


def _same(a: Slots, b: Slots) -> np.ndarray:
    """Return whether two slots have the same value of a column [columns, a, b]."""
    return np.asarray(np.equal(a.codes.T[:, :, None], b.codes.T[:, None]))


def _likeliest(y: np.ndarray, shared: np.ndarray, kernels: np.ndarray) -> np.ndarray:
    """Return the sizes of deviations that make estimates most likely, tried one after the other."""
    columns = len(kernels) - 1
    sizes = np.array([SIZES[2]] * columns + [0.0])
    for _ in range(ROUNDS):
        before = sizes
        for j in range(columns + (columns > 1)):  # of one column, combinations are the values themselves
            tried = [np.where(np.arange(len(sizes)) == j, size, sizes) for size in SIZES]
            gains = np.array([_log_density(y, _sum(shared, kernels, each)) for each in tried])
            gains[0] += LEAST_GAIN * (j == columns)
            sizes = tried[int(gains.argmax())]
        if (sizes == before).all():
            break
    return sizes


def _sum(shared: np.ndarray, kernels: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.asarray(shared + np.tensordot(sizes**2, kernels, 1))


def _log_density(y: np.ndarray, covariance: np.ndarray) -> float:
    """Return the log density of a normal vector around 0, up to a constant."""
    root = linalg.cholesky(covariance, lower=True)
    scaled = linalg.solve_triangular(root, y, lower=True)
    return float(-0.5 * scaled @ scaled - np.log(root.diagonal()).sum())


def _deviation(
    known: Slots, column: int, size: float, y: np.ndarray, covariance: np.ndarray, possible: np.ndarray
) -> Deviation:
    """Return the deviations of the values of a column, each relative to their mean."""
    x, at, number = known.log_position, np.log(SHOWN_POSITION), len(known.values[column])
    across = size**2 * (at * x + BEND * np.minimum(at, x)) * (np.arange(number)[:, None] == known.codes[:, column])
    own = size**2 * (at * at + BEND * at) * np.eye(number)
    gain = linalg.solve(covariance, across.T, assume_a="pos").T
    centre = np.eye(number) - 1 / number
    mean, spread = centre @ gain @ y, centre @ (own - gain @ across.T + gain @ possible @ gain.T) @ centre
    error = Z * np.sqrt(np.maximum(spread.diagonal(), 0))
    low, middle, high = np.exp([mean - error, mean, mean + error])
    ratios = zip(middle.tolist(), low.tolist(), high.tolist(), strict=True)
    return Deviation(float(size), dict(zip(known.values[column], ratios, strict=True)))
