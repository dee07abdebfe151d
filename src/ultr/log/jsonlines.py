"""Read JSON Lines: a file with one JSON object per line, also gzipped, whole or in blocks of lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.json

from ultr.errors import DataError
from ultr.log.sources import SourceFile
from ultr.log.values import as_data_error

BLOCK_BYTES = 16 << 20  # bytes of text that are parsed at a time; a line may be longer
KIND = "JSON Lines"


def read_json_lines(file: SourceFile, names: Sequence[str]) -> pa.Table:
    """Read keys of a whole file as columns; a line without the key has a missing value there."""
    tables = list(json_blocks(file, None))
    if not tables:
        raise DataError("there are no rows", where=file, hint="create the file again")
    with as_data_error(file, KIND):
        table = pa.concat_tables(tables, promote_options="permissive")
    return table.select([name for name in names if name in table.column_names])


def json_schema(file: SourceFile) -> pa.Schema:
    """Return the columns of the first lines of a file."""
    first = next(json_blocks(file, None), None)
    return pa.schema([]) if first is None else first.schema


def json_blocks(file: SourceFile, schema: pa.Schema | None) -> Iterator[pa.Table]:
    """Yield the lines of a file in tables; with a schema, only its columns, and in its types."""
    options = None
    if schema is not None:
        options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    with as_data_error(file, KIND), file.stream() as stream:
        for text in _whole_lines(stream):
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
    return pa.float64() if pa.types.is_integer(kind) or pa.types.is_null(kind) else kind


def _whole_lines(stream: Any) -> Iterator[bytes]:
    rest = b""
    while block := stream.read(BLOCK_BYTES):
        text = rest + block
        end = text.rfind(b"\n") + 1
        text, rest = text[:end], text[end:]
        if text.strip():
            yield text
    if rest.strip():
        yield rest
