"""The columns that are taken for the parts of a log: those that are named, those of training, and common names."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ultr
from ultr.errors import ColumnError, LabelError
from ultr.log import Log, read_log, write_log
from ultr.log.columns import resolve_columns
from ultr.log.labels import Label, click_label, default_label
from ultr.log.readers import read_batches

COLUMNS = {"search": [1, 1, 2], "rank": [1, 2, 1], "sku": ["x", "y", "x"], "click": [1, 0, 1], "price": [3.0, 4.0, 3.0]}


def trained(**changes):
    named = {"request": "search", "item": "sku", "features": ["price"], **changes}
    return read_log(pa.table(COLUMNS), **named)


def test_a_log_says_which_columns_it_took():
    log = trained()
    expected = {"request": "search", "position": "rank", "item": "sku", "actions": ["click"], "features": ["price"]}
    assert log.columns == expected
    assert log.select([1]).columns == expected


def test_the_columns_of_training_are_used_by_name_and_not_guessed_again():
    other = {**COLUMNS, "request": [7, 8, 9], "item": ["a", "b", "c"], "f1": [0.0, 0.0, 0.0], "dwell": [1, 2, 3]}
    log = read_log(pa.table(other), columns=trained().columns)
    assert log.request_ids.to_pylist() == [1, 2]
    assert log.item_ids.to_pylist() == ["x", "y", "x"]
    assert log.feature_names == ("price",)
    assert list(log.actions) == ["click"]
    assert read_log(pa.table(other), columns=trained().columns, item="item").item_ids.to_pylist() == ["a", "b", "c"]


@pytest.mark.parametrize(("column", "option"), [("search", "--request"), ("price", "--features")])
def test_a_column_of_training_that_is_missing_is_an_error_that_names_the_option(column, option):
    other = {name: values for name, values in COLUMNS.items() if name != column}
    with pytest.raises(ColumnError, match=f"there is no column '{column}', which was .* in training; .*{option}"):
        read_log(pa.table({**other, "request": [1, 1, 2], "f1": [0.0, 1.0, 2.0]}), columns=trained().columns)


def test_an_item_column_that_is_missing_is_not_replaced_by_a_guess():
    other = {"item" if name == "sku" else name: values for name, values in COLUMNS.items()}
    log = read_log(pa.table(other), columns=trained().columns)
    assert log.item_ids is None
    assert log.notes[0].startswith("there is no column 'sku', which was the item in training; to use another one,")


def test_features_may_be_in_a_column_of_lists_that_has_their_names(tmp_path):
    write_log(trained(), tmp_path / "log.parquet")
    log = read_log(tmp_path / "log.parquet", columns={"features": ["price"]})
    assert log.feature_names == ("price",)


def test_batches_take_the_columns_of_training():
    other = pa.table({**COLUMNS, "request": [7, 8, 9], "item": ["a", "b", "c"], "slot": [1, 1, 1]})
    log = next(read_batches(other, feature_names=["price"], columns=trained().columns).batches).log
    assert log.request_ids.to_pylist() == [1, 1, 2]
    assert log.item_ids.to_pylist() == ["x", "y", "x"]
    assert log.positions.tolist() == [1, 2, 1]
    named = read_batches(other, feature_names=["price"], columns=trained().columns, request="request", position="slot")
    assert next(named.batches).log.request_ids.to_pylist() == [7, 8, 9]


def test_an_empty_name_means_no_column():
    table = pa.table({"request": [1, 1], "position": [1, 2], "item": [1, 2], "click": [0, 1]})
    assert read_log(table, item="").item_ids is None
    assert read_log(table).item_ids is not None


def test_a_query_that_differs_within_requests_gets_a_note():
    log = read_log(pa.table({**COLUMNS, "query": ["a", "b", "c"]}), request="search")
    assert "query" not in log.columns
    assert log.notes == ("column 'query' differs within requests, so it is not used as the query",)


def test_errors_name_the_part_that_a_column_was_taken_for():
    with pytest.raises(ColumnError, match="request column 'session' has 1 missing values"):
        read_log(pa.table({"session": [1, None], "slot": [1, 2], "click": [0, 1]}))


@pytest.mark.parametrize(
    ("actions", "label"),
    [
        (["click"], "click"),
        (["dwell", "click"], "click + dwell / exp(3)"),
        (["dwell_time", "Clicked"], "Clicked"),
        (["purchase", "like"], "purchase"),
        (["Was clicked"], "`Was clicked`"),
        (["max"], "`max`"),
        ([], "click + dwell / exp(3)"),
    ],
)
def test_the_default_label_uses_the_actions_that_there_are(actions, label):
    assert default_label(actions) == label
    if actions:
        assert set(Label(label).actions) <= set(actions)
        assert click_label(actions) == ("click" if "click" in actions else label)


def test_names_with_blanks_are_written_in_backquotes():
    label = Label("2 * `Was clicked` + `dwell [s]` / 10 + like")
    assert label.actions == ("Was clicked", "dwell [s]", "like")
    values = {name: pa.array([1.0, 0.0]).to_numpy() for name in label.actions}
    assert label(values).tolist() == [2 + 1 / 10 + 1, 0]
    with pytest.raises(LabelError):
        Label("`click")


def test_a_log_made_in_memory_has_no_columns():
    assert Log(features=[[1.0]], offsets=[0, 1], request_ids=[1], feature_names=("a",)).columns == {}


# --- Several columns that may be the request --------------------------------------------------------------------------


def searches(requests=300, *, repeat=False):
    """Return a log whose queries recur, and whose searches do not."""
    ids = np.repeat(np.arange(requests), 3)
    positions = np.tile(np.arange(3) + 1, requests)
    columns = {
        "query_id": [f"q{i % 7}" for i in ids],
        "search_id": [f"{i:04}" for i in ids],
        "position": np.ones(len(ids), int) if repeat else positions,
        "click": (positions == 1).astype(int),
        "f1": np.linspace(0, 1, len(ids)),
    }
    return pd.DataFrame(columns).sample(frac=1, random_state=0)


NOTE = "the request is 'search_id', because positions repeat within 'query_id'; to use another column, name it with "


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl", "frame"])
def test_the_request_is_the_column_within_which_positions_do_not_repeat(tmp_path, form):
    source = tmp_path / f"log.{form}"
    if form == "parquet":
        searches().to_parquet(source)
    elif form == "csv":
        searches().to_csv(source, index=False)
    else:
        searches().to_json(source, orient="records", lines=True)
    log = ultr.read_log(searches() if form == "frame" else source)
    assert (log.columns["request"], log.columns["query"]) == ("search_id", "query_id")
    assert len(log) == 300
    assert sorted(log.request_ids.to_pylist())[:2] == ["0000", "0001"]
    assert log.notes == (NOTE + "--request",)
    if form != "frame":
        lists = ultr.prepare_lists(source, tmp_path / "lists")
        assert lists.about["columns"]["request"] == "search_id"
        assert NOTE + "--request" in lists.about["notes"]
        assert sum(each["requests"] for each in lists.splits.values()) == 300


def test_the_usual_column_stays_the_request_if_its_positions_do_not_repeat():
    log = searches()
    log["query_id"], log["search_id"] = log["search_id"], [f"s{i}" for i in range(len(log))]
    read = ultr.read_log(log)
    assert (read.columns["request"], read.notes) == ("query_id", ())


def test_a_column_with_another_value_in_each_row_is_not_the_request():
    log = searches(repeat=True).drop(columns="search_id")
    log["impression_id"] = range(len(log))
    with pytest.raises(ColumnError, match="two items of one request have the same position"):
        ultr.read_log(log)


def test_a_named_request_is_taken_as_it_is():
    read = ultr.read_log(searches(), request="query_id", on_duplicates="sum")
    assert read.columns["request"] == "query_id"
    assert not any("repeat within" in note for note in read.notes)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=1, max_size=12))
def test_no_position_repeats_within_the_request_if_a_column_of_lists_has_none(rows):
    table = pa.table(
        dict(zip(("query_id", "search_id", "session_id", "position"), zip(*rows, strict=True), strict=True))
    )
    columns = resolve_columns(table.schema, where="test", rows=lambda: table)

    def fine(number):
        return len({(row[number], row[3]) for row in rows}) == len(rows) and (
            number == 0 or len({row[number] for row in rows}) < len(rows)
        )

    candidates = [name for number, name in enumerate(table.column_names[:3]) if fine(number)]
    assert columns.request == (candidates or ["query_id"])[0]
    assert (columns.request_note == "") == (columns.request == "query_id")
