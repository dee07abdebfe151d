from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from ultr.datasets import DATASETS, SPLITS, load_dataset
from ultr.datasets.base import FORMAT
from ultr.datasets.letor import read_letor
from ultr.errors import DataError
from ultr.log import svmlight
from ultr.utils.jsonfiles import add_checksum, load_json


def letor_text(first_qid: int, requests: int = 6, features: int = 4, grades: int = 3) -> str:
    rng = np.random.default_rng(first_qid)
    lines = []
    for qid in range(first_qid, first_qid + requests):
        for _ in range(5):
            words = [f"{i}:{rng.random():.4f}" for i in range(1, features + 1) if rng.random() < 0.8]
            lines.append(f"{rng.integers(grades)} qid:{qid} {' '.join(words)} #doc")
    return "\n".join(lines) + "\n"


LAYOUTS = {
    "yahoo": ["set1.train.txt", "set1.valid.txt", "set1.test.txt"],
    "mslr": ["Fold1/train.txt", "Fold1/vali.txt", "Fold1/test.txt"],
    "istella": ["sample/train.txt", "sample/vali.txt", "sample/test.txt"],
    "gzipped": ["train.txt.gz", "vali.txt.gz", "test.txt.gz"],
    "blocks": ["S1.txt", "S2.txt", "S3.txt", "S4.txt", "S5.txt"],
}


def write_layout(folder: Path, files: list[str]) -> None:
    for i, name in enumerate(files):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = letor_text(10 * i, features=4 + i % 2).encode()
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_found_and_split(layout, tmp_path):
    write_layout(tmp_path, LAYOUTS[layout])
    data = load_dataset(tmp_path)
    expected = [18, 6, 6] if layout == "blocks" else [6, 6, 6]
    assert [len(data[split]) for split in SPLITS] == expected
    assert {data[split].features.shape[1] for split in SPLITS} == {5}  # as wide as the widest file
    assert data.max_grade == 2
    firsts = [data[split].request_ids.to_pylist()[0] for split in SPLITS]
    assert firsts == ([0, 30, 40] if layout == "blocks" else [0, 10, 20])


def test_a_single_file_is_split_by_request(tmp_path):
    (tmp_path / "all.txt").write_text(letor_text(0, requests=20))
    data = load_dataset(tmp_path / "all.txt")
    ids = [set(data[split].request_ids.to_pylist()) for split in SPLITS]
    assert [len(i) for i in ids] == [12, 4, 4]
    assert set.union(*ids) == set(range(20))
    (tmp_path / "few.txt").write_text(letor_text(0, requests=2))
    with pytest.raises(DataError, match="at least 5 requests"):
        load_dataset(tmp_path / "few.txt")


def test_it_is_read_once_and_again_when_it_changes(tmp_path, monkeypatch):
    write_layout(tmp_path, LAYOUTS["yahoo"])
    first = read_letor(tmp_path)

    def fail(*_):
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr("ultr.datasets.letor.read_svmlight", fail)
        second = read_letor(tmp_path)
    assert second.fingerprint == first.fingerprint
    assert second.train.feature_names == first.train.feature_names
    np.testing.assert_array_equal(second.train.features, first.train.features)
    np.testing.assert_array_equal(second.test.relevance, first.test.relevance)
    (tmp_path / "set1.train.txt").write_text(letor_text(500))
    os.utime(tmp_path / "set1.train.txt", ns=(1, 1))
    third = read_letor(tmp_path)
    assert third.fingerprint != first.fingerprint
    assert third.train.request_ids.to_pylist()[0] == 500


@pytest.mark.parametrize("damage", ["cut short", "no meta", "older format", "other rows"])
def test_a_damaged_or_older_cache_is_made_again(damage, tmp_path, own_cache):
    write_layout(tmp_path, LAYOUTS["yahoo"])
    features = read_letor(tmp_path).train.features.copy()  # it is mapped from the file that is damaged below
    (folder,) = own_cache.iterdir()
    meta = folder / "meta.json"
    if damage == "cut short":
        content = (folder / "train.arrow").read_bytes()
        (folder / "train.arrow").write_bytes(content[: len(content) // 2])
    elif damage == "no meta":
        meta.unlink()
    else:
        changed = {"format": 0} if damage == "older format" else {"rows": dict.fromkeys(SPLITS, 1)}
        meta.write_text(json.dumps(add_checksum({**load_json(meta), **changed})))
    again = read_letor(tmp_path)
    np.testing.assert_array_equal(again.train.features, features)
    assert load_json(meta)["format"] == FORMAT


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    write_layout(tmp_path / "data", LAYOUTS["yahoo"])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ULTR_CACHE", str(tmp_path / "file" / "cache"))
    assert len(read_letor(tmp_path / "data").train) == 6


def test_grades_are_doubled_and_requests_without_a_relevant_document_left_out_for_mq2007(tmp_path):
    write_layout(tmp_path / "mq2007", LAYOUTS["blocks"])
    for block, first in (("S4", 30), ("S5", 40)):
        (tmp_path / "mq2007" / f"{block}.txt").write_text("0 qid:90 1:1\n0 qid:90 1:2\n" + letor_text(first))
    data = load_dataset("mq2007", data_dir=tmp_path)
    assert data.max_grade == 4
    assert set(np.unique(data.train.relevance)) == {0, 2, 4}
    assert 90 not in data.test.request_ids.to_pylist() + data.validation.request_ids.to_pylist()


def test_a_request_in_two_files_of_a_split_is_an_error(tmp_path):
    write_layout(tmp_path, LAYOUTS["blocks"])
    (tmp_path / "S2.txt").write_text(letor_text(0))
    with pytest.raises(DataError, match="is in two files"):
        load_dataset(tmp_path)


def test_the_error_of_missing_data_says_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.delenv("ULTR_DATA", raising=False)
    with pytest.raises(DataError, match="--data-dir or ULTR_DATA"):
        load_dataset("yahoo")
    monkeypatch.setenv("ULTR_DATA", str(tmp_path))
    for name in DATASETS:
        with pytest.raises(DataError, match=f"put its files into {tmp_path}/{name}"):
            load_dataset(name)
    with pytest.raises(DataError, match="did you mean 'synthetic'"):
        load_dataset("syntetic")
    with pytest.raises(DataError, match="known layout, got nothing"):
        load_dataset(tmp_path)


def test_mq2007_has_its_true_size(real_data):
    data = load_dataset("mq2007", data_dir=real_data("mq2007").parent)
    raw = [svmlight.read_svmlight(real_data("mq2007") / f"S{i}.txt.gz") for i in range(1, 6)]
    assert sum(len(log) for log in raw) == 1692
    assert sum(log.rows for log in raw) == 59135
    assert data.train.rows == sum(log.rows for log in raw[:3])
    assert data.train.features.shape[1] == 46
    assert data.max_grade == 4


def test_too_high_grades_and_files_without_features_are_errors(own_cache, tmp_path):
    rows = [f"{grade} qid:{query} 1:0.5" for query in range(9) for grade in (0, 1)]
    (tmp_path / "high.txt").write_text("\n".join([*rows, "100 qid:9 1:0.5"]))
    with pytest.raises(DataError, match=r"grades of at most 30, got 100\.0; scale the labels"):
        read_letor(tmp_path / "high.txt")
    (tmp_path / "bare.txt").write_text("\n".join(row.removesuffix(" 1:0.5") for row in rows))
    with pytest.raises(DataError, match="no features"):
        read_letor(tmp_path / "bare.txt")
