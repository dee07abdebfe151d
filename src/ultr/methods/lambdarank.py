"""LambdaRank (Burges 2006): pairs weighed by what swapping them would change in NDCG. No correction of bias."""

from __future__ import annotations

from torch import Tensor

from ultr.lists import Lists
from ultr.losses import lambdarank_weights, pairwise_loss
from ultr.methods.base import Method
from ultr.metrics import Gain


class LambdaRank(Method):
    """Pairwise logistic loss times |ΔNDCG|; gain is linear in the label, and 2^y - 1 for true grades."""

    def loss(self, lists: Lists) -> Tensor:
        scores, labels = self.score(lists.features), self.labels(lists)
        gain: Gain = "exponential" if self.inputs.truth else "linear"
        weights = lambdarank_weights(scores, labels, where=lists.where, gain=gain)
        return pairwise_loss(scores, weights, where=lists.where, weights=lists.weights)
