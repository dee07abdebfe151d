"""Estimate how actions after the click, such as purchases, depend on the position of the click: trust in the position.

    E[action, k] = θ_k P(c>0 | examined, x) τ_k E[action | c>0, x],    τ_1 = 1

An item that is clicked in the first position may be bought more often than if it is clicked further down, because users
trust the order. τ is estimated among the rows with a positive label, where examination plays no part: a stratum (rows
of equal relevance) has n_sk such rows at position k, with actions that sum to a_sk. In E[a_sk] = n_sk τ_k μ_s, the mean
μ_s is free in each stratum: the equations of `estimators.fit_conditional`. Their errors come from groups of requests,
because amounts such as seconds vary more than counts do.

τ is used only if it clearly falls or rises with position (`LEVEL`), and if the label is linear in the action. Then the
action is divided by τ_k before the label is computed: its expectation is that of a click in the first position.

Strata of the logging score are not used: in logs without trust, a third of their p values were below 0.05.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy import linalg, sparse, stats

from ultr.bias.counts import Counts, Impressions, impressions, log_counts
from ultr.bias.estimators import (
    RANDOM,
    fill_gaps,
    fit_conditional,
    items_comparable,
    pools,
)
from ultr.log import Log
from ultr.log.labels import CLICKS, Label
from ultr.log.table import SHIFT, as_shown, position_id
from ultr.utils.jsonfiles import content_errors

MOST_POSITIONS = 1_000  # with more there is no estimate
LARGEST = 10.0  # the largest |log τ|
LEVEL = 0.001  # a p value of no trend over positions below this makes τ used
APART = 0.01  # a p value of the difference between items and random requests below which items count as biased
NORMAL = 1.96
TEXTS = {
    "randomised": "requests in random order",
    "swaps": "requests with swapped positions",
    "items": "items clicked at several positions",
}
Trust = Mapping[str, Mapping[int, float]]  # action -> position id -> τ
NO_TRUST: Trust = MappingProxyType({})


@dataclass(frozen=True)
class AfterClick:
    """τ of an action by position in the list, relative to the first position, with 95% intervals."""

    positions: tuple[int, ...]
    tau: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    p: float  # of no trend over positions
    used: bool  # whether actions are divided by τ
    evidence: str  # in words

    def sentence(self, name: str) -> str:
        """Return how an action depends on position, in words."""
        if not self.used:
            return f"{name} after a click does not clearly depend on the position"
        first, last = as_shown(self.positions[0]), as_shown(self.positions[-1])
        return (
            f"{name} after a click at position {last}: {self.tau[-1]:.2f} times that at {first}, and corrected for it"
        )

    def at(self, ids: Iterable[int]) -> dict[int, float]:
        """Return τ by position id, interpolated between positions; all segments have the same."""
        return {k: float(np.interp(k & ((1 << SHIFT) - 1), self.positions, self.tau)) for k in ids}

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "positions": [*map(as_shown, self.positions)]}

    @staticmethod
    def of(content: Mapping[str, Any]) -> AfterClick:
        curves = {name: tuple(map(float, content[name])) for name in ("tau", "low", "high")}
        positions = tuple(position_id(str(position)) for position in content["positions"])
        values = np.array([*curves.values()])
        if values.shape != (3, len(positions)) or not (np.isfinite(values).all() and (values > 0).all()):
            raise ValueError("τ must have a number above 0 for each position")
        p, used, evidence = float(content["p"]), bool(content["used"]), str(content["evidence"])
        return AfterClick(positions, **curves, p=p, used=used, evidence=evidence)


def read_actions(content: Mapping[str, Any], where: object) -> dict[str, AfterClick]:
    """Return the τ of actions in the content of a file; {} if it has none."""
    with content_errors("actions after the click cannot be read", where=where, hint="write the file again"):
        return {str(name): AfterClick.of(each) for name, each in content.get("actions", {}).items()}


def trust_of(actions: Mapping[str, AfterClick], ids: Iterable[int]) -> Trust:
    """Return the τ that are used, by action and position id."""
    ids = list(ids)
    return {name: each.at(ids) for name, each in actions.items() if each.used}


def corrected(log: Log, trust: Trust) -> Log:
    """Return a log whose actions are divided by τ."""
    divided = {name: log.actions[name] / by_row(log, tau) for name, tau in trust.items() if name in log.actions}
    return replace(log, actions={**log.actions, **divided}) if divided else log


def by_row(log: Log, tau: Mapping[int, float]) -> np.ndarray:
    """Return τ of the position of each row, as float32; 1 at positions without one."""
    ids, place = np.unique(log.shown_positions("actions after the click"), return_inverse=True)
    return np.array([tau.get(int(k), 1.0) for k in ids], np.float32)[place]


def estimate_after_click(log: Log, label: Label, *, seed: int = 0, sample: Log | None = None) -> dict[str, AfterClick]:
    """Return τ of each action of a label that follows the click, if the log has evidence about it; {} if there is none.

    A row counts as clicked if its label is above 0. An action that is equal on all of these is the click itself. The
    `sample` has features, which show whether items are the same each time; by default those of the log do.
    """
    if log.positions is None:
        return {}
    names = [name for name in label.actions if name.lower() not in CLICKS]
    clicked = np.asarray(label(log.actions)) > 0 if names else np.zeros(0)
    names = [name for name in names if _follows(log.actions[name][clicked]) and _is_linear(log, label, name, clicked)]
    if not names:
        return {}
    seen = impressions(log, clicked, seed=seed, most_positions=1 << SHIFT)
    in_list, place = np.unique(seen.positions & ((1 << SHIFT) - 1), return_inverse=True)
    if len(in_list) > MOST_POSITIONS:
        return {}
    seen = replace(seen, positions=in_list, place=place[seen.place].astype(np.int32))
    if not items_comparable(log if sample is None else sample, by_query=seen.by_query):
        seen = replace(seen, items=None)
    found = {name: _estimate(seen, log.actions[name].astype(np.float64), seed) for name in names}
    return {name: each for name, each in found.items() if each is not None}


def _follows(values: np.ndarray) -> bool:
    """Return whether an action on clicked rows varies, and is not negative."""
    return bool(len(values) and values.min() >= 0 and values.min() < values.max())


def _is_linear(log: Log, label: Label, name: str, clicked: np.ndarray) -> bool:
    """Return whether the label of each clicked row is a linear function of an action, and rises with it."""
    rows = {each: values[clicked].astype(np.float64) for each, values in log.actions.items()}
    without, once, twice = (np.asarray(label({**rows, name: k * rows[name]}, check=False)) for k in (0, 1, 2))
    return bool(np.allclose(twice - once, once - without, rtol=1e-6, atol=1e-9) and (once >= without).all())


@dataclass(frozen=True, eq=False)
class _Curve:
    """log τ of pools of positions relative to the first pool, with its covariance; NaN without an estimate."""

    log_tau: np.ndarray
    covariance: np.ndarray
    groups: int  # of requests, whose spread is the covariance

    def p_of_trend(self, log_place: np.ndarray) -> float:
        """Return the p value of no slope of log τ over the log of the place of each pool, relative to the first."""
        free = np.flatnonzero(np.isfinite(self.log_tau))[1:]
        weighted = np.linalg.pinv(self.covariance[np.ix_(free, free)], hermitian=True) @ log_place[free]
        z = weighted @ self.log_tau[free] / np.sqrt(max(float(weighted @ log_place[free]), 1e-300))
        return float(2 * stats.t.sf(abs(z), self.groups - 1))

    def p_of_difference(self, other: _Curve) -> float:
        """Return the p value of no difference to another curve of the same pools (Hotelling's test)."""
        free = np.flatnonzero(np.isfinite(self.log_tau) & np.isfinite(other.log_tau))[1:]
        freedom = self.groups - len(free)
        if not len(free) or freedom < 1:
            return 1.0
        apart, covariance = (self.log_tau - other.log_tau)[free], self.covariance + other.covariance
        square = float(apart @ np.linalg.pinv(covariance[np.ix_(free, free)], hermitian=True) @ apart)
        return float(stats.f.sf(square * freedom / (len(free) * (self.groups - 1)), len(free), freedom))


def _estimate(seen: Impressions, values: np.ndarray, seed: int) -> AfterClick | None:
    clicked = seen.clicked
    # Sums of values that are divided by this vary like counts; it is 1 for actions that are 0 or 1.
    values = values / ((values[clicked] ** 2).sum() / values[clicked].sum())
    sources = log_counts(replace(seen, values=values), seed=seed).sources
    size = float(seen.row_weights[clicked].mean())
    events = {name: each.total().compared_clicks(size) for name, each in sources.items()}
    pool = {name: pools(each, np.arange(len(each))) for name, each in events.items()}
    curves = {name: _curve(each.pooled(pool[name]), size) for name, each in sources.items()}
    found = {name: curve for name, curve in curves.items() if curve is not None}
    if not found:
        return None
    name = max(found, key=lambda name: events[name].sum())
    random = next((name for name in RANDOM if name in found), None)
    if name == "items" and random is not None:
        coarse = _curve(sources[name].pooled(pool[random]), size)
        if coarse is not None and found[random].p_of_difference(coarse) < APART:
            name = random
    curve, of_position = found[name], pool[name]
    log_place = np.bincount(of_position, np.log1p(np.arange(len(of_position)))) / np.bincount(of_position)
    p = curve.p_of_trend(log_place - log_place[0])
    log_tau = np.log(fill_gaps(np.exp(curve.log_tau)))[of_position]
    known = np.flatnonzero(np.isfinite(curve.log_tau))
    error = np.sqrt(curve.covariance.diagonal())[known[np.abs(of_position[:, None] - known).argmin(1)]]
    curves_of_log = np.clip([log_tau, log_tau - NORMAL * error, log_tau + NORMAL * error], -LARGEST, LARGEST)
    tau, low, high = (tuple(each) for each in np.exp(curves_of_log).tolist())
    return AfterClick(tuple(seen.positions.tolist()), tau, low, high, p, p < LEVEL, TEXTS[name])


def _curve(counts: Counts, size: float) -> _Curve | None:
    """Return log τ from the counts of clicked rows by group of requests; `size` is the mean weight of a row.

    The score of a group is its part of the equations that τ solves. The spread of these scores gives the covariance
    (a sandwich). A mean μ_s of n rows takes 1/n of the variance of their residuals, which is given back.
    """
    groups, cells = counts.shown.shape[1], counts.total()
    fit = fit_conditional(cells, anchor=0)
    free = np.flatnonzero(np.isfinite(fit.theta))[1:]
    if not len(free) or groups < 2:
        return None
    strata, places, tau = cells.strata, cells.places, np.nan_to_num(fit.theta)
    linked = np.isfinite(fit.theta)[places]

    def by_stratum(values: np.ndarray) -> np.ndarray:
        return np.bincount(strata, values, cells.size[0])

    exposure, rows = cells.shown * tau[places], by_stratum(cells.shown * linked) / size
    whole = np.maximum(by_stratum(exposure), 1e-300)
    mean = by_stratum(cells.clicked * linked) / whole
    given_back = np.sqrt(rows / np.maximum(rows - 1, 1e-300)) * (rows > 1)
    residual = sparse.diags(linked * given_back[strata]) @ (
        counts.clicked - sparse.diags(mean[strata] * tau[places]) @ counts.shown
    )
    number = np.arange(len(strata))
    at_place, in_stratum = (
        sparse.csr_matrix((np.ones(len(number)), (rows_, number)), (most, len(number)))
        for rows_, most in ((places, cells.size[1]), (strata, cells.size[0]))
    )
    share = sparse.csr_matrix((exposure / whole[strata], (strata, places)), cells.size)
    scores = (at_place @ residual - share.T @ (in_stratum @ residual)).toarray()[free]
    inverse = linalg.pinvh(fit.information[np.ix_(free, free)])
    covariance = np.zeros_like(fit.information)
    covariance[np.ix_(free, free)] = inverse @ (scores @ scores.T) @ inverse * groups / (groups - 1)
    with np.errstate(divide="ignore"):
        return _Curve(np.log(fit.theta), covariance, groups)
