"""Whether a log is like those that a run knows: its features, lists, feedback, and feedback by position.

Distributions are compared by the population stability index Σ (q - p) log(q / p) of shares p and q. It has to be above
what chance gives, where rows of a request count as one, and above the movement from one known log to the next: the age
of an item rises by a day each day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import chdtri

from ultr.checks.pitfalls import Pitfall, names_of
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.splits import as_texts
from ultr.log.table import is_grid

BINS = 10  # of a number; also the values of a number that has no more
MOVED = 0.25  # least index of a distribution that has changed
CHANCE = 1e-5  # probability that chance moves a distribution as far
USUAL = 9.0  # times the largest index from one known log to the next: a trend has that after three steps
FAR = 5.0  # an index of nearly disjoint distributions, which no trend explains
OTHER_RATE = 1.5  # factor of the feedback by request
SIGMAS = 4.0
CHECK = "check how the log was made; if the change is intended, pass --allow with the name of this finding"


@dataclass(frozen=True)
class Change:
    """How far a distribution has moved, how far it may, and what has changed, in words."""

    name: str
    index: float
    limit: float
    what: str
    features: tuple[str, ...] = ()

    @property
    def finding(self) -> Pitfall:
        return Pitfall(self.name, f"{self.what}: stability index {self.index:.2f}", CHECK, self.features)


def find_drift(known: Sequence[Log], new: Log, label: Label, *, by_value: bool = False) -> list[Pitfall]:
    """Return how a log differs from the known logs, the newest first, which have the same features and codes.

    The amount of feedback is the number of rows with some, or `by_value` the sum of labels: where few rows stand for
    those whose actions have not arrived.
    """
    moved = [each.finding for each in changes(known, new, label) if each.index > each.limit]
    return [*moved, *_rates(known[0], new, label, by_value=by_value)]


def changes(known: Sequence[Log], new: Log, label: Label) -> Iterator[Change]:
    """Yield how far each distribution of a log is from that of the newest known log, and how far it may be.

    The two halves of a single known log show how far distributions move.
    """
    before = [log for log in reversed(known) if len(log)]
    if len(before) == 1:
        middle = len(before[0]) // 2
        before = [before[0].select(np.arange(middle)), before[0].select(np.arange(middle, len(before[0])))]
    if not before or not all(map(len, (*before, new))):
        return
    for name, samples, sizes, what, features in _columns([*before, new], label):
        few = _few_values(samples[:-1])
        *usual, (index, _chance, most) = (_moved(samples[k : k + 2], sizes[k : k + 2], few) for k in range(len(before)))
        farthest = max(index - chance for index, chance, _ in usual)
        yield Change(name, index, max(MOVED, most, min(USUAL * farthest, FAR)), what(), features)


def _moved(samples: Sequence[np.ndarray], sizes: Sequence[int], few: np.ndarray | None) -> tuple[float, float, float]:
    """Return the stability index of two samples, the mean that chance gives, and what it rarely exceeds by chance.

    Numbers are binned by value, if they have few, or else by the deciles of the first sample, so that a steady trend
    moves each day as far as the day before.
    """
    codes = samples if samples[0].dtype.kind == "i" else _binned(samples[0], samples[1], few)
    width = max(int(each.max(initial=0)) for each in codes) + 1
    counts = np.stack([np.bincount(each, minlength=width) for each in codes]).astype(np.float64)
    first, last = counts[:, counts.any(0)]
    freedom, scale = len(first) - 1, 1 / sizes[0] + 1 / sizes[1]
    return stability_index(first, last), freedom * scale, float(chdtri(max(freedom, 1), CHANCE)) * scale


def stability_index(before: np.ndarray, after: np.ndarray) -> float:
    """Return the population stability index of two counts [values]; half a count is added to each."""
    p, q = ((counts + 0.5) / (counts.sum() + 0.5 * len(counts)) for counts in (before, after))
    return float(((q - p) * np.log(q / p)).sum())


Column = tuple[str, list[np.ndarray], tuple[int, ...], Callable[[], str], tuple[str, ...]]


def _columns(logs: Sequence[Log], label: Label) -> Iterator[Column]:
    """Yield for each distribution its name, its numbers or codes and sizes by log, what is said of it, and features."""
    sizes = tuple(map(len, logs))
    for column, name in enumerate(logs[0].feature_names):
        values = [log.features[:, column] for log in logs]
        if name in logs[0].vocabularies:
            codes = [each.astype(np.int64) for each in values]
            new = float((codes[-1] == 0).mean())
            more = f"; {new:.0%} of the rows have an unknown category" if new else ""
            yield f"feature {name}", codes, sizes, _said(f"the categories of {name} have changed{more}"), (name,)
        else:
            yield f"feature {name}", values, sizes, _numbers(f"the values of {name}", values), (name,)
    if all("segment" in log.context for log in logs):
        names = [np.array(as_texts(log.context["segment"]).to_pylist(), object).astype(str) for log in logs]
        segment = np.unique(np.concatenate(names), return_inverse=True)[1]
        new_ones = sorted({*names[-1]}.difference(*names[:-1]))
        among = f", {names_of(new_ones)} among them" if new_ones else ""
        parts = np.split(segment, np.cumsum(sizes)[:-1])
        yield "segments", parts, sizes, _said(f"the segments of requests have changed{among}"), ()
    lengths = [log.lengths.astype(np.float64) for log in logs]
    yield "lengths of lists", lengths, sizes, _numbers("the lengths of lists", lengths), ()
    labels = [np.asarray(label(log.actions), np.float64) for log in logs]
    clicks = tuple(int((each > 0).sum()) for each in labels)
    if not min(clicks):
        return
    sizes_of_labels = [each[each > 0] for each in labels]
    if len(np.unique(sizes_of_labels[0])) > 1:
        what = _numbers("the labels above 0", sizes_of_labels)
        yield "size of the label", sizes_of_labels, clicks, what, ()
    if any(log.positions is None for log in logs):
        return
    positions = [log.shown_positions("a comparison of logs") for log in logs]
    if is_grid(positions[0]):  # slots in reading order
        known = np.unique(np.concatenate(positions))
        positions = [np.searchsorted(known, each) + 1 for each in positions]
    places = [np.asarray(each, np.float64) for each in positions]
    yield "positions", places, sizes, _numbers("the positions", places), ()
    clicked = [place[each > 0] for place, each in zip(places, labels, strict=True)]
    yield "feedback by position", clicked, clicks, _numbers("the positions of feedback", clicked), ()


def _said(text: str) -> Callable[[], str]:
    return lambda: text


def _numbers(of: str, values: Sequence[np.ndarray]) -> Callable[[], str]:
    """Return what has changed in the last of several samples of numbers."""

    def say() -> str:
        before, after = np.concatenate(values[:-1]), values[-1]
        missing = [float(np.isnan(each).mean()) if len(each) else 0.0 for each in (before, after)]
        if abs(missing[1] - missing[0]) > 0.1:
            return f"{missing[1]:.0%} of {of} are missing, {missing[0]:.0%} before"
        medians = [_median(each) for each in (before, after)]
        return f"{of} have changed (median {medians[1]:.4g}, {medians[0]:.4g} before)"

    return say


def _median(values: np.ndarray) -> float:
    present = values[~np.isnan(values)]
    return float(np.median(present)) if len(present) else float("nan")


def _few_values(samples: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the values of all samples; None if they are many, or codes."""
    values = np.unique(np.concatenate([np.unique(each) for each in samples]))
    return values[~np.isnan(values)] if samples[0].dtype.kind == "f" and len(values) <= BINS else None


def _binned(before: np.ndarray, after: np.ndarray, few: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return codes of numbers, 0 if missing."""
    if few is None:
        edges = np.unique(np.quantile(before[~np.isnan(before)], np.arange(1, BINS) / BINS))
    else:  # numbers between two of the values have bins of their own
        edges = np.sort(np.concatenate([few, np.nextafter(few, np.inf)]))

    def code(values: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(values), 0, 1 + np.searchsorted(edges, values, "right"))

    return code(before), code(after)


def _rates(before: Log, after: Log, label: Label, *, by_value: bool) -> Iterator[Pitfall]:
    found = []
    for log in (before, after):
        values = np.asarray(label(log.actions))
        feedback = values if by_value else values > 0
        found.append(np.add.reduceat(feedback.astype(np.float64), log.offsets[:-1]))
    rates = [float(each.mean()) for each in found]
    error = sum(float(each.var()) / max(len(each) - 1, 1) for each in found) ** 0.5
    if not 1 / OTHER_RATE < rates[1] / max(rates[0], 1e-12) < OTHER_RATE and abs(rates[1] - rates[0]) > SIGMAS * error:
        unit = "of the label" if by_value else "rows with feedback"
        what = f"a request has {rates[1]:.3g} {unit}, {rates[0]:.3g} before"
        yield Pitfall("amount of feedback", what, CHECK)
