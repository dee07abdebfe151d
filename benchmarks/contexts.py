"""Examination that depends on two columns: errors of its estimates, coverage of their intervals, and rankers.

    python benchmarks/contexts.py [--seeds 100] [--first 1000] [--requests 30000] [--plain] [--features] [--jobs 1]
                                  [--rank] [--ranker lightgbm]

The world is tests/worlds/contexts.py: 5% of the requests are in random order. `--plain` takes away the dependence. θ is
relative to the first position of its segment. Three estimates are compared: one curve, a curve for each segment alone,
and curves that share strength.

`--rank` compares rankers instead: `ultr.train` with `segment="device,surface"` and with one curve (`segment="none"`),
by NDCG@10 of the true relevance on fresh requests with other items. Each device has items of its own, which production
shows at the bottom. Differences are paired over seeds.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import ultr
from ultr.bias.examination import Examination, estimate_examination
from ultr.evaluation.scores import mean_with_interval
from ultr.log import read_log
from ultr.log.labels import Label
from ultr.log.table import by_segment, slot

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from worlds.contexts import Catalogue, contexts  # type: ignore[import-not-found]

FRESH, SHOWN = 2_000, 20  # fresh requests, and their items
ONE, SHARED = "one curve", "shared"


def errors(found: Examination, names: tuple[str, ...], truth: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the relative errors of θ by slot, and whether 95% intervals cover the truth."""
    log_theta, spread = np.log(found.theta), found.covariance
    assert spread is not None
    place = {slot(k, names): i for i, k in enumerate(found.positions)}
    off, inside = [], []
    for name, true in truth.items():
        segment = name.partition("@")[2]
        here, first = (place[text if names else text.partition("@")[0]] for text in (name, f"1@{segment}"))
        if here != first:
            error = log_theta[here] - log_theta[first] - np.log(true)
            variance = spread[here, here] + spread[first, first] - 2 * spread[here, first]
            off.append(abs(np.expm1(error)))
            inside.append(abs(error) <= 1.96 * np.sqrt(max(variance, 0.0)))
    return np.array(off), np.array(inside)


def estimates(given: argparse.Namespace, seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the errors of each estimate, and whether its intervals cover the truth."""
    table, truth = contexts(given.requests, seed=seed, plain=given.plain)
    whole = read_log(table, segment="device,surface", randomised="random", features=["f1"] if given.features else [])
    log, names = by_segment(whole)
    return {
        ONE: errors(estimate_examination(whole, Label("click")), (), truth),
        "each alone": errors(estimate_examination(log, Label("click")), names, truth),
        SHARED: errors(estimate_examination(log, Label("click"), segments=names), names, truth),
    }


def rankers(given: argparse.Namespace, seed: int) -> dict[str, float]:
    """Return NDCG@10 of a ranker with one curve, and of one with curves that share strength."""
    table, _ = contexts(given.requests, seed=seed, plain=given.plain, catalogue=Catalogue(seed))
    rng = np.random.default_rng([seed, 2])
    device = rng.integers(1, 3, (FRESH, 1))
    features = Catalogue.features_of(rng, device * (rng.random((FRESH, SHOWN)) < 1 / 3))
    relevance = Catalogue.relevance_of(features)
    columns: dict[str, Any] = {f"f{i + 1}": values for i, values in enumerate(features.reshape(-1, 4).T)}
    fresh = pa.table({"request": np.repeat(np.arange(FRESH), SHOWN), **columns})
    found = {}
    for name, segment in ((ONE, "none"), (SHARED, "device,surface")):
        options: dict[str, Any] = {"seed": seed, "segment": segment, "randomised": "random"}
        options |= {} if given.ranker is None else {"ranker": given.ranker}
        scores = np.asarray(ultr.train(table, **options).score(fresh), float).reshape(FRESH, SHOWN)
        discount = 1 / np.log2(np.arange(10) + 2)
        gained = (np.take_along_axis(relevance, np.argsort(-scores, 1)[:, :10], 1) @ discount).sum()
        found[name] = float(gained / (-np.sort(-relevance, 1)[:, :10] @ discount).sum())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--plain", action="store_true", help="examination is the same in all contexts")
    parser.add_argument("--features", action="store_true", help="use the feature too, as a log without item ids would")
    parser.add_argument("--rank", action="store_true", help="compare rankers, not estimates")
    parser.add_argument("--ranker", help="the ranker of --rank, such as lightgbm; default: that of ultr train")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    with ProcessPoolExecutor(given.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        results: list[Any] = [*pool.map(partial(rankers if given.rank else estimates, given), seeds)]
    if given.rank:
        values = {name: np.array([row[name] for row in results]) for name in (ONE, SHARED)}
        for name, each in values.items():
            print(f"{name:12} {each.mean():.4f}")
        found = mean_with_interval(values[SHARED] / values[ONE] - 1)
        print(f"{'difference':12} {found.mean:+.2%} [{found.low:+.2%}, {found.high:+.2%}] over {len(seeds)} seeds")
        return
    print(f"{'':12} {'mean error':>10} {'worst slot':>10} {'covered':>8}")
    for name in results[0]:
        off, inside = (np.array([row[name][i] for row in results]) for i in (0, 1))
        print(f"{name:12} {off.mean():10.1%} {off.mean(0).max():10.1%} {inside.mean():8.1%}")


if __name__ == "__main__":
    main()
