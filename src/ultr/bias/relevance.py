"""Estimate the relevance of each pair of a query and an item from feedback, with its error: empirical Bayes.

The feedback c on a pair has the mean e λ. Here e = Σ_k n_k θ_k are its examined impressions, and λ is its attraction:
the feedback per impression that users look at. Production predicts the attraction of a pair, and queries and pairs
differ from this prediction:

    c ~ Poisson(e λ),    λ = μ u t,    log μ = b · x,    log u ~ N(0, τ²) of a query,    t ~ Gamma(r, r) of a pair

The covariates x are where production showed the pair, and features, where given. b, τ and r maximise the marginal
likelihood, in which t is integrated exactly and u by Gauss-Hermite quadrature. Amounts of feedback, and weights of
requests, are divided by Σ c² / Σ c, so that their variance is about that of a Poisson distribution. A click that is
likely varies less: the variance of a click with probability p is p (1 - p). So c and e of a pair are both divided by
the mean of 1 - p at its positions.

The relevance R of a pair is its attraction, or nearer to production's prediction: users also click for reasons that are
not relevance, such as a catchy title. `weight` is the share of the variance of log λ - log M that is relevance, where M
is production's prediction of λ. Then the posterior of R given the feedback has the logarithmic moments

    E log R = log M + w (E log λ - log M),    Var log R = w² Var log λ + w (1 - w) (τ² + ψ'(r))

and is the gamma distribution with these moments; for w = 1 and a known u it is exact. The errors of examination, and of
b, r and τ, are those of draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch
from scipy import special

from ultr.bias.counts import Counts, count_cells
from ultr.bias.examination import Examination
from ultr.errors import DataError, OptionError
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.splits import codes
from ultr.log.table import IN_LIST
from ultr.utils.arguments import Seed, Within, checked
from ultr.utils.display import facts_html
from ultr.utils.optimisation import minimise

WEIGHT = 0.2  # share of the differences between predicted and clicked attraction that are relevance
SURE = 0.6  # probability of its grade from which on a pair is sure
LEAST_EVIDENCE = 0.2  # share of the estimate that must come from the feedback on a pair that is sure
GRADES = 3  # the highest grade
TOP = 0.99  # the quantile of relevance, over impressions, that default cut points are relative to
TAILS = (0.025, 0.975)  # of intervals
MOST_GRADES = 30  # above grade 0
NODES = 15  # of the quadrature over queries
FITTED_PAIRS = 50_000  # pairs that the prediction is fitted to, at most about
DRAWS = 10  # of θ
CHUNK = 50_000  # pairs whose posteriors are computed at once
LEAST_VARIANCE = 1e-8  # of log R
LEAST_DISPERSION = 0.05  # of clicks
LOG_RANGE = (-5.0, 8.0)  # of log r and log τ
MOST_MOVED = 2.0  # of a parameter in a draw
RIDGE = 1e-3  # penalty on the squared coefficients
LARGEST_FEATURES = 500  # most features that predict relevance


@dataclass(frozen=True, eq=False)
class Pairs:
    """The impressions and the feedback of each pair of a query and an item, by position.

    Pairs of one query are adjacent. In a log without queries, all items are pairs of one query.
    """

    queries: Any  # [pairs] Arrow array; None: the log has no queries
    items: Any  # [pairs] Arrow array
    query: np.ndarray  # [pairs] number of the query
    positions: np.ndarray  # ids, ascending
    cells: Counts  # strata are pairs; clicks are amounts of feedback over `unit`
    clicks: np.ndarray  # [pairs] rows with feedback
    unit: float = 1.0  # the amount of feedback that counts as one click
    features: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))  # [pairs, features] means; NaN: missing
    feature_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.cells.size[0]

    def sums(self, of_cells: np.ndarray) -> np.ndarray:
        """Return the sums over the cells of each pair."""
        return np.asarray(np.bincount(self.cells.strata, of_cells, len(self)))

    def examined(self, theta: np.ndarray) -> np.ndarray:
        """Return the impressions of each pair that users looked at, given θ by position."""
        return self.sums(self.cells.shown * theta[self.cells.places])

    @property
    def dispersion(self) -> np.ndarray:
        """The variance of the feedback on each pair, by the click rates of its positions, over that of Poisson."""
        cells, width = self.cells, self.cells.size[1]
        clicked, shown = (np.bincount(cells.places, each, width) for each in (cells.clicked, cells.shown))
        rate = np.clip(clicked / np.maximum(shown, 1e-12), 0, 1 - LEAST_DISPERSION)[cells.places]
        expected = self.sums(cells.shown * rate)
        return np.asarray(
            np.where(expected > 0, self.sums(cells.shown * rate * (1 - rate)) / np.maximum(expected, 1e-12), 1.0)
        )

    @property
    def impressions(self) -> np.ndarray:
        return self.sums(self.cells.shown)

    @property
    def ranks(self) -> np.ndarray:
        """The place of each position in the list, from 1, whatever the segment [positions]."""
        return np.asarray(np.unique(self.positions & IN_LIST, return_inverse=True)[1] + 1)

    @property
    def mean_rank(self) -> np.ndarray:
        return np.asarray(self.sums(self.cells.shown * self.ranks[self.cells.places]) / self.impressions)

    def covariates(self) -> np.ndarray:
        """Return what predicts relevance [pairs, covariates]: mean and best rank, on a log scale, and features."""
        ranks = np.log(self.ranks[self.cells.places])
        best = np.full(len(self), np.inf)
        np.minimum.at(best, self.cells.strata, ranks)
        columns = [self.sums(self.cells.shown * ranks) / self.impressions, best]
        return _standardised(np.column_stack([*columns, *self.features.T[:LARGEST_FEATURES]]))


def pairs_of_log(log: Log, label: Label | str) -> Pairs:
    """Count the rows of a log by query, item and position; rows without an item id are left out."""
    if log.item_ids is None:
        raise DataError("judgments need item ids, and the log has none", hint="name their column with --item")
    known = log.item_ids.is_valid().to_numpy(zero_copy_only=False)
    queries = log.context.get("query")
    request = log.request_of_row[known]
    items = log.item_ids.filter(pa.array(known))
    query = np.zeros(len(items), np.int64) if queries is None else codes(queries).astype(np.int64)[request]
    positions, places = np.unique(log.shown_positions("an estimate of relevance")[known], return_inverse=True)
    item = codes(items).astype(np.int64)
    ids, first, pair = np.unique(query * (int(item.max(initial=0)) + 1) + item, return_index=True, return_inverse=True)
    if not len(ids):
        raise DataError("no row of the log has an item id", hint="name another column with --item")
    weights = np.ones(len(pair)) if log.weights is None else log.weights[request].astype(np.float64)
    amounts = weights * np.asarray(Label.of(label)(log.actions), np.float64)[known]
    unit = float((amounts**2).sum() / amounts.sum()) if amounts.any() else 1.0
    cells = count_cells(pair, places, weights, amounts / unit, width=len(positions))
    values = log.features[known]
    numeric = [i for i in range(len(log.feature_names)) if i not in log.categories]
    shown = np.bincount(pair)
    return Pairs(
        None if queries is None else queries.take(pa.array(request[first])),
        items.take(pa.array(first)),
        np.unique(query[first], return_inverse=True)[1],
        positions,
        cells,
        np.bincount(pair, amounts > 0, len(ids)),
        unit,
        np.column_stack([np.bincount(pair, values[:, i]) / shown for i in numeric] or [np.empty((len(ids), 0))]),
        tuple(log.feature_names[i] for i in numeric),
    )


# --- Prediction -------------------------------------------------------------------------------------------------------


def _standardised(values: np.ndarray) -> np.ndarray:
    """Return columns with mean 0 and standard deviation 1, in which missing values are 0."""
    known = np.where(np.isfinite(values), values, np.nan)
    with np.errstate(all="ignore"):
        number = np.isfinite(known).sum(0)
        mean = np.nansum(known, 0) / np.maximum(number, 1)
        scale = np.sqrt(np.nansum((known - mean) ** 2, 0) / np.maximum(number, 1))
    return np.asarray(np.nan_to_num((known - mean) / np.where(scale > 0, scale, 1.0)))


@dataclass(frozen=True, eq=False)
class Prediction:
    """The distribution of attraction that production predicts: b (first the intercept), r and τ."""

    coefficients: np.ndarray
    shape: float  # r
    spread: float  # τ
    covariance: np.ndarray | None = None  # of b, log r and log τ

    @staticmethod
    def of(parameters: np.ndarray, covariance: np.ndarray, *, several: bool) -> Prediction:
        """Return a prediction with the parameters b, log r and log τ; without `several` queries, τ is 0."""
        shape, spread = np.exp(np.clip(parameters[-2:], *LOG_RANGE)).tolist()
        return Prediction(parameters[:-2], shape, spread if several else 0.0, covariance)

    @property
    def parameters(self) -> np.ndarray:
        return np.array([*self.coefficients, np.log(self.shape), np.log(max(self.spread, 1e-3))])

    def drawn(self, random: np.random.Generator) -> Prediction:
        """Return a prediction as it may be, given its error."""
        assert self.covariance is not None  # noqa: S101 - of a fit
        root = np.linalg.eigh(self.covariance)
        halves = root.eigenvectors * np.sqrt(np.maximum(root.eigenvalues, 0))
        moved = halves @ root.eigenvectors.T @ random.normal(size=len(halves))  # signs of eigenvectors do not matter
        parameters = self.parameters + np.clip(moved, -MOST_MOVED, MOST_MOVED)
        return Prediction.of(parameters, self.covariance, several=self.spread > 0)

    def log_means(self, covariates: np.ndarray) -> np.ndarray:
        """Return log μ of each pair."""
        return np.asarray(self.coefficients[0] + covariates @ self.coefficients[1:])

    @property
    def variance(self) -> float:
        """The variance of log λ around its prediction."""
        return float(special.polygamma(1, self.shape)) + self.spread**2


def fit_prediction(
    clicks: np.ndarray,
    examined: np.ndarray,
    covariates: np.ndarray,
    query: np.ndarray,
    *,
    start: Prediction | None = None,
) -> Prediction:
    """Fit b, r and τ by the marginal likelihood of the feedback `clicks` on pairs with `examined` impressions.

    Their covariance is the inverse of the information. Without several queries, τ is 0.
    """
    queries = int(query.max()) + 1
    nodes, weights = _quadrature(queries > 1)
    c, e, x, of = (torch.from_numpy(np.asarray(each)) for each in (clicks, examined, covariates, query))
    u, log_weights = torch.from_numpy(nodes), torch.from_numpy(np.log(weights))
    if start is None:
        intercept = np.log(max(clicks.sum(), 0.5) / max(examined.sum(), 1e-12))
        start = Prediction(np.append(intercept, np.zeros(covariates.shape[1])), 1.0, 0.5)

    def loss(parameters: torch.Tensor) -> torch.Tensor:
        b, (log_r, log_tau) = parameters[:-2], parameters[-2:].clamp(*LOG_RANGE)
        r = log_r.exp()
        log_mean = (b[0] + x @ b[1:])[:, None] + log_tau.exp() * u - log_r
        odds = torch.log1p(e[:, None] * log_mean.clamp(-60, 60).exp())
        terms = (torch.lgamma(c + r) - torch.lgamma(r))[:, None] + c[:, None] * log_mean - (c[:, None] + r) * odds
        of_query = torch.zeros(queries, len(u), dtype=torch.float64).index_add(0, of, terms)
        return RIDGE * parameters[1:].square().sum() - (of_query + log_weights).logsumexp(1).sum()

    parameters = torch.from_numpy(start.parameters).requires_grad_()
    minimise([parameters], lambda: loss(parameters), iterations=200)
    found = parameters.detach()
    covariance = start.covariance
    if covariance is None:
        information = torch.autograd.functional.hessian(loss, found).numpy()  # type: ignore[no-untyped-call]
        covariance = np.linalg.pinv(information, hermitian=True)
    return Prediction.of(found.numpy(), covariance, several=queries > 1)


def _quadrature(several: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes and the weights of a standard normal variable; one node, 0, if there are not `several` draws."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES if several else 1)
    return nodes, weights / weights.sum()


def _sample(pairs: Pairs, seed: int) -> np.ndarray:
    """Return a mask of the pairs of random queries, about `FITTED_PAIRS`; of random pairs if there is one query."""
    if len(pairs) <= FITTED_PAIRS:
        return np.ones(len(pairs), bool)
    random = np.random.default_rng(seed)
    sizes = np.bincount(pairs.query)
    if len(sizes) == 1:
        return np.asarray(random.random(len(pairs)) < FITTED_PAIRS / len(pairs))
    order = random.permutation(len(sizes))
    chosen = order[: max(1, int(np.searchsorted(np.cumsum(sizes[order]), FITTED_PAIRS, "right")))]
    return np.isin(pairs.query, chosen)


def _fits(
    pairs: Pairs, examination: Examination, covariates: np.ndarray, seed: int
) -> Iterator[tuple[np.ndarray, Prediction]]:
    """Yield θ and its prediction, and then both as they may be, given their errors."""
    sampled, random = _sample(pairs, seed), np.random.default_rng(seed)
    dispersion = pairs.dispersion[sampled]
    clicks = pairs.sums(pairs.cells.clicked)[sampled] / dispersion
    query = np.unique(pairs.query[sampled], return_inverse=True)[1]

    def fit(theta: np.ndarray, start: Prediction | None) -> Prediction:
        examined = pairs.examined(theta)[sampled] / dispersion
        return fit_prediction(clicks, examined, covariates[sampled], query, start=start)

    first = fit(examination.theta, None)
    yield examination.theta, first
    thetas = [*examination.draws(DRAWS, seed=seed)]
    for theta in thetas or [examination.theta] * DRAWS:
        yield theta, (fit(theta, first) if thetas else first).drawn(random)


# --- Posterior --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Moments:
    """The mean and the variance of the logarithm of a positive number, for each pair."""

    mean: np.ndarray
    variance: np.ndarray

    @staticmethod
    def mixed(parts: Sequence[Moments], weights: Any = None) -> Moments:
        """Return the moments of a mixture."""
        means, variances = (np.array([getattr(part, name) for part in parts]) for name in ("mean", "variance"))
        mean = np.average(means, axis=0, weights=weights)
        return Moments(mean, np.average(variances + (means - mean) ** 2, axis=0, weights=weights))

    def gamma(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the shape and the scale of the gamma distribution with these moments."""
        shape = inverse_trigamma(self.variance)
        return shape, np.exp(self.mean - special.digamma(shape))


def inverse_trigamma(values: np.ndarray) -> np.ndarray:
    """Return x with ψ'(x) = `values`, by Newton's method on 1 / ψ', which is nearly linear."""
    values = np.maximum(values, LEAST_VARIANCE)
    x = np.where(values > 1, 1 / np.sqrt(values), 0.5 + 1 / values)
    for _ in range(8):
        found = special.polygamma(1, x)
        x = np.maximum(x + found * (1 - found / values) / special.polygamma(2, x), x / 2)
    return np.asarray(x)


def attraction(
    clicks: np.ndarray, examined: np.ndarray, log_mean: np.ndarray, query: np.ndarray, fit: Prediction
) -> Moments:
    """Return the posterior moments of log λ, given the feedback on all pairs of each query."""
    nodes, weights = _quadrature(fit.spread > 0)
    r, number = fit.shape, int(query.max()) + 1
    logs = [log_mean + fit.spread * node for node in nodes]
    odds = [np.log1p(examined * np.exp(each) / r) for each in logs]
    terms = [clicks * (each - np.log(r)) - (clicks + r) * odd for each, odd in zip(logs, odds, strict=True)]
    of_query = np.array([np.bincount(query, each, number) for each in terms]) + np.log(weights)[:, None]
    share = special.softmax(of_query, axis=0)[:, query]
    known = special.polygamma(1, clicks + r)
    means = [special.digamma(clicks + r) + each - np.log(r) - odd for each, odd in zip(logs, odds, strict=True)]
    return Moments.mixed([Moments(mean, known) for mean in means], share)


@dataclass(frozen=True, eq=False)
class Posterior:
    """The estimate of each pair from its feedback, in clicks per examined impression."""

    moments: Moments  # of log R
    predicted: np.ndarray  # M, production's prediction
    examined: np.ndarray  # impressions that users looked at
    evidence: np.ndarray  # share of the estimate of t that comes from the feedback on the pair


def posterior(pairs: Pairs, examination: Examination, *, weight: float, seed: int) -> Posterior:
    """Return what the feedback says about each pair; its error has that of examination."""
    covariates, dispersion = pairs.covariates(), pairs.dispersion
    clicks, results = pairs.sums(pairs.cells.clicked) / dispersion, []
    for theta, fit in _fits(pairs, examination, covariates, seed):
        examined, log_mean = pairs.examined(theta) / dispersion, fit.log_means(covariates)
        parts = [
            attraction(clicks[part], examined[part], log_mean[part], pairs.query[part] - pairs.query[part][0], fit)
            for part in _chunks(pairs.query)
        ]
        mean, variance = (np.concatenate([getattr(each, name) for each in parts]) for name in ("mean", "variance"))
        predicted = log_mean + fit.spread**2 / 2
        moments = Moments(
            predicted + weight * (mean - predicted), weight**2 * variance + weight * (1 - weight) * fit.variance
        )
        expected = examined * np.exp(predicted)
        evidence = expected / (fit.shape + expected)
        results.append(Posterior(moments, np.exp(predicted), examined * dispersion, evidence))
    spread = Moments.mixed([each.moments for each in results]).variance
    return replace(results[0], moments=Moments(results[0].moments.mean, spread))


def _chunks(query: np.ndarray) -> Iterator[slice]:
    """Yield parts of the pairs with whole queries, and about `CHUNK` pairs."""
    starts = np.flatnonzero(np.diff(query, prepend=-1))
    bounds = [0]
    for start in np.append(starts[1:], len(query)).tolist():
        if start - bounds[-1] >= CHUNK or start == len(query):
            bounds.append(start)
    for a, b in pairwise(bounds):
        yield slice(a, b)


# --- Judgments --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Judgments:
    """The relevance of pairs of a query and an item, with intervals, grades and the evidence behind them.

    A grade is the most probable one. A pair is sure if the probability of its grade is high enough, and if enough of
    the estimate comes from the feedback on the pair.
    """

    pairs: Pairs
    relevance: np.ndarray  # [pairs] feedback per examined impression
    low: np.ndarray  # of the 95% interval
    high: np.ndarray
    predicted: np.ndarray  # by production, before the feedback on the pair
    examined: np.ndarray  # impressions that users looked at
    evidence: np.ndarray  # share of the estimate that comes from the feedback on the pair
    grade: np.ndarray
    probability: np.ndarray  # of the grade
    sure: np.ndarray
    cuts: tuple[float, ...]  # least relevance of the grades 1, 2, ...
    label: str
    examination: str  # the evidence about examination, in words
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs)

    def table(self) -> pa.Table:
        """Return an Arrow table with a row for each pair."""
        columns: dict[str, Any] = {} if self.pairs.queries is None else {"query": self.pairs.queries}
        columns["item"] = self.pairs.items
        names = ("relevance", "low", "high", "grade", "probability", "sure")
        columns |= {name: getattr(self, name) for name in names}
        columns |= {"impressions": self.pairs.impressions, "examined": self.examined, "clicks": self.pairs.clicks}
        columns |= {"evidence": self.evidence, "mean_rank": self.pairs.mean_rank, "predicted": self.predicted}
        return pa.table(columns)

    def summary(self) -> dict[str, Any]:
        """Return the numbers of pairs, of sure pairs, and of sure pairs of each grade."""
        return {
            "pairs": len(self),
            "queries": int(self.pairs.query.max()) + 1,
            "sure": int(self.sure.sum()),
            "grades": np.bincount(self.grade[self.sure], minlength=len(self.cuts) + 1).tolist(),
            "cuts": list(self.cuts),
            "label": self.label,
            "examination": self.examination,
        }

    def _repr_html_(self) -> str:
        facts = {name: str(value) for name, value in self.summary().items()}
        return facts_html("Judgments", facts, self.notes)


@checked
def judge(
    pairs: Pairs,
    examination: Examination,
    *,
    label: str = "click",
    grades: Annotated[int, Within(1, MOST_GRADES)] = GRADES,
    cuts: Sequence[float] | None = None,
    weight: float = WEIGHT,
    sure: float = SURE,
    seed: Seed = 0,
    notes: Sequence[str] = (),
) -> Judgments:
    """Estimate the relevance of pairs, with grades from 0 to `grades`.

    `cuts` are the least relevance of the grades 1, 2, ... Without them, they are `default_cuts`. `weight` is the share
    of the differences between predicted and clicked attraction that are relevance, and `sure` the least probability of
    the grade of a pair that is sure.
    """
    for name, value in (("weight", weight), ("sure", sure)):
        if not 0 <= value <= 1:
            raise OptionError(f"{name} must be from 0 to 1", got=value)
    found = posterior(pairs, examination, weight=weight, seed=seed)
    shape, scale = found.moments.gamma()
    relevance = shape * scale
    chosen = default_cuts(relevance * pairs.unit, pairs.impressions, grades) if cuts is None else checked_cuts(cuts)
    below = [special.gammainc(shape, cut / pairs.unit / scale) for cut in chosen]
    chances = np.diff(np.array([np.zeros(len(pairs)), *below, np.ones(len(pairs))]), axis=0)
    low, high = (special.gammaincinv(shape, each) * scale * pairs.unit for each in TAILS)
    return Judgments(
        pairs,
        relevance * pairs.unit,
        low,
        high,
        found.predicted * pairs.unit,
        found.examined,
        found.evidence,
        chances.argmax(0),
        chances.max(0),
        (chances.max(0) >= sure) & (found.evidence >= LEAST_EVIDENCE),
        chosen,
        label,
        examination.source,
        tuple(notes),
    )


def default_cuts(relevance: np.ndarray, impressions: np.ndarray, grades: int) -> tuple[float, ...]:
    """Return cut points for which the gain 2^grade - 1 of nDCG is about proportional to relevance.

    The highest grade G stands for the relevance that 1% of the impressions exceed. A cut point between the grades g and
    g + 1 is at the gain 2^(g + 1/2) - 1.
    """
    order = np.argsort(relevance)
    total = np.cumsum(impressions[order])
    top = relevance[order[min(int(np.searchsorted(total, TOP * total[-1])), len(order) - 1)]]
    gains = (2 ** (np.arange(grades) + 0.5) - 1) / (2**grades - 1)
    return tuple(float(f"{cut:.3g}") for cut in gains * top)


def checked_cuts(cuts: Sequence[float]) -> tuple[float, ...]:
    """Return cut points; raise OptionError if they do not increase from above 0, or if they are too many."""
    values = tuple(float(cut) for cut in cuts)
    if not 1 <= len(values) <= MOST_GRADES or not all(a < b for a, b in pairwise((0.0, *values, np.inf))):
        got = ", ".join(f"{cut:g}" for cut in values)
        raise OptionError(f"cut points must increase, from above 0, and be at most {MOST_GRADES}", got=got or "none")
    return values
