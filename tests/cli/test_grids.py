"""A grid from simulated users to scores, from the command line: all files and messages name rows and columns."""

from __future__ import annotations

import csv
import json

import pyarrow.parquet as pq
import pytest

from worlds.grids import grids


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("grid") / "log.parquet"
    pq.write_table(grids(800, seed=1)[0].drop(["relevance"]), path)
    return path


def test_a_grid_is_audited_trained_and_scored(ultr, path, tmp_path):
    named = ("--randomised", "random", "--row", "row", "--column", "column")
    done = ultr("describe", path, *named)
    assert "at r1c6" in done.stderr
    assert "next: ultr bias" in done.stderr
    done = ultr("bias", path, *named, "--out", tmp_path / "bias", "--bootstrap", 20)
    assert done.returncode == 0, done.stderr
    assert "Examination by row and column, relative to r1c1" in done.stdout
    assert "│ r4 │" in done.stdout
    with (tmp_path / "bias" / "propensities.csv").open() as file:
        assert [row["position"] for row in csv.DictReader(file)] == [
            f"r{r}c{c}" for r in range(1, 5) for c in range(1, 7)
        ]
    assert "Examination by row and column" in (tmp_path / "bias" / "bias.html").read_text()
    run = tmp_path / "run"
    few = ("--ranker", "linear", "--steps", 10, "--label", "click", "--out", run)
    done = ultr("train", path, *named, "--propensities", tmp_path / "bias" / "propensities.csv", *few)
    assert done.returncode == 0, done.stderr
    bias = json.loads((run / "bias.json").read_text())
    assert bias["positions"][:2] == ["r1c1", "r1c2"]
    done = ultr("score", run, path, "--out", tmp_path / "scores.csv")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "scores.csv").open() as file:
        first = next(csv.DictReader(file))
    assert (first["row"], first["column"]) == ("1", "1")


def test_a_row_without_a_column_is_an_error(ultr, path):
    done = ultr("bias", path, "--row", "row")
    assert done.returncode == 2
    assert "a slot of a grid needs a row and a column, got only the row 'row'; name both" in done.stderr


def test_simulated_users_of_carousels_write_a_log_with_rows_and_columns(ultr, tmp_path):
    out = tmp_path / "log.parquet"
    done = ultr("simulate", "synthetic", "--users", "carousel", "--columns", 5, "--sessions", 50, "--out", out)
    assert done.returncode == 0, done.stderr
    table = pq.read_table(out)
    assert set(table["column"].to_pylist()) == set(range(1, 6))
    assert set(table["row"].to_pylist()) == {1, 2}
    done = ultr("simulate", "synthetic", "--columns", 5, "--out", tmp_path / "other.parquet")
    assert done.returncode == 2
    assert "user 'pbm' does not have these options" in done.stderr
