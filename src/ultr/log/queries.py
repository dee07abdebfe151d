"""Queries: requests of one query must be on one side of a split, else held-out requests are not new to a model."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.errors import DataError
from ultr.log.hashes import sums_of_hashes
from ultr.log.table import Log

MOST_ALIKE = 0.1  # share of the requests that may have equal features; if more have, equal features do not show a query
LARGEST_QUERY = 0.5  # share of the requests that one query may have; if one has more, the column cannot divide the log


def codes(values: pa.Array) -> np.ndarray:
    """Return an integer for each value, equal for equal values; missing values are equal."""
    try:
        encoded = values.dictionary_encode()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        hint = "convert the column, or name another one with --item or --query"
        what = "item ids and queries must be numbers or strings"
        raise DataError(what, got=f"type {values.type}", hint=hint) from error
    return np.asarray(pc.fill_null(encoded.indices, len(encoded.dictionary)).to_numpy(zero_copy_only=False))


def queries_of(log: Log) -> np.ndarray:
    """Return an integer from 0 on for the query of each request.

    It is the column `query`, unless most requests have one value there, as in a feed. Otherwise requests with the same
    id, or with the same items by their features, are one query.
    """
    if "query" in log.context and not log.context["query"].null_count:
        query: np.ndarray = np.unique(codes(log.context["query"]), return_inverse=True)[1]
        if np.bincount(query, minlength=1).max() <= max(1, LARGEST_QUERY * len(log)):
            return query
    by_id = np.unique(codes(log.request_ids), return_inverse=True)[1]
    if not log.features.shape[1]:
        return by_id
    alike = np.unique(sums_of_hashes(log), return_inverse=True)[1]
    if np.bincount(alike).max() > max(1, MOST_ALIKE * len(log)):
        return by_id
    return _joined(by_id, alike)


def split_by_query(log: Log, held_out: list[int], *, seed: int) -> list[np.ndarray]:
    """Split the requests at random into parts with about as many requests as `held_out` says, and the rest.

    A part has whole queries, in increasing order of requests.
    """
    query = queries_of(log)
    order = np.random.default_rng(seed).permutation(len(log))
    if query.max(initial=-1) + 1 < len(log):  # then requests of a query follow each other
        rank = np.empty(len(log), np.int64)
        rank[order] = np.arange(len(log))
        first = np.full(query.max() + 1, len(log))
        np.minimum.at(first, query, rank)
        order = np.lexsort((rank, first[query]))
    ends = np.concatenate([np.flatnonzero(np.diff(query[order])) + 1, [len(log)]])  # after the last request of a query
    parts, start = [], 0
    for wanted in np.cumsum(held_out).tolist():
        stop = max(start, int(ends[np.searchsorted(ends, min(wanted, len(log)))])) if wanted else start
        parts.append(np.sort(order[start:stop]))
        start = stop
    return [*parts, np.sort(order[start:])]


def split_by_time(log: Log, validation: float, test: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the requests for training, validation and testing; the last ones by `context["time"]` are for testing."""
    times = np.asarray(log.context["time"].to_numpy(zero_copy_only=False))
    validation_from, test_from = time_bounds(*np.unique(times, return_counts=True), validation, test)
    part = (times >= validation_from).astype(np.int8) + (times >= test_from)
    return np.flatnonzero(part == 0), np.flatnonzero(part == 1), np.flatnonzero(part == 2)


def time_bounds(times: np.ndarray, requests: np.ndarray, validation: float, test: float) -> tuple[float, float]:
    """Return the times at which validation and test start, so that they have about these shares of the requests.

    `times` are in increasing order, and `requests` has the number of requests at each time.
    """
    later = requests[::-1].cumsum()[::-1]  # requests at each time or after it

    def bound(share: float) -> float:
        return float(times[np.abs(later - share * later[0]).argmin()]) if share > 0 else float("inf")

    test_from = bound(test)
    return (min(bound(validation + test), test_from) if validation > 0 else test_from), test_from


def _joined(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return groups of elements that are connected by equal numbers in one of two arrays."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    count = first.max() + 1
    edges = coo_matrix((np.ones(len(first), bool), (first, count + second)), shape=(n := count + second.max() + 1, n))
    return np.unique(connected_components(edges, directed=False)[1][first], return_inverse=True)[1]
