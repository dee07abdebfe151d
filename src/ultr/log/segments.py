"""Position bias by segment (such as phone and desktop): each position gets a different id in each segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.errors import DataError
from ultr.log.table import Log

SHIFT = 20  # a position id has the position in its lowest 20 bits, and the number of the segment above them


def by_segment(log: Log, known: Sequence[str] | None = None) -> tuple[Log, tuple[str, ...]]:
    """Return the log with position ids that differ between segments, and the names of the segments.

    If `known` segments are passed, all others count as one more segment. The order of items does not change.
    """
    if log.positions is None or "segment" not in log.context:
        raise DataError("the log has no segments", hint="name their column with --segment (segment=...)")
    if int(log.positions.max()) >> SHIFT:
        highest, hint = int(log.positions.max()), "number the positions 1, 2, ..."
        raise DataError(f"positions by segment must be below {1 << SHIFT:,}", got=highest, hint=hint)
    names = pc.fill_null(log.context["segment"].cast(pa.string()), "")
    known = sorted(pc.unique(names).to_pylist()) if known is None else known
    codes = pc.fill_null(pc.index_in(names, pa.array(known, pa.string())), len(known))
    codes = codes.to_numpy(zero_copy_only=False).astype(np.int64)
    return replace(log, positions=(np.repeat(codes, log.lengths) << SHIFT) + log.positions), tuple(known)


def slot(position: int, segments: Sequence[str] = ()) -> str:
    """Return the text of a position id: `3`, or `3@phone` if there are segments."""
    if not segments:
        return str(position)
    return f"{position & ((1 << SHIFT) - 1)}@{segments[position >> SHIFT]}"
