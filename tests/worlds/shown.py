"""A log with rows that nobody could see: below a cut-off, or below the viewport of a session that ended."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

POSITIONS = 10
SLOPE = 0.6  # θ_k = k^-SLOPE, of an item that was shown
STAYS = 0.8  # who goes on to the next position, with viewports


def shown(requests: int, *, seed: int = 0, viewport: bool = False, random_share: float = 0.2) -> pa.Table:
    """Return a log with recurring items, a column `shown`, and the truth of each row (`worth`).

    Of 10 candidates, a cut-off shows the first 3 to 10, as the logging policy likes; candidates below it have no
    position. With a `viewport`, all 10 have positions, and a session ends after a number of them.
    """
    rng = np.random.default_rng([23, seed])
    relevance = rng.uniform(0.05, 0.7, 300)
    features = np.column_stack([relevance + rng.normal(0, 0.1, 300), rng.normal(size=300)])
    items = np.argsort(rng.random((requests, 300)), 1)[:, :POSITIONS]
    random = rng.random(requests) < random_share
    score = np.where(random[:, None], rng.random(items.shape), relevance[items] + 0.25 * rng.normal(size=items.shape))
    items = np.take_along_axis(items, np.argsort(-score, 1), 1)
    position = np.arange(1, POSITIONS + 1)
    last = np.minimum(rng.geometric(1 - STAYS, requests), POSITIONS) if viewport else rng.integers(3, 11, requests)
    seen = position <= last[:, None]
    clicked = seen & (rng.random(items.shape) < position**-SLOPE * relevance[items])
    places = np.where(seen | viewport, position.astype(float), np.nan)
    return pa.table(
        {
            "request": np.repeat(np.arange(requests), POSITIONS),
            "position": pa.array(places.ravel(), from_pandas=True),
            "item": items.ravel(),
            "shown": seen.ravel().astype(int),
            "randomised": np.repeat(random, POSITIONS),
            "click": clicked.ravel().astype(int),
            "f1": features[items, 0].ravel(),
            "f2": features[items, 1].ravel(),
            "worth": relevance[items].ravel(),
        }
    )


def without_column(table: pa.Table) -> pa.Table:
    """Return the log without the column; candidates of a cut-off get the positions that they had in the list."""
    positions = np.tile(np.arange(1, POSITIONS + 1), len(table) // POSITIONS)
    return table.drop(["shown"]).set_column(1, "position", pa.array(positions))
