"""Update a run with a new log: training starts from its ranker and bias model, and a worse ranker is not accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ultr.bias.pitfalls import Pitfall
from ultr.bias.propensities import BIAS_FILE
from ultr.errors import OptionError
from ultr.evaluation.judgement import Judged, Judgement, judge_rankers
from ultr.evaluation.scores import OFF_POLICY
from ultr.log.segments import by_segment
from ultr.log.shards import is_lists
from ultr.rankers.boosters import is_trees
from ultr.rankers.model import load_model
from ultr.training.config import RunConfig, with_training
from ultr.training.data import columns_for_run, read_data
from ultr.training.finish import Listeners
from ultr.training.fresh import fresh_requests, split_of
from ultr.training.joined import OF_NETWORKS, is_joined, network_of
from ultr.training.run import train_both
from ultr.utils.files import check_output, sync_folder, take_name
from ultr.utils.jsonfiles import read_json

JUDGED = 0.2  # share of the requests of a new log that the gate compares the two rankers on
PARTS = 5  # an update has this part of the steps of the first training
CANDIDATE = ".candidate"  # end of the name of a new run until it is accepted


@dataclass(frozen=True)
class Update:
    """A new run, its comparison with the old one, and whether the gate accepted it."""

    run: Path  # `out`; or the folder next to it, if the run was not accepted
    accepted: bool
    metric: str
    judgement: Judgement
    warnings: tuple[str, ...]

    @property
    def judged(self) -> Judged:
        """The value of the new ranker, and its difference to the old one."""
        return self.judgement.rankers["the new run"][self.metric]


def update_run(
    run: Path,
    data: str,
    out: Path,
    *,
    gate: float = 0.95,
    refit_bias: bool = False,
    decay: float | None = None,
    time: str | None = None,
    listeners: Listeners | None = None,
    on_note: Callable[[str], None] = lambda _: None,
    on_warning: Callable[[Pitfall], None] = lambda _: None,
    **training: Any,
) -> Update:
    """Train a run further on a new log, and write it to `out`, unless it is worse than `run` on requests of that log.

    Training has the options of `run`; `training` replaces some (steps and learning rate only of the network, if the
    run has both). It starts from the ranker and the bias model of `run`,
    and keeps its examination, unless `refit_bias` is set. `decay` is the half-life of the weights of requests in days,
    and `time` the column of their times, if days are neither partitions nor several logs.

    Then both rankers are compared off policy, on requests that neither was trained or selected on. The new run is
    rejected if the interval of the difference with confidence `gate` is below 0. The new run is in a folder next to
    `out` until it is accepted. If the process is killed at any moment, the next call with the same arguments resumes.
    """
    if not 0 < gate < 1:
        raise OptionError("the gate must be above 0 and below 1", got=gate, hint="pass --gate 0.95")
    how: dict[str, Any] = {"refit_bias": refit_bias, "decay": decay, "time": time}
    configs = [update_config(network_of(run), data, **how, **training)]
    if is_joined(run):
        of_both = {name: value for name, value in training.items() if name not in OF_NETWORKS}
        configs.append(update_config(run, data, **how, **of_both))
    config = configs[-1]
    candidate = out.with_name(out.name + CANDIDATE)
    accepted_before = _is_result(out, config) and _is_result(network_of(out), configs[0])
    if not accepted_before:
        check_output(out, overwrite=False, folder=True)
    listeners = listeners or Listeners()
    candidate = out if accepted_before else candidate
    train_both(
        configs,
        candidate,
        resume=candidate.exists(),
        on_note=on_note,
        on_warning=on_warning,
        on_bias_progress=listeners.on_bias_progress,
        on_progress=listeners.on_progress,
    )
    metric = config.selection if config.selection.startswith(OFF_POLICY) else f"{OFF_POLICY}reward@10"
    judgement, warnings = compare_runs(run, candidate, config, metric)
    test = judgement.rankers["the new run"][metric].difference
    accepted = accepted_before or test is None or not (test.difference < 0 and test.p < 1 - gate)
    if accepted and not accepted_before:
        take_name(candidate, out, overwrite=False)
        sync_folder(out.resolve().parent)
    return Update(out if accepted else candidate, accepted, metric, judgement, tuple(warnings))


def _is_result(out: Path, config: RunConfig) -> bool:
    """Return whether `out` is a finished run of this configuration: the process was killed after it was accepted."""
    if not ((out / "model").is_dir() and (out / "config.json").is_file()):
        return False
    return not config.differences(RunConfig.from_json(read_json(out / "config.json"), where=out))


def update_config(
    run: Path,
    data: str,
    *,
    refit_bias: bool = False,
    decay: float | None = None,
    time: str | None = None,
    **training: Any,
) -> RunConfig:
    """Return the configuration of an update: that of the run, with the new data, its ranker and its bias."""
    config = RunConfig.from_json(read_json(run / "config.json"), where=run)
    if config.users is not None or config.learn_from != "feedback":
        raise OptionError("only a run that was trained on a log can be updated", got=run, hint="use ultr train")
    training = {**_shorter(config), **{name: value for name, value in training.items() if value is not None}}
    model = load_model(run)
    bias = read_json(run / BIAS_FILE) if (run / BIAS_FILE).is_file() else {}
    keeps_theta = bias.get("theta") and config.propensities is None and not refit_bias
    return with_training(
        replace(
            config,
            data=data,
            columns=config.columns if is_lists(data) or not model.columns else model.columns,
            warm_start=str(run),
            bias=str(run / BIAS_FILE) if keeps_theta else None,
            decay=decay,
            time=time or (config.time if config.split == "time" else None),
            judged=0.0 if is_lists(data) else config.judged or JUDGED,
            stream="auto",
        ),
        **training,
    )


def _shorter(config: RunConfig) -> dict[str, int]:
    """Return the training options of an update of a run; those of a run that is an update itself stay as they are.

    An update starts near its end, so it takes fewer steps than the first training, and stops earlier.
    """
    options = config.training
    if config.warm_start is not None:
        return {}
    fewer = {name: max(1, getattr(options, name) // PARTS) for name in ("steps", "bias_steps")}
    if is_trees(config.ranker):
        fewer |= {"evaluate_every": max(1, options.evaluate_every // 2), "patience": -(-(options.patience or 0) // 2)}
    return fewer


def compare_runs(old: Path, new: Path, config: RunConfig, metric: str) -> tuple[Judgement, list[str]]:
    """Judge two runs on requests of the new run's log that it was neither trained nor selected on."""
    models = {"the old run": (old, load_model(old)), "the new run": (new, load_model(new))}
    columns = {**columns_for_run(new, models["the new run"][1], {}), "where": list(config.where)}
    log, _ = read_data(config.data, split="test", data_dir=config.data_dir, columns=columns)
    views = {name: (folder, model.view(log)) for name, (folder, model) in models.items()}
    judged, warnings = fresh_requests(views, split_of(config.data, "test", config.data_dir), unselected=True)
    rows, some = np.repeat(judged, log.lengths), log.select(judged)
    scores = {name: np.zeros(log.rows) for name in models}
    for name, (_, model) in models.items():
        scores[name][rows] = model.score(some)
    log = views["the new run"][1]
    log, segments = by_segment(log) if "segment" in log.context else (log, ())
    judgement = judge_rankers(
        log,
        scores,
        [metric],
        label=config.label,
        judged=judged,
        known=config.propensities,
        segments=segments,
        against="the old run",
    )
    return judgement, warnings
