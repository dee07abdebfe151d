"""Baselines: regression of the label, LambdaRank, and position as a feature of the network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ultr.evaluation.metrics import Gain
from ultr.lists import Lists
from ultr.methods.base import Method, MethodInputs, PositionIndex, at_least_single
from ultr.methods.losses import lambdarank_weights, pairwise_loss, pointwise_loss
from ultr.rankers import WithConstants

DIMENSIONS = 8  # of the embedding of a position


class Pointwise(Method):
    """Least squares Σ_i (s_i - c_i)² of the scores s as predictions of the labels c."""

    LEARNS_ALONE = True

    def loss(self, lists: Lists) -> Tensor:
        return pointwise_loss(self.score(lists.features), self.labels(lists), where=lists.where, weights=lists.weights)


class LambdaRank(Method):
    """Pairwise logistic loss times |ΔNDCG|; the gain is linear in the label, and 2^y - 1 for true labels.

    LambdaRank (Burges 2006), without bias correction.
    """

    def loss(self, lists: Lists) -> Tensor:
        scores, labels = self.score(lists.features), self.labels(lists)
        gain: Gain = "exponential" if self.inputs.truth else "linear"
        weights = lambdarank_weights(scores, labels, where=lists.where, gain=gain)
        return pairwise_loss(scores, weights, where=lists.where, weights=lists.weights)


class PositionFeature(Method):
    """Least squares on the label, from features and an embedding of the position; scores are for the first position.

    It is the oldest bias correction. The network can combine position and features in any way, so fixing the position
    may not rank by relevance.
    """

    LEARNS_ALONE = True

    def __init__(self, inputs: MethodInputs) -> None:
        super().__init__(inputs)
        self.ranker = inputs.make_ranker(extra_features=DIMENSIONS)
        self.index = PositionIndex(inputs.positions)
        self.positions = nn.Embedding(len(self.index), DIMENSIONS)

    def score_at(self, features: Tensor, place: Tensor) -> Tensor:
        embedded = self.positions(place).expand(*features.shape[:-1], DIMENSIONS)
        return at_least_single(self.ranker(torch.cat([features, embedded], dim=-1)))

    def score(self, features: Tensor) -> Tensor:
        return self.score_at(features, torch.zeros((), dtype=torch.int64, device=features.device))

    def serving(self) -> nn.Module:
        return WithConstants(self.ranker, self.positions.weight.detach()[0])  # loaded weights also set the embedding

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score_at(lists.features, self.index(lists.shown_positions))
        return pointwise_loss(scores, self.labels(lists), where=lists.where, weights=lists.weights)
