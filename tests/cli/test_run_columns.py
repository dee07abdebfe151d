"""A run keeps the columns of its log: later commands use them by name, and say so if they are missing."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

FAST = (
    "--ranker",
    "mlp",
    "--set",
    "hidden=4",
    "--steps",
    4,
    "--set",
    "evaluate_every=4",
    "--set",
    "bias_steps=4",
    "--device",
    "cpu",
)


def visits(requests=200, seed=0):
    """Make a click log whose columns would be taken for other parts if they were recognised by their names."""
    rng = np.random.default_rng(seed)
    rows = requests * 4
    frame = pd.DataFrame({"visit": np.repeat(np.arange(requests), 4), "shown_at": np.arange(rows) % 4 + 1})
    frame["sku"] = [f"s{number}" for number in rng.permutation(rows)]
    frame["quality"], frame["f1"] = rng.random(rows), rng.random(rows)
    frame["click"] = (rng.random(rows) < frame["quality"] / frame["shown_at"]).astype(int)
    frame["session_id"] = rng.integers(0, 5, rows)  # common names with other content
    frame["rank"], frame["item"], frame["day"] = 1, "same", frame["visit"] // 10
    return frame


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("columns")


@pytest.fixture
def trained(ultr, folder):
    """A run that was trained on `log.parquet`, once for all tests."""
    if not (folder / "run").exists():
        visits().to_parquet(folder / "log.parquet", index=False)
        columns = ("--request", "visit", "--position", "shown_at", "--item", "sku", "--features", "quality")
        done = ultr("train", folder / "log.parquet", "--out", folder / "run", *columns, *FAST)
        assert done.returncode == 0, done.stderr
        assert "label: click (--label sets another one)" in done.stderr
    return folder / "run"


def test_scores_have_the_request_position_and_item_under_their_names_in_training(ultr, trained, tmp_path):
    frame = visits(20, seed=1)
    frame.to_csv(tmp_path / "new.csv", index=False)
    done = ultr("score", trained, tmp_path / "new.csv", "--out", tmp_path / "scores.parquet")
    assert done.returncode == 0, done.stderr
    assert "request 'visit'; position 'shown_at'; item 'sku'; features 'quality'" in done.stderr
    scores = pq.read_table(tmp_path / "scores.parquet").to_pandas()
    assert scores["visit"].tolist() == frame["visit"].tolist()
    assert scores["sku"].tolist() == frame["sku"].tolist()
    assert scores["shown_at"].tolist() == frame["shown_at"].tolist()


def test_a_missing_request_column_is_an_error_with_the_option(ultr, trained, tmp_path):
    path = tmp_path / "new.parquet"
    visits(20).drop(columns="visit").assign(request=np.repeat(np.arange(20), 4)).to_parquet(path, index=False)
    done = ultr("score", trained, path, "--out", tmp_path / "scores.parquet")
    assert done.returncode == 5
    assert "there is no column 'visit', which was the request in training; name it with --request" in done.stderr
    named = ultr("score", trained, path, "--out", tmp_path / "scores.parquet", "--request", "request", "--item", "item")
    assert named.returncode == 0, named.stderr
    assert "request 'request'; position 'shown_at'; item 'item'" in named.stderr


def test_candidates_without_positions_and_items_are_not_given_others(ultr, trained, tmp_path):
    visits(20).drop(columns=["shown_at", "sku"]).to_parquet(tmp_path / "new.parquet", index=False)
    done = ultr("score", trained, tmp_path / "new.parquet", "--out", tmp_path / "scores.parquet")
    assert done.returncode == 0, done.stderr
    assert pq.read_schema(tmp_path / "scores.parquet").names == ["visit", "score"]
    for name, role in (("shown_at", "position"), ("sku", "item")):
        assert f"there is no column '{name}', which was the {role} in training" in done.stderr


def test_evaluation_uses_the_columns_of_training(ultr, trained, tmp_path):
    visits(60, seed=2).to_json(tmp_path / "new.jsonl", orient="records", lines=True)
    done = ultr("evaluate", trained, tmp_path / "new.jsonl", "--metrics", "feedback-ndcg@10", "--json")
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["rankers"][str(trained)]["feedback-ndcg@10"]["mean"] <= 1
    other = ultr("evaluate", trained, tmp_path / "new.jsonl", "--metrics", "feedback-ndcg@10", "--position", "rank")
    assert "two items of one request have the same position in column 'rank'" in other.stderr


def test_describe_names_the_column_of_each_part(ultr, folder, tmp_path):
    frame = visits(20).rename(columns={"visit": "qid", "shown_at": "Slot"})
    frame.drop(columns=["session_id", "rank", "item"]).to_parquet(tmp_path / "log.parquet", index=False)
    done = ultr("describe", tmp_path / "log.parquet", "--item", "sku", "--json")
    columns = json.loads(done.stdout)["columns"]
    expected = {"request": "qid", "position": "Slot", "item": "sku", "actions": ["click"], "features": ["f1"]}
    assert columns == expected
    printed = ultr("describe", tmp_path / "log.parquet", "--segment", "qid", "--request", "day", "--position", "Slot")
    assert "same position in column 'Slot'" in printed.stderr


@pytest.mark.parametrize("command", ["train", "compare"])
def test_conditions_and_a_split_by_time_work_in_training(command, ultr, tmp_path):
    visits().to_parquet(tmp_path / "log.parquet", index=False)
    columns = ("--request", "visit", "--position", "shown_at", "--features", "quality", "--item", "sku")
    rows = ("--set", "split=time", "--set", "time=day")
    rows += ("--set", "where=day >= 5") if command == "compare" else ("--where", "day >= 5", "--where", "day != 7")
    compared = ("--methods", "pointwise", "--seeds", 1, "--lrs", 0.1, "--tune", "seeds=1", "--jobs", 1)
    further = compared if command == "compare" else ()
    done = ultr(command, tmp_path / "log.parquet", "--out", tmp_path / "out", *columns, *rows, *further, *FAST)
    assert done.returncode == 0, done.stderr
    runs = [path.parent for path in (tmp_path / "out").rglob("config.json")]
    config = json.loads((runs[0] / "config.json").read_text())
    where = ["day >= 5", "day != 7"] if command == "train" else ["day >= 5"]
    assert (config["data"]["where"], config["data"]["split"], config["data"]["time"]) == (where, "time", "day")
    requests = pq.read_table(next(runs[0].glob("outcome/*.parquet"))).num_rows if command == "train" else None
    assert requests in (None, 10)  # the last of nine days judges the run


def test_the_options_of_a_split_are_checked(ultr, tmp_path):
    visits(20).to_parquet(tmp_path / "log.parquet", index=False)
    columns = ("--request", "visit", "--position", "shown_at", "--features", "quality", "--item", "")
    for options, code, message in (
        (("--set", "split=time"), 2, "a split by time needs both"),
        (("--set", "split=late"), 2, "'split' must be one of random, time, got 'late'"),
        (("--set", "split=time", "--set", "time=dya"), 5, "no column 'dya' for the time; did you mean 'day'?"),
        (("--where", "day > x"), 2, "must be a number"),
        (("--set", "on_duplicates=last"), 2, "'on_duplicates' must be one of error, first, sum, got 'last'"),
    ):
        done = ultr("train", tmp_path / "log.parquet", "--out", tmp_path / "run", *columns, *options, *FAST)
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr
        assert not (tmp_path / "run").exists()
