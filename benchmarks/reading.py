"""Measure how fast logs and data sets are read, as ratios within one run.

    python benchmarks/reading.py [--rows 470000] [--features 700] [--folder DIR]

| measured                | compared with                                        | bound |
|-------------------------|------------------------------------------------------|-------|
| SVMlight, first reading | scikit-learn's `load_svmlight_file` on the same file | 1.3   |
| SVMlight, from cache    | seconds                                              | 5 s   |
| Parquet, list column    | `pyarrow.parquet.read_table` on the same file        | 2     |

The default is the size of Yahoo! LETOR set 1: 470,000 rows of 700 features, of which about 220 are not zero.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_svmlight_file

from ultr.datasets import SPLITS, Dataset
from ultr.datasets.letor import read_letor
from ultr.log import Log, read_log, write_log

ROWS_PER_REQUEST = 24


def write_sparse(path: Path, rows: int, features: int, filled: float = 0.31) -> None:
    """Write a LETOR-format file that repeats a block of rows under other ids, because formatting numbers is slow."""
    rng = np.random.default_rng(0)
    block: list[str] = []
    for _ in range(2400):
        columns = np.flatnonzero(rng.random(features) < filled)
        values = rng.random(len(columns))
        block.append(" ".join(f"{c + 1}:{v:.6g}" for c, v in zip(columns, values, strict=True)))
    with path.open("w") as file:
        for start in range(0, rows, len(block)):
            count = min(len(block), rows - start)
            grades = rng.integers(5, size=count)
            file.writelines(f"{grades[i]} qid:{(start + i) // ROWS_PER_REQUEST + 1} {block[i]}\n" for i in range(count))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(what: str, ours: float, other: float | None, bound: str) -> None:
    ratio = f"{other:8.2f} s  ratio {ours / other:5.2f}" if other else " " * 23
    print(f"{what:<26} {ours:8.2f} s  {ratio}  (bound {bound})", flush=True)


def svmlight(folder: Path, rows: int, features: int) -> None:
    path = folder / "set1.txt"
    write_sparse(path, rows, features)
    print(f"{path.name}: {rows:,} rows, {features} features, {path.stat().st_size / 1e6:,.0f} MB", flush=True)
    other = seconds(lambda: load_svmlight_file(str(path), dtype=np.float32, query_id=True))
    ours = seconds(lambda: read_log(path))
    report("SVMlight", ours, other, "1.3")
    report("SVMlight, with caching", seconds(lambda: read_letor(path)), other, "1.3")
    # Summing touches every value of the memory-mapped cache, so that all of it is read within the measured time.
    from_cache = seconds(lambda: [np.sum(log.features) for log in splits_of(read_letor(path))])
    report("SVMlight, from cache", from_cache, None, "5 s")


def splits_of(dataset: Dataset) -> list[Log]:
    return [dataset[split] for split in SPLITS]


def parquet(folder: Path, rows: int, features: int) -> None:
    rng = np.random.default_rng(0)
    lengths = np.full(rows // 10, 10)
    positions = np.tile(np.arange(1, 11), len(lengths))
    log = Log(
        features=rng.random((10 * len(lengths), features), dtype=np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        request_ids=pa.array(np.arange(len(lengths))),
        feature_names=tuple(f"f{i}" for i in range(features)),
        positions=positions,
        actions={"click": (rng.random(len(positions)) < 0.1).astype(np.float32)},
    )
    path = folder / "log.parquet"
    write_log(log, path)
    print(f"{path.name}: {log.rows:,} rows, {features} features, {path.stat().st_size / 1e6:,.0f} MB", flush=True)
    times = [(seconds(lambda: read_log(path)), seconds(lambda: pq.read_table(path))) for _ in range(5)]
    ours, other = (float(np.median(column)) for column in zip(*times, strict=True))
    report("Parquet", ours, other, "2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=470_000, help="rows of each file")
    parser.add_argument("--features", type=int, default=700, help="features of the SVMlight file")
    parser.add_argument("--folder", type=Path, help="where to make a temporary folder for the files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        os.environ["ULTR_CACHE"] = str(Path(folder) / "cache")
        parquet(Path(folder), options.rows, 136)
        svmlight(Path(folder), options.rows, options.features)


if __name__ == "__main__":
    main()
