"""Find features that follow the feedback on the item that they describe, and so are not known before ranking."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ultr.checks.pitfalls import Pitfall, names_of
from ultr.log import Log
from ultr.log.columns import ACTION_NAMES
from ultr.log.sampling import sample_log

LEAK_ROWS, LEAK_NUMBERS = 50_000, 2_000_000  # most rows, and most rows times features, that are checked
RANKED_ROWS = 5_000  # most rows that are ranked by each feature
LEAST_ROWS = 10  # fewest rows for a decision
BY_CHANCE = 20.0  # minus the logarithm of the largest probability by chance
FAR_RARER = 0.01  # without the action, values are this much rarer than by chance
EQUAL = 0.999  # share of rows in which a feature has the value of an action
SEPARATES = 0.995  # area under the curve: by the feature, a row with the action is above a row without it
FOLLOWS = 0.97  # rank correlation of a feature with the size of an action


def find_leaks(log: Log) -> tuple[list[Pitfall], list[Pitfall]]:
    """Return clear leaks and likely leaks among the features of a log, each as at most one pitfall.

    A feature is a clear leak if it equals an action, or if nearly all rows without an action have the same value of it
    and others differ from it. It is a likely leak if its name is that of an action, if it separates rows with an action
    from those without, or if it orders rows by the size of an action.
    """
    if not (log.actions and log.feature_names):
        return [], []
    log = sample_log(log, min(LEAK_ROWS, LEAK_NUMBERS // len(log.feature_names)))
    values, names = np.nan_to_num(log.features, nan=-3e38), log.feature_names
    clear: dict[str, str] = {}
    likely = {name: "has the name of an action" for name in names if name.lower() in ACTION_NAMES}
    for action, feedback in log.actions.items():
        for column in _equal(values, feedback):
            clear.setdefault(names[column], f"equals '{action}'")
        for column in _only_with(values, feedback > 0):
            clear.setdefault(names[column], f"differs from its usual value only in rows with '{action}'")
        for column in _ordered(values[:RANKED_ROWS], feedback[:RANKED_ROWS]):
            likely.setdefault(names[column], f"is nearly a function of '{action}'")
    likely = {name: why for name, why in likely.items() if name not in clear}
    return [*_pitfall("features that follow feedback", clear)], [*_pitfall("features that may follow feedback", likely)]


def _pitfall(name: str, reasons: dict[str, str]) -> Iterable[Pitfall]:
    if reasons:
        what = names_of([f"'{feature}' {why}" for feature, why in reasons.items()])
        hint = "leave them out with --features (features=...): they are not known when items are ranked"
        yield Pitfall(name, what, hint, tuple(reasons))


def _equal(values: np.ndarray, feedback: np.ndarray) -> np.ndarray:
    """Return the columns that have the value of an action in nearly all rows with the action, which must vary there."""
    acted = feedback > 0
    if acted.sum() < LEAST_ROWS or np.ptp(feedback[acted]) == 0:
        return np.arange(0)
    same = np.isclose(values[acted], feedback[acted, None].astype(np.float32), rtol=1e-5)
    return np.flatnonzero(same.mean(0) >= EQUAL)


def _only_with(values: np.ndarray, acted: np.ndarray) -> np.ndarray:
    """Return the columns that, in rows without an action, nearly always have one value, from which others differ."""
    share = acted.mean()
    if not 0 < share < 1:
        return np.arange(0)
    middle = int((~acted).sum()) // 2
    differs = values != np.partition(values[~acted], middle, axis=0)[middle]  # the median, as one of the values
    count, without = differs.sum(0), differs[~acted].sum(0)
    beyond_chance = (count >= LEAST_ROWS) & (count * -np.log(share) >= BY_CHANCE)
    return np.flatnonzero(beyond_chance & (without <= FAR_RARER * count * (1 - share)))


def _ordered(values: np.ndarray, feedback: np.ndarray) -> np.ndarray:
    """Return the columns that separate rows with an action from those without, or order rows by its size."""
    acted = feedback > 0
    with_action, without = int(acted.sum()), int((~acted).sum())
    found: set[int] = set()
    if min(with_action, without) >= LEAST_ROWS**2:
        above = mean_ranks(values)[acted].sum(0) - with_action * (with_action + 1) / 2
        area = above / (with_action * without)
        found |= set(np.flatnonzero(np.maximum(area, 1 - area) >= SEPARATES).tolist())
    sizes = feedback[acted]
    if with_action >= LEAST_ROWS**2 and np.ptp(sizes) > 0:
        ranks, of_size = mean_ranks(values[acted]), mean_ranks(sizes)
        ranks, of_size = ranks - ranks.mean(0), of_size - of_size.mean()
        norm = np.sqrt((ranks**2).sum(0) * (of_size @ of_size))
        correlation = np.abs(of_size @ ranks) / np.maximum(norm, 1e-12)
        found |= set(np.flatnonzero(correlation >= FOLLOWS).tolist())
    return np.array(sorted(found), np.int64)


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value in its column, from 1; equal values have their mean rank.

    It is scipy.stats.rankdata, which takes a second to import.
    """
    order = np.argsort(values, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, axis=0)
    number = np.broadcast_to(np.arange(len(values)).reshape(-1, *[1] * (values.ndim - 1)), values.shape)
    ties = np.zeros((len(values) + 1, *values.shape[1:]), bool)  # whether a value equals the one before it
    ties[1:-1] = ordered[1:] == ordered[:-1]
    first = np.maximum.accumulate(np.where(ties[:-1], 0, number), axis=0)
    last = np.minimum.accumulate(np.where(ties[1:], len(values), number)[::-1], axis=0)[::-1]
    ranks = np.empty(values.shape)
    np.put_along_axis(ranks, order, 1 + (first + last) / 2, axis=0)
    return ranks
