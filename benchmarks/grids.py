"""Examination in grids and carousels: errors, coverage of intervals, and what the estimate does for a ranker.

    python benchmarks/grids.py [--world grid] [--seeds 20] [--first 1000] [--requests 30000] [--jobs 1] [--rank]

The worlds are in tests/worlds/grids.py: 5% of the requests are in random order, and production likes a feature that
users do not. θ is relative to the most clicked slot. `shared` is the estimate of `ultr train`, whose slots share
strength; `plain positions` numbers the slots in reading order, and each has a θ of its own. `ultr bias` is the estimate
that its verdict recommends, and `items` its estimate from items. `column only` and `row only` are one curve.
`--rank` trains the default ranker with each of these θ, and compares NDCG@10 by true relevance on 2,000 other requests.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import ultr
from ultr.bias.audit import audit
from ultr.bias.examination import estimate_examination
from ultr.log import Log, read_log
from ultr.log.labels import Label
from ultr.log.table import as_shown, rows_and_columns
from ultr.training.config import make_config
from ultr.training.run import run_training

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from worlds.grids import USERS, grids  # type: ignore[import-not-found]

CLICK = Label("click")
Errors = tuple[np.ndarray, np.ndarray]  # relative error of each slot, and whether the interval covers the truth


def as_list(table: pa.Table) -> pa.Table:
    """Return the log with one column of positions in place of rows and columns: the reading order, from 1."""
    size = table.num_rows // len(table["request"].unique())
    position = np.tile(np.arange(1, size + 1), table.num_rows // size)
    return table.drop(["row", "column"]).append_column("position", pa.array(position))


def estimates(table: pa.Table, world: str, seed: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the name of each estimate, log θ by slot, and its covariance."""
    reading: dict[str, Any] = {"randomised": "random", "features": []}
    log = read_log(table, **reading)
    shared, plain = (estimate_examination(each, CLICK) for each in (log, read_log(as_list(table), **reading)))
    for name, found in (("shared", shared), ("plain positions", plain)):
        assert found.covariance is not None
        yield name, np.log(found.theta), found.covariance
    if world == "list":
        same = np.array_equal(shared.theta, plain.theta) and np.array_equal(shared.covariance, plain.covariance)  # type: ignore[arg-type]
        assert same, f"seed {seed}: a grid of one column differs from a list"
    report = audit(log, bootstrap=200)
    for title, source in (("ultr bias", report.verdict.anchor), ("ultr bias: items", "items")):
        if source is not None and source in report.estimates:
            logs = report.estimates[source].logs
            yield title, logs[0], np.cov(logs[1:].T)
    for axis, name in enumerate(("row only", "column only")):
        values = one_axis(log, axis)
        yield name, np.log(values), np.zeros((len(values), len(values)))


def one_axis(log: Log, axis: int) -> np.ndarray:
    """Return θ by slot of one curve over rows, or over columns."""
    ids, place = np.unique(log.shown_positions("a benchmark"), return_inverse=True)
    values = rows_and_columns(ids)[axis]
    curve = estimate_examination(replace(log, positions=values[place]), CLICK).by_position()
    return np.array([curve[int(k)] for k in values])


def errors(log_theta: np.ndarray, spread: np.ndarray, truth: dict[str, float], clicks: np.ndarray) -> Errors:
    anchor = int(clicks.argmax())
    true = np.log(list(truth.values()))
    error = log_theta - log_theta[anchor] - (true - true[anchor])
    variance = spread.diagonal() + spread[anchor, anchor] - 2 * spread[anchor]
    others = np.arange(len(error)) != anchor
    return np.abs(np.expm1(error))[others], (np.abs(error) <= 1.96 * np.sqrt(np.maximum(variance, 0)))[others]


def of_seed(seed: int, world: str, requests: int) -> dict[str, Errors]:
    table, truth = grids(requests, world=world, seed=seed)
    clicks = np.asarray(table["click"]).reshape(requests, -1).sum(0)
    found = estimates(table, world, seed)
    return {name: errors(log_theta, spread, truth, clicks) for name, log_theta, spread in found}


def ranked(seed: int, world: str, requests: int) -> dict[str, float]:
    """Return NDCG@10 of the default ranker with each θ, and of the logged order."""
    whole, truth = grids(requests + 2000, world=world, seed=seed)
    size = len(truth)
    train, test = whole.slice(0, requests * size), whole.slice(requests * size)
    relevance = np.asarray(test["relevance"]).reshape(-1, size)
    found = {"logged order": ndcg(np.broadcast_to(-np.arange(size), relevance.shape), relevance)}
    log = read_log(train, randomised="random", features=[])
    slots = [str(as_shown(k)) for k in np.unique(log.shown_positions("a benchmark")).tolist()]
    wrong = {name: dict(zip(slots, one_axis(log, axis), strict=True)) for axis, name in enumerate(("row", "column"))}
    rows: dict[str, tuple[pa.Table, dict[str, Any]]] = {
        "shared": (train, {}),
        "plain positions": (as_list(train), {}),
        **{f"{name} only": (train, {"propensities": theta}) for name, theta in wrong.items()},
        "true θ": (train, {"propensities": truth}),
    }
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, (table, options)) in enumerate(rows.items()):
            pq.write_table(table.drop(["relevance"]), path := f"{folder}/{i}.parquet")
            columns = {"randomised": "random", "features": "f*"}
            config = make_config(path, label="click", columns=columns, seed=seed, **options)
            model = ultr.load_model(run_training(config, f"{folder}/{i}"))
            scores = model.score(read_log(test, features="f*"))
            found[name] = ndcg(scores.reshape(relevance.shape), relevance)
    return found


def ndcg(scores: np.ndarray, relevance: np.ndarray, k: int = 10) -> float:
    """Return the mean NDCG@k of requests [requests, items] of one length."""
    discount = 1 / np.log2(np.arange(2, k + 2))
    got, best = (
        np.take_along_axis(relevance, np.argsort(-order, 1, kind="stable")[:, :k], 1) @ discount
        for order in (scores, relevance)
    )
    return float((got / best).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=list(USERS), default="grid")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--rank", action="store_true", help="train rankers")
    given = parser.parse_args()
    work = partial(ranked if given.rank else of_seed, world=given.world, requests=given.requests)
    with ProcessPoolExecutor(given.jobs) as pool:
        found: list[dict[str, Any]] = list(pool.map(work, range(given.first, given.first + given.seeds)))
    print(f"{given.world}, {given.requests:,} requests, {given.seeds} seeds")
    if given.rank:
        print_ranks(found)
        return
    print(f"{'':18} {'mean error':>10} {'worst slot':>10} {'covered':>8}")
    for name in found[0]:
        off, inside = (np.array([each[name][i] for each in found]) for i in (0, 1))
        covered = "-" if name.endswith("only") else f"{inside.mean():.1%}"
        print(f"{name:18} {off.mean():10.1%} {off.mean(0).max():10.1%} {covered:>8}")


def print_ranks(found: list[dict[str, float]]) -> None:
    shared = np.array([each["shared"] for each in found])
    for name in found[0]:
        values = np.array([each[name] for each in found])
        text = f"{name:18} {values.mean():.4f}"
        if name != "shared" and len(found) > 1:
            test = ultr.paired_test(shared, values)
            text += f"   shared is {test.difference:+.4f} ({test.low:+.4f} to {test.high:+.4f}, p {test.p:.3f})"
        print(text)


if __name__ == "__main__":
    main()
