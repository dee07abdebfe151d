"""Options that both `ultr train` and `ultr compare` have, and the `RunConfig` that is made from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultr.cli.messages import words
from ultr.cli.options import SOURCES, named_columns, one_line, one_source, plain, print_notes, with_segment
from ultr.errors import OptionError

if TYPE_CHECKING:
    from ultr.training.config import RunConfig

Data = Annotated[
    list[str],
    typer.Argument(
        help=f"A log ({SOURCES}) or prepared lists; with --users, a data set with true labels (synthetic, ml-1m)."
    ),
]
UsersOption = Annotated[
    str | None,
    typer.Option("--users", help="Simulate users who give feedback: pbm, trust, cascade, clickbait or watch."),
]
LabelOption = Annotated[
    str | None,
    typer.Option(
        "--label",
        help="Label to learn: an expression over actions. Default: that of prepared lists, or click + dwell / exp(3), "
        "or click if there is no dwell.",
    ),
]
Split = Annotated[
    str, typer.Option("--split", help="Requests of a log to hold out: random ones, or the last ones (time).")
]
Time = Annotated[str | None, typer.Option("--time", help="Column with the time, for --split time and --decay.")]
Decay = Annotated[
    float | None,
    typer.Option(
        "--decay",
        help="Half-life in days: a request counts half as much as one that is so much later. Days are date=.../ "
        "partitions, --time, or the order of several logs.",
    ),
]
RankerOption = Annotated[str, typer.Option("--ranker", help="Kind of ranker: mlp, linear, lightgbm or xgboost.")]
RankerOrAuto = Annotated[
    str,
    typer.Option(
        "--ranker",
        help="Kind of ranker: mlp, linear, lightgbm or xgboost. auto trains mlp and, if it is installed, lightgbm, "
        "and their sum is the ranker; with options of networks, mlp alone.",
    ),
]
AUTO_RANKER = "auto"
RankerOptions = Annotated[
    list[str] | None,
    typer.Option("--ranker-option", help="A parameter of LightGBM or XGBoost, as key=value; may be repeated."),
]
Sessions = Annotated[
    int,
    typer.Option(
        "--sessions",
        help="With --users, simulate this number of sessions once. 0: new feedback at each step; 20,000 for trees.",
        min=0,
    ),
]
BiasOption = Annotated[
    str | None,
    typer.Option(
        "--bias",
        help="A folder that ultr bias --out or ultr train wrote, or its bias.json: take the examination (and, from a "
        "run, the bias model) from there.",
    ),
]
Hidden = Annotated[str, typer.Option("--hidden", help="Sizes of the hidden layers of the mlp, comma-separated.")]
HiddenByLog = Annotated[
    str | None,
    typer.Option(
        "--hidden",
        help="Sizes of the hidden layers of the mlp, comma-separated.",
        show_default="512,256,128; or 128,64,32 for a log of less than 100,000 rows",
    ),
]
Dropout = Annotated[float, typer.Option("--dropout", help="Dropout rate of the mlp.")]
Norm = Annotated[str, typer.Option("--norm", help="Normalisation of the mlp's layers: none or layer.")]
Steps = Annotated[
    int | None,
    typer.Option("--steps", help="Training steps, or rounds of trees.", show_default="1000, or 500 for trees"),
]
Batch = Annotated[int, typer.Option("--batch", help="Lists (requests) per step.")]
Optimizer = Annotated[str, typer.Option("--optimizer", help="Optimizer: adagrad, adam or adamw.")]
Schedule = Annotated[str, typer.Option("--schedule", help="Schedule of the learning rate: constant, cosine or linear.")]
Clip = Annotated[float, typer.Option("--clip", help="Clip the gradient of each network at this norm; 0: do not clip.")]
WeightDecay = Annotated[float, typer.Option("--weight-decay", help="Weight decay.")]
EvaluateEvery = Annotated[
    int | None,
    typer.Option("--evaluate-every", help="Steps between evaluations.", show_default="50, or 10 for trees"),
]
Patience = Annotated[
    int | None,
    typer.Option(
        "--patience",
        help="Stop after this number of evaluations without improvement; 0: never.",
        show_default="10 passes over the log, or 5 for trees",
    ),
]
Select = Annotated[
    str,
    typer.Option(
        "--select",
        help="Metric that chooses the best step. auto: off-policy-gain@10 on a log, feedback-ndcg@10 with --users.",
    ),
]
Stream = Annotated[
    str,
    typer.Option("--stream", help="Read prepared lists while training: yes, no, or auto (yes if memory is too small)."),
]
Workers = Annotated[
    int, typer.Option("--workers", help="Threads that read streamed lists; 0: by the number of cores.", min=0)
]
Precision = Annotated[
    str,
    typer.Option(
        "--precision", help="Precision of matrix products: float32, tf32 or bf16. Default: tf32 on a GPU, else float32."
    ),
]
BiasSteps = Annotated[int, typer.Option("--bias-steps", help="Largest number of training steps of the bias model.")]
Propensities = Annotated[
    Path | None,
    typer.Option("--propensities", help="CSV or Parquet file of known examination: columns position,propensity."),
]
MissingOption = Annotated[
    str,
    typer.Option(
        "--missing",
        help="Missing values in features, for networks: mean (the mean of training rows, and an indicator) or error.",
    ),
]
AllowLeaks = Annotated[
    bool, typer.Option("--allow-leaks", help="Train also with features that follow the feedback on their item.")
]
DropSuspicious = Annotated[
    bool,
    typer.Option(
        "--drop-suspicious",
        help="Leave out requests with impossible click rates (bots); their ids are written to suspicious.csv.",
    ),
]
SELECT = "auto"


def print_thresholds(label: str, methods: Mapping[str, tuple[str, Mapping[str, Any], str]]) -> None:
    """Print the methods that use only whether the label is above zero.

    `methods` maps the name to print to (method, options of the method, ranker).
    """
    from ultr.methods import thresholds

    binary = [
        shown for shown, (name, options, ranker) in methods.items() if thresholds(name, label, options, ranker=ranker)
    ]
    if binary:
        what = f"trained on clicks only; '{label}' counts as 1 if it is above zero, else as 0"
        words.print(plain(f"{', '.join(binary)}: {what}"), soft_wrap=True)


def print_reading(config: RunConfig) -> None:
    """Print what is changed when the log of a comparison is read, which happens in other processes."""
    from ultr.log import read_log
    from ultr.log.readers import read_columns

    if config.users is None and read_columns(config.data, **config.columns) is not None:
        light = {**config.columns, "features": [], "categorical": []}
        print_notes(read_log(config.data, on_duplicates=config.on_duplicates, where=config.where, **light).notes)


def run_configs(options: dict[str, Any], chosen: Collection[str]) -> list[RunConfig]:
    """Return the configurations of a run, one for each kind of ranker; the user has `chosen` some options."""
    from ultr.training.joined import NETWORK, with_trees

    if options["ranker"] != AUTO_RANKER:
        return [run_config(options)]
    return with_trees(run_config({**options, "ranker": NETWORK}), chosen)


def run_config(options: dict[str, Any]) -> RunConfig:
    """Return the `RunConfig` for the options of a command, given by name."""
    from ultr.bias.propensities import read_propensities
    from ultr.methods import parse_options
    from ultr.rankers.boosters import is_trees
    from ultr.rankers.tree_parameters import parse_parameters
    from ultr.training.config import DEFAULT_METHOD, RunConfig, TrainingOptions, default_training

    ranker_options: dict[str, Any] = {}
    if options["ranker"] == "mlp":
        try:
            sizes = None if options["hidden"] is None else [int(size) for size in options["hidden"].split(",")]
        except ValueError as error:
            what = "--hidden must be comma-separated whole numbers, such as 512,256"
            raise OptionError(what, got=f"'{options['hidden']}'") from error
        ranker_options = {} if sizes is None else {"hidden": sizes}
        ranker_options |= {"dropout": options["dropout"], "norm": options["norm"]}
    parameters = options.get("ranker_option") or []
    if is_trees(options["ranker"]):
        ranker_options = parse_parameters(parameters)
    elif parameters:
        raise OptionError("--ranker-option is for trees", hint="for mlp, use --hidden, --dropout and --norm")
    training = {name: options[name] for name in TrainingOptions.__dataclass_fields__ if options.get(name) is not None}
    data_dir, propensities = options["data_dir"], options["propensities"]
    method = options.get("method", DEFAULT_METHOD)
    method_options = list(options.get("option") or [])
    if options.get("loss"):
        method_options.append(f"loss={options['loss']}")
    data, named = one_source(options["data"]), named_columns(options)
    label = options["label"] or label_for(data, named, users=options["users"])
    return RunConfig(
        data=data,
        method=method,
        method_options=parse_options(method, method_options, ranker=options["ranker"]),
        propensities=None if propensities is None else read_propensities(propensities),
        bias=options["bias"],
        warm_start=None if options.get("warm_start") is None else str(options["warm_start"]),
        sessions=options["sessions"],
        learn_from=options.get("learn_from", "feedback"),
        label=label,
        ranker=options["ranker"],
        ranker_options=ranker_options,
        columns=_with_segment(data, named, label, options),
        on_duplicates=options["on_duplicates"],
        where=tuple(options["where"] or ()),
        split=options["split"],
        time=options["time"],
        decay=options.get("decay"),
        users=options["users"],
        user_options={"eta": options["eta"], "epsilon": options["epsilon"]} if options["users"] else {},
        data_dir=None if data_dir is None else str(data_dir),
        select=options["select"],
        stream=options["stream"],
        workers=options["workers"],
        missing=options["missing"],
        allow_leaks=options["allow_leaks"],
        drop_suspicious=options["drop_suspicious"],
        training=replace(default_training(options["ranker"]), **training),
    )


def _with_segment(data: str, columns: dict[str, Any], label: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that the user named, and the segment: of the run that --bias names, or found in the log.

    A resumed run has the columns that it started with. Known examination needs no segment.
    """
    resumed = options.get("resume") and (Path(options["out"]) / "config.json").is_file()
    if "segment" in columns or options["users"] is not None or resumed:
        return columns
    if options["bias"] is not None:
        return columns | _segment_of_run(options["bias"])
    if options["propensities"] is not None:
        return columns
    rows = {"where": tuple(options["where"] or ()), "on_duplicates": options["on_duplicates"], "time": options["time"]}
    return with_segment(data, columns, label=label, **rows)


def _segment_of_run(bias: str) -> dict[str, str]:
    """Return the segment of the run whose examination is used; empty without one."""
    from ultr.utils.jsonfiles import read_json
    from ultr.utils.stores import fetched

    config = fetched(bias) / "config.json"
    segment = dict(read_json(config)).get("columns", {}).get("segment") if config.is_file() else None
    if not segment:
        return {}
    words.print(plain(one_line(f"segments: '{segment}', as in {bias}")), soft_wrap=True)
    return {"segment": segment}


def label_for(data: str, columns: Mapping[str, Any], *, users: str | None) -> str:
    """Return the default label for data: `label` of prepared lists, or a label over the actions that there are."""
    from ultr.errors import UltrError
    from ultr.log.labels import DEFAULT_LABEL, default_label
    from ultr.log.readers import read_columns
    from ultr.log.shards import Manifest, is_lists

    if users is not None:
        return DEFAULT_LABEL
    if is_lists(data):
        manifest = Manifest.load(data)
        return "label" if manifest.label is not None else default_label(manifest.actions)
    try:
        found = read_columns(data, **columns)
    except UltrError:
        return DEFAULT_LABEL  # reading the log reports the error
    label = DEFAULT_LABEL if found is None else default_label(found.actions)
    if label != DEFAULT_LABEL:
        words.print(plain(f"label: {label} (--label sets another one)"), soft_wrap=True)
    return label
