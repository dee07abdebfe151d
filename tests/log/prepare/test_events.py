"""Logs from events of search engines and trackers: what is read, what is left out, and that it is counted."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ultr
from ultr.errors import ColumnError, DataError, OptionError, UltrError
from ultr.log.prepare.formats import FORMATS, find_format
from ultr.log.prepare.pipeline import events_to_log
from ultr.log.sources import open_source

TIME = "2026-05-01T10:00:00Z"
MICROSECONDS = 1_777_629_600_000_000  # the same time


def ubi(action, query, item=None, ordinal=None, *, detail=None, time=TIME, **further):
    attributes = {"object": {"object_id": item, "object_detail": detail}, "position": {"ordinal": ordinal}}
    event = {"action_name": action, "query_id": query, "timestamp": time, "event_attributes": attributes}
    return {**event, "client_id": "c", "application": "shop", **further}


def ubi_query(query, hits, text="cats", **further):
    return {"query_id": query, "user_query": text, "query_response_hit_ids": hits, "timestamp": TIME, **further}


def convert(folder, records, name="ubi", file="events.jsonl", **options):
    lines = [each if isinstance(each, str) else json.dumps(each) for each in records]
    (folder / file).write_text("\n".join(lines))
    events = events_to_log(folder / file, folder / "log.parquet", format=name, overwrite=True, **options)
    return pq.read_table(folder / "log.parquet").to_pandas(), events


def rows_of(log, *columns):
    return list(log[list(columns)].itertuples(index=False, name=None))


# --- UBI --------------------------------------------------------------------------------------------------------------


def test_impressions_and_clicks_of_one_table_become_rows(tmp_path):
    records = [
        ubi("impression", "q1", "a", 1, detail={"price": 2.5, "stock": True, "brand": "x"}),
        ubi("impression", "q1", 5, "2", detail={"price": 4}),
        ubi("click", "q1", 5, 2),
        ubi("add_to_cart", "q1", 5, 2),
        ubi("impression", "q2", "a", 1, time=1_777_629_600_000),
    ]
    log, events = convert(tmp_path, records)
    assert rows_of(log, "request", "item", "position", "add_to_cart", "click") == [
        ("q1", "a", 1, 0, 0),
        ("q1", "5", 2, 1, 1),
        ("q2", "a", 1, 0, 0),
    ]
    assert log["feature_price"].fillna(-1).tolist() == [2.5, 4, -1]
    assert log["feature_stock"].fillna(-1).tolist() == [1, -1, -1]
    assert set(log["time"]) == {pd.Timestamp("2026-05-01 10:00")}
    assert set(log["application"]) == {"shop"}
    assert events.notes == ["attributes of items that are no numbers are not read: brand"]
    read = ultr.read_log(tmp_path / "log.parquet")
    assert set(read.actions) == {"add_to_cart", "click"}  # the file names its actions
    assert read.columns["request"] == "request"


def test_results_of_queries_give_lists_and_impressions_say_what_was_shown(tmp_path):
    records = [
        ubi_query("q1", ["a", "b", "c"]),
        ubi("impression", "q1", "a", 1),
        ubi("click", "q1", "b"),
        ubi_query("q2", ["b", "a"], text="dogs"),  # its impressions are not tracked
        ubi("click", "q2", "a"),
        ubi_query("q3", [], text="nothing"),
    ]
    log, events = convert(tmp_path, records)
    assert rows_of(log, "request", "item", "position", "query", "shown", "click") == [
        ("q1", "a", 1, "cats", 1, 0),
        ("q1", "b", 2, "cats", 1, 1),
        ("q1", "c", 3, "cats", 0, 0),
        ("q2", "b", 1, "dogs", 1, 0),
        ("q2", "a", 2, "dogs", 1, 1),
    ]
    assert set(log["application"]) == {"shop"}
    assert events.notes == ["1 events show no items, and only the text of their query is used"]
    read = ultr.read_log(tmp_path / "log.parquet")
    assert read.hidden is not None
    assert read.rows == 4


def test_positions_of_each_application_start_at_1(tmp_path):
    records = [ubi("impression", f"q{i}", item, i + j) for i in range(2) for j, item in enumerate("ab")]
    records += [ubi("impression", "p", item, 1 + j, application="app") for j, item in enumerate("ab")]
    log, events = convert(tmp_path, records)
    positions = {(request, item): position for request, item, position in rows_of(log, "request", "item", "position")}
    assert positions == {("q0", "a"): 1, ("q0", "b"): 2, ("q1", "a"): 2, ("q1", "b"): 3, ("p", "a"): 1, ("p", "b"): 2}
    assert events.notes == [
        "positions of 'shop' start at 0; the log has them from 1",
        "1 of these lists start at 1 and 1 at 0: check how positions are counted",
    ]


def test_a_position_that_differs_from_the_results_is_noted(tmp_path):
    records = [ubi_query("q", ["a", "b"]), ubi("impression", "q", "b", 1), ubi("impression", "q", "z", 7)]
    log, events = convert(tmp_path, records)
    assert rows_of(log, "item", "position") == [("a", 1), ("b", 2), ("z", 7)]
    assert "1 impressions have another position than the results; that of the results counts" in events.notes
    assert "1 items were shown that are not among the results" in events.notes


@pytest.mark.parametrize(
    "time",
    [
        *(TIME, "2026-05-01T12:00:00+02:00", "2026-05-01 10:00:00", "2026-05-01T10:00:00.000Z"),
        *(MICROSECONDS // 10**6, MICROSECONDS // 1000, str(MICROSECONDS // 1000), MICROSECONDS, MICROSECONDS * 1000),
    ],
)
def test_times_are_iso_texts_or_numbers_of_any_unit(tmp_path, time):
    log, _ = convert(tmp_path, [ubi("impression", "q", "a", 1, time=time)])
    assert log["time"].tolist() == [pd.Timestamp("2026-05-01 10:00")]


@pytest.mark.parametrize("time", [None, "soon", -1, 1e300, "nan", "infinity", {"a": 1}])
def test_a_time_that_cannot_be_read_is_missing_and_counted(tmp_path, time):
    log, events = convert(tmp_path, [ubi("impression", "q", "a", 1, time=time)])
    assert log["time"].isna().all()
    assert events.notes == ["1 events have no time that can be read; their time is missing in the log"]


def _parquet(records):
    keys = dict.fromkeys(key for each in records for key in each)
    return pa.Table.from_pylist([{key: each.get(key) for key in keys} for each in records])


@pytest.mark.parametrize("form", ["lines", "array", "gzip", "parquet", "json in parquet", "exported", "several"])
def test_a_log_does_not_depend_on_the_file_format(tmp_path, form):
    records = [ubi("impression", f"q{i // 3}", f"i{i}", i % 3, detail={"price": i / 2}) for i in range(12)]
    records += [ubi("click", "q1", "i4", 1), ubi("login", None), ubi_query("q2", ["i6", "i8"])]
    expected, events = convert(tmp_path, records)
    lines = "\n".join(json.dumps(each) for each in records)
    source = tmp_path / "x.json"
    if form == "lines":
        source.write_text(lines)
    elif form == "array":
        source.write_text(json.dumps(records, indent=1))
    elif form == "gzip":
        (source := tmp_path / "x.ndjson.gz").write_bytes(gzip.compress(lines.encode()))
    elif form == "exported":
        source.write_text("\n".join(json.dumps({"_index": "ubi", "_source": each}) for each in records))
    elif form == "several":
        (tmp_path / "queries.jsonl").write_text(json.dumps(records[-1]))
        (tmp_path / "events.json").write_text(json.dumps(records[:-1]))
        source = f"{tmp_path}/queries.jsonl,{tmp_path}/events.json"
    else:
        if form == "json in parquet":
            records = [{**r, "event_attributes": json.dumps(r.get("event_attributes"))} for r in records]
        pq.write_table(_parquet(records), source := tmp_path / "x.parquet")
    got = events_to_log(source, tmp_path / "other.parquet", format="ubi")
    pd.testing.assert_frame_equal(pq.read_table(tmp_path / "other.parquet").to_pandas(), expected)
    assert got.notes == events.notes
    assert find_format(open_source(source)) == "ubi"


def test_numbers_of_ids_in_parquet_and_times_as_timestamps_are_read(tmp_path):
    attributes = {"object": {"object_id": 7}, "position": {"ordinal": 1}}
    record = {"action_name": "impression", "query_id": 12, "timestamp": pd.Timestamp(TIME)}
    pq.write_table(_parquet([{**record, "event_attributes": attributes}]), tmp_path / "x.parquet")
    events_to_log(tmp_path / "x.parquet", tmp_path / "log.parquet", format="ubi")
    log = pq.read_table(tmp_path / "log.parquet").to_pandas()
    assert rows_of(log, "request", "item", "position", "time") == [("12", "7", 1, pd.Timestamp("2026-05-01 10:00"))]


# Hostile events against a second implementation, in Python.

IDS = st.sampled_from(["q1", "q2", "", None, 3, "ü'\"", "\x00"])
ITEMS = st.sampled_from(["a", "b", "c", "", None, 7, 1.5, True])
ORDINALS = st.sampled_from([0, 1, 2, 3, "1", "x", -1, 2.5, None, True, [1], {"a": 1}, 1e30])
ACTIONS = st.sampled_from(["impression", "click", "Click ", "buy it", "", None])
JUNK = st.sampled_from(["{", "null", "3", "[]", '"text"', '{"action_name": "click"', '{"a": "\\ud800"}', "[[[[", "{}"])
EVENTS = st.builds(ubi, ACTIONS, IDS, ITEMS, ORDINALS, time=st.sampled_from([TIME, None, "x", 5, [2]]))
QUERIES = st.builds(ubi_query, IDS, st.one_of(st.none(), st.just("a,b"), st.lists(ITEMS, max_size=3)))
BROKEN = st.builds(
    lambda event, value: {**event, "event_attributes": value}, EVENTS, st.sampled_from([None, 3, "x", []])
)
RECORDS = st.lists(st.one_of(EVENTS, EVENTS, QUERIES, BROKEN, JUNK), min_size=1, max_size=25)


def _as_text(value):
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _position(value):
    text = _as_text(value)
    try:
        number = float(text)
    except (TypeError, ValueError):
        return None
    return int(number) if 0 <= number <= 1_000_000 and number == int(number) else None


def _rows(text):
    """Yield what a record says: (what, request, item, number or position or action), or why it cannot be used."""
    try:
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()
    except ValueError:
        yield ("invalid",)
        return
    record = record if isinstance(record, dict) else {}
    action = (record.get("action_name") or "").strip(" ").lower()
    is_query = record.get("action_name") is None and ("user_query" in record or "query_response_hit_ids" in record)
    if not is_query and not action:
        yield ("neither",)
        return
    attributes = record.get("event_attributes")
    attributes = attributes if isinstance(attributes, dict) else {}
    items = record.get("query_response_hit_ids") if is_query else [attributes.get("object", {}).get("object_id")]
    for number, item in enumerate(items if isinstance(items, list) and items else [None], 1):
        key = (_as_text(record.get("query_id")), _as_text(item))
        if not key[1]:
            yield ("text only" if is_query and number == 1 else "no item",)
        elif not key[0]:
            yield ("no request",)
        elif is_query:
            yield ("result", key, number)
        elif action == "impression":
            yield ("impression", key, _position(attributes.get("position", {}).get("ordinal")))
        else:
            yield ("action", key, action)


def expected_log(records):
    """Return what the log must have: (request, item) -> position and actions; and the numbers of what is left out."""
    left_out, shown, places, actions = Counter(), {}, {}, Counter()
    for what, *rest in (row for each in records for row in _rows(each if isinstance(each, str) else json.dumps(each))):
        if what == "action":
            actions[(*rest[0], rest[1])] += 1
        elif rest:
            (places if what == "result" else shown).setdefault(rest[0], []).append(rest[1])
        else:
            left_out[what] += 1
    ordinals = [ordinal for each in shown.values() for ordinal in each if ordinal is not None]
    shift = int(min(ordinals, default=1) == 0)
    log = {}
    for pair in {**places, **shown}:
        known = [ordinal + shift for ordinal in shown.get(pair, ()) if ordinal is not None]
        if pair in places or known:
            log[pair] = min(places[pair]) if pair in places else min(known)
            left_out["repeated"] += max(len(shown.get(pair, ())) - 1, 0) + max(len(places.get(pair, ())) - 1, 0)
    left_out["stray"] = sum(count for (request, item, _), count in actions.items() if (request, item) not in log)
    left_out["unplaced"] = sum(len(each) for pair, each in shown.items() if pair not in log)
    kinds = sorted({action for _, _, action in actions})
    return {pair: (log[pair], *(int((*pair, kind) in actions) for kind in kinds)) for pair in log}, kinds, left_out


@settings(max_examples=25, deadline=None)
@given(RECORDS)
def test_hostile_events_give_the_log_of_a_second_implementation_and_all_others_are_counted(records):
    expected, kinds, left_out = expected_log(records)
    with TemporaryDirectory() as folder:
        if not expected:
            with pytest.raises(
                DataError, match=r"there are no events|no event of the format|no item that was shown has a position"
            ):
                convert(Path(folder), records)
            return
        log, events = convert(Path(folder), records)
    got = {(row[0], row[1]): row[2:] for row in rows_of(log, "request", "item", "position", *kinds)}
    assert got == expected
    assert len(log) == len(expected) == events.counts["rows"]
    names = {
        "are not valid JSON": "invalid",
        "are neither lists nor actions of ubi": "neither",
        "show no items, and only the text of their query is used": "text only",
        "name no item": "no item",
        "have no id of the request": "no request",
        **{name: name for name in ("unplaced", "stray", "repeated")},
    }
    assert {names[name]: n for name, n in events.counts.items() if n and name != "rows"} == +left_out
    for name, count in events.counts.items():
        assert name == "rows" or not count or any(note.startswith(f"{count:,} ") for note in events.notes)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.binary(max_size=200))
def test_any_bytes_give_a_log_or_an_error_of_ultr(name, content):
    with TemporaryDirectory() as folder:
        (Path(folder) / "x.jsonl").write_bytes(content)
        with pytest.raises(UltrError):
            events_to_log(Path(folder) / "x.jsonl", Path(folder) / "log.parquet", format=name)
        assert not (Path(folder) / "log.parquet").exists()


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.data())
def test_fields_of_any_type_never_stop_the_conversion_of_other_records(name, data):
    good = SAMPLES[name]
    broken = [
        {**each, key: data.draw(VALUES)}
        for each in good
        for key in data.draw(st.sets(st.sampled_from(sorted(each)), max_size=2))
    ]
    with TemporaryDirectory() as folder:
        try:
            log, events = convert(Path(folder), [*good, *broken], name)
        except ColumnError:  # an action may have any name, also that of a column
            return
    assert {"request", "item", "position", "time"} <= set(log)
    assert events.counts["rows"] == len(log) >= 2


def test_events_without_lists_are_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"1 events name no item.*add the records of ubi_queries"):
        convert(tmp_path, [ubi("click", "q", "a", 1), ubi("login", "q")])
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="must be JSON or Parquet"):
        events_to_log(tmp_path / "x.csv", tmp_path / "log.parquet", format="ubi")
    (tmp_path / "broken.json").write_text('[{"action_name": ')
    with pytest.raises(DataError, match=r"broken\.json.*Malformed JSON"):
        events_to_log(tmp_path / "broken.json", tmp_path / "log.parquet", format="ubi")
    with pytest.raises(OptionError, match=r"no such option.*--label"):
        convert(tmp_path, [ubi("impression", "q", "a", 1)], label="click")


def test_names_of_actions_that_no_column_can_have_are_an_error(tmp_path):
    records = [ubi("impression", "q", "a", 1), ubi("position", "q", "a", 1), ubi("click", "q", "a", 1)]
    with pytest.raises(ColumnError, match=r"'position'.*--actions"):
        convert(tmp_path, records)
    log, events = convert(tmp_path, records, actions="Click,purchase")
    assert rows_of(log, "Click", "purchase") == [(1, 0)]
    assert "no event has the action 'purchase'; it is 0 in all rows" in events.notes
    assert "events of other actions are left out: position" in events.notes
    many = [records[0], *(ubi(f"action {i}", "q", "a") for i in range(51))]
    with pytest.raises(ColumnError, match="too many actions"):
        convert(tmp_path, many)


def test_deep_and_strange_attributes_are_not_read(tmp_path):
    detail = {"deep": json.loads("[" * 200 + "]" * 200), "a/b~c": 1, "Price": 2, "price": 3, "": 4, 'it\'s "x"': 5}
    log, events = convert(tmp_path, [ubi("impression", "q", "a", 1, detail=detail)])
    features = {name: log[name].tolist() for name in log if name.startswith("feature_")}
    assert features == {"feature_a/b~c": [1.0], 'feature_it\'s "x"': [5.0]}
    assert events.notes == ["attributes of items that are no numbers are not read: , Price, deep, price"]


# --- GA4, Snowplow and metarank ---------------------------------------------------------------------------------------


def ga4(name, seconds, items, user="u1", **further):
    parameters = [{"key": "search_term", "value": {"string_value": "cats", "int_value": None}}]
    event = {"event_date": "20260501", "event_name": name, "event_timestamp": str(MICROSECONDS + 10**6 * seconds)}
    return {**event, "user_pseudo_id": user, "stream_id": "7", "event_params": parameters, "items": items, **further}


def ga4_item(item, index=None, listing="results", **further):
    return {"item_id": item, "item_list_index": index, "item_list_id": listing, "price": 9.5, **further}


SNOWPLOW = "com_snowplowanalytics_snowplow_ecommerce"


def snowplow(event, kind, seconds, products, name="results", user="u1"):
    time = f"2026-05-01T10:00:{seconds:02}.000Z"
    return {
        **dict.fromkeys(("collector_tstamp", "etl_tstamp"), time),
        "app_id": "web",
        "event_id": event,
        "domain_userid": user,
        f"unstruct_event_{SNOWPLOW}_snowplow_ecommerce_action_1": {"type": kind, "name": name},
        f"contexts_{SNOWPLOW}_product_1": products,
    }


def metarank(event, name, **further):
    return {"event": event, "id": name, "timestamp": "1777629600000", "user": "u", "session": "s", **further}


SAMPLES = {
    "ubi": [ubi("impression", "q", "a", 1), ubi("impression", "q", "b", 2), ubi("click", "q", "b", 2)],
    "ga4": [
        ga4("view_item_list", 0, [ga4_item("a", "0"), ga4_item("b", "1"), ga4_item("c", "2")]),
        ga4("select_item", 5, [ga4_item("b", "1")]),
        ga4("purchase", 9, [ga4_item("b", None, None), ga4_item("z", None, None)]),
        ga4("page_view", 9, []),
    ],
    "snowplow": [
        snowplow("e1", "list_view", 0, [{"id": "a", "position": 1, "price": 3.5}, {"id": "b", "position": 2}]),
        snowplow("e2", "list_click", 5, [{"id": "b", "position": 2}]),
        snowplow("e3", "transaction", 9, [{"id": "a"}], name=None),
    ],
    "metarank": [
        metarank(
            "ranking",
            "r1",
            fields=[{"name": "query", "value": "cats"}, {"name": "source", "value": "search"}],
            items=[
                {"id": "a", "relevancy": 2.0},
                {"id": "b", "fields": [{"name": "relevancy", "value": 1.0}, {"name": "color", "value": ["red"]}]},
            ],
        ),
        metarank("interaction", "x", ranking="r1", type="click", item="b"),
        metarank("interaction", "y", type="like", item="b"),
        metarank("item", "z", item="b", fields=[]),
    ],
}


def test_ga4_actions_belong_to_the_latest_list_of_the_user_with_the_item(tmp_path):
    records = [
        *SAMPLES["ga4"],
        ga4("view_item_list", 20, [ga4_item("b"), ga4_item("a")]),  # no positions: the order counts
        ga4("view_item_list", 21, [ga4_item("b", "4", "related")]),
        ga4("select_item", 25, [ga4_item("b", None, "results")]),
        ga4("purchase", 30, [ga4_item("b", None, None)]),  # names no list
        ga4("select_item", 30, [ga4_item("a")], user="u2"),
    ]
    log, events = convert(tmp_path, records, "ga4")
    first, second, third = (
        f"u1-{MICROSECONDS + s}-{n}" for s, n in ((0, "results"), (20_000_000, "results"), (21_000_000, "related"))
    )
    assert rows_of(log, "request", "item", "position", "query", "click", "purchase") == [
        (first, "a", 1, "cats", 0, 0),
        (first, "b", 2, "cats", 1, 1),
        (first, "c", 3, "cats", 0, 0),
        (second, "b", 1, "cats", 1, 0),
        (second, "a", 2, "cats", 0, 0),
        (third, "b", 5, "cats", 0, 1),
    ]
    assert log["feature_price"].tolist() == [9.5] * 6
    assert events.notes == [
        "1 events name no item (page_view); they are left out",
        "1 lists have missing or repeated positions; the order of their items is the position",
        "positions of '7' start at 0; the log has them from 1",
        "2 actions are of items that were not shown before, or not in their request; they are left out",
    ]


def test_snowplow_lists_and_clicks_are_read(tmp_path):
    log, events = convert(tmp_path, SAMPLES["snowplow"], "snowplow")
    assert rows_of(log, "request", "item", "position", "click", "purchase") == [
        ("e1", "a", 1, 0, 1),
        ("e1", "b", 2, 1, 0),
    ]
    assert log["feature_price"].fillna(-1).tolist() == [3.5, -1]
    assert events.notes == []


def test_metarank_rankings_and_interactions_are_read(tmp_path):
    log, events = convert(tmp_path, SAMPLES["metarank"], "metarank")
    columns = ("request", "item", "position", "query", "click", "feature_relevancy")
    assert rows_of(log, *columns) == [("r1", "a", 1, "cats", 0, 2.0), ("r1", "b", 2, "cats", 1, 1.0)]
    assert events.notes == [
        "1 events are neither lists nor actions of metarank; they are left out",
        "1 events have no id of the request (like); they are left out",
        "attributes of items that are no numbers are not read: color",
    ]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_each_format_is_recognised_and_read_from_parquet_too(tmp_path, name):
    expected, events = convert(tmp_path, SAMPLES[name], name)
    assert find_format(open_source(tmp_path / "events.jsonl")) == name
    records = SAMPLES[name]
    if name == "metarank":  # its values have several types
        records = [{**each, **{k: json.dumps(each.get(k)) for k in ("fields", "items")}} for each in records]
    pq.write_table(_parquet(records), tmp_path / "x.parquet")
    got = events_to_log(tmp_path / "x.parquet", tmp_path / "other.parquet", format=name)
    pd.testing.assert_frame_equal(pq.read_table(tmp_path / "other.parquet").to_pandas(), expected)
    assert got.notes == events.notes
    assert find_format(open_source(tmp_path / "x.parquet")) == name


def test_json_in_a_folder_of_other_files_is_no_data(tmp_path):
    pd.DataFrame({"request": ["a"], "position": [1], "click": [1]}).to_parquet(tmp_path / "log.parquet")
    (tmp_path / "schema.json").write_text("{}")
    assert len(ultr.read_log(tmp_path)) == 1


def test_a_log_is_not_taken_for_events(tmp_path):
    pd.DataFrame({"request": ["a"], "event": ["click"], "position": [1], "timestamp": [1]}).to_parquet(
        tmp_path / "log.parquet"
    )
    assert find_format(open_source(tmp_path / "log.parquet")) is None


# --- Lists ------------------------------------------------------------------------------------------------------------


def many(days="x", requests=60):
    records = [
        ubi_query(f"{days}{i}", [f"i{(i + j) % 7}" for j in range(3)], text=f"t{i % 9}") for i in range(requests)
    ]
    for i in range(requests):
        records += [ubi("impression", f"{days}{i}", f"i{(i + j) % 7}", j + 1, detail={"price": j}) for j in range(3)]
        records.append(ubi("click", f"{days}{i}", f"i{i % 7}", 1))
    return records


@pytest.mark.parametrize("queries", [True, False])
def test_lists_from_events_are_those_of_the_log_from_the_same_events(tmp_path, queries):
    records = many() if queries else [each for each in many() if "action_name" in each]
    _, events = convert(tmp_path, [*records, ubi("click", "stray", "a")])
    lists = ultr.prepare_lists(tmp_path / "events.jsonl", tmp_path / "a", format="ubi")
    expected = ultr.prepare_lists(tmp_path / "log.parquet", tmp_path / "b")
    assert lists.footers == expected.footers
    assert lists.about["columns"] == expected.about["columns"]
    assert lists.about["notes"] == [*events.notes, *expected.about["notes"]]
    assert lists.about["format"] == "ubi"
    assert lists.about["source"] == str(tmp_path / "events.jsonl")
    assert lists.features == ("feature_price",)


def test_a_day_of_events_is_appended_with_the_actions_of_the_lists(tmp_path):
    convert(tmp_path, many())
    ultr.prepare_lists(tmp_path / "events.jsonl", tmp_path / "lists", format="ubi")
    monday = [each for each in many("y") if each.get("action_name") != "click"]
    (tmp_path / "next.jsonl").write_text("\n".join(map(json.dumps, monday)))
    lists = ultr.prepare_lists(tmp_path / "next.jsonl", tmp_path / "lists", append=True)
    assert sum(each["requests"] for each in lists.splits.values()) == 120
    assert "no event has the action 'click'; it is 0 in all rows" in lists.about["notes"]
