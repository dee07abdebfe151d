"""Lists prepared by an engine are those that grouping by hand gives, on every engine and in any order of the rows."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ultr
from conftest import some_always
from spark_sessions import ON_SPARK
from ultr.errors import ColumnError, DataError, LabelError, MissingExtraError, OptionError, OutputError, UltrError
from ultr.log import read_log, write_log
from ultr.log.prepare import engines, nesting
from ultr.log.prepare.pipeline import prepare_lists
from ultr.log.shards import SPLITS, Manifest, Shards

DAY = datetime(2024, 5, 1, tzinfo=UTC)


def make_rows(requests: int = 60, seed: int = 0) -> pd.DataFrame:
    """Impressions with gaps in positions, lists of one, ties of items and of whole rows, in random order."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, requests)
    lengths[:3] = 1
    n = int(lengths.sum())
    request = np.repeat(np.arange(requests), lengths)
    frame = pd.DataFrame(
        {
            "request": [f"r{i}" for i in request],
            "position": rng.integers(0, 9, n),  # some are equal within a request
            "item": rng.integers(0, 4, n),
            "click": (rng.random(n) < 0.25).astype(np.int8),
            "dwell": np.round(rng.exponential(20, n), 3),
            "weight": np.repeat(rng.uniform(0.5, 2, requests).astype(np.float32), lengths),
            "query": np.repeat(rng.integers(0, 9, requests), lengths),
            "device": np.repeat(rng.choice(["phone", "desk"], requests), lengths),
            "randomised": np.repeat(rng.random(requests) < 0.3, lengths),
            "shop": rng.choice(["a", "b", None], n),
            "country": rng.choice(["de", "fr"], n, p=[0.9, 0.1]),
            "time": [
                (DAY + timedelta(minutes=int(i) * 7, seconds=float(s))).replace(tzinfo=None)
                for i, s in zip(request, rng.uniform(0, 400, n), strict=True)
            ],
            "f1": rng.normal(size=n).astype(np.float32),
            "f2": rng.integers(0, 2, n),  # equal in many rows
        }
    )
    return frame.iloc[rng.permutation(n)].reset_index(drop=True)


PARTS = {"segment": "device", "categorical": "shop"}


def write(frame: pd.DataFrame, path: Path) -> Path:
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), path)
    return path


@pytest.fixture
def log(tmp_path) -> Path:
    return write(make_rows(), tmp_path / "log.parquet")


def read_split(folder: Path, split: str) -> list[dict]:
    shards = sorted((folder / split).glob("*.parquet"))
    return [row for shard in shards for row in pq.read_table(shard, partitioning=None).to_pylist()]


def read_lists(folder: Path) -> dict[str, list[dict]]:
    return {split: read_split(folder, split) for split in SPLITS}


def all_lists(folder: Path) -> list[dict]:
    return [row for rows in read_lists(folder).values() for row in rows]


def digest(request: object) -> str:
    return hashlib.md5(str(request).encode()).hexdigest()  # noqa: S324 - no secret


def uniform(request: object, first: int) -> float:
    """Return a number from 0 to 1 from eight digits of a request's digest."""
    return int(digest(request)[first : first + 8], 16) / 2**32


def by_hand(frame: pd.DataFrame) -> dict[str, list[dict]]:
    """Compute the lists in plain Python: requests by digest, items by position, id and then their other columns."""
    found: dict[str, list[dict]] = {split: [] for split in SPLITS}
    for request in sorted(frame["request"].unique(), key=digest):
        rows = frame[frame["request"] == request].to_dict("records")

        def key(row):
            shop = row["shop"] if isinstance(row["shop"], str) else ""
            numbers = np.array([row["click"], row["dwell"]], np.float32).view(np.int32).tolist()
            features = np.array([row["f1"], row["f2"]], np.float32).view(np.int32).tolist()
            return (row["position"], row["item"], numbers, shop, features)

        rows.sort(key=key)
        one = rows[0]
        of_split = uniform(one["query"], 8)  # requests of a query are on one side
        split = "train" if of_split < 0.8 else "validation" if of_split < 0.9 else "test"
        found[split].append(
            {
                "request": request,
                "weight": one["weight"],
                "query": one["query"],
                "segment": one["device"],
                "randomised": one["randomised"],
                "position": [row["position"] for row in rows],
                "click": [float(row["click"]) for row in rows],
                "dwell": [float(np.float32(row["dwell"])) for row in rows],
                "item": [row["item"] for row in rows],
                "shop": [row["shop"] if isinstance(row["shop"], str) else None for row in rows],
                "features": [[row["f1"], float(row["f2"])] for row in rows],
            }
        )
    return found


def test_lists_are_those_that_grouping_by_hand_gives(log, tmp_path):
    prepare_lists(log, tmp_path / "lists", **PARTS)
    found, expected = read_lists(tmp_path / "lists"), by_hand(make_rows())
    for split in SPLITS:
        assert [row["request"] for row in found[split]] == [row["request"] for row in expected[split]]
        for ours, theirs in zip(found[split], expected[split], strict=True):
            assert ours == theirs


def test_the_order_of_rows_and_their_files_does_not_show(log, tmp_path):
    frame = make_rows().sample(frac=1, random_state=7)
    (tmp_path / "many").mkdir()
    for i in range(3):
        write(frame.iloc[i::3], tmp_path / "many" / f"{i}.parquet")
    for columns in (PARTS, {**PARTS, "item": None}):
        first = prepare_lists(log, tmp_path / "first", overwrite=True, **columns)
        folder = prepare_lists(tmp_path / "many", tmp_path / "folder", overwrite=True, **columns)
        pattern = prepare_lists(f"{tmp_path}/many/*.parquet", tmp_path / "pattern", overwrite=True, **columns)
        assert read_lists(tmp_path / "first") == read_lists(tmp_path / "folder") == read_lists(tmp_path / "pattern")
        assert first.splits == folder.splits == pattern.splits


def test_ties_without_an_item_column_are_ordered_too(tmp_path):
    frame = make_rows().drop(columns="item")
    prepare_lists(write(frame, tmp_path / "a.parquet"), tmp_path / "a")
    prepare_lists(write(frame.sample(frac=1, random_state=3), tmp_path / "b.parquet"), tmp_path / "b")
    assert read_lists(tmp_path / "a") == read_lists(tmp_path / "b")
    assert any("have the same position" in note for note in Manifest.load(tmp_path / "a").about["notes"])


def test_the_manifest_says_what_training_has_to_know(log, tmp_path):
    manifest = prepare_lists(log, tmp_path / "lists", **PARTS)
    assert manifest == Manifest.load(tmp_path / "lists")
    train = read_split(tmp_path / "lists", "train")
    assert manifest.features == ("f1", "f2")
    assert manifest.actions == ("click", "dwell")
    assert manifest.binary == ("click",)
    assert manifest.positions == tuple(sorted({p for row in train for p in row["position"]}))
    assert manifest.categorical == {"shop": ("a", "b")}
    assert manifest.splits["train"] == {
        "requests": len(train),
        "rows": sum(len(row["position"]) for row in train),
        "longest": max(len(row["position"]) for row in train),
        "with_feedback": sum(any(row["click"] + row["dwell"]) for row in train),
    }
    assert manifest.about["rows"] == len(make_rows())
    assert manifest.about["requests_dropped"] == 0
    assert manifest.about["source"] == str(log)


def test_shards_are_read_back_as_a_log(log, tmp_path):
    prepare_lists(log, tmp_path / "lists", **PARTS)
    back = read_log(tmp_path / "lists")
    assert len(back) == Manifest.load(tmp_path / "lists").splits["train"]["requests"]
    assert back.feature_names == ("f1", "f2", "shop")
    assert set(back.context) == {"query", "segment", "randomised"}


def test_missing_features_are_kept(tmp_path):
    frame = make_rows()
    frame.loc[frame.index % 3 == 0, "f1"] = np.nan
    prepare_lists(write(frame, tmp_path / "log.parquet"), tmp_path / "lists", **PARTS)
    missing = np.isnan(read_log(tmp_path / "lists").features).mean(0)
    assert 0.1 < missing[0] < 0.6
    assert not missing[1:].any()


def test_a_log_that_write_log_wrote_keeps_the_names_of_its_features(shown_log, tmp_path):
    from dataclasses import replace

    acted = replace(shown_log, actions={"odd": np.ones(shown_log.rows, np.float32)})
    write_log(acted, tmp_path / "log.parquet")
    manifest = prepare_lists(tmp_path / "log.parquet", tmp_path / "lists", validation=0, test=0)
    assert manifest.features == shown_log.feature_names
    assert manifest.actions == ("odd",)
    assert list(manifest.splits) == ["train"]
    back = Shards(tmp_path / "lists").read_all()
    place = {name: i for i, name in enumerate(shown_log.request_ids.to_pylist())}
    np.testing.assert_array_equal(
        back.features, shown_log.select([place[name] for name in back.request_ids.to_pylist()]).features
    )


def test_scalars_and_lists_of_features_stand_in_the_order_of_their_names(tmp_path):
    table = pa.table(
        {
            "request": [1, 1],
            "position": [2, 1],
            "click": [True, False],
            "f1": [1, 2],
            "f2": pa.array([[3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float64(), 2)),
            "f3": [False, True],
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    manifest = prepare_lists(tmp_path / "log.parquet", tmp_path / "lists", validation=0, test=0)
    assert manifest.features == ("f1", "f2[0]", "f2[1]", "f3")
    [row] = read_split(tmp_path / "lists", "train")
    assert row["features"] == [[2, 5, 6, 1], [1, 3, 4, 0]]
    assert row["click"] == [0, 1]


@pytest.mark.parametrize("name", ["log.csv", "log.tsv.gz"])
def test_csv_gives_the_same_lists_with_ids_as_text(name, log, tmp_path):
    frame = make_rows()
    frame["request"] = [f"{int(name[1:]):03}" for name in frame["request"]]
    frame["randomised"] = frame["randomised"].astype(int)
    delimiter = "\t" if ".tsv" in name else ","
    text = frame.to_csv(index=False, sep=delimiter).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    frame["item"], frame["query"] = frame["item"].astype(str), frame["query"].astype(str)
    prepare_lists(tmp_path / name, tmp_path / "csv", **PARTS)
    prepare_lists(write(frame, tmp_path / "same.parquet"), tmp_path / "parquet", **PARTS)
    assert read_lists(tmp_path / "csv") == read_lists(tmp_path / "parquet")
    assert any(row["request"].startswith("0") for row in all_lists(tmp_path / "csv"))


@pytest.mark.long
def test_little_memory_gives_the_same_lists(tmp_path, monkeypatch):
    """Sort more than memory, into several shards and row groups, with requests that end inside a batch."""
    rng = np.random.default_rng(0)
    rows, width = 300_000, 40
    features = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(rows * width, np.float32)), width)
    request, click = rng.permutation(rows) // 7, rng.integers(0, 2, rows)
    table = pa.table({"request": request, "position": rng.permutation(rows), "click": click, "features": features})
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=10_000)
    prepare_lists(tmp_path / "log.parquet", tmp_path / "plain")
    monkeypatch.setattr("ultr.log.prepare.pipeline.MIN_MEMORY", 0)
    monkeypatch.setattr(nesting, "GROUP_BYTES", 1 << 20)
    monkeypatch.setattr(nesting, "SHARD_BYTES", 8 << 20)
    monkeypatch.setattr(engines, "GROUP_BYTES", 1 << 16)
    spilt = set()

    def look(*_) -> None:
        spilt.update(tmp_path.glob(".little*/scratch/spill/*"))

    prepare_lists(tmp_path / "log.parquet", tmp_path / "little", memory=64 << 20, threads=1, progress=look)
    assert spilt
    for split in SPLITS:
        plain, little = (pq.read_table(tmp_path / folder / split, partitioning=None) for folder in ("plain", "little"))
        assert plain.equals(little)
    shards = sorted(p.name for p in (tmp_path / "little" / "train").iterdir())
    assert shards == [f"part-{i:05}.parquet" for i in range(len(shards))]
    assert len(shards) > 3
    assert len(Shards(tmp_path / "little").groups) > 4 * len(shards)


def test_requests_end_where_batches_do_not():
    digests = [digest(i) for i in (0, 0, 1, 2, 2, 2, 2, 3)]
    whole = pa.record_batch({"digest": digests, "row": range(8)})
    for size in (1, 2, 3, 5, 8):
        pieces = list(nesting.whole_requests(whole.slice(i, size) for i in range(0, 8, size)))
        assert [row for piece in pieces for row in piece["row"].to_pylist()] == list(range(8))
        seen = [set(piece["digest"].to_pylist()) for piece in pieces]
        assert sum(map(len, seen)) == len(set().union(*seen)) == 4


# Filters and sampling


@pytest.mark.parametrize(
    ("condition", "keeps"),
    [
        ("country = de", lambda f: f["country"] == "de"),
        ("country=='de'", lambda f: f["country"] == "de"),
        ("country != de", lambda f: f["country"] != "de"),
        ("position <= 5", lambda f: f["position"] <= 5),
        ("dwell > 10.5", lambda f: f["dwell"] > 10.5),
        ("dwell >= 1e1", lambda f: f["dwell"] >= 10),
        ("randomised = true", lambda f: f["randomised"]),
        ("time < 2024-05-01T03:00", lambda f: f["time"] < datetime(2024, 5, 1, 3)),
        ("time >= 2024-05-01T05:00:00+02:00", lambda f: f["time"] >= datetime(2024, 5, 1, 3)),
        ("shop = a", lambda f: f["shop"] == "a"),
    ],
)
def test_conditions_keep_the_rows_that_meet_them(condition, keeps, log, tmp_path):
    prepare_lists(log, tmp_path / "lists", where=[condition], **PARTS)
    frame = make_rows()
    expected = by_hand(frame[keeps(frame)])
    assert read_lists(tmp_path / "lists") == expected


def test_too_many_columns_are_an_error(log, tmp_path, monkeypatch):
    monkeypatch.setattr("ultr.log.prepare.pipeline.MAX_COLUMNS", 3)
    with pytest.raises(ColumnError, match=r"at most 3 columns, got .*; put the features into one column"):
        prepare_lists(log, tmp_path / "lists", **PARTS)
    assert not (tmp_path / "lists").exists()


def test_a_condition_is_a_value_and_never_code(tmp_path):
    frame = make_rows()
    frame.loc[frame.index[:20], "country"] = "x' OR '1'='1"
    prepare_lists(write(frame, tmp_path / "log.parquet"), tmp_path / "lists", where=["country = x' OR '1'='1"])
    assert sum(len(row["position"]) for row in all_lists(tmp_path / "lists")) == 20


def test_short_lists_are_dropped_and_long_ones_cut(log, tmp_path):
    manifest = prepare_lists(log, tmp_path / "lists", min_items=2, max_items=3, **PARTS)
    whole = [row for rows in by_hand(make_rows()).values() for row in rows]
    found = all_lists(tmp_path / "lists")
    assert [row["position"] for row in found] == [r["position"][:3] for r in whole if len(r["position"]) >= 2]
    assert manifest.about["requests_dropped"] == sum(len(row["position"]) < 2 for row in whole)
    assert manifest.about["requests_dropped"] > 2


def clickless_log(folder: Path, requests: int = 4000) -> Path:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"request": np.repeat(np.arange(requests), 2), "position": [1, 2] * requests})
    frame["click"] = (rng.random(2 * requests) < 0.1).astype(float)
    frame["f1"] = 1.0
    return write(frame, folder / "log.parquet")


def test_sampled_requests_stand_for_those_that_are_not(tmp_path):
    path = clickless_log(tmp_path)
    manifest = prepare_lists(path, tmp_path / "lists", keep_clickless=0.25)
    found = all_lists(tmp_path / "lists")
    clicked = [row for row in found if any(row["click"])]
    clickless = [row for row in found if not any(row["click"])]
    frame = pd.read_parquet(path)
    assert len(clicked) == (frame.groupby("request")["click"].max() > 0).sum()
    assert {row["weight"] for row in clicked} == {1.0}
    assert {row["weight"] for row in clickless} == {4.0}
    assert {row["request"] for row in clickless} == {
        r for r, group in frame.groupby("request") if not group["click"].any() and uniform(r, 16) < 0.25
    }
    total = sum(row["weight"] for row in found)
    assert abs(total - 4000) < 4 * 4 * np.sqrt(3200 * 0.25 * 0.75)  # four deviations of a binomial count, times 4
    assert manifest.about["requests_dropped"] == 4000 - len(found)


def test_sampling_multiplies_weights_of_the_source_and_goes_by_the_label(log, tmp_path):
    label = "click * (dwell > 20)"
    prepare_lists(log, tmp_path / "lists", keep_clickless=0.5, label=label, **PARTS)
    source = make_rows().groupby("request")["weight"].first()
    found = all_lists(tmp_path / "lists")
    assert 0 < sum(not any(row["label"]) for row in found) < 60
    for row in found:
        assert row["weight"] == pytest.approx(source[row["request"]] * (1 if any(row["label"]) else 2))


# Splits


def test_splits_by_hash_are_disjoint_and_have_their_shares(tmp_path):
    manifest = prepare_lists(clickless_log(tmp_path), tmp_path / "lists", validation=0.2, test=0.1)
    requests = {split: {row["request"] for row in rows} for split, rows in read_lists(tmp_path / "lists").items()}
    assert sum(map(len, requests.values())) == len(set().union(*requests.values())) == 4000
    for split, share in {"train": 0.7, "validation": 0.2, "test": 0.1}.items():
        assert abs(len(requests[split]) - 4000 * share) < 4 * np.sqrt(4000 * share * (1 - share))
        assert manifest.splits[split]["requests"] == len(requests[split])
    assert manifest.about["split"] == {"by": "hash", "validation": 0.2, "test": 0.1, "by_query": False}


def test_requests_of_a_query_are_in_one_split(tmp_path):
    frame = make_rows(requests=400)
    frame["query"] = [
        f"query {int(request[1:]) % 60}" if int(request[1:]) % 5 else None for request in frame["request"]
    ]
    prepare_lists(write(frame, tmp_path / "log.parquet"), tmp_path / "lists")
    queries = {split: {row["query"] for row in rows} - {None} for split, rows in read_lists(tmp_path / "lists").items()}
    assert all(queries.values())
    assert sum(map(len, queries.values())) == len(set().union(*queries.values())) == 48
    without = {split for split, rows in read_lists(tmp_path / "lists").items() if any(not row["query"] for row in rows)}
    assert without == set(SPLITS)  # requests without a query are divided by their ids


def test_a_feed_with_one_query_for_most_requests_is_divided_by_requests(tmp_path):
    frame = make_rows(requests=400).assign(query="home")
    prepare_lists(write(frame, tmp_path / "log.parquet"), tmp_path / "lists")
    assert all(len(rows) > 10 for rows in read_lists(tmp_path / "lists").values())


def test_a_request_stays_in_its_split_as_the_log_grows(log, tmp_path):
    frame = make_rows()
    prepare_lists(log, tmp_path / "all")
    some = frame[frame["request"].isin(frame["request"].unique()[:30])]
    prepare_lists(write(some, tmp_path / "some.parquet"), tmp_path / "some")
    split_of = {row["request"]: split for split, rows in read_lists(tmp_path / "all").items() for row in rows}
    for split, rows in read_lists(tmp_path / "some").items():
        assert all(split_of[row["request"]] == split for row in rows)


@pytest.mark.parametrize("kind", ["timestamp", "ns", "zone", "date", "seconds", "float"])
def test_splits_by_time_hold_out_the_latest(kind, tmp_path):
    frame = make_rows()
    times = frame["time"].astype("datetime64[us]")
    converted = {
        "timestamp": times,
        "ns": times.astype("datetime64[ns]"),
        "zone": times.dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo"),
        "date": times.dt.date,
        "seconds": times.astype("int64") // 10**6,
        "float": times.astype("int64") / 10**6,
    }
    path = write(frame.assign(time=converted[kind]), tmp_path / "log.parquet")
    bounds = {"test_from": "2024-05-02"} if kind == "date" else {}
    if kind == "date":
        path = write(frame.assign(time=(times + pd.to_timedelta(frame["query"] % 2, "D")).dt.date), path)
    manifest = prepare_lists(path, tmp_path / "lists", split="time", time="time", **bounds)
    if kind == "date":
        assert list(manifest.splits) == ["train", "test"]
        return
    first = frame.groupby("request")["time"].min()
    span = {split: [first[row["request"]] for row in rows] for split, rows in read_lists(tmp_path / "lists").items()}
    assert max(span["train"]) < min(span["validation"])
    assert max(span["validation"]) < min(span["test"])
    assert [manifest.splits[split]["requests"] for split in SPLITS] == [48, 6, 6]
    assert manifest.about["split"]["time"] == "time"
    cut = datetime.fromtimestamp(manifest.about["split"]["test_from"], UTC).replace(tzinfo=None)
    assert cut <= min(span["test"]) < cut + timedelta(seconds=1)


def test_the_times_of_splits_may_be_given(log, tmp_path):
    limits = {"validation_from": "2024-05-01T02:00", "test_from": "2024-05-01T04:00+00:00"}
    prepare_lists(log, tmp_path / "lists", split="time", time="time", **limits)
    first = make_rows().groupby("request")["time"].min()
    for split, rows in read_lists(tmp_path / "lists").items():
        for row in rows:
            hour = (first[row["request"]] - datetime(2024, 5, 1)).total_seconds() / 3600
            assert split == ("train" if hour < 2 else "validation" if hour < 4 else "test")


# Events


def make_events() -> pd.DataFrame:
    """Clicks and dwell times of some of the items, one of which was never shown."""
    frame = make_rows()[["request", "item"]].drop_duplicates()
    rng = np.random.default_rng(5)
    some = frame.iloc[rng.integers(0, len(frame), 150)].reset_index(drop=True)
    some["event"] = rng.choice(["click", "dwell"], len(some))
    some["seconds"] = np.where(some["event"] == "dwell", rng.integers(1, 60, len(some)), 1)
    stray = pd.DataFrame({"request": ["r0"], "item": [99], "event": ["click"], "seconds": [1]})
    return pd.concat([some, stray]).sample(frac=1, random_state=0)


@pytest.fixture
def shown(tmp_path) -> Path:
    return write(make_rows().drop(columns=["click", "dwell"]), tmp_path / "shown.parquet")


def actions_of(folder: Path, name: str) -> dict[tuple, set]:
    found: dict[tuple, set] = {}
    for row in all_lists(folder):
        for item, value in zip(row["item"], row[name], strict=True):
            found.setdefault((row["request"], item), set()).add(value)
    return found


@pytest.mark.parametrize("value", [None, "seconds"])
def test_events_in_long_form_become_actions(value, shown, tmp_path):
    path = write(make_events(), tmp_path / "events.parquet")
    manifest = prepare_lists(shown, tmp_path / "lists", events=path, event_value=value, **PARTS)
    assert manifest.actions == ("click", "dwell")
    events = make_events().drop_duplicates()
    for name in manifest.actions:
        wanted = events[events["event"] == name].groupby(["request", "item"])["seconds"].sum()
        found = actions_of(tmp_path / "lists", name)
        assert len(found) == len(make_rows()[["request", "item"]].drop_duplicates())
        for pair, values in found.items():
            assert values == {float((wanted[pair] if value else 1) if pair in wanted.index else 0)}
    notes = " ".join(manifest.about["notes"])
    assert "1 pairs of request and item have events but are not in the log" in notes
    repeated = (make_rows().groupby(["request", "item"])["position"].nunique() > 1).sum()
    assert f"{repeated} items were shown more than once" in notes


def test_logs_and_events_may_be_csv(shown, tmp_path):
    make_rows().drop(columns=["click", "dwell"]).to_csv(tmp_path / "shown.csv", index=False)
    make_events().to_csv(tmp_path / "events.csv", index=False)
    write(make_events(), tmp_path / "events.parquet")
    options = {"event_value": "seconds", **PARTS}
    prepare_lists(shown, tmp_path / "a", events=tmp_path / "events.parquet", **options)
    prepare_lists(tmp_path / "shown.csv", tmp_path / "b", events=tmp_path / "events.csv", **options)
    for ours, theirs in zip(all_lists(tmp_path / "a"), all_lists(tmp_path / "b"), strict=True):
        ours |= {"item": list(map(str, ours["item"])), "query": str(ours["query"])}
        assert ours == theirs


def test_a_csv_file_is_read_in_blocks_that_differ(tmp_path, monkeypatch):
    monkeypatch.setattr("ultr.log.prepare.engines.BLOCK_BYTES", 200)
    frame = make_rows().assign(f3=0)
    frame["randomised"], frame["f3"] = frame["randomised"].astype(int), np.where(frame.index < 100, 3, 0.25)
    frame.to_csv(tmp_path / "log.csv", index=False)
    prepare_lists(tmp_path / "log.csv", tmp_path / "lists")
    assert {f[2] for row in all_lists(tmp_path / "lists") for f in row["features"]} == {3, 0.25}


def test_events_in_wide_form_become_actions(shown, tmp_path):
    events = make_events().rename(columns={"request": "rid", "item": "doc"})
    events["like"] = events["event"] == "click"
    events["dwell"] = events["seconds"].where(events["event"] == "dwell")
    path = write(events.drop(columns=["event", "seconds"]), tmp_path / "events.parquet")
    manifest = prepare_lists(
        shown, tmp_path / "lists", events=path, event_request="rid", event_item="doc", label="like + dwell"
    )
    assert manifest.actions == ("like", "dwell", "label")
    events = events.drop(columns=["event", "seconds"]).drop_duplicates()
    liked = events.groupby(["rid", "doc"])["like"].any()
    dwelt = events.groupby(["rid", "doc"])["dwell"].sum()
    for pair, values in actions_of(tmp_path / "lists", "label").items():
        assert values == {float(liked[pair]) + dwelt[pair] if pair in liked.index else 0.0}


def delivered_events() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return three items shown at 12:00, and events from 11:59 to 36 hours later, some of them delivered twice."""
    shown = pd.DataFrame({"request": ["a"] * 10, "position": range(10), "item": range(10), "f1": range(10)})
    shown["shown_at"] = datetime(2024, 5, 1, 12)
    events = pd.DataFrame(
        {
            "event_id": ["e0", "e1", "e1", "e2", "e3", "e4", None, None],
            "request": "a",
            "item": [0, 1, 1, 1, 2, 3, 4, 4],
            "event": "dwell",
            "seconds": [10, 20, 20, 20, 30, 40, 50, 50],
            "event_time": datetime(2024, 5, 1, 12) + pd.to_timedelta([1, 24, 24, 2, 36, -0.1, 1, 2], "h"),
        }
    )
    return shown, events


@pytest.mark.parametrize(
    ("columns", "options", "dwell", "notes"),
    [
        ([], {}, [10, 40, 30, 40, 100], ["1 events repeat the id of another event (column 'event_id')"]),
        ([], {"event_id": ""}, [10, 60, 30, 40, 100], []),
        (["event_id"], {}, [10, 40, 30, 40, 100], ["1 events are equal to another event in all columns"]),
        (
            [],
            {"event_window": "24h", "time": "shown_at"},
            [10, 40, 0, 0, 100],
            ["1 events repeat", "1 events came more than 24h after their item", "1 events came before their item"],
        ),
        (["event_id", "event_time"], {}, [10, 20, 30, 40, 50], ["3 events are equal to another event"]),
    ],
)
def test_events_count_once_and_only_in_their_window(columns, options, dwell, notes, tmp_path):
    shown, events = delivered_events()
    log = write(shown, tmp_path / "shown.parquet")
    path = write(events.drop(columns=columns), tmp_path / "events.parquet")
    given = {"event_value": "seconds", "validation": 0, "test": 0, **options}
    manifest = prepare_lists(log, tmp_path / "lists", events=path, **given)
    assert all_lists(tmp_path / "lists")[0]["dwell"] == [*dwell, 0, 0, 0, 0, 0]
    assert len(manifest.about["notes"]) == len(notes)
    assert all(note.startswith(start) for note, start in zip(manifest.about["notes"], notes, strict=True))


def test_windows_of_events_are_checked(tmp_path):
    shown, events = delivered_events()
    log, path = write(shown, tmp_path / "shown.parquet"), write(events, tmp_path / "events.parquet")
    window = {"event_window": "24h", "time": "shown_at"}
    millis = write(events.assign(event_time=1_714_564_800_000), tmp_path / "millis.parquet")
    without = write(events.drop(columns="event_time"), tmp_path / "without.parquet")
    gaps = write(events.assign(event_time=pd.NaT), tmp_path / "gaps.parquet")
    for events_file, options, message in (
        (path, {"event_window": "24h"}, "--event-window 24h needs the column of the times; pass .* --time COLUMN"),
        (path, {**window, "event_window": "a day"}, "must be a length of time, got 'a day'; write a number and a unit"),
        (path, {"event_time": "event_time"}, "--event-time is for --event-window"),
        (None, {"event_id": "event_id"}, "need a table of events, got --event-id"),
        (millis, window, "must be seconds since 1970, got 1714564800000; divide milliseconds by 1000"),
        (without, window, "found no column for the time of an event; name it with --event-time"),
        (gaps, window, "'event_time' has 7 missing values"),
    ):
        with pytest.raises(UltrError, match=message):
            prepare_lists(log, tmp_path / "lists", events=events_file, event_value=None, **options)


def test_only_the_actions_named_are_taken_of_events(log, shown, tmp_path):
    path = write(make_events(), tmp_path / "events.parquet")
    assert prepare_lists(shown, tmp_path / "a", events=path, actions="dwell").actions == ("dwell",)
    more = write(make_rows().drop(columns="click"), tmp_path / "more.parquet")
    assert prepare_lists(more, tmp_path / "b", events=path, actions="dwell,click").actions == ("dwell", "click")


# Labels


@settings(max_examples=12)
@given(
    expression=st.sampled_from(
        [
            "click + dwell / exp(3)",
            "max(log1p(dwell) - 1, 0) * (click >= 0)",
            "clip(dwell, 1, 30) ** 0.5 + (dwell != 3)",
            "max(log(dwell), 0, click)",
            "abs(1 - sqrt(dwell)) / (1 + click)",
        ]
    ),
    dwell=st.lists(st.floats(0, 1e4, width=32), min_size=1, max_size=5),
)
def test_labels_are_those_of_label_on_the_same_actions(expression, dwell, tmp_path_factory):
    folder = tmp_path_factory.mktemp("label")
    frame = pd.DataFrame({"request": 1, "position": range(len(dwell)), "dwell": dwell, "f1": 0.0})
    frame["click"] = frame["position"] % 2
    path = write(frame, folder / "log.parquet")
    manifest = prepare_lists(path, folder / "lists", label=expression, validation=0, test=0, threads=1)
    [row] = read_split(folder / "lists", "train")
    actions = {name: frame[name].to_numpy(np.float32) for name in ("click", "dwell")}
    np.testing.assert_array_equal(np.array(row["label"], np.float32), ultr.Label(expression)(actions))
    assert manifest.label == expression
    assert "label" in manifest.actions


# Errors


def changed(column: str, value: object, rows: int = 3) -> pd.DataFrame:
    frame = make_rows()
    frame[column] = frame[column].astype(object)
    frame.loc[frame.index[:rows], column] = value
    return frame.assign(**{column: frame[column].infer_objects()})


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (changed("request", None), {}, "'request' has 3 missing values"),
        (changed("position", None), {}, "'position' has 3 missing values"),
        (changed("position", 1.5), {}, "must be whole numbers, got other values in 3 rows"),
        (changed("position", -1, 2), {}, "must not be negative, got other values in 2 rows"),
        (changed("click", -1), {}, "'click' must be finite and not negative in every row, got other values in 3 rows"),
        (changed("dwell", float("inf")), {}, "action column 'dwell' must be finite"),
        (changed("dwell", 1e300), {}, "action column 'dwell' must be finite"),
        (changed("weight", 0.0), {}, "weight column 'weight' must be finite and positive"),
        (changed("weight", 3.0), {}, r"'weight' \(weight\) must have one value per request, got several in"),
        (changed("device", "tv"), {}, r"'device' \(segment\) must have one value per request"),
        (changed("device", None), {}, r"'device' \(segment\) must have one value per request"),
        (changed("query", 77), {"query": "query"}, r"'query' \(query\) must have one value per request"),
        (changed("f1", float("inf")), {}, "feature 'f1' has values that are not finite, got inf"),
        (make_rows().assign(request=1.5), {}, "request column 'request' must hold strings or whole numbers, got type"),
        (make_rows().assign(click="yes"), {}, "action column 'click' must hold numbers, got type string"),
        (make_rows().assign(f1="red"), {}, "feature column 'f1' must hold numbers"),
        (make_rows().assign(features=[[1.0] * (1 + i % 2) for i in range(len(make_rows()))]), {}, "must have"),
        (make_rows().assign(click=[[1]] * len(make_rows())), {}, "'click' holds lists; prepare needs one row per item"),
        (make_rows().drop(columns="request"), {}, "found no column with the request id of each row"),
        (make_rows().drop(columns="position"), {}, "found actions but no column with the position"),
        (make_rows().drop(columns=["f1", "f2"]), {"categorical": None}, "found no features"),
        (make_rows().drop(columns=["click", "dwell"]), {}, "found no actions to learn from"),
        (make_rows().assign(CLICK=1), {}, "must differ by more than case"),
        (make_rows(), {"where": ["country = xx"]}, "there are no rows"),
        (make_rows(), {"where": ["cuntry = de"]}, "did you mean 'country'"),
        (make_rows(), {"min_items": 100}, "no request is left for training"),
        (make_rows(), {"split": "time", "time": "tim"}, "did you mean 'time'"),
        (make_rows(), {"split": "time", "time": "country"}, "texts that are not times such as 2026-01-05T10:00:00Z"),
        (changed("time", None), {"split": "time", "time": "time"}, "'time' has 3 missing values"),
        (make_rows(), {"label": "like"}, "needs the action 'like'"),
        (make_rows(), {"label": "click - 1"}, "must be finite and not negative, got -1"),
        (make_rows(), {"label": "1 / click"}, "must be finite and not negative, got inf"),
        (
            make_rows().rename(columns={"dwell": "label"}),
            {"actions": "click,label", "label": "click"},
            "name of another",
        ),
    ],
)
def test_a_bad_log_is_an_error_and_leaves_nothing(frame, options, message, tmp_path):
    path = write(frame, tmp_path / "log.parquet")
    with pytest.raises((DataError, LabelError), match=message):
        prepare_lists(path, tmp_path / "lists", **{**PARTS, **options})
    assert [p.name for p in tmp_path.iterdir()] == ["log.parquet"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "duck"}, "did you mean 'duckdb'"),
        ({"keep_clickless": 0}, "'keep_clickless' must be above 0"),
        ({"validation": 0.6, "test": 0.4}, "their sum must be below 1"),
        ({"min_items": 5, "max_items": 3}, r"max_items \(3\) is less than min_items \(5\)"),
        ({"split": "random"}, "'split' must be one of 'hash', 'time', got 'random'"),
        ({"split": "time"}, "--split time needs the column of the times"),
        ({"test_from": "2024-01-01"}, "pass --split time"),
        ({"split": "time", "time": "time", "test_from": "soon"}, "must be times, got 'soon'"),
        (
            {"split": "time", "time": "time", "test_from": "2024", "validation_from": "2025"},
            "must not be later than --test-from",
        ),
        ({"event_type": "event"}, "pass it with --events"),
        ({"where": ["country"]}, "must be COLUMN OP VALUE"),
        ({"where": ["position > high"]}, "must be a number, got 'high'"),
        ({"where": ["randomised = maybe"]}, "must be true or false"),
        ({"where": ["time > noon"]}, "must be a time"),
        ({"keep_clicklss": 1}, "did you mean 'keep_clickless'"),
        ({"master": "local[1]"}, "--master needs --engine spark"),
        ({"threads": 0}, "'threads' must be at least 1"),
        ({"position": "item", "item": "item"}, "two roles"),
    ],
)
def test_wrong_options_are_errors(options, message, log, tmp_path):
    with pytest.raises(OptionError, match=message):
        prepare_lists(log, tmp_path / "lists", **options)
    assert not (tmp_path / "lists").exists()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"item": "text"}, {}, "ids of the item must have the same type"),
        ({}, {"actions": "buy"}, "no action 'buy' among the events"),
        ({}, {"event_item": "doc"}, "no column 'doc' for the item"),
        ({"event": "position"}, {}, "cannot have the name of another column"),
        ({"seconds": -1}, {"event_value": "seconds"}, "must be finite and not negative"),
    ],
)
def test_events_that_do_not_fit_are_errors(change, options, message, shown, tmp_path):
    path = write(make_events().assign(**change), tmp_path / "events.parquet")
    with pytest.raises(ColumnError, match=message):
        prepare_lists(shown, tmp_path / "lists", events=path, **options)


def test_events_need_items_and_actions_of_one_place(log, shown, tmp_path):
    path = write(make_events(), tmp_path / "events.parquet")
    with pytest.raises(ColumnError, match="have the same action, got 'click'"):
        prepare_lists(log, tmp_path / "lists", events=path)
    bare = write(make_rows().drop(columns=["item", "click", "dwell"]), tmp_path / "bare.parquet")
    with pytest.raises(ColumnError, match="no column of items"):
        prepare_lists(bare, tmp_path / "lists", events=path)
    with pytest.raises(OptionError, match="needs --event-type"):
        silent = write(make_events().drop(columns="event"), tmp_path / "silent.parquet")
        prepare_lists(shown, tmp_path / "lists", events=silent, event_value="seconds")
    with pytest.raises(ColumnError, match="found no actions among the events"):
        prepare_lists(shown, tmp_path / "lists", events=silent)


def test_a_column_named_like_a_query_that_differs_within_requests_is_not_used(tmp_path):
    path = write(changed("query", 77), tmp_path / "log.parquet")
    manifest = prepare_lists(path, tmp_path / "lists")
    assert "query" not in all_lists(tmp_path / "lists")[0]
    assert "not used as the query" in manifest.about["notes"][0]


def test_existing_lists_are_kept_unless_they_may_be_replaced(log, tmp_path):
    prepare_lists(log, tmp_path / "lists")
    with pytest.raises(OutputError, match="exists already"):
        prepare_lists(log, tmp_path / "lists")
    with pytest.raises(DataError, match="no rows"):
        prepare_lists(log, tmp_path / "lists", overwrite=True, where=["country = xx"])
    assert Manifest.load(tmp_path / "lists").about["where"] == []
    assert prepare_lists(log, tmp_path / "lists", overwrite=True, where=["country = de"]).about["where"]


def test_a_failure_half_way_leaves_nothing(log, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(nesting.ShardWriter, "_finish", fail)
    with pytest.raises(KeyboardInterrupt):
        prepare_lists(log, tmp_path / "lists")
    assert [p.name for p in tmp_path.iterdir()] == ["log.parquet"]


def test_files_that_cannot_be_read_are_errors(log, tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1" + bytes(100))
    (tmp_path / "empty").mkdir()
    for source, message in {
        "broken.parquet": "cannot be read as Parquet",
        "none.parquet": "no such file",
        "empty": "has no data files",
        "*.pq": "no file matches",
    }.items():
        with pytest.raises(DataError, match=message):
            prepare_lists(tmp_path / source, tmp_path / "lists")
    data = log.read_bytes()
    (tmp_path / "cut.parquet").write_bytes(data[:40] + bytes(3000) + data[3040:])  # a good footer, bad pages
    with pytest.raises(DataError, match=r"cut.parquet: the engine failed"):
        prepare_lists(tmp_path / "cut.parquet", tmp_path / "lists")
    (tmp_path / "two").mkdir()
    write(make_rows(), tmp_path / "two" / "1.parquet")
    write(make_rows().drop(columns="f2"), tmp_path / "two" / "2.parquet")
    with pytest.raises(ColumnError, match="column 'f2' is in 1 of 2 files, got no such column in"):
        prepare_lists(tmp_path / "two", tmp_path / "lists")


def test_names_of_files_are_not_patterns(tmp_path):
    folder = tmp_path / "day=1 [a]"
    folder.mkdir()
    write(make_rows(), folder / "x[1]?.parquet")
    manifest = prepare_lists(folder / "x[1]?.parquet", tmp_path / "lists")
    assert manifest.about["rows"] == len(make_rows())


def test_a_missing_engine_names_what_to_install(log, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ibis", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ultr\[prepare\]'"):
        prepare_lists(log, tmp_path / "lists")
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/java")
    with pytest.raises(MissingExtraError, match=r"pip install 'ultr\[spark\]'"):
        prepare_lists(log, tmp_path / "lists", engine="spark")


def test_spark_without_java_says_so(log, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(UltrError, match="Spark needs Java"):
        prepare_lists(log, tmp_path / "lists", engine="spark")


# Spark gives the same


@pytest.mark.long
def test_workers_of_spark_need_not_have_this_package(tmp_path):
    reason = "pyspark is not installed; make test-long installs it"
    cloudpickle = pytest.importorskip("pyspark.cloudpickle", reason=reason)
    task = nesting.Nesting(
        features=("f1",),
        actions=("click",),
        categorical=(),
        of_rows=(),
        of_requests=(),
        weighted=False,
        label=ultr.Label("2 * click"),
        by_time=False,
        by_query=False,
        validation_from=2.0**32,
        test_from=2.0**32,
        keep_clickless=1.0,
        min_items=1,
        max_items=None,
    )
    cloudpickle.register_pickle_by_value(ultr)
    (tmp_path / "task").write_bytes(cloudpickle.dumps((engines._task(task, "lists"), task)))
    worker = f"""
import sys, pathlib, pyarrow as pa
sys.modules["ultr"] = None  # cannot be imported
from pyspark import cloudpickle
_, nesting = cloudpickle.loads(pathlib.Path("task").read_bytes())
features = pa.array([[1.0], [2.0]], pa.list_(pa.float32()))
rows = {{"digest": ["{digest(1)}"] * 2, "request": [1, 1], "position": [1, 2], "action_0": [0.0, 1.0]}}
lists, counts = nesting.lists(pa.table({{**rows, "features": features}}))
assert (counts.requests, lists["train"]["label"].to_pylist()) == (1, [[0, 2]])
"""
    subprocess.run([sys.executable, "-c", worker], cwd=tmp_path, check=True)


CASES = {
    "plain": {},
    "chosen": {"label": "click + dwell / exp(3)", "where": ["country = de", "dwell > 0.5"], "max_items": 4},
    "sampled": {"keep_clickless": 0.5, "label": "click", "min_items": 2, "validation": 0.3, "test": 0},
    "times": {"split": "time", "time": "time", "where": ["time >= 2024-05-01T00:30"]},
    "given times": {"split": "time", "time": "time", "test_from": "2024-05-01T04:00"},
}


class TestSpark:
    pytestmark = ON_SPARK

    @pytest.mark.parametrize("case", some_always(CASES, {"chosen"}))
    def test_spark_gives_the_same_lists(self, case, tmp_path):
        path = write(make_rows().assign(time=make_rows()["time"].astype("datetime64[ns]")), tmp_path / "log.parquet")
        ours = prepare_lists(path, tmp_path / "duckdb", **PARTS, **CASES[case])
        theirs = prepare_lists(path, tmp_path / "spark", engine="spark", **PARTS, **CASES[case])
        assert read_lists(tmp_path / "duckdb") == read_lists(tmp_path / "spark")
        assert {**theirs.about, "engine": "duckdb"} == ours.about
        assert (ours.splits, ours.positions, ours.binary, ours.categorical) == (
            theirs.splits,
            theirs.positions,
            theirs.binary,
            theirs.categorical,
        )

    def test_spark_reads_partitions_and_files_that_differ_as_duckdb_does(self, tmp_path):
        first, second = make_rows().iloc[::2], make_rows().iloc[1::2]
        other = second.assign(f2=second["f2"] + 0.5, note="x")  # fractions in place of whole numbers, and a new column
        for day, frame in (("2024-05-01", first), ("2024-05-02", other)):
            (tmp_path / "days" / f"date={day}").mkdir(parents=True)
            write(frame, tmp_path / "days" / f"date={day}" / "part [0].parquet")
        for name, where in (("all", []), ("second", ["date > 2024-05-01"])):
            options = {**PARTS, "categorical": "shop,date", "where": where}
            ours = prepare_lists(tmp_path / "days", tmp_path / f"{name}-duckdb", **options)
            theirs = prepare_lists(tmp_path / "days", tmp_path / f"{name}-spark", engine="spark", **options)
            assert read_lists(tmp_path / f"{name}-duckdb") == read_lists(tmp_path / f"{name}-spark")
            assert ours.categorical == theirs.categorical
            assert ours.categorical["date"] == ("2024-05-01", "2024-05-02")[bool(where) :]

    def test_spark_joins_events_and_raises_errors_as_duckdb_does(self, shown, tmp_path):
        path = write(make_events(), tmp_path / "the [events].parquet")
        options = {"events": path, "event_value": "seconds", "label": "click + dwell", **PARTS}
        ours = prepare_lists(shown, tmp_path / "duckdb", **options)
        theirs = prepare_lists(shown, tmp_path / "spark", engine="spark", **options)
        assert read_lists(tmp_path / "duckdb") == read_lists(tmp_path / "spark")
        assert ours.about["notes"] == theirs.about["notes"]
        frames = zip(delivered_events(), ("delivered", "repeated"), strict=True)
        log, events = (write(frame, tmp_path / f"{name}.parquet") for frame, name in frames)
        window = {"events": events, "event_value": "seconds", "event_window": "24h", "time": "shown_at"}
        windows = [prepare_lists(log, tmp_path / f"in-{e}", engine=e, **window) for e in ("duckdb", "spark")]
        assert read_lists(tmp_path / "in-duckdb") == read_lists(tmp_path / "in-spark")
        assert windows[0].about["notes"] == windows[1].about["notes"] != []
        for frame, label, message in (
            (changed("position", None), None, "'position' has 3 missing values"),
            (changed("f1", float("inf")), None, "feature 'f1' has values that are not finite"),
            (make_rows(), "1 / click", "label '1 / click' must be finite and not negative, got inf"),
        ):
            bad = write(frame, tmp_path / "bad.parquet")
            with pytest.raises(DataError, match=message):
                prepare_lists(bad, tmp_path / "failed", engine="spark", label=label)
            assert not (tmp_path / "failed").exists()
