"""Impressions and clicks, counted by what they tell of examination and by groups of requests.

Groups are what intervals rest on: requests are put into a few hundred of them by chance, and a bootstrap weighs the
groups. Counts by group are taken once, and a replicate is a product with the weights, whatever the size of the log.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy import sparse

from ultr.errors import DataError
from ultr.examination import check_positions
from ultr.log import Log

GROUPS = 200
MOST_POSITIONS = 1_000  # different ones, whose θ are found together, once a replicate
CELLS = 150_000  # of items by positions that are counted; of more items a random part is taken


@dataclass(frozen=True, eq=False)
class Impressions:
    """What every row of a log says of examination."""

    positions: np.ndarray  # ids, ascending
    place: np.ndarray  # [rows] index of the position
    clicked: np.ndarray  # [rows] bool
    lengths: np.ndarray  # [requests]
    group: np.ndarray  # [requests]
    weights: np.ndarray | None  # [requests]
    items: np.ndarray | None  # [rows] codes of items, those of another query apart
    randomised: np.ndarray | None  # [requests] bool

    def of_rows(self, values: np.ndarray) -> np.ndarray:
        """Values of requests, for each of their rows."""
        return np.repeat(values, self.lengths)

    def row_weights(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        if self.weights is None:
            return np.ones(len(self.place[rows]))
        return self.of_rows(self.weights.astype(np.float64))[rows]


def impressions(log: Log, clicked: np.ndarray, *, seed: int = 0) -> Impressions:
    if log.positions is None:
        raise DataError("examination is by position, and the log has none", mend="name it with --position")
    positions = np.unique(log.positions)
    check_positions(len(positions), MOST_POSITIONS)
    groups = min(GROUPS, len(log))
    order = np.random.default_rng(seed).permutation(len(log))
    group = np.empty(len(log), np.int32)
    group[order] = np.arange(len(log)) % groups
    marked = log.context.get("randomised")
    return Impressions(
        positions,
        np.searchsorted(positions, log.positions).astype(np.int32),
        clicked,
        log.lengths,
        group,
        log.weights,
        _item_codes(log),
        None if marked is None else marked.to_numpy(zero_copy_only=False),
    )


def _item_codes(log: Log) -> np.ndarray | None:
    """A number for each item; the same item under another query is another, as it is relevant to another thing."""
    if log.item_ids is None:
        return None
    items = _codes(log.item_ids).astype(np.int64)
    if log.item_ids.null_count:  # of which nothing is known to recur
        unknown = pc.is_null(log.item_ids).to_numpy(zero_copy_only=False)
        items[unknown] = items.max() + 1 + np.arange(int(unknown.sum()))
    if "query" not in log.context:
        return items
    queries = _codes(log.context["query"])
    return _codes(pa.array(np.repeat(queries, log.lengths).astype(np.int64) * (int(items.max()) + 1) + items))


def _codes(values: pa.Array) -> np.ndarray:
    try:
        encoded = values.dictionary_encode()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        mend = "give each a number or a text, or name their column with --item"
        raise DataError("items cannot be told apart", got=f"type {values.type}", mend=mend) from error
    return np.asarray(pc.fill_null(encoded.indices, len(encoded.dictionary)).to_numpy(zero_copy_only=False))


@dataclass(frozen=True, eq=False)
class Counts:
    """Impressions and clicks by cell, a stratum at a position, and by group of requests."""

    strata: np.ndarray  # [cells]
    places: np.ndarray  # [cells]
    size: tuple[int, int]  # strata, positions
    shown: sparse.csr_matrix  # [cells, groups]
    clicked: sparse.csr_matrix
    share: float = 1.0  # of the items that were taken

    def weighed(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Impressions and clicks by cell, each group of requests counting so many times."""
        return self.shown @ weights, self.clicked @ weights


def counted(seen: Impressions, strata: np.ndarray, rows: np.ndarray | slice = slice(None)) -> Counts:
    """The rows of a log by stratum and position."""
    places = seen.place[rows]
    width = len(seen.positions)
    encoded = pa.array(strata.astype(np.int64) * width + places).dictionary_encode()
    cells, ids = encoded.indices.to_numpy(), encoded.dictionary.to_numpy()
    groups = int(seen.group.max()) + 1
    shape = len(ids), groups
    group, weights, clicked = seen.of_rows(seen.group)[rows], seen.row_weights(rows), seen.clicked[rows]
    return Counts(
        ids // width,
        ids % width,
        (int(strata.max(initial=-1)) + 1, width),
        sparse.csr_matrix((weights, (cells, group)), shape),
        sparse.csr_matrix((weights[clicked], (cells[clicked], group[clicked])), shape),
    )


def counted_items(seen: Impressions, *, seed: int = 0) -> Counts | None:
    """Items that were clicked and shown at several positions: no other item tells one position from another."""
    if seen.items is None:
        return None
    items, width = int(seen.items.max()) + 1, len(seen.positions)
    ever = np.bincount(seen.items[seen.clicked], minlength=items) > 0
    rows = np.flatnonzero(ever[seen.items])
    cells = pc.unique(pa.array(seen.items[rows].astype(np.int64) * width + seen.place[rows])).to_numpy()
    places_of = np.bincount(cells // width, minlength=items)
    telling = np.flatnonzero(places_of > 1)
    if not len(telling):
        return None
    order = np.random.default_rng(seed).permutation(telling)
    taken = order[: max(1, int(np.searchsorted(np.cumsum(places_of[order]), CELLS, "right")))]
    code = np.full(items, -1)
    code[np.sort(taken)] = np.arange(len(taken))
    rows = rows[code[seen.items[rows]] >= 0]
    found = counted(seen, code[seen.items[rows]], rows)
    return Counts(found.strata, found.places, found.size, found.shown, found.clicked, len(taken) / len(telling))


def replicates(groups: int, number: int, *, seed: int = 0) -> np.ndarray:
    """Weights of the groups [groups, 1 + number]: each once, then as a bootstrap draws them."""
    drawn = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=number).T
    return np.column_stack([np.ones(groups), drawn])
