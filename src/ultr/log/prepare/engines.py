"""The engines DuckDB and Spark, which read, sort and count the rows of a large log, and the files they read."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import add
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from ultr.errors import ColumnError, DataError, MissingExtraError, OptionError, UltrError
from ultr.log.columns import Columns, as_data_error, saved_names
from ultr.log.prepare.nesting import GROUP_BYTES, ORDER, SHARD_BYTES, BadRowsError, Counts, Nesting, write_shards
from ultr.log.readers import FIRST_ROWS, csv_records, file_schemas, json_blocks, streaming_schema, with_floats
from ultr.log.sources import (
    Source,
    SourceFile,
    all_columns,
    common_schema,
    common_type,
    open_source,
    plain_type,
    read_schemas,
)
from ultr.log.table import FEATURE_NAMES_KEY
from ultr.utils.stores import as_fsspec, reject_network

# --- Files ------------------------------------------------------------------------------------------------------------
# The files of a log for `ultr prepare`, as Parquet, and their columns.

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

    def first_rows(self) -> pa.Table:
        file = self.source.files[0]
        with as_data_error(file, "Parquet"), file.parquet() as opened:
            return pa.Table.from_batches(islice(opened.iter_batches(FIRST_ROWS), 1), opened.schema_arrow)

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
    types = dict.fromkeys(ids, pa.string())
    kinds: dict[str, set[Any]] = {}
    for file in source.files:
        with as_data_error(file, "CSV"):
            for column in csv_records(file, types, block_bytes=BLOCK_BYTES).schema:
                kinds.setdefault(column.name, set()).add(column.type)
    for name, found in kinds.items():
        known = {with_floats(kind) for kind in found if not pa.types.is_null(kind)}
        if not known:
            types[name] = pa.string()
        elif len(known) == 1:  # else the files differ, which is an error if the column is read
            types[name] = known.pop()

    def convert(file: SourceFile, target: Path) -> None:
        with as_data_error(file, "CSV"):
            content = csv_records(file, types, block_bytes=BLOCK_BYTES)
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


# --- Engines ----------------------------------------------------------------------------------------------------------
# The engines DuckDB and Spark, for large logs: each reads and sorts rows, and evaluates Ibis expressions.

EngineName = Literal["duckdb", "spark"]
RecordBatches = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
Progress = Callable[[int], None]  # called with the number of rows done so far
ENGINE_MODULES = {"duckdb", "_duckdb", "ibis", "pyspark", "py4j", "sqlglot"}
# Errors of ultr in the text of an error of Spark.
WORKER_ERROR = re.compile(r"(?:BadRowsError|ColumnError|DataError|LabelError|MissingExtraError): (.+)")


class Engine(ABC):
    """An engine (DuckDB or Spark) that evaluates Ibis expressions; `backend` is that of Ibis."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self._views = 0

    @abstractmethod
    def read(self, tables: Tables) -> Any:
        """Return the rows of tables as an Ibis expression."""

    def fetch(self, expression: Any) -> pa.Table:
        """Evaluate an expression whose result fits in memory."""
        with _no_warnings():
            return self.backend.to_pyarrow(expression)

    @abstractmethod
    def write(self, rows: Any, nesting: Nesting, folder: Path, *, total: int, progress: Progress) -> Counts:
        """Sort the rows, group them by request and write them as shards; return what was written."""


@contextmanager
def engine_errors(where: object) -> Iterator[None]:
    """Turn exceptions of DuckDB, Spark and Ibis, and BadRowsError, into a DataError with a short message."""
    try:
        yield
    except UltrError:
        raise
    except BadRowsError as error:
        raise DataError(str(error), where=where) from error
    except Exception as error:
        if type(error).__name__ == "InterruptException" or str(error) == "Query interrupted":  # DuckDB after Ctrl-C
            raise KeyboardInterrupt from error
        if type(error).__module__.split(".")[0] not in ENGINE_MODULES:
            raise
        text = str(error)
        reject_network(error, where)
        if messages := WORKER_ERROR.findall(text):
            raise DataError(messages[0].strip(), where=where) from error
        brief = " ".join(text.split())[:300]
        hint = "check the columns; if memory or disk is full, pass --memory, or choose another disk for --out"
        raise DataError(f"the engine failed ({type(error).__name__}: {brief})", where=where, hint=hint) from error


def start_engine(
    name: EngineName, *, scratch: Path, memory: int, threads: int | None, master: str | None
) -> AbstractContextManager[Engine]:
    """Start an engine, and stop it at the end of the `with` block; `scratch` is a folder for its temporary files."""
    if name == "spark":
        return _spark(scratch, master)
    if master is not None:
        raise OptionError("--master needs --engine spark", got=master, hint="pass --engine spark")
    return _duckdb(scratch, memory, threads)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Hide warnings of deprecated functions that Ibis calls; users of ultr cannot change these calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


class DuckDB(Engine):
    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self._stores: list[Any] = []  # file systems that DuckDB knows

    def read(self, tables: Tables) -> Any:
        source, paths = tables.source, [self.path(file) for file in tables.source.files]
        settings: dict[str, Any] = {"hive_partitioning": False, "union_by_name": len(paths) > 1}
        partitions = source.partitions.names
        with _no_warnings():
            if not partitions:
                return self.backend.read_parquet(paths, **settings)
            rows = self.backend.read_parquet(paths, filename=True, **settings)
            rows = rows.select(*(name for name in rows.columns if name not in partitions))
            # DuckDB returns the paths that it was given, without the brackets.
            names = [self.path(file, escaped=False) for file in source.files]
            values = {f"ultr_{i}": source.values(name) for i, name in enumerate(partitions)}
            self._views += 1
            self.backend.con.register(f"ultr_files_{self._views}", pa.table({"ultr_file": names, **values}))
            of_file = self.backend.table(f"ultr_files_{self._views}")
            joined = rows.inner_join(of_file, rows.filename == of_file.ultr_file).drop("filename", "ultr_file")
            return joined.rename({name: f"ultr_{i}" for i, name in enumerate(partitions)})

    def path(self, file: SourceFile, *, escaped: bool = True) -> str:
        """Return the path of a file for DuckDB, which reads files of a store through pyarrow's file system."""
        path = str(Path(file.path).resolve())
        if file.stored is not None:
            # Each store has a scheme of its own. For `s3` itself, Ibis would download an extension of DuckDB.
            if file.filesystem not in self._stores:
                self._stores.append(file.filesystem)
                self.backend.con.register_filesystem(as_fsspec(file.filesystem, f"ultr{len(self._stores)}"))
            path = f"ultr{self._stores.index(file.filesystem) + 1}://{file.path}"
        # DuckDB reads a path as a pattern, and brackets escape its special characters.
        return re.sub(r"([\[*?])", r"[\1]", path) if escaped else path

    def write(self, rows: Any, nesting: Nesting, folder: Path, *, total: int, progress: Progress) -> Counts:
        """Write shards from a sort that uses disk; DuckDB's `list` aggregate would need several times the memory."""
        # This avoids the batch reader of Ibis, which keeps the whole result in memory.
        relation = self.backend.con.sql(self.backend.compile(rows.order_by(*ORDER)))
        read = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader
        written = Counts(0, 0, 0)
        batches = read(max(2048, 2 * GROUP_BYTES // nesting.row_bytes))
        for counts in write_shards(batches, nesting, str(folder), "part"):
            written = Counts(*map(add, written, counts))
            progress(written.rows + written.copies)
        return written


@contextmanager
def _duckdb(scratch: Path, memory: int, threads: int | None) -> Iterator[DuckDB]:
    try:
        import ibis

        options: dict[str, Any] = {"threads": threads} if threads is not None else {}
        backend = ibis.duckdb.connect(
            memory_limit=f"{memory}B",
            temp_directory=str(scratch / "spill"),
            preserve_insertion_order=False,  # the rows are sorted anyway
            autoinstall_known_extensions=False,
            **options,
        )
    except ImportError as error:
        raise MissingExtraError("--engine duckdb", package="ibis-framework[duckdb]", extra="prepare") from error
    # This optimizer trusts the statistics in Parquet files, which ignore NaN, so that checks would not find NaN.
    backend.con.execute("SET disabled_optimizers = 'statistics_propagation'")
    # Give memory back after each query; else it adds up above the limit. Older versions lack a setting.
    known = {name for (name,) in backend.con.execute("SELECT name FROM duckdb_settings()").fetchall()}
    for name, value in (("allocator_flush_threshold", "'1MB'"), ("allocator_background_threads", "true")):
        if name in known:
            backend.con.execute(f"SET {name} = {value}")
    try:
        yield DuckDB(backend)
    finally:
        backend.disconnect()


class Spark(Engine):
    def __init__(self, backend: Any, session: Any) -> None:
        super().__init__(backend)
        self.session = session

    def read(self, tables: Tables) -> Any:
        groups: dict[Any, list[SourceFile]] = {}  # files with the same columns and partitions
        for file, schema in zip(tables.source.files, tables.schemas, strict=True):
            groups.setdefault((schema.remove_metadata(), tuple(file.partitions.items())), []).append(file)
        frames = [self._frame(tables, schema, files) for (schema, _), files in groups.items()]
        frame = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), frames)
        name = f"ultr_source_{id(self)}_{self._views}"
        self._views += 1
        frame.createOrReplaceTempView(name)
        with _no_warnings():
            return self.backend.table(name)

    def _frame(self, tables: Tables, schema: pa.Schema, files: list[SourceFile]) -> Any:
        """Read files with the same columns and partitions; the types are those of all files of the source."""
        from pyspark.sql import functions
        from pyspark.sql.pandas.types import from_arrow_type

        # Spark reads a path as a pattern, and backslashes escape its special characters.
        paths = [re.sub(r"([\\\[\]{}*?])", r"\\\1", _spark_path(file)) for file in files]
        frame, source = self.session.read.parquet(*paths), tables.source
        for column in schema:
            quoted = "`" + column.name.replace("`", "``") + "`"
            if pa.types.is_timestamp(column.type) and column.type.unit == "ns":  # Spark reads them as plain numbers
                micros = functions.floor(functions.col(quoted) / 1000).cast("long")
                frame = frame.withColumn(column.name, functions.timestamp_micros(micros))
            elif (kind := tables.types.get(column.name, column.type)) != column.type:
                frame = frame.withColumn(column.name, functions.col(quoted).cast(from_arrow_type(kind)))
        for name in source.partitions.names:
            kind = source.partitions.field(name).type
            value = source.typed_value(files[0], name)
            frame = frame.withColumn(name, functions.lit(value).cast(from_arrow_type(kind)))
        return frame

    def write(self, rows: Any, nesting: Nesting, folder: Path, *, total: int, progress: Progress) -> Counts:
        """Let each worker sort and write the requests in a range of hashed ids; all workers must share the folder."""
        import pyspark

        import ultr

        pyspark.cloudpickle.register_pickle_by_value(ultr)  # workers get the code of ultr, and need not install it
        size = total * nesting.row_bytes
        cores = self.session.sparkContext.defaultParallelism
        parts = max(1, -(-size // SHARD_BYTES), min(cores, size // (16 << 20)))
        frame = self.session.sql(self.backend.compile(rows))
        ordered = frame.repartitionByRange(parts, ORDER[0]).sortWithinPartitions(*ORDER)
        schema = ", ".join(f"{name} long" for name in Counts._fields)
        counts = ordered.mapInArrow(_task(nesting, str(folder)), schema).collect()
        for partial in folder.glob("*/.*"):  # files of failed attempts
            partial.unlink()
        return Counts(*(sum(row[name] for row in counts) for name in Counts._fields))

    def map_to_parquet(self, rows: Any, work: RecordBatches, schema: Callable[[Any], Any], folder: Path) -> None:
        """Let workers map the record batches of rows, and write the results as Parquet into a folder that they share.

        `schema` returns Spark's schema of the results, given that of the rows.
        """
        import pyspark

        import ultr

        pyspark.cloudpickle.register_pickle_by_value(ultr)
        frame = self.session.sql(self.backend.compile(rows))

        def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return work(batches)

        results = frame.mapInArrow(task, schema(frame.schema))
        results.write.mode("append").parquet(f"file://{folder}")
        for other in [*folder.glob(".*"), *folder.glob("_*")]:  # checksums and marks of Spark
            other.unlink()


def _spark_path(file: SourceFile) -> str:
    """Return a path for Spark, which reads files of stores with its own connectors; that of S3 is `s3a`."""
    if file.stored is None:
        return f"file://{Path(file.path).resolve()}"
    return re.sub("^s3:", "s3a:", file.name)


def _task(nesting: Nesting, folder: str) -> RecordBatches:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        name, attempt = f"part-{task.partitionId():05}", task.taskAttemptId()
        for counts in write_shards(batches, nesting, folder, name, attempt=attempt):
            yield pa.record_batch({name: pa.array([count]) for name, count in counts._asdict().items()})

    return write


@contextmanager
def _spark(scratch: Path, master: str | None) -> Iterator[Spark]:
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        hint = "install a Java runtime (17 or later) and set JAVA_HOME, or use --engine duckdb"
        raise UltrError("Spark needs Java, which is not on the PATH", hint=hint)
    try:
        import ibis
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise MissingExtraError("--engine spark", package="pyspark", extra="spark") from error
    existing = SparkSession.getActiveSession()
    active = existing or _new_session(scratch, master)
    session = active.newSession()  # the settings below must not change the caller's session
    for name, value in {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.ansi.enabled": "false",
        "spark.sql.caseSensitive": "true",
        "spark.sql.legacy.parquet.nanosAsLong": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
    }.items():
        session.conf.set(name, value)
    try:
        yield Spark(ibis.pyspark.connect(session), session)
    finally:
        if existing is None:
            active.stop()


def _new_session(scratch: Path, master: str | None) -> Any:
    """Start a Spark session; messages that Java prints while it starts go to a file, not to the user."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    address = master or os.environ.get("SPARK_MASTER") or "local[*]"
    if address.startswith("local"):  # workers run on this machine, and need the packages of this environment
        os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("ultr").master(address)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(scratch / "spark"),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    messages = scratch / "spark.log"
    try:
        with _stderr_in(messages):
            return builder.getOrCreate()
    except (PySparkException, OSError, RuntimeError) as error:
        last = " ".join(messages.read_text(errors="replace").split("\n")[-4:]).strip()
        hint = "check Java (17 or later) and --master, or use --engine duckdb"
        raise UltrError(f"Spark does not start ({last[-300:] or error})", hint=hint) from error


@contextmanager
def _stderr_in(path: Path) -> Iterator[None]:
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
