"""Reading a log from a file, a folder of shards, an Arrow table, or a pandas or polars frame."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq

from ultr.arguments import checked, taken
from ultr.errors import ColumnError, DataError
from ultr.files import content_kind, existing_file
from ultr.log.build import Missing, as_data_error, log_from_table
from ultr.log.schema import Columns, resolve_columns
from ultr.log.shards import SPLITS, Shards, is_lists
from ultr.log.svmlight import has_no_names, read_svmlight
from ultr.log.table import FEATURE_NAMES_KEY, Log

MISSING_VALUES = ["", "NA", "N/A", "NULL", "null", "nan", "NaN"]  # in CSV files
SUFFIXES = {
    ".parquet": "Parquet",
    ".pq": "Parquet",
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".csv": "CSV",
    ".tsv": "CSV",
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
    missing: Missing = "refuse",
) -> Log:
    """Read a log from a Parquet, Arrow, CSV or SVMlight file (CSV and SVMlight also gzipped), a folder of Parquet
    shards, an Arrow table, or a pandas or polars frame.

    There is one row per item shown, in any order; or one row per request, with lists. Columns not named are found by
    the names people use (`request`, `position`, `click`, `features`, ...). Columns named in `categorical` become
    features that rankers embed. A request may have a `query`, which tells when its items recur, a `segment`, and a mark
    that its order was `randomised`. `missing="keep"` lets NaN features pass.
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
    if not isinstance(source, str | Path):
        return _from_table(as_table(source), named, where=f"the {type(source).__name__}", missing=missing)
    path = Path(taken("source", source, str | Path))
    if is_lists(path) or (path.name in SPLITS and is_lists(path.parent)):
        return _read_lists(path, named)
    if path.is_dir():
        return _read_parquet(shards_in(path), named, where=path, missing=missing)
    path = existing_file(path)
    kind = file_kind(path)
    if kind == "SVMlight":
        if given := [name for name, value in named.items() if value is not None]:
            raise has_no_names(path, given[0], named[given[0]])
        return read_svmlight(path)
    if kind == "Parquet":
        return _read_parquet([path], named, where=path, missing=missing)
    if kind == "CSV":
        return _read_csv(path, named, missing)
    with as_data_error(path, kind):
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    return _from_table(table, named, where=path, missing=missing)


def _read_lists(path: Path, named: dict[str, Any]) -> Log:
    """A folder that `ultr prepare` wrote, of which the split for training is read; or a split of it."""
    shards = Shards(path) if is_lists(path) else Shards(path.parent, path.name)
    shards.check_names(named)
    return shards.read_all()


def csv_form(path: Path) -> tuple[str | None, str, list[str]]:
    """How a CSV file is written: its compression, its delimiter, and the names of its columns."""
    compression = "gzip" if path.suffix.lower() == ".gz" else None
    with as_data_error(path, "CSV"):
        with pa.input_stream(str(path), compression=compression) as stream:
            first_line = stream.read(1 << 20).split(b"\n")[0].decode("utf-8-sig").rstrip("\r")
        delimiter = "\t" if ".tsv" in path.name.lower() else max(",;\t|", key=first_line.count)
        return compression, delimiter, [name.strip() for name in next(csv.reader([first_line], delimiter=delimiter))]


def _read_csv(path: Path, named: dict[str, Any], missing: Missing) -> Log:
    """CSV or TSV, gzipped or not. Ids are read as text first, so that 007 and 7, or two long hashes, stay apart."""
    compression, delimiter, names = csv_form(path)
    columns = resolve_columns(pa.schema([(name, pa.float64()) for name in names]), where=path, **named)
    ids = [*csv_ids(columns), *columns.categorical]
    settings = csv_settings(delimiter, names, dict.fromkeys(ids, pa.string()), include=columns.used)
    with as_data_error(path, "CSV"):
        table = pa.csv.read_csv(pa.input_stream(str(path), compression=compression), **settings)
    for name in ids:
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, whole_numbers(table[name]))
    return log_from_table(table, columns, where=path, missing=missing, unused=columns.unused(names))


def csv_ids(columns: Columns) -> list[str]:
    """The columns whose values name something."""
    named = (columns.request, columns.item, columns.context.get("query"), columns.context.get("segment"))
    return [name for name in named if name is not None]


def csv_settings(
    delimiter: str, names: list[str], types: dict[str, Any], *, include: Sequence[str] = (), block_bytes: int = 1 << 20
) -> dict[str, Any]:
    """How Arrow should read a CSV file with these columns, all of them or some."""
    return {
        "read_options": pa.csv.ReadOptions(column_names=names, skip_rows=1, block_size=block_bytes),
        "parse_options": pa.csv.ParseOptions(delimiter=delimiter),
        "convert_options": pa.csv.ConvertOptions(
            column_types=types, include_columns=include, strings_can_be_null=True, null_values=MISSING_VALUES
        ),
    }


def whole_numbers(texts: Any) -> Any:
    """Texts as whole numbers, if every one is written as one would write that number."""
    try:
        numbers = texts.cast(pa.int64())
    except pa.ArrowInvalid:
        return texts
    return numbers if numbers.cast(pa.string()).equals(texts) else texts


def file_kind(path: Path) -> str:
    """The format a file's name promises, after a look whether its first bytes keep the promise."""
    stem, gzipped = (path.with_suffix(""), True) if path.suffix.lower() == ".gz" else (path, False)
    kind = SUFFIXES.get(stem.suffix.lower())
    if kind is None:
        raise DataError(
            "the name does not say what the file holds", where=path, mend=f"end it in one of {' '.join(SUFFIXES)}"
        )
    expected = "gzip" if gzipped else {"Parquet": "Parquet", "Arrow": "Arrow"}.get(kind, "text")
    found = content_kind(path)
    if found != expected:
        if not path.stat().st_size:
            raise DataError("the file is empty", where=path, mend="write it again from its source")
        raise DataError(f"named like {expected} but holds {found}", where=path, mend="give it the name of what it is")
    if gzipped and kind in ("Parquet", "Arrow"):
        raise DataError(
            f"{kind} files are not read gzipped", where=path, mend="gunzip it; Parquet compresses by itself"
        )
    return kind


def as_table(source: object) -> pa.Table:
    if isinstance(source, pa.Table):
        return source
    if any(isinstance(name, str) and "\0" in name for name in getattr(source, "columns", ())):
        # Arrow's interface between libraries has names that end in it: polars ends the process over one.
        raise DataError("a column's name holds the character NUL", mend="rename it")
    try:
        if type(source).__module__.startswith("pandas") and hasattr(source, "columns"):
            return pa.Table.from_pandas(source, preserve_index=False)
        if hasattr(source, "__arrow_c_stream__") and hasattr(source, "columns"):
            return pa.table(source)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError) as error:
        brief = " ".join(str(error).split())[:200]
        raise DataError(f"the frame cannot be read ({brief})", mend="give its columns plain types") from error
    raise DataError(
        "a log is a path, an Arrow table, or a pandas or polars frame",
        got=type(source).__name__,
        mend="convert it to one",
    )


def _from_table(table: pa.Table, named: dict[str, Any], *, where: object, missing: Missing) -> Log:
    columns = resolve_columns(table.schema, where=where, **named)
    unused = columns.unused(table.schema.names)
    return log_from_table(table, columns, where=where, missing=missing, unused=unused)


def shards_in(folder: Path) -> list[Path]:
    """The Parquet files of a folder that holds no other data."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name[0] not in "._")  # others are work in progress
    shards = [p for p in files if p.suffix.lower() in (".parquet", ".pq")]
    if not shards:
        raise DataError("the folder holds no Parquet files", where=folder, mend="name a file, or a folder of shards")
    if strange := [p.name for p in files if p not in shards and p.suffix.lower() in (*SUFFIXES, ".gz")]:
        raise DataError(
            "the folder holds other data beside its shards", where=folder, got=strange[0], mend="move it away"
        )
    return shards


def shard_columns(paths: list[Path], resolve: Callable[[pa.Schema], Columns]) -> tuple[list[pa.Schema], Columns]:
    """The schema of each shard, and the columns of the first, which the others must have."""
    schemas: list[pa.Schema] = []
    for path in paths:
        with as_data_error(path, "Parquet"):
            schemas.append(pq.read_schema(path))
    first = schemas[0]
    columns = resolve(first)
    for path, own in zip(paths, schemas, strict=True):
        if (own.metadata or {}).get(FEATURE_NAMES_KEY) != (first.metadata or {}).get(FEATURE_NAMES_KEY):
            raise DataError("its features are not those of the first shard", where=path, mend="write shards alike")
        if lacking := [name for name in columns.used if name not in own.names]:
            raise ColumnError(
                f"lacks the column '{lacking[0]}' of the first shard", where=path, mend="write shards alike"
            )
    return schemas, columns


def _read_parquet(paths: list[Path], named: dict[str, Any], *, where: Path, missing: Missing) -> Log:
    (schema, *_), columns = shard_columns(paths, lambda schema: resolve_columns(schema, where=paths[0], **named))
    tables = []
    for path in paths:
        with as_data_error(path, "Parquet"):
            tables.append(pq.read_table(path, columns=columns.used, memory_map=True, partitioning=None))
    with as_data_error(where, "shards of one log"):
        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive")
    table, unused = table.replace_schema_metadata(schema.metadata), columns.unused(schema.names)
    return log_from_table(table, columns, where=where, missing=missing, unused=unused)
