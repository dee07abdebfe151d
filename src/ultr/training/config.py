"""The configuration of a run: one tree of typed options, which is made once and never changed.

The options of the command line, TOML files, config.json, `ultr.train` and `UnbiasedRanker` are all parts of this tree.
What the data decide (label, segment, rankers, sizes of layers) is not in it: see `ultr.training.data.Decisions`.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ultr._version import __version__
from ultr.bias.propensities import as_propensities
from ultr.datasets.initial import Logging
from ultr.errors import DataError, OptionError, nearest
from ultr.evaluation.scores import FEEDBACK, LIKELIHOOD, parse_any_metric
from ultr.log.cleaning import OnDuplicates
from ultr.log.delays import arrivals, parse_pairs, parse_time
from ultr.log.labels import Label, sum_of_goals, weighted_goals
from ultr.methods import METHODS, TREE_METHODS, parse_options
from ultr.rankers.boosters import BOOSTERS, library_version
from ultr.utils.arguments import check_fields, check_value, requirement
from ultr.utils.jsonfiles import check_format
from ultr.utils.optimisation import Optimizer
from ultr.utils.stores import fetched

FORMAT = 2
ADDED = ("goals", "tradeoff")  # options that runs of this format may lack
DEFAULT_METHOD = "pairwise-em"
AUTO: Final = "auto"
Ranker = Literal["mlp", "linear", "lightgbm", "xgboost"]
Precision = Literal["auto", "float32", "tf32", "bf16"]
TREE_SESSIONS = 20_000  # simulated sessions if trees are trained and `sessions` is 0


def _listed(value: Any) -> Any:
    """Return comma-separated text as a list; other values as they are."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _path(value: Any, info: ValidationInfo) -> Any:
    """Return a path as text; raise OptionError if no file can have it."""
    text = str(value) if isinstance(value, Path) else value
    return check_value(str(info.field_name), text, str | Path) if isinstance(text, str) else value


def _pairs(value: Any) -> Any:
    """Return a table, or texts such as `purchase=7d`, as a list of texts."""
    return [f"{name}={each}" for name, each in value.items()] if isinstance(value, Mapping) else _listed(value)


Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_listed), Field(min_length=1)]
Names = str | tuple[str, ...] | None
Pairs = Annotated[tuple[str, ...], BeforeValidator(_pairs)]
PathText = Annotated[str, BeforeValidator(_path)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeastZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
AtLeastOne = Annotated[int, Field(ge=1, lt=2**63)]


class Section(BaseModel):
    """A part of the tree of options."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ColumnOptions(Section):
    """The columns of a log by role. Roles without a name are recognised by common names; "" means no column."""

    request: str | None = Field(None, description="id of the request")
    position: str | None = Field(None, description="position at which the item was shown")
    row: str | None = Field(None, description="row at which the item was shown, if users see a grid")
    column: str | None = Field(None, description="column at which the item was shown, if users see a grid")
    item: str | None = Field(None, description="id of the item")
    features: Names = Field(None, description="features, comma-separated; patterns such as 'f_*' are allowed")
    categorical: Names = Field(None, description="features with categories or ids, comma-separated")
    actions: Names = Field(None, description="feedback, comma-separated")
    query: str | None = Field(None, description="query; requests of one query show the same items")
    randomised: str | None = Field(None, description="mark of requests shown in random order")
    swaps: str | None = Field(None, description="drawn arm of an experiment with swaps, such as 1-3")
    shown: str | None = Field(None, description="mark of rows that users could see, 1 or 0; other rows are left out")
    segment: str | None = Field(
        None, description="columns on which examination depends, such as device,surface; none: do not look for one"
    )
    relevance: str | None = Field(None, description="true label, if it is known")
    weight: str | None = Field(None, description="weight of the request")

    def named(self) -> dict[str, Any]:
        """Return role -> column for the roles that the user named, as arguments of `read_log`."""
        named = {role: value for role, value in self if value is not None}
        return {**named, "segment": ""} if named.get("segment") == "none" else named


class DataOptions(Section):
    """The data of a run."""

    source: PathText = Field("", description="a log, prepared lists or, with simulated users, the name of a data set")
    columns: ColumnOptions = ColumnOptions()
    where: tuple[str, ...] = Field((), description="conditions on rows, such as 'country = de'")
    on_duplicates: OnDuplicates = Field("error", description="rows with the same item or position: error, first or sum")
    split: Literal["random", "time"] = Field("random", description="requests to hold out: random ones, or the last")
    time: str | None = Field(None, description="column with the time, for split=time, decay and action_delay")
    decay: Positive | None = Field(None, description="half-life of the weights of requests, in days")
    action_delay: Pairs = Field(
        (), description="how late actions arrive, such as purchase=7d; requests too young to know are left out"
    )
    action_times: Pairs = Field(
        (), description="columns with the times of actions, such as purchase=bought_at; keeps some young requests"
    )
    actions_until: str | None = Field(
        None, description="time up to which the log has actions; default: the time of its last request"
    )
    watch: str | None = Field(None, description="action with the watch time, for the next four options")
    duration: str | None = Field(None, description="column with the length of the item, in the unit of watch")
    censored: str | None = Field(None, description="column with 1 for a watch that the end of the session cut")
    capped: bool = Field(False, description="watches to the end of the item are cut too; needs duration")
    remove_duration: bool = Field(
        False, description="watch counts as its quantile among items of similar duration (D2Q); needs duration"
    )
    validation: Share = Field(0.15, gt=0, description="share of requests that choose steps, rounds and shares")
    test: Share = Field(0.1, description="share of requests held out for testing")
    missing: Literal["mean", "error"] = Field(
        "mean", description="missing features of networks: mean and mark, or error"
    )
    allow_leaks: bool = Field(False, description="train also with features that follow the feedback on their item")
    drop_suspicious: bool = Field(False, description="leave out requests with impossible click rates (bots)")
    stream: Literal["auto", "yes", "no"] = Field(
        "auto", description="read prepared lists while training; auto: if needed"
    )
    folder: PathText | None = Field(
        None, description="folder of data sets; default: the environment variable ULTR_DATA"
    )

    @model_validator(mode="after")
    def _check(self) -> DataOptions:
        by_age = self.decay is not None or bool(self.action_delay)
        if (self.split == "time" or not by_age) and (self.split == "time") != (self.time is not None):
            what = "a split by time needs both split=time and the column of the times (data.time)"
            raise ValueError(f"{what}; set both, or neither")
        self._check_actions()
        if self.validation + self.test >= 1:
            raise ValueError(f"the shares of validation ({self.validation:g}) and test ({self.test:g}) must be below 1")
        return self

    def _check_actions(self) -> None:
        """Raise an error if the options of watch times or of delayed actions do not belong together."""
        if arrivals(self.delays, parse_pairs(self.action_times, "action_times", "purchase=bought_at")):
            if self.time is None:
                raise ValueError(
                    "action_delay needs the times of requests; name their column with --time (--set time=COLUMN)"
                )
        elif self.actions_until is not None:
            raise ValueError("actions_until needs action_delay; pass --action-delay purchase=7d too")
        if self.actions_until is not None:
            parse_time(self.actions_until)
        given = [name for name in ("duration", "censored", "capped", "remove_duration") if getattr(self, name)]
        if given and self.watch is None:
            raise ValueError(f"{given[0]} needs the action with the watch time; name it with --set watch=ACTION")
        if (self.capped or self.remove_duration) and self.duration is None:
            name = "capped" if self.capped else "remove_duration"
            raise ValueError(f"{name} needs the length of items; name its column with --set duration=COLUMN")
        if self.watch is not None and not (self.censored or self.capped or self.remove_duration):
            raise ValueError("watch has no effect by itself; set censored=COLUMN, capped=true or remove_duration=true")

    @property
    def delays(self) -> dict[str, str]:
        """Return action -> the text of its delay."""
        return parse_pairs(self.action_delay, "--action-delay", "--action-delay purchase=7d")


class SimulationOptions(Section):
    """Simulated users, who give feedback on a data set with true labels."""

    users: str | None = Field(
        None, description="kind of users: pbm, trust, cascade, dcm, clickbait, watch, grid or carousel"
    )
    eta: float = Field(1.0, description="severity of position bias; 0: none")
    epsilon: float = Field(0.1, description="probability that users click an irrelevant item")
    options: dict[str, Any] = Field({}, description="further options of the users")
    sessions: Count = Field(0, description="sessions simulated once; 0: new feedback at each step (trees: 20,000)")
    items: AtLeastOne = Field(10, description="items that users see per request")
    logging: Logging = Field("linear", description="ranker that orders what users see, or a network's share")
    share: float = Field(0.01, description="share of requests that train this ranker")
    learn_from: Literal["feedback", "truth", "no-bias"] = Field(
        "feedback", description="feedback; for upper bounds, truth (true labels) or no-bias (users without bias)"
    )

    @property
    def user_options(self) -> dict[str, Any]:
        return {"eta": self.eta, "epsilon": self.epsilon, **self.options}


class ExaminationOptions(Section):
    """Known examination: how often users look at each position."""

    propensities: dict[str, float] | None = Field(None, description="position, or position@segment -> probability")
    bias: PathText | None = Field(None, description="run, ultr bias folder or bias.json to take examination from")

    @field_validator("propensities", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return None if value is None else as_propensities(value)

    @model_validator(mode="after")
    def _check(self) -> ExaminationOptions:
        if self.bias is not None and self.propensities is not None:
            raise ValueError("known examination is given twice; pass only one of --propensities and --bias")
        return self


class MethodOptions(BaseModel):
    """The method and its options, which `ultr.methods` declares and checks."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str = Field(DEFAULT_METHOD, description="pairwise-em, or a baseline such as pointwise or pal-click")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class NetworkOptions(Section):
    """The network: its layers, and how it is trained."""

    hidden: Sizes | None = Field(None, description="sizes of the hidden layers; default: by the rows of the log")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate")
    norm: Literal["none", "layer"] = Field("none", description="normalisation of the layers")
    steps: AtLeastOne = Field(1000, description="maximum number of training steps")
    batch: AtLeastOne = Field(256, description="requests per step")
    optimizer: Optimizer = Field("adagrad", description="optimizer")
    lr: Positive = Field(0.02, description="learning rate")
    schedule: Literal["constant", "cosine", "linear"] = Field("constant", description="schedule of the learning rate")
    warmup: Count = Field(0, description="warm-up steps of the learning rate")
    clip: AtLeastZero = Field(5.0, description="largest norm of the gradient of each network; 0: no limit")
    weight_decay: AtLeastZero = Field(0.0, description="weight decay")
    evaluate_every: AtLeastOne = Field(50, description="steps between evaluations")
    patience: Count | None = Field(
        None, description="evaluations without improvement before training stops; 0: never stop early; default: by log"
    )
    bias_steps: AtLeastOne = Field(
        3000, description="maximum number of steps of the bias model, which is not used next to trees"
    )


class TreeOptions(Section):
    """The boosted trees, and how they are grown."""

    rounds: AtLeastOne = Field(500, description="maximum number of rounds")
    lr: Positive = Field(0.1, description="learning rate")
    evaluate_every: AtLeastOne = Field(10, description="rounds between evaluations")
    patience: Count = Field(5, description="evaluations without improvement before training stops; 0: never stop early")
    parameters: dict[str, Any] = Field({}, description="parameters of LightGBM or XGBoost, such as num_leaves")


class TrainingSection(Section):
    """Options of all rankers of a run."""

    seed: Annotated[int, Field(ge=0, lt=2**63 - 1)] = Field(0, description="random seed")
    select: str = Field(AUTO, description="metric that chooses the best step; auto: off-policy-likelihood on a log")
    warm_start: PathText | None = Field(None, description="a finished run; training starts from its ranker")


class MachineOptions(Section):
    """Where and how to compute; these options never change which model is trained."""

    device: str = Field(AUTO, description="auto, cpu, cuda or cuda:1")
    precision: Precision = Field(AUTO, description="precision of matrix products; auto: tf32 on a GPU, else float32")
    workers: Count = Field(0, description="threads that read streamed lists; 0: by the number of cores")


def _rankers(value: Any) -> Any:
    """Return `auto`, or the kinds of rankers with the network first."""
    if isinstance(value, str) and value == AUTO:
        return value
    given, kinds = _listed(value), get_args(Ranker)
    listed = list(given) if isinstance(given, list | tuple) else [given]
    for kind in listed or [""]:
        if not isinstance(kind, str) or kind not in kinds:
            raise OptionError(f"there is no ranker '{str(kind)[:200]}'", hint=nearest(str(kind), kinds))
    if len({is_trees(kind) for kind in listed}) < len(listed):
        what = "two rankers must be a network and trees"
        raise OptionError(what, got=",".join(listed), hint="pass, for example, mlp,lightgbm")
    return tuple(sorted(listed, key=is_trees))


class Config(Section):
    """Everything that is needed to repeat a run."""

    data: DataOptions = DataOptions()
    label: str | None = Field(
        None, description="label to learn, over actions, or several; default: click + dwell / exp(3), or click"
    )
    goals: tuple[str, ...] = Field(
        (), description="labels whose sum is the label, from several --label; a run shows the trade-off of two"
    )
    tradeoff: Count = Field(5, description="weightings of two goals whose values a run shows; 0: none")
    simulation: SimulationOptions = SimulationOptions()
    examination: ExaminationOptions = ExaminationOptions()
    method: MethodOptions = MethodOptions()
    rankers: Annotated[Literal["auto"] | tuple[Ranker, ...], BeforeValidator(_rankers)] = Field(
        AUTO, description="mlp, linear, lightgbm or xgboost, or two of them, whose sum is the ranker"
    )
    network: NetworkOptions = NetworkOptions()
    trees: TreeOptions = TreeOptions()
    training: TrainingSection = TrainingSection()
    machine: MachineOptions = MachineOptions()

    @model_validator(mode="before")
    @classmethod
    def _sum_goals(cls, content: Any) -> Any:
        """Make one label of several, or of goals and their weights; goals of another label are dropped."""
        if not isinstance(content, Mapping):
            return content
        label, goals = content.get("label"), content.get("goals")
        if isinstance(label, Mapping | list | tuple) and label:
            goals = weighted_goals(label)
            label = sum_of_goals(goals)
        elif isinstance(goals, list | tuple) and goals:
            goals = weighted_goals(goals)
            label = sum_of_goals(goals) if label is None else label
        else:
            return content
        return {**content, "label": label, "goals": goals if len(goals) > 1 and sum_of_goals(goals) == label else ()}

    @model_validator(mode="after")
    def _check(self) -> Config:
        simulation, data = self.simulation, self.data
        if data.decay is not None and simulation.users is not None:
            raise ValueError("simulated users have no days, so weights cannot decay; leave out data.decay")
        if (data.watch or data.action_delay) and simulation.users is not None:
            raise ValueError("simulated users give their actions at once; leave out data.watch and data.action_delay")
        if simulation.learn_from == "no-bias" and simulation.users is None:
            raise ValueError("learn_from=no-bias needs simulated users; pass --users pbm")
        if self.label is not None:
            Label(self.label)
        parse_any_metric(self.selection)
        return self

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of rankers that the user chose; empty if the data decide."""
        return () if self.rankers == AUTO else tuple(self.rankers)

    @property
    def seed(self) -> int:
        return self.training.seed

    @property
    def users(self) -> str | None:
        return self.simulation.users

    @property
    def selection(self) -> str:
        """The name of the metric that chooses the best step, with `auto` replaced by a metric."""
        if self.training.select != AUTO:
            return self.training.select
        from_log = self.users is None and self.simulation.learn_from == "feedback"
        return LIKELIHOOD if from_log else f"{FEEDBACK}ndcg@10"

    @property
    def sessions_drawn(self) -> int:
        """The number of sessions simulated once, before training; 0 if users give new feedback at each step."""
        has_trees = any(map(is_trees, self.kinds))
        return self.simulation.sessions or (TREE_SESSIONS if self.users is not None and has_trees else 0)

    def loop(self, kind: str) -> TrainingOptions:
        """Return the options of the training loop of a kind of ranker."""
        common: dict[str, Any] = {"seed": self.seed, "device": self.machine.device, "precision": self.machine.precision}
        if is_trees(kind):
            trees = self.trees.model_dump(exclude={"parameters", "rounds"})
            # The bias model of trees may be a network.
            bias: dict[str, Any] = {"bias_steps": self.network.bias_steps, "batch": self.network.batch}
            return TrainingOptions(steps=self.trees.rounds, **bias, **trees, **common)
        return TrainingOptions(**self.network.model_dump(exclude={"hidden", "dropout", "norm"}), **common)

    def with_options(self, **options: Any) -> Config:
        """Return another configuration: these options, by their short names or paths, replace those of this one."""
        return _validated(_merged(self.model_dump(exclude_unset=True), _by_path(options, self.rankers)))

    def shared_key(self, kind: str, label: str, settings: Mapping[str, Any]) -> str:
        """Return a hash that is the same for runs that can share a bias model: same data, seed and bias settings."""
        sections = {name: getattr(self, name).model_dump() for name in ("data", "simulation", "examination")}
        options = self.loop(kind)
        loop = [options.seed, options.batch, options.bias_steps]
        return _hashed([FORMAT, sections, label, kind, loop, self.sessions_drawn, self.training.warm_start, settings])

    def data_key(self) -> str:
        """Return a hash that is the same for runs with the same requests, whatever their method and ranker."""
        sections = {name: getattr(self, name).model_dump() for name in ("data", "simulation")}
        others = [self.label, self.seed, self.selection, self.sessions_drawn, self.machine.device]
        return _hashed([sections, others, self.training.warm_start])

    @property
    def start_run(self) -> Path | None:
        """The folder of the run that training starts from; that of a URL is copied to this machine."""
        return None if self.training.warm_start is None else fetched(self.training.warm_start)

    def to_json(self) -> dict[str, Any]:
        libraries = {name: version for kind in self.kinds for name, version in library_version(kind).items()}
        versions = {"ultr": __version__, "torch": torch.__version__, **libraries}
        return {"format": FORMAT, **versions, **self.model_dump(mode="json")}

    @staticmethod
    def from_json(content: Mapping[str, Any], *, where: object = None) -> Config:
        check_format(content, FORMAT, what="the run", where=where, hint="train again")
        try:
            needed = [name for name in Config.model_fields if name in content or name not in ADDED]
            return _validated({name: content[name] for name in needed})
        except (KeyError, TypeError, OptionError) as error:
            raise DataError(f"the configuration cannot be read ({error})", where=where, hint="train again") from error


def _hashed(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def is_trees(kind: str) -> bool:
    """Return whether a kind of ranker is boosted trees."""
    return kind in BOOSTERS


# --- The options of a loop ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a training loop: steps (rounds of trees), optimizer, evaluation, seed and device."""

    steps: int = 1000
    batch: int = 256  # lists per step
    optimizer: Optimizer = "adagrad"
    lr: float = 0.02
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: int = 0
    clip: float = 5.0
    weight_decay: float = 0.0
    evaluate_every: int = 50
    patience: int | None = None
    bias_steps: int = 3000
    seed: int = 0
    device: str = AUTO
    precision: Precision = AUTO

    def __post_init__(self) -> None:
        check_fields(self)

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warm = min(1.0, (step + 1) / (self.warmup + 1))
        done = min(1.0, max(0, step - self.warmup) / max(1, self.steps - self.warmup))
        shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[self.schedule]
        return self.lr * warm * shape


PASSES = 10  # over a log without improvement, after which training stops
BIAS_TRAINING = TrainingOptions(lr=0.03, evaluate_every=25, patience=40)


def patience_for(requests: int, options: TrainingOptions, *, least: int, most: int) -> int:
    """Return the number of evaluations without improvement after which training on a log stops.

    They take as many steps as ten passes over the requests of the log, but at least `least` and at most `most` steps.
    """
    steps = min(most, max(least, PASSES * requests // options.batch))
    return math.ceil(steps / options.evaluate_every)


# --- Options by path and by short name ------------------------------------------------------------------------------

# Short names that are not the last word of their path.
RENAMED = {
    "data": "data.source",
    "data_dir": "data.folder",
    "held_out": "data.validation",
    "ranker": "rankers",
    "method": "method.name",
    "loss": "method.loss",
}
# Names of tables -> their paths; the options of a table are merged into those that were set before.
TABLES = {
    "columns": "data.columns",
    "method_options": "method",
    "tree_parameters": "trees.parameters",
    "user_options": "simulation.options",
}
OF_ALL_USERS = ("eta", "epsilon")  # options of users that are not in the table `simulation.options`
OF_ONE_RANKER = {"steps": "rounds", "lr": "lr", "evaluate_every": "evaluate_every", "patience": "patience"}


@dataclass(frozen=True)
class OptionInfo:
    """An option of the tree: its path, type, default and description."""

    path: str
    type: str
    default: Any
    description: str


@cache
def all_options() -> tuple[OptionInfo, ...]:
    """Return all options of the tree, but for those of methods."""
    return tuple(_walk(Config, ""))


def _walk(model: type[BaseModel], above: str) -> Iterator[OptionInfo]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _walk(kind, f"{above}{name}.")
        else:
            yield OptionInfo(f"{above}{name}", type_text(kind), field.default, field.description or "")


def type_text(kind: Any) -> str:
    """Return a type in words, such as `number` or `auto | float32`."""
    if getattr(kind, "__origin__", None) is Annotated or hasattr(kind, "__metadata__"):
        return type_text(get_args(kind)[0])
    words = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "", dict: "table"}
    if kind in words:
        return words[kind]
    origin, inner = getattr(kind, "__origin__", None), get_args(kind)
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin is tuple:
        return f"list of {type_text(inner[0])}"
    if origin is dict:
        return "table"
    return " | ".join(dict.fromkeys(text for each in inner if (text := type_text(each))))


@cache
def short_names() -> dict[str, str]:
    """Return short name -> path of the options whose last word is unique, or which have another short name."""
    paths = [option.path for option in all_options()]
    last = [path.rsplit(".", 1)[-1] for path in paths]
    return {**{n: p for n, p in zip(last, paths, strict=True) if last.count(n) == 1 and n != "options"}, **RENAMED}


def make_config(data: Any = "", **options: Any) -> Config:
    """Return the configuration with these options, by short name (`steps`) or path (`network.steps`); others: default.

    `steps`, `lr`, `evaluate_every` and `patience` are those of the network, or of trees if only trees are trained.
    """
    return Config().with_options(data=data, **options)


def _by_path(options: Mapping[str, Any], rankers: Any) -> dict[str, Any]:
    """Return options, given by short names or paths, by path; values of NumPy become those of Python."""
    rankers = _rankers(options.get("ranker", options.get("rankers", rankers)))
    only_trees = rankers != AUTO and all(map(is_trees, rankers))
    found: dict[str, Any] = {}
    for name, given in options.items():
        value = given.item() if hasattr(given, "item") and not getattr(given, "shape", ()) else given
        if name in OF_ONE_RANKER:
            found[f"trees.{OF_ONE_RANKER[name]}" if only_trees else f"network.{name}"] = value
        elif name in TABLES:
            if value is not None and not isinstance(value, Mapping):
                raise OptionError(f"'{name}' must be a table of options", got=repr(value)[:200])
            for key, each in (value or {}).items():
                of_all = name == "user_options" and key in OF_ALL_USERS
                found[f"simulation.{key}" if of_all else f"{TABLES[name]}.{key}"] = each
        else:
            found[name if "." in name else short_names().get(name, name)] = value
    return found


def check_path(path: str) -> None:
    """Raise OptionError if there is no option with this path or short name; the hint has the nearest one."""
    paths = {option.path for option in all_options()}
    tables = [option.path for option in all_options() if option.type == "table"]
    open_ended = (*(f"{table}." for table in tables), "method.")
    if path not in paths and not path.startswith(open_ended):
        hint = f"{nearest(path, [*paths, *short_names()])}; ultr options lists all of them"
        raise OptionError(f"there is no option '{path}'", hint=hint)


def _merged(content: dict[str, Any], by_path: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested content in which options by path replace others; another method has none of the old options."""
    before = content.get("method", {}).get("name", DEFAULT_METHOD)
    method = by_path.get("method.name", before)
    if not (isinstance(method, str) and method == before):
        content = {**content, "method": {}}
    for path, value in by_path.items():
        check_path(path)
        in_table = any(path.startswith(f"{table}.") and table.count(".") for table in TABLES.values())
        content = _with(content, path.split(".", 2 if in_table else 1), value)
    return content


def _with(content: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**content, first: _with(content.get(first) or {}, rest, value) if rest else value}


def _validated(content: Mapping[str, Any]) -> Config:
    try:
        config = Config.model_validate(content)
    except ValidationError as error:
        raise _option_error(error) from error
    given = config.method.options
    parsed = parse_options(config.method.name, given, ranker=config.kinds[0] if config.kinds else "mlp")
    if parsed == given:
        return config
    return config.model_copy(update={"method": MethodOptions(name=config.method.name, **parsed)})


def _option_error(error: ValidationError) -> OptionError:
    """Return the first problem that pydantic found as an OptionError: what is wrong, the value, what to do."""
    problem = error.errors()[0]
    path = ".".join(str(part) for part in problem["loc"] if isinstance(part, str) and "[" not in part)
    cause = (problem.get("ctx") or {}).get("error")
    if problem["type"] == "extra_forbidden":
        names = [option.path for option in all_options()]
        return OptionError(f"there is no option '{path}'", hint=nearest(path, names))
    if not path or isinstance(cause, ValueError):
        text, _, hint = (str(cause) if cause is not None else problem["msg"]).partition("; ")
        return OptionError(f"'{path}': {text}" if path and "'" not in text else text, hint=hint or None)
    short = path.removesuffix(".auto").rsplit(".", 1)[-1]
    got = repr(problem["input"])[:200]
    return OptionError(f"'{short}' must be {requirement(error)}", got=got, hint=f"ultr options {path} describes it")


def trains_trees_too(config: Config) -> bool:
    """Return whether the rankers of `auto` are a network and trees, as the default method has both forms."""
    if config.users is not None or config.simulation.learn_from != "feedback" or config.method.name != DEFAULT_METHOD:
        return False
    options = config.method.options
    if options.get("loss", "posterior") not in ("posterior", "opt-posterior") or options.get("variant") == "released":
        return False
    try:
        parse_options(DEFAULT_METHOD, options, ranker="lightgbm")
    except OptionError:
        return False
    return True


# --- The command that repeats a run -----------------------------------------------------------------------------------


def differences(config: Config, other: Config, *, unset: bool = False) -> dict[str, tuple[Any, Any]]:
    """Return the options that differ, by path: (value here, value there); those of the machine do not count.

    With `unset`, options that are not set here do not count either.
    """
    here, there = (dict(flat(each.model_dump(mode="json"))) for each in (config, other))
    chosen = dict(flat(config.model_dump(mode="json", exclude_unset=True))) if unset else here | there
    names = [name for name in chosen if not name.startswith("machine.")]
    return {name: (here.get(name), there.get(name)) for name in names if here.get(name) != there.get(name)}


def flat(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by path, such as (`network.lr`, 0.02)."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def train_command(config: Config, *, out: str = "run") -> tuple[str, list[str]]:
    """Return the `ultr train` command that repeats a run, and a note for each setting that it cannot set."""
    default = dict(flat(Config().model_dump(mode="json")))
    words = ["ultr", "train", config.data.source, "--out", out]
    notes: list[str] = []
    for path, value in flat(config.model_dump(mode="json")):
        if path.startswith("examination.propensities"):
            if not notes and value is not None:
                notes.append("--propensities: pass a file with the values of 'propensities' in the configuration")
        elif path == "data.where":
            words += [word for condition in value for word in ("--where", condition)]
        elif path == "goals":
            words += [word for goal in value for word in ("--label", goal)]
        elif path == "label" and config.goals:
            pass  # the sum of the goals
        elif path != "data.source" and value != default.get(path) and value is not None:
            words += ["--set", f"{path}={_text(value)}"]
    return shlex.join(words), notes


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


assert set(TREE_METHODS) <= set(METHODS)  # noqa: S101 - every method for trees is one for networks, too
