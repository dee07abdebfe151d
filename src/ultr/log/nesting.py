"""Rows that stand in order of request and position become lists, and shards of them, whatever engine sorted them.

Every decision about a whole request is made here, once for all engines: its split, whether it is kept, what it weighs,
its label. Spark sends this code to its workers, which need nothing but NumPy and Arrow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ultr.log.shards import SPLITS

SHARD_BYTES = 256 << 20  # of raw values, as are the bytes of a row group
GROUP_BYTES = 4 << 20  # the least that training reads at once
MOST_WAITING = 4  # pieces to be written
HASH_RANGE = 1 << 32
ORDER = ("digest", "position")  # rows come in this order
# Of the request's digest, eight hexadecimal digits each: the order comes from the first, the split and the sample from
SPLIT_DIGITS, SAMPLE_DIGITS = slice(8, 16), slice(16, 24)


class BadRowsError(ValueError):
    """Values that lists cannot have; a plain exception, as it may have to travel from a worker."""


@dataclass(frozen=True)
class Nesting:
    """What becomes of sorted rows. Actions and categories come as `action_0`, `category_0`, ... and get their names."""

    features: tuple[str, ...]
    actions: tuple[str, ...]
    categorical: tuple[str, ...]
    of_rows: tuple[str, ...]  # of item, relevance: those that are there
    of_requests: tuple[str, ...]  # of query, segment, randomised
    weighted: bool  # the source has weights
    label: Any  # ultr.Label, or None
    by_time: bool
    validation_from: float  # of the hash or the time; what is below is for training
    test_from: float
    keep_clickless: float
    min_items: int
    max_items: int | None

    @property
    def row_bytes(self) -> int:
        """Raw bytes of a row, about."""
        return 4 * (len(self.features) + len(self.actions) + 2) + 16 * (len(self.categorical) + len(self.of_rows))

    def lists(self, rows: pa.Table) -> tuple[dict[str, pa.Table], int]:
        """The lists of whole requests by split, and how many requests there were, kept or not.

        Labels are those that training would compute: the same code does.
        """
        digests = _digests(rows["digest"])
        starts = np.concatenate([[0], np.flatnonzero((digests[1:] != digests[:-1]).any(axis=1)) + 1])
        positions = rows["position"].to_numpy()
        columns = self._row_columns(rows)
        order = _settled_ties(positions, starts, columns)
        if order is not None:
            columns = {name: _taken(values, order) for name, values in columns.items()}
        lengths = np.diff(np.append(starts, len(digests)))
        kept = lengths if self.max_items is None else np.minimum(lengths, self.max_items)
        if self.label is not None:
            columns["label"] = self.label({name: columns[name] for name in self.actions})
        feedback = [columns["label"]] if self.label is not None else [columns[name] for name in self.actions]
        clicked = _any_positive(feedback, starts, kept)
        letters = digests[starts].view(np.uint8)
        sampled = _as_numbers(letters[:, SAMPLE_DIGITS]) < self.keep_clickless * HASH_RANGE
        chosen = (lengths >= self.min_items) & (clicked | sampled)
        if self.by_time:
            keys = np.minimum.reduceat(rows["time"].to_numpy(), starts).astype(np.float64)
        else:
            keys = _as_numbers(letters[:, SPLIT_DIGITS]).astype(np.float64)
        split = (keys >= self.validation_from).astype(np.int8) + (keys >= self.test_from)
        single = self._request_columns(rows, starts, clicked)
        columns = {"position": positions, **columns}
        found = ((name, np.flatnonzero(chosen & (split == code))) for code, name in enumerate(SPLITS))
        return {name: _nested(single, columns, starts[of], kept[of], of) for name, of in found if len(of)}, len(starts)

    def _row_columns(self, rows: pa.Table) -> dict[str, Any]:
        """What each row has, but its position: numbers as NumPy arrays, the rest as Arrow's."""
        columns: dict[str, Any] = {
            name: rows[f"action_{i}"].to_numpy().astype(np.float32, copy=False) for i, name in enumerate(self.actions)
        }
        for name in self.of_rows:
            columns[name] = _one(rows[name]) if name == "item" else rows[name].to_numpy().astype(np.float32, copy=False)
        columns |= {name: _one(rows[f"category_{i}"]) for i, name in enumerate(self.categorical)}
        if self.features:
            columns["features"] = self._matrix(_one(rows["features"]))
        return columns

    def _matrix(self, lists: Any) -> np.ndarray:
        width = len(self.features)
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        if (lengths != width).any():
            got = int(lengths[lengths != width][0])
            raise BadRowsError(f"each item should have {width} features, got {got}; pad lists of them to one length")
        flat = pc.fill_null(lists.flatten(), float("nan")).to_numpy(zero_copy_only=False)
        matrix: np.ndarray = flat.astype(np.float32, copy=False).reshape(-1, width)
        with np.errstate(over="ignore", invalid="ignore"):
            if not np.isfinite(matrix.sum()):  # any NaN or infinity shows in the sum
                bad = ~np.isfinite(matrix)
                if bad.any():
                    row, column = np.argwhere(bad)[0]
                    what = f"feature '{self.features[column]}' has values that are missing or not finite"
                    raise BadRowsError(f"{what}, got {matrix[row, column]}; fill or clip them, or filter with --where")
        return matrix

    def _request_columns(self, rows: pa.Table, starts: np.ndarray, clicked: np.ndarray) -> dict[str, Any]:
        first = pa.array(starts)
        columns: dict[str, Any] = {"request": _one(rows["request"].take(first))}
        if self.weighted or self.keep_clickless < 1:
            weights = rows["weight"].to_numpy()[starts] if self.weighted else np.ones(len(starts))
            stands_for = np.where(clicked, 1.0, 1 / self.keep_clickless)
            columns["weight"] = pa.array((weights * stands_for).astype(np.float32))
        return columns | {name: _one(rows[name].take(first)) for name in self.of_requests}


def _one(column: pa.ChunkedArray) -> Any:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _digests(column: pa.ChunkedArray) -> np.ndarray:
    """Digests of 32 letters as [rows, 4] numbers of eight."""
    texts = _one(column).cast(pa.large_string())
    _, offsets, letters = texts.buffers()
    first = int(np.frombuffer(offsets, np.int64)[texts.offset])
    return np.frombuffer(letters, np.uint8)[first : first + 32 * len(texts)].view(np.uint64).reshape(-1, 4)


def _as_numbers(letters: np.ndarray) -> np.ndarray:
    """Hexadecimal letters [requests, 8] as numbers."""
    digits = np.where(letters >= ord("a"), letters - (ord("a") - 10), letters - ord("0")).astype(np.int64)
    return digits @ (16 ** np.arange(7, -1, -1, dtype=np.int64))


def _any_positive(columns: list[np.ndarray], starts: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Whether any of the items kept of each request had feedback."""
    if not columns:
        return np.ones(len(starts), bool)
    positive = np.logical_or.reduce([values > 0 for values in columns])
    counts = np.concatenate([[0], np.cumsum(positive)])
    found: np.ndarray = counts[starts + kept] > counts[starts]
    return found


def _settled_ties(positions: np.ndarray, starts: np.ndarray, columns: dict[str, Any]) -> np.ndarray | None:
    """Order items that share a position by item and then by all they have, so that no order of the source shows."""
    same = np.diff(positions, prepend=-1) == 0
    same[starts] = False
    if not same.any():
        return None
    tied = np.flatnonzero(same | np.append(same[1:], False))
    keys: list[np.ndarray] = [np.cumsum(~same)[tied]]
    for name in sorted(columns, key=lambda name: name != "item"):
        values = columns[name]
        if isinstance(values, np.ndarray):  # by their bits, which are the same on every engine
            bits = np.ascontiguousarray(values[tied]).view(np.int32).reshape(len(tied), -1)
            keys += list(bits.T)
        else:
            keys.append(_ranks(values.take(pa.array(tied))))
    order = np.arange(len(positions))
    order[tied] = tied[np.lexsort(keys[::-1])]
    return order


def _ranks(values: Any) -> np.ndarray:
    coded = values.dictionary_encode()
    rank = np.empty(len(coded.dictionary) + 1, np.int64)
    rank[pc.sort_indices(coded.dictionary).to_numpy()] = np.arange(1, len(rank))
    rank[-1] = 0  # what is missing comes first
    ranks: np.ndarray = rank[pc.fill_null(coded.indices, -1).to_numpy(zero_copy_only=False)]
    return ranks


def _taken(values: Any, rows: np.ndarray) -> Any:
    return values[rows] if isinstance(values, np.ndarray) else values.take(pa.array(rows))


def _nested(
    single: dict[str, Any], columns: dict[str, Any], starts: np.ndarray, lengths: np.ndarray, requests: np.ndarray
) -> pa.Table:
    """The given requests, `lengths` rows of each from its start on."""
    ends = np.cumsum(lengths)
    rows = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    table = {name: values.take(pa.array(requests)) for name, values in single.items()}
    for name, values in columns.items():
        chosen = _taken(values, rows)
        if name == "features":
            width = chosen.shape[1]
            inner = pa.array(np.arange(len(rows) + 1, dtype=np.int32) * width)
            chosen = pa.ListArray.from_arrays(inner, pa.array(chosen.reshape(-1)))
        table[name] = pa.ListArray.from_arrays(offsets, pa.array(chosen) if isinstance(chosen, np.ndarray) else chosen)
    return pa.table(table)


def whole_requests(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Sorted rows again, in pieces that end where a request does."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        if not batch.num_rows:
            continue
        digests = batch.column("digest")
        cut = pc.index(digests, digests[-1]).as_py()  # where the last request begins
        if held and (cut > 0 or held[-1].column("digest")[-1] != digests[-1]):
            yield pa.Table.from_batches([*held, batch.slice(0, cut)])
            held = []
        elif cut:
            yield pa.Table.from_batches([batch.slice(0, cut)])
        held.append(batch.slice(cut))
    if held:
        yield pa.Table.from_batches(held)


class ShardWriter:
    """Writes lists to `FOLDER/SPLIT/NAME-000.parquet` and so on; a file has its name when it is complete."""

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
        """Let go of the files that are open, as after a failure."""
        for writer, _, _ in self._open.values():
            with suppress(OSError, pa.ArrowException):
                writer.close()
            writer.is_open = False  # or the library tries again when it is collected, and complains


def write_shards(
    batches: Iterable[pa.RecordBatch], nesting: Nesting, folder: str, name: str, *, attempt: int = 0
) -> Iterator[tuple[int, int]]:
    """Write sorted rows as shards; gives the requests and rows of each piece once it is nested.

    A thread writes while the next piece is nested: encoding takes most of the time, and Arrow does it without Python.
    """
    writer = ShardWriter(folder, name, attempt=attempt)
    writing: deque[Future[None]] = deque()
    try:
        with ThreadPoolExecutor(max_workers=1) as pool:
            for rows in whole_requests(batches):
                lists, requests = nesting.lists(rows)
                writing.append(pool.submit(writer.write, lists))
                if len(writing) > MOST_WAITING:
                    writing.popleft().result()
                yield requests, len(rows)
            for future in writing:
                future.result()
        writer.close()
    except BaseException:
        writer.abandon()
        raise
