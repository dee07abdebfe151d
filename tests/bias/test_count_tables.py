"""Tables of counts give the results of the log that they count, also if an engine counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ultr
from bias.judged import SHOWN, judged_world
from ultr.bias.count_tables import CountTable, _divided, is_count_table, read_counts
from ultr.bias.counts import clicked_rows, impressions, log_counts
from ultr.bias.examination import estimate_examination, examination_of_counts
from ultr.bias.relevance import pairs_of_log
from ultr.errors import ColumnError, DataError, OptionError
from ultr.log import Log, write_log
from ultr.log.labels import Label
from ultr.log.table import by_segment


@pytest.fixture(scope="module")
def log() -> Log:
    world = judged_world(1, queries=120)
    phone = np.arange(len(world.log)) % 3 == 0
    segment = pa.array(np.where(phone, "phone", "desktop"))
    return replace(world.log, context={**world.log.context, "segment": segment})


def counts_of(log: Log, *keys: str) -> pd.DataFrame:
    grouped = log.to_table().to_pandas().groupby([*keys, "item", "position"])["click"]
    return grouped.agg(impressions="size", clicks="sum").astype(int).reset_index()


@pytest.fixture(scope="module")
def frame(log) -> pd.DataFrame:
    return counts_of(log, "query")


def without_segment(log: Log) -> Log:
    return replace(log, context={"query": log.context["query"]})


@pytest.fixture(params=["frame", "csv", "parquet", "jsonl", "folder"])
def source(request, frame, tmp_path):
    shuffled = frame.sample(frac=1, random_state=0)
    path = tmp_path / f"counts.{request.param}"
    if request.param == "frame":
        return shuffled
    if request.param == "folder":  # a row of one cell may be in several files, which are added up
        path.mkdir()
        half = shuffled.assign(impressions=shuffled["impressions"] // 2, clicks=0)
        rest = shuffled.assign(impressions=shuffled["impressions"] - half["impressions"])
        half.to_parquet(path / "a.parquet")
        rest.rename(columns={"clicks": "Clicks"}).rename(columns={"Clicks": "clicks"}).to_parquet(path / "b.parquet")
        half[:0].to_parquet(path / "c.parquet")
    elif request.param == "csv":
        shuffled.to_csv(path, index=False)
    elif request.param == "parquet":
        shuffled.to_parquet(path)
    else:
        shuffled.to_json(path, orient="records", lines=True)
    return path


def test_pairs_are_those_of_the_log(source, log):
    pairs, expected = read_counts(source).pairs(), pairs_of_log(without_segment(log), "click")
    rows = []
    for each in (pairs, expected):
        ids = zip(each.queries.to_pylist(), each.items.to_pylist(), strict=True)
        values = np.column_stack([each.impressions, each.clicks, each.mean_rank, each.examined(np.arange(1.0, 9.0))])
        rows.append({(int(q), int(i)): tuple(row) for (q, i), row in zip(ids, values.round(6).tolist(), strict=True)})
        assert (np.diff(each.query) >= 0).all()
    assert rows[0] == rows[1]


def test_the_counts_of_an_audit_and_examination_are_those_of_the_log(frame, log):
    plain = without_segment(log)
    found = read_counts(frame).log_counts()
    expected = log_counts(impressions(plain, clicked_rows(plain, "click")))
    for name in ("positions", "shown", "clicked", "clicks"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name))
    assert (found.requests, found.by_query, found.groups) == (expected.requests, True, expected.groups)
    a, b = found.sources["items"], expected.sources["items"]
    assert a.share == b.share == 1
    assert a.shown.sum() == b.shown.sum()
    assert a.clicked.sum() == b.clicked.sum()
    one, other = examination_of_counts(found), estimate_examination(plain, Label("click"))
    np.testing.assert_allclose(one.theta, other.theta, rtol=1e-6)
    np.testing.assert_allclose(one.covariance, other.covariance, rtol=1e-6, atol=1e-12)
    assert one.source == other.source


def test_segments_share_strength_as_those_of_the_log(log):
    table = read_counts(counts_of(log, "query", "segment"), segment="segment")
    assert table.segments == ("desktop", "phone")
    coded, names = by_segment(log)
    one = examination_of_counts(table.log_counts(), segments=table.segments)
    other = estimate_examination(coded, Label("click"), segments=names)
    assert one.positions == other.positions
    np.testing.assert_allclose(one.theta, other.theta, rtol=1e-5)
    report = ultr.audit(counts_of(log, "query", "segment"), segment="segment", bootstrap=0)
    assert set(report.segments) == {"desktop", "phone"}
    assert report.impressions.sum() == log.rows


def check_judgments(a: pd.DataFrame, b: pd.DataFrame) -> None:
    """Raise AssertionError if judgments differ, but for the draws behind intervals: eigenvectors have two signs."""
    drawn = ["low", "high", "grade", "probability", "sure"]
    pd.testing.assert_frame_equal(a.drop(columns=drawn), b.drop(columns=drawn), rtol=0.01, check_dtype=False)
    np.testing.assert_allclose(a[["low", "high"]], b[["low", "high"]], rtol=0.15)
    assert (a["grade"] == b["grade"]).mean() > 0.97


def test_judgments_and_audits_of_counts_are_those_of_the_log(frame, log):
    plain = without_segment(log)
    one, other = ultr.judgments(frame), ultr.judgments(plain, keep_suspicious=True)
    keys = ["query", "item"]
    tables = [each.table().to_pandas().sort_values(keys).reset_index(drop=True) for each in (one, other)]
    check_judgments(*tables)
    audits = [ultr.audit(frame, bootstrap=100), ultr.audit(plain, bootstrap=100, keep_suspicious=True)]
    thetas = [each.estimates["items"].theta for each in audits]
    np.testing.assert_allclose(*thetas, rtol=1e-5)
    widths = [np.log(each.estimates["items"].high / each.estimates["items"].low)[1:] for each in audits]
    np.testing.assert_allclose(*widths, rtol=0.35)  # the groups of both are random


def test_an_engine_counts_the_same(log, tmp_path):
    pytest.importorskip("ibis")
    plain = without_segment(log)
    write_log(plain, tmp_path / "log.parquet")
    one = ultr.judgments(tmp_path / "log.parquet", engine="duckdb", memory=1 << 28)
    other = ultr.judgments(plain)
    tables = []
    for each in (one, other):
        table = each.table().to_pandas()
        table["query"] = table["query"].astype(int)
        tables.append(table.sort_values(["query", "item"]).reset_index(drop=True))
    check_judgments(*tables)
    with pytest.raises(ColumnError, match="item ids"):
        ultr.judgments(tmp_path / "log.parquet", engine="duckdb", item="")


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=20), st.integers(0, 100))
def test_every_impression_goes_to_one_group(counts, seed):
    parts = _divided(np.array(counts, float), np.random.default_rng(seed))
    np.testing.assert_array_equal(np.asarray(parts.sum(1)).ravel(), counts)
    assert parts.nnz <= sum(counts)


def test_bootstrap_groups_are_random():
    """The variance of a group's count is that of a binomial distribution."""
    parts = _divided(np.full(2000, 400.0), np.random.default_rng(0)).toarray()
    assert parts.mean() == pytest.approx(2.0)
    assert parts.var() == pytest.approx(400 * (1 / 200) * (199 / 200), rel=0.02)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("query item position impressions clicks", True),
        ("query_id item position Impressions CLICKS", True),
        ("request item position impressions clicks", False),
        ("query item position clicks", False),
        ("query item position impressions", False),
    ],
)
def test_a_table_of_counts_is_recognised(names, expected):
    frame = pd.DataFrame({name: [1] for name in names.split()})
    assert is_count_table(frame, {}) is expected
    assert is_count_table(frame, {"request": "query"}) is False


def bad(frame, **columns):
    return frame.assign(**columns)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(impressions=-1), DataError, "impressions"),
        (dict(impressions=1.5), DataError, "impressions"),
        (dict(impressions="many"), DataError, "impressions"),
        (dict(clicks=0.5), DataError, "'clicks' must be whole numbers"),
        (dict(clicks=-1), DataError, "'clicks' must be whole numbers"),
        (dict(clicks=10**6), DataError, "more clicks than impressions"),
    ],
)
def test_bad_counts_are_rejected(frame, change, error, message):
    with pytest.raises(error, match=message):
        read_counts(bad(frame, **change))


def test_what_counts_cannot_say_is_an_error(frame):
    with pytest.raises(ColumnError, match="needs item ids"):
        read_counts(frame.drop(columns="item"))
    with pytest.raises(DataError, match="positions"):
        read_counts(frame.drop(columns="position"))
    with pytest.raises(ColumnError, match="--swaps x"):
        read_counts(frame, swaps="x")
    with pytest.raises(DataError, match="no clicks"):
        read_counts(frame.assign(clicks=0)).log_counts()
    fixed = frame.drop_duplicates(["query", "item"])
    with pytest.raises(DataError, match="--propensities"):
        ultr.judgments(fixed)
    known = dict.fromkeys(range(1, SHOWN + 1), 0.5)
    assert len(ultr.judgments(fixed, propensities=known)) == len(fixed)
    with pytest.raises(OptionError, match="no argument 'clicks'"):
        ultr.judgments(frame, clicks="x")


def test_rows_that_were_never_shown_are_left_out(frame):
    with_zeros = pd.concat([frame, frame.assign(impressions=0, clicks=0, item=10**6)])
    assert CountTable(read_counts(with_zeros).table).pairs().impressions.sum() == frame["impressions"].sum()


def test_the_command_audits_a_table_of_counts(ultr, frame, tmp_path):
    frame.to_csv(tmp_path / "counts.csv", index=False)
    done = ultr("bias", tmp_path / "counts.csv", "--bootstrap", 10, "--out", tmp_path / "bias")
    assert done.returncode == 0, done.stderr
    assert "a table of counts: intervals take each impression as a request of its own" in done.stderr
    assert "feedback: clicks > 0" in done.stderr
    assert (tmp_path / "bias" / "bias.json").exists()
    done = ultr("bias", tmp_path / "counts.csv", "--label", "click")
    assert (done.returncode, "--label needs the rows of a log" in done.stderr) == (2, True)
    done = ultr("judgments", tmp_path / "counts.csv", "--out", tmp_path / "j.qrels")
    assert done.returncode == 0, done.stderr
