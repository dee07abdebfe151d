"""The run directory: written so that it can be killed at any moment and go on; safetensors and JSON, never pickle.

run/config.json        everything needed to repeat it
run/metrics.jsonl      one line per evaluation
run/checkpoints/step-000500/{weights,best,state}.safetensors, meta.json
run/bias.json          what was learned about bias, if the method learns it
run/model/             what scoring needs; it appears when training is done
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ultr.errors import DataError, OutputError
from ultr.files import atomic_path
from ultr.training import TrainingState

FORMAT = 1
KEEP = 2  # checkpoints


def write_json(path: Path, content: Any) -> None:
    with atomic_path(path, overwrite=True) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise DataError("this is no run directory, or an unfinished one", where=path, mend="check the path") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read ({error})", where=path, mend="train again") from error


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot be read ({error})", where=path, mend="train again") from error


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run directory for this process alone; the system lets go of it however the process ends."""
    run.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # not on this system: nothing to hold it with
        yield
        return
    with (run / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(
                "another process is training here", where=run, mend="wait, or choose another --out"
            ) from error
        yield


@contextmanager
def waiting_for(path: Path) -> Iterator[None]:
    """Hold a name for this process alone, after waiting for any other that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # not on this system: two processes may then do the same work twice
        yield
        return
    with path.with_suffix(".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def save_checkpoint(run: Path, state: TrainingState) -> None:
    folder = run / "checkpoints" / f"step-{state.step:06}"
    with atomic_path(folder, overwrite=True, folder=True) as temporary:
        save_tensors(temporary / "weights.safetensors", state.method.state_dict())
        save_tensors(temporary / "best.safetensors", state.best_weights)
        save_tensors(temporary / "state.safetensors", _optimizer_tensors(state.optimizer))
        meta = {
            "format": FORMAT,
            "step": state.step,
            "best": state.best if math.isfinite(state.best) else None,
            "best_step": state.best_step,
            "waited": state.waited,
        }
        (temporary / "meta.json").write_text(json.dumps(meta))
    for old in _checkpoints(run)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(run: Path, state: TrainingState) -> bool:
    """Put the newest checkpoint into the state; False if there is none."""
    folders = _checkpoints(run)
    if not folders:
        return False
    folder = folders[-1]
    meta = read_json(folder / "meta.json")
    if meta.get("format") != FORMAT:
        raise DataError(
            "the checkpoint is of another version", where=folder, got=meta.get("format"), mend="train again"
        )
    device = next(state.method.parameters()).device
    state.method.load_state_dict(load_tensors(folder / "weights.safetensors"))
    state.best_weights = {n: t.to(device) for n, t in load_tensors(folder / "best.safetensors").items()}
    _load_optimizer(state.optimizer, load_tensors(folder / "state.safetensors"))
    state.step, state.best_step, state.waited = meta["step"], meta["best_step"], meta["waited"]
    state.best = -math.inf if meta["best"] is None else meta["best"]
    return True


def _checkpoints(run: Path) -> list[Path]:
    return sorted(p for p in (run / "checkpoints").glob("step-*") if (p / "meta.json").is_file())


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


def append_metrics(run: Path, line: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run; a last line that was cut short by a kill is left out."""
    try:
        lines = (run / "metrics.jsonl").read_text().split("\n")
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def rewind_metrics(run: Path, step: int) -> None:
    """Drop the evaluations after a step: they will be made again."""
    kept = [line for line in read_metrics(run) if line["step"] <= step]
    with atomic_path(run / "metrics.jsonl", overwrite=True) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
