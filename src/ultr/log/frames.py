"""Frames and arrays of scikit-learn's interface as tables that `read_log` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from ultr.errors import DataError
from ultr.log.labels import Label
from ultr.log.readers import as_table

ROW = "ultr.row"  # column with the row numbers of X, because a log has its rows in another order


def is_frame(X: Any) -> bool:
    """Return whether X is a data frame (pandas, polars, Arrow), and not an array."""
    return hasattr(X, "columns")


def _array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"'{name}' cannot be read ({error})", hint="pass an array with values of one type") from error


def _column(name: str, values: Any, rows: int) -> pa.Array:
    array = _array(name, values)
    try:
        if array.shape == (rows,):
            return pa.array(array)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"'{name}' cannot be read ({error})", hint="pass an array with values of one type") from error
    raise DataError(f"'{name}' must have one value for each of {rows} rows", got=f"shape {list(array.shape)}")


def frame_table(X: Any) -> pa.Table:
    """Return a frame or an array as a table; the columns of an array are called feature_0, feature_1, ..."""
    if is_frame(X):
        return as_table(X)
    array = _array("X", X)
    if array.ndim != 2:
        raise DataError("X must be a frame or an array [rows, columns]", got=f"shape {list(array.shape)}")
    return pa.table({f"feature_{i}": _column(f"feature_{i}", v, len(array)) for i, v in enumerate(array.T)})


def row_values(role: str, value: Any) -> Mapping[str, Any] | None:
    """Return column name -> values if `value` holds values by row; None if it names columns of X."""
    if role in ("request", "position", "weight"):
        return None if value is None or isinstance(value, str | int) else {role: value}
    if is_frame(value):
        table = as_table(value)
        return dict(zip(table.column_names, table.columns, strict=True))
    return value if isinstance(value, Mapping) else None


def with_columns(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    """Return the table with columns added or replaced; each has one value per row."""
    others = {name: table[name] for name in table.column_names if name not in columns}
    added = {name: _column(name, values, table.num_rows) for name, values in columns.items()}
    return pa.table({**others, **added}).replace_schema_metadata(table.schema.metadata)


def joined(X: Any, sources: Mapping[str, Any]) -> tuple[pa.Table, dict[str, Any]]:
    """Return X as a table and role -> column name; sources that hold values by row become columns of the table."""
    table, named = frame_table(X), dict(sources)
    for role, value in sources.items():
        if (columns := row_values(role, value)) is not None:
            table, named[role] = with_columns(table, columns), list(columns) if role == "actions" else role
        elif isinstance(value, int):
            named[role] = f"feature_{value}"
    if not is_frame(X) and named["request"] is None:
        hint = "pass request and position as arrays or column numbers; in cross-validation, use metadata routing"
        raise DataError("X is an array, and the request of each row is not given", hint=hint)
    return table, named


def with_feedback(table: pa.Table, y: Any, label: Label) -> tuple[pa.Table, list[str]]:
    """Add y to the table, as the actions of the label that are not columns yet; return all actions of the label too."""
    missing = [name for name in label.actions if name not in table.column_names]
    if not missing:
        hint = "leave out y; for score, put true labels into a column 'relevance'"
        raise DataError(f"feedback is given twice, in X ({', '.join(label.actions)}) and in y", hint=hint)
    columns = row_values("actions", y)
    if columns is None:
        array = _array("y", y)
        values = array[:, None] if array.ndim == 1 else array
        if values.ndim != 2 or values.shape[1] != len(missing):
            got = f"shape {list(array.shape)}"
            raise DataError(f"y must have one column for each of {', '.join(missing)}", got=got)
        columns = dict(zip(missing, values.T, strict=True))
    return with_columns(table, columns), list(label.actions)


def numbered(table: pa.Table) -> pa.Table:
    """Return the table with a column `ROW` of row numbers."""
    return table.append_column(ROW, pa.array(np.arange(table.num_rows)))
