"""A log of users whose examination depends on two columns, device and surface, and not on a third, with its truth."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

POSITIONS = 8
SLOPES = {"phone": 0.3, "desk": -0.3, "search": 0.2, "home": -0.2}  # added to 1, the slope of log θ over log k
ITEMS = 300


def slope_of(device: str, surface: str, *, plain: bool = False, odd: float = 0.0) -> float:
    """Return how steeply log θ falls over log k; `odd` is added in one combination of values."""
    own = 0.0 if plain else SLOPES[device] + SLOPES[surface]
    return 1 + own + odd * ((device, surface) == ("phone", "home"))


def contexts(
    requests: int,
    *,
    seed: int = 0,
    random_share: float = 0.05,
    plain: bool = False,
    odd: float = 0.0,
    catalogue: Catalogue | None = None,
) -> tuple[pa.Table, dict[str, float]]:
    """Return a log with recurring items, and θ by `position@device + surface`, relative to the first position.

    If it is `plain`, examination depends on no column. `odd` is an interaction of the columns. Items are those of a
    `catalogue`, in which devices have items of their own, or else have one feature, their relevance. With a
    catalogue, half of the requests are from phones, else 80%.
    """
    rng = np.random.default_rng(seed)
    device = rng.choice(["phone", "desk"], requests, p=[0.8, 0.2] if catalogue is None else [0.5, 0.5])
    surface = rng.choice(["search", "home"], requests, p=[0.85, 0.15])
    slope = np.array([slope_of(a, b, plain=plain, odd=odd) for a, b in zip(device, surface, strict=True)])
    relevance = rng.uniform(0.05, 0.6, ITEMS) if catalogue is None else catalogue.relevance
    lots = rng.random((requests, ITEMS))
    items = np.argsort(lots if catalogue is None else lots + catalogue.others(device), 1)[:, :POSITIONS]
    random = rng.random(requests) < random_share
    score = relevance[items] if catalogue is None else catalogue.production(items)
    score = np.where(random[:, None], rng.random(items.shape), score + 0.15 * rng.normal(size=items.shape))
    items = np.take_along_axis(items, np.argsort(-score, 1), 1)
    position = np.arange(1, POSITIONS + 1)
    clicked = rng.random(items.shape) < position ** -slope[:, None] * relevance[items]

    def rows(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, POSITIONS)

    features = relevance[:, None] if catalogue is None else catalogue.features
    log = {
        "request": rows(np.arange(requests)),
        "position": np.tile(position, requests),
        "item": items.ravel(),
        "click": clicked.ravel().astype(int),
        **{f"f{i + 1}": values[items].ravel() for i, values in enumerate(features.T)},
        "device": rows(device),
        "surface": rows(surface),
        "login": rows(rng.random(requests) < 0.5),
        "random": rows(random),
    }
    truth = {
        f"{k}@{a} + {b}": float(k ** -slope_of(a, b, plain=plain, odd=odd))
        for a in ("phone", "desk")
        for b in ("search", "home")
        for k in position
    }
    return pa.table(log), truth


class Catalogue:
    """Items of which some are common to both devices, and some are shown on one device alone, below the common ones.

    So the items of phones are low on phones only. With one curve for both devices, their clicks are corrected by too
    little, and those of desktop items by too much. Relevance depends on the first two features alone.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 1])
        self.own = (
            np.arange(ITEMS) % 4 % 3
        )  # half of the items are common (0), and a quarter each of phones (1), desktops (2)
        self.features = self.features_of(rng, self.own)
        self.relevance = self.relevance_of(self.features)

    @staticmethod
    def features_of(rng: np.random.Generator, own: np.ndarray) -> np.ndarray:
        return np.concatenate([rng.normal(size=(*own.shape, 2)), own[..., None] == [1, 2]], -1)

    @staticmethod
    def relevance_of(features: np.ndarray) -> np.ndarray:
        return np.asarray(0.05 + 0.55 / (1 + np.exp(1 - features[..., :2].sum(-1))))

    def others(self, device: np.ndarray) -> np.ndarray:
        """Return whether an item is of another device than that of a request [requests, items]."""
        return self.own == np.where(device == "phone", 2, 1)[:, None]

    def production(self, items: np.ndarray) -> np.ndarray:
        return np.asarray(self.relevance[items] + 0.3 * (self.own[items] == 0))
