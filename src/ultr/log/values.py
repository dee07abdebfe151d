"""Check the values of a column, and convert them to arrays: ids, numbers, features and categories."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.errors import ColumnError, DataError
from ultr.log.schema import not_numbers, saved_names
from ultr.log.table import FEATURE_NAMES_KEY

Missing = Literal["reject", "keep"]
MAX_CATEGORIES = 1 << 24  # codes are stored as float32, which is exact up to here
NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
ROWS_AT_ONCE = 2048  # rows that are copied to the feature matrix at a time, to stay in the CPU's cache


@dataclass(frozen=True)
class Piece:
    """The place of some rows in a file, so that error messages can name the file and the number of a row in it."""

    path: object
    rows_before: int

    def __str__(self) -> str:
        return str(self.path)


def row_number(where: object, row: int) -> int:
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


def combined(column: pa.ChunkedArray) -> Any:
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


def is_list(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def without_missing(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, int]:
    """Return a column of numbers with 0 in place of missing values (also NaN), and the number of such values."""
    kind = column.type
    if pa.types.is_floating(kind):
        gaps = pc.is_null(column, nan_is_null=True)
        count = int(pc.sum(gaps).as_py() or 0)
        return (pc.if_else(gaps, pa.scalar(0, kind), column) if count else column), count
    if pa.types.is_null(kind):
        return pa.chunked_array([pa.array(np.zeros(len(column), np.int64))]), len(column)
    count = column.null_count
    if not count or not any(test(kind) for test in NUMBERS):
        return column, 0
    return pc.fill_null(column, pa.scalar(False if pa.types.is_boolean(kind) else 0, kind)), count


def missing_note(name: str, count: int) -> str:
    return f"{count:,} rows have no value in action column '{name}'; they count as 0"


def item_codes(items: Any) -> np.ndarray:
    """Return a number for each item id, equal for equal ids; -1 for ids that are missing or cannot be compared."""
    try:
        indices = items.dictionary_encode().indices
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return np.full(len(items), -1)
    return np.asarray(pc.fill_null(indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False))


def check_no_nulls(column: Any, name: str, where: object, *, what: str) -> None:
    if column.null_count:
        row = int(np.flatnonzero(pc.is_null(column).to_numpy(zero_copy_only=False))[0])
        text = f"{what} column '{name}' has {column.null_count} missing values (first in row {row_number(where, row)})"
        raise ColumnError(text, where=where, hint="fill them or drop those rows")


def position_values(column: pa.ChunkedArray, name: str, where: object) -> np.ndarray:
    values = numeric(column, name, "position", where)
    with np.errstate(invalid="ignore"):  # a value that does not fit int64 changes, which is detected below
        whole = values.astype(np.int64) if values.dtype.kind != "f" or np.isfinite(values).all() else None
    if whole is None or (whole != values).any():
        wrong = int(np.flatnonzero(~np.isfinite(values) if whole is None else whole != values)[0])
        raise ColumnError(
            f"positions in column '{name}' must be whole numbers",
            where=where,
            got=f"{values[wrong]} in row {row_number(where, wrong)}",
            hint="number the places where items were shown: 1, 2, ...",
        )
    if (whole < 0).any():
        wrong = int(np.flatnonzero(whole < 0)[0])
        raise ColumnError(
            f"positions in column '{name}' must not be negative",
            where=where,
            got=f"{whole[wrong]} in row {row_number(where, wrong)}",
            hint="drop the rows of items that were not shown",
        )
    return whole


def numeric(column: pa.ChunkedArray, name: str, what: str, where: object) -> np.ndarray:
    values = combined(column)
    kind = values.type
    if not any(test(kind) for test in NUMBERS):
        raise not_numbers(name, kind, what=what, where=where)
    check_no_nulls(values, name, where, what=what)
    if pa.types.is_decimal(kind):
        values = values.cast(pa.float64())
    return np.asarray(values.to_numpy(zero_copy_only=False))


def non_negative(column: pa.ChunkedArray, name: str, what: str, where: object) -> np.ndarray:
    """Return a column as float32; raise ColumnError if a number is negative or not finite."""
    with np.errstate(over="ignore"):
        values = numeric(column, name, what, where).astype(np.float32)
    fine = (values >= 0) & (values < np.inf)
    if not fine.all():
        row = int(np.flatnonzero(~fine)[0])
        got = f"{combined(column)[row].as_py()} in row {row_number(where, row)} ({int((~fine).sum())} such rows)"
        text = f"{what} column '{name}' must be finite and not negative in every row"
        raise ColumnError(text, where=where, got=got, hint="correct or drop the column")
    return values


def feature_matrix(
    table: pa.Table, names: tuple[str, ...], *, where: object, missing: Missing
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return all feature columns as one float32 matrix, and their names."""
    blocks: list[np.ndarray] = []
    labels: list[str] = []
    saved = saved_names(table.schema, FEATURE_NAMES_KEY)
    for name in names:
        column = table[name]
        if is_list(column.type):
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


def category_codes(column: pa.ChunkedArray, name: str, where: object) -> tuple[np.ndarray, Any]:
    """Return categories as codes (1, 2, ...; 0 for a missing value), and the string of each code from 1, sorted."""
    try:
        encoded = combined(column).cast(pa.string()).dictionary_encode()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        got, hint = f"type {column.type}", "convert it to numbers or strings"
        raise ColumnError(f"column '{name}' cannot be categorical", where=where, got=got, hint=hint) from error
    if len(encoded.dictionary) >= MAX_CATEGORIES:
        got = f"{len(encoded.dictionary):,}"
        raise ColumnError(f"'{name}' has too many categories", where=where, got=got, hint="hash or drop it")
    order = pc.sort_indices(encoded.dictionary)
    sorted_code = np.zeros(len(order) + 1, np.float32)  # the last entry, of index -1, is for a missing value
    sorted_code[order.to_numpy()] = np.arange(1, len(order) + 1)
    return sorted_code[pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)], encoded.dictionary.take(order)


def _feature_column(column: pa.ChunkedArray, name: str, where: object) -> np.ndarray:
    values = combined(column)
    if values.null_count and any(test(values.type) for test in (*NUMBERS, pa.types.is_null)):
        values = pc.fill_null(values.cast(pa.float64()), float("nan"))  # check_features rejects or accepts NaN
    with np.errstate(over="ignore"):
        return numeric(pa.chunked_array([values]), name, "feature", where).astype(np.float32, copy=False)


def _list_column(column: pa.ChunkedArray, name: str, where: object) -> np.ndarray:
    """Return a column of lists of one length as a matrix; contiguous float32 data is not copied."""
    values = combined(column)
    check_no_nulls(values, name, where, what="feature")
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
            hint = "fill them, or leave out --missing error (missing='error'; for read_log, missing='reject')"
        raise ColumnError(
            f"feature '{names[column]}' has values that are not finite",
            where=where,
            got=f"{matrix[row, column]} in row {row_number(where, row)} ({int(bad[:, column].sum())} such rows)",
            hint=hint,
        )
