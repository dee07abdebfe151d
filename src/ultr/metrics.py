"""Ranking metrics: pure functions from scores and labels to one figure per request.

The last dimension is the list; `where` marks items, and what it leaves out plays no part. Tied scores count as every
order of the tied items being equally likely, as in scikit-learn: the figure is the exact mean over those orders.
Computation is in the dtype of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ultr.arguments import checked
from ultr.errors import DataError, OptionError, nearest
from ultr.labels import Label
from ultr.simulate import User

Gain = Literal["exponential", "linear"]
GAINS = ("exponential", "linear")
MAX_GRADE = 60  # of the gain 2^y - 1
ORDERS = 16  # of tied items, where no closed form averages over them


@checked
def dcg_metric(
    scores: Tensor, labels: Tensor, *, k: int | None = None, where: Tensor | None = None, gain: Gain = "exponential"
) -> Tensor:
    """Discounted cumulative gain: Σ over ranks r <= k of G(y) / log2(r + 1), G(y) = 2^y - 1 or y (Järvelin 2002)."""
    scores, where = _prepared(scores, where, labels, k, gain)
    return (gains(labels, scores, where, gain) * _tie_averaged(_discounts(scores, k), scores, where)).sum(-1)


@checked
def ndcg_metric(
    scores: Tensor, labels: Tensor, *, k: int | None = None, where: Tensor | None = None, gain: Gain = "exponential"
) -> Tensor:
    """DCG over that of the best order, in [0, 1]; 0 for requests with nothing relevant, as in scikit-learn."""
    scores, where = _prepared(scores, where, labels, k, gain)
    dcg = dcg_metric(scores, labels, k=k, where=where, gain=gain)
    best = gains(labels, scores, where, gain).sort(dim=-1, descending=True).values
    ideal = (best * _discounts(scores, k)).sum(-1)
    return torch.where(ideal > 0, dcg / torch.where(ideal > 0, ideal, 1.0), 0.0).clamp(max=1)


@checked
def precision_metric(scores: Tensor, labels: Tensor, *, k: int | None = None, where: Tensor | None = None) -> Tensor:
    """The share of relevant items (label > 0) among the first k; shorter lists count as filled with irrelevant ones."""
    scores, where = _prepared(scores, where, labels, k)
    length = scores.shape[-1]
    top = (torch.arange(length, device=scores.device) < (length if k is None else k)).to(scores.dtype)
    share = _tie_averaged(top, scores, where) / (where.sum(-1, keepdim=True).clamp(min=1) if k is None else k)
    return torch.where(where & (labels > 0), share, 0.0).sum(-1)


@checked
def arp_metric(scores: Tensor, labels: Tensor, *, k: int | None = None, where: Tensor | None = None) -> Tensor:
    """Average relevance position Σ y·rank / Σ y; lower is better (Wang 2018). There is no cut-off.

    Requests with nothing relevant count (n + 1) / 2, as if all items were equally relevant.
    """
    if k is not None:
        raise OptionError("arp has no cut-off", got=f"arp@{k}", mend="ask for arp")
    scores, where = _prepared(scores, where, labels)
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    ranks = _tie_averaged(ranks, scores, where)
    relevance = torch.where(where, labels.to(scores.dtype), 0.0)
    weights = torch.where(relevance.sum(-1, keepdim=True) > 0, relevance, where.to(scores.dtype))
    total = weights.sum(-1)
    return (weights * ranks).sum(-1) / torch.where(total > 0, total, 1.0)


@checked
def mrr_metric(scores: Tensor, labels: Tensor, *, k: int | None = None, where: Tensor | None = None) -> Tensor:
    """The reciprocal rank of the first relevant item (label > 0), 0 if there is none among the first k.

    Among g tied items of which m are relevant, the first relevant is the t-th with probability C(g-t, m-1) / C(g, m).
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
    """Reward@k: the exact expectation of Σ over the first k of c, where `user` is shown the new ranking.

    For users whose feedback depends on an item's own position, ties are averaged over exactly; for others (cascade)
    over a few random orders, the same for every request.
    """
    scores, where = _prepared(scores, where, relevance, k)
    relevance = torch.where(where, relevance.to(scores.dtype), 0.0)
    k = min(scores.shape[-1], scores.shape[-1] if k is None else k)
    if not user.by_own_position:
        return torch.stack([_reward_of_order(scores, relevance, where, user, label, k, s) for s in range(ORDERS)]).mean(
            0
        )
    # What each grade is worth at each of the first k places, summed up from the top: a tie's mean is a difference.
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
    """Reward@k with ties broken by one random order of the slots, the same for every request."""
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
    """Reward@k from one draw of feedback at the new positions; its mean is `reward_metric`."""
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
def parse_metric(text: str) -> tuple[str, int | None]:
    """`ndcg@10` -> ("ndcg", 10); `mrr` -> ("mrr", None)."""
    name, at, cutoff = text.strip().partition("@")
    if name not in METRICS:
        raise OptionError(f"no metric '{name}'", mend=nearest(name, METRICS))
    if at and not (cutoff.isdecimal() and 0 < int(cutoff) < 10**6):
        raise OptionError("a metric's cut-off is a whole number from 1", got=f"'{text}'", mend=f"for example {name}@10")
    return name, int(cutoff) if at else None


@checked
def ranks_of(scores: Tensor, *, where: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
    """The rank of each item from 1, padding last; ties break at random if there is a generator, else by slot."""
    scores, where = _prepared(scores, where)
    shuffle = None
    if generator is not None:
        shuffle = torch.rand(scores.shape, generator=generator, device=scores.device).argsort(dim=-1)
        scores, where = scores.gather(-1, shuffle), where.gather(-1, shuffle)
    # Items scored -inf still stand before padding.
    keys = torch.where(where, scores.clamp(min=torch.finfo(scores.dtype).min), -torch.inf)
    order = keys.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(1, keys.shape[-1] + 1, device=keys.device).expand(keys.shape)
    ranks = torch.empty_like(order).scatter_(-1, order, places)
    return ranks if shuffle is None else torch.empty_like(ranks).scatter_(-1, shuffle, ranks)


def batch_innermost(values: Tensor) -> Tensor:
    """The same values laid out with the first dimension adjacent: pairs [..., i, j] of short lists are then computed in
    long strides over the batch, which is several times faster.
    """
    return values if values.ndim < 2 else values.transpose(0, -1).contiguous().transpose(0, -1)


def _prepared(
    scores: Tensor, where: Tensor | None, labels: Tensor | None = None, k: int | None = None, gain: str = "linear"
) -> tuple[Tensor, Tensor]:
    """Scores in single or double precision, and a mask; what does not go together is refused."""
    given = {"scores": scores, "labels": labels, "where": where}
    shapes = {name: list(tensor.shape) for name, tensor in given.items() if tensor is not None}
    if not scores.ndim or not scores.shape[-1] or any(shape != shapes["scores"] for shape in shapes.values()):
        raise DataError("scores, labels and where should be of one shape [..., items], an item or more", got=shapes)
    mixed = scores.is_complex() or (labels is not None and labels.is_complex())
    if mixed or (where is not None and where.dtype != torch.bool):
        raise DataError("scores and labels should be numbers, and where true or false", got=f"dtype {scores.dtype}")
    if k is not None and k < 1:
        raise OptionError("a metric's cut-off is a whole number from 1", got=k, mend="leave it out for all items")
    if gain not in GAINS:
        raise OptionError(f"no gain '{gain}'", mend=nearest(gain, GAINS))
    where = torch.ones_like(scores, dtype=torch.bool) if where is None else where
    if gain == "exponential" and labels is not None and bool(((labels > MAX_GRADE) & where).any()):
        highest = float(labels[where].max())
        raise DataError(f"grades above {MAX_GRADE} are beyond the gain 2^y - 1", got=highest, mend="scale them")
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float() if scores.is_floating_point() else scores.double()
    return scores, where


def gains(labels: Tensor, scores: Tensor, where: Tensor, gain: Gain) -> Tensor:
    """2^y - 1 or y in the dtype of the scores, 0 for padding."""
    labels = labels.to(scores.dtype)
    if gain == "exponential":  # exact for grades; of less than one, 2^y - 1 would cancel
        labels = torch.where(labels < 1, torch.expm1(labels * math.log(2)), torch.exp2(labels) - 1)
    return torch.where(where, labels, 0.0)


def discounts_at(ranks: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / log2(1 + rank)."""
    return 1 / torch.log2(ranks.to(dtype) + 1)


def _discounts(scores: Tensor, k: int | None) -> Tensor:
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    discounts = discounts_at(ranks, scores.dtype)
    return discounts if k is None else torch.where(ranks <= k, discounts, 0.0)


def _rank_bounds(scores: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """For each item, how many items score more, and how many score as much or more."""
    negated = torch.where(where, -scores, torch.inf).contiguous()
    ordered = negated.sort(dim=-1).values
    above = torch.searchsorted(ordered, negated, side="left")
    through = torch.searchsorted(ordered, negated, side="right")
    return above, torch.minimum(through, where.sum(-1, keepdim=True))


def _tie_averaged(by_rank: Tensor, scores: Tensor, where: Tensor) -> Tensor:
    """For each item, the mean of `by_rank` over the ranks it may take among the items it ties with."""
    above, through = _rank_bounds(scores, where)
    sums = by_rank.double().cumsum(0)  # differences of long sums cancel
    total = torch.cat([torch.zeros_like(sums[:1]), sums])
    return ((total[through] - total[above]) / (through - above).clamp(min=1)).to(by_rank.dtype)


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    n, k = n.double(), k.double()
    valid = (k >= 0) & (k <= n)
    n, k = torch.where(valid, n, 0.0), torch.where(valid, k, 0.0)
    return torch.where(valid, torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1), -torch.inf)
