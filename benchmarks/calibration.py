"""Calibration on fresh requests: the error of expected feedback relative to the mean, and orders that it changes.

    python benchmarks/calibration.py [--worlds demo,shop,feed,clips,news] [--seeds 5] [--requests 30000] [--jobs 1]

Half of the requests of a world train the default ranker, the others are fresh; the demo's fresh requests are its test
requests. The error is measured against the true expected feedback of each row: at the positions where rows were
shown, and of all rows at the first position. The second error includes that of examination and of what the logging
ranker knew. By chance: the error of a perfect calibration by the sampled feedback of the test requests of the run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ultr.datasets import ranking_svm, show
from ultr.datasets.synthetic import make_synthetic
from ultr.datasets.users import User, simulate_log
from ultr.log import Log, read_log
from ultr.log.labels import Label
from ultr.log.table import by_segment
from ultr.rankers.model import load_model
from ultr.training.calibrating import reliability
from ultr.training.config import make_config
from ultr.training.data import Decisions, columns_for_run
from ultr.training.outcome import read_outcome
from ultr.training.run import run_training

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from worlds.clips import clips  # type: ignore[import-not-found]
from worlds.feed import feed  # type: ignore[import-not-found]
from worlds.news import news  # type: ignore[import-not-found]
from worlds.shop import shop  # type: ignore[import-not-found]
from worlds.world import positions  # type: ignore[import-not-found]

FRESH = 20_000  # test requests of the demo
BOTS = (0.005, 0.6)  # of the shop: their share of the requests, and how often they click
WORLDS: dict[str, tuple[Any, str, dict[str, str]]] = {
    "shop": (shop, "click", {"request": "request_id", "item": "item_id", "query": "query"}),
    "feed": (feed, "watch_ratio", {"request": "session", "position": "rank", "item": "video"}),
    "news": (news, "click", {}),
    "clips": (clips, "watch_seconds", {"request": "list_id", "position": "slot", "item": "clip"}),
}


@dataclass(frozen=True, eq=False)
class Task:
    """A log to train on, and fresh rows with their expected feedback where they were shown, and at the top."""

    train: Any
    columns: dict[str, Any]
    label: str
    fresh: Any
    expected: np.ndarray
    at_first: np.ndarray


def make_task(world: str, requests: int, seed: int) -> Task:
    if world == "demo":
        data, user = make_synthetic(requests=(3000, 1, FRESH)), User()  # the train requests of the demo
        initial = ranking_svm(data.train, seed=seed)
        shown = show(data.train, initial(data.train.features))
        train = replace(simulate_log(shown, user, seed=seed, sessions=requests)[0], relevance=None)
        fresh = show(data.test, initial(data.test.features))
        attracted = user.attracted(torch.from_numpy(fresh.true_relevance)).numpy()
        theta = user.theta(torch.from_numpy(fresh.shown_positions("a test"))).numpy()
        return Task(train, {}, "click", fresh, theta * attracted, float(user.theta(torch.tensor([1]))) * attracted)
    make, label, named = WORLDS[world]
    whole = make(2 * requests, seed=seed)
    for_training = np.zeros(2 * requests, bool)
    for_training[np.random.default_rng(seed).permutation(2 * requests)[:requests]] = True
    rows = np.repeat(for_training, whole.lengths)
    places = positions(whole.lengths)
    expected, at_first = whole.expected(places), whole.expected(np.ones_like(places))
    if world == "shop":
        expected, at_first = ((1 - BOTS[0]) * each + BOTS[0] * BOTS[1] for each in (expected, at_first))
    columns: dict[str, Any] = {**named, "actions": [label], "features": list(whole.features)}
    columns |= {"categorical": list(whole.categorical)} if whole.categorical else {}
    train, fresh = (whole.log.filter(pa.array(mask)) for mask in (rows, ~rows))
    return Task(train, columns, label, fresh, expected[~rows], at_first[~rows])


def errors(world: str, requests: int, seed: int) -> dict[str, float]:
    """Train a run on a world; return its calibration errors, and the share of requests whose order changes."""
    torch.set_num_threads(1)
    task = make_task(world, requests, seed)
    config = make_config(label=task.label, seed=seed, device="cpu", **task.columns)
    with tempfile.TemporaryDirectory() as folder:
        run = run_training(config, Path(folder) / "run", source=task.train)
        model, decisions, outcome = load_model(run), Decisions.load(run), read_outcome(run)
        fresh = task.fresh if isinstance(task.fresh, Log) else read_log(task.fresh, **columns_for_run(run, model, {}))
    calibration = model.calibration
    assert calibration is not None
    assert outcome is not None
    assert outcome.calibration is not None
    scores = model.score(fresh)
    at_first = model.expected(scores, fresh)
    request = fresh.request_of_row
    changed = np.lexsort((-scores, request)) != np.lexsort((-at_first, request))
    by_segments = by_segment(fresh, decisions.segments)[0] if decisions.segments else fresh

    def error(truth: np.ndarray, **of_log: Any) -> float:
        log = replace(by_segments, actions={task.label: truth}, **of_log)
        return float(reliability(calibration, scores, log, Label(task.label), decisions.segments)["error"])

    shift = by_segments.shown_positions("a test") - fresh.shown_positions("a test")
    return {
        "error": error(task.expected),
        "at first": error(task.at_first, positions=shift + int(fresh.shown_positions("a test").min())),
        "reported": outcome.calibration["error"],
        "by chance": outcome.calibration["chance"],
        "changed": float(len(np.unique(request[changed]))),
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
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        waiting = [(world, pool.submit(errors, world, given.requests, seed)) for world, seed in cases]
        found: dict[str, list[dict[str, float]]] = {}
        for world, future in waiting:
            found.setdefault(world, []).append(future.result())
    names = ("error", "at first", "reported", "by chance", "changed")
    print(f"{'':8}" + "".join(f"{name:>20}" for name in names))
    for world, rows in found.items():
        cells = []
        for name in names[:-1]:
            values = np.array([row[name] for row in rows])
            error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
            cells.append(f"{values.mean():.2%} ± {error:.2%}")
        cells.append(f"{sum(row['changed'] for row in rows):.0f}")
        print(f"{world:8}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
