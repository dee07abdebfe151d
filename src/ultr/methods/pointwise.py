"""Regression of the label on the features, item by item: the plain baseline, which takes feedback at its word."""

from __future__ import annotations

from torch import Tensor

from ultr.lists import Lists
from ultr.losses import pointwise_loss
from ultr.methods.base import Method


class Pointwise(Method):
    """Least squares on the label."""

    def loss(self, lists: Lists) -> Tensor:
        return pointwise_loss(self.score(lists.features), self.labels(lists), where=lists.where, weights=lists.weights)
