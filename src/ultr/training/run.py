"""Train a run: check the configuration, lock the run directory, train or resume, and write the results."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ultr.bias.pitfalls import Pitfall
from ultr.errors import OptionError, OutputError
from ultr.log import Log
from ultr.log.shards import is_lists
from ultr.rankers.boosters import is_trees
from ultr.training.bias_progress import STAGE
from ultr.training.bias_stage import BIAS
from ultr.training.checkpoints import lock_run, read_metrics
from ultr.training.config import RunConfig
from ultr.training.data import RunData, load_run_data, split_log
from ultr.training.finish import Listeners
from ultr.training.inputs import notes_of
from ultr.training.joined import finish_successor, network_of, trees_for
from ultr.training.loop import Progress
from ultr.training.networks import NetworkRun
from ultr.training.replace import begin_successor, is_being_replaced, settle, successor
from ultr.training.together import can_train_together, make_network_run, train_together
from ultr.training.traps import find_traps
from ultr.training.trees import TreeRun
from ultr.training.warm_start import with_codes_of
from ultr.utils.arguments import checked
from ultr.utils.devices import threads_for
from ultr.utils.distributed import barrier, check_equal, is_main, job_id, main_decides, process_group, restarts, size
from ultr.utils.files import output_errors, remove_abandoned
from ultr.utils.jsonfiles import read_json, write_json
from ultr.utils.stages import begin_stage

JOB = ".job"  # file with the id of the torchrun job; processes that torchrun restarts resume only their own run


@checked
def run_training(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    chosen: Collection[str] | None = None,
    overwrite: bool = False,
    warm_start: str | Path | None = None,
    shared: str | Path | None = None,
    log: Log | None = None,
    checkpoint_seconds: float = 10.0,
    on_note: Callable[[str], None] = lambda _: None,
    on_warning: Callable[[Pitfall], None] | None = lambda _: None,
    on_bias_progress: Callable[[Progress], None] = lambda _: None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Train a ranker as `config` says, and write the run directory `out`; return `out`.

    - `resume` continues from the last checkpoint in `out`, if there is one. `config` must be that of the run in `out`;
      if `chosen` names options of `ultr train`, only these are compared, and the others are those of the run.
    - `overwrite` replaces an existing run, which stays usable until the new run is complete.
    - `warm_start` is another run directory, as `config.warm_start`; training starts from its ranker.
    - `log` is a log in memory, which is used in place of `config.data`.
    - `shared` is a folder for bias models, used by all runs with the same data, seed and bias options.
    - `on_note` gets a message for each change that was made to the log on reading it (`Log.notes`).
    - `on_warning` is called with each problem of the data; None if the data were checked before.

    Under torchrun all processes train and rank 0 writes. Processes that torchrun restarts resume their run.
    """
    out = Path(out)
    shared = None if shared is None else Path(shared)
    if warm_start is not None:
        config = replace(config, warm_start=str(warm_start))
    if config.warm_start is not None and not is_trees(config.ranker):
        config = replace(config, warm_start=str(network_of(Path(config.warm_start))))
    listeners = Listeners(on_bias_progress, on_progress, checkpoint_seconds)
    with process_group(config.training.device):
        place = _find_place(out, resume=resume, overwrite=overwrite or config.joins)
        if place.resume and (place.folder / "config.json").is_file():
            saved = _config_of(place.folder)
            _check_same(config, saved, chosen, out)
            config = saved
        if main_decides(place.resume and (place.folder / "model").is_dir()):
            _clean_up(place)
            return out
        begin_stage("reading the data")
        # Data and options are checked before anything is written.
        config, run_data = _load_data(config, log)
        for note in notes_of(config, run_data):
            on_note(note)
        torch.manual_seed(config.training.seed)
        if on_warning is not None:
            begin_stage("looking for problems of the data")
            run_data = replace(run_data, warnings=tuple(find_traps(config, run_data)))
            for warning in run_data.warnings:
                on_warning(warning)
        run = make_run(config, run_data, network=out)
        with _writing(place, run.config) as finished_elsewhere:
            if not finished_elsewhere:
                with threads_for(run_data.train.rows):
                    run.train(place.folder, shared, listeners)
        return out


def train_both(
    configs: Sequence[RunConfig],
    out: str | Path,
    *,
    on_start: Callable[[RunConfig], None] = lambda _: None,
    on_warning: Callable[[Pitfall], None] | None = lambda _: None,
    **options: Any,
) -> Path:
    """Train the first configuration, a network, into `out`; then the second one, if there is one: trees that join it.

    `options` are those of `run_training`. `on_start` gets each configuration that is trained. Trees are left out if
    the log is larger than memory, or if `out` cannot be replaced. A resumed run has both if it was started so.
    """
    out, chosen = Path(out), options.get("chosen")
    begun = successor(out) if is_being_replaced(out) else out
    has_trees = options.get("resume") and (begun / "config.json").is_file() and _config_of(begun).joins
    if has_trees and len(configs) > 1:
        _check_same(configs[0], _config_of(network_of(out)), chosen, out)
    first = configs[-1] if has_trees else configs[0]
    on_start(first)
    run_training(first, out, on_warning=on_warning, **options)
    network = _config_of(out)
    if network.both and not (network.joins or network.stream == "yes" or out.is_mount()):
        # A resumed run has options that `configs` do not have, unless all options were compared.
        trees = configs[1] if chosen is None and len(configs) > 1 else trees_for(network)
        on_start(trees)
        again = {**options, "resume": False, "overwrite": False, "on_note": lambda _: None}
        run_training(trees, out, on_warning=lambda _: None, **again)
    return out


def _config_of(run: Path) -> RunConfig:
    return RunConfig.from_json(read_json(run / "config.json"), where=run)


def run_together(
    configs: Sequence[RunConfig], outs: Sequence[Path], shared: Path, later: Sequence[RunConfig] = ()
) -> None:
    """Train or resume runs of networks that differ only in seed and learning rate, together if they can be.

    The directory of each run has the same content as after `run_training`, up to rounding. The bias models of runs that
    will be trained `later` are fitted too, in the folder `shared`.
    """
    places = [_find_place(out, resume=True, overwrite=False) for out in outs]
    left = [number for number, place in enumerate(places) if not (place.folder / "model").is_dir()]
    runs = [make_network_run(configs[number]) for number in left]
    folders = [places[number].folder for number in left]
    if len(runs) < 2 or not can_train_together(runs, folders):
        for number in left:
            run_training(configs[number], outs[number], resume=True, shared=shared, on_warning=None)
        return
    with ExitStack() as writing:
        for number, run in zip(left, runs, strict=True):
            if writing.enter_context(_writing(places[number], run.config)):
                raise OutputError("another process has finished this run", where=outs[number], hint="start again")
        train_together(runs, folders, shared, later)


def make_run(config: RunConfig, run_data: RunData, *, network: Path | None = None) -> NetworkRun | TreeRun:
    """Return a run of networks or trees, with all its options checked; trees may join the run `network`."""
    if config.warm_start is not None and (config.both or is_trees(config.ranker)):
        run_data = with_codes_of(Path(config.warm_start), run_data)
    if not is_trees(config.ranker):
        return NetworkRun(config, run_data)
    return TreeRun(config, run_data, network=network)


def _load_data(config: RunConfig, log: Log | None) -> tuple[RunConfig, RunData]:
    """Load the data; in the returned configuration `stream` is decided (yes or no), so a resumed run does the same."""
    if log is not None:
        return config, split_log(log, config)
    run_data = load_run_data(config)
    if is_lists(config.data):
        config = replace(config, stream="no" if run_data.stream is None else "yes")
        check_equal(int(run_data.stream is None), "whether lists are read into memory")
    return config, run_data


# --- The folder of a run --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The folder in which a run is trained: `out`, or a hidden folder next to it that replaces `out` at the end."""

    out: Path
    folder: Path
    resume: bool
    replaces: bool  # `out` has a run, which the new run replaces

    @property
    def existed(self) -> bool:
        return not self.replaces and self.folder.exists()


def _find_place(out: Path, *, resume: bool, overwrite: bool) -> Place:
    """Return the folder to train in, and whether to resume; raise OutputError if `out` must not be written."""
    if is_main():
        settle(out)
    resume = main_decides(resume or (restarts() > 0 and job_id() in (_job_of(out), _job_of(successor(out)))))
    if is_main():
        _check_output(out, resume=resume, overwrite=overwrite)
    replaces = main_decides(not resume and out.is_dir() and any(out.iterdir()))
    in_successor = replaces or main_decides(resume and is_being_replaced(out))
    return Place(out, successor(out) if in_successor else out, resume, replaces)


def _job_of(run: Path) -> str | None:
    """Return the id of the torchrun that started a run, or None."""
    try:
        return (run / JOB).read_text()
    except OSError:
        return None


def _check_output(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise OutputError if `out` exists and may not be overwritten, is not a run, or cannot be resumed."""
    if out.exists() and not (resume or overwrite):
        raise OutputError("the output exists already", where=out, hint="pass --resume or --overwrite, or another --out")
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if resume and "config.json" not in names and names & {"model", "checkpoints", "metrics.jsonl"}:
        hint = "train again with --overwrite"
        raise OutputError("the run has no config.json, so it cannot be resumed", where=out, hint=hint)
    if not resume and names and not names & {"config.json", ".lock"}:
        what = "the folder exists and is not a run, so it is not replaced"
        raise OutputError(what, where=out, hint="pass another --out")


def _check_same(config: RunConfig, saved: RunConfig, chosen: Collection[str] | None, out: Path) -> None:
    """Raise OptionError if options differ from those of the run that is resumed."""
    differences = {
        name: values for name, values in config.differences(saved).items() if chosen is None or name in chosen
    }
    if differences:
        shown = {name: "the log" if name == "log" else f"--{name.replace('_', '-')}" for name in differences}
        texts = [f"{shown[n]} ({_brief(given)}; the run has {_brief(had)})" for n, (given, had) in differences.items()]
        hint = "leave them out, or train again with --overwrite or another --out"
        raise OptionError(f"options differ from those of the run: {', '.join(texts)}", where=out, hint=hint)


def _brief(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:199]}…"


def _clean_up(place: Place) -> None:
    """Remove the temporary files of a complete run whose process was killed before it could remove them."""
    if is_main():
        with lock_run(place.folder) if place.folder != place.out else nullcontext():
            remove_abandoned(place.folder)
            for name in ("checkpoints", STAGE):
                shutil.rmtree(place.folder / name, ignore_errors=True)
            if place.folder != place.out:
                finish_successor(place.out)
    barrier()


# --- Lock and resume ------------------------------------------------------------------------------------------------


@contextmanager
def _writing(place: Place, config: RunConfig) -> Iterator[bool]:
    """Lock the run directory and write config.json; at the end, let a replacement take the name of the old run.

    Yield True if another process has finished the run in the meantime. If the run fails before it has learned
    anything, delete it, so that the corrected command can use the same folder.
    """
    out, folder, existed = place.out, place.folder, place.existed
    with ExitStack() as locks:
        if is_main():
            locks.enter_context(lock_run(out))
        if main_decides(place.resume and ((folder / "model").is_dir() or (existed and not folder.exists()))):
            yield True
            return
        try:
            if is_main():
                if place.replaces:
                    begin_successor(out)
                elif not place.resume:  # that of a run that was deleted
                    shutil.rmtree(successor(out).parent, ignore_errors=True)
                if folder != out:
                    locks.enter_context(lock_run(folder))
                if size() > 1:
                    with output_errors(folder):
                        (folder / JOB).write_text(job_id())
                write_json(folder / "config.json", config.to_json())
            barrier()
            yield False
        except BaseException:
            learned = any((folder / name).is_dir() for name in (BIAS, STAGE, "checkpoints")) or read_metrics(folder)
            if is_main() and not (existed or learned):
                shutil.rmtree(folder if folder == out else folder.parent, ignore_errors=True)
            raise
        if is_main():
            (folder / JOB).unlink(missing_ok=True)
            if folder != out:
                finish_successor(out)
        barrier()
