"""`ultr update`: yesterday's run, today's log."""

from __future__ import annotations

import json

import pytest

from training.test_warm_start import config, scores, table, write
from ultr.training import update
from ultr.training.run import run_training
from ultr.utils.jsonfiles import read_json

OPEN = ("--min-evidence", 0, "--allow", "all")  # for logs of a few requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("days")


@pytest.fixture(scope="module")
def yesterday(folder):
    path = write(folder / "day1.parquet", table(["a", "b", "c"], requests=400, falls=1))
    return run_training(config(path, method="pairwise-em"), folder / "yesterday")


@pytest.fixture(scope="module")
def today(folder):
    content = table(["new", "c", "b", "a"], seed=1, requests=400, falls=1)
    return write(folder / "day2.parquet", content.append_column("g0", content["f0"]))  # one more column


def test_a_run_is_updated_and_written_if_it_is_not_worse(ultr, yesterday, today, tmp_path):
    done = ultr("update", yesterday, "--log", today, "--out", tmp_path / "run", "--steps", 20, "--json", *OPEN)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["accepted"], found["run"], found["status"]) == (True, str(tmp_path / "run"), "accepted")
    on = found["comparisons"]
    assert [on[where]["against"] for where in ("the new log", "the reference")] == ["the old run"] * 2
    assert on["the reference"]["requests"] == 40  # those of yesterday that chose nothing
    assert on["the new log"]["requests"] == 80  # a fifth of the requests: neither trained nor selected on
    assert {p.name for p in tmp_path.iterdir()} == {"run"}
    saved = read_json(tmp_path / "run" / "config.json")
    started = (saved["training"]["warm_start"], saved["examination"]["bias"])
    assert started == (str(yesterday), str(yesterday / "bias.json"))
    assert saved["data"]["columns"]["features"] == ["f0", "f1"]  # the columns of yesterday, whatever else the log has
    assert read_json(tmp_path / "run" / "bias.json")["theta"] == read_json(yesterday / "bias.json")["theta"]
    assert f"wrote {tmp_path / 'run'}: not clearly worse than {yesterday} (difference" in done.stderr
    again = ultr("update", yesterday, "--log", today, "--out", tmp_path / "run")
    assert (again.returncode, "output exists already" in again.stderr) == (1, True)


def test_a_worse_run_is_not_written(ultr, yesterday, today, tmp_path, monkeypatch):
    def train_badly(config, out, **options):
        other = {"method": "pointwise", "warm_start": None, "bias": None, "ranker": "mlp", "network.lr": 1e-12}
        return run_training(config.with_options(**other), out, **options)

    monkeypatch.setattr(update, "run_training", train_badly)
    done = ultr("update", yesterday, "--log", today, "--out", tmp_path / "run", *OPEN)
    assert done.returncode == 3, done.stderr
    assert "worse on the new log: difference of" in done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"run.candidate"}


def test_a_killed_update_is_resumed(yesterday, today, tmp_path, monkeypatch):
    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        listeners = update.Listeners(on_progress=stop)
        update.update_run(
            yesterday, today, tmp_path / "run", steps=20, listeners=listeners, gate=update.Gate(0.95, 0, ("all",))
        )
    assert {p.name for p in tmp_path.iterdir()} == {"run.candidate.partial"}
    result = update.update_run(yesterday, today, tmp_path / "run", steps=20, gate=update.Gate(0.95, 0, ("all",)))
    assert result.accepted
    assert len(scores(result.run, today)) == 1600


def test_what_cannot_be_updated_is_an_error(ultr, yesterday, today, tmp_path):
    done = ultr("update", yesterday, "--log", today, "--out", tmp_path / "run", "--gate", 1)
    assert (done.returncode, "the gate must be above 0 and below 1" in done.stderr) == (2, True)
    done = ultr("update", yesterday, "--log", today, "--out", tmp_path / "run", "--decay", 7)
    assert (done.returncode, "the days of the log are not known" in done.stderr) == (2, True)
