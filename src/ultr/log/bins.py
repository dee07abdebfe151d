"""Bins of numbers, such as the length of a query: a segment of a number is a range of values, such as `3-5`.

A segment column may be named with the first values of its bins: `words:3:6` has the bins `below 3`, `3-5` and `6+`. A
column of many numbers without such values gets bins of about equal size. `Log.columns` then has their first values, so
that later logs have the same bins.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MOST_VALUES = 8  # a column with more different numbers has bins
BINS = 3
EDGES = re.compile(r"(.+?)((?::-?\d+(?:\.\d+)?)+)")

Edges = tuple[float, ...]  # the first values of all bins but the lowest, ascending; int if the column has whole numbers


def split_edges(name: str, columns: Collection[str] = ()) -> tuple[str, Edges]:
    """Return the column and the edges of a name such as `words:3:6`; a name among `columns` has no edges."""
    found = None if name in columns else EDGES.fullmatch(name)
    if found is None:
        return name, ()
    edges = (float(text) if "." in text else int(text) for text in found[2][1:].split(":"))
    return found[1], tuple(sorted(set(edges)))


def with_edges(column: str, edges: Edges) -> str:
    """Return the name that `split_edges` reads."""
    texts = (np.format_float_positional(e, trim="0") if isinstance(e, float) else str(e) for e in edges)
    return ":".join([column, *texts])


def equal_edges(column: Any) -> Edges:
    """Return edges that divide an Arrow column of many numbers into bins of about equal size; () for other columns."""
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        return ()
    numbers = column.drop_null() if pa.types.is_integer(kind) else column.drop_null().cast(pa.float64())
    values, counts = np.unique(numbers.to_numpy(zero_copy_only=False), return_counts=True)
    finite = np.isfinite(values.astype(float))
    values, counts = values[finite], counts[finite]
    if len(values) <= MOST_VALUES:
        return ()
    below = np.cumsum(counts) - counts  # rows with lower values
    first = [int(np.searchsorted(below, part * counts.sum() / BINS)) for part in range(1, BINS)]
    edges = [values[i] for i in first if 0 < i < len(values)]
    whole = pa.types.is_integer(kind)
    return tuple(sorted({int(each) if whole else float(f"{each:.3g}") for each in edges}))


def names_of(edges: Edges) -> list[str]:
    """Return the names of bins, the lowest first."""
    whole = all(isinstance(edge, int) for edge in edges)

    def between(low: float, high: float) -> str:
        if not whole:
            return f"{low} to {high}"
        return f"{low}" if high == low + 1 else f"{low}-{high - 1}" if low >= 0 else f"{low} to {high - 1}"

    return [f"below {edges[0]}", *(between(low, high) for low, high in pairwise(edges)), f"{edges[-1]}+"]


def binned(column: Any, edges: Edges) -> Any:
    """Return the name of the bin of each value of an Arrow column; missing values stay missing."""
    numbers = column.cast(pa.float64())
    numbers = pc.if_else(pc.is_nan(numbers), None, numbers)
    codes = np.searchsorted(edges, pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False), "right")
    return pc.if_else(numbers.is_valid(), pa.array(names_of(edges)).take(pa.array(codes)), None)
