"""The log of an experiment with swaps, by users whose examination is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from ultr.log import Log
from ultr.log.swaps import swap_items

THETA = np.array([1.0, 0.7, 0.5, 0.35, 0.2])
RELEVANCE = np.array([0.3, 0.24, 0.2, 0.15, 0.14])


def experiment(requests: int, *, short: float = 0.0, seed: int = 0) -> Log:
    """Return a log of requests of 5 items with swaps; a `short` share has only 2 items, which are better."""
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(requests) < short, 2, 5)
    positions = np.concatenate([np.arange(1, n + 1) for n in lengths])
    chance = np.clip(RELEVANCE[positions - 1] * np.repeat(np.where(lengths == 2, 2.0, 1.0), lengths), 0, 1)
    log = Log(
        features=np.empty((len(positions), 0), np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        request_ids=pa.array(np.arange(requests)),
        feature_names=(),
        positions=positions,
        relevance=chance.astype(np.float32),
    )
    log = swap_items(log, rng.choice(["", "1-2", "1-3", "1-4", "1-5"], requests, p=[0.6, 0.1, 0.1, 0.1, 0.1]))
    click = rng.random(log.rows) < THETA[positions - 1] * log.true_relevance
    return replace(log, relevance=None, actions={"click": click.astype(np.float32)})
