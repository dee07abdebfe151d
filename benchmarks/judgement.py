"""Check whether a comparison finds the true order of five rankers, on simulated logs and with an estimated θ.

    python benchmarks/judgement.py [--logs 100] [--sessions 6000] [--randomised 0.0] [--users pbm,trust]
        [--eta 0.75,1,1.5]

Every log is a new world: the taste of its users, its production ranker (which orders the items by features that the log
has, plus noise) and its items differ. `compare_rankers`, as in `ultr evaluate`, compares five rankers:

- `good`: the users' taste; `fair`: the taste plus noise
- `naive`: the click rate of the position where an item was shown, with some of the users' taste. A ranker that learns
  from clicks as they are gives such scores.
- the logged ranking, and `random`

With `trust` users and an eta of 0.5, the true rewards of `good` and `fair` are nearly equal, so their order is chance.
The truth is the exact expected reward of the rankings. The output has, for each kind of user, as JSON:

- `order`: how often all five are in the true order; `pairs`: how often each pair of neighbours is
- `gaps`: the mean true differences between neighbours, in % of the reward of the logged ranking
- `errors`: the mean and the standard deviation of the estimated minus the true value of each ranker, in %
- `covered`: how often the 95% interval of the difference to the logged ranking has the true difference
- `clicks`: how often the order by clicks without a correction (`feedback-dcg@10`) is true
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ultr.datasets import randomise
from ultr.datasets.users import User, make_user, simulate_log
from ultr.evaluation.comparing import LOGGED_RANKING, RankerComparison, compare_rankers
from ultr.evaluation.scores import evaluate_scores
from ultr.log import Log

LABEL, METRIC = "click", "off-policy-reward@10"
FEATURES, ITEMS = 6, 10
SHARES = (0.4, 0.25, 0.15, 0.12, 0.08)  # of the items with grades 0 to 4
NOISE = {"good": 0.0, "fair": 0.7}  # added to the users' taste
NAIVE = 0.4  # weight of the users' taste in the scores of `naive`, next to the logarithm of the click rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=int, default=100, help="simulated logs, divided among the kinds of users")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first log")
    parser.add_argument("--sessions", type=int, default=6000, help="requests per log")
    parser.add_argument("--randomised", type=float, default=0.0, help="share of the requests in random order")
    parser.add_argument("--users", default="pbm,trust", help="kinds of users, comma-separated")
    parser.add_argument("--eta", default="0.75,1,1.5", help="severities of the position bias, comma-separated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    kinds = [(users, float(eta)) for users in options.users.split(",") for eta in options.eta.split(",")]
    results: dict[str, list[dict[str, Any]]] = {f"{users}, eta {eta:g}": [] for users, eta in kinds}
    for seed in range(options.first_seed, options.first_seed + options.logs):
        users, eta = kinds[seed % len(kinds)]
        found = replication(users, eta, options.sessions, options.randomised, seed)
        results[f"{users}, eta {eta:g}"].append(found)
    every = [found for part in results.values() for found in part]
    report: dict[str, Any] = {"logs": len(every), "order": sum(bool(found["order"]) for found in every)}
    report |= {kind: _summary(part) for kind, part in results.items() if part}
    print(json.dumps({**vars(options), "seconds": round(time.perf_counter() - begun, 1), **report}, indent=1))


def world(sessions: int, user: User, *, randomised: float = 0.0, seed: int = 0) -> tuple[Log, dict[str, np.ndarray]]:
    """Return a simulated log and the scores of its rows by four rankers."""
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
    return log, {**rankers, "random": rng.random(log.rows)}


def replication(users: str, eta: float, sessions: int, randomised: float, seed: int) -> dict[str, Any]:
    """Return the true and the estimated value of each ranker on one simulated log."""
    user = make_user(users, eta=eta, dwell=None)
    log, rankers = world(sessions, user, randomised=randomised, seed=seed)
    every = {LOGGED_RANKING: -log.shown_positions("the benchmark"), **rankers}
    truth = {
        name: float(evaluate_scores(log, scores, "reward@10", user=user, label=LABEL)["reward@10"].mean())
        for name, scores in every.items()
    }
    compared = compare_rankers(log, rankers, [METRIC], label=LABEL, seed=seed)
    as_clicked = compare_rankers(log, rankers, ["feedback-dcg@10"], label=LABEL)
    return {
        "truth": truth,
        "value": _means(compared, METRIC),
        "order": _order(_means(compared, METRIC)) == _order(truth),
        "clicks": _order(_means(as_clicked, "feedback-dcg@10")) == _order(truth),
        "covered": {
            name: test.low <= truth[name] - truth[LOGGED_RANKING] <= test.high
            for name, each in compared.rankers.items()
            if (test := each[METRIC].difference) is not None
        },
        "theta": list(compared.theta.values()),
    }


def _means(compared: RankerComparison, metric: str) -> dict[str, float]:
    return {name: each[metric].mean.mean for name, each in compared.rankers.items()}


def _order(values: dict[str, float]) -> list[str]:
    return sorted(values, key=lambda name: -values[name])


def _summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of the logs with one kind of users."""
    names = _order({name: np.mean([each["truth"][name] for each in found]) for name in found[0]["truth"]})
    truth, value = (np.array([[each[what][name] for name in names] for each in found]) for what in ("truth", "value"))
    logged = truth[:, names.index(LOGGED_RANKING)].mean()
    neighbours = [f"{a} - {b}" for a, b in pairwise(names)]
    right = (np.diff(truth, axis=1) * np.diff(value, axis=1) > 0).sum(0).tolist()
    gaps = (-100 * np.diff(truth, axis=1).mean(0) / logged).round(1).tolist()
    errors = 100 * (value / truth - 1)
    return {
        "logs": len(found),
        "order": sum(bool(each["order"]) for each in found),
        "clicks": sum(bool(each["clicks"]) for each in found),
        "pairs": dict(zip(neighbours, right, strict=True)),
        "gaps": dict(zip(neighbours, gaps, strict=True)),
        "errors": {
            n: [round(float(e.mean()), 1), round(float(e.std()), 1)] for n, e in zip(names, errors.T, strict=True)
        },
        "covered": {n: sum(bool(e["covered"][n]) for e in found) for n in found[0]["covered"]},
        "theta": np.mean([each["theta"] for each in found], axis=0).round(3).tolist(),
    }


if __name__ == "__main__":
    main()
