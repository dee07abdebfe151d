"""Rows that repeat an item or a position of their request: find them, and drop them or add up their actions."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pyarrow as pa

from ultr.errors import ColumnError

OnDuplicates = Literal["error", "first", "sum"]
LARGE = 1 << 31  # positions below this number, times the number of a request, do not overflow
KEPT = "they are kept; --on-duplicates first keeps only the first row, and sum adds up the actions"
MERGED = {"first": "only the first row is kept", "sum": "the first row gets the sum of their actions"}
HINT = "check the request column, or pass --on-duplicates first (keep the first row) or sum (add up the actions)"


def find_duplicates(
    request_of_row: np.ndarray,
    keys: dict[str, tuple[str, np.ndarray]],
    on_duplicates: str,
    *,
    requests: Any,
    where: object,
) -> tuple[np.ndarray, list[str]]:
    """Return, for each row, the row that it is merged into (itself if it is kept), and notes.

    `keys` maps a role (item, position) to its column and a number for each value, -1 if it is missing. Repeated items
    are merged before positions are compared. With "error", a repeated position raises ColumnError, and items that
    were shown at several positions are only counted.
    """
    rows = np.arange(len(request_of_row))
    target, notes = rows.copy(), []
    for role, (name, codes) in keys.items():
        compared = np.flatnonzero((target == rows) & (codes >= 0))
        small = codes if codes.max(initial=0) < LARGE else np.unique(codes, return_inverse=True)[1]
        pair = request_of_row[compared] * (int(small.max(initial=0)) + 1) + small[compared]
        ordered = np.sort(pair)
        count = int((ordered[1:] == ordered[:-1]).sum())
        if not count:
            continue
        note = f"{count:,} rows repeat the {role} (column '{name}') of another row of their request"
        if on_duplicates == "error" and role == "item":
            notes.append(f"{note}; {KEPT}")
            continue
        _, first, inverse = np.unique(pair, return_index=True, return_inverse=True)
        merged = compared[first[inverse]]
        if on_duplicates == "error":
            row = int(compared[merged != compared][0])
            got = f"{role} {codes[row]} twice in request {requests[row].as_py()!r} ({count:,} such rows in all)"
            what = f"two items of one request have the same {role} in column '{name}'"
            raise ColumnError(what, where=where, got=got, hint=HINT)
        target[compared] = merged
        notes.append(f"{note}; {MERGED[on_duplicates]}")
    while (target[target] != target).any():  # a row may be merged into one that is itself merged
        target = target[target]
    return target, notes


def merge_rows(table: pa.Table, target: np.ndarray, actions: dict[str, np.ndarray], *, add_up: bool) -> pa.Table:
    """Return the rows that are kept, with their actions (column -> values of all rows) or the sums of merged rows."""
    kept = np.flatnonzero(target == np.arange(len(target)))
    merged = table.take(pa.array(kept))
    for name, values in actions.items():
        totals = np.bincount(target, values, minlength=len(target)) if add_up else values
        merged = merged.set_column(merged.schema.get_field_index(name), name, pa.array(totals[kept]))
    return merged
