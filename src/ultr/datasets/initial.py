"""The rankers that order the items of a simulated log: linear or a network, fitted on true labels.

| logging      | ranker                                                        |
|--------------|---------------------------------------------------------------|
| `weak`       | linear, fitted on half of `share`: 0.5% of the requests     |
| `linear`     | linear, fitted on `share` of the requests: 1%                 |
| `network`    | a network, fitted on `share` of the requests                  |
| 0.05, 0.3    | a network, fitted on this share of the requests               |
| `strong`     | a network, fitted on all training requests                    |
| `both`       | `linear` and `network`, each for half of the sessions         |
| `randomised` | `linear`, with 5% of the sessions in random order             |
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Literal, get_args

import numpy as np
import pyarrow as pa
from pydantic import Field

from ultr.datasets.base import Dataset, cache_folder, fitted_arrays
from ultr.errors import DataError, OptionError, nearest
from ultr.log import Log
from ultr.utils.arguments import Seed, checked

FORMAT = 2  # format number of the cached file
MAX_PAIRS = 50_000  # pairs in the fit; if there are more, these are sampled
UNITS = 32  # of the hidden layer of a network
PASSES, MOST_VISITS = 100, 2_500_000  # passes of a network over the rows; fewer if it would visit more rows in all
LoggingName = Literal["weak", "linear", "network", "strong", "both", "randomised"]
Logging = LoggingName | Annotated[float, Field(gt=0, le=1)]
WEAK = 0.5  # share of the `share` that trains a weak ranker
RANDOM_SHARE = 0.05  # of sessions in random order, with the logging `randomised`
MAX_ITEMS = 500  # items of one request that are paired; if there are more, these are sampled


@dataclass(frozen=True, eq=False)
class LinearScorer:
    """A linear ranker of features x: score = ((x - mean) / scale) · weights."""

    mean: np.ndarray
    scale: np.ndarray
    weights: np.ndarray

    def __call__(self, features: np.ndarray) -> np.ndarray:
        weights = (self.weights / self.scale).astype(np.float32)
        return np.asarray(features @ weights - np.float32(self.mean @ weights))


@dataclass(frozen=True, eq=False)
class NetworkScorer:
    """A network of one hidden layer with ReLU; x is normalised as by `LinearScorer`."""

    mean: np.ndarray
    scale: np.ndarray
    hidden: np.ndarray  # [features, units]
    shift: np.ndarray  # [units]
    output: np.ndarray  # [units]

    def __call__(self, features: np.ndarray) -> np.ndarray:
        hidden = (self.hidden / self.scale[:, None]).astype(np.float32)
        shift = (self.shift - self.mean @ hidden).astype(np.float32)
        return np.asarray(np.maximum(features @ hidden + shift, 0) @ self.output.astype(np.float32))


@checked
def ranking_svm(log: Log, *, share: float = 0.01, seed: Seed = 0) -> LinearScorer:
    """Fit a Ranking-SVM on a random share of the requests (Joachims 2002).

    It is a linear support vector machine on the feature differences of pairs of items with different grades.
    """
    from sklearn.svm import LinearSVC

    chosen, features, mean, scale, rng = _chosen(log, share, seed)
    better, worse = _graded_pairs(chosen, rng)
    if not len(better):
        hint = "raise --share (share=...)" if share < 1 else "use data with more than one grade"
        raise DataError("no two items of a request have different grades", got=f"{len(chosen)} requests", hint=hint)
    if len(better) > MAX_PAIRS:
        sample = rng.choice(len(better), MAX_PAIRS, replace=False)
        better, worse = better[sample], worse[sample]
    differences = (features[better] - features[worse]) / scale
    signs = np.where(np.arange(len(differences)) % 2 == 0, 1.0, -1.0)  # because a classifier needs two classes
    if len(signs) == 1:
        differences, signs = np.repeat(differences, 2, axis=0), np.array([1.0, -1.0])
    # C is divided by the number of pairs, so that the penalty is as strong for long lists as for short ones.
    machine = LinearSVC(C=100 / len(signs), dual=False, fit_intercept=False, random_state=seed % 2**32)
    machine.fit(differences * signs[:, None], signs)
    return LinearScorer(mean, scale, machine.coef_.ravel())


@checked
def regression_network(log: Log, *, share: float = 0.01, seed: Seed = 0) -> NetworkScorer:
    """Fit a small network on the grades of a random share of the requests."""
    from sklearn.neural_network import MLPRegressor

    chosen, features, mean, scale, _ = _chosen(log, share, seed)
    passes = min(PASSES, max(1, MOST_VISITS // len(features)))
    network = MLPRegressor(hidden_layer_sizes=(UNITS,), alpha=1.0, max_iter=passes, tol=0.0, random_state=seed % 2**32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it stops after these passes, as it should
        network.fit((features - mean) / scale, chosen.true_relevance)
    return NetworkScorer(mean, scale, network.coefs_[0], network.intercepts_[0], network.coefs_[1].ravel())


def _chosen(log: Log, share: float, seed: int) -> tuple[Log, np.ndarray, np.ndarray, np.ndarray, np.random.Generator]:
    """Return a random share of the requests, their features, the mean and scale of these, and the generator."""
    if not 0 < share <= 1:
        raise OptionError("'share' must be above 0 and at most 1", got=share)
    if not log.feature_names:
        raise DataError("the initial ranker needs features, and the data has none", hint="use data with features")
    rng = np.random.default_rng(seed)
    chosen = log.select(np.sort(rng.permutation(len(log))[: max(1, round(share * len(log)))]))
    features = chosen.features.astype(np.float64)
    if not np.isfinite(features).all():
        raise DataError("the initial ranker needs finite features", hint="replace NaN and infinite values")
    mean, scale = features.mean(0), features.std(0)
    scale[scale < 1e-9] = 1.0
    return chosen, features, mean, scale, rng


def initial_rankers(
    dataset: Dataset, *, kind: Logging = "linear", share: float = 0.01, seed: Seed = 0
) -> list[LinearScorer | NetworkScorer]:
    """Return the rankers that order what simulated users see: one, or a linear one and a network (`both`)."""
    if kind == "both":
        return [initial_ranker(dataset, kind=each, share=share, seed=seed) for each in ("linear", "network")]
    share = {"weak": WEAK * share, "strong": 1.0}.get(kind, share) if isinstance(kind, str) else kind
    family: Literal["linear", "network"] = "linear" if kind in ("weak", "linear", "randomised") else "network"
    return [initial_ranker(dataset, kind=family, share=share, seed=seed)]


def parse_logging(text: str) -> Logging:
    """Return the logging ranker that a text names: one of `Logging`, or the share of a network as a number."""
    names: tuple[LoggingName, ...] = get_args(LoggingName)
    for name in names:
        if text == name:
            return name
    try:
        share = float(text)
    except ValueError as error:
        what = f"'{text}' is not one of {', '.join(names)}, or a share of the training requests"
        raise OptionError(what, hint=nearest(text, names)) from error
    if not 0 < share <= 1:
        raise OptionError("a logging ranker's share must be above 0 and at most 1", got=text)
    return share


def initial_ranker(
    dataset: Dataset, *, kind: Literal["linear", "network"] = "linear", share: float = 0.01, seed: Seed = 0
) -> LinearScorer | NetworkScorer:
    """Return the ranker that orders what simulated users see; it is fitted once, and later read from the cache.

    It is a Ranking-SVM (`linear`), or a small `network`, which estimators of examination cannot recover exactly.
    """
    key = repr((FORMAT, dataset.fingerprint, len(dataset.train), share, seed)).encode()
    name = "initial" if kind == "linear" else f"initial-{kind}"
    path = cache_folder() / f"{name}-{hashlib.blake2b(key, digest_size=12).hexdigest()}.npz"
    width = dataset.train.features.shape[1]
    shapes: dict[str, tuple[int, ...]] = {"mean": (width,), "scale": (width,), "weights": (width,)}
    scorer: type[LinearScorer | NetworkScorer] = LinearScorer
    if kind == "network":
        del shapes["weights"]
        shapes |= {"hidden": (width, UNITS), "shift": (UNITS,), "output": (UNITS,)}
        scorer = NetworkScorer
    fit = ranking_svm if kind == "linear" else regression_network

    def fitted() -> list[np.ndarray]:
        ranker = fit(dataset.train, share=share, seed=seed)
        return [getattr(ranker, name) for name in shapes]

    return scorer(*fitted_arrays(path, shapes, fitted))


def _graded_pairs(log: Log, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays of row numbers: the better and the worse item of each pair in a request with unequal grades."""
    grades = log.true_relevance
    better, worse = [], []
    for start, stop in pairwise(log.offsets.tolist()):
        rows = np.arange(start, stop)
        if len(rows) > MAX_ITEMS:
            rows = rng.choice(rows, MAX_ITEMS, replace=False)
        i, j = np.nonzero(grades[rows, None] > grades[None, rows])
        better.append(rows[i])
        worse.append(rows[j])
    return np.concatenate(better), np.concatenate(worse)


@checked
def randomise(log: Log, share: float, *, seed: Seed = 0) -> Log:
    """Return the log with a random share of its requests shown in random order and marked as randomised."""
    if not 0 <= share <= 1:
        raise OptionError("'share' must be between 0 and 1", got=share)
    rng = np.random.default_rng(seed)
    marked = rng.random(len(log)) < share
    shuffled = np.repeat(marked, log.lengths)
    request = log.request_of_row
    order = np.lexsort((np.where(shuffled, rng.random(log.rows), np.arange(log.rows)), request))
    context = {**log.context, "randomised": pa.array(marked)}
    return replace(log.regroup(order, log.offsets), positions=log.positions, context=context)


@checked
def show(log: Log, scores: np.ndarray, *, items: int = 10) -> Log:
    """Return a log that keeps the `items` best-scored items of each request, at positions 1, 2, ... by score."""
    if items < 1:
        raise OptionError("'items' must be at least 1", got=items)
    order = np.lexsort((-log.check_scores(scores), log.request_of_row))
    positions = np.arange(log.rows) - np.repeat(log.offsets[:-1], log.lengths) + 1
    shown = positions <= items
    offsets = np.concatenate([[0], np.cumsum(np.minimum(log.lengths, items))])
    return replace(log.regroup(order[shown], offsets), positions=positions[shown])
