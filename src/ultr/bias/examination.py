"""Estimate examination, the probability that a user looks at a position, from a log alone.

Clicks fall with position because lower items are seen less, and because the ranker that logged them put worse items
there. Items that this ranker found equally good separate the two: where their positions differ, only examination
differs. So

1. the score of the logging ranker is recovered from the order that it showed (`logging_policy`);
2. rows are grouped into strata by that score and by its mean over their list (which affects the position of an item);
3. in P(c>0) = θ_k β_s, relevance β is free in each stratum s, and `estimators.position_based` gives examination θ.

Requests in random order, and items that were shown at several positions, separate the two without features
(`best_source`). They are used if the log has enough of them. Positions with few clicks share one θ with their
neighbours (`estimators.pools`). Memory depends on strata and positions, not on rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ultr.bias.counts import (
    Cells,
    check_positions,
    compared_clicks,
    count_cells,
    impressions,
    item_codes,
    log_counts,
    weight_unit,
)
from ultr.bias.estimators import Source, best_source, fit_conditional, fit_trust, items_comparable, largest_one, pools
from ultr.bias.logging_policy import logging_score, strata_of
from ultr.datasets.users import User
from ultr.errors import DataError
from ultr.lists import Lists
from ultr.log import Log
from ultr.log.labels import Label
from ultr.utils.jsonfiles import check_format, content_errors, read_json, write_json

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
    """θ_k = P(c>0 | relevant, k) and ζ_k = P(c>0 | irrelevant, k) by position id, and the counts behind them.

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

    def by_position(self) -> dict[int, float]:
        return dict(zip(self.positions, self.theta.tolist(), strict=True))

    @staticmethod
    def known(theta: Mapping[int, float]) -> Examination:
        """Return known examination by position id."""
        values, zeros = np.array(list(theta.values())), np.zeros(len(theta))
        return Examination(tuple(theta), values, zeros, zeros, zeros, moved=0.0, strata=0, source=SOURCES["known"])

    def save(self, path: Path) -> None:
        values = {name: getattr(self, name).tolist() for name in BY_POSITION}
        others = {name: getattr(self, name) for name in ("moved", "strata", "source", "error")}
        write_json(path, {"format": FORMAT, "positions": list(self.positions), **values, **others})

    @staticmethod
    def load(path: Path) -> Examination:
        content = read_json(path)
        check_format(content, FORMAT, what="the estimate of examination", where=path, hint="train again")
        with content_errors("the estimate of examination cannot be read", where=path, hint="train again"):
            positions = tuple(int(position) for position in content["positions"])
            values = {name: np.array(content[name], np.float64) for name in BY_POSITION}
            if any(value.shape != (len(positions),) for value in values.values()):
                raise ValueError("the numbers of values and positions differ")
            error = content["error"]
            return Examination(
                positions,
                **values,
                moved=float(content["moved"]),
                strata=int(content["strata"]),
                source=str(content["source"]),
                error=None if error is None else float(error),
            )


def estimate_examination(
    log: Log,
    label: Label,
    *,
    user: User | None = None,
    sessions: int = 0,
    seed: int = 0,
    trust: bool = False,
    theta_from: str = "auto",
    device: torch.device | str = "cpu",
) -> Examination:
    """Estimate examination by position from a log; a row counts as clicked if its `label` is above 0.

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
        clicked = shown * (np.asarray(label(log.actions)) > 0)
    else:
        passes = max(1, -(-sessions // len(log)))
        clicked = shown * _simulated_clicks(log, label, user, passes, seed, device)
        shown = shown * passes
    best = _best_source(log, clicked > 0, seed) if theta_from == "auto" and user is None and not trust else None
    if best is not None:
        source, error, cells = best.text, best.error, best.cells
    else:
        source, error = SOURCES["items" if theta_from == "items" else "strata"], None
        strata = _items(log) if theta_from == "items" else _strata(log, clicked, seed, device)
        cells = count_cells(strata, places, shown, clicked, width=len(ids))
    unit = 1.0 if log.weights is None else weight_unit(float(log.weights.mean()))
    cells, pool, clicks_behind = _pooled(cells, ids, unit)
    if trust:
        fit = fit_trust(cells)
        theta, zeta, moved = fit.theta[pool], fit.zeta[pool], fit.moved
    else:
        conditional = fit_conditional(cells)
        theta = largest_one(conditional.theta, clicks_behind)[pool]
        zeta, moved = np.zeros(len(ids)), conditional.moved
    shown_at, clicks_at = (np.bincount(places, rows, len(ids)) for rows in (shown, clicked))
    return Examination(tuple(ids.tolist()), theta, zeta, shown_at, clicks_at, moved, cells.size[0], source, error)


def _pooled(cells: Cells, ids: np.ndarray, unit: float) -> tuple[Cells, np.ndarray, np.ndarray]:
    """Return cells by pool of positions (`estimators.pools`), the pool of each position, and the clicks of pools."""
    clicks = compared_clicks(cells, unit)
    pool = pools(clicks, ids)
    width = int(pool[-1]) + 1
    pooled = count_cells(cells.strata, pool[cells.places], cells.shown, cells.clicked, width=width)
    return pooled, pool, np.bincount(pool, clicks)


def _best_source(log: Log, clicked: np.ndarray, seed: int) -> Source | None:
    seen = impressions(log, clicked, seed=seed, most_positions=MAX_TRAINED_POSITIONS)
    comparable = items_comparable(log, by_query=seen.by_query)
    return best_source(log_counts(seen if comparable else replace(seen, items=None), seed=seed))


def _items(log: Log) -> np.ndarray:
    if (items := item_codes(log)) is None:
        what = "an estimate of examination by item needs item ids, and the log has none"
        raise DataError(what, hint="name their column with --item")
    return items


def _strata(log: Log, clicked: np.ndarray, seed: int, device: torch.device | str) -> np.ndarray:
    return strata_of(log, logging_score(log, seed=seed, device=device).score, clicks=float(clicked.sum()))


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
