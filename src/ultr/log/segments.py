"""Examination by segment: a position of one segment is another place than the same position of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.errors import DataError
from ultr.log.table import Log

SHIFT = 20  # bits of a position; the number of its segment stands above them


def by_segment(log: Log, known: Sequence[str] | None = None) -> tuple[Log, tuple[str, ...]]:
    """The log with position ids that differ between segments, in the same order within a list, and their names.

    Where the segments are `known`, others count as one more.
    """
    if log.positions is None or "segment" not in log.context:
        raise DataError("the log has no segments", mend="name their column with --segment (segment=...)")
    if int(log.positions.max()) >> SHIFT:
        highest, mend = int(log.positions.max()), "number them from 1 on"
        raise DataError(f"positions by segment should be below {1 << SHIFT:,}", got=highest, mend=mend)
    names = pc.fill_null(log.context["segment"].cast(pa.string()), "")
    known = sorted(pc.unique(names).to_pylist()) if known is None else known
    codes = pc.fill_null(pc.index_in(names, pa.array(known, pa.string())), len(known))
    codes = codes.to_numpy(zero_copy_only=False).astype(np.int64)
    return replace(log, positions=(np.repeat(codes, log.lengths) << SHIFT) + log.positions), tuple(known)


def slot(position: int, segments: Sequence[str] = ()) -> str:
    """What a position id stands for: `3`, or `3@phone` where segments differ."""
    if not segments:
        return str(position)
    return f"{position & ((1 << SHIFT) - 1)}@{segments[position >> SHIFT]}"
