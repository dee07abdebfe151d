"""The ranker that was in production, and its cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.neural_network import MLPRegressor

from ultr.datasets import initial, initial_ranker, ranking_svm
from ultr.datasets.base import cache_folder
from ultr.datasets.initial import (
    LinearScorer,
    Logging,
    NetworkScorer,
    initial_rankers,
    parse_logging,
    regression_network,
)
from ultr.datasets.synthetic import make_synthetic
from ultr.errors import OptionError
from ultr.evaluation.scores import evaluate_scores
from ultr.training.config import make_config

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


def test_the_strength_of_the_logging_ranker_can_be_chosen():
    data = make_synthetic(requests=(400, 5, 100))

    def quality(kind: Logging) -> float:
        (ranker,) = initial_rankers(data, kind=kind, share=0.05, seed=0)
        return float(evaluate_scores(data.test, ranker(data.test.features), "ndcg@10")["ndcg@10"].mean())

    weak, linear, network, strong = map(quality, ("weak", "linear", 0.2, "strong"))
    assert weak + 0.02 < linear < network - 0.02
    assert network < strong - 0.02


def test_names_of_logging_rankers_are_those_of_shares():
    def made(logging: Logging, **changes):
        (ranker,) = initial_rankers(DATA, kind=logging, share=0.5, seed=3)
        return same(ranker, initial_ranker(DATA, seed=3, **changes))

    assert made("linear", share=0.5)
    assert made("randomised", share=0.5)
    assert made("weak", share=0.5 * 0.5)
    assert made("network", kind="network", share=0.5)
    assert made(0.25, kind="network", share=0.25)
    assert made("strong", kind="network", share=1.0)
    both = initial_rankers(DATA, kind="both", share=0.5, seed=3)
    assert [type(ranker) for ranker in both] == [LinearScorer, NetworkScorer]


def test_a_network_of_many_rows_has_fewer_passes(monkeypatch):
    made = []
    fit = MLPRegressor.fit
    monkeypatch.setattr(MLPRegressor, "fit", lambda self, x, y: (made.append(self), fit(self, x, y))[1])
    regression_network(DATA.train, share=1.0)
    monkeypatch.setattr(initial, "MOST_VISITS", 7 * DATA.train.rows)
    regression_network(DATA.train, share=1.0)
    assert [network.n_iter_ for network in made] == [100, 7]


def test_the_text_of_a_logging_ranker_is_a_name_or_a_share():
    assert [parse_logging(text) for text in ("weak", "strong", "0.25", "1")] == ["weak", "strong", 0.25, 1.0]
    for text, match in (
        ("strnog", "did you mean 'strong'"),
        ("0", "above 0"),
        ("nan", "above 0"),
        ("1.5", "at most 1"),
    ):
        with pytest.raises(OptionError, match=match):
            parse_logging(text)
    config = make_config("synthetic", users="pbm", logging="0.25")
    assert config.simulation.logging == 0.25
    assert make_config("synthetic", users="pbm", logging="strong").simulation.logging == "strong"
    with pytest.raises(OptionError):
        make_config("synthetic", users="pbm", logging="1.5")


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
