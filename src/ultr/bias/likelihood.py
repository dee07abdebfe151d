"""The held-out likelihood: how well an estimate of examination θ predicts clicks that it was not fitted to."""

from __future__ import annotations

import numpy as np

from ultr.bias.counts import Impressions

ROWS, CELLS = 2_000_000, 100_000  # about the most rows and cells that are used; a sample has whole strata
TRAINED, TUNED = 0.7, 0.8  # the first 70% of the requests fit β, the next 10% choose the prior, the rest validate θ
STRENGTHS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)  # candidates for the strength of β's prior, in impressions
EM_STEPS = 30


class HeldOut:
    """Clicks of held-out requests under P(c>0) = θ_k β_s, with β of each stratum estimated from the other requests.

    β has a Beta prior around its mean, so that an item without a click does not count as certainly irrelevant. A part
    of the other requests chooses the strength of the prior.
    """

    def __init__(self, seen: Impressions, strata: np.ndarray, *, seed: int = 0) -> None:
        rows: np.ndarray | slice = slice(None)
        if len(strata) > ROWS:
            number = int(strata.max()) + 1
            sampled = np.random.default_rng(seed).random(number) < ROWS / len(strata)
            rows = np.flatnonzero(sampled[strata])
        groups = int(seen.group.max()) + 1
        part = np.digitize(seen.of_rows(seen.group)[rows], [TRAINED * groups, TUNED * groups])
        self.size = int(strata.max()) + 1, len(seen.positions)
        cell = strata[rows].astype(np.int64) * self.size[1] + seen.place[rows]
        ids, cells = np.unique(cell, return_inverse=True)
        if len(ids) > CELLS:
            sampled = np.random.default_rng(seed).random(self.size[0]) < CELLS / len(ids)
            kept = sampled[ids // self.size[1]]
            rows = np.arange(len(strata))[rows][kept[cells]]
            part, cells, ids = part[kept[cells]], (np.cumsum(kept) - 1)[cells[kept[cells]]], ids[kept]
        self.strata, self.places = ids // self.size[1], ids % self.size[1]
        weights, clicked = seen.row_weights(rows), seen.clicked[rows]
        self.shown, self.clicked = (
            np.array([np.bincount(cells, weights * mark * (part == i), len(ids)) for i in range(3)])
            for mark in (np.ones(len(cells)), clicked)
        )

    def score(self, theta: np.ndarray) -> float:
        """Return the mean log-likelihood of an impression in held-out requests; rows where θ is NaN are ignored."""
        if not np.isfinite(theta).any():
            return float("nan")
        estimated = np.isfinite(theta)[self.places]
        here = np.where(estimated, (theta / np.nanmax(theta))[self.places], 1.0)
        shown, clicked = self.shown * estimated, self.clicked * estimated
        strengths = [self._mean(here, shown[0], clicked[0], shown[1], clicked[1], s) for s in STRENGTHS]
        strength = STRENGTHS[int(np.argmax(strengths))]
        return self._mean(here, shown[0] + shown[1], clicked[0] + clicked[1], shown[2], clicked[2], strength)

    def _mean(
        self,
        theta: np.ndarray,
        shown: np.ndarray,
        clicked: np.ndarray,
        held_out: np.ndarray,
        held_out_clicks: np.ndarray,
        strength: float,
    ) -> float:
        if not held_out.sum() or not shown.sum():
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
        likelihood = held_out_clicks * np.log(chance) + (held_out - held_out_clicks) * np.log1p(-chance)
        return float(likelihood.sum() / held_out.sum())
