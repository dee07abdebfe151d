from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import Ridge
from sklearn.neural_network import MLPRegressor

from ultr.datasets import SPLITS, load_dataset, ranking_svm, show
from ultr.datasets.synthetic import GRADE_SHARES, TREE_GRADES, make_synthetic, make_synthetic_trees
from ultr.datasets.users import User
from ultr.errors import OptionError
from ultr.evaluation.scores import evaluate_scores
from ultr.log import Log


@pytest.fixture(scope="module")
def data():
    return make_synthetic()


def test_it_has_the_traits_of_web_search(data):
    assert [len(data[split]) for split in SPLITS] == [3000, 600, 600]
    assert data.train.features.shape[1] == 136
    assert 24 < data.train.lengths.mean() < 26
    shares = np.bincount(data.train.relevance.astype(int)) / data.train.rows
    np.testing.assert_allclose(shares, GRADE_SHARES, atol=0.015)
    for split in SPLITS:
        assert np.isfinite(data[split].features).all()
        assert np.abs(data[split].features).max() < 1e3
    ids = np.concatenate([data[split].request_ids.to_numpy() for split in SPLITS])
    assert len(np.unique(ids)) == 4200
    with pytest.raises(OptionError, match="did you mean 'validation'"):
        _ = data["valid"]


def test_a_seed_repeats_its_world_and_another_draws_another(data):
    assert (make_synthetic().test.features == data.test.features).all()
    fewer = make_synthetic(requests=(50, 600, 600))
    assert (fewer.test.features == data.test.features).all()  # the world does not depend on how much is drawn from it
    assert not np.allclose(make_synthetic(seed=1, requests=(1, 1, 600)).test.relevance[:100], data.test.relevance[:100])


def test_grades_of_trees_follow_features_that_a_linear_ranker_uses_only_in_part():
    data = make_synthetic_trees(requests=(600, 10, 300))
    assert load_dataset("synthetic-trees").fingerprint == make_synthetic_trees().fingerprint
    shares = np.bincount(data.train.relevance.astype(int)) / data.train.rows
    np.testing.assert_allclose(shares, TREE_GRADES, atol=0.02)
    assert data.train.lengths.min() >= 5
    assert data.train.lengths.max() > 40
    assert (make_synthetic_trees(requests=(1, 10, 300)).test.features == data.test.features).all()
    linear, trees = Ridge(), HistGradientBoostingRegressor(random_state=0)
    found = [fitted_ndcg(model, data.train, data.train.relevance, data.test) for model in (linear, trees)]
    none = float(evaluate_scores(data.test, np.zeros(data.test.rows))["ndcg@10"].mean())
    assert none + 0.05 < found[0] < found[1] - 0.02


def fitted_ndcg(model, train: Log, target: np.ndarray, test: Log) -> float:
    """Mean NDCG@10 on test of a regression of the target on standardised features."""
    mean, scale = train.features.mean(0), train.features.std(0)
    model.fit((train.features - mean) / scale, target)
    return float(evaluate_scores(test, model.predict((test.features - mean) / scale))["ndcg@10"].mean())


def network() -> MLPRegressor:
    return MLPRegressor(hidden_layer_sizes=(64,), alpha=0.3, max_iter=12, early_stopping=True, random_state=0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_network_beats_a_linear_ranker_and_biased_feedback_hurts(data):
    attraction = User().attracted(torch.from_numpy(data.train.relevance)).numpy()
    linear = fitted_ndcg(Ridge(1.0), data.train, attraction, data.test)
    deep = fitted_ndcg(network(), data.train, attraction, data.test)
    assert deep > linear + 0.05
    shown = show(data.train, ranking_svm(data.train)(data.train.features))
    user = User()
    grades, positions = torch.from_numpy(shown.relevance), torch.from_numpy(shown.positions)
    # Many clicks on each item leave bias and no noise: the click rate itself is the target.
    biased = user.click_probability(grades, positions).numpy()
    fair = user.unbiased().click_probability(grades, positions).numpy()
    from_biased = fitted_ndcg(network(), shown, biased, data.test)
    from_fair = fitted_ndcg(network(), shown, fair, data.test)
    assert from_fair > from_biased + 0.03


def test_the_initial_ranker_is_mediocre_but_no_fool(data):
    scores = {
        "initial": ranking_svm(data.train)(data.test.features),
        "all labels": ranking_svm(data.train, share=0.3)(data.test.features),
        "random": np.random.default_rng(0).random(data.test.rows),
        "truth": data.test.relevance,
    }
    figures = {name: evaluate_scores(data.test, values)["ndcg@10"].mean() for name, values in scores.items()}
    assert figures["random"] + 0.05 < figures["initial"] < figures["all labels"] - 0.03 < figures["truth"]


def test_the_initial_ranker_does_not_depend_on_the_scale_of_features_or_on_constant_ones(data):
    log = data.train.select(np.arange(60))
    stretched = log.features * np.geomspace(1e-4, 1e5, 136).astype(np.float32)
    stretched[:, 7] = 3.0
    plain = log.features.copy()
    plain[:, 7] = 3.0
    one, two = (ranking_svm(replace(log, features=f), share=1.0)(f) for f in (plain, stretched))
    assert np.corrcoef(one, two)[0, 1] > 0.999


def test_shown_items_are_the_best_by_score_in_order(data):
    log = data.validation
    scores = np.random.default_rng(0).normal(size=log.rows)
    shown = show(replace(log, item_ids=None), scores, items=4)
    assert (shown.lengths == np.minimum(log.lengths, 4)).all()
    for i in (0, 17, 599):
        rows = np.arange(log.offsets[i], log.offsets[i + 1])
        best = rows[np.argsort(-scores[rows])][:4]
        np.testing.assert_array_equal(shown.features[shown.offsets[i] : shown.offsets[i + 1]], log.features[best])
        assert shown.positions[shown.offsets[i] : shown.offsets[i + 1]].tolist() == [1, 2, 3, 4]
    with pytest.raises(OptionError, match="'items' must be at least 1"):
        show(log, scores, items=0)


def test_an_initial_ranker_that_cannot_be_fitted_is_an_error(data):
    with pytest.raises(OptionError, match="share"):
        ranking_svm(data.train, share=0)
    flat = replace(data.validation, relevance=np.zeros(data.validation.rows, np.float32))
    with pytest.raises(Exception, match="no two items of a request have different grades"):
        ranking_svm(flat, share=0.1)
