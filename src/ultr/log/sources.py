"""The files of a source: a file, a folder, a pattern, `date=.../` partitions, a URL, or several of them.

All readers find and open their files here.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from ultr.errors import ColumnError, DataError, OptionError
from ultr.log.columns import SEVERAL, Columns, as_data_error, saved_names
from ultr.log.conditions import CONDITION, filter_rows
from ultr.log.table import ACTIONS_KEY, CATEGORICAL_KEY, FEATURE_NAMES_KEY
from ultr.utils.files import content_kind, existing_file, fingerprint
from ultr.utils.stores import Stored, as_path, as_url, fetched, files_below, find, shown

SUFFIXES = {
    ".parquet": "Parquet",
    ".pq": "Parquet",
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".jsonl": "JSON Lines",
    ".ndjson": "JSON Lines",
    ".json": "JSON Lines",
    ".txt": "SVMlight",
    ".svm": "SVMlight",
    ".svmlight": "SVMlight",
    ".letor": "SVMlight",
}
PARTITION = re.compile(r"([A-Za-z_]\w*)=([^/]*)")  # a folder such as `date=2026-11-01`
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # the value of a partition of rows without a value
ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
DAY = "\0day"  # the column of days that are the order of sources; no column of a log has this name
THREADS = 16  # files of a store whose columns are read at the same time


@dataclass(frozen=True)
class SourceFile:
    """A file on this machine, or in a store."""

    name: str  # its path or URL
    stored: Stored | None = None  # None: on this machine
    partitions: Mapping[str, str | None] = field(default_factory=dict, compare=False)  # column -> value
    number: int = field(default=0, compare=False)  # its place among the sources or the files that a pattern matches

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> str:
        """The path of the file in its `filesystem`."""
        return self.name if self.stored is None else self.stored.path

    @property
    def filesystem(self) -> Any:
        """Pyarrow's file system of the file; None on this machine."""
        return None if self.stored is None else self.stored.filesystem

    @property
    def gzipped(self) -> bool:
        return self.name.lower().endswith(".gz")

    def stream(self) -> Any:
        """Open the file to be read from start to end; a gzipped file is unpacked."""
        compression = "gzip" if self.gzipped else None
        if self.stored is None:
            return pa.input_stream(self.path, compression=compression)
        return self.filesystem.open_input_stream(self.path, compression=compression)

    def arrow(self) -> Any:
        """Open the file as an Arrow file."""
        whole = pa.memory_map(self.path) if self.stored is None else self.filesystem.open_input_file(self.path)
        return pa.ipc.open_file(whole)

    def parquet(self, **options: Any) -> pq.ParquetFile:
        return pq.ParquetFile(self.path, filesystem=self.filesystem, **options)

    def local(self) -> Path:
        """Return the path of the file on this machine; a file of a store is copied to it first."""
        return fetched(self.name)


@dataclass(frozen=True)
class Source:
    """Files of one format; `partitions` are the columns that the names of their folders give."""

    name: str
    files: tuple[SourceFile, ...]
    kind: str
    partitions: pa.Schema

    def only(self, conditions: Sequence[str]) -> Source:
        """Return the source without the files whose partitions do not meet the conditions."""
        names = self.partitions.names
        used = [text for text in conditions if (m := CONDITION.fullmatch(text)) is not None and m["column"] in names]
        if not used:
            return self
        values = pa.table({name: self.values(name) for name in names})
        place = "\0place"  # no partition has this name
        kept = filter_rows(values.append_column(place, pa.array(range(len(self.files)))), used)[place].to_pylist()
        if not kept:
            got, hint = " and ".join(used), "check --where"
            raise DataError("no partition meets the conditions", where=self.name, got=got, hint=hint)
        return replace(self, files=tuple(self.files[i] for i in kept))

    def by_day(self) -> tuple[Source, str]:
        """Return the source with a column of days, and its name: a partition of dates, or else the order of sources."""
        dates = [column.name for column in self.partitions if column.type == pa.date32()]
        if dates:
            return self, dates[0]
        if len({file.number for file in self.files}) < 2:
            hint = "pass days as several logs in their order, as folders date=2026-11-01/, or name the column of times"
            raise OptionError("the days of the log are not known, so weights cannot decay", got=self.name, hint=hint)
        days = [{**file.partitions, DAY: str(date.fromordinal(1 + file.number))} for file in self.files]
        files = tuple(replace(file, partitions=each) for file, each in zip(self.files, days, strict=True))
        return replace(self, files=files, partitions=self.partitions.append(pa.field(DAY, pa.date32()))), DAY

    def values(self, name: str) -> pa.Array:
        """Return the value of a partition column in each file."""
        return _typed([file.partitions.get(name) for file in self.files], self.partitions.field(name).type)

    def partition_values(self) -> dict[str, list[str]]:
        """Return the values of each partition column, as texts."""
        names = self.partitions.names
        return {name: sorted({str(file.partitions.get(name) or NO_VALUE) for file in self.files}) for name in names}

    def typed_value(self, file: SourceFile, name: str) -> Any:
        """Return the value of a partition column in a file."""
        return _typed([file.partitions.get(name)], self.partitions.field(name).type)[0].as_py()

    def with_partitions(self, table: pa.Table, file: SourceFile, names: Iterable[str]) -> pa.Table:
        """Return the rows of a file with its partition columns among `names`, and with the columns in this order."""
        for name in self.partitions.names:
            if name in names:
                value = pa.scalar(self.typed_value(file, name), self.partitions.field(name).type)
                table = table.append_column(name, pa.repeat(value, table.num_rows))
        return table.select(list(names))

    def fingerprint(self) -> str:
        """Return a digest of the contents of the files; of files in a store, of their names, sizes and times."""
        path = as_path(self.name)
        if as_url(self.name) is None and path.exists() and not self.partitions.names:
            return fingerprint(path)
        content = [
            (f.name, fingerprint(Path(f.path)) if f.stored is None else (f.stored.size, f.stored.changed))
            for f in self.files
        ]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def sum(self, count: Callable[[Any], int]) -> int:
        """Return the sum of a number of each Parquet file, from its footer."""
        return sum(each_file(self.files, lambda file: count(_footer(file))))


def _footer(file: SourceFile) -> Any:
    with as_data_error(file, "Parquet"):
        return pq.read_metadata(file.path, filesystem=file.filesystem)


def each_file(files: Sequence[SourceFile], read: Callable[[SourceFile], Any]) -> list[Any]:
    """Return the result of a function for each file; files of stores are read at the same time."""
    if all(file.stored is None for file in files):
        return [read(file) for file in files]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(read, files))


# --- Finding files ----------------------------------------------------------------------------------------------------


def open_source(source: str | Path | Sequence[str | Path]) -> Source:
    """Return the files of a path, URL or pattern, or of several, given as a list or separated by commas.

    A folder has the data files in it, and those in its folders `NAME=VALUE`. Such folders, also in the path itself,
    give all their rows a column NAME: whole numbers, dates, or else texts.
    """
    names = _several(source) if isinstance(source, str | Path) else [str(each) for each in source]
    if not names:
        raise DataError("there are no sources", hint="pass a file, a folder, a pattern or a URL")
    numbers = count()
    files = {file.name: file for name in names for file in _numbered(_find(name), name, numbers)}
    kinds = {file_kind(file): file.name for file in files.values()}
    if len(kinds) > 1:
        got, hint = "; ".join(f"{name} ({kind})" for kind, name in sorted(kinds.items())), "convert them to Parquet"
        raise DataError("all files of a source must have one format", where=", ".join(names), got=got, hint=hint)
    columns = dict.fromkeys(name for file in files.values() for name in file.partitions)
    types = {name: _type_of([file.partitions.get(name) for file in files.values()]) for name in columns}
    return Source(", ".join(map(shown, names)), tuple(files.values()), next(iter(kinds)), pa.schema(types.items()))


def _numbered(files: list[SourceFile], name: str, numbers: Iterator[int]) -> list[SourceFile]:
    """Return the files of a source with the next number; those that a pattern matches have one number each."""
    if glob.has_magic(name):
        return [replace(file, number=next(numbers)) for file in files]
    number = next(numbers)
    return [replace(file, number=number) for file in files]


def _several(source: str | Path) -> list[str]:
    """Return the sources that a text names; a comma separates two, unless it is in the name of a file."""
    text = str(source)
    if isinstance(source, Path) or "," not in text or (as_url(text) is None and as_path(text).exists()):
        return [text]
    return [name for part in text.split(",") if (name := part.strip())]


def is_source(source: str) -> bool:
    """Return whether a text names data files, and not a data set (a folder without such files)."""
    if "," in source or as_url(source) is not None or not as_path(source).is_dir():
        return True
    return bool(_data_files(_below(as_path(source))))


def _find(name: str) -> list[SourceFile]:
    url = as_url(name)
    if url is not None:
        return [_with_partitions(SourceFile(stored.url, stored)) for stored in _in_store(url)]
    path = as_path(name)
    if path.is_dir():
        files = _in_folder(path)
    elif glob.has_magic(str(path)) and not path.exists():
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))  # noqa: PTH207 - it may be absolute
        if not matches:
            raise DataError("no file matches this pattern", where=name, hint="check the pattern")
        files = [file for match in matches for file in (_in_folder(match) if match.is_dir() else [match])]
    else:
        files = [path]
    return [_with_partitions(SourceFile(str(existing_file(file)))) for file in files]


def _with_partitions(file: SourceFile) -> SourceFile:
    parts = [match for part in PurePosixPath(file.name).parts[:-1] if (match := PARTITION.fullmatch(part))]
    values = {part[1]: None if part[2] == NO_VALUE else unquote(part[2]) for part in parts}
    return replace(file, partitions=values)


def _below(folder: Path) -> list[Path]:
    """Return the files of a folder and of its folders `NAME=VALUE`; names that start with . or _ are temporary."""
    entries = sorted(path for path in folder.iterdir() if path.name[0] not in "._")
    inner = [path for path in entries if path.is_dir() and PARTITION.fullmatch(path.name)]
    return [path for path in entries if path.is_file()] + [file for path in inner for file in _below(path)]


def _in_folder(folder: Path) -> list[Path]:
    return [Path(name) for name in _checked([str(path) for path in _below(folder)], folder)]


def _in_store(url: str) -> list[Stored]:
    """Return the files that a URL names: a file, the files of a folder, or those that match a pattern."""
    if not glob.has_magic(url):
        stored = find(url)
        if stored is None:
            raise DataError("no such file or folder", where=url, hint="check the URL")
        if stored.size is not None:
            return [stored]
        files = {file.url: file for file in files_below(stored) if _plain(file.url[len(stored.url) + 1 :])}
        return [files[name] for name in _checked(list(files), url)]
    fixed = url[: re.search(r"[*?\[]", url).start()].rsplit("/", 1)[0]  # type: ignore[union-attr]  # it has magic
    pattern, stored = url.rstrip("/").split("/"), find(fixed)
    matches = {}
    for file in [] if stored is None else files_below(stored):
        parts = file.url.split("/")
        inside = "/".join(parts[len(pattern) :])  # of a folder that matches
        if len(parts) >= len(pattern) and all(map(fnmatchcase, parts, pattern)) and (not inside or _plain(inside)):
            matches[file.url] = file
    if not matches:
        raise DataError("no file matches this pattern", where=url, hint="check the pattern; ** is not supported")
    return [matches[name] for name in _checked(list(matches), url)]


def _plain(inside: str) -> bool:
    """Return whether a path in a folder is a file, or in folders `NAME=VALUE`, and not temporary."""
    *folders, name = inside.split("/")
    return name[:1] not in ("", ".", "_") and all(PARTITION.fullmatch(folder) for folder in folders)


def _data_files(names: Iterable[object]) -> dict[str, list[str]]:
    """Return format -> the files with a suffix of this format; SVMlight and .json only count if they are named."""
    kinds: dict[str, list[str]] = {}
    for name in map(str, names):
        kind = _kind_by_name(name)
        if kind not in (None, "SVMlight") and not name.lower().endswith((".json", ".json.gz")):
            kinds.setdefault(str(kind), []).append(name)
    return kinds


def _checked(names: Sequence[str], folder: object) -> list[str]:
    """Return the data files of a folder; raise DataError if there are none, or if they have several formats."""
    kinds = _data_files(names)
    if not kinds:
        hint = "pass a file, or a folder of Parquet, CSV, JSON Lines or Arrow files"
        raise DataError("the folder has no data files", where=folder, hint=hint)
    chosen = kinds.get("Parquet") or max(kinds.values(), key=len)
    if others := [name for kind in kinds.values() for name in kind if kind is not chosen]:
        what, hint = "the folder has data files of several formats", "move the others to another folder"
        raise DataError(what, where=folder, got=PurePosixPath(others[0]).name, hint=hint)
    return chosen


def _kind_by_name(name: str) -> str | None:
    name = name.lower()
    return SUFFIXES.get(PurePosixPath(name.removesuffix(".gz")).suffix)


def file_kind(file: SourceFile) -> str:
    """Return the format of a file by the suffix of its name; raise DataError if its first bytes do not match."""
    kind = _kind_by_name(file.name)
    if kind is None:
        hint = f"use one of {' '.join(SUFFIXES)}"
        raise DataError("the suffix of the name is not a known format", where=file, hint=hint)
    if file.gzipped and kind in ("Parquet", "Arrow"):
        raise DataError(f"gzipped {kind} files are not supported", where=file, hint="unpack it with gunzip")
    if file.stored is not None:  # reading says what is wrong; to read the start of each file would take a request
        return kind
    expected = "gzip" if file.gzipped else {"Parquet": "Parquet", "Arrow": "Arrow"}.get(kind, "text")
    content = content_kind(Path(file.path))
    if content != expected:
        hint = "rename the file to match its content"
        raise DataError(f"the name says {expected} but the file holds {content}", where=file, hint=hint)
    return kind


# --- Partition columns ------------------------------------------------------------------------------------------------


def _type_of(texts: Sequence[str | None]) -> pa.DataType:
    values = [text for text in texts if text is not None]
    if values and all(re.fullmatch(r"-?\d{1,18}", text) for text in values):
        return pa.int64()
    if not values or not all(ISO_DATE.fullmatch(text) for text in values):
        return pa.string()
    try:
        for text in values:
            date.fromisoformat(text)
    except ValueError:  # such as 2026-13-01
        return pa.string()
    return pa.date32()


def _typed(texts: Sequence[str | None], kind: pa.DataType) -> pa.Array:
    convert: Any = {pa.int64(): int, pa.date32(): date.fromisoformat}.get(kind, str)
    return pa.array([None if text is None else convert(text) for text in texts], kind)


# --- Columns of all files ---------------------------------------------------------------------------------------------
# The columns of several files of a source: one schema for all, whatever the order of the files.
#
# A column that is read must be in every file, with types that have a common type. Other columns may differ.


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
        what, hint = f"its features differ from the features of {first}", "write all files with the same features"
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
