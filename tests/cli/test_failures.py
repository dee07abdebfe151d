"""Failures outside of a command: a full disk, Ctrl-C, and a locale that cannot write a name."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from conftest import make_shown_log
from ultr.datasets.users import User, simulate_log
from ultr.log import write_log
from ultr.log.prepare import engines
from ultr.training import networks, run

SMALL = (
    "--set",
    "hidden=4",
    "--steps",
    2,
    "--set",
    "bias_steps=2",
    "--set",
    "batch=8",
    "--device",
    "cpu",
    "--method",
    "pointwise",
    "--ranker",
    "mlp",
)


@pytest.fixture(scope="module")
def log_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    write_log(simulate_log(make_shown_log(requests=60), User())[0], path)
    return path


def raising(kind, *arguments):
    def fail(*_args, **_options):
        raise kind(*arguments)

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_wherever_it_is_found(number, ultr, log_path, tmp_path, monkeypatch):
    """Libraries raise OSError without a path, such as a writer in another thread."""
    monkeypatch.setattr(networks, "append_metrics", raising(OSError, number, os.strerror(number)))
    done = ultr("train", log_path, "--out", tmp_path / "run", *SMALL)
    assert done.returncode == 1
    assert f"error: {os.strerror(number)}; free some space, or write to another disk" in done.stderr
    assert "internal" not in done.stderr


@pytest.mark.parametrize("error", [(OSError, errno.ENOSPC, "full"), (KeyboardInterrupt,), (RuntimeError, "memory")])
def test_a_start_that_fails_leaves_no_run(error, ultr, log_path, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "examine", raising(*error))
    assert ultr("train", log_path, "--out", tmp_path / "run", *SMALL).returncode in (1, 130)
    assert not any(tmp_path.iterdir())
    monkeypatch.undo()
    assert ultr("train", log_path, "--out", tmp_path / "run", *SMALL).returncode == 0


@pytest.mark.parametrize("error", [(RuntimeError, "Query interrupted"), (KeyboardInterrupt,)])
def test_an_interrupted_preparation_says_so(error, ultr, log_path, tmp_path, monkeypatch):
    """DuckDB turns Ctrl-C into a RuntimeError."""
    monkeypatch.setattr(engines.DuckDB, "fetch", raising(*error))
    done = ultr("prepare", log_path, "--out", tmp_path / "lists", "--threads", 1)
    assert done.returncode == 130
    assert done.stderr.strip() == "interrupted"
    assert not (tmp_path / "lists").exists()


def test_a_locale_that_cannot_read_a_name_is_an_error_that_says_what_to_do(tmp_path):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "ultr", "describe", tmp_path / "lög.parquet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **locale})
    assert done.returncode == 2, done.stderr
    assert "an argument is not in UTF-8, got" in done.stderr
    assert "set the environment variable PYTHONUTF8=1, and run the command again" in done.stderr


def test_a_path_that_is_not_utf8_is_rejected(ultr):
    done = ultr("describe", os.fsdecode(b"l\xf6g.parquet"))
    assert done.returncode == 2
    assert r"an argument is not in UTF-8, got 'l\udcf6g.parquet'; rename the file" in done.stderr
