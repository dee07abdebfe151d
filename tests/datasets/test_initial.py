"""The ranker that was in production, and its cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.neural_network import MLPRegressor

from ultr.datasets import initial, initial_ranker, ranking_svm
from ultr.datasets.base import cache_folder
from ultr.datasets.initial import regression_network
from ultr.datasets.synthetic import make_synthetic
from ultr.evaluation.scores import evaluate_scores

DATA = make_synthetic(requests=(60, 5, 5))


def same(a, b) -> bool:
    return type(a) is type(b) and all(np.array_equal(value, getattr(b, name)) for name, value in vars(a).items())


def test_the_initial_ranker_is_fitted_once(monkeypatch):
    fitted = initial_ranker(DATA, share=0.5, seed=3)
    assert same(fitted, ranking_svm(DATA.train, share=0.5, seed=3))
    with monkeypatch.context() as patch:
        patch.setattr(initial, "ranking_svm", lambda *_, **__: pytest.fail("it was fitted again"))
        assert same(initial_ranker(DATA, share=0.5, seed=3), fitted)
    for other in ({"share": 0.4, "seed": 3}, {"share": 0.5, "seed": 4}):
        assert not same(initial_ranker(DATA, **other), fitted)
    assert not same(initial_ranker(replace(DATA, fingerprint="other", train=DATA.test), share=0.5, seed=3), fitted)


def test_the_initial_ranker_can_be_a_network_which_is_fitted_once(monkeypatch):
    fitted = initial_ranker(DATA, kind="network", share=0.5, seed=3)
    assert same(fitted, regression_network(DATA.train, share=0.5, seed=3))
    with monkeypatch.context() as patch:
        patch.setattr(initial, "regression_network", lambda *_, **__: pytest.fail("it was fitted again"))
        assert same(initial_ranker(DATA, kind="network", share=0.5, seed=3), fitted)
    assert not same(initial_ranker(DATA, kind="network", share=0.5, seed=4), fitted)
    assert not same(initial_ranker(DATA, share=0.5, seed=3), fitted)


def test_a_network_scores_as_that_of_the_library_and_is_not_linear(monkeypatch):
    made = []
    fit = MLPRegressor.fit
    monkeypatch.setattr(MLPRegressor, "fit", lambda self, x, y: (made.append(self), fit(self, x, y))[1])
    fitted = regression_network(DATA.train, share=0.5, seed=3)
    features = DATA.train.features
    normal = (features.astype(np.float64) - fitted.mean) / fitted.scale
    expected = made[0].predict(normal) - made[0].intercepts_[1]
    np.testing.assert_allclose(fitted(features), expected, rtol=1e-3, atol=1e-3)
    linear = np.linalg.lstsq(np.c_[normal, np.ones(len(normal))], expected, rcond=None)[0]
    assert np.abs(np.c_[normal, np.ones(len(normal))] @ linear - expected).std() > 0.05 * expected.std()


def test_a_network_ranks_better_than_chance():
    data = make_synthetic(requests=(300, 5, 100))
    scores = initial_ranker(data, kind="network", share=0.3, seed=0)(data.test.features)
    good, random = (
        evaluate_scores(data.test, each)["ndcg@10"].mean()
        for each in (scores, np.random.default_rng(0).random(len(scores)))
    )
    assert good > random + 0.1


def test_a_damaged_or_unwritable_cache_is_not_an_error(monkeypatch, tmp_path):
    fitted = initial_ranker(DATA, share=0.5, seed=5)
    for path in cache_folder().glob("initial-*.npz"):
        path.write_bytes(b"damaged")
    assert same(initial_ranker(DATA, share=0.5, seed=5), fitted)
    for path in cache_folder().glob("initial-*.npz"):
        with path.open("wb") as handle:
            np.savez(handle, mean=np.zeros(3), scale=np.zeros(3), weights=np.zeros(3))
    assert same(initial_ranker(DATA, share=0.5, seed=5), fitted)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ULTR_CACHE", str(tmp_path / "file"))
    assert same(initial_ranker(DATA, share=0.5, seed=5), fitted)
