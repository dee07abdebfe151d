"""Compare training of `direct` with trees to the library's own training of the same objective, in one run.

    python benchmarks/direct.py --requests 50000 --rounds 100

Both have the same rows, labels and offset log θ, the same parameters and number of rounds, and no evaluations. They
take turns, and a ratio compares two trainings of the same turn. The estimate of θ is not part of it. The bound is 1.2.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import lightgbm
import numpy as np
import pyarrow as pa
import torch
import xgboost

from ultr.log import Log
from ultr.log.labels import Label
from ultr.methods import MethodInputs, make_tree_method
from ultr.rankers.boosters import BOOSTERS, Boosting, lightgbm_parameters

BOUND = 1.2
RATE = 0.1


def simulated(requests: int, items: int, features: int) -> tuple[Log, dict[int, float]]:
    """Return a log of clicks, and θ = 1/k^0.7 by position k."""
    rng = np.random.default_rng(0)
    rows = requests * items
    x = rng.standard_normal((rows, features), dtype=np.float32)
    positions = np.tile(np.arange(1, items + 1), requests)
    theta = {k: float(k**-0.7) for k in range(1, items + 1)}
    probability = np.array([0.0, *theta.values()])[positions] / (1 + np.exp(1 - x[:, :5].sum(1)))
    log = Log(
        features=x,
        offsets=np.arange(0, rows + 1, items),
        request_ids=pa.array(np.arange(requests)),
        feature_names=tuple(f"f{i}" for i in range(features)),
        positions=positions,
        actions={"click": (rng.random(rows) < probability).astype(np.float32)},
    )
    return log, theta


def ours(library: str, log: Log, theta: dict[int, float], rounds: int) -> None:
    inputs = MethodInputs(
        Label("click"),
        features=log.features.shape[1],
        positions=tuple(theta),
        ranker=library,
        propensities=theta,
        binary=("click",),
    )
    (task,) = make_tree_method("direct", inputs).tasks(log)
    how = Boosting(rounds, RATE, library_options=task.library_options)
    BOOSTERS[library].grow(task.rows, how, lambda *_: False)


def of_lightgbm(log: Log, theta: dict[int, float], rounds: int) -> None:
    offset = np.log(np.array([1.0, *theta.values()])[log.positions])
    data = lightgbm.Dataset(log.features, log.actions["click"], init_score=offset)
    parameters = {**lightgbm_parameters(RATE, 0, log.features.size), "objective": "poisson"}
    lightgbm.train(parameters, data, rounds)


def of_xgboost(log: Log, theta: dict[int, float], rounds: int) -> None:
    offset = np.log(np.array([1.0, *theta.values()])[log.positions])
    threads = torch.get_num_threads()
    data = xgboost.QuantileDMatrix(log.features, log.actions["click"], base_margin=offset, nthread=threads)
    parameters = {"objective": "count:poisson", "learning_rate": RATE, "base_score": 1.0, "nthread": threads}
    xgboost.train({**parameters, "disable_default_eval_metric": True}, data, rounds)


def seconds(train: Callable[[], None]) -> float:
    begun = time.perf_counter()
    train()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=10)
    parser.add_argument("--features", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    log, theta = simulated(given.requests, given.items, given.features)
    print(f"{log}; {given.rounds} rounds; {os.cpu_count()} cores")
    for library, own in (("lightgbm", of_lightgbm), ("xgboost", of_xgboost)):
        ratios, times = [], []
        for _ in range(given.turns):
            mine = seconds(partial(ours, library, log, theta, given.rounds))
            theirs = seconds(partial(own, log, theta, given.rounds))
            ratios.append(mine / theirs)
            times.append(theirs)
        ratio = float(np.median(ratios))
        print(f"{library}: {ratio:.2f} times the library's own {np.median(times):.2f} s (bound {BOUND:g})")


if __name__ == "__main__":
    main()
