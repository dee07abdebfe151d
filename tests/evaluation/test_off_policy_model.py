"""The model of a run that estimates off-policy metrics: its files, its values, and runs that are selected by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from conftest import make_shown_log
from ultr.bias.examination import Examination
from ultr.datasets.users import make_user, simulate_log
from ultr.errors import DataError, OptionError
from ultr.evaluation.off_policy import (
    OffPolicyModel,
    fit_off_policy_model,
    load_off_policy_model,
    request_metrics,
)
from ultr.log import write_log
from ultr.training.config import Config, make_config
from ultr.training.folder import read_metrics
from ultr.training.run import run_training
from ultr.utils.jsonfiles import read_json, write_json

THETA = {k: 1 / k for k in range(1, 11)}


@pytest.fixture(scope="module")
def log():
    shown = make_shown_log(requests=150, features=5, longest=10)
    return simulate_log(shown, make_user("pbm"), seed=0, sessions=600)[0]


@pytest.fixture(scope="module")
def model(log):
    return fit_off_policy_model(log, label="click", examination=Examination.known(THETA))


def config(data, **changes) -> Config:
    few = {"steps": 10, "batch": 32, "evaluate_every": 5, "bias_steps": 20, "device": "cpu"}
    return make_config(str(data), ranker="linear", **few).with_options(**changes)


def test_a_model_is_saved_and_loaded(log, model, tmp_path):
    model.save(tmp_path / "model")
    again = load_off_policy_model(tmp_path / "model")
    scores = np.arange(log.rows, dtype=float)
    a, b = (each.estimator(log, "off-policy-reward@5", label="click")(scores) for each in (model, again))
    assert a.value == b.value
    assert again.theta == {str(k): v for k, v in THETA.items()}
    assert load_off_policy_model(tmp_path / "none") is None
    about = read_json(tmp_path / "model" / "model.json")
    del about["numeric"]
    write_json(tmp_path / "model" / "model.json", about)
    with pytest.raises(DataError, match="cannot be read"):
        load_off_policy_model(tmp_path / "model")


def test_the_value_of_the_logged_order_is_its_feedback(log, model):
    found = request_metrics(log, ["off-policy-reward@10"], label="click", model=model)(-log.positions.astype(float))
    clicks = np.add.reduceat(log.actions["click"], log.offsets[:-1])
    np.testing.assert_allclose(found["off-policy-reward@10"], clicks, rtol=1e-6)


def test_an_evaluator_serves_any_number_of_scores(log, model, monkeypatch):
    metrics = ["off-policy-reward@10", "feedback-ndcg@10"]
    scores = np.random.default_rng(0).normal(size=(2, log.rows))
    expected = [request_metrics(log, metrics, label="click", model=model)(each) for each in scores]
    evaluate = request_metrics(log, metrics, keep=True, label="click", model=model)
    monkeypatch.setattr(OffPolicyModel, "estimator", lambda *_: pytest.fail("made again"))
    for each, values in zip(scores, expected, strict=True):
        found = evaluate(each)
        for name in metrics:
            np.testing.assert_array_equal(found[name], values[name])


def test_unknown_positions_have_the_lowest_examination(model):
    assert model.theta_of([1, 99]) == {1: 1.0, 99: 0.1}


def test_off_policy_metrics_need_a_model(log):
    with pytest.raises(DataError, match=r"train again with training\.select=off-policy-reward@10"):
        request_metrics(log, ["off-policy-reward@10"], label="click")
    with pytest.raises(OptionError, match="reward@k, dcg@k, gain@k and likelihood"):
        make_config("x", select="off-policy-ndcg@10")


def test_runs_of_a_log_have_the_same_model_whatever_their_method(log, tmp_path):
    write_log(log, tmp_path / "log.parquet")
    runs = [
        run_training(config(tmp_path / "log.parquet", method=method), tmp_path / method)
        for method in ("pointwise", "ipw-pointwise")
    ]
    one, other = (read_json(run / "off-policy" / "model.json") for run in runs)
    assert one == other
    assert all("off-policy-likelihood" in line for line in read_metrics(runs[0]))


def test_feedback_selects_runs_with_users_unless_an_off_policy_metric_is_chosen(tmp_path, small_synthetic):
    assert config("synthetic", users="pbm").selection == "feedback-ndcg@10"
    select = {"users": "pbm", "method": "pointwise", "select": "off-policy-dcg@5"}
    run = run_training(config("synthetic", **select), tmp_path / "run")
    assert all("off-policy-dcg@5" in line for line in read_metrics(run))


def test_examination_is_learned_and_known_by_segment(log, tmp_path):
    devices = pa.array(["phone" if i % 2 else "desk" for i in range(len(log))])
    write_log(replace(log, context={**log.context, "segment": devices}), tmp_path / "log.parquet")
    by_segment = config(tmp_path / "log.parquet", columns={"segment": "segment"})
    run = run_training(by_segment, tmp_path / "run")
    slots = {f"{k}@{name}" for k in range(1, 11) for name in ("desk", "phone")}
    assert set(read_json(run / "bias.json")["positions"]) == slots
    assert set(read_json(run / "off-policy" / "model.json")["theta"]) == slots
    known = {**{str(k): theta for k, theta in THETA.items()}, "1@phone": 0.3}
    run = run_training(by_segment.with_options(propensities=known), tmp_path / "known")
    found = read_json(run / "bias.json")
    theta = dict(zip(found["positions"], found["theta"], strict=True))
    assert (theta["1@phone"], theta["1@desk"], theta["2@phone"]) == (0.3, 1.0, 0.5)
    with pytest.raises(DataError, match="no propensity"):
        run_training(by_segment.with_options(propensities={"1": 1.0}), tmp_path / "missing")
