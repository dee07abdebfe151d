"""The configuration of a training run: its data, method, ranker and training options, saved as config.json."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ultr._version import __version__
from ultr.bias.propensities import as_propensities
from ultr.datasets.initial import Logging
from ultr.errors import DataError, OptionError, nearest
from ultr.evaluation.scores import FEEDBACK, OFF_POLICY, parse_any_metric
from ultr.log.duplicates import OnDuplicates
from ultr.log.labels import DEFAULT_LABEL, Label
from ultr.log.schema import ROLES
from ultr.rankers.boosters import is_trees, library_version
from ultr.training.optimizers import Optimizer
from ultr.utils.arguments import Seed, check_fields, check_value
from ultr.utils.jsonfiles import check_format

FORMAT = 1
LearnFrom = Literal["feedback", "truth", "no-bias"]
DEFAULT_METHOD = "pairwise-em"
AUTO = "auto"  # selection metric: off-policy-gain@10 on a log, else feedback-ndcg@10
Streaming = Literal["auto", "yes", "no"]
MissingValues = Literal["error", "mean"]
Precision = Literal["auto", "float32", "tf32", "bf16"]
TREE_SESSIONS = 20_000  # simulated sessions for trees if `sessions` is 0


@dataclass(frozen=True)
class TrainingOptions:
    """The options of the training loop: steps, optimizer, evaluation, seed and device."""

    steps: int = 1000
    batch: int = 256  # lists per step
    optimizer: Optimizer = "adagrad"
    lr: float = 0.02
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: int = 0  # number of first steps, in which the learning rate rises to `lr`
    clip: float = 5.0  # largest norm of the gradient of each network; 0: no limit
    weight_decay: float = 0.0
    evaluate_every: int = 50
    patience: int | None = None  # stop after so many evaluations without improvement; 0: never; None: by the log
    bias_steps: int = 3000  # largest number of training steps of a bias model, which comes before the ranker
    seed: Seed = 0
    device: str = "auto"
    precision: Precision = "auto"  # of matrix products; auto: tf32 on a GPU

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("steps", "batch", "evaluate_every", "bias_steps"):
            if getattr(self, name) < 1:
                raise OptionError(f"'{name}' must be at least 1", got=getattr(self, name))
        for name in ("warmup", "clip", "weight_decay", "patience", "seed"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise OptionError(f"'{name}' must be at least 0 and finite", got=getattr(self, name))
        if not 0 < self.lr < math.inf:
            raise OptionError("the learning rate must be above 0 and finite", got=self.lr)

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warm = min(1.0, (step + 1) / (self.warmup + 1))
        done = min(1.0, max(0, step - self.warmup) / max(1, self.steps - self.warmup))
        shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[self.schedule]
        return self.lr * warm * shape


PASSES = 10  # over a log without improvement, after which training stops
TREE_TRAINING = TrainingOptions(steps=500, lr=0.1, evaluate_every=10, patience=5)
BIAS_TRAINING = TrainingOptions(lr=0.03, evaluate_every=25, patience=40)


def patience_for(requests: int, options: TrainingOptions, *, least: int, most: int) -> int:
    """Return the number of evaluations without improvement after which training on a log stops.

    They take as many steps as ten passes over the requests of the log, but at least `least` and at most `most` steps.
    """
    steps = min(most, max(least, PASSES * requests // options.batch))
    return math.ceil(steps / options.evaluate_every)


def default_training(ranker: str) -> TrainingOptions:
    """Return the default training options of a ranker, given its name; for trees, a step is a boosting round."""
    return TREE_TRAINING if is_trees(ranker) else TrainingOptions()


@dataclass(frozen=True)
class RunConfig:
    """Everything that is needed to repeat a training run."""

    data: str  # path of a log; or, with `users`, name of a data set with true labels
    method: str = DEFAULT_METHOD
    method_options: Mapping[str, Any] = field(default_factory=dict)
    learn_from: LearnFrom = "feedback"
    label: str = DEFAULT_LABEL
    ranker: str = "mlp"
    ranker_options: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)  # role -> column of the log, as for read_log
    on_duplicates: OnDuplicates = "error"  # repeated rows of a log, as for read_log
    where: Sequence[str] = ()  # conditions on the rows of a log, as for read_log
    split: Literal["random", "time"] = "random"  # requests that are held out: random ones, or the last ones
    time: str | None = None  # column of the log with the time, for a split by time or for `decay`
    decay: float | None = None  # half-life of the weights of requests in days; None: all have the same weight
    users: str | None = None  # kind of simulated users, such as pbm; None: the data are a log with feedback
    user_options: Mapping[str, Any] = field(default_factory=dict)
    propensities: Mapping[str, float] | None = None  # position, or `position@segment` -> probability that it is seen
    data_dir: str | None = None
    items: int = 10  # items of a data set that simulated users see per request
    logging: Logging = "linear"  # the kind of the initial ranker, whose order simulated users see
    share: float = 0.01  # share of requests that train the initial ranker
    held_out: float = 0.2  # share of a log's requests held out for validation
    judged: float = 0.0  # share of a log's requests held out for the final test
    select: str = AUTO  # metric on validation requests that chooses the best step
    stream: Streaming = "auto"  # read prepared lists while training; auto: only if they do not fit in memory
    sessions: int = 0  # sessions simulated once before training; 0: new feedback at each step (trees: TREE_SESSIONS)
    bias: str | None = None  # a run, `ultr bias` folder or bias.json to take the estimated bias from
    warm_start: str | None = None  # a finished run whose ranker training starts from
    both: bool = False  # the ranker is the sum of a network and of trees, which are trained after it and join it
    workers: int = 0  # threads that read streamed lists; 0: chosen by the number of cores
    missing: MissingValues = "mean"  # of features of a network; mean: the mean of training rows, and an indicator
    allow_leaks: bool = False  # train also with features that follow the feedback on their item
    drop_suspicious: bool = False  # leave out requests with impossible click rates, such as those of bots
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def __post_init__(self) -> None:
        if self.propensities is not None:
            object.__setattr__(self, "propensities", as_propensities(self.propensities))
        check_fields(self)
        for name in ("data", "data_dir", "bias", "warm_start"):
            check_value(name, getattr(self, name), str | Path | None)
        if (self.split == "time" or self.decay is None) and (self.split == "time") != (self.time is not None):
            hint = "pass --split time --time COLUMN"
            raise OptionError("a split by time needs both --split time and the column of the times", hint=hint)
        if self.decay is not None and not 0 < self.decay < math.inf:
            what = "'decay' is a half-life in days, and must be above 0 and finite"
            raise OptionError(what, got=self.decay, hint="pass --decay 7")
        if self.decay is not None and self.users is not None:
            raise OptionError("simulated users have no days, so weights cannot decay", hint="leave out --decay")
        if unknown := next((name for name in self.columns if name not in ROLES), None):
            raise OptionError(f"'columns' has an unknown role {unknown!r}", hint=nearest(unknown, ROLES))
        if not (self.held_out > 0 and self.judged >= 0 and self.held_out + self.judged < 1):
            what = "'held_out' must be above 0, 'judged' (the test share) at least 0, and their sum below 1"
            raise OptionError(what, got=f"{self.held_out} and {self.judged}")
        for name in ("sessions", "workers"):
            if getattr(self, name) < 0:
                raise OptionError(f"'{name}' must be at least 0", got=getattr(self, name))
        if self.bias is not None and self.propensities is not None:
            hint = "pass only one of --propensities and --bias"
            raise OptionError("known examination is given twice, by 'propensities' and by 'bias'", hint=hint)
        if self.learn_from == "no-bias" and self.users is None:
            raise OptionError("learn_from=no-bias needs simulated users", hint="pass --users pbm")
        Label(self.label)
        parse_any_metric(self.selection)

    @property
    def sessions_drawn(self) -> int:
        """The number of sessions simulated once, before training; 0 if users give new feedback at each step."""
        return self.sessions or (TREE_SESSIONS if self.users is not None and is_trees(self.ranker) else 0)

    @property
    def ranker_name(self) -> str:
        """The name of the ranker, for people."""
        return f"mlp + {self.ranker}" if self.joins else self.ranker

    @property
    def joins(self) -> bool:
        """Whether the trees of this run join a network, which is in the folder of the run before them."""
        return self.both and is_trees(self.ranker)

    @property
    def selection(self) -> str:
        """The name of the metric that chooses the best step, with `auto` replaced by a metric."""
        if self.select != AUTO:
            return self.select
        from_log = self.users is None and self.learn_from == "feedback"
        return f"{OFF_POLICY}gain@10" if from_log else f"{FEEDBACK}ndcg@10"

    def shared_key(self, settings: Mapping[str, Any]) -> str:
        """Return a hash that is the same for runs that can share a bias model: same data, seed and bias settings."""
        options = self.training
        training = TrainingOptions(seed=options.seed, batch=options.batch, bias_steps=options.bias_steps)
        ranker = "trees" if is_trees(self.ranker) else self.ranker
        changes: dict[str, Any] = {"method_options": {}, "ranker_options": {}}
        common = replace(self, ranker=ranker, select=AUTO, training=training, **changes)
        text = json.dumps([FORMAT, asdict(common), settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Return the options that differ from another configuration's: name -> (value here, value there).

        Names are those of `ultr train`. Options that do not change the result are left out, and a `stream` of "auto".
        Hidden layers are left out if they are not chosen here.
        """
        here, there = _by_option(self), _by_option(other)
        left_out = {"device", "workers", *(("stream",) if self.stream == "auto" else ())}
        left_out |= {"hidden"} - set(self.ranker_options)
        names = [name for name in {**here, **there} if name not in left_out]
        return {name: (here.get(name), there.get(name)) for name in names if here.get(name) != there.get(name)}

    def to_json(self) -> dict[str, Any]:
        versions = {"ultr": __version__, "torch": torch.__version__, **library_version(self.ranker)}
        return {"format": FORMAT, **versions, **asdict(self)}

    @staticmethod
    def from_json(content: Mapping[str, Any], *, where: object = None) -> RunConfig:
        check_format(content, FORMAT, what="the run", where=where, hint="train again")
        names = {f.name for f in fields(RunConfig)}
        values = {name: value for name, value in content.items() if name in names}
        try:
            return RunConfig(**{**values, "training": TrainingOptions(**values["training"])})
        except (TypeError, KeyError) as error:
            raise DataError(f"the configuration cannot be read ({error})", where=where, hint="train again") from error


def _by_option(config: RunConfig) -> dict[str, Any]:
    """Return the values of a configuration as `config.json` has them, by the names of the options of `ultr train`."""
    values = json.loads(json.dumps(asdict(config), default=str))
    groups = ["columns", "user_options", "training", *(() if is_trees(config.ranker) else ("ranker_options",))]
    inner = {name: value for group in groups for name, value in values.pop(group).items()}
    renamed = {"method_options": "option", "ranker_options": "ranker_option", "data": "log"}
    return {**{renamed.get(name, name): value for name, value in values.items()}, **inner}


def with_training(config: RunConfig, **changes: Any) -> RunConfig:
    """Return a copy of a configuration with some training options changed."""
    return replace(config, training=replace(config.training, **changes))
