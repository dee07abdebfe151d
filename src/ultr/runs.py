"""A run: from a configuration to a run directory with a model that scores."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ultr.arguments import checked
from ultr.boosting import TreeRun
from ultr.checkpoint import (
    append_metrics,
    load_checkpoint,
    load_tensors,
    locked,
    read_json,
    read_metrics,
    rewind_metrics,
    save_checkpoint,
    write_json,
)
from ultr.errors import DataError, LabelError, OptionError, OutputError
from ultr.feeding import Feeding
from ultr.files import output_errors, remove_abandoned
from ultr.log import Log
from ultr.log.shards import is_lists
from ultr.methods import Method, make_method
from ultr.methods.bias_model import BiasModel
from ultr.models import save_model
from ultr.outcomes import write_outcome
from ultr.preparing import Prepared, RunConfig, prepare, split_log
from ultr.processes import (
    check_alike,
    first_says,
    is_first,
    job,
    joined,
    joined_shares,
    own_share,
    restarts,
    size,
    wait_for_all,
)
from ultr.rankers import score_rows
from ultr.rankers.boosters import is_trees
from ultr.replacing import begin_successor, is_being_replaced, settle, successor, take_place
from ultr.stages import BIAS, evaluator, fit_before, judge_of, less_is_better, method_inputs, save_bias, write_bias
from ultr.training import (
    Progress,
    TrainingState,
    check_has_features,
    choose_device,
    start,
    train,
)

JOB = ".job"  # so that processes started again tell their own run from one that was there before


@checked
def run_training(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    warm_start: str | Path | None = None,
    shared: str | Path | None = None,
    log: Log | None = None,
    checkpoint_seconds: float = 10.0,
    on_first: Callable[[Progress], None] = lambda _: None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Train as configured into `out`, going on from its last checkpoint if `resume`; returns `out`.

    A `log` that is at hand is learned from in place of the one that the configuration names. Bias models are looked for
    and left in the folder `shared`, if given, for runs that differ in what comes after; `on_first` hears of their fit.
    With `overwrite`, the run that is there stays as it is until the new one is complete.

    Of several processes, all take part and the first writes. Where torchrun has started them again, they resume.
    """
    out = Path(out)
    warm_start, shared = (None if path is None else Path(path) for path in (warm_start, shared))
    with joined(config.training.device):
        if is_first():
            settle(out)
        resume = first_says(resume or (restarts() > 0 and job() in (_began(out), _began(successor(out)))))
        if is_first():
            _check_place(out, resume=resume, overwrite=overwrite)
        anew = first_says(not resume and out.is_dir() and any(out.iterdir()))
        place = successor(out) if anew or first_says(resume and is_being_replaced(out)) else out
        if first_says(resume and (place / "model").is_dir()):  # which the first may move at once
            return _settled(out, place)
        if resume and (place / "config.json").is_file():
            config = RunConfig.from_json(read_json(place / "config.json"), where=place)
        # What cannot be used is refused before anything is written.
        prepared = prepare(config) if log is None else split_log(log, config)
        if log is None and is_lists(config.data):
            config = replace(config, stream="no" if prepared.stream is None else "yes")  # also when it goes on
            check_alike(int(prepared.stream is None), "whether lists are read into memory")
        torch.manual_seed(config.training.seed)
        learn = learner_of(config, prepared, warm_start)
        begun_before = not anew and place.exists()
        with ExitStack() as held:
            if is_first():
                held.enter_context(locked(out))
            if first_says(resume and ((place / "model").is_dir() or (begun_before and not place.exists()))):
                return out  # by another process, in the meantime
            try:
                if is_first():
                    if anew:
                        begin_successor(out)
                    if place != out:
                        held.enter_context(locked(place))
                    if size() > 1:
                        with output_errors(place):
                            (place / JOB).write_text(job())
                    write_json(place / "config.json", config.to_json())
                wait_for_all()
                learn(place, shared, checkpoint_seconds, on_first, on_progress)
            except (DataError, LabelError, OptionError):
                if is_first() and not (begun_before or (place / "checkpoints").is_dir() or read_metrics(place)):
                    # It learned nothing: the same command can be given again, mended.
                    shutil.rmtree(place if place == out else place.parent, ignore_errors=True)
                raise
            if is_first() and place != out:
                take_place(out)
            wait_for_all()
        return out


def _began(run: Path) -> str | None:
    """Which torchrun began a run, if one did."""
    try:
        return (run / JOB).read_text()
    except OSError:
        return None


def _settled(out: Path, place: Path) -> Path:
    """A run that was complete, cleared up where it was killed before it could."""
    if is_first():
        with locked(place) if place != out else nullcontext():
            remove_abandoned(place)
            shutil.rmtree(place / "checkpoints", ignore_errors=True)
            if place != out:
                take_place(out)
    wait_for_all()
    return out


def _check_place(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse to write over what is there unasked, to replace what is no run, and to go on with what has lost its
    configuration.
    """
    if out.exists() and not (resume or overwrite):
        raise OutputError("output exists already", where=out, mend="pass --resume or --overwrite, or another path")
    kept = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if resume and "config.json" not in kept and kept & {"model", "checkpoints", "metrics.jsonl"}:
        mend = "begin again with --overwrite"
        raise OutputError("the run has no config.json, so it cannot go on", where=out, mend=mend)
    if not resume and kept and not kept & {"config.json", ".lock"}:
        raise OutputError("exists and is no run, so it is not replaced", where=out, mend="choose another path")


def learner_of(config: RunConfig, prepared: Prepared, warm_start: Path | None = None) -> Callable[..., None]:
    """What learns as configured into a folder, with all its options checked."""
    if is_trees(config.ranker):
        if warm_start is not None:
            raise OptionError("a warm start is for networks", mend="leave --warm-start out")
        return TreeRun(config, prepared).learn
    check_has_features(prepared.train)  # torch warns of networks without inputs
    method = make_method(config.method, method_inputs(config, prepared), **config.method_options)
    if warm_start is not None:
        _start_from(method, warm_start)
    return partial(_train, config, prepared, method, start(method, prepared.train, config.training))


def _train(
    config: RunConfig,
    prepared: Prepared,
    method: Method,
    state: TrainingState,
    out: Path,
    shared: Path | None,
    checkpoint_seconds: float,
    on_first: Callable[[Progress], None],
    on_progress: Callable[[Progress], None],
) -> None:
    goes_on = load_checkpoint(out, state)
    check_alike(state.step if goes_on else -1, "the step they go on from")
    if not goes_on:
        fit_before(config, prepared, method, shared, on_first)
        if method.first() is not None and is_first():
            save_checkpoint(out, state)
    if is_first():
        rewind_metrics(out, state.step)
    device = choose_device(config.training.device)
    feed = prepared.feed(config.training)
    select, judge = config.selection, judge_of(config, prepared, out, shared)
    judged = evaluator(config, prepared, judge)
    rows = own_share(prepared.validation.rows)

    def evaluate(method: Method) -> dict[str, float]:
        method.eval()
        scores = score_rows(method.score, prepared.validation.features[rows], device=device)
        return judged(joined_shares(scores, prepared.validation.rows, device))

    saved = time.monotonic()
    for progress in train(
        state, feed, evaluate, config.training, select=select, larger_is_better=not less_is_better(select)
    ):
        if is_first():
            append_metrics(out, {"step": progress.step, "loss": progress.loss, **progress.figures})
            if time.monotonic() - saved >= checkpoint_seconds:
                save_checkpoint(out, state)
                saved = time.monotonic()
        on_progress(progress)
    method.load_state_dict(state.best_weights)
    if is_first():
        method.eval()
        scores = score_rows(method.score, prepared.validation.features, device=device)
        write_outcome(config, prepared, scores, judge, out)
        _finish(config, prepared, method, feed, out)
    wait_for_all()


def _finish(config: RunConfig, prepared: Prepared, method: Method, feed: Feeding, out: Path) -> None:
    """Write what was learned."""
    write_bias(config, prepared, method.bias, feed, out)
    if isinstance(model := method.first(), BiasModel):
        save_bias(out / BIAS, model)
    held_out = prepared.validation
    save_model(out / "model", method, prepared.train, data=prepared.fingerprint, held_out=held_out)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    (out / JOB).unlink(missing_ok=True)


def best_evaluation(run: Path) -> tuple[str, dict[str, Any]]:
    """The selection metric of a run, and its best evaluation by it."""
    select = RunConfig.from_json(read_json(run / "config.json"), where=run).selection
    choose = min if less_is_better(select) else max
    try:
        return select, choose(read_metrics(run), key=lambda line: float(line[select]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the run has no figures of '{select}'", where=run, mend="train again") from error


def _start_from(method: Method, run: Path) -> None:
    """Take the weights of another run's ranker, which must be of the same shape."""
    weights = load_tensors(run / "model" / "weights.safetensors")
    own = method.serving()  # whose ranker is the method's
    if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in own.state_dict().items()}:
        raise DataError(
            "its ranker has another shape", where=run, mend="start from a run with the same features and ranker"
        )
    own.load_state_dict(weights)


def with_training(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, training=replace(config.training, **changes))
