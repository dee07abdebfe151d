"""The stage `examine`: estimate examination once, for all parts of a run, and the model of off-policy metrics.

Without true labels, off-policy metrics choose the best step. A model that was fitted to the feedback of the train
requests estimates them (see `ultr.evaluation.off_policy`). It is the same for every method.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ultr.bias.after_click import estimate_after_click, read_actions
from ultr.bias.examination import Examination, estimate_examination
from ultr.bias.logging_policy import share_logging_score
from ultr.bias.propensities import bias_file, read_bias_file, read_bias_theta, theta_by_id
from ultr.datasets.users import simulate_log
from ultr.errors import DataError
from ultr.evaluation.off_policy import OffPolicyModel, fit_off_policy_model, load_off_policy_model
from ultr.evaluation.scores import OFF_POLICY, ScoreMetrics, less_is_better
from ultr.log.labels import Label
from ultr.log.table import slot
from ultr.training.config import Config
from ultr.training.data import Data, Decisions, cached_run_data
from ultr.training.folder import EXAMINATION, read_config, read_metrics, wait_for_lock
from ultr.utils.display import begin_stage
from ultr.utils.distributed import barrier, choose_device, is_main
from ultr.utils.stores import fetched

VALUES = "off-policy"  # folder of a run with the model that estimates off-policy metrics


@dataclass(frozen=True, eq=False)
class Examined:
    """The artefact of `examine`: examination, and the model that estimates off-policy metrics, where they are used."""

    examination: Examination | None = None
    values: OffPolicyModel | None = None


def examine(config: Config, data: Data, run: Path | None, shared: Path | None, *, needed: bool) -> Examined:
    """Estimate the examination of a run once, or read it if the run has it already.

    It is `needed` if the method uses it; the model of off-policy metrics, if these choose the best step. `shared` is a
    folder for runs with the same requests.
    """
    by_values = config.selection.startswith(OFF_POLICY)
    if not (needed or by_values):
        return Examined()
    if not is_main():
        barrier()
    with nullcontext() if shared is None else wait_for_lock(_stored(config, shared, "lock")):
        examined = _examine(config, data, run, shared, by_values=by_values)
    if is_main():
        barrier()
    return examined


def _examine(config: Config, data: Data, run: Path | None, shared: Path | None, *, by_values: bool) -> Examined:
    unbiased = config.simulation.learn_from == "no-bias"
    if unbiased:  # off-policy metrics are of feedback as it is logged
        config = config.with_options(learn_from="feedback")
        data = cached_run_data(config)
    paths = [] if run is None else [run / EXAMINATION]
    folders = [] if run is None else [run / VALUES]
    if shared is not None:
        paths.append(_stored(config, shared, "examination").with_suffix(".json"))
        folders.append(_stored(config, shared, VALUES))
    examination = next((Examination.load(path) for path in paths if path.is_file()), None)
    values = next((load_off_policy_model(folder) for folder in folders if folder.is_dir()), None)
    if examination is None:
        begin_stage("estimating examination")
        if shared is not None:
            share_logging_score(data.train, shared)
        examination = _estimate(config, data)
    for path in paths:
        if not path.is_file() and is_main():
            examination.save(path)
    of_log = None if unbiased else examination  # users without bias have another examination
    if not by_values:
        return Examined(of_log)
    values = values or _fit_values(config, data, examination)
    for folder in folders:
        if not folder.is_dir() and is_main():
            values.save(folder)
    return Examined(of_log, values)


def _estimate(config: Config, data: Data) -> Examination:
    label, known = Label(data.label), known_theta(config, data)
    examination = _estimate_theta(config, data, label) if known is None else Examination.known(known)
    if data.feeding_user is not None or config.simulation.learn_from != "feedback":
        return examination
    actions = estimate_after_click(data.train, label, seed=config.seed)
    if (bias := config.examination.bias) is not None:  # its curves come with its examination
        path = bias_file(fetched(bias))
        known_actions = read_actions(read_bias_file(path), path)
        actions |= {name: each for name, each in known_actions.items() if name in label.actions}
    return replace(examination, actions=actions)


def _estimate_theta(config: Config, data: Data, label: Label) -> Examination:
    return estimate_examination(
        data.train,
        label,
        segments=data.segments,
        user=data.feeding_user,
        sessions=_sessions(config),
        seed=config.seed,
        device=choose_device(config.machine.device),
    )


def _sessions(config: Config) -> int:
    return config.network.bias_steps * config.network.batch


def _fit_values(config: Config, data: Data, examination: Examination) -> OffPolicyModel:
    begin_stage("fitting the model of off-policy metrics")
    train = data.train
    if data.feeding_user is not None:
        sessions = min(len(train) * 4, max(len(train), _sessions(config)))
        train, _ = simulate_log(train, data.feeding_user, seed=config.seed, sessions=sessions)
    return fit_off_policy_model(
        train, label=data.label, examination=examination, segments=data.segments, seed=config.seed
    )


def known_theta(config: Config, data: Data) -> dict[int, float] | None:
    """Return position id -> known examination, from `propensities` or `bias` of the configuration; None if unknown."""
    known = config.examination
    theta = known.propensities if known.bias is None else read_bias_theta(fetched(known.bias))
    return None if theta is None else theta_by_id(theta, data.positions, data.segments, nearest=known.bias is not None)


def known_examination(config: Config, data: Data) -> Examination | None:
    """Return the examination of feedback that the configuration names; None if it names none."""
    known = known_theta(config, data) if config.simulation.learn_from == "feedback" else None
    return None if known is None else Examination.known(known)


# --- Runs of a comparison share them ----------------------------------------------------------------------------------


def _stored(config: Config, shared: Path, name: str) -> Path:
    feedback = config.with_options(learn_from="feedback")
    return shared / f"{name}-{feedback.shared_key('mlp', str(config.label), {})}"


def share_values(config: Config, shared: Path) -> OffPolicyModel:
    """Return the model of off-policy metrics of the runs with this data and seed; make it in the folder `shared`."""
    if (found := load_off_policy_model(_stored(config, shared, VALUES))) is not None:
        return found
    examined = _examine(config, cached_run_data(config), None, shared, by_values=True)
    assert examined.values is not None  # noqa: S101 - `by_values`
    return examined.values


def has_values(config: Config, shared: Path) -> bool:
    """Return whether the folder `shared` has the model of off-policy metrics of the runs with this data and seed."""
    return config.selection.startswith(OFF_POLICY) and _stored(config, shared, VALUES).is_dir()


def common_values(config: Config, shared: Path) -> OffPolicyModel:
    """Return the model of the test requests of a log, which all seeds share: that of the runs with seed 0."""
    return share_values(config.with_options(seed=0), shared)


def examination_of(run: Path) -> tuple[tuple[str, ...], Examination] | None:
    """Return the examination of a run, and the texts of its positions; None if it did not estimate it."""
    if not (run / EXAMINATION).is_file():
        return None
    examination, segments = Examination.load(run / EXAMINATION), Decisions.load(run).segments
    return tuple(slot(position, segments) for position in examination.positions), examination


# --- The best step ----------------------------------------------------------------------------------------------------


def best_evaluation(run: Path, kind: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return the name of a run's selection metric, and its best evaluation (line of metrics.jsonl).

    It is that of a kind of ranker; without one, of the ranker that was trained last.
    """
    select, lines = read_config(run).selection, read_metrics(run)
    choose = min if less_is_better(select) else max
    try:
        kind = kind or lines[-1]["ranker"]
        own = [line for line in lines if line["ranker"] == kind]
        return select, choose(own, key=lambda line: float(line[select]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"the run has no evaluations by '{select}'", where=run, hint="train again") from error


def evaluator(
    config: Config, data: Data, values: OffPolicyModel | None, device: torch.device | str = "cpu"
) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function that takes scores of the validation rows, on the device, and returns {selection metric: value}.

    It is called many times, so the validation requests and the value stay on the device.
    """
    log, select = (data.as_logged or data).validation, config.selection
    if values is not None and select.startswith(OFF_POLICY):
        estimator = values.estimator(log, select, label=data.label, segments=data.segments, device=device)
        return lambda scores: {select: estimator.mean(scores)}
    return ScoreMetrics(log, select, user=data.user, label=data.label, device=device, keep=True).means
