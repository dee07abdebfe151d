"""Read a log in batches of rows, in the order of the source, so that files larger than memory can be scored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq

from ultr.errors import DataError
from ultr.log.build import Reading, log_from_table, one_row_per_item
from ultr.log.jsonlines import json_blocks, json_schema, streaming_schema
from ultr.log.readers import (
    as_table,
    check_schemas,
    csv_form,
    csv_ids,
    csv_settings,
    file_kind,
    read_schemas,
    shards_in,
    whole_numbers,
)
from ultr.log.schema import Columns, resolve_columns
from ultr.log.shards import SPLITS, Shards, is_lists
from ultr.log.svmlight import MAX_INDEX, reject_names, svmlight_batches
from ultr.log.table import Log
from ultr.log.values import Missing, Piece, as_data_error
from ultr.utils.arguments import check_value
from ultr.utils.files import existing_file

NUMBERS = 1 << 22  # values in a batch, about
CSV_BYTES = 1 << 20  # bytes of text that are parsed at a time
BUFFER_BYTES = 1 << 17  # read buffer of a Parquet column, because a whole row group may not fit in memory


class Batch(NamedTuple):
    """Some rows of a source as a log."""

    log: Log
    rows: int  # rows of the source; fewer than `log.rows` if a source row holds a list of items


class LogBatches(NamedTuple):
    """All rows of a source, as an iterator of batches."""

    rows: int | None  # number of rows in the source, or None if it is not known before reading
    batches: Iterator[Batch]


@dataclass(frozen=True)
class Selection:
    """The columns to read: those that the caller names, by role, and for other roles those of training.

    If the caller does not name `features`, they are the numeric columns in `feature_names`.
    """

    feature_names: tuple[str, ...]
    categorical: tuple[str, ...]
    named: Mapping[str, Any]
    trained: Mapping[str, Any]
    missing: Missing

    def columns(self, schema: pa.Schema, where: object) -> Columns:
        trained = {role: name for role, name in self.trained.items() if role not in ("actions", "weight")}
        numeric = [n for n in self.feature_names if n not in self.categorical]
        if numeric and set(schema.names).issuperset(numeric):
            trained["features"] = numeric
        options: dict[str, Any] = {"categorical": self.categorical, **self.named, "actions": ()}
        return replace(resolve_columns(schema, where=where, trained=trained, **options), weight=None)


def read_batches(
    source: object,
    *,
    feature_names: Sequence[str],
    categorical: Sequence[str] = (),
    columns: Mapping[str, Any] | None = None,
    missing: Missing = "keep",
    **named: Any,
) -> LogBatches:
    """Read requests, items, positions and features, in batches, from any source that `read_log` can read.

    Each row becomes a request of its own, because the other rows of its request may be anywhere in the source. Only
    lists that `ultr prepare` wrote stay whole. `named` maps roles to columns, as for `read_log`. If it has no features,
    they are the columns in `feature_names`. Roles that are not named have the column of training (`columns`).
    """
    given = {role: name for role, name in named.items() if name is not None}
    selection = Selection(tuple(feature_names), tuple(categorical), given, columns or {}, missing)
    where = source if isinstance(source, str | Path) else f"the {type(source).__name__}"
    rows, batches = _read(source, selection, where)
    return LogBatches(rows, _with_same_features(batches, where))


def _read(source: object, selection: Selection, where: object) -> LogBatches:
    if not isinstance(source, str | Path):
        table = as_table(source)
        return LogBatches(table.num_rows, _arrow(table.to_batches(), table.schema, selection, where))
    path = Path(check_value("source", source, str | Path))
    if is_lists(path) or (path.name in SPLITS and is_lists(path.parent)):
        shards = Shards(path) if is_lists(path) else Shards(path.parent, path.name)
        shards.check_names({**selection.named, "categorical": selection.categorical})
        return LogBatches(shards.rows, (Batch(log, log.rows) for log in map(shards.read, shards.groups)))
    if path.is_dir():
        return _parquet(shards_in(path), path, selection)
    path = existing_file(path)
    kind = file_kind(path)
    if kind == "Parquet":
        return _parquet([path], path, selection)
    if kind == "CSV":
        return LogBatches(None, _csv(path, selection))
    if kind == "JSON Lines":
        return LogBatches(None, _json(path, selection))
    if kind == "SVMlight":
        reject_names(path, {**selection.named, "categorical": selection.categorical or None})
        numbered = (int(n) for n in selection.feature_names if n.isdecimal() and n.isascii())
        width = max((n for n in numbered if n <= MAX_INDEX), default=0)
        logs = svmlight_batches(path, width=width, numbers=NUMBERS)
        return LogBatches(None, (Batch(log, log.rows) for log in logs))
    with as_data_error(path, kind):
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
    records = (reader.get_batch(i) for i in range(reader.num_record_batches))
    return LogBatches(None, _arrow(records, reader.schema, selection, path))


def _with_same_features(batches: Iterator[Batch], where: object) -> Iterator[Batch]:
    """Yield the batches; raise DataError if there are none, or if they have different features."""
    expected = None
    for batch in batches:
        names = batch.log.feature_names
        if expected not in (None, names):
            got = f"{len(expected or ())} features and later {len(names)}"
            what, hint = "lists of features must have the same length in every row", "pad them to one length"
            raise DataError(what, where=where, got=got, hint=hint)
        expected = names
        yield batch
    if expected is None:
        raise DataError("there are no rows", where=where, hint="check the filter or query that made the data")


def _logs(tables: Iterable[pa.Table], columns: Columns, selection: Selection, where: object) -> Iterator[Batch]:
    rows = items = 0
    for table in tables:
        flat = one_row_per_item(table, columns, Piece(where, rows))
        if flat.num_rows:
            reading = Reading(missing=selection.missing)
            log = log_from_table(flat, columns, where=Piece(where, items), reading=reading, gather=False)
            yield Batch(log, table.num_rows)
        rows, items = rows + table.num_rows, items + flat.num_rows


def _arrow(
    records: Iterable[pa.RecordBatch], schema: pa.Schema, selection: Selection, where: object
) -> Iterator[Batch]:
    columns = selection.columns(schema, where)

    def tables() -> Iterator[pa.Table]:
        with as_data_error(where, "Arrow"):
            for record in records:
                table = pa.Table.from_batches([record]).select(columns.used)
                step = max(1, 4 * NUMBERS * table.num_rows // max(1, table.nbytes))
                yield from (table.slice(first, step) for first in range(0, table.num_rows, step))

    return _logs(tables(), columns, selection, where)


def _parquet(paths: list[Path], where: Path, selection: Selection) -> LogBatches:
    schemas = read_schemas(paths)
    columns = selection.columns(schemas[0], paths[0])
    check_schemas(paths, schemas, columns.used)
    used = [pa.schema([schema.field(name) for name in columns.used]) for schema in schemas]
    with as_data_error(where, "shards of one log"):
        common = pa.unify_schemas(used, promote_options="permissive").with_metadata(schemas[0].metadata)
        rows = sum(pq.read_metadata(path).num_rows for path in paths)
    pieces = (_logs(_shard(path, common), columns, selection, path) for path in paths)
    return LogBatches(rows, chain.from_iterable(pieces))


def _shard(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """Read a Parquet file in batches of rows, and cast its columns to the types of the common schema."""
    with (
        as_data_error(path, "Parquet"),
        pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file,
    ):
        # One thread decodes as fast as several here, and leaves the other cores to the caller.
        for record in file.iter_batches(_rows_of_batch(file.metadata, schema), columns=schema.names, use_threads=False):
            table = pa.Table.from_batches([record]).select(schema.names)
            for i, column in enumerate(schema):
                if table.schema.field(i).type != column.type:
                    table = table.set_column(i, column.name, table[i].cast(column.type))
            yield table.replace_schema_metadata(schema.metadata)


def _rows_of_batch(footer: Any, schema: pa.Schema) -> int:
    """Return the number of rows that have about `NUMBERS` values, by the row group with the most values per row."""
    names = set(schema.names)  # a column name may contain dots, which also separate the parts of a Parquet path
    paths = (footer.schema.column(i).path.split(".") for i in range(footer.num_columns))
    starts = [{".".join(path[:end]) for end in range(1, len(path) + 1)} for path in paths]
    leaves = [i for i, start in enumerate(starts) if start & names]
    groups = (footer.row_group(i) for i in range(footer.num_row_groups))
    most = max((sum(g.column(i).num_values for i in leaves) / g.num_rows for g in groups if g.num_rows), default=1)
    return max(1, int(NUMBERS / max(1, most)))


def _csv(path: Path, selection: Selection) -> Iterator[Batch]:
    """Read CSV or TSV, gzipped or not; a first pass checks whether all ids of a column are whole numbers."""
    compression, delimiter, names = csv_form(path)
    columns = selection.columns(pa.schema([(name, pa.float64()) for name in names]), path)
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
        for column in records(columns.used).schema:  # types of the first block; later ones may have fractions
            if pa.types.is_integer(column.type) or pa.types.is_null(column.type):
                types[column.name] = pa.float64()

    def tables() -> Iterator[pa.Table]:
        with as_data_error(path, "CSV"):
            for texts in _gathered(records(columns.used), rows=max(1, NUMBERS // len(columns.used))):
                ids = {name: texts[name].cast(pa.int64()) for name in whole}
                yield pa.table({name: ids.get(name, texts[name]) for name in columns.used})

    return _logs(tables(), columns, selection, path)


def _json(path: Path, selection: Selection) -> Iterator[Batch]:
    """Read JSON Lines, gzipped or not; the columns and the types of ids are those of the first block."""
    schema = json_schema(path)
    columns = selection.columns(schema, path)
    used = pa.schema([schema.field(name) for name in columns.used])
    blocks = json_blocks(path, streaming_schema(used, {*csv_ids(columns), *columns.categorical}))
    step = max(1, NUMBERS // max(1, len(columns.used)))
    tables = (table.slice(first, step) for table in blocks for first in range(0, table.num_rows, step))
    return _logs(tables, columns, selection, path)


def _gathered(records: Iterable[pa.RecordBatch], *, rows: int) -> Iterator[pa.Table]:
    """Join small batches into tables of at least `rows` rows; the last may have fewer."""
    parts: list[pa.RecordBatch] = []
    for record in records:
        parts.append(record)
        if sum(len(part) for part in parts) >= rows:
            yield pa.Table.from_batches(parts)
            parts = []
    if parts:
        yield pa.Table.from_batches(parts)
