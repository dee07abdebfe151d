"""Training from shards larger than memory beside training of the same network from memory, in one run.

    python benchmarks/streaming.py --gib 6 --folder /tmp/streaming

Writes shards (if the folder does not hold them), then trains in a process of its own each: streamed, and from memory.
Reported are requests a second while the ranker learns, their ratio, and the largest resident memory of the whole run.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ultr.log.shards import Manifest, is_lists

ITEMS, FEATURES, SHARD = 10, 50, 131_072
GROUP = 2048  # requests in a row group, as prepare writes them


def shard(rng: np.random.Generator, requests: int, first: int) -> pa.Table:
    """Clicks by a linear relevance and position bias; dwell after a click."""
    rows = requests * ITEMS
    features = rng.standard_normal((rows, FEATURES), dtype=np.float32)
    position = np.tile(np.arange(1, ITEMS + 1), requests)
    relevant = rng.random(rows, np.float32) < 1 / (1 + np.exp(1.5 - features[:, :5].sum(1)))
    click = (relevant & (rng.random(rows, np.float32) < 1 / position)).astype(np.float32)
    offsets = pa.array(np.arange(requests + 1, dtype=np.int32) * ITEMS)
    inner = pa.ListArray.from_arrays(
        pa.array(np.arange(rows + 1, dtype=np.int32) * FEATURES), pa.array(features.reshape(-1))
    )
    dwell = click * rng.exponential(10, rows).astype(np.float32)
    columns = {"position": pa.array(position), "click": pa.array(click), "dwell": pa.array(dwell), "features": inner}
    lists = {name: pa.ListArray.from_arrays(offsets, values) for name, values in columns.items()}
    return pa.table({"request": pa.array(np.arange(first, first + requests)), **lists})


def write(folder: Path, gib: float) -> None:
    rng = np.random.default_rng(0)
    wanted = round(gib * 2**30 / (ITEMS * (FEATURES + 4) * 4))
    splits = {"train": wanted, "validation": 20_000}
    for split, requests in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for number, first in enumerate(range(0, requests, SHARD)):
            table = shard(rng, min(SHARD, requests - first), first)
            pq.write_table(table, folder / split / f"part-{number:05}.parquet", row_group_size=GROUP)
    Manifest(
        features=tuple(f"f{i}" for i in range(FEATURES)),
        actions=("click", "dwell"),
        positions=tuple(range(1, ITEMS + 1)),
        splits={n: {"requests": r, "rows": r * ITEMS, "longest": ITEMS} for n, r in splits.items()},
        binary=("click",),
    ).save(folder)


def train(folder: Path, stream: str, steps: int, method: str, device: str) -> dict[str, Any]:
    """In this process: requests a second after the first evaluation, and the largest resident memory."""
    from ultr.preparing import RunConfig
    from ultr.runs import run_training
    from ultr.training import TrainingOptions

    options = TrainingOptions(steps=steps, evaluate_every=25, bias_steps=100, device=device)
    config = RunConfig(str(folder), method=method, stream=stream, training=options)  # type: ignore[arg-type]
    begun, times = time.perf_counter(), []
    out = folder / f"run-{stream}"
    run_training(config, out, overwrite=True, on_progress=lambda p: times.append((p.step, time.perf_counter())))
    (first, start), (last, end) = times[0], times[-1]
    return {
        "requests a second": options.batch * (last - first) / (end - start),
        "whole run, s": time.perf_counter() - begun,
        "peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("streaming"))
    parser.add_argument("--gib", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--method", default="pairwise-em")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", choices=("yes", "no"))
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(options.folder, options.child, options.steps, options.method, options.device)))
        return
    if not is_lists(options.folder):
        begun = time.perf_counter()
        write(options.folder, options.gib)
        print(f"wrote shards in {time.perf_counter() - begun:.0f} s")
    size = sum(path.stat().st_size for path in (options.folder / "train").glob("*.parquet")) / 2**30
    print(f"{size:.2f} GiB of shards, {options.method}, {options.steps} steps")
    found: dict[str, list[dict[str, float]]] = {"yes": [], "no": []}
    for stream in ("yes", "no", "yes"):
        command = [sys.executable, __file__, "--folder", str(options.folder), "--child", stream]
        command += ["--steps", str(options.steps), "--method", options.method, "--device", options.device]
        figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found[stream].append(figures)
        print("streamed:   " if stream == "yes" else "from memory:", {k: round(v, 2) for k, v in figures.items()})
    rate = {s: float(np.mean([f["requests a second"] for f in figures])) for s, figures in found.items()}
    print(f"throughput, streamed / from memory: {rate['yes'] / rate['no']:.2f}")
    print(f"resident, streamed: {max(f['peak GiB'] for f in found['yes']):.2f} GiB")


if __name__ == "__main__":
    main()
