"""`ultr train --config`: options in a TOML file."""

from __future__ import annotations

import tomllib

import pytest

from conftest import make_shown_log
from ultr.datasets.simulate import simulate_log
from ultr.datasets.users import User
from ultr.log import write_log
from ultr.utils.jsonfiles import read_json

SMALL = ("--hidden", "4", "--steps", 2, "--bias-steps", 2, "--batch", 8, "--device", "cpu")


@pytest.fixture(scope="module")
def log_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    write_log(simulate_log(make_shown_log(requests=60), User())[0], path)
    return path


def test_options_of_a_file_are_used_unless_the_command_line_has_them(ultr, log_path, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        f'data = "{log_path}"\nlr = 0.5\nhidden = [4, 3]\nsteps = 7\nbias-steps = 2\nevaluate_every = 1\n'
        'batch = 8\ndevice = "cpu"\nfeatures = ["features"]\ndrop-suspicious = false\n[option]\nloss = "opt"\n'
    )
    done = ultr("train", "--config", file, "--out", tmp_path / "run", "--steps", 2)
    assert done.returncode == 0, done.stderr
    config = read_json(tmp_path / "run" / "config.json")
    assert config["training"]["lr"] == 0.5
    assert config["training"]["steps"] == 2
    assert config["ranker_options"]["hidden"] == [4, 3]
    assert config["columns"] == {"features": "features"}
    assert config["method_options"] == {"loss": "opt"}
    done = ultr("train", "--config", file, "--out", tmp_path / "run", "--steps", 2, "--resume")
    assert done.returncode == 0, done.stderr
    done = ultr("train", "--config", file, "--out", tmp_path / "run", "--resume", "--lr", 0.1, "--loss", "ipw")
    assert done.returncode == 2
    assert "--option ({'loss': 'ipw'}; the run has {'loss': 'opt'})" in done.stderr
    assert "--steps (7; the run has 2), --lr (0.1; the run has 0.5)" in done.stderr


def test_a_file_of_all_defaults_changes_nothing(ultr, log_path, tmp_path, monkeypatch):
    """An option of networks, such as the steps, would train a network without trees."""
    pytest.importorskip("lightgbm")
    started = []
    monkeypatch.setattr("ultr.training.run.train_both", lambda configs, *_, **__: started.append(configs))
    written = ultr("train", log_path, "--out", tmp_path / "run", "--write-config", tmp_path / "all.toml")
    assert written.returncode == 0, written.stderr
    ultr("train", "--config", tmp_path / "all.toml")
    ultr("train", log_path, "--out", tmp_path / "run")
    assert started[0] == started[1]
    assert [config.ranker for config in started[0]] == ["mlp", "lightgbm"]


def test_a_resumed_run_needs_none_of_its_options(ultr, log_path, tmp_path):
    assert ultr("train", log_path, "--out", tmp_path / "run", "--lr", 0.5, *SMALL).returncode == 0
    assert ultr("train", log_path, "--out", tmp_path / "run", "--resume").returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepps = 3", "there is no option 'stepps'; did you mean 'steps'?"),
        ("bias_step = 3", "there is no option 'bias_step'; did you mean 'bias-steps'?"),
        ("config = 'x.toml'", "there is no option 'config'"),
        ("steps = true", "'steps' must be a text or a number, got true"),
        ("resume = 'yes'", "'resume' must be true or false, got yes"),
        ("lr = {a = 1}", "'lr' must be a text or a number"),
        ("steps = 'many'", "Invalid value for '--steps'"),
        ("steps = = 3", "the file of options cannot be read (Invalid value"),
    ],
)
def test_wrong_files_are_rejected(text, message, ultr, log_path, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    done = ultr("train", log_path, "--out", tmp_path / "run", "--config", tmp_path / "run.toml")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "run").exists()
    assert ultr("train", "--config", tmp_path / "none.toml").returncode == 2


def test_a_written_file_repeats_the_options(ultr, log_path, tmp_path):
    file, where = tmp_path / "run.toml", 'f0 > -9 \\ "ä"'
    given = (log_path, "--out", tmp_path / "run", "--where", where, "--allow-leaks", *SMALL)
    done = ultr("train", *given, "--write-config", file, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert f"next: ultr train --config {file}" in done.stderr
    assert not (tmp_path / "run").exists()
    options = tomllib.loads(file.read_text(encoding="utf-8"))
    assert options["where"] == [where]
    assert options["steps"] == 2
    assert options["allow-leaks"] is True
    assert options["data"] == [str(log_path)]
    assert "label" not in options
    assert "overwrite" not in options
    assert "# label =" in file.read_text(encoding="utf-8")
    written = tmp_path / "again.toml"
    assert ultr("train", "--config", file, "--write-config", written).returncode == 0
    assert tomllib.loads(written.read_text(encoding="utf-8")) == options
