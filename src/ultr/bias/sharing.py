"""Examination in several contexts, such as devices and surfaces, or in a grid, whose estimates share strength.

log θ of position k in a context is a sum of curves over log k:

    log θ(k, context) = a(k) + o(context) + Σ_j b_j(k, value of column j) + d(k, context)

a is the curve that all contexts share, and o a level. b_j says how the curve of each value of a column deviates, and d
how that of a combination of values does. b_j and d are normal around 0, so that a context with few clicks has nearly
the curve that its values suggest. How much they vary is what makes the estimates of the contexts, with their errors,
most likely. A column on which examination does not depend has little or no part, and combinations have one only if they
make the estimates much more likely.

In a grid, each curve is the sum of one over log row and one over log column. Columns may be seen only after a swipe, so
the curve over columns may have steps. Slots may deviate from the sum smoothly, as lower rows are often read less
broadly. Each slot may also deviate on its own, but again only if that makes the estimates much more likely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import linalg

from ultr.bias.estimators import ConditionalFit
from ultr.log.table import IN_LIST, SEPARATOR, SHIFT, is_grid, rows_and_columns

FREE = 100.0  # variance of what all contexts share: its mean and its slope over log k
ROUGH = 1.0  # variance of the shared curve around its slope, by log k
STEP = 0.5  # variance of the change of the shared curve between neighbouring columns of a grid, besides its slope
LEVEL = 1.0  # variance of the level of a context; clicks compare levels only if contexts show the same items
BEND = 0.25  # variance of a deviation around its slope, by log k, relative to that of the slope
SIZES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)  # standard deviations of the slopes of deviations that are tried
LEAST_GAIN = 2.0  # of the log-likelihood, for combinations of values, or for slots, to deviate on their own
ROUNDS = 3
MOST_SLOTS = 1_000  # with more, segments do not share strength: matrices have an entry for each pair
FLOOR = 1e-6  # variance of an estimate beside its error
SHOWN_POSITION = 5.0  # deviations are told for this position, relative to the first
Z = 1.96


@dataclass(frozen=True)
class Slots:
    """Positions in contexts: the log of each position (or the mean of a pool), and the code of each column's value."""

    log_position: np.ndarray  # [slots, 1], or of the row and the column of a grid [slots, 2]
    codes: np.ndarray  # [slots, columns], of the columns that define contexts
    values: tuple[tuple[str, ...], ...]  # the values of each column

    @property
    def in_grid(self) -> bool:
        return bool(self.log_position.shape[1] > 1)

    @staticmethod
    def of(positions: np.ndarray, contexts: np.ndarray, names: Sequence[str]) -> Slots:
        """Return the slots at positions, 1 the first, in contexts, which are indices of names such as `phone + search`.

        A name has the values of columns with ` + ` between them. Positions in a grid are rows and columns [slots, 2].
        """
        if not names:
            return Slots(_as_rows(np.log(positions)), np.zeros((len(positions), 0), np.int64), ())
        parts = [text.split(SEPARATOR) for text in names]
        if len({*map(len, parts)}) > 1:  # a value has the separator in it
            parts = [[text] for text in names]
        columns = [np.unique(column, return_inverse=True) for column in np.array(parts).T]
        codes = np.column_stack([codes for _, codes in columns])[contexts]
        return Slots(_as_rows(np.log(positions)), codes, tuple(tuple(map(str, values)) for values, _ in columns))

    def pooled(self, pool: np.ndarray, weights: np.ndarray) -> Slots:
        """Return the slots of pools; `pool` has the pool of each slot, all of one context."""
        places = [np.bincount(pool, weights * axis) / np.bincount(pool, weights) for axis in self.log_position.T]
        return replace(
            self, log_position=np.column_stack(places), codes=self.codes[np.unique(pool, return_index=True)[1]]
        )


def slots_of(ids: np.ndarray, segments: Sequence[str]) -> Slots | None:
    """Return the slots of position ids; None if they share no strength, or are too many.

    Slots of a grid do, and segments of several columns. Values of one column have the clicks for curves of their own,
    or else are not found to be segments. A grid with one row or one column is a list.
    """
    if ids[-1] >> SHIFT >= max(1, len(segments)) or len(ids) > MOST_SLOTS:
        return None
    places = np.column_stack(rows_and_columns(ids)) if is_grid(ids & IN_LIST) else (ids & IN_LIST)[:, None]
    places = places - places.min(0) + 1
    places = places[:, places.max(0) > 1] if places.max() > 1 else places[:, :1]
    slots = Slots.of(places, ids >> SHIFT, segments if len(segments) > 1 else ())
    return slots if places.shape[1] > 1 or len(slots.values) > 1 else None


@dataclass(frozen=True)
class Deviation:
    """How the values of a column look further or less far down the list than average, at `told_position`."""

    size: float  # standard deviation of the slopes of log θ over log k; 0: examination does not depend on the column
    ratios: dict[str, tuple[float, float, float]]  # value -> relative examination over the average, with an interval

    @staticmethod
    def of(content: Mapping[str, Any]) -> Deviation:
        ratios = {str(value): tuple(map(float, three)) for value, three in content["ratios"].items()}
        if any(len(three) != 3 for three in ratios.values()):
            raise ValueError("a ratio must have an interval")
        return Deviation(float(content["size"]), ratios)  # type: ignore[arg-type]


def told_position(ids: Sequence[int]) -> str:
    """Return the position of deviations: 5, or the first slot of row 5 of a grid, or of its last row."""
    places, fifth = np.array(ids) & IN_LIST, int(SHOWN_POSITION)
    if not is_grid(places):
        return str(fifth)
    rows, columns = rows_and_columns(places)
    if len({*rows.tolist()}) == 1:
        return f"r{rows[0]}c{columns.min() + fifth - 1}"
    last = rows.max() if len({*columns.tolist()}) > 1 else np.inf
    return f"r{min(rows.min() + fifth - 1, last)}c{columns.min()}"


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
    sizes = _likeliest(y, shared, kernels, len(slots.values))
    covariance = _sum(shared, kernels, sizes)
    across = _sum(_shared(wanted, known), _kernels(wanted, known), sizes)
    gain = linalg.solve(covariance, across.T, assume_a="pos").T
    possible = all_errors - errors
    left = _sum(_shared(wanted, wanted), _kernels(wanted, wanted), sizes) - gain @ across.T
    log_theta, spread = gain @ y, left + gain @ possible @ gain.T
    log_theta = log_theta - log_theta[anchor]
    spread = spread - spread[anchor] - spread[:, [anchor]] + spread[anchor, anchor]
    last = float(wanted.log_position[:, 0].max()) if wanted.in_grid else np.inf
    at = min(float(np.log(SHOWN_POSITION)), last)
    deviations = (_deviation(known, j, sizes[j], y, covariance, possible, at) for j in range(len(slots.values)))
    return ConditionalFit(np.exp(log_theta), fit.moved, fit.information, anchor, spread), tuple(deviations)


def _shared(a: Slots, b: Slots) -> np.ndarray:
    """Return the covariance of log θ between slots that contexts share: one curve, and the levels of contexts."""
    (line, bend), same = _lines(a, b), _same(a, b).all(0)
    steps = [STEP * np.expm1(np.minimum.outer(x, y)) for x, y in _axes(a, b)[1:]]  # over the columns of a grid
    return np.asarray(FREE * (1 + line) + ROUGH * bend + LEVEL * same + sum(steps))


def _kernels(a: Slots, b: Slots) -> np.ndarray:
    """Return the covariance of deviations of size 1: for each column, for combinations, and for slots of a grid.

    The latter are a surface, a product of curves over rows and columns, and each slot alone.
    """
    line, bend = _lines(a, b)
    same = _same(a, b)
    kernels = (line + BEND * bend) * np.concatenate([same, np.asarray(same.all(0))[None]])
    if len(axes := _axes(a, b)) < 2:
        return np.asarray(kernels)
    surface = np.prod([np.outer(x, y) + BEND * np.minimum.outer(x, y) for x, y in axes], axis=0)
    alone = np.prod([np.equal.outer(x, y) for x, y in axes], axis=0) * same.all(0)
    return np.concatenate([kernels, [surface, alone]])


def _axes(a: Slots, b: Slots) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the log positions of both, or their log rows and then their log columns."""
    return list(zip(a.log_position.T, b.log_position.T, strict=True))


def _lines(a: Slots, b: Slots) -> tuple[np.ndarray, np.ndarray]:
    line, bend = (sum(of(x, y) for x, y in _axes(a, b)) for of in (np.outer, np.minimum.outer))
    return np.asarray(line), np.asarray(bend)


def _as_rows(log_position: np.ndarray) -> np.ndarray:
    return log_position[:, None] if log_position.ndim == 1 else log_position


def _same(a: Slots, b: Slots) -> np.ndarray:
    """Return whether two slots have the same value of a column [columns, a, b]."""
    return np.asarray(np.equal(a.codes.T[:, :, None], b.codes.T[:, None]))


def _likeliest(y: np.ndarray, shared: np.ndarray, kernels: np.ndarray, columns: int) -> np.ndarray:
    """Return the sizes of deviations that make estimates most likely, tried one after the other."""
    surface = columns + 1  # which users of a grid are expected to have; the last kernel is that of slots alone
    sizes = np.array([SIZES[2]] * columns + [0.0, SIZES[1], 0.0][: len(kernels) - columns])
    # Of one column, combinations are the values themselves.
    tries = [j for j in range(len(kernels)) if j != columns or columns > 1]
    for _ in range(ROUNDS):
        before = sizes
        for j in tries:
            tried = [np.where(np.arange(len(sizes)) == j, size, sizes) for size in SIZES[j == surface :]]
            gains = np.array([_log_density(y, _sum(shared, kernels, each)) for each in tried])
            gains[0] += LEAST_GAIN * (j in (columns, columns + 2))
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
    known: Slots, column: int, size: float, y: np.ndarray, covariance: np.ndarray, possible: np.ndarray, at: float
) -> Deviation:
    """Return the deviations of the values of a column, each relative to their mean, at a log position (or row)."""
    x, number = known.log_position[:, 0], len(known.values[column])
    across = size**2 * (at * x + BEND * np.minimum(at, x)) * (np.arange(number)[:, None] == known.codes[:, column])
    own = size**2 * (at * at + BEND * at) * np.eye(number)
    gain = linalg.solve(covariance, across.T, assume_a="pos").T
    centre = np.eye(number) - 1 / number
    mean, spread = centre @ gain @ y, centre @ (own - gain @ across.T + gain @ possible @ gain.T) @ centre
    error = Z * np.sqrt(np.maximum(spread.diagonal(), 0))
    low, middle, high = np.exp([mean - error, mean, mean + error])
    ratios = zip(middle.tolist(), low.tolist(), high.tolist(), strict=True)
    return Deviation(float(size), dict(zip(known.values[column], ratios, strict=True)))
