"""Examination that depends on two columns: errors of its estimates, and coverage of their intervals.

    python benchmarks/contexts.py [--seeds 100] [--first 1000] [--requests 30000] [--plain] [--features]

The world is tests/worlds/contexts.py: 5% of the requests are in random order. `--plain` takes away the dependence. θ is
relative to the first position of its segment. Three estimates are compared: one curve, a curve for each segment alone,
and curves that share strength.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ultr.bias.examination import Examination, estimate_examination
from ultr.log import read_log
from ultr.log.labels import Label
from ultr.log.table import by_segment, slot

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from worlds.contexts import contexts  # type: ignore[import-not-found]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--plain", action="store_true", help="examination is the same in all contexts")
    parser.add_argument("--features", action="store_true", help="use the feature too, as a log without item ids would")
    given = parser.parse_args()
    results: dict[str, list[Any]] = {"one curve": [], "each alone": [], "shared": []}
    for seed in range(given.first, given.first + given.seeds):
        table, truth = contexts(given.requests, seed=seed, plain=given.plain)
        whole = read_log(
            table, segment="device,surface", randomised="random", features=["f1"] if given.features else []
        )
        log, names = by_segment(whole)
        results["one curve"].append(errors(estimate_examination(whole, Label("click")), (), truth))
        results["each alone"].append(errors(estimate_examination(log, Label("click")), names, truth))
        results["shared"].append(errors(estimate_examination(log, Label("click"), segments=names), names, truth))
    print(f"{'':12} {'mean error':>10} {'worst slot':>10} {'covered':>8}")
    for name, rows in results.items():
        off, inside = (np.array([row[i] for row in rows]) for i in (0, 1))
        print(f"{name:12} {off.mean():10.1%} {off.mean(0).max():10.1%} {inside.mean():8.1%}")


if __name__ == "__main__":
    main()
