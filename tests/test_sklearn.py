from __future__ import annotations

import json
import pickle

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import sklearn
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, GroupKFold, GroupShuffleSplit, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks

import ultr
from bias.shop import shop
from ultr import UnbiasedRanker
from ultr.errors import UltrError
from worlds.shop import shop as shop_world

# In these logs, one feature decides nearly alone on clicks.
pytestmark = pytest.mark.filterwarnings("ignore:features that may depend on feedback of their row")
FEATURES = ["feature_good", "feature_noise"]


def frame(requests: int = 120, seed: int = 0) -> pd.DataFrame:
    """Feedback of users who click by the first feature, at any position."""
    rng = np.random.default_rng(seed)
    rows = requests * 5
    good = rng.normal(size=rows)
    return pd.DataFrame(
        {
            "request": np.repeat(np.arange(requests), 5),
            "position": np.tile(np.arange(1, 6), requests),
            "feature_good": good,
            "feature_noise": rng.normal(size=rows),
            "click": (good + 0.3 * rng.normal(size=rows) > 0.5).astype(int),
        }
    ).sample(frac=1, random_state=seed)


def arrays(data: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    return (
        data[FEATURES].to_numpy(),
        data["click"].to_numpy(),
        {"request": data["request"].to_numpy(), "position": data["position"].to_numpy()},
    )


def ranker(**options) -> UnbiasedRanker:
    few = {"bias_steps": 20, "batch": 32, "evaluate_every": 20}
    return UnbiasedRanker(label="click", ranker="mlp", hidden=(8,), steps=60, options=few, device="cpu", **options)


def quick(**options) -> UnbiasedRanker:
    few = {"label": "click", "method": "pointwise", "ranker": "linear", "steps": 15, "lr": 0.1}
    return UnbiasedRanker(**{**few, "options": {"evaluate_every": 15}, "device": "cpu", **options})


def test_frames_and_arrays_give_the_same_scores_in_the_order_of_rows():
    data = frame()
    matrix, clicks, columns = arrays(data)
    model = ranker(method="lambdarank")
    from_pandas = clone(model).fit(data)
    from_polars = clone(model).fit(pl.from_pandas(data))
    from_arrays = clone(model).fit(matrix, clicks, **columns)
    scores = from_pandas.predict(data)
    assert isinstance(scores, np.ndarray)
    np.testing.assert_array_equal(from_polars.predict(pl.from_pandas(data)), scores)
    np.testing.assert_array_equal(from_arrays.predict(matrix), scores)
    np.testing.assert_array_equal(from_pandas.predict(matrix), scores)
    np.testing.assert_array_equal(from_pandas.predict(data.iloc[::-1]), scores[::-1])
    assert np.corrcoef(scores, data["feature_good"])[0, 1] > 0.9
    assert from_pandas.score(data, data["feature_good"] > 0) > 0.95
    assert [line["step"] for line in from_pandas.history_] == [20, 40, 60]


def test_features_have_the_names_of_the_frame():
    data = frame(40)
    matrix, clicks, columns = arrays(data)
    model = quick().fit(data)
    assert model.feature_names_in_.tolist() == FEATURES
    assert model.n_features_in_ == 2
    model.fit(matrix, clicks, **columns)
    assert model.n_features_in_ == 2
    assert not hasattr(model, "feature_names_in_")


def test_feedback_may_be_in_the_frame_or_next_to_it():
    data = frame(40).assign(dwell=lambda rows: 3.0 * rows["click"])
    matrix, clicks, columns = arrays(data)
    bare, two = data.drop(columns=["click", "dwell"]), data[["click", "dwell"]]
    by_click = quick().fit(data).predict(data)
    for y in (data["click"], clicks, clicks.tolist(), data[["click"]], pl.from_pandas(data)["click"]):
        np.testing.assert_array_equal(quick().fit(bare, y).predict(bare), by_click)
    features = quick().fit(data[FEATURES], clicks, **columns)
    np.testing.assert_array_equal(features.predict(data[FEATURES]), by_click)
    both = quick(label="click + dwell").fit(data).predict(data)
    for actions in (two, {"click": clicks, "dwell": 3.0 * clicks}):
        np.testing.assert_array_equal(
            quick(label="click + dwell").fit(matrix, actions=actions, **columns).predict(matrix), both
        )
    for y in (two, two.to_numpy()):
        np.testing.assert_array_equal(quick(label="click + dwell").fit(matrix, y, **columns).predict(matrix), both)
    np.testing.assert_array_equal(
        quick(label="dwell / 3").fit(matrix, 3.0 * clicks, **columns).predict(matrix), by_click
    )


def test_without_a_label_the_feedback_decides_on_it():
    data = frame(40)
    matrix, clicks, columns = arrays(data)
    assert quick(label=None).fit(data).model_.label == "click"
    assert quick(label=None).fit(matrix, clicks, **columns).model_.label == "click"
    dwell = data.assign(dwell=lambda rows: 3.0 * rows["click"])
    model = quick(label=None).fit(dwell)
    assert model.model_.label == "click + dwell / exp(3)"
    two = quick(label=None).fit(dwell.drop(columns=["click", "dwell"]), dwell[["click", "dwell"]])
    np.testing.assert_array_equal(two.predict(data), model.predict(data))
    assert np.isfinite(model.score(dwell))


def test_other_options_are_given_by_path():
    data = frame(40)
    expected = quick(method="pairwise-em", ranker="mlp", options={"network.hidden": [3], "bias_steps": 2}).fit(data)
    again = quick(method="pairwise-em", ranker="mlp", hidden=(3,), options={"network.bias_steps": 2}).fit(data)
    np.testing.assert_array_equal(again.predict(data), expected.predict(data))
    with pytest.raises(UltrError, match="'steps' is a parameter of its own, got options; leave it out of options"):
        quick(options={"steps": 3}).fit(data)
    with pytest.raises(UltrError, match=r"there is no option 'network\.hiden'; did you mean 'network\.hidden'"):
        quick(options={"network.hiden": 3}).fit(data)


def test_columns_are_named_in_the_constructor_or_in_fit():
    data = frame(40)
    renamed = data.set_axis(["uid", "place", "a", "b", "taken"], axis=1)
    names = {"request": "uid", "position": "place", "actions": ["taken"], "features": ["a", "b"]}
    expected = quick().fit(data)
    for model in (quick(**names).set_params(label="taken").fit(renamed), quick(label="taken").fit(renamed, **names)):
        np.testing.assert_array_equal(model.predict(renamed), expected.predict(data))
        assert model.score(renamed) == expected.score(data)
        assert model.score(renamed, data["feature_good"] > 0) == expected.score(data, data["feature_good"] > 0)


def test_an_array_may_contain_request_and_position():
    data = frame(40)
    matrix, clicks, columns = arrays(data)
    whole = np.column_stack([columns["position"], matrix, columns["request"]])
    model = quick(request=3, position=0).fit(whole, clicks)
    expected = quick().fit(matrix, clicks, **columns)
    np.testing.assert_array_equal(model.predict(whole), expected.predict(matrix))
    assert model.score(whole, clicks) == expected.score(matrix, clicks, **columns)


def test_features_in_a_list_column_are_read():
    data = frame(40)
    listed = data[["request", "position", "click"]].assign(features=list(data[FEATURES].to_numpy()))
    model = quick().fit(listed)
    np.testing.assert_array_equal(model.predict(listed), quick().fit(data).predict(data))
    assert model.feature_names_in_.tolist() == ["features[0]", "features[1]"]
    assert model.score(listed) == model.score(pl.from_pandas(listed))


def test_ranks_start_at_one_in_each_request_and_the_frame_is_not_changed():
    data = frame(20)
    model = quick().fit(data)
    ranked = model.rank(data)
    by_hand = ranked.groupby("request")["score"].rank(ascending=False).astype(int)
    pd.testing.assert_series_equal(ranked["rank"], by_hand, check_names=False)
    pd.testing.assert_frame_equal(ranked.drop(columns=["score", "rank"]), data)
    np.testing.assert_array_equal(ranked["score"], model.predict(data))
    by_polars = model.rank(pl.from_pandas(data))
    assert isinstance(by_polars, pl.DataFrame)
    assert by_polars["rank"].to_list() == ranked["rank"].tolist()
    by_arrow = model.rank(pa.Table.from_pandas(data, preserve_index=False))
    assert by_arrow["rank"].to_pylist() == ranked["rank"].tolist()
    served = data[FEATURES]  # without positions and clicks; requests are passed separately
    assert model.rank(served, request=data["request"])["rank"].tolist() == ranked["rank"].tolist()
    assert model.rank(served.assign(feature_good=0, feature_noise=0), request=[0] * 100)["rank"].tolist() == list(
        range(1, 101)
    )


def test_the_estimated_bias_is_an_attribute():
    data = frame(40)
    model = quick(method="ipw-pointwise").fit(data)
    assert model.bias_["label"] == "click"
    assert model.theta_ == dict(zip(model.bias_["positions"], model.bias_["theta"], strict=True))
    assert list(model.theta_) == [1, 2, 3, 4, 5]
    assert quick(method="ipw-pointwise", propensities=dict.fromkeys(range(1, 6), 0.5)).fit(data).theta_[3] == 0.5
    model = quick(method="pointwise").fit(data)
    assert model.bias_ is None
    assert model.theta_ is None


def test_a_method_for_clicks_warns_about_other_labels():
    data = frame().assign(dwell=lambda rows: 3.0 * rows["click"])
    model = ranker(method="dla").set_params(label="click + dwell")
    with pytest.warns(UserWarning, match="'dla' is a method for clicks: it uses 1 if 'click \\+ dwell' is") as warned:
        model.fit(data)
    (of_method,) = [each for each in warned if "is a method for clicks" in str(each.message)]
    assert of_method.filename == __file__
    assert model.bias_["label"] == "click + dwell > 0"
    values = ranker(method="ipw-listwise", method_options={"labels": "values"}).set_params(label="click + dwell")
    assert values.fit(data).bias_["label"] == "click + dwell"


# Held-out feedback


THETA = {1: 1.0, 2: 0.5, 4: 0.3, 7: 0.08}  # positions are ids


def biased(requests: int, seed: int = 0) -> pd.DataFrame:
    """Requests of four items, roughly in the order of the first feature, the probability of a click if examined."""
    rng = np.random.default_rng(seed)
    chance = rng.uniform(size=(requests, 4))
    order = np.argsort(-chance + rng.normal(size=chance.shape), axis=1)
    chance = np.take_along_axis(chance, order, axis=1)
    clicks = rng.uniform(size=chance.shape) < chance * np.array(list(THETA.values()))
    return pd.DataFrame(
        {
            "request": np.repeat(np.arange(requests), 4),
            "position": np.tile(list(THETA), requests),
            "feature_chance": chance.ravel(),
            "feature_noise": rng.normal(size=4 * requests),
            "click": clicks.ravel().astype(int),
        }
    ).sample(frac=1, random_state=seed)


def expected_clicks(model: UnbiasedRanker, data: pd.DataFrame) -> float:
    """Return the expected clicks per request if these users were shown the new rankings."""
    ranked = model.rank(data)
    seen = np.array(list(THETA.values()))[ranked["rank"] - 1]
    return float((seen * ranked["feature_chance"]).sum() / data["request"].nunique())


def test_without_true_labels_the_score_is_feedback_reweighted_to_the_new_positions():
    data = biased(30)
    model = quick(propensities=THETA).fit(data)
    total = 0.0
    for _, rows in model.rank(data).groupby("request"):
        positions = sorted(rows["position"])
        for position, click, rank in zip(rows["position"], rows["click"], rows["rank"], strict=True):
            total += click * min(THETA[positions[rank - 1]] / THETA[position], 10)
    assert model.score(data) == pytest.approx(total / 30)


def test_requests_have_weights():
    data = frame(40)
    weight = np.where(data["request"] == 0, 1e6, 1.0)
    known = dict.fromkeys(range(1, 6), 0.5)
    model = quick(propensities=known).fit(data, sample_weight=weight)
    np.testing.assert_array_equal(
        model.predict(data), quick(propensities=known).fit(data.assign(weight=weight)).predict(data)
    )
    assert not np.array_equal(model.predict(data), quick(propensities=known).fit(data).predict(data))
    heavy = data["request"] == 0
    for truth in (None, data["feature_noise"] > 0):
        alone = model.score(data[heavy], None if truth is None else truth[heavy])
        assert model.score(data, truth, sample_weight=weight) == pytest.approx(alone, rel=1e-3)
        assert model.score(data.assign(weight=weight), truth) == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("known", [True, False])
def test_the_score_of_held_out_feedback_is_close_to_the_expected_clicks(known):
    data, held_out = biased(150), biased(2000 if known else 600, seed=1)
    model = quick(propensities=THETA if known else None, steps=60).fit(data)
    shown = held_out.groupby("request")["click"].sum().mean()
    value = model.score(held_out)
    # Clipping 1 / 0.08 at 10 has a small error; estimated examination adds to it.
    assert value == pytest.approx(expected_clicks(model, held_out), rel=0.05 if known else 0.15)
    assert value > 1.15 * shown


def test_scores_do_not_depend_on_the_bias_that_a_ranker_has_estimated():
    data = biased(100)
    held_out = biased(200, seed=1)
    model, other = quick(method="ipw-pointwise").fit(data), quick(method="pointwise").fit(data)
    other.model_ = model.model_
    assert model.score(held_out) == other.score(held_out)


def test_true_labels_may_be_a_column():
    data = frame(40)
    model = quick().fit(data)
    truth = (data["feature_noise"] > 0).astype(int)
    assert model.score(data.assign(relevance=truth)) == model.score(data, truth)
    assert model.score(data, truth) != model.score(data)


# Together with scikit-learn


@pytest.mark.parametrize(
    "name",
    [
        "check_do_not_raise_errors_in_init_or_set_params",
        "check_estimator_cloneable",
        "check_estimator_repr",
        "check_estimators_unfitted",
        "check_get_params_invariance",
        "check_no_attributes_set_in_init",
        "check_parameters_default_constructible",
        "check_set_params",
        "check_valid_tag_types",
    ],
)
def test_checks_of_scikit_learn_that_do_not_fit(name):
    if not hasattr(estimator_checks, name):
        pytest.skip("this version of scikit-learn does not have the check")
    getattr(estimator_checks, name)("UnbiasedRanker", UnbiasedRanker())


def test_it_is_a_scikit_learn_estimator():
    model = ranker(lr=0.05)
    assert clone(model).get_params() == model.get_params()
    assert model.set_params(lr=0.01).lr == 0.01
    assert "lr=0.01" in repr(model)
    data = frame(40)
    assert quick().fit(data).fit(data).get_params() == quick().get_params()
    for method in (ranker().predict, ranker().score, ranker().rank):
        with pytest.raises(NotFittedError):
            method(data)
    model = quick().fit(data)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(data), model.predict(data))  # noqa: S301


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_grid_search_over_a_frame_does_not_split_requests(library):
    data = biased(90) if library == "pandas" else pl.from_pandas(biased(90))
    model = quick(propensities=THETA)
    search = GridSearchCV(model, {"lr": [1e-6, 0.1]}, cv=GroupKFold(3), error_score="raise")
    search.fit(data, groups=data["request"])
    assert search.best_params_ == {"lr": 0.1}
    rows = data.__getitem__ if library == "polars" else data.iloc.__getitem__
    by_hand = [
        clone(model).fit(rows(train)).score(rows(test))
        for train, test in GroupKFold(3).split(data, groups=data["request"])
    ]
    assert search.cv_results_["mean_test_score"][1] == pytest.approx(np.mean(by_hand))
    assert search.predict(data).shape == (360,)


def test_a_frame_is_cross_validated_with_clicks_in_y():
    data = biased(60)
    folds = {"groups": data["request"], "cv": GroupShuffleSplit(2, random_state=0), "error_score": "raise"}
    model = quick(propensities=THETA)
    scores = cross_val_score(model, data.drop(columns="click"), data["click"], **folds)
    np.testing.assert_array_equal(scores, cross_val_score(model, data, **folds))


def test_arrays_are_cross_validated_with_column_numbers_or_metadata_routing():
    data = biased(60)
    request, position, clicks = (data[name].to_numpy() for name in ("request", "position", "click"))
    matrix = data[["feature_chance", "feature_noise"]].to_numpy()
    folds = {"groups": request, "cv": GroupKFold(2), "error_score": "raise"}
    model = quick(propensities=THETA)
    expected = cross_val_score(model, data, **folds)
    whole = np.column_stack([request, position, matrix])
    by_column = clone(model).set_params(request=0, position=1)
    np.testing.assert_array_equal(cross_val_score(by_column, whole, clicks, **folds), expected)

    columns = {"request": request, "position": position}
    search = GridSearchCV(model, {"lr": [0.1]}, cv=GroupKFold(2), refit=False, error_score="raise")
    with pytest.raises(UltrError, match="the request of each row is not given"):
        search.fit(matrix, clicks, groups=request, **columns)
    with sklearn.config_context(enable_metadata_routing=True):
        model.set_fit_request(request=True, position=True).set_score_request(request=True, position=True)
        search.fit(matrix, clicks, groups=request, **columns)
        assert search.cv_results_["mean_test_score"][0] == pytest.approx(expected.mean())
        piped = GridSearchCV(make_pipeline(StandardScaler(), model), {}, cv=GroupKFold(2), error_score="raise")
        piped.fit(matrix, clicks, groups=request, **columns)
        assert piped.cv_results_["mean_test_score"][0] == pytest.approx(expected.mean(), rel=0.1)


def test_it_is_the_last_step_of_a_pipeline():
    data = frame(40)
    matrix, clicks, columns = arrays(data)
    pipeline = make_pipeline(StandardScaler(), quick())
    pipeline.fit(matrix, clicks, **{f"unbiasedranker__{name}": values for name, values in columns.items()})
    assert np.corrcoef(pipeline.predict(matrix), data["feature_good"])[0, 1] > 0.9
    scaled = make_column_transformer(
        (StandardScaler(), FEATURES), remainder="passthrough", verbose_feature_names_out=False
    ).set_output(transform="pandas")
    search = GridSearchCV(
        make_pipeline(scaled, quick()), {"unbiasedranker__lr": [0.01, 0.1]}, cv=GroupKFold(2), error_score="raise"
    )
    assert search.fit(data, groups=data["request"]).best_score_ > 0


def test_categories_are_learned_and_unknown_ones_scored():
    rng = np.random.default_rng(0)
    data = frame()
    data["shop"] = rng.choice(["good", "bad", "odd"], len(data))
    data["click"] = ((data["shop"] == "good") | (rng.random(len(data)) < 0.1)).astype(int)
    model = ranker(lr=0.1).fit(data, features=["feature_noise"], categorical=["shop"])
    assert model.feature_names_in_.tolist() == ["feature_noise", "shop"]
    scores = pd.Series(model.predict(data), index=data.index).groupby(data["shop"]).mean()
    assert scores["good"] > scores["bad"]
    assert np.isfinite(model.predict(data.assign(shop="never seen"))).all()
    np.testing.assert_array_equal(model.predict(data[["feature_noise", "shop"]].to_numpy()), model.predict(data))
    assert model.score(data) > 0


def test_a_random_state_repeats():
    data = frame(40)
    scores = quick(random_state=3, ranker="mlp", hidden=(4,)).fit(data).predict(data)
    for state, same in ((3, True), (np.int64(3), True), (4, False), (None, False)):
        again = quick(random_state=state, ranker="mlp", hidden=(4,)).fit(data).predict(data)
        assert np.array_equal(again, scores) == same
    drawn = [
        quick(random_state=np.random.RandomState(5), ranker="mlp", hidden=(4,)).fit(data).predict(data)
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*drawn)


def test_wrong_arguments_of_fit_are_errors():
    data = frame(40)
    matrix, clicks, columns = arrays(data)
    with pytest.raises(UltrError, match="the request of each row is not given"):
        quick().fit(matrix, clicks)
    with pytest.raises(UltrError, match="no column with the position of each item"):
        quick().fit(matrix, clicks, request=columns["request"])
    with pytest.raises(UltrError, match="needs the action 'click'"):
        quick().fit(matrix, **columns)
    with pytest.raises(UltrError, match="'click' must have one value for each of 200 rows"):
        quick().fit(matrix, clicks[:3], **columns)
    with pytest.raises(UltrError, match="each of click, dwell, got shape \\[200\\]"):
        quick(label="click + dwell").fit(matrix, clicks, **columns)
    with pytest.raises(UltrError, match="feedback is given twice, in X \\(click\\) and in y"):
        quick().fit(data, clicks)
    with pytest.raises(UltrError, match="no column 'feature_9' for the request"):
        quick(request=9, position=1).fit(matrix, clicks)
    with pytest.raises(UltrError, match=r"\[rows, columns\], got shape \[200\]"):
        quick().fit(clicks, clicks, **columns)
    with pytest.raises(UltrError, match="'request' cannot be read"):
        quick().fit(matrix, clicks, request=np.array([1, "a", ()] + [0] * 197, object), position=columns["position"])
    with pytest.raises(UltrError, match="no method"):
        quick(method="nothing").fit(data)


def test_data_that_does_not_fit_the_model_is_an_error():
    data = frame(40)
    model = quick().fit(data)
    with pytest.raises(UltrError, match="no column 'feature_good'"):
        model.predict(data.drop(columns="feature_good"))
    with pytest.raises(UltrError, match="must have 2 columns"):
        model.predict(np.zeros((3, 5)))
    with pytest.raises(UltrError, match="finite"):
        model.predict(np.full((3, 2), np.inf))
    with pytest.raises(UltrError, match="the request of each row is not given"):
        model.score(data[FEATURES].to_numpy(), data["click"])
    with pytest.raises(UltrError, match="no column with the request id of each row"):
        model.score(data[FEATURES], data["click"])
    with pytest.raises(UltrError, match="needs the action 'click'"):
        model.score(data.drop(columns="click"))
    with pytest.raises(UltrError, match="'relevance' must have one value"):
        model.score(data, [1, 0])
    with pytest.raises(UltrError, match="position 5 has no propensity"):
        quick(propensities=dict.fromkeys(range(1, 5), 0.5)).fit(data).score(data)
    with pytest.raises(UltrError, match="use predict"):
        model.rank(data[FEATURES].to_numpy())
    with pytest.raises(UltrError, match="a column 'rank'; rename"):
        model.rank(data.assign(rank=1))


def test_columns_of_the_evidence_about_bias_are_named_in_the_constructor():
    data = shop(1500).to_table().to_pandas()
    data = data.rename(columns={"item": "sku", "query": "phrase", "randomised": "shuffled"})
    named = {"item": "sku", "query": "phrase", "randomised": "shuffled"}
    options = {"method": "ipw-listwise", "label": "click", "ranker": "mlp", "hidden": (4,), "steps": 1}
    ranker = UnbiasedRanker(**options, **named).fit(data)
    assert ranker.bias_["theta_from"].endswith("items shown at several positions for the same query")
    assert np.isfinite(ranker.score(data))


# --- Propensities, segments, missing values ---------------------------------------------------------------------------


def test_propensities_may_be_a_dict_a_series_or_a_frame():
    data = frame(40)
    theta = {k: 1 / k for k in range(1, 6)}
    table = pd.DataFrame({"position": [*theta], "propensity": [*theta.values()]})
    expected = quick(method="ipw-pointwise", propensities=theta).fit(data)
    others = (
        {str(k): value for k, value in theta.items()},
        pd.Series(theta),
        table,
        table.set_index("position"),
        table.assign(segment=None),
        pl.from_pandas(table),
        pa.Table.from_pandas(table),
    )
    for known in others:
        model = quick(method="ipw-pointwise", propensities=known).fit(data)
        np.testing.assert_array_equal(model.predict(data), expected.predict(data))
        assert model.score(data) == expected.score(data)
    for wrong, message in (({1: 2.0}, "from 1e-06 to 1"), ({"a": 0.5}, "whole numbers"), ([0.5], "cannot be read")):
        with pytest.raises(UltrError, match=message):
            quick(method="ipw-pointwise", propensities=wrong).fit(data)


def test_examination_is_estimated_or_known_for_each_segment():
    data = frame(60).assign(device=lambda rows: np.where(rows["request"] % 2, "phone", "desktop"))
    model = quick(method="ipw-pointwise", segment="device").fit(data)
    assert {key.partition("@")[2] for key in model.theta_} == {"phone", "desktop"}
    known = pd.Series({(k, d): 1 / k for k in range(1, 6) for d in ("phone", "desktop")})
    model = quick(method="ipw-pointwise", segment="device", propensities=known).fit(data)
    assert model.theta_["2@phone"] == pytest.approx(0.5)
    assert np.isfinite(model.score(data))


def test_a_segment_is_found_if_examination_depends_on_a_column():
    world = shop_world(4000, seed=3)
    data, columns = world.log.to_pandas(), {"features": list(world.features), "categorical": list(world.categorical)}
    columns |= {"method": "ipw-pointwise"}
    found = quick(**columns).fit(data)
    assert found.segment_ == "device"
    assert len({key.partition("@")[2] for key in found.theta_}) == 2
    assert np.isfinite(found.score(data))
    assert clone(found).segment == "auto"
    without = quick(**columns, segment=None).fit(data)
    assert without.segment_ is None
    assert not any("@" in str(key) for key in without.theta_)


def test_networks_take_missing_values_as_the_mean_and_an_indicator():
    data = frame(200)
    # A missing value says that the item is good, which its mean cannot say.
    holes = data.assign(feature_noise=data["feature_noise"].where(data["feature_good"] < 0.5))
    with pytest.raises(UltrError, match="missing=error"):
        quick(missing="error").fit(holes)
    only = {"features": ["feature_noise"], "steps": 60}
    model = quick(**only).fit(holes)
    scores, good = model.predict(holes), holes["feature_noise"].isna()
    assert scores[good].mean() > scores[~good].mean() + 0.3
    same = quick().fit(data)
    np.testing.assert_array_equal(
        same.predict(data), quick(missing="error").fit(data).predict(data)
    )  # without missing values
    assert np.isfinite(same.predict(holes)).all()


# --- Save, load, progress and importance ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"ranker": "lightgbm", "lr": None}, {"missing": "error"}], ids=str)
def test_a_saved_ranker_is_loaded_equal(options, tmp_path):
    data = frame(60)
    model = quick(propensities=pd.Series({k: 1 / k for k in range(1, 6)}), random_state=3, **options).fit(data)
    loaded = UnbiasedRanker.load(model.save(tmp_path / "saved"))
    np.testing.assert_array_equal(loaded.predict(data), model.predict(data))
    assert loaded.score(data) == model.score(data)
    assert loaded.get_params()["random_state"] == 3
    assert loaded.feature_names_in_.tolist() == FEATURES
    assert loaded.importance_ == model.importance_
    assert [line["step"] for line in loaded.history_] == [line["step"] for line in model.history_]
    np.testing.assert_array_equal(ultr.load_model(tmp_path / "saved").score(ultr.read_log(data)).size, len(data))
    with pytest.raises(UltrError, match="exists"):
        loaded.save(tmp_path / "saved")
    loaded.save(tmp_path / "saved", overwrite=True)


def test_a_damaged_ranker_is_not_loaded(tmp_path):
    folder = quick().fit(frame(40)).save(tmp_path / "saved")
    about = json.loads((folder / "ranker.json").read_text())
    for wrong in ({"params": {"depth": 3}}, {"_named": 3}, {"format": 99}, {"n_features_in_": "two"}):
        (folder / "ranker.json").write_text(json.dumps({**about, **wrong}))
        with pytest.raises(UltrError, match=r"ranker|format"):
            UnbiasedRanker.load(folder)
    (folder / "ranker.json").unlink()
    with pytest.raises(UltrError, match=r"has no ranker\.json"):
        UnbiasedRanker.load(folder)


def test_evaluations_are_printed_if_verbose(capsys):
    quick().fit(frame(40))
    assert not capsys.readouterr().out
    quick(verbose=1, steps=30).fit(frame(40))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["linear, step 15", "linear, step 30"]


@pytest.mark.parametrize("kind", ["linear", "lightgbm", "xgboost"])
def test_the_feature_that_decides_clicks_is_the_most_important(kind):
    def seen(requests: int, seed: int) -> pd.DataFrame:
        data = frame(requests, seed)
        looked = np.random.default_rng(seed).random(len(data)) < 1 / data["position"]
        return data.assign(click=data["click"] * looked)

    theta = {k: 1 / k for k in range(1, 6)}
    model = quick(ranker=kind, steps=30, propensities=theta, method="direct").fit(seen(600, 0))
    for found in (model.importance_, model.feature_importance(seen(300, 1))):
        assert [each.feature for each in found] == FEATURES
        best, noise = found
        assert best.low > 0.1
        assert noise.low < 0.02
        assert (best.gain is None) == (kind == "linear")
        assert best.gain is None or best.gain > 0.8


def test_leaks_and_traps_are_errors_and_warnings():
    data = frame(100)
    leak = data.assign(feature_noise=data["click"] * 3)
    with pytest.raises(UltrError, match="allow_leaks=True"):
        quick().fit(leak)
    with pytest.warns(UserWarning, match="features that follow feedback"):
        quick(allow_leaks=True).fit(leak)
