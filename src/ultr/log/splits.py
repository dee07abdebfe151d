"""Splits of a log by query and by time, and hashes of requests, which recognise a request in another split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.errors import DataError
from ultr.log.table import Log

# --- Hashes of requests -----------------------------------------------------------------------------------------------

ROWS_AT_ONCE = 1 << 18  # rows whose features are hashed at once
MIX = np.uint64(0x9E3779B97F4A7C15)  # an odd number, by which hashes are multiplied


def request_hashes(log: Log) -> np.ndarray:
    """Return a 64-bit number for each request, which depends on its id and on the features of its items.

    An id alone would not be enough: in many logs, ids are counted from 0.
    """
    ids = as_texts(log.request_ids).cast(pa.large_binary())
    ends = np.frombuffer(ids.buffers()[1], np.int64)[ids.offset : ids.offset + len(ids) + 1]
    letters = np.frombuffer(ids.buffers()[2] or b"", np.uint8)[ends[0] : ends[-1]].astype(np.uint64) + np.uint64(1)
    lengths = np.diff(ends)
    place = np.arange(len(letters)) - np.repeat(ends[:-1] - ends[0], lengths)
    factors = np.random.default_rng(0).integers(1, 2**63, int(lengths.max(initial=0)), dtype=np.uint64)
    sums = np.concatenate([[np.uint64(0)], np.cumsum(letters * factors[place], dtype=np.uint64)])
    of_ids = np.diff(sums[ends - ends[0]])
    mixed: np.ndarray = (of_ids ^ (of_ids >> np.uint64(31))) * MIX + sums_of_hashes(log)
    return mixed.view(np.int64)


def as_texts(ids: Any) -> Any:
    """Return the ids of requests as an Arrow array of texts."""
    try:
        return ids.cast(pa.string())
    except pa.ArrowException:  # ids of a type that is not text, or bytes that are not UTF-8
        return pa.array([str(value) for value in ids.to_pylist()], pa.string())


def sums_of_hashes(log: Log) -> np.ndarray:
    """Return a number for each request that depends on the features of its items, but not on their order."""
    return np.add.reduceat(row_hashes(log), log.offsets[:-1])


def row_hashes(log: Log) -> np.ndarray:
    """Return a number for each row that depends on its features."""
    factors = np.random.default_rng(0).integers(1, 2**63, log.features.shape[1], dtype=np.uint64) | np.uint64(1)
    hashes = np.empty(log.rows, np.uint64)
    for first in range(0, log.rows, ROWS_AT_ONCE):
        bits = np.ascontiguousarray(log.features[first : first + ROWS_AT_ONCE], dtype=np.float32).view(np.uint32)
        mixed = np.einsum("ij,j->i", bits, factors, dtype=np.uint64)  # modulo 2**64
        hashes[first : first + len(mixed)] = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return hashes


# --- Splits -----------------------------------------------------------------------------------------------------------
# Queries: requests of one query must be on one side of a split, else held-out requests are not new to a model.

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
    if not log.features.size:
        return by_id
    alike = np.unique(sums_of_hashes(log), return_inverse=True)[1]
    if np.bincount(alike, minlength=1).max() > max(1, MOST_ALIKE * len(log)):
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
