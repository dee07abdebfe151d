"""The options of `prepare_lists`, and their checks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC
from pathlib import Path
from typing import Any, Literal

from ultr.errors import OptionError
from ultr.log.columns import ROLES
from ultr.log.conditions import utc_time
from ultr.log.prepare.engines import EngineName
from ultr.utils.arguments import check_fields

FormatName = Literal["ubi", "ga4", "snowplow", "metarank"]  # of events; `ultr.log.prepare.events` has their fields
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}  # seconds


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The options of `prepare_lists`; `ultr prepare --help` describes each of them."""

    engine: EngineName = "duckdb"
    format: FormatName | None = None  # of the events that the source has; None: it has one row per item shown
    master: str | None = None
    memory: int | None = None  # bytes; None is half of the available memory
    threads: int | None = None
    request: str | None = None
    position: str | None = None
    row: str | None = None
    column: str | None = None
    actions: Sequence[str] | str | None = None
    features: Sequence[str] | str | None = None
    categorical: Sequence[str] | str | None = None
    relevance: str | None = None
    weight: str | None = None
    item: str | None = None
    query: str | None = None
    segment: str | None = None
    randomised: str | None = None
    swaps: str | None = None
    shown: str | None = None
    events: str | Path | None = None
    event_request: str | None = None
    event_item: str | None = None
    event_type: str | None = None
    event_value: str | None = None
    event_id: str | None = None  # None: a common name, or else all columns; empty: events are not compared
    event_time: str | None = None
    event_window: str | None = None
    label: str | None = None
    where: Sequence[str] = ()
    on_duplicates: Literal["keep", "error", "first", "sum"] = "keep"
    min_items: int = 1
    max_items: int | None = None
    keep_clickless: float = 1.0
    drop_suspicious: bool = False
    split: Literal["hash", "time"] = "hash"
    by_query: bool | None = None  # split by the hash of the query; None: if there are enough queries
    time: str | None = None
    validation: float = 0.1
    test: float = 0.1
    validation_from: str | None = None
    test_from: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.keep_clickless <= 1:
            raise OptionError("'keep_clickless' must be above 0 and at most 1", got=self.keep_clickless)
        if not (min(self.validation, self.test) >= 0 and self.validation + self.test < 1):
            got = f"validation {self.validation}, test {self.test}"
            raise OptionError("validation and test must not be negative, and their sum must be below 1", got=got)
        if self.min_items < 1:
            raise OptionError("'min_items' must be at least 1", got=self.min_items)
        if self.max_items is not None and self.max_items < self.min_items:
            what, hint = f"max_items ({self.max_items}) is less than min_items ({self.min_items})", "raise --max-items"
            raise OptionError(what, hint=f"{hint} or lower --min-items")
        if (self.split == "time" or self.event_window) and self.time is None:
            option = "--split time" if self.split == "time" else f"--event-window {self.event_window}"
            raise OptionError(f"{option} needs the column of the times", hint=f"pass {option} --time COLUMN")
        if self.time is not None and self.split != "time" and self.event_window is None:
            hint = "pass --split time or --event-window, or leave out --time"
            raise OptionError("--time is for a split by time and for --event-window", hint=hint)
        if self.split == "hash" and (self.validation_from or self.test_from):
            raise OptionError("--validation-from and --test-from need a split by time", hint="pass --split time")
        if self.threads is not None and self.threads < 1:
            raise OptionError("'threads' must be at least 1", got=self.threads)
        of_events = [f.name for f in fields(self) if f.name.startswith("event_") and getattr(self, f.name) is not None]
        if self.events is None and of_events:
            got = f"--{of_events[0].replace('_', '-')}"
            raise OptionError("the --event-... options need a table of events", got=got, hint="pass it with --events")
        if self.event_time is not None and self.event_window is None:
            raise OptionError("--event-time is for --event-window", hint="pass --event-window, such as 24h")
        if self.event_window is not None:
            parse_window(self.event_window)

    @property
    def named(self) -> dict[str, Any]:
        """The columns that the caller named, by role, as arguments of `resolve_columns`."""
        return {role: getattr(self, role) for role in ROLES}


def as_seconds(time: str) -> float:
    """Return a time as seconds since 1970; a text that is a number is returned as this number."""
    try:
        return float(time)
    except ValueError:
        pass
    try:
        return utc_time(time).replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        hint = "write 2024-05-31, 2024-05-31T12:00 or a number"
        raise OptionError("--validation-from and --test-from must be times", got=f"'{time}'", hint=hint) from error


def parse_window(text: str) -> float:
    """Return the seconds of a length of time such as 30m, 24h or 7d."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*([{''.join(UNITS)}])", text.strip())
    if match is None or not float(match[1]):
        hint = "write a number and a unit (s, m, h, d or w), such as 24h"
        raise OptionError("--event-window must be a length of time", got=f"'{text}'", hint=hint)
    return float(match[1]) * UNITS[match[2]]
