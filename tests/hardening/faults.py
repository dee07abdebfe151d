"""Run work with faults: kill it or fill its disk at the n-th access to the disk, or kill it at a random moment.

`python -m hardening.faults PLAN FOLDER` imports the modules that the work needs and does no other work, so that it has
no threads and its forks start at once. The faults happen in the forks.
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
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv  # imported here once, for all forks
import pyarrow.dataset  # noqa: F401
import scipy.optimize  # noqa: F401
import torch

from conftest import make_shown_log
from lists_folder import write_lists
from ultr.bias.audit import audit
from ultr.cli.bias import _write as write_bias
from ultr.datasets.base import Dataset, cached
from ultr.datasets.users import User, simulate_log
from ultr.errors import UltrError
from ultr.log import Log, read_log, write_log
from ultr.log.prepare.pipeline import prepare_lists
from ultr.rankers.model import load_model
from ultr.report import write_report
from ultr.serving.export import export_run
from ultr.serving.scoring import score_file
from ultr.training.comparing.plan import compare
from ultr.training.config import Config, make_config
from ultr.training.folder import MARK
from ultr.training.loop import Listeners
from ultr.training.run import run_training

ULTR_ERROR = 3  # exit code of a fork that raised an UltrError
PROPENSITIES = {str(position): 1 / position for position in range(1, 20)}
SMALL: dict[str, Any] = {
    "propensities": PROPENSITIES,
    "device": "cpu",
    "hidden": (8,),
    "dropout": 0.2,
    "batch": 16,
    "bias_steps": 3,
    "network.steps": 4,
    "network.evaluate_every": 2,
    "trees.rounds": 4,
    "trees.evaluate_every": 2,
    "trees.patience": 0,
}
EVERY_CHECKPOINT = Listeners(on_finding=None, checkpoint_seconds=0)
Work = Callable[[Path, Path], object]  # takes a folder of inputs and a folder for outputs


def feedback_log(requests: int = 80, seed: int = 0) -> Log:
    log, _ = simulate_log(make_shown_log(requests=requests, seed=seed), User(), seed=seed)
    return replace(log, relevance=None)


def network(data: Path, **changes: Any) -> Config:
    return make_config(str(data), ranker="mlp", **SMALL).with_options(**changes)


def trees(data: Path, **changes: Any) -> Config:
    return make_config(str(data), ranker="lightgbm", select="feedback-ndcg@10", **SMALL).with_options(**changes)


def both(data: Path) -> Config:
    """Return the configuration of a run of a network and trees."""
    return make_config(str(data), **SMALL)


def preload(cases: set[str]) -> None:
    """Import the large libraries that some cases need, once for all forks."""
    if cases & {"prepare", "long prepare"}:
        import_module("ibis.backends.duckdb")
    if cases & {"both", "export", "report", "overwrite", "long trees"}:
        import_module("lightgbm")


def make_inputs(inputs: Path, cases: set[str]) -> None:
    """Make the inputs of some cases."""
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


def train(config: Config, out: Path) -> None:
    run_training(config, out / "run", resume=True, listeners=EVERY_CHECKPOINT)


def replace_run(inputs: Path, out: Path) -> None:
    run_training(network(inputs / "log.parquet"), out / "run", overwrite=True, listeners=EVERY_CHECKPOINT)


def score(inputs: Path, out: Path, name: str = "log.parquet") -> None:
    score_file(load_model(inputs / "run"), inputs / name, out / "scores.parquet", overwrite=True)


def cache(inputs: Path, out: Path) -> None:
    def build() -> Dataset:
        log = read_log(inputs / "log.parquet")
        return Dataset("small", log, log, log, max_grade=4, fingerprint="x")

    os.environ["ULTR_CACHE"] = str(out)
    dataset = cached("small", "key", build)
    np.testing.assert_array_equal(dataset.train.features, read_log(inputs / "log.parquet").features)


def compared(inputs: Path, out: Path) -> None:
    base = network(inputs / "log.parquet", select="feedback-ndcg@10")
    compare(base, ["pointwise"], out, seeds=2, rates=[0.01], jobs=1)


def bias(inputs: Path, out: Path) -> None:
    report = audit(read_log(inputs / "log.parquet").without_features(), bootstrap=2)
    write_bias(report, report.to_json(), str(out / "bias"), "log", overwrite=True)


def long_network(inputs: Path, out: Path) -> None:
    train(network(inputs / "log.parquet", steps=80, bias_steps=20, evaluate_every=10), out)


def long_trees(inputs: Path, out: Path) -> None:
    train(trees(inputs / "log.parquet", steps=40, evaluate_every=4), out)


def long_stream(inputs: Path, out: Path) -> None:
    train(network(inputs / "lists", stream="yes", steps=50, bias_steps=10, evaluate_every=10), out)


@dataclass(frozen=True)
class Case:
    """Work that can be repeated after an interruption, and a function that makes the files before it."""

    work: Work
    before: Work = lambda _inputs, _out: None
    atomic: str | None = None  # an output that is always complete: the old or the new one


def before_prepare(inputs: Path, out: Path) -> None:
    prepare_lists(inputs / "other.parquet", out / "lists", threads=1)


CASES = {
    "network": Case(lambda i, o: train(network(i / "log.parquet"), o), atomic="run"),
    "both": Case(lambda i, o: train(both(i / "log.parquet"), o), atomic="run"),
    "stream": Case(lambda i, o: train(network(i / "lists", stream="yes"), o), atomic="run"),
    "overwrite": Case(replace_run, lambda i, o: shutil.copytree(i / "trees", o / "run") and None, "run"),
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
    "bias": Case(bias, atomic="bias"),
    "cache": Case(cache, atomic="small-key"),
    "compare": Case(compared, atomic="comparison.json"),
    "long network": Case(long_network),
    "long trees": Case(long_trees),
    "long stream": Case(long_stream),
    "long prepare": Case(
        lambda i, o: prepare_lists(i / "long.parquet", o / "lists", overwrite=True, threads=1), atomic="lists"
    ),
    "long score": Case(lambda i, o: score(i, o, "long.parquet"), atomic="scores.parquet"),
}


# --- Faults -----------------------------------------------------------------------------------------------------------

WRITES = {"open", "os.mkdir", "tempfile.mkdtemp", "fsync"}  # events that fail on a full disk
TOUCHES = WRITES | {"os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate", "os.link"}


class Touches:
    """A counter of accesses to the disk below a folder, which calls `do` at the n-th. A full disk stays full."""

    def __init__(self, folder: Path, at: int, do: Callable[[], None], events: set[str]) -> None:
        self.folder, self.at, self.do, self.events = str(folder), at, do, events
        self.count = self.writes = 0
        self._fsync = os.fsync
        os.fsync = self._sync  # type: ignore[assignment]
        sys.addaudithook(self._audit)

    def _sync(self, descriptor: int) -> None:
        self._touched("fsync")
        self._fsync(descriptor)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if event in self.events:
            paths = [os.fsdecode(path) for path in arguments if isinstance(path, str | bytes)]
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
    """Start a fork that does some work; return its process id, and a pipe for its result or its error."""
    reading, writing = os.pipe()
    if (process := os.fork()) == 0:
        code, result = 1, ""
        try:
            warnings.simplefilter("error", UserWarning)  # such as that of a skipped checkpoint
            result, code = str(work()), 0
        except UltrError as error:
            result, code = str(error), ULTR_ERROR
        except BaseException:
            result = traceback.format_exc()
        finally:
            os.write(writing, result.encode()[-10_000:])
            os._exit(code)
    os.close(writing)
    return process, reading


def ended(process: int, reading: int) -> tuple[int, str]:
    """Wait for a fork; return its exit code, or minus the signal that ended it, and its result or error."""
    _, status = os.waitpid(process, 0)
    with os.fdopen(reading) as pipe:
        return os.waitstatus_to_exitcode(status), pipe.read()


def done(work: Callable[[], object]) -> str:
    code, result = ended(*start(work))
    assert code == 0, result
    return result


def contents(path: Path) -> dict[str, int]:
    """Return the checksum of a file, or of all files below a folder, except locks."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return {p.relative_to(path).as_posix(): zlib.crc32(p.read_bytes()) for p in files if not p.name.endswith(".lock")}


class Bench:
    """A case with its inputs, the files before it, and the files that it makes without faults."""

    def __init__(self, folder: Path, inputs: Path, name: str) -> None:
        self.inputs, self.case = inputs, CASES[name]
        self.first, self.out = folder / f"{name} first", folder / "out"
        self.first.mkdir()
        done(lambda: self.case.before(inputs, self.first))
        self.reset()
        begun = time.monotonic()
        self.touches, self.writes = map(int, done(self.counted).split())
        self.seconds = time.monotonic() - begun
        self.expected = contents(self.out)
        assert self.expected, "nothing was written"
        atomic = self.case.atomic or "nothing"
        self.before, self.after = contents(self.first / atomic), contents(self.out / atomic)

    def reset(self) -> None:
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
        """Check that the atomic output is complete: the old or the new one."""
        if self.case.atomic is None:
            return
        now = contents(self.out / self.case.atomic)
        now.pop(MARK, None)  # a run has it until the run that it replaces is deleted
        assert now in (self.before, self.after), f"neither the old nor the new output: {sorted(now)}"

    def check_same(self) -> None:
        files = contents(self.out)
        wrong = [name for name in {*files, *self.expected} if files.get(name) != self.expected.get(name)]
        assert not wrong, f"differs from the work without faults: {sorted(wrong)}"
        left = [p for p in self.out.rglob("*.partial") if any(p.iterdir())]
        assert not left, f"left behind: {left}"

    def killed_at(self, touch: int) -> str:
        self.reset()
        code, result = ended(*start(lambda: self.disturbed(touch, die, TOUCHES)))
        assert code == -signal.SIGKILL, f"touch {touch}: exit code {code}, {result}"
        self.check_left()
        done(self.work)
        self.check_same()
        return "killed"

    def full_from(self, write: int) -> str:
        """Fill the disk; return whether the work fails. Work on a cache, or that only deletes files, completes."""
        self.reset()
        code, result = ended(*start(lambda: self.disturbed(write, be_full, WRITES)))
        assert code in (0, ULTR_ERROR), f"write {write}: exit code {code}, {result}"
        assert code == 0 or "No space left" in result, result
        self.check_left()
        done(self.work)
        self.check_same()
        return "error" if code else "completed"

    def killed_at_random(self, kills: int) -> dict[str, int]:
        """Kill the work `kills` times, and resume it each time; when it is complete, start again."""
        self.reset()
        moments, counts = np.random.default_rng(0), {"killed": 0, "completed": 0}
        while counts["killed"] < kills:
            process, reading = start(self.work)
            time.sleep(moments.uniform(0, self.seconds))
            os.kill(process, signal.SIGKILL)
            code, result = ended(process, reading)
            if code == -signal.SIGKILL:
                counts["killed"] += 1
                self.check_left()
                continue
            assert code == 0, result
            self.check_same()
            counts["completed"] += 1
            self.reset()
        done(self.work)
        self.check_same()
        return counts


def chosen(count: int, of: int) -> Iterator[int]:
    """Yield `count` numbers from 1 to `of`, evenly spread, or all of them if `count` is 0."""
    yield from range(1, of + 1) if not count else sorted({round(x) for x in np.linspace(1, of, min(count, of))})


def main() -> None:
    """Run a plan: {"kill" or "full" or "random": {case: number of faults, 0 for all possible ones}}."""
    plan, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    inputs, names = folder / "inputs", {name for cases in plan.values() for name in cases}
    preload(names)
    done(lambda: make_inputs(inputs, names))
    for how, cases in plan.items():
        for name, count in cases.items():
            bench = Bench(Path(tempfile.mkdtemp(dir=folder)), inputs, name)
            counts: Counter[str] = Counter()
            if how == "random":
                counts.update(bench.killed_at_random(count))
            else:
                disturb, of = (bench.killed_at, bench.touches) if how == "kill" else (bench.full_from, bench.writes)
                counts.update(disturb(number) for number in chosen(count, of))
            print(json.dumps({"how": how, "case": name, **counts}), flush=True)


if __name__ == "__main__":
    main()
