"""From scores to figures: one per request, then means with intervals and paired tests between rankers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ultr.errors import DataError, OptionError
from ultr.labels import DEFAULT_LABEL, Label
from ultr.lists import ListBatches
from ultr.log import Log
from ultr.metrics import METRICS, parse_metric
from ultr.simulate import User


@dataclass(frozen=True)
class Mean:
    """A mean over requests with its 95% interval."""

    mean: float
    low: float
    high: float
    requests: int

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True)
class PairedTest:
    """The mean difference between two rankers on the same requests, its 95% interval and two-sided p value."""

    difference: float
    low: float
    high: float
    p: float
    requests: int

    @property
    def significant(self) -> bool:
        return self.p < 0.05


def evaluate_scores(
    log: Log,
    scores: np.ndarray,
    metrics: Sequence[str] = ("ndcg@10",),
    *,
    user: User | None = None,
    label: Label | str = DEFAULT_LABEL,
) -> dict[str, np.ndarray]:
    """The metrics of every request of a log with true labels, given a score for each of its rows.

    `reward@k` is the expected label if `user` is shown the new ranking.
    """
    scores = np.asarray(scores)
    if scores.shape != (log.rows,):
        raise DataError(f"there should be one score for each of {log.rows} rows", got=list(scores.shape))
    if np.isnan(scores).any():
        raise DataError("scores should be numbers", got=f"{int(np.isnan(scores).sum())} NaN")
    _ = log.true_relevance  # every metric needs it: refuse before any work
    wanted = [(text, *parse_metric(text)) for text in metrics]
    if any(name == "reward" for _, name, _ in wanted) and user is None:
        raise OptionError("reward needs a user to show the ranking to", mend="pass user=User()")
    bare = replace(log, features=np.empty((log.rows, 0), np.float32), feature_names=(), actions={"score": scores})
    figures = {text: np.empty(len(log)) for text, _, _ in wanted}
    for requests, lists in ListBatches(bare).by_length():
        for text, name, k in wanted:
            extra = {"user": user, "label": label} if name == "reward" else {}
            values = METRICS[name](lists.actions["score"], lists.true_relevance, k=k, where=lists.where, **extra)
            figures[text][requests.numpy()] = values.double().numpy()
    return figures


def mean_with_interval(values: np.ndarray, weights: np.ndarray | None = None, *, confidence: float = 0.95) -> Mean:
    """The (weighted) mean over requests, with a Student-t interval for requests drawn independently."""
    values = np.asarray(values, dtype=np.float64)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.float64)
    if values.ndim != 1 or not len(values) or weights.shape != values.shape:
        raise DataError("a mean needs one value and one weight per request", got=f"{values.shape} and {weights.shape}")
    mean = float(np.average(values, weights=weights))
    margin = _standard_error(values - mean, weights) * _t_quantile(len(values), confidence)
    return Mean(mean, mean - margin, mean + margin, len(values))


def paired_test(
    a: np.ndarray, b: np.ndarray, weights: np.ndarray | None = None, *, confidence: float = 0.95
) -> PairedTest:
    """Whether two rankers differ on the same requests: a paired t-test of a - b."""
    if np.shape(a) != np.shape(b):
        raise DataError("a paired test compares the same requests", got=f"{np.shape(a)} and {np.shape(b)}")
    from scipy.stats import t

    differences = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    mean = mean_with_interval(differences, weights, confidence=confidence)
    n = mean.requests
    error = (mean.high - mean.mean) / _t_quantile(n, confidence) if n > 1 else 0.0
    p = float(2 * t.sf(abs(mean.mean) / error, n - 1)) if error else float(mean.mean == 0 or n < 2)
    return PairedTest(mean.mean, mean.low, mean.high, p, n)


def _standard_error(deviations: np.ndarray, weights: np.ndarray) -> float:
    n = len(deviations)
    if n < 2:
        return 0.0
    return float(np.sqrt(np.sum((weights * deviations) ** 2) * n / (n - 1)) / weights.sum())


def _t_quantile(n: int, confidence: float) -> float:
    from scipy.stats import t

    return float(t.ppf(0.5 + confidence / 2, max(1, n - 1)))
