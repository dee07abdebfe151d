"""The run directory: written so that it can be killed at any moment and go on; safetensors and JSON, never pickle.

run/config.json        everything needed to repeat it
run/metrics.jsonl      one line per evaluation
run/checkpoints/step-000500/{weights,best,state}.safetensors, meta.json; of trees, the library's own file and meta.json
run/bias.json          what was learned about bias, if the method learns it
run/model/             what scoring needs; it appears when training is done

JSON and tensors carry checksums, and are refused where they do not agree with them.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ultr.errors import DataError, OutputError
from ultr.files import atomic_path, output_errors, remove_abandoned
from ultr.formats import check_format, load_json, parse_json
from ultr.seals import SEAL, sealed, unsealed
from ultr.training import TrainingState

FORMAT = 1
KEEP = 2  # checkpoints
META, METRICS = "meta.json", "metrics.jsonl"
Found = TypeVar("Found")


def write_json(path: Path, content: Any) -> None:
    """Write JSON, an object with a checksum of itself."""
    with atomic_path(path, overwrite=True) as temporary:
        kept = sealed(content) if isinstance(content, dict) else content
        temporary.write_text(json.dumps(kept, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of a run."""
    try:
        content = load_json(path)
    except FileNotFoundError as error:
        raise DataError("this is no run directory, or an unfinished one", where=path, mend="check the path") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read ({error})", where=path, mend="train again") from error
    if not isinstance(content, dict):
        raise DataError("should hold an object of JSON", where=path, got=type(content).__name__, mend="train again")
    return content


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        save_file(kept, path, {SEAL: _sum_of(kept)})
    except SafetensorError as error:  # as which it tells of a full disk
        raise OSError(str(error)) from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            seal = (file.metadata() or {}).get(SEAL)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot be read ({error})", where=path, mend="train again") from error
    if seal is not None and seal != _sum_of(tensors):
        mend = "restore it from a copy, or train again"
        raise DataError("the file is not as it was written", where=path, mend=mend)
    return tensors


def _sum_of(tensors: dict[str, Tensor]) -> str:
    found = 0
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run directory for this process alone; the system lets go of it however the process ends."""
    with output_errors(run):
        run.mkdir(parents=True, exist_ok=True)
        lock = (run / ".lock").open("a+")
    with lock:
        try:
            import fcntl
        except ImportError:  # not on this system: nothing to hold it with
            yield
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            got, mend = lock.read(100).strip() or None, "wait, or choose another --out"
            raise OutputError("another process is training here", where=run, got=got, mend=mend) from error
        with output_errors(run):
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {platform.node()}\n")
            lock.flush()
        remove_abandoned(run)
        yield


@contextmanager
def waiting_for(path: Path) -> Iterator[None]:
    """Hold a name for this process alone, after waiting for any other that holds it."""
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    with lock:
        try:
            import fcntl
        except ImportError:  # not on this system: two processes may then do the same work twice
            yield
            return
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def write_checkpoint(run: Path, step: int, write: Callable[[Path], dict[str, Any]]) -> None:
    """Keep how far a run has come: what `write` puts into a folder, and what it says of it. The last two are kept."""
    folder = run / "checkpoints" / f"step-{step:06}"
    remove_abandoned(folder.parent)
    with atomic_path(folder, overwrite=True, folder=True) as temporary:
        meta = {"format": FORMAT, "step": step, **write(temporary)}
        (temporary / META).write_text(json.dumps(sealed(meta)))
    for old in _checkpoints(run)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def newest_checkpoint(run: Path, read: Callable[[Path, dict[str, Any]], Found]) -> Found | None:
    """What `read` makes of the newest checkpoint that is whole, and None if there is none at all."""
    damage: DataError | None = None
    for folder in reversed(_checkpoints(run)):
        try:
            meta = read_json(folder / META)
            check_format(meta, FORMAT, what="the checkpoint", where=folder, mend="train again with --overwrite")
            found = read(folder, meta)
        except DataError as error:
            damage = damage or error
            continue
        if damage is not None:
            warnings.warn(f"{damage.where}: {damage.what}; going on from {folder.name}", stacklevel=2)
        return found
    if damage is not None:
        raise damage
    return None


def save_checkpoint(run: Path, state: TrainingState) -> None:
    def write(folder: Path) -> dict[str, Any]:
        save_tensors(folder / "weights.safetensors", state.method.state_dict())
        save_tensors(folder / "best.safetensors", state.best_weights)
        save_tensors(folder / "state.safetensors", _optimizer_tensors(state.optimizer))
        best = state.best if math.isfinite(state.best) else None
        return {"best": best, "best_step": state.best_step, "waited": state.waited}

    write_checkpoint(run, state.step, write)


def load_checkpoint(run: Path, state: TrainingState) -> bool:
    """Put the newest checkpoint that is whole into the state; False if there is none."""

    def read(folder: Path, meta: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        return meta, *(load_tensors(folder / f"{part}.safetensors") for part in ("weights", "best", "state"))

    if (found := newest_checkpoint(run, read)) is None:
        return False
    meta, weights, best, optimizer = found
    device = next(state.method.parameters()).device
    state.method.load_state_dict(weights)
    state.best_weights = {n: t.to(device) for n, t in best.items()}
    _load_optimizer(state.optimizer, optimizer)
    state.step, state.best_step, state.waited = meta["step"], meta["best_step"], meta["waited"]
    state.best = -math.inf if meta["best"] is None else meta["best"]
    return True


def _checkpoints(run: Path) -> list[Path]:
    """Of any version, the newest last."""
    found = (p for p in (run / "checkpoints").glob("step-*") if p.name[5:].isdecimal() and (p / META).is_file())
    return sorted(found, key=lambda folder: int(folder.name[5:]))


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{parameter}.{name}": value
        for parameter, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        parameter, _, name = key.partition(".")
        state.setdefault(int(parameter), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


# --- Metrics ----------------------------------------------------------------------------------------------------------


def append_metrics(run: Path, line: dict[str, Any]) -> None:
    with output_errors(run / METRICS), (run / METRICS).open("a") as file:
        file.write(json.dumps(sealed(line)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run; a last line that was cut short by a kill is left out."""
    try:
        *lines, last = (run / METRICS).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    try:
        lines += [last] if b"}" in last else []  # it is all there, and only its end is damaged
        return [unsealed(parse_json(line), where=run / METRICS) for line in lines]
    except ValueError as error:
        mend = "restore it from a copy, or train again"
        raise DataError(f"a line cannot be read ({error})", where=run / METRICS, mend=mend) from error


def rewind_metrics(run: Path, step: int) -> None:
    """Drop the evaluations after a step: they will be made again."""
    kept = [line for line in read_metrics(run) if line["step"] <= step]
    with atomic_path(run / METRICS, overwrite=True) as temporary:
        temporary.write_text("".join(json.dumps(sealed(line)) + "\n" for line in kept))
