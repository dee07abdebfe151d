"""Estimators of examination θ_k, the probability that a user looks at position k, and the assumption of each.

Each returns θ [replicates, positions] up to a factor, for bootstrap replicates of the log; NaN means no estimate.

| name         | assumption                                                                                  |
|--------------|---------------------------------------------------------------------------------------------|
| `randomised` | requests in random order: items have the same mean relevance at every position              |
| `swaps`      | requests with drawn swaps: an item is equally relevant at both positions                    |
| `harvest`    | items shown at several positions: two positions are compared by the items shown at both     |
| `items`      | items shown at several positions: each has one relevance, which is fitted together with θ   |
| `strata`     | features: items with similar scores of the logging ranker are equally relevant              |
| `regression` | features: relevance is a logistic function of them                                          |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import linalg, sparse
from scipy.sparse.csgraph import connected_components

from ultr.bias.counts import Counts, Impressions, LogCounts
from ultr.log import Log
from ultr.log.table import GRID, MOST_GRID_COLUMNS, SHIFT
from ultr.utils.optimisation import minimise

PAIR_WORK = 8_000_000  # `harvest` samples items if their number times positions squared is above this
DENSE = 2_000_000  # matrices with at most this many entries are dense, which is faster
NEWTON = 50  # most iterations of Newton's method
SETTLED = 1e-6  # EM stops if no θ changes by more than this share
LARGEST_MOVE = 3.0  # of log θ in a draw
SMALLEST = 1e-3  # the smallest θ; a lower one cannot be distinguished from 0
SCALE = 0.7  # the largest θ, a convention that leaves room on either side: clicks determine only ratios of θ
POOL_CLICKS = 25.0  # clicks of a pool of positions: the standard error of log θ is then 0.2 at most
RIDGE = 1e-5  # penalty on the squared coefficients of features, per row


def pair_clicks(counts: Counts, weights: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Return clicks [k, k'] at position k on items shown at both k and k', as if shown equally often at both.

    Item i counts n_ik n_ik' / (n_ik + n_ik') times at both positions, which compares its two click rates with the least
    error. The weights at both positions are the same, so the relevance of items cancels.
    """
    weighted = counts.weighted(weights)
    shown, clicked = weighted.shown, weighted.clicked
    items, width = counts.size
    most = max(100, PAIR_WORK // width**2)
    sampled = np.ones(items, bool)
    if items > most:
        sampled = np.zeros(items, bool)
        sampled[np.random.default_rng(seed).permutation(items)[:most]] = True
    row = np.cumsum(sampled) - 1
    cells = sampled[counts.strata]
    n, rate = np.zeros((width, int(sampled.sum()))), np.zeros((width, int(sampled.sum())))
    at = counts.places[cells], row[counts.strata[cells]]
    n[at], rate[at] = shown[cells], clicked[cells] / np.maximum(shown[cells], 1e-300)
    clicks = np.zeros((width, width))
    for k in range(width):
        here = np.flatnonzero(rate[k] > 0)  # other items add nothing
        at_k, others = n[k, here], n[:, here]
        clicks[k] = (others * at_k / (others + at_k)) @ rate[k, here]
    np.fill_diagonal(clicks, 0)
    return clicks


def harvest(counts: Counts, weights: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Estimate θ [replicates, positions] by intervention harvesting over all pairs of positions (Agarwal et al. 2019).

    Of the clicks on the items that two positions share, position k has the share θ_k / (θ_k + θ_k'). All pairs together
    are a Bradley-Terry model, whose likelihood has one maximum. The relevance of items is conditioned out, not fitted.
    """
    anchor = int(np.bincount(counts.places, counts.weighted(weights[:, 0]).clicked, counts.size[1]).argmax())
    return np.array([bradley_terry(pair_clicks(counts, column, seed=seed), anchor) for column in weights.T])


def bradley_terry(wins: np.ndarray, anchor: int = 0) -> np.ndarray:
    """Return strengths in a Bradley-Terry model; k beat k' `wins[k, k']` times. NaN if k is not linked to `anchor`.

    This is `fit_conditional` with a stratum for each pair, which is shown once at both positions.
    """
    first, second = np.nonzero(np.triu(wins + wins.T, 1))
    number, places = len(first), np.concatenate([first, second])
    clicks = np.concatenate([wins[first, second], wins[second, first]])
    pairs = Counts(np.tile(np.arange(number), 2), places, (number, len(wins)), np.ones(2 * number), clicks)
    theta = fit_conditional(pairs, anchor=anchor).theta
    return theta if np.isfinite(theta).sum() > 1 else np.full(len(wins), np.nan)


def _linked(wins: np.ndarray, anchor: int) -> np.ndarray:
    """Return a mask of the positions that won against the position `anchor` and lost to it, directly or in a chain."""
    part = connected_components(wins > 0, connection="strong")[1]
    return np.asarray(part == part[anchor])


def position_based(counts: Counts, weights: np.ndarray) -> np.ndarray:
    """Estimate θ [replicates, positions] in the position-based model, with one relevance β_s for each stratum s.

    E[c_sk] = n_sk θ_k β_s. Given θ, the best β_s is Σ c / Σ n θ, which EM reaches step by step. Inserted, it leaves

        Σ_s c_sk = Σ_s C_s p_sk,    p_sk = n_sk θ_k / Σ n_sk' θ_k',    C_s = Σ_k c_sk

    for every position: equations that are conditional on the clicks of each stratum. They have one solution, and mean
    zero at the truth even if strata were rarely shown. The binomial likelihood is then biased by its bound β <= 1.
    """
    first = fit_conditional(counts.weighted(weights[:, 0])).theta
    start = np.where(np.isfinite(first), np.log(first), 0.0)
    return np.array([first, *(fit_conditional(counts.weighted(each), start).theta for each in weights.T[1:])])


@dataclass(frozen=True, eq=False)
class ConditionalFit:
    """Examination θ relative to the anchor, a position; NaN at positions that no clicked strata link to it."""

    theta: np.ndarray
    moved: float  # the largest change of log θ in the last iteration
    information: np.ndarray  # [positions, positions] of log θ, given the clicks of each stratum
    anchor: int
    spread: np.ndarray | None = None  # the covariance of log θ, if it is not that of the information
    probable: np.ndarray | None = None  # that without a bias which is possible but not found, if there may be one

    def covariance(self) -> np.ndarray:
        """Return the covariance of log θ relative to the anchor [positions, positions]; 0 without an estimate."""
        if self.spread is not None:
            return self.spread
        free = np.flatnonzero(np.isfinite(self.theta) & (np.arange(len(self.theta)) != self.anchor))
        covariance = np.zeros_like(self.information)
        covariance[np.ix_(free, free)] = linalg.pinvh(self.information[np.ix_(free, free)])
        return covariance


def drawn(theta: np.ndarray, covariance: np.ndarray, number: int, *, seed: int = 0) -> np.ndarray:
    """Return θ [number, positions] as it may be, given the covariance of log θ, which is normal."""
    root = np.linalg.eigh(covariance)
    normal = np.random.default_rng(seed).normal(size=(number, len(theta)))
    moved = normal * np.sqrt(np.maximum(root.eigenvalues, 0)) @ root.eigenvectors.T
    return np.asarray(theta * np.exp(np.clip(moved, -LARGEST_MOVE, LARGEST_MOVE)))


def fit_conditional(cells: Counts, start: np.ndarray | None = None, *, anchor: int | None = None) -> ConditionalFit:
    """Solve the equations of `position_based` by Newton's method; `start` is the first guess of log θ.

    θ is relative to the `anchor`, by default the most clicked position.
    """
    size, width = cells.size
    total = np.bincount(cells.strata, cells.clicked, size)
    used = (total[cells.strata] > 0) & (cells.shown > 0)
    strata, places, shown, clicked = (
        values[used] for values in (cells.strata, cells.places, cells.shown, cells.clicked)
    )
    clicks = np.bincount(places, clicked, width)
    anchor = int(clicks.argmax()) if anchor is None else anchor
    matrix = _matrices(strata, places, (size, width))
    linked = _linked(_product(matrix(clicked > 0), matrix(shown > 0)), anchor)
    free = linked & (np.arange(width) != anchor)
    log_theta = np.where(linked, 0.0 if start is None else start, -40.0)
    step, curve = np.zeros(width), np.zeros((width, width))
    for _ in range(NEWTON):
        expected = shown * np.exp(log_theta - log_theta[anchor])[places]
        share = expected / np.bincount(strata, expected, size)[strata]
        drawn = total[strata] * share
        root = matrix(np.sqrt(total[strata]) * share)
        curve = np.diag(np.bincount(places, drawn, width)) - _product(root, root)
        slope = clicks - np.bincount(places, drawn, width)
        step = np.zeros(width)
        if free.any():
            step[free] = _solve(curve[np.ix_(free, free)], slope[free])
        log_theta = log_theta + np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-6:  # the next step would be about its square
            break
    theta = np.where(linked, np.exp(log_theta - log_theta[anchor]), np.nan)
    return ConditionalFit(theta, float(np.abs(step).max()), curve, anchor)


def _matrices(strata: np.ndarray, places: np.ndarray, size: tuple[int, int]) -> Callable[[np.ndarray], Any]:
    """Return a function from values of cells to a matrix [strata, positions], which is dense if it is small."""

    def matrix(values: np.ndarray) -> Any:
        made = sparse.csr_matrix((values.astype(np.float64), (strata, places)), size)
        return made if size[0] * size[1] > DENSE else made.toarray()

    return matrix


def _product(a: Any, b: Any) -> np.ndarray:
    product = a.T @ b
    return np.asarray(product.toarray() if sparse.issparse(product) else product)


def _solve(curve: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Solve a positive definite linear system; if it is nearly singular, return the solution of least norm."""
    try:
        return np.asarray(linalg.solve(curve, slope, assume_a="pos"))
    except (linalg.LinAlgError, linalg.LinAlgWarning):
        return np.asarray(np.linalg.lstsq(curve, slope, rcond=1e-12)[0])


def pools(clicks: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the index of the pool of each position. The positions of a pool get one θ, which chance does not rule.

    Going down the list, a pool takes positions until it has `POOL_CLICKS` clicks, so that a position with that many is
    alone unless rare ones are just above it. Positions below the last full pool join it. Segments, and the rows of a
    grid, have separate pools.
    """
    segments = positions >> SHIFT
    rows = positions // MOST_GRID_COLUMNS
    if (positions & GRID).all() and len(np.unique(rows)) < len(rows):  # a grid of one column is a list
        segments = rows
    pool, total = np.zeros(len(clicks), np.int64), float(clicks[0])
    for k in range(1, len(clicks)):
        opens = segments[k] != segments[k - 1]
        pool[k] = pool[k - 1] + (opens or total >= POOL_CLICKS)
        total = float(clicks[k]) + (total if pool[k] == pool[k - 1] else 0.0)
    totals = np.bincount(pool, clicks)
    of_pool = segments[np.searchsorted(pool, np.arange(len(totals)))]
    joins = np.append(False, (totals[1:] < POOL_CLICKS) & (of_pool[1:] == of_pool[:-1]))
    return np.asarray((np.arange(len(totals)) - np.cumsum(joins))[pool])


def largest_one(theta: np.ndarray, clicks: np.ndarray) -> np.ndarray:
    """Return θ with gaps filled, relative to its largest value with `POOL_CLICKS` clicks (or with the most clicks)."""
    filled, estimated = fill_gaps(theta), np.isfinite(theta)
    if not estimated.any():
        return filled
    anchors = estimated & (clicks >= min(POOL_CLICKS, clicks[estimated].max()))
    return np.asarray((filled / filled[anchors].max()).clip(SMALLEST, 1))


def fill_gaps(theta: np.ndarray) -> np.ndarray:
    """Return θ with NaN replaced by interpolation between the nearest positions (linear in log θ); 1 if all are NaN."""
    estimated = np.isfinite(theta)
    if not estimated.any():
        return np.ones_like(theta)
    return np.asarray(np.exp(np.interp(np.arange(len(theta)), np.flatnonzero(estimated), np.log(theta[estimated]))))


@dataclass(frozen=True, eq=False)
class TrustFit:
    """The result of `fit_trust`; `moved` is the largest relative change of θ in the last iteration."""

    theta: np.ndarray
    zeta: np.ndarray
    beta: np.ndarray
    moved: float


def fit_trust(cells: Counts, *, iterations: int = 6000) -> TrustFit:
    """Fit P(c>0) = θ_k β_s + ζ_k (1 - β_s) by EM: θ and ζ of each position k, β of each stratum s.

    Clicks determine β up to an affine map. By convention the largest θ is 1 and the smallest ζ is 0. Positions never
    shown have θ = 1. Two steps of EM are followed by an extrapolation of them (SQUAREM, Varadhan and Roland 2008),
    which is used if it does not lower the likelihood.
    """
    strata, places, size = cells.strata, cells.places, cells.size
    shown, clicked = cells.shown, cells.clicked
    missed = shown - clicked

    def by_place(values: np.ndarray) -> np.ndarray:
        return np.bincount(places, values, size[1])

    def by_stratum(values: np.ndarray) -> np.ndarray:
        return np.bincount(strata, values, size[0])

    shown_at, shown_in = by_place(shown), by_stratum(shown)
    rate = _share(by_place(clicked), shown_at)
    theta = np.where(shown_at > 0, SCALE * _share(rate, rate.max()), SCALE).clip(SMALLEST, SCALE)
    zeta = 0.3 * theta
    beta = _share(by_stratum(clicked), by_stratum(shown * theta[places])).clip(0.01, 0.99)

    def step(theta: np.ndarray, zeta: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, ...]:
        clicks, misses = _joint(theta[places], zeta[places], beta[strata])
        yes = clicked * _share(clicks[0], clicks[0] + clicks[1])
        relevant = yes + missed * _share(misses[0], misses[0] + misses[1])
        after = np.where(shown_at > 0, _share(by_place(yes), by_place(relevant)), theta).clip(SMALLEST, 1)
        zeta = np.where(shown_at > 0, _share(by_place(clicked - yes), by_place(shown - relevant)), zeta)
        return after, zeta, np.where(shown_in > 0, _share(by_stratum(relevant), shown_in), beta)

    def likelihood(theta: np.ndarray, zeta: np.ndarray, beta: np.ndarray) -> float:
        clicks, misses = (sum(terms) for terms in _joint(theta[places], zeta[places], beta[strata]))
        least = np.finfo(np.float64).tiny
        return float((clicked * np.log(np.maximum(clicks, least)) + missed * np.log(np.maximum(misses, least))).sum())

    moved = np.inf
    made = 0
    bounds = np.cumsum([len(theta), len(theta)])
    while made < iterations and moved > SETTLED:
        once = step(theta, zeta, beta)
        twice = step(*once)
        point, first, second = (np.concatenate(parameters) for parameters in ((theta, zeta, beta), once, twice))
        change, bend = first - point, second - 2 * first + point
        length = min(max(float(np.linalg.norm(change)) / max(float(np.linalg.norm(bend)), 1e-300), 1.0), 64.0)
        jump = (point + 2 * length * change + length**2 * bend).clip(1e-6, 1 - 1e-6)
        leap = step(*np.split(jump, bounds))
        best = leap if likelihood(*leap) >= likelihood(*twice) else twice
        moved = float(np.abs((best[0] / best[0].max()) / (theta / theta.max()) - 1).max())
        (theta, zeta, beta), made = best, made + 3
    return TrustFit(*_canonical(theta, zeta, beta, shown_at > 0), moved)


def _joint(theta: np.ndarray, zeta: np.ndarray, beta: np.ndarray) -> tuple[tuple[np.ndarray, ...], ...]:
    """Return P(c>0, r>0) and P(c>0, r<=0), and the same for c=0: `equations.relevance_posterior` in NumPy.

    The arrays are small and the iterations many, so that calls of torch would take most of the time.
    """
    return (theta * beta, zeta * (1 - beta)), ((1 - theta) * beta, (1 - zeta) * (1 - beta))


def _share(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return the ratio of two arrays, and 0 where both are 0."""
    return numerator / np.where(denominator > 0, denominator, 1.0)


def _canonical(
    theta: np.ndarray, zeta: np.ndarray, beta: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return parameters of `fit_trust` with the same click probabilities, smallest ζ/(θ-ζ) 0 and largest θ 1."""
    if not seen.any():
        return np.ones_like(theta), np.zeros_like(zeta), beta
    # P = a β + ζ = a (β + s) + (ζ - a s): β rises by s, and both ends of the line with it.
    slope = np.maximum(theta - zeta, 1e-9)
    shift = np.where(seen, zeta / slope, np.inf).min()
    theta, zeta, beta = theta - slope * shift, np.maximum(zeta - slope * shift, 0), beta + shift
    slope = np.maximum(theta - zeta, 1e-9)
    # P = a β' / b + ζ with β' = b β: the end at β' = 1 is ζ + a / b.
    stretch = np.where(seen, slope / np.maximum(1 - zeta, 1e-9), 0.0).max()
    theta, beta = zeta + slope / stretch, beta * stretch
    return np.where(seen, theta, 1.0).clip(SMALLEST, 1), np.where(seen, zeta, 0.0), beta.clip(0, 1)


def regression(seen: Impressions, features: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Estimate θ [replicates, positions] with relevance as a logistic function of features (Wang et al. 2018).

    L-BFGS maximises the likelihood of regression EM. A replicate is one step of Fisher's scoring from the maximum.
    """
    log_theta, logit = fitted_regression(seen, features, np.ones(len(weights)))
    chance = np.minimum(np.exp(log_theta)[seen.place] / (1 + np.exp(-logit)), 1 - 1e-6)
    draws = np.exp(log_theta + _one_step(seen, features, logit, chance, weights))
    clicks = np.bincount(seen.place, seen.clicked, len(seen.positions))
    return np.where(clicks > 0, draws, np.nan)  # a position without a click has no estimate


def fitted_regression(
    seen: Impressions, features: np.ndarray, group_weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return log θ [positions] and the logit of relevance [rows], fitted with a weight for each group of requests."""
    x = torch.from_numpy(features)
    place, clicked = torch.from_numpy(seen.place.astype(np.int64)), torch.from_numpy(seen.clicked)
    each = torch.from_numpy(seen.row_weights * seen.of_rows(group_weights[seen.group])).float()
    width = len(seen.positions)
    rate = torch.bincount(place, each * clicked, width) / torch.bincount(place, each, width).clamp(min=1e-9)
    coefficients = torch.zeros(x.shape[1] + 1, requires_grad=True)
    log_theta = (rate.clamp(min=1e-6) / rate.max().clamp(min=1e-6)).log().float().requires_grad_()

    def loss() -> torch.Tensor:
        logit = x @ coefficients[1:] + coefficients[0]
        log_p = (log_theta.clamp(max=0)[place] + torch.nn.functional.logsigmoid(logit)).clamp(max=-1e-6)
        likelihood = torch.where(clicked, log_p, torch.log1p(-log_p.exp()))
        return -(each * likelihood).sum() / each.sum() + RIDGE * coefficients[1:].square().sum()

    minimise([coefficients, log_theta], loss)
    with torch.no_grad():
        logit = x @ coefficients[1:] + coefficients[0]
    return log_theta.detach().clamp(max=0).double().numpy(), logit.clamp(-30, 30).numpy()


def _one_step(
    seen: Impressions, features: np.ndarray, logit: np.ndarray, chance: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return the change of log θ [replicates, positions] in one step of scoring; 0 in the first replicate."""
    width, size = len(seen.positions), features.shape[1] + 1
    # The derivative of log P by the logit's coefficients is (1 - β) [1, x]; by log θ_k it is 1 at position k.
    slopes = np.column_stack([np.ones(len(features), np.float32), features])
    slopes *= (1 / (1 + np.exp(logit)))[:, None].astype(np.float32)
    row_weights = seen.row_weights
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
    # The data hardly determine the scale of θ. Damping keeps the step from changing it.
    damped = curve + 1e-6 * np.diag(curve.diagonal() + 1e-12)
    return np.asarray(((weights - weights[:, :1]).T @ score @ np.linalg.pinv(damped, hermitian=True))[:, size:])


# --- Evidence ---------------------------------------------------------------------------------------------------------
# The evidence about examination that a log has apart from its features, and the choice of the best of it
# (`best_source`), for `ultr bias`, training and `ultr evaluate`. If it finds nothing, strata of the logging score are
# left.
#
# The sources `randomised`, `swaps` and `items` all leave relevance free in each stratum (`fit_conditional`). In a log
# whose queries recur, an item is another one under another query: a ranker moves items between queries because of their
# relevance. Items are precise, and may be wrong; random requests are right, and may be few. If a log has both, `merged`
# moves the estimate of the items towards that of the random requests, by how far the two are apart. Without item ids,
# training does the same with strata of the logging score.

RANDOM = ("randomised", "swaps")  # sources in which chance decided the order
CONFIRMED = ("known", *RANDOM)  # evidence that does not rest on how production orders items
MOST = 0.5  # a source must link positions with more than this share of the impressions
SURE = 1.4  # standard errors by which items and random requests must differ before items count as biased
MORE = 4.0  # items are used next to random requests, which they may include, if they have this many times the clicks
IMPRECISE = 0.5  # a source whose standard error is larger is not used; strata may be off by as much
SAME_FEATURES = 0.5  # items have one relevance if at least this share of their repeated rows has the same features


@dataclass(frozen=True, eq=False)
class Source:
    """The rows that estimate examination, from one source of evidence, and those that may make it more precise."""

    name: str
    error: float  # standard error of log θ: its root mean square over impressions
    cells: Counts  # the rows that are compared, by stratum and position
    text: str  # the evidence in words, such as "1,000 requests in random order"
    others: Counts | None = None  # rows whose more precise estimate the requests in random order correct


def best_source(log: LogCounts, *, most_error: float = IMPRECISE) -> Source | None:
    """Return the best source of evidence, or None if no source estimates most of the positions.

    Requests in random order come first, if they are precise enough; items then only make them more precise (`merged`).
    """
    sources, shown = log.sources, log.shown
    cells = {name: counts.total() for name, counts in sources.items()}
    fits = {name: fit_conditional(each) for name, each in cells.items()}
    errors = {name: standard_error(fit, shown) for name, fit in fits.items() if _links_most(fit, shown)}
    usable = {name: error for name, error in errors.items() if error <= most_error}
    if not usable:
        return None
    name = min(usable, key=lambda name: (name not in RANDOM, usable[name]))
    others = cells["items"] if name in RANDOM and "items" in errors else None
    if others is not None and others.clicked.sum() < MORE * cells[name].clicked.sum():
        others = None
    text = _described(name, sources[name], log)
    if others is not None:
        text = f"{text}, and {_described('items', sources['items'], log)}"
    return Source(name, usable[name], cells[name], text, others)


def merged(random: ConditionalFit, items: ConditionalFit, rate: np.ndarray) -> ConditionalFit:
    """Return the estimate from requests in random order, made more precise by items, whose bias is estimated.

    A ranker that moves items by their relevance lets θ fall too fast (or too slowly) wherever the click rate falls: the
    bias of items is s times the change of the log click rate between neighbouring positions. Items weigh as much as
    their variance with that bias, where s² is what the difference of the two estimates has beyond `SURE` standard
    errors. The covariance has the whole s², or its sampling error if that is larger: random requests cannot exclude a
    smaller bias. The probable covariance does not.
    """
    if (found := slope_apart(random, items, rate)) is None:
        return random
    slope, error = found
    both, falls, (of_random, of_items), (step, of_item_steps) = _common(random, items, rate)
    square, bias, apart = slope**2, np.outer(falls, falls), of_item_steps - step
    probable = of_items + max(0.0, square - SURE**2 * error) * bias
    weight = of_random @ np.linalg.pinv(of_random + probable, hermitian=True)
    other = np.eye(len(step)) - weight
    covariances = [
        other @ of_random @ other.T + weight @ each @ weight.T
        for each in (of_items + max(square, error) * bias, probable)
    ]
    return _from_neighbours(random, items, both, step + weight @ apart, covariances)


def slope_apart(a: ConditionalFit, b: ConditionalFit, rate: np.ndarray) -> tuple[float, float] | None:
    """Return how much more b falls than a, as a share of the fall of the log click rate, and the variance of the share.

    Return None if fewer than two positions have both estimates.
    """
    both, falls, covariances, steps = _common(a, b, rate)
    if len(both) < 2:
        return None
    precision = np.linalg.pinv(sum(covariances), hermitian=True)
    variance = 1 / max(float(falls @ precision @ falls), 1e-12)
    return float(falls @ precision @ (steps[1] - steps[0])) * variance, variance


def _common(
    a: ConditionalFit, b: ConditionalFit, rate: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Return the positions that two fits estimate, and, between neighbours of these, the changes of the log click rate,
    and the covariances and the changes of log θ of both.

    Clicks determine only ratios of θ: differences between neighbouring positions do not depend on its scale.
    """
    both = np.flatnonzero(np.isfinite(a.theta) & np.isfinite(b.theta))
    falls = np.diff(np.log(np.maximum(rate[both], 1e-12)))
    covariances = [_neighbours(fit.covariance()[np.ix_(both, both)]) for fit in (a, b)]
    return both, falls, covariances, [np.diff(np.log(fit.theta[both])) for fit in (a, b)]


def _neighbours(covariance: np.ndarray) -> np.ndarray:
    """Return the covariance of differences between neighbouring positions."""
    return np.asarray(np.diff(np.diff(covariance, axis=0), axis=1))


def _from_neighbours(
    random: ConditionalFit,
    items: ConditionalFit,
    both: np.ndarray,
    steps: np.ndarray,
    covariances: Sequence[np.ndarray],
) -> ConditionalFit:
    """Return an estimate from the differences of log θ between the positions `both`; items estimate the others.

    `covariances` of the differences are all of it, and what is probable.
    """
    sums = np.tril(np.ones((len(both), len(steps))), -1)
    anchor = int(np.flatnonzero(both == items.anchor)[0]) if items.anchor in both else 0
    sums = sums - sums[anchor]
    log_theta = np.log(items.theta) - np.log(items.theta[both[anchor]])
    estimated = np.isfinite(log_theta)
    places = np.arange(len(log_theta))
    log_theta[estimated] += np.interp(places[estimated], both, sums @ steps - log_theta[both])
    nearest = np.abs(places[:, None] - both).argmin(1)
    further = np.eye(len(places)) - np.eye(len(places))[both[nearest]]  # from the nearest of the positions to each
    of_further = further @ items.covariance() @ further.T
    spreads = ((sums @ each @ sums.T)[np.ix_(nearest, nearest)] + of_further for each in covariances)
    return ConditionalFit(np.exp(log_theta), random.moved, random.information, int(both[anchor]), *spreads)


def _links_most(fit: ConditionalFit, shown: np.ndarray) -> bool:
    linked = np.isfinite(fit.theta)
    return bool(linked.sum() > 1 and shown[linked].sum() > MOST * shown.sum())


def _described(name: str, counts: Counts, log: LogCounts) -> str:
    if name == "randomised":
        return f"{log.random_requests:,} requests in random order"
    if name == "swaps":
        return f"{log.swapped_requests:,} requests with swapped positions"
    one_query = " for the same query" if log.by_query else ""
    return f"{counts.clicked.sum():,.0f} clicks on items shown at several positions{one_query}"


def relative_variance(covariance: np.ndarray, reference: int) -> np.ndarray:
    """Return the variance of log θ relative to the position `reference` [positions], from the covariance of log θ."""
    return np.asarray(covariance.diagonal() + covariance[reference, reference] - 2 * covariance[reference])


def standard_error(fit: ConditionalFit, shown: np.ndarray) -> float:
    """Return the root mean square, over impressions, of the standard error of log θ relative to the anchor."""
    linked = np.isfinite(fit.theta)
    return float(np.sqrt(np.average(fit.covariance().diagonal()[linked], weights=shown[linked])))


def items_comparable(sample: Log | None, *, by_query: bool) -> bool:
    """Return False if an item seems to have another relevance each time, so that its positions cannot be compared.

    This is so if most items that occur again have other features in the `sample`, and no query says when they are the
    same (`by_query` is False).
    """
    if sample is None or by_query or sample.item_ids is None or not sample.feature_names:
        return True
    codes = sample.item_ids.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")[:200_000]
    again = np.flatnonzero(codes[order][1:] == codes[order][:-1])
    if not len(again):
        return True
    first, second = sample.features[order[again]], sample.features[order[again + 1]]
    same = ((first == second) | (np.isnan(first) & np.isnan(second))).all(1)
    return bool(same.mean() >= SAME_FEATURES)
