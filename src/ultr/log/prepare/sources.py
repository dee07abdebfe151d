"""The files of a log for `ultr prepare`, as Parquet, and their columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from ultr.errors import ColumnError, DataError
from ultr.log.drift import all_columns, common_schema, common_type, plain_type, read_schemas
from ultr.log.jsonlines import json_blocks, streaming_schema
from ultr.log.readers import csv_form, csv_settings, file_schemas
from ultr.log.schema import Columns, saved_names
from ultr.log.sources import Source, SourceFile, open_source
from ultr.log.table import FEATURE_NAMES_KEY
from ultr.log.values import as_data_error

BLOCK_BYTES = 16 << 20  # bytes of CSV text that are parsed at a time


@dataclass(frozen=True)
class Tables:
    """The Parquet files of a log, and their columns, with a common type for those that are read."""

    source: Source
    schemas: tuple[pa.Schema, ...]

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def schema(self) -> pa.Schema:
        """All columns of the files, and the partition columns."""
        return all_columns(self.source, self.schemas)

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The common type of each column whose type differs between files, and has a common type."""
        kinds: dict[str, set[Any]] = {}
        for schema in set(self.schemas):
            for column in schema:
                kinds.setdefault(column.name, set()).add(plain_type(column.type))
        return {name: kind for name, found in kinds.items() if len(found) > 1 and (kind := common_type(found))}

    def check(self, names: Iterable[str], columns: Columns | None = None) -> None:
        """Raise ColumnError if one of the columns is not in all files, or has no common type."""
        common_schema(self.source, self.schemas, [name for name in names if name in self.schema.names], columns)


def find_tables(
    source: str | Path,
    *,
    scratch: Path,
    ids: Callable[[pa.Schema], Iterable[str | None]],
    where: Sequence[str] = (),
) -> Tables:
    """Return the Parquet files of a source; CSV and JSON Lines are converted to Parquet in `scratch`.

    `ids` returns the columns of a schema that hold ids. In a CSV file they are read as text, so that 007 and 7 stay
    different ids. Files whose partitions do not meet the conditions `where` are left out.
    """
    found = open_source(source).only(where)
    if found.kind in ("CSV", "JSON Lines"):
        schemas = file_schemas(found)
        texts = {name for name in ids(all_columns(found, schemas)) if name is not None}
        convert = _from_csv(found, texts) if found.kind == "CSV" else _from_json(found, schemas, texts)
        scratch.mkdir(parents=True, exist_ok=True)
        files = []
        for i, file in enumerate(found.files):
            convert(file, target := scratch / f"{i:05}.parquet")
            files.append(replace(file, name=str(target), stored=None))
        found = replace(found, files=tuple(files))
    elif found.kind != "Parquet":
        hint = "convert them to Parquet"
        raise DataError("the files must be Parquet, CSV or JSON Lines", where=source, got=found.kind, hint=hint)
    return Tables(found, tuple(read_schemas(found.files)))


def _from_json(source: Source, schemas: Sequence[pa.Schema], ids: set[str]) -> Callable[[SourceFile, Path], None]:
    """Return a function that converts JSON Lines to Parquet, block by block.

    The columns are those of the first blocks of all files, and have one type in all files.
    """
    names = [name for name in all_columns(source, schemas).names if name not in source.partitions.names]
    schema = streaming_schema(common_schema(source, schemas, names), ids)

    def convert(file: SourceFile, target: Path) -> None:
        with pq.ParquetWriter(target, schema, compression="snappy") as writer:
            for table in json_blocks(file, schema):
                writer.write_table(table)

    return convert


def _from_csv(source: Source, ids: set[str]) -> Callable[[SourceFile, Path], None]:
    """Return a function that converts CSV files to Parquet, block by block.

    The types are those of the first blocks of all files. A column that is empty there holds texts.
    """

    def reader(file: SourceFile, types: Mapping[str, Any]) -> Any:
        delimiter, names = csv_form(file)
        settings = csv_settings(delimiter, names, dict(types), block_bytes=BLOCK_BYTES)
        return pa.csv.open_csv(file.stream(), **settings)

    types = dict.fromkeys(ids, pa.string())
    kinds: dict[str, set[Any]] = {}
    for file in source.files:
        with as_data_error(file, "CSV"):
            for column in reader(file, types).schema:
                kinds.setdefault(column.name, set()).add(column.type)
    for name, found in kinds.items():
        known = {pa.float64() if pa.types.is_integer(kind) else kind for kind in found if not pa.types.is_null(kind)}
        if not known:
            types[name] = pa.string()
        elif len(known) == 1:  # else the files differ, which is an error if the column is read
            types[name] = known.pop()

    def convert(file: SourceFile, target: Path) -> None:
        with as_data_error(file, "CSV"):
            content = reader(file, types)
            with pq.ParquetWriter(target, content.schema, compression="snappy") as writer:
                for batch in content:
                    writer.write_batch(batch)

    return convert


def feature_names(source: Tables, columns: Sequence[str]) -> tuple[str, ...]:
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


def _first_length(source: Tables, name: str) -> int:
    for each in source.source.files:
        with as_data_error(each, "Parquet"), each.parquet() as file:
            for batch in file.iter_batches(batch_size=16, columns=[name]):
                if lengths := [len(value) for value in batch.column(name).to_pylist() if value is not None]:
                    return lengths[0]
    raise ColumnError(f"feature column '{name}' has no values", where=source.name, hint="drop it")
