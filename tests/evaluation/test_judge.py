"""Selection without true labels: the judge, and runs by segment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from ultr.datasets import load_dataset, randomise, ranking_svm, show
from ultr.datasets.simulate import draw_sessions, simulate_log
from ultr.datasets.users import make_user
from ultr.errors import DataError, OptionError
from ultr.evaluation.judge import Judge, evaluate_requests, load_judge, make_judge, request_metrics
from ultr.log import write_log
from ultr.training.checkpoints import read_metrics
from ultr.training.config import RunConfig, TrainingOptions
from ultr.training.run import run_training
from ultr.utils.jsonfiles import read_json

THETA = {k: 1 / k for k in range(1, 11)}


@pytest.fixture(scope="module")
def log():
    data = load_dataset("synthetic")
    chosen = data.train.select(np.arange(150))
    shown = show(chosen, ranking_svm(data.train, share=0.01)(chosen.features))
    return simulate_log(shown, make_user("pbm"), seed=0, sessions=600)[0]


def config(path, **changes) -> RunConfig:
    training = TrainingOptions(steps=10, batch=32, evaluate_every=5, bias_steps=20, device="cpu")
    return RunConfig(data=str(path), ranker="linear", training=training, **changes)


def test_a_judge_is_saved_and_loaded(log, tmp_path):
    judge = make_judge(log, label="click", known=THETA)
    judge.save(tmp_path / "judge")
    again = load_judge(tmp_path / "judge")
    scores = np.arange(log.rows, dtype=float)
    a, b = (each.value(log, scores, "off-policy-reward@5", label="click") for each in (judge, again))
    assert a.value == b.value
    assert again.theta == {str(k): v for k, v in THETA.items()}
    assert load_judge(tmp_path / "none") is None
    (tmp_path / "judge" / "judge.json").write_text("{}")
    with pytest.raises(DataError, match="has a different format"):
        load_judge(tmp_path / "judge")


def test_the_value_of_the_logged_order_is_its_feedback(log):
    judge = make_judge(log, label="click", known=THETA)
    found = evaluate_requests(log, -log.positions.astype(float), ["off-policy-reward@10"], label="click", judge=judge)
    clicks = np.add.reduceat(log.actions["click"], log.offsets[:-1])
    np.testing.assert_allclose(found["off-policy-reward@10"], clicks, rtol=1e-6)


def test_an_evaluator_serves_any_number_of_scores(log, monkeypatch):
    options = {"label": "click", "judge": make_judge(log, label="click", known=THETA)}
    metrics = ["off-policy-reward@10", "feedback-ndcg@10"]
    scores = np.random.default_rng(0).normal(size=(2, log.rows))
    expected = [evaluate_requests(log, each, metrics, **options) for each in scores]
    evaluate = request_metrics(log, metrics, keep=True, **options)
    monkeypatch.setattr(Judge, "estimator", lambda *_: pytest.fail("made again"))
    for each, values in zip(scores, expected, strict=True):
        found = evaluate(each)
        for name in metrics:
            np.testing.assert_array_equal(found[name], values[name])


def test_off_policy_metrics_need_a_judge(log):
    with pytest.raises(DataError, match="which this run has not saved; train again with --select off-policy-reward@10"):
        evaluate_requests(log, np.zeros(log.rows), ["off-policy-reward@10"], label="click")
    with pytest.raises(OptionError, match="reward@k, dcg@k and gain@k"):
        RunConfig(data="x", select="off-policy-ndcg@10")


def test_runs_of_a_log_are_selected_by_the_same_judge_whatever_their_method(log, tmp_path):
    write_log(log, tmp_path / "log.parquet")
    runs = [
        run_training(config(tmp_path / "log.parquet", method=method), tmp_path / method)
        for method in ("pointwise", "ipw-pointwise")
    ]
    judges = [read_json(run / "judge" / "judge.json") for run in runs]
    assert judges[0] == judges[1]
    assert all("off-policy-gain@10" in line for line in read_metrics(runs[0]))


def test_runs_with_users_are_selected_by_feedback_by_default(tmp_path):
    assert config("synthetic", users="pbm").selection == "feedback-ndcg@10"
    assert config("log.parquet").selection == "off-policy-gain@10"
    assert config("log.parquet", select="mrr").selection == "mrr"
    run = run_training(
        config("synthetic", users="pbm", method="pointwise", select="off-policy-dcg@5"), tmp_path / "run"
    )
    assert all("off-policy-dcg@5" in line for line in read_metrics(run))


def test_examination_is_learned_and_known_by_segment(log, tmp_path):
    devices = pa.array(["phone" if i % 2 else "desk" for i in range(len(log))])
    write_log(replace(log, context={**log.context, "segment": devices}), tmp_path / "log.parquet")
    columns = {"segment": "segment"}
    run = run_training(config(tmp_path / "log.parquet", columns=columns), tmp_path / "run")
    slots = {f"{k}@{name}" for k in range(1, 11) for name in ("desk", "phone")}
    assert set(read_json(run / "bias.json")["positions"]) == slots
    assert set(read_json(run / "judge" / "judge.json")["theta"]) == slots
    known = {**{str(k): theta for k, theta in THETA.items()}, "1@phone": 0.3}
    run = run_training(config(tmp_path / "log.parquet", columns=columns, propensities=known), tmp_path / "known")
    found = read_json(run / "bias.json")
    theta = dict(zip(found["positions"], found["theta"], strict=True))
    assert (theta["1@phone"], theta["1@desk"], theta["2@phone"]) == (0.3, 1.0, 0.5)
    with pytest.raises(DataError, match="no propensity"):
        run_training(config(tmp_path / "log.parquet", columns=columns, propensities={"1": 1.0}), tmp_path / "missing")


def test_a_share_of_requests_is_shown_in_random_order_and_marked(log):
    found = randomise(log, 0.5, seed=1)
    marked = found.context["randomised"].to_numpy(zero_copy_only=False)
    assert 0.4 < marked.mean() < 0.6
    np.testing.assert_array_equal(found.positions, log.positions)
    rows = np.repeat(marked, log.lengths)
    np.testing.assert_array_equal(found.features[~rows], log.features[~rows])
    assert not np.array_equal(found.features[rows], log.features[rows])
    first, last = (found.relevance[rows & (found.positions == k)].mean() for k in (1, 10))
    assert abs(first - last) < 0.35  # a ranker would have put the best first
    with pytest.raises(OptionError, match="between 0 and 1"):
        randomise(log, 2.0)


def test_sessions_have_the_query_they_repeat(log):
    drawn = draw_sessions(log.select(np.arange(5)), 20, seed=0)
    assert len(drawn) == len(drawn.request_ids.unique()) == 20
    assert len(drawn.context["query"].unique()) <= 5
