"""LambdaRank (Burges 2006): pairs weighted by the change of NDCG if both items are swapped, without bias correction."""

from __future__ import annotations

from torch import Tensor

from ultr.evaluation.metrics import Gain
from ultr.lists import Lists
from ultr.methods.base import Method
from ultr.methods.losses import lambdarank_weights, pairwise_loss


class LambdaRank(Method):
    """Pairwise logistic loss times |ΔNDCG|; the gain is linear in the label, and 2^y - 1 for true labels."""

    def loss(self, lists: Lists) -> Tensor:
        scores, labels = self.score(lists.features), self.labels(lists)
        gain: Gain = "exponential" if self.inputs.truth else "linear"
        weights = lambdarank_weights(scores, labels, where=lists.where, gain=gain)
        return pairwise_loss(scores, weights, where=lists.where, weights=lists.weights)
