"""Tables of counts: rows that say how often an item was shown at a position for a query, and how often it was clicked.

Such a table is a log that somebody else has counted. It has all that `ultr bias` and `ultr judgments` need, and its
size depends on queries, items and positions, not on traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy import sparse

from ultr.bias.counts import CELLS, GROUPS, Counts, LogCounts, count_cells
from ultr.bias.relevance import Pairs
from ultr.errors import ColumnError, DataError
from ultr.log.columns import NAMES
from ultr.log.readers import read_batches, source_names
from ultr.log.splits import codes
from ultr.log.table import SHIFT

IMPRESSIONS, CLICKS = "impressions", "clicks"  # the common names of the columns of counts
REQUESTS = frozenset(NAMES["request"].split()) - frozenset(NAMES["query"].split())
ROWS_AT_ONCE = 10_000  # cells whose counts are divided among groups at once
KEYS = ("segment", "query", "item", "position")


@dataclass(frozen=True, eq=False)
class CountTable:
    """Impressions and clicks by item and position, and by query and segment, if the table has them; each once."""

    table: pa.Table  # the columns `KEYS` that there are, `shown` and `clicked`

    @property
    def by_query(self) -> bool:
        return "query" in self.table.column_names

    @property
    def segments(self) -> tuple[str, ...]:
        """The names of the segments, in the order of their numbers in position ids."""
        if "segment" not in self.table.column_names:
            return ()
        return tuple(sorted(pc.unique(self.table["segment"]).to_pylist()))

    @property
    def has_clicks(self) -> bool:
        return bool(pc.any(pc.greater(self.table["clicked"], 0)).as_py())

    def parts(self) -> Iterator[tuple[str, CountTable]]:
        """Yield the name and the counts of each segment."""
        for name in self.segments:
            rows = self.table.filter(pc.equal(self.table["segment"], name)).drop_columns("segment")
            yield name, CountTable(rows)

    def without_segments(self) -> CountTable:
        """Return the counts of all segments together."""
        return CountTable(_summed(self.table.drop_columns("segment"))) if self.segments else self

    def positions(self) -> np.ndarray:
        """Return the position id of each row, which differs by segment."""
        positions = self.table["position"].to_numpy().astype(np.int64)
        if not self.segments:
            return np.asarray(positions)
        number = pc.index_in(self.table["segment"], pa.array(self.segments)).to_numpy().astype(np.int64)
        return np.asarray((number << SHIFT) + positions)

    def pairs(self) -> Pairs:
        """Return the counts of each pair of a query and an item."""
        item, query = self._codes("item"), self._codes("query")
        code = query * (int(item.max()) + 1) + item
        _, first, pair = np.unique(code, return_index=True, return_inverse=True)
        positions, places = np.unique(self.positions(), return_inverse=True)
        shown, clicked = self._numbers()
        cells = count_cells(pair, places, shown, clicked, width=len(positions))
        of_pair = self.table.take(pa.array(first)).combine_chunks()
        clicks = np.bincount(pair, clicked)
        queries = of_pair["query"].combine_chunks() if self.by_query else None
        items, number = of_pair["item"].combine_chunks(), np.unique(query[first], return_inverse=True)[1]
        return Pairs(queries, items, number, positions, cells, clicks, features=np.empty((len(first), 0)))

    def log_counts(self, *, seed: int = 0) -> LogCounts:
        """Return what an audit needs, as `counts.log_counts` does.

        The impressions of a cell are divided among random groups, as if each was a request of its own.
        """
        positions, places = np.unique(self.positions(), return_inverse=True)
        shown, clicked = self._numbers()
        if not self.has_clicks:
            raise DataError("the table has no clicks", hint="name another column with --actions")
        at = [np.bincount(places, values, len(positions)) for values in (shown, clicked)]
        requests = int(max(np.bincount((self.positions() & ((1 << SHIFT) - 1)), shown)))
        item, query = self._codes("item"), self._codes("query")
        strata = np.unique(query * (int(item.max()) + 1) + item, return_inverse=True)[1]
        items = self._moved(strata, places, len(positions), seed)
        return LogCounts(
            positions=positions,
            shown=at[0],
            clicked=at[1],
            clicks=at[1].astype(np.int64),
            requests=requests,
            weight=float(requests),
            groups=GROUPS,
            sources={} if items is None else {"items": items},
            has_items=True,
            by_query=self.by_query,
        )

    def _moved(self, strata: np.ndarray, places: np.ndarray, width: int, seed: int) -> Counts | None:
        """Count the items that were clicked and shown at several positions, as `counts.counted_items` does."""
        shown, clicked = self._numbers()
        several = (np.bincount(strata) > 1) & (np.bincount(strata, clicked) > 0)
        moved = np.flatnonzero(several)
        if not len(moved):
            return None
        random = np.random.default_rng(seed)
        order = random.permutation(moved)
        sampled = order[: max(1, int(np.searchsorted(np.cumsum(np.bincount(strata)[order]), CELLS, "right")))]
        code = np.full(len(several), -1)
        code[np.sort(sampled)] = np.arange(len(sampled))
        rows = np.flatnonzero(code[strata] >= 0)
        clicks = _divided(clicked[rows], random)
        every = clicks + _divided((shown - clicked)[rows], random)
        counts = count_cells(code[strata[rows]], places[rows], every, clicks, width=width)
        return replace(counts, share=len(sampled) / len(moved))

    def _codes(self, name: str) -> np.ndarray:
        if name not in self.table.column_names:
            return np.zeros(len(self.table), np.int64)
        return codes(self.table[name].combine_chunks()).astype(np.int64)

    def _numbers(self) -> tuple[np.ndarray, np.ndarray]:
        return self.table["shown"].to_numpy().astype(np.float64), self.table["clicked"].to_numpy().astype(np.float64)


def _divided(counts: np.ndarray, random: np.random.Generator) -> Any:
    """Return counts by group [cells, groups], a sparse matrix; each of them goes to a random group."""
    even = np.full(GROUPS, 1 / GROUPS)
    parts = [
        sparse.csr_matrix(random.multinomial(counts[first : first + ROWS_AT_ONCE].astype(np.int64), even), dtype=float)
        for first in range(0, len(counts), ROWS_AT_ONCE)
    ]
    return sparse.vstack(parts, format="csr")


def _summed(table: pa.Table) -> pa.Table:
    keys = [name for name in KEYS if name in table.column_names]
    summed = table.group_by(keys).aggregate([("shown", "sum"), ("clicked", "sum")])
    return summed.rename_columns([*keys, "shown", "clicked"]).combine_chunks()


def is_count_table(source: Any, columns: Mapping[str, Any]) -> bool:
    """Return whether a source has columns `impressions` and `clicks`, and none of requests."""
    if columns.get("request"):
        return False
    names = {name.lower() for name in source_names(source)}
    return {IMPRESSIONS, CLICKS} <= names and not names & REQUESTS


def read_counts(source: Any, *, where: Sequence[str] = (), **columns: Any) -> CountTable:
    """Read a table of counts from anything that `read_log` reads; rows of one item and position are added up.

    `columns` name columns by role, as for `read_log`; those of counts are `impressions` and `clicks`.
    """
    by_lower = {name.lower(): name for name in source_names(source)}
    named = {role: name for role, name in columns.items() if name and role in (*KEYS, "row", "column")}
    if unknown := sorted({role for role, name in columns.items() if name} - {*named}):
        what, hint = "a table of counts has no such column", "leave it out"
        raise ColumnError(what, got=f"--{unknown[0]} {columns[unknown[0]]}", hint=hint)
    # Each row of the batches is a request of its own, whatever its id: here, the number of its impressions.
    _, batches = read_batches(
        source,
        feature_names=(by_lower[CLICKS],),
        request=by_lower[IMPRESSIONS],
        shown="",
        where=where,
        **named,
    )
    parts = []
    for batch in batches:
        log = batch.log
        if log.item_ids is None:
            raise ColumnError("a table of counts needs item ids", hint="name their column with --item")
        part = {role: log.context[role] for role in ("segment", "query") if role in log.context}
        part |= {"item": log.item_ids, "position": log.shown_positions("a table of counts")}
        part |= {"shown": _whole(log.request_ids, IMPRESSIONS), "clicked": _whole(log.features[:, 0], CLICKS)}
        parts.append(_summed(pa.table(part)))
    table = _summed(pa.concat_tables(parts, promote_options="permissive"))
    if wrong := pc.sum(pc.greater(table["clicked"], table["shown"])).as_py():
        what, hint = "a row has more clicks than impressions", "count requests with a click"
        raise DataError(what, got=f"{wrong:,} such rows", hint=hint)
    return CountTable(table.filter(pc.greater(table["shown"], 0)))


def _whole(values: Any, name: str) -> np.ndarray:
    """Return counts as whole numbers; raise DataError if they are not."""
    try:
        numbers = np.asarray(values, np.float64)
    except (ValueError, TypeError) as error:
        raise DataError(f"'{name}' must be whole numbers", hint="correct or drop other rows") from error
    if not ((numbers >= 0) & (numbers == np.floor(numbers)) & (numbers < 2**53)).all():
        bad = numbers[~((numbers >= 0) & (numbers == np.floor(numbers)))]
        got = f"{bad[0]:g}" if len(bad) else "numbers above 2^53"
        raise DataError(f"'{name}' must be whole numbers, not negative", got=got, hint="correct or drop other rows")
    return numbers.astype(np.int64)
