"""Runs that start from another run: `warm_start` and `bias`, on logs with other columns, values and positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from runs import FEEDBACK, Killed, killed_at
from ultr.bias.propensities import write_bias_file
from ultr.errors import DataError, OptionError, UltrError
from ultr.log import read_log
from ultr.methods import make_method
from ultr.rankers.model import load_model
from ultr.training.biases import load_bias
from ultr.training.config import Config, make_config
from ultr.training.data import Decisions, decide, load_run_data
from ultr.training.examining import best_evaluation
from ultr.training.fitting import FitInputs
from ultr.training.folder import fit_folder, read_config, read_metrics
from ultr.training.loop import Listeners
from ultr.training.run import run_training
from ultr.utils.jsonfiles import read_json

SHOPS = {"a": 0.2, "b": 0.9, "c": 0.05}  # click rate of each shop
STILL = {"network.steps": 1, "network.evaluate_every": 1, "network.lr": 1e-12}
COLUMNS = {"request": "request", "position": "position", "features": "f0,f1", "categorical": "shop"}


def table(shops, *, seed=0, shift=0.0, first=1, requests=60, items=4, falls=0.0) -> pa.Table:
    """Return a log whose clicks follow the shop, and fall with position^-`falls`; shops appear in the order given."""
    rng, rows = np.random.default_rng(seed), requests * items
    shop = np.array(shops)[np.r_[np.arange(len(shops)), rng.integers(0, len(shops), rows - len(shops))]]
    position = np.tile(np.arange(first, first + items), requests)
    rate = np.array([SHOPS.get(name, 0.4) for name in shop]) / position**falls
    return pa.table(
        {
            "request": np.repeat(np.arange(requests), items),
            "position": position,
            "f0": rng.normal(shift, 1 + abs(shift), rows),
            "f1": rng.normal(size=rows),
            "shop": shop,
            "click": (rng.random(rows) < rate).astype(float),
        }
    )


def config(path, **options) -> Config:
    common = {
        "method": "pointwise",
        "label": "click",
        "columns": COLUMNS,
        "ranker": "mlp",
        "hidden": (8,),
        "network.steps": 60,
        "network.bias_steps": 20,
        "network.batch": 32,
        "network.evaluate_every": 20,
        "network.lr": 0.1,
        "device": "cpu",
    }
    return make_config(str(path), **common).with_options(**options)


def write(path, content) -> str:
    pq.write_table(content, path)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("days")


@pytest.fixture(scope="module")
def day_1(folder) -> str:
    return write(folder / "day1.parquet", table(["a", "b", "c"]))


@pytest.fixture(scope="module")
def yesterday(folder, day_1) -> Path:
    return run_training(config(day_1), folder / "yesterday")


@pytest.fixture(scope="module")
def with_bias(folder, day_1) -> Path:
    return run_training(config(day_1, method="pairwise-em"), folder / "with-bias")


def after(run: Path, path, **options) -> Config:
    """Return the configuration of a run that starts from another one."""
    return config(path, warm_start=str(run)).with_options(**options)


def scores(run, path) -> np.ndarray:
    return load_model(run).score(read_log(path, categorical="shop", features="f0,f1"))


def test_the_network_is_small_for_a_small_log_and_that_of_the_run_it_starts_from(day_1, yesterday, monkeypatch):
    def hidden(**options):
        chosen = config(day_1, hidden=None, **options)
        return decide(chosen, load_run_data(chosen)).hidden

    assert hidden() == (128, 64, 32)
    assert hidden(warm_start=str(yesterday)) == (8,)
    assert hidden(ranker="linear") is None
    monkeypatch.setattr("ultr.training.data.SMALL_LOG", 10)
    assert hidden() == (128, 64, 32)  # few features
    monkeypatch.setattr("ultr.training.data.FEW_FEATURES", 1)
    assert hidden() == (512, 256, 128)


def test_vocabularies_are_sorted_whatever_the_order_of_rows():
    for order in (["c", "a", "b"], ["b", "c", "a"]):
        log = read_log(table(order), categorical="shop")
        assert log.vocabularies["shop"].to_pylist() == ["a", "b", "c"]
        assert log.to_table().column("shop").to_pylist()[:3] == order


@pytest.mark.parametrize(
    "shops",
    [["c", "b", "a"], ["b", "c"], ["0-new", "b", "c", "a"], [*(f"x{i}" for i in range(40)), "c", "b"]],
    ids=["another order", "one less", "one more", "embeddings of another size"],
)
def test_a_warm_start_has_the_scores_of_yesterday(shops, yesterday, tmp_path):
    """The next log has other shops, other columns' order, and other means: nothing moves before the first step."""
    content = table(shops, seed=1, shift=3.0)
    today = write(tmp_path / "today.parquet", content.select(["click", "shop", "f1", "f0", "position", "request"]))
    chosen = after(yesterday, today, columns={"features": "f1,f0"}, **STILL)
    run = run_training(chosen, tmp_path / "run")
    np.testing.assert_allclose(scores(run, today), scores(yesterday, today), atol=1e-6)
    known = pa.table({**table(["b"]).to_pydict(), "shop": ["b", "c"] * 120, "f0": [0.0] * 240, "f1": [0.0] * 240})
    b, c = scores(run, write(tmp_path / "known.parquet", known))[:2]
    assert b > c + 0.3  # b and c did not swap


def test_a_new_feature_starts_without_effect_and_is_learned(yesterday, tmp_path):
    content = table(["a", "b", "c"], seed=2)
    content = content.append_column("f2", content["click"]).append_column("brand", content["shop"])
    today = write(tmp_path / "today.parquet", content)
    columns = {**COLUMNS, "features": "f2,f0,f1", "categorical": "brand,shop"}
    chosen = after(yesterday, today, columns=columns, allow_leaks=True)
    still = run_training(chosen.with_options(**STILL), tmp_path / "still")
    log = read_log(today, **columns)
    np.testing.assert_allclose(load_model(still).score(log), scores(yesterday, today), atol=1e-6)
    run = run_training(chosen, tmp_path / "run")
    changed = replace(log, features=log.features + np.eye(5, dtype=np.float32)[list(log.feature_names).index("f2")])
    assert (load_model(run).score(changed) > load_model(run).score(log) + 0.05).mean() > 0.9


@pytest.mark.parametrize(
    ("method", "label"),
    [("position-feature", "click"), ("pal-click", "click + dwell"), ("direct", "click + dwell")],
)
def test_every_kind_of_ranker_starts_where_it_was(method, label, tmp_path):
    days = []
    for day in (0, 1):
        content = table(["a", "b", "c"], seed=day, requests=40)
        dwell = pa.array(content["click"].to_numpy() * (1 + 3 * day) * np.arange(160))
        days.append(write(tmp_path / f"{day}.parquet", content.append_column("dwell", dwell)))
    first = run_training(config(days[0], method=method, label=label), tmp_path / "first")
    second = run_training(after(first, days[1], method=method, label=label, **STILL), tmp_path / "second")
    np.testing.assert_allclose(scores(second, days[1]), scores(first, days[1]), rtol=1e-5, atol=1e-6)


def test_the_first_weights_are_evaluated_and_can_be_the_best(yesterday, day_1, tmp_path):
    worse = after(yesterday, day_1, select=FEEDBACK, lr=50.0, steps=2, evaluate_every=1)
    run = run_training(worse, tmp_path / "run")
    assert [line["step"] for line in read_metrics(run)] == [0, 1, 2]
    assert read_metrics(run)[0]["loss"] is None
    assert best_evaluation(run)[1]["step"] == 0
    np.testing.assert_allclose(scores(run, day_1), scores(yesterday, day_1), atol=1e-6)


def test_a_warm_start_is_recorded_and_a_resumed_run_starts_warm_again(yesterday, day_1, tmp_path):
    chosen = after(yesterday, day_1, **STILL)
    with pytest.raises(Killed):
        run_training(chosen, tmp_path / "run", listeners=replace(killed_at(0), checkpoint_seconds=1e9))
    run = run_training(chosen, tmp_path / "run", resume=True)
    assert [line["step"] for line in read_metrics(run)] == [0, 1]
    np.testing.assert_allclose(scores(run, day_1), scores(yesterday, day_1), atol=1e-6)
    assert read_config(run).training.warm_start == str(yesterday)


def test_a_warm_start_that_cannot_be_matched_is_rejected(yesterday, day_1, tmp_path):
    def rejected(match: str, error: type[UltrError] = DataError, **options) -> None:
        with pytest.raises(error, match=match):
            run_training(after(yesterday, day_1, **options), tmp_path / "run")
        assert list(tmp_path.iterdir()) == []

    rejected("features that the model was trained on are missing: f1", columns={"features": "f0"})
    rejected("different shapes", hidden=(9,))
    rejected("has another kind", ranker="linear")
    rejected("has another kind, or predicts other actions", method="pal-click")
    rejected("trees cannot start", OptionError, ranker="lightgbm", method="direct")


# --- The bias of another run ----------------------------------------------------------------------------------------


def beta(run, path, **columns) -> np.ndarray:
    """Return the relevance that the bias model of a run finds for the rows of a log."""
    chosen = config(path, method="pairwise-em", columns=columns)
    data = load_run_data(chosen)
    inputs = FitInputs(chosen, data, decide(chosen, data), "mlp").of_method()
    model = make_method("pairwise-em", inputs).bias_learner()
    load_bias(fit_folder(run, "mlp") / "bias", model)
    return model.eval().predictions(torch.from_numpy(data.train.features))[0].detach().numpy()


def test_a_bias_model_is_matched_by_name_and_value(with_bias, day_1, tmp_path):
    today = pq.read_table(day_1)
    order = pa.array(np.arange(len(today))[::-1].copy())  # the last shop appears first
    shuffled = write(tmp_path / "shuffled.parquet", today.take(order))
    chosen = config(shuffled, method="pairwise-em", columns={"features": "f1,f0"}, bias=str(with_bias), **STILL)
    fitted: list[int] = []
    listeners = Listeners(on_bias_progress=lambda progress: fitted.append(progress.step))
    run = run_training(chosen, tmp_path / "run", listeners=listeners)
    assert not fitted
    np.testing.assert_allclose(beta(run, day_1, features="f1,f0"), beta(with_bias, day_1), atol=1e-5)


def test_a_bias_model_takes_new_values_and_fewer_positions(with_bias, tmp_path):
    content = table([*(f"x{i}" for i in range(40)), "c", "b"], seed=3, items=3, first=2)
    today = write(tmp_path / "today.parquet", content)
    chosen = config(today, method="pairwise-em", bias=str(with_bias), **STILL)
    run = run_training(chosen, tmp_path / "run")
    before, found = (read_json(each / "bias.json") for each in (with_bias, run))
    assert found["positions"] == [2, 3, 4]
    assert found["theta"] == before["theta"][1:]
    later = run_training(chosen.with_options(bias=str(run)), tmp_path / "later")  # embeddings keep their size
    np.testing.assert_allclose(beta(later, today), beta(run, today), atol=1e-6)


def test_examination_and_the_bias_model_come_from_the_run_that_is_named(with_bias, day_1, tmp_path):
    theta = read_json(with_bias / "bias.json")["theta"]
    fitted: list[int] = []
    listeners = Listeners(on_bias_progress=lambda progress: fitted.append(progress.step))
    by_file = config(day_1, method="pairwise-em", bias=str(with_bias / "bias.json"), **STILL)
    run = run_training(by_file, tmp_path / "run", listeners=listeners)
    assert fitted  # only examination was loaded
    found = read_json(run / "bias.json")
    assert found["theta"] == pytest.approx(theta)
    assert found["theta_from"] == read_json(with_bias / "bias.json")["theta_from"]
    assert Decisions.load(run).segment is None
    (tmp_path / "empty").mkdir()
    write_bias_file(tmp_path / "empty", {})
    for message, options in {
        "is for another label": {"label": "click + 1"},
        "does not fit this run": {"loss": "bayes-ipw"},
        "no examination by position": {"bias": str(tmp_path / "empty")},
    }.items():
        chosen = config(day_1, method="pairwise-em", bias=str(with_bias)).with_options(**options)
        with pytest.raises(DataError, match=message):
            run_training(chosen, tmp_path / "no")
        assert not (tmp_path / "no").exists()
