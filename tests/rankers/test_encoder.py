"""Missing values in the encoder of features, and in models that were trained with them."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from ultr.errors import DataError
from ultr.log import read_log
from ultr.rankers import FeatureEncoder, LinearRanker, fit_encoders
from ultr.rankers.model import Model, load_model
from ultr.serving.export import export_run
from ultr.training.config import make_config
from ultr.training.loop import Listeners
from ultr.training.run import run_training


def test_indicators_are_one_where_a_feature_is_missing():
    rows = np.array([[1.0, np.nan], [3.0, 2.0]], np.float32)
    plain, marked = FeatureEncoder(2), FeatureEncoder(2, indicators=[1])
    for encoder in (plain, marked):
        encoder.fit(rows)
    numbers = plain(torch.from_numpy(rows))
    torch.testing.assert_close(marked(torch.from_numpy(rows)), torch.cat([numbers, torch.tensor([[1.0], [0.0]])], -1))
    assert marked.width == plain.width + 1
    assert marked.state_dict().keys() == plain.state_dict().keys()


def test_a_model_that_takes_missing_values_is_saved_and_exported(tmp_path):
    import pandas as pd

    rng = np.random.default_rng(0)
    data = pd.DataFrame({"request": np.arange(600) // 6, "position": np.arange(600) % 6 + 1})
    data[["f1", "f2"]] = rng.normal(size=(600, 2))
    data["click"] = (rng.random(600) < np.where(data["f1"] > 0, 0.6, 0.2)).astype(int)
    data.loc[rng.random(600) < 0.3, "f2"] = np.nan
    data.to_parquet(tmp_path / "log.parquet")
    few = {"steps": 5, "evaluate_every": 5, "batch": 32, "device": "cpu"}
    config = make_config(str(tmp_path / "log.parquet"), label="click", method="pointwise", ranker="linear", **few)
    with pytest.raises(DataError, match="f2"):
        run_training(config.with_options(missing="error"), tmp_path / "run")
    notes: list[str] = []
    run = run_training(config, tmp_path / "run", listeners=Listeners(on_note=notes.append))
    share = re.search(r"f2 \((\d+\.\d)%\)", notes[0])
    assert float(share[1]) == pytest.approx(30, abs=4)
    model, log = load_model(run), read_log(data)
    assert model.missing == "keep"
    scores = model.score(log)
    assert np.isfinite(scores).all()
    assert export_run(run, tmp_path / "exported").keeps_missing


def test_a_model_that_rejects_missing_values_does_not_score_them():
    log = read_log(pa.table({"request": [1, 1], "position": [1, 2], "click": [0, 1], "f1": [0.5, np.nan]}))
    model = Model(LinearRanker(FeatureEncoder(1)), ("f1",), "click")
    with pytest.raises(DataError, match="feature 'f1' has missing values"):
        model.score(log)
    assert np.isfinite(replace(model, indicators=()).score(log)).all()


def test_all_encoders_of_a_module_are_fitted_each_to_its_features():
    rows = np.random.default_rng(0).normal(3, 2, (50, 3)).astype(np.float32)
    encoders = torch.nn.ModuleList([FeatureEncoder(3), FeatureEncoder(3, only=[2]), FeatureEncoder(3)])
    fit_encoders(encoders, rows)
    for encoder in encoders:
        columns = encoder.numeric.numpy()
        np.testing.assert_allclose(encoder.mean, rows[:, columns].mean(0), rtol=1e-5)
        np.testing.assert_allclose(encoder.inverse_deviation, 1 / rows[:, columns].std(0), rtol=1e-5)
    assert encoders[0].mean.data_ptr() != encoders[2].mean.data_ptr()
