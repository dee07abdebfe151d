"""The loss of weighted pairs for boosted trees, with its gradients and curvatures by row from compiled code.

    Σ w_ij log(1 + exp(-(s_i - s_j)))    over pairs of a request with scores s and values v_i > v_j

Memory grows only with the number of rows: the terms of w_ij are stored by row and by pair of positions, and w_ij is
computed when it is needed. The same objective is used for LightGBM and XGBoost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import torch

from ultr.errors import MissingExtraError

CURVATURE = 0.1  # mean curvature of rows in the first round, about that of XGBoost's rank:ndcg


class Kind(IntEnum):
    """The formula of the weight of a pair (i, j), v_i > v_j, from its rows."""

    GAP = 0  # v_i - v_j
    PRODUCT = 1  # above_i · below_j
    TRUSTED = 2  # above_i · below_j, and times γ / (ε⁺ γ + ε⁻ (1-γ)) if v_j > 0
    PAPER = 3  # above_i · above_j · m_ij, times h_ij where v_j = 0 (`pair_trust`, `pair_examined`)


def _no_rows() -> np.ndarray:
    return np.zeros(1)


def _no_pairs() -> np.ndarray:
    return np.zeros((1, 1))


@dataclass(frozen=True, eq=False)
class PairTerms:
    """The numbers of each row from which the weight of a pair of rows is computed, in float64; `Kind` says how."""

    offsets: np.ndarray  # [requests + 1]
    weights: np.ndarray  # [requests]
    value: np.ndarray  # [rows] v, the label or its expected value
    kind: Kind = Kind.GAP
    by_metric: bool = False  # times |ΔDCG|: for GAP |D_i - D_j|, otherwise (v_i - v_j) |D_i - D_j|
    clip: float = math.inf  # the largest weight, before |ΔDCG| is applied
    above: np.ndarray = field(default_factory=_no_rows)
    below: np.ndarray = field(default_factory=_no_rows)
    place: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))  # index of the position in the tables
    preference: np.ndarray = field(default_factory=_no_rows)  # g, with γ_ij = sigmoid(g_i - g_j)
    beta: np.ndarray = field(default_factory=_no_rows)
    examined: np.ndarray = field(default_factory=_no_rows)  # θ⁻
    plus: np.ndarray = field(default_factory=_no_pairs)
    minus: np.ndarray = field(default_factory=_no_pairs)

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray):
                kind = np.int64 if name in ("offsets", "place") else np.float64
                object.__setattr__(self, name, np.ascontiguousarray(values, kind))


class PairwiseObjective:
    """The objective that LightGBM and XGBoost call for gradients and curvatures of the pair loss.

    The loss is scaled so that parameters of leaves (`min_child_weight`, `lambda_l2`) have about the same effect as with
    the ranking objectives of the libraries.
    """

    def __init__(self, terms: PairTerms) -> None:
        self.terms = terms
        self._last: np.ndarray | None = None
        curvature = self.derivatives(np.zeros(len(terms.value)))[1].mean()
        self.has_pairs = bool(curvature > 0)
        self.scale = CURVATURE / curvature if self.has_pairs else 1.0

    def __call__(self, scores: np.ndarray, _data: object = None) -> tuple[np.ndarray, np.ndarray]:
        self._last = scores
        gradient, curvature = self.derivatives(scores)
        return (self.scale * gradient).astype(np.float32), (self.scale * curvature).astype(np.float32)

    def __deepcopy__(self, _memo: object) -> PairwiseObjective:
        """Return the object itself, because LightGBM copies its parameters, including this objective."""
        return self

    def derivatives(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return first and second derivatives of the loss, summed over requests, by the score of each row."""
        gradient, curvature, _ = self._computed(scores, False)
        return gradient, curvature

    def loss(self, scores: np.ndarray) -> float:
        """Return the loss, a weighted mean over requests as in `ultr.methods.losses.pairwise_loss`."""
        return float(self._computed(scores, True)[2].sum() / self.terms.weights.sum())

    def last_loss(self) -> float:
        """Return the loss of the scores of the last call of this objective; NaN before the first call."""
        return math.nan if self._last is None else self.loss(self._last)

    def _computed(self, scores: np.ndarray, with_loss: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        t = self.terms
        scores = np.ascontiguousarray(scores, np.float64)
        results = np.zeros(len(scores)), np.zeros(len(scores)), np.zeros(len(t.weights))
        in_threads(
            kernels().derivatives, len(t.weights),
            scores, t.offsets, t.weights, t.value, int(t.kind), t.by_metric, t.clip,
            t.above, t.below, t.place, t.preference, t.beta, t.examined, t.plus, t.minus, with_loss, *results,
        )  # fmt: skip
        return results


def in_threads(function: Callable[..., None], count: int, *arguments: Any) -> None:
    """Call `function(*arguments, start, end)` for parts of `range(count)`, in as many threads as torch has."""
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        function(*arguments, 0, count)
        return
    bounds = [number * count // threads for number in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start, end: function(*arguments, start, end), bounds, bounds[1:]))


@cache
def kernels() -> Any:
    """Return the module of compiled functions. Compiling takes seconds; the result is cached if possible."""
    try:
        from ultr.rankers import tree_kernels
    except ImportError as error:
        raise MissingExtraError("training trees", package="numba", extra="trees") from error
    return tree_kernels
