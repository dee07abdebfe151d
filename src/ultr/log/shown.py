"""Rows that nobody could see: candidates that a cut-off hid, and rows below the viewport of a session that ended.

A column of the log may mark what was shown. The other rows gave no feedback because nobody could see them. They are
left out where feedback is learned from or counted, at one place: when a log is read.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.errors import ColumnError
from ultr.log.columns import Columns, combined, is_number, row_number
from ultr.log.table import MOST_GRID_COLUMNS, Hidden

RARE = 0.001  # share of the rows with feedback that may be marked as not shown; they count as shown


def only_shown(table: pa.Table, columns: Columns, *, where: object) -> tuple[pa.Table, Hidden | None, list[str]]:
    """Return the rows that were shown, what was left out, and notes.

    A column that was found by its name is used only if it has both 0 and 1, and if hardly any row with 0 has feedback;
    else all rows are returned, and None. For a column that was named, these are errors.
    """
    name, named = str(columns.shown), columns.shown_named
    shown = _flags(table[name])
    if shown is None and named:
        what, hint = f"column '{name}' must have 1 for rows that were shown and 0 for others", "convert the column"
        raise ColumnError(what, where=where, got=f"type {table[name].type}", hint=hint)
    if shown is None or (not named and (shown.all() or not shown.any())):
        return table, None, []
    acted = np.any([_numbers(table[action]) > 0 for action in columns.actions] or [np.zeros(len(table), bool)], axis=0)
    wrong = acted & ~shown
    if wrong.sum() > RARE * acted.sum():
        what = f"{int(wrong.sum()):,} rows with {name} = 0 have feedback"
        if not named:
            return table, None, [f"column '{name}' does not mark what was shown, so all rows count as shown: {what}"]
        hint = "correct the column, or name another one with --shown; '' means none"
        got = f"row {row_number(where, int(wrong.argmax()))}"
        raise ColumnError(f"{what}, but nobody could see them", where=where, got=got, hint=hint)
    shown |= wrong
    hidden = replace(_summary(name, shown, table, columns), with_feedback=int(wrong.sum()))
    return (table.filter(pa.array(shown)), hidden, [str(hidden)]) if hidden.rows else (table, hidden, [])


def _summary(marked_by: str, shown: np.ndarray, table: pa.Table, columns: Columns) -> Hidden:
    """Count the rows that were not shown, and the requests that have such rows only at the end."""
    codes = combined(table[columns.request]).dictionary_encode().indices
    request = np.asarray(pc.fill_null(codes.cast(pa.int64()), 0).to_numpy(zero_copy_only=False))
    count = int(request.max(initial=-1)) + 1
    place = np.full(len(shown), np.nan)
    for i, name in enumerate(columns.places):  # in reading order, if there are a row and a column
        place = _numbers(table[name]) + (MOST_GRID_COLUMNS * place if i else 0)
    last, first_hidden = np.full(count, -np.inf), np.full(count, np.inf)
    np.maximum.at(last, request[shown], np.nan_to_num(place[shown], nan=-np.inf))
    np.minimum.at(first_hidden, request[~shown], np.nan_to_num(place[~shown], nan=np.inf))
    with_hidden, nothing = np.bincount(request, ~shown, count) > 0, np.bincount(request, shown, count) == 0
    counts = (int(each.sum()) for each in (with_hidden, with_hidden & (first_hidden > last), nothing))
    return Hidden(marked_by, int((~shown).sum()), len(shown), *counts)


def _flags(column: pa.ChunkedArray) -> np.ndarray | None:
    """Return whether each row was shown, as 1 or 0; a missing value means that it was not. None for other columns."""
    numbers = np.nan_to_num(_numbers(column))
    return numbers == 1 if is_number(column.type) and np.isin(numbers, (0, 1)).all() else None


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column as numbers, NaN where they are missing; all are missing in a column of another type."""
    values = combined(column)
    if not is_number(values.type):
        return np.full(len(values), np.nan)
    return np.asarray(values.cast(pa.float64()).to_numpy(zero_copy_only=False))
