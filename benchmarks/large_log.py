"""Measure the time and peak memory of `ultr bias` or `ultr prepare` on a log that is larger than memory.

    python benchmarks/large_log.py --rows 20000000 --folder /somewhere/with/5GB
    python benchmarks/large_log.py --rows 100000000 --features 8 --engine duckdb --memory 4GB --folder ...
    python benchmarks/large_log.py --rows 100000000 --features 8 --prepare --memory 4GB --folder ...
    python benchmarks/large_log.py --rows 10000000 --features 8 --format ubi --memory 1GB --folder ...

A noisy ranker shows ten of twenty candidates, drawn from 200,000 items with 50 features (--features), to users with
position bias. With `--format ubi`, the rows are also written as events (one for each item shown, and one for each
click), and `ultr prepare` converts both: `times` is the time for the events divided by that for the log.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ultr.datasets.users import EYE_TRACKING

ITEMS, SHOWN, CANDIDATES, BLOCK = 200_000, 10, 20, 20_000


def tables(rows: int, width: int) -> Iterator[pa.Table]:
    """Yield the rows of a log."""
    rng = np.random.default_rng(0)
    taste, other = rng.normal(size=(2, width)) / np.sqrt(width)
    items = rng.normal(size=(ITEMS, width)).astype(np.float32)
    beta, score = 1 / (1 + np.exp(2 - 2 * items @ taste)), items @ (taste + other)
    for first in range(0, rows // SHOWN, BLOCK):
        requests = min(BLOCK, rows // SHOWN - first)
        candidates = rng.integers(0, ITEMS, (requests, CANDIDATES))
        noisy = score[candidates] + 0.5 * rng.normal(size=candidates.shape)
        shown = np.take_along_axis(candidates, np.argsort(-noisy, axis=1)[:, :SHOWN], axis=1)
        clicked = rng.random(shown.shape) < np.array(EYE_TRACKING) * beta[shown]
        features = pa.FixedSizeListArray.from_arrays(pa.array(items[shown.reshape(-1)].reshape(-1)), width)
        yield pa.table(
            {
                "request": np.repeat(np.arange(first, first + requests), SHOWN),
                "item": shown.reshape(-1),
                "position": np.tile(np.arange(1, SHOWN + 1), requests),
                "click": clicked.reshape(-1).astype(np.int8),
                "features": features.cast(pa.list_(pa.float32())),
            }
        )


def with_texts(log: pa.Table) -> pa.Table:
    """Return a log whose ids are texts, as those of UBI are."""
    for name in ("request", "item"):
        log = log.set_column(log.column_names.index(name), name, pc.cast(log[name], pa.string()))
    return log


def ubi_events(log: pa.Table) -> pa.Table:
    """Return the events of a log, in UBI 1.3: an impression of each row, and then a click of each row with one."""
    clicked = log.filter(pc.equal(log["click"], 1))
    rows = pa.concat_tables([log, clicked]).combine_chunks()
    column = {name: rows[name].combine_chunks() for name in rows.column_names}
    flat = column["features"].flatten()
    width = len(flat) // len(rows)
    numbers = [flat.take(pa.array(np.arange(i, len(flat), width))) for i in range(width)]
    detail = pa.StructArray.from_arrays(numbers, [f"f{i}" for i in range(width)])
    item = pa.StructArray.from_arrays([column["item"], detail], ["object_id", "object_detail"])
    place = pa.StructArray.from_arrays([column["position"]], ["ordinal"])
    return pa.table(
        {
            "application": pa.array(np.full(len(rows), "shop")),
            "action_name": pa.array(["impression"] * len(log) + ["click"] * len(clicked)),
            "query_id": column["request"],
            "timestamp": pa.array([f"2026-05-01T10:{i // 60 % 60:02}:{i % 60:02}Z" for i in range(len(rows))]),
            "event_attributes": pa.StructArray.from_arrays([item, place], ["object", "position"]),
        }
    )


def write(path: Path, parts: Iterable[pa.Table]) -> None:
    """Write tables as Parquet, or as JSON Lines if the name says so."""
    with ExitStack() as stack:
        lines = stack.enter_context(path.open("w")) if path.suffix == ".jsonl" else None
        writer = None
        for table in parts:
            if lines is not None:
                lines.writelines(json.dumps(row) + "\n" for row in table.to_pylist())
                continue
            writer = writer or stack.enter_context(pq.ParquetWriter(path, table.schema, compression="lz4"))
            writer.write_table(table)


def size(path: Path) -> float:
    return round(path.stat().st_size / 1e9, 2)


def run(command: Sequence[str]) -> tuple[str, dict[str, float]]:
    """Run `ultr`, and return what it prints, its time and its largest memory."""
    started = time.monotonic()
    with subprocess.Popen([sys.executable, "-m", "ultr", *command], stdout=subprocess.PIPE, text=True) as process:
        printed = process.stdout.read() if process.stdout is not None else ""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(process.returncode)
    return printed, {
        "seconds": round(time.monotonic() - started, 1),
        "core-seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak GiB": round(used.ru_maxrss / 2**20, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000, help="rows of the log")
    parser.add_argument("--folder", type=Path, help="a folder to keep the log in (default: a temporary one)")
    parser.add_argument("--features", type=int, default=50, help="features of the log")
    parser.add_argument("--engine", help="duckdb or spark (default: in memory)")
    parser.add_argument("--memory", help="memory limit of DuckDB, such as 4GB")
    parser.add_argument("--prepare", action="store_true", help="measure ultr prepare instead of ultr bias")
    parser.add_argument("--format", choices=("ubi",), help="measure ultr prepare of events, and of their log")
    parser.add_argument("--json-lines", action="store_true", help="with --format: JSON Lines, not Parquet")
    options = parser.parse_args()
    limits = ["--memory", options.memory] if options.memory else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        name, suffix = f"log-{options.rows}-{options.features}", ".jsonl" if options.json_lines else ".parquet"
        texts = options.format is not None
        parts = partial(tables, options.rows, options.features)
        path = folder / (f"{name}.texts{suffix}" if texts else f"{name}.parquet")
        if not path.exists():
            write(path, map(with_texts, parts()) if texts else parts())
        results: dict[str, object] = {"rows": options.rows, "engine": options.engine, "file GB": size(path)}
        engine = ["--engine", options.engine] if options.engine else []
        if not texts:
            command = ["bias", str(path), "--json"]
            if options.prepare:
                command = ["prepare", str(path), "--out", str(path.with_suffix(".lists")), "--json"]
            printed, used = run([*command, *engine, *limits])
            verdict = None if options.prepare else json.loads(printed)["verdict"]["status"]
            print(json.dumps({**results, **used, "verdict": verdict}))
            return
        events = folder / f"{name}.events{suffix}"
        if not events.exists():
            write(events, map(ubi_events, map(with_texts, parts())))
        lists = ["--out", str(Path(temporary) / "lists"), "--overwrite", "--json"]
        of_log = run(["prepare", str(path), *lists, *limits])[1]
        of_events = run(["prepare", str(events), "--format", options.format, *lists, *limits])[1]
        times = round(of_events["seconds"] / of_log["seconds"], 2)
        print(json.dumps({**results, "events GB": size(events), "times": times, "log": of_log, "events": of_events}))


if __name__ == "__main__":
    main()
