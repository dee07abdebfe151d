"""The position bias of a log: estimators side by side, how well each is identified, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from ultr.arguments import Seed, Within, checked
from ultr.errors import DataError
from ultr.examination import LEAST, logging_score, strata_of
from ultr.labels import Label
from ultr.log import Log
from ultr.pitfalls import Pitfall, find_pitfalls
from ultr.propensity import estimators
from ultr.propensity.counts import Impressions, counted, counted_items, impressions, replicates
from ultr.propensity.identification import Agreement, Estimate, Verdict, agreement, estimate, links, verdict
from ultr.propensity.likelihood import TUNED, HeldOut
from ultr.rankers import FeatureEncoder

FORMAT = 1
SCALE = 0.7  # of the largest propensity that is written: clicks tell ratios alone
MOST_FEATURES = 1_000  # that relevance is regressed on: work grows with their square
BUCKETS = 20  # of the regression's relevance, where its likelihood is compared
SAME_FEATURES = 0.5  # of the rows of an item that recurs, for its relevance to be its own
SEGMENTS = 10
MOST_REPLICATES = 10_000
CLEAR_GAIN = 1e-3  # of held-out likelihood, by features


@dataclass(frozen=True, eq=False)
class BiasReport:
    """What a log tells of examination."""

    label: str
    requests: int
    positions: np.ndarray
    impressions: np.ndarray
    rate: np.ndarray  # share of impressions with positive feedback
    reference: int  # the position that θ is relative to
    estimates: Mapping[str, Estimate]
    agreements: list[Agreement]
    verdict: Verdict
    pitfalls: list[Pitfall]
    links: Mapping[str, Any] | None = None  # between positions, through items
    explained: float | None = None  # share of the order that features explain
    sampled_requests: int = 0  # that estimates from features rest on
    notes: tuple[str, ...] = ()
    segments: Mapping[str, BiasReport] = field(default_factory=dict)

    @property
    def anchor(self) -> Estimate | None:
        """The estimate to go by."""
        return None if self.verdict.anchor is None else self.estimates[self.verdict.anchor]

    def propensities(self) -> dict[int, float]:
        """θ by position with its largest value at 0.7, as `--propensities` takes it; where it is not told, that of the
        positions around.
        """
        if self.anchor is None:
            return {}
        theta = self.anchor.theta
        told = np.isfinite(theta)
        if not told.any():
            return {}
        filled = np.exp(np.interp(np.arange(len(theta)), np.flatnonzero(told), np.log(theta[told])))
        scaled = np.clip(SCALE * filled / filled.max(), LEAST, SCALE)
        return {int(k): float(v) for k, v in zip(self.positions, scaled, strict=True)}

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "requests": self.requests,
            "positions": self.positions.tolist(),
            "impressions": self.impressions.tolist(),
            "rate": self.rate.tolist(),
            "reference": self.reference,
            "estimates": {name: _estimate_json(found) for name, found in self.estimates.items()},
            "agreements": [asdict(found) for found in self.agreements],
            "links": self.links,
            "order_explained_by_features": self.explained,
            "sampled_requests": self.sampled_requests,
            "verdict": {**asdict(self.verdict), "advice": self.verdict.advice},
            "pitfalls": [asdict(found) for found in self.pitfalls],
            "notes": list(self.notes),
            "segments": {name: report.to_json() for name, report in self.segments.items()},
        }


def _estimate_json(found: Estimate) -> dict[str, Any]:
    def plain(values: np.ndarray) -> list[float | None]:
        return [float(v) if np.isfinite(v) else None for v in values]

    return {
        "theta": plain(found.theta),
        "low": plain(found.low),
        "high": plain(found.high),
        "held_out_log_likelihood": None if found.held_out is None else plain(np.array([found.held_out]))[0],
    }


@dataclass(frozen=True)
class _Asked:
    label: str
    bootstrap: int
    seed: int


@checked
def audit(
    log: Log,
    *,
    label: str = "click",
    sample: Log | None = None,
    known: Mapping[Any, float] | None = None,
    bootstrap: Annotated[int, Within(0, MOST_REPLICATES)] = 100,
    seed: Seed = 0,
) -> BiasReport:
    """Estimate examination by position in every way that the log allows, and judge what came of it.

    Estimates from features rest on `sample`, some of the log's requests, where features of all are not at hand.
    `known` propensities are by position, or by `position@segment`.
    """
    if sample is None and log.feature_names:
        sample = log
    known = {str(slot): theta for slot, theta in (known or {}).items()}
    log = log.without_features()
    labels = np.asarray(Label(label)(log.actions)) > 0
    pitfalls = find_pitfalls(log, labels, sample=sample)
    asked = _Asked(label, bootstrap, seed)
    report = _audit(log, labels, sample, known, asked)
    if "segment" in log.context:
        report = replace(report, segments=_by_segment(log, labels, sample, known, asked))
    return replace(report, pitfalls=pitfalls)


def _by_segment(
    log: Log, clicked: np.ndarray, sample: Log | None, known: Mapping[str, float], asked: _Asked
) -> dict[str, BiasReport]:
    """The same for the segments with most requests."""
    names, marks = _names(log)
    counts = pc.value_counts(names).to_pylist()
    largest = sorted(counts, key=lambda count: -count["counts"])[:SEGMENTS]
    found = {}
    for count in largest:
        name = count["values"]
        part = marks == name
        rows = np.repeat(part, log.lengths)
        if not clicked[rows].any():
            continue
        own = None if sample is None else sample.select(_names(sample)[1] == name)
        own = own if own is not None and len(own) else None
        its = {slot.removesuffix(f"@{name}"): theta for slot, theta in known.items()}
        found[str(name)] = _audit(log.select(part), clicked[rows], own, its, asked)
    return found


def _names(log: Log) -> tuple[pa.Array, np.ndarray]:
    names = pc.fill_null(log.context["segment"].cast(pa.string()), "")
    return names, names.to_numpy(zero_copy_only=False)


def _audit(log: Log, clicked: np.ndarray, sample: Log | None, known: Mapping[str, float], asked: _Asked) -> BiasReport:
    if not clicked.any():
        raise DataError("there is no positive feedback in the log", got=f"label '{asked.label}'", mend="check --label")
    seen = impressions(log, clicked, seed=asked.seed)
    width, groups = len(seen.positions), int(seen.group.max()) + 1
    shown = np.bincount(seen.place, seen.row_weights(), width)
    rate = np.bincount(seen.place, seen.row_weights() * clicked, width) / shown
    reference = int((rate * shown).argmax())
    weights = replicates(groups, asked.bootstrap, seed=asked.seed)
    estimates: dict[str, Estimate] = {}
    notes: list[str] = []
    values = np.array([known.get(str(k), np.nan) for k in seen.positions.tolist()])
    if np.isfinite(values).any():
        estimates["known"] = estimate("known", np.tile(values, (asked.bootstrap + 1, 1)), reference)
    graph = _count_estimates(seen, sample, weights, reference, estimates, notes, asked.seed)
    explained, tells = None, False
    if sample is not None:
        explained, tells = _feature_estimates(seen, sample, reference, estimates, notes, asked)
    pairs = [(a, b) for i, a in enumerate(estimates.values()) for b in list(estimates.values())[i + 1 :]]
    agreements = [found for a, b in pairs if (found := agreement(a, b, seen.positions)) is not None]
    return BiasReport(
        label=asked.label,
        requests=len(log),
        positions=seen.positions,
        impressions=shown,
        rate=rate,
        reference=int(seen.positions[reference]),
        estimates=estimates,
        agreements=agreements,
        verdict=verdict(
            estimates,
            agreements,
            impressions=shown,
            requests=float(len(log) if log.weights is None else log.weights.sum()),
            rate=rate,
            explained=explained,
            features_tell=tells,
        ),
        pitfalls=[],
        links=graph,
        explained=explained,
        sampled_requests=0 if sample is None else len(sample),
        notes=tuple(notes),
    )


def _count_estimates(
    seen: Impressions,
    sample: Log | None,
    weights: np.ndarray,
    reference: int,
    estimates: dict[str, Estimate],
    notes: list[str],
    seed: int,
) -> Mapping[str, Any] | None:
    """Add what interventions tell: random order, and items at several positions; gives the links between positions."""
    early = (np.arange(len(weights)) < TUNED * len(weights)).astype(float)[:, None]  # the requests that others judge
    fitted: dict[str, np.ndarray] = {name: found.theta for name, found in estimates.items()}
    if seen.randomised is not None and seen.clicked[rows := seen.of_rows(seen.randomised)].any():
        estimates["randomised"] = estimate("randomised", estimators.rates(seen, rows, weights), reference)
        fitted["randomised"] = estimators.rates(seen, rows, early)[0]
    if sample is not None and "query" not in sample.context and _features_change(sample):
        notes.append(
            "items recur with other features, so that their relevance is not theirs alone: they are not compared "
            "across positions (a column `query`, or an item id for each context, would allow it)"
        )
        seen = replace(seen, items=None)
    counts = counted_items(seen, seed=seed)
    graph = None
    if counts is not None:
        if counts.share < 1:
            notes.append(f"items: {counts.share:.1%} of those that were clicked and shown at several positions")
        estimates["harvest"] = estimate("harvest", estimators.harvest(counts, weights, seed=seed), reference)
        estimates["items"] = estimate("items", estimators.position_based(counts, weights), reference)
        fitted["harvest"] = estimators.harvest(counts, early, seed=seed)[0]
        fitted["items"] = estimators.position_based(counts, early)[0]
        graph = links(estimators.pair_clicks(counts, weights[:, 0], seed=seed), seen.positions)
    if seen.items is not None and fitted:
        judge = HeldOut(seen, seen.items, seed=seed)
        common = np.isfinite(list(fitted.values())).all(0)  # positions where all can be judged alike
        for name, theta in fitted.items():
            estimates[name] = replace(estimates[name], held_out=judge.score(np.where(common, theta, np.nan)))
    return graph


def _features_change(sample: Log) -> bool:
    """Whether items that recur mostly have other features each time."""
    if sample.item_ids is None or not sample.feature_names:
        return False
    codes = sample.item_ids.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")[:200_000]
    again = np.flatnonzero(codes[order][1:] == codes[order][:-1])
    if not len(again):
        return False
    alike = (sample.features[order[again]] == sample.features[order[again + 1]]).all(1)
    return bool(alike.mean() < SAME_FEATURES)


def _feature_estimates(
    seen: Impressions,
    sample: Log,
    reference: int,
    estimates: dict[str, Estimate],
    notes: list[str],
    asked: _Asked,
) -> tuple[float, bool]:
    """Add what features tell; gives the share of the order they explain, and whether they explain clicks."""
    seed = asked.seed
    clicked = np.asarray(Label(asked.label)(sample.actions)) > 0
    own = impressions(sample, clicked, seed=seed)
    if not np.isin(own.positions, seen.positions).all():
        got = f"position {np.setdiff1d(own.positions, seen.positions)[0]}"
        raise DataError("the sample should be some of the log's requests", got=got, mend="take it from the log")
    at = np.searchsorted(seen.positions, own.positions)
    categories = {sample.feature_names.index(n): len(values) + 1 for n, values in sample.vocabularies.items()}
    found = logging_score(sample, seed=seed, categories=categories)
    strata = strata_of(sample, found.score, clicks=float(clicked.sum())).numpy()
    weights = replicates(int(own.group.max()) + 1, asked.bootstrap, seed=seed + 1)
    early = (np.arange(len(weights)) < TUNED * len(weights)).astype(float)[:, None]
    counts = counted(own, strata)
    _add(estimates, "strata", estimators.position_based(counts, weights), at, seen, reference)
    judge = HeldOut(own, strata, seed=seed)
    score = judge.score(estimators.position_based(counts, early)[0])
    estimates["strata"] = replace(estimates["strata"], held_out=score)
    numeric = [i for i in range(len(sample.feature_names)) if i not in categories]
    if len(numeric) > MOST_FEATURES:
        notes.append(f"regression: on {MOST_FEATURES:,} of {len(numeric):,} features, drawn at random")
        numeric = np.sort(np.random.default_rng(seed).choice(numeric, MOST_FEATURES, replace=False)).tolist()
    features = standardised(sample.features, numeric)
    theta, _ = estimators.regression(own, features, weights)
    _add(estimates, "regression", theta, at, seen, reference)
    log_theta, logit = estimators.fitted_regression(own, features, early[:, 0])  # which has not seen what judges it
    edges = np.quantile(logit, np.linspace(0, 1, BUCKETS + 1)[1:-1])
    bucketed = HeldOut(own, np.searchsorted(edges, logit), seed=seed).score(np.exp(log_theta))
    estimates["regression"] = replace(estimates["regression"], held_out=bucketed)
    flat = HeldOut(own, np.zeros(sample.rows, np.int64), seed=seed).score(np.exp(log_theta))
    return found.explained, bool(bucketed > flat + CLEAR_GAIN * abs(flat))


def standardised(features: np.ndarray, numeric: list[int]) -> np.ndarray:
    """Some columns with mean 0 and deviation 1, as rankers take them."""
    encoder = FeatureEncoder(features.shape[1], only=numeric)
    encoder.fit(features)
    return np.asarray(encoder(torch.from_numpy(np.array(features))).numpy())


def _add(
    estimates: dict[str, Estimate],
    name: str,
    theta: np.ndarray,
    at: np.ndarray,
    seen: Impressions,
    reference: int,
) -> None:
    """An estimate from a sample, whose positions are some of the log's."""
    draws = np.full((len(theta), len(seen.positions)), np.nan)
    draws[:, at] = theta
    estimates[name] = estimate(name, draws, reference)
