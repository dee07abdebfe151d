"""`ultr train`: train a ranker into a run directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultr.cli import options
from ultr.cli import training_options as shared
from ultr.cli.messages import progress_bar, with_options, words
from ultr.cli.options import free_path, metrics_text, print_next, print_notes, print_warnings
from ultr.errors import OptionError

if TYPE_CHECKING:
    from ultr.training.loop import Progress
    from ultr.training.outcome import RunOutcome
    from ultr.training.tracking import Tolerant


@with_options("given", shared.OPTIONS)
def train(
    *,
    out: Annotated[str, typer.Option(metavar="RUN", help="The run directory to write; also a URL.")],
    given: dict[str, Any],
    settings: shared.SetOption = None,
    config_file: shared.ConfigOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run, with its options.")] = False,
    overwrite: options.Overwrite = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write RUN/tensorboard.")] = False,
    mlflow: Annotated[
        str | None, typer.Option(metavar="URI", help="Also log to MLflow: a URL, a folder, or env.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Train a ranker from a log, or from a data set with simulated users, and write a run directory.

    ultr options lists all other options; pass them with --set, or in a file with --config.
    """
    words.quiet = os.environ.get("RANK", "0") != "0"  # of several processes, only the first prints messages
    with words.status("starting ..."):  # imports take seconds on a busy machine
        from ultr.datasets.base import cache_folder
        from ultr.training.data import Decisions
        from ultr.training.folder import read_config
        from ultr.training.loop import Listeners
        from ultr.training.outcome import read_outcome, value_of_run
        from ultr.training.run import run_training
        from ultr.utils.stores import kept_here

        config = shared.training_config(given, sets=settings or (), file=config_file)
    if not config.data.source:
        raise OptionError("there is no data to train on", hint="pass a log: ultr train LOG --out RUN")
    notes = list[str]()

    def show_note(note: str) -> None:
        notes.append(note)
        print_notes([note])

    here = kept_here(out, cache_folder() / "runs", resume=resume, overwrite=overwrite, writes=not words.quiet)
    with (
        progress_bar("starting") as bar,
        here as run,
        _tracked(run, tensorboard=tensorboard, mlflow=mlflow) as trackers,
    ):

        def show(progress: Progress) -> None:
            total, figure = config.loop(progress.ranker).steps, metrics_text(progress.metrics)
            bar.update(description=progress.ranker, completed=progress.step, total=total, figure=figure)
            for tracker in trackers:
                tracker(progress)

        def show_bias(progress: Progress) -> None:
            figure = f"held-out log-likelihood {progress.metrics['likelihood']:.4f}"
            name, total = f"bias model of {progress.ranker}", config.network.bias_steps
            bar.update(description=name, completed=progress.step, total=total, figure=figure)

        listeners = Listeners(show_note, options.print_warning, show_bias, show)
        run_training(config, run, resume=resume, overwrite=overwrite, all_options=False, listeners=listeners)
        for tracker in trackers:
            tracker.finish()
        config, decisions = read_config(run), Decisions.load(run)
        bias_of_run, (metric, value, step), outcome = _bias(run), value_of_run(run), read_outcome(run)
    calibration = None if outcome is None else outcome.calibration
    if as_json:
        about = {
            "run": out,
            "data": config.data.source,
            "label": decisions.label,
            "rankers": decisions.rankers,
            "metric": metric,
            "best": {metric: value, "step": step},
            "calibration": calibration,
        }
        print(json.dumps({**about, "bias": bias_of_run, "notes": notes}))
        return
    _print_findings(bias_of_run, outcome)
    at_step = "" if len(decisions.rankers) > 1 else f" at step {step}"  # that of its trees says little about a sum
    words.say(f"wrote {out}: {decisions.ranker_name}, {metric} {value:.4f}{at_step}")
    if config.users is not None:
        print_next("report", out, out=free_path("report.html"))
    else:
        print_next("evaluate", out, config.data.source)  # it prints the command of the report
        print_next("score", out, config.data.source, out=free_path("scores.parquet"))
        words.say("to score other items, put their file in place of the training log in this command")


def _print_findings(bias: Mapping[str, Any], outcome: RunOutcome | None) -> None:
    """Print what a run found about the users and its expected feedback."""
    print_warnings(f"{warning['name']}: {warning['what']}" for warning in bias.get("warnings", ()))
    for name, sentence in bias.get("summary", {}).items():
        words.say(f"{name}: {sentence}")
    if outcome is not None and (calibration := outcome.calibration) is not None:
        off = f"off by {calibration['error']:.1%} of its mean on {outcome.split} requests"
        words.say(f"calibration: expected feedback is {off} ({calibration['chance']:.1%} by chance alone)")
        for sentence in calibration["groups"]:
            words.say(f"calibration: {sentence}")


@contextmanager
def _tracked(run: Path, *, tensorboard: bool, mlflow: str | None) -> Iterator[list[Tolerant]]:
    """Yield what follows a run next to the printed progress, if the user asks for it: TensorBoard and MLflow."""
    from ultr.training.tracking import Board, Tolerant, Tracker

    chosen = list[Board | Tracker]()
    if tensorboard:
        chosen.append(Board(run))
    if mlflow is not None:
        chosen.append(Tracker(run, mlflow))
    trackers = [Tolerant(each, lambda text: print_warnings([text]), writes=not words.quiet) for each in chosen]
    try:
        yield trackers
    except BaseException:
        for tracker in trackers:
            tracker.failed()
        raise


def _bias(run: Path) -> dict[str, Any]:
    """Return the content of the run's bias.json, or {} if there is none."""
    from ultr.bias.propensities import BIAS_FILE
    from ultr.utils.jsonfiles import read_json

    path = run / BIAS_FILE
    return dict(read_json(path)) if path.is_file() else {}
