"""Regression of the label on the features, item by item: the plain baseline, which ignores the bias of feedback."""

from __future__ import annotations

from torch import Tensor

from ultr.lists import Lists
from ultr.methods.base import Method
from ultr.methods.losses import pointwise_loss


class Pointwise(Method):
    """Least squares Σ_i (s_i - c_i)² of the scores s as predictions of the labels c."""

    LEARNS_ALONE = True

    def loss(self, lists: Lists) -> Tensor:
        return pointwise_loss(self.score(lists.features), self.labels(lists), where=lists.where, weights=lists.weights)
