"""The off-policy value of a ranker: estimated from the biased feedback on another ranker, without true labels.

A request keeps its positions: the j-th row in the new order takes the j-th smallest of them. In a position-based world
E[c] = θ_old m with m = E[c | examined], so the expected label of a row at its new place is t m: t = θ_new for the value
`reward`, t = 1 / log2(1 + rank) for `dcg` (where the largest θ is 1), and the smaller of the two for `gain`; t = 0
beyond rank k. If users look at all places alike, all orders have the same reward, and only `dcg` and `gain` tell them
apart; if θ falls fast, `gain` is `reward`, without the large weights of `dcg`. With w = t / θ_old, its clipped value
u = min(w, M) and an estimate m̂ of m, every estimator is the mean over requests of

    Σ  m̂ t + f u (c - m̂ θ_old)

| name      | M      | m̂                     | f                   |                                  |
|-----------|--------|-----------------------|---------------------|----------------------------------|
| `ips`     | ∞      | any, as it cancels    | 1                   | w c: unbiased, of large variance |
| `clipped` | `clip` | 0                     | 1                   | u c: too low due to clipping     |
| `snips`   | `clip` | d Σ u c / Σ u θ_old d | Σ t d / Σ u θ_old d | sums over the rows of a new rank |
| `dr`      | `clip` | d                     | 1                   | u c + (w - u) θ_old d            |

where d is `direct`, a model of m from other requests (1 in `snips` if there is none). Self-normalisation divides by the
weights of the examined rows. Examination is not observed, so u θ_old, its expectation, replaces it: Σ u c at a new rank
is scaled up by the ratio of Σ t d to Σ u θ_old d. Without clipping the factor is 1 and `snips` is `ips`, which makes it
consistent as M grows. At any M it is exact if, at each new rank, d is right up to a factor. The doubly robust estimator
t d + u (c - θ_old d) is `dr` itself: weights follow from positions, so d matters only where weights are clipped.

Actions after the click that depend on position (see `ultr.bias.after_click`) are divided by τ_old, and for `reward`
multiplied by τ_new, so that the value has the trust in the new place; d, which matters where weights are clipped, is
without trust.

For clicks from trust, P(c>0) = θ β + ζ (1 - β), θ becomes θ - ζ, c becomes c - ζ_old, and `reward` adds the ζ_new of a
new place. All orders of items with tied scores are equally likely: t is the mean over their ranks.

Assumptions: the position-based model, labels whose size does not depend on position, θ and d from other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ultr.bias.after_click import NO_TRUST, AfterClick, Trust, corrected, read_actions, trust_of
from ultr.bias.examination import Examination
from ultr.bias.identification import NORMAL
from ultr.bias.propensities import suggested
from ultr.datasets.users import User
from ultr.errors import DataError, OptionError, nearest
from ultr.evaluation.scores import (
    OFF_POLICY,
    PairedTest,
    ScoreMetrics,
    mean_with_interval,
    paired_test,
    parse_any_metric,
)
from ultr.log import Log
from ultr.log.labels import DEFAULT_LABEL, Label
from ultr.log.sampling import sample_log
from ultr.log.table import as_shown, slot
from ultr.rankers import FeatureEncoder, score_rows
from ultr.rankers.combined import conditional_fit, spread_within
from ultr.utils.arguments import Seed, checked
from ultr.utils.display import facts_html
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import check_format, load_tensors, read_json, save_tensors, write_json

ByPosition = Mapping[int, float]
KINDS = ("reward", "dcg", "gain")
ESTIMATORS = ("ips", "clipped", "snips", "dr")
CLIP = 5.0  # default of M, the largest weight
LARGEST = 1e30  # limit of labels, and of ratios of θ, so that squares of their products are finite
PENALTY = 300.0  # on the squared weights of the direct model, in clicks
FITTED_NUMBERS = 30_000_000  # most features times rows that the direct model is fitted to
TINY = 1e-300  # almost 0, for denominators
FORMAT = 1  # of the files of an OffPolicyModel


@dataclass(frozen=True, eq=False)
class OffPolicyValue:
    """The estimated value of a ranker (mean reward, DCG or gain per request), its 95% interval and its evidence.

    The interval is for requests drawn independently. It includes errors of clipping (the difference to `unclipped`) and
    of θ (the spread of `replicates`).
    """

    kind: str
    estimator: str
    k: int
    value: float
    low: float
    high: float
    unclipped: float  # the value by `ips`
    per_request: np.ndarray  # the value of each request; their mean is the value
    weights: np.ndarray | None  # of requests
    replicates: np.ndarray  # the value under each replicate of θ
    effective_clicks: float  # (Σ f u)² / Σ (f u)² of rows with c > 0: equally weighted clicks with the same information
    clipped: float  # share of the first k places whose w is above M
    coverage: float  # share of the first k places that have an item; the others count 0
    groups: np.ndarray | None = None  # of requests that were not drawn independently

    def _repr_html_(self) -> str:
        facts = {
            "value, 95% interval": f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]",
            "effective clicks": f"{self.effective_clicks:,.0f}",
            "weights clipped": f"{self.clipped:.1%}",
        }
        return facts_html(f"Off-policy {self.kind}@{self.k} ({self.estimator})", facts)


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
    trust: Trust = NO_TRUST,
    replicates: Sequence[ByPosition] = (),
) -> OffPolicyValue:
    """Estimate the value that a ranker with these scores, one for each row, would have had on the requests of a log.

    `theta` (examination) and `zeta` (click rate of irrelevant items) are by position id. `direct` is the expected label
    of each row if it is examined, from `fit_direct`. `trust` is τ of actions after the click, by action and position
    id. `replicates` of θ (a bootstrap) add its error to the interval.
    """
    return OffPolicy(
        log,
        theta=theta,
        label=label,
        kind=kind,
        k=k,
        estimator=estimator,
        clip=clip,
        direct=direct,
        zeta=zeta,
        trust=trust,
        replicates=replicates,
    )(scores)


class OffPolicy:
    """The estimator of `off_policy_value` for one log and any number of scores; its rows stay on the `device`."""

    def __init__(
        self,
        log: Log,
        *,
        theta: ByPosition,
        label: Label | str = DEFAULT_LABEL,
        kind: str = "reward",
        k: int = 10,
        estimator: str = "dr",
        clip: float = CLIP,
        direct: np.ndarray | None = None,
        zeta: ByPosition | None = None,
        trust: Trust = NO_TRUST,
        replicates: Sequence[ByPosition] = (),
        groups: np.ndarray | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, choices, what in ((kind, KINDS, "kind of value"), (estimator, ESTIMATORS, "estimator")):
            if name not in choices:
                raise OptionError(f"no {what} '{name}'", hint=nearest(name, choices))
        if k < 1 or not clip > 0:
            raise OptionError("k must be at least 1, and clip must be above 0", got=f"k={k}, clip={clip}")
        self._log, self._kind, self._k, self._estimator, self._groups = log, kind, k, estimator, groups
        self._most = np.inf if estimator == "ips" else float(clip)
        self._rows = rows = _Rows(log, _labels(corrected(log, trust), label, zeta), kind, k, zeta, torch.device(device))
        if kind == "reward":
            rows.trusted = [(rows.tensor(part), rows.tensor(tau)) for part, tau in _trusted(log, label, trust)]
        self._expected = None  # the expected label at the old place, whatever θ is, so replicates share it
        if direct is not None:
            slope = rows.by_position(theta)[0]
            self._expected = rows.tensor(_checked(direct, log.rows)) * slope[rows.old]
        elif estimator == "dr":
            raise OptionError("dr needs a direct model", hint="pass direct=fit_direct(...)(log), or estimator='snips'")
        self._theta, self._replicates = rows.by_position(theta), [rows.by_position(one) for one in replicates]

    def __call__(self, scores: np.ndarray) -> OffPolicyValue:
        """Estimate the value of a ranker with these scores, one for each row."""
        log, rows, most = self._log, self._rows, self._most
        places = _Places(rows, rows.tensor(log.check_scores(scores)))
        here = rows.at(self._theta, places)

        def estimate(at: _Weights) -> tuple[Tensor, Tensor]:
            return rows.estimate(self._estimator, at, places, most, self._expected)

        contributions, used = estimate(here)
        per_request = rows.by_request(contributions).cpu().numpy()
        mean = mean_with_interval(per_request, log.weights, groups=self._groups)
        values = np.array([rows.mean(estimate(rows.at(one, places))[0]) for one in self._replicates])
        unclipped = rows.mean(rows.estimate("ips", here, places, np.inf, None)[0])
        margin = margin_of(mean.high - mean.mean, mean.mean - unclipped, values - mean.mean)
        clicked, top = torch.where(rows.c > 0, rows.weight * used, 0.0), rows.weight * (here.target > 0)
        return OffPolicyValue(
            kind=self._kind,
            estimator=self._estimator,
            k=self._k,
            value=mean.mean,
            low=mean.mean - margin,
            high=mean.mean + margin,
            unclipped=unclipped,
            per_request=per_request,
            weights=log.weights,
            replicates=values,
            effective_clicks=float(clicked.sum() ** 2 / (clicked @ clicked).clamp(min=TINY)),
            clipped=float(top @ (here.target > most * here.old).double() / top.sum().clamp(min=TINY)),
            coverage=rows.mean(rows.top.double()) / self._k,
            groups=self._groups,
        )

    def mean(self, scores: Tensor) -> Tensor:
        """Estimate the value of a ranker with these scores on the device; NaN if a score is NaN."""
        places = _Places(self._rows, scores.double())
        at = self._rows.at(self._theta, places)
        rows = self._rows.estimate(self._estimator, at, places, self._most, self._expected)[0]
        value: Tensor = self._rows.weight @ rows / self._rows.total
        return value + torch.where(scores.isnan().any(), torch.nan, 0.0)

    def per_request(self, scores: np.ndarray) -> np.ndarray:
        """Return the value of each request, given a score for each row."""
        return self(scores).per_request


@checked
def compare_values(a: OffPolicyValue, b: OffPolicyValue) -> PairedTest:
    """Test whether two rankers differ on the requests of a log: a paired test of a - b with the errors of both."""
    of_a, of_b = ((v.kind, v.k, v.per_request.shape, v.replicates.shape) for v in (a, b))
    if of_a != of_b:
        what = "two values can be compared only if kind, k, requests and replicates are the same"
        raise DataError(what, got=f"{of_a} and {of_b}")
    test = paired_test(a.per_request, b.per_request, a.weights, groups=a.groups)
    return widened_test(test, a.unclipped - b.unclipped, a.replicates - b.replicates)


class Likelihood:
    """How likely scores make the feedback of a log, given the feedback of each request and examination θ.

    The value of a request is Σ c_i log(p_i / q_i), divided by the mean size of a label: p_i is the share θ_i e^(u s_i)
    of the item in its request, and q_i is the same with u = 0, so 0 is the value of scores that tell nothing. u >= 0 is
    the slope with the largest mean. It needs no ratios of θ, so it varies much less than the value of a ranking, which
    it does not estimate: it chooses steps.
    """

    def __init__(
        self,
        log: Log,
        *,
        theta: ByPosition,
        label: Label | str = DEFAULT_LABEL,
        trust: Trust = NO_TRUST,
        device: torch.device | str = "cpu",
    ) -> None:
        def here(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.array(values, np.float64)).to(device)

        weights = np.ones(len(log)) if log.weights is None else log.weights
        labels = _labels(corrected(log, trust), label, None)
        self._weights, self._request = here(weights), torch.from_numpy(np.array(log.request_of_row)).to(device)
        self._c = here(labels * np.repeat(weights, log.lengths))
        self._size = here(np.array((labels**2).sum() / max(labels.sum(), TINY))).clamp(min=TINY)
        ids, place = np.unique(_positions(log), return_inverse=True)
        self._log_theta = here(np.log(np.maximum([theta[int(k)] for k in ids], TINY))[place])

    def _by_request(self, values: Tensor) -> Tensor:
        return torch.zeros_like(self._weights).index_add(0, self._request, values)

    def _gains(self, scores: Tensor) -> Tensor:
        """Return the value of each request, times its weight."""
        scores = scores.double()
        column = scores / spread_within(scores, self._request)
        slope = conditional_fit(column[:, None], self._request, self._c, self._log_theta, of=1)[0].clamp(min=0)
        gains = self._levels(column * slope) - self._levels(torch.zeros_like(column))
        return gains / self._size + torch.where(scores.isnan().any(), torch.nan, 0.0)

    def _levels(self, scores: Tensor) -> Tensor:
        scores = scores + self._log_theta
        top = torch.full_like(self._weights, -torch.inf).scatter_reduce(0, self._request, scores, "amax")
        sums = self._by_request((scores - top[self._request]).exp()).clamp(min=TINY).log()
        return self._by_request(self._c * (scores - (top + sums)[self._request]))

    def per_request(self, scores: np.ndarray) -> np.ndarray:
        """Return the value of each request, given a score for each row."""
        gains = self._gains(torch.from_numpy(np.array(scores)).to(self._c.device))
        return np.asarray((gains / self._weights.clamp(min=TINY)).cpu().numpy())

    def mean(self, scores: Tensor) -> Tensor:
        """Return the mean value over requests of scores on the device; NaN if a score is NaN."""
        mean: Tensor = self._gains(scores).sum() / self._weights.sum()
        return mean


class _Weights(NamedTuple):
    target: Tensor  # t
    old: Tensor  # θ_old - ζ_old, where the largest is 1
    excess: Tensor  # c - ζ_old, with the trust in the new place
    lift: Tensor | float  # ζ_new


class _Places:
    """The place of each row in a new order, by score. A request has as many places as rows, numbered by rank."""

    def __init__(self, rows: _Rows, scores: Tensor) -> None:
        order = torch.sort(-scores, stable=True).indices
        self.order = order[torch.sort(rows.request[order], stable=True).indices]
        ordered = scores[self.order]
        differs = (ordered[1:] != ordered[:-1]) | (rows.request[1:] != rows.request[:-1])
        ties = torch.nonzero(torch.cat([differs.new_ones(1), differs])).flatten()  # the first place of each tie
        self.sizes = torch.diff(ties, append=ties.new_full((1,), len(scores)))
        self.rank = self.placed(rows.ranks).long()  # the new rank, which is the middle one of a tie

    def placed(self, by_place: Tensor) -> Tensor:
        """Return values by row from values by place; rows with tied scores get the mean over their places."""
        if len(self.sizes) < len(by_place):
            means = torch.segment_reduce(by_place, "mean", lengths=self.sizes)
            by_place = torch.repeat_interleave(means, self.sizes, output_size=len(by_place))
        return torch.empty_like(by_place).index_copy_(0, self.order, by_place)


class _Rows:
    """The rows of a log, on a device."""

    def __init__(
        self, log: Log, c: np.ndarray, kind: str, k: int, zeta: ByPosition | None, device: torch.device
    ) -> None:
        self.device, self.kind, self.zeta = device, kind, zeta
        positions, request = _positions(log), log.request_of_row
        weight = np.ones(log.rows) if log.weights is None else log.weights.astype(np.float64)[request]
        self.total = float(weight[log.offsets[:-1]].sum())
        self._ids, old = np.unique(positions, return_inverse=True)
        self.c, self.weight, self.old = self.tensor(c), self.tensor(weight), self.tensor(old)
        self.new = self.tensor(old[np.lexsort((positions, request))])  # position of each place
        self.request, self._lengths = self.tensor(request), self.tensor(log.lengths)
        self.ranks = self.tensor(np.arange(log.rows) - log.offsets[request] + 1.0)
        self.top = self.ranks <= k
        self.trusted: list[tuple[Tensor, Tensor]] = []  # parts of c [rows], and τ by position, of actions with trust

    def tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self.device)

    def mean(self, values: Tensor) -> float:
        """Sum values [rows] over the rows of each request, and return the weighted mean over requests."""
        return float(self.weight @ values) / self.total

    def by_request(self, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", lengths=self._lengths)

    def by_position(self, theta: ByPosition) -> tuple[Tensor, Tensor]:
        """Return θ - ζ and ζ of each position."""
        slope, lift = _by_position(theta, self.zeta, self._ids)
        return self.tensor(slope), self.tensor(lift)

    def at(self, theta: tuple[Tensor, Tensor], places: _Places) -> _Weights:
        slope, lift = theta
        slope = slope / slope.max()
        reward, dcg = slope[self.new], 1 / torch.log2(1 + self.ranks)
        gain = {"reward": reward, "dcg": dcg, "gain": torch.minimum(reward, dcg)}[self.kind]
        excess = self.c - lift[self.old]
        for part, tau in self.trusted:
            excess = excess + part * (places.placed(tau[self.new]) - 1)
        adds_lift = self.zeta is not None and self.kind == "reward"
        return _Weights(
            places.placed(torch.where(self.top, gain, 0.0)),
            slope[self.old],
            excess,
            places.placed(torch.where(self.top, lift[self.new], 0.0)) if adds_lift else 0.0,
        )

    def estimate(
        self, name: str, at: _Weights, places: _Places, most: float, expected: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the contribution of each row to the value, and its weight f u; `expected` [rows] is θ_old d."""
        w = at.target / at.old
        used = w.clamp(max=most)
        if name in ("ips", "clipped"):
            return used * at.excess + at.lift, used
        expected = at.old if expected is None else expected
        if name == "snips":
            terms = used * at.excess, used * expected, w * expected
            observed, clipped, whole = (torch.bincount(places.rank, self.weight * values) for values in terms)
            clipped = clipped.clamp(min=TINY)
            expected, used = expected * (observed / clipped)[places.rank], used * (whole / clipped)[places.rank]
        return w * expected + used * (at.excess - expected) + at.lift, used


def _positions(log: Log) -> np.ndarray:
    if not len(log):
        raise DataError("an off-policy value needs requests, and the log has none", hint="use a log with requests")
    return log.shown_positions("an off-policy value")


def _labels(log: Log, label: Label | str, zeta: ByPosition | None) -> np.ndarray:
    c = np.asarray(Label.of(label)(log.actions), dtype=np.float64)
    if c.max(initial=0) > LARGEST:
        raise DataError(
            f"labels must be at most {LARGEST:g}", got=f"{c.max():g}", hint="scale the label down with --label"
        )
    if zeta is not None and not ((c == 0) | (c == 1)).all():
        raise OptionError("with ζ, labels must be 0 or 1", got=f"{c.max():g}", hint="use the label click, or zeta=None")
    return c


def _trusted(log: Log, label: Label | str, trust: Trust) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the part of the label that comes from each action with trust [rows], and its τ by position."""
    label, log = Label.of(label), corrected(log, trust)
    whole, found, ids = np.asarray(label(log.actions)), [], np.unique(_positions(log)).tolist()
    for name in [name for name in trust if name in label.actions]:
        without = label({**log.actions, name: np.zeros_like(log.actions[name])}, check=False)
        found.append((np.asarray(whole - without, np.float64), np.array([trust[name].get(k, 1.0) for k in ids])))
    return found


def _by_position(theta: ByPosition, zeta: ByPosition | None, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return θ - ζ and ζ of each position id."""
    for name, values in (("θ", theta), ("ζ", zeta)):
        if values is not None and (missing := [i for i in ids.tolist() if i not in values]):
            raise DataError(
                f"position {as_shown(missing[0])} has no {name}", hint="add a value for every position of the log"
            )
    lift = np.array([0.0 if zeta is None else zeta[i] for i in ids.tolist()])
    slope = np.array([theta[i] for i in ids.tolist()]) - lift
    bad = ~((slope > slope.max(initial=0) / LARGEST) & (slope < np.inf) & (lift >= 0))
    if bad.any():
        got = f"θ = {slope[bad][0] + lift[bad][0]:g} at position {as_shown(int(ids[bad][0]))}"
        raise DataError("θ must be finite and above 0 (above ζ, which must not be negative)", got=got)
    return slope, lift


def _checked(direct: np.ndarray, rows: int) -> np.ndarray:
    values = np.asarray(direct, dtype=np.float64)
    if values.shape != (rows,) or not ((values >= 0) & (values <= LARGEST)).all():
        got = f"shape {list(values.shape)}"
        raise DataError(f"'direct' must have {rows} values from 0 to {LARGEST:g}, one per row", got=got)
    return values


@dataclass(frozen=True, eq=False)
class DirectModel:
    """A model of the expected label of an examined item: m(x) = E[c | examined] = exp(b + x·w), without categories.

    Predictions are limited to the range of those for the fitted rows.
    """

    encoder: FeatureEncoder
    weights: Tensor
    intercept: float
    lowest: float
    highest: float

    def __call__(self, log: Log) -> np.ndarray:
        """Return m [rows] of a log, in the scale of the θ that the model was fitted with."""
        log_m = score_rows(lambda rows: self.encoder(rows) @ self.weights, log.features) + self.intercept
        return np.exp(np.clip(log_m, self.lowest, self.highest).astype(np.float64))


@checked
def fit_direct(
    log: Log, *, theta: ByPosition, label: Label | str = DEFAULT_LABEL, zeta: ByPosition | None = None, seed: Seed = 0
) -> DirectModel:
    """Fit a Poisson regression of labels c on features with exposure θ_k: E[c] = θ_k m(x). Labels may be continuous.

    Only the mean has to be right, not the distribution. The ridge penalty is relative to the label's dispersion
    Σ c² / Σ c. A large log is sampled. With ζ, c becomes c - ζ_k.
    """
    from scipy.optimize import minimize

    width = len(log.feature_names)
    if log.rows * width > FITTED_NUMBERS:
        log = sample_log(log, FITTED_NUMBERS // width, seed=seed)
    ids, place = np.unique(_positions(log), return_inverse=True)
    slope, lift = _by_position(theta, zeta, ids)
    weight = np.ones(log.rows) if log.weights is None else np.repeat(log.weights, log.lengths).astype(np.float64)
    total = float(weight @ (c := _labels(log, label, zeta)))
    if not total > 0:
        raise DataError("a direct model needs positive labels, and there are none", hint="choose another --label")
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


# --- Intervals --------------------------------------------------------------------------------------------------------


def widened_test(test: PairedTest, unclipped: float, replicates: Sequence[float] | np.ndarray = ()) -> PairedTest:
    """Return a test of two off-policy values with the error of clipping: the difference would be `unclipped` without.

    `replicates` are differences under other estimates of examination.
    """
    moved = np.asarray(replicates, np.float64) - test.difference
    return test.with_margin(margin_of(test.high - test.difference, test.difference - unclipped, moved))


def margin_of(of_requests: float, changed: float, moved: np.ndarray) -> float:
    """Return half of the width of a 95% interval: sampling error, the error of clipping, and that of examination."""
    return float(np.sqrt(of_requests**2 + NORMAL**2 * (changed**2 + moved @ moved / max(1, len(moved)))))


# --- The model of a run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OffPolicyModel:
    """A model that estimates the metric of a ranking from logged feedback, without true labels.

    Examination and the model of feedback `direct` come from other requests than those that are evaluated. All methods
    have the same model: a method that evaluated rankings with its own estimate of examination could get a better value
    from a wrong estimate.
    """

    theta: Mapping[str, float]  # examination by position, or by `position@segment`
    direct: DirectModel
    actions: Mapping[str, AfterClick] = field(default_factory=dict)  # how actions after the click depend on position

    def estimator(
        self,
        log: Log,
        metric: str,
        *,
        label: str,
        segments: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> OffPolicy | Likelihood:
        """Return what estimates a metric of rankings by scores: off-policy-reward@k, -dcg@k, -gain@k or -likelihood."""
        kind, k = parse_any_metric(metric)
        if log.positions is None:
            raise DataError(f"'{metric}' needs the positions of items", hint="name their column with --position")
        ids = np.unique(log.positions).tolist()
        given: dict[str, Any] = {"theta": self.theta_of(ids, segments), "trust": trust_of(self.actions, ids)}
        if kind == "likelihood":
            return Likelihood(log, label=label, device=device, **given)
        direct = _direct_values(self.direct, log)
        return OffPolicy(log, label=label, kind=kind, k=k or 10, direct=direct, device=device, **given)

    def theta_of(self, positions: Sequence[int], segments: Sequence[str] = ()) -> dict[int, float]:
        """Return examination by position id.

        Unknown positions have the lowest examination, and unknown segments that which their columns suggest.
        """
        least, texts = min(self.theta.values()), {position: slot(position, segments) for position in positions}
        return {k: self.theta.get(text) or suggested(self.theta, text) or least for k, text in texts.items()}

    def save(self, folder: Path) -> None:
        encoder = self.direct.encoder
        about = {
            "format": FORMAT,
            "theta": dict(self.theta),
            "features": encoder.features,
            "numeric": encoder.numeric.tolist(),
            "intercept": self.direct.intercept,
            "range": [self.direct.lowest, self.direct.highest],
            "actions": {name: each.to_json() for name, each in self.actions.items()},
        }
        with atomic_path(folder, overwrite=True, folder=True) as temporary:
            write_json(temporary / "model.json", about)
            save_tensors(temporary / "direct.safetensors", {**encoder.state_dict(), "weights": self.direct.weights})


@lru_cache(maxsize=2)
def _direct_values(model: DirectModel, log: Log) -> np.ndarray:
    """Return the model's values of a log, which do not depend on scores and are needed again with other scores."""
    return model(log)


def load_off_policy_model(folder: Path) -> OffPolicyModel | None:
    """Load the model of a run from its folder; return None if there is none: the run was selected without it."""
    if not folder.is_dir():
        return None
    what, hint = "the model that estimates off-policy metrics", "train again"
    about, tensors = read_json(folder / "model.json"), load_tensors(folder / "direct.safetensors")
    check_format(about, FORMAT, what=what, where=folder, hint=hint)
    try:
        encoder = FeatureEncoder(int(about["features"]), only=about["numeric"])
        weights = tensors.pop("weights")
        encoder.load_state_dict(tensors)
        direct = DirectModel(encoder, weights, float(about["intercept"]), *map(float, about["range"]))
        theta = {str(name): float(theta) for name, theta in about["theta"].items()}
        return OffPolicyModel(theta, direct, read_actions(about, folder))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise DataError(f"{what} cannot be read ({error})", where=folder, hint=hint) from error


def fit_off_policy_model(
    log: Log, *, label: str, examination: Examination, segments: Sequence[str] = (), seed: int = 0
) -> OffPolicyModel:
    """Fit the model of feedback to the requests of a log, of which `examination` is an estimate."""
    theta, actions = examination.by_position(), examination.actions
    direct = fit_direct(corrected(log, trust_of(actions, theta)), theta=theta, label=label, seed=seed)
    return OffPolicyModel({slot(position, segments): value for position, value in theta.items()}, direct, actions)


def request_metrics(
    log: Log,
    metrics: Sequence[str],
    *,
    user: User | None = None,
    label: str,
    model: OffPolicyModel | None = None,
    segments: Sequence[str] = (),
    device: torch.device | str = "cpu",
    keep: bool = False,
) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Return a function from scores [rows] to metrics [requests]; `keep` if it is called often.

    The `model` estimates metrics named `off-policy-*` from feedback. What does not depend on the scores is computed
    here, once.
    """
    plain = [name for name in metrics if not name.startswith(OFF_POLICY)]
    of_labels = ScoreMetrics(log, plain, user=user, label=label, device=device, keep=keep) if plain else None
    off_policy: dict[str, OffPolicy | Likelihood] = {}
    for name in metrics:
        if name.startswith(OFF_POLICY):
            if model is None:
                what = f"'{name}' needs an estimate of examination, which this run has not saved"
                raise DataError(what, hint=f"train again with training.select={name}")
            off_policy[name] = model.estimator(log, name, label=label, segments=segments, device=device)

    def evaluate(scores: np.ndarray) -> dict[str, np.ndarray]:
        results = {} if of_labels is None else of_labels(scores)
        results |= {name: estimator.per_request(scores) for name, estimator in off_policy.items()}
        return {name: check_finite(results)[name] for name in metrics}

    return evaluate


def check_finite(results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return metric -> values [requests]; raise DataError if a value is not finite."""
    for name, values in results.items():
        if not np.isfinite(values).all():
            got = f"infinite or missing values in {int((~np.isfinite(values)).sum()):,} of {len(values):,} requests"
            raise DataError(f"'{name}' must be finite", got=got, hint="scale the label or the true labels down")
    return results
