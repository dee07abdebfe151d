"""Swaps of items: the arms of an experiment that shows some items of a request at the positions of others.

An arm is a text: positions joined by `-`. `1-3` shows the item that production ranks at 1 at position 3, and that of 3
at 1. In an arm of more positions, each item moves to the next position, and the last one to the first: `1-2-3`. In a
grid, positions are slots: `r1c1-r1c3`. The empty arm is the control, the order of production.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.errors import ColumnError, DataError
from ultr.log.table import IN_LIST, SLOT, Log, as_shown, position_id

CONTROL = ""
PLACE = rf"(?:[0-9]{{1,18}}|{SLOT.pattern})"
PATTERN = re.compile(rf"{PLACE}(-{PLACE})+")


def parse_swap(text: str, *, where: object = None) -> tuple[int, ...]:
    """Return the positions of an arm; () for the control.

    >>> parse_swap("1-3")
    (1, 3)
    """
    if not text.strip():
        return ()
    try:
        places = tuple(map(position_id, text.strip().split("-"))) if PATTERN.fullmatch(text.strip()) else ()
    except ValueError:  # a slot beyond the largest grid
        places = ()
    if len(places) < 2 or len(set(places)) < len(places):
        hint = "write the positions that are swapped as 1-3, and leave the control empty"
        raise ColumnError("a swap must have two or more different positions", where=where, got=f"'{text}'", hint=hint)
    return places


def swap_text(places: Sequence[int]) -> str:
    return "-".join(str(as_shown(place)) for place in places)


def checked_swaps(values: Any, *, where: object = None) -> pa.Array:
    """Return arms as texts; a missing value is the control. Raise ColumnError if one is not an arm."""
    try:
        texts = pc.utf8_trim_whitespace(pc.fill_null(values.cast(pa.string()), CONTROL))
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        hint = "write the positions that are swapped as 1-3, and leave the control empty"
        raise ColumnError("a swap must be a text", where=where, got=f"type {values.type}", hint=hint) from error
    for text in pc.unique(texts).to_pylist():
        parse_swap(text, where=where)
    return texts


def production_positions(log: Log) -> tuple[np.ndarray, np.ndarray]:
    """Return the position at which production ranks the item of each row, and a mask of the rows that can be compared.

    The log needs swaps. Rows of the control and the rows that an arm moves can be compared. A request that does not
    show all positions of its arm is in the order of production.
    """
    positions = log.shown_positions("the comparison of swaps") & IN_LIST
    codes, arms = _encoded(log)
    production, compared = positions.copy(), np.ones(log.rows, bool)
    of_row = np.repeat(codes, log.lengths)
    for code, places in enumerate(arms):
        rows = np.flatnonzero(of_row == code)
        moved, complete = _moved(positions[rows], places, log.request_of_row[rows])
        compared[rows[complete]] = False
        for before, after in zip(places, places[1:] + places[:1], strict=True):
            at = rows[moved & (positions[rows] == after)]
            production[at], compared[at] = before, True
    return production, compared


def swap_items(log: Log, arms: Sequence[str] | np.ndarray) -> Log:
    """Return a log in the order of production with its items swapped as the arm of each request says.

    The result has the arms as its swaps. Actions move with their items, so draw them again.
    """
    if len(arms) != len(log):
        raise DataError("each request needs one arm", got=f"{len(arms)} arms of {len(log)} requests")
    log = replace(log, context={**log.context, "swaps": checked_swaps(pa.array([str(arm) for arm in arms]))})
    positions = log.shown_positions("a swap") & IN_LIST
    codes, swaps = _encoded(log)
    of_row, order = np.repeat(codes, log.lengths), np.arange(log.rows)
    for code, places in enumerate(swaps):
        rows = np.flatnonzero(of_row == code)
        moved, _complete = _moved(positions[rows], places, log.request_of_row[rows])
        for before, after in zip(places, places[1:] + places[:1], strict=True):
            order[rows[moved & (positions[rows] == after)]] = rows[moved & (positions[rows] == before)]
    return replace(log.regroup(order, log.offsets), positions=log.positions)


def _encoded(log: Log) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Return the code of the arm of each request, and the positions of each arm; the control has the code -1."""
    encoded = checked_swaps(log.context["swaps"]).dictionary_encode()
    arms = [tuple(k & IN_LIST for k in parse_swap(text)) for text in encoded.dictionary.to_pylist()]
    code = np.cumsum([bool(places) for places in arms]) - 1
    codes = np.where([bool(places) for places in arms], code, -1)[encoded.indices.to_numpy(zero_copy_only=False)]
    return codes, [places for places in arms if places]


def _moved(positions: np.ndarray, places: tuple[int, ...], request: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return masks of the rows that an arm moves, and of the rows of requests that show all its positions."""
    inside = np.isin(positions, places)
    numbers = np.unique(request, return_inverse=True)[1] if len(request) else request
    complete = np.bincount(numbers, inside)[numbers] == len(places) if len(request) else np.zeros(0, bool)
    return inside & complete, complete
