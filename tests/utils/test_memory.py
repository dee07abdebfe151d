from __future__ import annotations

import os
from pathlib import Path

import pytest

import ultr.utils.memory
from ultr.utils.memory import UNKNOWN, available_memory, parse_bytes


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
    monkeypatch.setattr(ultr.utils.memory, "CGROUPS", ((str(limit), str(used)),))
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
