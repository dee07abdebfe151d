"""Rows that nobody could see: what the column that marks them gives, next to the same log without it.

    python benchmarks/shown.py [--seeds 20] [--first 1000] [--requests 30000] [--jobs 1] [--no-rankers]

The worlds are those of tests/worlds/shown.py: a cut-off, and viewports. For each, with and without the column: the mean
error of θ by position relative to the first one, the last position, coverage of 95% intervals of θ, and the NDCG@10 of
the default ranker on the candidates of fresh requests, with the paired gain of the column.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import ultr
from ultr.bias.examination import estimate_examination
from ultr.log import read_log
from ultr.log.labels import Label
from ultr.rankers.model import load_model
from ultr.training.config import make_config
from ultr.training.run import run_training

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from worlds.shown import POSITIONS, SLOPE, shown, without_column  # type: ignore[import-not-found]

COLUMNS: dict[str, Any] = {"features": ["f1", "f2"], "actions": ["click"]}


def measured(requests: int, seed: int, viewport: bool, rankers: bool) -> dict[str, np.ndarray]:
    """Return, for the log with the column and without, errors and coverage by position, and NDCG@10."""
    torch.set_num_threads(1)
    table = shown(requests, seed=seed, viewport=viewport)
    fresh = shown(3000, seed=100_000 + seed, viewport=viewport)
    candidates = read_log(
        fresh, request="request", features=["f1", "f2"], relevance="worth", position="", shown="", actions=[]
    )
    truth = -SLOPE * np.log(np.arange(1, POSITIONS + 1))
    found: dict[str, list[Any]] = {"error": [], "covered": [], "ndcg": []}
    for log in (table, without_column(table)):
        estimate = estimate_examination(read_log(log, **COLUMNS), Label("click"))
        spread, fall = estimate.covariance, np.log(estimate.theta / estimate.theta[0]) - truth
        assert spread is not None
        variance = spread.diagonal() + spread[0, 0] - 2 * spread[0]
        found["error"].append(np.expm1(fall)[1:])
        found["covered"].append(np.abs(fall[1:]) <= 1.96 * np.sqrt(np.maximum(variance[1:], 0)))
        if rankers:
            config = make_config(label="click", seed=seed, device="cpu", **COLUMNS)
            with tempfile.TemporaryDirectory() as folder:
                model = load_model(run_training(config, Path(folder) / "run", source=pa.table(log)))
            scores = model.score(candidates)
            found["ndcg"].append(ultr.evaluate_scores(candidates, scores, ["ndcg@10"])["ndcg@10"].mean())
    return {name: np.array(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--no-rankers", action="store_true", help="estimate examination only")
    given = parser.parse_args()
    print(f"{'':28}{'mean error':>11}{'last':>8}{'covered':>9}{'NDCG@10':>9}{'gain of the column':>24}")
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        for viewport in (False, True):
            seeds = range(given.first, given.first + given.seeds)
            waiting = [pool.submit(measured, given.requests, s, viewport, not given.no_rankers) for s in seeds]
            rows = [each.result() for each in waiting]
            for i, how in enumerate(("with the column", "without")):
                errors, inside = (np.array([row[name][i] for row in rows]) for name in ("error", "covered"))
                text = f"{np.abs(errors).mean():11.1%}{errors[:, -1].mean():+8.1%}{inside.mean():9.1%}"
                if not given.no_rankers:
                    values = np.array([row["ndcg"] for row in rows])
                    gain = values[:, 0] - values[:, 1]
                    error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.nan
                    text += f"{values[:, i].mean():9.4f}" + (f"{gain.mean():+15.4f} ± {error:.4f}" if i == 0 else "")
                print(f"{'viewports' if viewport else 'a cut-off':10}, {how:16}{text}", flush=True)


if __name__ == "__main__":
    main()
