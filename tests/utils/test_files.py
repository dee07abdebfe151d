from __future__ import annotations

import gzip

import pytest

from ultr.errors import DataError, OutputError
from ultr.utils.files import atomic_path, content_kind, existing_file, fingerprint


def test_a_file_appears_only_when_it_is_complete(tmp_path):
    target = tmp_path / "out.txt"
    with atomic_path(target) as temporary:
        temporary.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    assert [p.name for p in tmp_path.iterdir()] == ["out.txt"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "out.txt"
    target.write_text("old")
    with pytest.raises(RuntimeError), atomic_path(target, overwrite=True) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.txt"]


def test_an_existing_output_is_an_error_unless_overwritten(tmp_path):
    target = tmp_path / "out.txt"
    target.write_text("old")
    with pytest.raises(OutputError, match="--overwrite"), atomic_path(target):
        pass
    with atomic_path(target, overwrite=True) as temporary:
        temporary.write_text("new")
    assert target.read_text() == "new"


def test_a_folder_replaces_a_folder_whole(tmp_path):
    target = tmp_path / "run"
    for content in ("one", "two"):
        with atomic_path(target, overwrite=True, folder=True) as temporary:
            (temporary / content).write_text(content)
    assert [p.name for p in target.iterdir()] == ["two"]
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_place_that_cannot_be_written_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"), atomic_path(tmp_path / "file" / "out.txt"):
        pass


def test_missing_empty_and_folder_paths_are_errors(tmp_path):
    with pytest.raises(DataError, match="is a folder"):
        existing_file(tmp_path)
    (tmp_path / "log.csv").write_text("")
    with pytest.raises(DataError, match="empty"):
        existing_file(tmp_path / "log.csv")
    with pytest.raises(DataError, match=r"no such file; did you mean 'log\.csv'"):
        existing_file(tmp_path / "lgo.csv")
    with pytest.raises(DataError, match="check the path"):
        existing_file(tmp_path / ("x" * 5000))


@pytest.mark.parametrize("folder", [False, True])
def test_a_file_never_replaces_a_folder_nor_a_folder_a_file(tmp_path, folder):
    target = tmp_path / "precious"
    if folder:
        target.write_text("kept")
    else:
        target.mkdir()
        (target / "inside").write_text("kept")
    with pytest.raises(OutputError, match="not overwritten"), atomic_path(target, overwrite=True, folder=folder):
        pass
    assert (target if folder else target / "inside").read_text() == "kept"


def test_a_link_is_followed_and_a_dangling_one_is_an_error(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_path(tmp_path / "link", overwrite=True) as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="exists already"), atomic_path(tmp_path / "dangling"):
        pass


def test_content_is_recognised_by_its_first_bytes(tmp_path):
    cases = {b"PAR1....": "Parquet", gzip.compress(b"x"): "gzip", b"a,b\n": "text", b"\x00\x01": "unknown binary data"}
    for content, kind in cases.items():
        (tmp_path / "f").write_bytes(content)
        assert content_kind(tmp_path / "f") == kind


def test_a_fingerprint_follows_content_and_names(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a").write_text("1")
    before = fingerprint(folder)
    assert before == fingerprint(folder)
    (folder / "a").rename(folder / "b")
    renamed = fingerprint(folder)
    (folder / "b").write_text("2")
    assert len({before, renamed, fingerprint(folder)}) == 3
