"""`Log`: requests, the items of each, and what users did with them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ultr.arguments import as_numbers, checked, taken
from ultr.errors import DataError, OptionError
from ultr.files import atomic_path

FEATURE_NAMES_KEY = b"ultr.feature_names"
ACTIONS_KEY = b"ultr.actions"
CATEGORICAL_KEY = b"ultr.categorical"
ROW_GROUP_BYTES = 64 << 20
RESERVED = {
    "request",
    "item",
    "position",
    "relevance",
    "weight",
    "features",
    "query",
    "segment",
    "randomised",
}  # names of a written log's other columns


@dataclass(frozen=True, eq=False)
class Log:
    """Requests and the items of each, row by row; the rows of a request are adjacent and ordered by position.

    Row `r` belongs to request `i` where `offsets[i] <= r < offsets[i + 1]`. Lists are kept at their own length here;
    `ultr.Lists` pads a few of them at a time. `positions` are ids, not ranks, and are `None` for items that were never
    shown. `relevance` is the true label where it is known; nothing that learns from feedback reads it. A categorical
    feature is a column of codes, 0 for a missing value.
    """

    features: np.ndarray  # [rows, features] float32
    offsets: np.ndarray  # [requests + 1] int64
    request_ids: Any  # [requests] Arrow array of any type
    feature_names: tuple[str, ...]
    positions: np.ndarray | None = None  # [rows] int64
    actions: Mapping[str, np.ndarray] = field(default_factory=dict)  # name -> [rows] float32
    relevance: np.ndarray | None = None  # [rows] float32
    weights: np.ndarray | None = None  # [requests] float32, None where every request counts once
    item_ids: Any = None  # [rows] Arrow array of any type
    vocabularies: Mapping[str, Any] = field(default_factory=dict)  # categorical feature -> its values, code i + 1 each
    context: Mapping[str, Any] = field(default_factory=dict)  # query, segment, randomised: [requests] Arrow array
    unused_columns: tuple[str, ...] = ()  # of the source; they play no part
    came_in_order: bool = False  # the source had its rows by request and position already

    def __post_init__(self) -> None:
        self._take_arrays()
        rows, requests = len(self.features), len(self.offsets) - 1
        if taken := RESERVED & set(self.actions):
            what = "an action cannot have the name of another column of the log"
            raise DataError(what, got=f"'{min(taken)}'", mend="rename it")
        per_row = {"positions": self.positions, "relevance": self.relevance, "item_ids": self.item_ids, **self.actions}
        per_request = {"request_ids": self.request_ids, "weights": self.weights, **self.context}
        for expected, columns in ((rows, per_row), (requests, per_request)):
            for name, column in columns.items():
                if column is not None and len(column) != expected:
                    raise DataError(f"'{name}' should have {expected} values", got=len(column))
        if self.features.ndim != 2 or self.features.shape[1] != len(self.feature_names):
            raise DataError(
                f"features should be [rows, {len(self.feature_names)}] for {len(self.feature_names)} names",
                got=list(self.features.shape),
            )
        if requests < 0 or self.offsets[0] != 0 or self.offsets[-1] != rows or (np.diff(self.offsets) <= 0).any():
            raise DataError("offsets should rise from 0 to the number of rows, one request after another")

    def _take_arrays(self) -> None:
        """Let whatever is like an array be one of its type, or refuse it; what is one already costs nothing."""
        by_name = {"actions": self.actions, "context": self.context, "vocabularies": self.vocabularies}
        for name, value in by_name.items():
            taken(name, value, Mapping[str, Any])
        found = {
            "features": _typed("features", self.features, np.float32, dimensions=2, double=False),
            "offsets": _typed("offsets", self.offsets, np.int64),
            "feature_names": tuple(taken("feature_names", self.feature_names, Sequence[str])),
            "request_ids": _arrow("request_ids", self.request_ids),
            "item_ids": _arrow("item_ids", self.item_ids),
            "positions": _typed("positions", self.positions, np.int64),
            "relevance": _typed("relevance", self.relevance, np.float32),
            "weights": _typed("weights", self.weights, np.float32, double=False),
            "actions": {name: _typed(name, values, np.float32) for name, values in self.actions.items()},
            "context": {name: _arrow(name, values) for name, values in self.context.items()},
            "vocabularies": {name: _arrow(name, values) for name, values in self.vocabularies.items()},
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)
        if self.positions is not None and self.positions.min(initial=0) < 0:
            raise DataError("positions should not be negative", got=int(self.positions.min()), mend="count from 0 or 1")
        if self.weights is not None and not ((self.weights > 0) & (self.weights < np.inf)).all():
            got = f"{self.weights.min():g} to {self.weights.max():g}"
            raise DataError("weights should be finite and positive", got=got, mend="drop requests that do not count")

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
    def rows(self) -> int:
        return len(self.features)

    @property
    def lengths(self) -> np.ndarray:
        """Items of each request."""
        return np.diff(self.offsets)

    @property
    def request_of_row(self) -> np.ndarray:
        """The index of the request that each row belongs to."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def true_relevance(self) -> np.ndarray:
        """The true labels, which must be there."""
        if self.relevance is None:
            raise DataError("the log has no true labels", mend="name their column with --relevance (relevance=...)")
        return self.relevance

    def select(self, requests: np.ndarray | Iterable[int]) -> Log:
        """The given requests, by index or as a mask, in the given order, which may repeat."""
        chosen = as_numbers("requests", [*requests] if isinstance(requests, Iterator) else requests)
        chosen = np.flatnonzero(chosen) if chosen.dtype == bool else _typed("requests", chosen, np.int64)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= len(self)):
            raise DataError(f"requests are numbered 0 to {len(self) - 1}", got=f"{chosen.min()} to {chosen.max()}")
        lengths = self.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], lengths)
        ids = self.request_ids.take(pa.array(chosen))
        weights = None if self.weights is None else self.weights[chosen]
        context = {name: values.take(pa.array(chosen)) for name, values in self.context.items()}
        return self._rebuilt(rows, offsets, request_ids=ids, weights=weights, context=context)

    def without_features(self) -> Log:
        """The same rows with no features, where only the rest is looked at."""
        return replace(self, features=np.empty((self.rows, 0), np.float32), feature_names=(), vocabularies={})

    def check_scores(self, scores: Any) -> np.ndarray:
        """Scores as floats, one for each row."""
        array = np.asarray(scores)
        if array.shape != (self.rows,) or array.dtype.kind not in "biuf":
            got = f"shape {list(array.shape)} of {array.dtype}"
            raise DataError(f"there should be one score, a number, for each of {self.rows} rows", got=got)
        numbers = array.astype(np.float32 if array.dtype == np.float32 else np.float64)
        if np.isnan(numbers).any():
            raise DataError("scores should be numbers", got=f"{int(np.isnan(numbers).sum())} NaN")
        return numbers

    def regroup(self, rows: np.ndarray, offsets: np.ndarray) -> Log:
        """The same requests, each now made of other rows of its own: some dropped, or in another order."""
        return self._rebuilt(rows, offsets)

    def _rebuilt(self, rows: np.ndarray, offsets: np.ndarray, **of_requests: Any) -> Log:
        return replace(
            self,
            features=self.features[rows],
            offsets=offsets,
            positions=None if self.positions is None else self.positions[rows],
            actions={name: values[rows] for name, values in self.actions.items()},
            relevance=None if self.relevance is None else self.relevance[rows],
            item_ids=None if self.item_ids is None else self.item_ids.take(pa.array(rows)),
            **of_requests,
        )

    def to_table(self, first: int = 0, last: int | None = None, *, fixed_size: bool = False) -> pa.Table:
        """An Arrow table with one row per item, of requests `first` to `last`; `read_log` reads it back.

        Features are one list column, of fixed size if asked for, and their names ride in the schema's metadata.
        """
        last = len(self) if last is None else last
        start, stop = int(self.offsets[first]), int(self.offsets[last])
        requests = np.repeat(np.arange(first, last), self.lengths[first:last])
        columns: dict[str, Any] = {"request": self.request_ids.take(pa.array(requests))}
        if self.item_ids is not None:
            columns["item"] = self.item_ids.slice(start, stop - start)
        if self.positions is not None:
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
            matrix = (
                self.features[start:stop] if width == len(self.feature_names) else self.features[start:stop, numeric]
            )
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
    """Values as an array of a type; double precision stays where single would do, unless it may not, as does None."""
    if values is None and name not in ("features", "offsets"):
        return None
    array = as_numbers(name, values)
    whole = dtype is np.int64
    if array.ndim != dimensions or (whole and array.size and (array.dtype.kind not in "iu" or _beyond(array))):
        what = f"'{name}' should have {dimensions} dimensions" + (" of whole numbers" if whole else "")
        raise DataError(what, got=f"shape {list(array.shape)} of {array.dtype}")
    if array.dtype == dtype or (array.dtype == np.float64 and double and not whole):
        return array
    with np.errstate(over="ignore"):
        single = array.astype(dtype)
    if np.isinf(single).sum() > np.isinf(array).sum():
        raise DataError(f"'{name}' has values beyond 3.4e38, which do not fit float32", mend="clip or scale them")
    return single


def _beyond(array: np.ndarray) -> bool:
    return array.dtype == np.uint64 and bool(array.max() >= 2**63)


def _arrow(name: str, values: Any) -> Any:
    if isinstance(values, pa.Array) or (values is None and name != "request_ids"):
        return values
    try:
        return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        got = type(values).__name__
        raise DataError(f"'{name}' is no array of ids", got=got, mend="give plain values of one type") from error


@checked
def write_log(
    log: Log, path: str | Path, *, overwrite: bool = False, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a log as Parquet, one row per item, atomically; `metadata` goes into the file's schema."""
    check_parquet_name(path)
    if not len(log):
        raise DataError("there are no requests to write", where=path, mend="check what was left out of the log")
    if len(log.request_ids.unique()) < len(log):
        raise DataError(
            "requests with the same id would be read back as one", where=path, mend="give them ids of their own"
        )
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
            writer.is_open = False  # or the library closes what has failed again when it is collected, and complains


def check_parquet_name(path: str | Path) -> None:
    if Path(path).suffix.lower() not in (".parquet", ".pq"):
        raise OptionError("the output is a Parquet file", got=f"'{path}'", mend="end its name in .parquet")


def _small_list(column: pa.Field) -> pa.Field:
    return column.with_type(pa.list_(pa.float32())) if pa.types.is_large_list(column.type) else column


def _request_blocks(offsets: np.ndarray, max_rows: int) -> list[int]:
    """Bounds of runs of whole requests of at most `max_rows` rows (or one request, if it alone is longer)."""
    bounds = [0]
    while bounds[-1] < len(offsets) - 1:
        fits = int(np.searchsorted(offsets, offsets[bounds[-1]] + max_rows, side="right")) - 1
        bounds.append(max(fits, bounds[-1] + 1))
    return bounds
