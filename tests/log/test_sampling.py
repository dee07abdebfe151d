"""A log read for an audit: all rows without features and a sample with them, from every kind of source."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from bias.worlds import world
from ultr.errors import ColumnError, DataError
from ultr.log import read_log, sampling, write_log
from ultr.log.sampling import read_for_audit


@pytest.fixture
def log():
    return world("random", requests=300, features=3)


@pytest.fixture
def large(monkeypatch):
    """Every Parquet log is read as if it did not fit into memory."""
    monkeypatch.setattr(sampling, "WHOLE_ROWS", 0)


def assert_same(a, b):
    np.testing.assert_array_equal(a.features, b.features)
    np.testing.assert_array_equal(a.offsets, b.offsets)
    np.testing.assert_array_equal(a.positions, b.positions)
    assert a.feature_names == b.feature_names
    assert a.request_ids.to_pylist() == b.request_ids.to_pylist()
    assert a.item_ids.to_pylist() == b.item_ids.to_pylist()
    for name in a.actions:
        np.testing.assert_array_equal(a.actions[name], b.actions[name])
    assert {k: v.to_pylist() for k, v in a.context.items()} == {k: v.to_pylist() for k, v in b.context.items()}


def of_requests(log, some):
    """Return the requests of a log that are also in another."""
    return log.select(np.isin(log.request_ids.to_numpy(zero_copy_only=False), some.request_ids))


def test_a_sample_has_the_rows_of_its_requests(log, tmp_path):
    write_log(log, tmp_path / "log.parquet")
    light, some = read_for_audit(tmp_path / "log.parquet", sample_rows=500)
    assert_same(light, log.without_features())
    assert len(some) == 100
    assert_same(some, of_requests(log, some))


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_large_log_is_read_as_a_small_one_is(log, tmp_path, large, shuffled, monkeypatch):
    path = tmp_path / "log.parquet"
    table = log.to_table()
    if shuffled:
        table = table.take(pa.array(np.random.default_rng(0).permutation(log.rows)))
    pq.write_table(table, path, row_group_size=100)
    light, some = read_for_audit(path, sample_rows=500)
    monkeypatch.undo()
    expected_light, expected = read_for_audit(path, sample_rows=500)
    assert_same(light, expected_light)
    assert_same(some, expected)
    assert_same(some, of_requests(read_log(path), some))


def test_shards_are_read_as_one_log(log, tmp_path, large):
    table = log.to_table()
    for number, (start, stop) in enumerate([(0, 702), (702, 900), (900, 1500)]):  # a request lies in two of them
        pq.write_table(table.slice(start, stop - start), tmp_path / f"{number}.parquet")
    light, some = read_for_audit(tmp_path, sample_rows=700)
    assert_same(light, log.without_features())
    assert len(some) == 140
    assert_same(some, of_requests(log, some))


def test_requests_may_be_texts_or_categories(log, tmp_path, large):
    table, path = log.to_table(), tmp_path / "log.parquet"
    names = table["request"].cast(pa.string())
    for values in (names, names.dictionary_encode()):
        pq.write_table(table.set_column(0, "request", values), path)
        light, some = read_for_audit(path, sample_rows=500)
        assert len(light) == 300
        chosen = np.array(some.request_ids.to_pylist()).astype(int)
        np.testing.assert_array_equal(some.features, log.select(chosen).features)


def test_columns_are_named_as_for_any_log(log, tmp_path, large):
    table = pa.table(
        {
            "visit": log.request_ids.take(pa.array(log.request_of_row)),
            "place": log.positions,
            "bought": log.actions["click"],
            "price": log.features[:, 0],
            "brand": pa.array([f"b{i % 7}" for i in range(log.rows)]),
            "x1": log.features[:, 1],
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    named = {"request": "visit", "position": "place", "actions": "bought", "features": "price", "categorical": "brand"}
    light, some = read_for_audit(tmp_path / "log.parquet", sample_rows=500, **named)
    assert light.feature_names == ()
    assert list(light.actions) == ["bought"]
    assert some.feature_names == ("price", "brand")
    assert len(some.vocabularies["brand"]) == 7
    assert_price = of_requests(log, some).features[:, 0]
    np.testing.assert_array_equal(some.features[:, 0], assert_price)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_csv_is_read(log, tmp_path, suffix):
    table = log.to_table().drop_columns(["features"])
    for i in range(3):
        table = table.append_column(f"x{i}", pa.array(log.features[:, i]))
    path = tmp_path / f"log{suffix}"
    with pa.output_stream(str(path), compression="gzip" if suffix.endswith("gz") else None) as stream:
        pa.csv.write_csv(table, stream)
    light, some = read_for_audit(path, sample_rows=500)
    assert_same(light, log.without_features())
    assert len(some) == 100
    assert_same(some, of_requests(log, some))


@pytest.mark.parametrize("rows", [0, 10**9])
def test_a_log_without_features_has_no_sample(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(sampling, "WHOLE_ROWS", rows)
    log = world("random", requests=20)
    write_log(log, tmp_path / "log.parquet")
    light, some = read_for_audit(tmp_path / "log.parquet")
    assert some is None
    assert_same(light, log)


def test_a_sample_is_repeatable_by_its_seed_and_as_large_as_asked_for(log, tmp_path, monkeypatch):
    path = tmp_path / "log.parquet"
    write_log(log, path)

    def ids(seed, rows=500):
        return read_for_audit(path, sample_rows=rows, seed=seed)[1].request_ids.to_pylist()

    assert ids(1) == ids(1) != ids(2)
    assert ids(1) == sorted(ids(1))
    assert len(ids(0, rows=10**6)) == 300
    assert len(ids(0, rows=1)) == 1  # never none
    monkeypatch.setattr(sampling, "SAMPLE_VALUES", 300)  # many features make for fewer rows
    assert len(ids(0)) == 300 // 3 // 5


def test_a_file_that_cannot_be_read_is_an_error(log, tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_for_audit(tmp_path / "nowhere.parquet")
    write_log(log, tmp_path / "log.parquet")
    with pytest.raises(ColumnError, match="no column 'rank' for the position"):
        read_for_audit(tmp_path / "log.parquet", position="rank")


@pytest.mark.parametrize("content", ["", "this is no Parquet"])
def test_a_broken_file_is_an_error(tmp_path, content):
    (tmp_path / "log.parquet").write_text(content)
    with pytest.raises(DataError):
        read_for_audit(tmp_path / "log.parquet")


@pytest.mark.parametrize("whole", [True, False])
def test_missing_values_of_features_are_kept(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "WHOLE_ROWS", 100_000 if whole else 0)
    rng = np.random.default_rng(0)
    price = np.where(rng.random(200) < 0.3, np.nan, rng.normal(5, 1, 200))
    columns = {"request": np.arange(200) // 4, "position": np.arange(200) % 4 + 1, "click": np.arange(200) % 3 == 0}
    table = pa.table({**columns, "feature_price": price, "feature_none": np.full(200, np.nan)})
    pq.write_table(table, tmp_path / "log.parquet")
    _, some = read_for_audit(tmp_path / "log.parquet", sample_rows=1000)
    assert some.feature_names == ("feature_price", "feature_none")
    np.testing.assert_array_equal(some.features[:, 0], price.astype(np.float32))
    assert np.isnan(some.features[:, 1]).all()
