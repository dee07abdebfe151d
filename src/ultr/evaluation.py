"""From scores to figures: one per request, then means with intervals and paired tests between rankers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ultr.arguments import checked
from ultr.errors import DataError, OptionError
from ultr.labels import DEFAULT_LABEL, Label
from ultr.lists import ListBatches
from ultr.log import Log
from ultr.metrics import MAX_GRADE, METRICS, parse_metric
from ultr.simulate import User

FEEDBACK = "feedback-"
OFF_POLICY = "off-policy-"  # the value of a ranking by biased feedback, as `judging` finds it
LARGEST = 1e150  # whose square is finite
VALUES = ("reward", "dcg")  # that have one


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


@checked
def parse_any_metric(text: str) -> tuple[str, int | None]:
    """`feedback-ndcg@10`, `off-policy-reward@10` and `ndcg@10` -> the metric and its cut-off."""
    name, k = parse_metric(text.removeprefix(FEEDBACK).removeprefix(OFF_POLICY))
    if text.startswith(OFF_POLICY) and (name not in VALUES or k is None):
        raise OptionError("off policy there are reward@k and dcg@k", got=f"'{text}'", mend=f"{OFF_POLICY}reward@10")
    return name, k


@checked
def evaluate_scores(
    log: Log,
    scores: np.ndarray,
    metrics: Sequence[str] | str = "ndcg@10",
    *,
    user: User | None = None,
    label: Label | str = DEFAULT_LABEL,
) -> dict[str, np.ndarray]:
    """The metrics of every request of a log, given a score for each of its rows.

    They are on the true labels, unless a name begins with `feedback-`: `feedback-ndcg@10` is on the label of the logged
    actions, with linear gain, and so has their bias. `reward@k` is the expected label if `user` is shown the ranking.
    """
    scores = log.check_scores(scores)
    names = metrics.split(",") if isinstance(metrics, str) else metrics
    wanted = {text.strip(): parse_metric(text.strip().removeprefix(FEEDBACK)) for text in names}
    on_feedback = {text for text in wanted if text.startswith(FEEDBACK)}
    columns = {"score": scores}
    if on_feedback:
        columns["label"] = Label.of(label)(log.actions)
    if len(on_feedback) < len(wanted) and (highest := float(log.true_relevance.max())) > MAX_GRADE:
        raise DataError(f"grades above {MAX_GRADE} are beyond the gain 2^y - 1", got=highest, mend="scale them")
    bare = replace(log.without_features(), actions=columns)
    figures = {text: np.empty(len(log)) for text in wanted}
    for requests, lists in ListBatches(bare).by_length():
        for text, (name, k) in wanted.items():
            options: dict[str, object] = {"k": k, "where": lists.where}
            if name == "reward":
                options |= {"user": _needed(user, text in on_feedback), "label": label}
            if text in on_feedback and name in ("ndcg", "dcg"):
                options["gain"] = "linear"
            labels = lists.actions["label"] if text in on_feedback else lists.true_relevance
            values = METRICS[name](lists.actions["score"], labels, **options)
            figures[text][requests.numpy()] = values.double().numpy()
    return figures


def _needed(user: User | None, on_feedback: bool) -> User:
    if on_feedback:
        raise OptionError("there is no feedback-reward: reward is what a user is expected to do", mend="ask for reward")
    if user is None:
        raise OptionError("reward needs a user to show the ranking to", mend="pass user=User()")
    return user


@checked
def mean_with_interval(values: np.ndarray, weights: np.ndarray | None = None, *, confidence: float = 0.95) -> Mean:
    """The (weighted) mean over requests, with a Student-t interval for requests drawn independently.

    One request alone says nothing about its spread: its interval has no ends.
    """
    mean, error = _mean_and_error(_bounded(values), weights)
    margin = error * _t_quantile(len(values), confidence)
    return Mean(mean, mean - margin, mean + margin, len(values))


@checked
def paired_test(
    a: np.ndarray, b: np.ndarray, weights: np.ndarray | None = None, *, confidence: float = 0.95
) -> PairedTest:
    """Whether two rankers differ on the same requests: a paired t-test of a - b."""
    if np.shape(a) != np.shape(b):
        raise DataError("a paired test compares the same requests", got=f"{np.shape(a)} and {np.shape(b)}")
    from scipy.stats import t

    mean, error = _mean_and_error(_bounded(a) - _bounded(b), weights)
    n = len(a)
    margin = error * _t_quantile(n, confidence)
    p = float(2 * t.sf(abs(mean) / error, max(1, n - 1))) if error else float(mean == 0)
    return PairedTest(mean, mean - margin, mean + margin, p, n)


def _bounded(values: np.ndarray) -> np.ndarray:
    """Values whose squares can be summed."""
    values = values.astype(np.float64)
    if (np.abs(values) > LARGEST).any():
        raise DataError(f"values should not be beyond {LARGEST:g}", got=float(np.abs(values).max()), mend="scale them")
    return values


def _mean_and_error(values: np.ndarray, weights: np.ndarray | None) -> tuple[float, float]:
    """The weighted mean and its standard error, infinite for one value alone."""
    weights = np.ones_like(values) if weights is None else weights.astype(np.float64)
    if values.ndim != 1 or not len(values) or weights.shape != values.shape:
        raise DataError("a mean needs one value and one weight per request", got=f"{values.shape} and {weights.shape}")
    if not 0 < weights.max() < np.inf or weights.min() < 0:
        got = f"{weights.min():g} to {weights.max():g}"
        raise DataError("weights should be finite and not negative, nor all zero", got=got)
    # By powers of two, which leave every digit, to sizes whose squares neither vanish nor overflow.
    weights = np.ldexp(weights, -np.frexp(weights.max())[1])
    exponent = int(np.frexp(np.abs(values).max())[1])
    values = np.ldexp(values, -exponent)
    n, mean = len(values), float(np.average(values, weights=weights))
    if n < 2:
        return float(np.ldexp(mean, exponent)), np.inf
    error = np.sqrt(np.sum((weights * (values - mean)) ** 2) * n / (n - 1)) / weights.sum()
    return float(np.ldexp(mean, exponent)), float(np.ldexp(error, exponent))


def _t_quantile(n: int, confidence: float) -> float:
    from scipy.stats import t

    if not 0 < confidence < 0.5 + confidence / 2 < 1:
        raise OptionError("the confidence should be between 0 and 1", got=confidence)
    return float(t.ppf(0.5 + confidence / 2, max(1, n - 1)))
