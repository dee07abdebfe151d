"""The speed of scoring a large file, compared with the bare network on rows in memory, in one run.

    python benchmarks/scoring.py --rows 10000000 --features 40

It writes a Parquet file of gigabytes to a temporary folder (in `--folder`), and makes an untrained network of the
default size. Then it measures in turns, each in a process of its own:

- the network alone, on chunks of the same rows; generating them is not timed;
- `score_file` on the file: reading, checks, scoring and writing, without the start of Python.

It prints rows a second, their ratio, and the largest resident memory (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ultr.rankers import FeatureEncoder, make_ranker, score_rows
from ultr.rankers.model import Model
from ultr.serving.scoring import score_file
from ultr.utils.distributed import choose_device

CHUNK = 1 << 17  # rows
ITEMS = 10
LEAST_SPEED, MOST_MEMORY = 0.7, 1.5  # the bounds: a ratio to the bare network; GiB


def chunks(rows: int, features: int) -> Iterator[np.ndarray]:
    for number, first in enumerate(range(0, rows, CHUNK)):
        yield np.random.default_rng(number).standard_normal((min(CHUNK, rows - first), features), dtype=np.float32)


def write(path: Path, rows: int, features: int, shape: str, row_group: int) -> None:
    """Write requests of ten items; each feature is a column (wide), or all are one column of lists (list)."""
    first, writer = 0, None
    for matrix in chunks(rows, features):
        row = np.arange(first, first + len(matrix))
        columns = {"request": pa.array(row // ITEMS), "item": pa.array(row), "position": pa.array(row % ITEMS + 1)}
        if shape == "list":
            ends = pa.array(np.arange(len(matrix) + 1, dtype=np.int32) * features)
            columns["features"] = pa.ListArray.from_arrays(ends, pa.array(matrix.reshape(-1)))
        else:
            columns |= {f"f{i}": pa.array(matrix[:, i]) for i in range(features)}
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema, use_dictionary=False)
        writer.write_table(table, row_group_size=row_group)
        first += len(matrix)
    if writer is not None:
        writer.close()


def default_model(features: int, shape: str) -> Model:
    torch.manual_seed(0)
    names = tuple(f"features[{i}]" if shape == "list" else f"f{i}" for i in range(features))
    return Model(make_ranker("mlp", FeatureEncoder(features)).eval(), names, "click")


def peak() -> float:
    """Return the largest resident memory of this process in GiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**20


def bare(model: Model, rows: int, features: int, device: str) -> float:
    """Return the seconds that the network takes for all rows."""
    chosen = choose_device(device)
    ranker, seconds = model.ranker.to(chosen), 0.0
    for matrix in chunks(rows, features):
        start = time.perf_counter()
        score_rows(ranker, matrix, device=chosen)
        seconds += time.perf_counter() - start
    return seconds


def child(what: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    model = default_model(options.features, options.shape)
    score_rows(model.ranker, np.zeros((1 << 15, options.features), np.float32))  # starts the threads
    before = peak()
    if what == "bare":
        seconds = bare(model, options.rows, options.features, options.device)
    else:
        start = time.perf_counter()
        score_file(model, folder / "rows.parquet", folder / "scores.parquet", overwrite=True, device=options.device)
        seconds = time.perf_counter() - start
    return {"rows a second": options.rows / seconds, "peak GiB": peak(), "before": before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--features", type=int, default=40)
    parser.add_argument("--shape", choices=("wide", "list"), default="wide")
    parser.add_argument("--row-group", type=int, default=CHUNK, help=f"rows; at most {CHUNK}")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="the folder of the temporary folder")
    parser.add_argument("--child", choices=("bare", "file"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        print(json.dumps(child(options.child, options.folder, options)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        path = Path(temporary) / "rows.parquet"
        start = time.perf_counter()
        write(path, options.rows, options.features, options.shape, options.row_group)
        size, seconds = path.stat().st_size / 2**30, time.perf_counter() - start
        print(f"{options.rows:,} rows of {options.features} features ({options.shape}), {options.threads} threads")
        print(f"{size:.2f} GiB written to {temporary} in {seconds:.0f} s", flush=True)
        results: dict[str, list[dict[str, float]]] = {"bare": [], "file": []}
        command = [sys.executable, __file__, "--folder", temporary]
        for name in ("rows", "features", "shape", "threads", "device"):
            command += [f"--{name}", str(getattr(options, name))]
        for _ in range(options.rounds):
            for what, measured in results.items():
                done = subprocess.run([*command, "--child", what], check=True, capture_output=True, text=True)
                measured.append(json.loads(done.stdout))
                shown = {name: round(value, 2) for name, value in measured[-1].items()}
                print("bare network:" if what == "bare" else "score_file:  ", shown, flush=True)
    rate = {what: float(np.mean([m["rows a second"] for m in measured])) for what, measured in results.items()}
    ratio, most = rate["file"] / rate["bare"], max(m["peak GiB"] for m in results["file"])
    print(f"speed, file / bare network: {ratio:.2f} (bound {LEAST_SPEED})")
    print(f"resident, file: {most:.2f} GiB (bound {MOST_MEMORY})")


if __name__ == "__main__":
    main()
