"""What differs between engines: how they start, read, and sort. Ibis expressions and nesting are the same on all."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from ultr.errors import DataError, MissingExtraError, OptionError, UltrError, nearest
from ultr.log.nesting import GROUP_BYTES, ORDER, SHARD_BYTES, BadRowsError, Nesting, write_shards
from ultr.log.sources import Source

Progress = Callable[[int], None]  # is told the rows done so far
ENGINE_MODULES = {"duckdb", "_duckdb", "ibis", "pyspark", "py4j", "sqlglot"}
REFUSAL = re.compile(r"(?:BadRowsError|LabelError): (.+)")


class Engine(Protocol):
    """An engine that evaluates Ibis expressions."""

    def read(self, source: Source) -> Any: ...

    def fetch(self, expression: Any) -> pa.Table:
        """A small result."""
        ...

    def write(self, rows: Any, nesting: Nesting, folder: Path, *, total: int, progress: Progress) -> tuple[int, int]:
        """Sort rows, nest them and write them as shards; gives the requests and rows there were."""
        ...


@contextmanager
def engine_errors(where: object) -> Iterator[None]:
    """What an engine cannot do is said in a line, and what nesting refuses as a refusal."""
    try:
        yield
    except UltrError:
        raise
    except BadRowsError as error:
        raise DataError(str(error), where=where) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ENGINE_MODULES:
            raise
        text = str(error)
        if refused := REFUSAL.findall(text):  # from a worker
            raise DataError(refused[0].strip(), where=where) from error
        brief = " ".join(text.split())[:300]
        mend = "check the columns; if memory or disk ran out, pass --memory, or choose another place for --out"
        raise DataError(f"the engine failed ({type(error).__name__}: {brief})", where=where, mend=mend) from error


@contextmanager
def connected(name: str, *, scratch: Path, memory: int, threads: int | None, master: str | None) -> Iterator[Engine]:
    if name == "duckdb":
        if master is not None:
            raise OptionError("a master is for --engine spark", got=master)
        with _duckdb(scratch, memory, threads) as engine:
            yield engine
    elif name == "spark":
        with _spark(scratch, master) as engine:
            yield engine
    else:
        raise OptionError(f"no engine '{name}'", mend=nearest(name, ("duckdb", "spark")))


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Ibis calls engines by names that they are about to drop, which is not for our users to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


class DuckDB:
    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def read(self, source: Source) -> Any:
        # A path is a pattern to DuckDB; a bracket around a sign takes its meaning away.
        paths = [re.sub(r"([\[*?])", r"[\1]", str(path)) for path in source.files]
        with _no_warnings():
            return self.backend.read_parquet(paths, hive_partitioning=False, union_by_name=len(paths) > 1)

    def fetch(self, expression: Any) -> pa.Table:
        with _no_warnings():
            return self.backend.to_pyarrow(expression)

    def write(self, rows: Any, nesting: Nesting, folder: Path, *, total: int, progress: Progress) -> tuple[int, int]:
        """DuckDB sorts by way of the disk; the list aggregate would take several times the time and memory."""
        # Not Ibis's own reader of batches: it would hold all of the result.
        relation = self.backend.con.sql(self.backend.compile(rows.order_by(*ORDER)))
        read = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader
        requests = done = 0
        for some_requests, some_rows in write_shards(
            read(max(2048, 2 * GROUP_BYTES // nesting.row_bytes)), nesting, str(folder), "part"
        ):
            requests, done = requests + some_requests, done + some_rows
            progress(done)
        return requests, done


@contextmanager
def _duckdb(scratch: Path, memory: int, threads: int | None) -> Iterator[DuckDB]:
    try:
        import ibis

        options: dict[str, Any] = {"threads": threads} if threads is not None else {}
        backend = ibis.duckdb.connect(
            memory_limit=f"{memory}B",
            temp_directory=str(scratch / "spill"),
            preserve_insertion_order=False,  # rows are sorted, and no other order is asked for
            autoinstall_known_extensions=False,
            **options,
        )
    except ImportError as error:
        raise MissingExtraError("ultr prepare", package="ibis-framework[duckdb]", extra="prepare") from error
    # It would conclude from the statistics of Parquet files, which leave NaN out, that there is none.
    backend.con.execute("SET disabled_optimizers = 'statistics_propagation'")
    try:
        yield DuckDB(backend)
    finally:
        backend.disconnect()


class Spark:
    def __init__(self, backend: Any, session: Any) -> None:
        self.backend, self.session = backend, session
        self._views = 0

    def read(self, source: Source) -> Any:
        from pyspark.sql import functions

        # A path is a pattern to Spark, too.
        paths = ["file://" + re.sub(r"([\\\[\]{}*?])", r"\\\1", str(path)) for path in source.files]
        frame = self.session.read.parquet(*paths)
        for column in source.schema:  # Spark has no such times, and reads their numbers
            if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
                quoted = "`" + column.name.replace("`", "``") + "`"
                micros = functions.floor(functions.col(quoted) / 1000).cast("long")
                frame = frame.withColumn(column.name, functions.timestamp_micros(micros))
        name = f"ultr_source_{id(self)}_{self._views}"
        self._views += 1
        frame.createOrReplaceTempView(name)
        with _no_warnings():
            return self.backend.table(name)

    def fetch(self, expression: Any) -> pa.Table:
        with _no_warnings():
            return self.backend.to_pyarrow(expression)

    def write(self, rows: Any, nesting: Nesting, folder: Path, *, total: int, progress: Progress) -> tuple[int, int]:
        """Workers sort a range of the hashes each, nest it, and write it: the folder must be one they all see."""
        import pyspark

        import ultr

        pyspark.cloudpickle.register_pickle_by_value(ultr)  # so that workers need not have it
        size = total * nesting.row_bytes
        cores = self.session.sparkContext.defaultParallelism
        parts = max(1, -(-size // SHARD_BYTES), min(cores, size // (16 << 20)))
        frame = self.session.sql(self.backend.compile(rows))
        ordered = frame.repartitionByRange(parts, ORDER[0]).sortWithinPartitions(*ORDER)
        counts = ordered.mapInArrow(_task(nesting, str(folder)), "requests long, rows long").collect()
        for partial in folder.glob("*/.*"):  # of attempts that failed
            partial.unlink()
        return sum(row["requests"] for row in counts), sum(row["rows"] for row in counts)


def _task(nesting: Nesting, folder: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        name, attempt = f"part-{task.partitionId():05}", task.taskAttemptId()
        for requests, rows in write_shards(batches, nesting, folder, name, attempt=attempt):
            yield pa.record_batch({"requests": pa.array([requests]), "rows": pa.array([rows])})

    return write


@contextmanager
def _spark(scratch: Path, master: str | None) -> Iterator[Spark]:
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        mend = "install a Java runtime (17 or later) and set JAVA_HOME, or use --engine duckdb"
        raise UltrError("Spark needs Java, which is not on the PATH", mend=mend)
    try:
        import ibis
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise MissingExtraError("--engine spark", package="pyspark", extra="spark") from error
    active = SparkSession.getActiveSession()
    if active is None:
        active = _new_session(scratch, master)
        ours = True
    else:
        ours = False
    session = active.newSession()  # with settings of its own
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
        if ours:
            active.stop()


def _new_session(scratch: Path, master: str | None) -> Any:
    """A session that says nothing: Java takes what is our stderr when it starts, so that is a file for the while."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    address = master or os.environ.get("SPARK_MASTER") or "local[*]"
    if address.startswith("local"):  # workers are processes here, and need the packages that we have
        os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("ultr prepare").master(address)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(scratch / "spark"),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    chatter = scratch / "spark.log"
    try:
        with _stderr_in(chatter):
            return builder.getOrCreate()
    except (PySparkException, OSError, RuntimeError) as error:
        last = " ".join(chatter.read_text(errors="replace").split("\n")[-4:]).strip()
        mend = "check Java (17 or later) and --master, or use --engine duckdb"
        raise UltrError(f"Spark does not start ({last[-300:] or error})", mend=mend) from error


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
