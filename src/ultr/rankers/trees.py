"""The loss of weighed pairs for boosted trees: gradients and curvatures of scores, compiled, request by request.

    Σ w_ij log(1 + exp(-(s_i - s_j)))    over pairs of a request with v_i > v_j

What w_ij follows from is kept by row and by pair of positions, and pairs are made where they are needed: memory grows
with the rows alone, whatever the length of lists. One objective serves LightGBM and XGBoost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from ultr.errors import MissingExtraError

CURVATURE = 0.1  # mean of rows at first, as XGBoost's rank:ndcg has it


class Kind(IntEnum):
    """How the weight of a pair (i, j), v_i > v_j, follows from its rows."""

    GAP = 0  # v_i - v_j
    PRODUCT = 1  # above_i · below_j
    TRUSTED = 2  # ... and, of two above zero, times γ / (ε⁺ γ + ε⁻ (1-γ))
    PAPER = 3  # above_i · above_j · m_ij, times h_ij where v_j = 0


def _no_rows() -> np.ndarray:
    return np.zeros(1)


def _no_pairs() -> np.ndarray:
    return np.zeros((1, 1))


@dataclass(frozen=True, eq=False)
class PairTerms:
    """Requests, and by row what the weights of their pairs follow from. All numbers are float64."""

    offsets: np.ndarray  # [requests + 1]
    weights: np.ndarray  # [requests]
    value: np.ndarray  # [rows]
    kind: Kind = Kind.GAP
    by_metric: bool = False  # times |ΔDCG|: for GAP |D_i - D_j|, otherwise (v_i - v_j) |D_i - D_j|
    clip: float = math.inf  # of a weight, before the metric
    above: np.ndarray = field(default_factory=_no_rows)
    below: np.ndarray = field(default_factory=_no_rows)
    place: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))  # of a position in the tables
    preference: np.ndarray = field(default_factory=_no_rows)  # g, of which γ_ij = sigmoid(g_i - g_j)
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
    """Gradients and curvatures for a library of trees.

    The loss is scaled so that what libraries ask of a leaf (`min_child_weight`, `lambda_l2`) means as much as it does
    with their own ranking objectives.
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
        """LightGBM copies its parameters, and this among them."""
        return self

    def derivatives(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and second derivatives of the sum over requests, by weight, for the score of each row."""
        gradient, curvature, _ = self._computed(scores, False)
        return gradient, curvature

    def loss(self, scores: np.ndarray) -> float:
        """The mean over requests, by weight, as `ultr.losses.pairwise_loss` has it."""
        return float(self._computed(scores, True)[2].sum() / self.terms.weights.sum())

    def last_loss(self) -> float:
        """The loss of the scores it was last asked about."""
        return math.nan if self._last is None else self.loss(self._last)

    def _computed(self, scores: np.ndarray, with_loss: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        t = self.terms
        scores = np.ascontiguousarray(scores, np.float64)
        compiled = kernels()
        use_threads()
        gradient, curvature, loss = compiled.derivatives(
            scores, t.offsets, t.weights, t.value, int(t.kind), t.by_metric, t.clip,
            t.above, t.below, t.place, t.preference, t.beta, t.examined, t.plus, t.minus, with_loss,
        )  # fmt: skip
        return gradient, curvature, loss


def use_threads() -> None:
    """Let compiled code use as many threads as torch does."""
    import numba
    import torch

    most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(torch.get_num_threads(), most))


@cache
def kernels() -> Any:
    """The compiled functions; compiling takes seconds, and is kept for the next process where that can be written."""
    try:
        from ultr.rankers import pair_kernels
    except ImportError as error:
        raise MissingExtraError("training trees", package="numba", extra="trees") from error
    return pair_kernels
