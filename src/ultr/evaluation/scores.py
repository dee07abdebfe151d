"""Evaluate scores: metrics by request, means with 95% intervals, and paired tests between rankers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import ndtr, stdtr, stdtrit
from torch import Tensor

from ultr.bias.identification import NORMAL
from ultr.datasets.users import User
from ultr.errors import DataError, OptionError
from ultr.evaluation.metrics import MAX_GRADE, METRICS, parse_metric
from ultr.lists import ListBatches, Lists
from ultr.log import Log
from ultr.log.labels import DEFAULT_LABEL, Label
from ultr.utils.arguments import checked
from ultr.utils.display import facts_html

FEEDBACK = "feedback-"  # names of metrics of the logged, biased feedback begin so
OFF_POLICY = "off-policy-"  # names of metrics that `evaluation.off_policy` estimates from biased feedback begin so
LIKELIHOOD = f"{OFF_POLICY}likelihood"  # of the feedback, given scores; it chooses steps
LARGEST = 1e150  # squares of larger values may overflow
CPU_ITEMS, GPU_ITEMS = 1 << 16, 1 << 20  # items with padding that are evaluated at once


@dataclass(frozen=True)
class Mean:
    """A mean over requests with its 95% interval."""

    mean: float
    low: float
    high: float
    requests: int

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"

    def _repr_html_(self) -> str:
        return facts_html("Mean", {"mean, 95% interval": str(self), "requests": f"{self.requests:,}"})


@dataclass(frozen=True)
class PairedTest:
    """The mean difference of a metric between two rankers on the same requests, its 95% interval and p value."""

    difference: float
    low: float
    high: float
    p: float
    requests: int

    @property
    def significant(self) -> bool:
        return self.p < 0.05

    def with_margin(self, margin: float) -> PairedTest:
        """Return the test with another half-width of its interval, and the p value that follows from it."""
        p = float(2 * ndtr(-NORMAL * abs(self.difference) / max(margin, 1e-300)))
        return replace(self, low=self.difference - margin, high=self.difference + margin, p=p)

    def _repr_html_(self) -> str:
        interval = f"{self.difference:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"
        facts = {"difference, 95% interval": interval, "p": f"{self.p:.2g}", "requests": f"{self.requests:,}"}
        return facts_html("Paired test: " + ("significant" if self.significant else "not significant"), facts)


@checked
def parse_any_metric(text: str) -> tuple[str, int | None]:
    """Return the metric and cut-off of a name such as `feedback-ndcg@10`, `off-policy-reward@10` or `ndcg@10`."""
    if text == LIKELIHOOD:
        return "likelihood", None
    bare = text.removeprefix(FEEDBACK).removeprefix(OFF_POLICY)
    off_policy = text.startswith(OFF_POLICY)
    name, k = parse_metric(bare, also=("gain",) if off_policy else ())
    if off_policy and (name not in ("reward", "dcg", "gain") or k is None):
        what = "only reward@k, dcg@k, gain@k and likelihood can be estimated from feedback (off policy)"
        raise OptionError(what, got=f"'{text}'", hint=f"use for example {OFF_POLICY}reward@10")
    return name, k


def ranks(log: Log, scores: np.ndarray) -> np.ndarray:
    """Return the rank of each row in its request: 0 for the highest score; rows with equal scores keep their order."""
    order = np.lexsort((-scores, log.request_of_row))
    rank = np.empty(log.rows, np.int64)
    rank[order] = np.arange(log.rows) - np.repeat(log.offsets[:-1], log.lengths)
    return rank


def judging_metric(selection: str) -> str:
    """Return the metric that judges a ranker whose step another one chose: the reward, which people understand."""
    if selection == LIKELIHOOD:
        return f"{OFF_POLICY}reward@10"
    return selection.replace(f"{OFF_POLICY}gain", f"{OFF_POLICY}reward")


def less_is_better(metric: str) -> bool:
    return metric.removeprefix(FEEDBACK) == "arp"


@checked
def evaluate_scores(
    log: Log,
    scores: np.ndarray,
    metrics: Sequence[str] | str = "ndcg@10",
    *,
    user: User | None = None,
    label: Label | str = DEFAULT_LABEL,
) -> dict[str, np.ndarray]:
    """Return metrics [requests] of a log by name, given a score for each of its rows.

    Metrics use the true labels. `feedback-ndcg@10` and others named `feedback-*` use the label of the logged actions,
    with linear gain, and have its bias. `reward@k` is the expected label if a simulated `user` sees the ranking.
    """
    return ScoreMetrics(log, metrics, user=user, label=label)(scores)


class ScoreMetrics:
    """The metrics of `evaluate_scores` for one log and any number of scores; `keep` holds its lists on the device."""

    def __init__(
        self,
        log: Log,
        metrics: Sequence[str] | str,
        *,
        user: User | None = None,
        label: Label | str = DEFAULT_LABEL,
        device: torch.device | str = "cpu",
        keep: bool = False,
    ) -> None:
        names = metrics.split(",") if isinstance(metrics, str) else metrics
        parsed = {text.strip(): parse_metric(text.strip().removeprefix(FEEDBACK)) for text in names}
        on_feedback = {text for text in parsed if text.startswith(FEEDBACK)}
        actions = {"label": Label.of(label)(log.actions)} if on_feedback else {}
        if len(on_feedback) < len(parsed) and (highest := float(log.true_relevance.max())) > MAX_GRADE:
            hint = "scale the labels down"
            raise DataError(f"the gain 2^y - 1 needs labels up to {MAX_GRADE}", got=highest, hint=hint)
        self._log, self._parsed, self._on_feedback, self._user, self._label = log, parsed, on_feedback, user, label
        self._source = ListBatches(replace(log.without_features(), actions=actions), device=device)
        self._kept = list(self._batches()) if keep else None
        self._weights: Tensor | None = None  # of the requests, in the order of the batches

    def __call__(self, scores: np.ndarray) -> dict[str, np.ndarray]:
        """Return metric -> values [requests], given a score for each row of the log."""
        values = torch.from_numpy(self._log.check_scores(scores)).to(self._source.device)
        results = {text: np.empty(len(self._log)) for text in self._parsed}
        found, order = self._found(values)
        if not order:
            return results
        where = torch.cat(order).numpy()
        for text, parts in found.items():
            results[text][where] = torch.cat(parts).double().cpu().numpy()
        return results

    def means(self, scores: Tensor) -> dict[str, Tensor]:
        """Return metric -> mean over requests, weighted by their weights, given a score on the device for each row.

        Nothing waits for a GPU. A mean is NaN if a score is NaN.
        """
        found, order = self._found(scores)
        if self._weights is None:
            weights = torch.ones(len(self._log)) if self._log.weights is None else torch.from_numpy(self._log.weights)
            self._weights = weights[torch.cat(order)].to(scores.device, torch.float64)
        missing = torch.where(scores.isnan().any(), torch.nan, 0.0)
        total = self._weights.sum()
        return {text: self._weights @ torch.cat(parts).double() / total + missing for text, parts in found.items()}

    def _found(self, scores: Tensor) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
        """Return metric -> values of requests, in batches, and the indices of the requests of each batch."""
        found: dict[str, list[Tensor]] = {text: [] for text in self._parsed}
        order = []
        for requests, lists, rows in self._kept or self._batches():
            order.append(requests)
            in_lists = torch.where(lists.where, scores[rows], 0)
            for text, metric in self._parsed.items():
                found[text].append(self._metric(text, *metric, lists, in_lists))
        return found, order

    def _metric(self, text: str, name: str, k: int | None, lists: Lists, scores: Tensor) -> Tensor:
        options: dict[str, object] = {"k": k, "where": lists.where}
        on_feedback = text in self._on_feedback
        if name == "reward":
            if on_feedback:
                what = "feedback-reward does not exist: reward is expected, not logged, feedback"
                raise OptionError(what, hint="use reward")
            if self._user is None:
                raise OptionError("reward needs a simulated user who sees the ranking", hint="pass user=User()")
            options |= {"user": self._user, "label": self._label}
        if on_feedback and name in ("ndcg", "dcg"):
            options["gain"] = "linear"
        return METRICS[name](scores, lists.actions["label"] if on_feedback else lists.true_relevance, **options)

    def _batches(self) -> Iterator[tuple[Tensor, Lists, Tensor]]:
        """Yield the indices of requests, their lists, and the row of each item in the log (0 for padding)."""
        on_gpu = self._source.device.type == "cuda"
        for requests, lists in self._source.by_length(GPU_ITEMS if on_gpu else CPU_ITEMS):
            yield requests, lists, self._source.rows(requests, lists.where)


@checked
def mean_with_interval(
    values: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    confidence: float = 0.95,
    groups: np.ndarray | None = None,
) -> Mean:
    """Return the (weighted) mean over requests, with a Student-t interval for requests drawn independently.

    Those of a group, such as a query, are drawn together: `groups` has the number of the group of each request, from 0.
    The interval of a single request or group is infinite, because its standard error is unknown.
    """
    mean, error, n = _mean_and_error(_bounded(values), weights, groups)
    margin = error * _t_quantile(n, confidence)
    return Mean(mean, mean - margin, mean + margin, len(values))


@checked
def paired_test(
    a: np.ndarray,
    b: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    confidence: float = 0.95,
    groups: np.ndarray | None = None,
) -> PairedTest:
    """Test whether two rankers differ, by a paired t-test of their metrics `a` and `b` [requests].

    `groups` are as for `mean_with_interval`.
    """
    if np.shape(a) != np.shape(b):
        raise DataError("a and b must be values of the same requests", got=f"shapes {np.shape(a)} and {np.shape(b)}")
    mean, error, n = _mean_and_error(_bounded(a) - _bounded(b), weights, groups)
    margin = error * _t_quantile(n, confidence)
    p = float(2 * stdtr(max(1, n - 1), -abs(mean) / error)) if error else float(mean == 0)
    return PairedTest(mean, mean - margin, mean + margin, p, len(a))


def holm(p: Sequence[float]) -> list[float]:
    """Return p values corrected by Holm's method (1979) for the number of tests.

    The i-th smallest of n is multiplied by n + 1 - i, and is at least as large as the corrected ones before it.
    """
    values = np.asarray(p, np.float64)
    order = np.argsort(values)
    corrected = np.minimum(1.0, np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)))
    result = np.empty_like(values)
    result[order] = corrected
    return [float(value) for value in result]


def _bounded(values: np.ndarray) -> np.ndarray:
    """Return values in double precision; raise DataError if their squares may overflow."""
    values = values.astype(np.float64)
    if (np.abs(values) > LARGEST).any():
        got = float(np.abs(values).max())
        raise DataError(f"values must be between -{LARGEST:g} and {LARGEST:g}", got=got, hint="scale them down")
    return values


def _mean_and_error(
    values: np.ndarray, weights: np.ndarray | None, groups: np.ndarray | None
) -> tuple[float, float, int]:
    """Return the weighted mean, its standard error (infinite for one group of values), and the number of groups."""
    weights = np.ones_like(values) if weights is None else weights.astype(np.float64)
    if values.ndim != 1 or not len(values) or weights.shape != values.shape:
        raise DataError("a mean needs one value and one weight per request", got=f"{values.shape} and {weights.shape}")
    if not 0 < weights.max() < np.inf or weights.min() < 0:
        got = f"{weights.min():g} to {weights.max():g}"
        raise DataError("weights must be finite and not negative, and at least one must be positive", got=got)
    # Scale by powers of two, which is exact, so that squares neither underflow nor overflow.
    weights = np.ldexp(weights, -np.frexp(weights.max())[1])
    exponent = int(np.frexp(np.abs(values).max())[1])
    values = np.ldexp(values, -exponent)
    mean = float(np.average(values, weights=weights))
    moved = weights * (values - mean)
    if groups is not None:
        moved = np.bincount(groups, moved)[np.bincount(groups) > 0]
    n = len(moved)
    if n < 2:
        return float(np.ldexp(mean, exponent)), np.inf, n
    error = np.sqrt(np.sum(moved**2) * n / (n - 1)) / weights.sum()
    return float(np.ldexp(mean, exponent)), float(np.ldexp(error, exponent)), n


def _t_quantile(n: int, confidence: float) -> float:
    if not 0 < confidence < 0.5 + confidence / 2 < 1:
        raise OptionError("the confidence must be between 0 and 1", got=confidence)
    return float(stdtrit(max(1, n - 1), 0.5 + confidence / 2))
