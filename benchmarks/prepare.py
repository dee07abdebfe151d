"""Compare the time and memory of `ultr prepare` with hand-written SQL in DuckDB, with the same settings.

    python benchmarks/prepare.py --rows 10000000 --folder /somewhere/with/10GB

The log has requests of ten items, with 50 feature columns, in shuffled rows. Each competitor runs in a process of its
own, one after the other. The SQL statements group rows by request, in order of position, and write Parquet:

- `list_sort` sorts a list of records;
- `order by` sorts in each aggregate;
- `sort first` sorts rows before it groups them: the fastest, although DuckDB does not guarantee the order of the lists.

Unlike `ultr prepare`, the statements do not check, hash, split or order the requests.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FEATURES, SHOWN, BLOCK = 50, 10, 100_000
COLUMNS = ", ".join(f"f{i}" for i in range(FEATURES))
FIELDS = ("position", "item", "click", "features")
SQL = {
    "list_sort": f"""
        SELECT request, {", ".join(f"list_transform(shown, lambda x: x.{name}) AS {name}" for name in FIELDS)}
        FROM (
            SELECT request, list_sort(list(
                {{position: position, item: item, click: click, features: [{COLUMNS}]}}
            )) AS shown
            FROM read_parquet($source) GROUP BY request
        )""",
    "order by": f"""
        SELECT request, list(position ORDER BY position) AS position, list(item ORDER BY position) AS item,
            list(click ORDER BY position) AS click, list([{COLUMNS}] ORDER BY position) AS features
        FROM read_parquet($source) GROUP BY request""",
    "sort first": f"""
        SELECT request, list(position) AS position, list(item) AS item, list(click) AS click,
            list([{COLUMNS}]) AS features
        FROM (FROM read_parquet($source) ORDER BY request, position) GROUP BY request""",
}


def write(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    places = rng.permutation(rows)
    writer = None
    for first in range(0, rows, BLOCK):
        place = places[first : first + BLOCK]
        features = rng.standard_normal((FEATURES, len(place)), dtype=np.float32)
        table = pa.table(
            {
                "request": place // SHOWN,
                "item": rng.integers(0, 200_000, len(place)),
                "position": (place % SHOWN + 1).astype(np.int32),
                "click": (rng.random(len(place)) < 0.2 / (place % SHOWN + 1)).astype(np.int8),
                **{f"f{i}": features[i] for i in range(FEATURES)},
            }
        )
        writer = writer or pq.ParquetWriter(path, table.schema, compression="snappy", use_dictionary=False)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def run_sql(name: str, source: Path, out: Path, memory: str, threads: int) -> None:
    import duckdb

    spill = str(out) + ".spill"
    settings: dict[str, Any] = {"memory_limit": memory, "threads": threads, "temp_directory": spill}
    connection = duckdb.connect(config={**settings, "preserve_insertion_order": False})
    connection.execute(f"COPY ({SQL[name]}) TO '{out}' (FORMAT parquet, COMPRESSION snappy)", {"source": str(source)})


def measured(command: list[str]) -> dict[str, Any]:
    """Return the seconds and the peak memory of a command, measured by a process that has no other child."""
    watch = (
        "import json,resource,subprocess,sys,time; t=time.monotonic(); done=subprocess.run(sys.argv[1:],"
        "capture_output=True,text=True); used=resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(json.dumps({'seconds':round(time.monotonic()-t,1),'cpu seconds':round(used.ru_utime+used.ru_stime,1),"
        "'peak GiB':round(used.ru_maxrss/2**20,2),"
        "'failed':next((x for x in done.stderr.split('\\n') if 'Error' in x),'?')[:99] if done.returncode else None}))"
    )
    done = subprocess.run([sys.executable, "-c", watch, *command], capture_output=True, text=True, check=True)
    return {name: value for name, value in json.loads(done.stdout).items() if value is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the log")
    parser.add_argument("--folder", type=Path, help="a folder to keep the log in (default: a temporary one)")
    parser.add_argument("--memory", default="3GB", help="the memory limit of DuckDB")
    parser.add_argument("--threads", type=int, default=2, help="threads of DuckDB or Spark")
    parser.add_argument("--repeats", type=int, default=1, help="runs per competitor; the fastest counts")
    parser.add_argument("--spark", action="store_true", help="also measure --engine spark")
    parser.add_argument("--sql", nargs=3, metavar=("NAME", "SOURCE", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sql:
        name, source, out = options.sql
        run_sql(name, Path(source), Path(out), options.memory, options.threads)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        source = folder / f"impressions-{options.rows}.parquet"
        if not source.exists():
            write(source, options.rows)
        settings = ["--memory", options.memory, "--threads", str(options.threads)]
        lists, table = folder / "lists", folder / "grouped.parquet"
        prepare = [sys.executable, "-m", "ultr", "prepare", str(source), "--out", str(lists), "--overwrite"]
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("ultr prepare", *SQL)}
        for _ in range(options.repeats):
            runs["ultr prepare"].append(measured([*prepare, *settings]))
            for name in SQL:
                statement = [sys.executable, __file__, "--sql", name, str(source), str(table)]
                runs[name].append(measured([*statement, *settings]))
                table.unlink(missing_ok=True)
                shutil.rmtree(str(table) + ".spill", ignore_errors=True)
        results = {name: min(repeats, key=lambda run: run["seconds"]) for name, repeats in runs.items()}
        if options.spark:
            master = f"local[{options.threads}]"
            results["--engine spark"] = measured([*prepare, "--engine", "spark", "--master", master])
        shutil.rmtree(lists, ignore_errors=True)
    if "failed" in results["ultr prepare"]:
        raise SystemExit(f"ultr prepare failed: {results['ultr prepare']['failed']}")
    ours = results["ultr prepare"]["seconds"]
    ratios = {name: round(ours / results[name]["seconds"], 2) for name in SQL if "failed" not in results[name]}
    print(json.dumps({"rows": options.rows, **results, "prepare / sql": ratios}, indent=2))


if __name__ == "__main__":
    main()
