"""A shop with known examination: several production rankers, some requests in random order, queries and items recur.

It shares no code with the simulated users of `ultr.datasets`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ultr.log import Log

SHOWN = 12
THETA = np.array([1.0, 0.78, 0.66, 0.52, 0.47, 0.40, 0.30, 0.27, 0.22, 0.19, 0.15, 0.12])


def shop(
    requests: int = 20_000,
    *,
    seed: int = 0,
    random_share: float = 0.02,
    rankers: int = 3,
    queries: int = 300,
    match: float = 1.0,
    columns: tuple[str, ...] = ("item", "query", "randomised"),
    theta: np.ndarray = THETA,
) -> Log:
    """Simulate a log whose features, price and age, say little about the production order.

    A product has a quality, and a match with each query, whose standard deviation is `match`. Each of the `rankers`
    sees both with its own error, which is fixed for a query and a product. `columns` are the optional columns to keep.
    """
    rng = np.random.default_rng(seed)
    products, candidates = 1500, 30
    quality, price, age = rng.normal(size=(3, products))
    found = rng.random((queries, products)).argpartition(candidates, axis=1)[:, :candidates]  # by the search engine
    fit = match * rng.normal(size=found.shape)
    attraction = 1 / (1 + np.exp(2.2 - quality[found] - fit + 0.3 * price[found]))
    error = rng.normal(size=(rankers, *found.shape))
    score = rng.uniform(0.5, 1.5, (rankers, 1, 1)) * quality[found] + fit + 1.2 * error
    chance = 1 / np.arange(1, queries + 1) ** 0.8
    query = rng.choice(queries, requests, p=chance / chance.sum())
    best = np.argsort(-score, axis=2)[rng.integers(rankers, size=requests), query, :SHOWN]
    randomised = rng.random(requests) < random_share
    shuffled = np.argsort(rng.random((requests, SHOWN)), axis=1)
    best = np.where(randomised[:, None], np.take_along_axis(best, shuffled, axis=1), best)
    items, beta = found[query[:, None], best], attraction[query[:, None], best]
    clicked = rng.random(beta.shape) < theta[:SHOWN] * beta
    context = {"query": pa.array(query), "randomised": pa.array(randomised)}
    return Log(
        features=np.stack([price[items], age[items]], axis=-1).reshape(-1, 2).astype(np.float32),
        offsets=SHOWN * np.arange(requests + 1),
        request_ids=pa.array(np.arange(requests)),
        feature_names=("price", "age"),
        positions=np.tile(np.arange(1, SHOWN + 1), requests),
        actions={"click": clicked.reshape(-1).astype(np.float32)},
        item_ids=pa.array(items.reshape(-1)) if "item" in columns else None,
        context={name: values for name, values in context.items() if name in columns},
        relevance=beta.reshape(-1).astype(np.float32),
    )


def error_of(theta: np.ndarray, truth: np.ndarray = THETA) -> float:
    """Return the mean relative error of θ_k / θ_1 over the positions after the first."""
    return float(np.abs(theta / theta[0] / (truth / truth[0]) - 1)[1:].mean())
