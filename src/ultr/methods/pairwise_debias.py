"""Pairwise debiasing (Hu et al. 2019, Unbiased LambdaMART): losses of pairs give the bias of clicks and non-clicks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ultr.bias.equations import quotient
from ultr.lists import Lists
from ultr.methods.base import AtLeastZero, ClickMethod, MethodInputs, PositionIndex, options_of
from ultr.methods.losses import gaps, lambdarank_weights, pairs_of, pairwise_loss, preferred_pairs
from ultr.methods.position_model import average_with, means_of_all, numbers, sums_in_cells

LEAST, MOST = 0.01, 100.0  # bounds of t⁺ and t⁻
RELEASED_STEP = 0.05  # share of a batch in t⁺ and t⁻, in the released code


class PairwiseDebias(ClickMethod):
    """Pairs of a click i and no click j, weighted by 1/(t⁺_i t⁻_j), with L_ij = |ΔNDCG_ij| log(1 + exp(-(s_i - s_j))).

        t⁺_k ∝ [Σ over i at k of  L_ij / t⁻_j] ^ 1/(p+1)         t⁻_k ∝ [Σ over j at k of  L_ij / t⁺_i] ^ 1/(p+1)

    each relative to the first position, p = `regularisation`. The sums are means per impression, averaged over batches;
    t⁺ and t⁻ are ratios of these averages. A position without pairs keeps its values. If the first position has no
    pairs, all positions keep their values.

    `variant=released` follows the toolbox ULTRA, so that published numbers can be compared: p = 1, L_ij without
    |ΔNDCG_ij|, and each batch moves t⁺ and t⁻ by 0.05 towards its ratios.
    """

    plus: Tensor
    minus: Tensor
    sums: Tensor
    updates: Tensor

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        regularisation: AtLeastZero | None = None,
        variant: Literal["standard", "released"] = "standard",
    ) -> None:
        super().__init__(inputs)
        self.released = variant == "released"
        default = 1.0 if self.released else 0.0
        self.power = 1 / ((default if regularisation is None else regularisation) + 1)
        self.index = PositionIndex(inputs.positions)
        size = len(self.index)
        self.register_buffer("plus", torch.ones(size))
        self.register_buffer("minus", torch.ones(size))
        self.register_buffer("sums", torch.zeros(3, size))  # loss over t⁻, loss over t⁺, impressions
        self.register_buffer("updates", torch.zeros(()))

    OPTIONS = options_of(__init__)

    def _weights(self, lists: Lists, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return |ΔNDCG| (or 1) of pairs of a click i and no click j [..., i, j], t⁺ of i, and t⁻ of j."""
        place = self.index(lists.shown_positions)
        if self.released:
            change = preferred_pairs(self.clicks(lists), where=lists.where).to(scores.dtype)
        else:
            change = lambdarank_weights(scores, self.clicks(lists), where=lists.where)
        return change, pairs_of(self.plus[place])[0], pairs_of(self.minus[place])[1]

    @torch.no_grad()
    def update(self, lists: Lists) -> None:
        with self.without_dropout():
            scores = self.score(lists.features)
        change, plus_i, minus_j = self._weights(lists, scores)
        losses = change * softplus(-gaps(scores))
        of_click, of_none = (losses / minus_j).sum(-1), (losses / plus_i).sum(-2)
        self.updates += 1
        terms = of_click, of_none, torch.ones_like(scores)
        place, weights = self.index(lists.shown_positions), lists.weights[:, None] * lists.where
        (sums,) = means_of_all((sums_in_cells(terms, place, weights, len(self.index)), weights))
        if self.released:
            self.sums.copy_(sums)
        else:
            average_with(self.sums, sums, self.updates)
        shown = self.sums[2]
        for sums, ratios in ((self.sums[0], self.plus), (self.sums[1], self.minus)):
            means = quotient(sums, shown)
            relative = quotient(means, means[0]).pow(self.power)
            if self.released:
                relative = torch.lerp(ratios, relative, RELEASED_STEP)
            ratios.copy_(torch.where((sums > 0) & (means[0] > 0), relative, ratios).clamp(LEAST, MOST))

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        with torch.no_grad():
            change, plus_i, minus_j = self._weights(lists, scores)
            weights = change / (plus_i * minus_j)
        return pairwise_loss(scores, weights, where=lists.where, weights=lists.weights)

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return {
            "positions": self.index.ids.tolist(),
            "t_plus": numbers(self.plus),
            "t_minus": numbers(self.minus),
            "warnings": [],
        }
