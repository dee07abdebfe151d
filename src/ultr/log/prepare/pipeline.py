"""`prepare_lists`: check a log of any size, group it by request, and write it as a folder of Parquet files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pyarrow as pa

from ultr.errors import ColumnError, DataError, OptionError, nearest
from ultr.log.build import MAX_WEIGHT, MIN_WEIGHT, Reading
from ultr.log.cleaning import (
    BOT_LEAST,
    BOT_LENGTH,
    HINT,
    MERGED,
    SUSPICIOUS_FILE,
    check_dropped,
    copies_note,
    suspicious_of,
    write_suspicious,
)
from ultr.log.columns import RESERVED_POSITIONS, Columns, as_names, missing_note, resolve_columns
from ultr.log.conditions import EXAMPLE
from ultr.log.labels import Label
from ultr.log.prepare.engines import DuckDB, Engine, Tables, engine_errors, feature_names, find_tables, start_engine
from ultr.log.prepare.events import EventLog
from ultr.log.prepare.folders import (
    FIXED,
    append_shards,
    check_same,
    locked,
    options_of_lists,
    parts_of,
    parts_to_replace,
    reject_known_requests,
    remove_unlisted,
    shard_facts,
)
from ultr.log.prepare.impressions import (
    Events,
    Fetch,
    count_rows,
    event_columns,
    filtered,
    impressions,
    only_shown,
    rounded,
    without_missing_actions,
)
from ultr.log.prepare.nesting import HASH_RANGE, Nesting
from ultr.log.prepare.options import FormatName, Preparation, as_seconds
from ultr.log.shards import SPLITS, Manifest, footer_sum
from ultr.log.sources import open_source
from ultr.log.splits import LARGEST_QUERY, time_bounds
from ultr.log.table import GRID, MOST_GRID_COLUMNS, MOST_GRID_ROWS, RESERVED, check_parquet_name
from ultr.utils.arguments import checked
from ultr.utils.files import atomic_path, output_errors
from ultr.utils.memory import available_memory

# --- Checks -----------------------------------------------------------------------------------------------------------
# Checks of a log before `ultr prepare` writes anything; DuckDB or Spark counts bad values, without the features.

LARGEST = float(np.finfo(np.float32).max)  # the largest number that lists can hold


def column_names(columns: Columns) -> dict[str, str]:
    """Return the columns of requests and positions by role, for `check_rows`; those of a grid have the role `grid`."""
    grid = {"grid": str(columns.position)} if len(columns.places) > 1 else {}
    return {"request": columns.request, "position": str(columns.position), **grid, **columns.context}


def check_rows(rows: Any, names: Mapping[str, str], *, fetch: Fetch, where: object) -> tuple[int, dict[str, int]]:
    """Return the number of rows, and of missing values by action column; raise ColumnError for other bad values.

    `names` maps roles to column names.
    """
    position = rows.position
    counts = {
        "rows": rows.count(),
        "request missing": rows.request.isnull().sum(),
        "position missing": position.isnull().sum(),
        "position negative": (position < 0).sum(),
    }
    if position.type().is_floating():
        counts["position broken"] = ((position % 1 != 0) | (position > 2.0**53) | position.isnan()).sum()
    if "grid" not in names:
        counts["position reserved"] = position.between(GRID, 2 * GRID - 1).sum()
    numbers = [n for n in rows.columns if n.startswith("action_") or n in ("relevance", "weight")]
    for name in numbers:
        value = rows[name]
        low, high = (MIN_WEIGHT, MAX_WEIGHT) if name == "weight" else (0, LARGEST)
        fine = (value >= low) & (value <= high)
        gap = value.isnull()
        if value.type().is_floating():
            fine = fine & ~value.isnan()
            gap = gap | value.isnan() if name.startswith("action_") else gap
        if name.startswith("action_"):
            fine = fine | gap
        counts[f"{name} missing"] = gap.sum()
        counts[f"{name} bad"] = (~fine).sum()
    for name in ("randomised", "time"):
        if name in rows.columns:
            counts[f"{name} missing"] = rows[name].isnull().sum()
    # The keys of `counts` are not valid column names, so the engine gets numbered names in the same order.
    sums = {f"count_{i}": value.cast("int64") for i, value in enumerate(counts.values())}
    results = fetch(rows.aggregate(**sums)).to_pylist()[0]
    bad_rows = {what: results[f"count_{i}"] or 0 for i, what in enumerate(counts)}
    total = int(bad_rows.pop("rows"))
    if not total:
        raise DataError("there are no rows", where=where, hint="check --where, or the query that made the data")
    missing = {}
    for what, count in bad_rows.items():
        if count and what.startswith("action_") and what.endswith("missing"):
            missing[names[what.split()[0]]] = count
        elif count:
            raise _column_error(*what.split(), names=names, count=count, where=where)
    return total, missing


def _column_error(role: str, problem: str, *, names: Mapping[str, str], count: int, where: object) -> ColumnError:
    column, title = names.get(role, role), "action" if role.startswith("action_") else role
    if problem == "missing":
        what = f"column '{column}' has {count:,} missing values"
        what += f", or texts that are not times such as {EXAMPLE}" if role == "time" else ""
        return ColumnError(what, where=where, hint="fill them, or drop those rows")
    hint = "correct or drop the column"
    if problem == "broken":
        what, hint = f"positions in column '{column}' must be whole numbers", "number the places of items: 1, 2, ..."
    elif role == "position" and "grid" in names:
        most = f"rows 0 to {MOST_GRID_ROWS - 1:,}, columns 0 to {MOST_GRID_COLUMNS - 1}"
        what, hint = f"'{column}' must be whole numbers: {most}", "drop rows of items that were not shown"
    elif problem == "reserved":
        what, hint = f"positions in column '{column}' {RESERVED_POSITIONS}", "number the places of items: 1, 2, ..."
    elif role == "position":
        what, hint = f"positions in column '{column}' must not be negative", "drop rows of items that were not shown"
    elif role == "weight":
        what = f"weight column '{column}' must be finite and positive, from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
    else:
        what = f"{title} column '{column}' must be finite and not negative in every row"
    return ColumnError(what, where=where, got=f"other values in {count:,} rows", hint=hint)


def check_requests(
    rows: Any, columns: Columns, names: Mapping[str, str], *, named_query: bool, fetch: Fetch, where: object
) -> tuple[Columns, list[str]]:
    """Raise ColumnError if a request has several values in a column that must have one (weight, segment, ...).

    Return the columns and notes. A query column that the caller did not name is dropped instead of an error.
    """
    roles = [*columns.context, *(("weight",) if columns.weight is not None else ())]
    if not roles:
        return columns, []
    tests = {}
    for role in roles:
        value = rows[role]
        mixed = (value.count() != 0) & (value.count() != rows.count())
        tests[role] = (value.min() != value.max()).coalesce(False) | mixed
    requests = rows.group_by("request").aggregate(**tests)
    counts = fetch(requests.aggregate(**{role: requests[role].sum().cast("int64") for role in roles})).to_pylist()[0]
    notes = []
    if counts.get("query") and not named_query:
        notes.append(f"column '{names['query']}' differs within requests, so it is not used as the query")
        columns = replace(columns, context={role: n for role, n in columns.context.items() if role != "query"})
        del counts["query"]
    for role, count in counts.items():
        if count:
            what = f"column '{names[role]}' ({role}) must have one value per request"
            raise ColumnError(what, where=where, got=f"several in {count:,} requests", hint="correct or drop it")
    return columns, notes


def divides(rows: Any, *, fetch: Fetch) -> bool:
    """Return whether queries can divide a log into splits: none of them has most of the rows, as in a feed."""
    of_query = rows.group_by("query").aggregate(rows=rows.count())
    counts = fetch(of_query.aggregate(largest=of_query["rows"].max(), total=of_query["rows"].sum())).to_pylist()[0]
    return bool(counts["largest"] <= LARGEST_QUERY * counts["total"])


def suspicious_ids(rows: Any, actions: int, *, fetch: Fetch) -> Any:
    """Return the ids of requests with impossible click rates, as an Arrow array; any action counts as a click.

    The engine counts items, clicks and expected clicks of requests; only those with many clicks are fetched.
    """
    import ibis

    clicked = ibis.or_(*(rows[f"action_{i}"] > 0 for i in range(actions))) if actions else ibis.literal(False)
    weight = rows.weight if "weight" in rows.columns else ibis.literal(1.0)
    shown = rows.select("request", "position", clicked=clicked.cast("float64"), weight=weight)
    of_position = shown.group_by("position").aggregate(
        rate=(shown.clicked * shown.weight).sum() / shown.weight.sum(), got=(shown.clicked * shown.weight).sum()
    )
    all_clicks = fetch(of_position.aggregate(clicks=of_position.got.sum()))["clicks"][0].as_py()
    joined = shown.join(of_position.select("position", "rate"), "position")
    of_request = joined.group_by("request").aggregate(
        items=joined.count(), clicks=joined.clicked.sum(), expected=joined.rate.sum(), weight=joined.weight.max()
    )
    many = (of_request["items"] >= BOT_LENGTH) & (of_request.clicks > BOT_LEAST * of_request["items"])
    eager = fetch(of_request.filter(many)).sort_by("request").combine_chunks()
    names = ("items", "clicks", "expected", "weight")
    items, clicks, expected, weights = (eager[name].to_numpy().astype(np.float64) for name in names)
    mask = suspicious_of(items, clicks, expected, weights, all_clicks or 0.0)
    return eager["request"].combine_chunks().filter(pa.array(mask))


def bounds_by_time(rows: Any, validation: float, test: float, *, fetch: Fetch) -> tuple[float, float]:
    """Return the times at which the validation and the test split start, so that they have these shares of requests."""
    first = rows.group_by("request").aggregate(time=rows.time.min())
    counts = fetch(first.group_by("time").aggregate(count=first.count())).sort_by("time")
    return time_bounds(counts["time"].to_numpy(), counts["count"].to_numpy(), validation, test)


# --- Lists ------------------------------------------------------------------------------------------------------------

MIN_MEMORY = 256 << 20  # bytes; an engine gets at least this much
MAX_COLUMNS = 10_000  # because the time to plan a query grows faster than its number of columns
Progress = Callable[[str, int, int], None]  # called with the stage, the rows done, and the total number of rows


@checked
def prepare_lists(
    source: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    append: bool = False,
    replace: Sequence[str] = (),
    progress: Progress = lambda what, done, total: None,
    **options: Any,
) -> Manifest:
    """Group an impression log by request, and write it to the folder `out` as Parquet files with one row per request.

    The log is Parquet, CSV or JSON Lines with one row per item shown, in any order. It is sorted on disk, so it may be
    larger than memory. The result does not depend on the order of the rows or on the engine. `options` are the fields
    of `Preparation`.

    With `append`, the requests of the log are added to the lists in `out`, as the options of these lists say. The old
    shards stay as they are. Until all is written, and after a kill, the folder has the old lists. Files that were
    appended before are not appended again. A request that is in the lists already is an error. With `replace`, such as
    `["date=2026-01-05"]`, the log replaces the requests of these partitions.
    """
    known = [f.name for f in fields(Preparation)]
    if unknown := next((name for name in options if name not in known), None):
        raise OptionError(f"no option '{unknown}'", hint=nearest(unknown, known))
    if append:
        return _append(source, out, progress, replace, options)
    if replace:
        raise OptionError("--replace is an option of --append", hint="pass --append LISTS in place of --out LISTS")
    chosen = Preparation(**options)
    with atomic_path(out, overwrite=overwrite, folder=True) as folder:
        scratch = folder.parent / "scratch"  # in the temporary folder that atomic_path removes
        return _prepare(source, folder, scratch, chosen, progress)


def _append(
    source: str | Path, out: str | Path, progress: Progress, replaces: Sequence[str], options: dict[str, Any]
) -> Manifest:
    with locked(out) as lists:
        manifest, temporary = Manifest.load(lists), lists / ".appending"
        remove_unlisted(lists, manifest)  # of a killed process
        chosen, parts = Preparation(**options_of_lists(manifest, options, where=lists)), parts_of(manifest)
        files = open_source(source).only(chosen.where)
        fingerprint = " ".join([files.fingerprint(), *chosen.where])
        if fingerprint in (part["fingerprint"] for part in parts):
            notes = [f"{files.name} was appended before, so it is not appended again"]
            return replace(manifest, about={**manifest.about, "notes": notes})
        replaced = parts_to_replace(parts, replaces, files, where=lists) if replaces else ()
        partitions = files.partition_values()
        for number in replaced:  # a corrected file without partitions has those that it replaces
            for name in parts[number]["partitions"].keys() - set(files.partitions.names):
                partitions[name] = sorted({*partitions.get(name, ()), *parts[number]["partitions"][name]})
        part = {"source": files.name, "partitions": partitions, "fingerprint": fingerprint}
        with output_errors(lists):
            shutil.rmtree(temporary, ignore_errors=True)  # of a killed process
            (temporary / "new").mkdir(parents=True)
            try:
                added = _prepare(source, temporary / "new", temporary / "scratch", chosen, progress)
                check_same(manifest, added, lists, temporary / "new")
                progress("comparing requests", 0, 0)
                others = [each for number, each in enumerate(parts) if number not in replaced]
                local = replace(chosen, engine="duckdb", master=None)
                with _engine(local, temporary / "scratch") as engine, engine_errors(source):
                    reject_known_requests(engine, lists, others, temporary / "new")
                return append_shards(lists, temporary / "new", added, part, replaced=replaced)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)


def _engine(chosen: Preparation, scratch: Path) -> AbstractContextManager[Engine]:
    memory = max(MIN_MEMORY, available_memory() // 2 if chosen.memory is None else chosen.memory)
    return start_engine(chosen.engine, scratch=scratch, memory=memory, threads=chosen.threads, master=chosen.master)


def _prepare(source: str | Path, folder: Path, scratch: Path, chosen: Preparation, progress: Progress) -> Manifest:
    label = None if chosen.label is None else Label(chosen.label)
    scratch.mkdir()
    log, events = source, None
    if chosen.format is not None:
        progress("reading events", 0, 0)
        log = scratch / "log.parquet"
        events = _write_log(source, chosen.format, log, scratch, chosen, sort=False)
    with open_log(log, chosen, scratch) as (engine, files):
        work = _Work(engine, files, chosen, label, progress)
        if events is not None:
            work.notes, work.where = events.notes, events.source.name
        manifest = work.write(folder, scratch)
    if events is not None:
        about = {**manifest.about, "format": chosen.format, "partitions": events.source.partition_values()}
        manifest = replace(manifest, about=about)
    manifest.save(folder)
    return manifest


def _write_log(
    source: str | Path, name: FormatName, log: Path, scratch: Path, chosen: Preparation, *, sort: bool
) -> EventLog:
    """Write the log of a source of events to a Parquet file; DuckDB does this for all engines."""
    files = open_source(source)
    with _engine(replace(chosen, engine="duckdb", master=None), scratch) as engine, engine_errors(source):
        events = EventLog(cast("DuckDB", engine), files, name, scratch)
        events.write(log, actions=chosen.actions, features=chosen.features, sort=sort)
    return events


@checked
def events_to_log(source: str | Path, out: str | Path, *, overwrite: bool = False, **options: Any) -> EventLog:
    """Write the events of a search engine or tracker as a log: a Parquet file with one row per item shown.

    `options` are the fields of `Preparation`: `format` names the format of the events, and `actions`, `memory` and
    `threads` are used too. The result says in `notes` which events were left out, and why.
    """
    check_parquet_name(out)
    chosen = Preparation(**options)
    used = ("format", "actions", "features", "memory", "threads")
    changed = [f.name for f in fields(Preparation) if f.name not in used and getattr(chosen, f.name) != f.default]
    if chosen.format is None or changed:
        option = f"--{changed[0].replace('_', '-')}" if changed else "no --format"
        hint = "pass a folder of lists as --out, or prepare the log with these options afterwards"
        raise OptionError("a log from events has no such option", got=option, hint=hint)
    with atomic_path(out, overwrite=overwrite) as log, TemporaryDirectory(dir=log.parent) as scratch:
        return _write_log(source, chosen.format, log, Path(scratch), chosen, sort=True)


@contextmanager
def open_log(source: str | Path, chosen: Preparation, scratch: Path) -> Iterator[tuple[Engine, Tables]]:
    """Start the engine of `chosen`, and find the files of a log; `scratch` is a folder for temporary files."""
    files = _find(source, chosen, scratch)
    with _engine(chosen, scratch) as engine, engine_errors(source):
        yield engine, files


def _find(source: str | Path, chosen: Preparation, scratch: Path) -> Tables:
    def ids(schema: pa.Schema) -> Iterable[str | None]:
        columns = resolve_columns(schema, where=source, **chosen.named | {"actions": ()})
        return [*columns.ids, *columns.requests]

    files = find_tables(source, scratch=scratch / "source", ids=ids, where=chosen.where)
    lower = [name.lower() for name in files.schema.names]
    if len(set(lower)) < len(lower):
        twice = next(name for name in lower if lower.count(name) > 1)
        what = "column names must differ by more than case"
        raise ColumnError(what, where=source, got=f"'{twice}' twice", hint="rename one of them")
    return files


class _Work:
    """The work of one `prepare_lists` call: read and check the rows, write the shards, and return their manifest."""

    def __init__(
        self, engine: Engine, source: Tables, chosen: Preparation, label: Label | None, progress: Progress
    ) -> None:
        self.engine, self.source, self.chosen, self.label, self.progress = engine, source, chosen, label, progress
        self.notes: list[str] = []
        self.where = source.name

    def write(self, folder: Path, scratch: Path) -> Manifest:
        self.progress("checking", 0, 0)
        columns, wanted = self._columns()
        table = self.engine.read(self.source)
        seen = filtered(table, self.chosen.where)
        seen, columns, notes = only_shown(seen, columns, self.engine.fetch, self.where)
        self.notes += notes
        rows = impressions(seen, columns, time=self.chosen.time, where=self.where)
        actions = columns.actions
        if self.chosen.events is not None:
            light = replace(columns, features=(), categorical=())
            whole = table if columns.shown is None else seen
            shown = impressions(whole, light, time=self.chosen.time, where=self.where)
            rows, further = self._with_events(rows, shown, actions, wanted, scratch)
            actions = (*actions, *further)
        self._check_actions(actions, columns)
        names = column_names(columns)
        names |= {role: name for role in ("relevance", "weight") if (name := getattr(columns, role)) is not None}
        names |= {f"action_{i}": name for i, name in enumerate(actions)} | {"time": self.chosen.time or ""}
        total, missing = check_rows(rows, names, fetch=self.engine.fetch, where=self.where)
        self.notes += [missing_note(name, count) for name, count in missing.items()]
        rows = without_missing_actions(rows) if missing else rows
        named_query, fetch = self.chosen.query is not None, self.engine.fetch
        columns, notes = check_requests(rows, columns, names, named_query=named_query, fetch=fetch, where=self.where)
        self.notes += notes
        if self.chosen.drop_suspicious:
            rows = self._without_suspicious(rows, actions, folder)
            total = count_rows(rows, self.engine.fetch)
        nesting = self._nesting(rows, columns, actions)
        self.progress("sorting", 0, total)
        requests, kept, copies = self.engine.write(
            rounded(rows), nesting, folder, total=total, progress=lambda done: self.progress("writing", done, total)
        )
        if copies:
            self.notes.append(copies_note(copies))
        if kept + copies < total:
            dropped, request = total - kept - copies, columns.request
            check_dropped(dropped, total - copies, self.chosen.on_duplicates, request, self.where)
            what = f"{dropped:,} rows repeat the item or position of another row of their request"
            self.notes.append(f"{what}; {MERGED[self.chosen.on_duplicates]}")
        return self._manifest(folder, nesting, columns, requests=requests, rows=total)

    def _columns(self) -> tuple[Columns, list[str] | None]:
        """Return the columns of the source, and the actions to take from the table of events (None: all)."""
        named, schema = self.chosen.named, self.source.schema
        wanted: list[str] | None = None
        actions = self.chosen.actions
        if self.chosen.events is not None and actions is not None:
            listed = as_names(actions)
            named["actions"] = [name for name in listed if name in schema.names]
            wanted = [name for name in listed if name not in schema.names]
        columns = resolve_columns(schema, where=self.where, rows=self.source.first_rows, **named)
        self.notes += columns.notes
        if columns.position is None:
            hint = "name it with --position (position=...)"
            raise ColumnError("found no column with the position of each item", where=self.where, hint=hint)
        if not columns.features and not columns.categorical:
            hint = "name them with --features or --categorical"
            raise ColumnError("found no features", where=self.where, hint=hint)
        if len(columns.used) > MAX_COLUMNS:
            got, hint = f"{len(columns.used):,}", "put the features into one column of lists"
            raise ColumnError(f"there must be at most {MAX_COLUMNS:,} columns", where=self.where, got=got, hint=hint)
        if self.chosen.events is not None and columns.item is None:
            what = "events are joined by request and item, but the log has no column of items"
            raise ColumnError(what, where=self.where, hint="name it with --item")
        reading = Reading(where=tuple(self.chosen.where), time=self.chosen.time)
        self.source.check(reading.names(columns, schema.names, self.where), columns)
        return columns, wanted

    def _with_events(
        self, rows: Any, shown: Any, actions: tuple[str, ...], wanted: list[str] | None, scratch: Path
    ) -> tuple[Any, tuple[str, ...]]:
        chosen, where = self.chosen, str(self.chosen.events)

        def text_columns(schema: pa.Schema) -> Iterable[str | None]:
            names = event_columns(schema, chosen, where=where)
            return (names.request, names.item, names.kind, names.id)

        files = find_tables(where, scratch=scratch / "events", ids=text_columns)
        columns = event_columns(files.schema, chosen, where=where)
        files.check(name for name in astuple(columns) if name is not None)
        events = Events(self.engine.read(files), columns, self.engine.fetch, where)
        if chosen.event_id != "":
            events.drop_repeats()
        events.add_ids(rows)
        if chosen.event_window is not None:
            events.drop_outside(chosen.event_window, shown)
        further = events.action_names(wanted)
        if both := set(further) & set(actions):
            what, hint = "the log and its events have the same action", "name the actions to use with --actions"
            raise ColumnError(what, where=where, got=f"'{min(both)}'", hint=hint)
        files.check(further)
        joined = events.joined_to(rows, shown, further, len(actions))
        self.notes += events.notes
        return joined, further

    def _check_actions(self, actions: tuple[str, ...], columns: Columns) -> None:
        if not actions and columns.relevance is None:
            hint = "name them with --actions, or pass a table of events with --events"
            raise ColumnError("found no actions to learn from", where=self.where, hint=hint)
        reserved = RESERVED | ({"label"} if self.label is not None else set())
        if clash := reserved & {*actions, *columns.categorical}:
            what = "an action or category cannot have the name of another column of the lists"
            raise ColumnError(what, where=self.where, got=f"'{min(clash)}'", hint="rename the column")
        if self.label is not None:
            self.label.check_actions(actions)

    def _without_suspicious(self, rows: Any, actions: tuple[str, ...], folder: Path) -> Any:
        """Return the rows without those of requests with impossible click rates, whose ids are written to a file."""
        ids = suspicious_ids(rows, len(actions), fetch=self.engine.fetch)
        write_suspicious(folder, ids)
        what = f"{len(ids):,} requests with impossible click rates are left out"
        self.notes.append(f"{what}; their ids are in {SUSPICIOUS_FILE}" if len(ids) else what)
        return rows.filter(rows.request.notin(ids.to_pylist())) if len(ids) else rows

    def _nesting(self, rows: Any, columns: Columns, actions: tuple[str, ...]) -> Nesting:
        chosen = self.chosen
        validation_from, test_from = self._bounds(rows)
        return Nesting(
            features=feature_names(self.source, columns.features),
            actions=actions,
            categorical=columns.categorical,
            of_rows=tuple(role for role in ("item", "relevance") if getattr(columns, role) is not None),
            of_requests=tuple(columns.context),
            weighted=columns.weight is not None,
            label=self.label,
            by_time=chosen.split == "time",
            by_query=self._splits_by_query(rows, columns),
            validation_from=validation_from,
            test_from=test_from,
            **{name: getattr(chosen, name) for name in FIXED},
        )

    def _splits_by_query(self, rows: Any, columns: Columns) -> bool:
        if self.chosen.split != "hash" or "query" not in columns.context:
            return False
        by_query = self.chosen.by_query
        return divides(rows, fetch=self.engine.fetch) if by_query is None else by_query

    def _bounds(self, rows: Any) -> tuple[float, float]:
        chosen = self.chosen
        if chosen.split == "hash":
            return HASH_RANGE * (1 - chosen.validation - chosen.test), HASH_RANGE * (1 - chosen.test)
        if chosen.validation_from is None and chosen.test_from is None:
            return bounds_by_time(rows, chosen.validation, chosen.test, fetch=self.engine.fetch)
        test_from = float("inf") if chosen.test_from is None else as_seconds(chosen.test_from)
        validation_from = test_from if chosen.validation_from is None else as_seconds(chosen.validation_from)
        if validation_from > test_from:
            got = f"{chosen.validation_from} and {chosen.test_from}"
            raise OptionError("--validation-from must not be later than --test-from", got=got)
        return validation_from, test_from

    def _manifest(self, folder: Path, nesting: Nesting, columns: Columns, *, requests: int, rows: int) -> Manifest:
        self.progress("counting", rows, rows)
        chosen, label = self.chosen, self.label
        _number(folder)
        actions = (*nesting.actions, *(("label",) if label is not None else ()))
        feedback = actions if label is None else ("label",)
        facts = shard_facts(folder, actions=actions, categorical=nesting.categorical, feedback=feedback)
        tied = f"{facts.tied:,} items have the same position as another item of their request"
        if facts.tied and chosen.on_duplicates == "error":
            raise ColumnError(tied, where=self.where, got=f"column '{columns.position}'", hint=HINT)
        if facts.tied:
            order = "such items are ordered by their ids, and then by their other columns"
            self.notes.append(f"{tied}; {order}; on_duplicates=first or sum merges them")
        split: dict[str, Any] = {"by": chosen.split}
        if chosen.split == "hash":
            split |= {"validation": chosen.validation, "test": chosen.test, "by_query": nesting.by_query}
        else:
            bounds = {"validation_from": nesting.validation_from, "test_from": nesting.test_from}
            split |= {"time": chosen.time, **{n: int(v) for n, v in bounds.items() if v != float("inf")}}
        kept = sum(counts["requests"] for counts in facts.splits.values())
        about = {
            "source": self.where,
            "partitions": self.source.source.partition_values(),
            "columns": {**columns.by_role, "actions": list(nesting.actions)},
            "engine": chosen.engine,
            "events": None if chosen.events is None else str(chosen.events),
            "event_window": chosen.event_window,
            "where": list(chosen.where),
            **{name: getattr(chosen, name) for name in FIXED},
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
            footers={f"{p.parent.name}/{p.name}": footer_sum(p) for p in sorted(folder.glob("*/*.parquet"))},
        )


def _number(folder: Path) -> None:
    """Rename the shards of each split to part-00000.parquet and so on, in the order of hashed request ids."""
    for split in SPLITS:
        for number, path in enumerate(sorted((folder / split).glob("*.parquet"))):
            path.rename(path.with_name(f"part-{number:05}.parquet.named"))
        for path in (folder / split).glob("*.named"):
            path.rename(path.with_suffix(""))
