"""`python -m hardening.disks FOLDER`: work on disks that are small or read-only, and side by side in one place.

A disk is a tmpfs that only its own fork sees, so that nothing of it is left; systems that do not allow it say so.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from hardening.faults import CASES, REFUSED, Case, contents, done, ended, make_inputs, network, start, train
from ultr.errors import UltrError
from ultr.log import read_log, write_log
from ultr.log.prepare import prepare_lists
from ultr.runs import run_training

NEW_NAMESPACE, PRIVATE, REMOUNT, READ_ONLY = 0x20000, 0x44000, 32, 1  # of unshare(2) and mount(2)
LARGE = 64 << 10
SIZES = (4, 8, 12, 16, 40, 100, 200)  # KiB that are free; none would mean no limit
ON_DISKS = ("network", "trees", "prepare", "score", "write_log", "export", "report", "bias", "compare", "cache")


def mount(place: Path, kilobytes: int, flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", flags, f"size={kilobytes}k".encode()):
        raise PermissionError(ctypes.get_errno(), "mount")


def own_disk(place: Path) -> None:
    """Put a disk there for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_NAMESPACE) or libc.mount(b"none", b"/", None, PRIVATE, None):
        raise PermissionError(ctypes.get_errno(), "unshare")
    mount(place, LARGE)


def allowed(place: Path) -> bool:
    return sys.platform == "linux" and ended(*start(lambda: own_disk(place)))[0] == 0


def tried(case: Case, inputs: Path, out: Path) -> str:
    before, said = contents(out), ""
    try:
        case.work(inputs, out)
    except UltrError as error:
        said = str(error)
    if not said:
        return "went on"
    assert "No space left" in said or "Read-only" in said or "Out of Memory" in said, said
    assert {name: found for name, found in contents(out).items() if name in before} == before, "it was changed"
    return "refused"


def on_small_disk(case: Case, inputs: Path, out: Path, free: int) -> str:
    """On a disk with so many KiB left; when there is space again, it comes to what it would have come to."""
    own_disk(out)
    case.before(inputs, out)
    used = os.statvfs(out)
    mount(out, (used.f_blocks - used.f_bfree) * used.f_frsize // 1024 + free, REMOUNT)
    how = tried(case, inputs, out)
    mount(out, LARGE, REMOUNT)
    case.work(inputs, out)
    return json.dumps([how, contents(out)])


def on_read_only_disk(case: Case, inputs: Path, out: Path) -> str:
    own_disk(out)
    case.before(inputs, out)
    mount(out, LARGE, REMOUNT | READ_ONLY)
    return tried(case, inputs, out)


def disks(inputs: Path, out: Path) -> None:
    for name in ON_DISKS:
        case, counts = CASES[name], Counter[str]()
        _, expected = json.loads(done(lambda case=case: on_small_disk(case, inputs, out, LARGE)))  # type: ignore[misc]
        for free in SIZES:
            how, found = json.loads(done(lambda case=case, free=free: on_small_disk(case, inputs, out, free)))  # type: ignore[misc]
            assert found == expected, f"{name} with {free} KiB: {[n for n in found if found[n] != expected.get(n)]}"
            counts[how] += 1
        print(json.dumps({"how": "small disk", "case": name, **counts}), flush=True)
        how = done(lambda case=case: on_read_only_disk(case, inputs, out))  # type: ignore[misc]
        print(json.dumps({"how": "read-only disk", "case": name, how: 1}), flush=True)


# --- Side by side -----------------------------------------------------------------------------------------------------


class Pause:
    """Where a fork waits until it is let go."""

    def __init__(self) -> None:
        self._reached, self._go = os.pipe(), os.pipe()
        self._passed = False

    def __call__(self, *_: object) -> None:
        if not self._passed:
            self._passed = True
            os.close(self._go[1])  # so that it ends with the process that would let it go
            os.write(self._reached[1], b".")
            os.read(self._go[0], 1)

    def reached(self) -> None:
        os.close(self._reached[1])
        assert os.read(self._reached[0], 1), "it ended before"

    def let_go(self) -> None:
        os.write(self._go[1], b".")


def refused(work: Callable[[], object], *saying: str) -> None:
    code, left = ended(*start(work))
    assert code == REFUSED, left
    assert all(words in left for words in saying), left


def two_trainings(inputs: Path, out: Path) -> None:
    config, pause = network(inputs / "log.parquet"), Pause()
    done(lambda: train(config, out / "alone"))
    first = start(lambda: run_training(config, out / "run", on_progress=pause, checkpoint_seconds=0))
    pause.reached()
    words = ("another process is training here", f"process {first[0]} on")
    refused(lambda: run_training(config, out / "run", resume=True), *words)
    refused(lambda: run_training(config, out / "run", overwrite=True), *words)
    pause.let_go()
    assert ended(*first)[0] == 0
    assert contents(out / "run") == contents(out / "alone" / "run")


def two_preparations(inputs: Path, out: Path) -> None:
    log, pause = inputs / "log.parquet", Pause()
    done(lambda: prepare_lists(log, out / "alone", threads=1))
    first = start(lambda: prepare_lists(log, out / "lists", threads=1, progress=pause))
    pause.reached()
    refused(lambda: prepare_lists(log, out / "lists", threads=1), "another process is writing it now")
    assert len(list(out.glob(".*.partial"))) == 1
    done(lambda: prepare_lists(log, out / "lists", overwrite=True, threads=1))
    assert contents(out / "lists") == contents(out / "alone")
    pause.let_go()
    code, left = ended(*first)
    assert (code, "output exists already" in left) == (REFUSED, True), left
    assert contents(out / "lists") == contents(out / "alone")
    assert not list(out.glob(".*.partial"))


def several_logs(inputs: Path, out: Path) -> None:
    log = read_log(inputs / "log.parquet")
    for number in range(2):
        forks = [start(lambda n=number: write_log(log, out / f"{n}.parquet")) for _ in range(4)]  # type: ignore[misc]
        codes = Counter(ended(*fork)[0] for fork in forks)
        assert codes[0] == 1, codes  # one has written it, and the others have left it alone
        assert codes[REFUSED] == 3, codes
        forks = [start(lambda: write_log(log, out / "all.parquet", overwrite=True)) for _ in range(4)]
        assert [ended(*fork)[0] for fork in forks] == [0] * 4
        assert read_log(out / "all.parquet").rows == read_log(out / f"{number}.parquet").rows == log.rows
    assert not list(out.glob(".*"))


def several_of(name: str) -> Callable[[Path, Path], None]:
    """The same work several times at once: each is done or refused, and then it is whole."""

    def together(inputs: Path, out: Path) -> None:
        (out / "alone").mkdir()
        (out / "beside").mkdir()
        work = CASES[name].work
        done(lambda: work(inputs, out / "alone"))
        forks = [start(lambda: work(inputs, out / "beside")) for _ in range(3)]
        ends = [ended(*fork) for fork in forks]
        assert all(code in (0, REFUSED) for code, _ in ends), ends
        assert any(code == 0 for code, _ in ends), ends
        done(lambda: work(inputs, out / "beside"))
        assert contents(out / "beside") == contents(out / "alone")
        assert not list((out / "beside").rglob(".*.partial"))

    return together


TOGETHER: dict[str, Callable[[Path, Path], None]] = {
    "train": two_trainings,
    "prepare": two_preparations,
    "write_log": several_logs,
    "compare": several_of("compare"),
    "cache": several_of("cache"),
    "trees": several_of("trees"),
}


def main() -> None:
    folder, asked = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    inputs, out = folder / "inputs", folder / "out"
    done(lambda: make_inputs(inputs, set(asked or ON_DISKS)))
    for name, together in TOGETHER.items():
        if not asked or name in asked:
            out.mkdir()
            together(inputs, out)
            shutil.rmtree(out)
            print(json.dumps({"how": "side by side", "case": name, "held": 1}), flush=True)
    out.mkdir()
    if not asked or "disks" in asked:
        if allowed(out):
            disks(inputs, out)
        else:
            print(json.dumps({"how": "disks", "not allowed": 1}), flush=True)


if __name__ == "__main__":
    main()
