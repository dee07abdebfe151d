"""The command that repeats the paper's experiments, called in this process, so that it takes no time to start."""

from __future__ import annotations

import json
import sys

import pytest

import ultr.experiments
from ultr.cli import main
from ultr.compare import RunTask
from ultr.errors import UnfinishedError
from ultr.experiments import FULL, QUICK, Outcome
from ultr.experiments import lab as labs
from ultr.experiments.claims import HELD, Claim
from ultr.formats import load_json


@pytest.fixture
def reproduce(monkeypatch, capsys):
    """Give the command; its exit code, and what it printed on stdout and stderr."""

    def give(*arguments):
        monkeypatch.setattr(sys, "argv", ["ultr", "reproduce", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        printed = capsys.readouterr()
        return done.value.code or 0, printed.out, " ".join(printed.err.split())

    return give


@pytest.fixture
def given(monkeypatch):
    """The labs that made-up experiments `table1` and `figure3` were given."""
    found = []

    def experiment(name):
        def make(lab):
            found.append((name, lab))
            claims = [Claim("it works", "data", HELD, "so")]
            return Outcome(name, f"About {name}", ["## A section"], claims, {"figure": [1.5]}, {"yahoo": "gone"})

        return make

    made = {name: experiment(name) for name in ("table1", "figure3")}
    monkeypatch.setattr(ultr.experiments, "EXPERIMENTS", made)
    return found


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("nothing", "known: all, figure3, figure4, figure5, live, table1, table2"),
        ("tabel1", "did you mean 'table1'?"),
        ("table1,figur5", "did you mean 'figure5'?"),
        ("", "known: all"),
    ],
)
def test_an_unknown_experiment_is_refused_before_anything_is_done(reproduce, tmp_path, monkeypatch, name, mend):
    monkeypatch.chdir(tmp_path)
    code, out, err = reproduce(name)
    assert code == 2
    assert mend in err
    assert f"no experiment '{name.split(',')[-1]}'" in err
    assert out == ""
    assert not list(tmp_path.iterdir())


def test_data_that_is_not_here_is_named_with_where_to_put_it(reproduce, tmp_path):
    (tmp_path / "empty").mkdir()
    options = "--quick", "--data", "mq2007", "--data-dir", tmp_path / "empty", "--out", tmp_path / "out"
    code, out, err = reproduce("table1", *options)
    assert code == 1
    assert "none of the data sets is here" in err
    assert "LETOR 4.0, offered by Microsoft Research" in err
    assert f"put it into {tmp_path / 'empty' / 'mq2007'}" in err
    assert out == ""
    assert not (tmp_path / "out").exists()


def test_when_the_time_is_up_it_says_how_to_go_on(reproduce, tmp_path, monkeypatch):
    monkeypatch.setattr(labs, "load_dataset", lambda name, data_dir=None: None)
    monkeypatch.setattr(RunTask, "perform", lambda task: pytest.fail("a run was begun after the time was up"))
    options = "--quick", "--data", "synthetic", "--runs", 1, "--jobs", 1, "--out", tmp_path
    code, out, err = reproduce("table1", *options, "--minutes", 1e-9)
    assert code == 3
    assert "table1: the time is up with 0 of 20 runs finished; give the same command to go on" in err  # 10 at 2 rates
    assert out == ""
    assert not (tmp_path / "table1.md").exists()


def test_experiments_that_were_finished_in_time_are_kept(reproduce, given, tmp_path, monkeypatch):
    def late(lab):
        raise UnfinishedError("the time is up with 3 of 9 runs finished")

    monkeypatch.setitem(ultr.experiments.EXPERIMENTS, "figure3", late)
    code, _, err = reproduce("table1,figure3", "--out", tmp_path)
    assert code == 3
    assert "figure3: the time is up with 3 of 9 runs finished; give the same command to go on" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["table1.json", "table1.md"]


def test_experiments_are_printed_and_written_in_order(reproduce, given, tmp_path):
    code, out, err = reproduce("figure3, table1", "--out", tmp_path)
    assert code == 0
    assert [name for name, _ in given] == ["figure3", "table1"]
    assert out.index("# About figure3") < out.index("# About table1")
    assert "Yahoo! LETOR set 1 is absent: gone" in out
    assert "- data: **held**. so" in out
    assert f"wrote {tmp_path / 'figure3'}.md, {tmp_path / 'table1'}.md" in err
    assert (tmp_path / "table1.md").read_text() + "\n" in out
    assert strict((tmp_path / "figure3.json").read_text())["figures"] == {"figure": [1.5]}


def test_all_is_every_experiment(reproduce, given, tmp_path):
    assert reproduce("all", "--out", tmp_path)[0] == 0
    assert [name for name, _ in given] == ["table1", "figure3"]


def test_json_alone_is_printed_if_asked_for(reproduce, given, tmp_path):
    code, out, _ = reproduce("all", "--json", "--out", tmp_path)
    assert code == 0
    content = strict(out)
    assert list(content) == ["table1", "figure3"]
    assert content["table1"] == load_json(tmp_path / "table1.json", finite=True)
    assert content["table1"]["claims"] == [{"text": "it works", "data": "data", "verdict": HELD, "evidence": "so"}]


def test_options_reach_the_experiment(reproduce, given, tmp_path):
    options = "--runs", 4, "--data", "mq2007, synthetic", "--data-dir", tmp_path, "--device", "cpu", "--out", tmp_path
    assert reproduce("table1", "--quick", *options)[0] == 0
    assert reproduce("table1", "--out", tmp_path)[0] == 0
    (_, own), (_, usual) = given
    assert (own.budget, own.seeds, own.data, own.data_dir) == (QUICK, 4, ("mq2007", "synthetic"), str(tmp_path))
    assert (own.device, own.out) == ("cpu", tmp_path)
    assert (usual.budget, usual.seeds, usual.data, usual.data_dir, usual.device) == (FULL, 10, (), None, "auto")


def test_the_time_given_is_in_minutes(reproduce, given, tmp_path, monkeypatch):
    monkeypatch.setattr("ultr.cli.experiments.time.monotonic", lambda: 1000.0)
    assert reproduce("table1", "--out", tmp_path, "--minutes", 2.5)[0] == 0
    assert reproduce("table1", "--out", tmp_path)[0] == 0
    assert [lab.workers.until for _, lab in given] == [1150.0, float("inf")]


@pytest.mark.parametrize(("option", "value"), [("--runs", -1), ("--minutes", "soon")])
def test_options_out_of_range_are_refused(reproduce, given, tmp_path, option, value):
    code, _, err = reproduce("table1", "--out", tmp_path, option, value)
    assert code == 2
    assert option in err
    assert not given


def test_less_than_no_jobs_are_refused(reproduce, given, tmp_path):
    code, _, err = reproduce("table1", "--out", tmp_path, "--jobs", -1)
    assert code == 2
    assert "--jobs" in err
