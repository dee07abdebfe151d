"""Time to a first model: `ultr train` with its defaults on a small log, next to LightGBM on the same rows.

    python benchmarks/first_model.py [--requests 3000] [--items 10] [--features 136] [--seed 0]

The log is simulated: position-based users, an order by a linear ranker. The ranker is judged by its NDCG@10 on true
labels of other requests. Times are of this process after imports, on as many threads as torch takes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import ultr
from ultr.datasets.synthetic import make_synthetic
from ultr.training.config import make_config
from ultr.training.run import run_training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("requests", 3000), ("items", 10), ("features", 136), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rankers", default="auto,mlp,lightgbm")
    given = parser.parse_args()
    data = make_synthetic(requests=(given.requests, 10, 1000), seed=given.seed)
    order = ultr.ranking_svm(data.train, share=0.05, seed=given.seed)
    test, logged = with_features(data.test, given.features), order(data.test.features)
    shown = with_features(ultr.show(data.train, order(data.train.features), items=given.items), given.features)
    log = replace(ultr.simulate_log(shown, ultr.User(), seed=given.seed)[0], relevance=None)
    print(f"{len(log):,} requests, {log.rows:,} rows, {len(log.feature_names)} features")
    for ranker in given.rankers.split(","):
        config = make_config(ranker=ranker, label="click", seed=given.seed)
        with tempfile.TemporaryDirectory() as folder:
            start, cpu = time.perf_counter(), time.process_time()
            run = run_training(config, Path(folder) / "run", source=log)
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            scores = ultr.load_model(run).score(test)
        print(f"ultr train --ranker {ranker}: {wall:.0f} s, {cpu:.0f} s of CPU, NDCG@10 {_ndcg(test, scores):.4f}")
    start = time.perf_counter()
    scores = _lightgbm(log, test.features)
    print(f"LightGBM lambdarank on clicks: {time.perf_counter() - start:.0f} s, NDCG@10 {_ndcg(test, scores):.4f}")
    print(f"the logging ranker: NDCG@10 {_ndcg(test, logged):.4f}")


def with_features(log: ultr.Log, count: int) -> ultr.Log:
    """Return a log with its first features only."""
    return replace(log, features=log.features[:, :count].copy(), feature_names=log.feature_names[:count])


def _ndcg(log: ultr.Log, scores: np.ndarray) -> float:
    return float(ultr.evaluate_scores(log, scores, ["ndcg@10"])["ndcg@10"].mean())


def _lightgbm(log: ultr.Log, features: np.ndarray) -> np.ndarray:
    import lightgbm

    rows = lightgbm.Dataset(log.features, label=log.actions["click"], group=log.lengths)
    trees = lightgbm.train({"objective": "lambdarank", "verbosity": -1}, rows, num_boost_round=100)
    return np.asarray(trees.predict(features))


if __name__ == "__main__":
    main()
