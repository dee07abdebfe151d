"""From an Arrow table to a `Log`: each column checked, rows gathered by request and ordered by position."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.errors import ColumnError, DataError, OptionError
from ultr.log.schema import Columns, not_numbers, saved_names
from ultr.log.table import FEATURE_NAMES_KEY, Log

Missing = Literal["refuse", "keep"]
MAX_CATEGORIES = 1 << 24  # codes are kept as float32
LIGHTEST, HEAVIEST = 1e-12, 1e12  # weights are summed up and squared
NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
ROWS_AT_ONCE = 2048  # of columns that are set side by side: they stay in the processor's cache


@dataclass(frozen=True)
class Piece:
    """Some rows of a file, for messages: they name the file and count its rows from the first."""

    path: object
    rows_before: int

    def __str__(self) -> str:
        return str(self.path)


def _row(where: object, row: int) -> int:
    """The number of a row, from 1, in all that is read."""
    return row + 1 + (where.rows_before if isinstance(where, Piece) else 0)


@contextmanager
def as_data_error(path: object, kind: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
        brief = " ".join(str(error).split())[:200]
        raise DataError(f"cannot be read as {kind} ({brief})", where=path, mend="check or rewrite the file") from error


def log_from_table(
    table: pa.Table,
    columns: Columns,
    *,
    where: object,
    missing: Missing = "refuse",
    unused: Iterable[str] = (),
    gather: bool = True,
) -> Log:
    """Check every column, gather the rows of each request and order them by position.

    Without `gather` rows stay as they come, each as a request of its own.
    """
    if missing not in get_args(Missing):
        raise OptionError("missing should be 'refuse' or 'keep'", got=repr(missing))
    table = one_row_per_item(table, columns, where)
    if table.num_rows == 0:
        raise DataError("there are no rows", where=where, mend="check the filter or query that made it")
    requests = _combined(table[columns.request])
    if pa.types.is_floating(requests.type):
        requests = pc.if_else(pc.is_nan(requests.cast(pa.float64())), None, requests.cast(pa.float64()))
    if requests.null_count:
        _refuse_nulls(requests, columns.request, where)
    try:
        order, offsets, first_rows = _group(requests, gather)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        got, mend = f"type {requests.type}", "give each request a number or a text"
        what = f"requests in column '{columns.request}' cannot be told apart"
        raise ColumnError(what, where=where, got=got, mend=mend) from error
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
        part: values
        for part, name in columns.context.items()
        if (values := _request_context(table[name], part, name, order, offsets, where)) is not None
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
    """A column as one Arrow array of a plain type."""
    return _plain(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())


def _plain(array: Any) -> Any:
    """Categories give their values, extensions their storage, polars' views of text the text; few kernels know them."""
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
    """Tables with one row per request hold lists; flatten them to one row per item. Others pass as they are."""
    table = table.select(columns.used)
    features = set(columns.features)
    whole = [n for n in columns.used if n not in features and _is_list(table.schema.field(n).type)]
    if not whole:
        return table
    nested = whole + [n for n in columns.features if _is_list(table.schema.field(n).type)]
    if columns.request in nested:
        raise ColumnError("a list in every row", where=f"{where}: column '{columns.request}'", mend="give one value")
    lengths = np.zeros(0, np.int64)
    flat: dict[str, Any] = {}
    for name in nested:
        column = _combined(table[name])
        if column.null_count:
            _refuse_nulls(column, name, where)
        counts = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        lengths = lengths if flat else counts
        if (counts != lengths).any():
            row = int(np.flatnonzero(counts != lengths)[0])
            raise ColumnError(
                f"'{name}' should have as many values as '{nested[0]}' in every row",
                where=where,
                got=f"{counts[row]} and {lengths[row]} in row {_row(where, row)}",
                mend="write lists of one length in a row",
            )
        flat[name] = pc.list_flatten(column)
    rows = pa.array(np.repeat(np.arange(table.num_rows), lengths))
    return pa.table(
        {n: flat[n] if n in flat else _combined(table[n]).take(rows) for n in columns.used}
    ).replace_schema_metadata(table.schema.metadata)


def _refuse_nulls(column: Any, name: str, where: object) -> None:
    row = int(np.flatnonzero(pc.is_null(column).to_numpy(zero_copy_only=False))[0])
    raise ColumnError(
        f"column '{name}' has {column.null_count} missing values (first in row {_row(where, row)})",
        where=where,
        mend="fill them or drop those rows",
    )


def _group(requests: Any, gather: bool) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Row order that makes each request's rows adjacent (None: they are), offsets, and a first row of each request.

    Requests keep the order of their first appearance. Only the ends of runs are compared, so a log that is grouped
    already costs one pass.
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
    with np.errstate(invalid="ignore"):  # what does not fit comes out as another number
        whole = values.astype(np.int64) if values.dtype.kind != "f" or np.isfinite(values).all() else None
    if whole is None or (whole != values).any():
        wrong = int(np.flatnonzero(~np.isfinite(values) if whole is None else whole != values)[0])
        raise ColumnError(
            f"positions in column '{name}' should be whole numbers",
            where=where,
            got=f"{values[wrong]} in row {_row(where, wrong)}",
            mend="give each item the place it was shown at: 1, 2, ...",
        )
    if (whole < 0).any():
        wrong = int(np.flatnonzero(whole < 0)[0])
        raise ColumnError(
            f"positions in column '{name}' should not be negative",
            where=where,
            got=f"{whole[wrong]} in row {_row(where, wrong)}",
            mend="drop the rows if it marks items that were not shown",
        )
    return whole


def _order_by_position(
    order: np.ndarray | None, offsets: np.ndarray, positions: np.ndarray, *, requests: Any, name: str, where: object
) -> tuple[np.ndarray | None, np.ndarray]:
    """Order the rows within each request by position, and refuse two items in one place."""
    grouped = positions if order is None else positions[order]
    inside = np.ones(len(grouped), bool)
    inside[offsets[:-1]] = False  # rows that have a neighbour above them in the same request
    steps = np.diff(grouped, prepend=grouped[:1])
    if (steps[inside] <= 0).any():
        request_of_row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        by_position = np.lexsort((grouped, request_of_row))
        order = by_position if order is None else order[by_position]
        grouped = grouped[by_position]
        clash = np.flatnonzero((np.diff(grouped, prepend=grouped[:1]) == 0) & inside)
        if len(clash):
            request = requests[int(order[clash[0]])].as_py()
            raise ColumnError(
                f"two items of one request are on one position in column '{name}'",
                where=where,
                got=f"position {grouped[clash[0]]} twice in request {request!r} ({len(clash)} such rows in all)",
                mend="check the request and position columns, or drop repeated rows",
            )
    return order, grouped


def _numeric(column: pa.ChunkedArray, name: str, what: str, where: object) -> np.ndarray:
    values = _combined(column)
    kind = values.type
    if not any(test(kind) for test in NUMBERS):
        raise not_numbers(name, kind, what=what, where=where)
    if values.null_count:
        _refuse_nulls(values, name, where)
    if pa.types.is_decimal(kind):
        values = values.cast(pa.float64())
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _non_negative(column: pa.ChunkedArray, name: str, what: str, where: object) -> np.ndarray:
    """A float32 column of finite numbers >= 0."""
    with np.errstate(over="ignore"):
        values = _numeric(column, name, what, where).astype(np.float32)
    fine = (values >= 0) & (values < np.inf)
    if not fine.all():
        row = int(np.flatnonzero(~fine)[0])
        got = f"{_combined(column)[row].as_py()} in row {_row(where, row)} ({int((~fine).sum())} such rows)"
        should = f"{what} column '{name}' should be finite and not negative in every row"
        raise ColumnError(should, where=where, got=got, mend="clean the column or leave it out")
    return values


def _request_weights(weights: np.ndarray, offsets: np.ndarray, name: str, where: object) -> np.ndarray:
    first = weights[offsets[:-1]]
    if (np.repeat(first, np.diff(offsets)) != weights).any():
        what, mend = f"weight column '{name}' should have one value per request", "weigh requests, not items"
        raise ColumnError(what, where=where, got="several", mend=mend)
    if len(odd := first[(first < LIGHTEST) | (first > HEAVIEST)]):
        what = f"weight column '{name}' should be positive, from {LIGHTEST:g} to {HEAVIEST:g}"
        raise ColumnError(what, where=where, got=odd[0], mend="drop requests without a weight, scale the others")
    return np.asarray(first)


def _request_context(
    column: pa.ChunkedArray, part: str, name: str, order: np.ndarray | None, offsets: np.ndarray, where: object
) -> Any:
    """The query, segment or mark of each request; None for a query that differs within requests, and so is none."""
    values = _combined(column)
    if part == "randomised":
        values = pa.array(_numeric(column, name, part, where) != 0)
    try:
        codes = pc.fill_null(values.dictionary_encode().indices, -1).to_numpy(zero_copy_only=False)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        got, mend = f"type {values.type}", "rename it, or convert it to a number or a text"
        raise ColumnError(f"'{name}' cannot be a {part}", where=where, got=got, mend=mend) from error
    rows = np.arange(len(codes)) if order is None else order
    first = rows[offsets[:-1]]
    if (np.repeat(codes[first], np.diff(offsets)) != codes[rows]).any():
        if part == "query":
            return None
        mend = "it is said of whole requests; leave it out if it is not"
        raise ColumnError(f"column '{name}' ({part}) should have one value per request", where=where, mend=mend)
    return values.take(pa.array(first))


def _features(
    table: pa.Table, names: tuple[str, ...], *, where: object, missing: Missing
) -> tuple[np.ndarray, tuple[str, ...]]:
    """All feature columns as one float32 matrix, and their names."""
    blocks: list[np.ndarray] = []
    labels: list[str] = []
    saved = saved_names(table.schema, FEATURE_NAMES_KEY)
    for name in names:
        column = table[name]
        if _is_list(column.type):
            block = _list_column(column, name, where)
            known = len(names) == 1 and len(saved) == block.shape[1]
            labels += saved if known else [f"{name}[{i}]" for i in range(block.shape[1])]
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
    """Categories as codes from 1, 0 where missing, and the values they stand for, as text."""
    try:
        encoded = _combined(column).cast(pa.string()).dictionary_encode()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        got, mend = f"type {column.type}", "convert it to a number or a text"
        raise ColumnError(f"'{name}' cannot be a category", where=where, got=got, mend=mend) from error
    if len(encoded.dictionary) >= MAX_CATEGORIES:
        got = f"{len(encoded.dictionary):,}"
        raise ColumnError(f"'{name}' has too many categories", where=where, got=got, mend="leave it out, or hash it")
    codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False) + 1
    return codes.astype(np.float32), encoded.dictionary


def _feature_column(column: pa.ChunkedArray, name: str, where: object) -> np.ndarray:
    values = _combined(column)
    if values.null_count and any(test(values.type) for test in (*NUMBERS, pa.types.is_null)):
        values = pc.fill_null(values.cast(pa.float64()), float("nan"))  # a missing value: refused or kept later
    with np.errstate(over="ignore"):
        return _numeric(pa.chunked_array([values]), name, "feature", where).astype(np.float32, copy=False)


def _list_column(column: pa.ChunkedArray, name: str, where: object) -> np.ndarray:
    """A column of equally long lists as a matrix; without a copy where it lies in one piece as float32."""
    values = _combined(column)
    if values.null_count:
        _refuse_nulls(values, name, where)
    lengths = pc.list_value_length(values)
    bounds = pc.min_max(lengths).as_py()
    if bounds["min"] != bounds["max"]:
        got, mend = f"lengths {bounds['min']} to {bounds['max']}", "fill up the shorter ones"
        raise ColumnError(f"feature column '{name}' should have equally long lists", where=where, got=got, mend=mend)
    flat = _feature_column(pa.chunked_array([values.flatten()]), name, where)
    return flat.reshape(len(values), bounds["max"])


def check_features(matrix: np.ndarray, names: list[str], *, where: object, missing: Missing) -> None:
    """Refuse infinite features, and missing ones unless they are to be kept."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(matrix.sum()):  # any NaN or infinity shows in the sum, which costs one pass and no memory
            return
    bad = ~np.isfinite(matrix) if missing == "refuse" else np.isinf(matrix)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        mend = "fill or clip them (values beyond 3.4e38 do not fit float32)"
        if missing == "refuse" and np.isnan(matrix[row, column]):
            mend = "fill them, or train with --ranker lightgbm or xgboost (missing='keep'), which can handle them"
        raise ColumnError(
            f"feature '{names[column]}' has values that are not finite",
            where=where,
            got=f"{matrix[row, column]} in row {_row(where, row)} ({int(bad[:, column].sum())} such rows)",
            mend=mend,
        )
