"""What a method is: a module with a loss, an update without gradients if it has one, and scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ultr.errors import OptionError
from ultr.labels import Label
from ultr.lists import Lists
from ultr.log import Log
from ultr.rankers import FeatureEncoder, make_ranker
from ultr.simulate import User

POSITION_SPEED = 10.0
BOUNDS = "take bounds from pointwise, lambdarank or pairwise-em"


@dataclass(frozen=True)
class MethodInputs:
    """What a method is made from: the label it learns, the features and positions there are, and the kind of ranker."""

    label: Label
    features: int
    positions: tuple[int, ...] = ()  # the position ids of the training log, rising
    categories: Mapping[int, int] = field(default_factory=dict)  # place of a categorical feature -> its size
    ranker: str = "mlp"
    ranker_options: Mapping[str, Any] = field(default_factory=dict)
    bias_ranker: str | None = None  # of a bias model; if not given, as the ranker
    truth: bool = False  # learn from true labels: an upper bound
    propensities: Mapping[int, float] | None = None  # known examination by position id
    feature_names: tuple[str, ...] = ()
    binary: tuple[str, ...] = ()  # the actions that are 0 or 1

    def make_ranker(self, *, extra_features: int = 0, outputs: int = 1) -> nn.Module:
        encoder = FeatureEncoder(self.features + extra_features, self.categories)
        return make_ranker(self.ranker, encoder, outputs=outputs, **self.ranker_options)

    def labels_of(self, lists: Lists) -> Tensor:
        """What is learned from: the label of the logged actions, or the true labels where those were asked for.

        Zero for padding, of which a label such as dwell / length would be 0/0.
        """
        labels: Tensor = lists.true_relevance if self.truth else self.label(lists.actions, check=False)
        return labels.masked_fill(~lists.where, 0)


class Learner(nn.Module):
    """What the training loop trains: it calls `update`, then takes a gradient step on `loss`."""

    def loss(self, lists: Lists) -> Tensor:
        """The loss of a batch. Calling it changes nothing."""
        raise NotImplementedError

    def update(self, lists: Lists) -> None:
        """Learn what is not learned by gradients (the E- and M-step of methods that have one)."""

    def held_out_figures(self, batches: list[Lists]) -> dict[str, float]:
        """How well requests that were not learned from are explained; "likelihood" is what a fit is judged by."""
        raise NotImplementedError

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """For an E-step: what dropout would drop is not part of what is believed."""
        training = self.training
        self.eval()
        yield
        self.train(training)

    def settings(self) -> dict[str, Any]:
        """What it learns depends on, beside data and seed."""
        return {}


class Method(Learner):
    """A ranker and a way to learn it."""

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {}  # the keyword options, and how each is read from text
    CLICKS_ALONE: ClassVar[bool] = False  # whether a label counts as 1 where it is above zero

    def __init__(self, inputs: MethodInputs) -> None:
        super().__init__()
        self.inputs = inputs
        self.ranker = inputs.make_ranker()

    def labels(self, lists: Lists) -> Tensor:
        return self.inputs.labels_of(lists)

    def prepare(self, log: Log, *, user: User | None, sessions: int, seed: int) -> None:
        """Learn what is to be learned from the whole training log, before anything else.

        Where a `user` gives the feedback, so many `sessions` are drawn from it.
        """

    def first(self) -> Learner | None:
        """What must be learned before the ranker is, and held while it is, if anything: a bias model."""
        return None

    def score(self, features: Tensor) -> Tensor:
        """The scores of items by their features alone."""
        return at_least_single(self.ranker(features))

    def serving(self) -> nn.Module:
        """The module that ships: from features to scores, with nothing of the bias."""
        return self.ranker

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        """What the method has learned about bias, if it learns it, and how that shows in some lists."""
        return None


class FeedbackMethod(Method):
    """A method that corrects what feedback has and true labels have not."""

    def __init__(self, inputs: MethodInputs) -> None:
        if inputs.truth:
            raise OptionError("a method that corrects feedback has nothing to correct in true labels", mend=BOUNDS)
        super().__init__(inputs)


class ClickMethod(FeedbackMethod):
    """A method for clicks: all it takes from a label is whether it is above zero."""

    CLICKS_ALONE = True

    def clicked(self, lists: Lists) -> Tensor:
        """Whether there was feedback; never for padding."""
        return (self.labels(lists) > 0) & lists.where

    def clicks(self, lists: Lists) -> Tensor:
        """1 for a click, else 0."""
        return self.clicked(lists).to(lists.features.dtype)


def at_least_single(outputs: Tensor) -> Tensor:
    """What a network gives, in single precision if it ran in less: ranks and gaps of scores need it."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


def one_of(name: str, *allowed: str) -> Callable[[str], str]:
    """A reader of an option that is one of a few words."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise OptionError(f"'{name}' should be one of {', '.join(allowed)}", got=f"'{text}'")
        return text

    return parse


def at_least(name: str, least: float) -> Callable[[str], float]:
    """A reader of an option that is a number, bounded below."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise OptionError(f"'{name}' should be {least:g} or more", got=f"'{text}'")
        return value

    return parse


class PositionIndex(nn.Module):
    """From position ids, which may be any numbers, to places 0, 1, ... in a table; ids never seen go to the nearest."""

    ids: Tensor

    def __init__(self, positions: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("ids", torch.tensor(positions or (1,), dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.ids)

    def forward(self, positions: Tensor) -> Tensor:
        right = torch.searchsorted(self.ids, positions).clamp(max=len(self.ids) - 1)
        left = (right - 1).clamp(min=0)
        return torch.where((positions - self.ids[left]).abs() < (self.ids[right] - positions).abs(), left, right)


class PositionTable(nn.Module):
    """A number for each place, zero at first, learned ten times as fast as a network at the same rate.

    A position has the whole log to learn from, and its bias has to be known before a ranker can be right.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    @property
    def values(self) -> Tensor:
        return POSITION_SPEED * self.weight

    def forward(self, place: Tensor) -> Tensor:
        return self.values[place]
