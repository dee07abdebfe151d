"""Read a log in batches of rows, in the order of the source, so that files larger than memory can be scored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv

from ultr.errors import DataError
from ultr.log.build import Reading, log_from_table, one_row_per_item
from ultr.log.conditions import filter_rows
from ultr.log.drift import all_columns, as_common, common_schema
from ultr.log.jsonlines import json_blocks, streaming_schema
from ultr.log.readers import (
    as_table,
    csv_form,
    csv_ids,
    csv_settings,
    file_schemas,
    is_files,
    one_file,
    prepared,
    reject_conditions,
    whole_numbers,
)
from ultr.log.schema import CONTEXT, Columns, resolve_columns
from ultr.log.sources import Source, SourceFile, open_source
from ultr.log.svmlight import MAX_INDEX, reject_names, svmlight_batches
from ultr.log.table import Log
from ultr.log.values import Missing, Piece, as_data_error

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
    """The columns to read for scores: those that the caller names, by role, and for other roles those of training.

    If the caller does not name `features`, they are the numeric columns in `feature_names`. Scores do not depend on the
    query or segment of a request, so the source may lack these without a note.
    """

    feature_names: tuple[str, ...]
    categorical: tuple[str, ...]
    named: Mapping[str, Any]
    trained: Mapping[str, Any]
    reading: Reading

    def columns(self, schema: pa.Schema, where: object) -> Columns:
        trained = {role: name for role, name in self.trained.items() if role not in ("actions", "weight")}
        numeric = [n for n in self.feature_names if n not in self.categorical]
        if numeric and set(schema.names).issuperset(numeric):
            trained["features"] = numeric
        options: dict[str, Any] = {"categorical": self.categorical, **self.named, "actions": ()}
        found = resolve_columns(schema, where=where, trained=trained, **options)
        return replace(found, weight=None, absent={r: name for r, name in found.absent.items() if r not in CONTEXT})


def read_batches(
    source: object,
    *,
    feature_names: Sequence[str],
    categorical: Sequence[str] = (),
    columns: Mapping[str, Any] | None = None,
    missing: Missing = "keep",
    where: Sequence[str] = (),
    **named: Any,
) -> LogBatches:
    """Read requests, items, positions and features, in batches, from any source that `read_log` can read.

    Each row becomes a request of its own, because the other rows of its request may be anywhere in the source. Only
    lists that `ultr prepare` wrote stay whole. `named` maps roles to columns, as for `read_log`. If it has no features,
    they are the columns in `feature_names`. Roles that are not named have the column of training (`columns`). Rows that
    do not meet the conditions `where` are left out.
    """
    given = {role: name for role, name in named.items() if name is not None}
    reading = Reading(missing, where=tuple(where))
    selection = Selection(tuple(feature_names), tuple(categorical), given, columns or {}, reading)
    title = source if is_files(source) else f"the {type(source).__name__}"
    rows, batches = _read(source, selection, title)
    return LogBatches(rows, _with_same_features(batches, title))


def _read(source: object, selection: Selection, where: object) -> LogBatches:
    if not is_files(source):
        table = as_table(source)
        return LogBatches(table.num_rows, _arrow(table.to_batches(), table.schema, selection, where))
    if (lists := prepared(source)) is not None:
        reject_conditions(source, selection.reading, hint="pass --where to ultr prepare")
        lists.check_names({**selection.named, "categorical": selection.categorical})
        return LogBatches(lists.rows, (Batch(log, log.rows) for log in map(lists.read, lists.groups)))
    files = open_source(source).only(selection.reading.where)
    if files.kind == "SVMlight":
        reject_conditions(files.name, selection.reading, hint="convert it to CSV or Parquet")
        reject_names(files.name, {**selection.named, "categorical": selection.categorical or None})
        numbered = (int(n) for n in selection.feature_names if n.isdecimal() and n.isascii())
        width = max((n for n in numbered if n <= MAX_INDEX), default=0)
        logs = svmlight_batches(one_file(files), width=width, numbers=NUMBERS)
        return LogBatches(None, (Batch(log, log.rows) for log in logs))
    return _files(files, selection)


def _files(source: Source, selection: Selection) -> LogBatches:
    """Read files of any format except SVMlight, one after the other, in the types that all files have."""
    schemas = file_schemas(source)
    schema = all_columns(source, schemas)
    columns = selection.columns(schema, source.name)
    names = selection.reading.names(columns, schema.names, source.name)
    common = common_schema(source, schemas, names, columns)
    rows, read = None, partial(_arrow_file, schema=common)
    if source.kind == "Parquet":
        rows, read = source.sum(lambda footer: footer.num_rows), partial(_shard, schema=common)
    elif source.kind == "CSV":
        rows, read = None, partial(_csv, form=_CsvTypes.of(source, columns, common.names))
    elif source.kind == "JSON Lines":
        # Ids have the types of the first blocks of all files; other numbers may have fractions.
        wide = streaming_schema(common, {*csv_ids(columns), *columns.categorical})
        rows, read = None, partial(_json, schema=wide)

    def tables(file: SourceFile) -> Iterator[pa.Table]:
        return (source.with_partitions(table, file, names) for table in read(file))

    pieces = (_logs(tables(file), columns, selection, file) for file in source.files)
    return LogBatches(rows, chain.from_iterable(pieces))


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
        flat = one_row_per_item(filter_rows(table, selection.reading.where), columns, Piece(where, rows))
        if flat.num_rows:
            reading = replace(selection.reading, where=())
            log = log_from_table(flat, columns, where=Piece(where, items), reading=reading, gather=False)
            yield Batch(log, table.num_rows)
        rows, items = rows + table.num_rows, items + flat.num_rows


def _arrow(
    records: Iterable[pa.RecordBatch], schema: pa.Schema, selection: Selection, where: object
) -> Iterator[Batch]:
    columns = selection.columns(schema, where)
    names = selection.reading.names(columns, schema.names, where)

    def tables() -> Iterator[pa.Table]:
        with as_data_error(where, "Arrow"):
            for record in records:
                yield from _slices(record, names)

    return _logs(tables(), columns, selection, where)


def _slices(record: pa.RecordBatch, names: Sequence[str]) -> Iterator[pa.Table]:
    """Yield some columns of a batch in tables of about `NUMBERS` values."""
    table = pa.Table.from_batches([record]).select(list(names))
    step = max(1, 4 * NUMBERS * table.num_rows // max(1, table.nbytes))
    return (table.slice(first, step) for first in range(0, table.num_rows, step))


def _shard(file: SourceFile, schema: pa.Schema) -> Iterator[pa.Table]:
    """Read a Parquet file in batches of rows, and cast its columns to the types of the common schema."""
    with as_data_error(file, "Parquet"), file.parquet(buffer_size=BUFFER_BYTES, pre_buffer=False) as opened:
        rows = _rows_of_batch(opened.metadata, schema)
        # One thread decodes as fast as several here, and leaves the other cores to the caller.
        for record in opened.iter_batches(rows, columns=schema.names, use_threads=False):
            yield as_common(pa.Table.from_batches([record]), schema)


def _arrow_file(file: SourceFile, schema: pa.Schema) -> Iterator[pa.Table]:
    with as_data_error(file, "Arrow"):
        reader = file.arrow()
        for i in range(reader.num_record_batches):
            yield from (as_common(table, schema) for table in _slices(reader.get_batch(i), schema.names))


def _rows_of_batch(footer: Any, schema: pa.Schema) -> int:
    """Return the number of rows that have about `NUMBERS` values, by the row group with the most values per row."""
    names = set(schema.names)  # a column name may contain dots, which also separate the parts of a Parquet path
    paths = (footer.schema.column(i).path.split(".") for i in range(footer.num_columns))
    starts = [{".".join(path[:end]) for end in range(1, len(path) + 1)} for path in paths]
    leaves = [i for i, start in enumerate(starts) if start & names]
    groups = (footer.row_group(i) for i in range(footer.num_row_groups))
    most = max((sum(g.column(i).num_values for i in leaves) / g.num_rows for g in groups if g.num_rows), default=1)
    return max(1, int(NUMBERS / max(1, most)))


class _CsvTypes(NamedTuple):
    """The columns of CSV files that are read, the types they are parsed with, and the ids that are whole numbers."""

    names: list[str]
    types: dict[str, Any]
    whole: set[str]

    @staticmethod
    def of(source: Source, columns: Columns, names: list[str]) -> _CsvTypes:
        """Find the types; a first pass over the ids of all files checks whether they are whole numbers."""
        ids = [name for name in csv_ids(columns) if name in names]
        types = {name: pa.string() for name in (*ids, *columns.categorical) if name in names}
        whole, first = set(ids), []
        for file in source.files:
            with as_data_error(file, "CSV"):
                for record in _csv_records(file, types, list(whole)) if whole else ():
                    whole = {name for name in whole if pa.types.is_integer(whole_numbers(record.column(name)).type)}
                    if not whole:
                        break
                first.append(_csv_records(file, types, names).schema)
        wide = [pa.schema([column.with_type(_wide(column.type)) for column in schema]) for schema in first]
        common = common_schema(source, wide, names, columns)
        types |= {column.name: pa.float64() if pa.types.is_null(column.type) else column.type for column in common}
        return _CsvTypes(names, types, whole)


def _wide(kind: pa.DataType) -> pa.DataType:
    """Return the type for all blocks of a column, from that of the first: later numbers may have fractions."""
    return pa.float64() if pa.types.is_integer(kind) else kind


def _csv_records(file: SourceFile, types: dict[str, Any], include: Sequence[str]) -> Any:
    delimiter, names = csv_form(file)
    settings = csv_settings(delimiter, names, types, include=include, block_bytes=CSV_BYTES)
    return pa.csv.open_csv(file.stream(), **settings)


def _csv(file: SourceFile, form: _CsvTypes) -> Iterator[pa.Table]:
    """Read CSV or TSV, gzipped or not."""
    with as_data_error(file, "CSV"):
        records = _csv_records(file, form.types, form.names)
        for texts in _gathered(records, rows=max(1, NUMBERS // max(1, len(form.names)))):
            ids = {name: texts[name].cast(pa.int64()) for name in form.whole}
            yield pa.table({name: ids.get(name, texts[name]) for name in form.names})


def _json(file: SourceFile, schema: pa.Schema) -> Iterator[pa.Table]:
    """Read JSON Lines, gzipped or not."""
    step = max(1, NUMBERS // max(1, len(schema.names)))
    for table in json_blocks(file, schema):
        yield from (table.slice(first, step) for first in range(0, table.num_rows, step))


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
