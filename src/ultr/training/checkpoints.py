"""The files of a run directory. If the process of a run is killed at any moment, the run can resume from them.

run/config.json        everything needed to repeat the run
run/metrics.jsonl      one line per evaluation
run/checkpoints/step-000500/{weights,best,state}.safetensors, meta.json; for trees, the library's own file and meta.json
run/bias.json          the probability that a position is seen, and other estimates, if the method has a bias model
run/model/             the files that scoring needs; they appear when training is done

The formats are safetensors and JSON, never pickle. Both carry checksums, and a file with a wrong checksum is rejected.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ultr.errors import DataError, OutputError
from ultr.rankers.matching import load_weights
from ultr.training.loop import TrainingState
from ultr.training.optimizers import AnyOptimizer
from ultr.utils.files import atomic_path, output_errors, remove_abandoned
from ultr.utils.jsonfiles import add_checksum, check_format, parse_json, read_json, verify_checksum
from ultr.utils.locks import lock
from ultr.utils.stopping import EarlyStopping
from ultr.utils.tensors import load_tensors, save_tensors

FORMAT = 1
KEEP = 2  # number of newest checkpoints that are kept
META, METRICS = "meta.json", "metrics.jsonl"
Content = TypeVar("Content")


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Lock a run directory for this process; raise OutputError if another process trains there."""
    with output_errors(run):
        run.mkdir(parents=True, exist_ok=True)
        file = (run / ".lock").open("a+")
    with file:
        try:
            lock(file.fileno(), wait=False)
        except BlockingIOError as error:
            file.seek(0)
            holder, hint = file.read(100).strip() or None, "wait until it is done, or pass another --out"
            raise OutputError("another process is training here", where=run, got=holder, hint=hint) from error
        with output_errors(run):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
        remove_abandoned(run)
        yield


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Lock a path for this process; while another process holds the lock, wait."""
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w")
    with file:
        lock(file.fileno(), wait=True)
        yield


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def write_checkpoint(run: Path, step: int, write: Callable[[Path], dict[str, Any]]) -> None:
    """Write a checkpoint and delete old ones. `write` writes files into a folder and returns entries for meta.json."""
    folder = run / "checkpoints" / f"step-{step:06}"
    remove_abandoned(folder.parent)
    with atomic_path(folder, overwrite=True, folder=True) as temporary:
        meta = {"format": FORMAT, "step": step, **write(temporary)}
        (temporary / META).write_text(json.dumps(add_checksum(meta)))
    for old in _checkpoints(run)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def newest_checkpoint(run: Path, read: Callable[[Path, dict[str, Any]], Content]) -> Content | None:
    """Return `read(folder, entries of meta.json)` of the newest checkpoint that is not damaged; None if there is none.

    Raise DataError if all checkpoints are damaged.
    """
    damage: DataError | None = None
    for folder in reversed(_checkpoints(run)):
        try:
            meta = read_json(folder / META)
            check_format(meta, FORMAT, what="the checkpoint", where=folder, hint="train again with --overwrite")
            content = read(folder, meta)
        except DataError as error:
            damage = damage or error
            continue
        if damage is not None:
            warnings.warn(f"{damage.where}: {damage.what}; resuming from {folder.name} instead", stacklevel=2)
        return content
    if damage is not None:
        raise damage
    return None


def save_checkpoint(run: Path, state: TrainingState) -> None:
    def write(folder: Path) -> dict[str, Any]:
        save_tensors(folder / "weights.safetensors", state.method.state_dict())
        save_tensors(folder / "best.safetensors", state.best_weights)
        save_tensors(folder / "state.safetensors", _optimizer_tensors(state.optimizer))
        return state.stopping.to_json()

    write_checkpoint(run, state.step, write)


def load_checkpoint(run: Path, state: TrainingState) -> bool:
    """Load the newest checkpoint that is not damaged into `state`; return False if the run has no checkpoints."""

    def read(folder: Path, meta: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        return meta, *(load_tensors(folder / f"{part}.safetensors") for part in ("weights", "best", "state"))

    if (content := newest_checkpoint(run, read)) is None:
        return False
    meta, weights, best, optimizer = content
    device = next(state.method.parameters()).device
    load_weights(state.method, weights)
    state.best_weights = {n: t.to(device) for n, t in best.items()}
    _load_optimizer(state.optimizer, optimizer)
    state.step, state.stopping = meta["step"], EarlyStopping.from_json(meta)
    return True


def _checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run, also those of other versions of the format, the newest last."""
    folders = (p for p in (run / "checkpoints").glob("step-*") if p.name[5:].isdecimal() and (p / META).is_file())
    return sorted(folders, key=lambda folder: int(folder.name[5:]))


def _optimizer_tensors(optimizer: AnyOptimizer) -> dict[str, Tensor]:
    return {
        f"{parameter}.{name}": value
        for parameter, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


def _load_optimizer(optimizer: AnyOptimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        parameter, _, name = key.partition(".")
        state.setdefault(int(parameter), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


# --- Metrics ----------------------------------------------------------------------------------------------------------


def append_metrics(run: Path, line: dict[str, Any]) -> None:
    with output_errors(run / METRICS), (run / METRICS).open("a") as file:
        file.write(json.dumps(add_checksum(line)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, one per evaluation; an incomplete last line (from a killed run) is skipped."""
    try:
        *lines, last = (run / METRICS).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    try:
        lines += [last] if b"}" in last else []  # a line with "}" is complete, so it is verified
        return [verify_checksum(parse_json(line), where=run / METRICS) for line in lines]
    except ValueError as error:
        hint = "restore the file from a backup, or train again"
        raise DataError(f"a line cannot be read ({error})", where=run / METRICS, hint=hint) from error


def rewind_metrics(run: Path, step: int) -> None:
    """Remove the evaluations after a step, because a run that resumes from this step repeats them."""
    lines = [line for line in read_metrics(run) if line["step"] <= step]
    with atomic_path(run / METRICS, overwrite=True) as temporary:
        temporary.write_text("".join(json.dumps(add_checksum(line)) + "\n" for line in lines))
