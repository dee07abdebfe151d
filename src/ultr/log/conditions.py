"""Conditions on rows, such as `country = de`, and the times of requests, for tables in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ultr.errors import ColumnError, OptionError, nearest

CONDITION = re.compile(r"\s*(?P<column>.+?)\s*(?P<op>==|!=|<=|>=|=|<|>)\s*(?P<value>.*?)\s*", re.DOTALL)
DATE = re.compile(r"\d{4}-\d\d-\d\d")
EXAMPLE = "2026-01-05T10:00:00Z"  # of a time as a text
COMPARE = {
    "==": "equal",
    "=": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}


class Condition(NamedTuple):
    """A condition of the form COLUMN OP VALUE; `compare` is Arrow's name of the comparison."""

    text: str
    column: str
    compare: str
    value: str

    @property
    def orders_times(self) -> bool:
        """Whether the value is a time, and its order matters, so that texts are compared as times, if they are."""
        return self.compare not in ("equal", "not_equal") and DATE.match(self.value) is not None

    def bad_value(self, expected: str) -> OptionError:
        return OptionError(f"the value in condition '{self.text}' must be {expected}", got=f"'{self.value}'")

    def bad_type(self, kind: object) -> OptionError:
        return OptionError(f"condition '{self.text}' is on a column that cannot be compared", got=f"type {kind}")


def parse_conditions(conditions: Iterable[str], names: Sequence[str]) -> list[Condition]:
    """Return the parts of each condition; raise an error if one cannot be parsed, or names an unknown column."""
    parsed = []
    for condition in conditions:
        match = CONDITION.fullmatch(condition)
        if match is None:
            hint = "write for example 'country = de'"
            raise OptionError("a condition must be COLUMN OP VALUE", got=f"'{condition}'", hint=hint)
        name, value = match["column"], match["value"]
        if name not in names:
            raise ColumnError(f"no column '{name}' for the condition '{condition}'", hint=nearest(name, names))
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        parsed.append(Condition(condition, name, COMPARE[match["op"]], value))
    return parsed


def filter_rows(table: pa.Table, conditions: Iterable[str]) -> pa.Table:
    """Return the rows of a table that meet every condition; a missing value meets no condition."""
    for condition in parse_conditions(conditions, table.column_names):
        column, value = _comparable(table[condition.column], condition)
        table = table.filter(getattr(pc, condition.compare)(column, value))
    return table


def _comparable(column: pa.ChunkedArray, condition: Condition) -> tuple[pa.ChunkedArray, Any]:
    """Return the column and the value of a condition in types that can be compared."""
    kind, text = column.type, condition.value
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    try:
        if _is_text(kind):
            if condition.orders_times:
                with suppress(ValueError):
                    return as_times(column), pa.scalar(utc_time(text), pa.timestamp("us"))
            return column.cast(pa.large_string()), pa.scalar(text, pa.large_string())
        if pa.types.is_boolean(kind):
            return column, {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if pa.types.is_integer(kind) and re.fullmatch(r"[+-]?\d+", text):
            return column, int(text)
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            numbers = column.cast(pa.float64())
            return pc.if_else(pc.is_nan(numbers), None, numbers), float(text)
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            return _utc(column), pa.scalar(utc_time(text), pa.timestamp("us"))
    except (KeyError, ValueError) as error:
        is_time = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
        expected = "a time like 2024-05-31" if is_time else "a number"
        raise condition.bad_value("true or false" if pa.types.is_boolean(kind) else expected) from error
    raise condition.bad_type(kind)


def utc_time(text: str) -> datetime:
    """Return a time in ISO 8601 as a UTC datetime without a time zone; a text without a zone is UTC."""
    time = datetime.fromisoformat(text)
    return time if time.tzinfo is None else time.astimezone(UTC).replace(tzinfo=None)


def _is_text(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def as_times(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return texts in ISO 8601 as times in UTC, without a time zone; raise ValueError, with a text, if one is no time.

    An empty text is a missing value.
    """
    texts = column.cast(pa.string())
    texts = pc.if_else(pc.equal(texts, ""), None, texts)
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):  # without and with time zones
        with suppress(pa.ArrowInvalid):
            return _utc(texts.cast(kind))
    coded = texts.combine_chunks().dictionary_encode()  # with several time zones, or digits
    values = []
    for text in coded.dictionary.to_pylist():
        try:
            values.append(utc_time(text))
        except ValueError as error:
            raise ValueError(text) from error
    return pa.chunked_array([pa.array(values, pa.timestamp("us")).take(coded.indices)])


def _times_of_texts(column: pa.ChunkedArray, what: str, where: object) -> pa.ChunkedArray:
    """Return a column of texts as times; return any other column as it is."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    try:
        return as_times(column) if _is_text(kind) else column
    except ValueError as error:
        hint = f"write times as {EXAMPLE}, or as seconds since 1970"
        raise ColumnError(what, where=where, got=f"the text {str(error)[:40]!r}", hint=hint) from error


def _utc(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return times in microseconds, in UTC and without a time zone."""
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.timestamp(column.type.unit, "UTC")).cast(pa.timestamp(column.type.unit))
    return column.cast(pa.timestamp("us"), safe=False)


def seconds(column: pa.ChunkedArray, *, where: object, name: str) -> np.ndarray:
    """Return times as whole seconds since 1970; numbers are only rounded down."""
    column = _times_of_texts(column, f"time column '{name}' must hold times", where)
    kind = column.type
    if column.null_count:
        what = f"time column '{name}' has {column.null_count:,} missing values"
        raise ColumnError(what, where=where, hint="fill them, or drop those rows with --where")
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return np.asarray(_utc(column).cast(pa.int64()).to_numpy() // 1_000_000)
    if pa.types.is_integer(kind):
        return np.asarray(column.to_numpy()).astype(np.int64)
    if not (pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        got, hint = f"type {kind}", "convert the column"
        raise ColumnError(f"time column '{name}' must hold times", where=where, got=got, hint=hint)
    values = np.floor(column.cast(pa.float64()).to_numpy())
    if not np.isfinite(values).all():
        what, got = f"time column '{name}' must be finite", f"{int((~np.isfinite(values)).sum()):,} other values"
        raise ColumnError(what, where=where, got=got, hint="correct or drop those rows")
    return np.asarray(values, np.int64)


def numbers_or_seconds(column: pa.ChunkedArray, name: str, where: object) -> np.ndarray:
    """Return numbers, or times as seconds since 1970, in double precision; missing values are NaN."""
    column = _times_of_texts(column, f"column '{name}' must hold numbers or times", where)
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        column = pc.divide(_utc(column).cast(pa.int64()).cast(pa.float64(), safe=False), 1e6)
    elif not any(getattr(pa.types, f"is_{one}")(kind) for one in ("boolean", "integer", "floating", "null")):
        hint = "convert it, or name another column"
        raise ColumnError(f"column '{name}' must hold numbers or times", where=where, got=f"type {kind}", hint=hint)
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), np.float64)
