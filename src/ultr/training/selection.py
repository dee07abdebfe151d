"""Choose the best step of a run by a metric on validation requests.

Without true labels, a judge estimates the metric: a model that was fitted to the feedback of the training requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ultr.bias.logging_policy import share_logging_score
from ultr.datasets.users import User
from ultr.errors import DataError
from ultr.evaluation.judge import Judge, evaluate_requests, load_judge, make_judge
from ultr.evaluation.scores import FEEDBACK, OFF_POLICY, ScoreMetrics
from ultr.log import Log
from ultr.rankers.boosters import is_trees
from ultr.training.checkpoints import read_metrics
from ultr.training.config import AUTO, DEFAULT_METHOD, RunConfig, with_training
from ultr.training.data import RunData, cached_run_data, load_run_data
from ultr.training.inputs import known_theta
from ultr.utils.devices import choose_device
from ultr.utils.distributed import barrier, is_main
from ultr.utils.jsonfiles import read_json
from ultr.utils.stages import begin_stage

JUDGE = "judge"  # folder in a run directory
EARLIER = "off-policy-reward@10"  # what `auto` meant for a log in earlier versions


def less_is_better(metric: str) -> bool:
    return metric.removeprefix(FEEDBACK) == "arp"


def best_evaluation(run: Path) -> tuple[str, dict[str, Any]]:
    """Return the name of a run's selection metric, and the evaluation (line of metrics.jsonl) where it is best."""
    config, lines = RunConfig.from_json(read_json(run / "config.json"), where=run), read_metrics(run)
    select = config.selection
    if config.select == AUTO and lines and EARLIER in lines[0]:
        select = EARLIER
    choose = min if less_is_better(select) else max
    try:
        return select, choose(lines, key=lambda line: float(line[select]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the run has no evaluations by '{select}'", where=run, hint="train again") from error


def judge_of(
    config: RunConfig, run_data: RunData, out: Path, shared: Path | None, *, known: Mapping[int, float] | None
) -> Judge | None:
    """Return the judge of a run; None if its selection metric is not an `off-policy-` metric.

    The judge is saved in the run directory, and in the folder `shared` for other runs with the same requests. `known`
    maps position ids to the known probability that the position is seen.
    """
    if not config.selection.startswith(OFF_POLICY):
        return None
    if not is_main():
        barrier()
    if (judge := load_judge(out / JUDGE)) is None:
        begin_stage("making the judge")
        judge = _new_judge(config, run_data, out, shared, known)
    if is_main():
        barrier()
    return judge


def share_judge(config: RunConfig, shared: Path) -> None:
    """Make the judge of the runs with this data and seed, if there is none yet, in the folder `shared`."""
    run_data = cached_run_data(config)
    _new_judge(config, run_data, None, shared, known_theta(config, run_data))


def has_judge(config: RunConfig, shared: Path) -> bool:
    """Return whether the folder `shared` has the judge of the runs with this data and seed."""
    return config.selection.startswith(OFF_POLICY) and _stored(config, shared).is_dir()


def common_judge(config: RunConfig, shared: Path) -> Judge:
    """Return the judge of the test requests of a log, which all runs of a comparison share, whatever their seeds.

    It is the judge of the runs with seed 0, in the folder `shared`. Test requests are the same for all seeds.
    """
    first = with_training(config, seed=0)
    if (judge := load_judge(_stored(first, shared))) is not None:
        return judge
    run_data = load_run_data(first) if is_trees(config.ranker) else cached_run_data(first)
    return _new_judge(first, run_data, None, shared, known_theta(first, run_data))


def _common(config: RunConfig) -> RunConfig:
    """Return a configuration that is the same for all runs with the same judge."""
    return replace(config, method=DEFAULT_METHOD, ranker="mlp", sessions=config.sessions_drawn, learn_from="feedback")


def _stored(config: RunConfig, shared: Path) -> Path:
    return shared / f"judge-{_common(config).shared_key({})}"


def _new_judge(
    config: RunConfig, run_data: RunData, out: Path | None, shared: Path | None, known: Mapping[int, float] | None
) -> Judge:
    stored = None if shared is None else _stored(config, shared)
    if stored is not None and (judge := load_judge(stored)) is not None:
        if out is not None:
            judge.save(out / JUDGE)
        return judge
    if config.learn_from == "no-bias":
        run_data = cached_run_data(_common(config))  # a judge knows only feedback as it is logged
    if shared is not None:
        share_logging_score(run_data.train, shared)
    judge = make_judge(
        run_data.train,
        label=config.label,
        known=known,
        segments=run_data.segments,
        user=run_data.feeding_user,
        sessions=config.training.bias_steps * config.training.batch,
        seed=config.training.seed,
        device=choose_device(config.training.device),
    )
    for folder in (stored, None if out is None else out / JUDGE):
        if folder is not None:
            judge.save(folder)
    return judge


def evaluator(
    config: RunConfig, run_data: RunData, judge: Judge | None, device: torch.device | str = "cpu"
) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function that takes scores of the validation rows, on the device, and returns {selection metric: value}.

    It is called many times, so the validation requests and the value stay on the device.
    """
    log, select, user, label = run_data.validation, config.selection, run_data.user, config.label
    if judge is not None and select.startswith(OFF_POLICY):
        estimator = judge.estimator(log, select, label=label, segments=run_data.segments, device=device)
        return lambda scores: {select: estimator.mean(scores)}
    return ScoreMetrics(log, select, user=user, label=label, device=device, keep=True).means


def mean_metrics(
    log: Log,
    scores: np.ndarray,
    metrics: list[str],
    *,
    user: User | None,
    label: str,
    judge: Judge | None = None,
    segments: tuple[str, ...] = (),
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Return metric -> mean over the requests of a log, weighted by the request weights of the log."""
    options: dict[str, Any] = {"user": user, "label": label, "judge": judge, "segments": segments, "device": device}
    values = evaluate_requests(log, scores, metrics, **options)
    return {name: float(np.average(per_request, weights=log.weights)) for name, per_request in values.items()}
