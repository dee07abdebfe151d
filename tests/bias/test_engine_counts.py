"""Counts that DuckDB and Spark make, next to those in memory: the same examination, notes and errors."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bias.shop import shop
from bias.worlds import THETA, world
from spark_sessions import ON_SPARK
from ultr.bias import engine_counts, logging_policy
from ultr.bias.audit import audit
from ultr.bias.engine_counts import count_on_engine
from ultr.errors import ColumnError, LabelError
from ultr.log import read_log, write_log
from ultr.log.prepare.options import Preparation

LABEL = "click + min(dwell, 9) / exp(3)"


@pytest.fixture(autouse=True)
def linear_logging_score(monkeypatch):
    monkeypatch.setattr(logging_policy, "MUCH_OPEN", np.inf)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A log with queries, segments, weights, requests in random order, missing items, and bots."""
    log, rng = shop(1200, random_share=0.4, queries=40), np.random.default_rng(0)
    clicks = log.actions["click"].copy()
    bots = np.repeat(np.arange(1200) % 60 == 7, log.lengths)
    clicks[bots] = 1
    log = replace(
        log,
        actions={"click": clicks, "dwell": (clicks * rng.exponential(5, log.rows)).astype(np.float32)},
        weights=rng.choice([0.5, 1.0, 2.0], len(log)).astype(np.float32),
        item_ids=pa.array([None if i % 97 == 0 else f"item {item}" for i, item in enumerate(log.item_ids.to_pylist())]),
        context={**log.context, "segment": pa.array(rng.choice(["phone", "desktop"], len(log)))},
    )
    path = tmp_path_factory.mktemp("engines") / "log.parquet"
    write_log(log, path)
    return path


def counted(path, engine="duckdb", **options):
    rows = {name: options.pop(name) for name in ("label", "sample_rows", "keep_suspicious") if name in options}
    return count_on_engine(str(path), Preparation(engine=engine, **options), **rows)


def test_an_engine_gives_the_theta_of_a_log_in_memory(path):
    expected = audit(read_log(path, segment="segment"), label=LABEL, bootstrap=10)
    report = counted(path, label=LABEL, segment="segment").report(bootstrap=10)
    assert [*report.estimates] == ["randomised", "harvest", "items", "strata", "regression"] == [*expected.estimates]
    assert sorted(report.segments) == sorted(expected.segments) == ["desktop", "phone"]
    for found, wanted in ((report, expected), *((report.segments[n], expected.segments[n]) for n in report.segments)):
        for name in wanted.estimates:
            np.testing.assert_allclose(found.estimates[name].theta, wanted.estimates[name].theta, rtol=1e-9)
        for values in ("positions", "impressions", "clicks", "rate", "pool", "requests"):
            np.testing.assert_allclose(getattr(found, values), getattr(wanted, values), rtol=1e-9)
        assert found.links["components"] == wanted.links["components"]
    assert report.left_out == expected.left_out == 20
    assert report.notes == expected.notes
    assert report.pitfalls == expected.pitfalls


def test_intervals_from_hashed_groups_cover_the_truth(tmp_path):
    write_log(world("random"), tmp_path / "log.parquet")
    report = counted(tmp_path / "log.parquet").report(bootstrap=60)
    in_memory = audit(world("random"), bootstrap=60)
    assert report.verdict.status == "identified under an assumption"
    for name, found in report.estimates.items():
        wide = (found.high / found.theta) ** 1.5
        assert (np.abs(np.log(found.theta * THETA[0] / THETA)) <= np.log(wide) + 1e-9).all()
        np.testing.assert_allclose(found.half_width, in_memory.estimates[name].half_width, rtol=0.4)


def test_samples_follow_from_hashes(path, monkeypatch):
    assert len(counted(path, sample_rows=10**6).sample) == 1200
    some, more = counted(path, sample_rows=3000), counted(path, sample_rows=6000)
    assert 200 < len(some.sample) < 300
    assert set(some.sample.request_ids.to_pylist()) < set(more.sample.request_ids.to_pylist())
    assert some.notes == [
        f"Warnings, and estimates from features, use a sample of {len(some.sample)} requests, those with the lowest "
        "hashes of their ids."
    ]
    everything = some.whole.sources["items"]
    monkeypatch.setattr(engine_counts, "CELLS", len(everything.strata) // 3)
    part = counted(path).whole.sources["items"]
    assert part.share == pytest.approx(1 / 3, rel=0.01)
    assert part.size[0] == pytest.approx(everything.size[0] / 3, rel=0.3)


def test_rows_that_cannot_be_counted_are_errors(path, tmp_path):
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, table.slice(0, 2)]), tmp_path / "repeated.parquet")
    with pytest.raises(ColumnError, match="2 rows have the same request and position as another row"):
        counted(tmp_path / "repeated.parquet")
    with pytest.raises(LabelError, match=r"must be finite and not negative, got other values in [\d,]+ rows"):
        counted(path, label="click - 1")
    with pytest.raises(LabelError, match="needs the action 'like'"):
        counted(path, label="like")


def test_the_command_counts_on_an_engine(ultr, path, tmp_path):
    options = ("--engine", "duckdb", "--bootstrap", 10, "--where", "segment = phone")
    done = ultr("bias", path, *options, "--out", tmp_path / "bias")
    assert done.returncode == 0, done.stderr
    assert "verdict: identified" in done.stderr
    content = json.loads((tmp_path / "bias" / "bias.json").read_text())
    assert content["estimates"]["items"]["held_out_log_likelihood"] is None
    assert (tmp_path / "bias" / "propensities.csv").is_file()
    for arguments, message in (
        (("--memory", "1GB"), "--memory is an option of engines; pass --engine too"),
        (("--engine", "duckdb", "--on-duplicates", "sum"), "an engine does not merge repeated rows"),
        (("--engine", "hive"), "'engine' must be one of 'duckdb', 'spark'"),
    ):
        failed = ultr("bias", path, *arguments)
        assert (failed.returncode, message in failed.stderr) == (2, True)


class TestSpark:
    pytestmark = ON_SPARK

    def test_spark_gives_the_theta_of_duckdb(self, path):
        ours, theirs = (counted(path, engine, label=LABEL).report(bootstrap=10) for engine in ("duckdb", "spark"))
        assert ours.verdict == theirs.verdict
        assert ours.propensities() == pytest.approx(theirs.propensities(), rel=1e-9)
        for name, found in ours.estimates.items():
            for values in ("theta", "low", "high"):
                expected = getattr(theirs.estimates[name], values)
                np.testing.assert_allclose(getattr(found, values), expected, rtol=1e-9)
