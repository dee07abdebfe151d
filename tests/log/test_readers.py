"""The same rows give the same `Log` from every format, and bad input is an error with a hint."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultr.errors import ColumnError, DataError, OptionError, UltrError
from ultr.log import Log, read_log, write_log
from ultr.log import readers as ultr_readers
from ultr.log.readers import read_batches
from ultr.log.sources import open_source

FEATURES = 3


@st.composite
def tables(draw) -> pa.Table:
    """Impressions of a few requests: lists of any length, positions with gaps, rows in any order, a weight each."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    rows = sum(lengths)
    requests = np.repeat(rng.permutation(100)[: len(lengths)], lengths)
    positions = np.concatenate([rng.choice(10**5, n, replace=False) for n in lengths])
    table = {
        "request": requests,
        "position": positions,
        "item": rng.integers(0, 50, rows),
        "click": rng.integers(0, 2, rows),
        "dwell_time": rng.exponential(size=rows),
        "weight": np.repeat(rng.uniform(0.5, 2, len(lengths)), lengths),
        "timestamp": rng.integers(0, 10**9, rows),
        **{f"f{i}": rng.normal(size=rows) for i in range(FEATURES)},
    }
    return pa.table(table).take(pa.array(rng.permutation(rows)))


def expected_log(table: pa.Table) -> dict[str, object]:
    """Compute the expected log with pandas, request by request in order of appearance."""
    frame = table.to_pandas()
    groups = [rows.sort_values("position") for _, rows in frame.groupby("request", sort=False)]
    rows = pd.concat(groups)
    return {
        "requests": [int(g["request"].iloc[0]) for g in groups],
        "lengths": [len(g) for g in groups],
        "positions": rows["position"].to_numpy(),
        "items": rows["item"].to_numpy(),
        "click": rows["click"].to_numpy(np.float32),
        "dwell_time": rows["dwell_time"].to_numpy(np.float32),
        "weights": np.array([g["weight"].iloc[0] for g in groups], np.float32),
        "features": rows[[f"f{i}" for i in range(FEATURES)]].to_numpy(np.float32),
    }


def assert_is(log: Log, expected: dict[str, object]) -> None:
    assert log.request_ids.to_pylist() == expected["requests"]
    assert log.lengths.tolist() == expected["lengths"]
    np.testing.assert_array_equal(log.positions, expected["positions"])
    np.testing.assert_array_equal(log.item_ids.to_numpy(), expected["items"])
    assert list(log.actions) == ["click", "dwell_time"]
    for name in log.actions:
        np.testing.assert_array_equal(log.actions[name], expected[name])
    np.testing.assert_array_equal(log.weights, expected["weights"])
    np.testing.assert_array_equal(log.features, expected["features"])


def as_parquet(table, folder):
    pq.write_table(table, folder / "log.parquet", row_group_size=3)
    return folder / "log.parquet"


def as_shards(table, folder):
    shards = folder / "shards"
    shards.mkdir(exist_ok=True)
    for old in shards.iterdir():
        old.unlink()
    for i, start in enumerate(range(0, table.num_rows, 4)):
        pq.write_table(table.slice(start, 4), shards / f"part-{i:03}.parquet")
    return shards


def as_csv(table, folder):
    pa.csv.write_csv(table, folder / "log.csv")
    return folder / "log.csv"


def as_gzipped_csv(table, folder):
    path = as_csv(table, folder)
    (folder / "log.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    return folder / "log.csv.gz"


def as_tsv(table, folder):
    pa.csv.write_csv(table, folder / "log.tsv", pa.csv.WriteOptions(delimiter="\t"))
    return folder / "log.tsv"


def as_arrow(table, folder):
    with pa.ipc.new_file(str(folder / "log.arrow"), table.schema) as writer:
        writer.write_table(table)
    return folder / "log.arrow"


def as_list_column(table, folder):
    matrix = np.stack([table[f"f{i}"].to_numpy() for i in range(FEATURES)], axis=1)
    return table.drop([f"f{i}" for i in range(FEATURES)]).append_column("features", pa.array(list(matrix)))


def as_nested(table, folder):
    """One row per request, lists of everything else."""
    table = as_list_column(table, folder)
    order = table["request"].unique().to_pylist()
    rows = []
    for request in order:
        group = table.filter(pa.compute.equal(table["request"], request)).to_pydict()
        rows.append({**group, "request": request, "weight": group["weight"][0]})
    return pa.Table.from_pylist(rows)


SHAPES = {
    "parquet": as_parquet,
    "shards": as_shards,
    "csv": as_csv,
    "csv.gz": as_gzipped_csv,
    "tsv": as_tsv,
    "arrow": as_arrow,
    "list column": as_list_column,
    "one row per request": as_nested,
    "table": lambda table, _: table,
    "pandas": lambda table, _: table.to_pandas(),
    "polars": lambda table, _: pl.from_arrow(table),
}


@pytest.mark.parametrize("shape", SHAPES)
@given(table=tables())
def test_every_shape_of_the_same_rows_gives_the_same_log(shape, table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    assert_is(read_log(SHAPES[shape](table, folder)), expected_log(table))


@given(table=tables())
def test_a_written_log_reads_back_equal(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    log = read_log(table)
    write_log(log, path, metadata={"note": "kept"})
    again = read_log(path)
    assert_is(again, expected_log(table))
    assert again.feature_names == log.feature_names == ("f0", "f1", "f2")
    assert pq.read_schema(path).metadata[b"note"] == b"kept"


def test_a_log_of_many_row_groups_reads_back_equal(tmp_path, monkeypatch, shown_log):
    monkeypatch.setattr("ultr.log.table.ROW_GROUP_BYTES", 400)
    write_log(shown_log, tmp_path / "log.parquet")
    assert pq.ParquetFile(tmp_path / "log.parquet").num_row_groups > 5
    again = read_log(tmp_path / "log.parquet")
    np.testing.assert_array_equal(again.features, shown_log.features)
    np.testing.assert_array_equal(again.offsets, shown_log.offsets)
    np.testing.assert_array_equal(again.relevance, shown_log.relevance)


BASE = {"request": [1, 1, 2], "position": [1, 2, 1], "click": [0, 1, 0], "f1": [0.1, 0.2, 0.3], "f2": [1.0, 2.0, 3.0]}


def table_with(**changes) -> pa.Table:
    columns = {**BASE, **changes}
    return pa.table({name: values for name, values in columns.items() if values is not None})


def test_requests_without_feedback_and_requests_of_one_item_are_kept():
    log = read_log(table_with(click=[0, 0, 0]))
    assert len(log) == 2
    assert log.lengths.tolist() == [2, 1]


def test_columns_are_recognised_in_any_case_and_others_are_listed_as_unused():
    log = read_log(pa.table({"QID": [1], "Rank": [3], "Clicked": [1], "price": [9.0], "F_1": [0.5]}))
    assert list(log.actions) == ["Clicked"]
    assert log.feature_names == ("F_1",)
    assert log.unused_columns == ("price",)


def test_features_are_chosen_by_name_and_pattern_in_the_order_asked():
    table = table_with(price=[1, 2, 3])
    assert read_log(table, features="price, f*").feature_names == ("price", "f1", "f2")
    assert read_log(table, features=["f2"]).feature_names == ("f2",)


def test_several_list_columns_and_scalars_stand_side_by_side():
    table = table_with(text=[[1.0, 2.0]] * 3, f2=None)
    log = read_log(table, features=["f1", "text"])
    assert log.feature_names == ("f1", "text[0]", "text[1]")
    np.testing.assert_allclose(log.features[1], [0.2, 1.0, 2.0])


def test_a_log_needs_no_features_and_no_actions():
    assert read_log(table_with(f1=None, f2=None)).features.shape == (3, 0)
    assert read_log(table_with(click=None)).actions == {}


def test_missing_features_are_kept():
    log = read_log(table_with(f1=[0.1, None, float("nan")]))
    assert np.isnan(log.features[:, 0]).tolist() == [False, True, True]


def test_booleans_decimals_and_categories_are_numbers_and_ids():
    table = table_with(click=pa.array([True, False, True]), f1=[Decimal(1), Decimal(2), Decimal(3)])
    log = read_log(table.set_column(0, "request", pa.array(["a", "a", "b"]).dictionary_encode()))
    assert log.actions["click"].tolist() == [1, 0, 1]
    assert log.features[:, 0].tolist() == [1, 2, 3]
    assert log.request_ids.to_pylist() == ["a", "b"]


BAD_TABLES = [
    (dict(request=None), {}, "no column with the request id of each row"),
    (dict(position=None), {}, "row order is not a position"),
    ({}, dict(position="positon"), "no column 'positon' for the position; did you mean 'position'"),
    ({}, dict(actions="clicks"), "no column 'clicks' for the actions; did you mean 'click'"),
    ({}, dict(features="g*"), "no column 'g[*]' for the features"),
    ({}, dict(features="click", actions="click"), "column 'click' has two roles"),
    ({}, dict(features=[1]), "'features' must be a list of strings"),
    ({}, dict(request=5), "'request' must be a string"),
    ({}, dict(missing="kep"), "'missing' must be one of 'reject', 'keep', got 'kep'; did you mean 'keep'"),
    (dict(request=[1.0, float("nan"), 2.0]), {}, r"'request' has 1 missing values \(first in row 2\)"),
    (dict(request=[{"a": 1}, {"a": 1}, {"a": 2}]), {}, "cannot be compared, got type struct"),
    (dict(request=[1, None, 2]), {}, r"'request' has 1 missing values \(first in row 2\)"),
    (dict(position=[1, None, 1]), {}, r"'position' has 1 missing values \(first in row 2\)"),
    (dict(position=[1.5, 2.0, 1.0]), {}, "whole numbers, got 1.5 in row 1"),
    (dict(position=[float("nan"), 2.0, 1.0]), {}, "whole numbers, got nan"),
    (dict(position=[1, -1, 1]), {}, "must not be negative, got -1 in row 2"),
    (dict(position=["a", "b", "c"]), {}, "position column 'position' must hold numbers"),
    (dict(position=[1, 1, 1]), {}, "position 1 twice in request 1"),
    (dict(click=[0, -1, 1]), {}, "finite and not negative in every row, got -1 in row 2"),
    (dict(click=[0, float("inf"), 1]), {}, "got inf in row 2"),
    (dict(click=[0, 1e39, 1]), {}, "got 1e[+]39 in row 2"),
    (dict(click=["x", "y", "z"]), {}, "action column 'click' must hold numbers, got type string"),
    (
        dict(f2=[1.0, None, 2.0]),
        dict(missing="reject"),
        "feature 'f2' has values that are not finite, got nan in row 2",
    ),
    (dict(f2=[1.0, 2.0, float("nan")]), dict(missing="reject"), "missing='reject'"),
    (dict(f2=[1.0, 2.0, float("-inf")]), {}, "feature 'f2' .* got -inf in row 3"),
    (dict(f2=[1.0, 2.0, 1e300]), {}, "got inf in row 3 .* beyond 3.4e38"),
    (dict(f2=["x", "y", "z"]), {}, "feature column 'f2' must hold numbers"),
    (dict(weight=[1, 2, 1]), {}, "one value per request"),
    (dict(weight=[1, 1, 0]), {}, "must be positive"),
    (dict(weight=[1, 1, -1]), {}, "not negative"),
    (dict(features=[[1.0], [1.0, 2.0], [1.0]]), {}, "lists of one length, got lengths 1 to 2"),
    (dict(features=[[1.0], None, [1.0]]), {}, "'features' has 1 missing values"),
]


@pytest.mark.parametrize(("changes", "options", "message"), BAD_TABLES)
def test_a_bad_table_is_an_error_with_a_hint(changes, options, message):
    with pytest.raises(UltrError, match=message):
        read_log(table_with(**changes), **options)


def test_infinite_features_are_an_error_even_if_missing_ones_are_kept():
    with pytest.raises(ColumnError, match="got inf"):
        read_log(table_with(f1=[0.1, None, float("inf")]))


def test_tables_without_rows_and_other_objects_are_errors():
    with pytest.raises(DataError, match="no rows"):
        read_log(table_with().slice(0, 0))
    with pytest.raises(DataError, match="a log must be a path, an Arrow table, or a pandas or polars frame, got list"):
        read_log([1, 2])


def test_repeated_column_names_are_an_error():
    with pytest.raises(ColumnError, match="'click' twice"):
        read_log(pa.Table.from_arrays([pa.array([1])] * 3, names=["request", "click", "click"]))


def test_lists_of_one_request_must_have_the_same_length():
    table = pa.table({"request": [1], "position": [[1, 2]], "click": [[1]]})
    with pytest.raises(ColumnError, match=r"'click' must have as many values as 'position'.*got 1 and 2 in row 1"):
        read_log(table)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.parquet", b"request,position\n1,1\n", "the name says Parquet but the file holds text"),
        ("log.csv", b"PAR1 and so on", "the name says text but the file holds Parquet"),
        ("log.csv.gz", b"request,position\n1,1\n", "the name says gzip but the file holds text"),
        ("log.parquet", b"PAR1" + b"junk" * 20, "cannot be read as Parquet"),
        ("log.arrow", b"ARROW1" + b"junk" * 20, "cannot be read as Arrow"),
        ("log.csv", b'request,position\n1,1\n1,2,3\n', "cannot be read as CSV"),
        ("log.xls", b"anything", "use one of .parquet"),
        ("log.csv", b"", "empty"),
        ("log.csv", b"request,position,click\n", "no rows"),
    ],
)  # fmt: skip
def test_files_whose_content_does_not_match_their_name_are_errors(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_log(tmp_path / name)


def test_gzipped_parquet_and_folders_without_shards_are_errors(tmp_path):
    (tmp_path / "log.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    with pytest.raises(DataError, match="gzipped Parquet files are not supported"):
        read_log(tmp_path / "log.parquet.gz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder has no data files; pass a file, or a folder of Parquet, CSV"):
        read_log(tmp_path / "empty")


def test_shards_that_differ_are_an_error(tmp_path):
    pq.write_table(table_with(), tmp_path / "a.parquet")
    pq.write_table(table_with(f2=None), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet"):
        read_log(tmp_path)


def test_only_the_columns_that_play_a_part_are_read(tmp_path, monkeypatch):
    pq.write_table(table_with(big=["x" * 1000] * 3), tmp_path / "log.parquet")
    asked = []
    real = pq.read_table

    def spy(path, columns, **options):
        asked.extend(columns)
        return real(path, columns=columns, **options)

    monkeypatch.setattr(pq, "read_table", spy)
    read_log(tmp_path / "log.parquet")
    assert asked == ["request", "position", "click", "f1", "f2"]


def test_column_names_with_dots_are_plain_names(tmp_path):
    pq.write_table(table_with(**{"f.3": [7.0, 8.0, 9.0]}), tmp_path / "log.parquet")
    log = read_log(tmp_path / "log.parquet")
    assert log.feature_names == ("f1", "f2", "f.3")
    assert log.features[:, 2].tolist() == [7, 8, 9]


def test_real_clicks_of_a_search_engine_are_read_as_they_come(real_data):
    log = read_log(real_data("yandex-clicks") / "impressions.csv.gz")
    assert (len(log), log.rows, int(log.actions["click"].sum())) == (35064, 350640, 42703)
    assert (log.unused_columns, len(log.context["query"].unique())) == ((), 20)


def test_columns_of_a_log_that_do_not_fit_are_errors():
    good = dict(
        features=np.zeros((2, 1), np.float32),
        offsets=np.array([0, 2]),
        request_ids=pa.array([1]),
        feature_names=("a",),
    )
    assert len(Log(**good)) == 1
    for change in (
        {"positions": np.array([1])},
        {"feature_names": ("a", "b")},
        {"offsets": np.array([0, 1])},
        {"offsets": np.array([0, 0, 2]), "request_ids": pa.array([1, 2])},
        {"weights": np.ones(2, np.float32)},
    ):
        with pytest.raises(DataError):
            Log(**{**good, **change})


def test_selecting_requests_takes_all_that_belongs_to_them():
    log = read_log(table_with(weight=[1, 1, 2], item=["a", "b", "c"]))
    twice = log.select([1, 0, 1])
    assert twice.request_ids.to_pylist() == [2, 1, 2]
    assert twice.lengths.tolist() == [1, 2, 1]
    assert twice.item_ids.to_pylist() == ["c", "a", "b", "c"]
    assert twice.weights.tolist() == [2, 1, 2]
    assert twice.request_of_row.tolist() == [0, 1, 1, 2]
    np.testing.assert_allclose(twice.features[:, 0], [0.3, 0.1, 0.2, 0.3])


def test_feature_names_ride_in_the_schema():
    metadata = read_log(table_with()).to_table().schema.metadata
    assert json.loads(metadata[b"ultr.feature_names"]) == ["f1", "f2"]


def test_an_option_error_is_for_the_call_and_a_column_error_for_the_data():
    with pytest.raises(OptionError):
        read_log(table_with(), features=["click"], actions=["click"])
    with pytest.raises(ColumnError):
        read_log(table_with(click=["a", "b", "c"]))


def test_a_column_the_caller_gives_a_part_is_not_taken_for_another():
    table = table_with(weight=[5.0, 6.0, 7.0], comment=["a", "b", "c"])
    log = read_log(table, features=["weight", "f1"])
    assert log.weights is None
    assert log.feature_names == ("weight", "f1")
    assert set(log.unused_columns) == {"f2", "comment"}


def test_categories_become_codes_and_are_written_as_they_were(tmp_path):
    table = table_with(shop=["b", None, "a"], brand=[7, 8, 7])
    log = read_log(table, categorical=["shop", "brand"])
    assert log.feature_names == ("f1", "f2", "shop", "brand")
    assert log.features[:, 2:].tolist() == [[2, 1], [0, 2], [1, 1]]  # codes follow the sorted values
    assert log.vocabularies["shop"].to_pylist() == ["a", "b"]
    assert log.vocabularies["brand"].to_pylist() == ["7", "8"]
    write_log(log, tmp_path / "log.parquet")
    again = read_log(tmp_path / "log.parquet")
    assert again.feature_names == log.feature_names
    np.testing.assert_array_equal(again.features, log.features)
    with pytest.raises(ColumnError, match="cannot be categorical"):
        read_log(table_with(shop=[{"a": 1}] * 3), categorical="shop")


def test_polars_text_is_read_whatever_its_type():
    frame = pl.DataFrame(
        {"request": ["b", "a", "b"], "position": [2, 1, 1], "click": [1, 0, 0], "item": ["x", "y", "z"]}
    )
    for kind in (pl.String, pl.Categorical, pl.Enum(["a", "b"])):
        log = read_log(frame.with_columns(pl.col("request").cast(kind)))
        assert log.request_ids.to_pylist() == ["b", "a"]
        assert log.item_ids.to_pylist() == ["z", "x", "y"]


@pytest.mark.parametrize("ids", [("007", "7"), ("9223372036854775808", "9223372036854775809"), ("12e4", "120e3")])
def test_ids_in_csv_that_differ_in_writing_stay_apart(tmp_path, ids):
    (tmp_path / "log.csv").write_text(f"request,position,click\n{ids[0]},1,0\n{ids[1]},2,1\n")
    assert read_log(tmp_path / "log.csv").request_ids.to_pylist() == list(ids)


def test_csv_may_have_a_mark_spaces_semicolons_and_windows_line_ends(tmp_path):
    (tmp_path / "log.csv").write_bytes("\ufeffrequest; position ;click\r\n1;1;0\r\n1;2;1\r\n".encode())
    log = read_log(tmp_path / "log.csv")
    assert log.request_ids.to_pylist() == [1]
    assert log.actions["click"].tolist() == [0, 1]


def test_missing_ids_in_csv_are_an_error(tmp_path):
    (tmp_path / "log.csv").write_text("request,position,click\na,1,0\n,2,1\n")
    with pytest.raises(ColumnError, match=r"'request' has 1 missing values \(first in row 2\)"):
        read_log(tmp_path / "log.csv")


def test_actions_of_any_name_can_be_written_and_reserved_names_are_errors(tmp_path):
    log = read_log(table_with(tap=[1, 0, 2]), actions=["tap"])
    write_log(log, tmp_path / "log.parquet")
    assert list(read_log(tmp_path / "log.parquet").actions) == ["tap"]
    with pytest.raises(DataError, match="name of another column"):
        replace(log, actions={"position": log.actions["tap"]})


def test_a_log_with_repeated_ids_is_not_written(tmp_path):
    log = read_log(table_with())
    with pytest.raises(DataError, match="two requests have the same id"):
        write_log(log.select([0, 0]), tmp_path / "log.parquet")
    with pytest.raises(DataError, match="no requests"):
        write_log(log.select([]), tmp_path / "log.parquet")
    with pytest.raises(OptionError, match=r"\.parquet"):
        write_log(log, tmp_path / "log.csv")
    assert list(tmp_path.iterdir()) == []


def test_shards_with_other_features_and_folders_with_other_data_are_errors(tmp_path):
    for i, names in enumerate((("p", "q"), ("q", "p"))):
        table = table_with(f1=None, f2=None, request=[10 * i, 10 * i, 10 * i + 1], p=[1.0, 2.0, 3.0], q=[4.0, 5.0, 6.0])
        write_log(read_log(table, features=names), tmp_path / f"{i}.parquet")
    with pytest.raises(DataError, match=r"1\.parquet: its features differ from the features of .*0\.parquet"):
        read_log(tmp_path)
    (tmp_path / "1.parquet").rename(tmp_path / "_1.parquet")
    assert len(read_log(tmp_path)) == 2
    (tmp_path / "more.csv").write_text("request,position\n1,1\n")
    with pytest.raises(DataError, match=r"data files of several formats, got more\.csv"):
        read_log(tmp_path)


def test_scores_of_any_number_type_are_taken_as_numbers(shown_log):
    grades = shown_log.relevance.astype(np.uint8)
    np.testing.assert_array_equal(shown_log.check_scores(grades), grades.astype(np.float64))
    for scores in (grades.astype(str), grades[:-1], np.full(shown_log.rows, np.nan), grades * 1j):
        with pytest.raises(DataError):
            shown_log.check_scores(scores)


def test_requests_are_selected_by_mask_and_out_of_range_is_an_error():
    log = read_log(table_with())
    assert log.select(np.array([False, True])).request_ids.to_pylist() == [2]
    with pytest.raises(DataError, match="must be 0 to 1"):
        log.select([2])


def test_an_empty_file_is_called_empty_whatever_its_name(tmp_path):
    path = tmp_path / "log.parquet"
    path.touch()
    with pytest.raises(DataError, match="the file is empty"):
        open_source(path)


@pytest.fixture(scope="module")
def bomb(tmp_path_factory):
    """A file of some kilobytes with five million equal rows."""
    path = tmp_path_factory.mktemp("bomb") / "bomb.parquet"
    values = {"request": "a request", "position": 1, "click": 0, "feature_a": 0.5}
    pq.write_table(pa.table({name: pa.repeat(value, 5_000_000) for name, value in values.items()}), path)
    assert path.stat().st_size < 200_000
    return path


@pytest.mark.parametrize("command", ["describe", "train", "bias", "explore"])
def test_a_small_file_with_too_many_rows_for_the_memory_is_an_error(command, bomb, ultr, tmp_path, monkeypatch):
    monkeypatch.setattr(ultr_readers, "available_memory", lambda: 256 << 20)
    done = ultr(command, bomb, *(["--out", tmp_path / "run"] if command == "train" else []))
    message = r"the log does not fit in memory, got at least 0\.[45] GiB for 5,000,000 rows; 0\.2 GiB are free"
    assert (done.returncode, bool(re.search(message, done.stderr))) == (5, True), done.stderr


def test_a_list_that_does_not_fit_in_memory_is_an_error(tmp_path, monkeypatch):
    lists = pa.ListArray.from_arrays(pa.array([0, 5_000_000], pa.int32()), pa.repeat(0.5, 5_000_000))
    table = {"request": pa.array(["a"]), "position": pa.array([[1]]), "features": lists}
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    monkeypatch.setattr(ultr_readers, "available_memory", lambda: 32 << 20)
    with pytest.raises(DataError, match=r"a row does not fit in memory, got 5,000,00. values in a row"):
        list(read_batches(tmp_path / "log.parquet", feature_names=("features",)).batches)
