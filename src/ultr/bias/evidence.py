"""The evidence about examination that a log has apart from its features, and the choice of the best of it.

| source       | rows that are compared           | valid if                                                      |
|--------------|----------------------------------|---------------------------------------------------------------|
| `randomised` | of requests marked as randomised | their order was random                                        |
| `items`      | of an item, or of a query's item | the relevance of an item does not depend on where it is shown |

Both leave relevance free in each stratum (`estimators.fit_conditional`). In a log whose queries recur, an item is
another one under another query: a ranker moves items between queries because of their relevance. `ultr bias`, training
and the judge use the same choice (`best_source`). Strata of the logging score remain if it finds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultr.bias.counts import Cells, Counts, LogCounts
from ultr.bias.estimators import ConditionalFit, fit_conditional
from ultr.log import Log

MOST = 0.5  # a source must link positions with more than this share of the impressions
IMPRECISE = 0.5  # a source whose standard error is larger is not used; strata may be off by as much
CONTRADICTION = 2.576  # items contradict the requests in random order at this many standard errors (level 1%)
SAME_FEATURES = 0.5  # items have one relevance if at least this share of their repeated rows has the same features


@dataclass(frozen=True, eq=False)
class Source:
    """An estimate of examination from one source, with its standard error."""

    name: str
    fit: ConditionalFit
    error: float  # standard error of log θ: its root mean square over impressions
    cells: Cells  # the rows that are compared, by stratum and position
    text: str  # the evidence in words, such as "1,000 requests in random order"


def best_source(log: LogCounts) -> Source | None:
    """Return the estimate of the best source, or None if no source estimates most of the positions.

    The more precise source is used. But if items contradict the requests in random order, their relevance depends on
    where they were shown, and the requests in random order are used.
    """
    sources, shown = log.sources, log.shown
    cells = {name: counts.weighted(np.ones(counts.shown.shape[1])) for name, counts in sources.items()}
    fits = {name: fit_conditional(each) for name, each in cells.items()}
    linked = {name: fit for name, fit in fits.items() if _links_most(fit, shown)}
    if not linked:
        return None
    errors = {name: _standard_error(fit, shown) for name, fit in linked.items()}
    name = min(errors, key=errors.__getitem__)
    precise = errors.get("randomised", np.inf) <= IMPRECISE
    if len(linked) > 1 and precise and _differ(linked["items"], linked["randomised"], log.rate):
        name = "randomised"
    if errors[name] > IMPRECISE:
        return None
    return Source(name, linked[name], errors[name], cells[name], _described(name, sources[name], log))


def _links_most(fit: ConditionalFit, shown: np.ndarray) -> bool:
    linked = np.isfinite(fit.theta)
    return bool(linked.sum() > 1 and shown[linked].sum() > MOST * shown.sum())


def _described(name: str, counts: Counts, log: LogCounts) -> str:
    if name == "randomised":
        return f"{log.random_requests:,} requests in random order"
    one_query = " for the same query" if log.by_query else ""
    return f"{counts.clicked.sum():,.0f} clicks on items shown at several positions{one_query}"


def _standard_error(fit: ConditionalFit, shown: np.ndarray) -> float:
    """Return the root mean square, over impressions, of the standard error of log θ relative to the anchor."""
    linked = np.isfinite(fit.theta)
    return float(np.sqrt(np.average(fit.covariance().diagonal()[linked], weights=shown[linked])))


def _differ(items: ConditionalFit, randomised: ConditionalFit, rate: np.ndarray) -> bool:
    """Test whether θ from items falls with the click rate of positions faster or slower than in random order.

    A ranker that moves items by their relevance lets θ fall too fast, wherever the click rate falls. So this one slope
    is tested, with more power than any difference. Some clicks count in both estimates. Their difference then varies
    less than is assumed, and the test errs towards False.
    """
    both = np.flatnonzero(np.isfinite(items.theta) & np.isfinite(randomised.theta))
    # Clicks determine only ratios of θ: differences between neighbouring positions do not depend on its scale.
    covariance = (items.covariance() + randomised.covariance())[np.ix_(both, both)]
    precision = np.linalg.pinv(np.diff(np.diff(covariance, axis=0), axis=1), hermitian=True)
    change = np.diff(np.log(items.theta[both] / randomised.theta[both]))
    direction = np.diff(np.log(rate[both])) @ precision
    information = float(direction @ np.diff(np.log(rate[both])))
    return information > 0 and abs(float(direction @ change)) > CONTRADICTION * np.sqrt(information)


def items_comparable(sample: Log | None, *, by_query: bool) -> bool:
    """Return False if an item seems to have another relevance each time, so that its positions cannot be compared.

    This is so if most items that occur again have other features in the `sample`, and no query says when they are the
    same (`by_query` is False).
    """
    if sample is None or by_query or sample.item_ids is None or not sample.feature_names:
        return True
    codes = sample.item_ids.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")[:200_000]
    again = np.flatnonzero(codes[order][1:] == codes[order][:-1])
    if not len(again):
        return True
    first, second = sample.features[order[again]], sample.features[order[again + 1]]
    same = ((first == second) | (np.isnan(first) & np.isnan(second))).all(1)
    return bool(same.mean() >= SAME_FEATURES)
