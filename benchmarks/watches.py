"""Watch times and late purchases: errors of the estimates, and how well the default ranks with each option.

    python benchmarks/watches.py [--seeds 20] [--first 1000] [--requests 30000] [--jobs 1] [--plain] [--estimates]
        [--ranker auto]

The world is tests/worlds/watches.py; with `--plain` sessions do not end during a video, and purchases come at once.

- Estimates, with coverage of their 95% intervals: E[T] of ten groups of durations; the share of purchases that have
  arrived after 6 hours to 4 days; the mean watch time, with cut watches continued.
- Rankings of other requests by the default, trained with each option and without it: NDCG@10 and the mean value of the
  first three places, by the true seconds, preference given the duration, or purchases. Differences are paired over
  seeds, in %, with 95% intervals.

`--estimates` leaves out the rankings.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

import ultr
from ultr.log.delays import Arrival, with_arrived
from ultr.log.watch import WatchModel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from worlds.watches import DAY, FEATURES, SPREAD, Watches, arrived, watches  # type: ignore[import-not-found]

TEST_SEED, TEST_REQUESTS = 500_000, 5_000  # of the requests that rankings are compared on
ACTIONS, EXTRA = ["click", "watch", "purchase"], ["duration", "cut", "bought_at"]
AGES = np.array([0.25, 0.5, 1.0, 2.0, 4.0])  # days
CUT: dict[str, Any] = {"watch": "watch", "duration": "duration", "censored": "cut"}
D2Q: dict[str, Any] = {"watch": "watch", "duration": "duration", "remove_duration": True}
LATE: dict[str, Any] = {"time": "time", "action_delay": "purchase=7d"}
# Truth -> label, and the options of each run; the first run is the one without options.
RUNS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "seconds": ("watch", {"as logged": {}, "cut watches continued": CUT}),
    "preference": ("watch", {"as logged": {}, "quantiles": D2Q, "quantiles, with cuts": {**D2Q, "censored": "cut"}}),
    "purchases": (
        "purchase",
        {"as logged": {}, "young left out": LATE, "by arrivals": {**LATE, "action_times": "purchase=bought_at"}},
    ),
}


def read(world: Watches) -> ultr.Log:
    return ultr.read_log(world.log, actions=ACTIONS, features=FEATURES, time="time", extra=EXTRA)


def estimates(world: Watches) -> dict[str, list[tuple[float, bool]]]:
    """Return the relative error of each estimate, and whether its interval covers the truth."""
    log = read(world)
    watched, duration = (np.asarray(world.log[name]) for name in ("watch", "duration"))
    model = WatchModel("watch", "duration", "cut").fit(log)
    group, started = np.searchsorted(model.limits, duration), watched > 0
    found: dict[str, list[tuple[float, bool]]] = {"E[T] of a group": [], "arrivals": []}
    for g, each in enumerate(model.groups):
        value, low, high = each.expected
        truth = float((world.median[started & (group == g)] * np.exp(SPREAD**2 / 2)).mean())
        found["E[T] of a group"].append((value / truth - 1, low <= truth <= high))
    for name, values in (("continued", model(log).actions["watch"]), ("as logged", watched)):
        found[f"mean watch time, {name}"] = [(float(values.mean() / world.uncut.mean() - 1), True)]
    curve = with_arrived(log, [Arrival("purchase", 7 * DAY, "bought_at")])[1][0]
    true, bounds = arrived(AGES), curve.interval(AGES * DAY)
    inside = (bounds[0] <= true) & (true <= bounds[1])
    found["arrivals"] = list(zip((curve.share(AGES * DAY) / true - 1).tolist(), inside.tolist(), strict=True))
    return found


def rankings(world: Watches, other: Watches, ranker: str, seed: int) -> dict[tuple[str, str], tuple[float, float]]:
    """Return NDCG@10 and the value of the first places of each run, on the requests of another world."""
    test = read(other)
    scores: dict[str, np.ndarray] = {}
    results = {}
    for truth, (label, runs) in RUNS.items():
        for name, options in runs.items():
            key = f"{label} {options}"
            if key not in scores:
                with tempfile.TemporaryDirectory() as folder:
                    common: dict[str, Any] = {"label": label, "ranker": ranker, "seed": seed, "device": "cpu"}
                    columns = {"actions": ACTIONS, "features": list(FEATURES), "segment": "none"}
                    run = ultr.train(world.log, Path(folder) / "run", columns=columns, **common, **options)
                    scores[key] = run.score(test)
            results[truth, name] = other.of(truth, scores[key])
    return results


def one_seed(seed: int, *, requests: int, plain: bool, only_estimates: bool, ranker: str) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    how = {"cut": not plain, "late": not plain}
    world = watches(requests, seed=seed, **how)
    found = None if plain else estimates(world)
    if only_estimates:
        return found, None
    return found, rankings(world, watches(TEST_REQUESTS, seed=TEST_SEED + seed, **how), ranker, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--plain", action="store_true", help="no watch is cut, and purchases come at once")
    parser.add_argument("--estimates", action="store_true", help="only estimates")
    parser.add_argument("--ranker", default="auto")
    given = parser.parse_args()
    task = partial(
        one_seed,
        requests=given.requests,
        plain=given.plain,
        only_estimates=given.estimates,
        ranker=given.ranker,
    )
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        results = list(pool.map(task, range(given.first, given.first + given.seeds)))
    if results[0][0] is not None:
        print(f"{'':28} {'mean error':>10} {'of one':>8} {'covered':>8}")
        for name in results[0][0]:
            rows = np.array([found[name] for found, _ in results])  # [seeds, estimates, error and covered]
            covered = "" if name.startswith("mean") else f"{rows[..., 1].mean():.1%}"
            mean, one = np.abs(rows[..., 0].mean(0)).max(), np.abs(rows[..., 0]).mean()
            print(f"{name:28} {mean:10.1%} {one:8.1%} {covered:>8}")
    if results[0][1] is not None:
        for truth, (_, runs) in RUNS.items():
            base = np.array([of[truth, "as logged"] for _, of in results])
            print(f"{truth}, as logged: NDCG@10 {base[:, 0].mean():.4f}, value {base[:, 1].mean():.4f}")
            for name in list(runs)[1:]:
                gain = 100 * (np.array([of[truth, name] for _, of in results]) / base - 1)
                margin = stats.t.ppf(0.975, len(gain) - 1) * gain.std(0, ddof=1) / len(gain) ** 0.5
                texts = (f"{m:+.2f}% ({m - e:+.2f} to {m + e:+.2f})" for m, e in zip(gain.mean(0), margin, strict=True))
                print(f"  {name:24} NDCG@10 {next(texts)}, value {next(texts)}")


if __name__ == "__main__":
    main()
