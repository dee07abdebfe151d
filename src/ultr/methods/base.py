"""What a method is: a module with a loss, an update without gradients if it has one, and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ultr.labels import Label
from ultr.lists import Lists
from ultr.rankers import FeatureEncoder, make_ranker


@dataclass(frozen=True)
class MethodInputs:
    """What a method is made from: the label it learns, the features and positions there are, and the kind of ranker."""

    label: Label
    features: int
    positions: tuple[int, ...] = ()  # the position ids of the training log, rising
    categories: Mapping[int, int] = field(default_factory=dict)  # place of a categorical feature -> its size
    ranker: str = "mlp"
    ranker_options: Mapping[str, Any] = field(default_factory=dict)
    truth: bool = False  # learn from true labels: an upper bound

    def make_ranker(self, extra_features: int = 0) -> nn.Module:
        encoder = FeatureEncoder(self.features + extra_features, self.categories)
        return make_ranker(self.ranker, encoder, **self.ranker_options)


class Method(nn.Module):
    """A ranker and a way to learn it. The training loop calls `update`, then takes a gradient step on `loss`."""

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {}  # the keyword options, and how each is read from text

    def __init__(self, inputs: MethodInputs) -> None:
        super().__init__()
        self.inputs = inputs
        self.ranker = inputs.make_ranker()

    def labels(self, lists: Lists) -> Tensor:
        """What is learned from: the label of the logged actions, or the true labels where those were asked for."""
        if self.inputs.truth:
            return lists.true_relevance
        labels: Tensor = self.inputs.label(lists.actions, check=False)
        return labels

    def loss(self, lists: Lists) -> Tensor:
        """The loss of a batch. Calling it changes nothing."""
        raise NotImplementedError

    def update(self, lists: Lists) -> None:
        """Learn what is not learned by gradients (the E- and M-step of methods that have one)."""

    def score(self, features: Tensor) -> Tensor:
        """The scores of items by their features alone."""
        scores: Tensor = self.ranker(features)
        return scores

    def serving(self) -> nn.Module:
        """The module that ships: from features to scores, with nothing of the bias."""
        return self.ranker

    def bias(self) -> dict[str, Any] | None:
        """What the method has learned about bias, if it learns it."""
        return None


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
