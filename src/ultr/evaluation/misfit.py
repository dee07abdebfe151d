"""Test on logged feedback whether one curve of examination describes the users, as off-policy values assume."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ultr.bias.counts import count_cells
from ultr.bias.estimators import fit_conditional, pools, slope_apart
from ultr.log import Log

SURE = 3.0  # standard errors by which the feedback must differ from what one curve predicts
FEW_PAIRS = 0.8  # share of the expected pairs of clicks below which clicks of a request exclude one another
STEEPER = 0.18  # difference of two curves, as a share of the fall of the click rate, that matters
STRATA = 20  # groups of rows with similar expected feedback
STOPS = "users look less often below a click, so no curve of examination by position is right"
TRUSTS = "clicks on worse items fall faster with position, as if users trusted high positions"


def misfit(log: Log, clicked: np.ndarray, theta: Mapping[int, float], relevance: np.ndarray) -> str | None:
    """Return why one curve of examination is wrong for a log, or None if the log does not show that it is.

    `clicked` and `relevance`, the expected feedback of an examined item, have a value for each row; `theta` is
    examination by position id. Two consequences of one curve are tested:

    - clicks on the items of a request are independent, given the items. Differences between requests can only add
      pairs of clicks;
    - the click rates of worse items do not fall faster with position than those of better items.
    """
    ids, place = np.unique(log.shown_positions("a test of examination"), return_inverse=True)
    expected = np.array([theta[position] for position in ids.tolist()])[place] * relevance
    chance = _mean_by_stratum(clicked, _strata(expected))
    apart = _pairs(log, clicked) - _pairs(log, chance)
    pairs = float(_pairs(log, chance).sum())
    if apart.sum() < -(1 - FEW_PAIRS) * pairs and apart.sum() < -SURE * np.sqrt((apart**2).sum()):
        return STOPS
    return TRUSTS if _curves_differ(place, clicked, relevance, ids) else None


def _pairs(log: Log, values: np.ndarray) -> np.ndarray:
    """Return the sum of the products of all pairs of values of each request."""
    values = values.astype(float)
    sums, squares = (np.add.reduceat(each, log.offsets[:-1]) for each in (values, values**2))
    return np.asarray((sums**2 - squares) / 2)


def _curves_differ(place: np.ndarray, clicked: np.ndarray, relevance: np.ndarray, ids: np.ndarray) -> bool:
    if not clicked.any():
        return False
    strata = _strata(relevance)
    better = strata >= (strata.max() + 1) // 2
    rows, clicks, width = np.ones(len(place)), clicked.astype(float), len(ids)
    halves = [
        count_cells(strata[half], place[half], rows[half], clicks[half], width=width) for half in (better, ~better)
    ]
    pool = pools(np.minimum(*(cells.compared_clicks() for cells in halves)), ids)
    better_ones, others = (fit_conditional(cells.pooled(pool)) for cells in halves)
    rate = np.bincount(pool[place], clicked) / np.bincount(pool[place])
    found = slope_apart(better_ones, others, rate)
    return found is not None and found[0] > max(STEEPER, SURE * np.sqrt(found[1]))


def _strata(values: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.quantile(values, np.linspace(0, 1, STRATA + 1)[1:-1]), values)


def _mean_by_stratum(values: np.ndarray, strata: np.ndarray) -> np.ndarray:
    return np.asarray((np.bincount(strata, values) / np.maximum(1, np.bincount(strata)))[strata])
