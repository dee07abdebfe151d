"""Compiled loops for `tree_objective`. They hold no lock of Python, so that several can run at once, in threads.

Threads are Python's own (`tree_objective.in_threads`). Loops that numba runs in threads take three times as long to
compile, and change the number of threads of torch and LightGBM.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

GAP, PRODUCT, TRUSTED, PAPER = 0, 1, 2, 3  # the values of `tree_objective.Kind`
WIDEST = 300.0  # if scores in a request differ by more, exponentials are computed pair by pair


def compiled(function: Any, **options: Any) -> Any:
    """Compile a function. The machine code is cached for other processes if the cache folder can be written."""
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy", **options)(function)


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    e = math.exp(x)
    return e / (1 + e)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


sigmoid = compiled(_sigmoid, inline="always")
softplus = compiled(_softplus, inline="always")


def _discounts(scores, discount):  # type: ignore[no-untyped-def]
    """Set `discount` of each item to 1 / log2(1 + its rank by score); items with equal scores keep their order."""
    n = len(scores)
    order, merged = np.arange(n), np.empty(n, np.int64)
    width = 1
    while width < n:  # merge neighbouring runs of this width
        for start in range(0, n, 2 * width):
            middle, end = min(start + width, n), min(start + 2 * width, n)
            left, right = start, middle
            for k in range(start, end):
                if right >= end or (left < middle and not scores[order[left]] < scores[order[right]]):
                    merged[k] = order[left]
                    left += 1
                else:
                    merged[k] = order[right]
                    right += 1
        order, merged = merged, order
        width *= 2
    for rank in range(n):
        discount[order[rank]] = 1 / math.log2(2.0 + rank)


discounts = compiled(_discounts)


def _trust(gamma: float, plus: float, minus: float) -> float:
    """Return γ / (ε⁺ γ + ε⁻ (1-γ)), which is m / ε⁺ with m of `bias.equations.pair_trust`."""
    total = plus * gamma + minus * (1 - gamma)
    return gamma / total if total > 0 else 0.0


trust = compiled(_trust, inline="always")


def _derivatives(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0915
    scores, offsets, weights, value, kind, by_metric, clip,
    above, below, place, preference, beta, examined, plus, minus, with_loss, gradient, curvature, loss, start, end,
):  # fmt: skip
    """Add gradient and curvature of the pair loss by row, and set the loss by request if `with_loss` (else 0).

    The three arrays are of the whole log. The requests from `start` to `end` - 1 write only their own rows.
    """
    for q in range(start, end):
        first, n = offsets[q], offsets[q + 1] - offsets[q]
        s, v = scores[first : first + n], value[first : first + n]
        high, low = s.max(), s.min()
        narrow = high - low < WIDEST
        e, d = np.ones(n), np.zeros(n)
        if narrow:
            for i in range(n):
                e[i] = math.exp(s[i] - high)
        if by_metric:
            discounts(s, d)
        g, h = gradient[first : first + n], curvature[first : first + n]
        total = 0.0
        if kind == GAP and narrow and clip == np.inf and not with_loss:
            # σ(s_j - s_i) = e_j / (e_i + e_j) needs no exponential for each pair, and sums stay in registers.
            for i in range(n):
                v_i, e_i, d_i, g_i, h_i = v[i], e[i], d[i], 0.0, 0.0
                if by_metric:
                    for j in range(n):
                        gap, share = (v_i - v[j]) * abs(d_i - d[j]), 1 / (e_i + e[j])
                        g_i -= gap * (e[j] if gap > 0 else e_i) * share
                        h_i += abs(gap) * e[j] * share * share
                else:
                    for j in range(n):
                        gap, share = v_i - v[j], 1 / (e_i + e[j])
                        g_i -= gap * (e[j] if gap > 0 else e_i) * share
                        h_i += abs(gap) * e[j] * share * share
                g[i], h[i] = g_i, h_i * e_i
        else:
            for i in range(n):
                if kind != GAP and v[i] <= 0:
                    continue  # no label is lower
                for j in range(n):
                    if not v[i] > v[j]:
                        continue
                    a, b = first + i, first + j
                    if kind == GAP:
                        w = v[i] - v[j]
                    elif kind == PAPER:
                        k, m = place[a], place[b]
                        gamma = sigmoid(preference[a] - preference[b])
                        right, wrong = plus[k, m] * gamma, minus[k, m] * (1 - gamma)
                        w = above[a] * above[b] * plus[k, m] * trust(gamma, plus[k, m], minus[k, m])
                        if v[j] <= 0:
                            both = examined[b] * (right + wrong)
                            all_seen = both + (1 - examined[b]) * beta[a]
                            w = w * both / all_seen if all_seen > 0 else 0.0
                    else:
                        w = above[a] * below[b]
                        if kind == TRUSTED and v[j] > 0:
                            k, m = place[a], place[b]
                            w *= trust(sigmoid(preference[a] - preference[b]), plus[k, m], minus[k, m])
                    w = min(w, clip)
                    if by_metric:
                        w *= abs(d[i] - d[j])
                        if kind != GAP:
                            w *= v[i] - v[j]
                    p = e[j] / (e[i] + e[j]) if narrow else sigmoid(s[j] - s[i])
                    g[i] -= w * p
                    g[j] += w * p
                    h[i] += w * p * (1 - p)
                    h[j] += w * p * (1 - p)
                    if with_loss:
                        total += w * softplus(s[j] - s[i])
        weight = weights[q]
        if weight != 1:
            for i in range(n):
                g[i] *= weight
                h[i] *= weight
        loss[q] = weight * total


derivatives = compiled(_derivatives, fastmath={"reassoc", "contract", "nsz"})  # NaN stays NaN
