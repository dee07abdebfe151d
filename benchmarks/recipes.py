"""The default next to LightGBM's own recipes, in worlds that share no code with `ultr.datasets` (tests/worlds).

    python benchmarks/recipes.py [--world shop] [--requests 8000] [--seeds 2000,2001] [--rankers auto]

All rows learn from the same log, and are judged by NDCG@10 of the true values of 3,000 other requests. The recipes have
a learning rate of 0.05, and the leaves (4 or 31) and rounds that are best for their own loss on a fifth of the
requests. Those that need θ have that of `ultr train`, by device in the shop and by surface in the clips. The
parts of the default, which is their sum, were fitted in its own run. "seconds" are of all processor cores together;
those of a recipe are of the leaves that it chose, with the estimate of θ if it needs that.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np

import ultr
from ultr.bias.examination import estimate_examination
from ultr.log.labels import Label
from ultr.log.table import by_segment
from ultr.training.config import make_config
from ultr.training.run import run_training

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
WORLDS: dict[str, tuple[str, dict[str, Any]]] = {
    "shop": ("click", {"segment": "device"}),
    "feed": ("watch_ratio", {"request": "session", "position": "rank", "item": "video"}),
    "news": ("click", {}),
    "clips": ("watch_seconds", {"actions": ["watch_seconds"], "item": "clip", "segment": "surface"}),
}
LEAVES = (4, 31)  # that a recipe chooses from
TREES = {"learning_rate": 0.05, "verbosity": -1, "num_threads": int(os.environ.get("OMP_NUM_THREADS", "2"))}
GRADES = 4  # of labels that are not clicks, for lambdarank
MOST = 10.0  # of the weights 1/θ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=list(WORLDS), default="shop")
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--seeds", default="2000,2001")
    parser.add_argument("--rankers", default="auto")
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in map(int, given.seeds.split(",")):
        for name, ndcg, seconds in compared(given.world, given.requests, seed, given.rankers.split(",")):
            found.setdefault(name, []).append((ndcg, seconds))
            print(f"seed {seed}: {name}: {ndcg:.4f}, {seconds:.1f} s", flush=True)
    first = next(iter(found.values()))
    print(f"\n{given.world}, {given.requests:,} requests, mean of {len(given.seeds.split(','))} seeds")
    for name, values in sorted(found.items(), key=lambda row: -np.mean([ndcg for ndcg, _ in row[1]])):
        ndcg, seconds = np.mean(values, axis=0)
        print(f"  {ndcg:.4f}  {seconds:5.0f} s  {name}{against(values, first)}")


def against(values: list[tuple[float, float]], first: list[tuple[float, float]]) -> str:
    """Return the difference of a row to the first one, paired over seeds, in words; empty with one seed."""
    if values is first or len(first) < 2:
        return ""
    test = ultr.paired_test(np.array(values)[:, 0], np.array(first)[:, 0])
    return f" ({test.difference:+.4f}, {test.low:+.4f} to {test.high:+.4f}, p {test.p:.3f})"


def compared(name: str, requests: int, seed: int, rankers: list[str]) -> Iterator[tuple[str, float, float]]:
    """Yield the name of each row of the comparison, its NDCG@10 and its seconds."""
    make, (text, columns) = getattr(import_module(f"worlds.{name}"), name), WORLDS[name]
    world, other = make(requests, seed=seed), make(3000, seed=seed + 5000)
    reading = {**columns, "features": list(world.features), "categorical": list(world.categorical)}
    log, test = (ultr.read_log(each.log, **reading) for each in (world, other))
    label = Label(text)
    for ranker in rankers:
        segment = {role: name for role, name in columns.items() if role == "segment"}
        config = make_config(label=text, ranker=ranker, columns=segment, seed=seed)
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            run = run_training(config, Path(folder) / "run", source=log)
            seconds = time.process_time() - start
            yield f"ultr train --ranker {ranker}", other.ndcg(ultr.load_model(run).score(test)), seconds
            fits = sorted((run / "fits").iterdir())
            for part in fits if len(fits) > 1 else ():
                yield f"its part {part.name}", other.ndcg(ultr.load_model(part).score(test)), math.nan
    start = time.process_time()
    split = by_segment(log)[0] if "segment" in columns else log
    by_position = estimate_examination(split, label, seed=seed).by_position()
    theta = np.array([by_position[k] for k in np.asarray(split.positions).tolist()])
    theta, spent = theta / theta.max(), time.process_time() - start
    for recipe, scores, seconds in recipes(log, test, label, theta, world.truth, seed):
        yield f"LightGBM, {recipe}", other.ndcg(scores), seconds + spent * ("θ" in recipe)
    yield "the logged ranking", other.ndcg(-np.asarray(test.positions, float)), 0.0
    yield "true values", other.ndcg(other.truth), 0.0


def recipes(
    log: ultr.Log, test: ultr.Log, label: Label, theta: np.ndarray, truth: np.ndarray, seed: int
) -> Iterator[tuple[str, np.ndarray, float]]:
    """Yield the name, the scores of the test rows and the seconds of each of LightGBM's recipes.

    The last one learns from what users never show, the true values of the log's rows: it is about as good as the
    features allow.
    """
    c = np.asarray(label(log.actions), np.float64)
    grade = graded(c) if (c % 1).any() else c
    held_out = (np.random.default_rng(seed).random(len(log)) < 0.2)[log.request_of_row]
    weight = np.where(c > 0, np.minimum(1 / theta, MOST), 1.0)
    ranking = {"objective": "lambdarank", "metric": "ndcg", "eval_at": [10]}
    tweedie = {"objective": "tweedie", "metric": "tweedie", "tweedie_variance_power": 1.5}
    for name, parameters, target, extra in (
        ("lambdarank", ranking, grade, {}),
        ("lambdarank, position=", ranking, grade, {"position": np.asarray(log.positions)}),
        ("lambdarank, weights 1/θ", ranking, grade, {"weight": weight}),
        ("Poisson, offset log θ", {"objective": "poisson", "metric": "poisson"}, c, {"init_score": np.log(theta)}),
        ("Tweedie, offset log θ", tweedie, c, {"init_score": np.log(theta)}),
        ("L2 on c/θ", {"objective": "regression", "metric": "l2"}, np.minimum(c / theta, MOST * c), {}),
        ("the true values of the log", {"objective": "regression", "metric": "l2"}, truth, {}),
    ):
        parts: list[Any] = []
        for rows in (~held_out, held_out):
            lengths = np.bincount(log.request_of_row[rows])
            given = {key: values[rows] for key, values in extra.items() if key != "position" or not parts}
            group = lengths[lengths > 0] if parameters is ranking else None
            data = lightgbm.Dataset(
                log.features[rows], target[rows], group=group, categorical_feature=list(log.categories), **given
            )
            parts.append(data)
        tried = []
        for leaves in LEAVES:
            start, stop = time.process_time(), lightgbm.early_stopping(30, verbose=False)
            shape = {**TREES, "num_leaves": leaves, "feature_pre_filter": False, **parameters}
            trees = lightgbm.train(shape, parts[0], 500, valid_sets=[parts[1]], callbacks=[stop])
            (loss,) = trees.best_score["valid_0"].values()
            scores = np.asarray(trees.predict(test.features, raw_score=True))
            tried.append((-loss if parameters is ranking else loss, time.process_time() - start, scores))
        _, seconds, scores = min(tried, key=lambda row: row[0])
        yield name, scores, seconds


def graded(c: np.ndarray) -> np.ndarray:
    """Return the grades of labels: shares of 1, rounded up; if some labels are above 1, quarters of those above 0."""
    if c.max() <= 1:
        return np.asarray(np.ceil(c * GRADES))
    bounds = np.quantile(c[c > 0], np.arange(1, GRADES) / GRADES)
    return np.where(c > 0, 1.0 + np.searchsorted(bounds, c), 0.0)


if __name__ == "__main__":
    main()
