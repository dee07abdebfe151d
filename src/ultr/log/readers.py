"""Read a log from files, an Arrow table, a frame (pandas, polars) or arrays: as a whole, or in batches of rows."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from ultr.errors import DataError, OptionError
from ultr.log.build import Reading, log_from_table, one_row_per_item
from ultr.log.cleaning import OnDuplicates
from ultr.log.columns import CONTEXT, Columns, Missing, Piece, as_data_error, is_number, resolve_columns
from ultr.log.conditions import filter_rows
from ultr.log.labels import Label
from ultr.log.shards import SPLITS, Shards, is_lists
from ultr.log.sources import (
    Source,
    SourceFile,
    all_columns,
    as_common,
    common_schema,
    each_file,
    open_source,
    read_schemas,
    read_together,
)
from ultr.log.svmlight import MAX_INDEX, read_svmlight, reject_names, svmlight_batches, whole_lines
from ultr.log.table import Log
from ultr.utils.arguments import checked
from ultr.utils.memory import available_memory
from ultr.utils.stores import shown

# --- JSON Lines -------------------------------------------------------------------------------------------------------
# Read JSON Lines: a file with one JSON object per line, also gzipped, whole or in blocks of lines.

BLOCK_BYTES = 16 << 20  # bytes of text that are parsed at a time; a line may be longer


def json_blocks(file: SourceFile, schema: pa.Schema | None) -> Iterator[pa.Table]:
    """Yield the lines of a file in tables; with a schema, only its columns, and in its types."""
    options = None
    if schema is not None:
        options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    with as_data_error(file, "JSON Lines"), file.stream() as stream:
        for text in whole_lines(stream, BLOCK_BYTES):
            if not text.strip():
                continue
            # The block must hold all of the text, because Arrow does not join lines of two blocks.
            size = pa.json.ReadOptions(block_size=len(text) + 1, use_threads=False)
            table = pa.json.read_json(pa.BufferReader(text), read_options=size, parse_options=options)
            if table.num_rows:
                yield table if schema is None else table.select(schema.names)


def streaming_schema(schema: pa.Schema, ids: set[str]) -> pa.Schema:
    """Return a schema for all blocks of a file, from that of the first: numbers, except ids, may have fractions."""
    return pa.schema([column if column.name in ids else column.with_type(_wide(column.type)) for column in schema])


def _wide(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_wide(kind.value_type))
    return pa.float64() if pa.types.is_null(kind) else with_floats(kind)


def with_floats(kind: pa.DataType) -> pa.DataType:
    """Return the type for all blocks of a column, from that of the first: later numbers may have fractions."""
    return pa.float64() if pa.types.is_integer(kind) else kind


# --- Logs -------------------------------------------------------------------------------------------------------------
# Read a log from files, an Arrow table, or a pandas or polars frame.

FIRST_ROWS = 10_000  # of a source that `first_rows` returns, at most
MISSING_VALUES = ["", "NA", "N/A", "NULL", "null", "nan", "NaN"]  # texts that mean a missing value in CSV files


@checked
def read_log(
    source: object,
    *,
    request: str | None = None,
    position: str | None = None,
    row: str | None = None,
    column: str | None = None,
    actions: Sequence[str] | str | None = None,
    features: Sequence[str] | str | None = None,
    categorical: Sequence[str] | str | None = None,
    relevance: str | None = None,
    weight: str | None = None,
    item: str | None = None,
    query: str | None = None,
    segment: str | None = None,
    randomised: str | None = None,
    swaps: str | None = None,
    shown: str | None = None,
    missing: Missing = "keep",
    on_duplicates: OnDuplicates = "error",
    where: Sequence[str] = (),
    time: str | None = None,
    extra: Sequence[str] = (),
    columns: Mapping[str, Any] | None = None,
) -> Log:
    """Read a log from files, an Arrow table, or a pandas or polars frame.

    Files are given by a path, a folder, a pattern such as `days/*.parquet`, a URL such as `s3://bucket/log`, or a list
    of these. Folders such as `date=2026-11-01` give their rows a column `date`. A file is Parquet, Arrow, CSV, JSON
    Lines or SVMlight; the last three may be gzipped. A source has one row per item
    shown, in any order, or one row per request, with columns of lists. Columns that are not named are recognised by
    common names (`request`, `position`, `click`, `features`, ...). An empty name means that there is no such column.

    - Items in a grid have a `row` and a `column` in place of a `position`.
    - Rankers learn a vector for each value of a `categorical` column.
    - A request may have a `query` (requests with the same query have the same items), a `segment` (one column, or
      several with commas between them), a mark that its order was `randomised`, the drawn arm of an experiment with
      `swaps` (such as `1-3`), and a `time`.
    - `shown` marks rows that users could see with 1. Rows with 0 are left out, and their positions may be missing.
    - NaN in features is a missing value; it is an error with `missing="reject"`. Missing actions are 0.
    - If two rows of a request have the same item or position, this is an error. With `on_duplicates="first"` the first
      row is kept; with "sum" it also gets the actions of the others.
    - `where` has conditions on rows, such as `country = de`.
    - `extra` are further columns of numbers or times, such as the duration of an item, which `Log.extra` has by row.
    - `columns` are those of a training log (`Log.columns`), which are used for all parts that are not named.

    `Log.columns` and `Log.notes` say which columns were taken, and what was changed.
    """
    named: dict[str, Any] = {
        "request": request,
        "position": position,
        "row": row,
        "column": column,
        "actions": actions,
        "features": features,
        "categorical": categorical,
        "relevance": relevance,
        "weight": weight,
        "item": item,
        "query": query,
        "segment": segment,
        "randomised": randomised,
        "swaps": swaps,
        "shown": shown,
    }
    reading = Reading(missing, on_duplicates, tuple(where), time, tuple(extra))
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


# Bytes of a value in memory, by its type in Parquet, and of the numbers that reading makes of each row (ids, order).
WIDTHS = {"BOOLEAN": 1 / 8, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
ROW_BYTES = 64


def read_columns(source: str | Path | Sequence[str | Path], **named: Any) -> Columns | None:
    """Return the columns that `read_log` would take; None if the source has no named columns (lists, SVMlight)."""
    schema = _schema(source)
    if schema is None:
        return None
    return resolve_columns(schema, where=open_source(source).name, rows=lambda: first_rows(source), **named)


def source_names(source: object) -> list[str]:
    """Return the names of the columns of a source; [] if it has none (lists, SVMlight)."""
    if not is_files(source):
        return list(as_table(source).column_names)
    return [] if (schema := _schema(source)) is None else list(schema.names)


def numeric_columns(source: str | Path | Sequence[str | Path], names: Sequence[str]) -> list[str]:
    """Return those of the columns that hold numbers; in CSV files, by the first rows of the first file."""
    schema = _schema(source)
    if schema is not None and open_source(source).kind == "CSV":
        schema = first_rows(source).schema
    kinds = {} if schema is None else {field.name: field.type for field in schema}
    return [name for name in names if name in kinds and is_number(kinds[name])]


def first_rows(source: Source | str | Path | Sequence[str | Path]) -> pa.Table:
    """Return the first rows of a source with named columns: the columns that all files have, and the partitions."""
    files = source if isinstance(source, Source) else open_source(source)
    file, schemas = files.files[0], file_schemas(files)
    with as_data_error(file, files.kind):
        if files.kind == "Parquet":
            opened = file.parquet()
            table = pa.Table.from_batches(islice(opened.iter_batches(FIRST_ROWS), 1), opened.schema_arrow)
        elif files.kind == "CSV":
            rows = csv_records(file, {})
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
            return next(json_blocks(file, None), pa.table({})).schema
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
    if reading.where or reading.further:
        what = "conditions (--where), times (--time) and further columns need a log with named columns"
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
    columns = resolve_columns(schema, where=where, rows=lambda: first_rows(source), **named)
    names = reading.names(columns, schema.names, where)
    ids = columns.ids if source.kind == "CSV" else []
    if source.kind == "Parquet":
        _check_fits_in_memory(source, names)

    def read(file: SourceFile, names: list[str]) -> pa.Table:
        with as_data_error(file, source.kind):
            if source.kind == "Parquet":
                options = {"filesystem": file.filesystem, "memory_map": True, "partitioning": None}
                return pq.read_table(file.path, columns=names, **options)
            if source.kind == "CSV":
                settings = _csv_settings(file, dict.fromkeys(ids, pa.string()), names)
                return pa.csv.read_csv(file.stream(), **settings)
            if source.kind == "Arrow":
                table = file.arrow().read_all()
            elif blocks := list(json_blocks(file, None)):
                table = pa.concat_tables(blocks, promote_options="permissive")
            else:
                raise DataError("there are no rows", where=file, hint="create the file again")
        return table.select([name for name in names if name in table.column_names])

    table = read_together(source, schemas if source.kind == "Parquet" else None, names, columns, read)
    for name in ids:
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, whole_numbers(table[name]))
    table, unused = table.replace_schema_metadata(schema.metadata), columns.unused(schema.names)
    return log_from_table(table, columns, where=where, reading=reading, unused=unused)


def _check_fits_in_memory(source: Source, names: Sequence[str]) -> None:
    """Raise DataError if Parquet files declare more values in the columns `names` than fit into the free memory.

    A small file can have billions of rows, because equal values take no space in it.
    """
    size = source.sum(lambda footer: _decoded_bytes(footer, names) + ROW_BYTES * footer.num_rows)
    if size > (free := available_memory()):
        rows = source.sum(lambda footer: footer.num_rows)
        got = f"at least {size / 2**30:.1f} GiB for {rows:,} rows; {free / 2**30:.1f} GiB are free"
        hint = "run ultr prepare on it first; if there should be fewer rows, write the file again"
        raise DataError("the log does not fit in memory", where=source.name, got=got, hint=hint)


def _decoded_bytes(footer: Any, names: Sequence[str]) -> int:
    """Return about how many bytes the values of columns have in memory, by the footer of a Parquet file."""
    leaves = _leaves(footer, names)
    chunks = (footer.row_group(n).column(i) for n in range(footer.num_row_groups) for i in leaves)
    return int(sum(chunk.num_values * _value_bytes(chunk) for chunk in chunks))


def _value_bytes(chunk: Any) -> float:
    """Return about how many bytes a value of a column chunk has in memory."""
    if (width := WIDTHS.get(chunk.physical_type)) is not None:
        return width
    known = chunk.statistics is not None and chunk.statistics.has_min_max
    shortest = min(len(str(chunk.statistics.min)), len(str(chunk.statistics.max))) if known else 0
    return float(4 + max(shortest, chunk.total_uncompressed_size / max(1, chunk.num_values)))


def csv_records(
    file: SourceFile, types: Mapping[str, Any], names: Sequence[str] = (), *, block_bytes: int | None = None
) -> Any:
    """Open a CSV or TSV file, gzipped or not, as record batches with its columns, or those in `names`."""
    settings = _csv_settings(file, types, names, block_bytes or CSV_BYTES)  # it reads the first line of the file
    return pa.csv.open_csv(file.stream(), **settings)


def _csv_settings(
    file: SourceFile, types: Mapping[str, Any], names: Sequence[str], block_bytes: int = 1 << 20
) -> dict[str, Any]:
    """Return arguments for `pyarrow.csv` that read those of the columns `names` that a file has, or else all."""
    delimiter, present = csv_form(file)
    return {
        "read_options": pa.csv.ReadOptions(column_names=present, skip_rows=1, block_size=block_bytes),
        "parse_options": pa.csv.ParseOptions(delimiter=delimiter),
        "convert_options": pa.csv.ConvertOptions(
            column_types=types,
            include_columns=[name for name in names if name in present],
            strings_can_be_null=True,
            null_values=MISSING_VALUES,
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
    columns = resolve_columns(table.schema, where=where, rows=lambda: table.slice(0, FIRST_ROWS), **named)
    table, unused = table.select(reading.names(columns, table.column_names, where)), columns.unused(table.column_names)
    return log_from_table(table, columns, where=where, reading=reading, unused=unused)


# --- Frames and arrays ------------------------------------------------------------------------------------------------
# Frames and arrays of scikit-learn's interface as tables that `read_log` reads.

ROW = "ultr.row"  # column with the row numbers of X, because a log has its rows in another order


def is_frame(X: Any) -> bool:
    """Return whether X is a data frame (pandas, polars, Arrow), and not an array."""
    return hasattr(X, "columns")


def _array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"'{name}' cannot be read ({error})", hint="pass an array with values of one type") from error


def _column(name: str, values: Any, rows: int) -> pa.Array:
    array = _array(name, values)
    try:
        if array.shape == (rows,):
            return pa.array(array)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"'{name}' cannot be read ({error})", hint="pass an array with values of one type") from error
    raise DataError(f"'{name}' must have one value for each of {rows} rows", got=f"shape {list(array.shape)}")


def frame_table(X: Any) -> pa.Table:
    """Return a frame or an array as a table; the columns of an array are called feature_0, feature_1, ..."""
    if is_frame(X):
        return as_table(X)
    array = _array("X", X)
    if array.ndim != 2:
        raise DataError("X must be a frame or an array [rows, columns]", got=f"shape {list(array.shape)}")
    return pa.table({f"feature_{i}": _column(f"feature_{i}", v, len(array)) for i, v in enumerate(array.T)})


def row_values(role: str, value: Any) -> Mapping[str, Any] | None:
    """Return column name -> values if `value` holds values by row; None if it names columns of X."""
    if role in ("request", "position", "weight"):
        return None if value is None or isinstance(value, str | int) else {role: value}
    if is_frame(value):
        table = as_table(value)
        return dict(zip(table.column_names, table.columns, strict=True))
    return value if isinstance(value, Mapping) else None


def with_columns(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    """Return the table with columns added or replaced; each has one value per row."""
    others = {name: table[name] for name in table.column_names if name not in columns}
    added = {name: _column(name, values, table.num_rows) for name, values in columns.items()}
    return pa.table({**others, **added}).replace_schema_metadata(table.schema.metadata)


def joined(X: Any, sources: Mapping[str, Any]) -> tuple[pa.Table, dict[str, Any]]:
    """Return X as a table and role -> column name; sources that hold values by row become columns of the table."""
    table, named = frame_table(X), dict(sources)
    for role, value in sources.items():
        if (columns := row_values(role, value)) is not None:
            table, named[role] = with_columns(table, columns), list(columns) if role == "actions" else role
        elif isinstance(value, int):
            named[role] = f"feature_{value}"
    if not is_frame(X) and named["request"] is None:
        hint = "pass request and position as arrays or column numbers; in cross-validation, use metadata routing"
        raise DataError("X is an array, and the request of each row is not given", hint=hint)
    return table, named


def with_feedback(table: pa.Table, y: Any, label: Label) -> tuple[pa.Table, list[str]]:
    """Add y to the table, as the actions of the label that are not columns yet; return all actions of the label too."""
    missing = [name for name in label.actions if name not in table.column_names]
    if not missing:
        hint = "leave out y; for score, put true labels into a column 'relevance'"
        raise DataError(f"feedback is given twice, in X ({', '.join(label.actions)}) and in y", hint=hint)
    columns = row_values("actions", y)
    if columns is None:
        array = _array("y", y)
        values = array[:, None] if array.ndim == 1 else array
        if values.ndim != 2 or values.shape[1] != len(missing):
            got = f"shape {list(array.shape)}"
            raise DataError(f"y must have one column for each of {', '.join(missing)}", got=got)
        columns = dict(zip(missing, values.T, strict=True))
    return with_columns(table, columns), list(label.actions)


def numbered(table: pa.Table) -> pa.Table:
    """Return the table with a column `ROW` of row numbers."""
    return table.append_column(ROW, pa.array(np.arange(table.num_rows)))


# --- Batches ----------------------------------------------------------------------------------------------------------
# Read a log in batches of rows, in the order of the source, so that files larger than memory can be scored.

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
        read = partial(_csv, names=common.names, **_csv_types(source, columns, common.names))
    elif source.kind == "JSON Lines":
        # Ids have the types of the first blocks of all files; other numbers may have fractions.
        read = partial(_json, schema=streaming_schema(common, {*columns.ids}))

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
    leaves = _leaves(footer, schema.names)
    groups = (footer.row_group(i) for i in range(footer.num_row_groups))
    most = max((sum(g.column(i).num_values for i in leaves) / g.num_rows for g in groups if g.num_rows), default=1)
    if 8 * most > (free := available_memory()):
        got = f"{most:,.0f} values in a row; {free / 2**30:.1f} GiB are free"
        raise DataError("a row does not fit in memory", got=got, hint="write the file again, with shorter lists")
    return max(1, int(NUMBERS / max(1, most)))


def _leaves(footer: Any, names: Iterable[str]) -> list[int]:
    """Return the numbers of the Parquet columns that hold the columns `names`, or parts of them."""
    wanted = set(names)  # a column name may contain dots, which also separate the parts of a Parquet path
    paths = (footer.schema.column(i).path.split(".") for i in range(footer.num_columns))
    starts = [{".".join(path[:end]) for end in range(1, len(path) + 1)} for path in paths]
    return [i for i, start in enumerate(starts) if start & wanted]


def _csv_types(source: Source, columns: Columns, names: Sequence[str]) -> dict[str, Any]:
    """Return the `types` that columns of CSV files are parsed with, and the ids that are `whole` numbers.

    A first pass over the ids of all files checks whether they are whole numbers.
    """
    types = {name: pa.string() for name in columns.ids if name in names}
    whole, schemas = set(types) - {*columns.categorical}, []
    for file in source.files:
        with as_data_error(file, "CSV"):
            for record in csv_records(file, types, list(whole)) if whole else ():
                whole = {name for name in whole if pa.types.is_integer(whole_numbers(record.column(name)).type)}
                if not whole:
                    break
            first = csv_records(file, types, names).schema
        schemas.append(pa.schema([column.with_type(with_floats(column.type)) for column in first]))
    for column in common_schema(source, schemas, names, columns):
        types[column.name] = pa.float64() if pa.types.is_null(column.type) else column.type
    return {"types": types, "whole": whole}


def _csv(file: SourceFile, names: Sequence[str], types: Mapping[str, Any], whole: set[str]) -> Iterator[pa.Table]:
    """Read CSV or TSV, gzipped or not."""
    with as_data_error(file, "CSV"):
        records = csv_records(file, types, names)
        for texts in _gathered(records, rows=max(1, NUMBERS // max(1, len(names)))):
            ids = {name: texts[name].cast(pa.int64()) for name in whole}
            yield pa.table({name: ids.get(name, texts[name]) for name in names})


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
