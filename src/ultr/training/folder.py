"""The files of a run directory. If the process of a run is killed at any moment, the run can resume from them.

A run is trained in a folder NAME.partial next to its output NAME, and gets its name when it is complete. So an output
is always a complete run, also while another one that replaces it is trained. docs/architecture.md lists its files.

The formats are safetensors and JSON, never pickle. Both carry checksums, and a file with a wrong checksum is rejected.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ultr.errors import DataError, OptionError, OutputError, UltrError
from ultr.rankers.matching import load_weights
from ultr.training.config import Config, differences, flat
from ultr.training.loop import TrainingState
from ultr.utils.distributed import barrier, is_main, job_id, main_decides, restarts, size
from ultr.utils.files import REPLACED, atomic_path, lock, output_errors, remove_abandoned, sync_folder, take_name
from ultr.utils.jsonfiles import (
    add_checksum,
    check_format,
    load_json,
    load_tensors,
    parse_json,
    read_json,
    save_tensors,
    verify_checksum,
    write_json,
)
from ultr.utils.optimisation import AnyOptimizer, EarlyStopping

FORMAT = 1
KEEP = 2  # number of newest checkpoints that are kept
META, METRICS, CONFIG = "meta.json", "metrics.jsonl", "config.json"
EXAMINATION = "examination.json"  # file of a run
FITS = "fits"  # folder of a run with a folder for each ranker
MODEL = "model"  # folder of a run, or of a fit, that is complete
CHECKPOINTS = "checkpoints"  # folder of a fit
STAGE = "bias-stage"  # folder of a fit with checkpoints of its bias model
MARK = ".unfinished"  # file in a run that is being trained
LOCK = ".lock"  # file in a run that its process locks
JOB = ".job"  # file with the id of the torchrun job; processes that torchrun restarts resume only their own run
Content = TypeVar("Content")


def read_config(run: Path) -> Config:
    return Config.from_json(read_json(run / CONFIG), where=run)


def fit_folder(run: Path, kind: str) -> Path:
    """Return the folder in a run of what a kind of ranker learned."""
    return run / FITS / kind


def part_of(run: Path, kind: str) -> Path:
    """Return the folder with the model of a kind of ranker: the run itself, if it has no other ranker."""
    folder = fit_folder(run, kind)
    return folder if (folder / MODEL).is_dir() else run


# --- The folder in which a run is trained -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFolder:
    """The output of a run, and the folder in which it is trained."""

    out: Path
    path: Path
    resume: bool

    @property
    def is_complete(self) -> bool:
        """Whether a run that is resumed is complete; the process may have been killed before it had its name."""
        return self.resume and ((self.path / MODEL).is_dir() or (not self._begun and (self.out / MODEL).is_dir()))

    @property
    def _begun(self) -> bool:
        return (self.path / CONFIG).is_file()

    def saved_config(self) -> Config | None:
        """Return the configuration of the run that is resumed; None if there is none yet."""
        if not self.resume or not (self._begun or (self.out / CONFIG).is_file()):
            return None
        return read_config(self.path if self._begun else self.out)

    @contextmanager
    def writing(self, config: Config) -> Iterator[bool]:
        """Lock the folder and write config.json; at the end, give the folder the name of the output.

        Yield True if another process has finished the run in the meantime. If the run fails before it has learned
        anything, delete it, so that the corrected command can be used again. If it is interrupted, keep what it has.
        """
        with ExitStack() as locks:
            if is_main():
                locks.enter_context(lock_run(self.path))
                if not self.resume and self.path != self.out:
                    _clear(self.path)
            begun = self._begun
            if main_decides(self.resume and (self.out / MODEL).is_dir() and not self._begun):
                if is_main() and self.path != self.out:
                    shutil.rmtree(self.path, ignore_errors=True)
                yield True
                return
            try:
                if is_main():
                    with output_errors(self.path):
                        (self.path / MARK).write_text("")
                        if size() > 1:
                            (self.path / JOB).write_text(job_id())
                    write_json(self.path / CONFIG, config.to_json())
                barrier()
                yield False
            except BaseException as error:
                if is_main() and not (begun or self._can_continue(error)):
                    self._delete()
                raise
            self.finish()

    def _delete(self) -> None:
        """Delete a run that has learned nothing; in a folder that was there before, only the files of the run."""
        if self.path != self.out:  # NAME.partial, which was made by this run, or has been checked to be a run
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for name in (CONFIG, MARK, JOB):
            (self.path / name).unlink(missing_ok=True)

    def _can_continue(self, error: BaseException) -> bool:
        """Return whether a run has results that it needs when it resumes; after an error, examination is not enough."""
        learned = any((self.path / FITS).glob("*/*")) or bool(read_metrics(self.path))
        return learned or (not isinstance(error, UltrError) and (self.path / EXAMINATION).is_file())

    def finish(self) -> None:
        """Give a complete run the name of the output, and delete the run that it replaces."""
        if is_main():
            with output_errors(self.out):
                remove_abandoned(self.path)
                (self.path / JOB).unlink(missing_ok=True)
                if self.path != self.out and (self.path / MODEL).is_dir():
                    place = self.out.resolve()
                    take_name(self.path, place, overwrite=place.exists())
                    sync_folder(place.parent)  # the new name is on disk before the old run is deleted
            settle(self.out)
        barrier()


def _clear(folder: Path) -> None:
    """Delete everything in the locked folder of a run but its lock."""
    if folder.is_mount() or not _may_be_run(folder):
        raise OutputError("not a run; left unchanged", where=folder, hint="pass another --out")
    with output_errors(folder):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()


def find_folder(out: Path, *, resume: bool, overwrite: bool) -> RunFolder:
    """Return the folder to train in, and whether to resume; raise OutputError if `out` must not be written."""
    if is_main():
        settle(out)
    path = partial_of(out)
    resume = main_decides(resume or (restarts() > 0 and job_id() == _job_of(path)))
    if is_main():
        _check_output(out, path, resume=resume, overwrite=overwrite)
    return RunFolder(out, path, resume)


def partial_of(out: Path) -> Path:
    """Return the folder in which a run is trained: NAME.partial, or the output itself if that cannot be renamed."""
    place = out.resolve()
    return out if out.is_mount() else place.with_name(f"{place.name[:200]}.partial")


def current_folder(out: Path) -> Path:
    """Return the folder of a run: NAME.partial while it is trained, then its output."""
    path = partial_of(out)
    return path if path.is_dir() else out


def settle(out: Path) -> None:
    """Finish the exchange of two runs, if a process was killed in the middle of it."""
    place, path = out.resolve(), partial_of(out)
    with output_errors(out):
        old = place.parent / REPLACED / place.name
        if old.is_dir() and not place.exists():
            old.replace(place)
        shutil.rmtree(old, ignore_errors=True)
        with suppress(OSError):
            old.parent.rmdir()  # if no other run is being exchanged
        replaced = path != out and (path / MODEL).is_dir() and not (path / MARK).is_file()
        if replaced and _may_be_run(path):
            shutil.rmtree(path)  # the run that was replaced
        if (place / MODEL).is_dir():
            (place / MARK).unlink(missing_ok=True)


def _job_of(run: Path) -> str | None:
    """Return the id of the torchrun that started a run, or None."""
    try:
        return (run / JOB).read_text()
    except OSError:
        return None


def _check_output(out: Path, path: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise OutputError if `out` exists and may not be overwritten, is not a run, or cannot be resumed."""
    if not (resume or overwrite):
        if out.exists():
            hint = "pass --resume or --overwrite, or another --out"
            raise OutputError("the output exists already", where=out, hint=hint)
        if path.exists():
            hint = "pass --resume to continue it, or --overwrite to start again"
            raise OutputError("an unfinished run exists already", where=path, hint=hint)
    for folder in (out, path):
        if folder.exists() and not _may_be_run(folder):
            what = "not a run; not overwritten"
            raise OutputError(what, where=folder, hint="pass another --out")
    if not resume and out == path and (out / CONFIG).is_file():
        hint = "pass --out with a folder inside it, or another path"
        raise OutputError("a file system is mounted here, so the folder cannot be replaced", where=out, hint=hint)


def _may_be_run(folder: Path) -> bool:
    """Return whether a folder is a run, or has nothing that could be lost."""
    if not folder.is_dir():
        return False
    names = {entry.name for entry in folder.iterdir()} - {LOCK, "lost+found"}
    if CONFIG not in names:
        return not names or MARK in names
    try:
        return "ultr" in load_json(folder / CONFIG)  # the version that wrote it
    except (OSError, ValueError, TypeError):
        return bool(names & {MARK, METRICS})  # a damaged run


def check_same(config: Config, saved: Config, out: Path, *, all_options: bool) -> None:
    """Raise OptionError if options differ from those of the run that is resumed; unset ones count if `all_options`."""
    if found := differences(config, saved, unset=not all_options):
        texts = [f"{name} ({_brief(given)}; the run has {_brief(had)})" for name, (given, had) in found.items()]
        hint = "leave them out, or train again with --overwrite or another --out"
        raise OptionError(f"options differ from the run: {', '.join(texts)}", where=out, hint=hint)


def _brief(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:199]}…"


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Lock a run directory for this process; raise OutputError if another process trains there."""
    with output_errors(run):
        run.mkdir(parents=True, exist_ok=True)
        file = (run / LOCK).open("a+")
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
    folder = run / CHECKPOINTS / f"step-{step:06}"
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


def has_checkpoint(run: Path) -> bool:
    return bool(_checkpoints(run))


def save_checkpoint(run: Path, state: TrainingState) -> None:
    def write(folder: Path) -> dict[str, Any]:
        save_tensors(folder / "weights.safetensors", state.method.state_dict())
        save_tensors(folder / "best.safetensors", state.best_weights)
        save_tensors(folder / "state.safetensors", dict(flat(state.optimizer.state_dict()["state"])))
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
    """Return the checkpoint folders of a run, the newest last."""
    folders = (p for p in (run / CHECKPOINTS).glob("step-*") if p.name[5:].isdecimal() and (p / META).is_file())
    return sorted(folders, key=lambda folder: int(folder.name[5:]))


def _load_optimizer(optimizer: AnyOptimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        parameter, _, name = key.partition(".")
        state.setdefault(int(parameter), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


# --- Metrics ----------------------------------------------------------------------------------------------------------


def append_metrics(run: Path, line: dict[str, Any]) -> None:
    """Add an evaluation to metrics.jsonl: the kind of ranker, the step, the loss and metrics."""
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


def rewind_metrics(run: Path, kind: str, step: int) -> None:
    """Remove the evaluations of a ranker after a step, because a run that resumes from this step repeats them."""
    lines = [line for line in read_metrics(run) if line["ranker"] != kind or line["step"] <= step]
    with atomic_path(run / METRICS, overwrite=True) as temporary:
        temporary.write_text("".join(json.dumps(add_checksum(line)) + "\n" for line in lines))
