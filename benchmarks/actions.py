"""Actions after the click: errors of τ, coverage of its intervals, false alarms, and what the correction gains.

    python benchmarks/actions.py [--seeds 20] [--first 1000] [--requests 30000] [--jobs 1] [--estimates]
                                 [--trust 1] [--ranker auto] [--conflict 0.5] [--label "click + 20 * purchase"]

The world is tests/worlds/actions.py, with trust (τ of purchases falls as k^-0.35, of seconds as k^-0.2) and without.
A run with the correction is compared with one without, by the true expected label of its ranking. Differences are
paired over seeds, in percent, with 95% intervals. `--estimates` trains no rankers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

import ultr
from ultr.bias import after_click
from ultr.log import read_log
from ultr.log.labels import Label
from ultr.utils.display import logger

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from worlds.actions import FEATURES, ActionWorld, actions  # type: ignore[import-not-found]

ALL = "click + 5 * purchase + seconds / 30"
COLUMNS = {"item": "item", "randomised": "random", "features": ",".join(FEATURES), "actions": "click,purchase,seconds"}


@dataclass(frozen=True)
class Result:
    """The results of a seed: of each action, errors of τ, whether intervals cover it, and whether it is used."""

    error: dict[str, np.ndarray]
    covered: dict[str, np.ndarray]
    used: dict[str, bool]
    with_correction: dict[str, float] | None = None  # the true expectation of each action, and of the label
    without: dict[str, float] | None = None


def trained(world: ActionWorld, options: argparse.Namespace, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run = ultr.train(
            world.log, f"{folder}/run", label=options.label, ranker=options.ranker, seed=seed, columns=COLUMNS
        )
        found: dict[str, float] = world.expected(run.score(world.log, **COLUMNS))
    value = Label(options.label)({name: np.array([each]) for name, each in found.items()})
    return {**found, "label": float(value[0])}


def one(seed: int, *, trust: float, options: argparse.Namespace) -> Result:
    world = actions(options.requests, seed=seed, trust=trust, conflict=options.conflict)
    log = read_log(
        world.log, item="item", randomised="random", features=FEATURES, actions=COLUMNS["actions"].split(",")
    )
    found = after_click.estimate_after_click(log, Label(ALL))
    error = {name: np.abs(np.array(each.tau) / world.tau[name] - 1)[1:] for name, each in found.items()}
    covered = {
        name: ((np.array(each.low) <= world.tau[name]) & (world.tau[name] <= np.array(each.high)))[1:]
        for name, each in found.items()
    }
    result = Result(error, covered, {name: each.used for name, each in found.items()})
    if options.estimates:
        return result
    level = after_click.LEVEL
    with_correction = trained(world, options, seed)
    after_click.LEVEL = 0.0  # nothing is clear enough
    try:
        without = trained(world, options, seed)
    finally:
        after_click.LEVEL = level
    return Result(error, covered, result.used, with_correction, without)


def interval(values: np.ndarray) -> str:
    error = stats.t.ppf(0.975, max(1, len(values) - 1)) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():+.2%} ({values.mean() - error:+.2%} to {values.mean() + error:+.2%})"


def show(name: str, results: list[Result]) -> None:
    print(f"{name}: {len(results)} seeds")
    for action in results[0].error:
        error, covered = (np.array([getattr(each, kind)[action] for each in results]) for kind in ("error", "covered"))
        used = np.mean([each.used[action] for each in results])
        print(
            f"  {action:9} error of τ {error.mean():.1%}, at the worst position {error.mean(0).max():.1%}; "
            f"covered {covered.mean():.1%}; used {used:.0%}"
        )
    pairs = [(each.with_correction, each.without) for each in results if each.with_correction and each.without]
    for action in pairs[0][0] if len(pairs) > 1 else ():
        gains = np.array([a[action] / b[action] - 1 for a, b in pairs])
        print(f"  {action:9} with the correction against without: {interval(gains)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--trust", type=float, default=1.0, help="times log τ of the world with trust")
    parser.add_argument("--estimates", action="store_true", help="only estimate τ, and train nothing")
    parser.add_argument("--ranker", default="auto", help="the ranker that is trained")
    parser.add_argument("--conflict", type=float, default=0.5, help="how much items that are clicked are not bought")
    parser.add_argument("--label", default="click + 20 * purchase", help="what is learned")
    options = parser.parse_args()
    logger.setLevel("ERROR")
    seeds = range(options.first, options.first + options.seeds)
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for name, trust in (("trust", options.trust), ("no trust", 0.0)):
            work: Any = partial(one, trust=trust, options=options)
            show(name, list(pool.map(work, seeds)))


if __name__ == "__main__":
    main()
