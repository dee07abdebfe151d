"""Count the impressions and clicks of a log by stratum (rows of equal relevance), position and group of requests.

Requests are divided at random into 200 groups, and counts by group are made once. A bootstrap replicate is a weighted
sum of these counts, so its cost does not depend on the size of the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy import sparse

from ultr.errors import DataError
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.splits import codes
from ultr.log.swaps import CONTROL, checked_swaps, production_positions
from ultr.log.table import SHIFT

GROUPS = 200  # random groups of requests, which the bootstrap draws
MAX_AUDITED_POSITIONS = 1_000  # each replicate estimates θ of all positions together
CELLS = 150_000  # most pairs of an item and a position that are counted; if there are more, items are sampled


@dataclass(frozen=True, eq=False)
class Impressions:
    """The rows of a log as the arrays that estimators of examination use: position, click, item and request."""

    positions: np.ndarray  # ids, ascending
    place: np.ndarray  # [rows] index of the row's position in `positions`
    clicked: np.ndarray  # [rows] bool
    lengths: np.ndarray  # [requests]
    group: np.ndarray  # [requests] number of the random group
    weights: np.ndarray  # [requests]
    items: np.ndarray | None  # [rows] codes of items; an item has another code under another query
    randomised: np.ndarray  # [requests] True if shown in random order
    by_query: bool = False  # whether codes of items differ by query
    production: np.ndarray | None = None  # [rows] position of the item before swaps; -1 if the row is not compared
    swapped_requests: int = 0  # requests whose drawn arm is a swap
    values: np.ndarray | None = None  # [rows] of an action: if given, clicked rows are counted with their values

    def select(self, requests: np.ndarray) -> Impressions:
        """Return the impressions of some requests, chosen by a mask."""
        rows = self.of_rows(requests)
        return replace(
            self,
            place=self.place[rows],
            clicked=self.clicked[rows],
            lengths=self.lengths[requests],
            group=self.group[requests],
            weights=self.weights[requests],
            items=None if self.items is None else self.items[rows],
            randomised=self.randomised[requests],
            production=None if self.production is None else self.production[rows],
            values=None if self.values is None else self.values[rows],
        )

    def pooled(self, pool: np.ndarray) -> Impressions:
        """Return impressions by pool of positions; `pool` has the pool of each position, and pools without rows go."""
        _, first, place = np.unique(pool, return_index=True, return_inverse=True)
        return replace(self, positions=self.positions[first], place=place[self.place].astype(np.int32))

    def of_rows(self, values: np.ndarray) -> np.ndarray:
        """Return values [rows] from values [requests]: each row has the value of its request."""
        return np.repeat(values, self.lengths)

    @property
    def request_of_row(self) -> np.ndarray:
        return self.of_rows(np.arange(len(self.lengths)))

    @property
    def row_weights(self) -> np.ndarray:
        return self.of_rows(self.weights.astype(np.float64))


def check_positions(count: int, most: int) -> None:
    """Raise DataError if `count`, the number of different positions in a log, is above `most`."""
    if count > most:
        what = f"bias can be estimated for up to {most:,} different positions"
        raise DataError(what, got=f"{count:,} in 'position'", hint="drop the rows of the last positions")


def clicked_rows(log: Log, label: Label | str) -> np.ndarray:
    """Return True for the rows that count as clicked: those whose label is above 0."""
    return np.asarray(Label.of(label)(log.actions)) > 0


def impressions(log: Log, clicked: np.ndarray, *, seed: int = 0, most_positions: int | None = None) -> Impressions:
    shown_positions = log.shown_positions("an estimate of examination")
    positions = np.unique(shown_positions)
    check_positions(len(positions), most_positions or MAX_AUDITED_POSITIONS)
    groups = min(GROUPS, len(log))
    order = np.random.default_rng(seed).permutation(len(log))
    group = np.empty(len(log), np.int32)
    group[order] = np.arange(len(log)) % groups
    marked = log.context.get("randomised")
    production, swapped_requests = _before_swaps(log)
    return Impressions(
        positions,
        np.searchsorted(positions, shown_positions).astype(np.int32),
        clicked,
        log.lengths,
        group,
        np.ones(len(log)) if log.weights is None else log.weights,
        item_codes(log),
        np.zeros(len(log), bool) if marked is None else marked.to_numpy(zero_copy_only=False),
        queries_recur(log),
        production,
        swapped_requests,
    )


def _before_swaps(log: Log) -> tuple[np.ndarray | None, int]:
    """Return the position of each row's item before swaps (-1: not compared), and how many requests have a swap."""
    if "swaps" not in log.context:
        return None, 0
    production, compared = production_positions(log)
    swapped = pc.not_equal(checked_swaps(log.context["swaps"]), CONTROL)
    return np.where(compared, production, -1), pc.sum(swapped).as_py() or 0


def queries_recur(log: Log) -> bool:
    """Return whether several requests have the same query, so that its items can be compared between them."""
    return "query" in log.context and len(log.context["query"].unique()) < len(log)


def item_codes(log: Log) -> np.ndarray | None:
    """Return an integer for each row's item, or None without item ids.

    If queries recur, it differs by query as relevance does.
    """
    if log.item_ids is None:
        return None
    items = codes(log.item_ids).astype(np.int64)
    if log.item_ids.null_count:  # each row without an id counts as an item that occurs once
        unknown = pc.is_null(log.item_ids).to_numpy(zero_copy_only=False)
        items[unknown] = items.max() + 1 + np.arange(int(unknown.sum()))
    if not queries_recur(log):
        return items
    queries = codes(log.context["query"])
    return codes(pa.array(np.repeat(queries, log.lengths).astype(np.int64) * (int(items.max()) + 1) + items))


@dataclass(frozen=True, eq=False)
class Counts:
    """Impressions and clicks by cell. A cell has the rows of one stratum (rows of equal relevance) at one position.

    They are sums over all requests [cells], or sparse, by random group of requests [cells, groups].
    """

    strata: np.ndarray  # [cells] index of the stratum
    places: np.ndarray  # [cells] index of the position
    size: tuple[int, int]  # number of strata, number of positions
    shown: Any  # impressions: an array, or a sparse matrix
    clicked: Any  # clicks
    share: float = 1.0  # share of the items that are counted; below 1 if items were sampled

    def weighted(self, weights: np.ndarray) -> Counts:
        """Return the sums over groups of requests with these weights [groups]."""
        return replace(self, shown=self.shown @ weights, clicked=self.clicked @ weights)

    def total(self) -> Counts:
        """Return the sums over all groups of requests."""
        return self.weighted(np.ones(self.shown.shape[1]))

    def select(self, cells: np.ndarray) -> Counts:
        """Return the counts of some cells, chosen by a mask."""
        strata, places = self.strata[cells], self.places[cells]
        return replace(self, strata=strata, places=places, shown=self.shown[cells], clicked=self.clicked[cells])

    def pooled(self, pool: np.ndarray) -> Counts:
        """Return the counts by pool of positions; `pool` has the pool of each position."""
        width = int(pool[-1]) + 1
        return replace(
            count_cells(self.strata, pool[self.places], self.shown, self.clicked, width=width), share=self.share
        )

    @property
    def is_compared(self) -> np.ndarray:
        """True for the cells of strata that were shown at several positions [cells]."""
        return np.asarray(np.bincount(self.strata)[self.strata] > 1)

    def compared(self) -> Counts | None:
        """Return the counts of the strata that were shown at several positions; None if there are none."""
        some = self.select(self.is_compared)
        left, strata = np.unique(some.strata, return_inverse=True)
        return replace(some, strata=strata, size=(len(left), self.size[1])) if len(left) else None

    def compared_clicks(self, mean_weight: float = 1.0) -> np.ndarray:
        """Return the clicks behind θ of each position: those of strata that were shown at several positions.

        Clicks are weighted. If the mean weight of requests is below 1 (a share), a click counts as that much.
        """
        return np.bincount(self.places, self.clicked * self.is_compared, self.size[1]) / min(1.0, mean_weight)


def count_cells(strata: np.ndarray, places: np.ndarray, shown: Any, clicked: Any, *, width: int) -> Counts:
    """Sum the impressions and clicks of rows by stratum and position; `width` is the number of positions."""
    ids, cells = np.unique(strata.astype(np.int64) * width + places, return_inverse=True)

    def sums(rows: Any) -> Any:
        if not sparse.issparse(rows):
            return np.bincount(cells, rows, len(ids))
        return sparse.csr_matrix((np.ones(len(cells)), (cells, np.arange(len(cells))))) @ rows

    return Counts(ids // width, ids % width, (int(strata.max(initial=-1)) + 1, width), sums(shown), sums(clicked))


def counted(seen: Impressions, strata: np.ndarray, rows: np.ndarray | slice = slice(None)) -> Counts:
    """Count the given `rows` of a log by stratum, position and group of requests; `strata` has one value per row.

    If rows have `values`, clicked rows count as impressions, and their values as clicks.
    """
    places = seen.place[rows]
    width = len(seen.positions)
    encoded = pa.array(strata.astype(np.int64) * width + places).dictionary_encode()
    cells, ids = encoded.indices.to_numpy(), encoded.dictionary.to_numpy()
    groups = int(seen.group.max()) + 1
    shape = len(ids), groups
    group, weights, clicked = seen.of_rows(seen.group)[rows], seen.row_weights[rows], seen.clicked[rows]
    of_clicked = cells[clicked], group[clicked]
    shown, clicks = sparse.csr_matrix((weights, (cells, group)), shape), weights[clicked]
    if seen.values is not None:
        shown, clicks = sparse.csr_matrix((clicks, of_clicked), shape), clicks * seen.values[rows][clicked]
    size = int(strata.max(initial=-1)) + 1, width
    return Counts(ids // width, ids % width, size, shown, sparse.csr_matrix((clicks, of_clicked), shape))


def counted_random(seen: Impressions) -> Counts | None:
    """Count the requests in random order by position; None if they have no clicks.

    A stratum is all requests with the same positions: over these, the mean relevance of items is the same. Segments
    share strata, as they share items, so that θ of one segment is relative to that of the others.
    """
    rows = seen.of_rows(seen.randomised)
    if not seen.clicked[rows].any():
        return None
    return counted(seen, seen.of_rows(_position_sets(seen))[rows], rows)


def _position_sets(seen: Impressions) -> np.ndarray:
    """Return a number for each request, equal for requests with the same positions, whatever their segments."""
    in_list = np.unique(seen.positions & ((1 << SHIFT) - 1), return_inverse=True)[1]
    key = np.random.default_rng(0).random(len(seen.positions))[in_list]
    positions = np.bincount(seen.request_of_row, key[seen.place], len(seen.lengths))
    return np.unique(positions, return_inverse=True)[1]


def counted_swaps(seen: Impressions) -> Counts | None:
    """Count an experiment with swaps by the position before the swap; None if no clicked rows can be compared.

    A stratum has the items that production ranks at one position, in requests with the same positions. Chance decides
    whether an item is shown there or at another position, so its relevance does not depend on where it is shown.
    """
    if seen.production is None or not seen.swapped_requests:
        return None
    rows = np.flatnonzero(seen.production >= 0)
    if not seen.clicked[rows].any():
        return None
    before = seen.production[rows]
    sets = seen.of_rows(_position_sets(seen))[rows]
    strata = np.unique(sets * (int(before.max()) + 1) + before, return_inverse=True)[1]
    return counted(seen, strata, rows)


def counted_items(seen: Impressions, *, seed: int = 0) -> Counts | None:
    """Count the items that were clicked and shown at several positions, to compare these; None if there are none."""
    if seen.items is None:
        return None
    items, width = int(seen.items.max()) + 1, len(seen.positions)
    ever = np.bincount(seen.items[seen.clicked], minlength=items) > 0
    rows = np.flatnonzero(ever[seen.items])
    cells = pc.unique(pa.array(seen.items[rows].astype(np.int64) * width + seen.place[rows])).to_numpy()
    places_of = np.bincount(cells // width, minlength=items)
    moved = np.flatnonzero(places_of > 1)
    if not len(moved):
        return None
    order = np.random.default_rng(seed).permutation(moved)
    sampled = order[: max(1, int(np.searchsorted(np.cumsum(places_of[order]), CELLS, "right")))]
    code = np.full(items, -1)
    code[np.sort(sampled)] = np.arange(len(sampled))
    rows = rows[code[seen.items[rows]] >= 0]
    return replace(counted(seen, code[seen.items[rows]], rows), share=len(sampled) / len(moved))


@dataclass(frozen=True, eq=False)
class LogCounts:
    """The counts of a log behind the estimates of examination, made in memory (`log_counts`) or by an engine."""

    positions: np.ndarray  # ids, ascending
    shown: np.ndarray  # [positions] weighted impressions
    clicked: np.ndarray  # [positions] weighted clicks
    clicks: np.ndarray  # [positions] rows with a click
    requests: int
    weight: float  # sum of the weights of requests
    groups: int  # random groups of requests
    sources: Mapping[str, Counts]  # by name, see `estimators`
    has_items: bool
    by_query: bool = False  # whether queries recur, so that an item is another one under another query
    random_requests: int = 0  # requests in random order
    swapped_requests: int = 0  # requests whose drawn arm is a swap
    suspicious: int = 0  # suspicious requests among these
    seen: Impressions | None = field(default=None, repr=False)  # the rows, if they are in memory

    @property
    def rate(self) -> np.ndarray:
        return np.asarray(self.clicked / self.shown)


def log_counts(seen: Impressions, *, seed: int = 0) -> LogCounts:
    """Count the rows of a log by position, and for each source of evidence."""
    width, weights = len(seen.positions), seen.row_weights
    sources = {
        "randomised": counted_random(seen),
        "swaps": counted_swaps(seen),
        "items": counted_items(seen, seed=seed),
    }
    return LogCounts(
        positions=seen.positions,
        shown=np.bincount(seen.place, weights, width),
        clicked=np.bincount(seen.place, weights * seen.clicked, width),
        clicks=np.bincount(seen.place[seen.clicked], minlength=width),
        requests=len(seen.lengths),
        weight=float(seen.weights.sum()),
        groups=int(seen.group.max()) + 1,
        sources={name: counts for name, counts in sources.items() if counts is not None},
        has_items=seen.items is not None,
        by_query=seen.by_query,
        random_requests=int(seen.randomised.sum()),
        swapped_requests=seen.swapped_requests,
        seen=seen,
    )


def replicates(groups: int, number: int, *, seed: int = 0) -> np.ndarray:
    """Return weights of groups of requests [groups, 1 + number]: a column of ones, then `number` bootstrap draws."""
    drawn = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=number).T
    return np.column_stack([np.ones(groups), drawn])
