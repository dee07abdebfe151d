"""The importance of features: how much a metric falls on held-out requests if the values of a feature are permuted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import nn

from ultr.evaluation.scores import mean_with_interval
from ultr.log import Log
from ultr.rankers import LinearRanker
from ultr.rankers.boosters import LightGBM, TreeRanker
from ultr.rankers.combined import Blend

REPEATS = 2  # permutations of each feature
CANDIDATES, SCREENED_ROWS = 50, 512  # most features that are evaluated by default; rows on which they are chosen
SCORED_ROWS = 100_000  # most rows that are scored for all features and permutations together


@dataclass(frozen=True)
class FeatureImportance:
    """The importance of a feature: the fall of a metric without it, with a 95% interval over requests."""

    feature: str
    drop: float
    low: float
    high: float
    gain: float | None = None  # its share of the gain of all splits; None if the ranker has no trees


def rows_to_score(features: int, repeats: int = REPEATS) -> int:
    """Return the number of rows on which the importance of so many features is estimated."""
    return SCORED_ROWS // (max(1, min(features, CANDIDATES)) * repeats)


def permutation_importance(
    log: Log,
    score: Callable[[np.ndarray], np.ndarray],
    evaluate: Callable[[np.ndarray], np.ndarray],
    *,
    gains: np.ndarray | None = None,
    repeats: int = REPEATS,
    seed: int = 0,
    most: int | None = None,
) -> list[FeatureImportance]:
    """Return the importance of the features of a log, the most important first.

    `score` returns scores [rows] of features [rows, features]. `evaluate` returns a metric [requests] of scores, larger
    is better. Values are permuted over all rows. Of more than `most` features (default 50), only those are evaluated
    whose permutation changes the scores of some rows most.
    """
    rng = np.random.default_rng(seed)
    features = np.array(log.features)  # one column at a time is permuted in place
    columns = _most_effective(features, score, rng, most or CANDIDATES)
    before = evaluate(score(features))
    found = []
    for column in columns.tolist():
        values = features[:, column].copy()
        drops = np.zeros(len(log))
        for _ in range(repeats):
            features[:, column] = rng.permutation(values)
            drops += (before - evaluate(score(features))) / repeats
        features[:, column] = values
        mean = mean_with_interval(drops, log.weights)
        gain = None if gains is None else float(gains[column])
        found.append(FeatureImportance(log.feature_names[column], mean.mean, mean.low, mean.high, gain))
    return sorted(found, key=lambda each: -each.drop)


def tree_gains(ranker: nn.Module, features: int) -> np.ndarray | None:
    """Return the share of each feature [features] in the gain of all splits; None if the ranker has other parts.

    Trees may start at a linear model, which has no splits.
    """
    parts = [part.ranker for part in ranker.parts if part.weight] if isinstance(ranker, Blend) else [ranker]
    trees = [part for part in parts if isinstance(part, TreeRanker)]
    if not trees or not all(isinstance(part, TreeRanker | LinearRanker) for part in parts):
        return None
    gains = sum(_gains(each, features) for each in trees)
    return np.asarray(gains / max(np.sum(gains), np.finfo(np.float64).tiny))


def _gains(ranker: TreeRanker, features: int) -> np.ndarray:
    trees, rounds = ranker.booster.trees, ranker.rounds
    if isinstance(ranker.booster, LightGBM):
        return np.asarray(trees.feature_importance("gain", iteration=rounds), np.float64)
    found = trees[:rounds].get_score(importance_type="total_gain")  # without the features that no split uses
    names = trees.feature_names or [f"f{i}" for i in range(features)]
    return np.array([found.get(name, 0.0) for name in names])


def _most_effective(
    features: np.ndarray, score: Callable[[np.ndarray], np.ndarray], rng: np.random.Generator, most: int
) -> np.ndarray:
    """Return the indices of at most `most` features, those whose permutation changes scores most."""
    count = features.shape[1]
    if count <= most:
        return np.arange(count)
    rows = features[rng.permutation(len(features))[:SCREENED_ROWS]]
    before, change = score(rows), np.zeros(count)
    for column in range(count):
        values = rows[:, column].copy()
        rows[:, column] = rng.permutation(values)
        change[column] = np.abs(score(rows) - before).mean()
        rows[:, column] = values
    return np.sort(np.argsort(-change, kind="stable")[:most])
