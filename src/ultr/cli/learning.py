"""Commands that learn: train, compare."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ultr.cli.common import (
    ActionColumns,
    CategoricalColumns,
    DataDir,
    Device,
    Epsilon,
    Eta,
    FeatureColumns,
    Json,
    Overwrite,
    PositionColumn,
    RequestColumn,
    Seed,
    SegmentColumn,
    pages_can_be_made,
    print_table,
    progress_bar,
    words,
)
from ultr.errors import OptionError

if TYPE_CHECKING:
    from ultr.compare import Comparison
    from ultr.preparing import RunConfig

Data = Annotated[
    str, typer.Argument(help="A log; or, with --users, a data set with true labels (synthetic, ml-1m, ...).")
]
UsersOption = Annotated[
    str | None,
    typer.Option("--users", help="Draw fresh feedback each step from users: pbm, trust, cascade, clickbait."),
]
LabelOption = Annotated[
    str | None,
    typer.Option(
        "--label",
        help="The label, an expression over actions; if not given, that of prepared lists, or click + dwell / exp(3).",
    ),
]
RankerOption = Annotated[str, typer.Option("--ranker", help="mlp, linear, lightgbm or xgboost.")]
RankerOptions = Annotated[
    list[str] | None,
    typer.Option("--ranker-option", help="A parameter of LightGBM or XGBoost, as key=value; may be repeated."),
]
Sessions = Annotated[
    int,
    typer.Option(
        "--sessions", help="With --users: draw so many once; 0: afresh each step, or 20,000 for trees.", min=0
    ),
]
BiasOption = Annotated[
    str | None, typer.Option("--bias", help="A run, or its bias.json, to take what is known of bias from.")
]
Hidden = Annotated[str, typer.Option("--hidden", help="Hidden layers of the mlp, comma-separated.")]
Dropout = Annotated[float, typer.Option("--dropout", help="Dropout of the mlp.")]
Norm = Annotated[str, typer.Option("--norm", help="Normalisation of the mlp's layers: none or layer.")]
Steps = Annotated[
    int | None, typer.Option("--steps", help="Training steps, or rounds of trees.", show_default="1000, or 500 rounds")
]
Batch = Annotated[int, typer.Option("--batch", help="Lists a step.")]
Optimizer = Annotated[str, typer.Option("--optimizer", help="adagrad, adam or adamw.")]
Schedule = Annotated[str, typer.Option("--schedule", help="Of the learning rate: constant, cosine or linear.")]
Clip = Annotated[float, typer.Option("--clip", help="Gradient norm to clip at; 0: none.")]
WeightDecay = Annotated[float, typer.Option("--weight-decay", help="Weight decay.")]
EvaluateEvery = Annotated[
    int | None,
    typer.Option("--evaluate-every", help="Steps between evaluations.", show_default="50, or 10 rounds"),
]
Patience = Annotated[
    int | None,
    typer.Option(
        "--patience",
        help="Stop after so many evaluations without improvement; 0: never.",
        show_default="0, or 5 for trees",
    ),
]
Select = Annotated[
    str,
    typer.Option(
        "--select",
        help="Metric the best step is chosen by; auto: off-policy-reward@10 on a log; ndcg@10 reads true labels.",
    ),
]
Stream = Annotated[
    str, typer.Option("--stream", help="Read prepared lists while training: yes, no, or auto, if they are too large.")
]
Workers = Annotated[int, typer.Option("--workers", help="Threads that read while training; 0: as cores allow.", min=0)]
Precision = Annotated[str, typer.Option("--precision", help="float32 or bf16.")]
BiasSteps = Annotated[int, typer.Option("--bias-steps", help="Steps, at most, of the bias model before the ranker.")]
Propensities = Annotated[
    Path | None, typer.Option("--propensities", help="Known examination: a table with position,propensity.")
]

SELECT = "auto"


def train(
    data: Data,
    out: Annotated[Path, typer.Option(help="The run directory to write.")],
    method: Annotated[
        str, typer.Option(help="pairwise-em, or a baseline: pointwise, lambdarank, pal-click, dla, ipw-listwise, ...")
    ] = "pairwise-em",
    loss: Annotated[
        str | None, typer.Option(help="Of pairwise-em: posterior (the default), opt, bayes-ipw or ipw.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Another option of the method, as key=value; may be repeated.")
    ] = None,
    propensities: Propensities = None,
    bias: BiasOption = None,
    learn_from: Annotated[str, typer.Option(help="feedback; or, as bounds, truth or no-bias.")] = "feedback",
    label: LabelOption = None,
    ranker: RankerOption = "mlp",
    ranker_option: RankerOptions = None,
    hidden: Hidden = "512,256,128",
    dropout: Dropout = 0.0,
    norm: Norm = "none",
    steps: Steps = None,
    batch: Batch = 256,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="0.02, or 0.1 for trees")] = None,
    optimizer: Optimizer = "adagrad",
    schedule: Schedule = "constant",
    warmup: Annotated[int, typer.Option(help="Steps over which the learning rate rises.")] = 0,
    clip: Clip = 5.0,
    weight_decay: WeightDecay = 0.0,
    evaluate_every: EvaluateEvery = None,
    patience: Patience = None,
    bias_steps: BiasSteps = 3000,
    select: Select = SELECT,
    users: UsersOption = None,
    sessions: Sessions = 0,
    eta: Eta = 1.0,
    epsilon: Epsilon = 0.1,
    data_dir: DataDir = None,
    request: RequestColumn = None,
    position: PositionColumn = None,
    features: FeatureColumns = None,
    categorical: CategoricalColumns = None,
    actions: ActionColumns = None,
    segment: SegmentColumn = None,
    stream: Stream = "auto",
    workers: Workers = 0,
    device: Device = "auto",
    precision: Precision = "float32",
    seed: Seed = 0,
    warm_start: Annotated[Path | None, typer.Option(help="A finished run to take the first weights from.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    overwrite: Overwrite = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints, at least.")] = 10.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write evaluations and bias to RUN/tensorboard too.")
    ] = False,
) -> None:
    """Train a ranker from a log, or from data with simulated users, into a run directory."""
    from ultr.runs import best_evaluation, run_training
    from ultr.tensorboard import Board

    words.quiet = os.environ.get("RANK", "0") != "0"  # of several processes, the first speaks
    config = _config({**locals()})
    board = Board(out, writes=not words.quiet) if tensorboard else None
    _say_thresholds(config.label, {method: (method, config.method_options, config.ranker)})
    steps = config.training.steps
    with progress_bar() as bar:
        task = bar.add_task(method, total=steps, figure="")

        def show(progress: Any) -> None:
            figures = " ".join(f"{name} {value:.4f}" for name, value in progress.figures.items())
            bar.update(task, description=method, completed=progress.step, total=steps, figure=figures)
            if board is not None:
                board(progress)

        def show_first(progress: Any) -> None:
            figures = f"held-out log-likelihood {progress.figures['likelihood']:.4f}"
            bar.update(task, description="bias model", completed=progress.step, total=bias_steps, figure=figures)

        run_training(
            config,
            out,
            resume=resume,
            overwrite=overwrite,
            warm_start=warm_start,
            checkpoint_seconds=checkpoint_seconds,
            on_first=show_first,
            on_progress=show,
        )
    if board is not None:
        board.finish()
    _say_warnings(out)
    chosen_by, best = best_evaluation(out)
    words.print(f"wrote {out}: best {chosen_by} {best[chosen_by]:.4f} at step {best['step']}", soft_wrap=True)
    words.print(f"look at it: ultr report {out}", soft_wrap=True)
    words.print(f"next: ultr score {out} CANDIDATES --out scores.parquet", soft_wrap=True)


def _say_thresholds(label: str, methods: Mapping[str, tuple[str, Mapping[str, Any], str]]) -> None:
    """Which methods, by the name they go under, take of the label no more than whether it is above zero."""
    from ultr.methods import thresholds

    cut = [
        shown for shown, (name, options, ranker) in methods.items() if thresholds(name, label, options, ranker=ranker)
    ]
    if cut:
        what = f"for clicks alone, so that '{label}' counts as 1 where it is above zero"
        words.print(f"{', '.join(cut)}: {what}", soft_wrap=True)


def _say_warnings(run: Path) -> None:
    """What the method found wrong with its bias model, if it has one."""
    path = run / "bias.json"
    for warning in json.loads(path.read_text())["warnings"] if path.is_file() else ():
        words.print(f"warning: {warning['name']}: {warning['what']}", soft_wrap=True)


def _config(options: dict[str, Any]) -> RunConfig:
    """The configuration that options of a command stand for."""
    from ultr.examination import read_propensities
    from ultr.methods import parse_options
    from ultr.preparing import DEFAULT_METHOD, RunConfig
    from ultr.rankers.boosters import is_trees, parse_parameters
    from ultr.training import TrainingOptions, usual_training

    ranker_options: dict[str, Any] = {}
    if options["ranker"] == "mlp":
        try:
            sizes = [int(size) for size in options["hidden"].split(",")]
        except ValueError as error:
            raise OptionError(
                "--hidden should be whole numbers, comma-separated", got=f"'{options['hidden']}'"
            ) from error
        ranker_options = {"hidden": sizes, "dropout": options["dropout"], "norm": options["norm"]}
    given_to_ranker = options.get("ranker_option") or []
    if is_trees(options["ranker"]):
        ranker_options = parse_parameters(given_to_ranker)
    elif given_to_ranker:
        raise OptionError("--ranker-option is for trees", mend="use --hidden, --dropout and --norm")
    parts = ("request", "position", "features", "categorical", "actions", "segment")
    columns = {name: options.get(name) for name in parts}
    training = {name: options[name] for name in TrainingOptions.__dataclass_fields__ if options.get(name) is not None}
    data_dir, propensities = options["data_dir"], options["propensities"]
    method = options.get("method", DEFAULT_METHOD)
    given = list(options.get("option") or [])
    if options.get("loss"):
        given.append(f"loss={options['loss']}")
    return RunConfig(
        data=options["data"],
        method=method,
        method_options=parse_options(method, given, ranker=options["ranker"]),
        propensities=None if propensities is None else read_propensities(propensities),
        bias=options["bias"],
        sessions=options["sessions"],
        learn_from=options.get("learn_from", "feedback"),
        label=options["label"] or _own_label(options["data"]),
        ranker=options["ranker"],
        ranker_options=ranker_options,
        columns={name: value for name, value in columns.items() if value is not None},
        users=options["users"],
        user_options={"eta": options["eta"], "epsilon": options["epsilon"]} if options["users"] else {},
        data_dir=None if data_dir is None else str(data_dir),
        select=options["select"],
        stream=options["stream"],
        workers=options["workers"],
        training=replace(usual_training(options["ranker"]), **training),
    )


def _own_label(data: str) -> str:
    """The label that lists were prepared with, or the usual one."""
    from ultr.labels import DEFAULT_LABEL
    from ultr.log.shards import Manifest, is_lists

    return "label" if is_lists(data) and Manifest.load(Path(data)).label is not None else DEFAULT_LABEL


def compare(
    data: Data,
    methods: Annotated[str, typer.Option(help="Comma-separated; a bound is lambdarank:from=no-bias or :from=truth.")],
    out: Annotated[Path, typer.Option(help="Folder of the comparison; what is finished there is not run again.")],
    seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 5,
    lrs: Annotated[
        str | None,
        typer.Option(
            help="Learning rates to choose from, on validation.",
            show_default="0.005,0.01,0.02,0.05; 0.05,0.1 for trees",
        ),
    ] = None,
    tuning_seeds: Annotated[int, typer.Option(help="Seeds the rate is chosen with.")] = 1,
    metrics: Annotated[str | None, typer.Option(help="Judged on test, comma-separated.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="The method others are compared with; the first if not given.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Runs side by side; 0: as many as there are cores, ten at most.", min=0)
    ] = 0,
    label: LabelOption = None,
    ranker: RankerOption = "mlp",
    ranker_option: RankerOptions = None,
    hidden: Hidden = "512,256,128",
    dropout: Dropout = 0.0,
    norm: Norm = "none",
    steps: Steps = None,
    batch: Batch = 256,
    optimizer: Optimizer = "adagrad",
    schedule: Schedule = "constant",
    clip: Clip = 5.0,
    weight_decay: WeightDecay = 0.0,
    evaluate_every: EvaluateEvery = None,
    patience: Patience = None,
    bias_steps: BiasSteps = 3000,
    propensities: Propensities = None,
    bias: BiasOption = None,
    select: Select = SELECT,
    users: UsersOption = None,
    sessions: Sessions = 0,
    eta: Eta = 1.0,
    epsilon: Epsilon = 0.1,
    data_dir: DataDir = None,
    request: RequestColumn = None,
    position: PositionColumn = None,
    features: FeatureColumns = None,
    categorical: CategoricalColumns = None,
    actions: ActionColumns = None,
    segment: SegmentColumn = None,
    stream: Stream = "auto",
    workers: Workers = 0,
    device: Device = "auto",
    precision: Precision = "float32",
    as_json: Json = False,
) -> None:
    """Compare methods fairly: each tuned alike on validation, the same seeds, paired tests on test."""
    from ultr.compare import Entry
    from ultr.compare import compare as run_comparison
    from ultr.report import write_comparison_page

    base = _config({**locals()})
    try:
        rates = [] if lrs is None else [float(rate) for rate in lrs.split(",")]
    except ValueError as error:
        raise OptionError("--lrs should be numbers, comma-separated", got=f"'{lrs}'") from error
    names = [name for name in methods.split(",") if name.strip()]
    entries = [Entry.parse(name, base.ranker) for name in names]
    _say_thresholds(base.label, {e.text: (e.method, e.options, e.ranker or base.ranker) for e in entries})
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
            tuning_seeds=tuning_seeds,
            metrics=metrics.split(",") if metrics else None,
            reference=reference,
            jobs=jobs,
            on_done=show,
        )
    if has_page := pages_can_be_made():
        write_comparison_page(out, out / "comparison.html", overwrite=True)
    if as_json:
        print(json.dumps(result.to_json()))
        return
    _print_comparison(result)
    page = f" and {out / 'comparison.html'}" if has_page else ""
    words.print(f"wrote {out / 'comparison.json'}{page}", soft_wrap=True)


def _print_comparison(result: Comparison) -> None:
    table = Table(
        title=f"mean ± deviation over seeds; * differs from {result.reference}, p < 0.05", title_justify="left"
    )
    table.add_column("method", no_wrap=True)
    for heading in ("rate", *result.metrics):
        table.add_column(heading, justify="right")
    for row in result.rows:
        cells = []
        for metric, summary in row.to_json()["figures"].items():
            star = "*" if metric in row.against and row.against[metric].significant else " "
            cells.append(f"{summary['mean']:.4f} ± {summary['deviation']:.4f}{star}")
        table.add_row(row.entry, f"{row.lr:g}", *cells)
    print_table(table)
