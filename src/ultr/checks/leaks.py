"""Find features that follow the feedback on the item that they describe, and so are not known before ranking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ultr.checks.pitfalls import Pitfall, names_of
from ultr.log import Log
from ultr.log.columns import ACTION_NAMES, item_codes
from ultr.log.sampling import sample_log
from ultr.log.splits import codes

LEAK_ROWS, LEAK_NUMBERS = 50_000, 2_000_000  # most rows, and most rows times features, that are checked
RANKED_ROWS = 5_000  # most rows that are ranked by each feature
LEAST_ROWS = 10  # fewest rows for a decision
BY_CHANCE = 20.0  # minus the logarithm of the largest probability by chance
FAR_RARER = 0.01  # without the action, values are this much rarer than by chance
EQUAL = 0.999  # share of rows in which a feature has the value of an action
SEPARATES = 0.995  # area under the curve: by the feature, a row with the action is above a row without it
FOLLOWS = 0.97  # rank correlation of a feature with the size of an action
LEAVE_OUT = "leave them out with --features (features=...): they are not known when items are ranked"
# Noisy leaks. In simulated worlds, the true relevance of a row has an area of at most 0.76 between rows of one item and
# 0.85 between rows of one request, and a rank correlation of at most 0.70 with sizes. Known features have less.
NOISY_ROWS, COUNTED_ROWS = 20_000, 1_000_000  # most rows whose features are checked, and whose items are counted
WITHIN_ITEM, WITHIN_REQUEST = 0.8, 0.9  # area under the curve, between rows of one item, or of one request
CHANGES = 0.9  # area under the curve, by the change of a feature since the item's row before
SIZES = 0.8  # rank correlation of a feature with the size of an action, between rows of one item
FEW_VARY = 0.05  # a feature that varies in fewer rows of items is taken as fixed for each item
OWN_SHARE, OWN_SIGMAS = 0.2, 6.0  # how far residuals of an item cancel (1: they sum to 0), and how sure it must be


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


def find_noisy_leaks(log: Log, known: Iterable[str] = ()) -> list[Pitfall]:
    """Return features that seem to depend on the feedback on their own row, below noise, as at most one pitfall.

    `known` has the features that are leaks for another reason. A feature that differs between the rows of an item is
    compared with the feedback on these rows (without items that recur: on the rows of a request). A feature that is
    fixed for each item is compared with the mean feedback of the item.
    """
    columns = [i for i, name in enumerate(log.feature_names) if name not in {*known, *log.vocabularies}]
    if not (log.actions and columns):
        return []
    most = min(NOISY_ROWS, LEAK_NUMBERS // len(log.feature_names))
    by_item = [groups for item in _items(log) if len((groups := _grouped(log, item, most)).rows) >= LEAST_ROWS**2]
    reasons: dict[str, str] = {}
    for number, groups in enumerate(by_item or [_grouped(log, log.request_of_row, most)]):
        feedback = {name: values[groups.rows] for name, values in log.actions.items()}
        for column in columns if len(groups.rows) else ():
            values = log.features[groups.rows, column]
            ranked = mean_ranks(np.nan_to_num(values, nan=-3e38))
            varies = groups.varies(ranked)
            if by_item and varies.mean() <= FEW_VARY:
                found = _mean_reasons(values, groups.only(~varies), feedback)
            elif number == 0:  # the smallest groups, such as pairs of query and item
                found = _row_reasons(ranked, groups, feedback, varies, "item" if by_item else "request")
            else:
                continue
            for why in found:
                reasons.setdefault(log.feature_names[column], why)
    made = "make them only of feedback before the impression, or leave them out with --features (features=...)"
    hint = f"{made}; if they are known before ranking, ignore this warning"
    return [*_pitfall("features that may depend on feedback of their row", reasons, hint)]


def _pitfall(name: str, reasons: dict[str, str], hint: str = LEAVE_OUT) -> Iterable[Pitfall]:
    if reasons:
        what = names_of([f"'{feature}' {why}" for feature, why in reasons.items()])
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


# --- Noisy leaks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Groups:
    """Rows of a log in groups of at least two, one group after the other, each in the order of time."""

    rows: np.ndarray
    starts: np.ndarray  # [groups] the first of its rows
    group: np.ndarray  # [rows]
    sizes: np.ndarray  # [groups]

    @staticmethod
    def of(rows: np.ndarray, group: np.ndarray) -> _Groups:
        """Return groups from rows that are sorted by their group; groups of one row are left out."""
        number = np.cumsum(np.diff(group, prepend=group[:1]) != 0)
        several = np.bincount(number)[number] > 1 if len(rows) else np.zeros(0, bool)
        rows, number = rows[several], np.unique(number[several], return_inverse=True)[1]
        sizes = np.bincount(number)
        return _Groups(rows, np.cumsum(sizes) - sizes, number, sizes)

    def only(self, rows: np.ndarray) -> _Groups:
        """Return the groups of some of the rows, a mask; the rows of the result are numbers of rows of this one."""
        kept = np.flatnonzero(rows)
        return _Groups.of(kept, self.group[kept])

    def centred(self, values: np.ndarray) -> np.ndarray:
        """Return values minus the mean of their group."""
        return np.asarray(values - (np.bincount(self.group, values) / self.sizes)[self.group])

    def varies(self, values: np.ndarray) -> np.ndarray:
        """Return the mask [rows] of rows in whose group the values differ."""
        same = np.minimum.reduceat(values, self.starts) == np.maximum.reduceat(values, self.starts)
        return np.asarray(~same[self.group])


def _items(log: Log) -> Iterator[np.ndarray]:
    """Yield a number for the item of each row, -1 without an id; then for pairs of query and item, if queries recur.

    The same item may match one query and not another, so that its features and its feedback differ.
    """
    if log.item_ids is None:
        return
    item = item_codes(log.item_ids)
    if "query" in log.context:
        query = codes(log.context["query"])
        if len(np.unique(query)) < len(query):
            yield np.where(item < 0, -1, query[log.request_of_row] * (item.max() + 2) + item)
    yield item


def _grouped(log: Log, group: np.ndarray, most: int) -> _Groups:
    """Return at most `most` rows of random groups of two rows or more, in the order of time."""
    rows = np.flatnonzero(group >= 0)
    if len(rows) > COUNTED_ROWS:  # some of the groups, with all of their rows
        mixed = (group[rows].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
        rows = rows[mixed < COUNTED_ROWS / len(rows) * 2**24]
    _, number, sizes = np.unique(group[rows], return_inverse=True, return_counts=True)
    chosen = np.random.default_rng(0).permutation(len(sizes))
    chosen = chosen[sizes[chosen] > 1]
    chosen = chosen[: 1 + int(np.searchsorted(np.cumsum(sizes[chosen]), most))]
    place = np.full(len(sizes), -1)
    place[chosen] = np.arange(len(chosen))
    rows, of_row = rows[place[number] >= 0], place[number][place[number] >= 0]
    times = log.context.get("time")
    time = rows if times is None else np.asarray(times.to_numpy(zero_copy_only=False))[log.request_of_row[rows]]
    order = np.lexsort((time, of_row))[:most]
    return _Groups.of(rows[order], of_row[order])


def _row_reasons(
    ranked: np.ndarray, groups: _Groups, feedback: Mapping[str, np.ndarray], varies: np.ndarray, within: str
) -> Iterator[str]:
    """Yield why a feature may depend on the feedback on its row, by its ranks in groups: of an item, or of a request.

    Feedback so far, which is known before ranking, follows feedback too: between the rows of an item in the other
    direction, and its change follows the row before. So what is found in a group must also be found in all rows.
    """
    least = WITHIN_ITEM if within == "item" else WITHIN_REQUEST
    centred, change = groups.centred(ranked), np.diff(ranked, prepend=ranked[:1])
    follows = varies.copy()
    follows[groups.starts] = False
    for action, sizes in feedback.items():
        acted = sizes > 0
        overall, mixed = _area(ranked, acted, least), varies & groups.varies(acted)
        area = _area(centred[mixed], acted[mixed], least) if overall else 0.0
        if area and (area > 0.5) == (overall > 0.5):
            yield f"tells rows of one {within} with '{action}' from those without (AUC {max(area, 1 - area):.2f})"
        if within == "item" and _area(change[follows], acted[follows], CHANGES) > 0.5:
            yield f"changes with the '{action}' of its own row"
        if size := _size_correlation(ranked, sizes, groups.only(acted & varies)):
            yield f"orders rows of one {within} by the size of '{action}' (correlation {abs(size):.2f})"


def _mean_reasons(values: np.ndarray, groups: _Groups, feedback: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield why a feature with one value in each group may have been made from the feedback on these rows."""
    x = values[groups.rows].astype(np.float64)
    known = np.isfinite(x)
    if len(groups.sizes) < LEAST_ROWS or not known.any():
        return
    x[~known] = np.median(x[known])
    for action, sizes in feedback.items():
        if _has_own_part([x, mean_ranks(x)], sizes[groups.rows], groups):
            yield f"has a part of the '{action}' of the rows that it describes, as an item mean that includes them"


def _area(values: np.ndarray, acted: np.ndarray, least: float) -> float:
    """Return the area under the curve by which values tell rows with an action from others.

    It is 0 if there are too few of either, or if it is between 1 - `least` and `least`. Few values must be ranked for
    this: with an area of `least`, at least 2 `least` - 1 of the rows with the action are above the median of others.
    """
    count, others = int(acted.sum()), int((~acted).sum())
    if min(count, others) < LEAST_ROWS**2:
        return 0.0
    middle, of_acted = np.median(values[~acted]), values[acted]
    if max((of_acted >= middle).mean(), (of_acted <= middle).mean()) < 2 * least - 1:
        return 0.0
    area = (float(mean_ranks(values)[acted].sum()) - count * (count + 1) / 2) / (count * others)
    return area if max(area, 1 - area) >= least else 0.0


def _size_correlation(ranked: np.ndarray, sizes: np.ndarray, groups: _Groups) -> float:
    """Return the rank correlation with the size of an action in groups and in all rows, the one nearer to 0.

    It is 0 if there are too few rows, or if either is below `SIZES`, or if they have different signs.
    """
    x, y = ranked[groups.rows], sizes[groups.rows]
    if len(y) < LEAST_ROWS**2 or np.ptp(y) == 0 or np.ptp(x) == 0:
        return 0.0
    y = mean_ranks(y)
    overall = _correlation(x, y)
    if abs(overall) < SIZES:
        return 0.0
    within = _correlation(mean_ranks(groups.centred(x)), mean_ranks(groups.centred(y)))
    return min(within, overall, key=abs) if within * overall > 0 and abs(within) >= SIZES else 0.0


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    return float(a @ b / max(np.sqrt((a @ a) * (b @ b)), 1e-12))


def _has_own_part(values: Sequence[np.ndarray], sizes: np.ndarray, groups: _Groups) -> bool:
    """Return whether functions of a feature that is fixed for each item have a part of the noise of its feedback.

    Let e = y - f(x) be the residuals of a regression of feedback y on the feature x. If x is known before, the noise of
    two rows of an item is independent given x, so that the mean of e_r e_s is the variance of what x does not know of
    the item, which is not negative. If x is the mean of y over the n rows of the item, the e of an item sum to 0, and
    the mean of e_r e_s is minus their variance / (n - 1). Feedback itself must not have this, as that of items that
    are no longer shown after their sale has.
    """
    outcomes = [(sizes > 0).astype(np.float64)] + [mean_ranks(sizes)] * bool((sizes > 0).any())
    design = np.column_stack([np.ones(len(sizes)), *[each / max(np.abs(each).max(), 1e-12) for each in values]])
    for outcome in outcomes:
        before, _ = _own_part(outcome - outcome.mean(), groups)
        if before < -OWN_SHARE / 2:
            continue
        residual = outcome - design @ np.linalg.lstsq(design, outcome)[0]
        share, sigmas = _own_part(residual, groups)
        if share <= -OWN_SHARE and sigmas <= -OWN_SIGMAS:
            return True
    return False


def _own_part(residual: np.ndarray, groups: _Groups) -> tuple[float, float]:
    """Return the products of residuals of two rows of one group, relative to -1 if they sum to 0; and in sigmas."""
    squares = np.bincount(groups.group, residual**2)
    weight = 1 / (groups.sizes - 1)
    products = (np.bincount(groups.group, residual) ** 2 - squares) * weight
    share = products.sum() / max((squares * weight).sum(), 1e-300)
    return float(share), float(products.sum() / max(np.sqrt((products**2).sum()), 1e-300))
