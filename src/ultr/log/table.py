"""`Log`: requests, the items shown for each, and the actions of users on the items."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ultr.errors import DataError, OptionError
from ultr.utils.arguments import as_numbers, check_value, checked
from ultr.utils.files import atomic_path

FEATURE_NAMES_KEY = b"ultr.feature_names"
ACTIONS_KEY = b"ultr.actions"
CATEGORICAL_KEY = b"ultr.categorical"
ROW_GROUP_BYTES = 64 << 20  # size of a Parquet row group, about
# The columns of a written log that are not actions.
RESERVED = {
    *("request", "item", "position", "relevance", "weight", "features"),
    *("query", "segment", "randomised", "swaps"),
}


AT_END = 0.99  # share of requests whose hidden rows are all at the end, from which on sessions or lists ended there


@dataclass(frozen=True)
class Hidden:
    """The rows of a source that were not shown, by a column."""

    column: str
    rows: int
    of: int
    requests: int  # with such rows
    at_end: int  # requests of these in which all hidden rows are below the last shown one, or without a position
    nothing_shown: int = 0  # requests without any row that was shown
    with_feedback: int = 0  # rows marked as not shown that have feedback, and count as shown

    def __str__(self) -> str:
        """Say which column marks what was shown, how many rows were not, and where in the lists they were."""
        if not self.rows:
            return f"column '{self.column}' marks what was shown: all rows were"
        ends = self.at_end >= AT_END * self.requests
        where = (
            "at the end of lists (a cut-off, or sessions that ended)" if ends else "also between rows that were shown"
        )
        text = (
            f"column '{self.column}' marks what was shown: {self.rows:,} of {self.of:,} rows were not, in "
            f"{self.requests:,} requests, {where}; they are left out, so that they do not count as impressions"
        )
        if self.nothing_shown:
            text += f"; {self.nothing_shown:,} requests showed nothing"
        if self.with_feedback:
            text += f"; {self.with_feedback:,} rows marked as not shown have feedback, and count as shown"
        return text


@dataclass(frozen=True, eq=False)
class Log:
    """Requests with one row per item; the rows of a request are adjacent and ordered by position.

    Row `r` belongs to request `i` where `offsets[i] <= r < offsets[i + 1]`. Nothing is padded here; `ultr.Lists` pads
    some requests at a time. `positions` identify the place where an item was shown, and may have gaps; None if items
    were never shown. `relevance` is the true label, or None; methods that learn from feedback do not read it. A
    categorical feature is a column of codes, 0 for a missing value.
    """

    features: np.ndarray  # [rows, features] float32
    offsets: np.ndarray  # [requests + 1] int64
    request_ids: Any  # [requests] Arrow array of any type
    feature_names: tuple[str, ...]
    positions: np.ndarray | None = None  # [rows] int64
    actions: Mapping[str, np.ndarray] = field(default_factory=dict)  # name -> [rows] float32
    relevance: np.ndarray | None = None  # [rows] float32
    weights: np.ndarray | None = None  # [requests] float32, None if every weight is 1
    item_ids: Any = None  # [rows] Arrow array of any type
    vocabularies: Mapping[str, Any] = field(default_factory=dict)  # categorical feature -> values; code is index + 1
    context: Mapping[str, Any] = field(default_factory=dict)  # query, segment, ...: [requests] Arrow array
    columns: Mapping[str, Any] = field(default_factory=dict)  # role -> its column (or columns) of the source
    unused_columns: tuple[str, ...] = ()  # columns of the source that were not read
    notes: tuple[str, ...] = ()  # changes made on reading, such as missing actions that count as 0
    came_in_order: bool = False  # whether the rows of the source were in order of request and position
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)  # further columns, such as durations: [rows] float64
    hidden: Hidden | None = None  # the rows of the source that nobody could see, which are left out; None: no column

    def __post_init__(self) -> None:
        self._convert_arrays()
        rows, requests = len(self.features), len(self.offsets) - 1
        if reserved := RESERVED & set(self.actions):
            what = "an action cannot have the name of another column of the log"
            raise DataError(what, got=f"'{min(reserved)}'", hint="rename the action")
        per_row = {"positions": self.positions, "relevance": self.relevance, "item_ids": self.item_ids}
        per_row |= {**self.actions, **self.extra}
        per_request = {"request_ids": self.request_ids, "weights": self.weights, **self.context}
        for expected, columns in ((rows, per_row), (requests, per_request)):
            for name, column in columns.items():
                if column is not None and len(column) != expected:
                    raise DataError(f"'{name}' must have {expected} values", got=len(column))
        if self.features.ndim != 2 or self.features.shape[1] != len(self.feature_names):
            what = f"features must have the shape [rows, {len(self.feature_names)}], like feature_names"
            raise DataError(what, got=list(self.features.shape))
        if requests < 0 or self.offsets[0] != 0 or self.offsets[-1] != rows or (np.diff(self.offsets) <= 0).any():
            raise DataError("offsets must increase from 0 to the number of rows", hint="drop empty requests")

    def _convert_arrays(self) -> None:
        """Convert array-like fields to arrays of the right types; raise DataError if one cannot be converted."""
        by_name = {name: getattr(self, name) for name in ("actions", "context", "vocabularies", "extra")}
        for name, value in by_name.items():
            check_value(name, value, Mapping[str, Any])
        converted = {
            "features": _typed("features", self.features, np.float32, dimensions=2, double=False),
            "offsets": _typed("offsets", self.offsets, np.int64),
            "feature_names": tuple(check_value("feature_names", self.feature_names, Sequence[str])),
            "request_ids": _arrow("request_ids", self.request_ids),
            "item_ids": _arrow("item_ids", self.item_ids),
            "positions": _typed("positions", self.positions, np.int64),
            "relevance": _typed("relevance", self.relevance, np.float32),
            "weights": _typed("weights", self.weights, np.float32, double=False),
            "actions": {name: _typed(name, values, np.float32) for name, values in self.actions.items()},
            "extra": {name: _typed(name, values, np.float64) for name, values in self.extra.items()},
            "context": {name: _arrow(name, values) for name, values in self.context.items()},
            "vocabularies": {name: _arrow(name, values) for name, values in self.vocabularies.items()},
        }
        for name, value in converted.items():
            object.__setattr__(self, name, value)
        if self.positions is not None and self.positions.min(initial=0) < 0:
            raise DataError("positions must not be negative", got=int(self.positions.min()), hint="count from 0 or 1")
        if self.weights is not None and not ((self.weights > 0) & (self.weights < np.inf)).all():
            got = f"{self.weights.min():g} to {self.weights.max():g}"
            raise DataError("weights must be finite and positive", got=got, hint="drop requests of weight 0")

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        parts = [f"{len(self):,} requests", f"{self.rows:,} rows", f"{len(self.feature_names)} features"]
        if self.actions:
            parts.append("actions " + ", ".join(self.actions))
        if self.relevance is not None:
            parts.append("true relevance")
        return f"Log({'; '.join(parts)})"

    @property
    def categories(self) -> dict[int, int]:
        """A dict from the index of each categorical feature to its number of codes."""
        return {self.feature_names.index(name): len(values) + 1 for name, values in self.vocabularies.items()}

    def shown_positions(self, purpose: str) -> np.ndarray:
        """Return the positions of the rows; raise DataError ("{purpose} needs positions") if the log has none."""
        if self.positions is None:
            hint = "name their column with --position"
            raise DataError(f"{purpose} needs positions, and the log has none", hint=hint)
        return self.positions

    @property
    def rows(self) -> int:
        return len(self.features)

    @property
    def lengths(self) -> np.ndarray:
        """The number of items of each request."""
        return np.diff(self.offsets)

    @property
    def request_of_row(self) -> np.ndarray:
        """The index of the request that each row belongs to."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def true_relevance(self) -> np.ndarray:
        """The true labels of the rows; raises DataError if the log has none."""
        if self.relevance is None:
            raise DataError("the log has no true labels", hint="name their column with --relevance (relevance=...)")
        return self.relevance

    def select(self, requests: np.ndarray | Iterable[int]) -> Log:
        """Return a log of some requests, chosen by indices (in any order, repeats allowed) or by a boolean mask."""
        chosen = as_numbers("requests", [*requests] if isinstance(requests, Iterator) else requests)
        chosen = np.flatnonzero(chosen) if chosen.dtype == bool else _typed("requests", chosen, np.int64)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= len(self)):
            got = f"{chosen.min()} to {chosen.max()}"
            raise DataError(f"indices of requests must be 0 to {len(self) - 1}", got=got)
        lengths = self.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], lengths)
        ids = self.request_ids.take(pa.array(chosen))
        weights = None if self.weights is None else self.weights[chosen]
        context = {name: values.take(pa.array(chosen)) for name, values in self.context.items()}
        return self._rebuilt(rows, offsets, request_ids=ids, weights=weights, context=context)

    def without_features(self) -> Log:
        """Return the log without its features, which saves memory."""
        return replace(self, features=np.empty((self.rows, 0), np.float32), feature_names=(), vocabularies={})

    def check_scores(self, scores: Any) -> np.ndarray:
        """Return scores as a float array; raise DataError if there is not one number, not NaN, for each row."""
        array = np.asarray(scores)
        if array.shape != (self.rows,) or array.dtype.kind not in "biuf":
            got = f"shape {list(array.shape)} of {array.dtype}"
            raise DataError(f"scores must be numbers, one for each of {self.rows} rows", got=got)
        numbers = array.astype(np.float32 if array.dtype == np.float32 else np.float64)
        if np.isnan(numbers).any():
            raise DataError("scores must not be NaN", got=f"{int(np.isnan(numbers).sum())} NaN")
        return numbers

    def regroup(self, rows: np.ndarray, offsets: np.ndarray) -> Log:
        """Return the same requests with only `rows` (row numbers, in this order); `offsets` are the new offsets."""
        return self._rebuilt(rows, offsets)

    def _rebuilt(self, rows: np.ndarray, offsets: np.ndarray, **of_requests: Any) -> Log:
        return replace(
            self,
            features=self.features[rows],
            offsets=offsets,
            positions=None if self.positions is None else self.positions[rows],
            actions={name: values[rows] for name, values in self.actions.items()},
            extra={name: values[rows] for name, values in self.extra.items()},
            relevance=None if self.relevance is None else self.relevance[rows],
            item_ids=None if self.item_ids is None else self.item_ids.take(pa.array(rows)),
            **of_requests,
        )

    def to_table(self, first: int = 0, last: int | None = None, *, fixed_size: bool = False) -> pa.Table:
        """Return an Arrow table, which `read_log` can read, of requests `first` to `last` - 1 with one row per item.

        Features are one column of lists, which has Arrow's fixed-size type if `fixed_size` is true. Their names are in
        the schema's metadata.
        """
        last = len(self) if last is None else last
        start, stop = int(self.offsets[first]), int(self.offsets[last])
        requests = np.repeat(np.arange(first, last), self.lengths[first:last])
        columns: dict[str, Any] = {"request": self.request_ids.take(pa.array(requests))}
        if self.item_ids is not None:
            columns["item"] = self.item_ids.slice(start, stop - start)
        if is_grid(self.positions):
            columns["row"], columns["column"] = rows_and_columns(self.positions[start:stop])  # type: ignore[index]
        elif self.positions is not None:
            columns["position"] = self.positions[start:stop]
        columns |= {name: values[start:stop] for name, values in self.actions.items()}
        if self.relevance is not None:
            columns["relevance"] = self.relevance[start:stop]
        if self.weights is not None:
            columns["weight"] = self.weights[requests]
        columns |= {name: values.take(pa.array(requests)) for name, values in self.context.items()}
        numeric = [i for i, name in enumerate(self.feature_names) if name not in self.vocabularies]
        for name, vocabulary in self.vocabularies.items():
            codes = self.features[start:stop, self.feature_names.index(name)].astype(np.int64)
            columns[name] = vocabulary.take(pa.array(codes - 1, mask=codes == 0))
        width = len(numeric)
        if width:
            rows = self.features[start:stop]
            matrix = rows if width == len(self.feature_names) else rows[:, numeric]
            flat = pa.array(np.ascontiguousarray(matrix).reshape(-1))
            ends = np.arange(stop - start + 1, dtype=np.int64) * width
            columns["features"] = (
                pa.FixedSizeListArray.from_arrays(flat, width)
                if fixed_size
                else pa.LargeListArray.from_arrays(ends, flat)
            )
        metadata = {
            FEATURE_NAMES_KEY: json.dumps([self.feature_names[i] for i in numeric]).encode(),
            CATEGORICAL_KEY: json.dumps(list(self.vocabularies)).encode(),
            ACTIONS_KEY: json.dumps(list(self.actions)).encode(),
        }
        return pa.table(columns).replace_schema_metadata(metadata)


def _typed(name: str, values: Any, dtype: type[np.generic], *, dimensions: int = 1, double: bool = True) -> Any:
    """Return values as an array of type `dtype`; None stays None, and float64 stays float64 if `double` is true."""
    if values is None and name not in ("features", "offsets"):
        return None
    array = as_numbers(name, values)
    whole = dtype is np.int64
    too_large = array.dtype == np.uint64 and array.size and array.max() >= 2**63
    if array.ndim != dimensions or (whole and array.size and (array.dtype.kind not in "iu" or too_large)):
        what = f"'{name}' must have {dimensions} dimensions" + (" of whole numbers" if whole else "")
        raise DataError(what, got=f"shape {list(array.shape)} of {array.dtype}")
    if array.dtype == dtype or (array.dtype == np.float64 and double and not whole):
        return array
    with np.errstate(over="ignore"):
        single = array.astype(dtype)
    if np.isinf(single).sum() > np.isinf(array).sum():
        raise DataError(f"'{name}' has values beyond 3.4e38, which do not fit float32", hint="clip or scale them")
    return single


def _arrow(name: str, values: Any) -> Any:
    if isinstance(values, pa.Array) or (values is None and name != "request_ids"):
        return values
    try:
        return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        got, hint = type(values).__name__, "pass numbers or strings, all of one type"
        raise DataError(f"'{name}' is not an array of ids", got=got, hint=hint) from error


@checked
def write_log(
    log: Log, path: str | Path, *, overwrite: bool = False, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a log to a Parquet file with one row per item, in one step; `metadata` is added to the file's schema."""
    check_parquet_name(path)
    if not len(log):
        raise DataError("there are no requests to write", where=path, hint="check how the log was selected")
    if len(log.request_ids.unique()) < len(log):
        raise DataError("two requests have the same id", where=path, hint="give each request its own id")
    row_bytes = 4 * max(1, len(log.feature_names) + len(log.actions) + 4)
    starts = _request_blocks(log.offsets, max_rows=max(1, ROW_GROUP_BYTES // row_bytes))
    with atomic_path(path, overwrite=overwrite) as temporary:
        blocks = (log.to_table(a, b) for a, b in pairwise(starts))
        first = next(blocks)
        notes = {**(first.schema.metadata or {}), **{k.encode(): v.encode() for k, v in (metadata or {}).items()}}
        schema = pa.schema([_small_list(f) for f in first.schema], metadata=notes)
        writer = pq.ParquetWriter(temporary, schema)
        try:
            writer.write_table(first.cast(schema))
            for block in blocks:
                writer.write_table(block.cast(schema))
            writer.close()
        finally:
            writer.is_open = False  # else Arrow closes a failed writer once more at garbage collection, and raises


def check_parquet_name(path: str | Path) -> None:
    if Path(path).suffix.lower() not in (".parquet", ".pq"):
        raise OptionError("the output must be a Parquet file", got=f"'{path}'", hint="end its name in .parquet")


def _small_list(column: pa.Field) -> pa.Field:
    return column.with_type(pa.list_(pa.float32())) if pa.types.is_large_list(column.type) else column


def _request_blocks(offsets: np.ndarray, max_rows: int) -> list[int]:
    """Return the bounds of blocks of whole requests; a block has at most `max_rows` rows, or one longer request."""
    bounds = [0]
    while bounds[-1] < len(offsets) - 1:
        fits = int(np.searchsorted(offsets, offsets[bounds[-1]] + max_rows, side="right")) - 1
        bounds.append(max(fits, bounds[-1] + 1))
    return bounds


# --- Segments ---------------------------------------------------------------------------------------------------------
# Position bias by segment (such as phone and desktop): each position gets a different id in each segment.

SEPARATOR = " + "  # between the values of several columns that make a segment, as in `phone + search`
SHIFT = 20  # a position id has the position in its lowest 20 bits, and the number of the segment above them
IN_LIST = (1 << SHIFT) - 1  # the bits of a position id that are the position, without the segment


def by_segment(log: Log, known: Sequence[str] | None = None) -> tuple[Log, tuple[str, ...]]:
    """Return the log with position ids that differ between segments, and the names of the segments.

    If `known` segments are passed, all others count as one more segment. The order of items does not change.
    """
    if log.positions is None or "segment" not in log.context:
        raise DataError("the log has no segments", hint="name their column with --segment (segment=...)")
    if int(log.positions.max()) >> SHIFT:
        highest, hint = int(log.positions.max()), "number the positions 1, 2, ..."
        raise DataError(f"positions by segment must be below {1 << SHIFT:,}", got=highest, hint=hint)
    names = pc.fill_null(log.context["segment"].cast(pa.string()), "")
    known = sorted(pc.unique(names).to_pylist()) if known is None else known
    codes = pc.fill_null(pc.index_in(names, pa.array(known, pa.string())), len(known))
    codes = codes.to_numpy(zero_copy_only=False).astype(np.int64)
    return replace(log, positions=(np.repeat(codes, log.lengths) << SHIFT) + log.positions), tuple(known)


def without_segments(log: Log) -> Log:
    """Return a log with the positions that it had before `by_segment`."""
    return log if log.positions is None else replace(log, positions=log.positions & IN_LIST)


def slot(position: int, segments: Sequence[str] = ()) -> str:
    """Return the text of a position id: `3`, `r2c3` in a grid, `3@phone` if there are segments (`3@` in others)."""
    if not segments:
        return str(as_shown(position))
    return f"{as_shown(position & IN_LIST)}@{(*segments, '')[min(position >> SHIFT, len(segments))]}"


# --- Grids ------------------------------------------------------------------------------------------------------------
# A position in a grid is a row and a column. Its id has the bit GRID, the row, and the column in the lowest nine bits,
# so that ids increase in reading order: row by row.

GRID = 1 << 19  # no position in a list is from GRID to 2 GRID - 1
MOST_GRID_ROWS, MOST_GRID_COLUMNS = 1 << 10, 1 << 9
SLOT = re.compile(r"r([0-9]{1,4})c([0-9]{1,3})")


def grid_ids(rows: Any, columns: Any) -> Any:
    """Return the position ids of slots of a grid; `rows` and `columns` are whole numbers, arrays or tensors."""
    return rows * MOST_GRID_COLUMNS + columns + GRID


def rows_and_columns(positions: Any) -> tuple[Any, Any]:
    """Return the rows and the columns of position ids of a grid, also of ids that differ by segment."""
    within = positions & (GRID - 1)
    return within // MOST_GRID_COLUMNS, within % MOST_GRID_COLUMNS


def is_grid(positions: np.ndarray | Sequence[int] | None) -> bool:
    """Return whether position ids, without segments, are those of slots of a grid; a log has only such ids, or none."""
    return positions is not None and len(positions) > 0 and int(positions[0]) // GRID == 1


def as_shown(position: int) -> int | str:
    """Return a position without its segment as outputs show it: its number, or `r2c3` for row 2, column 3 of a grid."""
    if position // GRID != 1:
        return position
    return "r{}c{}".format(*rows_and_columns(position))


def named_places(positions: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the indices of the positions that a summary names: those of an order from 1, or the corners of a grid."""
    if not is_grid(positions):
        return [k - 1 for k in order if k <= len(positions)]
    rows = rows_and_columns(np.array(positions))[0]
    ends = [np.flatnonzero(rows == row)[[0, -1]] for row in (rows[0], rows[-1])]
    return [int(i) for i in np.unique(ends) if i]


def by_row(positions: Sequence[int], values: Sequence[Any]) -> tuple[list[str], list[str], list[list[Any]]]:
    """Return the names of the rows and the columns of a grid, and its values [rows, columns]; None without a value."""
    rows, columns = rows_and_columns(np.array(positions))
    of_row, of_column = ({int(k): i for i, k in enumerate(np.unique(each))} for each in (rows, columns))
    matrix: list[list[Any]] = [[None] * len(of_column) for _ in of_row]
    for row, column, value in zip(rows.tolist(), columns.tolist(), values, strict=True):
        matrix[of_row[row]][of_column[column]] = value
    return [f"r{k}" for k in of_row], [f"c{k}" for k in of_column], matrix


def position_id(text: str) -> int:
    """Return the position id of a text such as `3` or `r2c3`; raise ValueError if it is not one."""
    if (found := SLOT.fullmatch(text)) is None:
        return int(text)
    row, column = map(int, found.groups())
    if row >= MOST_GRID_ROWS or column >= MOST_GRID_COLUMNS:
        raise ValueError(f"rows of a grid are below {MOST_GRID_ROWS:,}, and columns below {MOST_GRID_COLUMNS}")
    return int(grid_ids(row, column))


# --- Summaries --------------------------------------------------------------------------------------------------------
# Summaries of a log: impressions, and the rate and mean of each action, by position; features with missing values.

ROWS_AT_ONCE = 1 << 14  # rows in which missing values are counted at once


@dataclass(frozen=True, eq=False)
class ByPosition:
    """The positions in increasing order, their numbers of impressions, and the rate and mean of each action there."""

    positions: np.ndarray
    impressions: np.ndarray
    rates: dict[str, np.ndarray]  # share of impressions with the action
    means: dict[str, np.ndarray]  # mean of the action over the impressions


def missing_values(log: Log, most: int = 5) -> str | None:
    """Return the features with missing values, and the share of rows without a value, in words; None without any."""
    counts = np.zeros(len(log.feature_names), np.int64)
    for first in range(0, log.rows, ROWS_AT_ONCE):  # rows are contiguous in memory, columns are not
        counts += np.isnan(log.features[first : first + ROWS_AT_ONCE]).sum(0)
    shares = zip(log.feature_names, counts / max(1, log.rows), strict=True)
    missing = [f"{name} ({share:.1%})" for name, share in shares if share]
    more = f" and {len(missing) - most} more" if len(missing) > most else ""
    return ", ".join(missing[:most]) + more if missing else None


def by_position(log: Log) -> ByPosition:
    """Return impressions and feedback by position; rates and means use the weights of requests."""
    positions, place = np.unique(log.shown_positions("a summary"), return_inverse=True)
    weights = np.ones(log.rows) if log.weights is None else np.repeat(log.weights, log.lengths).astype(np.float64)
    shown = np.bincount(place, weights)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.asarray(np.bincount(place, weights * values) / shown)

    return ByPosition(
        positions=positions,
        impressions=np.bincount(place),
        rates={name: mean(values > 0) for name, values in log.actions.items()},
        means={name: mean(values) for name, values in log.actions.items()},
    )
