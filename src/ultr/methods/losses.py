"""Losses: pure functions of scores and labels, with gradients for the scores only.

The last dimension is the list; `where` marks items, the rest is padding. `weights` are per request. Every loss is a sum
over the items or pairs of a request, and the weighted mean over requests, so that a request counts the same in any
batch. Padding is masked before any computation, because a NaN in it would become a gradient of 0 · NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from ultr.evaluation.metrics import Gain, batch_innermost, discounts_at, gains, ranks_of


def pointwise_loss(
    scores: Tensor,
    labels: Tensor,
    *,
    where: Tensor,
    weights: Tensor | None = None,
    item_weights: Tensor | None = None,
) -> Tensor:
    """Return the squared error of the score as a prediction of the label: Σ_i w_i (s_i - c_i)², w = 1 if not given."""
    squares = torch.where(where, scores - labels, 0.0).square()
    squares = squares if item_weights is None else torch.where(where, item_weights.detach(), 0.0) * squares
    return reduced(squares.sum(-1), weights)


def softmax_loss(scores: Tensor, item_weights: Tensor, *, where: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return Σ_i w_i log(Σ_j exp(s_j) / exp(s_i)): the cross-entropy of w with the softmax of the scores (Cao 2007).

    `item_weights` have no gradient.
    """
    log_probability = scores.masked_fill(~where, -torch.inf).log_softmax(-1)
    terms = torch.where(where, item_weights.detach(), 0.0) * torch.where(where, log_probability, 0.0)
    return reduced(-terms.sum(-1), weights)


def logistic_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    where: Tensor,
    weights: Tensor | None = None,
    item_weights: Tensor | None = None,
) -> Tensor:
    """Return the sum over items of w_i times the cross-entropy of targets in [0, 1] with sigmoids of logits; w is 1
    if it is not given.
    """
    factor = None if item_weights is None else torch.where(where, item_weights.detach(), 0.0)
    entropy = binary_cross_entropy_with_logits(logits.masked_fill(~where, 0.0), targets, factor, reduction="none")
    return reduced(torch.where(where, entropy, 0.0).sum(-1), weights)


def product_logistic_loss(
    logits: Tensor,
    others: Tensor,
    targets: Tensor,
    *,
    where: Tensor,
    weights: Tensor | None = None,
    item_weights: Tensor | None = None,
) -> Tensor:
    """Return Σ_i of the cross-entropy of targets with sigmoid(a) · sigmoid(b), which is the sigmoid of the logit

        -log(exp(-a) + exp(-b) + exp(-a-b))

    The terms of this sum are positive, so nothing cancels if the product is near one or near zero.
    """
    a, b = logits.masked_fill(~where, 0.0), others.masked_fill(~where, 0.0)
    both = -torch.logaddexp(torch.logaddexp(-a, -b), -a - b)
    return logistic_loss(both, targets, where=where, weights=weights, item_weights=item_weights)


def pairwise_loss(
    scores: Tensor, pair_weights: Tensor, *, where: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return Σ_ij w_ij log(1 + exp(-(s_i - s_j))), where w_ij >= 0 is how much i should rank above j (Burges 2005).

    `pair_weights` [..., i, j] have no gradient. They are zero for pairs that do not count, such as pairs with padding.
    `where` is needed if the scores of padding may not be finite.
    """
    scores = scores if where is None else scores.masked_fill(~where, 0.0)
    return reduced((pair_weights.detach() * softplus(-gaps(scores))).sum((-2, -1)), weights)


def pairs_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of i and of j for all pairs [..., i, j]; they broadcast."""
    values = batch_innermost(values)
    return values[..., :, None], values[..., None, :]


def gaps(scores: Tensor) -> Tensor:
    """Return the differences s_i - s_j of the scores of all pairs [..., i, j]."""
    score_i, score_j = pairs_of(scores)
    return score_i - score_j


def preferred_pairs(labels: Tensor, *, where: Tensor) -> Tensor:
    """Return True for the pairs [..., i, j] of two items where the label of i is above the label of j."""
    label_i, label_j = pairs_of(labels.masked_fill(~where, torch.nan))  # comparisons with NaN are False
    return label_i > label_j


def _ideal_dcg(gain_of: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the DCG [..., 1] of the best order of items with these gains, and 1 if no item has a gain."""
    ranks = torch.arange(1, gain_of.shape[-1] + 1, device=gain_of.device)
    best = gain_of.sort(dim=-1, descending=True).values
    ideal = (best * discounts_at(ranks, dtype)).sum(-1, keepdim=True)
    return torch.where(ideal > 0, ideal, 1.0)


def lambdarank_weights(
    scores: Tensor, labels: Tensor, *, where: Tensor, gain: Gain = "linear", normalise: bool = True
) -> Tensor:
    """Return |ΔNDCG_ij| of swapping i and j in the current ranking, for pairs with c_i > c_j (Burges 2006).

        |G(c_i) - G(c_j)| · |1/log2(1 + rank_i) - 1/log2(1 + rank_j)| / ideal DCG

    `normalise=False` does not divide by the ideal DCG, which gives |ΔDCG|.
    """
    scores = scores.detach()
    gain_of = gains(labels, scores, where, gain)
    discount_of = discounts_at(ranks_of(scores, where=where), scores.dtype)
    if normalise:
        gain_of = gain_of / _ideal_dcg(gain_of, scores.dtype)
    delta = gaps(gain_of) * gaps(discount_of).abs()  # not negative where i is preferred
    return torch.where(preferred_pairs(labels, where=where), delta, 0.0)


def lambdaloss_weights(scores: Tensor, labels: Tensor, *, where: Tensor) -> Tensor:
    """Return the weights of NDCG-Loss2 (Wang 2018), times the number of items, for pairs with c_i > c_j:

        n |c_i - c_j| / ideal DCG · |1/log2(1 + d) - 1/log2(2 + d)|,  d = |rank_i - rank_j|

    The code that the authors of the CIKM 2022 paper released has these.
    """
    ranks = ranks_of(scores.detach(), where=where)
    factor = where.sum(-1, keepdim=True) / _ideal_dcg(labels.masked_fill(~where, 0.0), scores.dtype)
    apart = gaps(ranks).abs().clamp(min=1)
    discount = discounts_at(apart, scores.dtype) - discounts_at(apart + 1, scores.dtype)
    weights = factor[..., None] * gaps(labels) * discount
    return torch.where(preferred_pairs(labels, where=where), weights, 0.0)


def reduced(per_request: Tensor, weights: Tensor | None) -> Tensor:
    """Return the weighted mean over requests; the plain mean without weights."""
    if weights is None:
        return per_request.mean()
    return (weights * per_request).sum() / weights.sum()
