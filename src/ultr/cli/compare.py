"""`ultr compare`: train several methods and compare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ultr.cli import options
from ultr.cli import training_options as shared
from ultr.cli.messages import progress_bar, words
from ultr.cli.options import free_path, pages_can_be_made, print_next, print_table, print_warning
from ultr.errors import OptionError

if TYPE_CHECKING:
    from ultr.training.comparison import Comparison


def compare(
    data: shared.Data,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, comma-separated; options follow a colon (pairwise-em:loss=opt). Upper bounds: "
            "lambdarank:from=truth (true labels), lambdarank:from=no-bias (users without bias)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the comparison; finished runs in it are not repeated.")],
    seeds: Annotated[int, typer.Option(help="Runs of each method, with different seeds.")] = 5,
    lrs: Annotated[
        str | None,
        typer.Option(
            help="Learning rates to choose from on validation, comma-separated.",
            show_default="0.005,0.01,0.02,0.05; 0.05,0.1 for trees",
        ),
    ] = None,
    dropouts: Annotated[
        str, typer.Option(help="Dropouts to choose from on validation besides --dropout, comma-separated.")
    ] = "",
    max_weights: Annotated[
        str, typer.Option(help="Largest weights to choose from besides the default, for methods that have weights.")
    ] = "2,3,5,none",
    tuning_seeds: Annotated[int, typer.Option(help="Runs of each setting to choose from; they are not tested.")] = 3,
    longest: Annotated[
        int | None,
        typer.Option(
            help="Times the steps that a method may have if it still improves at its last step.",
            show_default="4, or 1 with --steps",
            min=1,
        ),
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="Metrics on test requests, comma-separated.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="The method that the others are tested against; default: the first.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Parallel runs; 0: the number of cores, up to ten.", min=0)] = 0,
    label: shared.LabelOption = None,
    ranker: shared.RankerOption = "mlp",
    ranker_option: shared.RankerOptions = None,
    hidden: shared.Hidden = "512,256,128",
    dropout: shared.Dropout = 0.0,
    norm: shared.Norm = "none",
    steps: shared.Steps = None,
    batch: shared.Batch = 256,
    optimizer: shared.Optimizer = "adagrad",
    schedule: shared.Schedule = "constant",
    clip: shared.Clip = 5.0,
    weight_decay: shared.WeightDecay = 0.0,
    evaluate_every: shared.EvaluateEvery = None,
    patience: shared.Patience = None,
    bias_steps: shared.BiasSteps = 3000,
    propensities: shared.Propensities = None,
    bias: shared.BiasOption = None,
    select: shared.Select = shared.SELECT,
    users: shared.UsersOption = None,
    sessions: Annotated[
        int | None,
        typer.Option(
            help="Simulated sessions of the log that all methods learn from; 0: new ones at each step.",
            show_default="30000 with --users",
            min=0,
        ),
    ] = None,
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
    missing: shared.MissingOption = "mean",
    allow_leaks: shared.AllowLeaks = False,
    drop_suspicious: shared.DropSuspicious = False,
    stream: shared.Stream = "auto",
    workers: shared.Workers = 0,
    device: options.Device = "auto",
    precision: shared.Precision = "auto",
    as_json: options.Json = False,
) -> None:
    """Compare methods: tune each on validation requests, train with the same seeds, and evaluate on test requests.

    A method differs from the reference if paired tests over seeds and over test requests both have p < 0.05. On a log,
    one judge, with one estimate of examination, judges all runs and the logged ranking on the same test requests.
    """
    from ultr.rankers.boosters import is_trees
    from ultr.report import write_comparison_page
    from ultr.training.compare import LONGEST, PATIENCE, SESSIONS
    from ultr.training.compare import compare as run_comparison
    from ultr.training.entries import Entry, run_folder

    if sessions is None:
        sessions = 0 if users is None else SESSIONS
    if patience is None and not is_trees(ranker):
        patience = PATIENCE
    base = shared.run_config({**locals()})
    rates, other_dropouts = _numbers("--lrs", lrs or ""), _numbers("--dropouts", dropouts)
    texts = [text.strip() for text in max_weights.split(",") if text.strip()]
    limits = [text if text == "none" else _numbers("--max-weights", text)[0] for text in texts]
    names = [name for name in methods.split(",") if name.strip()]
    entries = [Entry.parse(name, base.ranker) for name in names]
    shared.print_reading(base)
    shared.print_thresholds(base.label, {e.text: (e.method, e.options, e.ranker or base.ranker) for e in entries})
    with progress_bar() as bar:
        task = bar.add_task("runs", total=None, figure="")

        def show(done: int, total: int, folder: str) -> None:
            bar.update(task, completed=done, total=total, figure=folder)

        result = run_comparison(
            base,
            names,
            out,
            seeds=seeds,
            rates=rates,
            dropouts=other_dropouts,
            limits=limits,
            tuning_seeds=tuning_seeds,
            longest=longest or (LONGEST if steps is None else 1),
            metrics=metrics.split(",") if metrics else None,
            reference=reference,
            jobs=jobs,
            on_done=show,
            on_warning=print_warning,
        )
    if has_page := pages_can_be_made():
        write_comparison_page(out, out / "comparison.html", overwrite=True)
    if as_json:
        print(json.dumps(result.to_json()))
        return
    _print_comparison(result)
    page = f" and {out / 'comparison.html'}" if has_page else ""
    words.print(f"wrote {out / 'comparison.json'}{page}", soft_wrap=True)
    best = result.best()
    folder = run_folder(out, Entry.parse(best.entry, base.ranker), best.setting, 0)
    if (folder / "model").is_dir():
        print_next("report", folder, out=free_path("report.html"))


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",") if number.strip()]
    except ValueError as error:
        raise OptionError(f"{option} must be comma-separated numbers, such as 0.5,2", got=f"'{text}'") from error


def _print_comparison(result: Comparison) -> None:
    from ultr.evaluation.judgement import LOGGED_RANKING
    from ultr.report.comparison import setting_text

    title = f"Mean ± standard deviation over seeds; * differs from {result.reference}, p < 0.05 over seeds and requests"
    if result.logged:
        title += f"; † differs from {LOGGED_RANKING}, p < 0.05 over requests"
    title += " (corrected by Holm)"
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for heading in ("setting", *result.metrics):
        table.add_column(heading, justify="right")
    if result.logged:
        table.add_row(LOGGED_RANKING, "", *(f"{mean.mean:.4f}{'':11}" for mean in result.logged.values()))
    for row in result.rows:
        cells = []
        for metric, summary in row.to_json()["figures"].items():
            marks = "*" if metric in row.against and row.against[metric].significant else " "
            if result.logged:
                marks += "†" if metric in row.against_logged and row.against_logged[metric].holm < 0.05 else " "
            cells.append(f"{summary['mean']:.4f} ± {summary['deviation']:.4f}{marks}")
        table.add_row(row.entry, setting_text(row.setting.to_json()), *cells)
    print_table(table)
