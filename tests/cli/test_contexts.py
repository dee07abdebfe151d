"""Segments of several columns from the command line: what is printed, the pages, and values that a later log adds."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from ultr.bias import logging_policy
from ultr.utils.jsonfiles import read_json
from worlds.contexts import POSITIONS, contexts

NAMED = ("--segment", "device,words", "--randomised", "random")
QUICK = ("--ranker", "linear", "--steps", 2, "--set", "bias_steps=2")


@pytest.fixture(autouse=True)
def linear_logging_score(monkeypatch):
    monkeypatch.setattr(logging_policy, "MUCH_OPEN", np.inf)


@pytest.fixture(scope="module")
def table():
    log, _ = contexts(1500, seed=2, random_share=0.5)
    words = np.random.default_rng(0).permutation(np.tile(np.arange(1, 13), 125))
    return log.append_column("words", pa.array(np.repeat(words, POSITIONS)))


@pytest.fixture(scope="module")
def path(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("contexts") / "log.parquet"
    pq.write_table(table, path)
    return path


@pytest.fixture(scope="module")
def later(table, path):
    """A log with a device that the first one does not have."""
    new = table.slice(0, 400 * POSITIONS)
    device = pc.if_else(pc.less(new["request"], 150), "tablet", new["device"])
    pq.write_table(
        new.set_column(new.schema.get_field_index("device"), "device", device), path.with_name("later.parquet")
    )
    return path.with_name("later.parquet")


def test_which_column_matters_is_printed_and_on_the_page(ultr, path, tmp_path):
    done = ultr("bias", path, *NAMED, "--bootstrap", 12, "--out", tmp_path / "bias")
    assert done.returncode == 0, done.stderr
    assert "Looks at position 5, over the average" in done.stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert [row[:2] for row in rows[:2]] == [["device", "desk"], ["device", "phone"]]
    assert float(rows[0][2]) > 1 > float(rows[1][2])
    content = read_json(tmp_path / "bias" / "bias.json")
    low, high = content["contexts"]["device"]["ratios"]["desk"][1:]
    assert rows[0][3] == f"{low:.2f} to {high:.2f}"
    assert "words" in content["contexts"]
    page = (tmp_path / "bias" / "bias.html").read_text()
    assert "Examination by device" in page
    as_json = json.loads(ultr("bias", path, *NAMED, "--bootstrap", 12, "--json").stdout)
    assert as_json["contexts"] == content["contexts"]


def test_later_logs_may_have_other_values(ultr, path, later, tmp_path):
    run = tmp_path / "run"
    done = ultr("train", path, *NAMED, *QUICK, "--out", run)
    assert done.returncode == 0, done.stderr
    assert "its segments are below 5, 5-8, 9+ (--segment words:5:9)" in " ".join(done.stderr.split())
    assert "contexts: by 'device', looks at position 5 over the average: desk" in " ".join(done.stderr.split())
    assert read_json(run / "decisions.json")["segment"] == "device,words:5:9"
    for command in (
        ("evaluate", run, later),
        ("score", run, later, "--out", tmp_path / "scores.parquet"),
        ("train", later, *QUICK, "--bias", run, "--randomised", "random", "--out", tmp_path / "other"),
        ("update", run, "--log", later, "--min-evidence", 0, "--allow", "all", "--out", tmp_path / "new"),
    ):
        done = ultr(*command)
        assert done.returncode == 0, done.stderr
    assert "tablet" in str(read_json(tmp_path / "other" / "decisions.json")["segments"])
    content = read_json(tmp_path / "other" / "bias.json")
    theta = dict(zip(content["positions"], content["theta"], strict=True))
    desk, phone, tablet = (theta[f"5@{name} + 5-8"] / theta[f"1@{name} + 5-8"] for name in ("desk", "phone", "tablet"))
    assert phone < tablet < desk  # the average of the devices
