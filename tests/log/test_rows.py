"""Rows of a log that need a decision: repeated rows, missing actions, conditions, times, and JSON Lines."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ultr.errors import ColumnError, DataError, OptionError
from ultr.log import read_log
from ultr.log import readers as jsonlines_module
from ultr.log.delays import old_enough
from ultr.log.prepare.pipeline import prepare_lists
from ultr.log.readers import read_batches
from ultr.log.shards import Shards
from ultr.log.splits import split_by_time


def table(**changes):
    columns = {
        "request": ["a", "a", "a", "b", "b"],
        "position": [1, 2, 2, 1, 2],
        "item": [7, 8, 8, 7, 9],
        "click": [1.0, 0.0, 1.0, 0.0, 1.0],
        "f1": [1.0, 2.0, 3.0, 4.0, 5.0],
    }
    return pa.table({**columns, **changes})


# --- Repeated rows ----------------------------------------------------------------------------------------------------


def test_a_repeated_position_is_an_error_that_names_the_option_and_the_count():
    with pytest.raises(ColumnError, match=r"position 2 twice in request 'a' \(1 such rows in all\).*on_duplicates"):
        read_log(table())


def test_the_first_of_repeated_rows_is_kept():
    log = read_log(table(), on_duplicates="first")
    assert log.features[:, 0].tolist() == [1, 2, 4, 5]
    assert log.actions["click"].tolist() == [1, 0, 0, 1]
    assert log.item_ids.to_pylist() == [7, 8, 7, 9]
    assert "1 rows repeat the item (column 'item')" in log.notes[0]


@pytest.mark.parametrize("prepared", [False, True])
def test_dropping_many_rows_as_repeated_is_an_error_that_names_the_request_column(prepared, tmp_path):
    rows = np.arange(1200)
    frame = pd.DataFrame({"request": rows // 6, "position": rows % 6, "item": rows, "f1": 1.0 * rows})
    frame["click"] = rows % 2
    path = tmp_path / "log.parquet"

    def read(log):
        log.to_parquet(path, index=False)
        if prepared:
            return prepare_lists(path, tmp_path / "lists", on_duplicates="first", overwrite=True).about["notes"]
        return read_log(path, on_duplicates="first").notes

    visitor = frame.assign(request=frame["request"] // 2)  # two lists have one id
    with pytest.raises(ColumnError, match=r"drop 50% of the rows.*600 of 1,200.*check the request column 'request'"):
        read(visitor)
    few = pd.concat([frame, frame.head(40).assign(item=rows[:40] + 5000)])  # 3% of the rows
    assert any(note.startswith("40 rows repeat the ") for note in read(few))
    copies = pd.concat([frame, frame])  # all events were delivered twice
    assert any(note.startswith("1,200 rows are equal to another row") for note in read(copies))


def test_the_actions_of_repeated_rows_are_added_up():
    log = read_log(table(click=[1.0, 2.0, 3.0, None, 1.0]), on_duplicates="sum")
    assert log.actions["click"].tolist() == [1, 2 + 3, 0, 1]
    assert log.features[:, 0].tolist() == [1, 2, 4, 5]
    assert [note.split(";")[0] for note in log.notes] == [
        "1 rows have no value in action column 'click'",
        "1 rows repeat the item (column 'item') of another row of their request",
    ]


def test_merging_depends_on_rows_in_any_order_as_a_loop_does():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"request": rng.integers(0, 40, 400), "position": rng.integers(1, 8, 400)})
    frame["item"], frame["click"], frame["f1"] = rng.integers(0, 12, 400), rng.integers(0, 3, 400), np.arange(400)
    kept = {}
    for key in ("item", "position"):  # first the rows of an item are merged, then those of a position
        merged, kept = kept or {row: frame.loc[row, "click"] for row in range(400)}, {}
        first = {}
        for row, click in merged.items():
            place = first.setdefault((frame.loc[row, "request"], frame.loc[row, key]), row)
            kept[place] = kept.get(place, 0) + click
    log = read_log(frame, on_duplicates="sum")
    assert dict(zip(log.features[:, 0].astype(int).tolist(), log.actions["click"].tolist(), strict=True)) == kept


def test_items_at_several_positions_are_kept_with_a_note():
    log = read_log(table(position=[1, 2, 3, 1, 2]))
    assert log.rows == 5
    assert "1 rows repeat the item (column 'item') of another row of their request; they are kept" in log.notes[0]
    assert read_log(table(position=[1, 2, 3, 1, 2], item=[7, None, None, 7, 9])).notes == ()


def test_large_positions_are_compared_exactly():
    log = read_log(table(position=[2**60, 2**61, 2**62, 1, 2], item=[1, 2, 3, 4, 5]))
    assert log.positions.tolist() == [2**60, 2**61, 2**62, 1, 2]


@pytest.mark.parametrize("choice", ["error", "first", "sum"])
def test_rows_that_were_delivered_twice_count_once(choice, tmp_path):
    once = table(position=[1, 2, 3, 1, 2], item=[7, 8, 9, 7, 9], click=[1, None, 1, 0, 1], f2=[np.nan, 1, 2, 3, 4])
    twice = pa.concat_tables([once, once.slice(1, 3)]).take([3, 5, 1, 0, 7, 6, 4, 2])
    given = {"missing": "keep", "on_duplicates": choice}
    log, expected = read_log(twice, **given), read_log(once.take([3, 1, 0, 4, 2]), **given)
    assert log.notes[0] == "3 rows are equal to another row of their request in all columns; only one of each is kept"
    assert log.notes[1:] == expected.notes  # 1 row has no value in the column of clicks
    assert log.actions["click"].tolist() == expected.actions["click"].tolist()
    assert log.features.tobytes() == expected.features.tobytes()
    whole = twice.drop(["f2"])  # prepared lists have no missing features
    lists = whole.append_column("features", pa.array([[f, 0.0] for f in whole["f1"].to_pylist()])).drop(["f1"])
    assert read_log(lists, on_duplicates=choice).rows == 5
    pq.write_table(whole, tmp_path / "log.parquet")
    manifest = prepare_lists(tmp_path / "log.parquet", tmp_path / "lists", on_duplicates=choice, test=0, validation=0)
    assert log.notes[0] in manifest.about["notes"]
    prepared = Shards(tmp_path / "lists").read_all()
    assert sorted(prepared.actions["click"].tolist()) == [0, 0, 1, 1, 1]
    assert prepared.rows == 5


@pytest.mark.parametrize("items", [{}, {"item": pa.array([None] * 4, pa.int64())}])
@pytest.mark.parametrize("choice", ["error", "first", "sum"])
def test_rows_without_item_ids_that_were_delivered_twice_count_once(choice, items, tmp_path):
    rows = {"request": ["a", "a", "a", "b"], "position": [1, 2, 1, 1], "click": [1, 0, 1, 1], "f1": [1.0, 1, 1, 1]}
    table = pa.table({**rows, **items})
    log = read_log(table, on_duplicates=choice)
    assert (log.lengths.tolist(), log.actions["click"].tolist()) == ([2, 1], [1, 0, 1])
    assert log.notes == ("1 rows are equal to another row of their request in all columns; only one of each is kept",)
    pq.write_table(table, tmp_path / "log.parquet")
    manifest = prepare_lists(tmp_path / "log.parquet", tmp_path / "lists", on_duplicates=choice, test=0, validation=0)
    assert log.notes[0] in manifest.about["notes"]
    prepared = Shards(tmp_path / "lists").read_all()
    assert (prepared.rows, prepared.actions["click"].sum()) == (3, 2)


def test_equal_rows_at_different_positions_without_an_item_are_two_items():
    rows = {"request": ["a", "a"], "click": [0, 0], "f1": [1, 1]}
    assert read_log(pa.table({**rows, "position": [1, 2]})).rows == 2
    assert read_log(pa.table({"request": ["a", "a"], "f1": [1, 1]})).rows == 2


def test_rows_of_two_lists_with_one_id_are_no_copies_although_some_are_equal():
    rows = {"request": ["a"] * 4, "position": [1, 2, 1, 2]}
    assert read_log(pa.table({**rows, "click": [0, 1, 0, 1]})).rows == 2
    with pytest.raises(ColumnError, match=r"position 1 twice in request 'a' \(2 such rows in all\)"):
        read_log(pa.table({**rows, "click": [0, 0, 0, 1]}))


def test_repeated_rows_of_lists_are_merged(tmp_path):
    frame = pd.DataFrame({"request": np.arange(400) // 2, "position": np.arange(400) % 2, "click": np.arange(400) % 2})
    frame["item"], frame["f1"] = np.arange(400), 1.0
    path = tmp_path / "log.parquet"
    pd.concat([frame, frame.tail(10).assign(f1=2.0)]).to_parquet(path, index=False)
    with pytest.raises(ColumnError, match=r"10 items have the same position .* on_duplicates"):
        prepare_lists(path, tmp_path / "error", on_duplicates="error")
    for choice, clicks in (("first", 200), ("sum", 205)):
        manifest = prepare_lists(path, tmp_path / choice, on_duplicates=choice)
        logs = [Shards(tmp_path / choice, split).read_all() for split in manifest.splits]
        assert sum(log.rows for log in logs) == 400
        assert all((log.lengths == 2).all() for log in logs)
        assert sum(log.actions["click"].sum() for log in logs) == clicks
        assert any(note.startswith("10 rows repeat the item or position") for note in manifest.about["notes"])


# --- Missing actions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[1, None, 0, None, 1], [1.0, float("nan"), 0.0, None, 1.0], [None] * 5])
def test_missing_actions_are_zero_with_a_note(values):
    log = read_log(table(position=[1, 2, 3, 1, 2], item=[1, 2, 3, 4, 5], click=pa.array(values)))
    count = int(pd.isna(values).sum())
    assert log.actions["click"].tolist() == [1 if value == 1 else 0 for value in values]
    assert log.notes == (f"{count} rows have no value in action column 'click'; they count as 0",)


def test_missing_actions_of_lists_are_zero_with_a_note(tmp_path):
    frame = pd.DataFrame({"request": np.arange(400) // 2, "position": np.arange(400) % 2, "f1": 1.0 * np.arange(400)})
    frame["click"] = np.where(np.arange(400) % 3 == 0, np.nan, np.arange(400) % 2)
    frame.to_csv(tmp_path / "log.csv", index=False)
    manifest = prepare_lists(tmp_path / "log.csv", tmp_path / "lists")
    assert "134 rows have no value in action column 'click'; they count as 0" in manifest.about["notes"]
    clicks = sum(Shards(tmp_path / "lists", split).read_all().actions["click"].sum() for split in manifest.splits)
    assert clicks == sum(i % 2 for i in range(400) if i % 3)


# --- Conditions and times ---------------------------------------------------------------------------------------------


def market(tmp_path, suffix=".parquet"):
    frame = pd.DataFrame({"request": np.arange(60) // 3, "position": np.arange(60) % 3, "click": np.arange(60) % 2})
    frame["market"] = np.where(frame["request"] % 4 == 0, "fr", "de")
    frame["time"] = pd.Timestamp("2024-05-01") + pd.to_timedelta(frame["request"] // 2, unit="h")
    frame["stock"], frame["f1"] = np.where(frame["request"] < 5, np.nan, frame["request"]), 1.0 * np.arange(60)
    path = tmp_path / f"log{suffix}"
    {
        ".parquet": lambda: frame.to_parquet(path, index=False),
        ".csv": lambda: frame.to_csv(path, index=False),
        ".jsonl": lambda: frame.assign(time=frame["time"].astype(str)).to_json(path, orient="records", lines=True),
    }[suffix]()
    return path


CONDITIONS = [
    (["market = de"], [i for i in range(20) if i % 4]),
    (["market != 'de'", "stock >= 8"], [8, 12, 16]),
    (["time >= 2024-05-01T08:00"], [16, 17, 18, 19]),
    (["position > 0", "time < 2024-05-01T01:00"], [0, 1]),
    (["stock < 7"], [5, 6]),
]


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
@pytest.mark.parametrize(("conditions", "expected"), CONDITIONS)
def test_conditions_choose_rows_in_every_format(conditions, expected, suffix, tmp_path):
    log = read_log(market(tmp_path, suffix), where=conditions)
    assert log.request_ids.to_pylist() == expected
    assert (log.lengths == (2 if conditions[0].startswith("position") else 3)).all()


def test_conditions_and_times_are_checked(tmp_path):
    path = market(tmp_path)
    for error, message, options in (
        (OptionError, "a condition must be COLUMN OP VALUE", {"where": ["market"]}),
        (ColumnError, "no column 'markt' for the condition 'markt = de'", {"where": ["markt = de"]}),
        (OptionError, "must be a number, got 'many'", {"where": ["stock > many"]}),
        (DataError, "there are no rows", {"where": ["market = it"]}),
        (ColumnError, "no column 'tiem' for the time", {"time": "tiem"}),
        (ColumnError, "time column 'market' must hold times", {"time": "market"}),
        (ColumnError, "time column 'stock' has 15 missing values", {"time": "stock"}),
    ):
        with pytest.raises(error, match=message):
            read_log(path, **options)


WRITTEN = {
    "Z": lambda times: times.dt.strftime("%Y-%m-%dT%H:%M:%SZ"),
    "blank": lambda times: times.dt.strftime("%Y-%m-%d %H:%M:%S"),
    "zone": lambda times: (times + pd.Timedelta(hours=2)).dt.strftime("%Y-%m-%dT%H:%M:%S+02:00"),
    "mixed": lambda times: times.dt.strftime("%Y-%m-%dT%H:%M:%S").where(times.dt.hour % 2 == 0, WRITTEN["zone"](times)),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_texts_in_iso_8601_are_times(how, tmp_path):
    path = market(tmp_path)
    frame = pd.read_parquet(path)
    seconds = (frame["time"] - pd.Timestamp("1970-01-01")) // pd.Timedelta(seconds=1)
    frame["text"] = WRITTEN[how](frame["time"])
    frame["bought"] = frame["text"].where(frame["click"] > 0, "")
    frame.astype({"text": "string"}).to_parquet(path, index=False)
    log = read_log(path, time="text", extra=["bought"])
    assert log.context["time"].to_pylist() == seconds[::3].tolist()
    np.testing.assert_array_equal(log.extra["bought"], seconds.where(frame["click"] > 0))
    later, clock = (f"{name} >= 2024-05-01 08:00" for name in ("text", "time"))
    assert read_log(path, where=[later]).request_ids.to_pylist() == [16, 17, 18, 19]
    assert old_enough(str(path), {"click": "2h"}, time="text") == "text <= 2024-05-01T07:00:00"
    shards = []
    for name, condition in (("text", later), ("time", clock)):
        options = {"split": "time", "time": name, "validation_from": "2024-05-01T09:00", "features": ["f1"]}
        prepare_lists(path, tmp_path / name, where=[condition], **options)
        logs = [Shards(tmp_path / name, split).read_all() for split in ("train", "validation")]
        shards.append([sorted(log.request_ids.to_pylist()) for log in logs])
    assert shards == [[[16, 17], [18, 19]]] * 2


def test_a_text_that_is_no_time_is_an_error_that_shows_it(tmp_path):
    frame = pd.read_parquet(path := market(tmp_path))
    frame["text"] = ["2024-05-01"] * 59 + ["yesterday"]
    frame.to_parquet(path, index=False)
    with pytest.raises(ColumnError, match=r"'text' must hold times, got the text 'yesterday'; write times as"):
        read_log(path, time="text")
    with pytest.raises(ColumnError, match=r"'text' must hold numbers or times, got the text 'yesterday'"):
        read_log(path, extra=["text"])
    with pytest.raises(ColumnError, match=r"'text' has 1 missing values, or texts that are not times such as"):
        prepare_lists(path, tmp_path / "lists", split="time", time="text", features=["f1"])
    assert read_log(path, where=["text > 2024-05-02"]).rows == 1  # as texts


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_the_last_requests_are_held_out_by_time(suffix, tmp_path):
    log = read_log(market(tmp_path, suffix), time="time")
    train, validation, test = split_by_time(log, 0.2, 0.1)
    assert (train.tolist(), validation.tolist(), test.tolist()) == (list(range(14)), [14, 15, 16, 17], [18, 19])
    assert log.context["time"][0].as_py() == pd.Timestamp("2024-05-01").timestamp()


# --- JSON Lines -------------------------------------------------------------------------------------------------------


def json_rows():
    for i in range(60):
        row = {"qid": f"q{i // 3}", "rank": i % 3, "features": [i, i / 2], "item": f"{i:03}"}
        yield row | ({"click": i % 2} if i % 5 else {})


@pytest.mark.parametrize("name", ["log.jsonl", "log.ndjson", "log.jsonl.gz"])
def test_json_lines_are_a_log(name, tmp_path, monkeypatch):
    monkeypatch.setattr(jsonlines_module, "BLOCK_BYTES", 500)  # several blocks
    text = "".join(json.dumps(row) + "\n" for row in json_rows()).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    log = read_log(tmp_path / name)
    assert (len(log), log.rows, log.feature_names) == (20, 60, ("features[0]", "features[1]"))
    assert log.features[:, 1].tolist() == [i / 2 for i in range(60)]
    assert log.item_ids[7].as_py() == "007"
    assert log.notes == ("12 rows have no value in action column 'click'; they count as 0",)
    batches = list(read_batches(tmp_path / name, feature_names=log.feature_names).batches)
    assert len(batches) > 1
    assert np.concatenate([batch.log.features for batch in batches]).tolist() == log.features.tolist()


def test_json_lines_are_prepared_as_parquet_is(tmp_path):
    rows = [row | {"click": row.get("click", 0)} for row in json_rows()]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    logs = []
    for name in ("log.parquet", "log.jsonl"):
        prepare_lists(tmp_path / name, tmp_path / f"{name}-lists")
        logs.append(Shards(tmp_path / f"{name}-lists").read_all())
    assert logs[0].request_ids.equals(logs[1].request_ids)
    assert logs[0].features.tolist() == logs[1].features.tolist()


def test_lines_that_are_not_json_are_an_error(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"request": 1}\nrequest=2\n')
    with pytest.raises(DataError, match="cannot be read as JSON Lines"):
        read_log(tmp_path / "log.jsonl")
