"""Measure the verdicts and the intervals of `ultr bias` on simulated logs whose examination is known.

    python benchmarks/bias.py --replications 100

For each world it prints JSON: the time per log, the verdicts, the share of 95% intervals that contain the true θ, and
the relative errors of θ. The worlds are:

- `random`: every list is in random order;
- `rankers`: three logging rankers, and random swaps;
- `deterministic`: one ranker whose score is a function of the features, and items that never recur.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

import numpy as np
import pyarrow as pa

from ultr.bias.audit import audit
from ultr.datasets.users import EYE_TRACKING
from ultr.log import Log

QUERIES, CANDIDATES, SHOWN, FEATURES = 60, 20, 10, 8
THETA = np.array(EYE_TRACKING)
WORLDS = {"random": 10_000, "rankers": 25_000, "deterministic": 5_000}  # the number of requests in a log


def world(kind: str, *, seed: int = 0, requests: int = 5000) -> Log:
    """Simulate a log of position-based users, whose relevance is a function of the features plus unobserved noise."""
    rng = np.random.default_rng(seed)
    fresh = kind == "deterministic"
    queries = np.arange(requests) if fresh else rng.integers(0, QUERIES, requests)
    number = requests if fresh else QUERIES
    features = rng.normal(size=(number, CANDIDATES, FEATURES)).astype(np.float32)
    taste = rng.normal(size=FEATURES)
    beta = 1 / (1 + np.exp(2 - features @ taste / 2 - 0.5 * rng.normal(size=(number, CANDIDATES))))
    if kind == "random":
        score = rng.random((requests, CANDIDATES))
    else:
        weights = taste + rng.normal(size=(1 if fresh else 3, FEATURES))
        score = (features @ weights.T)[queries, :, rng.integers(0, len(weights), requests)]
    chosen = np.argsort(-score, axis=1)[:, :SHOWN]
    if kind == "rankers":
        swapped = rng.random(requests) < 0.3
        a, b = rng.integers(0, SHOWN, (2, requests))
        rows = np.flatnonzero(swapped)
        chosen[rows, a[rows]], chosen[rows, b[rows]] = chosen[rows, b[rows]], chosen[rows, a[rows]]
    clicked = rng.random((requests, SHOWN)) < THETA * beta[queries[:, None], chosen]
    return Log(
        features=features[queries[:, None], chosen].reshape(-1, FEATURES),
        offsets=np.arange(requests + 1) * SHOWN,
        request_ids=pa.array(np.arange(requests)),
        feature_names=tuple(f"x{i}" for i in range(FEATURES)),
        positions=np.tile(np.arange(1, SHOWN + 1), requests),
        actions={"click": clicked.reshape(-1).astype(np.float32)},
        item_ids=pa.array((queries[:, None] * CANDIDATES + chosen).reshape(-1)),
        context={"query": pa.array(queries)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replications", type=int, default=100, help="logs per world")
    parser.add_argument("--requests", type=int, default=0, help="requests per log (0: the default of the world)")
    parser.add_argument("--features", action="store_true", help="use features in all worlds (default: deterministic)")
    parser.add_argument("--bootstrap", type=int, default=100, help="bootstrap replicates per log")
    parser.add_argument("--worlds", default=",".join(WORLDS), help="worlds, separated by commas")
    options = parser.parse_args()
    for kind in options.worlds.split(","):
        verdicts: Counter[str] = Counter()
        covered: dict[str, list[np.ndarray]] = {}
        errors: dict[str, list[np.ndarray]] = {}
        started = time.monotonic()
        for seed in range(options.replications):
            log = world(kind, seed=seed, requests=options.requests or WORLDS[kind])
            if kind != "deterministic" and not options.features:  # to measure the estimators from counts
                log = log.without_features()
            report = audit(log, bootstrap=options.bootstrap, seed=seed)
            verdicts[report.verdict.status] += 1
            reference = report.positions.tolist().index(report.reference)
            true = THETA / THETA[reference]
            for name, estimate in report.estimates.items():
                inside = (estimate.low <= true) & (true <= estimate.high)
                covered.setdefault(name, []).append(np.delete(inside, reference))
                errors.setdefault(name, []).append(np.delete(estimate.theta / true - 1, reference))
        results = {
            "world": kind,
            "seconds per log": round((time.monotonic() - started) / options.replications, 2),
            "verdicts": dict(verdicts),
            "coverage": {name: round(float(np.mean(inside)), 3) for name, inside in covered.items()},
            "mean relative error": {name: np.mean(e, 0).round(3).tolist() for name, e in errors.items()},
            "standard deviation": {name: np.std(e, 0).round(3).tolist() for name, e in errors.items()},
        }
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
