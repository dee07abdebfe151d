"""Logs of a grid: rows and columns are one position id, which all ways of reading a log and all outputs name alike."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultr.errors import ColumnError, OptionError, UltrError
from ultr.log import read_log, write_log
from ultr.log.prepare.pipeline import prepare_lists
from ultr.log.readers import read_batches
from ultr.log.shards import Shards
from ultr.log.swaps import parse_swap, swap_text
from ultr.log.table import (
    GRID,
    MOST_GRID_COLUMNS,
    MOST_GRID_ROWS,
    as_shown,
    by_row,
    by_segment,
    grid_ids,
    named_places,
    position_id,
    rows_and_columns,
    slot,
    without_segments,
)

ROWS, COLUMNS = st.integers(0, MOST_GRID_ROWS - 1), st.integers(0, MOST_GRID_COLUMNS - 1)
TABLE = pa.table(
    {
        "request": ["a", "a", "a", "b", "b"],
        "row": [2, 1, 1, 1, 2],
        "column": [1, 2, 1, 1, 2],
        "click": [0, 1, 0, 1, 0],
        "f1": [1.0, 2.0, 3.0, 4.0, 5.0],
        "device": ["phone", "phone", "phone", "desk", "desk"],
    }
)
SLOTS = ["r1c1", "r1c2", "r2c1", "r1c1", "r2c2"]


@given(ROWS, COLUMNS, st.integers(0, 1000))
def test_a_slot_is_its_row_and_column_whatever_its_segment(row, column, segment):
    position = grid_ids(row, column)
    assert rows_and_columns(position + (segment << 20)) == (row, column)
    assert as_shown(position) == slot(position) == f"r{row}c{column}"
    assert position_id(f"r{row}c{column}") == position
    names = tuple(map(str, range(segment + 1)))
    assert slot(position + (segment << 20), names) == f"r{row}c{column}@{segment}"


@given(st.integers(0, 2**62).filter(lambda k: k // GRID != 1))
def test_a_position_in_a_list_is_its_number(position):
    assert as_shown(position) == position == position_id(str(position))


@given(st.lists(st.tuples(ROWS, COLUMNS), min_size=1, unique=True))
def test_ids_increase_in_reading_order_and_values_are_shown_in_their_cells(slots):
    ids = sorted(grid_ids(*each) for each in slots)
    assert ids == [grid_ids(*each) for each in sorted(slots)]
    rows, columns, values = by_row(ids, ids)
    shown = [f"{r}{c}" for r, line in zip(rows, values, strict=True) for c, v in zip(columns, line, strict=True) if v]
    assert shown == [as_shown(k) for k in ids]
    assert all(k is None or as_shown(k).startswith(rows[i] + "c") for i, line in enumerate(values) for k in line)
    assert set(named_places(ids, ())) <= set(range(len(ids)))


@pytest.mark.parametrize("text", ["r1024c1", "r1c512", "r1", "c1", "r-1c2", ""])
def test_a_text_that_is_no_position_is_an_error(text):
    with pytest.raises(ValueError, match=r"invalid literal|rows of a grid"):
        position_id(text)


def slots_of(log) -> list[str]:
    return [slot(k) for k in log.positions.tolist()]


def test_every_way_of_reading_gives_the_same_slots_in_reading_order(tmp_path):
    log = read_log(TABLE)
    assert slots_of(log) == SLOTS
    assert log.columns["position"] == "row,column"
    np.testing.assert_array_equal(log.actions["click"], [0, 1, 0, 1, 0])
    renamed = TABLE.rename_columns(["request", "shelf", "place", "click", "f1", "device"])
    named = read_log(renamed, row="shelf", column="place")
    assert slots_of(named) == SLOTS
    assert slots_of(read_log(renamed, position="shelf,place")) == SLOTS
    assert slots_of(read_log(renamed, columns=named.columns)) == SLOTS  # as a run reads a later log
    write_log(log, tmp_path / "log.parquet")
    assert slots_of(read_log(tmp_path / "log.parquet")) == SLOTS
    batches = read_batches(renamed, feature_names=["f1"], row="shelf", column="place").batches
    assert sorted(k for batch in batches for k in slots_of(batch.log)) == sorted(SLOTS)


def test_prepared_lists_have_the_slots_of_the_log(tmp_path):
    pq.write_table(
        TABLE.rename_columns(["request", "shelf", "place", "click", "f1", "device"]), tmp_path / "log.parquet"
    )
    columns = {"row": "shelf", "column": "place", "features": "f1"}
    manifest = prepare_lists(tmp_path / "log.parquet", tmp_path / "lists", validation=0.0, test=0.0, **columns)
    assert [as_shown(k) for k in manifest.positions] == ["r1c1", "r1c2", "r2c1", "r2c2"]
    lists = Shards(tmp_path / "lists").read_all()
    order = np.argsort(lists.request_ids.to_numpy(zero_copy_only=False))
    assert slots_of(lists.select(order)) == SLOTS


def test_slots_differ_by_segment_and_keep_their_names():
    log, names = by_segment(read_log(TABLE, segment="device"))
    assert names == ("desk", "phone")
    expected = ["r1c1@phone", "r1c2@phone", "r2c1@phone", "r1c1@desk", "r2c2@desk"]
    assert [slot(k, names) for k in log.positions.tolist()] == expected
    assert slots_of(without_segments(log)) == SLOTS


def test_a_position_column_comes_first_and_a_log_without_actions_has_no_guess():
    with_position = TABLE.append_column("position", pa.array([1, 2, 3, 1, 2]))
    assert read_log(with_position).positions.max() == 3
    assert "row" in read_log(with_position).unused_columns
    without_actions = TABLE.drop(["click"])
    assert read_log(without_actions, features="f1").positions is None


@pytest.mark.parametrize(
    ("changed", "named", "error", "message"),
    [
        (
            {},
            {"row": "row"},
            OptionError,
            "a slot of a grid needs a row and a column, got only the row 'row'; name both",
        ),
        (
            {},
            {"row": "row", "column": "column", "position": "f1"},
            OptionError,
            "positions are given twice.*--position for",
        ),
        ({}, {"row": "row", "column": "row"}, OptionError, "column 'row' has two roles"),
        ({}, {"position": "row,column,f1"}, OptionError, "a position must have one column, or a row and a column"),
        ({}, {"row": "rwo", "column": "column"}, ColumnError, "no column 'rwo' for the position; did you mean 'row'"),
        (
            {"column": [1, 2, 1, 1, 512]},
            {},
            ColumnError,
            "columns in column 'column' must be below 512, got 512 in row 5",
        ),
        ({"row": [1024, 1, 1, 1, 2]}, {}, ColumnError, "rows in column 'row' must be below 1,024, got 1024 in row 1"),
        ({"row": [1.5, 1, 1, 1, 2]}, {}, ColumnError, "positions in column 'row' must be whole numbers, got 1.5"),
        ({"row": [-1, 1, 1, 1, 2]}, {}, ColumnError, "positions in column 'row' must not be negative"),
        ({"column": [1, 1, 1, 1, 2]}, {}, ColumnError, "column 'row,column'.*got position r1c1 twice in request 'a'"),
        ({"row": [GRID] * 5}, {"position": "row"}, ColumnError, "must not be from 524,288 to 1,048,575"),
    ],
)
def test_errors_say_what_to_do(changed, named, error, message):
    table = TABLE
    for name, values in changed.items():
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(values))
    with pytest.raises(error, match=message):
        read_log(table, **named)


@pytest.mark.parametrize("wrong", [-1, 1024, 1.5, None])
def test_rows_that_are_no_slots_are_not_prepared(tmp_path, wrong):
    bad = TABLE.set_column(1, "row", pa.array([wrong, 1.0, 1.0, 1.0, 2.0]))
    pq.write_table(bad, tmp_path / "log.parquet")
    with pytest.raises(ColumnError, match="'row,column' must be whole numbers: rows 0 to 1,023, columns 0 to 511, got"):
        prepare_lists(tmp_path / "log.parquet", tmp_path / "lists", features="f1")


def test_reserved_positions_are_not_prepared(tmp_path):
    pq.write_table(TABLE.append_column("position", pa.array([GRID + k for k in range(5)])), tmp_path / "log.parquet")
    with pytest.raises(ColumnError, match="positions in column 'position' must not be from 524,288 to 1,048,575"):
        prepare_lists(tmp_path / "log.parquet", tmp_path / "lists", features="f1")


@given(st.lists(st.tuples(ROWS, COLUMNS), min_size=2, max_size=4, unique=True))
def test_a_swap_of_slots_is_read_as_it_was_written(slots):
    places = tuple(grid_ids(*each) for each in slots)
    assert parse_swap(swap_text(places)) == places


@pytest.mark.parametrize("text", ["r1c1", "r1c1-r1c1", "r9999c1-r1c1", "r1c1-x"])
def test_a_wrong_swap_of_slots_is_an_error(text):
    with pytest.raises(UltrError, match="a swap must have two or more different positions"):
        parse_swap(text)
