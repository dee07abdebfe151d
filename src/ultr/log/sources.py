"""The files that make up a log too large to be read at once, and what their columns are."""

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
from ultr.files import existing_file
from ultr.log.build import as_data_error
from ultr.log.readers import csv_form, csv_settings, file_kind
from ultr.log.table import FEATURE_NAMES_KEY

PARQUET = (".parquet", ".pq")
BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Source:
    """Parquet files with the same columns."""

    name: str  # as the caller gave it
    files: tuple[Path, ...]
    schema: pa.Schema


def find_source(given: str | Path, *, scratch: Path, ids: Callable[[pa.Schema], Iterable[str | None]]) -> Source:
    """The Parquet files of a path, a folder or a pattern; CSV files are converted to some in the `scratch` folder.

    `ids` tells which columns of a schema hold ids, which are text in a CSV file: 007 and 7 stay apart.
    """
    path = Path(given)
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.is_file() and p.name[0] not in "._")
        files = [p for p in files if p.suffix.lower() in PARQUET]
        if not files:
            raise DataError("the folder holds no Parquet files", where=given, mend="name a file, or a folder of shards")
    elif glob.has_magic(str(given)) and not path.exists():
        files = sorted(Path(found) for found in glob.glob(str(given)))  # noqa: PTH207 - it may be absolute
        if not files:
            raise DataError("no file matches", where=given, mend="check the pattern")
    else:
        files = [existing_file(path)]
    kinds = {file_kind(existing_file(file)) for file in files}
    if kinds == {"CSV"}:
        files = [_converted(file, scratch / f"{i:05}.parquet", ids) for i, file in enumerate(files)]
    elif kinds != {"Parquet"}:
        got = " and ".join(sorted(kinds))
        raise DataError("lists are prepared from Parquet or CSV files", where=given, got=got, mend="convert it")
    return Source(str(given), tuple(file.resolve() for file in files), _common_schema(files))


def _common_schema(files: Sequence[Path]) -> pa.Schema:
    """The schema of the first file, which the others must have columns of."""
    with as_data_error(files[0], "Parquet"):
        schema = pq.read_schema(files[0])
    for path in files[1:]:
        with as_data_error(path, "Parquet"):
            own = pq.read_schema(path)
        if (own.metadata or {}).get(FEATURE_NAMES_KEY) != (schema.metadata or {}).get(FEATURE_NAMES_KEY):
            raise DataError("its features are not those of the first file", where=path, mend="write files alike")
        if lacking := [name for name in schema.names if name not in own.names]:
            raise ColumnError(
                f"lacks the column '{lacking[0]}' of the first file", where=path, mend="write files alike"
            )
    return schema


def _converted(path: Path, target: Path, ids: Callable[[pa.Schema], Iterable[str | None]]) -> Path:
    """A CSV file as Parquet, piece by piece."""
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
        for column in reader().schema:  # of the first block: what is whole or missing there need not be so below
            if pa.types.is_integer(column.type):
                types[column.name] = pa.float64()
            elif pa.types.is_null(column.type):
                types[column.name] = pa.string()
        content = reader()
        with pq.ParquetWriter(target, content.schema, compression="snappy") as writer:
            for batch in content:
                writer.write_batch(batch)
    return target
