"""Measure the peak memory of `ultr reproduce` on generated data of the size of Yahoo! LETOR set 1 or MSLR-WEB30K.

    python benchmarks/memory.py --like yahoo --jobs 2

It reads the generated files (gigabytes, in a temporary folder), then trains with `--quick` for some minutes. Memory is
the proportional set size (PSS), summed over all processes. Part of it is the memory-mapped cache of the data set, which
the system can reclaim at any time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SIZES = {  # files, requests per file, documents per file, features, share of features that a document has
    "yahoo": (
        ("set1.train.txt", "set1.valid.txt", "set1.test.txt"),
        (19_944, 2_994, 6_983),
        (473_134, 71_083, 165_660),
        700,
        0.3,
    ),
    "mslr-web30k": (
        ("train.txt", "vali.txt", "test.txt"),
        (18_919, 6_306, 6_306),
        (2_270_296, 747_218, 753_611),
        136,
        1.0,
    ),
}
EXPERIMENT = {"yahoo": "table1", "mslr-web30k": "table2"}


def generate(name: str, folder: Path, share: float) -> None:
    """Write files like those of a data set, with a share of its requests; grades are linear in features plus noise."""
    files, requests, documents, width, density = SIZES[name]
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    weights, request = rng.normal(size=width), 0
    for file, all_queries, all_rows in zip(files, requests, documents, strict=True):
        queries, rows = max(5, int(share * all_queries)), max(50, int(share * all_rows))
        lengths = rng.multinomial(rows - queries, np.ones(queries) / queries) + 1
        with (folder / file).open("w") as out:
            for length in lengths:
                request += 1
                values = np.round(rng.random((length, width)), 3)
                there = rng.random((length, width)) < density
                worth = (values * there) @ weights - weights.sum() * density / 2 + 2 * rng.normal(size=length)
                for row, grade in enumerate(np.digitize(worth, (1, 4, 7, 9)).tolist()):
                    pairs = zip(np.flatnonzero(there[row]).tolist(), values[row, there[row]].tolist(), strict=True)
                    text = " ".join(f"{place + 1}:{value}" for place, value in pairs)
                    out.write(f"{grade} qid:{request} {text}\n")


def processes(first: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    tree = [first]
    for process in tree:
        tree += children.get(process, [])
    return tree


def memory(first: int) -> tuple[float, float]:
    """Return the GiB used by a process and its descendants: in total, and without mapped files."""
    total = {"Pss:": 0, "Pss_Anon:": 0}
    for process in processes(first):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name = line.split()[0]
            if name in total:
                total[name] += int(line.split()[1])
    return total["Pss:"] / 2**20, total["Pss_Anon:"] / 2**20


def measure(command: list[str], environment: dict[str, str]) -> tuple[int, float, float, float]:
    """Run a command; return its exit code, its seconds, its peak memory, and that without mapped files, in GiB."""
    began = time.monotonic()
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    peak = peak_unmapped = 0.0
    while running.poll() is None:
        total, unmapped = memory(running.pid)
        peak, peak_unmapped = max(peak, total), max(peak_unmapped, unmapped)
        time.sleep(0.5)
    return running.returncode, time.monotonic() - began, peak, peak_unmapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", choices=list(SIZES), default="yahoo", help="the data set to imitate")
    parser.add_argument("--share", type=float, default=1.0, help="share of the requests to generate")
    parser.add_argument("--jobs", type=int, default=2, help="runs trained at the same time")
    parser.add_argument("--minutes", type=float, default=2.0, help="minutes of training")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        generate(options.like, root / "data" / options.like, options.share)
        environment = {**os.environ, "ULTR_CACHE": str(root / "cache")}
        source = f"from ultr import load_dataset; load_dataset({options.like!r}, data_dir={str(root / 'data')!r})"
        train = [sys.executable, "-m", "ultr", "reproduce", EXPERIMENT[options.like], "--quick", "--runs", "1"]
        train += ["--data", options.like, "--data-dir", str(root / "data"), "--out", str(root / "out")]
        train += ["--jobs", str(options.jobs), "--minutes", str(options.minutes)]
        for what, command in (("reading", [sys.executable, "-c", source]), ("training", train)):
            code, seconds, peak, unmapped = measure(command, environment)
            if code not in (0, 3):
                raise SystemExit(f"{what} failed with exit code {code}")
            print(f"{options.like}, {what}: peak {peak:.2f} GiB, {unmapped:.2f} without mapped files, {seconds:.0f} s")


if __name__ == "__main__":
    main()
