"""Logs of users who look at a grid or at carousels: recurring items, an order by relevance and noise, and the truth."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from ultr.datasets.users import CarouselUser, GridUser
from ultr.log.table import as_shown, grid_ids

ITEMS, FEATURES = 300, 5
USERS = {
    "grid": (GridUser(columns=6, middle=0.3), 4),
    "carousel": (CarouselUser(columns=6, visible=4, swipe=0.3), 4),
    "list": (GridUser(columns=1, scroll=0.7), 8),
}


def grids(
    requests: int, *, world: str = "grid", seed: int = 0, random_share: float = 0.05
) -> tuple[pa.Table, dict[str, float]]:
    """Return a log with rows and columns, features and the relevance of items, and θ by slot, relative to the first."""
    user, rows = USERS[world]
    size = rows * user.columns
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ITEMS, FEATURES))
    relevance = 0.5 / (1 + np.exp(1 - x[:, :-1] @ rng.normal(size=FEATURES - 1)))
    production = relevance + 0.1 * x[:, -1]  # of a ranker that likes a feature, which users do not
    items = np.argsort(rng.random((requests, ITEMS)), 1)[:, :size]
    random = rng.random(requests) < random_share
    score = production[items] + 0.1 * rng.normal(size=items.shape)
    score = np.where(random[:, None], rng.random(items.shape), score)
    items = np.take_along_axis(items, np.argsort(-score, 1), 1)
    row, column = np.divmod(np.arange(size), user.columns)
    slots = torch.from_numpy(grid_ids(row + 1, column + 1))
    feedback = user.sample(torch.zeros(items.shape), slots.expand(items.shape), torch.Generator().manual_seed(seed))
    clicked = feedback.examined.numpy() & (rng.random(items.shape) < relevance[items])
    log = {
        "request": np.repeat(np.arange(requests), size),
        "row": np.tile(row + 1, requests),
        "column": np.tile(column + 1, requests),
        "item": items.ravel(),
        "click": clicked.ravel().astype(int),
        "relevance": relevance[items].ravel(),
        "random": np.repeat(random, size),
        **{f"f{i}": x[items, i].ravel() for i in range(FEATURES)},
    }
    theta = user.theta(slots, torch.float64).numpy()
    return pa.table(log), {str(as_shown(int(k))): float(t) for k, t in zip(slots, theta / theta[0], strict=True)}
