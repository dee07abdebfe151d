"""Update a run with a new log: training starts from its ranker and bias model, and a worse ranker is not accepted."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ultr.bias.propensities import BIAS_FILE
from ultr.errors import OptionError
from ultr.evaluation.comparing import RankerComparison, RankerValue, compare_rankers
from ultr.evaluation.scores import OFF_POLICY, judging_metric
from ultr.log.shards import is_lists
from ultr.log.table import by_segment
from ultr.rankers.model import load_model
from ultr.training.config import Config, differences
from ultr.training.data import DECISIONS, Decisions, columns_for_run, fingerprint_of, read_data
from ultr.training.folder import CONFIG, MODEL, current_folder, find_folder, read_config, settle
from ultr.training.loop import Listeners
from ultr.training.outcome import fresh_requests, split_of
from ultr.training.run import run_training
from ultr.utils.files import check_output, sync_folder, take_name
from ultr.utils.jsonfiles import read_json
from ultr.utils.stores import fetched, url_below

TEST = 0.2  # least share of the requests of a new log that the gate compares the two rankers on
PARTS = 5  # an update has this part of the steps of the first training
CANDIDATE = ".candidate"  # end of the name of a new run until it is accepted


@dataclass(frozen=True)
class Update:
    """A new run, its comparison with the old one, and whether the gate accepted it."""

    run: Path  # `out`; or the folder next to it, if the run was not accepted
    accepted: bool
    metric: str
    comparison: RankerComparison
    warnings: tuple[str, ...]

    @property
    def value(self) -> RankerValue:
        """The value of the new ranker, and its difference to the old one."""
        return self.comparison.rankers["the new run"][self.metric]


def update_run(
    run: str | Path,
    data: str,
    out: Path,
    *,
    gate: float = 0.95,
    refit_bias: bool = False,
    decay: float | None = None,
    time: str | None = None,
    overwrite: bool = False,
    listeners: Listeners | None = None,
    **training: Any,
) -> Update:
    """Train a run further on a new log, and write it to `out`, unless it is worse than `run` on requests of that log.

    Training has the options of `run`; `training` replaces some, by their names in `make_config`. It starts from the
    rankers and the bias models of `run`, and keeps its examination, unless `refit_bias` is set. `decay` is the
    half-life of the weights of requests in days, and `time` the column of their times, if days are neither partitions
    nor several logs.

    Then both rankers are compared off policy, on requests that neither was trained or selected on. The new run is
    rejected if the interval of the difference with confidence `gate` is below 0. The new run is in a folder next to
    `out` until it is accepted. If the process is killed at any moment, the next call with the same arguments resumes.
    If the log or the arguments have changed, it starts again. `overwrite` replaces another run at `out`.
    """
    if not 0 < gate < 1:
        raise OptionError("the gate must be above 0 and below 1", got=gate, hint="pass --gate 0.95")
    config = update_config(run, data, refit_bias=refit_bias, decay=decay, time=time, **training)
    candidate = out.with_name(out.name + CANDIDATE)
    listeners, content = listeners or Listeners(), fingerprint_of(config)
    accepted_before = (out / MODEL).is_dir() and _is_of(out, config, content)  # the process was killed afterwards
    if accepted_before:
        candidate = out
    else:
        check_output(out, overwrite=overwrite, folder=True)
        find_folder(out, resume=False, overwrite=True)  # what is not a run is never replaced
        begun = current_folder(candidate)
        resume = begun.exists() and _is_of(begun, config, content)
        if begun.exists() and not resume:
            listeners.on_note(f"{begun} is of another log or other options, so it is trained again")
        run_training(config, candidate, resume=resume, overwrite=not resume, listeners=listeners)
    metric = judging_metric(config.selection) if config.selection.startswith(OFF_POLICY) else f"{OFF_POLICY}reward@10"
    comparison, warnings = compare_runs(fetched(run), candidate, config, metric)
    test = comparison.rankers["the new run"][metric].difference
    accepted = accepted_before or test is None or not (test.difference < 0 and test.p < 1 - gate)
    if accepted and not accepted_before:
        take_name(candidate, out, overwrite=overwrite)
        sync_folder(out.resolve().parent)
        settle(out)
        shutil.rmtree(candidate, ignore_errors=True)  # the run that it replaced, if the names were exchanged
    return Update(out if accepted else candidate, accepted, metric, comparison, tuple(warnings))


def _is_of(folder: Path, config: Config, content: str) -> bool:
    """Return whether a folder has a run, perhaps unfinished, of this configuration and this fingerprint of data."""
    if not (folder / CONFIG).is_file() or differences(config, read_config(folder)):
        return False
    return not (folder / DECISIONS).is_file() or Decisions.load(folder).data in ("", content)


def update_config(
    run: str | Path,
    data: str,
    *,
    refit_bias: bool = False,
    decay: float | None = None,
    time: str | None = None,
    **training: Any,
) -> Config:
    """Return the configuration of an update: that of the run, with the new data, its rankers and its bias."""
    here = fetched(run)
    config, decisions = read_config(here), Decisions.load(here)
    if config.users is not None or config.simulation.learn_from != "feedback":
        raise OptionError("only a run that was trained on a log can be updated", got=run, hint="use ultr train")
    bias = read_json(here / BIAS_FILE) if (here / BIAS_FILE).is_file() else {}
    keeps_theta = bias.get("theta") and config.examination.propensities is None and not refit_bias
    columns = {} if is_lists(data) else {**load_model(here).columns, "segment": decisions.segment or "none"}
    changes: dict[str, Any] = {
        "data": data,
        "columns": columns,
        "label": decisions.label,
        "warm_start": str(run),
        "bias": url_below(run, BIAS_FILE) if keeps_theta else None,
        "decay": decay,
        "time": time or (config.data.time if config.data.split == "time" else None),
        "test": 0.0 if is_lists(data) else max(config.data.test, TEST),
        "stream": "auto",
    }
    given = {name: value for name, value in training.items() if value is not None}
    return config.with_options(**changes, **_shorter(config)).with_options(**given)


def _shorter(config: Config) -> dict[str, int]:
    """Return the training options of an update of a run; those of a run that is an update itself stay as they are.

    An update starts near its end, so it takes fewer steps than the first training, and stops earlier.
    """
    if config.training.warm_start is not None:
        return {}
    network, trees = config.network, config.trees
    return {
        "network.steps": max(1, network.steps // PARTS),
        "network.bias_steps": max(1, network.bias_steps // PARTS),
        "trees.rounds": max(1, trees.rounds // PARTS),
        "trees.evaluate_every": max(1, trees.evaluate_every // 2),
        "trees.patience": -(-trees.patience // 2),
    }


def compare_runs(old: Path, new: Path, config: Config, metric: str) -> tuple[RankerComparison, list[str]]:
    """Compare two runs on requests of the new run's log that it was neither trained nor selected on."""
    models = {"the old run": (old, load_model(old)), "the new run": (new, load_model(new))}
    columns = {**columns_for_run(new, models["the new run"][1], {}), "where": list(config.data.where)}
    source, folder = config.data.source, config.data.folder
    log, _ = read_data(source, split="test", data_dir=folder, columns=columns)
    views = {name: (run, model.view(log)) for name, (run, model) in models.items()}
    fresh = fresh_requests(views, split_of(source, "test", folder))
    rows, some = np.repeat(fresh.mask, log.lengths), log.select(fresh.mask)
    scores = {name: np.zeros(log.rows) for name in models}
    for name, (_, model) in models.items():
        scores[name][rows] = model.score(some)
    log = views["the new run"][1]
    log, segments = by_segment(log) if "segment" in log.context else (log, ())
    comparison = compare_rankers(
        log,
        scores,
        [metric],
        label=Decisions.load(new).label,
        test=fresh.mask,
        chosen_on=fresh.chosen_on,
        known=config.examination.propensities,
        segments=segments,
        against="the old run",
    )
    return comparison, fresh.warnings
