"""Sources of a log: partitions, patterns, several sources, and files whose columns differ, in any order."""

from __future__ import annotations

import gzip
import json
from datetime import date

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ultr.errors import ColumnError, DataError, UltrError
from ultr.log import read_log
from ultr.log.prepare.pipeline import prepare_lists
from ultr.log.readers import read_batches, read_columns
from ultr.log.sampling import read_for_audit
from ultr.log.shards import Shards
from ultr.log.sources import open_source

DAYS = ("2026-11-01", "2026-11-02", "2026-11-03")


def rows(day: int, requests: int = 20) -> pd.DataFrame:
    rng = np.random.default_rng(day)
    n = 3 * requests
    frame = pd.DataFrame({"request": [f"{day}-{i // 3}" for i in range(n)], "position": np.arange(n) % 3 + 1})
    frame["item"], frame["click"], frame["f1"] = np.arange(n), rng.integers(0, 2, n), rng.normal(size=n)
    frame["f2"] = rng.integers(0, 5, n)
    return frame


def write(frame: pd.DataFrame, path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        frame.to_parquet(path, index=False)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False)


def write_days(folder, suffix=".parquet"):
    for number, day in enumerate(DAYS):
        for hour in (7, 12):
            write(rows(10 * number + hour), folder / f"date={day}" / f"hour={hour:02}" / f"part-0{suffix}")
    return folder


def prepared_log(source, out, **options):
    manifest = prepare_lists(source, out, validation=0, test=0, **options)
    return Shards(out).read_all(), manifest


def scored(source, **options):
    names = ("f1", "f2")
    _, batches = read_batches(source, feature_names=names, columns={"features": list(names)}, **options)
    return [batch.log for batch in batches]


# --- Partitions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".csv.gz", ".jsonl"])
def test_partitions_are_columns_and_choose_the_files(suffix, tmp_path):
    folder = write_days(tmp_path / "days", suffix)
    assert read_columns(folder).features == ("f1", "f2")
    where = ["date >= 2026-11-02", "hour = 7"]
    log = read_log(folder, where=where, time="date", segment="hour")
    assert {request.split("-")[0] for request in log.request_ids.to_pylist()} == {"17", "27"}
    days = [int(pd.Timestamp(day).timestamp()) for day in DAYS[1:]]
    assert sorted(set(log.context["time"].to_pylist())) == days
    assert set(log.context["segment"].to_pylist()) == {7}
    assert sum(part.rows for part in scored(folder, where=where)) == log.rows == 120
    lists, manifest = prepared_log(folder, tmp_path / "lists", where=where, segment="hour")
    assert sorted(lists.request_ids.to_pylist()) == sorted(log.request_ids.to_pylist())
    assert set(map(str, lists.context["segment"].to_pylist())) == {"7"}
    assert manifest.about["where"] == where
    with pytest.raises(DataError, match="no partition meets the conditions, got hour = 9; check --where"):
        read_log(folder, where=["hour = 9"])


def test_files_of_other_partitions_are_not_opened(tmp_path):
    folder = write_days(tmp_path / "days")
    (folder / f"date={DAYS[0]}" / "hour=07" / "part-0.parquet").write_bytes(b"PAR1 broken")
    assert len(read_log(folder, where=["date > 2026-11-01"])) == 80
    assert len(read_for_audit(folder, where=["date > 2026-11-01"])[0]) == 80
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read_log(folder)


def test_the_values_of_partitions_have_types(tmp_path):
    for name in ("day=1/shop=a%20b/x=2026-11-01", "day=02/shop=__HIVE_DEFAULT_PARTITION__/x=later"):
        write(rows(1), tmp_path / name / "log.parquet")
    source = open_source(tmp_path)
    values = {name: source.values(name).to_pylist() for name in source.partitions.names}
    assert values == {"day": [2, 1], "shop": [None, "a b"], "x": ["later", "2026-11-01"]}
    days = open_source(write_days(tmp_path / "days"))
    assert days.values("date").to_pylist()[::2] == [date.fromisoformat(day) for day in DAYS]
    # A folder of the path itself counts too, and a file inside is one partition.
    one = open_source(tmp_path / "days" / f"date={DAYS[1]}")
    assert (len(one.files), one.partitions.names) == (2, ["date", "hour"])


def test_a_large_partitioned_log_is_sampled_as_a_small_one_is(tmp_path, monkeypatch):
    folder = write_days(tmp_path / "days")
    options = {"segment": "hour", "where": ["date > 2026-11-01"]}
    whole, sample = read_for_audit(folder, **options)
    monkeypatch.setattr("ultr.log.sampling.WHOLE_ROWS", 0)
    light, large = read_for_audit(folder, **options)
    for ours, theirs in ((whole, light), (sample, large)):
        assert ours.request_ids.equals(theirs.request_ids)
        assert np.array_equal(ours.features, theirs.features)
        assert ours.context["segment"].equals(theirs.context["segment"])


# --- Several sources, patterns and URLs -------------------------------------------------------------------------------


def test_sources_are_files_folders_patterns_lists_and_urls(tmp_path):
    folder = write_days(tmp_path / "days")
    write(rows(99), tmp_path / "one, two.parquet")
    first, second = (f"{folder}/date={day}" for day in DAYS[:2])
    for source, requests in (
        (folder, 120),
        (f"{first},{second}", 80),
        ([first, tmp_path / "one, two.parquet"], 60),
        (tmp_path / "one, two.parquet", 20),
        (f"{folder}/date=2026-11-0[12]/hour=07/*.parquet", 40),
        (f"{folder}/date=2026-11-0[12]", 80),
        (f"{first},{first}", 40),  # a file counts once
        (f"file://{folder}", 120),
    ):
        assert len(read_log(source)) == requests
        assert sum(part.rows for part in scored(source)) == 3 * requests
    with pytest.raises(DataError, match=r"one format, got .*\(CSV\); .*\(Parquet\)"):
        rows(1).to_csv(tmp_path / "log.csv", index=False)
        read_log([tmp_path / "log.csv", folder])
    with pytest.raises(DataError, match="no file matches this pattern"):
        read_log(f"{tmp_path}/*/*.arrow")


def test_commands_take_several_sources_and_conditions(ultr, tmp_path):
    folder = write_days(tmp_path / "days")
    days = [f"{folder}/date={day}" for day in DAYS[:2]]
    done = ultr("describe", *days, "--where", "hour = 7", "--json")
    assert json.loads(done.stdout)["requests"] == 40
    done = ultr("prepare", *days, "--out", f"file://{tmp_path}/lists", "--json", "--where", "date > 2026-11-01")
    assert json.loads(done.stdout)["about"]["requests"] == 40
    assert (tmp_path / "lists" / "lists.json").is_file()
    done = ultr("describe", *days, f"{tmp_path}/a,b")
    assert (done.returncode, "a name with a comma cannot be one of several sources" in done.stderr) == (2, True)


# --- Files that differ ------------------------------------------------------------------------------------------------


def outcome(read, *paths):
    """Return what a reader does with files: its result, or its error without the names of the sources."""
    try:
        return read(list(paths))
    except UltrError as error:
        return str(error).removeprefix(", ".join(map(str, paths)))


def readers(tmp_path):
    """Return name -> a function from files to the requests, features and clicks that a command reads."""

    def facts(log):
        ids = log.request_ids.take(pa.array(log.request_of_row)).to_numpy(zero_copy_only=False)
        order = np.argsort(ids, kind="stable")
        clicks = {name: values[order].tolist() for name, values in log.actions.items()}
        return log.feature_names, log.features[order].tolist(), clicks

    def prepare(paths):
        out = tmp_path / f"lists-{np.random.default_rng().integers(1 << 60)}"
        return facts(prepared_log(",".join(map(str, paths)), out)[0])

    def score(paths):
        logs = scored(paths)
        table = sorted(
            zip(
                [i for log in logs for i in log.request_ids.to_pylist()],
                [tuple(row) for log in logs for row in log.features.tolist()],
                strict=True,
            )
        )
        return logs[0].feature_names, table

    return {"train": lambda paths: facts(read_log(paths)), "prepare": prepare, "score": score}


DRIFT = {
    "a column is only in one file": (lambda f: f.assign(like=1), "column 'like' is in 1 of 2 files", ("score",)),
    "a feature is only in one file": (lambda f: f.assign(f3=1.0), "column 'f3' is in 1 of 2 files", ("score",)),
    "a feature is missing in one file": (lambda f: f.drop(columns="f2"), "column 'f2' is in 1 of 2 files", ()),
    "texts and numbers": (lambda f: f.assign(f2=f["f2"].astype(str) + "x"), "column 'f2' has different types", ()),
    "ids of two types": (lambda f: f.assign(request=range(len(f))), "column 'request' has different types", ()),
    "whole numbers and fractions": (lambda f: f.assign(f2=f["f2"] + 0.5), None, ()),
    "another order of columns": (lambda f: f[f.columns[::-1]], None, ()),
    "another column that is not used": (lambda f: f.assign(note="x"), None, ()),
    "an unused column of two types": (lambda f: f.assign(query_note="x"), None, ()),
}  # fmt: skip


@pytest.mark.parametrize("reader", ["train", "prepare", "score"])
@pytest.mark.parametrize("case", DRIFT)
def test_files_that_differ_give_one_result_in_any_order(case, reader, tmp_path):
    change, message, unaffected = DRIFT[case]
    one, other = rows(1), change(rows(2))
    if case == "an unused column of two types":
        one["query_note"] = 1
    results = []
    for number, frames in enumerate([(one, other), (other, one)]):  # the files change places, by name
        paths = [tmp_path / str(number) / f"{name}.parquet" for name in "ab"]
        for frame, path in zip(frames, paths, strict=True):
            write(frame, path)
        results.append(outcome(readers(tmp_path)[reader], *paths))
        if reader != "prepare":  # which takes longer
            assert results[-1] == outcome(readers(tmp_path)[reader], *paths[::-1])
    if message is None or reader in unaffected:
        assert results[0] == results[1]
        assert not isinstance(results[0], str)
    else:
        assert all(message in result for result in results), results


def test_errors_of_files_that_differ_say_what_to_do(tmp_path):
    write(rows(1), tmp_path / "a.parquet")
    write(rows(2).assign(like=1, f2="x"), tmp_path / "b.parquet")
    hint = r"got no such column in .*a\.parquet; write it to all files, or name the columns .* with --actions"
    with pytest.raises(ColumnError, match=hint):
        read_log(tmp_path, features="f1")
    assert len(read_log(tmp_path, features="f1", actions="click")) == 40
    with pytest.raises(ColumnError, match=r"got int64 in .*a\.parquet and (large_)?string in .*b\.parquet; write it"):
        read_log(tmp_path, actions="click")


@pytest.mark.parametrize("reader", ["train", "prepare", "score"])
@pytest.mark.parametrize("swap", [False, True])
def test_csv_files_of_a_folder_have_one_type_for_each_column(reader, swap, tmp_path):
    one, other = rows(1), rows(2)
    one["f2"], other["f2"] = np.nan if reader != "prepare" else 3, other["f2"] + 0.25
    for frame, name in zip((one, other), "ba" if swap else "ab", strict=True):
        (tmp_path / f"{name}.csv.gz").write_bytes(gzip.compress(frame.to_csv(index=False).encode()))
    if reader == "train":
        log = read_log(tmp_path, missing="keep")
    elif reader == "prepare":
        log, _ = prepared_log(tmp_path, tmp_path / "lists")
    else:
        assert sum(part.rows for part in scored(tmp_path, missing="keep")) == 120
        return
    assert len(log) == 40
    assert np.nansum(log.features[:, 1]) == pytest.approx(other["f2"].sum() + (180 if reader == "prepare" else 0))


def test_a_key_that_json_lines_leave_out_has_no_value(tmp_path):
    write(rows(1), tmp_path / "a.jsonl")
    write(rows(2).assign(like=1), tmp_path / "b.jsonl")
    log = read_log(tmp_path)
    assert log.actions["like"].sum() == 60
    assert "60 rows have no value in action column 'like'" in log.notes[0]


def test_columns_of_lists_with_other_names_of_features_are_an_error_in_any_order(tmp_path):
    metadata = {name: {b"ultr.features": json.dumps([name, "y"]).encode()} for name in "pq"}
    table = pa.table({"request": [1], "position": [1], "click": [1], "features": [[1.0, 2.0]]})
    from ultr.log.table import FEATURE_NAMES_KEY

    for name, file in (("p", "a"), ("q", "b")):
        content = {FEATURE_NAMES_KEY: metadata[name][b"ultr.features"]}
        pq.write_table(table.replace_schema_metadata(content), tmp_path / f"{file}.parquet")
    for names in ("ab", "ba"):
        with pytest.raises(DataError, match=r"b\.parquet: its features differ from the features of .*a\.parquet"):
            read_log([tmp_path / f"{name}.parquet" for name in names])
