"""Count the impressions and clicks of a log on an engine (DuckDB, Spark), for logs that are larger than memory.

The counts are those of `counts.log_counts`. Two things differ, because an engine has no order of rows:

- The 256 groups of requests, and samples, follow from the MD5 hash of ids, and not from a random number.
- Held-out likelihoods are not computed.

Estimates from features, and warnings, need rows. They use the requests with the lowest hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
from scipy import sparse

from ultr.bias.audit import AuditOptions, BiasReport, audit_counts, largest_segments, with_pitfalls, without_requests
from ultr.bias.counts import CELLS, MAX_AUDITED_POSITIONS, Counts, LogCounts, check_positions, clicked_rows, count_cells
from ultr.checks.pitfalls import find_pitfalls
from ultr.errors import ColumnError, LabelError, OptionError
from ultr.log import Log, read_log
from ultr.log.columns import Columns, missing_note, resolve_columns
from ultr.log.conditions import parse_conditions
from ultr.log.labels import Label, click_label
from ultr.log.prepare.engines import Engine, Tables, feature_names
from ultr.log.prepare.impressions import (
    count_rows,
    filtered,
    id_column,
    impressions,
    only_shown,
    rounded,
    without_missing_actions,
)
from ultr.log.prepare.options import Preparation
from ultr.log.prepare.pipeline import MIN_MEMORY, check_requests, check_rows, column_names, open_log, suspicious_ids
from ultr.log.sampling import SAMPLE_VALUES
from ultr.log.splits import codes
from ultr.utils.display import begin_stage

GROUPS = 256  # groups of requests, by the first two hexadecimal digits of a hash
MOST_COUNTS = 10_000_000  # counts by item, position and group that are fetched, at most about
COUNT_BYTES = 200  # memory that a fetched count needs, about
PRIME = (1 << 31) - 1  # squares of smaller numbers fit into 64 bits
ROUNDS = (748_932_582, 1_995_689_511, 1_254_013_873, 1_625_943_013)  # random numbers, which make a hash of a position
DIGITS = 12  # hexadecimal digits of a hash that decide about a sample


@dataclass(frozen=True, eq=False)
class EngineAudit:
    """The counts of a log that an engine made, with a sample of its requests."""

    label: str
    rows: int
    whole: LogCounts
    segments: dict[str, LogCounts]
    sample: Log  # of all requests, with their features
    suspicious: pa.Array  # ids of the requests that are not counted
    notes: list[str] = field(default_factory=list)

    def report(self, *, known: dict[str, float] | None = None, bootstrap: int = 50, seed: int = 0) -> BiasReport:
        """Return the results and a verdict, as `audit` does."""
        clicked = clicked_rows(self.sample, self.label)
        has_features = bool(self.sample.feature_names)
        pitfalls = find_pitfalls(self.sample, clicked, sample=self.sample if has_features else None)
        sample = self.kept_sample() if has_features else None
        options = AuditOptions(self.label, bootstrap, seed, known=known or {})
        report = audit_counts(self.whole, self.segments.items(), options, sample)
        return with_pitfalls(report, pitfalls, len(self.suspicious))

    def kept_sample(self) -> Log | None:
        """Return the sample without suspicious requests; None if no request is left."""
        return without_requests(self.sample, self.suspicious) if len(self.suspicious) else self.sample


def count_on_engine(
    source: str,
    chosen: Preparation,
    *,
    label: str | None = None,
    sample_rows: int = 100_000,
    keep_suspicious: bool = False,
) -> EngineAudit:
    """Count a log on the engine of `chosen`, whose columns and conditions it reads; without a label, clicks count.

    The rows are read as they are: rows that repeat a position of their request are an error.
    """
    with TemporaryDirectory(prefix="ultr-") as scratch, open_log(source, chosen, Path(scratch)) as (engine, files):
        return _Work(engine, files, chosen, keep_suspicious=keep_suspicious).count(label, sample_rows)


@dataclass(frozen=True, eq=False)
class EnginePairs:
    """The impressions and clicks of a log by query, item and position, that an engine made."""

    label: str
    table: pa.Table  # with the columns of `count_tables.CountTable`
    counts: LogCounts
    notes: list[str]


def pairs_on_engine(
    source: str, chosen: Preparation, *, label: str | None = None, keep_suspicious: bool = False
) -> EnginePairs:
    """Count a log by query, item and position on the engine of `chosen`, as `count_on_engine` does."""
    with TemporaryDirectory(prefix="ultr-") as scratch, open_log(source, chosen, Path(scratch)) as (engine, files):
        return _Work(engine, files, chosen, keep_suspicious=keep_suspicious).pairs(label)


class _Work:
    """The work of one call."""

    def __init__(self, engine: Engine, source: Tables, chosen: Preparation, *, keep_suspicious: bool) -> None:
        self.engine, self.source, self.chosen, self.keep_suspicious = engine, source, chosen, keep_suspicious
        self.where, self.fetch = source.name, engine.fetch
        self.notes: list[str] = []

    def count(self, label: str | None, sample_rows: int) -> EngineAudit:
        table, columns, chosen_label, total, rows = self._checked(label)
        begin_stage("counting")
        rows, ids = self._without_suspicious(rows)
        suspicious = ids.slice(0, 0) if self.keep_suspicious else ids
        left = len(ids) if self.keep_suspicious else 0
        whole = replace(_log_counts(rows, self.fetch, self._most), suspicious=left)
        segments = {name: _log_counts(part, self.fetch, self._most) for name, part in self._segments(rows)}
        begin_stage("sampling")
        sample = self._sample(table, columns, total, sample_rows)
        return EngineAudit(
            label=chosen_label.expression,
            rows=total,
            whole=whole,
            segments=segments,
            sample=sample,
            suspicious=suspicious,
            notes=self.notes,
        )

    def pairs(self, label: str | None) -> EnginePairs:
        _, columns, chosen_label, _, rows = self._checked(label)
        if columns.item is None:
            raise ColumnError("judgments need item ids", where=self.where, hint="name their column with --item")
        begin_stage("counting")
        rows, ids = self._without_suspicious(rows)
        left_out = 0 if self.keep_suspicious else len(ids)
        self.notes += [f"{left_out:,} suspicious requests, such as those of bots, were left out"] if left_out else []
        keys = [role for role in ("query", "item", "position") if role in rows.columns]
        table = self.fetch(_sums(rows.filter(rows["item"].notnull()), keys)).combine_chunks()
        table = table.sort_by([(name, "ascending") for name in keys])
        return EnginePairs(chosen_label.expression, table, _log_counts(rows, self.fetch, self._most), self.notes)

    def _checked(self, label: str | None) -> tuple[Any, Columns, Label, int, Any]:
        """Check the rows; return the table, its columns, the label, the number of rows, and the columns to count."""
        begin_stage("checking")
        columns = self._columns()
        chosen_label = Label(click_label(columns.actions) if label is None else label)
        chosen_label.check_actions(columns.actions)
        table = filtered(self.engine.read(self.source), self.chosen.where)
        table, columns, notes = only_shown(table, columns, self.fetch, self.where)
        self.notes += notes
        total, rows = self._rows(table, columns, chosen_label)
        return table, columns, chosen_label, total, rows

    def _without_suspicious(self, rows: Any) -> tuple[Any, pa.Array]:
        """Return the rows that are counted, and the ids of suspicious requests."""
        ids = suspicious_ids(rows.mutate(action_0=rows.clicked), 1, fetch=self.fetch)
        if len(ids) and not self.keep_suspicious:
            rows = rows.filter(rows.request.notin(ids.to_pylist()))
        return rows, ids

    @property
    def _most(self) -> int:
        """The most counts that are fetched."""
        if self.chosen.memory is None:
            return MOST_COUNTS
        return min(MOST_COUNTS, max(MIN_MEMORY, self.chosen.memory) // COUNT_BYTES)  # the engine's memory is free then

    def _columns(self) -> Columns:
        rows = self.source.first_rows
        columns = resolve_columns(self.source.schema, where=self.where, rows=rows, **self.chosen.named)
        self.notes += columns.notes
        if columns.position is None:
            hint = "name it with --position"
            raise ColumnError("found no column with the position of each item", where=self.where, hint=hint)
        if "swaps" in columns.context:
            what, hint = "an engine does not compare swaps", "leave out --engine, or pass --swaps '' to ignore them"
            raise OptionError(what, got=f"column '{columns.context['swaps']}'", hint=hint)
        conditions = [condition.column for condition in parse_conditions(self.chosen.where, self.source.schema.names)]
        self.source.check([*columns.used, *conditions], columns)
        return columns

    def _rows(self, table: Any, columns: Columns, label: Label) -> tuple[int, Any]:
        """Check the rows; return their number, and the columns that are counted."""
        light = replace(columns, features=(), categorical=(), relevance=None)
        rows = impressions(table, light, time=None, where=self.where)
        names = column_names(columns)
        names |= {f"action_{i}": name for i, name in enumerate(columns.actions)}
        names |= {} if columns.weight is None else {"weight": columns.weight}
        total, missing = check_rows(rows, names, fetch=self.fetch, where=self.where)
        self.notes += [missing_note(name, count) for name, count in missing.items()]
        rows = rounded(without_missing_actions(rows) if missing else rows)
        named_query, where = self.chosen.query is not None, self.where
        kept, notes = check_requests(rows, columns, names, named_query=named_query, fetch=self.fetch, where=where)
        self.notes += notes
        rows = rows.drop(*(role for role in columns.context if role not in kept.context))
        self._check_repeats(rows, total)
        value = label.on_engine({n: rows[f"action_{i}"].cast("float64") for i, n in enumerate(columns.actions)})
        bad = self.fetch(rows.aggregate(bad=(~((value >= 0) & (value < float("inf")))).coalesce(True).sum()))
        if count := bad["bad"][0].as_py():
            what, hint = f"label '{label.expression}' must be finite and not negative", "use clip(x, low, high)"
            raise LabelError(what, got=f"other values in {count:,} rows", hint=hint)
        return total, _counted_columns(rows, value > 0)

    def _check_repeats(self, rows: Any, total: int) -> None:
        places = rows.select("request", "position").distinct()
        if repeats := total - count_rows(places, self.fetch):
            what = f"{repeats:,} rows have the same request and position as another row"
            hint = "merge them with ultr prepare --on-duplicates first, and pass its lists without --engine"
            raise ColumnError(what, where=self.where, hint=hint)

    def _segments(self, rows: Any) -> Iterator[tuple[str, Any]]:
        """Yield the name and the rows of each of the segments with the most requests."""
        if "segment" not in rows.columns:
            return
        of_request = rows.select("request", "segment").distinct()
        counts = of_request.group_by(values="segment").aggregate(counts=of_request.count())
        for name in largest_segments(self.fetch(counts).sort_by("values").to_pylist()):
            yield name, rows.filter(rows.segment == name)

    def _sample(self, table: Any, columns: Columns, total: int, most: int) -> Log:
        """Return the requests whose hashes are lowest, with features, and with at most about `most` rows."""
        width = len(feature_names(self.source, columns.features)) + len(columns.categorical)
        share = min(most, SAMPLE_VALUES // max(1, width)) / total
        rows = table.select(*columns.used)
        if share < 1:
            request = id_column(rows[columns.request], what="request", where=self.where)
            rows = rows.filter(_hash(request) < _threshold(share))
        fetched = self.fetch(rows).replace_schema_metadata(self.source.schema.metadata)
        sample = read_log(fetched, missing="keep", **self.chosen.named)
        if share < 1:
            what = f"a sample of {len(sample):,} requests, those with the lowest hashes of their ids"
            self.notes.append(f"Warnings, and estimates from features, use {what}.")
        return sample


def _hash(column: Any) -> Any:
    """Return the first digits of the MD5 hash of an Ibis column."""
    return column.cast("string").hexdigest("md5").substr(0, DIGITS)


def _threshold(share: float) -> str:
    """Return the text that this share of hashes is below."""
    return f"{int(share * 16**DIGITS):0{DIGITS}x}"


def _counted_columns(rows: Any, clicked: Any) -> Any:
    """Return the columns that are counted: position, click, weight, group of requests, item and request."""
    import ibis

    weight = rows.weight.cast("float64") if "weight" in rows.columns else ibis.literal(1.0)
    chosen = {
        "request": rows.request,
        "position": rows.position,
        "clicked": clicked.cast("float64"),
        "weight": weight,
        "group": rows.digest.substr(0, 2),
    }
    chosen |= {role: rows[role] for role in ("item", "randomised") if role in rows.columns}
    texts = [role for role in ("query", "segment") if role in rows.columns]  # a join would drop missing values
    return rows.select(**chosen, **{role: rows[role].cast("string").coalesce("") for role in texts})


def _log_counts(rows: Any, fetch: Callable[[Any], pa.Table], most: int) -> LogCounts:
    """Count rows by position, and for each source of evidence, as `counts.log_counts` does in memory."""
    sums = _sums(rows, ["position"], clicks=rows.clicked.sum())
    of_position = fetch(sums).sort_by("position")
    positions = of_position["position"].to_numpy()
    check_positions(len(positions), MAX_AUDITED_POSITIONS)
    about = {"weight": rows.weight.max()}
    about |= {role: rows[role].max() for role in ("query", "randomised") if role in rows.columns}
    requests = rows.group_by("request").aggregate(**about)
    facts = {"requests": requests.count(), "weight": requests.weight.sum()}
    facts |= {"queries": requests["query"].nunique()} if "query" in about else {}
    facts |= {"random": requests.randomised.cast("int64").sum()} if "randomised" in about else {}
    found = fetch(requests.aggregate(**facts)).to_pylist()[0]
    by_query = "query" in about and found["queries"] < found["requests"]
    sources = {
        "randomised": _random_counts(rows, fetch, positions) if found.get("random") else None,
        "items": _item_counts(rows, fetch, positions, ["item", "query"] if by_query else ["item"], most),
    }
    return LogCounts(
        positions=positions,
        shown=of_position["shown"].to_numpy(),
        clicked=of_position["clicked"].to_numpy(),
        clicks=of_position["clicks"].to_numpy().astype(np.int64),
        requests=int(found["requests"]),
        weight=float(found["weight"]),
        groups=GROUPS,
        sources={name: counts for name, counts in sources.items() if counts is not None},
        has_items="item" in rows.columns,
        by_query=by_query,
        random_requests=int(found.get("random") or 0),
    )


def _sums(rows: Any, keys: Sequence[str], **further: Any) -> Any:
    """Return weighted impressions and clicks by the columns `keys`."""
    sums = {"shown": rows.weight.sum(), "clicked": (rows.weight * rows.clicked).sum()}
    return rows.group_by(list(keys)).aggregate(**sums, **further)


def _random_counts(rows: Any, fetch: Callable[[Any], pa.Table], positions: np.ndarray) -> Counts | None:
    """Count the requests in random order as `counts.counted_random` does: a stratum has requests of equal positions."""
    part = rows.filter(rows.randomised)
    of_request = part.group_by("request").aggregate(stratum=_position_hash(part.position).sum())
    found = fetch(_sums(part.inner_join(of_request, "request"), ["stratum", "position", "group"]))
    return _as_counts(found, ["stratum"], positions) if np.any(found["clicked"].to_numpy()) else None


def _position_hash(position: Any) -> Any:
    """Return an integer for each position; sums of them hardly ever agree between different sets of positions."""
    value = position % PRIME
    for number in ROUNDS:
        value = (value * value + number) % PRIME
    return value


def _item_counts(
    rows: Any, fetch: Callable[[Any], pa.Table], positions: np.ndarray, keys: list[str], most: int
) -> Counts | None:
    """Count the items that were clicked and shown at several positions, as `counts.counted_items` does.

    If there are more counts than `most`, those of the items with the lowest hashes are fetched.
    """
    if "item" not in rows.columns:
        return None
    known = rows.filter(rows["item"].notnull())
    totals = {"clicks": known.clicked.sum(), "places": known.position.nunique(), "seen": known.count()}
    of_item = known.group_by(keys).aggregate(**totals)
    moved = of_item.filter((of_item.clicks > 0) & (of_item.places > 1))
    size = fetch(moved.aggregate(items=moved.count(), cells=moved.places.sum(), seen=moved.seen.sum())).to_pylist()[0]
    if not size["items"]:
        return None
    share = min(1.0, CELLS / size["cells"], most / min(size["seen"], GROUPS * size["cells"]))
    counted = moved.select(*keys)
    if share < 1:
        text = counted["item"].cast("string")
        text = text.concat("\x1f", counted["query"]) if len(keys) > 1 else text
        counted = counted.filter(_hash(text) < _threshold(share))
    found = fetch(_sums(known.inner_join(counted, keys), [*keys, "position", "group"]))
    return replace(_as_counts(found, keys, positions), share=share) if len(found) else None


def _as_counts(found: pa.Table, keys: list[str], positions: np.ndarray) -> Counts:
    """Return fetched counts by stratum (the columns `keys`), position and group, in an order that engines share."""
    found = found.sort_by([(name, "ascending") for name in (*keys, "position", "group")]).combine_chunks()
    strata = np.zeros(len(found), np.int64)
    for name in keys:
        values = codes(found[name].combine_chunks()).astype(np.int64)
        strata = strata * (int(values.max()) + 1) + values
    strata = np.unique(strata, return_inverse=True)[1]
    places, shape = np.searchsorted(positions, found["position"].to_numpy()), (len(found), GROUPS)
    named = found["group"].combine_chunks().dictionary_encode()
    group = np.array([int(text, 16) for text in named.dictionary.to_pylist()])[named.indices.to_numpy()]
    shown, clicked = (
        sparse.csr_matrix((found[name].to_numpy().astype(np.float64), (np.arange(len(found)), group)), shape)
        for name in ("shown", "clicked")
    )
    return count_cells(strata, places, shown, clicked, width=len(positions))
