"""Actions that stand in a table of their own, one row per event: joined to the items shown by request and item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ultr.errors import ColumnError, OptionError, nearest
from ultr.log.impressions import id_column, number_column
from ultr.log.schema import ACTION_NAMES, NAMES
from ultr.log.table import RESERVED

TYPE_NAMES = ("event", "event_type", "action", "action_type", "type")
MOST_TYPES = 50
Fetch = Callable[[Any], pa.Table]


@dataclass(frozen=True)
class EventColumns:
    request: str
    item: str
    kind: str | None = None  # the column that names the action, where there is one row per action
    value: str | None = None  # and the one that says how much of it


def event_columns(
    schema: pa.Schema, *, where: object, request: str | None, item: str | None, kind: str | None, value: str | None
) -> EventColumns:
    """The columns of a table of events: those named, or else those of the usual names."""
    by_lower = {name.lower(): name for name in reversed(schema.names)}

    def one(part: str, given: str | None, usual: Sequence[str]) -> str | None:
        if given is not None and given not in schema.names:
            raise ColumnError(f"no column '{given}' for the {part}", where=where, mend=nearest(given, schema.names))
        return given or next((by_lower[name] for name in usual if name in by_lower), None)

    found_request = one("request", request, NAMES["request"].split())
    found_item = one("item", item, NAMES["item"].split())
    for part, found in (("request", found_request), ("item", found_item)):
        if found is None:
            mend = f"name it with --event-{part}; columns: {', '.join(schema.names[:12])}"
            raise ColumnError(f"found no column for the {part} of an event", where=where, mend=mend)
    found_kind = one("event type", kind, TYPE_NAMES)
    if value is not None and found_kind is None:
        raise OptionError("--event-value goes with --event-type", where=where, mend="name the column of the types")
    found_value = one("event value", value, ())
    return EventColumns(str(found_request), str(found_item), found_kind, found_value)


def action_names(
    events: Any, columns: EventColumns, wanted: Sequence[str] | None, *, fetch: Fetch, where: object
) -> tuple[str, ...]:
    """The actions of a table of events: those wanted, or all types, or the columns with usual names."""
    if columns.kind is not None:
        kind = id_column(events[columns.kind], what="event type", where=where).cast("string")
        found = fetch(events.select(kind=kind).filter(kind.notnull()).distinct().limit(MOST_TYPES + 1))
        known = sorted(found["kind"].to_pylist())
        if wanted is None and len(known) > MOST_TYPES:
            got, mend = f"more than {MOST_TYPES} in '{columns.kind}'", "name the actions with --actions"
            raise ColumnError("too many types of events", where=where, got=got, mend=mend)
        unknown = [] if len(known) > MOST_TYPES else [name for name in wanted or () if name not in known]
    else:
        known = [n for n in events.columns if n not in (columns.request, columns.item)]
        unknown = [name for name in wanted or () if name not in known]
        if wanted is None:
            known = [n for n in known if n.lower() in ACTION_NAMES and not events[n].type().is_string()]
    if unknown:
        raise ColumnError(f"no action '{unknown[0]}' among the events", where=where, mend=nearest(unknown[0], known))
    names = tuple(known if wanted is None else wanted)
    if not names:
        mend = "name the column of their types with --event-type, or their own with --actions"
        raise ColumnError("found no actions among the events", where=where, mend=mend)
    if taken := RESERVED & set(names):
        what = "an action cannot have the name of another part of a log"
        raise ColumnError(what, where=where, got=f"'{min(taken)}'", mend="rename it")
    return names


def actions_by_item(events: Any, columns: EventColumns, names: Sequence[str], *, where: object) -> Any:
    """One row per request and item with each action: how much there was of it, or 1 where it is said only that."""
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
    """The rows with the actions of their events after the `actions` of their own, 0 where there was no event."""
    _refuse_other_types(rows, totals, where)
    joined = rows.left_join(totals, [rows.request == totals.event_request, rows.item == totals.event_item])
    own = {name: joined[name] for name in rows.columns}
    found = {f"action_{actions + i}": joined[f"event_{i}"].coalesce(0.0) for i in range(count)}
    return joined.select(**own, **found)


def _refuse_other_types(rows: Any, totals: Any, where: object) -> None:
    for part in ("request", "item"):
        ours, theirs = rows[part].type(), totals[f"event_{part}"].type()
        if ours.is_string() != theirs.is_string():
            got = f"{theirs} where the log has {ours}"
            raise ColumnError(f"ids of the {part} should have one type", where=where, got=got, mend="convert one")


def event_notes(rows: Any, totals: Any, *, fetch: Fetch) -> list[str]:
    """In words: events of no item shown, and items shown more than once in a request."""
    stray = totals.anti_join(rows, [totals.event_request == rows.request, totals.event_item == rows.item])
    strays = fetch(stray.aggregate(count=stray.count()))["count"][0].as_py()
    pairs = rows.group_by(["request", "item"]).aggregate(times=rows.count())
    repeated = pairs.filter(pairs.times > 1)
    repeats = fetch(repeated.aggregate(count=repeated.count()))["count"][0].as_py()
    notes = []
    if strays:
        notes.append(f"{strays:,} pairs of request and item have events but were not shown; they are left out")
    if repeats:
        notes.append(f"{repeats:,} items were shown more than once in a request; each time has all of its events")
    return notes
