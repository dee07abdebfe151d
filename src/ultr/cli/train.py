"""`ultr train`: train a ranker into a run directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ultr.cli import options
from ultr.cli import training_options as shared
from ultr.cli.options import free_path, print_next, print_notes, print_warning, progress_bar, words


def train(
    data: shared.Data,
    out: Annotated[Path, typer.Option(help="The run directory to write.")],
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
    ranker: shared.RankerOption = "mlp",
    ranker_option: shared.RankerOptions = None,
    hidden: shared.Hidden = "512,256,128",
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
    segment: options.SegmentColumn = None,
    on_duplicates: options.OnDuplicates = "error",
    where: options.Where = None,
    split: shared.Split = "random",
    time: shared.Time = None,
    missing: shared.MissingOption = "mean",
    allow_leaks: shared.AllowLeaks = False,
    drop_suspicious: shared.DropSuspicious = False,
    stream: shared.Stream = "auto",
    workers: shared.Workers = 0,
    device: options.Device = "auto",
    precision: shared.Precision = "auto",
    seed: options.Seed = 0,
    warm_start: Annotated[Path | None, typer.Option(help="Start from the weights of this finished run.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False,
    overwrite: options.Overwrite = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Shortest time between checkpoints, in seconds.")] = 10.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write evaluations and bias to RUN/tensorboard.")
    ] = False,
) -> None:
    """Train a ranker from a log, or from a data set with simulated users, and write a run directory."""
    from ultr.training.run import best_evaluation, run_training
    from ultr.training.tensorboard import Board

    words.quiet = os.environ.get("RANK", "0") != "0"  # of several processes, only the first prints messages
    config = shared.run_config({**locals()})
    board = Board(out, writes=not words.quiet) if tensorboard else None
    shared.print_thresholds(config.label, {method: (method, config.method_options, config.ranker)})
    steps = config.training.steps
    with progress_bar() as bar:
        task = bar.add_task(method, total=steps, figure="")

        def show(progress: Any) -> None:
            metrics = " ".join(f"{name} {value:.4f}" for name, value in progress.metrics.items())
            bar.update(task, description=method, completed=progress.step, total=steps, figure=metrics)
            if board is not None:
                board(progress)

        def show_bias_progress(progress: Any) -> None:
            likelihood = f"held-out log-likelihood {progress.metrics['likelihood']:.4f}"
            bar.update(task, description="bias model", completed=progress.step, total=bias_steps, figure=likelihood)

        run_training(
            config,
            out,
            resume=resume,
            overwrite=overwrite,
            warm_start=warm_start,
            checkpoint_seconds=checkpoint_seconds,
            on_note=lambda note: print_notes([note]),
            on_warning=print_warning,
            on_bias_progress=show_bias_progress,
            on_progress=show,
        )
    if board is not None:
        board.finish()
    _print_bias(out)
    metric, best = best_evaluation(out)
    words.print(f"wrote {out}: best {metric} {best[metric]:.4f} at step {best['step']}", soft_wrap=True)
    print_next("report", out, out=free_path("report.html"))
    if users is None:
        print_next("score", out, data, out=free_path("scores.parquet"))
        words.print("to score other items, put their file in place of the training log in this command", soft_wrap=True)


def _print_bias(run: Path) -> None:
    """Print the warnings of the bias model and the source of theta, if the run has them."""
    from ultr.utils.jsonfiles import read_json

    path = run / "bias.json"
    bias: dict[str, Any] = read_json(path) if path.is_file() else {}
    for warning in bias.get("warnings", ()):
        words.print(f"warning: {warning['name']}: {warning['what']}", soft_wrap=True)
    if "theta_from" in bias:
        error = bias.get("theta_standard_error")
        sure = "" if error is None else f" (standard error {error:.1%})"
        words.print(f"theta from {bias['theta_from']}{sure}", soft_wrap=True)
