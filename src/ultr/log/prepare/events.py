"""Actions from a separate table with one row per event, which is joined to the items shown by request and item ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ultr.errors import ColumnError, OptionError, nearest
from ultr.log.prepare.impressions import id_column, number_column
from ultr.log.schema import ACTION_NAMES, NAMES
from ultr.log.table import RESERVED

TYPE_NAMES = ("event", "event_type", "action", "action_type", "type")
MAX_TYPES = 50  # types of events that may become actions if the caller names no actions
Fetch = Callable[[Any], pa.Table]


@dataclass(frozen=True)
class EventColumns:
    """The names of the columns of a table of events."""

    request: str
    item: str
    kind: str | None = None  # the column with the name of the action, if there is one row per action
    value: str | None = None  # the column with the amount of that action


def event_columns(
    schema: pa.Schema, *, where: object, request: str | None, item: str | None, kind: str | None, value: str | None
) -> EventColumns:
    """Return the columns of a table of events: those that the caller named, or else those with common names."""
    by_lower = {name.lower(): name for name in reversed(schema.names)}

    def one(role: str, named: str | None, common: Sequence[str]) -> str | None:
        if named is not None and named not in schema.names:
            raise ColumnError(f"no column '{named}' for the {role}", where=where, hint=nearest(named, schema.names))
        return named or next((by_lower[name] for name in common if name in by_lower), None)

    ids = {
        "request": one("request", request, NAMES["request"].split()),
        "item": one("item", item, NAMES["item"].split()),
    }
    if missing := next((role for role, name in ids.items() if name is None), None):
        hint = f"name it with --event-{missing}; columns: {', '.join(schema.names[:12])}"
        raise ColumnError(f"found no column for the {missing} of an event", where=where, hint=hint)
    kind = one("event type", kind, TYPE_NAMES)
    if value is not None and kind is None:
        hint = "name the column of the types with --event-type"
        raise OptionError("--event-value needs --event-type", where=where, hint=hint)
    return EventColumns(str(ids["request"]), str(ids["item"]), kind, one("event value", value, ()))


def action_names(
    events: Any, columns: EventColumns, wanted: Sequence[str] | None, *, fetch: Fetch, where: object
) -> tuple[str, ...]:
    """Return the actions of a table of events: those `wanted`, else all event types, else columns with common names."""
    if columns.kind is not None:
        kind = id_column(events[columns.kind], what="event type", where=where).cast("string")
        types = fetch(events.select(kind=kind).filter(kind.notnull()).distinct().limit(MAX_TYPES + 1))
        present = sorted(types["kind"].to_pylist())
        if wanted is None and len(present) > MAX_TYPES:
            got, hint = f"more than {MAX_TYPES} in '{columns.kind}'", "name the actions with --actions"
            raise ColumnError("too many types of events", where=where, got=got, hint=hint)
        unknown = [] if len(present) > MAX_TYPES else [name for name in wanted or () if name not in present]
    else:
        present = [n for n in events.columns if n not in (columns.request, columns.item)]
        unknown = [name for name in wanted or () if name not in present]
        if wanted is None:
            present = [n for n in present if n.lower() in ACTION_NAMES and not events[n].type().is_string()]
    if unknown:
        raise ColumnError(f"no action '{unknown[0]}' among the events", where=where, hint=nearest(unknown[0], present))
    names = tuple(present if wanted is None else wanted)
    if not names:
        hint = "name the column of event types with --event-type, or the columns of actions with --actions"
        raise ColumnError("found no actions among the events", where=where, hint=hint)
    if reserved := RESERVED & set(names):
        what = "an action cannot have the name of another column of a log"
        raise ColumnError(what, where=where, got=f"'{min(reserved)}'", hint="rename the action")
    return names


def actions_by_item(events: Any, columns: EventColumns, names: Sequence[str], *, where: object) -> Any:
    """Return one row per request and item, with each action's amount: the sum of its values, or 1 if it has none."""
    import ibis

    chosen = {
        "event_request": id_column(events[columns.request], what="request", where=where),
        "event_item": id_column(events[columns.item], what="item", where=where),
    }
    summed = set()
    if columns.kind is not None:
        kind = id_column(events[columns.kind], what="event type", where=where).cast("string")
        value = None
        if columns.value is not None:
            value = number_column(events[columns.value], what="event value", where=where)
            summed = set(names)
        for i, name in enumerate(names):
            chosen[f"event_{i}"] = ibis.ifelse(kind == name, 1.0 if value is None else value, 0.0)
    else:
        for i, name in enumerate(names):
            chosen[f"event_{i}"] = number_column(events[name], what="action", where=where)
            if not events[name].type().is_boolean():
                summed.add(name)
    typed = events.select(**chosen)
    totals = {
        f"event_{i}": typed[f"event_{i}"].sum() if name in summed else typed[f"event_{i}"].max()
        for i, name in enumerate(names)
    }
    return typed.group_by(["event_request", "event_item"]).aggregate(**totals)


def with_events(rows: Any, totals: Any, actions: int, count: int, *, where: object) -> Any:
    """Return rows that have `actions` actions with `count` more from the events; 0 for items without events."""
    for role in ("request", "item"):
        in_log, in_events = rows[role].type(), totals[f"event_{role}"].type()
        if in_log.is_string() != in_events.is_string():
            got, hint = f"{in_events} in the events and {in_log} in the log", "convert one of the columns"
            raise ColumnError(f"ids of the {role} must have the same type", where=where, got=got, hint=hint)
    joined = rows.left_join(totals, [rows.request == totals.event_request, rows.item == totals.event_item])
    columns = {name: joined[name] for name in rows.columns}
    added = {f"action_{actions + i}": joined[f"event_{i}"].coalesce(0.0) for i in range(count)}
    return joined.select(**columns, **added)


def event_notes(rows: Any, totals: Any, *, fetch: Fetch) -> list[str]:
    """Return messages about events of items that were not shown, and about items shown twice in a request."""
    stray = totals.anti_join(rows, [totals.event_request == rows.request, totals.event_item == rows.item])
    strays = fetch(stray.aggregate(count=stray.count()))["count"][0].as_py()
    pairs = rows.group_by(["request", "item"]).aggregate(times=rows.count())
    repeated = pairs.filter(pairs.times > 1)
    repeats = fetch(repeated.aggregate(count=repeated.count()))["count"][0].as_py()
    notes = []
    if strays:
        notes.append(f"{strays:,} pairs of request and item have events but are not in the log; they are ignored")
    if repeats:
        notes.append(f"{repeats:,} items were shown more than once in a request; each showing gets all their events")
    return notes
