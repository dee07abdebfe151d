"""A grid from simulated users to scores, from the command line: all files and messages name rows and columns."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pyarrow as pa
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
    few = ("--ranker", "linear", "--steps", 10, "--set", "bias_steps=10", "--label", "click", "--out", run)
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


# --- Together with segments, goals and rows that nobody saw -----------------------------------------------------------

NAMED = ("--segment", "device,page", "--randomised", "random", "--shown", "visible")
GOALS = ("--label", "click", "--label", "5 * purchase")
TREES = ("--ranker", "lightgbm", "--steps", 5)
FILES = ("bias.json", "model/calibration.json", "outcome/outcome.json")
INTERNAL = re.compile(r"\b(5[2-9]|[6-9][0-9])[0-9]{4}\b")  # a number that may be the id of a slot


def several() -> pa.Table:
    """Return a grid by device and page, with hidden rows and purchases after the click."""
    log = grids(1400, seed=3, random_share=0.3)[0].drop(["relevance"])
    rng, request = np.random.default_rng(3), log["request"].to_numpy()
    log = log.set_column(0, "request", pa.array([f"q{i}" for i in request]))
    visible = (log["row"].to_numpy() <= rng.choice([3, 4], 1400)[request]).astype(int)
    click = log["click"].to_numpy() * visible
    bought = click * (rng.random(len(click)) < 0.6 / log["row"].to_numpy())
    device = np.where(rng.random(1400) < 0.3, "desk", np.where(np.arange(1400) < 700, "phone", "tablet"))
    of_request = {"device": device, "page": rng.choice(["home", "search"], 1400)}
    columns = {name: pa.array(values[request]) for name, values in of_request.items()}
    columns |= {"visible": pa.array(visible), "purchase": pa.array(bought)}
    log = log.set_column(log.column_names.index("click"), "click", pa.array(click))
    for name, values in columns.items():
        log = log.append_column(name, values)
    return log


@pytest.fixture(scope="module")
def several_paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    log = several()
    pq.write_table(log.slice(0, log.num_rows // 2), folder / "log.parquet")
    pq.write_table(log.slice(log.num_rows // 2), folder / "later.parquet")  # a device is new
    return folder / "log.parquet", folder / "later.parquet"


def test_a_grid_has_segments_goals_and_hidden_rows(ultr, several_paths, tmp_path):
    log, later = several_paths
    done = ultr("train", log, *NAMED, *GOALS, *TREES, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    scores = tmp_path / "scores.parquet"
    done = ultr("score", tmp_path / "run", log, "--out", scores, "--calibrated", "--at-position", "r1c2")
    assert done.returncode == 0, done.stderr
    done = ultr("score", tmp_path / "run", log, "--out", scores, "--calibrated", "--at-position", "r9c9", "--overwrite")
    assert done.returncode == 2
    assert "'r9c9'; pass one of r1c1, r1c2" in done.stderr
    # A later log has a segment that the run and the bias folder do not have.
    done = ultr("update", tmp_path / "run", "--log", later, "--allow", "segments", "--out", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    done = ultr("bias", log, *NAMED, *GOALS, "--bootstrap", 10, "--out", tmp_path / "bias")
    assert done.returncode == 0, done.stderr
    assert "feedback: click + 5 * purchase > 0" in done.stderr
    assert "Looks at position r4c1, over the average" in done.stdout
    done = ultr("train", later, *NAMED, *GOALS, *TREES, "--bias", tmp_path / "bias", "--out", tmp_path / "known")
    assert done.returncode == 0, done.stderr
    known = json.loads((tmp_path / "known" / "bias.json").read_text())
    assert any(position.endswith("@tablet + home") for position in known["positions"])
    for path in (run / name for run in (tmp_path / "run", tmp_path / "new") for name in FILES):
        assert not INTERNAL.search(path.read_text()), path
