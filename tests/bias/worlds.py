"""Logs of position-based users whose examination is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from ultr.bias.counts import Impressions, impressions
from ultr.log import Log

THETA = np.array([0.9, 0.65, 0.45, 0.3, 0.2])
QUERIES, CANDIDATES = 20, 8


def world(
    kind: str, *, requests: int = 3000, seed: int = 0, theta: np.ndarray = THETA, features: int = 0, noise: float = 0.5
) -> Log:
    """Make a log of lists in `random` order or by three `rankers` with swaps. Items of the kinds `fresh` (random order)
    and `deterministic` (one ranker) never recur.

    Relevance is a logistic function of features and of `noise`, which is not a feature.
    """
    rng = np.random.default_rng(seed)
    shown, fresh = len(theta), kind in ("fresh", "deterministic")
    queries = np.arange(requests) if fresh else rng.integers(0, QUERIES, requests)
    x = rng.normal(size=(requests if fresh else QUERIES, CANDIDATES, 3))
    taste = np.array([1.0, -0.8, 0.5])
    beta = 1 / (1 + np.exp(0.5 - x @ taste - noise * rng.normal(size=x.shape[:2])))
    if kind in ("random", "fresh"):
        score = rng.random((requests, CANDIDATES))
    else:
        rankers = taste + rng.normal(size=(1 if fresh else 3, 3))
        score = (x @ rankers.T)[queries, :, rng.integers(0, len(rankers), requests)]
    chosen = np.argsort(-score, axis=1)[:, :shown]
    if kind == "rankers":
        rows = np.flatnonzero(rng.random(requests) < 0.3)
        a, b = rng.integers(0, shown, (2, len(rows)))
        chosen[rows, a], chosen[rows, b] = chosen[rows, b], chosen[rows, a]
    clicked = rng.random((requests, shown)) < theta * beta[queries[:, None], chosen]
    return Log(
        features=x[queries[:, None], chosen].reshape(-1, 3)[:, :features].astype(np.float32),
        offsets=np.arange(requests + 1) * shown,
        request_ids=pa.array(np.arange(requests)),
        feature_names=tuple(f"x{i}" for i in range(features)),
        positions=np.tile(np.arange(1, shown + 1), requests),
        actions={"click": clicked.reshape(-1).astype(np.float32)},
        item_ids=pa.array((queries[:, None] * CANDIDATES + chosen).reshape(-1)),
        context={"query": pa.array(queries)},
    )


def with_rare_positions(log: Log) -> Log:
    """Append 36 items to the first two requests, at positions 6 to 41; those at positions 39 to 41 are clicked."""
    extra, rng = 36, np.random.default_rng(1)
    rows = np.arange(log.rows)
    source = np.concatenate([rows[:5], rng.integers(0, log.rows, extra), rows[5:10], rng.integers(0, log.rows, extra)])
    source = np.concatenate([source, rows[10:]])
    lengths = log.lengths + extra * (np.arange(len(log)) < 2)
    long = log.regroup(source, np.concatenate([[0], np.cumsum(lengths)]))
    positions = np.concatenate([np.arange(1, n + 1) for n in lengths])
    clicks = np.where(positions > 5, positions > 38, long.actions["click"]).astype(np.float32)
    return replace(long, positions=positions, actions={"click": clicks})


def small_log(seed: int, *, requests: int = 12, weights: bool = False, queries: bool = False) -> Log:
    """Make a log of short lists of several lengths, at positions with gaps, of a few items that recur."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, requests)
    positions = [np.sort(rng.permutation([2, 3, 5, 7, 11])[:n]) for n in lengths]
    rows = int(lengths.sum())
    return Log(
        features=np.empty((rows, 0), np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        request_ids=pa.array(np.arange(requests)),
        feature_names=(),
        positions=np.concatenate(positions),
        actions={"click": (rng.random(rows) < 0.3).astype(np.float32)},
        weights=rng.integers(1, 4, requests).astype(np.float32) if weights else None,
        item_ids=pa.array(rng.integers(0, 8, rows)),
        context={"query": pa.array(rng.integers(0, 2, requests))} if queries else {},
    )


def seen_in(log: Log, seed: int = 0) -> Impressions:
    return impressions(log, log.actions["click"] > 0, seed=seed)
