"""The dual learning algorithm (Ai et al. 2018): ranker and propensities, each weighted by the inverse of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ultr.lists import Lists
from ultr.methods.base import ClickMethod, MethodInputs, PositionIndex, PositionTable, as_limit, weight_limit
from ultr.methods.losses import softmax_loss
from ultr.methods.position_model import MAX_WEIGHT, numbers


class DLA(ClickMethod):
    """Two softmax losses over the clicks of a list, for the ranker s and the logits g of positions.

        Σ over clicks of  exp(g_1 - g_k) · -log softmax(s)_i   +   exp(s_1 - s_i) · -log softmax(g)_k

    Softmax gives P(o_1)/P(o_k) = exp(g_1 - g_k) of examination o, and P(r_1)/P(r_i) = exp(s_1 - s_i) of relevance r,
    where 1 is the first position (for g) or the first item of the list (for s). These weights have no gradient and are
    at most `max_weight`.
    """

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {"max_weight": weight_limit}

    def __init__(self, inputs: MethodInputs, *, max_weight: float | str = MAX_WEIGHT) -> None:
        super().__init__(inputs)
        self.max_weight = as_limit(max_weight)
        self.index = PositionIndex(inputs.positions)
        self.propensity = PositionTable(len(self.index))

    def loss(self, lists: Lists) -> Tensor:
        scores, clicks = self.score(lists.features), self.clicks(lists)
        logits: Tensor = self.propensity(self.index(lists.shown_positions))
        with torch.no_grad():
            seen = (self.propensity.values[0] - logits).exp().clamp(max=self.max_weight)
        ranking = softmax_loss(scores, clicks * seen, where=lists.where, weights=lists.weights)
        return ranking + self.propensity_loss(lists, logits, clicks, scores.detach())

    def propensity_loss(self, lists: Lists, logits: Tensor, clicks: Tensor, scores: Tensor) -> Tensor:
        """Return the loss of the logits of positions."""
        last = torch.iinfo(torch.int64).max
        highest = torch.where(lists.where, lists.shown_positions, last).argmin(-1, keepdim=True)
        relevant = (scores.gather(-1, highest) - scores).exp().clamp(max=self.max_weight)
        return softmax_loss(logits, clicks * relevant, where=lists.where, weights=lists.weights)

    @torch.no_grad()
    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        logits = self.propensity.values
        return {
            "positions": self.index.ids.tolist(),
            "theta": numbers((logits - logits[0]).exp()),
            "theta_from": "dual learning, together with the ranker",
            "theta_scale": "1 at the first position: only ratios are learned",
            "warnings": [],
        }
