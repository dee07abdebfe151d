"""Examination is estimated once for a run, and for runs that share it; the best step follows from the metrics."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from runs import FEEDBACK, KNOWN, PLAIN, feedback_log, quick
from ultr.bias.examination import Examination
from ultr.errors import DataError
from ultr.evaluation.off_policy import request_metrics
from ultr.training.data import load_run_data
from ultr.training.examining import (
    Examined,
    best_evaluation,
    common_values,
    evaluator,
    examine,
    has_values,
    less_is_better,
    share_values,
)
from ultr.training.folder import CONFIG, append_metrics, read_metrics
from ultr.training.run import run_training
from ultr.utils.jsonfiles import write_json


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """Count the estimates of examination, and the models of off-policy metrics."""
    import ultr.training.examining as module

    counts: Counter[str] = Counter()

    def counted(name):
        function = getattr(module, name)
        return lambda *args, **options: (counts.update([name]), function(*args, **options))[1]

    for name in ("estimate_examination", "fit_off_policy_model"):
        monkeypatch.setattr(module, name, counted(name))
    return counts


ONE_OF_EACH = {"estimate_examination": 1, "fit_off_policy_model": 1}


def examined(config, folder: Path | None, shared: Path | None = None, *, needed: bool = True) -> Examined:
    data = load_run_data(config, None if config.users else feedback_log())
    return examine(config, data, folder, shared, needed=needed)


def test_a_run_reads_back_what_it_has_estimated(calls, tmp_path):
    first, second = (examined(quick(""), tmp_path) for _ in range(2))
    assert calls == ONE_OF_EACH
    assert first.examination.by_position() == second.examination.by_position()
    np.testing.assert_array_equal(first.examination.theta, Examination.load(tmp_path / "examination.json").theta)
    data = load_run_data(quick(""), feedback_log())
    scores = torch.rand(data.validation.rows)
    values = [evaluator(quick(""), data, each.values)(scores)["off-policy-likelihood"] for each in (first, second)]
    assert float(values[0]) == pytest.approx(float(values[1]))


def test_known_examination_is_not_estimated(calls, tmp_path):
    found = examined(quick("", propensities=KNOWN), tmp_path)
    assert calls == {"fit_off_policy_model": 1}
    theta = found.examination.by_position()
    assert {position: value / theta[1] for position, value in theta.items()} == pytest.approx(
        {position: 1 / position for position in theta}
    )


@pytest.mark.parametrize(
    ("options", "needed", "files"),
    [
        (PLAIN, False, set()),
        ({"method": "pointwise"}, False, {"examination.json", "off-policy"}),
        ({"select": FEEDBACK}, True, {"examination.json"}),
    ],
)
def test_only_what_is_needed_is_estimated(options, needed, files, tmp_path):
    found = examined(quick("", **options), tmp_path, needed=needed)
    assert {path.name for path in tmp_path.iterdir()} == files
    assert (found.examination is not None, found.values is not None) == (bool(files), "off-policy" in files)


def test_runs_with_the_same_data_and_seed_share_it(calls, tmp_path):
    shared = tmp_path / "shared"
    for number, options in enumerate(({}, {"lr": 0.5}, {"hidden": (4,)}, {"method": "direct"})):
        examined(quick("", **options), tmp_path / str(number), shared)
        assert (tmp_path / str(number) / "examination.json").is_file()
    assert calls == ONE_OF_EACH
    examined(quick("", seed=1), None, shared)
    assert calls == dict.fromkeys(ONE_OF_EACH, 2)


def test_the_requests_of_all_seeds_of_a_comparison_have_one_model(calls, tmp_path, small_synthetic):
    config = quick("synthetic", users="pbm", select="off-policy-reward@10", seed=3, bias_steps=5)
    assert not has_values(config, tmp_path)
    share_values(config, tmp_path)
    assert has_values(config, tmp_path)
    common_values(config, tmp_path)
    assert calls == dict.fromkeys(ONE_OF_EACH, 2)  # of the seeds 3 and 0
    common_values(config.with_options(seed=4), tmp_path)
    share_values(config, tmp_path)
    assert calls == dict.fromkeys(ONE_OF_EACH, 2)


def test_users_without_bias_are_judged_by_the_feedback_of_the_others(tmp_path, small_synthetic):
    options = {"users": "pbm", "select": "off-policy-reward@10", "bias_steps": 5}
    found = examined(quick("synthetic", learn_from="no-bias", **options), tmp_path)
    assert found.examination is None  # all items are examined
    theta = Examination.load(tmp_path / "examination.json").by_position()
    assert theta[10] < 0.5 * theta[1]
    assert found.values is not None


# --- The best step ----------------------------------------------------------------------------------------------------


def test_the_best_evaluation_is_that_of_a_ranker(tmp_path):
    write_json(tmp_path / CONFIG, quick("x", select="ndcg@10").to_json())
    for ranker, values in {"mlp": (0.1, 0.7, 0.5), "lightgbm": (0.3, 0.2)}.items():
        for step, value in enumerate(values):
            append_metrics(tmp_path, {"ranker": ranker, "step": step, "ndcg@10": value})
    assert best_evaluation(tmp_path, "mlp")[1]["step"] == 1
    for kind in (None, "lightgbm"):  # that was trained last
        name, line = best_evaluation(tmp_path, kind)
        assert (name, line["ranker"], line["step"]) == ("ndcg@10", "lightgbm", 0)
    with pytest.raises(DataError):
        best_evaluation(tmp_path, "xgboost")
    write_json(tmp_path / CONFIG, quick("x", select="ndcg@5").to_json())
    with pytest.raises(DataError, match="no evaluations by 'ndcg@5'"):
        best_evaluation(tmp_path)


def test_less_is_better_for_positions(tmp_path):
    assert [less_is_better(name) for name in ("arp", "feedback-arp", "ndcg@10")] == [True, True, False]
    config = quick("", method="pointwise", select="feedback-arp")
    run = run_training(config, tmp_path / "run", source=feedback_log())
    _, line = best_evaluation(run)
    assert line["feedback-arp"] == min(each["feedback-arp"] for each in read_metrics(run))


def test_means_have_the_weights_of_the_requests():
    log = feedback_log(20)
    scores = np.random.default_rng(0).normal(size=log.rows)
    mean = np.average(request_metrics(log, [FEEDBACK], label="click")(scores)[FEEDBACK], weights=log.weights)
    data = load_run_data(quick("", select=FEEDBACK, label="click"), log)
    alone = evaluator(quick("", select=FEEDBACK, label="click"), data, None)
    rows = np.isin(np.asarray(log.request_ids), np.asarray(data.validation.request_ids))
    part = log.select(rows)
    of_part = torch.from_numpy(scores[np.repeat(rows, log.lengths)].astype(np.float32))
    values = request_metrics(part, [FEEDBACK], label="click")(of_part.numpy())[FEEDBACK]
    expected = np.average(values, weights=part.weights)
    assert float(alone(of_part)[FEEDBACK]) == pytest.approx(expected, rel=1e-5)
    assert mean != expected
