"""Test the assumption behind estimates from items: the position of an item does not depend on its relevance.

An item at several positions identifies examination only if it was not moved because it suited the request. No test can
prove that. Each test here fails if the assumption is wrong in a certain way:

| test                      | compares the estimate from items with                                                  |
|---------------------------|----------------------------------------------------------------------------------------|
| `shuffled`                | a flat curve, after positions were shuffled within requests (a check of the counts)    |
| `halves of items`         | that of the other half: frequent items with rare items                                 |
| `halves of time`          | that of the other half: the first requests with the last ones                          |
| `position given the item` | that within values of the segment, the time or a feature, where these move items       |
| `other items`             | that within requests where the first of the other items is the same                    |
| `random requests`         | that from requests in random order, or from random swaps                               |
| `random order`            | nothing: it tests whether the usual position predicts the position in random requests  |

An unknown query or taste moves items and makes them relevant. It also decides which other item is first, so that the
estimate changes if this item is held fixed. The change shows the reason only in part: the estimate may be further off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import fdtrc, stdtr

from ultr.bias.counts import Counts, Impressions, counted, impressions
from ultr.bias.estimators import RANDOM, position_based
from ultr.bias.identification import PRECISE, SIGNIFICANCE, Estimate, Refutation
from ultr.log import Log

ROWS = 500_000  # most rows of a test; it uses a random sample of requests if there are more
REPLICATES = 30  # most bootstrap replicates of a test
LEAST_REPLICATES = 10
LEVEL = SIGNIFICANCE / 5  # of each of five tests that compare estimates, so that all together have `SIGNIFICANCE`
SLIGHT = 0.01  # smaller changes of the estimate are not a failure, however clear they are
CHANGED = 0.1  # a change by a reason that the log shows only in part is severe from here
EXPLAINED = 0.1  # a reason that explains this share of the positions of an item needs the test of its effect
VARIES = 0.05  # a feature varies if it has other values than the item's first in this share of the rows
MOST_TESTED = 50  # most features that are tested
BINS = 3  # groups of the values of a feature
LEAST_ROWS = 200  # a share of the positions that is explained needs this many rows more than groups
CLEAR = 1e-3  # level of the tests of positions


@dataclass(frozen=True, eq=False)
class Evidence:
    """The items of a log at pools of positions, and the bootstrap weights [groups, 1 + replicates] of its requests."""

    counts: Counts
    seen: Impressions | None  # the rows; None if an engine counted them
    pool: np.ndarray  # the pool of each position of the log
    shown: np.ndarray  # [pools] impressions
    rate: np.ndarray  # [pools]
    weights: np.ndarray
    segment: np.ndarray | None = None  # [requests of `seen`] codes
    sample: Log | None = None  # requests with features
    sample_clicked: np.ndarray | None = None  # [rows of the sample]


def refutations(evidence: Evidence, estimates: Mapping[str, Estimate]) -> tuple[Refutation, ...]:
    """Return the results of the tests that the log allows."""
    if evidence.weights.shape[1] <= LEAST_REPLICATES:
        return ()
    tests = [*_items(evidence, estimates)]
    if evidence.seen is not None:
        seen, segment = _sampled(evidence.seen, evidence.segment)
        seen = seen.pooled(evidence.pool)
        tests += [_shuffled(evidence, seen), _time(evidence, seen), _given(evidence, seen, segment)]
        tests += [_others(evidence, seen), _random_order(seen)]
    return tuple(test for test in tests if test is not None)


# --- Tests that compare estimates -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Difference:
    """The difference of two estimates of θ: its mean over impressions, that of sampling error alone, and p."""

    mean: float
    chance: float
    p: float

    @property
    def is_clear(self) -> bool:
        return self.p < LEVEL and self.mean > SLIGHT


def _difference(first: Counts, second: Counts, evidence: Evidence) -> _Difference | None:
    """Compare the estimates from two counts; None if too few positions or clicks can be compared."""
    return _tested(_draws(first, evidence), _draws(second, evidence), evidence)


def _tested(a: np.ndarray, b: np.ndarray, evidence: Evidence) -> _Difference | None:
    """Test the difference of draws of log θ [1 + replicates, pools]; None if it is too uncertain, or at few positions.

    Two tests share the level: of the largest difference, and of the slope of the differences along the feedback rate,
    because an order by relevance adds to the fall of θ where the feedback rate falls.
    """
    difference = a - b
    both = np.isfinite(difference).all(0) & (evidence.rate > 0)
    share = evidence.shown * both / evidence.shown.sum()
    if both.sum() < 2 or share.sum() <= 0.5:
        return None
    difference, share = difference[:, both], share[both] / share.sum()
    difference = difference - (difference @ share)[:, None]  # clicks determine ratios of θ only
    noise = difference[1:] - difference[0]
    chance = float(np.abs(noise).mean(0) @ share)
    if chance > PRECISE:
        return None
    line = np.log(evidence.rate[both])
    line = line - line @ share
    along = difference @ (share * line)
    tests = np.column_stack([difference, along])
    spread = tests[1:].std(0, ddof=1)
    t = np.abs(tests[0]) / np.maximum(spread, 1e-9)
    p = 2 * stdtr(len(noise) - 1, -t)
    smallest = min(float(p[-1]), float(p[:-1].min()) * len(share))
    return _Difference(float(np.expm1(np.abs(difference[0])) @ share), chance, min(1.0, 2 * smallest))


def _draws(counts: Counts, evidence: Evidence) -> np.ndarray:
    width = evidence.counts.size[1]
    if (compared := counts.compared()) is None:
        return np.full((1, width), np.nan)
    with np.errstate(divide="ignore"):
        logs = np.log(position_based(compared, evidence.weights[:, : 1 + REPLICATES]))
    return np.where(np.isfinite(logs), logs, np.nan)


def _differ(name: str, difference: _Difference | None, what: str, severe: float) -> Refutation | None:
    if difference is None:
        return None
    verb = "differ" if difference.is_clear else "agree"
    size = f"{difference.mean:.1%} on average; sampling error alone gives {difference.chance:.1%}"
    bad = difference.is_clear and difference.mean > severe
    return Refutation(name, not difference.is_clear, difference.mean, f"{what} {verb} (difference {size}).", bad)


def _items(evidence: Evidence, estimates: Mapping[str, Estimate]) -> Iterator[Refutation | None]:
    """Compare frequent with rare items, and all items with each randomised source."""
    counts = evidence.counts
    shown, clicks = (np.asarray(each.sum(1)).ravel() for each in (counts.shown, counts.clicked))
    often = np.bincount(counts.strata, shown)[counts.strata]
    order = np.argsort(often, kind="stable")
    middle = often[order][int(np.searchsorted(np.cumsum(clicks[order]), clicks.sum() / 2))]
    rare, frequent = (counts.select(half) for half in (often < middle, often >= middle))
    yield _differ("halves of items", _difference(rare, frequent, evidence), "Frequent and rare items", PRECISE)
    first = np.unique(evidence.pool, return_index=True)[1]
    for name in RANDOM:
        if name in estimates and "items" in estimates:
            chance, items = (estimates[each].logs[: 1 + REPLICATES, first] for each in (name, "items"))
            what = f"The estimates items and {name}"
            yield _differ("random requests", _tested(chance, items, evidence), what, np.inf)


def _shuffled(evidence: Evidence, seen: Impressions) -> Refutation | None:
    """Shuffle positions within requests. Rows are then compared within items and within equal sets of positions."""
    rng = np.random.default_rng(0)
    request = seen.request_of_row
    place = seen.place[np.lexsort((rng.random(len(request)), request))]
    keys = rng.random(len(seen.positions))
    sets = np.unique(np.bincount(request, keys[seen.place]).round(9), return_inverse=True)[1]
    strata = _joint(_known_items(seen), sets[request])
    draws = _draws(counted(replace(seen, place=place), strata), evidence)
    difference = _tested(draws, np.zeros_like(draws), evidence)
    what = "After positions were shuffled within requests, the estimate and a flat curve"
    return _differ("shuffled", difference, what, PRECISE)


def _time(evidence: Evidence, seen: Impressions) -> Refutation | None:
    items, late = _known_items(seen), seen.of_rows(_halves(seen))
    first, last = (counted(seen, items[rows], rows) for rows in (np.flatnonzero(late == half) for half in (0, 1)))
    what = "The first and the last requests"
    return _differ("halves of time", _difference(first, last, evidence), what, PRECISE)


def _others(evidence: Evidence, seen: Impressions) -> Refutation | None:
    items = _known_items(seen)
    within = counted(seen, _joint(items, _first_other(seen)))
    difference = _difference(within, counted(seen, items), evidence)
    what = "Estimates from requests with the same first other item, and from all requests"
    return _differ("other items", difference, what, CHANGED)


# --- Tests of positions -----------------------------------------------------------------------------------------------


def _given(evidence: Evidence, seen: Impressions, segment: np.ndarray | None) -> Refutation | None:
    """Test the reason that explains the positions of an item best: the segment, the time, or a feature.

    A reason alone is no failure: a new production ranker moves items too. The test fails if the estimate changes where
    the reason is held fixed, or if too few clicks are left to see that.
    """
    reasons = [("the half of the log", seen, seen.of_rows(_halves(seen)))]
    reasons += [] if segment is None else [("the segment", seen, seen.of_rows(segment))]
    reasons += _feature_reasons(evidence)
    shares = [_explained(part, values) for _, part, values in reasons]
    known = [i for i, each in enumerate(shares) if each is not None]
    if not known:
        return None
    best = max(known, key=lambda i: shares[i] or 0.0)
    share, (name, part, values) = shares[best] or 0.0, reasons[best]
    what = f"{name[0].upper()}{name[1:]} explains {share:.0%} of the positions of an item"
    if share < EXPLAINED:
        return Refutation("position given the item", True, share, f"{what}.")
    strata = _known_items(part)
    difference = _difference(counted(part, _joint(strata, values)), counted(part, strata), evidence)
    if difference is None:
        text = f"{what}, and too few clicks show whether it also makes items relevant."
        return Refutation("position given the item", False, share, text)
    verb = "changes" if difference.is_clear else "does not change"
    text = f"{what}; where it is held fixed, the estimate {verb} ({difference.mean:.1%} on average)."
    bad = difference.is_clear and difference.mean > CHANGED
    return Refutation("position given the item", not difference.is_clear, share, text, bad)


def _feature_reasons(evidence: Evidence) -> Iterator[tuple[str, Impressions, np.ndarray]]:
    """Yield features whose values differ between the rows of an item, in groups of values."""
    sample, clicked = evidence.sample, evidence.sample_clicked
    if sample is None or clicked is None or sample.item_ids is None or evidence.seen is None:
        return
    seen = impressions(sample, clicked)
    pool = evidence.pool[np.searchsorted(evidence.seen.positions, seen.positions)]
    if not np.array_equal(np.unique(pool), np.arange(evidence.counts.size[1])):
        return
    seen = seen.pooled(pool)
    strata = _known_items(seen)
    first = np.unique(strata, return_index=True)[1][np.unique(strata, return_inverse=True)[1]]
    for i, name in enumerate(sample.feature_names[:MOST_TESTED]):
        values = np.asarray(sample.features[:, i])
        other = (values != values[first]) & ~(np.isnan(values) & np.isnan(values[first]))
        if other.mean() > VARIES:
            edges = np.unique(np.nanquantile(values, np.linspace(0, 1, BINS + 1)[1:-1]))
            yield f"the feature '{name}'", seen, np.searchsorted(edges, values)


def _explained(seen: Impressions, values: np.ndarray) -> float | None:
    """Return the share of the variance of the position within items that `values` [rows] explain, corrected for chance.

    Return None if there are too few rows, or if the share is not clearly above 0 (then it is 0 at most).
    """
    strata = _known_items(seen)
    place = seen.place.astype(np.float64)
    (within, groups), (left, cells) = (_within(place, each) for each in (strata, _joint(strata, values)))
    if len(np.unique(values)) < 2 or cells == groups or len(place) - cells < LEAST_ROWS or within <= 0:
        return None
    residual = left / (len(place) - cells)
    f = (within - left) / (cells - groups) / max(residual, 1e-12)
    clear = fdtrc(cells - groups, len(place) - cells, f) < CLEAR
    return max(0.0, float(1 - residual / (within / (len(place) - groups)))) if clear else 0.0


def _within(values: np.ndarray, groups: np.ndarray) -> tuple[float, int]:
    """Return the sum of squares of values around the means of their groups, and the number of groups."""
    return float((_centred(values, groups) ** 2).sum()), len(np.unique(groups))


def _random_order(seen: Impressions) -> Refutation | None:
    """Test whether the usual position of an item predicts its position in requests that are marked as random."""
    if seen.items is None:
        return None
    random = seen.of_rows(seen.randomised)
    number = int(seen.items.max()) + 1
    usual_rows = np.bincount(seen.items[~random], minlength=number)
    usual = np.bincount(seen.items[~random], seen.place[~random], number) / np.maximum(usual_rows, 1)
    rows = np.flatnonzero(random & (usual_rows[seen.items] > 0))
    request = seen.request_of_row[rows]
    if len(rows) < LEAST_ROWS:
        return None
    x, y = (_centred(values, request) for values in (usual[seen.items[rows]], seen.place[rows].astype(float)))
    scale = float(np.sqrt((x @ x) * (y @ y)))
    correlation = float(x @ y) / scale if scale > 0 else 0.0
    products = np.bincount(request, x * y)
    passed = abs(products.sum()) <= 3.29 * np.sqrt((products**2).sum())  # level 0.1%
    text = f"In requests in random order, the correlation of positions with usual positions is {correlation:.3f}."
    return Refutation("random order", bool(passed), correlation, text)


# --- Rows -------------------------------------------------------------------------------------------------------------


def _sampled(seen: Impressions, segment: np.ndarray | None) -> tuple[Impressions, np.ndarray | None]:
    """Return a random sample of the requests, with at most about `ROWS` rows, and their segments."""
    if len(seen.place) <= ROWS:
        return seen, segment
    kept = np.random.default_rng(0).random(len(seen.lengths)) < ROWS / len(seen.place)
    return seen.select(kept), None if segment is None else segment[kept]


def _known_items(seen: Impressions) -> np.ndarray:
    return np.zeros(len(seen.place), np.int64) if seen.items is None else seen.items


def _halves(seen: Impressions) -> np.ndarray:
    """Return 0 for each request in the first half of the log, and 1 for the others."""
    return np.asarray(2 * np.arange(len(seen.lengths)) >= len(seen.lengths)).astype(np.int64)


def _joint(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a code for each pair of codes."""
    return np.asarray(np.unique(a.astype(np.int64) * (int(b.max()) + 1) + b, return_inverse=True)[1])


def _first_other(seen: Impressions) -> np.ndarray:
    """Return for each row the item at the first position of its request; for that item, the one at the second."""
    request = seen.request_of_row
    order = np.lexsort((seen.place, request))
    start = np.cumsum(seen.lengths) - seen.lengths
    items = _known_items(seen)
    other = items[order[start]][request]
    other[order[start]] = items[order[np.minimum(start + 1, start + seen.lengths - 1)]]
    return np.asarray(other)


def _centred(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    group = np.unique(groups, return_inverse=True)[1]
    return np.asarray(values - (np.bincount(group, values) / np.bincount(group))[group])
