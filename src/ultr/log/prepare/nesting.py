"""Convert rows that an engine has sorted by request and position to lists, and write them as Parquet files (shards).

Every decision about a whole request is made here, in the same way for all engines: its split, whether it is kept, its
weight, its label. Spark sends this code to its workers, which need only NumPy and Arrow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import md5
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ultr.log.cleaning import find_duplicates
from ultr.log.columns import combined, item_codes
from ultr.log.shards import SPLITS

SHARD_BYTES = 256 << 20  # raw bytes of a shard
GROUP_BYTES = 4 << 20  # raw bytes of a row group, which is the smallest unit that training reads
MAX_WAITING = 4  # tables of lists that may wait for the thread that writes them
HASH_RANGE = 1 << 32  # hashes are from 0 to below this number
ORDER = ("digest", "position")  # columns by which the engine sorts the rows
# Digits of a request's digest that decide its split and its sampling; they are not the first, which decide its place.
SPLIT_DIGITS, SAMPLE_DIGITS = slice(8, 16), slice(16, 24)


class BadRowsError(ValueError):
    """Bad values in rows; a plain exception, which a Spark worker can send to the main process."""


class Counts(NamedTuple):
    """Numbers of requests and rows; `rows` is without the rows that were merged, and without copies of other rows."""

    requests: int
    rows: int
    copies: int


@dataclass(frozen=True)
class Nesting:
    """The conversion of sorted rows to lists; the columns `action_0`, `category_0`, ... get the names given here."""

    features: tuple[str, ...]
    actions: tuple[str, ...]
    categorical: tuple[str, ...]
    of_rows: tuple[str, ...]  # item and relevance, if the source has them
    of_requests: tuple[str, ...]  # query, segment and randomised, if the source has them
    weighted: bool  # whether the source has weights
    label: Any  # ultr.Label, or None
    by_time: bool
    by_query: bool  # whether the hash of the query, not of the request, decides the split
    validation_from: float  # hash or time at which the validation split starts; lower ones are for training
    test_from: float
    keep_clickless: float
    min_items: int
    max_items: int | None
    on_duplicates: str = "keep"  # rows of a request with the same item or position: keep, error, first or sum

    @property
    def row_bytes(self) -> int:
        """The approximate size of a row in bytes, before compression."""
        return 4 * (len(self.features) + len(self.actions) + 2) + 16 * (len(self.categorical) + len(self.of_rows))

    def lists(self, rows: pa.Table) -> tuple[dict[str, pa.Table], Counts]:
        """Return split -> table of lists, and the numbers of requests and rows, which include dropped requests."""
        digests = _digests(rows["digest"])
        starts = np.concatenate([[0], np.flatnonzero((digests[1:] != digests[:-1]).any(axis=1)) + 1])
        positions = rows["position"].to_numpy()
        columns = self._row_columns(rows)
        order, copies = _order_of_ties(positions, starts, columns)
        if order is not None:
            columns = {name: _take(values, order[~copies]) for name, values in columns.items()}
            positions = positions[~copies]
        lengths = np.diff(np.append(starts, len(digests))) - np.add.reduceat(copies, starts, dtype=np.int64)
        firsts = np.cumsum(lengths) - lengths  # of `columns`
        if self.on_duplicates in ("first", "sum"):
            columns, firsts, lengths = self._merged({"position": positions, **columns}, lengths)
            positions = columns.pop("position")
        kept = lengths if self.max_items is None else np.minimum(lengths, self.max_items)
        if self.label is not None:
            columns["label"] = self.label({name: columns[name] for name in self.actions})
        feedback = [columns["label"]] if self.label is not None else [columns[name] for name in self.actions]
        clicked = any_positive(feedback, firsts, kept)
        letters = digests[starts].view(np.uint8)
        sampled = _as_numbers(letters[:, SAMPLE_DIGITS]) < self.keep_clickless * HASH_RANGE
        chosen = (lengths >= self.min_items) & (clicked | sampled)
        if self.by_time:
            keys = np.minimum.reduceat(rows["time"].to_numpy(), starts).astype(np.float64)
        else:
            keys = _as_numbers(letters[:, SPLIT_DIGITS]).astype(np.float64)
        single = self._request_columns(rows, starts, clicked)
        if self.by_query:  # requests of a query are on one side of the split
            keys = np.where(single["query"].is_valid(), _hashes(single["query"]), keys)
        split = (keys >= self.validation_from).astype(np.int8) + (keys >= self.test_from)
        columns = {"position": positions, **columns}
        lists = {}
        for code, name in enumerate(SPLITS):
            if len(requests := np.flatnonzero(chosen & (split == code))):
                lists[name] = _nested(single, columns, firsts[requests], kept[requests], requests)
        return lists, Counts(len(starts), len(positions), int(copies.sum()))

    def _merged(self, columns: dict[str, Any], lengths: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
        """Merge rows that repeat an item or a position of their request.

        Return the columns of the rows that stay, and the first row and the number of rows of each request.
        """
        request_of_row = np.repeat(np.arange(len(lengths)), lengths)
        keys = {"item": ("item", item_codes(columns["item"]))} if "item" in columns else {}
        keys["position"] = ("position", columns["position"])
        target, _ = find_duplicates(request_of_row, keys, self.on_duplicates, requests=None, where=None)
        kept = np.flatnonzero(target == np.arange(len(target)))
        merged = {name: _take(values, kept) for name, values in columns.items()}
        if self.on_duplicates == "sum":
            for name in self.actions:
                totals = np.bincount(target, columns[name], minlength=len(target))
                merged[name] = totals[kept].astype(np.float32)
        lengths = np.bincount(request_of_row[kept], minlength=len(lengths))
        return merged, np.cumsum(lengths) - lengths, lengths

    def _row_columns(self, rows: pa.Table) -> dict[str, Any]:
        """Return all columns of rows except the position: numbers as NumPy arrays, the others as Arrow arrays."""
        columns: dict[str, Any] = {
            name: rows[f"action_{i}"].to_numpy().astype(np.float32, copy=False) for i, name in enumerate(self.actions)
        }
        for name in self.of_rows:
            values = combined(rows[name])
            columns[name] = values if name == "item" else values.to_numpy(zero_copy_only=False).astype(np.float32)
        columns |= {name: combined(rows[f"category_{i}"]) for i, name in enumerate(self.categorical)}
        if self.features:
            columns["features"] = self._matrix(combined(rows["features"]))
        return columns

    def _matrix(self, lists: Any) -> np.ndarray:
        width = len(self.features)
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        if (lengths != width).any():
            got = int(lengths[lengths != width][0])
            raise BadRowsError(f"each item must have {width} features, got {got}; pad feature lists to one length")
        flat = pc.fill_null(lists.flatten(), float("nan")).to_numpy(zero_copy_only=False)
        matrix: np.ndarray = flat.astype(np.float32, copy=False).reshape(-1, width)
        with np.errstate(over="ignore", invalid="ignore"):
            if not np.isfinite(matrix.sum()):  # a sum is not finite if a value is not
                bad = np.isinf(matrix)
                if bad.any():
                    row, column = np.argwhere(bad)[0]
                    what = f"feature '{self.features[column]}' has values that are not finite"
                    raise BadRowsError(f"{what}, got {matrix[row, column]}; clip them, or filter with --where")
        return matrix

    def _request_columns(self, rows: pa.Table, starts: np.ndarray, clicked: np.ndarray) -> dict[str, Any]:
        first = pa.array(starts)
        columns: dict[str, Any] = {"request": combined(rows["request"].take(first))}
        if self.weighted or self.keep_clickless < 1:
            weights = rows["weight"].to_numpy()[starts] if self.weighted else np.ones(len(starts))
            inverse_rate = np.where(clicked, 1.0, 1 / self.keep_clickless)
            columns["weight"] = pa.array((weights * inverse_rate).astype(np.float32))
        return columns | {name: combined(rows[name].take(first)) for name in self.of_requests}


def _digests(column: pa.ChunkedArray) -> np.ndarray:
    """Return digests of 32 letters as an array [rows, 4] of 64-bit numbers, each with the bytes of eight letters."""
    texts = combined(column).cast(pa.large_string())
    _, offsets, letters = texts.buffers()
    first = int(np.frombuffer(offsets, np.int64)[texts.offset])
    return np.frombuffer(letters, np.uint8)[first : first + 32 * len(texts)].view(np.uint64).reshape(-1, 4)


def _as_numbers(letters: np.ndarray) -> np.ndarray:
    """Convert hexadecimal digits, as bytes [requests, 8], to numbers [requests]."""
    digits = np.where(letters >= ord("a"), letters - (ord("a") - 10), letters - ord("0")).astype(np.int64)
    return digits @ (16 ** np.arange(7, -1, -1, dtype=np.int64))


def _hashes(values: Any) -> np.ndarray:
    """Return a number for each value, below `HASH_RANGE`, from the digits of its digest that decide the split."""
    encoded = values.dictionary_encode()
    digests = [md5(str(value).encode(), usedforsecurity=False).hexdigest() for value in encoded.dictionary.to_pylist()]
    numbers = np.array([int(digest[SPLIT_DIGITS], 16) for digest in digests] or [0], np.float64)
    found: np.ndarray = numbers[encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)]
    return found


def any_positive(columns: list[np.ndarray], starts: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return, for each request, whether one of its first `kept` items has a value above 0 in one of the columns."""
    if not columns:
        return np.ones(len(starts), bool)
    positive = np.logical_or.reduce([values > 0 for values in columns])
    counts = np.concatenate([[0], np.cumsum(positive)])
    any_positive: np.ndarray = counts[starts + kept] > counts[starts]
    return any_positive


def _order_of_ties(
    positions: np.ndarray, starts: np.ndarray, columns: dict[str, Any]
) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the row order that sorts items with the same position by id and then by all other columns.

    The order of the source then has no effect on the lists. The order is None if no two items have the same position.
    Also return a mask of the rows, in this order, that equal the row before in all columns.
    """
    same, copies = np.diff(positions, prepend=-1) == 0, np.zeros(len(positions), bool)
    same[starts] = False
    if not same.any():
        return None, copies
    tied = np.flatnonzero(same | np.append(same[1:], False))
    keys: list[np.ndarray] = [np.cumsum(~same)[tied]]
    for name in sorted(columns, key=lambda name: name != "item"):
        values = columns[name]
        if isinstance(values, np.ndarray):  # compare the bits, which are the same on every engine
            bits = np.ascontiguousarray(values[tied]).view(np.int32).reshape(len(tied), -1)
            keys += list(bits.T)
        else:
            keys.append(_ranks(values.take(pa.array(tied))))
    order = np.arange(len(positions))
    sorted_ties = np.lexsort(keys[::-1])
    order[tied] = tied[sorted_ties]
    equal = np.ones(len(tied) - 1, bool)
    for key in keys:
        equal &= key[sorted_ties[1:]] == key[sorted_ties[:-1]]
    copies[tied[1:]] = equal
    return order, copies


def _ranks(values: Any) -> np.ndarray:
    coded = values.dictionary_encode()
    rank = np.empty(len(coded.dictionary) + 1, np.int64)
    rank[pc.sort_indices(coded.dictionary).to_numpy()] = np.arange(1, len(rank))
    rank[-1] = 0  # missing values come first
    ranks: np.ndarray = rank[pc.fill_null(coded.indices, -1).to_numpy(zero_copy_only=False)]
    return ranks


def _take(values: Any, rows: np.ndarray) -> Any:
    return values[rows] if isinstance(values, np.ndarray) else values.take(pa.array(rows))


def _nested(
    single: dict[str, Any], columns: dict[str, Any], starts: np.ndarray, lengths: np.ndarray, requests: np.ndarray
) -> pa.Table:
    """Return a table with one row per request, whose columns hold its first `lengths` rows as lists."""
    ends = np.cumsum(lengths)
    rows = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    table = {name: values.take(pa.array(requests)) for name, values in single.items()}
    for name, values in columns.items():
        chosen = _take(values, rows)
        if name == "features":
            width = chosen.shape[1]
            inner = pa.array(np.arange(len(rows) + 1, dtype=np.int32) * width)
            chosen = pa.ListArray.from_arrays(inner, pa.array(chosen.reshape(-1)))
        table[name] = pa.ListArray.from_arrays(offsets, pa.array(chosen) if isinstance(chosen, np.ndarray) else chosen)
    return pa.table(table)


def whole_requests(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield sorted rows in tables of whole requests: no request is divided between two tables."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        if not batch.num_rows:
            continue
        digests = batch.column("digest")
        cut = pc.index(digests, digests[-1]).as_py()  # where the last request begins
        if waiting and (cut > 0 or waiting[-1].column("digest")[-1] != digests[-1]):
            yield pa.Table.from_batches([*waiting, batch.slice(0, cut)])
            waiting = []
        elif cut:
            yield pa.Table.from_batches([batch.slice(0, cut)])
        waiting.append(batch.slice(cut))
    if waiting:
        yield pa.Table.from_batches(waiting)


class ShardWriter:
    """A writer of lists to `FOLDER/SPLIT/NAME-000.parquet` and so on; a file has another name until it is complete."""

    def __init__(self, folder: str | Path, name: str, *, attempt: int = 0) -> None:
        self.folder, self.name, self.attempt = Path(folder), name, attempt
        self._waiting: dict[str, list[pa.Table]] = {}
        self._open: dict[str, tuple[pq.ParquetWriter, Path, Path]] = {}
        self._written: dict[str, int] = {}  # bytes in the open file
        self._files: dict[str, int] = {}

    def write(self, lists: dict[str, pa.Table]) -> None:
        for split, table in lists.items():
            waiting = self._waiting.setdefault(split, [])
            waiting.append(table)
            if sum(part.nbytes for part in waiting) >= GROUP_BYTES:
                self._write_group(split)

    def _write_group(self, split: str) -> None:
        table = pa.concat_tables(self._waiting.pop(split))
        writer = self._open[split][0] if split in self._open else self._start(split, table.schema)
        pieces = max(1, round(table.nbytes / GROUP_BYTES))
        writer.write_table(table, row_group_size=-(-len(table) // pieces))
        self._written[split] += table.nbytes
        if self._written[split] >= SHARD_BYTES:
            self._finish(split)

    def _start(self, split: str, schema: pa.Schema) -> pq.ParquetWriter:
        number = self._files[split] = self._files.get(split, -1) + 1
        path = self.folder / split / f"{self.name}-{number:03}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{self.attempt}")
        texts = [f"{c.name}.list.element" for c in schema if c.type == pa.list_(pa.string())]
        writer = pq.ParquetWriter(
            partial, schema, compression="snappy", use_dictionary=texts or False, write_page_checksum=True
        )
        self._open[split], self._written[split] = (writer, partial, path), 0
        return writer

    def _finish(self, split: str) -> None:
        writer, partial, path = self._open[split]
        writer.close()
        del self._open[split]
        partial.replace(path)

    def close(self) -> None:
        for split in list(self._waiting):
            self._write_group(split)
        for split in list(self._open):
            self._finish(split)

    def abandon(self) -> None:
        """Close the open files after a failure; they keep their temporary names."""
        for writer, _, _ in self._open.values():
            with suppress(OSError, pa.ArrowException):
                writer.close()
            writer.is_open = False  # else Arrow closes a failed writer once more at garbage collection, and raises


def write_shards(
    batches: Iterable[pa.RecordBatch], nesting: Nesting, folder: str, name: str, *, attempt: int = 0
) -> Iterator[Counts]:
    """Write sorted rows as shards; yield the numbers of requests and rows in each table.

    A second thread writes while the next lists are made. This saves time because Arrow releases Python's global lock.
    """
    writer = ShardWriter(folder, name, attempt=attempt)
    writing: deque[Future[None]] = deque()
    try:
        with ThreadPoolExecutor(max_workers=1) as pool:
            for rows in whole_requests(batches):
                lists, counts = nesting.lists(rows)
                writing.append(pool.submit(writer.write, lists))
                if len(writing) > MAX_WAITING:
                    writing.popleft().result()
                yield counts
            for future in writing:
                future.result()
        writer.close()
    except BaseException:
        writer.abandon()
        raise
