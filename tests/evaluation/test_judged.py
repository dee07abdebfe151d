"""Rankings by relevance judgments: the values of ir_measures and trec_eval, and by hand."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultr.errors import DataError, OptionError
from ultr.evaluation.judged import (
    Measure,
    compare_judged,
    parse_measure,
    ranking_of,
    read_qrels,
    read_run,
    split_measures,
)

MEASURES = (
    "nDCG@3",
    "nDCG",
    "P@3",
    "P(rel=2)@5",
    "R@3",
    "R(rel=2)@3",
    "AP",
    "AP(rel=2)",
    "AP@3",
    "RR",
    "RR(rel=2)",
    "Success@3",
    "Judged@4",
)
ids = st.sampled_from([str(number) for number in range(12)])
judgments = st.dictionaries(ids, st.integers(0, 3), min_size=1, max_size=8)
# Sums of different powers of 2, which are exact in the single precision of trec_eval.
scores = st.dictionaries(ids, st.integers(0, 6).map(lambda n: n / 4), max_size=8)


@given(st.dictionaries(ids, judgments, min_size=1, max_size=4), st.dictionaries(ids, scores, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_values_are_those_of_ir_measures(qrels, run):
    ir_measures = pytest.importorskip("ir_measures")
    run = {query: items for query, items in run.items() if items}
    if not set(run) & set(qrels):
        return
    parsed = [ir_measures.parse_measure(text) for text in MEASURES if not text.startswith("Judged")]
    expected = ir_measures.calc_aggregate(parsed, qrels, run)
    found = compare_judged(qrels, {"a": run}, MEASURES)
    for measure, value in expected.items():
        assert found.rankers["a"][str(measure)].mean.mean == pytest.approx(value, abs=1e-6), measure


@given(judgments, scores.map(lambda each: dict(zip(each, range(len(each)), strict=True))))
def test_the_share_of_judged_items_is_that_of_ir_measures(judged, run):
    """Its provider of Judged puts equal scores in another order than trec_eval, so scores differ here."""
    ir_measures = pytest.importorskip("ir_measures")
    if run:
        measure = ir_measures.parse_measure("Judged@4")
        expected = ir_measures.calc_aggregate([measure], {"q": judged}, {"q": run})[measure]
        assert parse_measure("Judged@4")(ranking_of(run), judged) == pytest.approx(expected)


def test_values_by_hand():
    judged, ranking = {"a": 3.0, "b": 0.0, "c": 1.0}, ["x", "a", "b"]
    best = 3 + 1 / math.log2(3)
    assert parse_measure("nDCG@10")(ranking, judged) == pytest.approx(3 / math.log2(3) / best)
    exponential = parse_measure("nDCG(dcg='exp-log2')@2")
    assert exponential == Measure("nDCG", 2, exponential=True)
    assert exponential(ranking, judged) == pytest.approx(7 / math.log2(3) / (7 + 1 / math.log2(3)))
    assert parse_measure("P(rel=2)@2")(ranking, judged) == 1 / 2
    assert parse_measure("R@2")(ranking, judged) == 1 / 2
    assert parse_measure("RR@1")(ranking, judged) == 0
    assert parse_measure("Judged@2")(ranking, judged) == 1 / 2
    for text in MEASURES:
        assert parse_measure(text)([], judged) == 0
        assert parse_measure(text)(["b"], {"b": 0.0}) in (0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ndcg@10", "no measure 'ndcg@10'"),
        ("P", "use P@10"),
        ("P@0", "cut-off above 0"),
        ("P(rel=x)@3", "rel=2 with P"),
        ("nDCG(rel=2)@3", "has no such parameter"),
        ("nDCG(dcg='other')@3", "exp-log2"),
        ("P(rel=1,rel=2,)@3", ""),
        ("", "no measure"),
    ],
)
def test_bad_measures_are_rejected(text, message):
    if message:
        with pytest.raises(OptionError) as error:
            parse_measure(text)
        assert message in str(error.value)
    else:
        assert parse_measure(text).rel == 2


def test_commas_within_parentheses_do_not_separate():
    assert split_measures("nDCG@10, P(rel=2,rel=2)@3,RR") == ["nDCG@10", "P(rel=2,rel=2)@3", "RR"]


@pytest.fixture
def files(tmp_path):
    """Judgments and scores as files of trec_eval and as tables, with the same content."""
    (tmp_path / "j.qrels").write_text("red%20dress 0 007 3\nred%20dress 0 8 0\n\nhat\t0\t9 1\n")
    frame = pd.DataFrame({"Query": ["red dress", "red dress", "hat", "hat"], "docid": ["007", "8", "9", "8"]})
    frame.assign(rating=[3, 0, 1, 2], sure=[True, True, True, False]).to_csv(tmp_path / "j.csv", index=False)
    frame.assign(rating=[3, 0, 1, 2], sure=[True, True, True, False]).to_parquet(tmp_path / "j.parquet")
    (tmp_path / "a.run").write_text("red%20dress Q0 8 1 2.5 x\nred%20dress Q0 007 2 1 x\nhat Q0 9 1 4 x\n")
    scores = frame[:3].assign(score=[1, 2.5, 4])
    pd.concat([scores, scores[1:2].assign(score=0.5)]).to_csv(tmp_path / "a.csv", index=False)
    scores.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    return tmp_path


def test_files_of_all_forms_have_the_same_content(files):
    expected = {"red%20dress": {"007": 3, "8": 0}, "hat": {"9": 1}}
    assert read_qrels(files / "j.qrels") == read_qrels(files / "j.csv") == read_qrels(files / "j.parquet") == expected
    expected = {"red%20dress": {"007": 1, "8": 2.5}, "hat": {"9": 4}}
    assert read_run(files / "a.run") == read_run(files / "a.csv") == read_run(files / "a.tsv") == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("j.qrels", "q 0 item\n", "must have 4 fields"),
        ("j.qrels", "q 0 item high\n", "grade is not a number"),
        ("j.qrels", "q 0 item inf\n", "grade is not finite"),
        ("j.qrels", "q 0 item 1\nq 0 item 2\n", "two grades"),
        ("j.qrels", "\n", "no judgments"),
        ("j.qrels", b"\xff\xfe 0 a 1\n", "j.qrels"),
        ("j.csv", "query,grade\na,1\n", "no column 'item'"),
        ("j.csv", "query,item,grade\na,b,\n", "grade is not a number"),
        ("j.parquet", "PAR1", "j.parquet"),
    ],
)
def test_bad_files_are_rejected(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DataError, match=message):
        read_qrels(tmp_path / name)


def test_the_command_compares_files_of_scores(ultr, files):
    qrels = "".join(f"q{i} 0 a {i % 4}\nq{i} 0 b {1 - min(i % 4, 1)}\n" for i in range(60))
    (files / "q.qrels").write_text(qrels)
    for name, order in (("good", "ab"), ("bad", "ba")):
        rows = (f"q{i} Q0 {item} 1 {-place} x\n" for i in range(60) for place, item in enumerate(order))
        (files / f"{name}.run").write_text("".join(rows))
    command = ("evaluate", files / "bad.run", files / "good.run", "--qrels", files / "q.qrels")
    found = json.loads(ultr(*command, "--metrics", "nDCG@1,P(rel=2)@1", "--json").stdout)
    good = found["rankers"][str(files / "good.run")]
    assert found["requests"] == 60
    assert good["nDCG@1"]["mean"] == pytest.approx(3 / 4)
    assert good["P(rel=2)@1"]["mean"] == pytest.approx(1 / 2)
    assert good["nDCG@1"]["difference"]["difference"] == pytest.approx(1 / 2)
    done = ultr(*command)
    assert "good.run: deploy" in done.stderr
    assert "nDCG@10" in done.stdout
    assert "leave out --data" in ultr(*command, "--data", "x").stderr
    assert "pass files of scores" in ultr("evaluate", "--qrels", files / "q.qrels").stderr
    assert ultr(*command, "--against", "other").returncode == 2
