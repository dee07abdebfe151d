"""What runs of networks and of trees have in common: what a method is made from, what is fitted first, the judge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ultr.checkpoint import load_tensors, read_json, save_tensors, waiting_for, write_json
from ultr.errors import DataError
from ultr.evaluation import FEEDBACK, OFF_POLICY
from ultr.feeding import Feeding
from ultr.files import atomic_path
from ultr.formats import check_format
from ultr.judging import Judge, figures_of, load_judge, make_judge
from ultr.labels import Label
from ultr.lists import Lists
from ultr.log import Log
from ultr.log.segments import slot
from ultr.methods import Method, MethodInputs, thresholds
from ultr.methods.base import Learner
from ultr.methods.bias_model import BiasModel
from ultr.methods.boosted_bias import BoostedOutputs
from ultr.preparing import AUTO, DEFAULT_METHOD, Prepared, RunConfig
from ultr.processes import is_first, wait_for_all
from ultr.rankers.boosters import is_trees
from ultr.simulate import User
from ultr.training import Progress, TrainingOptions, fit_first

FORMAT = 1  # of what is told of bias
BIAS_BATCHES = 20  # of lists in which a bias model is looked at
BIAS = "bias"  # of a run: the bias model it learned, for other runs


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
        propensities=_known(_propensities(config), positions, segments),
        feature_names=log.feature_names,
        binary=binary if user is None else user.binary_actions,
    )


def _propensities(config: RunConfig) -> Mapping[str, float] | None:
    """Examination that is known, or was found by another run: `bias` is that run, or its bias.json."""
    if config.bias is None:
        return config.propensities
    path = Path(config.bias)
    path = path / "bias.json" if path.is_dir() else path
    found = read_json(path)
    check_format(found, FORMAT, what="this bias", where=path, mend="train that run again", unmarked=True)
    try:
        theta = {str(k): float(value) for k, value in zip(found["positions"], found["theta"], strict=True)}
    except (KeyError, TypeError, ValueError) as error:
        mend = "name a run of pairwise-em, or its bias.json"
        raise DataError("there is no examination by position here", where=path, mend=mend) from error
    if wrong := [k for k, value in theta.items() if not 0 < value <= 1]:
        got, mend = f"{theta[wrong[0]]}", "use the bias of another run"
        raise DataError("examination should be above 0 and at most 1", where=path, got=got, mend=mend)
    return theta


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
            mend = "give one for every position shown in --propensities"
            raise DataError("a position has no propensity", got=names[0], mend=mend)
        found[position] = known
    return found


def _binary(log: Log) -> tuple[str, ...]:
    """The actions of a log that are 0 or 1."""
    return tuple(name for name, values in log.actions.items() if bool(np.isin(values, (0, 1)).all()))


def judge_of(config: RunConfig, prepared: Prepared, out: Path, shared: Path | None) -> Judge | None:
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
    alike = replace(config, method=DEFAULT_METHOD, ranker="mlp", sessions=config.sessions_drawn, learn_from="feedback")
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
    ranker = "trees" if is_trees(config.ranker) else config.ranker
    about = asdict(replace(config, ranker=ranker, method_options={}, ranker_options={}, select=AUTO, training=training))
    return hashlib.sha256(json.dumps([FORMAT, about, settings], sort_keys=True).encode()).hexdigest()[:16]


# --- Bias models on disk ------------------------------------------------------------------------------------------


def save_bias(folder: Path, model: Learner) -> None:
    """Write what a run has learned about bias, for itself if it is stopped, and for others."""
    with atomic_path(folder, overwrite=True, folder=True) as temporary:
        save_tensors(temporary / "weights.safetensors", model.state_dict())
        if isinstance(getattr(model, "network", None), BoostedOutputs):
            model.network.save(temporary)  # type: ignore[union-attr,operator]


def load_bias(folder: Path, model: Learner) -> None:
    """Take what a run has learned about bias, which must be of the same data and options."""
    try:
        if isinstance(model, BiasModel) and BoostedOutputs.is_at(folder):
            model.network = BoostedOutputs.load(folder, tuple(sorted(model.inputs.categories)))
        model.load_state_dict(load_tensors(folder / "weights.safetensors"))
    except (RuntimeError, KeyError, ValueError) as error:
        mend = "take a run with the same features, positions, label and options of its bias model"
        raise DataError("its bias model is of another kind", where=folder, mend=mend) from error


def _given_bias(config: RunConfig, model: Learner) -> Path | None:
    """The bias model of the run that a configuration names, if it has one."""
    if config.bias is None or not isinstance(model, BiasModel):
        return None
    folder = Path(config.bias) / BIAS
    if not folder.is_dir():
        return None
    label = read_json(Path(config.bias) / "bias.json").get("label")
    if label != config.label:
        mend = f"pass --label '{label}', or its bias.json for examination alone"
        raise DataError("its bias was learned for another label", where=config.bias, got=f"'{label}'", mend=mend)
    return folder


# --- What comes before a ranker -----------------------------------------------------------------------------------


def fit_before(
    config: RunConfig,
    prepared: Prepared,
    method: Method,
    shared: Path | None,
    on_progress: Callable[[Progress], None],
    *,
    fit: Callable[[], None] | None = None,
) -> None:
    """Fit what comes before the ranker, or take it from a run that is named, or from one with the same data, seed and
    options of it. `fit` does it in another way than step by step.
    """
    model = method.first()

    def usual() -> None:
        user, stream = prepared.feeding_user, prepared.stream
        fit_first(method, prepared.train, config.training, user=user, stream=stream, on_progress=on_progress)

    fit = fit or usual
    if model is None:
        fit()
    elif (given := _given_bias(config, model)) is not None:
        load_bias(given, model)
    elif shared is None:
        fit()
    else:
        key = _key(config, {**model.settings(), **({} if fit is usual else {"em": "trees"})})
        with waiting_for(shared / key):
            if (shared / key).is_dir():
                load_bias(shared / key, model)
                return
            fit()
            save_bias(shared / key, model)


def evaluator(config: RunConfig, prepared: Prepared, judge: Judge | None) -> Callable[[np.ndarray], dict[str, float]]:
    """From the scores of validation to the selection metric."""

    def evaluate(scores: np.ndarray) -> dict[str, float]:
        return mean_figures(
            prepared.validation,
            scores,
            [config.selection],
            user=prepared.user,
            label=config.label,
            judge=judge,
            segments=prepared.segments,
        )

    return evaluate


def less_is_better(metric: str) -> bool:
    return metric.removeprefix(FEEDBACK) == "arp"


def write_bias(
    config: RunConfig,
    prepared: Prepared,
    bias: Callable[[Iterable[Lists]], dict[str, Any] | None],
    feed: Feeding,
    out: Path,
) -> None:
    """Write what a method has learned about bias, if it learns it, as it shows in some lists."""
    if (found := bias(feed(step) for step in range(BIAS_BATCHES))) is None:
        return
    cut = thresholds(config.method, config.label, config.method_options, ranker=config.ranker)
    if prepared.segments:
        found["positions"] = [slot(position, prepared.segments) for position in found["positions"]]
    label = f"{config.label} > 0" if cut else config.label
    write_json(out / "bias.json", {"format": FORMAT, **found, "label": label})


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
