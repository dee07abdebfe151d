"""Compare training from shards larger than memory with training of the same network from memory, in one run.

    python benchmarks/streaming.py --gib 6 --folder /tmp/streaming

It writes shards, unless the folder has them already. Then it trains, streamed and from memory, each in a process of its
own. It prints the requests per second of the ranker, their ratio, and the peak memory of the whole run.
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
LAYOUT = {"row_group_size": 2048, "use_dictionary": False, "write_page_checksum": True}  # as `ultr prepare` writes


def shard(rng: np.random.Generator, requests: int, first: int) -> pa.Table:
    """Simulate lists with position-biased clicks on linear relevance, and dwell times after clicks."""
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
    train = round(gib * 2**30 / (ITEMS * (FEATURES + 4) * 4))
    splits = {"train": train, "validation": min(20_000, train // 4)}  # requests
    for split, requests in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for number, first in enumerate(range(0, requests, SHARD)):
            table = shard(rng, min(SHARD, requests - first), first)
            pq.write_table(table, folder / split / f"part-{number:05}.parquet", **LAYOUT)
    Manifest(
        features=tuple(f"f{i}" for i in range(FEATURES)),
        actions=("click", "dwell"),
        positions=tuple(range(1, ITEMS + 1)),
        splits={n: {"requests": r, "rows": r * ITEMS, "longest": ITEMS} for n, r in splits.items()},
        binary=("click",),
    ).save(folder)


def train(folder: Path, stream: str, steps: int, method: str, device: str) -> dict[str, Any]:
    """Train in this process; return the requests per second after the first evaluation, and the peak memory."""
    from ultr.training.config import make_config
    from ultr.training.loop import Listeners
    from ultr.training.run import run_training

    every = max(1, min(25, steps // 4))  # two evaluations are the least that gives a speed
    config = make_config(str(folder), method=method, ranker="mlp", stream=stream, device=device)
    config = config.with_options(steps=steps, evaluate_every=every, bias_steps=min(100, steps))
    begun, times = time.perf_counter(), []
    out = folder / f"run-{stream}"
    listeners = Listeners(on_progress=lambda p: times.append((p.step, time.perf_counter())))
    run_training(config, out, overwrite=True, listeners=listeners)
    (first, start), (last, end) = times[0], times[-1]
    return {
        "requests per second": config.network.batch * (last - first) / (end - start),
        "seconds of the whole run": time.perf_counter() - begun,
        "peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("streaming"), help="a folder for the shards and runs")
    parser.add_argument("--gib", type=float, default=6.0, help="the size of the training shards")
    parser.add_argument("--steps", type=int, default=300, help="steps of the ranker")
    parser.add_argument("--method", default="pairwise-em")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", choices=("yes", "no"), help=argparse.SUPPRESS)
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
    results: dict[str, list[dict[str, float]]] = {"yes": [], "no": []}
    for stream in ("yes", "no", "yes"):
        command = [sys.executable, __file__, "--folder", str(options.folder), "--child", stream]
        command += ["--steps", str(options.steps), "--method", options.method, "--device", options.device]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        results[stream].append(result)
        print("streamed:   " if stream == "yes" else "from memory:", {k: round(v, 2) for k, v in result.items()})
    speed = {stream: float(np.mean([run["requests per second"] for run in runs])) for stream, runs in results.items()}
    print(f"throughput, streamed / from memory: {speed['yes'] / speed['no']:.2f}")
    print(f"peak memory, streamed: {max(run['peak GiB'] for run in results['yes']):.2f} GiB")


if __name__ == "__main__":
    main()
