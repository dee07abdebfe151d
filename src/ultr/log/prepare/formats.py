"""The formats of events that `ultr prepare --format` reads: UBI, GA4, Snowplow and metarank, as one table.

A `Format` says where a record has its request, items, positions, action and time. `find_format` recognises a format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ultr.log.columns import as_data_error
from ultr.log.prepare.options import FormatName
from ultr.log.sources import Source, SourceFile

Fields = str | dict[str, Any] | list[Any]  # of a record: a type of DuckDB, an object, or a list of one such type

FIRST_RECORDS, FIRST_BYTES = 50, 1 << 20  # from which the format is recognised


@dataclass(frozen=True, kw_only=True)
class Format:
    """Where the records of a format have what a log needs, as SQL expressions of the record `e`."""

    title: str
    fields: dict[str, Fields]
    marks: tuple[tuple[str, ...], ...]  # a record that has all keys of one of these is of this format
    listed: str  # whether the record says which items were shown
    action: str  # the name of the action, if the record is one
    request: str  # the id of the request; of an action only if the format has it
    attributed: bool = False  # whether actions have no request, so that they belong to the latest list with their item
    user: str = "NULL"
    listing: str = "NULL"  # the name of the list on a page, by which actions find their list
    query: str = "NULL"  # the text of the query
    application: str  # positions of one application start at the same number
    time: str
    items: str  # list of structs with the item, its position, and its attributes: a struct, or JSON
    ordered: str  # whether the order of the items is their position, if they have no positions
    renamed: Mapping[str, str] = field(default_factory=dict)  # action -> its common name in logs
    no_lists: str  # what to do if no record says which items were shown


TEXT, NUMBER, JSON = "VARCHAR", "DOUBLE", "JSON"
_SNOWPLOW = "com_snowplowanalytics_snowplow_ecommerce"
_SNOWPLOW_ACTION, _SNOWPLOW_PRODUCTS = (
    f"unstruct_event_{_SNOWPLOW}_snowplow_ecommerce_action_1",
    f"contexts_{_SNOWPLOW}_product_1",
)
_METARANK_VALUES = [{"name": TEXT, "value": JSON}]

FORMATS: dict[FormatName, Format] = {
    "ubi": Format(
        title="User Behavior Insights (UBI) 1.3",
        fields={
            **dict.fromkeys(("application", "action_name", "query_id", "user_query", "timestamp"), TEXT),
            "query_response_hit_ids": [TEXT],
            "event_attributes": {"object": {"object_id": TEXT, "object_detail": JSON}, "position": {"ordinal": TEXT}},
        },
        marks=(("action_name", "event_attributes"), ("user_query", "query_response_hit_ids")),
        listed="lower(e.action_name) = 'impression' OR (e.action_name IS NULL AND "
        "(e.query_response_hit_ids IS NOT NULL OR e.user_query IS NOT NULL))",
        action="e.action_name",
        request="e.query_id",
        query="e.user_query",
        application="e.application",
        time="e.timestamp",
        items="CASE WHEN e.action_name IS NULL "
        "THEN [{'item': x, 'position': NULL, 'attributes': NULL} FOR x IN e.query_response_hit_ids] "
        "ELSE [{'item': e.event_attributes.object.object_id, 'position': e.event_attributes.position.ordinal, "
        "'attributes': e.event_attributes.object.object_detail}] END",
        ordered="e.action_name IS NULL",
        no_lists="add the records of ubi_queries, or track events with the action_name 'impression'",
    ),
    "ga4": Format(
        title="Google Analytics 4, BigQuery export",
        fields={
            **dict.fromkeys(("event_name", "event_timestamp", "user_pseudo_id", "stream_id"), TEXT),
            "event_params": [{"key": TEXT, "value": {"string_value": TEXT}}],
            "items": [
                {
                    **dict.fromkeys(
                        ("item_id", "item_name", "item_list_id", "item_list_name", "item_list_index"), TEXT
                    ),
                    "price": NUMBER,
                }
            ],
        },
        marks=(("event_name", "event_timestamp", "event_params"),),
        listed="e.event_name = 'view_item_list'",
        action="e.event_name",
        request="concat_ws('-', e.user_pseudo_id, e.event_timestamp, "
        "coalesce(e.items[1].item_list_id, e.items[1].item_list_name))",
        attributed=True,
        user="e.user_pseudo_id",
        listing="coalesce(e.items[1].item_list_id, e.items[1].item_list_name)",
        query="[p.value.string_value FOR p IN e.event_params IF p.key = 'search_term'][1]",
        application="e.stream_id",
        time="e.event_timestamp",
        items="[{'item': coalesce(nullif(x.item_id, '(not set)'), x.item_name), 'position': x.item_list_index, "
        "'attributes': {'price': x.price}} FOR x IN e.items]",
        ordered="len(e.items) > 1",
        renamed={"select_item": "click"},
        no_lists="track view_item_list events, and export them",
    ),
    "snowplow": Format(
        title="Snowplow ecommerce, enriched events as JSON",
        fields={
            **dict.fromkeys(("app_id", "event_id", "domain_userid", "network_userid", "user_id"), TEXT),
            **dict.fromkeys(("derived_tstamp", "collector_tstamp"), TEXT),
            _SNOWPLOW_ACTION: {"type": TEXT, "name": TEXT},
            _SNOWPLOW_PRODUCTS: [{"id": TEXT, "position": TEXT, "price": NUMBER, "list_price": NUMBER}],
        },
        marks=((_SNOWPLOW_ACTION,), ("event_id", "collector_tstamp", "etl_tstamp")),
        listed=f"e.{_SNOWPLOW_ACTION}.type = 'list_view'",
        action=f"e.{_SNOWPLOW_ACTION}.type",
        request="e.event_id",
        attributed=True,
        user="coalesce(e.domain_userid, e.network_userid, e.user_id)",
        listing=f"e.{_SNOWPLOW_ACTION}.name",
        application="e.app_id",
        time="coalesce(e.derived_tstamp, e.collector_tstamp)",
        items="[{'item': x.id, 'position': x.position, "
        f"'attributes': {{'price': x.price, 'list_price': x.list_price}}}} FOR x IN e.{_SNOWPLOW_PRODUCTS}]",
        ordered=f"len(e.{_SNOWPLOW_PRODUCTS}) > 1",
        renamed={"list_click": "click", "transaction": "purchase"},
        no_lists="track list_view events with their products",
    ),
    "metarank": Format(
        title="metarank events",
        fields={
            **dict.fromkeys(("event", "id", "timestamp", "tenant", "ranking", "type", "item"), TEXT),
            "fields": _METARANK_VALUES,
            "items": [{"id": TEXT, "relevancy": NUMBER, "fields": _METARANK_VALUES}],
        },
        marks=(
            ("event", "id", "timestamp", "items"),
            ("event", "id", "timestamp", "fields"),
            ("event", "id", "ranking", "item"),
        ),
        listed="e.event = 'ranking'",
        action="CASE WHEN e.event = 'interaction' THEN e.type END",
        request="CASE WHEN e.event = 'ranking' THEN e.id ELSE e.ranking END",
        query="[f.value ->> '$' FOR f IN e.fields IF e.event = 'ranking' AND f.name IN ('query', 'search')][1]",
        application="e.tenant",
        time="e.timestamp",
        items="CASE WHEN e.event = 'ranking' THEN [{'item': x.id, 'position': NULL, "
        # The attributes as JSON text, because a field may be there twice.
        "'attributes': TRY_CAST('{' || array_to_string(list_concat(['\"relevancy\":' || to_json(x.relevancy)], "
        "[to_json(f.name) || ':' || f.value FOR f IN x.fields IF f.name IS NOT NULL]), ',') || '}' AS JSON)} "
        "FOR x IN e.items] ELSE [{'item': e.item, 'position': NULL, 'attributes': NULL}] END",
        ordered="true",
        no_lists="add the ranking events",
    ),
}


def find_format(source: Source) -> FormatName | None:
    """Return the name of the format of events that a source has, by its first records; None if it is none of them."""
    known: list[FormatName] = [
        name
        for file in source.files[:FIRST_RECORDS]
        for keys in _first_keys(source.kind, file)
        for name, each in FORMATS.items()
        if any(keys.issuperset(mark) for mark in each.marks)
    ]
    return max(dict.fromkeys(known), key=known.count, default=None)


def _first_keys(kind: str, file: SourceFile) -> list[set[str]]:
    """Return the keys of the first records of a file; of Parquet the columns."""
    if kind == "Parquet":
        with as_data_error(file, kind), file.parquet() as opened:
            return [set(opened.schema_arrow.names)]
    if kind != "JSON Lines":
        return []
    with as_data_error(file, "JSON"), file.stream() as stream:
        text = stream.read(FIRST_BYTES).decode("utf-8-sig", errors="replace").lstrip()
    decoder, keys = json.JSONDecoder(), list[set[str]]()
    if text.startswith("["):
        while len(keys) < FIRST_RECORDS and text.lstrip("[,\n\r\t ").startswith("{"):
            text = text.lstrip("[,\n\r\t ")
            try:
                record, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                break
            keys.append(_keys(record))
            text = text[end:]
        return keys
    for line in islice((line for line in text.splitlines() if line.strip()), FIRST_RECORDS):
        try:
            keys.append(_keys(json.loads(line)))
        except (ValueError, RecursionError):
            continue
    return keys


def _keys(record: object) -> set[str]:
    """Return the keys of a record, which an export of Elasticsearch or OpenSearch has in `_source`."""
    inner = record.get("_source", record) if isinstance(record, dict) else None
    return set(inner) if isinstance(inner, dict) else set()
