"""Update a run with a new log: training starts from its ranker and bias model, and a worse ranker is not accepted."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ultr.bias.propensities import BIAS_FILE
from ultr.checks.pitfalls import Pitfall
from ultr.errors import OptionError
from ultr.evaluation.comparing import RankerComparison, RankerValue
from ultr.evaluation.scores import OFF_POLICY, judging_metric
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.sampling import sample_log
from ultr.log.shards import concatenate_logs, is_lists
from ultr.rankers.model import Model, load_model
from ultr.training.config import Config, differences
from ultr.training.data import DECISIONS, ActionModel, Decisions, columns_for_run, fingerprint_of, read_data
from ultr.training.folder import CONFIG, MODEL, current_folder, find_folder, read_config, settle
from ultr.training.gate import (
    ACCEPTED,
    NEEDED,
    NEW,
    NEW_LOG,
    OLD,
    QUARANTINED,
    REFERENCE_LOG,
    UNCLEAR,
    Gate,
    Known,
    check_log,
    compare_on,
    extend_reference,
    few_clicks,
    judge_new,
    read_reference,
    stopping,
)
from ultr.training.loop import Listeners
from ultr.training.outcome import fresh_requests, split_of
from ultr.training.run import run_training
from ultr.utils.files import check_output, sync_folder, take_name
from ultr.utils.jsonfiles import read_json
from ultr.utils.stores import fetched, url_below

TEST = 0.2  # least share of the requests of a new log that the gate compares the two rankers on
PARTS = 5  # an update has this part of the steps of the first training
MOST_ROWS, MOST_NUMBERS = 200_000, 20_000_000  # rows, and rows times features, of a new log that are checked
CANDIDATE = ".candidate"  # end of the name of a new run until it is accepted


@dataclass(frozen=True)
class Update:
    """A new run, what the gate says about it and why, and its comparisons with the old run."""

    run: Path | None  # `out`; or the folder next to it, if the run was not accepted; None if nothing was trained
    status: str  # accepted, worse, quarantined or not enough evidence
    metric: str
    reasons: tuple[Pitfall, ...] = ()  # why it was not accepted
    comparisons: Mapping[str, RankerComparison] = field(default_factory=dict)  # on the new log, and on the reference
    warnings: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        return self.status == ACCEPTED

    @property
    def value(self) -> RankerValue | None:
        """The value of the new ranker on the new log, and its difference to the old one."""
        return self.comparisons[NEW_LOG].rankers[NEW][self.metric] if self.comparisons else None

    def to_json(self) -> dict[str, Any]:
        return {
            "run": None if self.run is None else str(self.run),
            "accepted": self.accepted,
            "status": self.status,
            "reasons": [asdict(each) for each in self.reasons],
            "metric": self.metric,
            "comparisons": {where: each.to_json() for where, each in self.comparisons.items()},
        }


def update_run(
    run: str | Path,
    data: str,
    out: Path,
    *,
    gate: Gate = Gate(),  # noqa: B008 - it is frozen
    reference: str | None = None,
    refit_bias: bool = False,
    decay: float | None = None,
    time: str | None = None,
    action_delay: Sequence[str] | None = None,
    actions_until: str | None = None,
    overwrite: bool = False,
    listeners: Listeners | None = None,
    **training: Any,
) -> Update:
    """Train a run further on a new log, and write it to `out`, unless the gate stops it.

    Training has the options of `run`; `training` replaces some, by their names in `make_config`. It starts from the
    rankers and the bias models of `run`, and keeps its examination, unless `refit_bias` is set. `decay` is the
    half-life of the weights of requests in days, and `time` the column of their times, if days are neither partitions
    nor several logs. `action_delay` replaces that of `run`: requests of the new log that are too young for an action
    take no part, and `actions_until` is the time up to which the new log has actions.

    A log that differs too much from the reference of `run` (or from the log `reference`) is quarantined: nothing is
    trained. Else both rankers are compared off policy, on requests of the new log and of the reference that neither was
    trained or selected on. The new run is rejected if it is worse on one of them, or if the new log has too little
    evidence. It is in a folder next to `out` until it is accepted. If the process is killed at any moment, the next
    call with the same arguments resumes. If the log or the arguments have changed, it starts again. `overwrite`
    replaces another run at `out`.
    """
    if not 0 < gate.confidence < 1:
        raise OptionError("the gate must be above 0 and below 1", got=gate.confidence, hint="pass --gate 0.95")
    training |= {"action_delay": action_delay, "actions_until": actions_until}
    config = update_config(run, data, refit_bias=refit_bias, decay=decay, time=time, **training)
    candidate = out.with_name(out.name + CANDIDATE)
    listeners, content = listeners or Listeners(), fingerprint_of(config)
    metric = judging_metric(config.selection) if config.selection.startswith(OFF_POLICY) else f"{OFF_POLICY}reward@10"
    judges = Judges.of(fetched(run), config, reference)
    if not judges.reference:
        listeners.on_note(f"{run} has no reference, so only the new log tests rankers; pass good days with --reference")
    accepted_before = (out / MODEL).is_dir() and _is_of(out, config, content)  # the process was killed afterwards
    if accepted_before:
        candidate = out
    else:
        check_output(out, overwrite=overwrite, folder=True)
        find_folder(out, resume=False, overwrite=True)  # what is not a run is never replaced
        status, reasons = judges.of_log(gate, config)
        if status != ACCEPTED:
            return Update(None, status, metric, tuple(reasons))
        begun = current_folder(candidate)
        resume = begun.exists() and _is_of(begun, config, content)
        if begun.exists() and not resume:
            listeners.on_note(f"{begun} was started with a different log or options, so it is trained again")
        run_training(config, candidate, resume=resume, overwrite=not resume, listeners=listeners)
    comparisons, status, reasons, warnings = judges.of_run(candidate, gate, config, metric)
    if accepted_before:
        status, reasons = ACCEPTED, []
    elif status == ACCEPTED:
        extend_reference(candidate, judges.run)
        take_name(candidate, out, overwrite=overwrite)
        sync_folder(out.resolve().parent)
        settle(out)
        shutil.rmtree(candidate, ignore_errors=True)  # the run that it replaced, if the names were exchanged
    where = out if status == ACCEPTED else candidate
    return Update(where, status, metric, tuple(reasons), comparisons, tuple(warnings))


@dataclass(frozen=True, eq=False)
class Judges:
    """The logs that judge an update: the new one and those of the reference, the newest first, as they were read."""

    run: Path
    model: Model
    new: Log
    reference: Sequence[Log]
    young: bool = False  # whether actions of young requests are divided by the share that has arrived

    @staticmethod
    def of(run: Path, config: Config, reference: str | None) -> Judges:
        model = load_model(run)
        actions = ActionModel.of(config.data, Decisions.load(run).actions)
        columns = {**columns_for_run(run, model, {}), "where": list(config.data.where), **actions.reading}

        def read(source: str, until: str | None = None) -> Log:
            return actions(read_data(source, split="test", data_dir=config.data.folder, columns=columns)[0], until)

        logs = read_reference(run) if reference is None else [read(reference)]  # those of the run are transformed
        young = any(each.column is not None for each in actions.arrivals)
        return Judges(run, model, read(config.data.source, config.data.actions_until), logs, young)

    def of_log(self, gate: Gate, config: Config) -> tuple[str, list[Pitfall]]:
        """Return whether the new log may be learned from, and if not, why."""
        known = Known.of(self.run)
        if self.reference:
            rows = min(MOST_ROWS, MOST_NUMBERS // max(1, len(self.model.feature_names)))
            new = self.model.view(sample_log(self.new, rows))
            logs = [self.model.view(log) for log in self.reference]
            scores = {REFERENCE_LOG: self.model.score(logs[0]), NEW_LOG: self.model.score(new)}
            if found := stopping(check_log(known, logs, new, scores, by_value=self.young), gate):
                return QUARANTINED, found
        share = config.data.test if not is_lists(config.data.source) else 1.0
        clicks = share * float((np.asarray(Label(known.label)(self.new.actions)) > 0).sum())
        return (UNCLEAR, [few_clicks(gate, clicks)]) if clicks < gate.min_evidence else (ACCEPTED, [])

    def of_run(
        self, new: Path, gate: Gate, config: Config, metric: str
    ) -> tuple[dict[str, RankerComparison], str, list[Pitfall], list[str]]:
        """Return the comparisons of the new run with the old one, its status with reasons, and warnings."""
        models = {OLD: (self.run, self.model), NEW: (new, load_model(new))}
        common = [name for name in NEEDED if all(name in log.context for log in self.reference)]
        reference = [replace(log, context={name: log.context[name] for name in common}) for log in self.reference]
        logs = {NEW_LOG: [self.new], REFERENCE_LOG: reference}
        comparisons, warnings, judged = {}, [], None
        for where, parts in logs.items():
            if not parts:
                continue
            views = {
                name: (folder, concatenate_logs([model.view(log) for log in parts]))
                for name, (folder, model) in models.items()
            }
            log = views[OLD][1]
            fresh = fresh_requests(
                views, split_of(config.data.source, "test", config.data.folder) if where == NEW_LOG else None
            )
            scores = {
                name: np.concatenate([model.score(part) for part in parts]) for name, (_, model) in models.items()
            }
            comparisons[where] = compare_on(
                log,
                scores,
                metric,
                Decisions.load(new).label,
                test=fresh.mask,
                known=config.examination.propensities,
                chosen_on=fresh.chosen_on,
            )
            rows = np.repeat(fresh.mask, log.lengths)
            warnings += fresh.warnings if where == NEW_LOG else []
            if where == REFERENCE_LOG:
                judged = log.select(fresh.mask), {name: values[rows] for name, values in scores.items()}
        status, reasons = judge_new(gate, Known.of(self.run), comparisons, judged, metric)
        return comparisons, status, reasons, warnings


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
    action_delay: Sequence[str] | None = None,
    actions_until: str | None = None,
    **training: Any,
) -> Config:
    """Return the configuration of an update: that of the run, with the new data, its rankers and its bias."""
    here = fetched(run)
    config, decisions = read_config(here), Decisions.load(here)
    if config.users is not None or config.simulation.learn_from != "feedback":
        raise OptionError("only a run that was trained on a log can be updated", got=run, hint="use ultr train")
    bias = read_json(here / BIAS_FILE) if (here / BIAS_FILE).is_file() else {}
    keeps_theta = bias.get("theta") and config.examination.propensities is None and not refit_bias
    delays = config.data.action_delay if action_delay is None else tuple(action_delay)
    if not is_lists(data):
        columns = {**load_model(here).columns, "segment": decisions.segment or "none"}
    else:  # whose columns cannot be changed
        columns = {} if decisions.segment else {"segment": "none"}
    changes: dict[str, Any] = {
        "data": data,
        "columns": columns,
        "label": decisions.label,
        "warm_start": str(run),
        "bias": url_below(run, BIAS_FILE) if keeps_theta else None,
        "decay": decay,
        "time": time or (config.data.time if config.data.split == "time" or delays else None),
        "action_delay": delays,
        "actions_until": actions_until,
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
