"""Convert an Arrow table to a `Log`: check each column, group the rows by request, and order them by position."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.errors import ColumnError, DataError
from ultr.log.schema import Columns, not_numbers, saved_names
from ultr.log.table import FEATURE_NAMES_KEY, Log

Missing = Literal["reject", "keep"]
MAX_CATEGORIES = 1 << 24  # codes are stored as float32, which is exact up to here
MIN_WEIGHT, MAX_WEIGHT = 1e-12, 1e12  # sums of squared weights within these bounds do not overflow
NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
ROWS_AT_ONCE = 2048  # rows that are copied to the feature matrix at a time, to stay in the CPU's cache


@dataclass(frozen=True)
class Piece:
    """The place of some rows in a file, so that error messages can name the file and the number of a row in it."""

    path: object
    rows_before: int

    def __str__(self) -> str:
        return str(self.path)


def _row(where: object, row: int) -> int:
    """Return the number of a row in its file, counted from 1."""
    return row + 1 + (where.rows_before if isinstance(where, Piece) else 0)


@contextmanager
def as_data_error(path: object, kind: str) -> Iterator[None]:
    """Turn the exceptions that reading a file of format `kind` causes into a DataError."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
        brief = " ".join(str(error).split())[:200]
        raise DataError(f"cannot be read as {kind} ({brief})", where=path, hint="check or rewrite the file") from error


def log_from_table(
    table: pa.Table,
    columns: Columns,
    *,
    where: object,
    missing: Missing = "reject",
    unused: Iterable[str] = (),
    gather: bool = True,
) -> Log:
    """Return a table as a `Log`: check every column, gather the rows of each request and order them by position.

    With `gather=False` the rows keep their order, and each becomes a request. `unused` are the columns not read.
    """
    table = one_row_per_item(table, columns, where)
    if table.num_rows == 0:
        raise DataError("there are no rows", where=where, hint="check the filter or query that made the data")
    requests = _combined(table[columns.request])
    if pa.types.is_floating(requests.type):
        requests = pc.if_else(pc.is_nan(requests.cast(pa.float64())), None, requests.cast(pa.float64()))
    _check_no_nulls(requests, columns.request, where)
    try:
        order, offsets, first_rows = _group(requests, gather)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        got, hint = f"type {requests.type}", "give each request a number or a string as its id"
        what = f"the ids of requests in column '{columns.request}' cannot be compared"
        raise ColumnError(what, where=where, got=got, hint=hint) from error
    if columns.position is not None:
        positions = _positions(table[columns.position], columns.position, where)
        order, positions = _order_by_position(
            order, offsets, positions, requests=requests, name=columns.position, where=where
        )
    else:
        positions = None
    features, feature_names = _features(table, columns.features, where=where, missing=missing)
    vocabularies = {}
    for name in columns.categorical:
        codes, vocabularies[name] = _codes(table[name], name, where)
        features, feature_names = np.column_stack([features, codes]), (*feature_names, name)

    def row_values(name: str, what: str) -> np.ndarray:
        values = _non_negative(table[name], name, what, where)
        return values if order is None else values[order]

    weights = None
    if columns.weight is not None:
        weights = _request_weights(row_values(columns.weight, "weight"), offsets, columns.weight, where)
    context = {
        role: values
        for role, name in columns.context.items()
        if (values := _request_context(table[name], role, name, order, offsets, where)) is not None
    }
    items = None if columns.item is None else _combined(table[columns.item])
    return Log(
        features=features if order is None else features[order],
        offsets=offsets,
        request_ids=requests.take(pa.array(first_rows)),
        feature_names=feature_names,
        positions=positions,
        actions={name: row_values(name, "action") for name in columns.actions},
        relevance=None if columns.relevance is None else row_values(columns.relevance, "relevance"),
        weights=weights,
        item_ids=items if items is None or order is None else items.take(pa.array(order)),
        vocabularies=vocabularies,
        context=context,
        unused_columns=tuple(unused),
        came_in_order=order is None,
    )


def _combined(column: pa.ChunkedArray) -> Any:
    """Return a column as one Arrow array of a plain type."""
    return _plain(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())


def _plain(array: Any) -> Any:
    """Convert categories, extension types and polars' string views to plain types, which all Arrow kernels support."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(array.storage)
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(array.indices, _plain(array.dictionary)).dictionary_decode()
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return array.cast(pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary())
    return array


def _is_list(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def one_row_per_item(table: pa.Table, columns: Columns, where: object) -> pa.Table:
    """Flatten a table with one row per request, whose columns hold lists; return any other table as it is."""
    table = table.select(columns.used)
    features = set(columns.features)
    lists = [n for n in columns.used if n not in features and _is_list(table.schema.field(n).type)]
    if not lists:
        return table
    nested = lists + [n for n in columns.features if _is_list(table.schema.field(n).type)]
    if columns.request in nested:
        hint = "write one id per row"
        raise ColumnError(f"request column '{columns.request}' must not hold lists", where=where, hint=hint)
    lengths = np.zeros(0, np.int64)
    flat: dict[str, Any] = {}
    for name in nested:
        column = _combined(table[name])
        _check_no_nulls(column, name, where)
        counts = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        lengths = lengths if flat else counts
        if (counts != lengths).any():
            row = int(np.flatnonzero(counts != lengths)[0])
            raise ColumnError(
                f"'{name}' must have as many values as '{nested[0]}' in every row",
                where=where,
                got=f"{counts[row]} and {lengths[row]} in row {_row(where, row)}",
                hint="in each row, write lists of the same length",
            )
        flat[name] = pc.list_flatten(column)
    rows = pa.array(np.repeat(np.arange(table.num_rows), lengths))
    return pa.table(
        {n: flat[n] if n in flat else _combined(table[n]).take(rows) for n in columns.used}
    ).replace_schema_metadata(table.schema.metadata)


def _check_no_nulls(column: Any, name: str, where: object) -> None:
    if column.null_count:
        row = int(np.flatnonzero(pc.is_null(column).to_numpy(zero_copy_only=False))[0])
        what = f"column '{name}' has {column.null_count} missing values (first in row {_row(where, row)})"
        raise ColumnError(what, where=where, hint="fill them or drop those rows")


def _group(requests: Any, gather: bool) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Return the row order that makes each request's rows adjacent, the offsets, and the first row of each request.

    The order is None if the rows are adjacent already. Requests keep the order of their first appearance. Rows with the
    same id in a run are handled together, so that a log that is grouped already costs one pass.
    """
    rows = len(requests)
    if not gather:
        return None, np.arange(rows + 1), np.arange(rows)
    changes = pc.not_equal(requests.slice(1), requests.slice(0, rows - 1)).to_numpy(zero_copy_only=False)
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    runs = requests.take(pa.array(starts)).dictionary_encode()
    lengths = np.diff(np.append(starts, rows))
    if len(runs.dictionary) == len(starts):
        return None, np.append(starts, rows).astype(np.int64), starts
    code_of_run = runs.indices.to_numpy(zero_copy_only=False)
    codes = np.repeat(code_of_run, lengths)
    order = np.argsort(codes, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(codes))]).astype(np.int64)
    return order, offsets, order[offsets[:-1]]


def _positions(column: pa.ChunkedArray, name: str, where: object) -> np.ndarray:
    values = _numeric(column, name, "position", where)
    with np.errstate(invalid="ignore"):  # a value that does not fit int64 changes, which is detected below
        whole = values.astype(np.int64) if values.dtype.kind != "f" or np.isfinite(values).all() else None
    if whole is None or (whole != values).any():
        wrong = int(np.flatnonzero(~np.isfinite(values) if whole is None else whole != values)[0])
        raise ColumnError(
            f"positions in column '{name}' must be whole numbers",
            where=where,
            got=f"{values[wrong]} in row {_row(where, wrong)}",
            hint="number the places where items were shown: 1, 2, ...",
        )
    if (whole < 0).any():
        wrong = int(np.flatnonzero(whole < 0)[0])
        raise ColumnError(
            f"positions in column '{name}' must not be negative",
            where=where,
            got=f"{whole[wrong]} in row {_row(where, wrong)}",
            hint="drop the rows of items that were not shown",
        )
    return whole


def _order_by_position(
    order: np.ndarray | None, offsets: np.ndarray, positions: np.ndarray, *, requests: Any, name: str, where: object
) -> tuple[np.ndarray | None, np.ndarray]:
    """Order the rows within each request by position; raise ColumnError if two have the same position."""
    grouped = positions if order is None else positions[order]
    inside = np.ones(len(grouped), bool)
    inside[offsets[:-1]] = False  # true for all rows but the first of each request
    steps = np.diff(grouped, prepend=grouped[:1])
    if (steps[inside] <= 0).any():
        request_of_row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        by_position = np.lexsort((grouped, request_of_row))
        order = by_position if order is None else order[by_position]
        grouped = grouped[by_position]
        repeated = np.flatnonzero((np.diff(grouped, prepend=grouped[:1]) == 0) & inside)
        if len(repeated):
            request = requests[int(order[repeated[0]])].as_py()
            raise ColumnError(
                f"two items of one request have the same position in column '{name}'",
                where=where,
                got=f"position {grouped[repeated[0]]} twice in request {request!r} ({len(repeated)} such rows in all)",
                hint="check the request and position columns, or drop repeated rows",
            )
    return order, grouped


def _numeric(column: pa.ChunkedArray, name: str, what: str, where: object) -> np.ndarray:
    values = _combined(column)
    kind = values.type
    if not any(test(kind) for test in NUMBERS):
        raise not_numbers(name, kind, what=what, where=where)
    _check_no_nulls(values, name, where)
    if pa.types.is_decimal(kind):
        values = values.cast(pa.float64())
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _non_negative(column: pa.ChunkedArray, name: str, what: str, where: object) -> np.ndarray:
    """Return a column as float32; raise ColumnError if a number is negative or not finite."""
    with np.errstate(over="ignore"):
        values = _numeric(column, name, what, where).astype(np.float32)
    fine = (values >= 0) & (values < np.inf)
    if not fine.all():
        row = int(np.flatnonzero(~fine)[0])
        got = f"{_combined(column)[row].as_py()} in row {_row(where, row)} ({int((~fine).sum())} such rows)"
        text = f"{what} column '{name}' must be finite and not negative in every row"
        raise ColumnError(text, where=where, got=got, hint="correct or drop the column")
    return values


def _request_weights(weights: np.ndarray, offsets: np.ndarray, name: str, where: object) -> np.ndarray:
    first = weights[offsets[:-1]]
    if (np.repeat(first, np.diff(offsets)) != weights).any():
        what, hint = f"weight column '{name}' must have one value per request", "give the rows of a request one weight"
        raise ColumnError(what, where=where, got="several", hint=hint)
    if len(outside := first[(first < MIN_WEIGHT) | (first > MAX_WEIGHT)]):
        what = f"weight column '{name}' must be positive, from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        raise ColumnError(what, where=where, got=outside[0], hint="drop requests of weight 0, and scale the others")
    return np.asarray(first)


def _request_context(
    column: pa.ChunkedArray, role: str, name: str, order: np.ndarray | None, offsets: np.ndarray, where: object
) -> Any:
    """Return one value per request of a column whose role is query, segment or randomised.

    Return None for a query column with several values in one request, because it does not hold queries.
    """
    values = _combined(column)
    if role == "randomised":
        values = pa.array(_numeric(column, name, role, where) != 0)
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
        raise ColumnError(what, where=where, hint="correct or drop the column")
    return values.take(pa.array(first))


def _features(
    table: pa.Table, names: tuple[str, ...], *, where: object, missing: Missing
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return all feature columns as one float32 matrix, and their names."""
    blocks: list[np.ndarray] = []
    labels: list[str] = []
    saved = saved_names(table.schema, FEATURE_NAMES_KEY)
    for name in names:
        column = table[name]
        if _is_list(column.type):
            block = _list_column(column, name, where)
            use_saved = len(names) == 1 and len(saved) == block.shape[1]
            labels += saved if use_saved else [f"{name}[{i}]" for i in range(block.shape[1])]
        else:
            block = _feature_column(column, name, where)[:, None]
            labels.append(name)
        blocks.append(block)
    matrix = blocks[0] if len(blocks) == 1 else _side_by_side(blocks, table.num_rows)
    check_features(matrix, labels, where=where, missing=missing)
    return matrix, tuple(labels)


def _side_by_side(blocks: list[np.ndarray], rows: int) -> np.ndarray:
    matrix = np.empty((rows, sum(block.shape[1] for block in blocks)), np.float32)
    for start in range(0, rows, ROWS_AT_ONCE):
        chosen, place = slice(start, start + ROWS_AT_ONCE), 0
        for block in blocks:
            matrix[chosen, place : place + block.shape[1]] = block[chosen]
            place += block.shape[1]
    return matrix


def _codes(column: pa.ChunkedArray, name: str, where: object) -> tuple[np.ndarray, Any]:
    """Return categories as codes (1, 2, ...; 0 for a missing value), and the string of each code from 1."""
    try:
        encoded = _combined(column).cast(pa.string()).dictionary_encode()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        got, hint = f"type {column.type}", "convert it to numbers or strings"
        raise ColumnError(f"column '{name}' cannot be categorical", where=where, got=got, hint=hint) from error
    if len(encoded.dictionary) >= MAX_CATEGORIES:
        got = f"{len(encoded.dictionary):,}"
        raise ColumnError(f"'{name}' has too many categories", where=where, got=got, hint="hash or drop it")
    codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False) + 1
    return codes.astype(np.float32), encoded.dictionary


def _feature_column(column: pa.ChunkedArray, name: str, where: object) -> np.ndarray:
    values = _combined(column)
    if values.null_count and any(test(values.type) for test in (*NUMBERS, pa.types.is_null)):
        values = pc.fill_null(values.cast(pa.float64()), float("nan"))  # check_features rejects or accepts NaN
    with np.errstate(over="ignore"):
        return _numeric(pa.chunked_array([values]), name, "feature", where).astype(np.float32, copy=False)


def _list_column(column: pa.ChunkedArray, name: str, where: object) -> np.ndarray:
    """Return a column of lists of one length as a matrix; contiguous float32 data is not copied."""
    values = _combined(column)
    _check_no_nulls(values, name, where)
    lengths = pc.list_value_length(values)
    bounds = pc.min_max(lengths).as_py()
    if bounds["min"] != bounds["max"]:
        got, hint = f"lengths {bounds['min']} to {bounds['max']}", "pad the shorter lists"
        raise ColumnError(f"feature column '{name}' must have lists of one length", where=where, got=got, hint=hint)
    flat = _feature_column(pa.chunked_array([values.flatten()]), name, where)
    return flat.reshape(len(values), bounds["max"])


def check_features(matrix: np.ndarray, names: list[str], *, where: object, missing: Missing) -> None:
    """Raise ColumnError if a feature is infinite, or is NaN while `missing` is "reject"."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(matrix.sum()):  # a sum is not finite if a value is not, and takes no memory
            return
    bad = ~np.isfinite(matrix) if missing == "reject" else np.isinf(matrix)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        hint = "replace or clip them (values beyond 3.4e38 do not fit float32)"
        if missing == "reject" and np.isnan(matrix[row, column]):
            hint = "fill them, pass --missing mean (missing='mean'), or use --ranker lightgbm, which accepts them"
        raise ColumnError(
            f"feature '{names[column]}' has values that are not finite",
            where=where,
            got=f"{matrix[row, column]} in row {_row(where, row)} ({int(bad[:, column].sum())} such rows)",
            hint=hint,
        )
