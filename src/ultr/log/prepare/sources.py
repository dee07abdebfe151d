"""Find the files of a log for `ultr prepare`, and check that they have the same columns."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from ultr.errors import ColumnError, DataError
from ultr.log.jsonlines import json_blocks, json_schema, streaming_schema
from ultr.log.readers import check_schemas, csv_form, csv_settings, file_kind, parquet_files, read_schemas
from ultr.log.schema import saved_names
from ultr.log.table import FEATURE_NAMES_KEY
from ultr.log.values import as_data_error
from ultr.utils.files import existing_file

BLOCK_BYTES = 16 << 20  # bytes of CSV text that are parsed at a time


@dataclass(frozen=True)
class Source:
    """The Parquet files of a log, which have the same columns."""

    name: str  # the path that the caller passed
    files: tuple[Path, ...]
    schema: pa.Schema


def find_source(source: str | Path, *, scratch: Path, ids: Callable[[pa.Schema], Iterable[str | None]]) -> Source:
    """Return the files of a path, a folder or a pattern; CSV and JSON Lines are converted to Parquet in `scratch`.

    `ids` returns the columns of a schema that hold ids. In a CSV file they are read as text, so that 007 and 7 stay
    different ids.
    """
    path = Path(source)
    if path.is_dir():
        files = parquet_files(path)
        if not files:
            hint = "pass a file, or a folder of such files"
            raise DataError("the folder has no Parquet files", where=source, hint=hint)
    elif glob.has_magic(str(source)) and not path.exists():
        files = sorted(Path(name) for name in glob.glob(str(source)))  # noqa: PTH207 - the pattern may be absolute
        if not files:
            raise DataError("no file matches this pattern", where=source, hint="check the pattern")
    else:
        files = [existing_file(path)]
    kinds = {file_kind(existing_file(file)) for file in files}
    if len(kinds) == 1 and kinds < {"CSV", "JSON Lines"}:
        convert = _from_csv if kinds == {"CSV"} else _from_json
        files = [convert(file, scratch / f"{i:05}.parquet", ids) for i, file in enumerate(files)]
    elif kinds != {"Parquet"}:
        got, hint = " and ".join(sorted(kinds)), "convert them to Parquet"
        raise DataError("the files must be Parquet, CSV or JSON Lines", where=source, got=got, hint=hint)
    schemas = read_schemas(files)
    check_schemas(files, schemas, schemas[0].names)
    return Source(str(source), tuple(file.resolve() for file in files), schemas[0])


def _from_json(path: Path, target: Path, ids: Callable[[pa.Schema], Iterable[str | None]]) -> Path:
    """Convert JSON Lines to Parquet, block by block; the columns are those of the first block."""
    schema = json_schema(path)
    schema = streaming_schema(schema, {name for name in ids(schema) if name is not None})
    target.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(target, schema, compression="snappy") as writer:
        for table in json_blocks(path, schema):
            writer.write_table(table)
    return target


def _from_csv(path: Path, target: Path, ids: Callable[[pa.Schema], Iterable[str | None]]) -> Path:
    """Convert a CSV file to Parquet, block by block."""
    compression, delimiter, names = csv_form(path)
    texts = ids(pa.schema([(name, pa.float64()) for name in names]))
    types = {name: pa.string() for name in texts if name is not None}

    def reader() -> Any:
        return pa.csv.open_csv(
            pa.input_stream(str(path), compression=compression),
            **csv_settings(delimiter, names, types, block_bytes=BLOCK_BYTES),
        )

    target.parent.mkdir(parents=True, exist_ok=True)
    with as_data_error(path, "CSV"):
        for column in reader().schema:  # types of the first block; later ones may have other values
            if pa.types.is_integer(column.type):
                types[column.name] = pa.float64()
            elif pa.types.is_null(column.type):
                types[column.name] = pa.string()
        content = reader()
        with pq.ParquetWriter(target, content.schema, compression="snappy") as writer:
            for batch in content:
                writer.write_batch(batch)
    return target


def feature_names(source: Source, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of all features; a column of lists has as many features as its first list has values."""
    names: list[str] = []
    saved = saved_names(source.schema, FEATURE_NAMES_KEY)
    for name in columns:
        if not hasattr(source.schema.field(name).type, "value_field"):
            names.append(name)
            continue
        width = _first_length(source, name)
        use_saved = len(columns) == 1 and len(saved) == width
        names += saved if use_saved else [f"{name}[{i}]" for i in range(width)]
    return tuple(names)


def _first_length(source: Source, name: str) -> int:
    for path in source.files:
        with as_data_error(path, "Parquet"), pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=16, columns=[name]):
                if lengths := [len(value) for value in batch.column(name).to_pylist() if value is not None]:
                    return lengths[0]
    raise ColumnError(f"feature column '{name}' has no values", where=source.name, hint="drop it")
