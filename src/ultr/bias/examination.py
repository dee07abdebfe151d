"""Estimate examination, the probability that a user looks at a position, from a log alone.

Clicks fall with position because lower items are seen less, and because the ranker that logged them put worse items
there. Items that this ranker found equally good separate the two: where their positions differ, only examination
differs. So

1. the score of the logging ranker is recovered from the order that it showed (`logging_policy`);
2. rows are grouped into strata by that score and by its mean over their list (which affects the position of an item);
3. in P(c>0) = θ_k β_s, relevance β is free in each stratum s, and `estimators.position_based` gives examination θ.

Requests in random order, and items that were shown at several positions, separate the two without features
(`best_source`). They are used if the log has enough of them. Positions with few clicks share one θ with their
neighbours (`estimators.pools`); segments of several columns, and the slots of a grid, share strength (`sharing`).
Memory depends on strata and positions, not on rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ultr.bias.after_click import AfterClick, read_actions
from ultr.bias.counts import (
    Counts,
    LogCounts,
    check_positions,
    clicked_rows,
    count_cells,
    impressions,
    item_codes,
    log_counts,
)
from ultr.bias.estimators import (
    CONFIRMED,
    IMPRECISE,
    MORE,
    RANDOM,
    SMALLEST,
    ConditionalFit,
    Source,
    best_source,
    drawn,
    fill_gaps,
    fit_conditional,
    fit_trust,
    items_comparable,
    largest_one,
    merged,
    pools,
    relative_variance,
    standard_error,
)
from ultr.bias.logging_policy import logging_score, strata_of
from ultr.bias.sharing import Deviation, share_strength, slots_of
from ultr.datasets.users import User
from ultr.errors import DataError
from ultr.lists import Lists
from ultr.log import Log
from ultr.log.columns import segment_columns
from ultr.log.labels import Label
from ultr.utils.jsonfiles import check_format, content_errors, read_json, write_json

LIKELY_FALL = 1.0  # the deviation of log θ around no bias that a ranker takes for likely, before it sees the log
MAX_TRAINED_POSITIONS = 5_000  # a bias model has tables with an entry for each pair of positions
SOURCES = {
    "strata": "features alone (rows with similar scores of the logging ranker)",
    "items": "items that occur in several requests",
    "known": "known propensities",
}
FORMAT = 1
BY_POSITION = ("theta", "zeta", "impressions", "clicks")  # the arrays of an Examination


@dataclass(frozen=True, eq=False)
class Examination:
    """θ_k = P(c>0 | relevant, k) and ζ_k = P(c>0 | irrelevant, k) by position id, with the evidence and its error.

    Clicks determine only ratios of θ. By convention its largest value, among those with enough clicks, is 1.
    """

    positions: tuple[int, ...]
    theta: np.ndarray
    zeta: np.ndarray
    impressions: np.ndarray
    clicks: np.ndarray  # positive labels
    moved: float  # the largest relative change of θ in the last iteration
    strata: int
    source: str = SOURCES["strata"]  # the evidence that was used, in words
    error: float | None = None  # the relative standard error of θ if it is not from strata, which may have a bias
    evidence: str = "strata"  # the name of the source
    covariance: np.ndarray | None = None  # of log θ [positions, positions], which draws come from; None: 0
    deviations: tuple[Deviation, ...] = ()  # of the curves of segments, for each of the columns that define them
    actions: Mapping[str, AfterClick] = field(default_factory=dict)  # how actions after the click depend on position

    @property
    def confirmed(self) -> bool:
        """Whether θ is known, or chance decided an order: if not, it rests on how production orders items."""
        return self.evidence in CONFIRMED

    def cautious(self) -> Examination:
        """Return the θ that a ranker corrects feedback by, which is nearer to no bias the less sure θ is.

        It is the mean of log θ, relative to the largest θ, given its estimate and a normal prior around 0. A ranker
        that corrects too little leaves the logged order as it is. One that corrects too much reverses it.
        """
        if self.covariance is None:
            return self
        top, largest = int(self.theta.argmax()), float(self.theta.max())
        variance = relative_variance(self.covariance, top)
        fall = np.log(np.maximum(self.theta / largest, SMALLEST))
        return replace(self, theta=largest * np.exp(fall / (1 + np.maximum(variance, 0) / LIKELY_FALL**2)))

    def draws(self, number: int, *, seed: int = 0) -> np.ndarray:
        """Return θ [number, positions] as it may be, given its sampling error; empty if θ has none."""
        if self.covariance is None:
            return np.empty((0, len(self.positions)))
        return drawn(self.theta, self.covariance, number, seed=seed)

    def at(self, slots: Sequence[str], wanted: Mapping[int, str]) -> Examination | None:
        """Return the estimate of other position ids; `slots` are the texts of its positions, `wanted` those by id.

        Return None if one of them is missing.
        """
        if not set(wanted.values()) <= set(slots):
            return None
        found = [slots.index(slot) for slot in wanted.values()]
        values = {name: getattr(self, name)[found] for name in BY_POSITION}
        covariance = None if self.covariance is None else self.covariance[np.ix_(found, found)]
        return replace(self, positions=tuple(wanted), **values, covariance=covariance)

    def contexts(self, segment: str | None) -> dict[str, dict[str, Any]]:
        """Return the deviations by column, for bias.json; `segment` has the names of the columns."""
        names = segment_columns(segment or "")
        if len(names) != len(self.deviations):  # the values of one column have the separator in them
            names = [f"part {i + 1}" for i in range(len(self.deviations))]
        return {name: asdict(each) for name, each in zip(names, self.deviations, strict=True)}

    def by_position(self) -> dict[int, float]:
        return dict(zip(self.positions, self.theta.tolist(), strict=True))

    @staticmethod
    def known(theta: Mapping[int, float]) -> Examination:
        """Return known examination by position id."""
        values, zeros = np.array(list(theta.values())), np.zeros(len(theta))
        known: dict[str, Any] = {"source": SOURCES["known"], "evidence": "known"}
        return Examination(tuple(theta), values, zeros, zeros, zeros, moved=0.0, strata=0, **known)

    def save(self, path: Path) -> None:
        fields = vars(self).items()
        content = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields}
        content["deviations"] = [asdict(each) for each in self.deviations]
        content["actions"] = {name: each.to_json() for name, each in self.actions.items()}
        write_json(path, {"format": FORMAT, **content})

    @staticmethod
    def load(path: Path) -> Examination:
        content = read_json(path)
        check_format(content, FORMAT, what="the estimate of examination", where=path, hint="train again")
        with content_errors("the estimate of examination cannot be read", where=path, hint="train again"):
            positions = tuple(int(position) for position in content["positions"])
            values = {name: np.array(content[name], np.float64) for name in BY_POSITION}
            if any(value.shape != (len(positions),) for value in values.values()):
                raise ValueError("the numbers of values and positions differ")
            error, covariance = content["error"], content["covariance"]
            if covariance is not None:
                covariance = np.array(covariance, np.float64)
                if covariance.shape != 2 * (len(positions),) or not np.isfinite(covariance).all():
                    raise ValueError("the covariance must have a finite number for each pair of positions")
            return Examination(
                positions,
                **values,
                moved=float(content["moved"]),
                strata=int(content["strata"]),
                source=str(content["source"]),
                error=None if error is None else float(error),
                evidence=str(content["evidence"]),
                covariance=covariance,
                deviations=tuple(Deviation.of(each) for each in content["deviations"]),
                actions=read_actions(content, path),
            )


def estimate_examination(
    log: Log,
    label: Label,
    *,
    segments: Sequence[str] = (),
    user: User | None = None,
    sessions: int = 0,
    seed: int = 0,
    trust: bool = False,
    theta_from: str = "auto",
    device: torch.device | str = "cpu",
) -> Examination:
    """Estimate examination by position from a log; a row counts as clicked if its `label` is above 0.

    `segments` are the names of its segments, if position ids differ by segment (`by_segment`); they share strength.

    `theta_from` is the evidence: rows with similar scores of the logging ranker (`strata`), rows of an item (`items`),
    or the best evidence of the log (`auto`, see `estimators.best_source`), which is strata if nothing is better.

    With a simulated `user`, its feedback in about `sessions` sessions replaces that of the log. It sees each request in
    one order, so that `auto` is strata. `trust` also estimates ζ, the click rate of irrelevant items; this needs groups
    of many rows, so that `auto` is strata. Users are simulated, and the logging ranker is recovered, on the `device`.
    """
    ids, places = np.unique(log.shown_positions("an estimate of examination"), return_inverse=True)
    check_positions(len(ids), MAX_TRAINED_POSITIONS)
    shown = np.ones(log.rows) if log.weights is None else np.repeat(log.weights, log.lengths).astype(np.float64)
    if user is None:
        clicked = shown * clicked_rows(log, label)
    else:
        passes = max(1, -(-sessions // len(log)))
        clicked = shown * _simulated_clicks(log, label, user, passes, seed, device)
        shown = shown * passes

    def by_strata() -> Counts:
        if theta_from == "items":
            strata = _items(log)
        else:
            strata = strata_of(log, logging_score(log, seed=seed, device=device).score, clicks=float(clicked.sum()))
        return count_cells(strata, places, shown, clicked, width=len(ids))

    name = "items" if theta_from == "items" else "strata"
    text, error, covariance = SOURCES[name], None, None
    best = None
    if theta_from == "auto" and user is None and not trust:
        best = _best_source(log, clicked > 0, seed, by_strata)
    cells = by_strata() if best is None else best.cells
    evidence = [cells] if best is None or best.others is None else [cells, best.others]
    mean_weight = 1.0 if log.weights is None else float(log.weights.mean())
    clicks = np.sum([each.compared_clicks(mean_weight) for each in evidence], axis=0)
    shown_at, clicks_at = (np.bincount(places, rows, len(ids)) for rows in (shown, clicked))
    deviations = tuple[Deviation, ...]()
    if trust:
        pool = pools(clicks, ids)
        fit = fit_trust(cells.pooled(pool))
        theta, zeta, moved = fit.theta[pool], fit.zeta[pool], fit.moved
    else:
        others = None if best is None else best.others
        theta, moved, covariance, deviations = _theta(cells, others, ids, shown_at, clicks, segments)
        zeta = np.zeros(len(ids))
    if best is not None and covariance is not None:
        name, text = best.name, best.text
        error = float(np.sqrt(np.average(covariance.diagonal(), weights=shown_at)))
    return Examination(
        *(tuple(ids.tolist()), theta, zeta, shown_at, clicks_at, moved, cells.size[0], text, error, name, covariance),
        deviations=deviations,
    )


def examination_of_counts(log: LogCounts, *, segments: Sequence[str] = ()) -> Examination:
    """Estimate examination as `estimate_examination` does, from the counts of a log without features."""
    best = best_source(log)
    if best is None:
        what = "the counts do not show how often users look at each position: too few clicks on items at several ones"
        raise DataError(what, hint="pass known examination with --propensities")
    evidence = [best.cells] if best.others is None else [best.cells, best.others]
    clicks = np.sum([each.compared_clicks(log.weight / log.requests) for each in evidence], axis=0)
    theta, moved, covariance, deviations = _theta(best.cells, best.others, log.positions, log.shown, clicks, segments)
    return Examination(
        tuple(log.positions.tolist()),
        theta,
        np.zeros(len(theta)),
        log.shown,
        log.clicked,
        moved,
        best.cells.size[0],
        best.text,
        float(np.sqrt(np.average(covariance.diagonal(), weights=log.shown))),
        best.name,
        covariance,
        deviations,
    )


def _theta(
    cells: Counts,
    others: Counts | None,
    ids: np.ndarray,
    shown: np.ndarray,
    clicks: np.ndarray,
    segments: Sequence[str],
) -> tuple[np.ndarray, float, np.ndarray, tuple[Deviation, ...]]:
    """Return θ by position, its largest change in the last iteration, its covariance, and deviations of segments.

    `clicks` are those behind θ of each position.
    """
    pool, deviations = pools(clicks, ids), tuple[Deviation, ...]()
    fit = fit_conditional(cells.pooled(pool))
    if others is not None:
        fit = _merged(fit, others.pooled(pool))
    slots = slots_of(ids, segments)
    if slots is not None:
        fit, deviations = share_strength(fit, slots.pooled(pool, shown), slots, anchor=int(clicks.argmax()))
        pool = np.arange(len(ids))
    return largest_one(fit.theta, np.bincount(pool, clicks))[pool], fit.moved, _of_pools(fit, pool), deviations


def _merged(random: ConditionalFit, others: Counts) -> ConditionalFit:
    shown, clicked = (np.bincount(others.places, values, others.size[1]) for values in (others.shown, others.clicked))
    return merged(random, fit_conditional(others), clicked / np.maximum(shown, 1e-12))


def _of_pools(fit: ConditionalFit, pool: np.ndarray) -> np.ndarray:
    """Return the covariance of log θ by position; a pool without an estimate has that of the nearest one.

    Positions of a pool have one θ, though θ falls within it: by its slope there, times the distance to the middle.
    """
    estimated = np.flatnonzero(np.isfinite(fit.theta))
    nearest = estimated[np.abs(np.arange(len(fit.theta))[:, None] - estimated).argmin(1)][pool]
    covariance = fit.covariance()[np.ix_(nearest, nearest)]
    places = np.arange(len(pool))
    middle = np.bincount(pool, places) / np.bincount(pool)
    if len(middle) < 2:
        return covariance
    slope = np.gradient(np.log(fill_gaps(fit.theta)), middle)[pool]
    return covariance + np.diag((slope * (places - middle[pool])) ** 2)


def _best_source(log: Log, clicked: np.ndarray, seed: int, by_strata: Callable[[], Counts]) -> Source | None:
    """Return the best evidence of a log; None if it is that of its features (`by_strata`).

    Features make an estimate from requests in random order more precise if the items of the log cannot. It may then be
    good enough, though these requests are too few on their own.
    """
    seen = impressions(log, clicked, seed=seed, most_positions=MAX_TRAINED_POSITIONS)
    comparable = items_comparable(log, by_query=seen.by_query)
    counts = log_counts(seen if comparable else replace(seen, items=None), seed=seed)
    some = best_source(counts, most_error=np.inf)
    if some is not None and some.name in RANDOM:
        if some.others is None and log.feature_names:
            others = by_strata()
            if others.clicked.sum() > MORE * some.cells.clicked.sum():
                some = replace(some, others=others, text=f"{some.text}, and features")
        fit = fit_conditional(some.cells)
        fit = fit if some.others is None else _merged(fit, some.others)
        if standard_error(fit, counts.shown) <= IMPRECISE:
            return some
    return best_source(counts)


def _items(log: Log) -> np.ndarray:
    if (items := item_codes(log)) is None:
        what = "an estimate of examination by item needs item ids, and the log has none"
        raise DataError(what, hint="name their column with --item")
    return items


def _simulated_clicks(
    log: Log, label: Label, user: User, passes: int, seed: int, device: torch.device | str
) -> np.ndarray:
    """Return how often each row gets a positive label if the simulated `user` sees the whole log `passes` times."""
    generator = torch.Generator(device).manual_seed(seed)
    lists = Lists.from_log(log.without_features(), device=device)
    total = torch.zeros(lists.where.shape, dtype=torch.float64, device=device)
    for _ in range(passes):
        feedback = user.sample(lists.true_relevance, lists.shown_positions, generator, where=lists.where, check=False)
        total += label(feedback.actions, check=False) > 0
    return total[lists.where].cpu().numpy()
