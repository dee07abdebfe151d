"""`ultr train` and `ultr bias` find segments by themselves, say so, and use them as if they had been named."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from ultr.bias import logging_policy
from worlds.shop import shop

QUICK = ("--features", "text_match,popularity", "--ranker", "linear", "--steps", 2, "--set", "bias_steps=2")
FOUND = "segments: 'device' (desktop, mobile): at position 5 users look 0."
OFF = "; --segment none switches this off"


@pytest.fixture(autouse=True)
def linear_logging_score(monkeypatch):
    monkeypatch.setattr(logging_policy, "MUCH_OPEN", np.inf)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("shop") / "log.parquet"
    pq.write_table(shop(4000, seed=3).log, path)
    return path


def segment_of(run):
    return json.loads((run / "decisions.json").read_text())["segment"]


def test_a_run_has_the_segment_in_its_columns_and_later_commands_use_it(ultr, path, tmp_path):
    run = tmp_path / "run"
    done = ultr("train", path, *QUICK, "--out", run)
    assert done.returncode == 0, done.stderr
    assert FOUND in done.stderr
    assert OFF in done.stderr
    said = " ".join(done.stderr.split())
    assert "users: desktop: compared with position " in said
    assert "; mobile: compared with position " in said
    assert segment_of(run) == "device"
    again = ultr("train", path, *QUICK, "--out", run, "--resume")
    assert again.returncode == 0, again.stderr
    assert "segments:" not in again.stderr
    evaluated = ultr("evaluate", run, path)
    assert evaluated.returncode == 0, evaluated.stderr
    pq.write_table(pq.read_table(path).drop_columns("device"), tmp_path / "day.parquet")
    without = ultr("evaluate", run, tmp_path / "day.parquet")
    assert without.returncode == 0, without.stderr
    assert "there is no column 'device', which was the segment in training" in without.stderr
    scored = ultr("score", run, tmp_path / "day.parquet", "--out", tmp_path / "scores.parquet")
    assert scored.returncode == 0, scored.stderr
    assert "device" not in scored.stderr  # scores do not depend on it
    other = ultr("train", path, *QUICK, "--bias", run, "--out", tmp_path / "other")
    assert other.returncode == 0, other.stderr
    assert segment_of(tmp_path / "other") == "device"


def test_segment_none_switches_segments_off(ultr, path, tmp_path):
    done = ultr("train", path, *QUICK, "--out", tmp_path / "run", "--segment", "none")
    assert done.returncode == 0, done.stderr
    assert "segments:" not in done.stderr
    assert segment_of(tmp_path / "run") is None
    audited = ultr("bias", path, "--segment", "none", "--bootstrap", 10)
    assert audited.returncode == 0, audited.stderr
    assert "segment" not in audited.stderr


def test_bias_estimates_each_segment_and_hands_it_to_train(ultr, path, tmp_path):
    done = ultr("bias", path, "--features", "text_match,popularity", "--bootstrap", 10, "--out", tmp_path / "bias")
    assert done.returncode == 0, done.stderr
    assert FOUND in done.stderr
    assert "segment 'mobile' (" in done.stderr
    assert "--segment device" in done.stderr.split("next: ultr train")[1]
    assert set(json.loads((tmp_path / "bias/bias.json").read_text())["segments"]) == {"desktop", "mobile"}


def test_known_examination_needs_no_segment(ultr, path, tmp_path):
    table = tmp_path / "known.csv"
    table.write_text("position,propensity\n" + "".join(f"{k},{1 / k}\n" for k in range(1, 41)))
    done = ultr("train", path, *QUICK, "--propensities", table, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert segment_of(tmp_path / "run") is None
