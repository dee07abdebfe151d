"""What trees lose that learn the scores of the default ranker, for search engines; and its own trees alone.

    python benchmarks/distilling.py [--worlds demo,shop,feed,clips,news] [--seeds 5] [--requests 30000] [--jobs 1]

Half of the requests of a world train the default ranker, and trees learn its scores on them. The others judge: NDCG@10
by the true expected feedback at the first position, and the rank correlation (Kendall's τ) with the whole ranker.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from calibration import make_task  # type: ignore[import-not-found,unused-ignore]

from ultr.evaluation.scores import ranks
from ultr.log import Log, read_log, write_log
from ultr.rankers import score_rows
from ultr.rankers.boosters import TreeRanker
from ultr.rankers.combined import Blend
from ultr.rankers.model import load_model
from ultr.serving.distilling import distil
from ultr.training.config import make_config
from ultr.training.data import columns_for_run
from ultr.training.outcome import agreements
from ultr.training.run import run_training

RANKERS = ("ranker", "learned", "own trees")


def ndcg(log: Log, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return NDCG@10 of each request, with linear gain."""

    def dcg(by: np.ndarray) -> np.ndarray:
        rank = ranks(log, by)
        return np.bincount(log.request_of_row, np.where(rank < 10, values / np.log2(rank + 2), 0), len(log))

    return np.asarray(dcg(scores) / np.maximum(dcg(values), 1e-300))


def values_of(world: str, requests: int, seed: int) -> dict[str, tuple[float, float]]:
    """Train a run on a world; return NDCG and rank correlation of each ranker."""
    torch.set_num_threads(1)
    task = make_task(world, requests, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.parquet"
        if isinstance(task.train, Log):
            write_log(task.train, path)
        else:
            pq.write_table(task.train, path)
        config = make_config(str(path), label=task.label, seed=seed, device="cpu", **task.columns)
        run = run_training(config, Path(folder) / "run")
        model = load_model(run)
        learned = distil(run, model, None, library="lightgbm").booster
        fresh = task.fresh if isinstance(task.fresh, Log) else read_log(task.fresh, **columns_for_run(run, model, {}))
    features = np.asarray(model.columns_of(fresh))
    parts = model.ranker.parts if isinstance(model.ranker, Blend) else ()
    own = [part.weight * score_rows(part.ranker, features) for part in parts if isinstance(part.ranker, TreeRanker)]
    scores = dict(
        zip(RANKERS, (model.score_features(features), learned.predict(features), np.sum(own, 0)), strict=True)
    )
    whole = ranks(fresh, scores["ranker"])
    return {
        name: (
            float(ndcg(fresh, each, task.at_first).mean()),
            float(np.nanmean(agreements(fresh, whole, ranks(fresh, each)))),
        )
        for name, each in scores.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="demo,shop,feed,clips,news")
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    for name, default, words in (
        ("seeds", 5, "logs of each world"),
        ("requests", 30_000, "training requests"),
        ("jobs", 1, "processes"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=words)
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    cases = [(world, seed) for world in given.worlds.split(",") for seed in seeds]
    found: dict[str, list[dict[str, tuple[float, float]]]] = {}
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        waiting = [(world, pool.submit(values_of, world, given.requests, seed)) for world, seed in cases]
        for world, future in waiting:
            found.setdefault(world, []).append(future.result())
    print(f"{'':8}" + "".join(f"{f'{name}: NDCG, τ':>28}" for name in RANKERS))
    for world, rows in found.items():
        cells = []
        for name in RANKERS:
            values = np.array([row[name] for row in rows])
            error = values[:, 0].std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
            cells.append(f"{values[:, 0].mean():.4f} ± {error:.4f}, {values[:, 1].mean():.3f}")
        print(f"{world:8}" + "".join(f"{cell:>28}" for cell in cells))


if __name__ == "__main__":
    main()
