"""Read a log from a file, a folder of Parquet files, an Arrow table, or a pandas or polars frame."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq

from ultr.errors import ColumnError, DataError, OptionError
from ultr.log.build import Reading, log_from_table
from ultr.log.duplicates import OnDuplicates
from ultr.log.jsonlines import json_schema, read_json_lines
from ultr.log.schema import Columns, resolve_columns
from ultr.log.shards import SPLITS, Shards, is_lists
from ultr.log.svmlight import read_svmlight, reject_names
from ultr.log.table import FEATURE_NAMES_KEY, Log
from ultr.log.values import Missing, as_data_error
from ultr.utils.arguments import check_value, checked
from ultr.utils.files import content_kind, existing_file

MISSING_VALUES = ["", "NA", "N/A", "NULL", "null", "nan", "NaN"]  # texts that mean a missing value in CSV files
SUFFIXES = {
    ".parquet": "Parquet",
    ".pq": "Parquet",
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".jsonl": "JSON Lines",
    ".ndjson": "JSON Lines",
    ".txt": "SVMlight",
    ".svm": "SVMlight",
    ".svmlight": "SVMlight",
    ".letor": "SVMlight",
}


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
    """Read a log from a file, a folder of Parquet shards, an Arrow table, or a pandas or polars frame.

    A file is Parquet, Arrow, CSV, JSON Lines or SVMlight; the last three may be gzipped. A source has one row per item
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
    if not isinstance(source, str | Path):
        named["trained"] = columns
        return _from_table(as_table(source), named, where=f"the {type(source).__name__}", reading=reading)
    path = Path(check_value("source", source, str | Path))
    if is_lists(path) or (path.name in SPLITS and is_lists(path.parent)):
        _reject_conditions(path, reading, hint="pass --where and --split time to ultr prepare")
        return _read_lists(path, named)
    if path.is_dir():
        return _read_parquet(shards_in(path), {**named, "trained": columns}, where=path, reading=reading)
    path = existing_file(path)
    kind = file_kind(path)
    if kind == "SVMlight":
        reject_names(path, named)
        _reject_conditions(path, reading, hint="convert it to CSV or Parquet")
        return read_svmlight(path)
    named["trained"] = columns
    if kind == "Parquet":
        return _read_parquet([path], named, where=path, reading=reading)
    if kind == "CSV":
        return _read_csv(path, named, reading)
    if kind == "JSON Lines":
        return _from_table(read_json_lines(path), named, where=path, reading=reading)
    with as_data_error(path, kind):
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    return _from_table(table, named, where=path, reading=reading)


def read_columns(source: str | Path, **named: Any) -> Columns | None:
    """Return the columns that `read_log` would take; None if the source has no named columns (lists, SVMlight)."""
    schema = _schema(Path(source))
    return None if schema is None else resolve_columns(schema, where=source, **named)


def numeric_columns(source: str | Path, names: Sequence[str]) -> list[str]:
    """Return those of the columns that hold numbers; in a CSV file, by its first rows."""
    path = Path(source)
    schema = _schema(path)
    if schema is not None and path.is_file() and file_kind(path) == "CSV":
        compression, delimiter, columns = csv_form(path)
        with as_data_error(path, "CSV"):
            stream = pa.input_stream(str(path), compression=compression)
            schema = pa.csv.open_csv(stream, **csv_settings(delimiter, columns, {})).schema
    kinds = {} if schema is None else {field.name: field.type for field in schema}
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return [name for name in names if name in kinds and any(is_kind(kinds[name]) for is_kind in numbers)]


def _schema(path: Path) -> pa.Schema | None:
    """Return the schema of a log; None if it has no named columns. The columns of a CSV file count as numbers."""
    if is_lists(path) or is_lists(path.parent):
        return None
    if path.is_dir():
        path = shards_in(path)[0]
    kind = file_kind(existing_file(path))
    if kind == "SVMlight":
        return None
    if kind == "CSV":
        return pa.schema([(name, pa.float64()) for name in csv_form(path)[2]])
    if kind == "JSON Lines":
        return json_schema(path)
    if kind == "Parquet":
        return read_schemas([path])[0]
    with as_data_error(path, kind):
        return pa.ipc.open_file(pa.memory_map(str(path))).schema


def _reject_conditions(path: Path, reading: Reading, *, hint: str) -> None:
    if reading.where or reading.time is not None:
        what = "conditions (--where) and times (--time) need a log with named columns"
        raise OptionError(what, where=path, hint=hint)


def _read_lists(path: Path, named: dict[str, Any]) -> Log:
    """Read a split of a folder that `ultr prepare` wrote, or the training split if the path is the whole folder."""
    shards = Shards(path) if is_lists(path) else Shards(path.parent, path.name)
    shards.check_names(named)
    return shards.read_all()


def csv_form(path: Path) -> tuple[str | None, str, list[str]]:
    """Return the compression and the delimiter of a CSV file, and the names of its columns."""
    compression = "gzip" if path.suffix.lower() == ".gz" else None
    with as_data_error(path, "CSV"):
        with pa.input_stream(str(path), compression=compression) as stream:
            first_line = stream.read(1 << 20).split(b"\n")[0].decode("utf-8-sig").rstrip("\r")
        delimiter = "\t" if ".tsv" in path.name.lower() else max(",;\t|", key=first_line.count)
        return compression, delimiter, [name.strip() for name in next(csv.reader([first_line], delimiter=delimiter))]


def _read_csv(path: Path, named: dict[str, Any], reading: Reading) -> Log:
    """Read CSV or TSV, gzipped or not; ids are read as text first, so that 007 and 7 stay different ids."""
    compression, delimiter, names = csv_form(path)
    columns = resolve_columns(pa.schema([(name, pa.float64()) for name in names]), where=path, **named)
    ids = [*csv_ids(columns), *columns.categorical]
    included = reading.names(columns, names, path)
    settings = csv_settings(delimiter, names, dict.fromkeys(ids, pa.string()), include=included)
    with as_data_error(path, "CSV"):
        table = pa.csv.read_csv(pa.input_stream(str(path), compression=compression), **settings)
    for name in ids:
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, whole_numbers(table[name]))
    return log_from_table(table, columns, where=path, reading=reading, unused=columns.unused(names))


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


def file_kind(path: Path) -> str:
    """Return the format of a file by the suffix of its name; raise DataError if its first bytes do not match."""
    stem, gzipped = (path.with_suffix(""), True) if path.suffix.lower() == ".gz" else (path, False)
    kind = SUFFIXES.get(stem.suffix.lower())
    if kind is None:
        hint = f"use one of {' '.join(SUFFIXES)}"
        raise DataError("the suffix of the name is not a known format", where=path, hint=hint)
    expected = "gzip" if gzipped else {"Parquet": "Parquet", "Arrow": "Arrow"}.get(kind, "text")
    content = content_kind(path)
    if content != expected:
        if not path.stat().st_size:
            raise DataError("the file is empty", where=path, hint="create the file again")
        hint = "rename the file to match its content"
        raise DataError(f"the name says {expected} but the file holds {content}", where=path, hint=hint)
    if gzipped and kind in ("Parquet", "Arrow"):
        raise DataError(f"gzipped {kind} files are not supported", where=path, hint="unpack it with gunzip")
    return kind


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


def parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder, sorted, without temporary files (names that start with . or _)."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name[0] not in "._")
    return [p for p in files if p.suffix.lower() in (".parquet", ".pq")]


def shards_in(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder; raise DataError if it has none, or data files of other formats as well."""
    shards = parquet_files(folder)
    if not shards:
        raise DataError("the folder has no Parquet files", where=folder, hint="pass a file, or a folder of such files")
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name[0] not in "._")
    if others := [p.name for p in files if p not in shards and p.suffix.lower() in (*SUFFIXES, ".gz")]:
        what = "the folder has data files of other formats next to its Parquet files"
        raise DataError(what, where=folder, got=others[0], hint="move it to another folder")
    return shards


def read_schemas(paths: Sequence[Path]) -> list[pa.Schema]:
    schemas = []
    for path in paths:
        with as_data_error(path, "Parquet"):
            schemas.append(pq.read_schema(path))
    return schemas


def check_schemas(paths: Sequence[Path], schemas: Sequence[pa.Schema], names: Sequence[str]) -> None:
    """Raise DataError if the features of a file differ from those of the first, or a column in `names` is missing."""
    hint = "write all files with the same columns"
    expected = (schemas[0].metadata or {}).get(FEATURE_NAMES_KEY)
    for path, schema in zip(paths, schemas, strict=True):
        if (schema.metadata or {}).get(FEATURE_NAMES_KEY) != expected:
            raise DataError("its features differ from those of the first file", where=path, hint=hint)
        if missing := [name for name in names if name not in schema.names]:
            raise ColumnError(f"the column '{missing[0]}' of the first file is missing", where=path, hint=hint)


def _read_parquet(paths: list[Path], named: dict[str, Any], *, where: Path, reading: Reading) -> Log:
    schemas = read_schemas(paths)
    columns = resolve_columns(schemas[0], where=paths[0], **named)
    names = reading.names(columns, schemas[0].names, where)
    check_schemas(paths, schemas, names)
    tables = []
    for path in paths:
        with as_data_error(path, "Parquet"):
            tables.append(pq.read_table(path, columns=names, memory_map=True, partitioning=None))
    with as_data_error(where, "shards of one log"):
        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive")
    table, unused = table.replace_schema_metadata(schemas[0].metadata), columns.unused(schemas[0].names)
    return log_from_table(table, columns, where=where, reading=reading, unused=unused)
