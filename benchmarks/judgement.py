"""Check the intervals, the order and the decisions of comparisons of five rankers, on simulated logs.

    python benchmarks/judgement.py [--logs 100] [--sessions 6000] [--randomised 0.0] [--eta 0.75,1,1.5] [--jobs 1]
        [--worlds pbm,trust,cascade,confounded,shop,feed]

Nothing is known about examination: `compare_rankers`, as in `ultr evaluate`, estimates it from each log. `--randomised`
is the share of the requests in random order, which the log marks. The worlds:

- `pbm`, `trust`, `cascade`: simulated users of `ultr`, with each severity `--eta` of the position bias in turn. Every
  log has another taste of its users, another production ranker (by features that the log has, plus noise) and other
  items;
- `confounded`: the shop of `tests/bias/shop.py`, without its query column. Production moves items by the query, which
  also makes them relevant;
- `shop` and `feed`: the worlds of `tests/worlds`, which share no code with `ultr`. The shop has two devices, which are
  segments; in the feed, viewers go on less often after a video that they watched for long.

The rankers:

- `good`: the users' taste; `fair`: the taste plus noise
- `naive`: the click rate of the position where an item was shown, with some of the users' taste. A ranker that learns
  from clicks as they are gives such scores.
- the logged ranking, and `random`

The truth is the exact expected reward of the rankings. The output has, for each world, as JSON:

- `order`: how often all five are in the true order; `pairs`: how often each pair of neighbours is
- `gaps`: the mean true differences between neighbours, in % of the reward of the logged ranking
- `errors`: the mean and the standard deviation of the estimated minus the true value of each ranker, in %
- `covered`: how often the 95% interval of the difference to the logged ranking has the true difference, and `widths`:
  its mean width, in % of the reward of the logged ranking
- `values`: how often the 95% interval of the value has the true value
- `confirmed`: how often random order confirmed examination
- `decisions`: how often each decision was made on each ranker, next to `worse` and `better`: how often it is truly
  worse than the logged ranking, and how often better by 3% or more
- `wrong`: how often a truly worse ranker was to be deployed; `found`: how often one that is better by 3% or more was to
  be deployed or tested
- `clicks`: how often the order by clicks without a correction (`feedback-dcg@10`) is true
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "bias"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import shop as confounded_shop  # type: ignore[import-not-found]

from ultr.datasets import randomise
from ultr.datasets.users import User, make_user, simulate_log
from ultr.evaluation.comparing import DEPLOY, LOGGED_RANKING, TEST, RankerComparison, compare_rankers
from ultr.evaluation.scores import evaluate_scores
from ultr.log import Log, read_log
from ultr.log.table import by_segment
from worlds.feed import feed  # type: ignore[import-not-found]
from worlds.shop import shop  # type: ignore[import-not-found]

METRIC = "off-policy-reward@10"
USERS, SHOPS = ("pbm", "trust", "cascade"), ("confounded", "shop", "feed")
CLEAR = 0.03  # a relative gain that a comparison should find
FEATURES, ITEMS = 6, 10
SHARES = (0.4, 0.25, 0.15, 0.12, 0.08)  # of the items with grades 0 to 4
NOISE = {"good": 0.0, "fair": 0.7}  # added to the users' taste
NAIVE = 0.4  # weight of the users' taste in the scores of `naive`, next to the logarithm of the click rate


@dataclass(frozen=True, eq=False)
class Case:
    """A simulated log, the scores of its rows by rankers, and the true value of any scores."""

    log: Log
    rankers: dict[str, np.ndarray]
    value: Callable[[np.ndarray], float]
    label: str = "click"
    segments: tuple[str, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=int, default=100, help="simulated logs, divided among the worlds")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first log")
    parser.add_argument("--sessions", type=int, default=6000, help="requests per log")
    parser.add_argument("--randomised", type=float, default=0.0, help="share of the requests in random order")
    parser.add_argument("--worlds", default="pbm,trust", help=f"of {', '.join(USERS + SHOPS)}; comma-separated")
    parser.add_argument("--eta", default="0.75,1,1.5", help="severities of the position bias, comma-separated")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    begun = time.perf_counter()
    worlds = options.worlds.split(",")
    kinds = [(world, float(eta)) for world in worlds if world in USERS for eta in options.eta.split(",")]
    kinds += [(world, 1.0) for world in worlds if world in SHOPS]
    names = {kind: f"{kind[0]}, eta {kind[1]:g}" if kind[0] in USERS else kind[0] for kind in kinds}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    seeds = range(options.first_seed, options.first_seed + options.logs)
    tasks = [(*kinds[seed % len(kinds)], options.sessions, options.randomised, seed) for seed in seeds]
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for (world, eta, *_), found in zip(tasks, pool.map(replication, *zip(*tasks, strict=True)), strict=True):
            results[names[world, eta]].append(found)
    every = [found for part in results.values() for found in part]
    report: dict[str, Any] = {"logs": len(every), "order": sum(bool(found["order"]) for found in every)}
    report |= {kind: _summary(part) for kind, part in results.items() if part}
    print(json.dumps({**vars(options), "seconds": round(time.perf_counter() - begun, 1), **report}, indent=1))


def make_case(world: str, eta: float, sessions: int, randomised: float, seed: int) -> Case:
    if world in USERS:
        return simulated(sessions, make_user(world, eta=eta, dwell=None), randomised=randomised, seed=seed)
    return foreign(world, sessions, randomised, seed)


def foreign(world: str, sessions: int, randomised: float, seed: int) -> Case:
    """Return a log of a world of the tests. The taste of its users is what a row is worth if it is seen."""
    if world == "confounded":
        log = confounded_shop.shop(sessions, seed=seed, random_share=randomised, columns=("item", "randomised"))
        theta = confounded_shop.THETA[:10]

        def value(scores: np.ndarray) -> float:
            order = np.argsort(-scores.reshape(len(log), -1), axis=1)[:, : len(theta)]
            worth = np.take_along_axis(log.true_relevance.reshape(len(log), -1), order, axis=1)
            return float((worth @ theta).mean())

        return Case(log, _rankers(log, log.true_relevance, "click", seed), value)
    label, segments = ("click", ("device",)) if world == "shop" else ("watch_ratio", ())
    made = (
        shop(sessions, seed=seed, random_share=randomised, bots=0.0) if world == "shop" else feed(sessions, seed=seed)
    )
    how: dict[str, Any] = {"features": list(made.features), "categorical": list(made.categorical), "actions": [label]}
    how |= {"segment": "device"} if segments else {"request": "session", "position": "rank", "item": "video"}
    log = read_log(made.log, **how)
    log, names = by_segment(log) if segments else (log, ())
    return Case(log, _rankers(log, made.truth, label, seed), made.reward, label, names)


def _rankers(log: Log, truth: np.ndarray, label: str, seed: int) -> dict[str, np.ndarray]:
    """Return the scores of four rankers, from what rows are worth if they are seen."""
    rng = np.random.default_rng(seed)
    taste = np.log(np.maximum(truth, 1e-6))
    taste = (taste - taste.mean()) / taste.std()
    positions = np.unique(log.shown_positions("the benchmark"), return_inverse=True)[1]
    by_position = np.bincount(positions, log.actions[label]) / np.bincount(positions)
    rankers = {name: taste + noise * rng.normal(size=log.rows) for name, noise in NOISE.items()}
    rankers["naive"] = np.log(np.maximum(by_position, 1e-6))[positions] + NAIVE * taste
    return {**rankers, "random": rng.random(log.rows)}


def simulated(sessions: int, user: User, *, randomised: float = 0.0, seed: int = 0) -> Case:
    """Return a log of simulated users, and the scores of its rows by four rankers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sessions, ITEMS, FEATURES))
    taste, other = np.linalg.qr(rng.normal(size=(FEATURES, 2)))[0].T
    worth = x @ taste + 0.3 * rng.normal(size=(sessions, ITEMS))
    production = x @ (0.5 * taste + np.sqrt(0.75) * other) + 0.05 * rng.normal(size=(sessions, ITEMS))
    order = np.argsort(-production, axis=1)
    x, worth = np.take_along_axis(x, order[:, :, None], 1), np.take_along_axis(worth, order, 1)
    grades = np.searchsorted(np.quantile(worth, np.cumsum(SHARES)[:-1]), worth).reshape(-1)
    log = Log(
        features=x.reshape(-1, FEATURES).astype(np.float32),
        offsets=np.arange(sessions + 1) * ITEMS,
        request_ids=pa.array(np.arange(sessions)),
        feature_names=tuple(f"x{i}" for i in range(FEATURES)),
        positions=np.tile(np.arange(1, ITEMS + 1), sessions),
        relevance=grades.astype(np.float32),
    )
    log = simulate_log(randomise(log, randomised, seed=seed) if randomised else log, user, seed=seed)[0]
    liked = log.features @ taste
    positions = log.shown_positions("the benchmark")
    by_position = np.bincount(positions, log.actions["click"]) / np.maximum(1, np.bincount(positions))
    rankers = {name: liked + noise * rng.normal(size=log.rows) for name, noise in NOISE.items()}
    rankers["naive"] = np.log(by_position[positions]) + NAIVE * liked

    def value(scores: np.ndarray) -> float:
        return float(evaluate_scores(log, scores, "reward@10", user=user, label="click")["reward@10"].mean())

    return Case(log, {**rankers, "random": rng.random(log.rows)}, value)


def replication(world: str, eta: float, sessions: int, randomised: float, seed: int) -> dict[str, Any]:
    """Return the true and the estimated value of each ranker on one simulated log."""
    case = make_case(world, eta, sessions, randomised, seed)
    log, rankers, label = case.log, case.rankers, case.label
    every = {LOGGED_RANKING: -log.shown_positions("the benchmark").astype(float), **rankers}
    truth = {name: case.value(scores) for name, scores in every.items()}
    compared = compare_rankers(log, rankers, [METRIC], label=label, segments=case.segments, seed=seed)
    values = compared.rankers.items()
    as_clicked = compare_rankers(log, rankers, ["feedback-dcg@10"], label=label)
    return {
        "truth": truth,
        "value": _means(compared, METRIC),
        "order": _order(_means(compared, METRIC)) == _order(truth),
        "clicks": _order(_means(as_clicked, "feedback-dcg@10")) == _order(truth),
        "confirmed": compared.confirmed,
        "covered": {
            name: test.low <= truth[name] - truth[LOGGED_RANKING] <= test.high
            for name, each in values
            if (test := each[METRIC].difference) is not None
        },
        "values": {name: each[METRIC].mean.low <= truth[name] <= each[METRIC].mean.high for name, each in values},
        "widths": {
            name: 100 * (test.high - test.low) / truth[LOGGED_RANKING]
            for name, each in values
            if (test := each[METRIC].difference) is not None
        },
        "decisions": {name: found.action for name, _ in values if (found := compared.decision(name)) is not None},
        "theta": list(compared.theta.values())[:10],
    }


def _means(compared: RankerComparison, metric: str) -> dict[str, float]:
    return {name: each[metric].mean.mean for name, each in compared.rankers.items()}


def _order(values: dict[str, float]) -> list[str]:
    return sorted(values, key=lambda name: -values[name])


def _summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of the logs with one kind of users."""
    names = _order({name: np.mean([each["truth"][name] for each in found]) for name in found[0]["truth"]})
    truth, value = (np.array([[each[what][name] for name in names] for each in found]) for what in ("truth", "value"))
    logged_at = names.index(LOGGED_RANKING)
    logged = truth[:, logged_at].mean()
    neighbours = [f"{a} - {b}" for a, b in pairwise(names)]
    right = (np.diff(truth, axis=1) * np.diff(value, axis=1) > 0).sum(0).tolist()
    gaps = (-100 * np.diff(truth, axis=1).mean(0) / logged).round(1).tolist()
    errors = 100 * (value / truth - 1)
    gains = {n: truth[:, names.index(n)] / truth[:, logged_at] - 1 for n in found[0]["decisions"]}
    return {
        "logs": len(found),
        "order": sum(bool(each["order"]) for each in found),
        "clicks": sum(bool(each["clicks"]) for each in found),
        "pairs": dict(zip(neighbours, right, strict=True)),
        "gaps": dict(zip(neighbours, gaps, strict=True)),
        "errors": {
            n: [round(float(e.mean()), 1), round(float(e.std()), 1)] for n, e in zip(names, errors.T, strict=True)
        },
        "decisions": {n: dict(Counter(each["decisions"][n] for each in found)) for n in found[0]["decisions"]},
        "worse": {n: int((gains[n] < 0).sum()) for n in gains},
        "better": {n: int((gains[n] >= CLEAR).sum()) for n in gains},
        "wrong": {n: _decided(found, n, gains[n] < 0, DEPLOY) for n in gains},
        "found": {n: _decided(found, n, gains[n] >= CLEAR, DEPLOY, TEST) for n in gains},
        "confirmed": sum(each["confirmed"] for each in found),
        "widths": {n: round(float(np.mean([each["widths"][n] for each in found])), 1) for n in found[0]["widths"]},
        "values": {n: sum(bool(e["values"][n]) for e in found) for n in found[0]["values"]},
        "covered": {n: sum(bool(e["covered"][n]) for e in found) for n in found[0]["covered"]},
        "theta": np.mean([each["theta"] for each in found], axis=0).round(3).tolist(),
    }


def _decided(found: list[dict[str, Any]], name: str, which: np.ndarray, *actions: str) -> int:
    """Return how often a decision on a ranker was one of some actions, in some of the logs."""
    return sum(bool(use) and each["decisions"][name] in actions for use, each in zip(which, found, strict=True))


if __name__ == "__main__":
    main()
