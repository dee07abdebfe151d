"""Read hostile files: each is read, or rejected with one message, and nothing is changed.

The readers get all files. Each command gets three of them, and all of them under the marker `long`.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardening.hostile import (
    ITEMS,
    KINDS,
    base,
    clean,
    files,
    holds,
    parquet_bytes,
    propensities,
    spoilt_json,
    with_column,
)
from hardening.hostile_cases import CASES, LARGE, PROPENSITIES, TEXTS, Case, run_cases
from ultr import cli
from ultr.bias.explore import SwapTable
from ultr.bias.propensities import read_bias_theta, read_propensities
from ultr.datasets.users import Dwell, read_dwell_times
from ultr.errors import UltrError
from ultr.log import Log, read_log
from ultr.log.readers import read_batches, read_columns
from ultr.log.shards import Shards
from ultr.rankers.model import load_model
from ultr.report import load_run
from ultr.serving.export import export_run
from ultr.serving.exported import load_exported
from ultr.serving.http import served

SMALL = ("--device", "cpu", "--steps", 2, "--set", "network.batch=16", "--set", "network.evaluate_every=2")
NETWORK = (*SMALL, "--ranker", "mlp", "--set", "network.hidden=4", "--set", "network.bias_steps=3")
METRICS = "ndcg@10,feedback-ndcg@10,off-policy-reward@10"


class Command(NamedTuple):
    """The arguments of a command, made from a file and an output, and a check of its results."""

    arguments: Callable[[Path, Path, SimpleNamespace], tuple[object, ...]]
    check: Callable[[SimpleNamespace, Path], None]
    out: str | None = None  # the name of the output, if there is one
    overwrites: bool = True


def finite_json(text: str) -> Any:
    def reject(constant: str) -> None:
        raise AssertionError(f"{constant} in {text[:300]}")

    return json.loads(text, parse_constant=reject)


def prints_json(done: SimpleNamespace, _out: Path) -> None:
    assert finite_json(done.stdout)


def prints(done: SimpleNamespace, _out: Path) -> None:
    assert done.stdout or done.stderr


def is_lists(_done: SimpleNamespace, out: Path) -> None:
    for split in ("train", "validation", "test"):
        if (out / split).is_dir():
            assert len(Shards(out, split).read_all())


def is_bias(_done: SimpleNamespace, out: Path) -> None:
    table = out / "propensities.csv"
    assert {p.name for p in out.iterdir()} - {table.name} == {"bias.html", "bias.json"}
    finite_json((out / "bias.json").read_text())
    values = pa.csv.read_csv(table)["propensity"].to_pylist() if table.exists() else [1]
    assert values, "a table has rows"
    assert all(0 < value <= 1 for value in values), values


def is_swaps(_done: SimpleNamespace, out: Path) -> None:
    assert abs(sum(SwapTable.read(out).probabilities) - 1) < 1e-9


def is_judgments(_done: SimpleNamespace, out: Path) -> None:
    table = pa.csv.read_csv(out)
    low, middle, high = (table[name].to_numpy() for name in ("low", "relevance", "high"))
    assert np.isfinite(high).all()
    assert ((low >= 0) & (low <= middle) & (middle <= high)).all()


def is_run(_done: SimpleNamespace, out: Path) -> None:
    model = load_model(out)
    rows = np.zeros((3, len(model.feature_names)), np.float32)
    assert np.isfinite(model.score_features(rows)).all()
    for path in out.rglob("*.json*"):
        if path.name != "xgboost.json":
            for line in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
                finite_json(line)


def is_scores(_done: SimpleNamespace, out: Path) -> None:
    table = pq.read_table(out) if out.suffix == ".parquet" else pa.csv.read_csv(out)
    scores = table["score"].to_numpy()
    assert len(scores)
    assert np.isfinite(scores).all()


def is_comparison(_done: SimpleNamespace, out: Path) -> None:
    finite_json((out / "comparison.json").read_text())
    assert (out / "comparison.html").stat().st_size


def is_log(_done: SimpleNamespace, out: Path) -> None:
    assert len(read_log(out))


def is_page(_done: SimpleNamespace, out: Path) -> None:
    assert "</html>" in out.read_text()[-200:]


def is_export(_done: SimpleNamespace, out: Path) -> None:
    exported = load_exported(out)
    assert exported.session(threads=1)
    finite_json((out / "model.json").read_text())


def serves(done: SimpleNamespace, _out: Path) -> None:
    assert "serving version" in done.stderr


TREES = ("--ranker", "lightgbm", "--set", "trees.parameters.min_data_in_leaf=2", "--steps", 2)
TREES += ("--method", "pointwise", "--set", "training.select=feedback-ndcg@10")
COMPARE = ("--methods", "pointwise", "--seeds", 1, "--lrs", 0.1, "--jobs", 1)
OF_LOGS: dict[str, Command] = {
    "describe": Command(lambda f, o, h: ("describe", f), prints),
    "describe --json": Command(lambda f, o, h: ("describe", f, "--json"), prints_json),
    "score": Command(lambda f, o, h: ("score", h.run, f, "--out", o, "--device", "cpu"), is_scores, "scores.parquet"),
    "score to CSV": Command(
        lambda f, o, h: ("score", h.run, f, "--out", o, "--device", "cpu"), is_scores, "scores.csv"
    ),
    "score by trees": Command(
        lambda f, o, h: ("score", h.trees, f, "--out", o, "--device", "cpu"), is_scores, "scores.parquet"
    ),
    "evaluate": Command(
        lambda f, o, h: ("evaluate", h.run, f, "--metrics", METRICS, "--json", "--device", "cpu"), prints_json
    ),
    "evaluate trees": Command(lambda f, o, h: ("evaluate", h.trees, f, "--metrics", "feedback-ndcg@10"), prints),
    "prepare": Command(
        lambda f, o, h: ("prepare", f, "--out", o, "--threads", 1, "--memory", "256MB"), is_lists, "lists"
    ),
    "prepare --events": Command(
        lambda f, o, h: ("prepare", h.unseen, "--events", f, "--out", o, "--threads", 1), is_lists, "lists"
    ),
    "bias": Command(lambda f, o, h: ("bias", f, "--out", o, "--bootstrap", 10, "--sample", 1000), is_bias, "bias"),
    "bias --json": Command(lambda f, o, h: ("bias", f, "--bootstrap", 10, "--json"), prints_json),
    "explore": Command(lambda f, o, h: ("explore", f, "--out", o), is_swaps, "swaps.csv"),
    "explore --json": Command(lambda f, o, h: ("explore", f, "--json"), prints_json),
    "judgments": Command(lambda f, o, h: ("judgments", f, "--out", o), is_judgments, "judgments.csv"),
    "train": Command(lambda f, o, h: ("train", f, "--out", o, *NETWORK), is_run, "run"),
    "train pointwise": Command(
        lambda f, o, h: ("train", f, "--out", o, "--method", "pointwise", "--ranker", "linear", *SMALL), is_run, "run"
    ),
    "train trees": Command(lambda f, o, h: ("train", f, "--out", o, *TREES), is_run, "run"),
    "compare": Command(
        lambda f, o, h: ("compare", f, "--out", o, *COMPARE, *NETWORK), is_comparison, "comparison", overwrites=False
    ),
    "simulate": Command(lambda f, o, h: ("simulate", f, "--out", o, "--share", 0.5), is_log, "log.parquet"),
    "export --rows": Command(lambda f, o, h: ("export", h.without_rows, "--out", o, "--rows", f), is_export, "model"),
}


OF_RUNS: dict[str, Command] = {
    "evaluate run": Command(lambda f, o, h: ("evaluate", f, h.log, "--device", "cpu", "--json"), prints_json),
    "score run": Command(lambda f, o, h: ("score", f, h.log, "--out", o, "--device", "cpu"), is_scores, "scores.csv"),
    "report": Command(lambda f, o, h: ("report", f, "--out", o), is_page, "report.html"),
    "export": Command(lambda f, o, h: ("export", f, "--out", o), is_export, "model"),
    "serve": Command(lambda f, o, h: ("serve", f, "--port", 0), serves),
    "train --warm-start": Command(
        lambda f, o, h: ("train", h.log, "--out", o, "--warm-start", f, *NETWORK), is_run, "run"
    ),
    "train --bias": Command(lambda f, o, h: ("train", h.log, "--out", o, "--bias", f, *NETWORK), is_run, "run"),
}
OF_PROPENSITIES: dict[str, Command] = {
    "bias --propensities": Command(
        lambda f, o, h: ("bias", h.log, "--propensities", f, "--out", o, "--bootstrap", 10), is_bias, "bias"
    ),
    "train --propensities": Command(
        lambda f, o, h: ("train", h.log, "--out", o, "--propensities", f, *NETWORK), is_run, "run"
    ),
}
OF_TEXTS: dict[str, Command] = {
    "simulate --dwell-file": Command(
        lambda f, o, h: ("simulate", h.graded, "--out", o, "--share", 0.5, "--dwell-file", f), is_log, "log.parquet"
    ),
    "serve --token-file": Command(lambda f, o, h: ("serve", h.trees, "--port", 0, "--token-file", f), serves),
}
COMMANDS = OF_LOGS | OF_RUNS | OF_PROPENSITIES | OF_TEXTS
SLOW = {"export --rows"}  # torch takes seconds to export
EVERY = 10  # one in 10 rejected files is tried again with an existing output
tried: Counter[tuple[str, str]] = Counter()


@pytest.fixture(autouse=True)
def export_in_this_process(monkeypatch):
    """A server exports a run in another process, which takes seconds to start."""
    monkeypatch.setattr(served, "export_in_process", lambda run, out, stopped=None: export_run(run, out).folder)


@pytest.fixture(scope="session")
def here(tmp_path_factory) -> SimpleNamespace:
    """The logs and runs that commands need in addition to the hostile file."""
    folder = tmp_path_factory.mktemp("here")
    paths = SimpleNamespace(log=folder / "log.parquet", unseen=folder / "unseen.parquet", graded=folder / "graded.txt")
    paths.log.write_bytes(clean(".parquet"))
    paths.graded.write_bytes(clean(".txt"))
    pq.write_table(pq.read_table(paths.log).drop_columns(["click", "dwell"]), paths.unseen)
    paths.run, paths.trees, paths.without_rows = folder / "run", folder / "trees", folder / "without"
    for name, out in (("train", paths.run), ("train trees", paths.trees)):
        arguments = OF_LOGS[name].arguments(paths.log, out, paths)
        typer.main.get_command(cli.app)(list(map(str, arguments)), standalone_mode=False)
    shutil.copytree(paths.run, paths.without_rows)
    (paths.without_rows / "model" / "rows.safetensors").unlink()
    return paths


@pytest.fixture(scope="session", autouse=True)
def write_counts() -> Iterator[None]:
    """Append the number of inputs, by command and outcome, to the file that ULTR_COUNTS names."""
    yield
    if path := os.environ.get("ULTR_COUNTS"):
        counts: dict[str, dict[str, int]] = {}
        for (command, outcome), count in sorted(tried.items()):
            counts.setdefault(command, {})[outcome] = count
        with Path(path).open("a") as file:
            file.write(json.dumps({"test": "hostile files", "tried": counts, "total": tried.total()}) + "\n")


@pytest.fixture
def attempt(ultr, here, tmp_path, monkeypatch) -> Iterator[Callable[[str, Callable[[Path], Path]], str]]:
    """Run a command with a file in an empty folder; return whether it works or rejects the file, or fail."""
    monkeypatch.setattr(cli, "app", built())
    monkeypatch.setattr("uvicorn.Server.run", lambda server, **_: server._on_start())
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    interval, numbers = sys.getswitchinterval(), count()

    def run(name: str, make: Callable[[Path], Path]) -> str:
        command, folder = COMMANDS[name], tmp_path / str(next(numbers))
        (folder / "in").mkdir(parents=True)
        path, out = make(folder / "in"), folder / (command.out or "none")
        before, arguments = content(folder), command.arguments(path, out, here)
        done = ultr(*arguments)
        about = f"{name}: {path.name[-60:]!r}: exit {done.returncode}: {done.stderr[:1000]}"
        assert "Traceback" not in done.stderr, about
        assert "Warning" not in done.stderr, about
        if done.returncode == 0:
            assert not list(folder.rglob("*.partial")), about
            command.check(done, out)
        else:
            check_rejection(done, path, about)
            assert content(folder) == before, about
            if command.overwrites and command.out is not None and tried[name, "rejected"] % EVERY == 0:
                check_existing_output(name, arguments, out)
        outcome = "works" if done.returncode == 0 else "rejected"
        tried[name, outcome] += 1
        shutil.rmtree(folder)
        return outcome

    def check_existing_output(name: str, arguments: tuple[object, ...], out: Path) -> None:
        """Check that an existing output is unchanged, without `--overwrite` and if the input is rejected."""
        if out.suffix:
            out.write_text("precious")
        elif out.name == "run":
            shutil.copytree(here.run, out)
        else:
            out.mkdir()
            (out / "precious").write_text("kept")
        before = content(out.parent)
        for more in ((), ("--overwrite",)):
            done = ultr(*arguments, *more)
            assert done.returncode in (1, 2, 5), (name, done.stderr)
            assert content(out.parent) == before, (name, more, done.stderr)

    yield run
    for number, handler in handlers.items():  # a server replaces these
        signal.signal(number, handler)
    sys.setswitchinterval(interval)
    gc.unfreeze()


@functools.cache
def built() -> Any:
    """Build the commands once, because this takes longer than most rejections."""
    return typer.main.get_command(cli.app)


def check_rejection(done: SimpleNamespace, path: Path, about: str) -> None:
    """Check that there is one error message, which names the file, a column or an option, and has a hint."""
    assert done.returncode in (1, 2, 5), about
    assert done.stdout == "", about
    if done.returncode == 2 and done.stderr.startswith("Usage:"):
        return
    lines = done.stderr.strip("\n").split("\n")
    assert [line.startswith("error: ") for line in lines] == [False] * (len(lines) - 1) + [True], about
    check_message(lines[-1], path, about)


def check_message(message: str, path: Path, about: str) -> None:
    """Check that a message names the file, a column or an option, and has a hint."""
    assert path.name in message or repr(path.name)[1:-1] in message or re.search(r"'.+'|--[a-z]", message), about
    assert "; " in message, about


def content(folder: Path) -> dict[str, bytes | None]:
    paths = sorted(folder.rglob("*")) if folder.is_dir() else []
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in paths}


# Readers


def check_log(log: Log) -> None:
    """Check that the numbers of a log are usable."""
    assert len(log)
    assert (np.diff(log.offsets) > 0).all()
    assert not np.isinf(log.features).any()
    assert log.positions is None or (log.positions >= 0).all()
    for values in (*log.actions.values(), log.relevance):
        assert values is None or (np.isfinite(values).all() and (values >= 0).all())
    assert log.weights is None or (np.isfinite(log.weights).all() and (log.weights > 0).all())


def read_all_batches(path: Path) -> None:
    for batch in read_batches(path, feature_names=("f1", "f2")).batches:
        check_log(batch.log)


def fit_dwell_times(path: Path) -> None:
    assert np.isfinite(Dwell.fit(read_dwell_times(path)).mu).all()


READERS: dict[str, Callable[[Path], object]] = {
    "read_log": lambda path: check_log(read_log(path)),
    "read_columns": read_columns,
    "read_batches": read_all_batches,
}


def read(name: str, function: Callable[[Path], object], make: Callable[[Path], Path], folder: Path) -> str:
    """Read a file in an empty folder; return whether this works or the file is rejected, or fail."""
    folder.mkdir(parents=True)
    path = make(folder)
    before = content(folder)
    try:
        function(path)
        outcome = "works"
    except (UltrError, OSError) as error:
        if getattr(error, "filename", None) is None:  # otherwise it is of the file system, and commands print its path
            check_message(str(error), path, f"{name}: {path.name[-60:]!r}: {error}")
        outcome = "rejected"
    assert content(folder) == before, f"{name} changed a file"
    tried[name, outcome] += 1
    return outcome


def read_each(name: str, function: Callable[[Path], object], cases: Iterable[Case], folder: Path) -> dict[str, str]:
    """Read all cases; return the outcome of each, or fail with a list of those that are neither read nor rejected."""
    outcomes, failures = {}, []
    for number, case in enumerate(cases):
        try:
            outcomes[case.name] = read(name, function, case.make, folder / str(number))
        except (Exception, AssertionError) as error:
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)
    return outcomes


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_reads_or_rejects_every_hostile_file(reader, tmp_path):
    outcomes = read_each(reader, READERS[reader], CASES.values(), tmp_path)
    assert len(outcomes) == len(CASES)
    assert set(outcomes.values()) == {"works", "rejected"}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_reads_or_rejects_drawn_files(reader, tmp_path):
    numbers = count()

    @drawn(100)
    @given(files())
    def each(file):
        read(reader, READERS[reader], holds(file[1], file[0]), tmp_path / str(next(numbers)))

    each()


def test_a_reader_reads_valid_files_of_every_kind(tmp_path):
    """Valid files must work, because hostile files could otherwise be rejected for the wrong reason."""
    cases = [Case(suffix, holds(clean(suffix), suffix)) for suffix in KINDS]
    for name, function in READERS.items():
        assert set(read_each(name, function, cases, tmp_path / name).values()) == {"works"}


def test_the_reader_of_propensities_reads_or_rejects_every_hostile_table(tmp_path):
    outcomes = read_each("read_propensities", read_propensities, PROPENSITIES.values(), tmp_path)
    assert outcomes["good propensities"] == "works"
    assert outcomes["two of one position"] == "rejected"


def test_dwell_times_are_read_or_rejected(tmp_path):
    outcomes = read_each("read_dwell_times", fit_dwell_times, TEXTS.values(), tmp_path)
    assert outcomes["dwell times"] == "works"
    assert outcomes["dwell times of NaN"] == "rejected"


LOADERS: dict[str, Callable[[Path], object]] = {
    "load_model": load_model,
    "load_run": load_run,
    "read_bias_theta": lambda run: read_bias_theta(run / "bias.json"),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_loader_loads_or_rejects_every_spoilt_run(loader, here, tmp_path):
    outcomes = read_each(loader, LOADERS[loader], run_cases(here.run).values(), tmp_path / "network")
    assert set(outcomes.values()) == {"works", "rejected"}
    if loader != "read_bias_theta":  # trees by the method pointwise have no bias model
        outcomes = read_each(loader, LOADERS[loader], run_cases(here.trees).values(), tmp_path / "trees")
        assert set(outcomes.values()) == {"works", "rejected"}


# Commands

THREE = ("a .parquet cut at 50%", "request has 'None'", "f1 is missing")  # cannot be opened, a wrong value, an odd log
THREE_PROPENSITIES = ("noise", "two of one position", "one position")
THREE_TEXTS = ("NUL", "a dwell time of words", "a missing path")
THREE_OF_RUNS = ("model/model.json cut", "config.json []", "nothing left")


@pytest.mark.parametrize("command", OF_LOGS)
def test_a_command_accepts_or_rejects_three_hostile_files(attempt, command):
    names = THREE[:2] if command in SLOW else THREE
    outcomes = [attempt(command, CASES[name].make) for name in names]
    assert outcomes[0] == "rejected"
    assert outcomes[1] == "rejected" or command == "prepare --events"  # this leaves out events without a request


@pytest.mark.long
@pytest.mark.parametrize("command", OF_LOGS)
def test_commands_accept_all_hostile_files_or_reject_them(attempt, command):
    for case in CASES.values():
        attempt(command, case.make)


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("command", OF_LOGS)
def test_commands_accept_large_files_or_reject_them(attempt, command, name):
    attempt(command, LARGE[name].make)


@pytest.mark.parametrize("command", [pytest.param(c, marks=pytest.mark.long) if c in SLOW else c for c in OF_LOGS])
def test_a_valid_log_works_with_every_command(attempt, command):
    suffix = ".txt" if command == "simulate" else ".parquet"
    assert attempt(command, holds(clean(suffix), suffix)) == "works"


@pytest.mark.parametrize("name", ["position has nan", "relevance has nan"])
def test_prepare_finds_nan_that_the_statistics_of_parquet_leave_out(attempt, name):
    assert attempt("prepare", CASES[name].make) == "rejected"


@pytest.mark.parametrize("name", ["no label is positive", "labels are too large", "one request"])
def test_a_log_without_information_does_not_change_an_older_run(attempt, here, monkeypatch, name):
    """The log is rejected before the run is replaced."""
    actions = {"no label is positive": 0.0, "labels are too large": 3e38}
    table = base()
    for action in ("click", "dwell"):
        table = with_column(table, action, [actions.get(name, 1.0)] * table.num_rows)
    monkeypatch.setitem(tried, ("train", "rejected"), 0)  # so that it is tried with an existing run
    table = table.slice(0, ITEMS) if name == "one request" else table
    assert attempt("train", holds(parquet_bytes(table), ".parquet")) == "rejected"


def test_evaluation_does_not_depend_on_the_order_of_columns(ultr, here, tmp_path):
    other = tmp_path / "other.parquet"
    table = base()
    pq.write_table(table.select(table.column_names[::-1]).append_column("f0", table["f1"]), other)
    arguments = ("--metrics", METRICS, "--json", "--device", "cpu")
    found = [finite_json(ultr("evaluate", here.run, log, *arguments).stdout) for log in (here.log, other)]
    before, after = ({m: v["mean"] for m, v in each["rankers"][str(here.run)].items()} for each in found)
    assert before == pytest.approx(after, rel=1e-4)


@pytest.mark.parametrize("command", OF_PROPENSITIES)
def test_a_command_accepts_or_rejects_three_tables_of_propensities(attempt, command):
    outcomes = [attempt(command, PROPENSITIES[name].make) for name in THREE_PROPENSITIES]
    assert outcomes[:2] == ["rejected", "rejected"]


@pytest.mark.long
@pytest.mark.parametrize("command", OF_PROPENSITIES)
def test_commands_accept_all_tables_of_propensities_or_reject_them(attempt, command):
    outcomes = {name: attempt(command, case.make) for name, case in PROPENSITIES.items()}
    assert outcomes["good propensities"] == "works"
    assert outcomes["two of one position"] == "rejected"


def test_simulate_rejects_three_files_of_dwell_times(attempt):
    assert {attempt("simulate --dwell-file", TEXTS[name].make) for name in THREE_TEXTS} == {"rejected"}


def test_a_server_accepts_or_rejects_every_token_file(attempt):
    """The command itself reads the token, so it gets all of the files."""
    outcomes = {attempt("serve --token-file", case.make) for case in TEXTS.values()}
    assert outcomes == {"works", "rejected"}


@pytest.mark.long
def test_simulate_accepts_or_rejects_all_files_of_dwell_times(attempt):
    outcomes = {attempt("simulate --dwell-file", case.make) for case in TEXTS.values()}
    assert outcomes == {"works", "rejected"}


# Run folders


@pytest.mark.parametrize("command", OF_RUNS)
def test_a_command_accepts_or_rejects_three_spoilt_runs(attempt, here, command):
    cases = run_cases(here.trees)
    for name in THREE_OF_RUNS:
        attempt(command, cases[name].make)


@pytest.mark.long
@pytest.mark.parametrize("command", OF_RUNS)
def test_any_spoilt_run_works_or_is_rejected(attempt, here, command):
    for case in [*run_cases(here.run).values(), *run_cases(here.trees).values()]:
        attempt(command, case.make)


# Files that are drawn


def drawn(examples: int) -> Callable[[Any], Any]:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples, suppress_health_check=checks, deadline=None)


@pytest.mark.long
@pytest.mark.parametrize(
    "command", ["describe --json", "score", "score to CSV", "score by trees", "evaluate", "simulate"]
)
def test_thousands_of_drawn_files_are_used_or_rejected(attempt, command):
    @drawn(1000)
    @given(files())
    def each(file):
        attempt(command, holds(file[1], file[0]))

    each()


@pytest.mark.long
@pytest.mark.parametrize("command", ["prepare", "bias", "train", "train pointwise", "train trees", "evaluate trees"])
def test_hundreds_of_drawn_files_are_learned_from_or_rejected(attempt, command):
    @drawn(200)
    @given(files())
    def each(file):
        attempt(command, holds(file[1], file[0]))

    each()


@pytest.mark.long
@pytest.mark.parametrize("command", OF_PROPENSITIES)
def test_drawn_propensities_work_or_are_rejected(attempt, command):
    @drawn(200)
    @given(propensities())
    def each(file):
        attempt(command, holds(file[1], file[0]))

    each()


@pytest.mark.long
@pytest.mark.parametrize("command", ["evaluate run", "score run", "report", "train --bias"])
def test_runs_with_drawn_json_work_or_are_rejected(attempt, here, command):
    @drawn(200)
    @given(st.data())
    def each(data):
        path = data.draw(st.sampled_from(sorted(p.relative_to(here.run) for p in here.run.rglob("*.json"))))
        text = data.draw(spoilt_json((here.run / path).read_text()))

        def make(folder: Path) -> Path:
            shutil.copytree(here.run, folder / "run")
            (folder / "run" / path).write_text(text)
            return folder / "run"

        attempt(command, make)

    each()


# Pipes


@pytest.mark.parametrize("command", [*OF_LOGS, *OF_PROPENSITIES, "simulate --dwell-file"])
def test_a_pipe_is_rejected_before_it_is_opened(attempt, command):
    """Opening a pipe waits for a process that writes to it, which may never come."""
    over, opened = threading.Event(), []

    def watch(pipe: Path) -> None:
        while not over.wait(0.01):
            try:  # succeeds as soon as the command opens the pipe for reading
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
                opened.append(pipe)
            except OSError:
                continue

    def make(folder: Path) -> Path:
        pipe = folder / "hostile.parquet"
        os.mkfifo(pipe)
        threading.Thread(target=watch, args=[pipe]).start()
        return pipe

    try:
        assert attempt(command, make) == "rejected"
    finally:
        over.set()
    assert not opened
