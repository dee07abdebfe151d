"""Compare training in several processes with training in one, each with one thread: speed, and difference of results.

    python benchmarks/processes.py --processes 2 --folder /tmp/processes

It trains the same steps on the same lists, by `torchrun` and in one process: first the bias model, then the ranker. It
compares requests per second, examination and trust, and scores up to a constant. The upper bound of the speed-up is
that of independent processes that only multiply matrices.
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
from ultr.rankers.model import load_model


def train(options: argparse.Namespace, out: Path) -> None:
    """Train in this process, which is the only one or one that torchrun started."""
    from ultr.training.config import make_config
    from ultr.training.loop import Listeners
    from ultr.training.run import run_training
    from ultr.utils.distributed import rank

    config = make_config(
        str(options.folder),
        stream=options.stream,
        method_options=dict(text.split("=") for text in options.option),
        ranker="mlp",
        hidden=options.hidden,
        steps=options.steps,
        bias_steps=options.steps,
        batch=options.batch,
        evaluate_every=max(1, min(50, options.steps // 4)),  # two evaluations are the least that gives a speed
        select="feedback-ndcg@10",
        device=options.device,
        precision=options.precision,
    )
    bias, ranker = [], []
    first = os.environ.get("RANK", "0") == "0"
    listeners = Listeners(
        on_bias_progress=lambda p: bias.append((p.step, time.perf_counter())),
        on_progress=lambda p: ranker.append((p.step, time.perf_counter())),
    )
    run_training(config, out, overwrite=True, listeners=listeners)
    if first and not rank():
        speeds = [
            options.batch * (times[-1][0] - times[0][0]) / (times[-1][1] - times[0][1]) if len(times) > 1 else 0.0
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


def speed_up_limit(processes: int) -> float:
    """Return the speed-up of independent processes that only multiply matrices."""

    def products(count: int) -> int:
        command = [sys.executable, "-c", PRODUCTS]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        return sum(int(process.communicate()[0]) for process in running)

    return products(processes) / products(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("processes"), help="a folder for the lists and runs")
    parser.add_argument("--gib", type=float, default=0.25, help="the size of the training shards")
    parser.add_argument("--processes", type=int, default=2, help="processes that torchrun starts")
    parser.add_argument("--steps", type=int, default=200, help="steps of the bias model and of the ranker")
    parser.add_argument("--batch", type=int, default=256, help="requests per step")
    parser.add_argument("--option", action="append", default=[], help="an option of pairwise-em: KEY=VALUE")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--stream", default="no", help="stream the lists: yes or no")
    parser.add_argument("--hidden", default="512,256,128", help="sizes of hidden layers")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(options, options.child)
        return
    if not is_lists(options.folder):
        write(options.folder, options.gib)
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
        print(f"{name}: requests per second, bias model {speeds[-1][0]:,.0f}, ranker {speeds[-1][1]:,.0f}", flush=True)
    if min(map(min, speeds)):
        ratios = [b / a for a, b in zip(*speeds, strict=True)]
        print(f"{options.processes} processes / one: bias model {ratios[0]:.2f}, ranker {ratios[1]:.2f}")
        print(f"upper bound, from independent matrix products: {speed_up_limit(options.processes):.2f}")
    one, other = (json.loads((run / "bias.json").read_text()) for run in runs)
    for name in ("theta", "eps_plus", "eps_minus"):
        if name in one:
            print(f"{name}: largest difference {np.abs(np.array(one[name]) - np.array(other[name])).max():.1e}")
    log = read_log(options.folder / "validation")
    differences = np.subtract(*(load_model(run).score(log) for run in runs))
    print(f"scores, up to a constant: largest difference {np.abs(differences - differences.mean()).max():.1e}")


if __name__ == "__main__":
    main()
