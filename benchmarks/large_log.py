"""Measure the time and peak memory of `ultr bias` or `ultr prepare` on a log that is larger than memory.

    python benchmarks/large_log.py --rows 20000000 --folder /somewhere/with/5GB
    python benchmarks/large_log.py --rows 100000000 --features 8 --engine duckdb --memory 4GB --folder ...
    python benchmarks/large_log.py --rows 100000000 --features 8 --prepare --memory 4GB --folder ...

A noisy ranker shows ten of twenty candidates, drawn from 200,000 items with 50 features (--features), to users with
position bias.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ultr.datasets.users import EYE_TRACKING

ITEMS, SHOWN, CANDIDATES, BLOCK = 200_000, 10, 20, 20_000


def write(path: Path, rows: int, width: int) -> None:
    rng = np.random.default_rng(0)
    taste, other = rng.normal(size=(2, width)) / np.sqrt(width)
    items = rng.normal(size=(ITEMS, width)).astype(np.float32)
    beta, score = 1 / (1 + np.exp(2 - 2 * items @ taste)), items @ (taste + other)
    writer = None
    for first in range(0, rows // SHOWN, BLOCK):
        requests = min(BLOCK, rows // SHOWN - first)
        candidates = rng.integers(0, ITEMS, (requests, CANDIDATES))
        noisy = score[candidates] + 0.5 * rng.normal(size=candidates.shape)
        shown = np.take_along_axis(candidates, np.argsort(-noisy, axis=1)[:, :SHOWN], axis=1)
        clicked = rng.random(shown.shape) < np.array(EYE_TRACKING) * beta[shown]
        features = pa.FixedSizeListArray.from_arrays(pa.array(items[shown.reshape(-1)].reshape(-1)), width)
        table = pa.table(
            {
                "request": np.repeat(np.arange(first, first + requests), SHOWN),
                "item": shown.reshape(-1),
                "position": np.tile(np.arange(1, SHOWN + 1), requests),
                "click": clicked.reshape(-1).astype(np.int8),
                "features": features.cast(pa.list_(pa.float32())),
            }
        )
        writer = writer or pq.ParquetWriter(path, table.schema, compression="lz4")
        writer.write_table(table)
    if writer is not None:
        writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000, help="rows of the log")
    parser.add_argument("--folder", type=Path, help="a folder to keep the log in (default: a temporary one)")
    parser.add_argument("--features", type=int, default=50, help="features of the log")
    parser.add_argument("--engine", help="duckdb or spark (default: in memory)")
    parser.add_argument("--memory", help="memory limit of DuckDB, such as 4GB")
    parser.add_argument("--prepare", action="store_true", help="measure ultr prepare instead of ultr bias")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = (options.folder or Path(temporary)) / f"log-{options.rows}-{options.features}.parquet"
        if not path.exists():
            write(path, options.rows, options.features)
        started = time.monotonic()
        command = [sys.executable, "-m", "ultr", "bias", str(path), "--json"]
        if options.prepare:
            command = [sys.executable, "-m", "ultr", "prepare", str(path), "--out", str(path.with_suffix(".lists"))]
        for name in ("engine", "memory"):
            command += [f"--{name}", value] if (value := getattr(options, name)) is not None else []
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        verdict = None if options.prepare else json.loads(done.stdout)["verdict"]["status"]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        results = {
            "rows": options.rows,
            "engine": options.engine,
            "file GB": round(path.stat().st_size / 1e9, 2),
            "seconds": round(time.monotonic() - started, 1),
            "core-seconds": round(used.ru_utime + used.ru_stime, 1),
            "peak GiB": round(used.ru_maxrss / 2**20, 2),
            "verdict": verdict,
        }
        print(json.dumps(results))


if __name__ == "__main__":
    main()
