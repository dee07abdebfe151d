"""Examination by position from counts, each estimator with the assumption it rests on.

All give θ_k up to its scale, for each bootstrap replicate of the groups of requests, NaN where they cannot tell.

| name         | rests on                                                                                  |
|--------------|-------------------------------------------------------------------------------------------|
| `randomised` | requests whose order was random: what stands at a position is the same everywhere on average |
| `harvest`    | items shown at several positions: of two positions, the items that were at both            |
| `items`      | the same items, each with a relevance of its own, that is fitted with θ                     |
| `strata`     | features: items that the logging ranker scored alike are alike                              |
| `regression` | features: relevance is a logistic function of them                                          |
"""

from __future__ import annotations

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from ultr.propensity.counts import Counts, Impressions

PAIR_WORK = 30_000_000  # items times positions squared, at most, that harvesting takes in one replicate
NEWTON = 50
RIDGE = 1e-5  # on the coefficients of features, a row


def rates(seen: Impressions, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Click rates by position [replicates, positions] of some rows: θ, where their order was random."""
    width, groups = len(seen.positions), len(weights)
    cell = seen.of_rows(seen.group)[rows] * width + seen.place[rows]
    each = seen.row_weights(rows)
    clicked = seen.clicked[rows]
    shown = np.bincount(cell, each, groups * width).reshape(groups, width)
    clicks = np.bincount(cell[clicked], each[clicked], groups * width).reshape(groups, width)
    return _ratio(weights.T @ clicks, weights.T @ shown)


def pair_clicks(counts: Counts, weights: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Clicks at k [k, k'] on the items that were shown at k and at k' both, had these been shown as often at either.

    Item i counts n_ik n_ik' / (n_ik + n_ik') times at both positions, which is what its two click rates can be compared
    with least error by; the weights are the same on either side, so that the relevance of items cancels.
    """
    shown, clicked = counts.weighed(weights)
    items, width = counts.size
    most = max(100, PAIR_WORK // width**2)
    kept = np.ones(items, bool)
    if items > most:
        kept = np.zeros(items, bool)
        kept[np.random.default_rng(seed).permutation(items)[:most]] = True
    row = np.cumsum(kept) - 1
    cells = kept[counts.strata]
    n, rate = np.zeros((int(kept.sum()), width)), np.zeros((int(kept.sum()), width))
    at = row[counts.strata[cells]], counts.places[cells]
    n[at], rate[at] = shown[cells], clicked[cells] / np.maximum(shown[cells], 1e-300)
    found = np.zeros((width, width))
    for k in range(width):
        here = n[:, k] > 0
        own = n[here, k][:, None]
        overlap = own * n[here] / (own + n[here])
        found[k] = rate[here, k] @ overlap
    np.fill_diagonal(found, 0)
    return found


def harvest(counts: Counts, weights: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Intervention harvesting over all pairs of positions (Agarwal et al. 2019): θ [replicates, positions].

    Of the clicks that a pair's common items had, position k has the share θ_k / (θ_k + θ_k'). All pairs together are a
    Bradley-Terry model, whose likelihood has one maximum; the relevance of a pair's items is not fitted but conditioned
    out.
    """
    anchor = int(np.bincount(counts.places, counts.weighed(weights[:, 0])[1], counts.size[1]).argmax())
    return np.array([bradley_terry(pair_clicks(counts, column, seed=seed), anchor) for column in weights.T])


def bradley_terry(wins: np.ndarray, anchor: int = 0) -> np.ndarray:
    """The strengths under which k beats k' as often as it did; NaN where comparisons do not link it to the anchor."""
    games = wins + wins.T
    inside = _linked(wins, anchor)
    theta = np.full(len(wins), np.nan)
    if inside.sum() < 2:
        return theta
    wins, games = wins[np.ix_(inside, inside)], games[np.ix_(inside, inside)]
    size = len(wins)
    log_theta = np.zeros(size)
    for _ in range(NEWTON):
        share = 1 / (1 + np.exp(log_theta[None, :] - log_theta[:, None]))
        slope = (wins - games * share).sum(1)
        curve = games * share * (1 - share)
        hessian = np.diag(curve.sum(1)) - curve
        step = np.linalg.solve(hessian + hessian.trace() / size**2, slope)  # the rank-one term fixes Σ log θ
        log_theta += np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-10:
            break
    theta[inside] = np.exp(log_theta)
    return theta


def _linked(wins: np.ndarray, anchor: int) -> np.ndarray:
    """The positions that have won over the anchor and lost to it, by some way of comparisons."""
    part = connected_components(wins > 0, connection="strong")[1]
    return np.asarray(part == part[anchor])


def position_based(counts: Counts, weights: np.ndarray) -> np.ndarray:
    """The position-based model with a relevance of its own for each stratum: θ [replicates, positions].

    E[c_sk] = n_sk θ_k β_s. Given θ, the best β_s is Σ c / Σ n θ, which EM finds step by step; put in, it leaves

        Σ_s c_sk = Σ_s C_s p_sk,    p_sk = n_sk θ_k / Σ n_sk' θ_k',    C_s = Σ_k c_sk

    for every position: what is conditioned on the clicks that a stratum had. It has one solution, and mean zero at the
    truth however seldom a stratum was shown, where the binomial likelihood is off, by its bound β <= 1 most of all.
    """
    start: np.ndarray | None = None
    found = []
    for column in weights.T:
        theta, start = _conditional(counts, *counts.weighed(column), start)
        found.append(theta)
    return np.array(found)


def _conditional(
    counts: Counts, shown: np.ndarray, clicked: np.ndarray, start: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """θ, NaN where clicked items do not link a position to the most clicked one; and log θ to start from."""
    strata, places, (size, width) = counts.strata, counts.places, counts.size
    total = np.bincount(strata, clicked, size)
    telling = (total[strata] > 0) & (shown > 0)
    strata, places, shown, clicked = strata[telling], places[telling], shown[telling], clicked[telling]
    clicks = np.bincount(places, clicked, width)
    anchor = int(clicks.argmax())
    together = sparse.csr_matrix((np.ones(len(places)), (strata, places)), (size, width))
    won = sparse.csr_matrix((clicked > 0, (strata, places)), (size, width), dtype=float)
    told = _linked((won.T @ together).toarray(), anchor)
    free = told & (np.arange(width) != anchor)
    log_theta = np.where(told, 0.0 if start is None else start, -40.0)
    for _ in range(NEWTON):
        expected = shown * np.exp(log_theta - log_theta[anchor])[places]
        share = expected / np.bincount(strata, expected, size)[strata]
        drawn = total[strata] * share
        root = sparse.csr_matrix((np.sqrt(total[strata]) * share, (strata, places)), (size, width))
        curve = np.diag(np.bincount(places, drawn, width)) - (root.T @ root).toarray()
        slope = clicks - np.bincount(places, drawn, width)
        step = np.zeros(width)
        if free.any():
            step[free] = np.linalg.lstsq(curve[np.ix_(free, free)], slope[free], rcond=1e-12)[0]
        log_theta = log_theta + np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-8:
            break
    theta = np.exp(log_theta - log_theta[anchor])
    return np.where(told, theta, np.nan), np.where(told, log_theta, 0.0)


def regression(seen: Impressions, features: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Relevance as a logistic function of features, fitted with θ (Wang et al. 2018): θ [replicates, positions].

    The likelihood that regression-EM climbs, climbed by L-BFGS; replicates are one step of Fisher's scoring from its
    top. Also gives the logit of relevance by row.
    """
    log_theta, logit = fitted_regression(seen, features, np.ones(len(weights)))
    chance = np.minimum(np.exp(log_theta)[seen.place] / (1 + np.exp(-logit)), 1 - 1e-6)
    return np.exp(log_theta + _one_step(seen, features, logit, chance, weights)), logit


def fitted_regression(
    seen: Impressions, features: np.ndarray, group_weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Log θ by position and the logit of relevance by row, fitted to requests as much as their groups weigh."""
    x = torch.from_numpy(features)
    place, clicked = torch.from_numpy(seen.place.astype(np.int64)), torch.from_numpy(seen.clicked)
    each = torch.from_numpy(seen.row_weights() * seen.of_rows(group_weights[seen.group])).float()
    width = len(seen.positions)
    rate = torch.bincount(place, each * clicked, width) / torch.bincount(place, each, width).clamp(min=1e-9)
    coefficients = torch.zeros(x.shape[1] + 1, requires_grad=True)
    log_theta = (rate.clamp(min=1e-6) / rate.max().clamp(min=1e-6)).log().float().requires_grad_()
    optimizer = torch.optim.LBFGS([coefficients, log_theta], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        logit = x @ coefficients[1:] + coefficients[0]
        log_p = (log_theta.clamp(max=0)[place] + torch.nn.functional.logsigmoid(logit)).clamp(max=-1e-6)
        likelihood = torch.where(clicked, log_p, torch.log1p(-log_p.exp()))
        loss = -(each * likelihood).sum() / each.sum() + RIDGE * coefficients[1:].square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        logit = x @ coefficients[1:] + coefficients[0]
    return log_theta.detach().clamp(max=0).double().numpy(), logit.clamp(-30, 30).numpy()


def _one_step(
    seen: Impressions, features: np.ndarray, logit: np.ndarray, chance: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """How far log θ goes in one step of scoring, for each replicate; the first, where the slope is none, stays."""
    width, size = len(seen.positions), features.shape[1] + 1
    # ∂ log P by the logit's coefficients is (1 - β) [1, x], by log θ_k 1 at the position.
    slopes = np.column_stack([np.ones(len(features), np.float32), features])
    slopes *= (1 / (1 + np.exp(logit)))[:, None].astype(np.float32)
    row_weights = seen.row_weights()
    information = (row_weights * chance / (1 - chance)).astype(np.float32)
    residual = (row_weights * (seen.clicked - chance) / (1 - chance)).astype(np.float32)
    curve = np.zeros((size + width, size + width))
    curve[:size, :size] = slopes.T @ (slopes * information[:, None])
    curve[:size, :size] += 2 * RIDGE * row_weights.sum() * np.diag([0.0, *np.ones(size - 1)])
    at = sparse.csr_matrix((information, (seen.place, np.arange(len(features)))), (width, len(features)))
    curve[size:, :size] = at @ slopes
    curve[:size, size:] = curve[size:, :size].T
    curve[size:, size:] = np.diag(np.bincount(seen.place, information, width))
    group = seen.of_rows(seen.group)
    of_group = sparse.csr_matrix((residual, (group, np.arange(len(features)))), (len(weights), len(features)))
    cells = np.bincount(group * width + seen.place, residual, len(weights) * width).reshape(len(weights), width)
    score = np.column_stack([of_group @ slopes, cells])
    # The scale of θ is hardly told: a little of the identity keeps the step from running along it.
    damped = curve + 1e-6 * np.diag(curve.diagonal() + 1e-12)
    return np.asarray(((weights - weights[:, :1]).T @ score @ np.linalg.pinv(damped, hermitian=True))[:, size:])


def _ratio(over: np.ndarray, under: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = over / under
    ratio[(under == 0) | (over == 0)] = np.nan
    return np.asarray(ratio)
