"""From an impression log of any size to a folder of sharded lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ultr.arguments import check_fields, checked
from ultr.errors import ColumnError, OptionError, nearest
from ultr.files import atomic_path, refuse_existing
from ultr.labels import Label
from ultr.log.build import as_data_error
from ultr.log.checks import check_rows, differing, refuse_differing, time_bounds
from ultr.log.engines import Engine, connected, engine_errors
from ultr.log.events import EventColumns, action_names, actions_by_item, event_columns, event_notes, with_events
from ultr.log.facts import shard_facts
from ultr.log.impressions import filtered, impressions, rounded, utc_time
from ultr.log.nesting import HASH_RANGE, Nesting
from ultr.log.schema import CONTEXT, Columns, resolve_columns, saved_names
from ultr.log.shards import SPLITS, Manifest, footer_sum
from ultr.log.sources import Source, find_source
from ultr.log.table import FEATURE_NAMES_KEY, RESERVED
from ultr.memory import available_memory

LEAST_MEMORY = 256 << 20
MOST_COLUMNS = 10_000  # that an engine is asked for by name: its query grows with them, and the work on it faster
Progress = Callable[[str, int, int], None]  # what is done, and of how many rows


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How lists are prepared; `ultr prepare --help` says what each option is."""

    engine: str = "duckdb"
    master: str | None = None
    memory: int | None = None  # bytes; half of what is there if not given
    threads: int | None = None
    request: str | None = None
    position: str | None = None
    actions: Sequence[str] | str | None = None
    features: Sequence[str] | str | None = None
    categorical: Sequence[str] | str | None = None
    relevance: str | None = None
    weight: str | None = None
    item: str | None = None
    query: str | None = None
    segment: str | None = None
    randomised: str | None = None
    events: str | Path | None = None
    event_request: str | None = None
    event_item: str | None = None
    event_type: str | None = None
    event_value: str | None = None
    label: str | None = None
    where: Sequence[str] = ()
    min_items: int = 1
    max_items: int | None = None
    keep_clickless: float = 1.0
    split: Literal["hash", "time"] = "hash"
    time: str | None = None
    validation: float = 0.1
    test: float = 0.1
    validation_from: str | None = None
    test_from: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.keep_clickless <= 1:
            raise OptionError("keep_clickless is a rate above 0, at most 1", got=self.keep_clickless)
        if not (min(self.validation, self.test) >= 0 and self.validation + self.test < 1):
            got = f"validation {self.validation}, test {self.test}"
            raise OptionError("shares should not be negative, and leave some for training", got=got)
        if self.min_items < 1 or (self.max_items is not None and self.max_items < self.min_items):
            got = f"{self.min_items} to {self.max_items}"
            raise OptionError("lists have at least one item, and at most not fewer than at least", got=got)
        if self.split not in ("hash", "time"):
            raise OptionError(f"no split by '{self.split}'", mend=nearest(str(self.split), ("hash", "time")))
        if (self.split == "time") != (self.time is not None):
            raise OptionError("a split by time goes with the column of the times", mend="--split time --time COLUMN")
        if self.split == "hash" and (self.validation_from or self.test_from):
            raise OptionError("the times from which to hold out go with a split by time", mend="pass --split time")
        if self.threads is not None and self.threads < 1:
            raise OptionError("there should be a thread at least", got=self.threads)
        if self.events is None and (self.event_request or self.event_item or self.event_type or self.event_value):
            raise OptionError("columns of events go with a table of events", mend="name it with --events")

    @property
    def named(self) -> dict[str, Any]:
        """The columns that the caller names, as `resolve_columns` takes them."""
        parts = ("request", "position", "features", "categorical", "relevance", "weight", "item", *CONTEXT)
        return {part: getattr(self, part) for part in parts} | {"actions": self.actions}


@checked
def prepare_lists(
    source: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
    **options: Any,
) -> Manifest:
    """Group an impression log by request and write it as shards of lists, `out`; `options` are of `Preparation`.

    The log is Parquet or CSV with one row per item shown, in any order. It is sorted by way of the disk, so that memory
    does not grow with it. The same rows give the same lists, whatever their order and the engine.
    """
    known = [f.name for f in fields(Preparation)]
    if unknown := next((name for name in options if name not in known), None):
        raise OptionError(f"no option '{unknown}'", mend=nearest(unknown, known))
    chosen = Preparation(**options)
    label = None if chosen.label is None else Label.of(chosen.label)
    memory = max(LEAST_MEMORY, available_memory() // 2 if chosen.memory is None else chosen.memory)
    refuse_existing(Path(out), overwrite=overwrite, folder=True)
    with atomic_path(out, overwrite=overwrite, folder=True) as folder:
        scratch = folder.parent / "scratch"  # beside the lists, and removed with their temporary place
        scratch.mkdir()
        found = _find(source, chosen, scratch)
        with (
            connected(
                chosen.engine, scratch=scratch, memory=memory, threads=chosen.threads, master=chosen.master
            ) as engine,
            engine_errors(source),
        ):
            manifest = _Work(engine, found, chosen, label, progress).write(folder, scratch)
        manifest.save(folder)
    return manifest


def _find(source: str | Path, chosen: Preparation, scratch: Path) -> Source:
    def ids(schema: pa.Schema) -> Iterable[str | None]:
        columns = resolve_columns(schema, where=source, **chosen.named | {"actions": ()})
        context = (columns.context.get("query"), columns.context.get("segment"))
        return (columns.request, columns.item, *context, *columns.categorical)

    found = find_source(source, scratch=scratch / "source", ids=ids)
    lower = [name.lower() for name in found.schema.names]
    if len(set(lower)) < len(lower):
        twice = next(name for name in lower if lower.count(name) > 1)
        what = "column names should differ by more than case"
        raise ColumnError(what, where=source, got=f"'{twice}' twice", mend="rename one of them")
    return found


class _Work:
    """One preparation: the rows, what is wrong with them, the shards, and what they hold."""

    def __init__(
        self, engine: Engine, source: Source, chosen: Preparation, label: Label | None, progress: Progress
    ) -> None:
        self.engine, self.source, self.chosen, self.label, self.progress = engine, source, chosen, label, progress
        self.notes: list[str] = []
        self.where = source.name

    def write(self, folder: Path, scratch: Path) -> Manifest:
        self.progress("checking", 0, 0)
        columns, wanted = self._columns()
        table = self.engine.read(self.source)
        self._check_time(table.columns)
        rows = impressions(filtered(table, self.chosen.where), columns, time=self.chosen.time, where=self.where)
        actions = columns.actions
        if self.chosen.events is not None:
            shown = impressions(table, replace(columns, features=(), categorical=()), time=None, where=self.where)
            rows, further = self._with_events(rows, shown, actions, wanted, scratch)
            actions = (*actions, *further)
        self._check_actions(actions, columns)
        names = {"request": columns.request, "position": str(columns.position), **columns.context}
        names |= {part: name for part in ("relevance", "weight") if (name := getattr(columns, part)) is not None}
        names |= {f"action_{i}": name for i, name in enumerate(actions)} | {"time": self.chosen.time or ""}
        total = check_rows(rows, names, fetch=self.engine.fetch, where=self.where)
        columns = self._check_requests(rows, columns, names)
        nesting = self._nesting(rows, columns, actions)
        self.progress("sorting", 0, total)
        requests, _ = self.engine.write(
            rounded(rows), nesting, folder, total=total, progress=lambda done: self.progress("writing", done, total)
        )
        return self._manifest(folder, nesting, requests=requests, rows=total)

    def _columns(self) -> tuple[Columns, list[str] | None]:
        """The parts of the source's columns, and the actions that are wanted of a table of events."""
        named, schema = self.chosen.named, self.source.schema
        wanted: list[str] | None = None
        if self.chosen.events is not None and self.chosen.actions is not None:
            given = self.chosen.actions
            listed = [n.strip() for n in given.split(",")] if isinstance(given, str) else list(given)
            named["actions"] = [name for name in listed if name in schema.names]
            wanted = [name for name in listed if name not in schema.names]
        columns = resolve_columns(schema, where=self.where, **named)
        if columns.position is None:
            mend = "name it with --position (position=...)"
            raise ColumnError("found no column that says where an item was shown", where=self.where, mend=mend)
        if not columns.features and not columns.categorical:
            mend = "name them with --features or --categorical"
            raise ColumnError("found no features", where=self.where, mend=mend)
        if len(columns.used) > MOST_COLUMNS:
            got, mend = f"{len(columns.used):,}", "put features into one column 'features', of lists"
            raise ColumnError(f"up to {MOST_COLUMNS:,} columns are prepared", where=self.where, got=got, mend=mend)
        if self.chosen.events is not None and columns.item is None:
            mend = "name its column with --item"
            raise ColumnError(
                "events are joined by request and item, and there is no item", where=self.where, mend=mend
            )
        return columns, wanted

    def _check_time(self, names: Sequence[str]) -> None:
        time = self.chosen.time
        if time is not None and time not in names:
            raise ColumnError(f"no column '{time}' for the time", where=self.where, mend=nearest(time, names))

    def _with_events(
        self, rows: Any, shown: Any, actions: tuple[str, ...], wanted: list[str] | None, scratch: Path
    ) -> tuple[Any, tuple[str, ...]]:
        chosen, where = self.chosen, str(self.chosen.events)
        ids = {"request": chosen.event_request, "item": chosen.event_item}

        def columns_of(schema: pa.Schema) -> EventColumns:
            return event_columns(schema, where=where, **ids, kind=chosen.event_type, value=chosen.event_value)

        def texts(schema: pa.Schema) -> Iterable[str | None]:
            named = columns_of(schema)
            return (named.request, named.item, named.kind)

        found = find_source(where, scratch=scratch / "events", ids=texts)
        columns = columns_of(found.schema)
        events = self.engine.read(found)
        further = action_names(events, columns, wanted, fetch=self.engine.fetch, where=where)
        if both := set(further) & set(actions):
            mend = "name the wanted ones with --actions"
            raise ColumnError(
                "the log and its events both have an action", where=where, got=f"'{min(both)}'", mend=mend
            )
        totals = actions_by_item(events, columns, further, where=where)
        joined = with_events(rows, totals, len(actions), len(further), where=where)
        self.notes += event_notes(shown, totals, fetch=self.engine.fetch)
        return joined, further

    def _check_actions(self, actions: tuple[str, ...], columns: Columns) -> None:
        if not actions and columns.relevance is None:
            mend = "name them with --actions, or the table of them with --events"
            raise ColumnError("found no actions to learn from", where=self.where, mend=mend)
        taken = {"label"} if self.label is not None else set()
        if clash := (RESERVED | taken) & {*actions, *columns.categorical}:
            got, mend = f"'{min(clash)}'", "rename the column"
            raise ColumnError(
                "a column cannot have the name of another part of lists", where=self.where, got=got, mend=mend
            )
        if self.label is not None:
            self.label({name: np.zeros(1) for name in actions}, check=False)  # refuses actions that are not there

    def _check_requests(self, rows: Any, columns: Columns, names: dict[str, str]) -> Columns:
        """Refuse parts of whole requests that differ within one; a query that was only found by its name is none."""
        parts = [*columns.context, *(("weight",) if columns.weight is not None else ())]
        differ = differing(rows, parts, fetch=self.engine.fetch)
        if "query" in differ and self.chosen.query is None:
            self.notes.append(f"column '{names['query']}' differs within requests, so it is not taken for the query")
            columns = replace(columns, context={p: n for p, n in columns.context.items() if p != "query"})
            del differ["query"]
        refuse_differing(differ, names, where=self.where)
        return columns

    def _nesting(self, rows: Any, columns: Columns, actions: tuple[str, ...]) -> Nesting:
        chosen = self.chosen
        validation_from, test_from = self._bounds(rows)
        return Nesting(
            features=_feature_names(self.source, columns.features),
            actions=actions,
            categorical=columns.categorical,
            of_rows=tuple(part for part in ("item", "relevance") if getattr(columns, part) is not None),
            of_requests=tuple(columns.context),
            weighted=columns.weight is not None,
            label=self.label,
            by_time=chosen.split == "time",
            validation_from=validation_from,
            test_from=test_from,
            keep_clickless=chosen.keep_clickless,
            min_items=chosen.min_items,
            max_items=chosen.max_items,
        )

    def _bounds(self, rows: Any) -> tuple[float, float]:
        chosen = self.chosen
        if chosen.split == "hash":
            return HASH_RANGE * (1 - chosen.validation - chosen.test), HASH_RANGE * (1 - chosen.test)
        if chosen.validation_from is None and chosen.test_from is None:
            return time_bounds(rows, chosen.validation, chosen.test, fetch=self.engine.fetch)
        test_from = float("inf") if chosen.test_from is None else _as_number(chosen.test_from)
        validation_from = test_from if chosen.validation_from is None else _as_number(chosen.validation_from)
        if validation_from > test_from:
            got = f"{chosen.validation_from} and {chosen.test_from}"
            raise OptionError("validation comes before the test in time", got=got)
        return validation_from, test_from

    def _manifest(self, folder: Path, nesting: Nesting, *, requests: int, rows: int) -> Manifest:
        self.progress("counting", rows, rows)
        chosen, label = self.chosen, self.label
        _number(folder)
        actions = (*nesting.actions, *(("label",) if label is not None else ()))
        feedback = actions if label is None else ("label",)
        facts = shard_facts(folder, actions=actions, categorical=nesting.categorical, feedback=feedback)
        if facts.tied:
            note = f"{facts.tied:,} items share a position with another of their request"
            self.notes.append(f"{note}; those are ordered by item, and by what they have")
        split: dict[str, Any] = {"by": chosen.split}
        if chosen.split == "hash":
            split |= {"validation": chosen.validation, "test": chosen.test}
        else:
            bounds = {"validation_from": nesting.validation_from, "test_from": nesting.test_from}
            split |= {"time": chosen.time, **{n: int(v) for n, v in bounds.items() if v != float("inf")}}
        kept = sum(counts["requests"] for counts in facts.splits.values())
        about = {
            "source": self.where,
            "engine": chosen.engine,
            "events": None if chosen.events is None else str(chosen.events),
            "where": list(chosen.where),
            "min_items": chosen.min_items,
            "max_items": chosen.max_items,
            "keep_clickless": chosen.keep_clickless,
            "split": split,
            "rows": rows,
            "requests": requests,
            "requests_dropped": requests - kept,
            "notes": self.notes,
        }
        return Manifest(
            features=nesting.features,
            actions=actions,
            positions=facts.positions,
            splits=facts.splits,
            categorical=facts.categorical,
            binary=facts.binary,
            label=None if label is None else label.expression,
            about=about,
            footers={
                f"{path.parent.name}/{path.name}": footer_sum(path) for path in sorted(folder.glob("*/*.parquet"))
            },
        )


def _number(folder: Path) -> None:
    """Give shards plain names, in the order of their hashes."""
    for split in SPLITS:
        for number, path in enumerate(sorted((folder / split).glob("*.parquet"))):
            path.rename(path.with_name(f"part-{number:05}.parquet.named"))
        for path in (folder / split).glob("*.named"):
            path.rename(path.with_suffix(""))


def _as_number(time: str) -> float:
    """A time as seconds, or a number as it is."""
    try:
        return float(time)
    except ValueError:
        pass
    try:
        return utc_time(time).replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise OptionError("a time reads 2024-05-31 or 2024-05-31T12:00, or is a number", got=f"'{time}'") from error


def _feature_names(source: Source, columns: Sequence[str]) -> tuple[str, ...]:
    """The names of all features; lists give one for each of their values, by the length of the first."""
    names: list[str] = []
    saved = saved_names(source.schema, FEATURE_NAMES_KEY)
    for name in columns:
        if not hasattr(source.schema.field(name).type, "value_field"):
            names.append(name)
            continue
        width = _first_length(source, name)
        known = len(columns) == 1 and len(saved) == width
        names += saved if known else [f"{name}[{i}]" for i in range(width)]
    return tuple(names)


def _first_length(source: Source, name: str) -> int:
    for path in source.files:
        with as_data_error(path, "Parquet"), pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=16, columns=[name]):
                if lengths := [len(value) for value in batch.column(name).to_pylist() if value is not None]:
                    return lengths[0]
    raise ColumnError(f"feature column '{name}' has no values", where=source.name, mend="leave it out")
