"""Scoring files of any size: rows are read, scored and written some at a time, side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from ultr.arguments import checked
from ultr.errors import OptionError, OutputError
from ultr.files import atomic_path, refuse_existing
from ultr.log import Log
from ultr.log.batches import read_batches
from ultr.models import Model
from ultr.training import choose_device

AHEAD = 2  # batches that are read while one is scored
ROW_GROUP = 1 << 17  # rows of the output
RARELY_REPEAT = ("item", "score")  # looking for repeated values there costs more than it saves
Item = TypeVar("Item")


@checked
def score_file(
    model: Model,
    source: object,
    out: str | Path,
    *,
    request: str | None = None,
    features: Sequence[str] | str | None = None,
    overwrite: bool = False,
    device: str = "auto",
    on_progress: Callable[[int, int | None], None] = lambda _done, _rows: None,
) -> int:
    """Score the rows of whatever `read_log` reads, in their order, and write the keys of each and its score to a
    Parquet or CSV file; gives their number.

    Keys are the request, and where there are any the item, position, true relevance, query and mark of random order.
    Memory does not grow with the file. Where `features` are not named, columns that are called as those of the model
    are. `on_progress` is told how many rows of the source are done, and how many it has if it tells.
    """
    out = Path(out)
    if out.suffix.lower() not in WRITERS:
        raise OptionError("scores are written as Parquet or CSV", got=f"'{out}'", mend="end the name in .parquet")
    refuse_existing(out, overwrite=overwrite)
    choose_device(device)
    rows, batches = read_batches(
        source,
        feature_names=model.feature_names,
        categorical=tuple(model.vocabularies),
        request=request,
        features=features,
        missing=model.missing,
    )
    done = scores = 0
    with (
        atomic_path(out, overwrite=overwrite) as temporary,
        _ScoreWriter(temporary) as writer,
        closing(_read_ahead(batches)) as ahead,
    ):
        for log, rows_read in ahead:
            writer.write(_keys(log).append_column("score", pa.array(model.score(log, device=device))))
            done, scores = done + rows_read, scores + log.rows
            on_progress(done, rows)
    return scores


def _keys(log: Log) -> pa.Table:
    return replace(log.without_features(), actions={}, weights=None).to_table()


def _read_ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """The items of an iterator, taken from it by a thread some before they are asked for."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="ultr-read")
    try:
        reading = deque(pool.submit(next, items, None) for _ in range(AHEAD))
        while (item := reading.popleft().result()) is not None:
            reading.append(pool.submit(next, items, None))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


def _parquet_file(path: Path, schema: pa.Schema) -> Any:
    return pq.ParquetWriter(path, schema, use_dictionary=[n for n in schema.names if n not in RARELY_REPEAT])


WRITERS: dict[str, Callable[[Path, pa.Schema], Any]] = {
    ".parquet": _parquet_file,
    ".pq": _parquet_file,
    ".csv": pa.csv.CSVWriter,
}


class _ScoreWriter:
    """Writes tables with the same columns to a file, in a thread; one that is being written is waited for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ultr-write")
        self._file: Any = None
        self._held: list[pa.Table] = []
        self._writing: Future[None] | None = None

    def write(self, table: pa.Table) -> None:
        self._held.append(table)
        if sum(len(part) for part in self._held) >= ROW_GROUP:
            self._start()

    def _start(self) -> None:
        self._wait()
        self._writing = self._pool.submit(self._write, pa.concat_tables(self._held))
        self._held = []

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write(self, table: pa.Table) -> None:
        try:
            if self._file is None:
                self._file = WRITERS[self._path.suffix.lower()](self._path, table.schema)
            self._file.write_table(table)
        except pa.ArrowException as error:
            brief = " ".join(str(error).split())[:200]
            mend = "write Parquet: --out scores.parquet"
            raise OutputError(f"cannot be written ({brief})", where=self._path.name, mend=mend) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        try:
            if kind is None:
                if self._held:
                    self._start()
                self._wait()
        finally:
            self._pool.shutdown()
            if self._file is not None:
                file, self._file = self._file, None
                try:
                    file.close()
                finally:
                    if isinstance(file, pq.ParquetWriter):
                        file.is_open = False  # or it closes what has failed again when it is collected, and complains
