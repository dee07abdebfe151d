"""Rows and requests that are left out of a log: rows that nobody could see, repeated rows, and requests by bots."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.errors import ColumnError
from ultr.log.columns import Columns, combined, is_list, is_number, item_codes, row_number
from ultr.log.splits import MIX, as_texts
from ultr.log.table import MOST_GRID_COLUMNS, Hidden, as_shown
from ultr.utils.files import atomic_path

# --- Rows that nobody could see ---------------------------------------------------------------------------------------
# Candidates that a cut-off hid, and rows below the viewport of a session that ended. They gave no feedback because
# nobody could see them, so that they are left out at one place: when a log is read.

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


# --- Repeated rows ----------------------------------------------------------------------------------------------------
# Rows that repeat another row, or its item or position: find them, and drop them or add up their actions.

OnDuplicates = Literal["error", "first", "sum"]
MOST_DROPPED, FEW_ROWS = 0.05, 10  # share of the rows that "first" may drop; in short logs, it may drop this number
LARGE = 1 << 31  # positions below this number, times the number of a request, do not overflow
KEPT = "they are kept; on_duplicates=first keeps only the first row, and sum adds up the actions"
MERGED = {"first": "only the first row is kept", "sum": "the first row gets the sum of their actions"}
HINT = "check the request column, or set on_duplicates to first (keep the first row) or sum (add up the actions)"


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
        pair = _pairs(request_of_row[compared], codes[compared])
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
            value = as_shown(int(codes[row])) if role == "position" else codes[row]
            got = f"{role} {value} twice in request {requests[row].as_py()!r} ({count:,} such rows in all)"
            what = f"two items of one request have the same {role} in column '{name}'"
            raise ColumnError(what, where=where, got=got, hint=HINT)
        target[compared] = merged
        notes.append(f"{note}; {MERGED[on_duplicates]}")
    while (target[target] != target).any():  # a row may be merged into one that is itself merged
        target = target[target]
    return target, notes


def _pairs(request_of_row: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return a number for each pair of a request and a code."""
    small = codes if codes.max(initial=0) < LARGE else np.unique(codes, return_inverse=True)[1]
    return np.asarray(request_of_row * (int(small.max(initial=0)) + 1) + small)


def check_dropped(dropped: int, rows: int, on_duplicates: str, request: str | None, where: object) -> None:
    """Raise ColumnError if "first" drops more than a few rows, as it does if requests share an id."""
    if on_duplicates == "first" and dropped > max(MOST_DROPPED * rows, FEW_ROWS):
        what = f"on_duplicates=first would drop {dropped / rows:.0%} of the rows, which is too much for repeated events"
        got = f"{dropped:,} of {rows:,} rows repeat the item or position of another row with their request id"
        hint = f"check the request column '{request}': each page, visit or list that was shown needs its own id"
        raise ColumnError(what, where=where, got=got, hint=hint)


def copies_note(count: int) -> str:
    return f"{count:,} rows are equal to another row of their request in all columns; only one of each is kept"


def find_copies(table: pa.Table, request_of_row: np.ndarray, codes: np.ndarray, *, certain: bool) -> np.ndarray:
    """Return a mask of the rows that equal an earlier row of their request in all columns.

    `codes` has a number for each position, or, without positions, for each item id: -1 if it is missing. If the table
    has neither items nor features (not `certain`), rows of different lists with one id may be equal, but hardly all of
    them. So none is marked if other rows have the position of a row.
    """
    copies = np.zeros(len(codes), bool)
    rows = np.flatnonzero(codes >= 0)
    _, pair, counts = np.unique(_pairs(request_of_row[rows], codes[rows]), return_inverse=True, return_counts=True)
    several = counts[pair] > 1
    rows, hashes = rows[several], pair[several].astype(np.uint64)
    if len(rows):
        for column in table.take(pa.array(rows)).columns:
            hashes = (hashes ^ (hashes >> np.uint64(29))) * MIX + _codes(combined(column))
        copies[rows] = True
        copies[rows[np.unique(hashes, return_index=True)[1]]] = False
        if not certain and len(copies) - copies.sum() > len(counts):
            copies[:] = False
    return copies


def _codes(values: Any) -> np.ndarray:
    """Return a number for each value, which is the same for equal values."""
    if not is_list(values.type):
        return item_codes(values).astype(np.uint64)
    lengths = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
    width = int(lengths[0])
    if width < 1 or (lengths != width).any():  # lists of features have one length, which is checked elsewhere
        return np.arange(len(values), dtype=np.uint64)
    factors = np.random.default_rng(0).integers(1, 2**63, width, dtype=np.uint64) | np.uint64(1)
    codes = item_codes(values.flatten()).astype(np.uint64).reshape(-1, width)
    return np.asarray((codes * factors).sum(axis=1, dtype=np.uint64))


def merge_rows(table: pa.Table, target: np.ndarray, actions: dict[str, np.ndarray], *, add_up: bool) -> pa.Table:
    """Return the rows that are kept, with their actions (column -> values of all rows) or the sums of merged rows."""
    kept = np.flatnonzero(target == np.arange(len(target)))
    merged = table.take(pa.array(kept))
    for name, values in actions.items():
        totals = np.bincount(target, values, minlength=len(target)) if add_up else values
        merged = merged.set_column(merged.schema.get_field_index(name), name, pa.array(totals[kept]))
    return merged


# --- Suspicious requests ----------------------------------------------------------------------------------------------
# Requests that users are unlikely to have made: bots, tests and faults click nearly everything in a list.

SUSPICIOUS_FILE = "suspicious.csv"  # in a run, a comparison or a folder of lists: requests that were left out
BOT_LENGTHS = (5, 8, 12, 18)  # fewest items of groups of requests: in short lists, many users click on most items
BOT_SHARES = ((0.45, 0.7), (0.55, 0.8), (0.75, 0.9))  # share of clicked items above which bots may begin; gap below it
# Fewer and fewer users click on more and more of the items, so that hardly more are above a gap than in it. Bots are.
BOT_BUMP = 2  # smallest ratio of requests above a gap and in it
BOT_CHANCE = 1e-5  # largest probability of so many clicks by chance
BOT_REQUESTS, BOT_CLICKS = 10, 0.01  # fewest requests, and smallest share of all clicks, for bots
BOT_LENGTH, BOT_LEAST = BOT_LENGTHS[0], BOT_SHARES[0][0]  # requests with fewer items or clicks have no effect
TINY = 1e-12


def suspicious_of(
    items: np.ndarray, clicks: np.ndarray, expected: np.ndarray, weights: np.ndarray, all_clicks: float
) -> np.ndarray:
    """Return the mask of requests with impossibly many clicks; all False if there are too few, or if users are eager.

    `items` and `clicks` count the rows of a request, and those with feedback. `expected` is the sum of the click rates
    of its positions. `all_clicks` is the weighted number of clicks of the log, of which these requests may be a part:
    requests with fewer than `BOT_LENGTH` items, or at most a share `BOT_LEAST` of them clicked, have no effect.
    """
    n, share, mask = items, clicks / items, np.zeros(len(items), bool)
    a, p = share, np.clip(expected / n, TINY, 1 - TINY)
    # Chernoff's bound, which holds for clicks of unequal rates (Hoeffding 1956): P(m or more) <= exp(-n KL(a, p)).
    kl = a * np.log(np.maximum(a, TINY) / p) + (1 - a) * np.log(np.maximum(1 - a, TINY) / (1 - p))
    rare = (a > p) & (n * kl > -np.log(BOT_CHANCE))
    for least, below in zip(BOT_LENGTHS, (*BOT_LENGTHS[1:], np.inf), strict=True):
        group = (n >= least) & (n < below)
        for low, high in BOT_SHARES:
            bots = group & rare & (share > high)
            if bots.sum() >= BOT_BUMP * max(1, (group & (share > low) & (share <= high)).sum()):
                mask |= bots
                break
    if mask.sum() < BOT_REQUESTS or weights[mask] @ clicks[mask] <= BOT_CLICKS * all_clicks:
        mask[:] = False
    return mask


def write_suspicious(folder: Path, requests: Any) -> None:
    """Write suspicious.csv into a folder: the ids of the requests that were left out, an Arrow array."""
    with atomic_path(folder / SUSPICIOUS_FILE, overwrite=True) as path, path.open("w", newline="") as file:
        csv.writer(file).writerows([("request",), *((text,) for text in as_texts(requests).to_pylist())])
