"""A run: from a configuration to a run directory with a model that scores."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ultr.checkpoint import (
    append_metrics,
    load_checkpoint,
    load_tensors,
    locked,
    read_json,
    read_metrics,
    rewind_metrics,
    save_checkpoint,
    save_tensors,
    waiting_for,
    write_json,
)
from ultr.errors import DataError, LabelError, OutputError
from ultr.evaluation import FEEDBACK, OFF_POLICY
from ultr.feeding import Feeding
from ultr.files import atomic_path
from ultr.judging import Judge, figures_of, load_judge, make_judge
from ultr.labels import Label
from ultr.log import Log
from ultr.log.segments import slot
from ultr.log.shards import is_lists
from ultr.methods import Method, MethodInputs, make_method, thresholds
from ultr.models import save_model
from ultr.preparing import AUTO, DEFAULT_METHOD, Prepared, RunConfig, prepare, split_log
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
from ultr.simulate import User
from ultr.training import (
    Progress,
    TrainingOptions,
    TrainingState,
    choose_device,
    fit_first,
    start,
    train,
)

JOB = ".job"  # so that processes started again tell their own run from one that was there before
BIAS_BATCHES = 20  # of lists in which a bias model is looked at


def method_inputs(config: RunConfig, prepared: Prepared) -> MethodInputs:
    log, user, segments, positions = prepared.train, prepared.feeding_user, prepared.segments, prepared.positions
    if positions is None:
        positions = () if log.positions is None else tuple(np.unique(log.positions).tolist())
    binary = _binary(log) if prepared.binary is None else prepared.binary
    return MethodInputs(
        label=Label(config.label),
        features=len(log.feature_names),
        positions=positions,
        categories={log.feature_names.index(n): len(values) + 1 for n, values in log.vocabularies.items()},
        ranker=config.ranker,
        ranker_options=config.ranker_options,
        truth=config.learn_from == "truth",
        propensities=_known(config.propensities, positions, segments),
        feature_names=log.feature_names,
        binary=binary if user is None else user.binary_actions,
    )


def _known(
    propensities: Mapping[str, float] | None, positions: tuple[int, ...], segments: tuple[str, ...]
) -> dict[int, float] | None:
    """Known examination by position id; positions of all segments may share theirs."""
    if propensities is None:
        return None
    found = {}
    for position in positions:
        names = slot(position, segments), slot(position, segments).partition("@")[0]
        known = next((propensities[name] for name in names if name in propensities), None)
        if known is None:
            raise DataError("a position has no propensity", got=names[0], mend="give one for every position shown")
        found[position] = known
    return found


def _binary(log: Log) -> tuple[str, ...]:
    """The actions of a log that are 0 or 1."""
    return tuple(name for name, values in log.actions.items() if bool(np.isin(values, (0, 1)).all()))


def run_training(
    config: RunConfig,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    warm_start: Path | None = None,
    shared: Path | None = None,
    log: Log | None = None,
    checkpoint_seconds: float = 10.0,
    on_first: Callable[[Progress], None] = lambda _: None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Train as configured into `out`, going on from its last checkpoint if `resume`; returns `out`.

    A `log` that is at hand is learned from in place of the one that the configuration names. Bias models are looked for
    and left in the folder `shared`, if given, for runs that differ in what comes after; `on_first` hears of their fit.

    Of several processes, all take part and the first writes. Where torchrun has started them again, they resume.
    """
    with joined(config.training.device):
        resume = first_says(resume or (restarts() > 0 and _began(out) == job()))
        if is_first() and out.exists() and not (resume or overwrite):
            raise OutputError("output exists already", where=out, mend="pass --resume or --overwrite, or another path")
        if resume and (out / "model").is_dir():
            return out
        if resume and (out / "config.json").is_file():
            config = RunConfig.from_json(read_json(out / "config.json"), where=out)
        # What cannot be used is refused before anything is written.
        prepared = prepare(config) if log is None else split_log(log, config)
        if log is None and is_lists(config.data):
            config = replace(config, stream="no" if prepared.stream is None else "yes")  # also when it goes on
            check_alike(int(prepared.stream is None), "whether lists are read into memory")
        torch.manual_seed(config.training.seed)
        method = make_method(config.method, method_inputs(config, prepared), **config.method_options)
        if warm_start is not None:
            _start_from(method, warm_start)
        state = start(method, prepared.train, config.training)
        begun_before = out.exists()
        try:
            with locked(out) if is_first() else nullcontext():
                if is_first():
                    if overwrite and not resume:
                        _empty(out)
                    if size() > 1:
                        (out / JOB).write_text(job())
                    write_json(out / "config.json", config.to_json())
                wait_for_all()
                _train(config, prepared, method, state, out, shared, checkpoint_seconds, on_first, on_progress)
        except (DataError, LabelError):
            if is_first() and not (begun_before or (out / "checkpoints").is_dir() or read_metrics(out)):
                # It learned nothing: the same command can be given again, mended.
                shutil.rmtree(out, ignore_errors=True)
            raise
        return out


def _began(run: Path) -> str | None:
    """Which torchrun began a run, if one did."""
    try:
        return (run / JOB).read_text()
    except OSError:
        return None


def _empty(run: Path) -> None:
    for path in run.iterdir():
        if path.name != ".lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


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
        _fit_first(config, prepared, method, shared, on_first)
        if method.first() is not None and is_first():
            save_checkpoint(out, state)
    if is_first():
        rewind_metrics(out, state.step)
    device = choose_device(config.training.device)
    feed = prepared.feed(config.training)
    select, judge = config.selection, _judge(config, prepared, out, shared)
    rows = own_share(prepared.validation.rows)

    def evaluate(method: Method) -> dict[str, float]:
        method.eval()
        scores = score_rows(method.score, prepared.validation.features[rows], device=device)
        return mean_figures(
            prepared.validation,
            joined_shares(scores, prepared.validation.rows, device),
            [select],
            user=prepared.user,
            label=config.label,
            judge=judge,
            segments=prepared.segments,
        )

    saved = time.monotonic()
    for progress in train(
        state, feed, evaluate, config.training, select=select, larger_is_better=not _less_is_better(select)
    ):
        if is_first():
            append_metrics(out, {"step": progress.step, "loss": progress.loss, **progress.figures})
            if time.monotonic() - saved >= checkpoint_seconds:
                save_checkpoint(out, state)
                saved = time.monotonic()
        on_progress(progress)
    method.load_state_dict(state.best_weights)
    if is_first():
        _finish(config, prepared, method, feed, out)
    wait_for_all()


def _finish(config: RunConfig, prepared: Prepared, method: Method, feed: Feeding, out: Path) -> None:
    """Write what was learned."""
    if (bias := method.bias(feed(step) for step in range(BIAS_BATCHES))) is not None:
        cut = thresholds(config.method, config.label, config.method_options)
        if prepared.segments:
            bias["positions"] = [slot(position, prepared.segments) for position in bias["positions"]]
        write_json(out / "bias.json", {**bias, "label": f"{config.label} > 0" if cut else config.label})
    save_model(out / "model", method, prepared.train, data=prepared.fingerprint)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    (out / JOB).unlink(missing_ok=True)


def _judge(config: RunConfig, prepared: Prepared, out: Path, shared: Path | None) -> Judge | None:
    """What the run is selected by off policy, if it is: kept with it, and shared between runs of the same requests."""
    if not config.selection.startswith(OFF_POLICY):
        return None
    if not is_first():
        wait_for_all()
    if (judge := load_judge(out / "judge")) is None:
        judge = _new_judge(config, prepared, out, shared)
    if is_first():
        wait_for_all()
    return judge


def _new_judge(config: RunConfig, prepared: Prepared, out: Path, shared: Path | None) -> Judge:
    alike = replace(config, method=DEFAULT_METHOD, ranker="mlp", learn_from="feedback")
    kept = None if shared is None else shared / f"judge-{_key(alike, {})}"
    if kept is not None and (judge := load_judge(kept)) is not None:
        judge.save(out / "judge")
        return judge
    inputs = method_inputs(config, prepared)
    judge = make_judge(
        prepared.train,
        label=config.label,
        known=inputs.propensities,
        segments=prepared.segments,
        categories=inputs.categories,
        user=prepared.feeding_user,
        sessions=config.training.bias_steps * config.training.batch,
        seed=config.training.seed,
    )
    for folder in (out / "judge", kept):
        if folder is not None:
            judge.save(folder)
    return judge


def _key(config: RunConfig, settings: Mapping[str, Any]) -> str:
    """The same for runs that have their data, seed and these settings in common."""
    own = config.training
    training = TrainingOptions(seed=own.seed, batch=own.batch, bias_steps=own.bias_steps)
    about = asdict(replace(config, method_options={}, ranker_options={}, select=AUTO, training=training))
    return hashlib.sha256(json.dumps([about, settings], sort_keys=True).encode()).hexdigest()[:16]


def _fit_first(
    config: RunConfig,
    prepared: Prepared,
    method: Method,
    shared: Path | None,
    on_progress: Callable[[Progress], None],
) -> None:
    """Fit what comes before the ranker, or take it from a run with the same data, seed and options of it."""
    model = method.first()

    def fit() -> None:
        user, stream = prepared.feeding_user, prepared.stream
        fit_first(method, prepared.train, config.training, user=user, stream=stream, on_progress=on_progress)

    if shared is None or model is None:
        fit()
        return
    key = _key(config, model.settings())
    with waiting_for(shared / key):
        kept = shared / f"{key}.safetensors"
        if kept.is_file():
            model.load_state_dict(load_tensors(kept))
            return
        fit()
        with atomic_path(kept, overwrite=True) as temporary:
            save_tensors(temporary, model.state_dict())


def mean_figures(
    log: Log,
    scores: np.ndarray,
    metrics: list[str],
    *,
    user: User | None,
    label: str,
    judge: Judge | None = None,
    segments: tuple[str, ...] = (),
) -> dict[str, float]:
    figures = figures_of(log, scores, metrics, user=user, label=label, judge=judge, segments=segments)
    return {name: float(np.average(values, weights=log.weights)) for name, values in figures.items()}


def best_evaluation(run: Path) -> tuple[str, dict[str, Any]]:
    """The selection metric of a run, and its best evaluation by it."""
    select = RunConfig.from_json(read_json(run / "config.json"), where=run).selection
    choose = min if _less_is_better(select) else max
    return select, choose(read_metrics(run), key=lambda line: float(line[select]))


def _less_is_better(metric: str) -> bool:
    return metric.removeprefix(FEEDBACK) == "arp"


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
