"""A log's rows some at a time, in the order they come: what needs no whole request can go through files of any size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq

from ultr.arguments import taken
from ultr.errors import DataError
from ultr.files import existing_file
from ultr.log.build import Missing, Piece, as_data_error, log_from_table, one_row_per_item
from ultr.log.readers import (
    as_table,
    csv_form,
    csv_ids,
    csv_settings,
    file_kind,
    shard_columns,
    shards_in,
    whole_numbers,
)
from ultr.log.schema import Columns, resolve_columns
from ultr.log.shards import SPLITS, Shards, is_lists
from ultr.log.svmlight import MAX_INDEX, has_no_names, svmlight_batches
from ultr.log.table import Log

NUMBERS = 1 << 22  # of a batch
CSV_BYTES = 1 << 20  # of text that is parsed at once
BUFFER_BYTES = 1 << 17  # of a column of Parquet: row groups may be larger than memory


class Batch(NamedTuple):
    """Some rows as a log, and how many rows of the source they are: fewer where those hold lists."""

    log: Log
    rows: int


class LogBatches(NamedTuple):
    """The rows of a source, some at a time."""

    rows: int | None  # of the source, where it tells beforehand
    batches: Iterator[Batch]


@dataclass(frozen=True)
class Wanted:
    """What is read: features by the caller's names or else by those of `feature_names` that are no categories."""

    feature_names: tuple[str, ...]
    categorical: tuple[str, ...]
    request: str | None
    features: Sequence[str] | str | None
    missing: Missing

    def columns(self, schema: pa.Schema, where: object) -> Columns:
        features, numeric = self.features, [n for n in self.feature_names if n not in self.categorical]
        names = {name for name in schema.names if name == name.strip()}  # as names that are given are stripped
        if features is None and numeric and names.issuperset(numeric):
            features = numeric
        options: dict[str, Any] = {"request": self.request, "features": features, "categorical": self.categorical}
        return replace(resolve_columns(schema, where=where, actions=(), **options), weight=None)

    @property
    def given(self) -> dict[str, Any]:
        """The columns that were named."""
        named = {"request": self.request, "features": self.features, "categorical": self.categorical or None}
        return {part: name for part, name in named.items() if name is not None}


def read_batches(
    source: object,
    *,
    feature_names: Sequence[str],
    categorical: Sequence[str] = (),
    request: str | None = None,
    features: Sequence[str] | str | None = None,
    missing: Missing = "refuse",
) -> LogBatches:
    """What `read_log` reads, some rows at a time and in their own order, with requests, items, positions and features.

    Each row is a request of its own, as the others of its request may be anywhere; those of prepared lists stay
    together. Columns that have the `feature_names` are the features, where none are named.
    """
    wanted = Wanted(tuple(feature_names), tuple(categorical), request, features, missing)
    where = source if isinstance(source, str | Path) else f"the {type(source).__name__}"
    rows, batches = _found(source, wanted, where)
    return LogBatches(rows, _alike(batches, where))


def _found(source: object, wanted: Wanted, where: object) -> LogBatches:
    if not isinstance(source, str | Path):
        table = as_table(source)
        return LogBatches(table.num_rows, _arrow(table.to_batches(), table.schema, wanted, where))
    path = Path(taken("source", source, str | Path))
    if is_lists(path) or (path.name in SPLITS and is_lists(path.parent)):
        shards = Shards(path) if is_lists(path) else Shards(path.parent, path.name)
        shards.check_names(wanted.given)
        return LogBatches(shards.rows, (Batch(log, log.rows) for log in map(shards.read, shards.groups)))
    if path.is_dir():
        return _parquet(shards_in(path), path, wanted)
    path = existing_file(path)
    kind = file_kind(path)
    if kind == "Parquet":
        return _parquet([path], path, wanted)
    if kind == "CSV":
        return LogBatches(None, _csv(path, wanted))
    if kind == "SVMlight":
        if wanted.given:
            raise has_no_names(path, *next(iter(wanted.given.items())))
        numbered = (int(n) for n in wanted.feature_names if n.isdecimal() and n.isascii())
        width = max((n for n in numbered if n <= MAX_INDEX), default=0)
        logs = svmlight_batches(path, width=width, numbers=NUMBERS)
        return LogBatches(None, (Batch(log, log.rows) for log in logs))
    with as_data_error(path, kind):
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
    records = (reader.get_batch(i) for i in range(reader.num_record_batches))
    return LogBatches(None, _arrow(records, reader.schema, wanted, path))


def _alike(batches: Iterator[Batch], where: object) -> Iterator[Batch]:
    """The batches, of which there must be one, and which must have the same features."""
    names = None
    for batch in batches:
        found = batch.log.feature_names
        if names not in (None, found):
            got = f"{len(names or ())} features and further down {len(found)}"
            what, mend = "lists of features should be equally long in every row", "pad them to one length"
            raise DataError(what, where=where, got=got, mend=mend)
        names = found
        yield batch
    if names is None:
        raise DataError("there are no rows", where=where, mend="check the filter or query that made it")


def _logs(tables: Iterable[pa.Table], columns: Columns, wanted: Wanted, where: object) -> Iterator[Batch]:
    rows = items = 0
    for table in tables:
        flat = one_row_per_item(table, columns, Piece(where, rows))
        if flat.num_rows:
            log = log_from_table(flat, columns, where=Piece(where, items), missing=wanted.missing, gather=False)
            yield Batch(log, table.num_rows)
        rows, items = rows + table.num_rows, items + flat.num_rows


def _arrow(records: Iterable[pa.RecordBatch], schema: pa.Schema, wanted: Wanted, where: object) -> Iterator[Batch]:
    columns = wanted.columns(schema, where)

    def tables() -> Iterator[pa.Table]:
        with as_data_error(where, "Arrow"):
            for record in records:
                table = pa.Table.from_batches([record]).select(columns.used)
                step = max(1, 4 * NUMBERS * table.num_rows // max(1, table.nbytes))
                yield from (table.slice(first, step) for first in range(0, table.num_rows, step))

    return _logs(tables(), columns, wanted, where)


def _parquet(paths: list[Path], where: Path, wanted: Wanted) -> LogBatches:
    schemas, columns = shard_columns(paths, lambda schema: wanted.columns(schema, paths[0]))
    used = [pa.schema([schema.field(name) for name in columns.used]) for schema in schemas]
    with as_data_error(where, "shards of one log"):
        common = pa.unify_schemas(used, promote_options="permissive").with_metadata(schemas[0].metadata)
        rows = sum(pq.read_metadata(path).num_rows for path in paths)
    pieces = (_logs(_shard(path, common), columns, wanted, path) for path in paths)
    return LogBatches(rows, chain.from_iterable(pieces))


def _shard(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """A Parquet file some rows at a time, with columns of the types that all files have in common."""
    with (
        as_data_error(path, "Parquet"),
        pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file,
    ):
        # One thread decodes as fast as several here, and leaves the others to whoever uses the rows.
        for record in file.iter_batches(_rows_of_batch(file.metadata, schema), columns=schema.names, use_threads=False):
            table = pa.Table.from_batches([record]).select(schema.names)
            for i, column in enumerate(schema):
                if table.schema.field(i).type != column.type:
                    table = table.set_column(i, column.name, table[i].cast(column.type))
            yield table.replace_schema_metadata(schema.metadata)


def _rows_of_batch(footer: Any, schema: pa.Schema) -> int:
    """As many rows as make a batch, by the row group whose rows hold most."""
    names = set(schema.names)  # of which any may have dots, as paths do
    paths = (footer.schema.column(i).path.split(".") for i in range(footer.num_columns))
    starts = [{".".join(path[:end]) for end in range(1, len(path) + 1)} for path in paths]
    leaves = [i for i, start in enumerate(starts) if start & names]
    groups = (footer.row_group(i) for i in range(footer.num_row_groups))
    most = max((sum(g.column(i).num_values for i in leaves) / g.num_rows for g in groups if g.num_rows), default=1)
    return max(1, int(NUMBERS / max(1, most)))


def _csv(path: Path, wanted: Wanted) -> Iterator[Batch]:
    """CSV or TSV, gzipped or not. Ids are whole numbers if all of them are, which takes a look at the file before."""
    compression, delimiter, names = csv_form(path)
    columns = wanted.columns(pa.schema([(name, pa.float64()) for name in names]), path)
    types = dict.fromkeys((*csv_ids(columns), *columns.categorical), pa.string())

    def records(include: Sequence[str]) -> Any:
        stream = pa.input_stream(str(path), compression=compression)
        settings = csv_settings(delimiter, names, types, include=include, block_bytes=CSV_BYTES)
        return pa.csv.open_csv(stream, **settings)

    whole = set(csv_ids(columns))
    with as_data_error(path, "CSV"):
        for record in records(list(whole)):
            whole = {name for name in whole if pa.types.is_integer(whole_numbers(record.column(name)).type)}
            if not whole:
                break
        for column in records(columns.used).schema:  # of the first block: what is whole or missing there need not be
            if pa.types.is_integer(column.type) or pa.types.is_null(column.type):
                types[column.name] = pa.float64()

    def tables() -> Iterator[pa.Table]:
        with as_data_error(path, "CSV"):
            for texts in _gathered(records(columns.used), rows=max(1, NUMBERS // len(columns.used))):
                ids = {name: texts[name].cast(pa.int64()) for name in whole}
                yield pa.table({name: ids.get(name, texts[name]) for name in columns.used})

    return _logs(tables(), columns, wanted, path)


def _gathered(records: Iterable[pa.RecordBatch], *, rows: int) -> Iterator[pa.Table]:
    """Small batches put together to some of so many rows or little more."""
    held: list[pa.RecordBatch] = []
    for record in records:
        held.append(record)
        if sum(len(part) for part in held) >= rows:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)
