"""`ultr explore` plans an experiment and writes its table; `ultr bias --swaps` and training read what comes back."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swapped import RELEVANCE, THETA, experiment
from ultr.bias.explore import SwapTable
from ultr.log import write_log


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Return the path of a log in the order of production, over ten days."""
    path = tmp_path_factory.mktemp("explore") / "log.parquet"
    table = replace(experiment(4000), context={}).to_table()
    request = np.asarray(table["request"])
    times = [datetime(2026, 11, 1) + timedelta(minutes=3.6 * int(i)) for i in request]
    table = table.append_column("at", pa.array(times))
    pq.write_table(table.append_column("x", pa.array(np.ones(len(request)))), path)
    return path


def test_plans_are_printed_and_the_fastest_is_written(ultr, log, tmp_path):
    done = ultr("explore", log, "--time", "at", "--out", tmp_path / "swaps.csv")
    assert done.returncode == 0, done.stderr
    for name in ("neighbours", "first", "top3", "shuffle"):
        assert f"│ {name} " in done.stdout
    assert "days" in done.stdout
    assert "so the plans assume the worst case" in done.stderr
    assert "chosen: first" in done.stderr
    assert "neighbours loses" in done.stderr
    assert "4 swaps; 90.0% of the requests are the control" in done.stderr
    assert SwapTable.read(tmp_path / "swaps.csv").swaps == ("1-2", "1-3", "1-4", "1-5", "")
    assert "exists already" in ultr("explore", log, "--out", tmp_path / "swaps.csv").stderr
    done = ultr("explore", log, "--plan", "top3", "--share", 0.3, "--out", tmp_path / "swaps.csv", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert SwapTable.read(tmp_path / "swaps.csv").swaps == ("1-2", "1-3", "2-3", "1-2-3", "1-3-2", "")


def test_json_has_the_figures_of_all_plans(ultr, log):
    found = json.loads(ultr("explore", log, "--precision", 0.2, "--requests-per-day", 1000, "--json").stdout)
    assert (found["verdict"], found["worst_case"], found["chosen"]) == ("not identified", True, "first")
    rate = THETA * RELEVANCE
    np.testing.assert_allclose(found["theta"], np.sqrt(rate / rate[0]), rtol=0.25)
    for plan in found["plans"].values():
        assert plan["days"] == plan["requests"] / 1000
        assert plan["lost_clicks"] == pytest.approx(plan["requests"] * plan["lost_per_1000_requests"] / 1000)
        assert plan["half_widths"][0] == 0
        assert max(plan["half_widths"]) <= 0.2 + 1e-9
    assert sum(found["plans"]["first"]["swaps"].values()) == pytest.approx(0.1)
    timed = json.loads(ultr("explore", log, "--time", "at", "--json").stdout)["plans"]["first"]
    assert timed["days"] == pytest.approx(timed["requests"] / 400, rel=0.01)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--plan", "firts"], 2, "there is no plan 'firts'; did you mean 'first'?"),
        (["--plan", "shuffle", "--out", "swaps.csv"], 2, "has no swaps for a table"),
        (["--precision", "0"], 2, "--precision"),
        (["--label", "buy"], 2, "buy"),
        (["--time", "nowhen"], 5, "nowhen"),
    ],
)
def test_wrong_options_are_an_error(options, code, message, ultr, log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = ultr("explore", log, *options)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Return the path of the log of an experiment, as CSV with a column `arm`."""
    path = tmp_path_factory.mktemp("outcome") / "log.csv"
    log = experiment(8000)
    arms = np.repeat(log.context["swaps"].to_pylist(), log.lengths)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["request", "position", "click", "arm", "x"])
        columns = (log.request_of_row, log.positions, log.actions["click"].astype(int), arms, np.arange(log.rows) % 7)
        rows.writerows(zip(*(column.tolist() for column in columns), strict=True))
    write_log(log, path.with_suffix(".parquet"))
    return path


def test_bias_reads_the_swaps(ultr, outcome, tmp_path):
    done = ultr("bias", outcome, "--swaps", "arm", "--bootstrap", 20, "--json")
    report = json.loads(done.stdout)
    assert report["verdict"]["anchor"] == "swaps", done.stderr
    np.testing.assert_allclose(report["estimates"]["swaps"]["theta"], THETA, rtol=0.3)
    printed = ultr(
        "bias", outcome.with_suffix(".parquet"), "--bootstrap", 20, "--out", tmp_path / "bias"
    )  # by its name
    assert "Some requests had swapped positions, drawn at random." in printed.stderr
    without = ultr("bias", outcome.with_suffix(".parquet"), "--swaps", "", "--bootstrap", 10)
    assert "not identified" in without.stderr
    unread = ultr("bias", outcome, "--swaps", "x", "--bootstrap", 10)
    assert unread.returncode == 5
    assert "two or more different positions" in unread.stderr
    engine = ultr("bias", outcome, "--swaps", "arm", "--engine", "duckdb")
    assert engine.returncode == 2
    assert "an engine does not compare swaps" in engine.stderr


def test_training_and_prepared_lists_use_the_swaps(ultr, outcome, tmp_path):
    few = ["--features", "x", "--steps", 3, "--set", "bias_steps=3", "--ranker", "mlp", "--set", "hidden=4"]
    done = ultr("train", outcome, "--swaps", "arm", "--out", tmp_path / "run", *few)
    assert done.returncode == 0, done.stderr
    assert "requests with swapped positions" in done.stderr
    prepared = ultr("prepare", outcome, "--swaps", "arm", "--features", "x", "--out", tmp_path / "lists")
    assert prepared.returncode == 0, prepared.stderr
    report = json.loads(ultr("bias", tmp_path / "lists", "--bootstrap", 10, "--json").stdout)
    assert report["verdict"]["anchor"] == "swaps"
