"""Run every benchmark at a small size, to check that it works.

    python tools/bench.py [NAME ...]

The ratios at these sizes are rough. The top of each file in benchmarks/ has the command for the full size.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALL = {
    "averages": "--seeds 1 --sessions 300 --steps 10 --batches 32",
    "bias": "--replications 2 --requests 2000 --bootstrap 20",
    "click_models": "--models pbm",
    "daily": "--days 3 --requests 200 --window 2 --compare 1 --option=--steps=20 --option=--bias-steps=20",
    "direct": "--requests 2000 --rounds 10 --turns 2",
    "examination": "--seeds 1 --sessions 60000",
    "first_model": "--requests 300 --rankers lightgbm",
    "large_log": "--rows 20000 --folder {folder}",
    "memory": "--like yahoo --share 0.01 --jobs 1 --minutes 0.2",
    "offpolicy": "--replications 2 --sessions 3000 --bootstrap 2",
    "position_based": "--iterations 20",
    "prepare": "--rows 100000 --folder {folder}",
    "processes": "--steps 50 --batch 32 --gib 0.005 --folder {folder}",
    "reading": "--rows 10000 --features 100",
    "scoring": "--rows 200000 --rounds 1",
    "serve": "--rounds 2",
    "streaming": "--gib 0.005 --steps 8 --method lambdarank --folder {folder}",
    "training": "--steps 3",
    "trees": "--documents 20000 --items 10 --rounds 4 --skipped 1 --losses posterior",
}


def main() -> int:
    failed = []
    for name in sys.argv[1:] or SMALL:
        with tempfile.TemporaryDirectory() as folder:
            options = SMALL[name].format(folder=folder).split()
            print(f"--- {name} {' '.join(options)}", flush=True)
            started = time.monotonic()
            done = subprocess.run([sys.executable, str(BENCHMARKS / f"{name}.py"), *options], check=False)
            print(f"--- {name}: exit code {done.returncode} after {time.monotonic() - started:.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all benchmarks ran")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
