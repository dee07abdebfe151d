"""Requests that users are unlikely to have made: bots, tests and faults click nearly everything in a list."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ultr.utils.files import atomic_path

SUSPICIOUS_FILE = "suspicious.csv"  # in a run, a comparison or a folder of lists: requests that were left out
BOT_LENGTH, BOT_SHARE, BOT_CHANCE = 5, 0.8, 1e-6  # items, share of them clicked, largest probability by chance
BOT_MIDDLE, BOT_BUMP = 0.6, 3  # eager users have more requests between BOT_MIDDLE and BOT_SHARE than above; bots do not
BOT_REQUESTS, BOT_CLICKS = 10, 0.01  # fewest requests, and smallest share of all clicks, for bots
TINY = 1e-12


def suspicious_of(
    items: np.ndarray, clicks: np.ndarray, expected: np.ndarray, weights: np.ndarray, all_clicks: float
) -> np.ndarray:
    """Return the mask of requests with impossibly many clicks; all False if there are too few, or if users are eager.

    `items` and `clicks` count the rows of a request, and those with feedback. `expected` is the sum of the click rates
    of its positions. `all_clicks` is the weighted number of clicks of the log, of which these requests may be a part:
    requests with fewer than `BOT_LENGTH` items, or at most `BOT_MIDDLE` of them clicked, have no effect.
    """
    n, m = items, clicks
    middle = int(((n >= BOT_LENGTH) & (m > BOT_MIDDLE * n) & (m <= BOT_SHARE * n)).sum())
    eager = np.flatnonzero((n >= BOT_LENGTH) & (m > BOT_SHARE * n))
    a, p = m[eager] / n[eager], np.clip(expected[eager] / n[eager], TINY, 1 - TINY)
    # Chernoff's bound, which holds for clicks of unequal rates (Hoeffding 1956): P(m or more) <= exp(-n KL(a, p)).
    kl = a * np.log(a / p) + (1 - a) * np.log(np.maximum(1 - a, TINY) / (1 - p))
    bots = eager[(a > p) & (n[eager] * kl > -np.log(BOT_CHANCE))]
    mask = np.zeros(len(n), bool)
    share = weights[bots] @ m[bots] / max(all_clicks, TINY)
    mask[bots] = len(bots) >= max(BOT_REQUESTS, BOT_BUMP * middle) and share > BOT_CLICKS
    return mask


def write_suspicious(folder: Path, requests: Any) -> None:
    """Write suspicious.csv into a folder: the ids of the requests that were left out, an Arrow array."""
    try:
        texts = requests.cast(pa.string())
    except pa.ArrowException:  # ids of a type that is not text, or bytes that are not UTF-8
        texts = pa.array([str(value) for value in requests.to_pylist()], pa.string())
    with atomic_path(folder / SUSPICIOUS_FILE, overwrite=True) as path, path.open("w", newline="") as file:
        csv.writer(file).writerows([("request",), *((text,) for text in texts.to_pylist())])
