"""`ultr train`: train a ranker into a run directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ultr.cli import config_file as config_files
from ultr.cli import options
from ultr.cli import training_options as shared
from ultr.cli.config_file import chosen_options, read_config
from ultr.cli.messages import progress_bar, words
from ultr.cli.options import free_path, metrics_text, plain, print_next, print_notes, print_warning


def train(
    context: typer.Context,
    data: shared.Data,
    out: Annotated[str, typer.Option(help="The run directory to write; also a URL.")],
    method: Annotated[
        str, typer.Option(help="pairwise-em, or a baseline: pointwise, lambdarank, pal-click, dla, ipw-listwise, ...")
    ] = "pairwise-em",
    loss: Annotated[
        str | None, typer.Option(help="Loss of pairwise-em: posterior (the default), opt, bayes-ipw or ipw.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Another option of the method, as key=value; may be repeated.")
    ] = None,
    propensities: shared.Propensities = None,
    bias: shared.BiasOption = None,
    learn_from: Annotated[
        str, typer.Option(help="feedback; for upper bounds, truth (true labels) or no-bias (users without bias).")
    ] = "feedback",
    label: shared.LabelOption = None,
    ranker: shared.RankerOrAuto = shared.AUTO_RANKER,
    ranker_option: shared.RankerOptions = None,
    hidden: shared.HiddenByLog = None,
    dropout: shared.Dropout = 0.0,
    norm: shared.Norm = "none",
    steps: shared.Steps = None,
    batch: shared.Batch = 256,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="0.02, or 0.1 for trees")] = None,
    optimizer: shared.Optimizer = "adagrad",
    schedule: shared.Schedule = "constant",
    warmup: Annotated[int, typer.Option(help="Number of first steps in which the learning rate rises.")] = 0,
    clip: shared.Clip = 5.0,
    weight_decay: shared.WeightDecay = 0.0,
    evaluate_every: shared.EvaluateEvery = None,
    patience: shared.Patience = None,
    bias_steps: shared.BiasSteps = 3000,
    select: shared.Select = shared.SELECT,
    users: shared.UsersOption = None,
    sessions: shared.Sessions = 0,
    eta: options.Eta = 1.0,
    epsilon: options.Epsilon = 0.1,
    data_dir: options.DataDir = None,
    request: options.RequestColumn = None,
    position: options.PositionColumn = None,
    item: options.ItemColumn = None,
    features: options.FeatureColumns = None,
    categorical: options.CategoricalColumns = None,
    actions: options.ActionColumns = None,
    query: options.QueryColumn = None,
    randomised: options.RandomisedColumn = None,
    segment: options.FoundSegment = None,
    on_duplicates: options.OnDuplicates = "error",
    where: options.Where = None,
    split: shared.Split = "random",
    time: shared.Time = None,
    decay: shared.Decay = None,
    missing: shared.MissingOption = "mean",
    allow_leaks: shared.AllowLeaks = False,
    drop_suspicious: shared.DropSuspicious = False,
    stream: shared.Stream = "auto",
    workers: shared.Workers = 0,
    device: options.Device = "auto",
    precision: shared.Precision = "auto",
    seed: options.Seed = 0,
    warm_start: Annotated[
        Path | None,
        typer.Option(help="Start from the ranker of this finished run: features by name, and categories by value."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint, with the options of the run.")
    ] = False,
    overwrite: options.Overwrite = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Shortest time between checkpoints, in seconds.")] = 10.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write evaluations and bias to RUN/tensorboard.")
    ] = False,
    mlflow: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="Also log to MLflow: http://HOST:5000, a folder, or env for the address in MLFLOW_TRACKING_URI.",
        ),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="A TOML file of options; options on the command line replace those of the file.",
            callback=read_config,
            is_eager=True,
        ),
    ] = None,
    write_config: Annotated[
        Path | None, typer.Option("--write-config", help="Write all options to this TOML file, and do not train.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Train a ranker from a log, or from a data set with simulated users, and write a run directory."""
    words.quiet = os.environ.get("RANK", "0") != "0"  # of several processes, only the first prints messages
    if write_config is not None:
        config_files.write_config(context, write_config, overwrite=overwrite)
        words.print(f"wrote {write_config}", soft_wrap=True, markup=False)
        print_next("train", config=write_config)
        return
    with words.status("starting ..."):  # imports take seconds on a busy machine
        from ultr.datasets.cache import cache_folder
        from ultr.training.run import train_both
        from ultr.utils.stores import kept_here

        configs = shared.run_configs({**locals()}, chosen_options(context))
    config = configs[0]
    shared.print_thresholds(config.label, {method: (method, config.method_options, config.ranker)})
    notes = list[str]()
    here = kept_here(out, cache_folder() / "runs", resume=resume, overwrite=overwrite, writes=not words.quiet)
    with progress_bar() as bar, here as run:
        trackers = _trackers(run, tensorboard=tensorboard, mlflow=mlflow)
        task, now = bar.add_task(method, total=config.training.steps, figure=""), config

        def show_note(note: str) -> None:
            notes.append(note)
            print_notes([note])

        def begin(started: Any) -> None:
            nonlocal now
            if started is not config:
                words.print(f"now {started.ranker}, which joins the network", soft_wrap=True)
            now = started

        def show(progress: Any) -> None:
            name, figure = method if len(configs) == 1 else now.ranker, metrics_text(progress.metrics)
            bar.update(task, description=name, completed=progress.step, total=now.training.steps, figure=figure)
            for tracker in trackers:
                tracker(progress)

        def show_bias_progress(progress: Any) -> None:
            likelihood = f"held-out log-likelihood {progress.metrics['likelihood']:.4f}"
            bar.update(task, description="bias model", completed=progress.step, total=bias_steps, figure=likelihood)

        with _failing(trackers):
            train_both(
                configs,
                run,
                on_start=begin,
                resume=resume,
                chosen=_compared(chosen_options(context)),
                overwrite=overwrite,
                checkpoint_seconds=checkpoint_seconds,
                on_note=show_note,
                on_warning=print_warning,
                on_bias_progress=show_bias_progress,
                on_progress=show,
            )
        for tracker in trackers:
            tracker.finish()
        bias_of_run = _bias(run)
        (metric, value, step), value_text = _value(run)
    if as_json:
        about = {
            "run": out,
            "data": config.data,
            "label": config.label,
            "metric": metric,
            "best": {metric: value, "step": step},
        }
        print(json.dumps({**about, "bias": bias_of_run, "notes": notes}))
        return
    _print_bias(bias_of_run)
    words.print(f"wrote {out}: {value_text}", soft_wrap=True)
    if users is not None:
        print_next("report", out, out=free_path("report.html"))
    else:
        print_next("evaluate", out, config.data)  # it prints the command of the report
        print_next("score", out, config.data, out=free_path("scores.parquet"))
        words.print("to score other items, put their file in place of the training log in this command", soft_wrap=True)


def _value(run: Path) -> tuple[tuple[str, float, int], str]:
    """Return the selection metric of a run, its value and best step, and a text of them."""
    from ultr.training.joined import is_joined
    from ultr.training.outcome import value_of_run

    metric, value, step = value_of_run(run)
    of_sum = f"{metric} {value:.4f}"  # the step of its trees says little
    return (metric, value, step), of_sum if is_joined(run) else f"best {of_sum} at step {step}"


def _trackers(run: Path, *, tensorboard: bool, mlflow: str | None) -> list[Any]:
    """Return what follows a run next to the printed progress: TensorBoard and MLflow, if the user asks for them."""
    from ultr.training.tensorboard import Board
    from ultr.training.tracking import Tracker

    boards: list[Any] = [Board(run, writes=not words.quiet)] if tensorboard else []
    return boards + ([Tracker(run, mlflow, writes=not words.quiet)] if mlflow is not None else [])


@contextmanager
def _failing(trackers: list[Any]) -> Iterator[None]:
    """Tell trackers if a `with` block fails."""
    try:
        yield
    except BaseException:
        for tracker in trackers:
            tracker.failed()
        raise


def _compared(chosen: set[str]) -> set[str]:
    """Return the names of chosen options as `RunConfig.differences` has them."""
    return {{"loss": "option", "data": "log"}.get(name, name) for name in chosen}


def _bias(run: Path) -> dict[str, Any]:
    """Return the content of the run's bias.json, empty if there is none."""
    from ultr.utils.jsonfiles import read_json

    path = run / "bias.json"
    return dict(read_json(path)) if path.is_file() else {}


def _print_bias(bias: dict[str, Any]) -> None:
    """Print the warnings of the bias model, and what was done about bias."""
    for warning in bias.get("warnings", ()):
        words.print(f"warning: {warning['name']}: {warning['what']}", soft_wrap=True)
    for name, sentence in bias.get("summary", {}).items():
        words.print(plain(f"{name}: {sentence}"), soft_wrap=True)
