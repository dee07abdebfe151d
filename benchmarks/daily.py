"""A simulated month: `ultr update` every day, next to training from scratch on the same window of days.

    python benchmarks/daily.py [--days 30] [--requests 500] [--ranker lightgbm] [--window 7] [--seen 1] [--kill 0.3]

Each day users search once per request, in the order of a weak ranker, and the log of the day is a folder date=.../.
The first run is trained on the first window. From then on, one command a day updates the run of the day before with the
log of the day, or of the last --seen days. With --kill, a part of these commands is killed at a random moment, and the
same command is started again. On every --compare'th day, `ultr train` trains from scratch on the last --window days.
Rankers are compared by their NDCG@10 on the true labels of other requests. Times are of CPU, of whole processes; those
of killed commands count too.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np

import ultr
from ultr.datasets.synthetic import make_synthetic
from ultr.log import write_log

FIRST = date(2026, 11, 1)
REJECTED = 3  # the exit code of `ultr update` if the new run is worse
Command = Callable[[Sequence[str]], int]  # runs `ultr` with these arguments and returns the exit code


@dataclass(frozen=True)
class Day:
    """The results of a day: NDCG@10 and seconds of the updated run, and of training from scratch (or None)."""

    number: int
    accepted: bool
    ndcg: float
    seconds: float
    kills: int = 0
    scratch_ndcg: float | None = None
    scratch_seconds: float | None = None


def simulated_month(
    folder: Path,
    command: Command,
    *,
    days: int,
    requests: int,
    options: Sequence[str],
    window: int = 7,
    seen: int = 1,
    decay: float = 3.0,
    compare: int = 5,
    seed: int = 0,
    killed: Callable[[Sequence[str], float], bool] = lambda _arguments, _seconds: False,
    report: Callable[[Day], None] = lambda _day: None,
) -> list[Day]:
    """Train on the first window, then update every day; return the results of the days.

    `killed` may start a command and kill it; it gets the seconds of the day before, and returns whether it has.
    `report` gets the results of each day at its end.
    """
    data = make_synthetic(seed=seed, requests=(days * requests, 10, 1000))
    order = ultr.ranking_svm(data.train, share=0.01, seed=seed)
    shown = ultr.show(data.train, order(data.train.features), items=10)
    log = replace(ultr.simulate_log(shown, ultr.User(), seed=seed)[0], relevance=None)
    for number in range(days):
        place = folder / "days" / f"date={FIRST + timedelta(number)}"
        place.mkdir(parents=True)
        of_day = log.select(np.arange(number * requests, (number + 1) * requests))
        write_log(replace(of_day, item_ids=None), place / "log.parquet")

    def ndcg(run: Path) -> float:
        scores = ultr.load_model(run).score(data.test)
        return float(ultr.evaluate_scores(data.test, scores, ["ndcg@10"])["ndcg@10"].mean())

    def cpu() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    def timed(arguments: Sequence[str]) -> float:
        start = cpu()
        if (code := command(arguments)) not in (0, REJECTED):
            raise RuntimeError(f"ultr {' '.join(arguments)} failed with exit code {code}")
        return cpu() - start

    def sources(number: int, last: int = window) -> list[str]:
        first = max(0, number - last + 1)
        return [str(folder / "days" / f"date={FIRST + timedelta(each)}") for each in range(first, number + 1)]

    run, results, wall = folder / "first", [], 0.0
    timed(["train", *sources(window - 1), "--out", str(run), "--set", f"decay={decay}", *options])
    for number in range(window, days):
        out = folder / f"run-{number}"
        logs = [argument for source in sources(number, seen) for argument in ("--log", source)]
        how = ["--decay", str(decay)] if seen > 1 else []
        arguments = ["update", str(run), *logs, *how, "--out", str(out), "--min-evidence", "0"]
        kills, start = 0, cpu()
        while kills < 5 and killed(arguments, wall):
            kills += 1
        started = time.perf_counter()
        timed(arguments)
        wall = time.perf_counter() - started
        run = out if (accepted := out.exists()) else run
        day = Day(number, accepted, ndcg(run), cpu() - start, kills)
        if number % compare == 0 or number == days - 1:
            scratch = folder / f"scratch-{number}"
            how = ["--set", f"decay={decay}", *options]
            scratch_seconds = timed(["train", *sources(number), "--out", str(scratch), *how])
            day = replace(day, scratch_ndcg=ndcg(scratch), scratch_seconds=scratch_seconds)
        results.append(day)
        report(day)
    return results


def summary(results: Sequence[Day]) -> tuple[float, float, float]:
    """Return the mean difference of NDCG@10 to training from scratch, its standard error, and the ratio of times."""
    compared = [day for day in results if day.scratch_ndcg is not None]
    differences = np.array([day.ndcg - (day.scratch_ndcg or 0.0) for day in compared])
    error = float(differences.std(ddof=1) / len(differences) ** 0.5) if len(differences) > 1 else float("nan")
    times = [sum(day.seconds for day in compared), sum(day.scratch_seconds or 0.0 for day in compared)]
    return float(differences.mean()), error, times[0] / max(times[1], 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("days", 30), ("requests", 500), ("window", 7), ("seen", 1), ("compare", 5), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--decay", type=float, default=3.0, help="half-life of the weights of requests, in days")
    parser.add_argument("--kill", type=float, default=0.0, help="probability that a command is killed")
    parser.add_argument("--ranker", default="lightgbm")
    parser.add_argument("--option", action="append", default=[], help="an option of ultr train, such as --steps=200")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    ultr_command = [sys.executable, "-m", "ultr"]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every command would compile torch again

    def command(arguments: Sequence[str]) -> int:
        done = subprocess.run([*ultr_command, *arguments], check=False, capture_output=True, text=True)
        if done.returncode not in (0, REJECTED):
            print(done.stderr, file=sys.stderr)
        return done.returncode

    def killed(arguments: Sequence[str], seconds: float) -> bool:
        if rng.random() >= given.kill:
            return False
        process = subprocess.Popen([*ultr_command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(rng.uniform(0, 1.2 * seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return process.returncode != 0

    def show(day: Day) -> None:
        text = f"day {day.number}: NDCG@10 {day.ndcg:.4f}, {day.seconds:.0f} s, {day.kills} kills"
        text += "" if day.accepted else ", rejected"
        if day.scratch_ndcg is not None:
            text += f"; from scratch {day.scratch_ndcg:.4f}, {day.scratch_seconds:.0f} s"
        print(text, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        options = ["--label", "click", "--ranker", given.ranker, "--seed", str(given.seed), *given.option]
        sizes: dict[str, int] = {
            name: getattr(given, name) for name in ("days", "requests", "window", "seen", "compare", "seed")
        }
        how: dict[str, Any] = {"decay": given.decay, "killed": killed, "report": show, **sizes}
        results = simulated_month(Path(folder), command, options=options, **how)
        names = [path.name for path in Path(folder).iterdir()]
    left = [name for name in names if name.startswith(".") or name.endswith(".partial")]
    difference, error, ratio = summary(results)
    print(f"{given.ranker}: {sum(day.kills for day in results)} kills, {len(left)} files left over")
    print(f"NDCG@10 minus that from scratch: {difference:+.4f}, standard error {error:.4f}")
    print(f"time: {ratio:.2f} times that from scratch")


if __name__ == "__main__":
    main()
