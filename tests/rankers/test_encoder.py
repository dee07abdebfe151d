"""Missing values in the encoder of features, and in models that were trained with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ultr.errors import DataError
from ultr.log import read_log
from ultr.rankers import FeatureEncoder
from ultr.rankers.model import load_model
from ultr.serving.export import export_run
from ultr.training.config import RunConfig, TrainingOptions
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
    few = TrainingOptions(steps=5, evaluate_every=5, batch=32, device="cpu")
    config = {"label": "click", "method": "pointwise", "ranker": "linear", "training": few}
    with pytest.raises(DataError, match="--missing mean"):
        run_training(RunConfig(data=str(tmp_path / "log.parquet"), **config), tmp_path / "run")
    run = run_training(RunConfig(data=str(tmp_path / "log.parquet"), missing="mean", **config), tmp_path / "run")
    model, log = load_model(run), read_log(data, missing="keep")
    assert model.missing == "keep"
    scores = model.score(log)
    assert np.isfinite(scores).all()
    assert export_run(run, tmp_path / "exported").keeps_missing
