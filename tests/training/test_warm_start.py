"""Runs that start from another run: `--warm-start` and `--bias`, on logs with other columns, values and positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ultr.errors import DataError, OptionError
from ultr.log import read_log
from ultr.rankers.model import load_model
from ultr.training.checkpoints import read_metrics
from ultr.training.command import train_command
from ultr.training.config import RunConfig, TrainingOptions
from ultr.training.run import run_training
from ultr.training.selection import best_evaluation
from ultr.utils.jsonfiles import read_json

SHOPS = {"a": 0.2, "b": 0.9, "c": 0.05}  # click rate of each shop
STILL = {"steps": 1, "evaluate_every": 1, "lr": 1e-12}
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


def config(path, **changes) -> RunConfig:
    training = {"steps": 60, "bias_steps": 20, "batch": 32, "evaluate_every": 20, "lr": 0.1, "device": "cpu"}
    training |= changes.pop("training", {})
    given = {"method": "pointwise", "label": "click", "columns": COLUMNS, "ranker_options": {"hidden": [8]}}
    return RunConfig(data=str(path), training=TrainingOptions(**training), **{**given, **changes})


def write(path, content) -> str:
    pq.write_table(content, path)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("days")


@pytest.fixture(scope="module")
def day_1(folder):
    return write(folder / "day1.parquet", table(["a", "b", "c"]))


@pytest.fixture(scope="module")
def yesterday(folder, day_1):
    return run_training(config(day_1), folder / "yesterday")


@pytest.fixture(scope="module")
def with_bias(folder, day_1):
    return run_training(config(day_1, method="pairwise-em"), folder / "with-bias")


def scores(run, path) -> np.ndarray:
    return load_model(run).score(read_log(path, categorical="shop", features="f0,f1"))


def test_the_network_is_small_for_a_small_log_and_that_of_the_run_it_starts_from(
    day_1, yesterday, tmp_path, monkeypatch
):
    def hidden(out, **changes):
        run = run_training(config(day_1, training=STILL, **changes), out)
        return read_json(run / "config.json")["ranker_options"]["hidden"]

    free = {"ranker_options": {"dropout": 0.0}}
    assert hidden(tmp_path / "small", **free) == [128, 64, 32]
    assert hidden(tmp_path / "warm", warm_start=str(yesterday), **free) == [8]
    monkeypatch.setattr("ultr.training.inputs.SMALL_LOG", 10)
    assert hidden(tmp_path / "large", **free) == [512, 256, 128]
    run_training(config(day_1, training=STILL, **free), tmp_path / "large", resume=True)
    with pytest.raises(OptionError, match=r"--hidden \(\[8\]; the run has \[128, 64, 32\]\)"):
        run_training(config(day_1, training=STILL), tmp_path / "small", resume=True)


def test_vocabularies_are_sorted_whatever_the_order_of_rows(tmp_path):
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
    columns = {**COLUMNS, "features": "f1,f0"}
    run = run_training(config(today, columns=columns, training=STILL), tmp_path / "run", warm_start=yesterday)
    np.testing.assert_allclose(scores(run, today), scores(yesterday, today), atol=1e-6)
    known = pa.table({**table(["b"]).to_pydict(), "shop": ["b", "c"] * 120, "f0": [0.0] * 240, "f1": [0.0] * 240})
    b, c = scores(run, write(tmp_path / "known.parquet", known))[:2]
    assert b > c + 0.3  # b and c did not swap


def test_a_new_feature_starts_without_effect_and_is_learned(yesterday, tmp_path):
    content = table(["a", "b", "c"], seed=2)
    content = content.append_column("f2", content["click"]).append_column("brand", content["shop"])
    today = write(tmp_path / "today.parquet", content)
    columns = {**COLUMNS, "features": "f2,f0,f1", "categorical": "brand,shop"}
    given = {"columns": columns, "allow_leaks": True}
    still = run_training(config(today, **given, training=STILL), tmp_path / "still", warm_start=yesterday)
    log = read_log(today, **columns)
    np.testing.assert_allclose(load_model(still).score(log), scores(yesterday, today), atol=1e-6)
    run = run_training(config(today, **given), tmp_path / "run", warm_start=yesterday)
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
    given = {"method": method, "label": label}
    first = run_training(config(days[0], **given), tmp_path / "first")
    second = run_training(config(days[1], **given, training=STILL), tmp_path / "second", warm_start=first)
    np.testing.assert_allclose(scores(second, days[1]), scores(first, days[1]), rtol=1e-5, atol=1e-6)


def test_the_first_weights_are_evaluated_and_can_be_the_best(yesterday, day_1, tmp_path):
    worse = config(day_1, select="feedback-ndcg@10", training={"lr": 50.0, "steps": 2, "evaluate_every": 1})
    run = run_training(worse, tmp_path / "run", warm_start=yesterday)
    steps = [line["step"] for line in read_metrics(run)]
    assert steps == [0, 1, 2]
    assert read_metrics(run)[0]["loss"] is None
    assert best_evaluation(run)[1]["step"] == 0
    np.testing.assert_allclose(scores(run, day_1), scores(yesterday, day_1), atol=1e-6)


def test_a_warm_start_is_recorded_and_a_resumed_run_starts_warm_again(yesterday, day_1, tmp_path):
    class StoppedError(Exception):
        pass

    def stop(progress):
        raise StoppedError

    chosen = config(day_1, warm_start=str(yesterday), training=STILL)
    with pytest.raises(StoppedError):
        run_training(chosen, tmp_path / "run", on_progress=stop, checkpoint_seconds=1e9)
    run = run_training(chosen, tmp_path / "run", resume=True)
    assert [line["step"] for line in read_metrics(run)] == [0, 1]
    np.testing.assert_allclose(scores(run, day_1), scores(yesterday, day_1), atol=1e-6)
    assert f"--warm-start {yesterday}" in train_command(chosen)[0]
    from ultr.serving.model_card import model_card
    from ultr.utils.jsonfiles import read_json

    assert read_json(run / "config.json")["warm_start"] == str(yesterday)
    about = {**read_json(run / "model" / "model.json"), "keeps_missing": False, "files": [], "no_onnx": "", "data": ""}
    assert f"started from the run `{yesterday}`"[:60] in model_card(run, about)


def test_a_warm_start_that_cannot_be_matched_is_rejected(yesterday, day_1, tmp_path):
    def rejected(match, error=DataError, **changes):
        with pytest.raises(error, match=match):
            run_training(config(day_1, **changes), tmp_path / "run", warm_start=yesterday)
        assert not (tmp_path / "run").exists()

    rejected("features that the model was trained on are missing: f1", columns={**COLUMNS, "features": "f0"})
    rejected("weights of other shapes", ranker_options={"hidden": [9]})
    rejected("is of another kind", ranker_options={}, ranker="linear")
    rejected("is of another kind, or predicts other actions", method="pal-click")
    rejected("trees cannot start", OptionError, ranker="lightgbm", ranker_options={}, method="direct")


# --- The bias of another run ----------------------------------------------------------------------------------------


def beta(run, path, columns=COLUMNS) -> np.ndarray:
    """Return the relevance that the bias model of a run finds for the rows of a log."""
    import torch

    from ultr.methods import make_method
    from ultr.training.bias_stage import load_bias
    from ultr.training.data import load_run_data
    from ultr.training.inputs import method_inputs

    chosen = config(path, method="pairwise-em", columns=columns)
    data = load_run_data(chosen)
    model = make_method("pairwise-em", method_inputs(chosen, data)).bias_learner()
    load_bias(run / "bias", model)
    return model.eval().predictions(torch.from_numpy(data.train.features))[0].detach().numpy()


def test_a_bias_model_is_matched_by_name_and_value(with_bias, day_1, tmp_path):
    today = pq.read_table(day_1)
    order = pa.array(np.arange(len(today))[::-1].copy())  # the last shop appears first
    shuffled = write(tmp_path / "shuffled.parquet", today.take(order))
    columns = {**COLUMNS, "features": "f1,f0"}
    given = {"method": "pairwise-em", "columns": columns, "bias": str(with_bias)}
    run = run_training(config(shuffled, **given, training=STILL), tmp_path / "run")
    np.testing.assert_allclose(beta(run, day_1, columns), beta(with_bias, day_1), atol=1e-5)


def test_a_bias_model_takes_new_values_and_fewer_positions(with_bias, tmp_path):
    content = table([*(f"x{i}" for i in range(40)), "c", "b"], seed=3, items=3, first=2)
    today = write(tmp_path / "today.parquet", content)
    chosen = config(today, method="pairwise-em", bias=str(with_bias), training=STILL)
    run = run_training(chosen, tmp_path / "run", checkpoint_seconds=0)
    from ultr.utils.jsonfiles import read_json

    before, after = (read_json(folder / "bias.json") for folder in (with_bias, run))
    assert after["positions"] == [2, 3, 4]
    assert after["theta"] == before["theta"][1:]
    later = run_training(replace(chosen, bias=str(run)), tmp_path / "later")  # embeddings keep their size
    np.testing.assert_allclose(beta(later, today), beta(run, today), atol=1e-6)
