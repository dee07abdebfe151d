"""Ranking metrics: pure functions from scores and labels to one value per request.

The last dimension is the list; `where` marks items, and other entries (padding) are ignored. The value with tied scores
is the exact mean over all orders of the tied items, as in scikit-learn. Computation is in the dtype of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ultr.datasets.users import User
from ultr.errors import DataError, OptionError, nearest
from ultr.log.labels import Label
from ultr.utils.arguments import checked

Gain = Literal["exponential", "linear"]
MAX_GRADE = 60  # the largest label for which the gain 2^y - 1 is computed
ORDERS = 16  # random orders of tied items, if there is no closed form for their mean
CUT_OFF = "the cut-off of a metric must be a whole number from 1"


@checked
def dcg_metric(
    scores: Tensor, labels: Tensor, *, k: int | None = None, where: Tensor | None = None, gain: Gain = "exponential"
) -> Tensor:
    """Compute DCG: Σ of G(y)/log2(r + 1) over ranks r <= k, with gain G = 2^y - 1 or y of label y (Järvelin 2002)."""
    scores, where = _prepared(scores, where, labels, k, gain)
    return (gains(labels, scores, where, gain) * _tie_averaged(_discounts(scores, k), scores, where)).sum(-1)


@checked
def ndcg_metric(
    scores: Tensor, labels: Tensor, *, k: int | None = None, where: Tensor | None = None, gain: Gain = "exponential"
) -> Tensor:
    """Compute NDCG: DCG divided by DCG of the best order; 0 for requests without relevant items, as in scikit-learn."""
    scores, where = _prepared(scores, where, labels, k, gain)
    dcg = dcg_metric(scores, labels, k=k, where=where, gain=gain)
    best = gains(labels, scores, where, gain).sort(dim=-1, descending=True).values
    ideal = (best * _discounts(scores, k)).sum(-1)
    return torch.where(ideal > 0, dcg / torch.where(ideal > 0, ideal, 1.0), 0.0).clamp(max=1)


@checked
def precision_metric(scores: Tensor, labels: Tensor, *, k: int | None = None, where: Tensor | None = None) -> Tensor:
    """Compute the number of relevant items (label > 0) among the first k, divided by k, also if the list is shorter."""
    scores, where = _prepared(scores, where, labels, k)
    length = scores.shape[-1]
    top = (torch.arange(length, device=scores.device) < (length if k is None else k)).to(scores.dtype)
    share = _tie_averaged(top, scores, where) / (where.sum(-1, keepdim=True).clamp(min=1) if k is None else k)
    return torch.where(where & (labels > 0), share, 0.0).sum(-1)


@checked
def arp_metric(scores: Tensor, labels: Tensor, *, k: int | None = None, where: Tensor | None = None) -> Tensor:
    """Compute the average relevance position Σ y·rank / Σ y; lower is better (Wang 2018). There is no cut-off.

    A request of n items without a relevant one has the value (n + 1) / 2, as if all items were equally relevant.
    """
    if k is not None:
        raise OptionError("the metric arp has no cut-off", got=f"arp@{k}", hint="use arp without @")
    scores, where = _prepared(scores, where, labels)
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    ranks = _tie_averaged(ranks, scores, where)
    relevance = torch.where(where, labels.to(scores.dtype), 0.0)
    weights = torch.where(relevance.sum(-1, keepdim=True) > 0, relevance, where.to(scores.dtype))
    total = weights.sum(-1)
    return (weights * ranks).sum(-1) / torch.where(total > 0, total, 1.0)


@checked
def mrr_metric(scores: Tensor, labels: Tensor, *, k: int | None = None, where: Tensor | None = None) -> Tensor:
    """Compute the reciprocal rank of the first relevant item (label > 0); 0 if the first k items have none.

    If m of g tied items are relevant, the first relevant one is the t-th with probability C(g-t, m-1) / C(g, m).
    """
    scores, where = _prepared(scores, where, labels, k)
    relevant = where & (labels > 0)
    above, through = _rank_bounds(scores, where)
    length = scores.shape[-1]
    first = torch.where(relevant, above, length).min(dim=-1, keepdim=True).values  # items above the deciding tie
    tied = torch.where(relevant & (above == first), through - above, 0).max(dim=-1, keepdim=True).values
    m = (relevant & (above == first)).sum(-1, keepdim=True)
    t = torch.arange(1, length + 1, device=scores.device)
    log_chance = _log_choose(tied - t, m - 1) - _log_choose(tied, m)
    possible = (m > 0) & (t <= tied - m + 1) & (first + t <= (length if k is None else k))
    chance = torch.where(possible, log_chance, -torch.inf).exp()
    return (chance / (first + t)).sum(-1).to(scores.dtype)


@checked
def reward_metric(
    scores: Tensor,
    relevance: Tensor,
    *,
    user: User,
    label: Label | str,
    k: int | None = None,
    where: Tensor | None = None,
) -> Tensor:
    """Compute Reward@k: the expected sum of the labels of the first k items if a simulated `user` sees the ranking.

    The mean over orders of tied items is exact for users whose feedback depends only on an item's own position. For
    other users (cascade) the mean is over 16 random orders, the same for every request.
    """
    scores, where = _prepared(scores, where, relevance, k)
    relevance = torch.where(where, relevance.to(scores.dtype), 0.0)
    k = min(scores.shape[-1], scores.shape[-1] if k is None else k)
    if not user.by_own_position:
        rewards = [_reward_of_order(scores, relevance, where, user, label, k, seed) for seed in range(ORDERS)]
        return torch.stack(rewards).mean(0)
    # The expected label of each grade, summed over ranks from the top: the mean of a tie is a difference of sums.
    grades, grade = torch.unique(relevance, return_inverse=True)
    places = torch.arange(1, k + 1, device=scores.device).expand(len(grades), k)
    worth = user.expected(grades[:, None].expand(len(grades), k).double(), places, label).cumsum(-1)
    worth = torch.cat([torch.zeros_like(worth[:, :1]), worth], dim=-1)
    above, through = _rank_bounds(scores, where)
    mean = (worth[grade, through.clamp(max=k)] - worth[grade, above.clamp(max=k)]) / (through - above).clamp(min=1)
    return torch.where(where, mean, 0.0).sum(-1).to(scores.dtype)


def _reward_of_order(
    scores: Tensor, relevance: Tensor, where: Tensor, user: User, label: Label | str, k: int, seed: int
) -> Tensor:
    """Compute Reward@k with ties broken by one random order of the indices in a list, the same for every request."""
    order = torch.randperm(scores.shape[-1], generator=torch.Generator().manual_seed(seed)).to(scores.device)
    scores, relevance, where = scores[..., order], relevance[..., order], where[..., order]
    ranks = ranks_of(scores, where=where)
    return torch.where(ranks <= k, user.expected(relevance, ranks, label, where=where), 0.0).sum(-1)


@checked
def sampled_reward_metric(
    scores: Tensor,
    relevance: Tensor,
    *,
    user: User,
    label: Label | str,
    generator: torch.Generator,
    k: int | None = None,
    where: Tensor | None = None,
) -> Tensor:
    """Compute Reward@k from one simulated draw of feedback on the ranking; the mean over draws is `reward_metric`."""
    scores, where = _prepared(scores, where, relevance, k)
    ranks = ranks_of(scores, where=where, generator=generator)
    feedback = user.sample(torch.where(where, relevance.to(scores.dtype), 0.0), ranks, generator, where=where)
    values = Label.of(label)(feedback.actions)
    return torch.where(where & (ranks <= (scores.shape[-1] if k is None else k)), values, 0.0).sum(-1)


METRICS: dict[str, Callable[..., Tensor]] = {
    "arp": arp_metric,
    "dcg": dcg_metric,
    "mrr": mrr_metric,
    "ndcg": ndcg_metric,
    "precision": precision_metric,
    "reward": reward_metric,
}


@checked
def parse_metric(text: str, *, also: Sequence[str] = ()) -> tuple[str, int | None]:
    """Split the name of a metric and its cut-off: `ndcg@10` -> ("ndcg", 10); `mrr` -> ("mrr", None).

    Names in `also` are accepted too.
    """
    name, at, cutoff = text.strip().partition("@")
    if name not in METRICS and name not in also:
        raise OptionError(f"no metric '{name}'", hint=nearest(name, METRICS))
    if at and not (cutoff.isdecimal() and 0 < int(cutoff) < 10**6):
        raise OptionError(CUT_OFF, got=f"'{text}'", hint=f"use for example {name}@10")
    return name, int(cutoff) if at else None


@checked
def ranks_of(scores: Tensor, *, where: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
    """Return the rank of each item by score, from 1; padding is last. Ties break by `generator` or index."""
    scores, where = _prepared(scores, where)
    shuffle = None
    if generator is not None:
        shuffle = torch.rand(scores.shape, generator=generator, device=scores.device).argsort(dim=-1)
        scores, where = scores.gather(-1, shuffle), where.gather(-1, shuffle)
    # An item with score -inf still ranks above padding.
    keys = torch.where(where, scores.clamp(min=torch.finfo(scores.dtype).min), -torch.inf)
    order = keys.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(1, keys.shape[-1] + 1, device=keys.device).expand(keys.shape)
    ranks = torch.zeros_like(order).scatter(-1, order, places)
    return ranks if shuffle is None else torch.empty_like(ranks).scatter_(-1, shuffle, ranks)


def batch_innermost(values: Tensor) -> Tensor:
    """Return the same values stored with the first dimension contiguous: a CPU computes pairs [..., i, j] faster."""
    return values if values.ndim < 2 or values.is_cuda else values.transpose(0, -1).contiguous().transpose(0, -1)


def _prepared(
    scores: Tensor, where: Tensor | None, labels: Tensor | None = None, k: int | None = None, gain: Gain = "linear"
) -> tuple[Tensor, Tensor]:
    """Return the scores in single or double precision, and the mask of items; raise an error for invalid arguments."""
    tensors = {"scores": scores, "labels": labels, "where": where}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if not scores.ndim or not scores.shape[-1] or any(shape != shapes["scores"] for shape in shapes.values()):
        raise DataError("scores, labels and where must have the same shape with at least one item", got=shapes)
    is_complex = scores.is_complex() or (labels is not None and labels.is_complex())
    if is_complex or (where is not None and where.dtype != torch.bool):
        raise DataError("scores and labels must be real, and where must be of type bool", got=f"dtype {scores.dtype}")
    if k is not None and k < 1:
        raise OptionError(CUT_OFF, got=k, hint="use k=None for all items")
    where = torch.ones_like(scores, dtype=torch.bool) if where is None else where
    if gain == "exponential" and labels is not None and bool(((labels > MAX_GRADE) & where).any()):
        highest = float(labels[where].max())
        raise DataError(f"the gain 2^y - 1 needs labels up to {MAX_GRADE}", got=highest, hint="scale the labels down")
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float() if scores.is_floating_point() else scores.double()
    return scores, where


def gains(labels: Tensor, scores: Tensor, where: Tensor, gain: Gain) -> Tensor:
    """Return the gains 2^y - 1 or y of labels y in the dtype of the scores; 0 for padding."""
    labels = labels.to(scores.dtype)
    if gain == "exponential":  # exp2 is exact for whole grades; below 1, the difference 2^y - 1 would lose digits
        labels = torch.where(labels < 1, torch.expm1(labels * math.log(2)), torch.exp2(labels) - 1)
    return torch.where(where, labels, 0.0)


def discounts_at(ranks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the discounts 1 / log2(1 + rank) of DCG."""
    return 1 / torch.log2(ranks.to(dtype) + 1)


def _discounts(scores: Tensor, k: int | None) -> Tensor:
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    discounts = discounts_at(ranks, scores.dtype)
    return discounts if k is None else torch.where(ranks <= k, discounts, 0.0)


def _rank_bounds(scores: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each item, the number of items with a higher score, and with an equal or higher score."""
    negated = torch.where(where, -scores, torch.inf).contiguous()
    ordered = negated.sort(dim=-1).values
    above = torch.searchsorted(ordered, negated, side="left")
    through = torch.searchsorted(ordered, negated, side="right")
    return above, torch.minimum(through, where.sum(-1, keepdim=True))


def _tie_averaged(by_rank: Tensor, scores: Tensor, where: Tensor) -> Tensor:
    """Return the mean of `by_rank` over the ranks that each item can have among the items it ties with."""
    above, through = _rank_bounds(scores, where)
    sums = by_rank.double().cumsum(0)  # differences of long sums lose digits in single precision
    total = torch.cat([torch.zeros_like(sums[:1]), sums])
    return ((total[through] - total[above]) / (through - above).clamp(min=1)).to(by_rank.dtype)


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    n, k = n.double(), k.double()
    valid = (k >= 0) & (k <= n)
    n, k = torch.where(valid, n, 0.0), torch.where(valid, k, 0.0)
    return torch.where(valid, torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1), -torch.inf)
