"""Positions that differ by segment."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.csv import write_csv

from ultr.errors import ColumnError, DataError, OptionError
from ultr.log import read_log
from ultr.log.table import by_segment, slot

TABLE = pa.table(
    {
        "request": [1, 1, 2, 2, 3],
        "position": [2, 1, 1, 2, 1],
        "click": [0, 1, 0, 0, 1],
        "device": ["phone", "phone", "desk", "desk", None],
    }
)


def test_a_position_of_another_segment_is_another_place_and_lists_keep_their_order():
    log, names = by_segment(read_log(TABLE, segment="device"))
    assert names == ("", "desk", "phone")
    assert [slot(k, names) for k in log.positions.tolist()] == ["1@phone", "2@phone", "1@desk", "2@desk", "1@"]
    assert (log.positions[:-1:2] < log.positions[1::2]).all()


def test_without_segments_a_position_is_its_number():
    assert slot(3) == "3"


def test_a_segment_that_was_not_known_has_no_name():
    log, names = by_segment(read_log(TABLE, segment="device"), ["phone"])
    assert [slot(k, names) for k in log.positions.tolist()] == ["1@phone", "2@phone", "1@", "2@", "1@"]


def test_logs_without_segments_and_huge_positions_are_errors():
    with pytest.raises(DataError, match="no segments"):
        by_segment(read_log(TABLE))
    huge = TABLE.set_column(1, "position", pa.array([2, 1, 1, 2, 1 << 20]))
    with pytest.raises(DataError, match="must be below"):
        by_segment(read_log(huge, segment="device"))


def test_a_segment_has_one_value_per_request():
    mixed = TABLE.set_column(3, "device", pa.array(["phone", "desk", "desk", "desk", "desk"]))
    with pytest.raises(DataError, match="one value per request"):
        read_log(mixed, segment="device")


def test_the_context_of_requests_is_selected_and_written_with_them():
    table = TABLE.append_column("query", pa.array(["a", "a", "b", "b", "c"]))
    table = table.append_column("randomised", pa.array([1, 1, 0, 0, 0]))
    log = read_log(table, segment="device")
    chosen = read_log(log.select([2, 0]).to_table(), segment="segment")
    assert {name: values.to_pylist() for name, values in chosen.context.items()} == {
        "query": ["c", "a"],
        "segment": [None, "phone"],
        "randomised": [False, True],
    }


def test_a_query_that_differs_within_a_request_is_none():
    table = TABLE.append_column("query", pa.array(["a", "b", "b", "b", "c"]))
    assert "query" not in read_log(table).context


def test_several_columns_make_a_segment(tmp_path):
    columns = {"request": [1, 1, 2, 2, 3], "position": [1, 2, 1, 2, 1], "click": [1, 0, 0, 1, 0], "f1": range(5)}
    table = pa.table({**columns, "device": ["p", "p", None, None, "d"], "login": [True, True, False, False, True]})
    log = read_log(table, segment="device,login")
    assert log.context["segment"].to_pylist() == ["p + true", " + false", "d + true"]
    assert log.columns["segment"] == "device,login"
    assert "device" not in log.unused_columns
    with pytest.raises(ColumnError, match="no column 'logn' for the segment; did you mean 'login'"):
        read_log(table, segment="device,logn")
    with pytest.raises(OptionError, match="column 'f1' has two roles"):
        read_log(table, segment="device,f1", features=["f1"])
    named = table.rename_columns(["request", "position", "click", "f1", "device,login", "login"])
    assert read_log(named, segment="device,login").context["segment"].to_pylist() == ["p", None, "d"]


def numbers(values, device="p") -> pa.Table:
    """Return a log with one request of two items for each value of a column `words`."""
    rows = {"request": np.repeat(np.arange(len(values)), 2), "position": np.tile([1, 2], len(values))}
    of_request = {
        "words": pa.array(values).take(np.repeat(np.arange(len(values)), 2)),
        "device": [device] * len(rows["request"]),
    }
    return pa.table({**rows, "click": np.tile([1, 0], len(values)), **of_request})


def test_many_numbers_are_bins_which_later_logs_share(tmp_path):
    table = numbers([*range(1, 13), None])
    log = read_log(table, segment="device,words")
    assert log.columns["segment"] == "device,words:5:9"
    assert log.context["segment"].to_pylist()[::4] == ["p + below 5", "p + 5-8", "p + 9+", "p + "]
    assert log.notes == ("'words' has many values; its segments are below 5, 5-8, 9+ (--segment words:5:9)",)
    later = read_log(numbers([1, 30]), columns=log.columns)
    assert later.context["segment"].to_pylist() == ["p + below 5", "p + 9+"]
    assert later.columns["segment"] == log.columns["segment"]
    assert not later.notes
    write_csv(table, tmp_path / "log.csv")
    assert read_log(tmp_path / "log.csv", segment="words").context["segment"].to_pylist()[::4] == [
        "below 5",
        "5-8",
        "9+",
        None,
    ]


def test_few_numbers_are_values_and_named_bins_are_used():
    assert read_log(numbers([1, 2, 10]), segment="words").context["segment"].to_pylist() == [1, 2, 10]
    named = read_log(numbers([1, 2, 10]), segment="words:2:3")
    assert named.context["segment"].to_pylist() == ["below 2", "2", "3+"]
    with pytest.raises(ColumnError, match="segment column 'device' must hold numbers to have bins"):
        read_log(numbers([1, 2]), segment="device:2")
    with pytest.raises(ColumnError, match="no column 'word' for the segment"):
        read_log(numbers([1, 2]), segment="word:2")


def test_prepared_lists_have_the_named_bins(tmp_path):
    pytest.importorskip("ibis")
    from ultr.log.prepare.pipeline import prepare_lists
    from ultr.log.shards import SPLITS, Shards

    table = numbers([*range(1, 61), None], "d")
    pq.write_table(table.append_column("f1", pa.array(np.arange(122.0))), tmp_path / "log.parquet")
    prepare_lists(tmp_path / "log.parquet", tmp_path / "lists", segment="device,words:20:40")
    found: dict[int, str] = {}
    for split in SPLITS:
        part = Shards(tmp_path / "lists", split).read_all()
        found |= dict(zip(part.request_ids.to_pylist(), part.context["segment"].to_pylist(), strict=True))
    assert [found[k] for k in (0, 18, 19, 38, 39, 59, 60)] == [
        *("d + below 20", "d + below 20", "d + 20-39", "d + 20-39", "d + 40+", "d + 40+", "d + "),
    ]


def test_prepared_lists_have_the_segments_of_the_log(tmp_path):
    pytest.importorskip("ibis")
    from ultr.log.prepare.pipeline import prepare_lists
    from ultr.log.shards import SPLITS, Shards

    device, login = [None, "d", "p"], [True, False, True]
    rows = {"request": np.repeat(np.arange(90), 2), "position": np.tile([1, 2], 90), "click": np.tile([1, 0], 90)}
    table = pa.table(
        {**rows, "f1": np.arange(180.0), "device": np.repeat(device * 30, 2), "login": np.repeat(login * 30, 2)}
    )
    pq.write_table(table, tmp_path / "log.parquet")
    prepare_lists(tmp_path / "log.parquet", tmp_path / "lists", segment="device,login")
    found: dict[int, str] = {}
    for split in SPLITS:
        part = Shards(tmp_path / "lists", split).read_all()
        found |= dict(zip(part.request_ids.to_pylist(), part.context["segment"].to_pylist(), strict=True))
    assert [found[k] for k in range(3)] == [" + true", "d + false", "p + true"]
    Shards(tmp_path / "lists").check_names({"segment": "device,login"})  # its names in the source
    with pytest.raises(OptionError, match="cannot be changed"):
        Shards(tmp_path / "lists").check_names({"segment": "device"})


def test_a_run_on_prepared_lists_has_the_segments_that_they_were_prepared_with(tmp_path):
    pytest.importorskip("ibis")
    from ultr.log.prepare.pipeline import prepare_lists
    from ultr.training.config import make_config
    from ultr.training.data import load_run_data

    rows = {"request": np.repeat(np.arange(90), 2), "position": np.tile([1, 2], 90), "click": np.tile([1, 0], 90)}
    table = pa.table({**rows, "f1": np.arange(180.0), "device": np.repeat(["d", "p"] * 45, 2)})
    pq.write_table(table, tmp_path / "log.parquet")
    prepare_lists(tmp_path / "log.parquet", tmp_path / "lists", segment="device")
    for named in ({}, {"segment": "segment"}, {"segment": "device"}, {"segment": "none"}):
        data = load_run_data(make_config(tmp_path / "lists", columns=named))
        assert data.segments == (() if named == {"segment": "none"} else ("d", "p"))
