"""Methods that learn propensities together with the ranker: DLA, and UPE, which knows the logging policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from ultr.bias.logging_policy import STRATA
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.base import (
    BiasInputs,
    ClickMethod,
    MaxWeight,
    MethodInputs,
    PositionIndex,
    PositionTable,
    as_limit,
    options_of,
    sortable_positions,
)
from ultr.methods.logging_strata import LoggingStrata
from ultr.methods.losses import softmax_loss
from ultr.methods.position_model import MAX_WEIGHT, numbers

THETA_FROM_STRATA = "softmax over clicks, adjusted for strata of the logging score, together with the ranker"


class DLA(ClickMethod):
    """Two softmax losses over the clicks of a list, for the ranker s and the logits g of positions.

        Σ over clicks of  exp(g_1 - g_k) · -log softmax(s)_i   +   exp(s_1 - s_i) · -log softmax(g)_k

    Softmax gives P(o_1)/P(o_k) = exp(g_1 - g_k) of examination o, and P(r_1)/P(r_i) = exp(s_1 - s_i) of relevance r,
    where 1 is the first position (for g) or the first item of the list (for s). These weights have no gradient and are
    at most `max_weight`. This is the dual learning algorithm (Ai et al. 2018).
    """

    def __init__(self, inputs: MethodInputs, *, max_weight: MaxWeight = MAX_WEIGHT) -> None:
        super().__init__(inputs)
        self.max_weight = as_limit(max_weight)
        self.index = PositionIndex(inputs.positions)
        self.propensity = PositionTable(len(self.index))

    OPTIONS = options_of(__init__)

    def loss(self, lists: Lists) -> Tensor:
        scores, clicks = self.score(lists.features), self.clicks(lists)
        logits: Tensor = self.propensity(self.index(lists.shown_positions))
        with torch.no_grad():
            seen = (self.propensity.values[0] - logits).exp().clamp(max=self.max_weight)
        ranking = softmax_loss(scores, clicks * seen, where=lists.where, weights=lists.weights)
        return ranking + self.propensity_loss(lists, logits, clicks, scores.detach())

    def propensity_loss(self, lists: Lists, logits: Tensor, clicks: Tensor, scores: Tensor) -> Tensor:
        """Return the loss of the logits of positions."""
        highest = sortable_positions(lists).argmin(-1, keepdim=True)
        relevant = (scores.gather(-1, highest) - scores).exp().clamp(max=self.max_weight)
        return softmax_loss(logits, clicks * relevant, where=lists.where, weights=lists.weights)

    @torch.no_grad()
    def bias(self, batches: Iterable[Lists]) -> dict[str, Any]:
        logits = self.propensity.values
        return {
            "positions": self.index.ids.tolist(),
            "theta": numbers((logits - logits[0]).exp()),
            "theta_from": "dual learning, together with the ranker",
            "theta_scale": "1 at the first position: only ratios are learned",
            "warnings": [],
        }


class UPE(DLA):
    """`DLA` with a propensity model that knows the logging policy. It is learned in two steps, 1 before the others:

        1.  m(x) = score under which the logged order is most likely (Plackett-Luce), z = stratum of m(x) in its list
        2.  Σ over clicks of  -log softmax(g + u)_i,  with the logits g_k of position k and u_z of stratum z
        3.  P(o | do(k)) = Σ_z P(z) P(o | k, z) = exp(g_k) · Σ_z P(z) exp(u_z)    (backdoor adjustment)
        4.  Σ over clicks of  exp(g_1 - g_k) · -log softmax(s)_i,  with the propensities of 3

    It is unconfounded propensity estimation (Luo et al. 2023). A good logging ranker puts relevant items high. `DLA`
    takes a part of this effect of relevance for examination, and its propensities are too steep.

    The confounding effect u takes up the relevance that follows from the logging policy, so that g does not. The sum
    over z in 3 is one factor for all k, and cancels in the weights of 4. These are at most `max_weight`.

    Departures from the paper: its propensity model is a network of embeddings of position and confounder, and here the
    two add up to the logit. `relevance=dual` weights the clicks in 2 by the inverse relevance exp(s_1 - s_i), as in
    `DLA`. The default does not, because u and s both explain relevance until both are learned, and g is then too flat.
    """

    def __init__(
        self, inputs: MethodInputs, *, relevance: Literal["strata", "dual"] = "strata", **options: Any
    ) -> None:
        super().__init__(inputs, **options)
        self.dual = relevance == "dual"
        self.strata, self.effect = LoggingStrata(inputs), PositionTable(STRATA)

    OPTIONS = DLA.OPTIONS | options_of(__init__)

    def estimate_bias(self, log: Log, **given: Unpack[BiasInputs]) -> None:
        self.strata.fit(log, seed=given["seed"])

    @torch.no_grad()
    def bias(self, batches: Iterable[Lists]) -> dict[str, Any]:
        return {**super().bias(batches), "theta_from": THETA_FROM_STRATA, "confounding": numbers(self.effect.values)}

    def propensity_loss(self, lists: Lists, logits: Tensor, clicks: Tensor, scores: Tensor) -> Tensor:
        logits = logits + torch.where(self.strata.several, self.effect(self.strata(lists)), 0.0)
        if self.dual:
            return super().propensity_loss(lists, logits, clicks, scores)
        return softmax_loss(logits, clicks, where=lists.where, weights=lists.weights)
