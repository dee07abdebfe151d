"""`ultr describe`, the first command for a log: what was recognised, what is wrong, and what to do next."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pandas as pd
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from worlds.shop import FEATURES, shop


@pytest.fixture(scope="module")
def log():
    return shop(400).log


def lines_of(done):
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_log_is_described_in_ten_lines_and_its_numbers_are_suggested_as_features(suffix, ultr, log, tmp_path):
    path = tmp_path / f"log.{suffix}"
    (pq.write_table if suffix == "parquet" else pyarrow.csv.write_csv)(log.append_column("ts", log["query"]), path)
    lines = lines_of(done := ultr("describe", path))
    assert done.stdout == ""
    assert len(lines) <= 10
    assert lines[0].startswith("Log(400 requests; ")
    assert "request 'request_id'; position 'position'; item 'item_id'; query 'query'; randomised" in lines[1]
    assert lines[2].startswith("feedback by position: click ")
    assert any("no column was recognised as a feature" in line for line in lines)
    words = shlex.split(lines[-1])
    assert words[:4] == ["next:", "ultr", "bias", str(path)]
    assert words[words.index("--features") + 1] == ",".join(FEATURES)  # neither the time nor the device


def test_missing_values_and_features_that_follow_feedback_are_named(ultr, log, tmp_path):
    seconds = log["click"].to_numpy() * np.random.default_rng(0).gamma(2, 10, len(log))
    names = {name: f"feature_{name}" for name in FEATURES}
    table = log.rename_columns([names.get(name, name) for name in log.column_names])
    pq.write_table(table.append_column("feature_seconds", [seconds]), tmp_path / "log.parquet")
    lines = lines_of(ultr("describe", tmp_path / "log.parquet"))
    assert len(lines) <= 10
    note = next(line for line in lines if line.startswith("note: values of features are missing"))
    assert "feature_rating (2" in note
    assert "feature_shipping_days (" in note
    assert any(line.startswith("warning: features that follow feedback: 'feature_seconds'") for line in lines)
    facts = json.loads(ultr("describe", tmp_path / "log.parquet", "--json").stdout)
    assert facts["warnings"][0]["name"] == "features that follow feedback"


def test_a_log_without_actions_says_what_to_name(ultr, log, tmp_path):
    pq.write_table(
        log.rename_columns(["tap" if n == "click" else n for n in log.column_names]), tmp_path / "log.parquet"
    )
    lines = lines_of(ultr("describe", tmp_path / "log.parquet"))
    assert lines[-1] == "the log has no actions: name their column with --actions, and run this command again"


def test_columns_of_feedback_are_suggested_as_actions_and_not_as_features(ultr, tmp_path):
    rng = np.random.default_rng(0)
    rows = 2000
    view = (rng.random(rows) < 0.3).astype(int)
    cart = view * (rng.random(rows) < 0.3)
    columns = {
        "request": np.repeat(np.arange(rows // 5), 5),
        "position": np.tile(np.arange(5) + 1, rows // 5),
        "price": rng.normal(size=rows),
        "in_stock": (rng.random(rows) < 0.5).astype(int),
        "view": view,
        "add_to_cart": cart,
        "read_seconds": cart * rng.gamma(2, 5, rows),
    }
    pd.DataFrame(columns).to_csv(tmp_path / "log.csv", index=False)
    done = ultr("describe", tmp_path / "log.csv")
    assert done.returncode == 0, done.stderr
    assert "view, read_seconds look like feedback; the next command has --actions" in done.stderr
    (command,) = [line for line in done.stderr.splitlines() if line.startswith("next: ")]
    assert "--features price,in_stock " in command
    assert "--actions add_to_cart,view,read_seconds" in command


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_texts_that_differ_within_a_request_are_suggested_as_categories(suffix, ultr, tmp_path):
    rng = np.random.default_rng(0)
    requests, rows = 200, 1000
    columns = {
        "request": np.repeat(np.arange(requests), 5),
        "position": np.tile(np.arange(5) + 1, requests),
        "click": (rng.random(rows) < 0.3).astype(int),
        "brand": rng.choice(["acme", "zeta", "omni"], rows),
        "device": np.repeat(rng.choice(["phone", "desktop"], requests), 5),  # of the whole request
        "title": [f"title {i}" for i in range(rows)],  # too many values
        "page_url": rng.choice(["a", "b"], rows),
        "nothing": ["same"] * rows,
    }
    frame = pd.DataFrame(columns)
    path = tmp_path / f"log{suffix}"
    frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_parquet(path, index=False)
    done = ultr("describe", path)
    assert done.returncode == 0, done.stderr
    assert "takes the unused categories: leave out what is not known before ranking" in done.stderr
    (command,) = [line for line in done.stderr.splitlines() if line.startswith("next: ")]
    assert "--categorical brand " in command
    assert "--features" not in command
    assert ultr(*command.removeprefix("next: ultr ").split()[:-1], tmp_path / "bias").returncode == 0
    named = ultr("describe", path, "--categorical", "brand").stderr
    assert "takes the unused" not in named


def test_a_column_that_recurs_but_never_within_a_request_is_suggested_as_the_item(ultr, tmp_path):
    rng = np.random.default_rng(0)
    listing = np.concatenate([rng.choice(40, 5, replace=False) for _ in range(300)])
    columns = {
        "request": np.repeat(np.arange(300), 5),
        "position": np.tile(np.arange(5) + 1, 300),
        "click": (rng.random(1500) < 0.3).astype(int),
        "read_seconds": np.zeros(1500),
        "listing": [f"L{i}" for i in listing],
        "city": rng.choice(["Graz", "Linz"], 1500),
        "photos": listing,
        "session_text": [f"text {i}" for i in range(1500)],  # it never recurs
    }
    frame = pd.DataFrame(columns)
    frame["read_seconds"] = frame["click"] * rng.gamma(2, 20, 1500)
    frame.to_csv(tmp_path / "log.csv", index=False)
    done = ultr("describe", tmp_path / "log.csv")
    assert done.returncode == 0, done.stderr
    assert "listing looks like the id of the item" in done.stderr
    (command,) = [line for line in done.stderr.splitlines() if line.startswith("next: ")]
    assert "--item listing" in command
    assert "--categorical city " in command
    bias = ultr(*command.removeprefix("next: ultr ").split()[:-1], tmp_path / "bias", "--bootstrap", 10)
    assert bias.returncode == 0, bias.stderr
    mean = frame["read_seconds"][frame["read_seconds"] > 0].mean()
    assert f"--label 'click + read_seconds / {mean:.2g}'" in bias.stderr
    frame.assign(item=frame["listing"]).to_csv(tmp_path / "named.csv", index=False)
    assert "looks like the id" not in ultr("describe", tmp_path / "named.csv").stderr


def test_a_flag_of_random_requests_an_index_and_seconds_watched_are_never_proposed_as_features(ultr, log, tmp_path):
    frame = log.to_pandas().drop(columns=["query", "item_id"]).rename(columns={"randomised": "dice"})
    frame["watch_seconds"] = frame["click"] * np.random.default_rng(0).gamma(2, 10, len(frame))
    frame["hovered"] = frame["click"] * np.random.default_rng(1).gamma(2, 10, len(frame))
    frame.sample(frac=1, random_state=1).to_parquet(tmp_path / "log.parquet")  # with the index as a column
    done = ultr("describe", tmp_path / "log.parquet")
    assert done.returncode == 0, done.stderr
    assert "__index_level_0__" in next(line for line in done.stderr.splitlines() if line.startswith("unused columns"))
    words = shlex.split(done.stderr.splitlines()[-1])
    assert words[words.index("--features") + 1] == ",".join(FEATURES)
    assert words[words.index("--actions") + 1] == "click,watch_seconds,hovered"
    assert "dice: the same for all items of a request" in done.stderr
    named = ultr("describe", tmp_path / "log.parquet", "--features", "text_match,rating").stderr
    (line,) = [line for line in named.splitlines() if line.startswith("unused columns: ")]
    assert "dice" in line
    assert "hovered looks like feedback; the next command has --actions click,watch_seconds,hovered" in named
    frame.rename(columns={"dice": "explore"}).to_parquet(tmp_path / "log.parquet")
    assert "randomised 'explore'; actions 'click', 'watch_seconds'" in ultr("describe", tmp_path / "log.parquet").stderr


def test_a_column_of_texts_with_the_name_of_a_random_flag_is_not_taken_as_one(ultr, log, tmp_path):
    texts = log.drop_columns(["randomised"]).append_column("explore", [["control"] * len(log)])
    pq.write_table(texts, tmp_path / "log.parquet")
    assert "randomised" not in lines_of(ultr("describe", tmp_path / "log.parquet"))[1]


def test_an_unused_column_with_infinite_values_does_not_stop_describe(ultr, log, tmp_path):
    pq.write_table(log.append_column("ratio", [np.full(len(log), np.inf)]), tmp_path / "log.parquet")
    assert "ratio" in "".join(lines_of(ultr("describe", tmp_path / "log.parquet", "--features", "text_match")))


def test_events_are_recognised_and_the_command_that_reads_them_is_printed_and_works(ultr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = {"object": {"object_id": "p", "object_detail": {"price": 1}}, "position": {"ordinal": 0}}
    event = {"action_name": "impression", "query_id": "q", "timestamp": 1_777_629_600_000, "event_attributes": where}
    lines = [event, {**event, "action_name": "click"}, {**event, "query_id": None}]
    (tmp_path / "my events.json").write_text(json.dumps(lines))
    done = ultr("describe", "my events.json")
    assert done.returncode == 0, done.stderr
    assert "events, not one row per item shown: User Behavior Insights (UBI) 1.3" in done.stderr
    command = done.stderr.split("next: ultr ")[1].strip()
    assert command == "prepare 'my events.json' --format ubi --out log.parquet"
    assert json.loads(ultr("describe", "my events.json", "--json").stdout)["format"] == "ubi"
    done = ultr(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert "1 events have no id of the request; they are left out" in done.stderr
    assert "wrote log.parquet: 1 items that were shown" in done.stderr
    assert "next: ultr describe log.parquet" in done.stderr
    printed = json.loads(ultr(*shlex.split(command), "--overwrite", "--json").stdout)
    assert (printed["format"], printed["counts"]["rows"]) == ("ubi", 1)
    assert "click" in ultr("describe", "log.parquet").stderr


def test_the_note_on_the_request_is_printed(ultr, tmp_path):
    rows = [
        {"query_id": f"q{i % 3}", "search_id": i, "position": j, "click": j == 1} for i in range(30) for j in (1, 2)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = ultr("describe", tmp_path / "log.jsonl")
    assert "recognised: request 'search_id'" in done.stderr
    assert "note: the request is 'search_id', because positions repeat within 'query_id'" in done.stderr
