"""A log of users whose examination depends on two columns, device and surface, and not on a third, with its truth."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

POSITIONS = 8
SLOPES = {"phone": 0.3, "desk": -0.3, "search": 0.2, "home": -0.2}  # added to 1, the slope of log θ over log k


def contexts(
    requests: int, *, seed: int = 0, random_share: float = 0.05, plain: bool = False
) -> tuple[pa.Table, dict[str, float]]:
    """Return a log with recurring items, and θ by `position@device + surface`, relative to the first position.

    If it is `plain`, examination depends on no column.
    """
    slopes = dict.fromkeys(SLOPES, 0.0) if plain else SLOPES
    rng = np.random.default_rng(seed)
    device = rng.choice(["phone", "desk"], requests, p=[0.8, 0.2])
    surface = rng.choice(["search", "home"], requests, p=[0.85, 0.15])
    slope = 1 + np.array([slopes[a] + slopes[b] for a, b in zip(device, surface, strict=True)])
    relevance = rng.uniform(0.05, 0.6, 300)
    items = np.argsort(rng.random((requests, len(relevance))), 1)[:, :POSITIONS]
    random = rng.random(requests) < random_share
    score = np.where(random[:, None], rng.random(items.shape), relevance[items] + 0.15 * rng.normal(size=items.shape))
    items = np.take_along_axis(items, np.argsort(-score, 1), 1)
    position = np.arange(1, POSITIONS + 1)
    clicked = rng.random(items.shape) < position ** -slope[:, None] * relevance[items]

    def rows(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, POSITIONS)

    log = {
        "request": rows(np.arange(requests)),
        "position": np.tile(position, requests),
        "item": items.ravel(),
        "click": clicked.ravel().astype(int),
        "f1": relevance[items].ravel(),
        "device": rows(device),
        "surface": rows(surface),
        "login": rows(rng.random(requests) < 0.5),
        "random": rows(random),
    }
    truth = {
        f"{k}@{a} + {b}": float(k ** -(1 + slopes[a] + slopes[b]))
        for a in ("phone", "desk")
        for b in ("search", "home")
        for k in position
    }
    return pa.table(log), truth
