"""Audit the position bias of a log: several estimates of examination, their agreement, and a verdict on the log.

Examination θ, or propensity, is the probability that a user looks at a position. The verdict says whether the log
determines it well enough to correct the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from ultr.bias import estimators
from ultr.bias.counts import Impressions, counted, impressions, replicates
from ultr.bias.estimators import SCALE, SMALLEST, largest_one, pools
from ultr.bias.evidence import best_source, evidence, items_comparable
from ultr.bias.identification import INTERVALS, Agreement, Estimate, Verdict, agreement, estimate, links, verdict
from ultr.bias.likelihood import TUNED, HeldOut
from ultr.bias.logging_policy import logging_score, strata_of
from ultr.bias.pitfalls import Pitfall, find_pitfalls, suspicious_requests
from ultr.errors import DataError
from ultr.log import Log
from ultr.log.labels import Label
from ultr.rankers import FeatureEncoder
from ultr.utils.arguments import Seed, Within, checked
from ultr.utils.html import facts_html, table_html

MAX_FEATURES = 1_000  # most features in the regression of relevance; its work grows with their square
BUCKETS = 20  # groups of rows with similar predicted relevance, in which the regression is validated
MAX_SEGMENTS = 10  # the segments with the most requests are audited separately
MAX_REPLICATES = 10_000  # of the bootstrap
CLEAR_GAIN = 1e-3  # features explain clicks if they raise the held-out log-likelihood by this share of it


@dataclass(frozen=True, eq=False)
class BiasReport:
    """The result of an audit: estimates of examination by position, a verdict, and problems of the log."""

    label: str
    requests: int
    positions: np.ndarray
    impressions: np.ndarray
    clicks: np.ndarray  # number of rows with positive feedback at each position
    rate: np.ndarray  # share of the impressions at each position with positive feedback
    reference: int  # the position that θ is relative to: θ is 1 there
    estimates: Mapping[str, Estimate]
    agreements: list[Agreement]
    verdict: Verdict
    pitfalls: list[Pitfall]
    links: Mapping[str, Any] | None = None  # groups of positions that shared items link (`identification.links`)
    explained: float | None = None  # share of the logged order that features explain
    sampled_requests: int = 0  # number of requests that estimates from features use
    left_out: int = 0  # number of suspicious requests that no estimate uses
    notes: tuple[str, ...] = ()
    segments: Mapping[str, BiasReport] = field(default_factory=dict)

    @property
    def anchor(self) -> Estimate | None:
        """The estimate that the verdict recommends, or None."""
        return None if self.verdict.anchor is None else self.estimates[self.verdict.anchor]

    def propensities(self) -> dict[int, float]:
        """Return examination by position, at most 0.7; {} if no estimate is recommended.

        Positions with few clicks or imprecise estimates share one with their neighbours (`estimators.pools`). It is
        Σn / Σ(n/θ), where n is the precision of log θ, but at most the number of clicks. Where θ is unknown, it is
        interpolated.
        """
        if self.anchor is None or not (estimated := np.isfinite(self.anchor.theta)).any():
            return {}
        theta, clicks = self.anchor.theta.copy(), np.full(len(self.positions), np.inf)
        if self.verdict.anchor != "known":
            precision = self.anchor.precision if np.isfinite(self.anchor.low).any() else self.clicks
            n = np.minimum(precision, np.maximum(self.clicks, 1))[estimated]
            pool = pools(n, self.positions[estimated])
            theta[estimated] = (np.bincount(pool, n) / np.bincount(pool, n / theta[estimated]))[pool]
            clicks[estimated] = np.bincount(pool, n)[pool]
        scaled = np.maximum(SCALE * largest_one(theta, clicks), SMALLEST)
        return {int(k): float(v) for k, v in zip(self.positions, scaled, strict=True)}

    def _repr_html_(self) -> str:
        names = list(self.estimates)
        rows = []
        for i, position in enumerate(self.positions.tolist()):
            cells = [self.estimates[name].text(i) for name in names]
            rows.append([str(position), f"{self.impressions[i]:,.0f}", f"{self.rate[i]:.2%}", *cells])
        table = table_html(["position", "shown", "rate", *names], rows, f"θ relative to position {self.reference}")
        facts = {"verdict": f"{self.verdict.status}: {self.verdict.advice}", "requests": f"{self.requests:,}"}
        warnings = [f"{p.name}: {p.what}; {p.hint}" for p in self.pitfalls]
        return facts_html("Position bias", facts, [*self.verdict.reasons, *warnings]) + table

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dictionary for bias.json, where `ultr train --bias` reads `positions` and `theta`."""
        theta = self.propensities()
        return {
            "label": self.label,
            "requests": self.requests,
            "positions": self.positions.tolist(),
            "theta": [theta.get(position) for position in self.positions.tolist()],
            "impressions": self.impressions.tolist(),
            "rate": self.rate.tolist(),
            "reference": self.reference,
            "estimates": {name: _estimate_json(result) for name, result in self.estimates.items()},
            "intervals": INTERVALS,
            "left_out": self.left_out,
            "agreements": [asdict(test) for test in self.agreements],
            "links": self.links,
            "order_explained_by_features": self.explained,
            "sampled_requests": self.sampled_requests,
            "verdict": {**asdict(self.verdict), "advice": self.verdict.advice},
            "pitfalls": [asdict(pitfall) for pitfall in self.pitfalls],
            "notes": list(self.notes),
            "segments": {name: report.to_json() for name, report in self.segments.items()},
        }


def _estimate_json(result: Estimate) -> dict[str, Any]:
    def plain(values: np.ndarray) -> list[float | None]:
        return [float(v) if np.isfinite(v) else None for v in values]

    return {
        "theta": plain(result.theta),
        "low": plain(result.low),
        "high": plain(result.high),
        "held_out_log_likelihood": None if result.held_out is None else plain(np.array([result.held_out]))[0],
    }


@dataclass(frozen=True)
class _Options:
    label: str
    bootstrap: int
    seed: int
    keep_suspicious: bool


@checked
def audit(
    log: Log,
    *,
    label: str = "click",
    sample: Log | None = None,
    known: Mapping[Any, float] | None = None,
    bootstrap: Annotated[int, Within(0, MAX_REPLICATES)] = 100,
    seed: Seed = 0,
    keep_suspicious: bool = False,
) -> BiasReport:
    """Estimate examination by position with every estimator that the log allows, and return the results and a verdict.

    A row counts as clicked if its `label` is above 0. `sample` is a subset of the log's requests with features, for a
    `log` without them. Keys of `known`, the known propensities, are positions such as 3, or `3@phone` in a segment.
    `bootstrap` is the number of replicates for intervals. Suspicious requests, such as those of bots, are left out of
    the estimates (`pitfalls.suspicious_requests`), unless `keep_suspicious` keeps them.
    """
    if sample is None and log.feature_names:
        sample = log
    known = {str(slot): theta for slot, theta in (known or {}).items()}
    log = log.without_features()
    pitfalls = find_pitfalls(log, _clicked(log, label), sample=sample)
    options, left_out = _Options(label, bootstrap, seed, keep_suspicious), 0
    if not keep_suspicious:
        log, sample, left_out = without_suspicious(log, sample, label)
    labels = _clicked(log, label)
    report = _audit(log, labels, sample, known, options)
    if "segment" in log.context:
        report = replace(report, segments=_by_segment(log, labels, sample, known, options))
    note = f"The estimates leave out {left_out:,} suspicious requests (--keep-suspicious keeps them)."
    notes = (note, *report.notes) if left_out else report.notes
    return replace(report, pitfalls=pitfalls, left_out=left_out, notes=notes)


def _clicked(log: Log, label: str) -> np.ndarray:
    return np.asarray(Label(label)(log.actions)) > 0


def without_suspicious(log: Log, sample: Log | None, label: str) -> tuple[Log, Log | None, int]:
    """Return a log and a sample of its requests, both without suspicious requests, and the number of these."""
    suspicious = suspicious_requests(log, _clicked(log, label))
    if not suspicious.any():
        return log, sample, 0
    if sample is not None:
        out = pc.is_in(sample.request_ids, value_set=log.request_ids.filter(pa.array(suspicious)))
        sample = sample.select(~out.to_numpy(zero_copy_only=False))
    return log.select(~suspicious), sample if sample is not None and len(sample) else None, int(suspicious.sum())


def _by_segment(
    log: Log, clicked: np.ndarray, sample: Log | None, known: Mapping[str, float], options: _Options
) -> dict[str, BiasReport]:
    """Audit each of the largest segments (values of the column `segment`); return the reports by segment."""
    names, segment_of = _segment_names(log)
    counts = pc.value_counts(names).to_pylist()
    largest = sorted(counts, key=lambda count: -count["counts"])[:MAX_SEGMENTS]
    reports = {}
    for count in largest:
        name = count["values"]
        requests = segment_of == name
        rows = np.repeat(requests, log.lengths)
        if not clicked[rows].any():
            continue
        part = None if sample is None else sample.select(_segment_names(sample)[1] == name)
        part = part if part is not None and len(part) else None
        known_here = {slot.removesuffix(f"@{name}"): theta for slot, theta in known.items()}
        reports[str(name)] = _audit(log.select(requests), clicked[rows], part, known_here, options)
    return reports


def _segment_names(log: Log) -> tuple[pa.Array, np.ndarray]:
    names = pc.fill_null(log.context["segment"].cast(pa.string()), "")
    return names, names.to_numpy(zero_copy_only=False)


def _audit(
    log: Log, clicked: np.ndarray, sample: Log | None, known: Mapping[str, float], options: _Options
) -> BiasReport:
    if not clicked.any():
        what = f"the log has no positive feedback: the label '{options.label}' is never above 0"
        raise DataError(what, hint="choose another label with --label")
    seen = impressions(log, clicked, seed=options.seed)
    width, groups = len(seen.positions), int(seen.group.max()) + 1
    shown = np.bincount(seen.place, seen.row_weights(), width)
    rate = np.bincount(seen.place, seen.row_weights() * clicked, width) / shown
    reference = int((rate * shown).argmax())
    weights = replicates(groups, options.bootstrap, seed=options.seed)
    estimates: dict[str, Estimate] = {}
    notes: list[str] = []
    values = np.array([known.get(str(k), np.nan) for k in seen.positions.tolist()])
    if np.isfinite(values).any():
        estimates["known"] = estimate("known", np.tile(values, (options.bootstrap + 1, 1)), reference)
    no_links = "no clicked item was shown at more than one position"  # the reason, if items give no estimate
    if seen.items is None:
        no_links = "the log has no item ids"
    elif not items_comparable(log, sample):
        no_links = "items were not compared across positions"
        notes.append(
            "Items are not compared across positions: most items that occur again have other features each time, so "
            "their relevance may differ too. To compare them, add a column `query`, or a new item id for each context."
        )
        seen = replace(seen, items=None)
    best, graph = _count_estimates(seen, weights, reference, estimates, notes, options.seed)
    explained, explain_clicks = None, False
    if sample is not None:
        explained, explain_clicks = _feature_estimates(seen, sample, reference, estimates, notes, options)
    pairs = [(a, b) for i, a in enumerate(estimates.values()) for b in list(estimates.values())[i + 1 :]]
    agreements = [test for a, b in pairs if (test := agreement(a, b, seen.positions)) is not None]
    return BiasReport(
        label=options.label,
        requests=len(log),
        positions=seen.positions,
        impressions=shown,
        clicks=np.bincount(seen.place[clicked], minlength=width),
        rate=rate,
        reference=int(seen.positions[reference]),
        estimates=estimates,
        agreements=agreements,
        verdict=verdict(
            estimates,
            agreements,
            best=best,
            impressions=shown,
            requests=float(len(log) if log.weights is None else log.weights.sum()),
            rate=rate,
            explained=explained,
            features_explain_clicks=explain_clicks,
            no_links=no_links,
            suspicious=int(suspicious_requests(log, clicked).sum()) if options.keep_suspicious else 0,
        ),
        pitfalls=[],
        links=graph,
        explained=explained,
        sampled_requests=0 if sample is None else len(sample),
        notes=tuple(notes),
    )


def _count_estimates(
    seen: Impressions,
    weights: np.ndarray,
    reference: int,
    estimates: dict[str, Estimate],
    notes: list[str],
    seed: int,
) -> tuple[str | None, Mapping[str, Any] | None]:
    """Add estimates from requests in random order and from items shown at several positions to `estimates`.

    Return the name of the best of them, or None, and the groups of positions that such items link
    (`identification.links`), or None if there are no such items.
    """
    training = _training_groups(weights)
    fitted: dict[str, np.ndarray] = {name: result.theta for name, result in estimates.items()}
    sources = evidence(seen, seed=seed)
    graph = None
    if (counts := sources.get("randomised")) is not None:
        estimates["randomised"] = estimate("randomised", estimators.position_based(counts, weights), reference)
        fitted["randomised"] = estimators.position_based(counts, training)[0]
    if (counts := sources.get("items")) is not None:
        if counts.share < 1:
            used = f"a random {counts.share:.1%} of the items that were clicked and shown at several positions"
            notes.append(f"The estimators harvest and items use {used}.")
        estimates["harvest"] = estimate("harvest", estimators.harvest(counts, weights, seed=seed), reference)
        estimates["items"] = estimate("items", estimators.position_based(counts, weights), reference)
        fitted["harvest"] = estimators.harvest(counts, training, seed=seed)[0]
        fitted["items"] = estimators.position_based(counts, training)[0]
        graph = links(estimators.pair_clicks(counts, weights[:, 0], seed=seed), seen.positions)
    if seen.items is not None and fitted:
        held_out = HeldOut(seen, seen.items, seed=seed)
        common = np.isfinite(list(fitted.values())).all(0)  # likelihoods are comparable only at the same positions
        for name, theta in fitted.items():
            estimates[name] = replace(estimates[name], held_out=held_out.score(np.where(common, theta, np.nan)))
    best = best_source(sources, seen)
    return None if best is None else best.name, graph


def _training_groups(weights: np.ndarray) -> np.ndarray:
    """Return weights [groups, 1] of the groups of requests: 1 for those that fit an estimate, 0 for held-out groups."""
    return (np.arange(len(weights)) < TUNED * len(weights)).astype(float)[:, None]


def _feature_estimates(
    seen: Impressions,
    sample: Log,
    reference: int,
    estimates: dict[str, Estimate],
    notes: list[str],
    options: _Options,
) -> tuple[float, bool]:
    """Add estimates from features to `estimates`.

    Return the share of the logged order that features explain, and True if features explain clicks.
    """
    seed = options.seed
    clicked = _clicked(sample, options.label)
    sampled = impressions(sample, clicked, seed=seed)
    if not np.isin(sampled.positions, seen.positions).all():
        got = f"position {np.setdiff1d(sampled.positions, seen.positions)[0]}, which the log does not show"
        hint = "draw the sample from the requests of the log"
        raise DataError("the sample must be a subset of the log's requests", got=got, hint=hint)
    at = np.searchsorted(seen.positions, sampled.positions)
    logging = logging_score(sample, seed=seed)
    strata = strata_of(sample, logging.score, clicks=float(clicked.sum()))
    weights = replicates(int(sampled.group.max()) + 1, options.bootstrap, seed=seed + 1)
    training = _training_groups(weights)
    counts = counted(sampled, strata)
    _add(estimates, "strata", estimators.position_based(counts, weights), at, seen, reference)
    score = HeldOut(sampled, strata, seed=seed).score(estimators.position_based(counts, training)[0])
    estimates["strata"] = replace(estimates["strata"], held_out=score)
    numeric = [i for i in range(len(sample.feature_names)) if i not in sample.categories]
    if len(numeric) > MAX_FEATURES:
        notes.append(f"The estimator regression uses {MAX_FEATURES:,} of {len(numeric):,} features, chosen at random.")
        numeric = np.sort(np.random.default_rng(seed).choice(numeric, MAX_FEATURES, replace=False)).tolist()
    features = standardised(sample.features, numeric)
    _add(estimates, "regression", estimators.regression(sampled, features, weights), at, seen, reference)
    log_theta, logit = estimators.fitted_regression(sampled, features, training[:, 0])
    edges = np.quantile(logit, np.linspace(0, 1, BUCKETS + 1)[1:-1])
    bucketed = HeldOut(sampled, np.searchsorted(edges, logit), seed=seed).score(np.exp(log_theta))
    estimates["regression"] = replace(estimates["regression"], held_out=bucketed)
    flat = HeldOut(sampled, np.zeros(sample.rows, np.int64), seed=seed).score(np.exp(log_theta))
    return logging.explained, bool(bucketed > flat + CLEAR_GAIN * abs(flat))


def standardised(features: np.ndarray, numeric: list[int]) -> np.ndarray:
    """Return the numeric columns of features, scaled to mean 0 and standard deviation 1 as for rankers."""
    encoder = FeatureEncoder(features.shape[1], only=numeric)
    encoder.fit(features)
    return np.asarray(encoder(torch.from_numpy(np.array(features))).numpy())


def _add(
    estimates: dict[str, Estimate], name: str, theta: np.ndarray, at: np.ndarray, seen: Impressions, reference: int
) -> None:
    """Add θ [replicates, positions of the sample] to `estimates`; `at` is the index of each position in the log."""
    draws = np.full((len(theta), len(seen.positions)), np.nan)
    draws[:, at] = theta
    estimates[name] = estimate(name, draws, reference)
