"""Messages of commands: levels, JSON lines, progress without a terminal, and results as JSON."""

from __future__ import annotations

import io
import json
import logging
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer
from rich.console import Console

from ultr import __version__, cli
from ultr.cli import app, messages
from ultr.utils.display import begin_stage

SMALL = ("--ranker", "mlp", "--steps", 10, "--set", "bias_steps=10", "--set", "hidden=4", "--label", "click")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    rng = np.random.default_rng(0)
    rows = 600
    frame = pd.DataFrame({"request": np.arange(rows) // 4, "position": np.arange(rows) % 4 + 1, "item": range(rows)})
    frame["click"] = (rng.random(rows) < 0.6 / frame["position"]).astype(float)
    frame.loc[0, "click"] = np.nan
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    frame.assign(f1=rng.normal(size=rows), f2=rng.normal(size=rows)).to_parquet(path, index=False)
    return path


def test_training_and_scoring_give_json_and_log_json(ultr, log, tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "LINE_SECONDS", 0.01)
    done = ultr("train", log, "--out", tmp_path / "run", *SMALL, "--json", "--log-json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["run"] == str(tmp_path / "run")
    assert result["best"][result["metric"]] > 0
    assert "theta" in result["bias"]
    assert result["notes"] == ["1 rows have no value in action column 'click'; they count as 0"]
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
    stages = list(dict.fromkeys(line["stage"] for line in lines if "stage" in line))
    first, last = (
        ["reading the data", "looking for problems of the data", "estimating examination"],
        "writing the results",
    )
    assert (stages[:3], stages[-1]) == (first, last)
    assert {line.get("progress") for line in lines} & set(first)  # lines of progress before training
    assert any(line.get("total") == 10 and line["done"] <= 10 for line in lines)
    out = tmp_path / "scores.parquet"
    scored = json.loads(ultr("score", tmp_path / "run", log, "--out", out, "--json").stdout)
    assert (scored["out"], scored["scores"], scored["columns"]["request"]) == (str(out), 600, "request")


OF_SERVICES = {"serve"}  # commands that print no results


def commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands


def test_all_commands_have_json_and_log_json():
    assert commands().keys() > OF_SERVICES
    for name, command in commands().items():
        named = {option for parameter in command.params for option in parameter.opts}
        assert {"--log-json", "--log-level"} <= named, name
        assert ("--json" in named) == (name not in OF_SERVICES), name


def error_line(done: SimpleNamespace) -> dict[str, Any]:
    """Return the only line of stderr, after a check that it is an error."""
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (line["level"], line["exit_code"], done.stdout) == ("error", done.returncode, ""), line
    assert line["message"]
    return line


@pytest.mark.parametrize("name", sorted(commands()))
def test_with_log_json_an_error_of_any_command_is_one_line(name, ultr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = error_line(ultr(name, "--log-json", "--no-such-option"))
    assert (line["exit_code"], line["type"], line["message"]) == (2, "NoSuchOption", "No such option: --no-such-option")
    line = error_line(ultr(name, "--log-level", "loud", "--log-json", *required(name)))
    assert (line["exit_code"], line["type"]) == (2, "OptionError")
    monkeypatch.setattr(cli, "app", typer.Typer())

    @messages.with_log_options
    def fails() -> None:
        raise RuntimeError("[a fault]\nin two lines")

    cli.app.command("other")(lambda: None)
    cli.app.command(name)(fails)
    line = error_line(ultr(name, "--log-json"))
    assert (line["exit_code"], line["type"]) == (1, "RuntimeError")
    assert "[a fault]\nin two lines" in line["message"]


def required(name: str) -> list[str]:
    """Return values for the required arguments and options of a command."""
    texts = []
    for parameter in commands()[name].params:
        if parameter.required:
            texts += [parameter.opts[0], "x"] if parameter.opts[0].startswith("-") else ["x"]
    return texts


def test_errors_have_the_exit_code_and_the_type_of_their_class(ultr, tmp_path):
    line = error_line(ultr("describe", tmp_path / "absent.parquet", "--log-json"))
    assert (line["exit_code"], line["type"]) == (5, "DataError")
    assert error_line(ultr("simulat", "--log-json"))["message"].startswith("No such command 'simulat'")
    assert error_line(ultr("describe", "--log-json"))["message"].startswith("Missing argument 'LOG")


def test_simulations_reports_and_the_version_have_results_as_json(ultr, log, tmp_path):
    out = tmp_path / "simulated.parquet"
    done = ultr("simulate", "synthetic", "--out", out, "--sessions", 30, "--json")
    simulated = json.loads(done.stdout)
    assert (simulated["out"], simulated["requests"], simulated["rows"]) == (str(out), 30, 300)
    assert simulated["simulation"]["users"] == "pbm"
    assert json.loads(ultr("version", "--json").stdout) == {"version": __version__}
    assert ultr("train", log, "--out", tmp_path / "run", *SMALL).returncode == 0
    page = tmp_path / "report.html"
    written = json.loads(ultr("report", tmp_path / "run", "--out", page, "--json").stdout)
    assert (written["out"], written["runs"]) == (str(page), [str(tmp_path / "run")])
    (importance,) = written["importance"].values()
    assert {each["feature"] for each in importance} == {"f1", "f2"}


def test_levels_choose_messages(ultr, log, tmp_path):
    assert "note: 1 rows have no value" in ultr("describe", log).stderr
    assert ultr("describe", log, "--log-level", "warning").stderr == ""
    done = ultr("describe", tmp_path / "none.parquet", "--log-level", "error", "--log-json")
    line = json.loads(done.stderr)
    assert (done.returncode, line["level"]) == (5, "error")
    assert line["message"].startswith(f"{tmp_path}/none.parquet: no such file")
    done = ultr("describe", log, "--log-level", "warn")
    assert (done.returncode, done.stderr) == (
        2,
        "error: unknown log level, got --log-level warn; did you mean 'warning'?\n",
    )
    assert logging.getLogger("ultr").handlers == []  # a program that calls `main` keeps its own logging


def test_without_a_terminal_there_is_a_line_every_few_seconds(monkeypatch, capsys):
    monkeypatch.setattr(messages, "LINE_SECONDS", 0.05)
    with messages.messages_on_stderr(), messages.progress_bar("starting", "rows") as bar:
        begin_stage("reading the data")
        time.sleep(0.2)  # work that reports nothing
        bar.update(description="writing", completed=1000, total=4000, figure="rows")
        time.sleep(0.12)
        bar.update(description="pairwise-em", completed=50, total=100, figure="ndcg@10 0.1234")
        time.sleep(0.12)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "reading the data: 0 s"
    assert "writing: 1,000 of 4,000 rows, 0 s, about 0 s left" in lines
    assert lines[-1] == "pairwise-em: 50 of 100, ndcg@10 0.1234, 0 s, at most 0 s left"
    assert messages.LINE_SECONDS < 10


def test_a_status_is_a_line_too_and_a_terminal_has_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(messages, "LINE_SECONDS", 0.05)
    with messages.messages_on_stderr(), messages.words.status("estimating examination ..."):
        time.sleep(0.1)
    assert capsys.readouterr().err.splitlines()[0] == "estimating examination: 0 s"
    screen = io.StringIO()
    monkeypatch.setattr(messages.words, "console", Console(file=screen, force_terminal=True, width=100))
    with messages.messages_on_stderr(), messages.progress_bar("starting") as bar:
        bar.update(total=10, completed=5)
        begin_stage("making the judge")
    assert "making the judge" in screen.getvalue()
    assert "5/10" in screen.getvalue()


def test_python_programs_get_stages_from_logging(caplog):
    with caplog.at_level(logging.INFO, logger="ultr"):
        begin_stage("reading the data")
    assert [record.stage for record in caplog.records] == ["reading the data"]
