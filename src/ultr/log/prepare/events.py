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
OTHERS = "'VARCHAR', 'OBJECT', 'ARRAY'"  # types of values in JSON that are no numbers
FEATURE = "feature_"  # the names of features start with this
LEFT_OUT = "they are left out"
NO_ITEMS = "show no items, and only the text of their query is used"

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
        self.items, self.pairs = _text(str(scratch / "items.parquet")), scratch / "pairs.parquet"
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
        kind = self.engine.backend.con.sql(f"SELECT attributes FROM {self.items}").types[0]
        self.typed = kind.id == "struct"
        self.kinds = {key: each.id for key, each in kind.children} if self.typed else {}
        self._count_left_out()
        applications = self._number_applications()
        names = self._actions(actions)
        numbers = self._features([name for name in as_names(features or ()) if name.startswith(FEATURE)])
        self._write_pairs(names, numbers, applications=applications)
        self._write_log(target, names, applications=applications, sort=sort)

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
        distinct = f"len(list_distinct([{position} FOR x IN items IF {whole}])) = len(items)"
        placed = f"SELECT *, CASE WHEN len(items) = 1 THEN true ELSE {distinct} END AS placed FROM ({of_records})"
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
        ordinal = f"CASE WHEN listed AND placed AND {whole} THEN TRY_CAST({position} AS BIGINT) END"
        return f"""SELECT CASE {cases} END AS reason, listed, CASE WHEN NOT listed THEN {action} END AS action, request,
                "user", coalesce(listing, '') AS listing, CASE WHEN number = 1 THEN "query" END AS "query",
                application, x.item AS item, time, {ordinal} AS ordinal,
                CASE WHEN listed AND ordered AND ({ordinal}) IS NULL THEN number END AS place,
                CASE WHEN listed THEN x.attributes END AS attributes
            FROM ({unnested})"""

    def _count_left_out(self) -> None:
        """Count the records by reason, action and application, and note those that cannot be used."""
        given = "".join(f", bool_or(attributes.{_name(key)} IS NOT NULL) AS g{i}" for i, key in enumerate(self.kinds))
        self._run(
            f"""CREATE TEMP TABLE ultr_facts AS SELECT reason, listed, application, action, count(*) AS n,
                count(*) FILTER (WHERE time IS NULL) AS timeless, count(*) FILTER (WHERE place = 1) AS fallen,
                min(ordinal) AS first, bool_or("query" != '') AS has_query {given}
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
                SELECT application, coalesce(min(first) = 0, false)::INT AS shift,
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
        if clash := [n for n in names if n in others or n.startswith((FEATURE, "ultr_")) or not n.isprintable()]:
            what = "an action has a name that no column of actions can have"
            hint = "name the actions to use with --actions"
            raise ColumnError(what, where=self.source.name, got=f"'{clash[0]}'", hint=hint)
        if unused := sorted({*present} - {name.lower() for name in names}):
            self.notes.append(f"events of other actions are left out: {some(unused, 5)}")
        return names

    def _features(self, wanted: Sequence[str]) -> dict[str, str]:
        """Return the name of each feature, and the key of an item's attributes that has its numbers."""
        present = list(self.kinds) if self.typed else self._keys()
        lower = Counter(key.lower() for key in present)
        known = [key for key in present if key.strip() and (self.typed or lower[key.lower()] == 1)]
        if self.typed:
            facts = [
                f"bool_or(g{i}), {self.kinds[key] not in NUMBERS}" for i, key in enumerate(present) if key in known
            ]
            rows = "ultr_facts WHERE reason IS NULL"
        else:
            values = [f"v.{_name(key)}" for key in known]
            facts = [f"bool_or({v} IS NOT NULL), bool_or(json_type({v}) IN ({OTHERS}))" for v in values]
            rows = f"(SELECT {self._values(known, JSON)} AS v FROM {self.items} WHERE reason IS NULL)"
        found = self._run(f"SELECT {', '.join(facts)} FROM {rows}")[0] if known else ()
        features, others = dict[str, str](), [key for key in present if key not in known]
        for key, has_values, other in zip(known, found[::2], found[1::2], strict=True):
            if has_values and other:
                others.append(key)
            elif has_values:
                features[FEATURE + key] = key
        if others:
            self.notes.append(f"attributes of items that are no numbers are not read: {some(sorted(others), 5)}")
        self.given = set(features.values())
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

    def _write_pairs(self, actions: Sequence[str], features: Mapping[str, str], *, applications: int) -> None:
        """Write one row per request and item that was shown, which sums its events; the log without what needs a join.

        Only numbers are aggregated, so that DuckDB can use the disk if the memory is full.
        """
        values = f", {self._values(features.values(), NUMBER)} AS v" if features else ""
        codes = self._run("SELECT code, shift FROM ultr_applications")
        if len(codes) == 1:
            of_application, join = "{} AS code, {} AS shift".format(*codes[0]), ""
        else:
            of_application = "a.code, a.shift"
            join = "JOIN ultr_applications AS a ON e.application IS NOT DISTINCT FROM a.application"
        rows = f"SELECT e.* EXCLUDE (attributes){values}, {of_application} FROM {self._used()} AS e {join}"
        columns = [
            f"max(CASE WHEN action = {_text(name.lower())} THEN 1 ELSE 0 END)::TINYINT AS {_name(name)}"
            for name in actions
        ]
        for name, key in features.items():
            number = f"TRY_CAST(v.{_name(key)} AS FLOAT)" if key in self.given else "NULL::FLOAT"
            columns.append(f"min({number}) AS {_name(name)}")
        if applications == 1:
            columns.append("(SELECT application FROM ultr_applications) AS application")
        self._copy(
            f"""SELECT request, item, coalesce(min(place), min(ordinal + shift)) AS position,
                make_timestamp(min(CASE WHEN listed THEN time END)) AS time {"".join(f", {each}" for each in columns)},
                count(place) AS ultr_places, count(action) AS ultr_actions,
                (count(*) - count(place) - count(action)) AS ultr_impressions,
                (min(place) != min(ordinal + shift)) AS ultr_moved, min(code) AS ultr_code
            FROM ({rows}) GROUP BY request, item HAVING coalesce(min(place), min(ordinal + shift)) IS NOT NULL""",
            _text(str(self.pairs)),
            f", KV_METADATA {{{_text(ACTIONS_KEY.decode())}: {_text(json.dumps(list(actions)))}}}",
        )

    def _write_log(self, target: Path, actions: Sequence[str], *, applications: int, sort: bool) -> None:
        """Write the pairs as a log, with the query, the application, and the mark of what was shown."""
        both, pairs = self._count_pairs(), _text(str(self.pairs))
        columns, joins = list[str](), ""
        if self._run("SELECT bool_or(has_query) FROM ultr_facts WHERE listed")[0][0]:
            columns.append('q."query"')
            texts = f"""SELECT request, max("query") AS "query" FROM {self.items}
                WHERE "query" != '' AND request != '' AND listed GROUP BY request"""
            joins += f" LEFT JOIN ({texts}) AS q ON p.request = q.request"
        if applications > 1:
            columns.append("a.application")
            codes = f"SELECT request, min(ultr_code) AS code FROM {pairs} GROUP BY request"
            joins += f" LEFT JOIN ({codes}) AS c ON p.request = c.request"
            joins += " LEFT JOIN ultr_applications AS a ON c.code = a.code"
        if both:  # of requests whose impressions are tracked, items without events were not shown
            columns.append("(t.request IS NULL OR ultr_impressions + ultr_actions > 0)::TINYINT AS shown")
            tracked = f"SELECT DISTINCT request FROM {pairs} WHERE ultr_impressions > 0"
            joins += f" LEFT JOIN ({tracked}) AS t ON p.request = t.request"
        if not sort and not columns:
            self.pairs.replace(target)
            return
        further = "".join(f", {each}" for each in columns)
        self._copy(
            f"""SELECT p.* EXCLUDE (ultr_places, ultr_actions, ultr_impressions, ultr_moved, ultr_code) {further}
            FROM {pairs} AS p {joins} {"ORDER BY p.request, position, p.item" if sort else ""}""",
            _text(str(target)),
            f", KV_METADATA {{{_text(ACTIONS_KEY.decode())}: {_text(json.dumps(list(actions)))}}}",
        )

    def _count_pairs(self) -> bool:
        """Count what the log leaves out; return whether it has both lists of results and impressions."""
        again = "greatest(ultr_impressions - 1, 0) + greatest(ultr_places - 1, 0)"
        counts = {
            "rows": "count(*)",
            "actions": "sum(ultr_actions)",
            "lists": "sum(ultr_impressions + ultr_places)",
            "repeated": f"sum({again})",
            "unlisted": "count(*) FILTER (WHERE ultr_impressions > 0 AND ultr_places = 0)",
            "moved": "count(*) FILTER (WHERE ultr_moved)",
            "of_lists": "sum(ultr_places)",
            "tracked": "sum(ultr_impressions)",
        }
        row = self._run(f"SELECT {', '.join(counts.values())} FROM {_text(str(self.pairs))}")[0]
        found = {name: int(value or 0) for name, value in zip(counts, row, strict=True)}
        if not found["rows"]:
            what, hint = "no item that was shown has a position", "send positions with the events, or the lists shown"
            raise DataError(what, where=self.source.name, hint=hint)
        lists, actions = self._run(
            """SELECT coalesce(sum(n) FILTER (WHERE listed), 0), coalesce(sum(n) FILTER (WHERE NOT listed), 0)
            FROM ultr_facts WHERE reason IS NULL"""
        )[0]
        self.counts["unplaced"] = int(lists) - found["lists"]
        self.counts["stray"] = int(actions) - found["actions"]
        self.counts |= {name: found[name] for name in ("rows", "repeated")}
        self._note(self.counts["unplaced"], f"items were shown without a position; {LEFT_OUT}")
        what = "actions are of items that were not shown before, or not in their request"
        self._note(self.counts["stray"], f"{what}; {LEFT_OUT}")
        self._note(found["repeated"], "times an item was shown again in its request; the first position counts")
        both = self.name == "ubi" and found["of_lists"] > 0 and found["tracked"] > 0
        if both:
            self._note(found["moved"], "impressions have another position than the results; that of the results counts")
            self._note(found["unlisted"], "items were shown that are not among the results")
        return both


def _is_array(file: SourceFile) -> bool:
    """Return whether a JSON file is one array, and not one record per line."""
    if not file.name.lower().removesuffix(".gz").endswith(".json"):
        return False
    with as_data_error(file, "JSON"), file.stream() as stream:
        return bool(stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["))
