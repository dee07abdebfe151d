"""Run work on small or read-only disks, and several processes on one output: `python -m hardening.disks FOLDER`.

A disk is a tmpfs in the mount namespace of a fork, so that it disappears with the fork. If the system does not allow
this, the output says so.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from hardening.faults import (
    CASES,
    EVERY_CHECKPOINT,
    ULTR_ERROR,
    Case,
    contents,
    done,
    ended,
    make_inputs,
    network,
    preload,
    start,
    train,
)
from ultr.errors import UltrError
from ultr.log import read_log, write_log
from ultr.log.prepare.pipeline import prepare_lists
from ultr.training.run import run_training

NEW_NAMESPACE, PRIVATE, REMOUNT, READ_ONLY = 0x20000, 0x44000, 32, 1  # flags of unshare(2) and mount(2)
LARGE = 64 << 10
SIZES = (4, 8, 12, 16, 40, 100, 200)  # free KiB; 0 would mean no limit
ON_DISKS = ("both", "prepare", "score", "write_log", "export", "report", "bias", "compare", "cache")


def mount(place: Path, kilobytes: int, flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", flags, f"size={kilobytes}k".encode()):
        raise PermissionError(ctypes.get_errno(), "mount")


def own_disk(place: Path) -> None:
    """Mount a disk that only this process sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_NAMESPACE) or libc.mount(b"none", b"/", None, PRIVATE, None):
        raise PermissionError(ctypes.get_errno(), "unshare")
    mount(place, LARGE)


def allowed(place: Path) -> bool:
    return sys.platform == "linux" and ended(*start(lambda: own_disk(place)))[0] == 0


def outcome_of(case: Case, inputs: Path, out: Path) -> str:
    before, message = contents(out), ""
    try:
        case.work(inputs, out)
    except UltrError as error:
        message = str(error)
    if not message:
        return "completed"
    assert "No space left" in message or "Read-only" in message or "Out of Memory" in message, message
    assert {name: crc for name, crc in contents(out).items() if name in before} == before, "a file was changed"
    return "error"


def on_small_disk(case: Case, inputs: Path, out: Path, free: int) -> str:
    """Run a case on a disk with `free` KiB left, then with enough; return the first outcome and the final files."""
    own_disk(out)
    case.before(inputs, out)
    used = os.statvfs(out)
    mount(out, (used.f_blocks - used.f_bfree) * used.f_frsize // 1024 + free, REMOUNT)
    outcome = outcome_of(case, inputs, out)
    mount(out, LARGE, REMOUNT)
    case.work(inputs, out)
    return json.dumps([outcome, contents(out)])


def on_read_only_disk(case: Case, inputs: Path, out: Path) -> str:
    own_disk(out)
    case.before(inputs, out)
    mount(out, LARGE, REMOUNT | READ_ONLY)
    return outcome_of(case, inputs, out)


def disks(inputs: Path, out: Path) -> None:
    for name in ON_DISKS:
        case, counts = CASES[name], Counter[str]()
        _, expected = json.loads(done(lambda case=case: on_small_disk(case, inputs, out, LARGE)))  # type: ignore[misc]
        for free in SIZES:
            outcome, files = json.loads(done(lambda case=case, free=free: on_small_disk(case, inputs, out, free)))  # type: ignore[misc]
            assert files == expected, f"{name} with {free} KiB: {[n for n in files if files[n] != expected.get(n)]}"
            counts[outcome] += 1
        print(json.dumps({"how": "small disk", "case": name, **counts}), flush=True)
        outcome = done(lambda case=case: on_read_only_disk(case, inputs, out))  # type: ignore[misc]
        print(json.dumps({"how": "read-only disk", "case": name, outcome: 1}), flush=True)


# --- In parallel ------------------------------------------------------------------------------------------------------


class Pause:
    """A point where a fork waits until the parent calls `let_go`."""

    def __init__(self) -> None:
        self._reached, self._go = os.pipe(), os.pipe()
        self._passed = False

    def __call__(self, *_: object) -> None:
        if not self._passed:
            self._passed = True
            os.close(self._go[1])  # so that the fork does not wait for a parent that has ended
            os.write(self._reached[1], b".")
            os.read(self._go[0], 1)

    def reached(self) -> None:
        os.close(self._reached[1])
        assert os.read(self._reached[0], 1), "the fork ended before the pause"

    def let_go(self) -> None:
        os.write(self._go[1], b".")


def rejected(work: Callable[[], object], *words: str) -> None:
    code, message = ended(*start(work))
    assert code == ULTR_ERROR, message
    assert all(word in message for word in words), message


def two_trainings(inputs: Path, out: Path) -> None:
    config, pause = network(inputs / "log.parquet"), Pause()
    done(lambda: train(config, out / "alone"))
    paused = replace(EVERY_CHECKPOINT, on_progress=pause)
    first = start(lambda: run_training(config, out / "run", listeners=paused))
    pause.reached()
    words = ("another process is training here", f"process {first[0]} on")
    rejected(lambda: run_training(config, out / "run", resume=True), *words)
    rejected(lambda: run_training(config, out / "run", overwrite=True), *words)
    pause.let_go()
    assert ended(*first)[0] == 0
    assert contents(out / "run") == contents(out / "alone" / "run")


def two_preparations(inputs: Path, out: Path) -> None:
    log, pause = inputs / "log.parquet", Pause()
    done(lambda: prepare_lists(log, out / "alone", threads=1))
    first = start(lambda: prepare_lists(log, out / "lists", threads=1, progress=pause))
    pause.reached()
    rejected(lambda: prepare_lists(log, out / "lists", threads=1), "another process is writing it now")
    assert len(list(out.glob(".*.partial"))) == 1
    done(lambda: prepare_lists(log, out / "lists", overwrite=True, threads=1))
    assert contents(out / "lists") == contents(out / "alone")
    pause.let_go()
    code, message = ended(*first)
    assert (code, "output exists already" in message) == (ULTR_ERROR, True), message
    assert contents(out / "lists") == contents(out / "alone")
    assert not list(out.glob(".*.partial"))


def several_logs(inputs: Path, out: Path) -> None:
    log = read_log(inputs / "log.parquet")
    for number in range(2):
        forks = [start(lambda n=number: write_log(log, out / f"{n}.parquet")) for _ in range(4)]  # type: ignore[misc]
        codes = Counter(ended(*fork)[0] for fork in forks)
        assert codes[0] == 1, codes  # one process writes the file, and the others are rejected
        assert codes[ULTR_ERROR] == 3, codes
        forks = [start(lambda: write_log(log, out / "all.parquet", overwrite=True)) for _ in range(4)]
        assert [ended(*fork)[0] for fork in forks] == [0] * 4
        assert read_log(out / "all.parquet").rows == read_log(out / f"{number}.parquet").rows == log.rows
    assert not list(out.glob(".*"))


def several_of(name: str) -> Callable[[Path, Path], None]:
    """Run a case in several processes at once: each completes or is rejected, and the output is complete."""

    def together(inputs: Path, out: Path) -> None:
        (out / "alone").mkdir()
        (out / "together").mkdir()
        work = CASES[name].work
        done(lambda: work(inputs, out / "alone"))
        forks = [start(lambda: work(inputs, out / "together")) for _ in range(3)]
        ends = [ended(*fork) for fork in forks]
        assert all(code in (0, ULTR_ERROR) for code, _ in ends), ends
        assert any(code == 0 for code, _ in ends), ends
        done(lambda: work(inputs, out / "together"))
        assert contents(out / "together") == contents(out / "alone")
        assert not list((out / "together").rglob(".*.partial"))

    return together


TOGETHER: dict[str, Callable[[Path, Path], None]] = {
    "train": two_trainings,
    "prepare": two_preparations,
    "write_log": several_logs,
    "compare": several_of("compare"),
    "cache": several_of("cache"),
    "both": several_of("both"),
}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    inputs, out = folder / "inputs", folder / "out"
    preload(set(names or ON_DISKS))
    done(lambda: make_inputs(inputs, set(names or ON_DISKS)))
    for name, together in TOGETHER.items():
        if not names or name in names:
            out.mkdir()
            together(inputs, out)
            shutil.rmtree(out)
            print(json.dumps({"how": "in parallel", "case": name, "passed": 1}), flush=True)
    out.mkdir()
    if not names or "disks" in names:
        if allowed(out):
            disks(inputs, out)
        else:
            print(json.dumps({"how": "disks", "not allowed": 1}), flush=True)


if __name__ == "__main__":
    main()
