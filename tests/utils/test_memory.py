from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ultr.utils.memory as ultr_memory
from ultr.errors import DataError
from ultr.utils.memory import UNKNOWN, available_memory, check_parquet_fits, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1", 1),
        ("512", 512),
        ("512B", 512),
        ("1K", 1 << 10),
        ("512MB", 512 << 20),
        ("512mb", 512 << 20),
        ("2GB", 2 << 30),
        ("2G", 2 << 30),
        ("2GiB", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("1.5 GB", 3 << 29),
        (" 3TB ", 3 << 40),
        ("0.5kb", 512),
    ],
)
def test_sizes_are_read_as_people_write_them(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "much", "1..5GB", "nan", "2XB", "4 GB 2"])
def test_text_that_is_not_a_size_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"could not convert|must be from 0 to"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["infGB", "1e400", "-1GB"])
def test_sizes_beyond_bounds_are_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        parse_bytes(text)


def test_available_memory_is_at_most_that_of_the_machine():
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory() <= physical


def test_the_limit_of_the_group_of_processes_counts(tmp_path, monkeypatch):
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(ultr_memory, "CGROUPS", ((str(limit), str(used)),))
    whole = available_memory()  # there is no such group
    limit.write_text("max\n")
    used.write_text("5\n")
    assert available_memory() == pytest.approx(whole, rel=0.5)  # it has no limit
    limit.write_text("1000\n")
    used.write_text("300\n")
    assert available_memory() == 700
    used.write_text("1300\n")
    assert available_memory() == 0


def test_a_default_is_used_where_the_system_does_not_report_memory(monkeypatch):
    def absent(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", absent)
    assert available_memory() == UNKNOWN


# --- Parquet files that are small, and large in memory ----------------------------------------------------------------

ROWS = 1_000_000


def log_file(path: Path, **columns: object) -> Path:
    """Write a log with a million rows, all equal: less than 200 kilobytes."""
    same = {name: pa.array(np.zeros(ROWS, np.int64)) for name in ("request", "position", "click", "f1", "f2")}
    pq.write_table(pa.table({**same, **columns}), path, store_schema=False)
    assert path.stat().st_size < 200_000
    return path


def check(path: Path, names: list[str], monkeypatch, free: int) -> None:
    monkeypatch.setattr(ultr_memory, "available_memory", lambda: free)
    check_parquet_fits([lambda **options: pq.ParquetFile(path, **options)], names, where=path, hint="read less")


def test_numbers_that_repeat_count_with_their_size_in_memory(tmp_path, monkeypatch):
    path = log_file(tmp_path / "log.parquet")
    check(path, ["request", "click"], monkeypatch, free=16 * ROWS)
    with pytest.raises(DataError, match=r"log.parquet: the log does not fit in memory, got at least .*; read less"):
        check(path, ["request", "click", "f1"], monkeypatch, free=16 * ROWS)


def test_texts_and_lists_that_repeat_count_with_their_size_in_memory(tmp_path, monkeypatch):
    texts = pa.DictionaryArray.from_arrays(np.zeros(ROWS, np.int32), pa.array(["x" * 1000]))
    nested = pa.ListArray.from_arrays(np.arange(0, ROWS + 1, 10, np.int32), np.zeros(ROWS))
    path = log_file(tmp_path / "log.parquet", item=texts)
    pq.write_table(pa.table({"a.b": nested}), tmp_path / "lists.parquet")
    check(path, ["item"], monkeypatch, free=2100 * ROWS)
    check(tmp_path / "lists.parquet", ["a.b"], monkeypatch, free=8 * ROWS)
    for file, name, free in ((path, "item", 1900 * ROWS), (tmp_path / "lists.parquet", "a.b", 7 * ROWS)):
        with pytest.raises(DataError, match="does not fit in memory"):
            check(file, [name], monkeypatch, free=free)


@pytest.mark.parametrize("command", [["describe"], ["train", "--out", "run"]])
def test_a_small_file_that_is_large_in_memory_is_an_error_before_it_is_read(command, ultr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = log_file(tmp_path / "log.parquet")
    monkeypatch.setattr(pq, "read_table", None)  # it must not be called
    monkeypatch.setattr(ultr_memory, "available_memory", lambda: 30 * ROWS)
    done = ultr(command[0], path, *command[1:])
    assert done.returncode == 5, done.stderr
    assert "the log does not fit in memory, got at least" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["log.parquet"]
