"""A shop whose users trust the order after the click: clicks, purchases and seconds on the page, with the truth.

A product is clicked with probability θ_k r. If it is clicked, it is bought with probability τ_k b, and read for seconds
with the mean τ'_k m: curves of its own for each action. Products recur, production orders them by their clicks and by
noise, and a few requests are in random order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from worlds.world import ranked, sigmoid

POSITIONS = 10
PRODUCTS = 300
FEATURES = ("popular", "bargain", "long_read", "noise")
PURCHASES, SECONDS = 0.35, 0.2  # how τ falls: as k to the minus this
SPREAD = 0.8  # standard deviation of the logarithm of the seconds


@dataclass(frozen=True)
class ActionWorld:
    """A log and its truth; rows of a request are together, in the order in which they were shown."""

    log: pa.Table
    clicks: np.ndarray  # [rows] the probability of a click, if the row is seen
    purchases: np.ndarray  # [rows] of a purchase after a click in the first position
    seconds: np.ndarray  # [rows] the mean seconds after a click in the first position
    theta: np.ndarray  # [positions]
    tau: dict[str, np.ndarray]  # by action

    def expected(self, scores: np.ndarray) -> dict[str, float]:
        """Return the expected clicks, purchases and seconds per request of the ranking by `scores`."""
        request = np.arange(len(scores)) // POSITIONS
        order = ranked(request, scores)
        shown = self.clicks[order].reshape(-1, POSITIONS) * self.theta
        after = {"purchase": self.purchases, "seconds": self.seconds}
        values = {
            name: float((shown * each[order].reshape(-1, POSITIONS) * self.tau[name]).sum(1).mean())
            for name, each in after.items()
        }
        return {"click": float(shown.sum(1).mean()), **values}


def actions(
    requests: int, *, seed: int = 0, trust: float = 1.0, random_share: float = 0.05, conflict: float = 0.0
) -> ActionWorld:
    """Return a world; `trust` multiplies the logarithm of τ, and 0 is none.

    With a `conflict` of 1, the products that are clicked most are bought least after the click; with 0, clicks say
    nothing about purchases.
    """
    rng = np.random.default_rng([23, seed])
    popular, bargain, long_read = rng.normal(size=(3, PRODUCTS))
    bargain = np.sqrt(1 - conflict**2) * bargain - conflict * popular
    click, buy, mean = sigmoid(-1.1 + popular), sigmoid(-1.4 + 1.1 * bargain), 30 * np.exp(0.5 * long_read)
    k = np.arange(1, POSITIONS + 1)
    theta = 1 / k**0.8
    tau = {"purchase": k ** -(trust * PURCHASES), "seconds": k ** -(trust * SECONDS)}

    shown = rng.random((requests, PRODUCTS)).argpartition(POSITIONS, axis=1)[:, :POSITIONS]
    random = rng.random(requests) < random_share
    score = np.where(random[:, None], rng.random(shown.shape), popular[shown] + rng.normal(size=shown.shape))
    item = np.take_along_axis(shown, np.argsort(-score, 1), 1)
    clicked = rng.random(item.shape) < theta * click[item]
    bought = clicked & (rng.random(item.shape) < tau["purchase"] * buy[item])
    read = mean[item] * tau["seconds"] * np.exp(SPREAD * rng.normal(size=item.shape) - SPREAD**2 / 2)
    features = [popular, bargain, long_read, np.zeros(PRODUCTS)] + 0.5 * rng.normal(size=(4, PRODUCTS))
    table = {
        "request": np.repeat(np.arange(requests), POSITIONS),
        "position": np.tile(k, requests),
        "item": item.ravel(),
        "random": np.repeat(random, POSITIONS),
        "click": clicked.ravel().astype(int),
        "purchase": bought.ravel().astype(int),
        "seconds": np.where(clicked, read, 0).ravel(),
        **{name: values[item].ravel() for name, values in zip(FEATURES, features, strict=True)},
    }
    values = (each[item].ravel() for each in (click, buy, mean))
    return ActionWorld(pa.table(table), *values, theta, tau)
