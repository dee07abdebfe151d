"""Files of judgments, read again by their published rules, for ids of any text."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bias.judged import judged_world
from ultr.bias.examination import Examination
from ultr.bias.judgment_files import FORMATS, format_of, trec_id, write_judgments
from ultr.bias.relevance import Judgments, judge, pairs_of_log
from ultr.errors import DataError, OptionError, OutputError
from ultr.log import read_log


@pytest.fixture(scope="module")
def found() -> Judgments:
    world = judged_world(0, queries=30)
    features = np.random.default_rng(0).normal(size=(world.log.rows, 2)).astype(np.float32)
    features[0, 1] = np.nan
    log = replace(world.log, features=features, feature_names=("a", "b"))
    return judge(pairs_of_log(log, "click"), Examination.known({k: k**-0.8 for k in range(1, 9)}))


def expected(found: Judgments, *, unsure: bool = False) -> list[tuple[str, str, int]]:
    rows = zip(*(each.to_pylist() for each in (found.pairs.queries, found.pairs.items)), found.grade, strict=True)
    return [(str(q), str(i), int(g)) for (q, i, g), sure in zip(rows, found.sure, strict=True) if sure or unsure]


@pytest.mark.parametrize("name", ["j.csv", "j.parquet", "j.PQ"])
def test_tables_have_all_pairs_and_columns(found, tmp_path, name):
    assert write_judgments(found, tmp_path / name) == len(found)
    table = (pa_csv.read_csv if name.endswith("csv") else pq.read_table)(tmp_path / name)
    assert table.column_names == found.table().column_names
    np.testing.assert_allclose(table["relevance"].to_numpy(), found.relevance, rtol=1e-6)
    assert table["sure"].to_pylist() == found.sure.tolist()


@pytest.mark.parametrize("unsure", [False, True])
def test_qrels_have_four_columns(found, tmp_path, unsure):
    count = write_judgments(found, tmp_path / "j.qrels", keep_unsure=unsure)
    rows = [line.split() for line in (tmp_path / "j.qrels").read_text().splitlines()]
    assert [(q, i, int(g)) for q, zero, i, g in rows if zero == "0"] == expected(found, unsure=unsure)
    assert 0 < count == len(rows) <= len(found)


def test_opensearch_imports_the_body(found, tmp_path):
    """The rules of its ImportJudgmentsProcessor: a list for each query, with texts `docId` and `rating`, a float."""
    write_judgments(found, tmp_path / "body.json", format="opensearch")
    body = json.loads((tmp_path / "body.json").read_text())
    assert {key: type(value) for key, value in body.items()} == {
        "name": str,
        "description": str,
        "type": str,
        "judgmentRatings": list,
    }
    assert body["type"] == "IMPORT_JUDGMENT"
    rows = []
    for query in body["judgmentRatings"]:
        assert sorted(query) == ["query", "ratings"]
        for each in query["ratings"]:
            assert sorted(each) == ["docId", "rating"]
            assert isinstance(each["rating"], str)
            rows.append((query["query"], each["docId"], int(float(each["rating"]))))
    assert rows == expected(found)
    assert len({query["query"] for query in body["judgmentRatings"]}) == len(body["judgmentRatings"])


def test_quepid_imports_the_columns(found, tmp_path):
    write_judgments(found, tmp_path / "q.csv", format="quepid")
    with (tmp_path / "q.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["query", "docid", "rating"]
    assert [(row["query"], row["docid"], int(row["rating"])) for row in rows] == expected(found)


def test_ranklib_lines_are_letor(found, tmp_path):
    """A missing value is left out, which readers take as 0."""
    (tmp_path / "data").mkdir()
    count = write_judgments(found, tmp_path / "train.txt", format="ranklib", keep_unsure=True)
    lines = (tmp_path / "train.txt").read_text().splitlines()
    pattern = re.compile(r"\d+ qid:[1-9]\d*( [1-9]\d*:\S+)* # \S.*")
    assert all(pattern.fullmatch(line) for line in lines)
    log = read_log(tmp_path / "train.txt")
    assert log.rows == count == len(found)
    np.testing.assert_allclose(log.features, np.nan_to_num(found.pairs.features), rtol=1e-5, atol=1e-6)
    assert log.relevance.tolist() == found.grade.tolist()
    assert len(log) == len(set(found.pairs.queries.to_pylist()))


words = st.text(min_size=1, max_size=8)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=5, unique=True))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_may_be_any_text(found, tmp_path, ids):
    """Every pair is on one line, and JSON and qrels give the same ids back."""
    one_line = [tuple(" ".join(text.splitlines()) for text in pair) for pair in ids]
    size = len(ids)
    pairs = replace(
        found.pairs,
        queries=pa.array([pair[0] for pair in ids]),
        items=pa.array([pair[1] for pair in ids]),
        query=np.arange(size),
        features=found.pairs.features[:size],
    )
    some = replace(found, pairs=pairs, grade=found.grade[:size], sure=np.ones(size, bool))
    for name in ("qrels", "quepid", "opensearch"):
        write_judgments(some, tmp_path / name, format=name, overwrite=True)
    rows = [line.split() for line in (tmp_path / "qrels").read_text(encoding="utf-8").split("\n")[:-1]]
    assert [(row[0], row[2]) for row in rows] == [(trec_id(a), trec_id(b)) for a, b in one_line]
    body = json.loads((tmp_path / "opensearch").read_text(encoding="utf-8"))["judgmentRatings"]
    assert [(each["query"], rating["docId"]) for each in body for rating in each["ratings"]] == one_line
    with (tmp_path / "quepid").open(newline="", encoding="utf-8") as file:
        assert [(row[0], row[1]) for row in csv.reader(file)][1:] == one_line


@pytest.mark.parametrize("name", ["csv", "qrels", "quepid", "opensearch", "ranklib"])
def test_ids_that_are_not_utf_8_are_an_error(found, tmp_path, name):
    items = pa.array([b"\xff"] * len(found), pa.binary()).view(pa.string())
    some = replace(found, pairs=replace(found.pairs, items=items))
    with pytest.raises(OutputError, match="--item"):
        write_judgments(some, tmp_path / "j", format=name)
    assert not list(tmp_path.iterdir())


def test_the_format_follows_from_the_name():
    assert [format_of(name, None) for name in ("a.csv", "b.parquet", "c.qrels")] == ["csv", "parquet", "qrels"]
    assert format_of("a.csv", "quepid") == "quepid"
    with pytest.raises(OptionError, match="use --format csv, parquet, qrels, opensearch, quepid, ranklib"):
        format_of("a.txt", None)
    with pytest.raises(OptionError, match="got 'trec'"):
        format_of("a.txt", "trec")


@pytest.mark.parametrize("name", [each for each in FORMATS if each not in ("csv", "parquet")])
def test_what_a_format_needs(found, tmp_path, name):
    without = replace(found, pairs=replace(found.pairs, queries=None))
    with pytest.raises(DataError, match="need queries"):
        write_judgments(without, tmp_path / "j", format=name)
    assert not (tmp_path / "j").exists()
    with pytest.raises(DataError, match="RankLib needs features"):
        write_judgments(replace(found, pairs=replace(found.pairs, feature_names=())), tmp_path / "j", format="ranklib")
    write_judgments(found, tmp_path / "j", format=name)
    with pytest.raises(OutputError, match="exists already"):
        write_judgments(found, tmp_path / "j", format=name)
