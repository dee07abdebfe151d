"""How well θ explains clicks that it was not fitted to."""

from __future__ import annotations

import numpy as np

from ultr.propensity.counts import Impressions

ROWS = 2_000_000  # at most, of whole items, that θ is judged by
TRAINED, TUNED = 0.7, 0.8  # shares of the groups of requests: fitted, then the prior is chosen, the rest judges
STRENGTHS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)  # of the prior of relevance, in impressions
EM_STEPS = 60


class HeldOut:
    """Clicks of held-out requests under P(c>0) = θ_k β_s, β of each stratum found from the other requests.

    β has a Beta prior around the mean, as strong as it is best for requests held out inside training: an item without
    a click is not thought irrelevant for good.
    """

    def __init__(self, seen: Impressions, strata: np.ndarray, *, seed: int = 0) -> None:
        rows: np.ndarray | slice = slice(None)
        if len(strata) > ROWS:
            number = int(strata.max()) + 1
            kept = np.random.default_rng(seed).random(number) < ROWS / len(strata)
            rows = np.flatnonzero(kept[strata])
        groups = int(seen.group.max()) + 1
        part = np.digitize(seen.of_rows(seen.group)[rows], [TRAINED * groups, TUNED * groups])
        self.size = int(strata.max()) + 1, len(seen.positions)
        cell = strata[rows].astype(np.int64) * self.size[1] + seen.place[rows]
        ids, cells = np.unique(cell, return_inverse=True)
        self.strata, self.places = ids // self.size[1], ids % self.size[1]
        weights, clicked = seen.row_weights(rows), seen.clicked[rows]
        self.shown, self.clicked = (
            np.array([np.bincount(cells, weights * mark * (part == i), len(ids)) for i in range(3)])
            for mark in (np.ones(len(cells)), clicked)
        )

    def score(self, theta: np.ndarray) -> float:
        """The mean log-likelihood of an impression of the judging requests; positions without θ are left out."""
        if not np.isfinite(theta).any():
            return float("nan")
        told = np.isfinite(theta)[self.places]
        here = np.where(told, (theta / np.nanmax(theta))[self.places], 1.0)
        shown, clicked = self.shown * told, self.clicked * told
        strengths = [self._mean(here, shown[0], clicked[0], shown[1], clicked[1], s) for s in STRENGTHS]
        strength = STRENGTHS[int(np.argmax(strengths))]
        return self._mean(here, shown[0] + shown[1], clicked[0] + clicked[1], shown[2], clicked[2], strength)

    def _mean(
        self,
        theta: np.ndarray,
        shown: np.ndarray,
        clicked: np.ndarray,
        judged: np.ndarray,
        judged_clicks: np.ndarray,
        strength: float,
    ) -> float:
        if not judged.sum() or not shown.sum():
            return float("nan")
        mean = np.clip(clicked.sum() / (shown * theta).sum(), 1e-6, 1 - 1e-6)
        total = np.bincount(self.strata, shown, self.size[0])
        beta = np.full(self.size[0], mean)
        for _ in range(EM_STEPS):
            here = beta[self.strata]
            unseen = (1 - theta) * here / (1 - theta * here)
            relevant = np.bincount(self.strata, clicked + (shown - clicked) * unseen, self.size[0])
            beta = np.clip((relevant + strength * mean) / (total + strength), 1e-9, 1 - 1e-9)
        chance = np.clip(theta * beta[self.strata], 1e-12, 1 - 1e-12)
        likelihood = judged_clicks * np.log(chance) + (judged - judged_clicks) * np.log1p(-chance)
        return float(likelihood.sum() / judged.sum())
