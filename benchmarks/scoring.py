"""Scoring a file of any size beside the bare network on rows that are in memory already, in one run.

    python benchmarks/scoring.py --rows 10000000 --features 40

Writes a Parquet file (gigabytes, in a temporary folder or `--folder`), chunk by chunk, and an untrained network of the
usual size. Then, in processes of their own that take turns: the network alone, called on chunks of the same rows that
are generated beforehand and not timed; and `score_file` on the file, all of it timed: reading, checks, scoring and
writing, but not the start of Python. Reported are rows a second, their ratio, and the largest resident memory (VmHWM).
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

from ultr.models import Model
from ultr.rankers import FeatureEncoder, make_ranker, score_rows
from ultr.scoring import score_file
from ultr.training import choose_device

CHUNK = 1 << 17  # rows
ITEMS = 10
LEAST_SPEED, MOST_MEMORY = 0.7, 1.5  # of the bare network's; GiB


def chunks(rows: int, features: int) -> Iterator[np.ndarray]:
    for number, first in enumerate(range(0, rows, CHUNK)):
        yield np.random.default_rng(number).standard_normal((min(CHUNK, rows - first), features), dtype=np.float32)


def write(path: Path, rows: int, features: int, shape: str, row_group: int) -> None:
    """Requests of ten items; features in columns of their own, or in one of lists."""
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


def usual_model(features: int, shape: str) -> Model:
    torch.manual_seed(0)
    names = tuple(f"features[{i}]" if shape == "list" else f"f{i}" for i in range(features))
    return Model(make_ranker("mlp", FeatureEncoder(features)).eval(), names, "click")


def peak() -> float:
    """GiB that this process had at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**20


def bare(model: Model, rows: int, features: int, device: str) -> float:
    """Seconds that the network takes for all rows, chunks of which are in memory."""
    chosen = choose_device(device)
    ranker, seconds = model.ranker.to(chosen), 0.0
    for matrix in chunks(rows, features):
        begun = time.perf_counter()
        score_rows(ranker, matrix, device=chosen)
        seconds += time.perf_counter() - begun
    return seconds


def child(what: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    model = usual_model(options.features, options.shape)
    score_rows(model.ranker, np.zeros((1 << 15, options.features), np.float32))  # threads are there
    before = peak()
    if what == "bare":
        seconds = bare(model, options.rows, options.features, options.device)
    else:
        begun = time.perf_counter()
        score_file(model, folder / "rows.parquet", folder / "scores.parquet", overwrite=True, device=options.device)
        seconds = time.perf_counter() - begun
    return {"rows a second": options.rows / seconds, "peak GiB": peak(), "before": before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--features", type=int, default=40)
    parser.add_argument("--shape", choices=("wide", "list"), default="wide")
    parser.add_argument("--row-group", type=int, default=CHUNK, help=f"rows; at most {CHUNK}")
    parser.add_argument("--rounds", type=int, default=2, help="of both")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where the files are written; a temporary folder otherwise")
    parser.add_argument("--child", choices=("bare", "file"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        print(json.dumps(child(options.child, options.folder, options)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        path = Path(temporary) / "rows.parquet"
        begun = time.perf_counter()
        write(path, options.rows, options.features, options.shape, options.row_group)
        size, seconds = path.stat().st_size / 2**30, time.perf_counter() - begun
        print(f"{options.rows:,} rows of {options.features} features ({options.shape}), {options.threads} threads")
        print(f"{size:.2f} GiB written to {temporary} in {seconds:.0f} s", flush=True)
        found: dict[str, list[dict[str, float]]] = {"bare": [], "file": []}
        command = [sys.executable, __file__, "--folder", temporary]
        for name in ("rows", "features", "shape", "threads", "device"):
            command += [f"--{name}", str(getattr(options, name))]
        for _ in range(options.rounds):
            for what, figures in found.items():
                done = subprocess.run([*command, "--child", what], check=True, capture_output=True, text=True)
                figures.append(json.loads(done.stdout))
                shown = {name: round(value, 2) for name, value in figures[-1].items()}
                print("bare network:" if what == "bare" else "score_file:  ", shown, flush=True)
    rate = {what: float(np.mean([f["rows a second"] for f in figures])) for what, figures in found.items()}
    ratio, most = rate["file"] / rate["bare"], max(f["peak GiB"] for f in found["file"])
    print(f"speed, file / bare network: {ratio:.2f} (bound {LEAST_SPEED})")
    print(f"resident, file: {most:.2f} GiB (bound {MOST_MEMORY})")


if __name__ == "__main__":
    main()
