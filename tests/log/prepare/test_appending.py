"""Days that are appended to a folder of lists: the same lists as if all days had been prepared at once."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from ultr.errors import ColumnError, DataError, OptionError
from ultr.log import read_log
from ultr.log.prepare import folders
from ultr.log.prepare.pipeline import prepare_lists
from ultr.log.shards import SPLITS, Manifest, Shards

OPTIONS = {"features": "f", "categorical": "shop", "label": "2 * click", "max_items": 4, "validation": 0.2, "test": 0.2}


def day(number: int, shops: str, requests: int = 40) -> pd.DataFrame:
    rng, rows = np.random.default_rng(number), requests * 5
    return pd.DataFrame(
        {
            "request": np.repeat(np.arange(requests) + 1000 * number, 5),
            "position": np.tile(np.arange(1, 6), requests) + (number == 2),
            "query": np.repeat(rng.integers(0, 30, requests), 5),
            "f": rng.normal(size=rows),
            "shop": rng.choice(list(shops), rows),
            "click": rng.integers(0, 2, rows),
        }
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("days")
    for number, shops in ((1, "bc"), (2, "abz"), (3, "cq")):
        day(number, shops).to_parquet(folder / f"{number}.parquet", index=False)
    return folder


@pytest.fixture
def lists(files, tmp_path):
    prepare_lists(files / "1.parquet", tmp_path / "lists", **OPTIONS)
    return tmp_path / "lists"


def rows(folder, split):
    log = Shards(folder, split).read_all()
    frame = log.to_table().to_pandas()
    return frame.sort_values(["request", "position"]).reset_index(drop=True)


def test_appended_days_are_the_lists_of_all_days(files, lists, tmp_path):
    for number in (2, 3):
        prepare_lists(files / f"{number}.parquet", lists, append=True)
    whole = prepare_lists(f"{files}/*.parquet", tmp_path / "whole", **OPTIONS)
    manifest = Manifest.load(lists)
    for split in SPLITS:  # a query is in the same split as if all days were prepared at once
        pd.testing.assert_frame_equal(rows(lists, split), rows(tmp_path / "whole", split), check_like=True)
    assert manifest.splits == whole.splits
    assert (manifest.positions, manifest.actions, manifest.label) == (whole.positions, whole.actions, whole.label)
    assert manifest.categorical["shop"] == ("b", "c", "a", "z", "q")  # the codes of known values stay
    assert [part["source"] for part in manifest.appended] == [str(files / f"{number}.parquet") for number in (2, 3)]
    assert {p.name for p in lists.iterdir()} == {"lists.json", ".lock", *SPLITS}


def test_a_day_is_appended_only_once(files, lists):
    prepare_lists(files / "2.parquet", lists, append=True)
    before = (lists / "lists.json").read_bytes()
    again = prepare_lists(files / "2.parquet", lists, append=True)
    assert "was appended before" in again.about["notes"][0]
    assert (lists / "lists.json").read_bytes() == before


@pytest.fixture
def days(tmp_path):
    """Days as partitions, and the folder of their lists."""

    def write(number, content):
        folder = tmp_path / "log" / f"date=2026-01-0{number}"
        folder.mkdir(parents=True, exist_ok=True)
        content.to_parquet(folder / "log.parquet", index=False)
        return folder

    first, *others = (write(number, day(number, shops)) for number, shops in ((1, "bc"), (2, "abz"), (3, "cq")))
    prepare_lists(first, tmp_path / "lists", **OPTIONS)
    for other in others:
        prepare_lists(other, tmp_path / "lists", append=True)
    return write, tmp_path / "lists"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_corrected_day_replaces_the_old_one(number, days, tmp_path):
    write, lists = days
    corrected = day(number, "bq", requests=50).assign(f=0.5)
    folder, before = write(number, corrected), Manifest.load(lists)
    with pytest.raises(
        DataError, match=rf"40 requests of the log are in .*{number}0.*--replace date=2026-01-0{number}"
    ):
        prepare_lists(folder, lists, append=True)
    assert Manifest.load(lists) == before
    prepare_lists(folder, lists, append=True, replace=[f"date=2026-01-0{number}"])
    whole = prepare_lists(tmp_path / "log", tmp_path / "whole", **OPTIONS)
    manifest = Manifest.load(lists)
    for split in SPLITS:
        pd.testing.assert_frame_equal(rows(lists, split), rows(tmp_path / "whole", split), check_like=True)
    assert manifest.splits == whole.splits
    assert (manifest.positions, manifest.binary) == (whole.positions, whole.binary)
    assert manifest.about["requests"] == whole.about["requests"] == 130
    day_of = Shards(lists, decay=1.0).read_all()  # the corrected day is still the same day
    np.testing.assert_allclose(day_of.weights, 2.0 ** (np.asarray(day_of.request_ids) // 1000 - 3.0))
    files = {f"{path.parent.name}/{path.name}" for path in lists.glob("*/*.parquet")}
    assert files == set(manifest.footers)
    again = prepare_lists(folder, lists, append=True, replace=[f"date=2026-01-0{number}"])
    assert "was appended before" in again.about["notes"][0]


def test_only_whole_sources_can_be_replaced(days, tmp_path):
    write, lists = days
    for number in (4, 5):
        write(number, day(number, "b"))
    log = tmp_path / "log"
    prepare_lists(f"{log}/date=2026-01-0[45]", lists, append=True)
    corrected = write(5, day(5, "c"))
    for replaced, match in (
        (["date=2026-01-05"], "were prepared together with date=2026-01-04; name all of them"),
        (["date=2026-01-09"], "no such partition, got date=2026-01-09; the lists have date=2026-01-01, "),
        (["day=5"], "no such partition, got day=5; the lists have no partitions of this name"),
        (["date=2026-01-03"], "the partitions of the log are not those of --replace, got date=2026-01-05"),
        (["2026-01-05"], "--replace must be NAME=VALUE"),
    ):
        with pytest.raises(OptionError, match=match):
            prepare_lists(corrected, lists, append=True, replace=replaced)
    both = ["date=2026-01-04", "date=2026-01-05"]
    prepare_lists(f"{log}/date=2026-01-0[45]", lists, append=True, replace=both)
    plain = tmp_path / "plain.parquet"
    pd.concat([day(4, "b", 10), day(5, "c", 10)]).to_parquet(plain, index=False)
    prepare_lists(plain, lists, append=True, replace=both)  # a file without partitions
    prepare_lists(f"{log}/date=2026-01-0[45]", lists, append=True, replace=both)
    assert Manifest.load(lists).about["requests"] == 200
    with pytest.raises(OptionError, match="--replace is an option of --append"):
        prepare_lists(plain, tmp_path / "other", replace=both)


def test_requests_without_partitions_are_not_stored_twice(files, lists, tmp_path):
    both = pd.concat([day(1, "b").query("request < 1002"), day(2, "b")])
    both.to_parquet(tmp_path / "both.parquet", index=False)
    match = r"2 requests of the log are in the lists already, got 1000, 1001, \.\.\.; leave them out"
    with pytest.raises(DataError, match=match):
        prepare_lists(tmp_path / "both.parquet", lists, append=True)
    assert not (lists / ".appending").exists()
    assert not Manifest.load(lists).appended


@pytest.mark.parametrize("moment", ["check_same", "_joined", "remove_unlisted"])
def test_a_kill_leaves_the_old_or_the_corrected_day(moment, days):
    write, lists = days
    folder, before = write(2, day(2, "bq").assign(f=0.5)), rows(lists, "train")
    code = (
        "import os, sys\n"
        "from ultr.log.prepare import folders, pipeline\n"
        "def kill(*_): os.kill(os.getpid(), 9)\n"
        f"{'pipeline' if moment == 'check_same' else 'folders'}.{moment} = kill\n"
        "pipeline.prepare_lists(sys.argv[1], sys.argv[2], append=True, replace=['date=2026-01-02'])\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(lists)]
    assert subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}).returncode == -9
    done = moment == "remove_unlisted"
    assert rows(lists, "train").equals(before) != done
    manifest = prepare_lists(folder, lists, append=True, replace=["date=2026-01-02"])
    assert ("was appended before" in " ".join(manifest.about["notes"])) == done
    changed = rows(lists, "train")
    assert set(changed[changed.request // 1000 == 2]["features"].map(tuple).str[0]) == {0.5}
    assert list(changed.request) == list(before.request)
    assert len(list((lists / "train").iterdir())) == 3


def test_weights_decay_with_the_days_that_were_appended(files, lists):
    with pytest.raises(OptionError, match="the days of the lists are not known"):
        Shards(lists, decay=1.0)
    for number in (2, 3):
        prepare_lists(files / f"{number}.parquet", lists, append=True)
    log = Shards(lists, decay=2.0).read_all()
    day_of = np.asarray(log.request_ids) // 1000
    np.testing.assert_allclose(log.weights, 2.0 ** ((day_of - 3) / 2), rtol=1e-6)


@pytest.mark.parametrize("moment", ["check_same", "_joined"])
def test_a_kill_leaves_the_old_lists_and_the_same_command_appends_them(moment, files, lists):
    before = rows(lists, "train")
    code = (
        "import os, sys\n"
        "from ultr.log.prepare import folders, pipeline\n"
        "def kill(*_): os.kill(os.getpid(), 9)\n"
        f"{'pipeline' if moment == 'check_same' else 'folders'}.{moment} = kill\n"
        "pipeline.prepare_lists(sys.argv[1], sys.argv[2], append=True)\n"
    )
    command = [sys.executable, "-c", code, str(files / "2.parquet"), str(lists)]
    assert subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}).returncode == -9
    assert (moment == "_joined") == (len(list((lists / "train").iterdir())) == 2)  # shards that are not read
    pd.testing.assert_frame_equal(rows(lists, "train"), before)
    prepare_lists(files / "2.parquet", lists, append=True)
    assert len(rows(lists, "train")) > len(before)
    assert not (lists / ".appending").exists()


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        ({"f": "g"}, {}, "'f'"),
        ({}, {"max_items": 3}, r"the option 'max-items' is that of the lists.*the lists have 4"),
        ({}, {"categorical": "shop,query"}, r"the option 'categorical' is that of the lists"),
        ("query", {}, "the type of 'query' is not that of the lists.*string; the lists have int64"),
    ],
)
def test_other_columns_and_options_are_errors(change, options, match, lists, tmp_path):
    other = day(2, "ab")
    other = other.astype({"query": str}) if change == "query" else other.rename(columns=change)
    other.to_parquet(tmp_path / "other.parquet", index=False)
    before = (lists / "lists.json").read_bytes()
    with pytest.raises((ColumnError, OptionError), match=match):
        prepare_lists(tmp_path / "other.parquet", lists, append=True, **options)
    assert (lists / "lists.json").read_bytes() == before
    assert len(read_log(lists)) == Manifest.load(lists).splits["train"]["requests"]


def test_only_lists_split_by_hash_can_be_appended_to(files, tmp_path):
    with pytest.raises(DataError, match="is not a folder of lists"):
        prepare_lists(files / "1.parquet", tmp_path / "none", append=True)
    prepare_lists(files / "1.parquet", tmp_path / "lists", features="f", split="time", time="request")
    with pytest.raises(OptionError, match="split by time cannot be appended to"):
        prepare_lists(files / "2.parquet", tmp_path / "lists", append=True)


def test_another_process_that_appends_is_an_error(files, lists):
    with folders.locked(lists), pytest.raises(Exception, match="another process appends to these lists"):
        prepare_lists(files / "2.parquet", lists, append=True)


def test_the_command_replaces_a_partition(ultr, days):
    write, lists = days
    folder = write(3, day(3, "cq", requests=45))
    done = ultr("prepare", folder, "--append", lists)
    assert (done.returncode, "--replace date=2026-01-03" in done.stderr) == (5, True), done.stderr
    done = ultr("prepare", folder, "--append", lists, "--replace", "date=2026-01-03")
    assert done.returncode == 0, done.stderr
    assert Manifest.load(lists).about["requests"] == 125


def test_the_command_appends(ultr, files, lists):
    done = ultr("prepare", files / "2.parquet", "--append", lists)
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stderr
    assert len(Manifest.load(lists).appended) == 1
    done = ultr("prepare", files / "2.parquet")
    assert (done.returncode, "--out or --append must name" in done.stderr) == (2, True)
