"""The conversion of events of a search engine or tracker to a log, on DuckDB.

`EventLog` reads the records of a format, and writes a log with one row per item shown. Each record that is not used is
counted, with the reason.
"""

# ruff: noqa: S608 - the parts of queries are constants of this module, or quoted by `_text` and `_name`

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ultr.errors import ColumnError, DataError
from ultr.log.columns import as_data_error, as_names, some
from ultr.log.prepare.engines import DuckDB
from ultr.log.prepare.formats import FORMATS, JSON, NUMBER, TEXT, Fields
from ultr.log.prepare.impressions import MAX_TYPES
from ultr.log.prepare.options import FormatName
from ultr.log.sources import Source, SourceFile
from ultr.log.table import ACTIONS_KEY, RESERVED

LARGEST_POSITION = 1_000_000
LATEST = 253_402_300_799_000_000  # microseconds since 1970, at the end of the year 9999
MAX_ATTRIBUTES = 1_000  # numbers of an item that become features
MAX_KEYS = 10_000  # sets of attributes
NUMBERS = {  # types of DuckDB
    *(
        "tinyint",
        "smallint",
        "integer",
        "bigint",
        "hugeint",
        "utinyint",
        "usmallint",
        "uinteger",
        "ubigint",
        "uhugeint",
    ),
    *("float", "double", "decimal", "boolean"),
}
FEATURE = "feature_"  # the names of features start with this
LEFT_OUT = "they are left out"
NO_ITEMS = "show no items, and only the text of their query is used"
PLACED = "listed AND coalesce(place, ordinal) IS NOT NULL"  # the items that were shown, and whose position is known

# --- SQL --------------------------------------------------------------------------------------------------------------


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _name(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'


def _type(fields: Fields) -> str:
    """Return the type of DuckDB for fields of records."""
    if isinstance(fields, str):
        return fields
    if isinstance(fields, list):
        return f"{_type(fields[0])}[]"
    return f"STRUCT({', '.join(f'{_name(name)} {_type(each)}' for name, each in fields.items())})"


def _converted(value: str, kind: pa.DataType, fields: Fields, depth: int = 0) -> str:
    """Return an SQL expression that converts a value in Parquet to the type of fields; NULL if it cannot be.

    A struct in place of JSON stays a struct.
    """
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):  # nested values may be stored as JSON
        if fields in (TEXT, NUMBER):
            return f"TRY_CAST({value} AS {fields})"
        text = f"TRY_CAST({value} AS JSON)"
        return text if fields == JSON else f"json_transform({text}, {_text(json.dumps(fields))})"
    if fields == JSON and pa.types.is_struct(kind):
        return value
    if isinstance(fields, str):
        return f"to_json({value})" if fields == JSON else f"TRY_CAST({value} AS {fields})"
    if isinstance(fields, list) and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        each = f"v{depth}"
        return f"[{_converted(each, kind.value_type, fields[0], depth + 1)} FOR {each} IN {value}]"
    if isinstance(fields, dict) and pa.types.is_struct(kind):
        inner = {column.name: column.type for column in kind}
        parts = [
            f"{_name(name)} := "
            + (
                _converted(f"{value}.{_name(name)}", inner[name], each, depth)
                if name in inner
                else f"NULL::{_type(each)}"
            )
            for name, each in fields.items()
        ]
        return f"struct_pack({', '.join(parts)})"
    return f"NULL::{_type(fields)}"


def _microseconds(text: str) -> str:
    """Return an SQL expression for a time: ISO 8601, or seconds, milli-, micro- or nanoseconds since 1970."""
    number, size = f"TRY_CAST({text} AS DOUBLE)", f"abs(TRY_CAST({text} AS DOUBLE))"
    factor = f"CASE WHEN {size} < 1e11 THEN 1e6 WHEN {size} < 1e14 THEN 1e3 WHEN {size} < 1e17 THEN 1 ELSE 1e-3 END"
    iso, numeric = f"epoch_us(TRY_CAST({text} AS TIMESTAMPTZ))", f"TRY_CAST({number} * {factor} AS BIGINT)"
    time = f"CASE WHEN {text}[5] = '-' THEN {iso} ELSE {numeric} END"
    return f"CASE WHEN {time} BETWEEN 0 AND {LATEST} THEN {time} END"


# --- The log ----------------------------------------------------------------------------------------------------------


class EventLog:
    """The conversion of events to a log on DuckDB; `notes` says what was not used, `counts` has the numbers."""

    def __init__(self, engine: DuckDB, source: Source, name: FormatName, scratch: Path) -> None:
        self.engine, self.source, self.name, self.format = engine, source, name, FORMATS[name]
        self.items, self.pairs = (_text(str(scratch / f"{each}.parquet")) for each in ("items", "pairs"))  # of queries
        self.notes: list[str] = []
        self.counts: dict[str, int] = {}

    def write(
        self, target: Path, *, actions: Sequence[str] | str | None, features: Sequence[str] | str | None, sort: bool
    ) -> None:
        """Write the log to a Parquet file; `actions` and `features` name columns that it must have."""
        items = self._items()
        if self.source.kind == "Parquet":
            self.items = f"({items})"  # it is faster to read them again than to write them
        else:
            self._copy(items, self.items)
        self._count_left_out()
        applications = self._number_applications()
        names = self._actions(actions)
        numbers = self._features([name for name in as_names(features or ()) if name.startswith(FEATURE)])
        self._write_pairs(names, numbers)
        self._write_log(target, names, list(numbers), applications=applications, sort=sort)

    def _run(self, query: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self.engine.backend.con.execute(query).fetchall()
        return rows

    def _copy(self, query: str, path: str, options: str = "") -> None:
        self._run(f"COPY ({query}) TO {path} (FORMAT parquet{options})")

    def _note(self, count: int, what: str) -> None:
        if count:
            self.notes.append(f"{count:,} {what}")

    def _records(self) -> str:
        """Return a query for all records as structs `e`, which are NULL if a record is not valid."""
        fields = self.format.fields
        if self.source.kind == "Parquet":
            parts = []
            for file in self.source.files:
                with as_data_error(file, "Parquet"), file.parquet() as opened:
                    kinds = {column.name: column.type for column in opened.schema_arrow}
                record = pa.struct(list(kinds.items()))
                value = _converted("r", record, dict(fields))
                columns = ", ".join(_name(name) for name in fields if name in kinds) or "1"
                path = _text(self.engine.path(file))
                parts.append(f"SELECT {value} AS e FROM (SELECT {columns} FROM read_parquet({path})) AS r")
            return " UNION ALL ".join(parts)
        if self.source.kind != "JSON Lines":
            hint = "convert them to JSON Lines or Parquet"
            raise DataError("events must be JSON or Parquet", where=self.source.name, got=self.source.kind, hint=hint)
        parts = []
        for form in ("array", "newline_delimited"):
            files = [file for file in self.source.files if _is_array(file) == (form == "array")]
            if files:
                paths = ", ".join(_text(self.engine.path(file)) for file in files)
                parts.append(f"SELECT json FROM read_json_objects([{paths}], format='{form}', ignore_errors=true)")
        records = " UNION ALL ".join(parts)
        wrapped = self._run(f"SELECT count(*) FROM ({records} LIMIT 100) WHERE json_exists(json, '$._source')")[0][0]
        value = "json -> '$._source'" if wrapped else "json"
        return f"SELECT json_transform({value}, {_text(json.dumps(fields))}) AS e FROM ({records})"

    def _items(self) -> str:
        """Return a query for one row per record and item, with the reason if it cannot be used."""
        each = self.format
        names = ("request", "user", "listing", "query", "application", "ordered")
        request = each.request if not each.attributed else f"CASE WHEN {each.listed} THEN {each.request} END"
        values = {name: getattr(each, name) for name in names} | {"request": request}
        columns = ", ".join(f"{value} AS {_name(name)}" for name, value in values.items())
        of_records = f"""
            SELECT e IS NULL AS invalid, coalesce({each.listed}, false) AS listed,
                nullif(trim(lower({each.action})), '') AS act, {_microseconds(f"({each.time})")} AS time, {columns},
                CASE WHEN len({each.items}) > 0 THEN {each.items} ELSE [NULL] END AS items
            FROM ({self._records()})"""
        position = "TRY_CAST(x.position AS DOUBLE)"
        whole = f"{position} BETWEEN 0 AND {LARGEST_POSITION} AND {position} % 1 = 0"
        positions = f"[TRY_CAST({position} AS BIGINT) FOR x IN items IF {whole}]"
        distinct = f"len(CASE WHEN len(items) = 1 THEN {positions} ELSE list_distinct({positions}) END)"
        placed = f"SELECT *, {distinct} = len(items) AS placed FROM ({of_records})"
        numbered = "unnest(items) AS x, unnest(range(1, len(items) + 1)) AS number"
        unnested = f"SELECT * EXCLUDE (items), {numbered} FROM ({placed})"
        renamed = " ".join(f"WHEN {_text(old)} THEN {_text(new)}" for old, new in each.renamed.items())
        action = f"CASE act {renamed} ELSE act END" if renamed else "act"
        missing = "coalesce({}, '') = ''"
        reasons = {
            "are not valid JSON": "invalid",
            f"are neither lists nor actions of {self.name}": "NOT listed AND act IS NULL",
            NO_ITEMS: f"listed AND number = 1 AND NOT {missing.format('query')} AND {missing.format('x.item')}",
            "name no item": missing.format("x.item"),
        }
        if each.attributed:
            reasons["name no user"] = missing.format('"user"')
            reasons["have no time that can be read"] = "time IS NULL"
        else:
            reasons["have no id of the request"] = missing.format("request")
        cases = " ".join(f"WHEN {condition} THEN {_text(reason)}" for reason, condition in reasons.items())
        ordinal = f"CASE WHEN placed THEN TRY_CAST({position} AS BIGINT) END"
        return f"""SELECT CASE {cases} END AS reason, listed, CASE WHEN NOT listed THEN {action} END AS action, request,
                "user", coalesce(listing, '') AS listing, CASE WHEN number = 1 THEN "query" END AS "query",
                application, x.item AS item, time, CASE WHEN listed THEN {ordinal} END AS ordinal,
                CASE WHEN listed AND NOT placed AND ordered THEN number END AS place,
                CASE WHEN listed THEN x.attributes END AS attributes
            FROM ({unnested})"""

    def _count_left_out(self) -> None:
        """Count the records by reason, action and application, and note those that cannot be used."""
        self._run(
            f"""CREATE TEMP TABLE ultr_facts AS SELECT reason, listed, application, action, count(*) AS n,
                count(*) FILTER (WHERE time IS NULL) AS timeless, count(*) FILTER (WHERE place = 1) AS fallen,
                min(ordinal) AS first, bool_or("query" != '') AS has_query
            FROM {self.items} GROUP BY reason, listed, application, action"""
        )
        rows = self._run(
            """SELECT reason, sum(n)::BIGINT, array_to_string(list_sort(array_agg(DISTINCT action))[1:5], ', ')
            FROM ultr_facts WHERE reason IS NOT NULL GROUP BY reason ORDER BY reason"""
        )
        for reason, count, actions in rows:
            self.counts[reason] = count
            kinds, left_out = f" ({actions})" if actions else "", "" if reason == NO_ITEMS else f"; {LEFT_OUT}"
            self._note(count, f"events {reason}{kinds}{left_out}")
        lists, timeless, fallen, events = self._run(
            """SELECT count(*) FILTER (WHERE listed AND reason IS NULL), sum(timeless) FILTER (WHERE reason IS NULL),
                sum(fallen) FILTER (WHERE reason IS NULL), count(*) FROM ultr_facts"""
        )[0]
        if not events:
            raise DataError("there are no events", where=self.source.name, hint="check how they were exported")
        if not lists:
            what = f"no event of the format {self.name} says which items were shown"
            got = "; ".join(f"{count:,} events {reason}" for reason, count in self.counts.items()) or "only actions"
            raise DataError(what, where=self.source.name, got=got, hint=self.format.no_lists)
        self._note(int(timeless), "events have no time that can be read; their time is missing in the log")
        if self.format.attributed:
            what = "lists have missing or repeated positions; the order of their items is the position"
            self._note(int(fallen), what)

    def _used(self) -> str:
        """Return a query for the rows that are used; each has a request, except actions without a list before them."""
        rows = f"(SELECT * FROM {self.items} WHERE reason IS NULL)"
        if not self.format.attributed:
            return rows
        # The latest list of the user with the item, and of the same name if the action has the name of a list.
        lists = f"""SELECT "user", item, time, request, unnest(list_distinct([listing, ''])) AS listing
            FROM {rows} WHERE listed"""
        return f"""(SELECT * FROM {rows} WHERE listed UNION ALL BY NAME SELECT a.* REPLACE (s.request AS request)
            FROM (SELECT * FROM {rows} WHERE NOT listed) AS a ASOF LEFT JOIN ({lists}) AS s ON a."user" = s."user"
            AND a.item = s.item AND a.listing = s.listing AND a.time >= s.time)"""

    def _number_applications(self) -> int:
        """Make a table of applications with the number to add to their positions, so that all start from 1.

        Return how many there are, where events without an application count as one more; 0 if no event has one.
        """
        self._run(
            """CREATE TEMP TABLE ultr_applications AS
                SELECT application, (min(first) = 0)::INT AS shift,
                    row_number() OVER (ORDER BY application NULLS LAST) AS code
                FROM ultr_facts WHERE reason IS NULL GROUP BY application"""
        )
        shifted = self._run("SELECT coalesce(application, '') FROM ultr_applications WHERE shift = 1 ORDER BY 1")
        if shifted:
            of = f" of {some([repr(name) for (name,) in shifted], 5)}" if shifted != [("",)] else ""
            self.notes.append(f"positions{of} start at 0; the log has them from 1")
            starts = self._run(
                f"""SELECT count(*) FILTER (WHERE first = 0), count(*) FILTER (WHERE first = 1) FROM (SELECT
                    min(ordinal) AS first FROM {self.items} JOIN ultr_applications USING (application)
                    WHERE shift = 1 AND reason IS NULL GROUP BY request)"""
            )[0]
            if min(starts) > 0.1 * sum(starts):
                self._note(
                    starts[1], f"of these lists start at 1 and {starts[0]:,} at 0: check how positions are counted"
                )
        return int(
            self._run("SELECT CASE WHEN count(application) > 0 THEN count(*) ELSE 0 END FROM ultr_applications")[0][0]
        )

    def _actions(self, wanted: Sequence[str] | str | None) -> list[str]:
        query = "SELECT DISTINCT action FROM ultr_facts WHERE reason IS NULL AND action IS NOT NULL"
        present = sorted(name for (name,) in self._run(f"{query} LIMIT {10 * MAX_TYPES}"))
        names = present if wanted is None else as_names(wanted)
        absent = [name for name in names if name.lower() not in present]
        self.notes += [f"no event has the action '{name}'; it is 0 in all rows" for name in absent]
        if len(names) > MAX_TYPES:
            got, hint = f"{len(names)}: {some(names, 5)}", "name the actions to use with --actions"
            raise ColumnError("too many actions", where=self.source.name, got=got, hint=hint)
        others = {*RESERVED, "time", "application", "shown"}
        if clash := [n for n in names if n in others or n.startswith(FEATURE) or not n.isprintable()]:
            what = "an action has a name that no column of actions can have"
            hint = "name the actions to use with --actions"
            raise ColumnError(what, where=self.source.name, got=f"'{clash[0]}'", hint=hint)
        if unused := sorted({*present} - {name.lower() for name in names}):
            self.notes.append(f"events of other actions are left out: {some(unused, 5)}")
        return names

    def _features(self, wanted: Sequence[str]) -> dict[str, str]:
        """Return the name of each feature, and the key of an item's attributes that has its numbers."""
        kind = self.engine.backend.con.sql(f"SELECT attributes FROM {self.items}").types[0]
        self.typed = kind.id == "struct"
        kinds = {key: each.id for key, each in kind.children} if self.typed else dict.fromkeys(self._keys(), "json")
        self.keys = set(kinds)
        lower = Counter(key.lower() for key in kinds)
        keys = [key for key in kinds if key.strip() and lower[key.lower()] == 1]
        features, others = dict[str, str](), [key for key in kinds if key not in keys]
        if keys:
            bad = [f"json_type(v.{_name(key)}) IN ('VARCHAR', 'OBJECT', 'ARRAY')" for key in keys]
            bad = [str(kinds[key] not in NUMBERS) if self.typed else each for key, each in zip(keys, bad, strict=True)]
            given = [f"v.{_name(key)} IS NOT NULL" for key in keys]
            sums = ", ".join(f"bool_or({test})" for tests in zip(given, bad, strict=True) for test in tests)
            (facts,) = self._run(f"SELECT {sums} FROM (SELECT {self._values(keys, JSON)} AS v FROM {self.items})")
            for key, has_values, other in zip(keys, facts[::2], facts[1::2], strict=True):
                if has_values and other:
                    others.append(key)
                elif has_values:
                    features[FEATURE + key] = key
        if others:
            self.notes.append(f"attributes of items that are no numbers are not read: {some(sorted(others), 5)}")
        features |= {name: name.removeprefix(FEATURE) for name in wanted if name not in features}
        return dict(sorted(features.items()))

    def _keys(self) -> list[str]:
        """Return the keys of the attributes of all items, which are JSON."""
        rows = f"(SELECT attributes FROM {self.items} WHERE json_type(attributes) = 'OBJECT')"
        found = self._run(f"SELECT DISTINCT json_keys(attributes) FROM {rows} LIMIT {MAX_KEYS + 1}")
        keys = sorted({key for (each,) in found for key in each})
        if len(keys) > MAX_ATTRIBUTES or len(found) > MAX_KEYS:
            got, hint = f"{len(keys):,}: {some(keys, 5)}", "use the same keys in all events"
            raise ColumnError("items have too many attributes", where=self.source.name, got=got, hint=hint)
        return keys

    def _values(self, keys: Iterable[str], kind: str) -> str:
        """Return an SQL expression for the attributes of an item as a struct; values of JSON get the type `kind`."""
        if self.typed:
            return "attributes"
        return f"json_transform(attributes, {_text(json.dumps(dict.fromkeys(keys, kind)))})"

    def _write_pairs(self, actions: Sequence[str], features: Mapping[str, str]) -> None:
        """Write one row per request and item: a sum of all its events that needs no memory per event."""
        values = f", {self._values(features.values(), NUMBER)} AS v" if features else ""
        rows = f"""SELECT e.* EXCLUDE (attributes){values}, a.code, a.shift FROM {self._used()} AS e
            JOIN ultr_applications AS a ON e.application IS NOT DISTINCT FROM a.application"""
        sums = [
            f"coalesce(max(CASE WHEN action = {_text(n.lower())} THEN 1 ELSE 0 END), 0)::TINYINT AS a{i}"
            for i, n in enumerate(actions)
        ]
        known = features.values() if not self.typed else self.keys
        numbers = [
            f"TRY_CAST(v.{_name(key)} AS DOUBLE)" if key in known else "NULL::DOUBLE" for key in features.values()
        ]
        sums += [f"min({number}) FILTER (WHERE listed) AS f{i}" for i, number in enumerate(numbers)]
        self._copy(
            f"""SELECT request, item, bool_or(listed) AS listed, bool_or(listed AND place IS NULL) AS tracked,
                bool_or(NOT listed) AS acted, min(place) AS place, min(ordinal + shift) AS ordinal,
                count(*) FILTER (WHERE listed AND place IS NULL) AS impressions, count(place) AS places,
                count(*) FILTER (WHERE NOT listed) AS actions, min(time) FILTER (WHERE listed) AS time,
                min(code) AS code {"".join(f", {each}" for each in sums)}
            FROM ({rows}) GROUP BY request, item""",
            self.pairs,
        )

    def _write_log(
        self, target: Path, actions: Sequence[str], features: Sequence[str], *, applications: int, sort: bool
    ) -> None:
        both = self._count_pairs()
        query = f"""SELECT request, max("query") AS "query" FROM {self.items}
            WHERE "query" != '' AND request != '' AND listed GROUP BY request"""
        has_query = self._run("SELECT bool_or(has_query) FROM ultr_facts WHERE listed")[0][0]
        columns = ["p.request", "p.item", "coalesce(place, ordinal) AS position", "make_timestamp(time) AS time"]
        joins = ""
        if has_query:
            columns.append('q."query"')
            joins += f" LEFT JOIN ({query}) AS q ON p.request = q.request"
        if applications == 1:
            columns.append("(SELECT application FROM ultr_applications) AS application")
        elif applications > 1:
            columns.append("a.application")
            codes = f"SELECT request, min(code) AS code FROM {self.pairs} GROUP BY request"
            joins += f" LEFT JOIN ({codes}) AS c ON p.request = c.request"
            joins += " LEFT JOIN ultr_applications AS a ON c.code = a.code"
        if both:  # of requests whose impressions are tracked, items without events were not shown
            columns.append("(t.request IS NULL OR tracked OR acted)::TINYINT AS shown")
            joins += (
                f" LEFT JOIN (SELECT DISTINCT request FROM {self.pairs} WHERE tracked) AS t ON p.request = t.request"
            )
        columns += [f"a{i} AS {_name(name)}" for i, name in enumerate(actions)]
        columns += [f"f{i} AS {_name(name)}" for i, name in enumerate(features)]
        rows = f"SELECT {', '.join(columns)} FROM {self.pairs} AS p{joins} WHERE {PLACED}"
        order = " ORDER BY p.request, position, p.item" if sort else ""
        metadata = f", KV_METADATA {{{_text(ACTIONS_KEY.decode())}: {_text(json.dumps(list(actions)))}}}"
        self._copy(rows + order, _text(str(target)), metadata)

    def _count_pairs(self) -> bool:
        """Count what the log leaves out; return whether it has both lists of results and impressions."""
        again = "greatest(impressions - 1, 0) + greatest(places - 1, 0)"
        counts = {
            "rows": f"count(*) FILTER (WHERE {PLACED})",
            "unplaced": f"coalesce(sum(impressions + actions) FILTER (WHERE listed AND NOT ({PLACED})), 0)",
            "stray": "coalesce(sum(actions) FILTER (WHERE NOT listed), 0)",
            "repeated": f"coalesce(sum({again}) FILTER (WHERE listed), 0)",
            "unlisted": "count(*) FILTER (WHERE tracked AND place IS NULL)",
            "moved": "count(*) FILTER (WHERE place IS NOT NULL AND ordinal IS NOT NULL AND place != ordinal)",
            "of_lists": "count(place)",
            "tracked": "count(*) FILTER (WHERE tracked)",
        }
        row = self._run(f"SELECT {', '.join(counts.values())} FROM {self.pairs}")[0]
        found = {name: int(value) for name, value in zip(counts, row, strict=True)}
        self.counts |= {name: found[name] for name in ("rows", "unplaced", "stray", "repeated")}
        self._note(found["unplaced"], f"events of items without a position; {LEFT_OUT}")
        self._note(
            found["stray"], f"actions are of items that were not shown before, or not in their request; {LEFT_OUT}"
        )
        self._note(found["repeated"], "times an item was shown again in its request; the first position counts")
        both = self.name == "ubi" and found["of_lists"] > 0 and found["tracked"] > 0
        if both:
            self._note(found["moved"], "impressions have another position than the results; that of the results counts")
            self._note(found["unlisted"], "items were shown that are not among the results")
        if not found["rows"]:
            what, hint = "no item that was shown has a position", "send positions with the events, or the lists shown"
            raise DataError(what, where=self.source.name, hint=hint)
        return both


def _is_array(file: SourceFile) -> bool:
    """Return whether a JSON file is one array, and not one record per line."""
    if not file.name.lower().removesuffix(".gz").endswith(".json"):
        return False
    with as_data_error(file, "JSON"), file.stream() as stream:
        return bool(stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["))
