"""Ibis expressions for the rows of a log, and for events that are joined to them, on DuckDB and on Spark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import pyarrow as pa

from ultr.errors import ColumnError, OptionError, nearest
from ultr.log.bins import names_of
from ultr.log.cleaning import RARE
from ultr.log.columns import ACTION_NAMES, NAMES, Columns, not_numbers
from ultr.log.conditions import Condition, parse_conditions, utc_time
from ultr.log.prepare.options import Preparation, parse_window
from ultr.log.table import MOST_GRID_COLUMNS, MOST_GRID_ROWS, RESERVED, SEPARATOR, grid_ids

Fetch = Callable[[Any], pa.Table]  # evaluate an Ibis expression on the engine

# --- Impressions ------------------------------------------------------------------------------------------------------
# Ibis expressions for the rows of a log, which both DuckDB and Spark can evaluate: filters, types and hashes.

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
        meets = getattr(column, COMPARE[condition.compare])(value)
        if condition.orders_times and column.type().is_string():
            times = _as_times(column)
            in_order = getattr(times, COMPARE[condition.compare])(utc_time(condition.value))
            meets = times.notnull().ifelse(in_order, meets)
        table = table.filter(meets)
    return table


def _as_times(texts: Any) -> Any:
    """Return texts in ISO 8601 as times in UTC; other texts are missing values. The engine's own time zone is UTC."""
    return texts.try_cast("timestamp('UTC')").cast("timestamp")


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


def only_shown(table: Any, columns: Columns, fetch: Fetch, where: object) -> tuple[Any, Columns, list[str]]:
    """Return the rows that were shown, as `ultr.log.cleaning.only_shown` does in memory, and notes."""
    if columns.shown is None:
        return table, columns, []
    name, unused = columns.shown, replace(columns, shown=None)
    kind = table[name].type()
    flag = (
        table[name].cast("int64" if kind.is_boolean() else "float64")
        if kind.is_numeric() or kind.is_boolean()
        else None
    )
    counts = {"other": 1, "hidden": 0, "of": 0}
    if flag is not None:
        shown = (flag == 1).coalesce(False)
        acted = reduce(
            or_, (number_column(table[a], what="action", where=where) > 0 for a in columns.actions), shown & ~shown
        )
        facts = {
            "other": ((flag != 0) & (flag != 1)).sum(),
            "hidden": (~shown).sum(),
            "of": table.count(),
            "acted": acted.coalesce(False).sum(),
            "wrong": (acted & ~shown).coalesce(False).sum(),
        }
        counts = {key: int(value or 0) for key, value in fetch(table.aggregate(**facts)).to_pylist()[0].items()}
    if not columns.shown_named and (counts["other"] or counts["hidden"] in (0, counts["of"])):
        return table, unused, []
    if counts["other"]:
        what, hint = f"column '{name}' must have 1 for rows that were shown and 0 for others", "convert the column"
        raise ColumnError(what, where=where, got=f"type {kind}", hint=hint)
    what = f"{counts['wrong']:,} rows with {name} = 0 have feedback"
    if counts["wrong"] > RARE * counts["acted"]:
        if not columns.shown_named:
            return table, unused, [f"column '{name}' does not mark what was shown: {what}"]
        hint = "correct the column, or name another one with --shown; '' means none"
        raise ColumnError(f"{what}, but nobody could see them", where=where, hint=hint)
    rows = f"{counts['hidden']:,} of {counts['of']:,} rows"
    left = f"column '{name}' marks what was shown: {rows} were not; they are left out"
    kept = table.filter((shown | acted).coalesce(False))
    return kept, columns, [left] if counts["hidden"] else []


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
    chosen = {
        "digest": request.cast("string").hexdigest("md5"),
        "request": request,
        "position": _position(table, columns, where),
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
        elif role == "segment":
            values = [_segment_column(table, each, columns, where) for each in columns.segments]
            texts = (value.cast("string").coalesce("") for value in values)
            chosen[role] = values[0] if len(values) == 1 else reduce(lambda a, b: a + SEPARATOR + b, texts)
        else:
            chosen[role] = id_column(table[name], what=role, where=where)
    if time is not None:
        chosen["time"] = seconds_column(table[time], where)
    for i, name in enumerate(columns.categorical):
        chosen[f"category_{i}"] = id_column(table[name], what="categorical", where=where).cast("string")
    if columns.features:
        chosen["features"] = _features(table, columns.features, where)
    return table.select(**chosen)


def _position(table: Any, columns: Columns, where: object) -> Any:
    """Return the position of each row: a number, or the id of its slot in a grid, which is -1 if it has none."""
    if len(columns.places) == 1:
        position = table[columns.position]
        whole = position.type().is_integer()
        return position.cast("int64") if whole else number_column(position, what="position", where=where)
    row, column = (number_column(table[name], what="position", where=where) for name in columns.places)
    inside = row.between(0, MOST_GRID_ROWS - 1) & column.between(0, MOST_GRID_COLUMNS - 1)
    fine = (inside & (row % 1 == 0) & (column % 1 == 0)).coalesce(False)
    return fine.ifelse(grid_ids(row.cast("int64"), column.cast("int64")), -1).cast("int64")


def _segment_column(table: Any, name: str, columns: Columns, where: object) -> Any:
    """Return a column of a segment, or the names of the bins of its numbers."""
    import ibis

    edges = columns.edges[name]
    if not edges:
        return id_column(table[name], what="segment", where=where)
    number = number_column(table[name], what="segment", where=where)
    *lower, highest = names_of(edges)
    bins = [(number < edge, ibis.literal(text)) for edge, text in zip(edges, lower, strict=True)]
    missing = number.isnull() | (number.isnan() if table[name].type().is_floating() else ibis.literal(False))
    return ibis.cases((missing, ibis.null("string")), *bins, else_=highest)


def seconds_column(column: Any, where: object) -> Any:
    """Return times in whole seconds since 1970; numbers are only rounded down."""
    kind = column.type()
    if kind.is_integer():
        return column.cast("int64")
    if kind.is_timestamp() or kind.is_date():
        column = column.cast("timestamp").epoch_seconds()
    elif kind.is_string():  # other texts count as missing values, which are an error
        column = _as_times(column).epoch_seconds()
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


def count_rows(rows: Any, fetch: Fetch) -> int:
    return int(fetch(rows.aggregate(count=rows.count()))["count"][0].as_py())


# --- Events -----------------------------------------------------------------------------------------------------------
# Actions from a separate table with one row per event, which is joined to the items shown by request and item ids.

TYPE_NAMES = ("event", "event_type", "action", "action_type", "type")
ID_NAMES = ("event_id", "event_uuid")
TIME_NAMES = ("event_time", "event_timestamp", "timestamp", "time", "ts")
LATEST = 1e11  # seconds since 1970, in the year 5138; larger numbers are milliseconds
MAX_TYPES = 50  # types of events that may become actions if the caller names no actions
IDS = ("request", "item")  # the roles by which events are joined to the rows of a log


@dataclass(frozen=True)
class EventColumns:
    """The names of the columns of a table of events."""

    request: str
    item: str
    kind: str | None = None  # the column with the name of the action, if there is one row per action
    value: str | None = None  # the column with the amount of that action
    id: str | None = None  # the column with the id of the event; None: repeated events are equal in all columns
    time: str | None = None  # the column with the time of the event, if there is a window


def event_columns(schema: pa.Schema, options: Preparation, *, where: object) -> EventColumns:
    """Return the columns of a table of events: those that the options name, or else those with common names."""
    by_lower = {name.lower(): name for name in reversed(schema.names)}

    def one(role: str, named: str | None, common: Sequence[str]) -> str | None:
        if named is not None and named not in schema.names:
            raise ColumnError(f"no column '{named}' for the {role}", where=where, hint=nearest(named, schema.names))
        return named or next((by_lower[name] for name in common if name in by_lower), None)

    value = options.event_value
    ids = {role: one(role, getattr(options, f"event_{role}"), NAMES[role].split()) for role in IDS}
    if missing := next((role for role, name in ids.items() if name is None), None):
        hint = f"name it with --event-{missing}; columns: {', '.join(schema.names[:12])}"
        raise ColumnError(f"found no column for the {missing} of an event", where=where, hint=hint)
    kind = one("event type", options.event_type, TYPE_NAMES)
    if value is not None and kind is None:
        hint = "name the column of the types with --event-type"
        raise OptionError("--event-value needs --event-type", where=where, hint=hint)
    time = one("time of an event", options.event_time, TIME_NAMES) if options.event_window else None
    if options.event_window and time is None:
        hint = f"name it with --event-time; columns: {', '.join(schema.names[:12])}"
        raise ColumnError("found no column for the time of an event", where=where, hint=hint)
    return EventColumns(
        request=str(ids["request"]),
        item=str(ids["item"]),
        kind=kind,
        value=one("event value", value, ()),
        id=one("id of an event", options.event_id, ID_NAMES) if options.event_id != "" else None,
        time=time,
    )


class Events:
    """The events of a log on an engine; `notes` says which of them are left out."""

    def __init__(self, rows: Any, columns: EventColumns, fetch: Fetch, where: object) -> None:
        self.rows, self.columns, self.fetch, self.where = rows, columns, fetch, where
        self.notes: list[str] = []

    def drop_repeats(self) -> None:
        """Drop the events that repeat the id of another event, or without a column of ids all its columns.

        Of events with the same id, the earliest one is kept. Events without an id are all kept.
        """
        import ibis

        events, columns = self.rows, self.columns
        if columns.id is None:
            unique, what = events.distinct(), "are equal to another event in all columns"
        else:
            first = [columns.time] if columns.time is not None else []
            order = [*first, *(name for name in events.columns if name not in (columns.id, *first))]
            comparable = [events[name] for name in order if not events[name].type().is_nested()]
            place = ibis.row_number().over(ibis.window(group_by=columns.id, order_by=comparable))
            numbered = events.mutate(ultr_place=place)
            unique = numbered.filter((numbered.ultr_place == 0) | numbered[columns.id].isnull()).drop("ultr_place")
            what = f"repeat the id of another event (column '{columns.id}')"
        if repeats := count_rows(events, self.fetch) - count_rows(unique, self.fetch):
            off = "--event-id '' keeps them" if columns.id is None else "--event-id names another column"
            self.notes.append(f"{repeats:,} events {what}; they are left out ({off})")
        self.rows = unique

    def add_ids(self, log: Any) -> None:
        """Add the columns `event_request`, `event_item` and, if there is a window, `event_time`.

        Raise ColumnError if the ids of the log have another type.
        """
        ids = {role: id_column(self.rows[getattr(self.columns, role)], what=role, where=self.where) for role in IDS}
        for role, column in ids.items():
            in_log, in_events = log[role].type(), column.type()
            if in_log.is_string() != in_events.is_string():
                got, hint = f"{in_events} in the events and {in_log} in the log", "convert one of the columns"
                raise ColumnError(f"ids of the {role} must have the same type", where=self.where, got=got, hint=hint)
        chosen = {f"event_{role}": column for role, column in ids.items()}
        if self.columns.time is not None:
            chosen["event_time"] = seconds_column(self.rows[self.columns.time], self.where)
        self.rows = self.rows.mutate(**chosen)

    def drop_outside(self, window: str, shown: Any) -> None:
        """Drop the events before their item was shown, and after the end of the window.

        `shown` has the items shown with their times. Events of items that were not shown stay.
        """
        events = self.rows
        times = shown.group_by(IDS).aggregate(ultr_shown=shown.time.min())
        times = times.select(ultr_request=times.request, ultr_item=times["item"], ultr_shown=times.ultr_shown)
        same = [events.event_request == times.ultr_request, events.event_item == times.ultr_item]
        joined = events.left_join(times, same)
        delay = joined.event_time - joined.ultr_shown
        late, early = (delay > parse_window(window)).coalesce(False), (delay < 0).coalesce(False)
        counts = {
            "missing": joined.event_time.isnull().sum(),
            "late": late.sum(),
            "early": early.sum(),
            "latest": joined.event_time.max(),
            "latest_shown": joined.ultr_shown.max(),
        }
        got = self.fetch(joined.aggregate(**counts)).to_pylist()[0]
        if got["missing"]:
            what = f"column '{self.columns.time}' has {got['missing']:,} missing values"
            raise ColumnError(what, where=self.where, hint="fill them, or drop those events")
        latest = max(got["latest"] or 0, got["latest_shown"] or 0)
        if latest > LATEST:
            what, hint = "times that are numbers must be seconds since 1970", "divide milliseconds by 1000"
            raise ColumnError(what, where=self.where, got=f"{latest}", hint=hint)
        for count, when in ((got["late"], f"more than {window} after"), (got["early"], "before")):
            if count:
                self.notes.append(f"{count:,} events came {when} their item was shown; they are left out")
        self.rows = joined.filter(~(late | early)).select(*events.columns)

    def _kinds(self) -> Any:
        """Return the event type of each event, as an Ibis column of texts."""
        return id_column(self.rows[self.columns.kind], what="event type", where=self.where).cast("string")

    def action_names(self, wanted: Sequence[str] | None) -> tuple[str, ...]:
        """Return the actions: those `wanted`, else all event types, else columns with common names of actions."""
        events, columns = self.rows, self.columns
        if columns.kind is not None:
            kind = self._kinds()
            types = self.fetch(events.select(kind=kind).filter(kind.notnull()).distinct().limit(MAX_TYPES + 1))
            present = sorted(types["kind"].to_pylist())
            if wanted is None and len(present) > MAX_TYPES:
                got, hint = f"more than {MAX_TYPES} in '{columns.kind}'", "name the actions with --actions"
                raise ColumnError("too many types of events", where=self.where, got=got, hint=hint)
            unknown = [] if len(present) > MAX_TYPES else [name for name in wanted or () if name not in present]
        else:
            present = [n for n in events.columns if n not in (columns.request, columns.item)]
            unknown = [name for name in wanted or () if name not in present]
            if wanted is None:
                present = [n for n in present if n.lower() in ACTION_NAMES and not events[n].type().is_string()]
        if unknown:
            what = f"no action '{unknown[0]}' among the events"
            raise ColumnError(what, where=self.where, hint=nearest(unknown[0], present))
        names = tuple(present if wanted is None else wanted)
        if not names:
            hint = "name the column of event types with --event-type, or the columns of actions with --actions"
            raise ColumnError("found no actions among the events", where=self.where, hint=hint)
        if reserved := RESERVED & set(names):
            what = "an action cannot have the name of another column of a log"
            raise ColumnError(what, where=self.where, got=f"'{min(reserved)}'", hint="rename the action")
        return names

    def joined_to(self, rows: Any, shown: Any, names: Sequence[str], first: int) -> Any:
        """Return the rows of a log with the actions `names` from number `first` on; 0 for items without events.

        Note the events of items that were not shown, and items that were shown at several positions.
        """
        totals = self._totals(names)
        stray = totals.anti_join(shown, [totals.event_request == shown.request, totals.event_item == shown["item"]])
        if strays := count_rows(stray, self.fetch):
            what = "pairs of request and item have events but are not in the log"
            self.notes.append(f"{strays:,} {what}; they are ignored")
        pairs = shown.group_by(IDS).aggregate(places=shown.position.nunique())
        if repeats := count_rows(pairs.filter(pairs.places > 1), self.fetch):
            what = "items were shown more than once in a request"
            self.notes.append(f"{repeats:,} {what}; each showing gets all their events")
        joined = rows.left_join(totals, [rows.request == totals.event_request, rows["item"] == totals.event_item])
        added = {f"action_{first + i}": joined[f"event_{i}"].coalesce(0.0) for i in range(len(names))}
        return joined.select(**{name: joined[name] for name in rows.columns}, **added)

    def _totals(self, names: Sequence[str]) -> Any:
        """Return one row per request and item, with the amount of each action: the sum of its values, or 1 without."""
        import ibis

        events, columns = self.rows, self.columns
        amounts, summed = [], set()
        if columns.kind is not None:
            kind, value = self._kinds(), 1.0
            if columns.value is not None:
                value = number_column(events[columns.value], what="event value", where=self.where)
                summed = set(names)
            amounts = [ibis.ifelse(kind == name, value, 0.0) for name in names]
        else:
            amounts = [number_column(events[name], what="action", where=self.where) for name in names]
            summed = {name for name in names if not events[name].type().is_boolean()}
        chosen = {f"event_{i}": amount for i, amount in enumerate(amounts)}
        typed = events.select("event_request", "event_item", **chosen)
        totals = {
            column: typed[column].sum() if name in summed else typed[column].max()
            for column, name in zip(chosen, names, strict=True)
        }
        return typed.group_by(["event_request", "event_item"]).aggregate(**totals)
