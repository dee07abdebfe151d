"""Ibis expressions for the rows of a log, which both DuckDB and Spark can evaluate: filters, types and hashes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ultr.errors import ColumnError
from ultr.log.conditions import Condition, parse_conditions, utc_time
from ultr.log.schema import Columns, not_numbers

# Arrow's names of comparisons -> those of Python, which Ibis uses.
COMPARE = {
    "equal": "__eq__",
    "not_equal": "__ne__",
    "less": "__lt__",
    "less_equal": "__le__",
    "greater": "__gt__",
    "greater_equal": "__ge__",
}


def filtered(table: Any, conditions: Iterable[str]) -> Any:
    """Return the rows that meet every condition, such as `country = de`; a missing value meets no condition."""
    for condition in parse_conditions(conditions, table.columns):
        column, value = _comparable(table[condition.column], condition)
        table = table.filter(getattr(column, COMPARE[condition.compare])(value))
    return table


def _comparable(column: Any, condition: Condition) -> tuple[Any, Any]:
    """Return the column and the value of a condition in types that can be compared."""
    kind, text = column.type(), condition.value
    try:
        if kind.is_string():
            return column, text
        if kind.is_boolean():
            return column, {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind.is_integer() and re.fullmatch(r"[+-]?\d+", text):
            return column, int(text)
        if kind.is_numeric():
            return column.cast("float64"), float(text)
        if kind.is_timestamp() or kind.is_date():
            return column.cast("timestamp"), utc_time(text)
    except (KeyError, ValueError) as error:
        value = "true or false" if kind.is_boolean() else "a number" if kind.is_numeric() else "a time like 2024-05-31"
        raise condition.bad_value(value) from error
    raise condition.bad_type(kind)


def id_column(column: Any, *, what: str, where: object) -> Any:
    """Return a column of ids as int64 or as strings, in the same way on every engine."""
    kind = column.type()
    if kind.is_integer() and not kind.is_uint64():
        return column.cast("int64")
    whole = kind.is_uint64() or (kind.is_decimal() and kind.scale == 0) or kind.is_boolean() or kind.is_uuid()
    if kind.is_string() or kind.is_date() or whole:
        return column.cast("string")
    text, got = f"{what} column '{column.get_name()}' must hold strings or whole numbers", f"type {kind}"
    raise ColumnError(text, where=where, got=got, hint="convert the column")


def number_column(column: Any, *, what: str, where: object) -> Any:
    kind = column.type()
    if not (kind.is_numeric() or kind.is_boolean()):
        raise not_numbers(column.get_name(), kind, what=what, where=where)
    return column.cast("float64")


def impressions(table: Any, columns: Columns, *, time: str | None, where: object) -> Any:
    """Return one row per item shown, in columns of fixed names and types; `check_rows` and `rounded` come after."""
    if nested := [n for n in columns.used if n not in columns.features and table[n].type().is_array()]:
        hint = "pass this log to ultr train directly, or flatten its lists first"
        raise ColumnError(f"'{nested[0]}' holds lists; prepare needs one row per item", where=where, hint=hint)
    request = id_column(table[columns.request], what="request", where=where)
    position = table[columns.position]
    whole = position.type().is_integer()
    chosen = {
        "digest": request.cast("string").hexdigest("md5"),
        "request": request,
        "position": position.cast("int64") if whole else number_column(position, what="position", where=where),
    }
    if columns.item is not None:
        chosen["item"] = id_column(table[columns.item], what="item", where=where)
    for i, name in enumerate(columns.actions):
        chosen[f"action_{i}"] = number_column(table[name], what="action", where=where)
    for role in ("relevance", "weight"):
        if (name := getattr(columns, role)) is not None:
            chosen[role] = number_column(table[name], what=role, where=where)
    for role, name in columns.context.items():
        if role == "randomised":
            chosen[role] = number_column(table[name], what=role, where=where) != 0
        else:
            chosen[role] = id_column(table[name], what=role, where=where)
    if time is not None:
        chosen["time"] = seconds_column(table[time], where)
    for i, name in enumerate(columns.categorical):
        chosen[f"category_{i}"] = id_column(table[name], what="categorical", where=where).cast("string")
    if columns.features:
        chosen["features"] = _features(table, columns.features, where)
    return table.select(**chosen)


def seconds_column(column: Any, where: object) -> Any:
    """Return times in whole seconds since 1970; numbers are only rounded down."""
    kind = column.type()
    if kind.is_integer():
        return column.cast("int64")
    if kind.is_timestamp() or kind.is_date():
        column = column.cast("timestamp").epoch_seconds()
    elif not kind.is_numeric():
        got, hint = f"type {kind}", "convert the column"
        raise ColumnError(f"time column '{column.get_name()}' must hold times", where=where, got=got, hint=hint)
    return column.cast("float64").floor().cast("int64")


def _features(table: Any, names: Sequence[str], where: object) -> Any:
    """Return all features of an item as one array, in the order of `names`."""
    import ibis

    parts: list[Any] = []
    scalars: list[Any] = []
    for name in names:
        column = table[name]
        kind = column.type()
        value = kind.value_type if kind.is_array() else kind
        if not (value.is_numeric() or value.is_boolean()):
            raise not_numbers(name, kind, what="feature", where=where)
        if kind.is_array():
            parts += [ibis.array(scalars)] if scalars else []
            parts.append(column.cast("array<float32>"))
            scalars = []
        else:
            scalars.append(column.cast("float32"))
    parts += [ibis.array(scalars)] if scalars else []
    return parts[0] if len(parts) == 1 else parts[0].concat(*parts[1:])


def without_missing_actions(rows: Any) -> Any:
    """Return rows with 0 in place of missing actions."""
    names = [name for name in rows.columns if name.startswith("action_")]
    return rows.mutate(**{n: rows[n].isnan().ifelse(0.0, rows[n]).coalesce(0.0) for n in names})


def rounded(rows: Any) -> Any:
    """Return rows that passed `check_rows`, with positions as int64 and other numbers as float32."""
    numbers = [n for n in rows.columns if n.startswith("action_") or n in ("relevance", "weight")]
    return rows.mutate(position=rows.position.cast("int64"), **{name: rows[name].cast("float32") for name in numbers})
