"""Scoring of files of any size: rows are read, scored and written in batches, in parallel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from ultr.errors import OptionError, OutputError
from ultr.log import Log
from ultr.log.readers import read_batches
from ultr.log.table import as_shown
from ultr.rankers.model import Model
from ultr.utils.arguments import checked
from ultr.utils.calibration import of_model
from ultr.utils.distributed import choose_device
from ultr.utils.files import atomic_path, check_output

AHEAD = 2  # batches that are read in advance while one is scored
ROW_GROUP = 1 << 17  # rows of a row group in the output
EXPECTED = "expected"  # the column of expected feedback
UNIQUE_COLUMNS = ("score", EXPECTED)  # and items: few values repeat, so a dictionary costs more than it saves
Item = TypeVar("Item")


@checked
def score_file(
    model: Model,
    source: object,
    out: str | Path,
    *,
    request: str | None = None,
    position: str | None = None,
    row: str | None = None,
    column: str | None = None,
    item: str | None = None,
    features: Sequence[str] | str | None = None,
    where: Sequence[str] = (),
    calibrated: bool = False,
    at_position: str | None = None,
    overwrite: bool = False,
    device: str = "auto",
    on_progress: Callable[[int, int | None], None] = lambda _done, _rows: None,
    on_start: Callable[[Log, np.ndarray], None] = lambda _first, _scores: None,
) -> int:
    """Score the rows of any source that `read_log` reads, and write their keys and scores to a Parquet or CSV file.

    The output has the rows of the source, in the same order. Keys are the request and, if the source has them, the
    item, position, true relevance, query and mark of random order, under their names in the source. Columns that are
    not named are those of training. If scores are `calibrated`, a column `expected` has the expected feedback at the
    first position, or `at_position`.
    Without `features`, the columns with the names of the model's features are used. Memory does not grow with the file.
    `where` has conditions on rows, such as `country = de`; other rows get no score.

    `on_start` gets the first rows and their scores, `on_progress` the number of rows done, and the number of all rows
    if it is known. Return the number of scores.
    """
    if Path(out).suffix.lower() not in WRITERS:
        raise OptionError(
            "scores are written as Parquet or CSV", got=f"'{out}'", hint="use a name that ends in .parquet"
        )
    check_output(out, overwrite=overwrite)
    choose_device(device)
    if calibrated:
        of_model(model.calibration, "this model").factor(at_position)
    elif at_position is not None:
        raise OptionError("only calibrated scores depend on a position", hint="pass --calibrated too")
    rows, batches = read_batches(
        source,
        feature_names=model.feature_names,
        categorical=tuple(model.vocabularies),
        columns=model.columns,
        missing=model.missing,
        request=request,
        position=position,
        row=row,
        column=column,
        item=item,
        features=features,
        where=where,
    )
    done = scores = 0
    with (
        atomic_path(out, overwrite=overwrite) as temporary,
        _ScoreWriter(temporary) as writer,
        closing(_read_ahead(batches)) as ahead,
    ):
        for log, rows_read in ahead:
            found = model.score(log, device=device)
            if not done:
                on_start(log, found)
            keys = _keys(log)
            table = keys.rename_columns(output_names(log.columns, keys.column_names)).append_column(
                "score", pa.array(found)
            )
            if calibrated:
                table = table.append_column(EXPECTED, pa.array(model.expected(found, log, at_position)))
            writer.unique = {*UNIQUE_COLUMNS, str(log.columns.get("item", "item"))}
            writer.write(table)
            done, scores = done + rows_read, scores + log.rows
            on_progress(done, rows)
    return scores


def first_ranking(log: Log, scores: np.ndarray, most: int = 5) -> str | None:
    """Return the items of the first request in the order of their scores, in words; None if there is nothing to tell.

    Items without ids are named by the position at which they were shown.
    """
    keys = _keys(log)
    if "row" in keys.column_names:
        slots = pa.array([str(as_shown(each)) for each in log.shown_positions("a ranking").tolist()])
        keys = keys.append_column("position", slots)
    name = next((each for each in ("item", "position") if each in keys.column_names), None)
    of_first = np.flatnonzero(np.asarray(pc.equal(keys["request"], keys["request"][0])))
    if name is None or len(of_first) < 2:
        return None
    best = of_first[np.argsort(-scores[of_first], kind="stable")[:most]]
    items = ", ".join(str(value) for value in keys[name].take(best).to_pylist())
    more = ", ..." if len(of_first) > most else ""
    kind = "items" if name == "item" else "what was at positions"
    return f"request {keys['request'][0].as_py()}, best first: {kind} {items}{more}"


def output_names(columns: Mapping[str, Any], roles: Sequence[str]) -> list[str]:
    """Return the user's names of the columns with these roles; a role whose name would occur twice keeps its own."""
    names = [name if isinstance(name := columns.get(role), str) and "," not in name else role for role in roles]
    taken = [*names, *roles, "score", EXPECTED]
    return [name if name == role or taken.count(name) == 1 else role for name, role in zip(names, roles, strict=True)]


def _keys(log: Log) -> pa.Table:
    return replace(log.without_features(), actions={}, weights=None).to_table()


def _read_ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield the items of an iterator; a thread reads some of them in advance."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="ultr-read")
    try:
        reading = deque(pool.submit(next, items, None) for _ in range(AHEAD))
        while (item := reading.popleft().result()) is not None:
            reading.append(pool.submit(next, items, None))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


def _parquet_file(path: Path, schema: pa.Schema, unique: Collection[str]) -> Any:
    return pq.ParquetWriter(path, schema, use_dictionary=[n for n in schema.names if n not in unique])


WRITERS: dict[str, Callable[[Path, pa.Schema, Collection[str]], Any]] = {
    ".parquet": _parquet_file,
    ".pq": _parquet_file,
    ".csv": lambda path, schema, _: pa.csv.CSVWriter(path, schema),
}


class _ScoreWriter:
    """A writer of tables with the same columns to one file, in a thread; at most one table is being written."""

    def __init__(self, path: Path) -> None:
        self._path, self.unique = path, set[str]()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ultr-write")
        self._file: Any = None
        self._waiting: list[pa.Table] = []
        self._writing: Future[None] | None = None

    def write(self, table: pa.Table) -> None:
        self._waiting.append(table)
        if sum(len(part) for part in self._waiting) >= ROW_GROUP:
            self._start()

    def _start(self) -> None:
        self._wait()
        self._writing = self._pool.submit(self._write, pa.concat_tables(self._waiting))
        self._waiting = []

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write(self, table: pa.Table) -> None:
        try:
            if self._file is None:
                self._file = WRITERS[self._path.suffix.lower()](self._path, table.schema, self.unique)
            self._file.write_table(table)
        except pa.ArrowException as error:
            brief = " ".join(str(error).split())[:200]
            hint = "write Parquet: --out scores.parquet"
            raise OutputError(f"cannot be written ({brief})", where=self._path.name, hint=hint) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        try:
            if kind is None:
                if self._waiting:
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
                        file.is_open = (
                            False  # otherwise a writer that failed is closed again, with an error, when it is collected
                        )
