"""Reading a log from a file, a folder of shards, an Arrow table, or a pandas or polars frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq

from ultr.errors import DataError
from ultr.files import content_kind, existing_file
from ultr.log.build import Missing, log_from_table
from ultr.log.schema import Columns, resolve_columns
from ultr.log.svmlight import read_svmlight
from ultr.log.table import Log

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


def read_log(
    source: object,
    *,
    request: str | None = None,
    position: str | None = None,
    actions: Sequence[str] | str | None = None,
    features: Sequence[str] | str | None = None,
    relevance: str | None = None,
    weight: str | None = None,
    item: str | None = None,
    missing: Missing = "refuse",
) -> Log:
    """Read a log from a Parquet, Arrow, CSV or SVMlight file (CSV and SVMlight also gzipped), a folder of Parquet
    shards, an Arrow table, or a pandas or polars frame.

    There is one row per item shown, in any order; or one row per request, with lists. Columns not named are found by
    the names people use (`request`, `position`, `click`, `features`, ...). `missing="keep"` lets NaN features pass.
    """
    named: dict[str, Any] = {
        "request": request,
        "position": position,
        "actions": actions,
        "features": features,
        "relevance": relevance,
        "weight": weight,
        "item": item,
    }
    if not isinstance(source, str | Path):
        return _from_table(_as_table(source), named, where=f"the {type(source).__name__}", missing=missing)
    path = Path(source)
    if path.is_dir():
        return _read_folder(path, named, missing)
    path = existing_file(path)
    kind = file_kind(path)
    if kind == "SVMlight":
        return read_svmlight(path)
    if kind == "Parquet":
        return _read_parquet([path], named, where=path, missing=missing)
    with _as_data_error(path, kind):
        if kind == "Arrow":
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        else:
            delimiter = "\t" if ".tsv" in path.name else ","
            table = pa.csv.read_csv(path, parse_options=pa.csv.ParseOptions(delimiter=delimiter))
    return _from_table(table, named, where=path, missing=missing)


def file_kind(path: Path) -> str:
    """The format a file's name promises, after a look whether its first bytes keep the promise."""
    stem, gzipped = (path.with_suffix(""), True) if path.suffix == ".gz" else (path, False)
    kind = SUFFIXES.get(stem.suffix.lower())
    if kind is None:
        raise DataError(
            "the name does not say what the file holds", where=path, mend=f"end it in one of {' '.join(SUFFIXES)}"
        )
    expected = "gzip" if gzipped else {"Parquet": "Parquet", "Arrow": "Arrow"}.get(kind, "text")
    found = content_kind(path)
    if found != expected:
        raise DataError(f"named like {expected} but holds {found}", where=path, mend="give it the name of what it is")
    if gzipped and kind in ("Parquet", "Arrow"):
        raise DataError(
            f"{kind} files are not read gzipped", where=path, mend="gunzip it; Parquet compresses by itself"
        )
    return kind


def _as_table(source: object) -> pa.Table:
    if isinstance(source, pa.Table):
        return source
    if type(source).__module__.startswith("pandas"):
        return pa.Table.from_pandas(source, preserve_index=False)
    if hasattr(source, "__arrow_c_stream__"):
        return pa.table(source)
    raise DataError(
        "a log is a path, an Arrow table, or a pandas or polars frame",
        got=type(source).__name__,
        mend="convert it to one",
    )


def _from_table(table: pa.Table, named: dict[str, Any], *, where: object, missing: Missing) -> Log:
    columns = resolve_columns(table.schema, where=where, **named)
    unused = columns.unused(table.schema.names)
    return log_from_table(table, columns, where=where, missing=missing, unused=unused)


def _read_folder(folder: Path, named: dict[str, Any], missing: Missing) -> Log:
    shards = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".parquet", ".pq"))
    if not shards:
        raise DataError("the folder holds no Parquet files", where=folder, mend="name a file, or a folder of shards")
    return _read_parquet(shards, named, where=folder, missing=missing)


def _read_parquet(paths: list[Path], named: dict[str, Any], *, where: Path, missing: Missing) -> Log:
    with _as_data_error(paths[0], "Parquet"):
        schema = pq.read_schema(paths[0])
    columns: Columns = resolve_columns(schema, where=paths[0], **named)
    tables = []
    for path in paths:
        with _as_data_error(path, "Parquet"):
            tables.append(pq.read_table(path, columns=columns.used, memory_map=True, partitioning=None))
    with _as_data_error(where, "shards of one log"):
        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive")
    table, unused = table.replace_schema_metadata(schema.metadata), columns.unused(schema.names)
    return log_from_table(table, columns, where=where, missing=missing, unused=unused)


@contextmanager
def _as_data_error(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        brief = " ".join(str(error).split())[:200]
        raise DataError(f"cannot be read as {kind} ({brief})", where=path, mend="check or rewrite the file") from error
