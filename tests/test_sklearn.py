from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from ultr import UnbiasedRanker
from ultr.errors import UltrError


def frame(requests: int = 120, seed: int = 0) -> pd.DataFrame:
    """Users who click what the first feature says, wherever it stands."""
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


def ranker(**options) -> UnbiasedRanker:
    return UnbiasedRanker(
        label="click", hidden=(8,), steps=60, bias_steps=20, batch=32, evaluate_every=20, device="cpu", **options
    )


def test_it_fits_frames_and_arrays_alike_and_keeps_the_order_of_rows():
    data = frame()
    features = ["feature_good", "feature_noise"]
    from_pandas = ranker().fit(data)
    from_polars = ranker().fit(pl.from_pandas(data))
    matrix = data[features].to_numpy()
    from_arrays = ranker().fit(
        matrix, data["click"].to_numpy(), request=data["request"].to_numpy(), position=data["position"].to_numpy()
    )
    scores = from_pandas.predict(data)
    np.testing.assert_array_equal(from_polars.predict(pl.from_pandas(data)), scores)
    np.testing.assert_array_equal(from_arrays.predict(matrix), scores)
    np.testing.assert_array_equal(from_pandas.predict(data.iloc[::-1]), scores[::-1])
    assert np.corrcoef(scores, data["feature_good"])[0, 1] > 0.9
    assert from_pandas.score(data, data["feature_good"] > 0, request="request") > 0.95
    assert from_pandas.feature_names_in_.tolist() == features
    assert [line["step"] for line in from_pandas.history_] == [20, 40, 60]


def test_a_method_for_clicks_says_what_it_takes_of_a_label():
    data = frame().assign(dwell=lambda rows: 3.0 * rows["click"])
    model = ranker(method="dla").set_params(label="click + dwell")
    with pytest.warns(UserWarning, match="'dla' is for clicks: 'click \\+ dwell' counts as 1"):
        model.fit(data)
    assert model.bias_["label"] == "click + dwell > 0"
    values = ranker(method="ipw-listwise", method_options={"labels": "values"}).set_params(label="click + dwell")
    assert values.fit(data).bias_["label"] == "click + dwell"


def test_it_has_the_manners_of_scikit_learn():
    model = ranker(lr=0.05)
    assert clone(model).get_params() == model.get_params()
    assert model.set_params(lr=0.01).lr == 0.01
    assert model.fit(frame()) is model
    with pytest.raises(NotFittedError):
        ranker().predict(frame())


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


def test_a_random_state_repeats():
    data = frame()
    np.testing.assert_array_equal(ranker().fit(data).predict(data), ranker().fit(data).predict(data))
    assert not np.array_equal(ranker(random_state=1).fit(data).predict(data), ranker().fit(data).predict(data))


def test_what_does_not_fit_is_refused():
    data = frame()
    model = ranker().fit(data)
    with pytest.raises(UltrError, match="lacks the feature 'feature_good'"):
        model.predict(data.drop(columns="feature_good"))
    with pytest.raises(UltrError, match=r"\[rows, 2\]"):
        model.predict(np.zeros((3, 5)))
    with pytest.raises(UltrError, match="finite"):
        model.predict(np.full((3, 2), np.nan))
    with pytest.raises(UltrError, match="needs what was done beside it"):
        ranker().fit(np.zeros((3, 2)))
    with pytest.raises(UltrError, match="one value for each of 3 rows"):
        ranker().fit(np.zeros((3, 2)), [1, 0], request=[1, 1, 1], position=[1, 2, 3])
    with pytest.raises(UltrError, match="no method"):
        ranker(method="nothing").fit(data)
