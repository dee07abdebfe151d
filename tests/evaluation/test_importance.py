"""The importance of features, against a world in which the truth is known."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from ultr.evaluation import importance
from ultr.evaluation.importance import permutation_importance, rows_to_score
from ultr.log import Log

REQUESTS, ITEMS, FEATURES = 400, 6, 8
WEIGHTS = np.array([2.0, 1.0, 0.5, *[0.0] * (FEATURES - 3)])


def world(seed: int = 0) -> tuple[Log, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(REQUESTS * ITEMS, FEATURES)).astype(np.float32)
    log = Log(
        features=features,
        offsets=np.arange(REQUESTS + 1) * ITEMS,
        request_ids=pa.array(np.arange(REQUESTS)),
        feature_names=tuple(f"f{i}" for i in range(FEATURES)),
    )
    return log, (features @ WEIGHTS).reshape(REQUESTS, ITEMS)


def first_item(worth: np.ndarray):
    """Return a metric [requests]: the worth of the item with the highest score."""
    return lambda scores: worth[np.arange(REQUESTS), scores.reshape(REQUESTS, ITEMS).argmax(1)]


def test_the_drop_is_that_of_a_ranker_without_the_feature():
    log, worth = world()
    found = permutation_importance(log, lambda x: x @ WEIGHTS, first_item(worth), repeats=20)
    assert [each.feature for each in found[:3]] == ["f0", "f1", "f2"]
    # The maximum of `ITEMS` standard normal numbers has the mean m.
    m, norm = 1.2672, np.linalg.norm(WEIGHTS)
    for place, each in enumerate(found[:3]):
        kept = WEIGHTS @ WEIGHTS - WEIGHTS[place] ** 2  # the covariance of the permuted score with the worth
        assert each.drop == pytest.approx(m * norm - m * kept / norm, rel=0.15)
        assert each.low < each.drop < each.high
    assert all(each.drop == 0 for each in found[3:])
    np.testing.assert_array_equal(log.features, world()[0].features)


def test_of_many_features_only_those_that_move_scores_are_evaluated(monkeypatch):
    monkeypatch.setattr(importance, "CANDIDATES", 3)
    log, worth = world()
    found = permutation_importance(log, lambda x: x @ WEIGHTS, first_item(worth))
    assert [each.feature for each in found] == ["f0", "f1", "f2"]
    found = permutation_importance(log, lambda x: x @ WEIGHTS, first_item(worth), most=2)
    assert [each.feature for each in found] == ["f0", "f1"]


def test_the_number_of_scored_rows_is_bounded():
    for features in (1, 10, 1000):
        assert rows_to_score(features, 2) * min(features, importance.CANDIDATES) * 2 <= importance.SCORED_ROWS
