"""The value of a ranker from a log of biased feedback that another ranker wrote, without true labels.

The rows of a request keep its positions, and the j-th in the new order takes the j-th smallest. In a position-based
world E[c] = θ_old m with m = E[c | examined], so that a row would bring t m in its new place: t = θ_new for the value
`reward`, t = 1 / log2(1 + rank) for `dcg` (where the largest θ is 1), and t = 0 beyond rank k. With w = t / θ_old, its
clipped value u = min(w, M) and an estimate m̂ of m, every estimator is the mean over requests of

    Σ  m̂ t + f u (c - m̂ θ_old)

| name      | M      | m̂                     | f                   |                                  |
|-----------|--------|-----------------------|---------------------|----------------------------------|
| `ips`     | ∞      | any, as it cancels    | 1                   | w c: unbiased, of large variance |
| `clipped` | `clip` | 0                     | 1                   | u c: too low by what is clipped  |
| `snips`   | `clip` | d Σ u c / Σ u θ_old d | Σ t d / Σ u θ_old d | sums over the rows of a new rank |
| `dr`      | `clip` | d                     | 1                   | u c + (w - u) θ_old d            |

where d is `direct`, a model of m from other requests (1 in `snips` if there is none). Self-normalisation divides by the
weights of what was examined. That is not seen, so its expectation u θ_old stands for it: Σ u c at a new rank is scaled
up to what Σ t d promises of it. Unclipped, the factor is 1 and `snips` is `ips`, which makes it consistent as M grows;
at any M it is exact where, at each new rank, d is right up to a factor. The doubly robust t d + u (c - θ_old d) is `dr`
itself: weights follow from the positions, so that a direct model only speaks for what is clipped.

Clicks on trust, P(c>0) = θ β + ζ (1 - β), enter with θ - ζ for θ, c - ζ_old for c, and, in `reward`, the ζ_new of the
new place on top. Tied scores count as each of their orders being equally likely: t is the mean over their ranks.

Assumed: the position-based model, labels whose size is free of position, θ and d from other requests than these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ultr.arguments import Seed, checked
from ultr.errors import DataError, OptionError, nearest
from ultr.evaluation import PairedTest, mean_with_interval, paired_test
from ultr.labels import DEFAULT_LABEL, Label
from ultr.log import Log
from ultr.rankers import FeatureEncoder, score_rows

ByPosition = Mapping[int, float]
KINDS = ("reward", "dcg")
ESTIMATORS = ("ips", "clipped", "snips", "dr")
CLIP, TINY = 5.0, 1e-300
LARGEST = 1e30  # of labels, and of θ beside θ: squares of their products are finite
NORMAL = 1.959964  # of a 95% interval
PENALTY = 300.0  # of the direct model's squared weights, in clicks
FITTED_NUMBERS = 30_000_000  # features times rows, at most, that it is fitted to


@dataclass(frozen=True, eq=False)
class OffPolicyValue:
    """The value of a ranker a request with its 95% interval, and what it rests on.

    The interval is for requests drawn independently. Added are what the clip changed, as `unclipped` sees it, and how
    far replicates of θ move the value.
    """

    kind: str
    estimator: str
    k: int
    value: float
    low: float
    high: float
    unclipped: float  # what `ips` makes of it
    per_request: np.ndarray  # whose mean is the value
    weights: np.ndarray | None  # of requests
    replicates: np.ndarray  # the value under each replicate of θ
    effective_clicks: float  # (Σ f u)² / Σ (f u)² of rows with c > 0: as many clicks of equal weight tell as much
    clipped: float  # share of the first k places whose w is above M
    coverage: float  # share of the first k places for which items were shown; the others bring nothing


@checked
def off_policy_value(
    log: Log,
    scores: np.ndarray,
    *,
    theta: ByPosition,
    label: Label | str = DEFAULT_LABEL,
    kind: str = "reward",
    k: int = 10,
    estimator: str = "dr",
    clip: float = CLIP,
    direct: np.ndarray | None = None,
    zeta: ByPosition | None = None,
    replicates: Sequence[ByPosition] = (),
) -> OffPolicyValue:
    """The value that a ranker with these scores, one for each row, would have had on the requests of a log.

    θ (and ζ, for clicks on trust) go by position id. `direct` is m by row in the scale of θ, as `fit_direct` gives it.
    `replicates` of θ, such as a bootstrap's, say how well it is known.
    """
    for name, known, what in ((kind, KINDS, "kind of value"), (estimator, ESTIMATORS, "estimator")):
        if name not in known:
            raise OptionError(f"no {what} '{name}'", mend=nearest(name, known))
    if k < 1 or not clip > 0:
        raise OptionError("the cut-off is a whole number from 1, and the clip above 0", got=f"k={k}, clip={clip}")
    most = np.inf if estimator == "ips" else float(clip)
    rows = _Rows(log, log.check_scores(scores), _labels(log, label, zeta), kind, k, zeta)
    expected = None  # where a row was shown, which the data tell whatever θ is: replicates hold it
    if direct is not None:
        expected = _checked(direct, log.rows) * _by_position(theta, zeta, rows.ids)[0][rows.old]
    elif estimator == "dr":
        raise OptionError("dr needs a direct model", mend="pass direct=fit_direct(...)(log), or estimator='snips'")
    here = rows.at(theta)
    brings, used = rows.estimate(estimator, here, most, expected)
    per_request = np.add.reduceat(brings, log.offsets[:-1])
    mean = mean_with_interval(per_request, log.weights)
    values = np.array([rows.mean(rows.estimate(estimator, rows.at(one), most, expected)[0]) for one in replicates])
    unclipped = rows.mean(rows.estimate("ips", here, np.inf, None)[0])
    margin = _margin(mean.high - mean.mean, mean.mean - unclipped, values - mean.mean)
    telling, top = (rows.weight * used)[rows.c > 0], rows.weight * (here.target > 0)
    rests_on = (
        float(telling.sum() ** 2 / max(telling @ telling, TINY)),
        float(top @ (here.target > most * here.old) / max(top.sum(), TINY)),
        rows.mean(rows.top) / k,
    )
    found = mean.mean, mean.mean - margin, mean.mean + margin, unclipped, per_request, log.weights, values
    return OffPolicyValue(kind, estimator, k, *found, *rests_on)


@checked
def compare_values(a: OffPolicyValue, b: OffPolicyValue) -> PairedTest:
    """Whether two rankers differ on the requests of a log: a paired test of a - b, with an error made up as theirs."""
    from scipy.stats import norm

    of_a, of_b = ((v.kind, v.k, v.per_request.shape, v.replicates.shape) for v in (a, b))
    if of_a != of_b:
        raise DataError("values are compared on the same requests, and of the same kind", got=f"{of_a} and {of_b}")
    test = paired_test(a.per_request, b.per_request, a.weights)
    changed = test.difference - (a.unclipped - b.unclipped)
    margin = _margin(test.high - test.difference, changed, a.replicates - b.replicates - test.difference)
    p = float(2 * norm.sf(NORMAL * abs(test.difference) / max(margin, TINY)))
    return PairedTest(test.difference, test.difference - margin, test.difference + margin, p, test.requests)


def _margin(of_requests: float, changed: float, moved: np.ndarray) -> float:
    return float(np.sqrt(of_requests**2 + NORMAL**2 * (changed**2 + moved @ moved / max(1, len(moved)))))


class _Weights(NamedTuple):
    target: np.ndarray  # t
    old: np.ndarray  # θ_old - ζ_old, where the largest is 1
    excess: np.ndarray  # c - ζ_old
    lift: np.ndarray | float  # ζ_new


class _Rows:
    """The rows of a log, and where a ranker puts them; places are numbered as rows are, those of a request by rank."""

    def __init__(self, log: Log, scores: np.ndarray, c: np.ndarray, kind: str, k: int, zeta: ByPosition | None) -> None:
        self.c, self.kind, self.zeta = c, kind, zeta
        positions, request = _positions(log), log.request_of_row
        self.weight = np.ones(log.rows) if log.weights is None else log.weights.astype(np.float64)[request]
        self.total = float(self.weight[log.offsets[:-1]].sum())
        self.ids, self.old = np.unique(positions, return_inverse=True)
        self.new = self.old[np.lexsort((positions, request))]  # position of each place
        self.ranks = np.arange(log.rows) - log.offsets[request] + 1
        self.top = self.ranks <= k
        self.order = np.lexsort((-scores, request))
        ordered = scores[self.order]
        differs = (ordered[1:] != ordered[:-1]) | (request[1:] != request[:-1])
        self.ties = np.flatnonzero(np.append(True, differs)[: log.rows])  # where they start
        self.sizes = np.diff(np.append(self.ties, log.rows))
        self.rank = self.placed(self.ranks).astype(np.int64)  # new, the middle one of a tie

    def mean(self, values: np.ndarray) -> float:
        """The sum over the rows of a request, on average."""
        return float(self.weight @ values / self.total)

    def placed(self, by_place: np.ndarray) -> np.ndarray:
        """By row, the mean over the places that it shares with those it ties with."""
        by_row = np.empty(len(by_place))
        if len(self.ties) < len(by_place):
            by_place = np.repeat(np.add.reduceat(by_place, self.ties) / self.sizes, self.sizes)
        by_row[self.order] = by_place
        return by_row

    def at(self, theta: ByPosition) -> _Weights:
        slope, lift = _by_position(theta, self.zeta, self.ids)
        slope /= slope.max()
        gain = slope[self.new] if self.kind == "reward" else 1 / np.log2(1 + self.ranks)
        brought = self.zeta is not None and self.kind == "reward"
        return _Weights(
            self.placed(np.where(self.top, gain, 0.0)),
            slope[self.old],
            self.c - lift[self.old],
            self.placed(np.where(self.top, lift[self.new], 0.0)) if brought else 0.0,
        )

    def estimate(self, name: str, at: _Weights, most: float, expected: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """What each row brings, and its weight f u; θ_old d of each row is `expected`."""
        used = np.minimum(w := at.target / at.old, most)
        if name in ("ips", "clipped"):
            return used * at.excess + at.lift, used
        expected = at.old if expected is None else expected
        if name == "snips":
            terms = used * at.excess, used * expected, w * expected
            got, seen, promised = (np.bincount(self.rank, self.weight * values) for values in terms)
            seen = np.maximum(seen, TINY)
            expected, used = expected * (got / seen)[self.rank], used * (promised / seen)[self.rank]
        return w * expected + used * (at.excess - expected) + at.lift, used


def _positions(log: Log) -> np.ndarray:
    if log.positions is None or not len(log):
        raise DataError("a value is of requests with positions, and the log has none", mend="name it with --position")
    return log.positions


def _labels(log: Log, label: Label | str, zeta: ByPosition | None) -> np.ndarray:
    c = np.asarray(Label.of(label)(log.actions), dtype=np.float64)
    if c.max(initial=0) > LARGEST:
        raise DataError(f"labels should not be beyond {LARGEST:g}", got=f"{c.max():g}", mend="scale it: see --label")
    if zeta is not None and not ((c == 0) | (c == 1)).all():
        raise OptionError("clicks on trust are known of labels that are 0 or 1", got=f"{c.max():g}", mend="take click")
    return c


def _by_position(theta: ByPosition, zeta: ByPosition | None, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """θ - ζ and ζ of each position id."""
    for name, given in (("θ", theta), ("ζ", zeta)):
        if given is not None and (lacking := [i for i in ids.tolist() if i not in given]):
            raise DataError(f"a position has no {name}", got=lacking[0], mend="give one for every position shown")
    lift = np.array([0.0 if zeta is None else zeta[i] for i in ids.tolist()])
    slope = np.array([theta[i] for i in ids.tolist()]) - lift
    bad = ~((slope > slope.max(initial=0) / LARGEST) & (slope < np.inf) & (lift >= 0))
    if bad.any():
        got = f"{slope[bad][0] + lift[bad][0]:g} at position {ids[bad][0]}"
        raise DataError("θ should be finite and above 0 (above ζ, which is not negative)", got=got)
    return slope, lift


def _checked(direct: np.ndarray, rows: int) -> np.ndarray:
    found = np.asarray(direct, dtype=np.float64)
    if found.shape != (rows,) or not ((found >= 0) & (found <= LARGEST)).all():
        got = f"shape {list(found.shape)}"
        raise DataError(f"a direct model gives {rows} finite values from 0 to {LARGEST:g}", got=got)
    return found


@dataclass(frozen=True, eq=False)
class DirectModel:
    """m(x) = E[c | examined] = exp(b + x·w), within the range that was fitted; categories play no part."""

    encoder: FeatureEncoder
    weights: Tensor
    intercept: float
    lowest: float
    highest: float

    def __call__(self, log: Log) -> np.ndarray:
        """By row of a log, in the scale of the θ that it was fitted with."""
        found = score_rows(lambda rows: self.encoder(rows) @ self.weights, log.features) + self.intercept
        return np.exp(np.clip(found, self.lowest, self.highest).astype(np.float64))


@checked
def fit_direct(
    log: Log,
    *,
    theta: ByPosition,
    label: Label | str = DEFAULT_LABEL,
    zeta: ByPosition | None = None,
    seed: Seed = 0,
) -> DirectModel:
    """Poisson regression of c on features with exposure θ_k: E[c] = θ_k m(x), for clicks and continuous labels alike.

    It needs no more than the mean to be right; the ridge penalty is relative to the label's dispersion Σ c² / Σ c. It
    is fitted to random requests if the log is large. With ζ, c - ζ_k takes the place of c.
    """
    from scipy.optimize import minimize

    width = len(log.feature_names)
    if log.rows * width > FITTED_NUMBERS:
        order = np.random.default_rng(seed).permutation(len(log))
        enough = int(np.searchsorted(np.cumsum(log.lengths[order]), FITTED_NUMBERS // width))
        log = log.select(np.sort(order[: max(1, enough)]))
    ids, place = np.unique(_positions(log), return_inverse=True)
    slope, lift = _by_position(theta, zeta, ids)
    weight = np.ones(log.rows) if log.weights is None else np.repeat(log.weights, log.lengths).astype(np.float64)
    total = float(weight @ (c := _labels(log, label, zeta)))
    if not total > 0:
        raise DataError("a direct model needs feedback, and no label is positive", mend="check --label")
    exposure, response = weight * slope[place], weight * (c - lift[place])
    penalty = PENALTY * float(weight @ c**2) / total
    encoder = FeatureEncoder(width, only=[i for i, n in enumerate(log.feature_names) if n not in log.vocabularies])
    encoder.fit(log.features)
    x = encoder(torch.from_numpy(np.array(log.features))).numpy()

    def loss(b: np.ndarray) -> tuple[float, np.ndarray]:
        eta = np.clip(x @ b[1:].astype(np.float32) + b[0], -30, 30)
        expected = exposure * np.exp(eta)
        rest = expected - response
        value = (expected.sum() - response @ eta + penalty / 2 * b[1:] @ b[1:]) / total
        return value, np.append(rest.sum(), x.T @ rest.astype(np.float32) + penalty * b[1:]) / total

    start = np.append(np.log(max(response.sum(), 1e-3 * total) / exposure.sum()), np.zeros(x.shape[1]))
    b = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 50}).x
    weights, eta = torch.from_numpy(b[1:].astype(np.float32)), x @ b[1:] + b[0]
    return DirectModel(encoder, weights, float(b[0]), float(eta.min()), float(eta.max()))
