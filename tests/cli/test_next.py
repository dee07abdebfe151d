"""The commands that `next:` lines name work as they are printed: every one of them is run, from several examples."""

from __future__ import annotations

import inspect
import re
import shlex

import numpy as np
import pandas as pd
import pytest

from ultr import cli
from ultr.cli.options import CARRIED
from ultr.log.columns import ROLES

FAST = {
    "bias": ["--bootstrap", "10", "--sample", "1000"],
    "train": ["--ranker", "mlp", "--set", "hidden=4", "--steps", "4", "--set", "bias_steps=4", "--device", "cpu"],
}


def impressions(requests=250, items=4, seed=0):
    """Make a log of requests in random order, so that examination is identified; clicks fall with position."""
    rng = np.random.default_rng(seed)
    rows = requests * items
    frame = pd.DataFrame({"request": np.repeat(np.arange(requests), items), "position": np.arange(rows) % items + 1})
    frame["randomised"] = 1
    quality = rng.random(rows)
    frame["click"] = (rng.random(rows) < 0.9 * quality / frame["position"]).astype(int)
    return frame.assign(feature_quality=quality, feature_age=rng.random(rows))


def click_only(folder):
    impressions().to_csv(folder / "log.csv", index=False)
    return ["describe", "log.csv"]


def missing_values(folder):
    log = impressions()
    log["feature_age"] = log["feature_age"].where(log.index % 3 > 0)
    log.to_csv(folder / "log.csv", index=False)
    return ["describe", "log.csv"]


def odd_names(folder):
    names = {"request": "Search ID", "position": "Slot No.", "click": "Was Clicked?", "randomised": "Shuffled?"}
    names |= {"feature_quality": "Item's quality", "feature_age": "age [days]"}
    impressions().rename(columns=names).to_parquet(folder / "my log (May).parquet", index=False)
    columns = {"request": "Search ID", "position": "Slot No.", "actions": "Was Clicked?", "randomised": "Shuffled?"}
    columns |= {"features": "Item's quality,age [days]"}
    named = [word for role, name in columns.items() for word in (f"--{role}", name)]
    return ["describe", "my log (May).parquet", *named]


def with_dwell(folder):
    frame = impressions()
    frame["dwell"] = frame["click"] * np.random.default_rng(1).gamma(2, 10, len(frame))
    frame.to_json(folder / "log.jsonl", orient="records", lines=True)
    return ["describe", "log.jsonl"]


def several_actions(folder):
    frame = impressions().rename(columns={"click": "purchase"})
    frame.insert(0, "add_to_cart", frame["purchase"])
    frame.loc[frame.index % 7 == 0, "add_to_cart"] = np.nan
    pd.concat([frame, frame.head(4)]).to_parquet(folder / "log.parquet", index=False)
    return ["describe", "log.parquet", "--on-duplicates", "first", "--actions", "purchase,add_to_cart"]


def position_among_the_features(folder):
    frame = impressions()
    frame.assign(feature_slot=frame["position"] / 10).to_parquet(folder / "log.parquet", index=False)
    return ["describe", "log.parquet"]


def prepared(folder):
    impressions().to_json(folder / "log.jsonl", orient="records", lines=True)
    return ["prepare", "log.jsonl", "--out", "my lists"]


def run_all(ultr, command):
    """Run a command and, one after another, all commands that it and they print after `next:`; return the commands."""
    waiting, done = [command], []
    while waiting:
        words = waiting.pop(0)
        result = ultr(*words, *FAST.get(words[0], ()))
        assert result.returncode == 0, f"{shlex.join(words)}\n{result.stderr}"
        done.append(words)
        lines = re.findall(r"^next: (.*)$", result.stderr, re.MULTILINE)
        assert all(line.startswith("ultr ") for line in lines)
        waiting += [shlex.split(line)[1:] for line in lines if not line.startswith("ultr serve")]  # runs until stopped
    return done


EXAMPLES = (click_only, missing_values, odd_names, with_dwell, several_actions, position_among_the_features, prepared)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)
def test_every_printed_command_runs_as_it_is(example, ultr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bias").mkdir()  # a name in use is not printed again
    done = run_all(ultr, example(tmp_path))
    names = [words[0] for words in done]
    start = ["prepare"] if example is prepared else ["describe", "bias"]
    assert names == [*start, "train", "evaluate", "score", "report", "export"]
    assert "CANDIDATES" not in str(done)
    train = next(words for words in done if words[0] == "train")
    label = train[train.index("--label") + 1]
    expected = {"odd_names": "`Was Clicked?`", "with_dwell": "click + dwell / exp(3)", "several_actions": "purchase"}
    assert label == expected.get(example.__name__, "click")
    if example is position_among_the_features:
        assert train[train.index("--features") + 1] == "feature_quality,feature_age"


@pytest.mark.parametrize("command", CARRIED)
def test_next_lines_carry_every_column_option_of_a_command(command):
    function = next(function for function in cli.COMMANDS if function.__name__ == command)
    options = {name for name in inspect.signature(function).parameters if name in ROLES}
    assert set(CARRIED[command]) == options


def test_the_first_command_of_a_simulation_runs(ultr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = ultr("simulate", "synthetic", "--out", "a log.parquet", "--sessions", 20)
    line = re.findall(r"^next: ultr (.*)$", done.stderr, re.MULTILINE)[0]
    assert ultr(*shlex.split(line)).returncode == 0
