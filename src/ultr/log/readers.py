"""Read a log from files, an Arrow table, or a pandas or polars frame."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from ultr.errors import DataError, OptionError
from ultr.log.build import Reading, log_from_table
from ultr.log.drift import all_columns, read_schemas, read_together
from ultr.log.duplicates import OnDuplicates
from ultr.log.jsonlines import json_blocks, json_schema, read_json_lines
from ultr.log.schema import Columns, resolve_columns
from ultr.log.shards import SPLITS, Shards, is_lists
from ultr.log.sources import Source, SourceFile, each_file, open_source
from ultr.log.svmlight import read_svmlight, reject_names
from ultr.log.table import Log
from ultr.log.values import Missing, as_data_error
from ultr.utils.arguments import checked
from ultr.utils.stores import shown

FIRST_ROWS = 10_000  # of a source that `first_rows` returns, at most
MISSING_VALUES = ["", "NA", "N/A", "NULL", "null", "nan", "NaN"]  # texts that mean a missing value in CSV files


@checked
def read_log(
    source: object,
    *,
    request: str | None = None,
    position: str | None = None,
    actions: Sequence[str] | str | None = None,
    features: Sequence[str] | str | None = None,
    categorical: Sequence[str] | str | None = None,
    relevance: str | None = None,
    weight: str | None = None,
    item: str | None = None,
    query: str | None = None,
    segment: str | None = None,
    randomised: str | None = None,
    missing: Missing = "keep",
    on_duplicates: OnDuplicates = "error",
    where: Sequence[str] = (),
    time: str | None = None,
    columns: Mapping[str, Any] | None = None,
) -> Log:
    """Read a log from files, an Arrow table, or a pandas or polars frame.

    Files are given by a path, a folder, a pattern such as `days/*.parquet`, a URL such as `s3://bucket/log`, or a list
    of these. Folders such as `date=2026-11-01` give their rows a column `date`. A file is Parquet, Arrow, CSV, JSON
    Lines or SVMlight; the last three may be gzipped. A source has one row per item
    shown, in any order, or one row per request, with columns of lists. Columns that are not named are recognised by
    common names (`request`, `position`, `click`, `features`, ...). An empty name means that there is no such column.

    - Rankers learn a vector for each value of a `categorical` column.
    - A request may have a `query` (requests with the same query have the same items), a `segment`, a mark that its
      order was `randomised`, and a `time`.
    - NaN in features is a missing value; it is an error with `missing="reject"`. Missing actions are 0.
    - If two rows of a request have the same item or position, this is an error. With `on_duplicates="first"` the first
      row is kept; with "sum" it also gets the actions of the others.
    - `where` has conditions on rows, such as `country = de`.
    - `columns` are those of a training log (`Log.columns`), which are used for all parts that are not named.

    `Log.columns` and `Log.notes` say which columns were taken, and what was changed.
    """
    named: dict[str, Any] = {
        "request": request,
        "position": position,
        "actions": actions,
        "features": features,
        "categorical": categorical,
        "relevance": relevance,
        "weight": weight,
        "item": item,
        "query": query,
        "segment": segment,
        "randomised": randomised,
    }
    reading = Reading(missing, on_duplicates, tuple(where), time)
    if not isinstance(source, Source) and not is_files(source):
        named["trained"] = columns
        return _from_table(as_table(source), named, where=f"the {type(source).__name__}", reading=reading)
    if not isinstance(source, Source) and (lists := prepared(source)) is not None:
        reject_conditions(source, reading, hint="pass --where and --split time to ultr prepare")
        lists.check_names(named)
        return lists.read_all()
    files = (source if isinstance(source, Source) else open_source(source)).only(reading.where)
    if files.kind == "SVMlight":
        reject_names(files.name, named)
        reject_conditions(files.name, reading, hint="convert it to CSV or Parquet")
        return read_svmlight(one_file(files))
    return _read_files(files, {**named, "trained": columns}, reading)


def is_files(source: object) -> TypeGuard[str | Path | Sequence[str | Path]]:
    """Return whether a source is a path, or a list of paths, and not a table."""
    return isinstance(source, str | Path) or (
        isinstance(source, list | tuple) and all(isinstance(each, str | Path) for each in source)
    )


def prepared(source: str | Path | Sequence[str | Path]) -> Shards | None:
    """Return a split of a folder that `ultr prepare` wrote, the training split if the path is the whole folder.

    Return None if the source is something else.
    """
    if not isinstance(source, str | Path):
        return None
    if is_lists(source):
        return Shards(source)
    folder, _, split = shown(source).rstrip("/").rpartition("/")
    return Shards(folder, split) if split in SPLITS and folder and is_lists(folder) else None


def read_columns(source: str | Path | Sequence[str | Path], **named: Any) -> Columns | None:
    """Return the columns that `read_log` would take; None if the source has no named columns (lists, SVMlight)."""
    schema = _schema(source)
    return None if schema is None else resolve_columns(schema, where=open_source(source).name, **named)


def numeric_columns(source: str | Path | Sequence[str | Path], names: Sequence[str]) -> list[str]:
    """Return those of the columns that hold numbers; in CSV files, by the first rows of the first file."""
    schema = _schema(source)
    if schema is not None and open_source(source).kind == "CSV":
        schema = first_rows(source).schema
    kinds = {} if schema is None else {field.name: field.type for field in schema}
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return [name for name in names if name in kinds and any(is_kind(kinds[name]) for is_kind in numbers)]


def first_rows(source: str | Path | Sequence[str | Path]) -> pa.Table:
    """Return the first rows of a source with named columns: the columns that all files have, and the partitions."""
    files = open_source(source)
    file, schemas = files.files[0], file_schemas(files)
    with as_data_error(file, files.kind):
        if files.kind == "Parquet":
            opened = file.parquet()
            table = pa.Table.from_batches(islice(opened.iter_batches(FIRST_ROWS), 1), opened.schema_arrow)
        elif files.kind == "CSV":
            rows = pa.csv.open_csv(file.stream(), **csv_settings(*csv_form(file), {}))
            table = pa.Table.from_batches(islice(rows, 1), rows.schema)
        elif files.kind == "Arrow":
            table = file.arrow().read_all()  # it is mapped, not copied
        else:
            table = next(json_blocks(file, None), schemas[0].empty_table())
    names = [name for name in table.column_names if all(name in schema.names for schema in schemas)]
    return files.with_partitions(table.slice(0, FIRST_ROWS), file, [*names, *files.partitions.names])


def _schema(source: str | Path | Sequence[str | Path]) -> pa.Schema | None:
    """Return the schema of a log; None if it has no named columns. The columns of CSV files count as numbers."""
    if prepared(source) is not None:
        return None
    files = open_source(source)
    if files.kind == "SVMlight":
        return None
    return all_columns(files, file_schemas(files))


def file_schemas(source: Source) -> list[pa.Schema]:
    """Return the schema of each file; the types of CSV files are not known before they are read."""

    def read(file: SourceFile) -> pa.Schema:
        if source.kind == "CSV":
            return pa.schema([(name, pa.float64()) for name in csv_form(file)[1]])
        if source.kind == "JSON Lines":
            return json_schema(file)
        with as_data_error(file, source.kind):
            return file.arrow().schema

    return read_schemas(source.files) if source.kind == "Parquet" else each_file(source.files, read)


def one_file(source: Source) -> Path:
    """Return the path of the only file of a source, on this machine."""
    if len(source.files) > 1:
        what, hint = f"several {source.kind} files cannot be read together", "convert them to Parquet"
        raise DataError(what, where=source.name, got=f"{len(source.files)} files", hint=hint)
    return source.files[0].local()


def reject_conditions(path: object, reading: Reading, *, hint: str) -> None:
    if reading.where or reading.time is not None:
        what = "conditions (--where) and times (--time) need a log with named columns"
        raise OptionError(what, where=path, hint=hint)


def csv_form(file: SourceFile) -> tuple[str, list[str]]:
    """Return the delimiter of a CSV file, and the names of its columns."""
    with as_data_error(file, "CSV"):
        with file.stream() as stream:
            first_line = stream.read(1 << 20).split(b"\n")[0].decode("utf-8-sig").rstrip("\r")
        delimiter = "\t" if ".tsv" in file.name.rpartition("/")[2].lower() else max(",;\t|", key=first_line.count)
        return delimiter, [name.strip() for name in next(csv.reader([first_line], delimiter=delimiter))]


def _read_files(source: Source, named: dict[str, Any], reading: Reading) -> Log:
    """Read the columns of a log from files of any format except SVMlight."""
    schemas = file_schemas(source)
    schema, where = all_columns(source, schemas), source.name
    columns = resolve_columns(schema, where=where, **named)
    names = reading.names(columns, schema.names, where)
    ids = [*csv_ids(columns), *columns.categorical] if source.kind == "CSV" else []

    def read(file: SourceFile, names: list[str]) -> pa.Table:
        with as_data_error(file, source.kind):
            if source.kind == "Parquet":
                options = {"filesystem": file.filesystem, "memory_map": True, "partitioning": None}
                return pq.read_table(file.path, columns=names, **options)
            if source.kind == "CSV":
                return _csv_table(file, names, ids)
            if source.kind == "Arrow":
                table = file.arrow().read_all()
                return table.select([name for name in names if name in table.column_names])
        return read_json_lines(file, names)

    table = read_together(source, schemas if source.kind == "Parquet" else None, names, columns, read)
    for name in ids:
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, whole_numbers(table[name]))
    table, unused = table.replace_schema_metadata(schema.metadata), columns.unused(schema.names)
    return log_from_table(table, columns, where=where, reading=reading, unused=unused)


def _csv_table(file: SourceFile, wanted: Sequence[str], ids: Sequence[str]) -> pa.Table:
    """Read columns of CSV or TSV, gzipped or not; ids are read as text, so that 007 and 7 stay different ids."""
    delimiter, names = csv_form(file)
    types = dict.fromkeys(ids, pa.string())
    present = [name for name in wanted if name in names]
    return pa.csv.read_csv(file.stream(), **csv_settings(delimiter, names, types, include=present))


def csv_ids(columns: Columns) -> list[str]:
    """Return the names of the columns that hold the ids of requests, items, queries and segments."""
    named = (columns.request, columns.item, columns.context.get("query"), columns.context.get("segment"))
    return [name for name in named if name is not None]


def csv_settings(
    delimiter: str, names: list[str], types: dict[str, Any], *, include: Sequence[str] = (), block_bytes: int = 1 << 20
) -> dict[str, Any]:
    """Return arguments for `pyarrow.csv` that read all columns `names` of a CSV file, or those in `include`."""
    return {
        "read_options": pa.csv.ReadOptions(column_names=names, skip_rows=1, block_size=block_bytes),
        "parse_options": pa.csv.ParseOptions(delimiter=delimiter),
        "convert_options": pa.csv.ConvertOptions(
            column_types=types, include_columns=include, strings_can_be_null=True, null_values=MISSING_VALUES
        ),
    }


def whole_numbers(texts: Any) -> Any:
    """Return texts as whole numbers if each is the usual spelling of a number (7, not 007); else return the texts."""
    try:
        numbers = texts.cast(pa.int64())
    except pa.ArrowInvalid:
        return texts
    return numbers if numbers.cast(pa.string()).equals(texts) else texts


def as_table(source: object) -> pa.Table:
    """Return an Arrow table, or a pandas or polars frame, as an Arrow table."""
    if isinstance(source, pa.Table):
        return source
    if any(isinstance(name, str) and "\0" in name for name in getattr(source, "columns", ())):
        # NUL ends a name in Arrow's C interface, and polars aborts the process.
        raise DataError("the name of a column contains the character NUL", hint="rename the column")
    try:
        if type(source).__module__.startswith("pandas") and hasattr(source, "columns"):
            return pa.Table.from_pandas(source, preserve_index=False)
        if hasattr(source, "__arrow_c_stream__") and hasattr(source, "columns"):
            return pa.table(source)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError) as error:
        brief = " ".join(str(error).split())[:200]
        hint = "convert its columns to plain types"
        raise DataError(f"the frame cannot be read ({brief})", hint=hint) from error
    what = "a log must be a path, an Arrow table, or a pandas or polars frame"
    raise DataError(what, got=type(source).__name__, hint="convert it to one of these")


def _from_table(table: pa.Table, named: dict[str, Any], *, where: object, reading: Reading) -> Log:
    columns = resolve_columns(table.schema, where=where, **named)
    table, unused = table.select(reading.names(columns, table.column_names, where)), columns.unused(table.column_names)
    return log_from_table(table, columns, where=where, reading=reading, unused=unused)
