"""The ranker that was in production when the log was written: a Ranking-SVM fitted on a small share of true labels."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from ultr.arguments import Seed, checked
from ultr.datasets.base import Dataset
from ultr.datasets.cache import cache_folder, kept_arrays
from ultr.errors import DataError, OptionError, OutputError
from ultr.files import atomic_path
from ultr.log import Log

FORMAT = 1  # of what is cached
MAX_PAIRS = 50_000
MAX_ITEMS = 500  # of one request


@dataclass(frozen=True, eq=False)
class LinearScorer:
    """score = ((x - mean) / scale) · weights."""

    mean: np.ndarray
    scale: np.ndarray
    weights: np.ndarray

    def __call__(self, features: np.ndarray) -> np.ndarray:
        weights = (self.weights / self.scale).astype(np.float32)
        return np.asarray(features @ weights - np.float32(self.mean @ weights))


@checked
def ranking_svm(log: Log, *, share: float = 0.01, seed: Seed = 0) -> LinearScorer:
    """A linear support vector machine on the feature differences of pairs with different grades (Joachims 2002),
    from a random share of the requests.
    """
    from sklearn.svm import LinearSVC

    if not 0 < share <= 1:
        raise OptionError("the share of requests should be above 0 and at most 1", got=share)
    if not log.feature_names:
        raise DataError("an initial ranker needs features, and the data has none", mend="use data with features")
    rng = np.random.default_rng(seed)
    chosen = log.select(np.sort(rng.permutation(len(log))[: max(1, round(share * len(log)))]))
    features = chosen.features.astype(np.float64)
    if not np.isfinite(features).all():
        raise DataError("an initial ranker needs features that are finite", mend="fill or clip them")
    mean, scale = features.mean(0), features.std(0)
    scale[scale < 1e-9] = 1.0
    better, worse = _graded_pairs(chosen, rng)
    if not len(better):
        mend = "take a larger share" if share < 1 else "use data with more than one grade"
        raise DataError("no two items of a request differ in grade", got=f"{len(chosen)} requests", mend=mend)
    if len(better) > MAX_PAIRS:
        kept = rng.choice(len(better), MAX_PAIRS, replace=False)
        better, worse = better[kept], worse[kept]
    differences = (features[better] - features[worse]) / scale
    signs = np.where(np.arange(len(differences)) % 2 == 0, 1.0, -1.0)  # a classifier needs both classes
    if len(signs) == 1:
        differences, signs = np.repeat(differences, 2, axis=0), np.array([1.0, -1.0])
    # C shrinks with the number of pairs, so that the penalty weighs the same for long lists as for short ones.
    machine = LinearSVC(C=100 / len(signs), dual=False, fit_intercept=False, random_state=seed % 2**32)
    machine.fit(differences * signs[:, None], signs)
    return LinearScorer(mean, scale, machine.coef_.ravel())


def initial_ranker(dataset: Dataset, *, share: float = 0.01, seed: Seed = 0) -> LinearScorer:
    """The Ranking-SVM of a data set's training requests, fitted once: the next time it comes from the cache."""
    about = repr((FORMAT, dataset.fingerprint, len(dataset.train), share, seed)).encode()
    path = cache_folder() / f"initial-{hashlib.blake2b(about, digest_size=12).hexdigest()}.npz"
    names, width = ("mean", "scale", "weights"), dataset.train.features.shape[1]
    if (kept := kept_arrays(path, dict.fromkeys(names, (width,)))) is not None:
        return LinearScorer(*kept)
    fitted = ranking_svm(dataset.train, share=share, seed=seed)
    try:
        with atomic_path(path, overwrite=True) as temporary, temporary.open("wb") as handle:
            np.savez(handle, **{name: getattr(fitted, name) for name in names})
    except OutputError:  # no cache can be written here: slower next time, and no reason to fail
        pass
    return fitted


def _graded_pairs(log: Log, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows (better, worse) of every pair of one request with different grades; of long requests, a sample's."""
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
    """A log that was shown, a share of its requests now in random order and marked as such."""
    if not 0 <= share <= 1:
        raise OptionError("the share in random order should be between 0 and 1", got=share)
    rng = np.random.default_rng(seed)
    marked = rng.random(len(log)) < share
    shuffled = np.repeat(marked, log.lengths)
    request = log.request_of_row
    order = np.lexsort((np.where(shuffled, rng.random(log.rows), np.arange(log.rows)), request))
    context = {**log.context, "randomised": pa.array(marked)}
    return replace(log.regroup(order, log.offsets), positions=log.positions, context=context)


@checked
def show(log: Log, scores: np.ndarray, *, items: int = 10) -> Log:
    """The log as a ranker would have shown it: the best items at positions 1, 2, ..., the rest dropped."""
    if items < 1:
        raise OptionError("at least one item is shown", got=items)
    order = np.lexsort((-log.check_scores(scores), log.request_of_row))
    positions = np.arange(log.rows) - np.repeat(log.offsets[:-1], log.lengths) + 1
    kept = positions <= items
    offsets = np.concatenate([[0], np.cumsum(np.minimum(log.lengths, items))])
    return replace(log.regroup(order[kept], offsets), positions=positions[kept])
