"""The command `ultr reproduce`, called in this process, so that it starts fast."""

from __future__ import annotations

import json
import sys

import pytest

import ultr.experiments
from ultr.cli import main
from ultr.errors import UnfinishedError
from ultr.experiments import FULL, QUICK, ExperimentResult
from ultr.experiments import lab as labs
from ultr.experiments.lab import HELD, Claim
from ultr.report.page import Section, Text
from ultr.training.comparing.tasks import RunTask, SharedTask
from ultr.utils.jsonfiles import load_json


@pytest.fixture
def reproduce(monkeypatch, capsys):
    """Run the command, and return its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ultr", "reproduce", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        printed = capsys.readouterr()
        return done.value.code or 0, printed.out, " ".join(printed.err.split())

    return run


@pytest.fixture
def labs_of_experiments(monkeypatch):
    """The name and lab of each call of the made-up experiments `table1` and `figure3`."""
    calls = []

    def experiment(name):
        def make(lab):
            calls.append((name, lab))
            claims = [Claim("it works", "data", HELD, "so")]
            sections = [Section("A section", [Text("A text.")])]
            results = {"figure": [1.5]}
            return ExperimentResult(name, f"About {name}", "Two runs.", sections, claims, results, {"yahoo": "gone"})

        return make

    made = {name: experiment(name) for name in ("table1", "figure3")}
    monkeypatch.setattr(ultr.experiments, "EXPERIMENTS", made)
    return calls


def strict(text):
    def fail(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=fail)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nothing", "use one of all, figure3, figure4, figure5, live, settling, table1, table2, trees, worlds"),
        ("tabel1", "did you mean 'table1'?"),
        ("table1,figur5", "did you mean 'figure5'?"),
        ("", "use one of all"),
    ],
)
def test_an_unknown_experiment_is_an_error_before_any_work(reproduce, tmp_path, monkeypatch, name, hint):
    monkeypatch.chdir(tmp_path)
    code, out, err = reproduce(name)
    assert code == 2
    assert hint in err
    assert f"no experiment '{name.split(',')[-1]}'" in err
    assert out == ""
    assert not list(tmp_path.iterdir())


def test_a_missing_data_set_is_named_with_where_to_put_it(reproduce, tmp_path):
    (tmp_path / "empty").mkdir()
    options = "--quick", "--data", "mq2007", "--data-dir", tmp_path / "empty", "--out", tmp_path / "out"
    code, out, err = reproduce("table1", *options)
    assert code == 5
    assert "none of the data sets is available" in err
    assert "LETOR 4.0" in err
    assert f"put its files into {tmp_path / 'empty' / 'mq2007'}" in err
    assert out == ""
    assert not (tmp_path / "out").exists()


def test_at_the_time_limit_it_says_how_to_continue(reproduce, tmp_path, monkeypatch):
    monkeypatch.setattr(labs, "load_dataset", lambda name, data_dir=None: None)
    for kind in (RunTask, SharedTask):
        monkeypatch.setattr(kind, "perform", lambda task: pytest.fail("a task was started after the time limit"))
    options = "--quick", "--data", "synthetic", "--runs", 1, "--jobs", 1, "--out", tmp_path
    code, out, err = reproduce("table1", *options, "--minutes", 1e-9)
    assert code == 3
    assert "0 of 33 runs finished; run the same command again to continue" in err  # 11 methods, 2 learning rates
    assert out == ""
    assert not (tmp_path / "table1.md").exists()


def test_experiments_that_finished_in_time_are_written(reproduce, labs_of_experiments, tmp_path, monkeypatch):
    def late(lab):
        raise UnfinishedError("the time limit was reached with 3 of 9 runs finished")

    monkeypatch.setitem(ultr.experiments.EXPERIMENTS, "figure3", late)
    code, _, err = reproduce("table1,figure3", "--out", tmp_path)
    assert code == 3
    assert "figure3: the time limit was reached with 3 of 9 runs finished; run the same command again" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["table1.html", "table1.json", "table1.md"]


def test_experiments_are_printed_and_written_in_order(reproduce, labs_of_experiments, tmp_path):
    code, out, err = reproduce("figure3, table1", "--out", tmp_path)
    assert code == 0
    assert [name for name, _ in labs_of_experiments] == ["figure3", "table1"]
    assert out.index("# About figure3") < out.index("# About table1")
    assert "Two runs.\n\n## A section\n\nA text.\n\nYahoo! LETOR set 1 is missing: gone\n\n## Claims" in out
    assert "- data: **held**. so" in out
    assert f"wrote {tmp_path / 'figure3'}.md, {tmp_path / 'table1'}.md, each with .json and .html" in err
    assert (tmp_path / "table1.md").read_text() + "\n" in out
    assert strict((tmp_path / "figure3.json").read_text())["figures"] == {"figure": [1.5]}


def test_without_plotly_pages_are_left_out_with_one_line(reproduce, labs_of_experiments, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    code, _, err = reproduce("all", "--out", tmp_path)
    assert code == 0
    assert err.count("HTML pages are not written; to get them, run: pip install plotly") == 1
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".json", ".md", ".md"]
    assert "each with .json of the same name" in err


def test_all_is_every_experiment(reproduce, labs_of_experiments, tmp_path):
    assert reproduce("all", "--out", tmp_path)[0] == 0
    assert [name for name, _ in labs_of_experiments] == ["table1", "figure3"]


def test_with_json_only_json_is_printed(reproduce, labs_of_experiments, tmp_path):
    code, out, _ = reproduce("all", "--json", "--out", tmp_path)
    assert code == 0
    content = strict(out)
    assert list(content) == ["table1", "figure3"]
    assert content["table1"] == load_json(tmp_path / "table1.json", finite=True)
    claim = {"text": "it works", "data": "data", "verdict": HELD, "evidence": "so"}
    assert content["table1"]["claims"] == [{**claim, "difference": None, "p": 1.0, "is_level": False}]


def test_options_reach_the_experiment(reproduce, labs_of_experiments, tmp_path):
    options = "--runs", 4, "--data", "mq2007, synthetic", "--data-dir", tmp_path, "--device", "cpu", "--out", tmp_path
    options += "--users", "trust", "--sessions", 0, "--logging", "network", "--select", "truth, off-policy"
    assert reproduce("table1", "--quick", *options)[0] == 0
    assert reproduce("table1", "--out", tmp_path)[0] == 0
    (_, lab), (_, default) = labs_of_experiments
    assert (lab.budget, lab.seeds, lab.data, lab.data_dir) == (QUICK, 4, ("mq2007", "synthetic"), str(tmp_path))
    assert (lab.device, lab.out) == ("cpu", tmp_path)
    assert (lab.users, lab.sessions, lab.logging, lab.selections) == ("trust", 0, "network", ("truth", "off-policy"))
    assert (default.budget, default.seeds, default.data, default.data_dir, default.device) == (
        FULL,
        10,
        (),
        None,
        "auto",
    )
    assert (default.users, default.sessions, default.logging, default.selections) == ("pbm", None, "linear", ())


def test_the_docs_have_the_page_of_each_experiment_and_the_command_that_repeats_it(
    reproduce, labs_of_experiments, tmp_path
):
    plain = "--out", tmp_path / "out", "--docs", tmp_path / "docs", "--jobs", 1, "--device", "cpu"
    assert reproduce("table1, figure3", *plain)[0] == 0
    assert sorted(path.name for path in (tmp_path / "docs").iterdir()) == [
        "figure3.json",
        "figure3.md",
        "table1.json",
        "table1.md",
    ]
    for name in ("table1", "figure3"):
        page = (tmp_path / "docs" / f"{name}.md").read_text()
        assert f"Made by `ultr reproduce {name}` from commit " in page
        assert "A text." in page
        saved = load_json(tmp_path / "docs" / f"{name}.json")
        assert saved["figures"] == {"figure": [1.5]}
        assert saved["made"]["command"] == f"ultr reproduce {name}"
    options = "--runs", 2, "--data", "mq2007, synthetic", "--select", "truth", "--sessions", 0
    options += "--users", "trust", "--logging", "network"
    assert reproduce("table1", "--quick", *options, *plain)[0] == 0
    changed = "--runs 2 --data 'mq2007, synthetic' --sessions 0 --select truth --users trust --logging network"
    command = f"ultr reproduce table1 --quick {changed}"
    assert load_json(tmp_path / "docs" / "table1.json")["made"]["command"] == command
    assert f"Made by `{command}` from commit " in (tmp_path / "docs" / "table1.md").read_text()


def test_without_the_option_no_docs_are_written(reproduce, labs_of_experiments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reproduce("table1", "--out", "out")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_time_limit_is_in_minutes(reproduce, labs_of_experiments, tmp_path, monkeypatch):
    monkeypatch.setattr("ultr.cli.reproduce.time.monotonic", lambda: 1000.0)
    assert reproduce("table1", "--out", tmp_path, "--minutes", 2.5)[0] == 0
    assert reproduce("table1", "--out", tmp_path)[0] == 0
    assert [lab.workers.until for _, lab in labs_of_experiments] == [1150.0, float("inf")]


@pytest.mark.parametrize(("option", "value"), [("--runs", -1), ("--minutes", "soon"), ("--sessions", -1)])
def test_options_out_of_range_are_errors(reproduce, labs_of_experiments, tmp_path, option, value):
    code, _, err = reproduce("table1", "--out", tmp_path, option, value)
    assert code == 2
    assert option in err
    assert not labs_of_experiments


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--select", "truht", "'truht' is not one of off-policy, truth; did you mean 'truth'?"),
        ("--select", "off-policy,", "'' is not one of off-policy, truth"),
        ("--logging", "netwerk", "did you mean 'network'?"),
        ("--users", "trsut", "did you mean 'trust'?"),
    ],
)
def test_unknown_names_are_errors_before_any_work(reproduce, labs_of_experiments, tmp_path, option, value, message):
    code, out, err = reproduce("table1", "--out", tmp_path / "out", option, value)
    assert code == 2
    assert message in err
    assert out == ""
    assert not labs_of_experiments
    assert not (tmp_path / "out").exists()


def test_a_negative_number_of_jobs_is_an_error(reproduce, labs_of_experiments, tmp_path):
    code, _, err = reproduce("table1", "--out", tmp_path, "--jobs", -1)
    assert code == 2
    assert "--jobs" in err
