from __future__ import annotations

import numpy as np
import pytest

from conftest import make_shown_log
from ultr.methods.anchor import MOST_ROWS, fit_anchor, some_rows


def rows(requests: int, items: int, slopes: np.ndarray, seed: int, noise: float = 0.0):
    """Rows of requests that a ranker with these slopes, and noise, has ordered: x, positions, numbers of requests."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(requests, items, len(slopes)))
    scores = x @ slopes + noise * rng.normal(size=(requests, items))
    order = np.argsort(-scores, axis=1)
    x = np.take_along_axis(x, order[..., None], axis=1).reshape(-1, len(slopes))
    return x, np.tile(np.arange(items) + 1, requests), np.repeat(np.arange(requests), items)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("label", ["clicks", "values"])
def test_a_large_log_gives_the_true_slopes(label):
    true, toward = np.array([0.5, -0.3, 0.0, 0.2]), np.array([1.0, 0.0, 0.5, 0.0])
    x, positions, request = rows(4000, 8, toward, 1)
    rng = np.random.default_rng(2)
    theta = 1 / positions
    labels = (rng.random(len(x)) < theta * np.exp(x @ true - 2.5)).astype(float)
    if label == "values":
        labels *= rng.gamma(2.0, 1.5, len(x))
    found = fit_anchor(x, labels, theta, positions, request, seed=0)
    np.testing.assert_allclose(found.slopes, true, atol=0.08)
    assert found.constant == pytest.approx(-2.5 + (np.log(3) if label == "values" else 0), abs=0.1)


def test_a_small_log_stays_near_the_ranker_that_wrote_it():
    rng = np.random.default_rng(3)
    toward = rng.normal(size=30)
    true = toward / 10 + 0.02 * rng.normal(size=30)
    similar = []
    for seed in range(5):
        x, positions, request = rows(150, 10, toward, seed)
        theta = 1 / positions
        labels = (np.random.default_rng(seed).random(len(x)) < theta * np.exp(x @ true - 2.5)).astype(float)
        found = fit_anchor(x, labels, theta, positions, request, seed=seed)
        plain = np.linalg.lstsq(x, labels / theta, rcond=None)[0]
        similar.append((cosine(found.slopes, true), cosine(plain, true)))
    found, plain = np.mean(similar, axis=0)
    assert found > 0.9
    assert found > plain + 0.2


def test_a_log_that_cannot_be_learned_from_has_no_anchor():
    x, positions, request = rows(30, 5, np.ones(3), 0)
    theta = np.ones(len(x))
    assert fit_anchor(x, np.zeros(len(x)), theta, positions, request, seed=0) is None  # no feedback
    assert fit_anchor(x[:, :0], np.ones(len(x)), theta, positions, request, seed=0) is None  # no numbers
    few = request < 5
    assert fit_anchor(x[few], np.ones(few.sum()), theta[few], positions[few], request[few], seed=0) is None
    constant = np.zeros_like(x)
    found = fit_anchor(constant, np.ones(len(x)), theta, positions, request, seed=0)
    np.testing.assert_array_equal(found.slopes, 0)


def test_the_rows_are_whole_requests_and_not_too_many(monkeypatch):
    log = make_shown_log(requests=50)
    taken, request = some_rows(log, seed=0)
    np.testing.assert_array_equal(taken, np.arange(log.rows))
    np.testing.assert_array_equal(request, log.request_of_row)
    assert log.rows < MOST_ROWS
    monkeypatch.setattr("ultr.methods.anchor.MOST_ROWS", log.rows // 3)
    taken, request = some_rows(log, seed=0)
    assert log.rows // 4 < len(taken) <= log.rows // 3
    assert set(np.bincount(request)) <= set(log.lengths)
    chosen = np.unique(log.request_of_row[taken])
    np.testing.assert_array_equal(np.bincount(request), log.lengths[chosen])
