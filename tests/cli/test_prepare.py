"""`ultr prepare` from the command line: its messages, its errors, and training on its lists."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from ultr.log.shards import Manifest


@pytest.fixture
def log(tmp_path):
    rng = np.random.default_rng(0)
    rows = 2000
    frame = pd.DataFrame({"request": np.arange(rows) // 5, "position": np.arange(rows) % 5 + 1})
    frame["click"] = (rng.random(rows) < 0.3 / frame["position"]).astype(int)
    frame["market"] = rng.choice(["de", "fr"], rows)
    frame[["f1", "f2"]] = rng.normal(size=(rows, 2))
    frame.sample(frac=1, random_state=0).to_parquet(tmp_path / "log.parquet", index=False)
    return tmp_path / "log.parquet"


def test_a_table_of_the_splits_and_the_next_command_are_printed(ultr, log, tmp_path):
    done = ultr("prepare", log, "--out", tmp_path / "lists")
    assert done.returncode == 0, done.stderr
    for heading in ("split", "requests", "rows", "longest", "with feedback", "train", "validation", "test"):
        assert heading in done.stdout
    assert f"next: ultr train {tmp_path}/lists --label click --out my-run" in done.stderr
    assert "2 features, actions click" in done.stderr


def test_json_goes_to_stdout_alone(ultr, log, tmp_path):
    done = ultr("prepare", log, "--out", tmp_path / "lists", "--json", "--max-items", 3, "--keep-clickless", 0.5)
    printed = json.loads(done.stdout)
    assert printed["splits"] == dict(Manifest.load(tmp_path / "lists").splits)
    assert printed["splits"]["train"]["longest"] == 3
    assert printed["about"]["keep_clickless"] == 0.5


def test_every_option_reaches_the_preparation(ultr, log, tmp_path):
    options = ["--where", "market = de", "--where", "position < 5", "--label", "2 * click", "--memory", "1GB"]
    done = ultr("prepare", log, "--out", tmp_path / "lists", *options, "--threads", 1, "--test", 0, "--min-items", 2)
    assert done.returncode == 0, done.stderr
    manifest = Manifest.load(tmp_path / "lists")
    assert manifest.label == "2 * click"
    assert manifest.about["where"] == ["market = de", "position < 5"]
    assert list(manifest.splits) == ["train", "validation"]
    assert "requests left out" in done.stderr


def test_errors_are_one_line_and_leave_no_files(ultr, log, tmp_path):
    for options, code, message in (
        (["--position", "rank"], 5, "no column 'rank' for the position"),
        (["--where", "market"], 2, "a condition must be COLUMN OP VALUE"),
        (["--memory", "much"], 2, "--memory must be a size such as 512MB or 4GB"),
        (["--engine", "hive"], 2, "'engine' must be one of 'duckdb', 'spark', got 'hive'"),
        (["--label", "click - 1"], 2, "must be finite and not negative"),
        (["--split", "time"], 2, "--split time --time COLUMN"),
    ):
        done = ultr("prepare", log, "--out", tmp_path / "lists", *options)
        assert done.returncode == code
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert [p.name for p in tmp_path.iterdir() if "cache" not in p.name] == ["log.parquet"]
    (tmp_path / "lists").mkdir()
    assert "exists already" in ultr("prepare", log, "--out", tmp_path / "lists").stderr


def test_training_reads_prepared_lists(ultr, log, tmp_path):
    assert ultr("prepare", log, "--out", tmp_path / "lists").returncode == 0
    done = ultr(
        "train",
        tmp_path / "lists",
        "--out",
        tmp_path / "run",
        "--steps",
        20,
        "--set",
        "bias_steps=20",
        "--label",
        "click",
    )
    assert done.returncode == 0, done.stderr
