from __future__ import annotations

import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_svmlight_file

from ultr.errors import DataError
from ultr.log import read_log

blanks = st.sampled_from([" ", "  ", "\t", " \t "])
numbers = st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: f"{x:.6g}") | st.integers(-5, 5).map(str)


@st.composite
def lines(draw) -> str:
    indices = sorted(draw(st.sets(st.integers(1, 30), max_size=8)))
    words = [str(draw(st.integers(0, 4))), f"qid:{draw(st.integers(0, 3))}"]
    words += [f"{i}:{draw(numbers)}" for i in indices]
    comment = draw(st.sampled_from(["", "", " # a comment 1:2", "#doc = 3 # again", " #"]))
    return draw(blanks).join(words) + draw(st.sampled_from(["", " "])) + comment


@given(text=st.lists(lines(), min_size=1, max_size=12), end=st.sampled_from(["\n", "\r\n"]), block=st.integers(1, 200))
def test_files_read_as_scikit_learn_reads_them(text, end, block, tmp_path_factory):
    path = tmp_path_factory.mktemp("svm") / "data.txt"
    path.write_text(end.join(text) + end, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ultr.log.svmlight.BLOCK_BYTES", block)  # blocks end anywhere
        log = read_log(path)
    width = max(1, log.features.shape[1])  # scikit-learn gives a file without features one all the same
    features, grades, qids = load_svmlight_file(str(path), n_features=width, query_id=True, zero_based=False)
    _, first = np.unique(qids, return_index=True)
    order = np.concatenate([np.flatnonzero(qids == qid) for qid in qids[np.sort(first)]])
    np.testing.assert_array_equal(log.features, features.toarray()[order, : log.features.shape[1]].astype(np.float32))
    np.testing.assert_array_equal(log.relevance, grades[order])
    assert log.request_ids.to_pylist() == qids[np.sort(first)].tolist()
    assert log.positions is None
    assert log.actions == {}


def test_gzipped_and_plain_files_give_the_same_log_and_blank_lines_are_skipped(tmp_path):
    text = b"# heading\n\n2 qid:7 1:0.5 3:1e-3\n\n0 qid:7 2:4\n1 qid:8 1:1"
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text))
    for name in ("a.txt", "b.txt.gz"):
        log = read_log(tmp_path / name)
        np.testing.assert_allclose(log.features, [[0.5, 0, 1e-3], [0, 4, 0], [1, 0, 0]])
        assert log.lengths.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 1:2 2:3", "got '1 1:2 2:3' in line 3"),
        ("1 qid:1 1:2 2", "line 3"),
        ("1 qid:1 1:x", "line 3"),
        ("x qid:1 1:2", "line 3"),
        ("1 qid:a 1:2", "line 3"),
        ("1 qid:1 0:2", "line 3"),
        ("1 qid:1 1.5:2", "line 3"),
        ("1 qid:1 1:2:3", "line 3"),
        ("1 qid:1 1:2 1:3", "each once.*line 3"),
        ("1 qid:1 1000000000:2", "line 3"),
        ("1 qid:1 3000000000:2", "line 3"),
        ("1 qid:9007199254740993 1:2", "line 3"),
        ("1 qid:1 1: 2", "line 3"),
        ("1", "line 3"),
        ("1 qid", "line 3"),
        ("request,position,click", "line 3"),
        ("1 qid:1 1:nan", "not finite, got nan"),
        ("1 qid:1 1:1e60", "not finite, got inf"),
        ("-1 qid:1 1:1", "not negative, got -1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "bad.txt").write_text(f"0 qid:1 1:1\n1 qid:1 1:2\n{line}\n0 qid:2 1:1\n")
    with pytest.raises(DataError, match=message):
        read_log(tmp_path / "bad.txt")


def test_files_without_rows_and_damaged_gzip_are_errors(tmp_path):
    (tmp_path / "none.txt").write_text("# only a comment\n")
    with pytest.raises(DataError, match="no rows"):
        read_log(tmp_path / "none.txt")
    whole = gzip.compress(b"1 qid:1 1:1\n" * 1000)
    (tmp_path / "cut.txt.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged"):
        read_log(tmp_path / "cut.txt.gz")


def test_a_sample_of_web30k_reads_whole(real_data):
    path = real_data("mslr-sample") / "msn1.fold1.train.5k.txt.gz"
    log = read_log(path)
    assert (log.rows, len(log), log.features.shape[1]) == (5000, 43, 136)
    features, grades = load_svmlight_file(str(path), dtype=np.float32)
    np.testing.assert_array_equal(log.features, features.toarray())
    np.testing.assert_array_equal(log.relevance, grades)
