"""Convert an Arrow table to a `Log`: check each column, group the rows by request, and order them by position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.errors import ColumnError, DataError, nearest
from ultr.log.bins import Edges, binned, equal_edges, names_of, with_edges
from ultr.log.cleaning import (
    OnDuplicates,
    check_dropped,
    copies_note,
    find_copies,
    find_duplicates,
    merge_rows,
    only_shown,
)
from ultr.log.columns import (
    Columns,
    Missing,
    category_codes,
    check_no_nulls,
    combined,
    feature_matrix,
    is_list,
    item_codes,
    missing_note,
    non_negative,
    numeric,
    position_values,
    row_number,
    without_missing,
)
from ultr.log.conditions import filter_rows, numbers_or_seconds, parse_conditions, seconds
from ultr.log.splits import as_texts
from ultr.log.swaps import checked_swaps
from ultr.log.table import SEPARATOR, Log

MIN_WEIGHT, MAX_WEIGHT = 1e-12, 1e12  # sums of squared weights within these bounds do not overflow


@dataclass(frozen=True)
class Reading:
    """How to read the rows of a log: missing features, repeated rows, conditions, times and further columns."""

    missing: Missing = "keep"
    on_duplicates: OnDuplicates = "error"
    where: tuple[str, ...] = ()
    time: str | None = None
    extra: tuple[str, ...] = ()

    @property
    def further(self) -> tuple[str, ...]:
        return (*(() if self.time is None else (self.time,)), *self.extra)

    def names(self, columns: Columns, names: Sequence[str], where: object) -> list[str]:
        """Return the columns to read: those with a role, and those of conditions and times."""
        for name in self.further:
            if name not in names:
                purpose = " for the time" if name == self.time else ""
                raise ColumnError(f"no column '{name}'{purpose}", where=where, hint=nearest(name, names))
        conditions = [condition.column for condition in parse_conditions(self.where, names)]
        return list(dict.fromkeys([*columns.used, *conditions, *self.further]))


def log_from_table(
    table: pa.Table,
    columns: Columns,
    *,
    where: object,
    reading: Reading,
    unused: Iterable[str] = (),
    gather: bool = True,
) -> Log:
    """Return a table as a `Log`: check every column, gather the rows of each request and order them by position.

    With `gather=False` the rows keep their order, and each becomes a request. `unused` are the columns not read.
    """
    table = one_row_per_item(filter_rows(table, reading.where), columns, where, further=reading.further)
    name, every = columns.shown, replace(columns, shown=None)
    if name is None:
        return _log_of_rows(table, columns, where=where, reading=reading, unused=unused, gather=gather)
    if not gather:  # rows to score, some of which may have no position
        every = replace(every, position=None, places=())
        return _log_of_rows(table, every, where=where, reading=reading, unused=unused, gather=False)
    table, hidden, notes = only_shown(table, columns, where=where)
    log = _log_of_rows(table, every, where=where, reading=reading, unused=unused)
    if hidden is None:
        return replace(log, notes=(*notes, *log.notes), unused_columns=(*log.unused_columns, name))
    return replace(log, notes=(*notes, *log.notes), columns={**log.columns, "shown": name}, hidden=hidden)


def _log_of_rows(
    table: pa.Table,
    columns: Columns,
    *,
    where: object,
    reading: Reading,
    unused: Iterable[str] = (),
    gather: bool = True,
) -> Log:
    """Return the rows of a table as a `Log`, as `log_from_table` does."""
    if table.num_rows == 0:
        hint = "check --where, or the query that made the data"
        raise DataError("there are no rows", where=where, hint=hint)
    columns, bins = _with_bins(table, columns, whole=gather)
    requests = _request_ids(table, columns.request, where)
    order, offsets, first_rows = group_rows(requests, gather=gather, name=columns.request, where=where)
    positions = None
    if columns.position is not None:
        positions = position_values(table, columns, where)
    actions, notes = _actions(table, columns.actions, where)
    notes = [*columns.notes, *bins, *notes]
    if gather and (keys := _keys(table, columns, order, offsets, positions)):
        of_row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        if order is not None:
            of_row[order] = of_row.copy()
        unique, rest, notes = _without_repeats(table, reading, keys, of_row, requests, actions, notes, columns, where)
        if unique.num_rows < table.num_rows:
            log = _log_of_rows(unique, columns, where=where, reading=rest, unused=unused)
            return replace(log, notes=tuple(dict.fromkeys((*notes, *log.notes))))
    if positions is not None:
        order, positions = _order_by_position(order, offsets, positions)
    features, feature_names, vocabularies = _features(table, columns, where, missing=reading.missing)

    def ordered(values: np.ndarray) -> np.ndarray:
        return values if order is None else values[order]

    def row_values(name: str, what: str) -> np.ndarray:
        return ordered(non_negative(table[name], name, what, where))

    weights = None
    if columns.weight is not None:
        weights = _request_weights(row_values(columns.weight, "weight"), offsets, columns.weight, where)
    context = {
        role: _request_context(_context_column(table, role, name, columns), role, name, order, offsets, where)
        for role, name in columns.context.items()
    }
    by_role = columns.by_role
    if context.get("query", "") is None:
        name = by_role.pop("query")
        del context["query"]
        notes.append(f"column '{name}' differs within requests, so it is not used as the query")
    if reading.time is not None:
        times = ordered(seconds(table[reading.time], where=where, name=reading.time))
        context["time"] = pa.array(np.minimum.reduceat(times, offsets[:-1]))
    items = None if columns.item is None else combined(table[columns.item])
    return Log(
        features=ordered(features),
        offsets=offsets,
        request_ids=requests.take(pa.array(first_rows)),
        feature_names=feature_names,
        positions=positions,
        actions={name: ordered(values) for name, values in actions.items()},
        relevance=None if columns.relevance is None else row_values(columns.relevance, "relevance"),
        weights=weights,
        item_ids=items if items is None or order is None else items.take(pa.array(order)),
        vocabularies=vocabularies,
        context=context,
        columns=by_role,
        unused_columns=tuple(unused),
        notes=tuple(notes),
        came_in_order=order is None,
        extra={name: ordered(numbers_or_seconds(table[name], name, where)) for name in reading.extra},
    )


def _request_ids(table: pa.Table, name: str, where: object) -> Any:
    """Return the id of the request of each row; an id that is NaN counts as missing, which is an error."""
    requests = combined(table[name])
    if pa.types.is_floating(requests.type):
        requests = requests.cast(pa.float64())
        requests = pc.if_else(pc.is_nan(requests), None, requests)
    check_no_nulls(requests, name, where, what="request")
    return requests


def _features(
    table: pa.Table, columns: Columns, where: object, *, missing: Missing
) -> tuple[np.ndarray, tuple[str, ...], dict[str, Any]]:
    """Return numeric and then categorical features, their names, and the vocabulary of each categorical one."""
    features, names = feature_matrix(table, columns.features, where=where, missing=missing)
    vocabularies = {}
    for name in columns.categorical:
        codes, vocabularies[name] = category_codes(table[name], name, where)
        features = np.column_stack([features, codes])
        names = (*names, name)
    return features, names, vocabularies


def _actions(table: pa.Table, names: Sequence[str], where: object) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the values of each action, 0 where they are missing, and a note for each column with missing values."""
    actions, notes = {}, []
    for name in names:
        values, count = without_missing(table[name])
        if count:
            notes.append(missing_note(name, count))
        actions[name] = non_negative(values, name, "action", where)
    return actions, notes


def _keys(
    table: pa.Table, columns: Columns, order: np.ndarray | None, offsets: np.ndarray, positions: np.ndarray | None
) -> dict[str, tuple[str, np.ndarray]]:
    """Return the columns that may repeat within a request: role -> its column and a number for each value."""
    keys: dict[str, tuple[str, np.ndarray]] = {}
    if columns.item is not None:
        keys["item"] = (columns.item, item_codes(combined(table[columns.item])))
    if positions is not None and not _ascend(positions if order is None else positions[order], offsets):
        keys["position"] = (str(columns.position), positions)
    return keys


def _without_repeats(
    table: pa.Table,
    reading: Reading,
    keys: dict[str, tuple[str, np.ndarray]],
    request_of_row: np.ndarray,
    requests: Any,
    actions: dict[str, np.ndarray],
    notes: list[str],
    columns: Columns,
    where: object,
) -> tuple[pa.Table, Reading, list[str]]:
    """Return a table without copies of rows, or else without rows that `on_duplicates` merges.

    Also return how to read this table, and the notes on what was changed. `notes` are those on actions. Copies come
    first, because they would count in the sum of merged rows.
    """
    # A copy has the position of the other row. If all positions of a request differ, "position" is not in `keys`.
    compared = "item" if columns.position is None else "position"
    if compared in keys:
        certain = bool(columns.item or columns.features or columns.categorical)
        copies = find_copies(table, request_of_row, keys[compared][1], certain=certain)
        if copies.any():
            unique = table.filter(pa.array(~copies))
            return unique, replace(reading, where=()), [copies_note(int(copies.sum()))]
    target, further = find_duplicates(request_of_row, keys, reading.on_duplicates, requests=requests, where=where)
    notes = [*notes, *further]
    dropped = int((target != np.arange(len(target))).sum())
    check_dropped(dropped, len(target), reading.on_duplicates, columns.request, where)
    if not dropped:
        return table, reading, notes
    merged = merge_rows(table, target, actions, add_up=reading.on_duplicates == "sum")
    return merged, replace(reading, where=(), on_duplicates="error"), notes


def one_row_per_item(table: pa.Table, columns: Columns, where: object, *, further: Iterable[str] = ()) -> pa.Table:
    """Flatten a table with one row per request, whose columns hold lists; return any other table as it is."""
    names = list(dict.fromkeys([*columns.used, *further]))
    table = table.select(names)
    features = set(columns.features)
    lists = [n for n in names if n not in features and is_list(table.schema.field(n).type)]
    if not lists:
        return table
    nested = lists + [n for n in columns.features if is_list(table.schema.field(n).type)]
    if columns.request in nested:
        hint = "write one id per row"
        raise ColumnError(f"request column '{columns.request}' must not hold lists", where=where, hint=hint)
    lengths = np.zeros(0, np.int64)
    flat: dict[str, Any] = {}
    for name in nested:
        column = combined(table[name])
        check_no_nulls(column, name, where, what="list")
        counts = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        lengths = lengths if flat else counts
        if (counts != lengths).any():
            row = int(np.flatnonzero(counts != lengths)[0])
            raise ColumnError(
                f"'{name}' must have as many values as '{nested[0]}' in every row",
                where=where,
                got=f"{counts[row]} and {lengths[row]} in row {row_number(where, row)}",
                hint="in each row, write lists of the same length",
            )
        flat[name] = pc.list_flatten(column)
    rows = pa.array(np.repeat(np.arange(table.num_rows), lengths))
    return pa.table(
        {n: flat[n] if n in flat else combined(table[n]).take(rows) for n in names}
    ).replace_schema_metadata(table.schema.metadata)


def group_rows(
    requests: Any, *, gather: bool = True, name: str, where: object
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Return the row order that makes each request's rows adjacent, the offsets, and the first row of each request.

    The order is None if the rows are adjacent already. Requests keep the order of their first appearance. Rows with the
    same id in a run are handled together, so that a log that is grouped already costs one pass.
    """
    rows = len(requests)
    if not gather:
        return None, np.arange(rows + 1), np.arange(rows)
    try:
        changes = pc.not_equal(requests.slice(1), requests.slice(0, rows - 1)).to_numpy(zero_copy_only=False)
        starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
        runs = requests.take(pa.array(starts)).dictionary_encode()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        got, hint = f"type {requests.type}", "give each request a number or a string as its id"
        what = f"the ids of requests in column '{name}' cannot be compared"
        raise ColumnError(what, where=where, got=got, hint=hint) from error
    lengths = np.diff(np.append(starts, rows))
    if len(runs.dictionary) == len(starts):
        return None, np.append(starts, rows).astype(np.int64), starts
    code_of_run = runs.indices.to_numpy(zero_copy_only=False)
    codes = np.repeat(code_of_run, lengths)
    order = np.argsort(codes, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(codes))]).astype(np.int64)
    return order, offsets, order[offsets[:-1]]


def _ascend(grouped: np.ndarray, offsets: np.ndarray) -> bool:
    """Return whether the positions of each request, whose rows are adjacent, increase from row to row."""
    inside = np.ones(len(grouped), bool)
    inside[offsets[:-1]] = False  # true for all rows but the first of each request
    return bool((np.diff(grouped, prepend=grouped[:1])[inside] > 0).all())


def _order_by_position(
    order: np.ndarray | None, offsets: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the row order by request and position (None if it is that of the rows), and the positions in it."""
    grouped = positions if order is None else positions[order]
    if _ascend(grouped, offsets):
        return order, grouped
    request_of_row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    by_position = np.lexsort((grouped, request_of_row))
    return by_position if order is None else order[by_position], grouped[by_position]


def _request_weights(weights: np.ndarray, offsets: np.ndarray, name: str, where: object) -> np.ndarray:
    first = weights[offsets[:-1]]
    if (np.repeat(first, np.diff(offsets)) != weights).any():
        what, hint = f"weight column '{name}' must have one value per request", "give the rows of a request one weight"
        raise ColumnError(what, where=where, got="several", hint=hint)
    if len(outside := first[(first < MIN_WEIGHT) | (first > MAX_WEIGHT)]):
        what = f"weight column '{name}' must be positive, from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        raise ColumnError(what, where=where, got=outside[0], hint="drop requests of weight 0, and scale the others")
    return np.asarray(first)


def _with_bins(table: pa.Table, columns: Columns, *, whole: bool) -> tuple[Columns, list[str]]:
    """Return the columns, in which a segment column of many numbers has bins, and a note for each such column.

    If the table is not the whole log, its numbers do not decide on bins.
    """
    if not whole:
        return columns, []
    found = {name: edges or equal_edges(combined(table[name])) for name, edges in columns.edges.items()}
    notes = [
        f"'{name}' has many values; its segments are {', '.join(names_of(edges))} (--segment {with_edges(name, edges)})"
        for name, edges in found.items()
        if edges and not columns.edges[name]
    ]
    if not notes:
        return columns, []
    segment = ",".join(with_edges(name, edges) for name, edges in found.items())
    return replace(columns, edges=found, context={**columns.context, "segment": segment}), notes


def _context_column(table: pa.Table, role: str, name: str, columns: Columns) -> pa.ChunkedArray:
    """Return the column of a role, or the values of several columns that make a segment, such as `phone + search`."""
    if role != "segment":
        return table[name]
    values = [_segment_values(table, each, columns.edges[each]) for each in columns.segments]
    if len(values) == 1:
        return values[0]
    texts = [as_texts(each) for each in values]
    return pc.binary_join_element_wise(*texts, SEPARATOR, null_handling="replace", null_replacement="")


def _segment_values(table: pa.Table, name: str, edges: Edges) -> pa.ChunkedArray:
    """Return a column, or the names of the bins of its numbers."""
    if not edges:
        return table[name]
    try:
        return pa.chunked_array([binned(combined(table[name]), edges)])
    except (pa.ArrowException, TypeError) as error:
        got, hint = f"type {table.schema.field(name).type}", f"name the column without bins: --segment {name}"
        raise ColumnError(f"segment column '{name}' must hold numbers to have bins", got=got, hint=hint) from error


def _request_context(
    column: pa.ChunkedArray, role: str, name: str, order: np.ndarray | None, offsets: np.ndarray, where: object
) -> Any:
    """Return one value per request of a column whose role is query, segment, randomised or swaps.

    Return None for a query column with several values in one request, because it does not hold queries.
    """
    values = combined(column)
    if role == "randomised":
        values = pa.array(numeric(column, name, role, where) != 0)
    if role == "swaps":
        values = checked_swaps(values, where=f"{where}: column '{name}'")
    try:
        codes = pc.fill_null(values.dictionary_encode().indices, -1).to_numpy(zero_copy_only=False)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        got, hint = f"type {values.type}", "rename the column, or convert it to numbers or strings"
        raise ColumnError(f"'{name}' cannot be a {role}", where=where, got=got, hint=hint) from error
    rows = np.arange(len(codes)) if order is None else order
    first = rows[offsets[:-1]]
    if (np.repeat(codes[first], np.diff(offsets)) != codes[rows]).any():
        if role == "query":
            return None
        what = f"column '{name}' ({role}) must have one value per request"
        raise ColumnError(what, where=where, hint=f"correct or drop the column; '' as --{role} means none")
    return values.take(pa.array(first))


# --- Weights that decay with age --------------------------------------------------------------------------------------
# Weights of requests that decay with their age: a request counts half as much as one a half-life later.

DAY = 86_400  # seconds


def decayed(log: Log, ages: np.ndarray | float, half_life: float) -> Log:
    """Return the log with the weights of its requests multiplied by 2^(-age / half-life), both in days."""
    weights = np.exp2(-np.broadcast_to(ages, len(log)) / half_life)
    weights = np.maximum(weights if log.weights is None else weights * log.weights, MIN_WEIGHT)
    return replace(log, weights=weights.astype(np.float32))


def decayed_by_time(log: Log, half_life: float) -> Log:
    """Return the log with weights that decay with the age of requests, by their `context["time"]` in seconds."""
    times = np.asarray(log.context["time"].to_numpy(zero_copy_only=False), np.float64)
    return decayed(log, (times.max() - times) / DAY, half_life)
