"""Several processes under torchrun take the steps that one would take, and recover from failures like one."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ultr.utils.distributed
from lists_folder import write_lists
from runs import feedback_log, weights
from ultr.cli import app
from ultr.errors import ProcessError
from ultr.log import read_log
from ultr.rankers.model import load_model
from ultr.training.data import Decisions
from ultr.training.folder import current_folder, read_metrics
from ultr.utils.distributed import process_group
from utils.divided_training import CASES

TESTS = Path(__file__).parents[1]
PROCESSES = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMAND = TESTS / "utils" / "frequent_checkpoints.py"
PATIENCE = 400  # seconds; a busy machine takes a while to start processes


class Done(NamedTuple):
    code: int
    said: str


@contextmanager
def started(*command: str, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Start two processes of a command, and kill those that are left at the end."""
    whole = [*PROCESSES, "--max-restarts", str(restarts), *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "COLUMNS": "500"}
    process = subprocess.Popen(whole, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        for pid in [*descendants(process.pid), process.pid] if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def torchrun(*command: str, restarts: int = 0) -> Done:
    with started(*command, restarts=restarts) as process:
        _, said = process.communicate(timeout=PATIENCE)
        return Done(process.returncode, said)


def descendants(parent: int) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
        if above == parent:
            yield from descendants(int(entry.name))
            yield int(entry.name)


# Every method, in one process and in two.


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("divided")
    done = torchrun(str(TESTS / "utils" / "divided_training.py"), str(out))
    assert done.code == 0, done.said
    return out


def of_case(results: Path, case: str) -> tuple[dict[str, torch.Tensor], ...]:
    return tuple(load_file(results / f"{case} {who}.safetensors") for who in ("alone", 0, 1))


@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_same_to_the_bit_and_learn_what_one_does(case, results):
    """Two constants are not compared, as no loss depends on them: that of a score, and of the network of ε⁺ and ε⁻."""
    alone, together, second = of_case(results, case)
    assert together.keys() == second.keys()
    for name, values in together.items():
        assert torch.equal(values, second[name]), name
    assert alone.keys() == together.keys()
    biases = [name for name in alone if name.startswith("state.ranker.") and name.endswith(".bias")]
    of_score = [name for name in biases if name.startswith("state.ranker.ranker.layers.0.")] or biases
    for name in alone.keys() - {"scores", max(of_score, default=""), "state.bias_model.network.layers.6.bias"}:
        torch.testing.assert_close(
            together[name], alone[name], rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
    gap = together["scores"] - alone["scores"]
    assert float((gap - gap.mean()).abs().max()) < 1e-4
    assert float((alone["scores"] - alone["scores"].mean()).abs().max()) > 1e-3  # something was learned


def test_bias_and_buffers_are_among_what_is_compared(results):
    alone, _, _ = of_case(results, "bayes-ipw double")
    named = {f"state.bias_model.{name}" for name in ("theta", "theta_minus", "plus", "minus", "item_sums", "pair_sums")}
    assert named < alone.keys()
    assert float(alone["state.bias_model.updates"]) > 10
    assert alone["scores"].dtype == torch.float64


def test_shares_are_gathered_and_differences_are_an_error(results):
    for rank in range(2):
        size, shares, said = (results / f"met-{rank}.txt").read_text().split("\n")
        assert size == "2"
        assert ast.literal_eval(shares) == [[float(i) for i in range(n)] for n in range(9)]
        assert said.startswith(
            "processes differ in their number, got 3 to 4; put the data and --out on a disk that all"
        )


# Without torchrun.


def test_one_process_is_all_and_shares_nothing():
    values, gradient = torch.arange(3.0), torch.nn.Parameter(torch.ones(2))
    gradient.grad = torch.full((2,), 3.0)
    with ultr.utils.distributed.process_group():
        assert (ultr.utils.distributed.rank(), ultr.utils.distributed.size(), ultr.utils.distributed.is_main()) == (
            0,
            1,
            True,
        )
        assert ultr.utils.distributed.summed(values) is values
        loss = torch.tensor(0.5)
        assert ultr.utils.distributed.average_gradients([gradient], loss, torch.tensor(2.0)) == loss
        ultr.utils.distributed.copy_from_main([values])
        ultr.utils.distributed.barrier()
        ultr.utils.distributed.check_equal(3, "anything")
        assert ultr.utils.distributed.own_share(7) == slice(0, 7)
        numbers = torch.arange(4.0)
        assert ultr.utils.distributed.gather_shares(numbers, 4) is numbers
        assert not torch.distributed.is_initialized()
    assert gradient.grad.tolist() == [3.0, 3.0]
    assert values.tolist() == [0.0, 1.0, 2.0]


def test_parts_without_torchrun_are_eight():
    assert ultr.utils.distributed.parts_of(16) == [(number, 2) for number in range(8)]
    assert sum(requests for _, requests in ultr.utils.distributed.parts_of(3)) == 3


@pytest.mark.parametrize(("count", "again"), [(None, False), ("0", False), ("1", True), ("3", True)])
def test_restarts_of_torchrun_are_counted(count, again, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    if count is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    assert (ultr.utils.distributed.restarts() > 0) is again


def test_a_process_that_torchrun_starts_alone_starts_nothing(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with ultr.utils.distributed.process_group("cpu"):
        assert not torch.distributed.is_initialized()


# The command.


@pytest.fixture(scope="module")
def lists(tmp_path_factory) -> Path:
    folder = write_lists(feedback_log(250), tmp_path_factory.mktemp("lists") / "lists", shards=4, group=5)
    theta = "".join(f"{k},{1 / k:.3f}\n" for k in range(1, 13))
    (folder.parent / "theta.csv").write_text(f"position,propensity\n{theta}")
    return folder


def train(lists: Path, out: Path, *more: str) -> list[str]:
    """Return the command of a short run; it can be killed at any moment, and reads examination from a file."""
    options = ["--propensities", str(lists.parent / "theta.csv"), "--device", "cpu", "--out", str(out)]
    for setting in (
        *("stream=yes", "hidden=16", "dropout=0.2", "batch=32"),
        *("bias_steps=20", "network.evaluate_every=5", "network.patience=0"),
    ):
        options += ["--set", setting]
    return [str(COMMAND), "train", str(lists), *options, *(more or ("--steps", "60"))]


def in_process(command: list[str]) -> None:
    app(command[1:], standalone_mode=False)


def assert_same_metrics(run: Path, other: Path, tolerance: float) -> None:
    one, two = read_metrics(run), read_metrics(other)
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for line, its in zip(one, two, strict=True):
        assert line == pytest.approx(its, abs=tolerance)


@pytest.fixture(scope="module")
def undisturbed(lists, tmp_path_factory) -> tuple[Path, Done]:
    """A run by two processes without a failure."""
    run = tmp_path_factory.mktemp("runs") / "two"
    done = torchrun(*train(lists, run))
    assert done.code == 0, done.said
    return run, done


def test_the_command_gives_two_processes_the_results_of_one(lists, undisturbed, tmp_path):
    two, one = undisturbed[0], tmp_path / "one"
    in_process(train(lists, one))
    assert len(read_metrics(two)) == 13  # also before the first step
    assert_same_metrics(two, one, 1e-4)
    files = [{path.relative_to(run).as_posix() for path in run.rglob("*")} for run in (one, two)]
    assert files[0] == files[1]
    log = read_log(lists / "validation")
    assert np.ptp(load_model(two).score(log) - load_model(one).score(log)) < 1e-4
    assert Decisions.load(two).rankers == ("mlp",)


def test_only_one_of_several_processes_prints(undisturbed):
    run, done = undisturbed
    assert done.said.count(f"wrote {run}") == 1, done.said
    assert "process 1:" not in done.said


def test_lists_in_memory_give_two_processes_the_results_of_one(results):
    one, two = results / "run alone", results / "run together"
    assert [line["step"] for line in read_metrics(two)] == [0, 4, 8, 12]
    assert_same_metrics(two, one, 1e-4)
    for run in (one, two):
        assert (Decisions.load(run).rankers, Decisions.load(run).streamed) == (("mlp",), False)
    log = read_log(results / "lists" / "validation")
    assert np.ptp(load_model(two).score(log) - load_model(one).score(log)) < 1e-4


def test_an_error_of_all_processes_is_printed_once(lists, tmp_path):
    done = torchrun(*train(lists, tmp_path / "run", "--label", "clik"))
    assert not (tmp_path / "run.partial").exists()
    assert done.code != 0
    assert done.said.count("needs the action 'clik'") == 1, done.said
    assert "process 1:" not in done.said
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_an_output_that_exists_is_one_error(lists, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("of someone else")
    done = torchrun(*train(lists, tmp_path / "run"))
    assert done.code != 0
    assert done.said.count("output exists already") == 1, done.said
    assert "process 1:" not in done.said
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


@pytest.mark.long
def test_an_output_that_exists_is_an_error_to_restarted_processes(lists, tmp_path):
    """A restart resumes the run that failed, and not another output at the same path."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("of someone else")
    done = torchrun(*train(lists, tmp_path / "run"), restarts=1)
    assert done.code != 0
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


# A process fails.


def process_of_rank(parent: int, rank: int) -> int:
    """Return the id of the process that torchrun has started with this rank."""
    for pid in descendants(parent):
        words = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in words:
            return pid
    raise AssertionError(f"no process of rank {rank}")


def killed_in_the_middle(command: list[str], run: Path, *, restarts: int) -> tuple[Done, float]:
    """Kill rank 1 after some evaluations; return the result, and the seconds from then to the end."""
    with started(*command, restarts=restarts) as process:
        deadline = time.monotonic() + PATIENCE
        while len(read_metrics(current_folder(run))) < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        os.kill(process_of_rank(process.pid, 1), signal.SIGKILL)
        begun = time.monotonic()
        _, said = process.communicate(timeout=PATIENCE)
        return Done(process.returncode, said), time.monotonic() - begun


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for the process in /proc")


@pytest.fixture(scope="module")
def failed(lists, tmp_path_factory) -> tuple[Path, Done, float]:
    """A run whose second process was killed, without a restart."""
    run = tmp_path_factory.mktemp("runs") / "failed"
    return run, *killed_in_the_middle(train(lists, run, "--steps", "3000"), run, restarts=0)


@needs_proc
def test_a_killed_process_ends_the_others_soon(failed):
    run, done, seconds = failed
    assert done.code != 0
    assert seconds < 60
    assert not run.exists()
    assert list((current_folder(run) / "fits" / "mlp" / "checkpoints").iterdir())


@needs_proc
def test_the_error_of_a_killed_process_says_how_to_resume(failed):
    _, done, _ = failed
    assert "--resume" in done.said


@pytest.mark.parametrize(
    ("rank", "fails", "left"),
    [("0", True, signal.SIG_IGN), ("0", False, signal.SIG_DFL), ("1", True, signal.SIG_DFL)],
)
def test_a_process_that_fails_is_not_stopped_before_it_prints_its_error(rank, fails, left, monkeypatch):
    """torchrun stops all processes when one fails; this must not come between the error and its message."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(ultr.utils.distributed, "_connect", lambda backend: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with suppress(ProcessError), process_group("cpu"):
            if fails:
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == left
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.long
@needs_proc
def test_restarted_processes_resume_to_the_same_bits(lists, undisturbed, tmp_path):
    run, whole = tmp_path / "killed", undisturbed[0]
    done, _ = killed_in_the_middle(train(lists, run), run, restarts=1)
    assert done.code == 0, done.said
    assert read_metrics(run) == read_metrics(whole)
    assert all(torch.equal(weights(run)[name], tensor) for name, tensor in weights(whole).items())
