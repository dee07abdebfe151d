"""Hashes of requests, which recognise a request in another file or in another split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ultr.log.table import Log

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
    except pa.ArrowException:  # the bytes are not UTF-8
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
