"""The base classes of methods. A method has a loss, scores of items and, optionally, an update without gradients."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict, Unpack, get_args, get_type_hints

import numpy as np
import torch
from pydantic import BeforeValidator, Field, StringConstraints
from torch import Tensor, nn

from ultr.bias.examination import Examination
from ultr.datasets.users import User
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.table import GRID, MOST_GRID_COLUMNS, rows_and_columns
from ultr.rankers import FeatureEncoder, make_ranker
from ultr.rankers.networks import HIDDEN

MOST_IN_TABLE = 1 << 16  # position ids that are looked up in a table
POSITION_SPEED = 10.0  # learning rate of parameters by position, relative to that of a network
RELEASED_ACCUMULATOR = 0.1  # Adagrad's first sums of squared gradients, in the code that the paper's authors released
BOUNDS = "use the method pointwise, lambdarank or pairwise-em with true labels"


@dataclass(frozen=True)
class MethodInputs:
    """The inputs of a method: the label to learn, the features and positions of the log, and the kind of ranker."""

    label: Label
    features: int
    positions: tuple[int, ...] = ()  # the position ids of the training log, ascending
    categories: Mapping[int, int] = field(default_factory=dict)  # index of a categorical feature -> its size
    ranker: str = "mlp"
    ranker_options: Mapping[str, Any] = field(default_factory=dict)
    bias_ranker: str | None = None  # kind of ranker in a bias model; None: the same as `ranker`
    truth: bool = False  # learn from true labels, for an upper bound of the results
    propensities: Mapping[int, float] | None = None  # known examination by position id
    feature_names: tuple[str, ...] = ()
    binary: tuple[str, ...] = ()  # the actions that are 0 or 1
    indicators: tuple[int, ...] = ()  # features whose missing values the ranker recognises, by index
    user: User | None = None  # the simulated user, whom only an oracle knows

    @property
    def label_is_binary(self) -> bool:
        """Whether the label is one action that is 0 or 1."""
        return self.label.expression in self.binary

    def make_ranker(self, *, extra_features: int = 0, outputs: int = 1) -> nn.Module:
        encoder = FeatureEncoder(self.features + extra_features, self.categories, indicators=self.indicators)
        return make_ranker(self.ranker, encoder, outputs=outputs, **self.ranker_options)

    def as_released(self) -> MethodInputs:
        """Return these inputs with the networks of the code that the authors of the CIKM 2022 paper released."""
        networks = {"norm": "layer", "dropout": 0.0, "separate": True} if self.ranker == "mlp" else {}
        return replace(self, ranker_options={**self.ranker_options, **networks})

    def with_half_the_units(self, **options: Any) -> MethodInputs:
        """Return these inputs with half the units in each hidden layer, and with these options of the ranker."""
        hidden = [max(1, size // 2) for size in self.ranker_options.get("hidden", HIDDEN)]
        return replace(self, ranker_options={**self.ranker_options, "hidden": hidden, **options})

    def labels_of(self, lists: Lists) -> Tensor:
        """Return the labels of items to learn from: of the logged actions, or the true labels if `truth` is set.

        The label of padding is set to 0, because an expression such as dwell / length would be 0/0 there.
        """
        labels: Tensor = lists.true_relevance if self.truth else self.label(lists.actions, check=False)
        return labels.masked_fill(~lists.where, 0)


class BiasInputs(TypedDict):
    """The inputs of an estimate of position bias from a log, before anything is trained."""

    user: User | None  # who simulates the feedback, in about `sessions` sessions
    sessions: int
    seed: int
    examination: NotRequired[Examination | None]  # the best estimate of this log, if the run has made it


@dataclass(frozen=True, eq=False)
class HeldOutRows:
    """Rows of requests that a method does not learn from, on its device."""

    features: Tensor
    request: Tensor  # the number of the request of each row
    labels: Tensor | None  # None if no feedback is known
    positions: Tensor | None


@dataclass(frozen=True, eq=False)
class Relevance:
    """The relevance of each row of a log, estimated by another ranker: P(c>0) = θ_k β and E[c | c>0] = μ."""

    beta: np.ndarray
    value: np.ndarray


def _split(value: Any) -> Any:
    return value.split("+") if isinstance(value, str) else value


# The types of options that several methods have.
ThetaFrom = Literal["auto", "strata", "items", "oracle"]
AtLeastZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AtLeastOne = Annotated[int, Field(ge=1)]
MaxWeight = Literal["none"] | Annotated[float, Field(ge=1, allow_inf_nan=False)]
Names = Annotated[
    tuple[Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)], ...],
    BeforeValidator(_split),
    Field(min_length=1),
]


def options_of(constructor: Callable[..., None]) -> dict[str, Any]:
    """Return the keyword options of a constructor, each with its type; None as a default means "not set"."""
    types, options = get_type_hints(constructor, include_extras=True), {}
    for parameter in inspect.signature(constructor).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            kind = types[parameter.name]
            given = [each for each in get_args(kind) if each is not type(None)]
            options[parameter.name] = reduce(or_, given) if type(None) in get_args(kind) else kind
    return options


class Learner(nn.Module):
    """A module that the training loop can train: the loop calls `update`, then takes a gradient step on `loss`."""

    accumulator = 0.0  # the first value of Adagrad's sums of squared gradients

    def loss(self, lists: Lists) -> Tensor:
        """Return the loss of a batch, without changing any state."""
        raise NotImplementedError

    def update(self, lists: Lists) -> None:
        """Update the state that is not learned by gradients, such as the E- and M-step of an EM method."""

    @property
    def draws(self) -> bool:
        """Whether the loss draws random numbers by torch's own generators, dropout apart."""
        return False

    def held_out_metrics(self, batches: list[Lists]) -> dict[str, Tensor]:
        """Return metrics of held-out requests; training keeps the state with the highest "likelihood"."""
        raise NotImplementedError

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Turn dropout off in a `with` block, for an E-step: posteriors are computed by the whole network."""
        training = self.training
        self.eval()
        yield
        self.train(training)

    def settings(self) -> dict[str, Any]:
        """Return the settings of this module that, with data and seed, determine the result of training."""
        return {}


class Method(Learner):
    """The base class of methods for networks: a ranker and a way to train it."""

    OPTIONS: ClassVar[dict[str, Any]] = {}  # keyword options, each with its type
    CLICKS_ALONE: ClassVar[bool] = False  # True if every label above zero counts as 1
    by_item = False  # whether `with_targets` adds what depends on item ids, which lists do not have
    anchored = False  # whether the ranker starts at a model of the log
    LEARNS_ALONE: ClassVar[bool] = False  # True if the ranker learns from requests with one item

    @classmethod
    def has_bias_stage(cls, options: Mapping[str, Any]) -> bool:
        """Return whether the method with these options trains a bias model before the ranker."""
        return False

    @classmethod
    def has_dropout(cls, options: Mapping[str, Any]) -> bool:
        """Return whether the dropout of the ranker can be chosen."""
        return True

    @classmethod
    def limits_weights(cls, options: Mapping[str, Any]) -> bool:
        """Return whether the method has weights whose limit `max_weight` can be chosen, and is not chosen yet."""
        return "max_weight" in cls.OPTIONS and "max_weight" not in options

    def __init__(self, inputs: MethodInputs) -> None:
        super().__init__()
        self.inputs = inputs
        self.ranker = inputs.make_ranker()

    def labels(self, lists: Lists) -> Tensor:
        return self.inputs.labels_of(lists)

    def estimate_bias(self, log: Log, **given: Unpack[BiasInputs]) -> None:
        """Estimate position bias from the whole training log, before anything is trained."""

    def estimate_policy(self, log: Log, *, seed: int) -> None:
        """Estimate from the whole training log how the logging ranker shows items, after the bias stage.

        It is also called if that stage is skipped, because the bias model was loaded.
        """

    def bias_learner(self) -> Learner | None:
        """Return the bias model, or None. It is trained before the ranker, and fixed while the ranker is trained."""
        return None

    def score(self, features: Tensor) -> Tensor:
        """Return the scores of items from their features alone."""
        return at_least_single(self.ranker(features))

    def balance(self, rows: HeldOutRows) -> None:
        """Weigh the terms of the ranker, if it has several; called before each evaluation."""

    def with_targets(self, log: Log) -> Log:
        """Return a log with what the loss needs of each row and what stays fixed after the bias stage."""
        return log

    @property
    def takes_relevance(self) -> bool:
        """Whether trees that were fitted to the log before may take the place of the bias model."""
        return False

    def with_relevance(self, log: Log, relevance: Relevance) -> Log:
        """Return a log with what the loss needs of each row, from the relevance of its rows."""
        raise NotImplementedError

    def start_ranker(self, log: Log, *, seed: int) -> None:
        """Give the ranker first weights that are better than random ones, if `anchored`, after the bias stage."""

    def serving(self) -> nn.Module:
        """Return the module for serving, which computes scores from features without the bias model."""
        return self.ranker

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        """Return a report of the learned position bias and its effect on some lists, or None if none is learned."""
        return None


class FeedbackMethod(Method):
    """A method that corrects the bias of feedback, and so cannot learn from true labels."""

    def __init__(self, inputs: MethodInputs) -> None:
        if inputs.truth:
            raise OptionError("this method corrects the bias of feedback, and true labels have none", hint=BOUNDS)
        super().__init__(inputs)


class ClickMethod(FeedbackMethod):
    """A method for clicks: every item with a label above zero counts as clicked."""

    CLICKS_ALONE = True

    def clicked(self, lists: Lists) -> Tensor:
        """Return True for items with a label above zero; False for padding."""
        return (self.labels(lists) > 0) & lists.where

    def clicks(self, lists: Lists) -> Tensor:
        """Return 1 for a click, else 0."""
        return self.clicked(lists).to(lists.features.dtype)


def at_least_single(outputs: Tensor) -> Tensor:
    """Return outputs of a network in single or double precision, which ranks and differences of scores need."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


def sortable_positions(lists: Lists) -> Tensor:
    """Return the positions of items, and a larger number than any position for padding."""
    return torch.where(lists.where, lists.shown_positions, torch.iinfo(torch.int64).max)


def as_limit(max_weight: float | str) -> float:
    """Return the largest weight as a number: infinity for `none`."""
    return math.inf if max_weight == "none" else float(max_weight)


class PositionIndex(nn.Module):
    """A module from position ids to indices 0, 1, ... of tables; an unknown id has the index of the nearest one."""

    ids: Tensor
    table: Tensor

    def __init__(self, positions: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("ids", torch.tensor(positions or (1,), dtype=torch.int64))
        self.register_buffer("table", torch.empty(0), persistent=False)  # from an id, less the first one, to its index
        self._make_table()
        self.register_load_state_dict_post_hook(_make_table)  # type: ignore[no-untyped-call]

    def _make_table(self) -> None:
        self._first, last = int(self.ids[0]), int(self.ids[-1])
        self._by_table = last - self._first < MOST_IN_TABLE
        in_grid = bool((self.ids & GRID).all())
        self._rows = [int(bound) for bound in rows_and_columns(self.ids)[0].aminmax()] if in_grid else None
        if self._by_table:
            self.table = self._nearest(torch.arange(self._first, last + 1, device=self.ids.device))

    def __len__(self) -> int:
        return len(self.ids)

    def forward(self, positions: Tensor) -> Tensor:
        if self._rows is not None:  # beyond the rows of a grid, the first or last row is the nearest
            rows = rows_and_columns(positions)[0]
            positions = positions + (rows.clamp(*self._rows) - rows) * MOST_GRID_COLUMNS
        if self._by_table:
            return self.table[(positions - self._first).clamp(0, len(self.table) - 1)]
        return self._nearest(positions)

    def _nearest(self, positions: Tensor) -> Tensor:
        right = torch.searchsorted(self.ids, positions).clamp(max=len(self.ids) - 1)
        left = (right - 1).clamp(min=0)
        return torch.where((positions - self.ids[left]).abs() < (self.ids[right] - positions).abs(), left, right)


def _make_table(index: PositionIndex, _: Any) -> None:
    index._make_table()


class PositionTable(nn.Module):
    """A learned number for each position, zero at first, with ten times the learning rate of a network.

    Each number learns from all requests, and a ranker can be right only after the position bias is.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    @property
    def values(self) -> Tensor:
        return POSITION_SPEED * self.weight

    def forward(self, place: Tensor) -> Tensor:
        return self.values[place]
