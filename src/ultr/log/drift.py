"""The columns of several files of a source: one schema for all, whatever the order of the files.

A column that is read must be in every file, with types that have a common type. Other columns may differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ultr.errors import ColumnError, DataError
from ultr.log.schema import SEVERAL, Columns, saved_names
from ultr.log.sources import Source, SourceFile, each_file
from ultr.log.table import ACTIONS_KEY, CATEGORICAL_KEY, FEATURE_NAMES_KEY
from ultr.log.values import as_data_error


def read_schemas(files: Sequence[SourceFile]) -> list[pa.Schema]:
    """Return the schema of each Parquet file."""

    def read(file: SourceFile) -> pa.Schema:
        with as_data_error(file, "Parquet"):
            return pq.read_schema(file.path, filesystem=file.filesystem)

    return each_file(files, read)


def all_columns(source: Source, schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return a schema with all columns of the files, and the partition columns; it does not depend on their order.

    Raise DataError if the files name the features of a column of lists differently.
    """
    base = sorted(schemas, key=lambda schema: (-len(schema.names), schema.names, list(map(str, schema.types))))
    saved = {tuple(saved_names(schema, FEATURE_NAMES_KEY)) for schema in base}
    if len(saved) > 1:
        first = min(source.files, key=str)
        expected = saved_names(schemas[source.files.index(first)], FEATURE_NAMES_KEY)
        pairs = zip(source.files, schemas, strict=True)
        other = min((f for f, schema in pairs if saved_names(schema, FEATURE_NAMES_KEY) != expected), key=str)
        what, hint = f"its features differ from those of {first}", "write all files with the same features"
        raise DataError(what, where=other, hint=hint)
    columns = {column.name: column for schema in (*reversed(base), source.partitions) for column in schema}
    metadata = dict(base[0].metadata or {})
    for key in (ACTIONS_KEY, CATEGORICAL_KEY):
        listed = dict.fromkeys(name for schema in base for name in saved_names(schema, key))
        metadata |= {key: json.dumps(list(listed)).encode()} if listed else {}
    twice = [column for column in base[0] if base[0].names.count(column.name) > 1]  # an error, which is found later
    names = dict.fromkeys(name for schema in (*base, source.partitions) for name in schema.names)
    return pa.schema([*(columns[name] for name in names), *twice], metadata=metadata or None)


def common_schema(
    source: Source, schemas: Sequence[pa.Schema], names: Sequence[str], columns: Columns | None = None
) -> pa.Schema:
    """Return the types that the columns `names`, without partition columns, have in all files.

    Raise ColumnError if a column is missing in a file, or if two files have types that have no common type.
    """
    wanted = [name for name in names if name not in source.partitions.names]
    if len(schemas) == 1:
        return pa.schema([schemas[0].field(name) for name in wanted], metadata=schemas[0].metadata)
    places = sorted(range(len(schemas)), key=lambda i: source.files[i].name)
    fields = []
    for name in wanted:
        kinds: dict[Any, list[str]] = {}
        missing = []
        for i in places:
            place = schemas[i].get_field_index(name)
            if place < 0:
                missing.append(source.files[i].name)
            else:
                kinds.setdefault(plain_type(schemas[i].field(place).type), []).append(source.files[i].name)
        if missing and source.kind != "JSON Lines":  # a line of JSON leaves out keys without a value
            what = f"column '{name}' is in {len(schemas) - len(missing)} of {len(schemas)} files"
            raise ColumnError(what, where=source.name, got=f"no such column in {missing[0]}", hint=_hint(name, columns))
        kind = common_type(kinds)
        if kind is None:
            texts = [f"{kind} in {where[0]}" for kind, where in sorted(kinds.items(), key=lambda kind: str(kind[0]))]
            what, hint = f"column '{name}' has different types", "write it with one type to all files"
            raise ColumnError(what, where=source.name, got=" and ".join(texts), hint=hint)
        fields.append(pa.field(name, kind))
    return pa.schema(fields, metadata=all_columns(source, schemas).metadata)


def common_type(kinds: Iterable[pa.DataType]) -> pa.DataType | None:
    """Return a type that holds the values of all types, such as double for int64 and double; None if there is none."""
    try:
        parts = [pa.schema([("", kind)]) for kind in sorted(kinds, key=str)]
        return pa.unify_schemas(parts, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of dictionaries and extension types."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    return plain_type(kind.value_type) if pa.types.is_dictionary(kind) else kind


def _hint(name: str, columns: Columns | None) -> str:
    every = "write it to all files"
    roles = {} if columns is None else columns.by_role
    role = next((role for role, used in roles.items() if name in ([used] if isinstance(used, str) else used)), None)
    if role in SEVERAL:
        return f"{every}, or name the columns that all files have with --{role}"
    return every if role in (None, "request") else f"{every}, or pass --{role} '' to read without it"


def as_common(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the rows of a file with the columns and types of a schema; a column that is missing has no values."""
    columns = []
    for column in schema:
        values = table[column.name] if column.name in table.column_names else pa.nulls(table.num_rows, column.type)
        columns.append(values if values.type == column.type else values.cast(column.type))
    return pa.Table.from_arrays(columns, schema=schema)


def read_together(
    source: Source,
    schemas: Sequence[pa.Schema] | None,
    names: Sequence[str],
    columns: Columns,
    read: Callable[[SourceFile, list[str]], pa.Table],
) -> pa.Table:
    """Read columns of all files as one table; `schemas` are the files' schemas, or None if only reading tells them."""
    wanted = [name for name in names if name not in source.partitions.names]
    common = None if schemas is None else common_schema(source, schemas, names, columns)
    tables = each_file(source.files, lambda file: read(file, wanted))
    if len(tables) > 1:
        common = common or common_schema(source, [table.schema for table in tables], names, columns)
        with as_data_error(source.name, "files of one log"):
            tables = [as_common(table, common) for table in tables]
    parts = [source.with_partitions(t, file, names) for t, file in zip(tables, source.files, strict=True)]
    return parts[0] if len(parts) == 1 else pa.concat_tables(parts)
