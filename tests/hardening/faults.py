"""Work that is disturbed: killed or refused the disk at its n-th touch of it, or killed at a random moment.

`python -m hardening.faults HOW CASE ...` makes this a process that has imported all there is to import and has done no
work, so that it has no threads: what is disturbed are its forks, which start at once.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb  # noqa: F401  # what is imported at need is imported here, once for all forks
import ibis.backends.duckdb  # noqa: F401
import lightgbm  # noqa: F401
import numpy as np
import pyarrow.csv
import pyarrow.dataset  # noqa: F401
import torch
import torch._dynamo

from conftest import make_shown_log
from lists_folder import write_lists
from ultr.cli.bias import _write as write_bias
from ultr.compare import compare
from ultr.datasets.base import Dataset
from ultr.datasets.cache import cached
from ultr.errors import UltrError
from ultr.export import export_run
from ultr.log import Log, read_log, write_log
from ultr.log.prepare import prepare_lists
from ultr.models import load_model
from ultr.preparing import RunConfig
from ultr.propensity.audit import audit
from ultr.report import write_report
from ultr.runs import run_training
from ultr.scoring import score_file
from ultr.simulate import User, simulate_log
from ultr.training import TREE_TRAINING, TrainingOptions

REFUSED = 3  # exit code of a fork that ended in an UltrError, as it should
KNOWN = {str(position): 1 / position for position in range(1, 20)}
SMALL = {"steps": 4, "bias_steps": 3, "batch": 16, "evaluate_every": 2, "device": "cpu"}
Work = Callable[[Path, Path], object]  # from a folder of inputs to one of outputs


def feedback_log(requests: int = 80, seed: int = 0) -> Log:
    log, _ = simulate_log(make_shown_log(requests=requests, seed=seed), User(), seed=seed)
    return replace(log, relevance=None)


def network(data: Path, **changes: Any) -> RunConfig:
    training = TrainingOptions(**{**SMALL, **changes.pop("training", {})})
    ranker = {"hidden": [8], "dropout": 0.2}
    return RunConfig(data=str(data), ranker_options=ranker, propensities=KNOWN, training=training, **changes)


def trees(data: Path, **changes: Any) -> RunConfig:
    training = replace(TREE_TRAINING, **{**SMALL, "patience": 0, **changes.pop("training", {})})
    usual = {"ranker": "lightgbm", "propensities": KNOWN, "select": "feedback-ndcg@10", **changes}
    return RunConfig(data=str(data), training=training, **usual)


def make_inputs(inputs: Path, cases: set[str]) -> None:
    """What these cases need."""
    inputs.mkdir()
    write_log(feedback_log(), inputs / "log.parquet")
    write_log(feedback_log(seed=1), inputs / "other.parquet")
    if cases & {"long prepare", "long score"}:
        write_log(feedback_log(4000), inputs / "long.parquet")
    if cases & {"stream", "long stream"}:
        write_lists(feedback_log(), inputs / "lists", group=8)
    if cases & {"score", "long score", "report"}:
        run_training(network(inputs / "log.parquet"), inputs / "run")
    if cases & {"export", "report", "overwrite"}:
        run_training(trees(inputs / "log.parquet"), inputs / "trees")


def train(config: RunConfig, out: Path) -> None:
    run_training(config, out / "run", resume=True, checkpoint_seconds=0)


def train_anew(inputs: Path, out: Path) -> None:
    """Over a finished run with another seed."""
    run_training(network(inputs / "log.parquet"), out / "run", overwrite=True, checkpoint_seconds=0)


def score(inputs: Path, out: Path, name: str = "log.parquet") -> None:
    score_file(load_model(inputs / "run"), inputs / name, out / "scores.parquet", overwrite=True)


def cache(inputs: Path, out: Path) -> None:
    def build() -> Dataset:
        log = read_log(inputs / "log.parquet")
        return Dataset("small", log, log, log, max_grade=4, fingerprint="x")

    os.environ["ULTR_CACHE"] = str(out)
    found = cached("small", "key", build)
    np.testing.assert_array_equal(found.train.features, read_log(inputs / "log.parquet").features)


def compared(inputs: Path, out: Path) -> None:
    base = replace(network(inputs / "log.parquet"), select="feedback-ndcg@10")
    compare(base, ["pointwise"], out, seeds=2, rates=[0.01], jobs=1)


def bias(inputs: Path, out: Path) -> None:
    found = audit(read_log(inputs / "log.parquet").without_features(), bootstrap=2)
    write_bias(found, out / "bias", "log", overwrite=True)


def long_network(inputs: Path, out: Path) -> None:
    train(network(inputs / "log.parquet", training={"steps": 80, "bias_steps": 20, "evaluate_every": 10}), out)


def long_trees(inputs: Path, out: Path) -> None:
    train(trees(inputs / "log.parquet", training={"steps": 40, "evaluate_every": 4}), out)


def long_stream(inputs: Path, out: Path) -> None:
    longer = {"steps": 50, "bias_steps": 10, "evaluate_every": 10}
    train(network(inputs / "lists", stream="yes", training=longer), out)


@dataclass(frozen=True)
class Case:
    """Work that can be asked for again after it was cut short, and what is there before it."""

    work: Work
    before: Work = lambda _inputs, _out: None
    whole: str | None = None  # the output that is, at any moment, either as it was before or as it will be


def before_prepare(inputs: Path, out: Path) -> None:
    prepare_lists(inputs / "other.parquet", out / "lists", threads=1)


CASES = {
    "network": Case(lambda i, o: train(network(i / "log.parquet"), o), whole="run/model"),
    "trees": Case(lambda i, o: train(trees(i / "log.parquet"), o), whole="run/model"),
    "stream": Case(lambda i, o: train(network(i / "lists", stream="yes"), o), whole="run/model"),
    "overwrite": Case(train_anew, lambda i, o: shutil.copytree(i / "trees", o / "run") and None, "run/model"),
    "prepare": Case(
        lambda i, o: prepare_lists(i / "log.parquet", o / "lists", overwrite=True, threads=1), before_prepare, "lists"
    ),
    "score": Case(score, lambda i, o: score(i, o, "other.parquet"), "scores.parquet"),
    "write_log": Case(
        lambda i, o: write_log(read_log(i / "log.parquet"), o / "log.parquet", overwrite=True),
        lambda i, o: shutil.copy(i / "other.parquet", o / "log.parquet") and None,
        "log.parquet",
    ),
    "export": Case(
        lambda i, o: export_run(i / "trees", o / "model", overwrite=True),
        lambda i, o: (export_run(i / "trees", o / "model").folder / "README.md").write_text("older"),
        "model",
    ),
    "report": Case(
        lambda i, o: write_report([i / "run"], o / "page.html", overwrite=True),
        lambda i, o: write_report([i / "trees"], o / "page.html") and None,
        "page.html",
    ),
    "bias": Case(bias, whole="bias"),
    "cache": Case(cache, whole="small-key"),
    "compare": Case(compared, whole="comparison.json"),
    "long network": Case(long_network),
    "long trees": Case(long_trees),
    "long stream": Case(long_stream),
    "long prepare": Case(
        lambda i, o: prepare_lists(i / "long.parquet", o / "lists", overwrite=True, threads=1), whole="lists"
    ),
    "long score": Case(lambda i, o: score(i, o, "long.parquet"), whole="scores.parquet"),
}


# --- Faults -----------------------------------------------------------------------------------------------------------

WRITES = {"open", "os.mkdir", "tempfile.mkdtemp", "fsync"}  # what a full disk refuses
TOUCHES = WRITES | {"os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate", "os.link"}


class Touches:
    """Counts how often Python touches the disk below a folder, and does something at one of the times; what is done
    instead of writing is done from then on.
    """

    def __init__(self, folder: Path, at: int, do: Callable[[], None], events: set[str]) -> None:
        self.folder, self.at, self.do, self.events = str(folder), at, do, events
        self.count = self.writes = 0
        self._fsync = os.fsync
        os.fsync = self._sync  # type: ignore[assignment]
        sys.addaudithook(self._hear)

    def _sync(self, descriptor: int) -> None:
        self._touched("fsync")
        self._fsync(descriptor)

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and not (given[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if event in self.events:
            paths = [os.fsdecode(path) for path in given if isinstance(path, str | bytes)]
            if any(path.startswith(self.folder) or not path.startswith("/") for path in paths[:2]):
                self._touched(event)

    def _touched(self, event: str) -> None:
        if event in self.events:
            self.count, self.writes = self.count + 1, self.writes + (event in WRITES)
            if self.at and (self.count == self.at or (self.count > self.at and self.do is be_full)):
                self.do()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def start(work: Callable[[], object]) -> tuple[int, int]:
    """A fork that does some work; its process, and where it leaves a number or what went wrong."""
    reading, writing = os.pipe()
    if (process := os.fork()) == 0:
        code, left = 1, ""
        try:
            warnings.simplefilter("error", UserWarning)  # a checkpoint that was passed over is one
            left, code = str(work()), 0
        except UltrError as error:
            left, code = str(error), REFUSED
        except BaseException:
            left = traceback.format_exc()
        finally:
            os.write(writing, left.encode()[-10_000:])
            os._exit(code)
    os.close(writing)
    return process, reading


def ended(process: int, reading: int) -> tuple[int, str]:
    """The exit code of a fork, or minus the signal that ended it, and what it left."""
    _, status = os.waitpid(process, 0)
    with os.fdopen(reading) as pipe:
        return os.waitstatus_to_exitcode(status), pipe.read()


def done(work: Callable[[], object]) -> str:
    code, left = ended(*start(work))
    assert code == 0, left
    return left


def contents(path: Path) -> dict[str, int]:
    """The sums of all files below a path, or of one, but for locks."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return {p.relative_to(path).as_posix(): zlib.crc32(p.read_bytes()) for p in files if not p.name.endswith(".lock")}


class Bench:
    """A case: its inputs, what is there before, and what comes of it undisturbed."""

    def __init__(self, folder: Path, inputs: Path, name: str) -> None:
        self.inputs, self.case = inputs, CASES[name]
        self.first, self.out = folder / f"{name} first", folder / "out"
        self.first.mkdir()
        done(lambda: self.case.before(inputs, self.first))
        self.fresh()
        begun = time.monotonic()
        self.touches, self.writes = map(int, done(self.counted).split())
        self.seconds = time.monotonic() - begun
        self.expected = contents(self.out)
        assert self.expected, "nothing was written"
        whole = self.case.whole or "nothing"
        self.before, self.after = contents(self.first / whole), contents(self.out / whole)

    def fresh(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self.first, self.out)

    def work(self) -> None:
        self.case.work(self.inputs, self.out)

    def counted(self) -> str:
        touches = Touches(self.out, 0, die, TOUCHES)
        self.work()
        return f"{touches.count} {touches.writes}"

    def disturbed(self, at: int, do: Callable[[], None], events: set[str]) -> None:
        Touches(self.out, at, do, events)
        self.work()

    def check_left(self) -> None:
        """What stands under its name is whole: as it was before, or as it will be."""
        if self.case.whole is None:
            return
        now = contents(self.out / self.case.whole)
        assert now in (self.before, self.after), f"neither as before nor complete: {sorted(now)}"

    def check_same(self) -> None:
        found = contents(self.out)
        wrong = [name for name in {*found, *self.expected} if found.get(name) != self.expected.get(name)]
        assert not wrong, f"differs from the undisturbed: {sorted(wrong)}"
        left = [p for p in self.out.rglob("*.partial") if any(p.iterdir())]
        assert not left, f"left behind: {left}"

    def killed_at(self, touch: int) -> str:
        self.fresh()
        code, left = ended(*start(lambda: self.disturbed(touch, die, TOUCHES)))
        assert code == -signal.SIGKILL, f"touch {touch}: exit code {code}, {left}"
        self.check_left()
        done(self.work)
        self.check_same()
        return "killed"

    def full_from(self, write: int) -> str:
        """Whether it was refused: what fills a cache, or only clears up, goes on."""
        self.fresh()
        code, left = ended(*start(lambda: self.disturbed(write, be_full, WRITES)))
        assert code in (0, REFUSED), f"write {write}: exit code {code}, {left}"
        assert code == 0 or "No space left" in left, left
        self.check_left()
        done(self.work)
        self.check_same()
        return "refused" if code else "went on"

    def killed_at_random(self, kills: int) -> dict[str, int]:
        """Kill it so many times, going on each time from what was left; when it is complete, it begins anew."""
        self.fresh()
        moments, counts = np.random.default_rng(0), {"killed": 0, "completed": 0}
        while counts["killed"] < kills:
            process, reading = start(self.work)
            time.sleep(moments.uniform(0, self.seconds))
            os.kill(process, signal.SIGKILL)
            code, left = ended(process, reading)
            if code == -signal.SIGKILL:
                counts["killed"] += 1
                self.check_left()
                continue
            assert code == 0, left
            self.check_same()
            counts["completed"] += 1
            self.fresh()
        done(self.work)
        self.check_same()
        return counts


def chosen(count: int, of: int) -> Iterator[int]:
    """So many numbers from 1 on, evenly spread; all of them if `count` is 0."""
    yield from range(1, of + 1) if not count else sorted({round(x) for x in np.linspace(1, of, min(count, of))})


def main() -> None:
    """Do what a plan says: {"kill" or "full" or "random": {case: how often, 0 for every time}}."""
    plan, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    inputs = folder / "inputs"
    done(lambda: make_inputs(inputs, {name for cases in plan.values() for name in cases}))
    for how, cases in plan.items():
        for name, count in cases.items():
            bench = Bench(Path(tempfile.mkdtemp(dir=folder)), inputs, name)
            found: Counter[str] = Counter()
            if how == "random":
                found.update(bench.killed_at_random(count))
            else:
                disturb, of = (bench.killed_at, bench.touches) if how == "kill" else (bench.full_from, bench.writes)
                found.update(disturb(number) for number in chosen(count, of))
            print(json.dumps({"how": how, "case": name, **found}), flush=True)


if __name__ == "__main__":
    main()
