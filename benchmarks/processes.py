"""Several processes beside one, each with one thread: how much faster, and how far apart they end.

    python benchmarks/processes.py --processes 2 --folder /tmp/processes

Trains the same steps on the same lists by `torchrun` and in one process, the whole run each: the bias model, then the
ranker. Compared are requests a second of both, with what the cores give to processes that never wait for one another;
examination and trust, and scores up to a constant.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from streaming import write

from ultr import read_log
from ultr.log.shards import is_lists
from ultr.models import load_model


def train(options: argparse.Namespace, out: Path) -> None:
    """In this process, one of those that torchrun started or the only one."""
    from ultr.preparing import RunConfig
    from ultr.processes import rank
    from ultr.runs import run_training
    from ultr.training import TrainingOptions

    training = TrainingOptions(
        steps=options.steps,
        bias_steps=options.steps,
        batch=options.batch,
        evaluate_every=50,
        device=options.device,
        precision=options.precision,
    )
    method_options = dict(text.split("=") for text in options.option)
    config = RunConfig(
        str(options.folder),
        method_options=method_options,
        ranker_options={"hidden": [int(size) for size in options.hidden.split(",")]},
        select="feedback-ndcg@10",
        stream=options.stream,
        training=training,
    )
    bias, ranker = [], []
    first = os.environ.get("RANK", "0") == "0"
    run_training(
        config,
        out,
        overwrite=True,
        on_first=lambda p: bias.append((p.step, time.perf_counter())),
        on_progress=lambda p: ranker.append((p.step, time.perf_counter())),
    )
    if first and not rank():
        speeds = [
            training.batch * (times[-1][0] - times[0][0]) / (times[-1][1] - times[0][1]) if len(times) > 1 else 0.0
            for times in (bias, ranker)
        ]
        (out / "speeds.json").write_text(json.dumps(speeds))


PRODUCTS = """
import time, torch
torch.set_num_threads(1)
x, w = torch.randn(1280, 512), torch.randn(512, 256)
start, done = time.perf_counter(), 0
while time.perf_counter() - start < 4:
    x @ w
    done += 1
print(done)
"""


def ceiling(processes: int) -> float:
    """How much more matrix products so many processes make that have nothing to do with one another."""

    def products(count: int) -> int:
        command = [sys.executable, "-c", PRODUCTS]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        return sum(int(process.communicate()[0]) for process in running)

    return products(processes) / products(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("processes"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--option", action="append", default=[], help="of pairwise-em, as key=value")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--stream", default="no")
    parser.add_argument("--hidden", default="512,256,128")
    parser.add_argument("--child", type=Path)
    options = parser.parse_args()
    if options.child:
        train(options, options.child)
        return
    if not is_lists(options.folder):
        write(options.folder, 0.25)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    several = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(options.processes),
    ]
    speeds, runs = [], []
    for name, start in (("one", [sys.executable]), ("several", several)):
        runs.append(options.folder / name)
        command = [*start, __file__, *sys.argv[1:], "--child", str(runs[-1])]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        speeds.append(json.loads((runs[-1] / "speeds.json").read_text()))
        print(f"{name}: requests a second, bias model {speeds[-1][0]:,.0f}, ranker {speeds[-1][1]:,.0f}", flush=True)
    if min(map(min, speeds)):
        ratios = [b / a for a, b in zip(*speeds, strict=True)]
        print(f"{options.processes} processes / one: bias model {ratios[0]:.2f}, ranker {ratios[1]:.2f}")
        print(
            f"the same of bare matrix products, which is what the machine has to give: {ceiling(options.processes):.2f}"
        )
    one, other = (json.loads((run / "bias.json").read_text()) for run in runs)
    for name in ("theta", "eps_plus", "eps_minus"):
        if name in one:
            print(f"{name}: largest difference {np.abs(np.array(one[name]) - np.array(other[name])).max():.1e}")
    log = read_log(options.folder / "validation")
    apart = np.subtract(*(load_model(run).score(log) for run in runs))
    print(f"scores, up to a constant: largest difference {np.abs(apart - apart.mean()).max():.1e}")


if __name__ == "__main__":
    main()
