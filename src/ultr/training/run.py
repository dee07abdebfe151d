"""Train a run: its stages from top to bottom.

    read      the data: train, validation and test requests
    check     findings about the data, or an error
    examine   examination, estimated once, and the model of off-policy metrics
    fit       a ranker of each kind
    combine   the ranker of the run, with the shares of its parts
    calibrate expected feedback from its scores
    judge     its values on requests that it did not learn from
    write     the run folder

Each stage is a function from artefacts to an artefact. What a stage has written to the run folder is read back if the
run is resumed, and the stage does not run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ultr.checks.pitfalls import Pitfall
from ultr.errors import DataError
from ultr.log.cleaning import write_suspicious
from ultr.methods import thresholds
from ultr.rankers.boosters import is_trees
from ultr.training.calibrating import calibrate
from ultr.training.checking import check
from ultr.training.combining import Ranker, combine
from ultr.training.config import Config
from ultr.training.data import DECISIONS, Data, Decisions, cached_run_data, decide, load_run_data
from ultr.training.examining import Examined, examine, known_examination
from ultr.training.fitting import CLICKS_ONLY, FitInputs, FitPlace, Fitted, notes_of, save_ranker, uses_examination
from ultr.training.folder import FITS, MODEL, check_same, find_folder
from ultr.training.gate import write_reference
from ultr.training.loop import Listeners
from ultr.training.networks import NetworkFit
from ultr.training.outcome import judge
from ultr.training.summary import write_bias_report
from ultr.training.tradeoff import write_trade_off
from ultr.training.trees import TreeFit
from ultr.utils.arguments import checked
from ultr.utils.display import begin_stage
from ultr.utils.distributed import barrier, check_equal, is_main, main_decides, process_group, threads_for
from ultr.utils.files import take_name


@checked
def run_training(
    config: Config,
    out: str | Path,
    *,
    source: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    all_options: bool = True,
    shared: str | Path | None = None,
    listeners: Listeners = Listeners(),  # noqa: B008 - it is frozen
) -> Path:
    """Train the rankers that `config` names, and write the run folder `out`; return `out`.

    - `source` is a log, data frame or Arrow table in memory, which is used in place of `config.data.source`.
    - `resume` continues the run in `out`, whose configuration must be the same. Without `all_options`, only the options
      that were set in `config` are compared, and the others are those of the run.
    - `overwrite` replaces an existing run, which stays usable until the new run is complete.
    - `shared` is a folder for what runs with the same data and seed share: examination and bias models.

    Under torchrun all processes train and rank 0 writes. Processes that torchrun restarts resume their run.
    """
    out, shared = Path(out), None if shared is None else Path(shared)
    with process_group(config.machine.device):
        folder = find_folder(out, resume=resume, overwrite=overwrite)
        if (saved := folder.saved_config()) is not None:
            check_same(config, saved, out, all_options=all_options)
            config = saved
        if main_decides(folder.is_complete):
            folder.finish()
            return out
        begin_stage("reading the data")
        decided = Decisions.load(folder.path) if folder.resume and (folder.path / DECISIONS).is_file() else None
        data = load_run_data(config, source, decided=decided)
        if decided is not None and decided.data not in ("", data.fingerprint):
            hint = "train again with --overwrite, or put the old data back"
            raise DataError(
                f"the data has changed since {out} was started", where=config.data.source or None, hint=hint
            )
        plan = make_plan(config, data, listeners)  # everything is checked before anything is written
        with folder.writing(config) as finished_elsewhere:
            if not finished_elsewhere:
                with threads_for(plan.data.train.rows):
                    _train(plan, folder.path, shared, listeners)
        return out


@dataclass(frozen=True, eq=False)
class Plan:
    """A run whose data is read and whose options are checked."""

    config: Config
    data: Data
    findings: Sequence[Pitfall]
    decisions: Decisions
    fits: Sequence[NetworkFit | TreeFit]

    @property
    def needs_examination(self) -> bool:
        """Whether examination is used: by a method, or for the shares of two rankers."""
        return len(self.fits) > 1 or any(uses_examination(fit.method) for fit in self.fits)

    def corrected(self, examined: Examined) -> Plan:
        """Return the plan whose fits learn from actions without the trust in their positions, if there is any."""
        if not self.needs_examination or examined.examination is None:
            return self
        data = self.data.corrected(examined.examination.actions)
        if data is self.data:
            return self
        return replace(self, fits=[type(fit)(replace(fit.inputs, data=data)) for fit in self.fits])


def make_plan(config: Config, data: Data, listeners: Listeners) -> Plan:
    """Check the data and the options of a run, and decide what the configuration leaves to the data."""
    check_equal(int(data.stream is None), "whether lists are read into memory")
    decisions = decide(config, data)
    for note in notes_of(config, data, decisions):
        listeners.on_note(note)
    name, label = config.method.name, decisions.label
    if any(thresholds(name, label, config.method.options, ranker=kind) for kind in decisions.rankers):
        listeners.on_note(f"{name}: {CLICKS_ONLY.format(label)}")
    findings: list[Pitfall] = []
    if listeners.on_finding is not None:
        begin_stage("looking for problems of the data")
        findings = check(config, data)
        for finding in findings:
            listeners.on_finding(finding)
    all_inputs = [FitInputs(config, data, decisions, kind) for kind in decisions.rankers]
    fits = [TreeFit(inputs) if is_trees(inputs.kind) else NetworkFit(inputs) for inputs in all_inputs]
    return Plan(config, data, findings, decisions, fits)


def _train(plan: Plan, run: Path, shared: Path | None, listeners: Listeners) -> None:
    """Run the stages after `check`, in the folder of the run."""
    if is_main():
        plan.decisions.save(run)
    examined = examine(plan.config, plan.data, run, shared, needed=plan.needs_examination)
    plan = plan.corrected(examined)
    fitted: dict[str, Fitted] = {}
    place, relevance = FitPlace(run, examined, shared, listeners), None
    for fit in sorted(plan.fits, key=lambda fit: isinstance(fit, NetworkFit)):  # trees tell a network what is relevant
        kind = fit.inputs.kind
        if isinstance(fit, NetworkFit):
            fitted[kind] = fit.fit(place, relevance)
        else:
            fitted[kind] = fit.fit(place)
            relevance = fit.relevance(fitted[kind]) if len(plan.fits) > 1 else None
    fits = [fitted[fit.inputs.kind] for fit in plan.fits]
    finish(plan, run, examined, fits, listeners)


def finish(plan: Plan, run: Path, examined: Examined, fits: Sequence[Fitted], listeners: Listeners) -> None:
    """Combine the fits of a run, judge the ranker, and write the run; those of a comparison have shorter outcomes."""
    compared = listeners.on_finding is None
    if is_main():
        begin_stage("writing the results")
        ranker = combine(fits, fits[0].inputs.data, examined.examination)
        if not compared:
            theta = examined.examination or known_examination(plan.config, plan.data)
            ranker = replace(ranker, calibration=calibrate(ranker, plan.data, theta))
        judge(plan.config, plan.data, ranker, examined, plan.findings, run, compared=compared)
        write_bias_report(plan.config, plan.data, fits, ranker, examined.examination, run)
        if not compared:
            write_trade_off(fits[0], plan.data, ranker.ranker, examined, run, on_note=listeners.on_note)
        if plan.config.users is None and plan.data.test is not None and not compared:
            write_reference(run, plan.data.test)
        if plan.data.suspicious is not None:
            write_suspicious(run, plan.data.suspicious)
        _write_model(run, ranker, fits)
    barrier()


def _write_model(run: Path, ranker: Ranker, fits: Sequence[Fitted]) -> None:
    """Write what scoring needs, last: it marks a complete run."""
    if len(fits) == 1:
        folder = run / FITS / fits[0].kind / MODEL
    else:
        folder = run / FITS / MODEL
        save_ranker(folder, ranker.ranker, fits[-1].inputs, {})
    if ranker.calibration is not None:
        ranker.calibration.save(folder)
    take_name(folder, run / MODEL, overwrite=False)


def make_cached_plan(config: Config) -> Plan:
    """Return the plan of a run that shares its data in memory with other runs; problems of the data are not sought."""
    torch.manual_seed(config.seed)
    return make_plan(config, cached_run_data(config), Listeners(on_finding=None))
