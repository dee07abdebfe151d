"""Audit the position bias of a log: several estimates of examination, their agreement, and a verdict on the log.

Examination θ, or propensity, is the probability that a user looks at a position. The verdict says whether the log
determines it well enough to correct the bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from ultr.bias import estimators
from ultr.bias.after_click import AfterClick, estimate_after_click
from ultr.bias.counts import (
    Counts,
    LogCounts,
    clicked_rows,
    counted,
    impressions,
    log_counts,
    queries_recur,
    replicates,
)
from ultr.bias.estimators import (
    SCALE,
    SMALLEST,
    best_source,
    drawn,
    fit_conditional,
    items_comparable,
    largest_one,
    pools,
    relative_variance,
)
from ultr.bias.examination import Examination, estimate_examination
from ultr.bias.identification import (
    EVIDENCE,
    INTERVALS,
    NO_ITEM_IDS,
    NORMAL,
    NOT,
    PRECISE,
    SHARED,
    STATUSES,
    TUNED,
    Agreement,
    Estimate,
    HeldOut,
    Refutation,
    Verdict,
    agreement,
    estimate,
    links,
    verdict,
)
from ultr.bias.logging_policy import recovered_score, strata_of
from ultr.bias.refutation import Evidence, refutations
from ultr.bias.sharing import MOST_SLOTS, Slots, share_strength, slots_of
from ultr.checks.pitfalls import Pitfall, find_pitfalls, suspicious_requests
from ultr.errors import DataError
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.splits import codes
from ultr.log.table import SEPARATOR, SHIFT, as_shown, by_segment, named_places, slot
from ultr.rankers import FeatureEncoder
from ultr.utils.arguments import Seed, Within, checked
from ultr.utils.display import facts_html, table_html
from ultr.utils.jsonfiles import finite

if TYPE_CHECKING:
    from ultr.bias.click_models import QualityReport

# --- Result -----------------------------------------------------------------------------------------------------------
# The result of an audit: estimates of examination, a verdict, and a summary of both in a few sentences.

NAMED_POSITIONS = (1, 2, 3, 5, 10, 20, 50)  # the positions, by their order in the list, whose θ a summary has


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
    pool: np.ndarray = field(default_factory=lambda: np.arange(0))  # of each position; those of a pool share one θ
    notes: tuple[str, ...] = ()
    segments: Mapping[str, BiasReport] = field(default_factory=dict)
    refutations: tuple[Refutation, ...] = ()  # tests of the assumption of estimates from items (`bias.refutation`)
    actions: Mapping[str, AfterClick] = field(default_factory=dict)  # how actions after the click depend on position
    contexts: Mapping[str, Any] = field(default_factory=dict)  # column -> deviations, for segments of several columns

    @property
    def anchor(self) -> Estimate | None:
        """The estimate that the verdict recommends, or None."""
        return None if self.verdict.anchor is None else self.estimates[self.verdict.anchor]

    def propensities(self) -> dict[int, float]:
        """Return examination by position, at most 0.7; {} if no estimate is recommended.

        Where examination is unknown, it is interpolated.
        """
        if self.anchor is None or not np.isfinite(self.anchor.theta).any():
            return {}
        theta, clicks = self.anchor.theta, np.full(len(self.positions), np.inf)
        if self.verdict.anchor != "known":
            clicks = np.bincount(self.pool, self.clicks)[self.pool]
        scaled = np.maximum(SCALE * largest_one(theta, clicks), SMALLEST)
        return {int(k): float(v) for k, v in zip(self.positions, scaled, strict=True)}

    def _repr_html_(self) -> str:
        names = list(self.estimates)
        rows = []
        for i, position in enumerate(self.positions.tolist()):
            cells = [self.estimates[name].text(i) for name in names]
            rows.append([str(as_shown(position)), f"{self.impressions[i]:,.0f}", f"{self.rate[i]:.2%}", *cells])
        table = table_html(
            ["position", "shown", "rate", *names], rows, f"θ relative to position {as_shown(self.reference)}"
        )
        facts = {"verdict": f"{self.verdict.status}: {self.verdict.advice}", "requests": f"{self.requests:,}"}
        facts |= {"assumption": self.verdict.assumption} if self.verdict.assumption else {}
        warnings = [f"{p.name}: {p.what}; {p.hint}" for p in self.pitfalls]
        return facts_html("Position bias", facts, [*self.verdict.reasons, *warnings]) + table

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dictionary for bias.json, where `ultr train --bias` reads `positions` and `theta`."""
        theta = self.propensities()
        return {
            "label": self.label,
            "summary": summary(self),
            "requests": self.requests,
            "positions": [*map(as_shown, self.positions.tolist())],
            "theta": [theta.get(position) for position in self.positions.tolist()],
            "impressions": self.impressions.tolist(),
            "rate": self.rate.tolist(),
            "reference": as_shown(self.reference),
            "pools": self.pool.tolist(),
            "estimates": {name: _estimate_json(result) for name, result in self.estimates.items()},
            "intervals": INTERVALS,
            "left_out": self.left_out,
            "agreements": [asdict(test) for test in self.agreements],
            "refutations": [asdict(test) for test in self.refutations],
            "actions": {name: each.to_json() for name, each in self.actions.items()},
            "links": self.links,
            "order_explained_by_features": self.explained,
            "sampled_requests": self.sampled_requests,
            "verdict": {**asdict(self.verdict), "advice": self.verdict.advice},
            "pitfalls": [asdict(pitfall) for pitfall in self.pitfalls],
            "notes": list(self.notes),
            "segments": {name: report.to_json() for name, report in self.segments.items()},
            **({"contexts": self.contexts} if self.contexts else {}),
        }


def _estimate_json(result: Estimate) -> dict[str, Any]:
    curves = {"theta": result.theta.tolist(), "low": result.low.tolist(), "high": result.high.tolist()}
    return dict(finite({**curves, "held_out_log_likelihood": result.held_out}))


def summary(report: BiasReport) -> dict[str, str]:
    """Return sentences by name: how biased, verdict, assumption and its tests (if any), positions, next step."""
    verdict = report.verdict
    reasons = " ".join(verdict.reasons)
    sentences = {"how biased": _how_biased(report), "verdict": f"{verdict.status} - {verdict.advice}. {reasons}"}
    if verdict.assumption:
        sentences["assumption"] = verdict.assumption
    if report.refutations:
        sentences["tests"] = _tests(report)
    if report.actions:
        sentences["after the click"] = "; ".join(each.sentence(name) for name, each in report.actions.items())
    return {**sentences, "positions": _positions(report), "next step": _next_step(report)}


def _tests(report: BiasReport) -> str:
    """Return which tests of the assumption about items failed."""
    failed = [each.name for each in report.refutations if not each.passed]
    passed = [each.name for each in report.refutations if each.passed]
    parts = [f"{what}: {', '.join(names)}" for what, names in (("failed", failed), ("passed", passed)) if names]
    of_items = "" if report.verdict.assumption else " (of estimates from items, which are not used)"
    return "; ".join(parts) + of_items


def _next_step(report: BiasReport) -> str:
    """Return what would make the verdict surer, or those of the segments that are less sure than all requests together.

    A ranker uses the examination of each segment.
    """
    surest = STATUSES.index(report.verdict.status)
    weaker = {name: each for name, each in report.segments.items() if STATUSES.index(each.verdict.status) > surest}
    if not weaker:
        return report.verdict.next_step
    return "; ".join(f"for segment '{name}', {each.verdict.next_step}" for name, each in list(weaker.items())[:2])


@dataclass(frozen=True)
class Row:
    """Positions that share one estimate, as a row of a table; `at` is the index of the first of them."""

    positions: str
    at: int
    shown: float
    rate: float


def rows_of(report: BiasReport) -> list[Row]:
    """Return a row for each position, or for each group of positions that share one estimate."""
    shown = np.bincount(report.pool, report.impressions)
    rate = np.bincount(report.pool, report.impressions * report.rate) / shown
    first = np.unique(report.pool, return_index=True)[1]
    names = [ranges(report.positions[report.pool == i], report.positions) for i in range(len(first))]
    return [Row(*row) for row in zip(names, first.tolist(), shown.tolist(), rate.tolist(), strict=True)]


def times_as_often(ratios: Mapping[str, float]) -> str:
    """Return position -> ratio in words, such as `0.51 times as often at 2, 0.34 at 3`."""
    text = ", ".join(f"{ratio:.2f} at {position}" for position, ratio in ratios.items())
    return text.replace(" at", " times as often at", 1)


def _how_biased(report: BiasReport) -> str:
    places = named_places(report.positions.tolist(), NAMED_POSITIONS)
    anchor, reference = report.anchor, as_shown(report.reference)
    if anchor is None:
        at = {report.reference: report.rate.max()} | {int(report.positions[i]): report.rate[i] for i in places}
        rates = ", ".join(f"{rate:.1%} at {as_shown(position)}" for position, rate in at.items())
        return f"unknown: the feedback rate is {rates}, because of position, relevance or both"
    known = [i for i in places if np.isfinite(anchor.theta[i]) and report.positions[i] != report.reference]
    if not known:
        return "unknown: only one position has an estimate"
    times = times_as_often({str(as_shown(int(report.positions[i]))): float(anchor.theta[i]) for i in known})
    assumption = report.verdict.assumption
    if_right = f", if {assumption}" if report.verdict.status == NOT and assumption else ""
    ratios = f"compared with position {reference}, users look {times}{if_right}"
    return ratios if _is_clear(report, anchor) else f"no clear bias: sampling error may explain this ({ratios})"


def _is_clear(report: BiasReport, anchor: Estimate) -> bool:
    """Return whether an estimate differs from a flat curve by more than its sampling error, at a position or overall.

    Overall is the trend along the list. It finds a small bias at many positions, none of which is clear alone.
    """
    flat = replace(anchor, logs=np.where(np.isfinite(anchor.logs), 0.0, np.nan))
    test = agreement(anchor, flat, report.positions, shown=report.impressions, pool=report.pool)
    if test is None or not test.agree:
        return True
    shown, rank = np.where(np.isfinite(anchor.theta), report.impressions, 0), np.log1p(np.arange(len(anchor.theta)))
    trend = np.nan_to_num(anchor.logs) @ (shown * (rank - np.average(rank, weights=shown)))
    return len(trend) > 2 and bool(abs(trend[0]) > NORMAL * trend[1:].std(ddof=1))


def _positions(report: BiasReport) -> str:
    parts = []
    share = report.impressions / report.impressions.sum()
    if (anchor := report.anchor) is not None and report.verdict.status != NOT:
        precise = anchor.half_width <= PRECISE
        without = ~np.isfinite(anchor.theta)
        for mask, what in (
            (precise, f"known to within {PRECISE:.0%}"),
            (~precise & ~without, "known less exactly"),
            (without, "without an estimate"),
        ):
            if mask.any():
                some = ranges(report.positions[mask], report.positions)
                parts.append(f"{some} {what} ({share[mask].sum():.1%} of rows)")
    else:
        parts.append("none is identified")
    shared = [report.positions[report.pool == i] for i in np.flatnonzero(np.bincount(report.pool) > 1)]
    if shared:
        pooled = ", ".join(ranges(each, report.positions) for each in shared[-3:])
        more = f" and {len(shared) - 3} more groups" if len(shared) > 3 else ""
        parts.append(f"positions with few clicks share one estimate: {pooled}{more}")
    return "; ".join(parts)


def ranges(some: np.ndarray, positions: np.ndarray) -> str:
    """Return some of the positions in words, such as `1 to 8 and 11`; neighbours in `positions` form a range."""
    place = np.searchsorted(positions, some)
    starts = np.flatnonzero(np.diff(place, prepend=-2) > 1)
    ends = np.append(starts[1:], len(some)) - 1
    names = [as_shown(each) for each in some.tolist()]
    texts = [f"{names[a]} to {names[b]}" if b > a else f"{names[a]}" for a, b in zip(starts, ends, strict=True)]
    if len(texts) > 4:
        texts = [*texts[:3], f"{len(texts) - 3} more ranges"]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


# --- Audit ------------------------------------------------------------------------------------------------------------

MAX_FEATURES = 1_000  # most features in the regression of relevance; its work grows with their square
BUCKETS = 20  # groups of rows with similar predicted relevance, in which the regression is validated
MAX_SEGMENTS = 10  # the segments with the most requests are audited separately
MAX_REPLICATES = 10_000  # of the bootstrap
CLEAR_MODEL = 0.01  # a click model is better than the position-based one if its log-likelihood is by this share of it
CLEAR_GAIN = 1e-3  # features explain clicks if they raise the held-out log-likelihood by this share of it


@dataclass(frozen=True)
class AuditOptions:
    """The options of an audit; see `audit`."""

    label: str
    bootstrap: int
    seed: int
    described: Log | None = None  # rows with numbers that show whether items are the same, if there are no features
    segment: np.ndarray | None = None  # [requests] code of the segment of each request in memory
    known: Mapping[str, float] = field(default_factory=dict)  # propensities by position


@checked
def audit(
    log: Log,
    *,
    label: str = "click",
    sample: Log | None = None,
    known: Mapping[Any, float] | None = None,
    bootstrap: Annotated[int, Within(0, MAX_REPLICATES)] = 50,
    seed: Seed = 0,
    keep_suspicious: bool = False,
    described: Log | None = None,
) -> BiasReport:
    """Estimate examination by position with every estimator that the log allows, and return the results and a verdict.

    A row counts as clicked if its `label` is above 0. `sample` is a subset of the log's requests with features, for a
    `log` without them. Keys of `known`, the known propensities, are positions such as 3, or `3@phone` in a segment.
    `bootstrap` is the number of replicates for intervals. Suspicious requests, such as those of bots, are left out of
    the estimates (`pitfalls.suspicious_requests`), unless `keep_suspicious` keeps them. If there are no features, the
    numbers in `described` show whether an item is the same each time it is shown; they are used for nothing else.
    """
    if sample is None and log.feature_names:
        sample = log
    log = log.without_features()
    pitfalls = find_pitfalls(log, clicked_rows(log, label), sample=sample)
    propensities = {str(position): theta for position, theta in (known or {}).items()}
    options, left_out = AuditOptions(label, bootstrap, seed, described, known=propensities), 0
    if not keep_suspicious:
        log, sample, left_out = without_suspicious(log, sample, label)
    clicked = clicked_rows(log, label)
    if "segment" in log.context:
        options = replace(options, segment=codes(_segment_names(log)[0]))

    def count(part: Log, clicked: np.ndarray) -> LogCounts:
        counts = log_counts(impressions(part, clicked, seed=seed), seed=seed)
        return replace(counts, suspicious=int(suspicious_requests(part, clicked).sum())) if keep_suspicious else counts

    def segments() -> Iterator[tuple[str, LogCounts]]:
        names, segment_of = _segment_names(log)
        for each in largest_segments(pc.value_counts(names).to_pylist()):
            requests = segment_of == each
            yield each, count(log.select(requests), clicked[np.repeat(requests, log.lengths)])

    parts = segments() if "segment" in log.context else ()
    shared = _shared(log, sample, options)
    report = audit_counts(count(log, clicked), parts, options, sample, shared=shared)
    actions = estimate_after_click(log, Label(label), seed=seed, sample=described if sample is None else sample)
    contexts = {} if shared is None else shared.examination.contexts(log.columns.get("segment"))
    return with_pitfalls(replace(report, actions=actions, contexts=contexts), pitfalls, left_out)


def audit_counts(
    whole: LogCounts,
    segments: Iterable[tuple[str, LogCounts]],
    options: AuditOptions,
    sample: Log | None,
    *,
    shared: SharedEstimate | None = None,
) -> BiasReport:
    """Return the results and a verdict as `audit` does, from the counts of a log and of each of its segments.

    `shared` is the estimate of all segments together, if they share strength.
    """
    report, reports = _audit(whole, sample, options), {}
    for name, counts in segments:
        if not counts.clicks.any():
            continue
        part = None if sample is None else sample.select(_segment_names(sample)[1] == name)
        part = part if part is not None and len(part) else None
        known = {slot.removesuffix(f"@{name}"): theta for slot, theta in options.known.items()}
        own = None if shared is None else shared.of_segment(name, counts.positions)
        reports[name] = _audit(counts, part, replace(options, segment=None, known=known), own)
    return replace(report, segments=reports)


def with_pitfalls(report: BiasReport, pitfalls: list[Pitfall], left_out: int) -> BiasReport:
    """Return a report with the problems of the log, and a note on the suspicious requests that were left out."""
    note = f"The estimates leave out {left_out:,} suspicious requests (--keep-suspicious keeps them)."
    notes = (note, *report.notes) if left_out else report.notes
    return replace(report, pitfalls=pitfalls, left_out=left_out, notes=notes)


def with_click_models(report: BiasReport, quality: QualityReport | None) -> BiasReport:
    """Return a report whose verdict says if a click model without one curve predicts held-out clicks better.

    The gain in likelihood must be clear (`CLEAR_MODEL`): a model with more parameters may win by chance.
    """
    models = () if quality is None else quality.models
    likelihood = {each.model: each.log_likelihood for each in models if each.modelled == 1}
    if "pbm" not in likelihood:
        return report
    best = max(likelihood, key=likelihood.__getitem__)
    gain = likelihood[best] / likelihood["pbm"] - 1  # both are negative
    if -gain < CLEAR_MODEL:
        return report
    reason = (
        f"The click model {best} predicts held-out clicks better than the position-based model (by {-gain:.1%}): "
        "whether users look at a position also depends on their other clicks, and the curve is an average over these."
    )
    return replace(report, verdict=replace(report.verdict, reasons=(*report.verdict.reasons, reason)))


def largest_segments(counts: list[dict[str, Any]]) -> list[str]:
    """Return the names of the segments with the most requests, given `values` and `counts` of each."""
    return [str(each["values"]) for each in sorted(counts, key=lambda each: -each["counts"])[:MAX_SEGMENTS]]


def without_suspicious(log: Log, sample: Log | None, label: str) -> tuple[Log, Log | None, int]:
    """Return a log and a sample of its requests, both without suspicious requests, and the number of these."""
    suspicious = suspicious_requests(log, clicked_rows(log, label))
    if not suspicious.any():
        return log, sample, 0
    if sample is not None:
        sample = without_requests(sample, log.request_ids.filter(pa.array(suspicious)))
    return log.select(~suspicious), sample, int(suspicious.sum())


def without_requests(log: Log, ids: pa.Array) -> Log | None:
    """Return a log without the requests with these ids; None if none is left."""
    left = ~pc.is_in(log.request_ids, value_set=ids.cast(log.request_ids.type)).to_numpy(zero_copy_only=False)
    return log.select(left) if left.any() else None


def _segment_names(log: Log) -> tuple[pa.Array, np.ndarray]:
    names = pc.fill_null(log.context["segment"].cast(pa.string()), "")
    return names, names.to_numpy(zero_copy_only=False)


@dataclass(frozen=True, eq=False)
class SharedEstimate:
    """The estimate of examination in all segments together, which is that of training, and the names of segments."""

    names: tuple[str, ...]
    examination: Examination

    def of_segment(self, name: str, positions: np.ndarray) -> Examination | None:
        slots = [slot(position, self.names) for position in self.examination.positions]
        return self.examination.at(slots, {k: f"{k}@{name}" for k in positions.tolist()})


def _shared(log: Log, sample: Log | None, options: AuditOptions) -> SharedEstimate | None:
    """Estimate examination in segments of several columns, whose estimates share strength.

    Return None for other segments, and if neither the log nor features of the sample have any evidence. Features of all
    requests are used as in training; if only a sample has features, they are used if there is no other evidence.
    """
    if "segment" not in log.context or not all(
        SEPARATOR in name for name in pc.unique(_segment_names(log)[0]).to_pylist()
    ):
        return None
    described = options.described if sample is None else sample
    if sample is not None and len(sample) == len(log):
        log = sample
    elif not items_comparable(described, by_query=queries_recur(log)):
        log = replace(log, item_ids=None)
    if log.shown_positions("an audit").max() >> SHIFT:
        return None
    coded, names = by_segment(log)
    if len(np.unique(coded.shown_positions("an audit"))) > MOST_SLOTS:
        return None
    if not log.feature_names and best_source(log_counts(impressions(coded, clicked_rows(log, options.label)))) is None:
        if sample is None:
            return None
        coded = by_segment(sample, names)[0]
    examination = estimate_examination(coded, Label(options.label), segments=names, seed=options.seed)
    return SharedEstimate(names, examination) if examination.deviations else None


def _shared_draws(shared: Examination, reference: int, options: AuditOptions) -> Estimate:
    """Return an estimate with its error as that of an audit, relative to the position with the index `reference`."""
    covariance = np.zeros((len(shared.theta),) * 2) if shared.covariance is None else shared.covariance
    log_theta = np.log([shared.theta, *shared.draws(options.bootstrap, seed=options.seed)])
    logs = log_theta - log_theta[:, [reference]]
    width = NORMAL * np.sqrt(np.maximum(relative_variance(covariance, reference), 0))
    low, middle, high = np.exp([logs[0] - width, logs[0], logs[0] + width])
    return Estimate(SHARED, middle, low, high, logs)


def _audit(log: LogCounts, sample: Log | None, options: AuditOptions, shared: Examination | None = None) -> BiasReport:
    if not log.clicks.any():
        what = f"the log has no positive feedback: the label '{options.label}' is never above 0"
        raise DataError(what, hint="choose another label with --label")
    positions, shown, clicks, rate = log.positions, log.shown, log.clicks, log.rate
    notes: list[str] = []
    no_links = "no clicked item was shown at more than one position"  # the reason, if items give no estimate
    if not log.has_items:
        no_links = NO_ITEM_IDS
    elif not items_comparable(options.described if sample is None else sample, by_query=log.by_query):
        no_links = "items were not compared across positions, because most have other features each time they are shown"
        notes.append(
            "Items are not compared across positions: most items that occur again have other features each time, so "
            "their relevance may differ too. To compare them, add a column `query`, or a new item id for each context."
        )
        log = replace(log, sources={name: log.sources[name] for name in log.sources if name != "items"}, seen=None)
    best = best_source(log)
    slots, behind = slots_of(positions, ()), [] if best is None else [best.cells]
    if best is not None and best.others is not None and slots is not None:  # slots share strength, so pools are small
        behind.append(best.others)
    compared = [each.compared_clicks(log.weight / log.requests) for each in behind]
    pool = pools(np.sum(compared, axis=0) if compared else clicks, positions)
    view = _View(positions, pool, int((rate * shown).argmax()), {}, slots, shown)
    values = np.array([options.known.get(str(as_shown(k)), np.nan) for k in positions.tolist()])
    if np.isfinite(values).any():
        view.estimates["known"] = estimate("known", np.tile(values, (options.bootstrap + 1, 1)), view.reference)
    chosen = from_source = None if best is None else best.name
    if shared is not None:
        view.estimates[SHARED] = _shared_draws(shared, view.reference, options)
        chosen, from_source = (SHARED, shared.evidence) if shared.evidence in EVIDENCE else (None, None)
    weights = replicates(log.groups, options.bootstrap, seed=options.seed)
    pooled = {name: counts.pooled(pool).compared() for name, counts in log.sources.items()}
    sources = {name: counts for name, counts in pooled.items() if counts is not None}
    graph = _count_estimates(log, sources, weights, view, notes, options.seed)
    explained, explain_clicks = None, False
    if sample is not None:
        explained, explain_clicks = _feature_estimates(view, sample, notes, options, network=best is None)
    estimates, together = view.estimates, pool if view.slots is None else np.arange(len(pool))
    pairs = [(a, b) for i, a in enumerate(estimates.values()) for b in list(estimates.values())[i + 1 :]]
    tests = [agreement(a, b, positions, shown=shown, pool=together) for a, b in pairs]
    agreements = [test for test in tests if test is not None]
    refuted: tuple[Refutation, ...] = ()
    if "items" in sources:
        shown_in, clicked_in = (np.bincount(pool, each) for each in (shown, log.clicked))
        evidence = Evidence(
            sources["items"],
            log.seen,
            pool,
            shown_in,
            clicked_in / shown_in,
            weights,
            segment=options.segment,
            sample=sample,
            sample_clicked=None if sample is None else clicked_rows(sample, options.label),
        )
        refuted = refutations(evidence, estimates)
    return BiasReport(
        label=options.label,
        requests=log.requests,
        positions=positions,
        impressions=shown,
        clicks=clicks,
        rate=rate,
        reference=int(positions[view.reference]),
        estimates=estimates,
        agreements=agreements,
        verdict=verdict(
            estimates,
            agreements,
            log,
            best=chosen,
            source=from_source,
            explained=explained,
            features_explain_clicks=explain_clicks,
            no_links=no_links,
            pool=together,
            refutations=refuted,
        ),
        pitfalls=[],
        links=graph,
        explained=explained,
        sampled_requests=0 if sample is None else len(sample),
        pool=together if shared is None else np.arange(len(pool)),
        notes=tuple(notes),
        refutations=refuted,
    )


@dataclass(frozen=True, eq=False)
class _View:
    """The positions of an audit, the pool of each, the index of the reference position, and the estimates so far.

    The slots of a grid share strength, so that each has a θ of its own.
    """

    positions: np.ndarray
    pool: np.ndarray
    reference: int
    estimates: dict[str, Estimate]
    slots: Slots | None  # of a grid
    shown: np.ndarray

    def add(self, name: str, draws: np.ndarray, at: np.ndarray | None = None, held_out: float | None = None) -> None:
        """Add an estimate, given θ [replicates, pools]; `at` are the pools, if they are not all."""
        if at is not None:
            some, draws = draws, np.full((len(draws), int(self.pool[-1]) + 1), np.nan)
            draws[:, at] = some
        self.estimates[name] = estimate(name, draws[:, self.pool], self.reference, held_out)

    def add_of_counts(
        self, name: str, cells: Counts, weights: np.ndarray, at: np.ndarray | None = None, held_out: float | None = None
    ) -> None:
        """Add the estimate of the position-based model, for which the slots of a grid share strength."""
        if self.slots is None or cells.size[1] <= int(self.pool[-1]):
            self.add(name, estimators.position_based(cells, weights), at, held_out)
            return
        fit = fit_conditional(cells.total())
        fit, _ = share_strength(fit, self.slots.pooled(self.pool, self.shown), self.slots, anchor=self.reference)
        draws = drawn(fit.theta, fit.covariance(), weights.shape[1] - 1)
        self.estimates[name] = estimate(name, np.vstack([fit.theta, draws]), self.reference, held_out)


def _count_estimates(
    log: LogCounts, sources: Mapping[str, Counts], weights: np.ndarray, view: _View, notes: list[str], seed: int
) -> Mapping[str, Any] | None:
    """Add estimates from requests in random order and from items shown at several positions to those of `view`.

    `sources` has the counts by pool. Return the groups of positions that such items link (`identification.links`), or
    None without such items.
    """
    training = _training_groups(weights)
    of_pool = np.bincount(view.pool, log.shown)
    fitted = {name: np.bincount(view.pool, log.shown * got.theta) / of_pool for name, got in view.estimates.items()}
    harvest = partial(estimators.harvest, seed=seed)
    for name, source, estimator in (
        ("randomised", "randomised", estimators.position_based),
        ("swaps", "swaps", estimators.position_based),
        ("harvest", "items", harvest),
        ("items", "items", estimators.position_based),
    ):
        if source in sources:
            if estimator is estimators.position_based:
                view.add_of_counts(name, sources[source], weights)
            else:
                view.add(name, estimator(sources[source], weights))
            fitted[name] = estimator(sources[source], training)[0]
    graph = None
    if (counts := sources.get("items")) is not None:
        if counts.share < 1:
            used = f"a random {counts.share:.1%} of the items that were clicked and shown at several positions"
            notes.append(f"The estimators harvest and items use {used}.")
        graph = links(estimators.pair_clicks(counts, weights[:, 0], seed=seed), view.positions, view.pool)
    if log.seen is not None and log.seen.items is not None and fitted:
        held_out = HeldOut(log.seen.pooled(view.pool), log.seen.items, seed=seed)
        common = np.isfinite(list(fitted.values())).all(0)  # likelihoods are comparable only at the same positions
        for name, theta in fitted.items():
            score = held_out.score(np.where(common, theta, np.nan))
            view.estimates[name] = replace(view.estimates[name], held_out=score)
    return graph


def _training_groups(weights: np.ndarray) -> np.ndarray:
    """Return weights [groups, 1] of the groups of requests: 1 for those that fit an estimate, 0 for held-out groups."""
    return (np.arange(len(weights)) < TUNED * len(weights)).astype(float)[:, None]


def _feature_estimates(
    view: _View, sample: Log, notes: list[str], options: AuditOptions, *, network: bool
) -> tuple[float, bool]:
    """Add estimates from features to those of `view`.

    With `network`, a network may model the logging ranker, which takes longer. Return the share of the logged order
    that features explain, and True if features explain clicks.
    """
    seed = options.seed
    clicked = clicked_rows(sample, options.label)
    sampled = impressions(sample, clicked, seed=seed)
    if not np.isin(sampled.positions, view.positions).all():
        got = (
            f"position {as_shown(int(np.setdiff1d(sampled.positions, view.positions)[0]))}, which the log does not show"
        )
        hint = "draw the sample from the requests of the log"
        raise DataError("the sample must be a subset of the log's requests", got=got, hint=hint)
    pool = view.pool[np.searchsorted(view.positions, sampled.positions)]
    sampled, at = sampled.pooled(pool), np.unique(pool)
    logging = recovered_score(sample, seed=seed, network=network)
    strata = strata_of(sample, logging.score, clicks=float(clicked.sum()))
    weights = replicates(int(sampled.group.max()) + 1, options.bootstrap, seed=seed + 1)
    training = _training_groups(weights)
    counts = counted(sampled, strata)
    score = HeldOut(sampled, strata, seed=seed).score(estimators.position_based(counts, training)[0])
    view.add_of_counts("strata", counts, weights, at, score)
    numeric = [i for i in range(len(sample.feature_names)) if i not in sample.categories]
    if len(numeric) > MAX_FEATURES:
        notes.append(f"The estimator regression uses {MAX_FEATURES:,} of {len(numeric):,} features, chosen at random.")
        numeric = np.sort(np.random.default_rng(seed).choice(numeric, MAX_FEATURES, replace=False)).tolist()
    features = standardised(sample.features, numeric)
    log_theta, logit = estimators.fitted_regression(sampled, features, training[:, 0])
    edges = np.quantile(logit, np.linspace(0, 1, BUCKETS + 1)[1:-1])
    bucketed = HeldOut(sampled, np.searchsorted(edges, logit), seed=seed).score(np.exp(log_theta))
    view.add("regression", estimators.regression(sampled, features, weights), at, bucketed)
    flat = HeldOut(sampled, np.zeros(sample.rows, np.int64), seed=seed).score(np.exp(log_theta))
    return logging.explained, bool(bucketed > flat + CLEAR_GAIN * abs(flat))


def standardised(features: np.ndarray, numeric: list[int]) -> np.ndarray:
    """Return the numeric columns of features, scaled to mean 0 and standard deviation 1 as for rankers."""
    encoder = FeatureEncoder(features.shape[1], only=numeric)
    encoder.fit(features)
    return np.asarray(encoder(torch.from_numpy(np.array(features))).numpy())
