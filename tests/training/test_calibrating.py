"""Expected feedback is fitted to feedback, corrected on requests that were not learned from, and judged on others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from sklearn.isotonic import IsotonicRegression

from runs import FEEDBACK, KNOWN, feedback_log, quick, write_feedback
from ultr.errors import OptionError
from ultr.log import Log
from ultr.log.labels import Label
from ultr.rankers.model import load_model
from ultr.report.runs import load_run, run_sections
from ultr.training.calibrating import _corrected, _Rows, _trusted, fit_calibration, reliability
from ultr.training.outcome import read_outcome
from ultr.training.run import run_training
from ultr.utils.calibration import Calibration

THETA = np.array([1, 0.5, 0.2])


def drawn(requests: int, *, seed: int = 0, slope: float = 1.0, selection=(1, 1, 1), each: int = 3) -> _Rows:
    """Return rows with E[c] = θ_k a_k g(s), where log g has this slope in the score."""
    rng = np.random.default_rng(seed)
    scores, places = rng.normal(size=requests * each), np.tile(np.arange(each), requests)
    mean = (THETA * np.array(selection))[places] * np.exp(slope * scores - 2)
    labels = (rng.random(len(mean)) < mean).astype(float)
    return _Rows(scores, labels, np.ones(len(mean)), places, np.repeat(np.arange(requests), each))


def test_the_fit_is_the_isotonic_one_of_feedback_over_examination():
    rows = drawn(400)
    rows = replace(rows, weights=np.random.default_rng(1).uniform(0.5, 2, len(rows.labels)))
    scores, values, factors = fit_calibration(replace(rows, places=0 * rows.places), np.array([0.5]))
    reference = IsotonicRegression().fit(rows.scores, rows.labels / 0.5, sample_weight=rows.weights)
    np.testing.assert_allclose(np.interp(rows.scores, scores, values), reference.predict(rows.scores), atol=1e-12)
    assert factors == [0.5]


def test_expected_feedback_adds_up_to_the_feedback():
    rows = drawn(400)
    scores, values, factors = fit_calibration(rows, THETA)
    expected = factors[rows.places] * np.interp(rows.scores, scores, values)
    assert expected.sum() == pytest.approx(rows.labels.sum(), rel=1e-9)


def test_factors_follow_the_feedback_at_a_position_only_if_it_is_not_noise():
    exact = fit_calibration(drawn(2000), THETA)[2] / THETA
    assert np.abs(exact - 1).max() < 0.05
    _, _, factors = fit_calibration(drawn(40_000, selection=(0.6, 1, 1.4)), THETA)
    np.testing.assert_allclose(factors / factors[1], np.array([0.6, 1, 1.4]) * THETA / THETA[1], rtol=0.06)


def test_scores_that_flatter_train_rows_are_corrected_by_held_out_rows():
    scores, values, factors = fit_calibration(drawn(20_000, slope=1.5), THETA)
    held_out = drawn(6000, seed=1, slope=0.5)
    corrected = _corrected(scores, values, factors, held_out)
    at = np.linspace(-1, 1, 9)
    np.testing.assert_allclose(np.interp(at, scores, corrected), np.exp(0.5 * at - 2), rtol=0.15)
    expected = factors[held_out.places] * np.interp(held_out.scores, scores, corrected)
    assert expected.sum() == pytest.approx(held_out.labels.sum(), rel=0.01)


def test_noise_of_held_out_rows_changes_nothing_in_most_logs():
    scores, values, factors = fit_calibration(drawn(20_000), THETA)
    at, changes = np.linspace(-1, 1, 9), []
    for seed in range(40):
        corrected = _corrected(scores, values, factors, drawn(300, seed=seed))
        changes.append(np.log(np.interp(at, scores, corrected) / np.interp(at, scores, values)))
    assert np.median(np.abs(changes)) < 0.03
    assert np.abs(np.mean(changes)) < 0.03


def test_trust_in_positions_takes_its_share_of_the_label():
    clicks, purchases = np.array([1.0, 1, 1, 0]), np.array([1.0, 0, 0.5, 0])  # τ_2 = 1/2
    log = replace(one_row_log(clicks, np.array([1, 1, 2, 2])), actions={"click": clicks, "purchase": purchases})
    found = _trusted(log, Label("click + 5 * purchase"), {"purchase": {1: 1.0, 2: 0.5}}, (1, 2))
    np.testing.assert_allclose(found, [1, (3 + 0.5 * 10) / (3 + 10)])


# --- Reliability ------------------------------------------------------------------------------------------------------


def one_row_log(clicks: np.ndarray, positions=None) -> Log:
    count = len(clicks)
    positions = np.ones(count, np.int64) if positions is None else positions
    return Log(np.zeros((count, 1)), np.arange(count + 1), np.arange(count), ("f",), positions, {"click": clicks})


def test_the_calibration_error_is_the_mean_difference_over_the_mean_feedback():
    scores = np.repeat([0.0, 1.0], 300)
    clicks = np.concatenate([np.tile([0, 0, 1.0], 100), np.tile([0, 1.0, 1], 100)])
    calibration = Calibration(np.array([0.0, 1]), np.array([0.5, 0.5]), {"1": 1.0})
    found = reliability(calibration, scores, one_row_log(clicks), Label("click"), ())
    assert found["error"] == pytest.approx((100 * 0.5 / 3 + 200 * 0.25 / 3) / 100, rel=0.1)  # 1/6 of 1/2
    assert found["groups"] == []
    right = Calibration(np.array([0.0, 1]), np.array([1 / 3, 2 / 3]), {"1": 1.0})
    assert reliability(right, scores, one_row_log(clicks), Label("click"), ())["error"] < 0.03  # a bin may cut a period


def test_the_error_by_chance_is_that_of_feedback_which_is_as_expected():
    rng, errors, chances = np.random.default_rng(0), [], []
    calibration = Calibration(np.array([0.0, 1]), np.array([0.1, 0.6]), {"1": 1.0})
    for _ in range(60):
        scores = rng.random(900)
        clicks = (rng.random(900) < calibration.g(scores)).astype(float)
        found = reliability(calibration, scores, one_row_log(clicks), Label("click"), ())
        errors.append(found["error"])
        chances.append(found["chance"])
    assert np.mean(errors) == pytest.approx(np.mean(chances), rel=0.1)


def test_groups_of_requests_whose_feedback_is_not_as_expected_are_named():
    rng = np.random.default_rng(0)
    lengths = np.repeat([3, 9], 1500)
    clicks = (rng.random(lengths.sum()) < np.repeat([0.1, 0.3], 1500).repeat(lengths)).astype(float)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.concatenate([np.arange(1, n + 1) for n in lengths])
    log = Log(np.zeros((len(clicks), 1)), offsets, np.arange(3000), ("f",), positions, {"click": clicks})
    calibration = Calibration(np.array([0.0]), np.array([0.25]), {})
    (short, long) = reliability(calibration, np.zeros(len(clicks)), log, Label("click"), ())["groups"]
    assert short.startswith("requests with 1 to 3 items: feedback is -")
    assert long.startswith("requests with 4 to 9 items: feedback is +")


# --- Runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    log = write_feedback(tmp_path_factory.mktemp("log"), 200)
    return run_training(quick(log, propensities=KNOWN, select=FEEDBACK), tmp_path_factory.mktemp("run") / "run")


def test_a_run_is_calibrated_and_judged_on_test_requests(run):
    model, log = load_model(run), feedback_log(60)
    scores = model.score(log)
    expected = model.score(log, calibrated=True, at_position=2)
    np.testing.assert_array_equal(np.argsort(expected, kind="stable"), np.argsort(scores, kind="stable"))
    first = model.score(log, calibrated=True)
    assert 0 < np.median(expected) < np.median(first)  # examination falls
    found = read_outcome(run).calibration
    assert set(found) == {"bins", "error", "chance", "groups"}
    assert found["error"] > 0
    assert len(found["bins"]["expected"]) > 5
    assert "Calibration" in [section.title for section in run_sections([load_run(run)])]
    with pytest.raises(OptionError, match="only calibrated scores depend on a position"):
        model.score(log, at_position=2)


def test_a_run_without_a_calibration_still_scores(run, tmp_path):
    model = replace(load_model(run), calibration=None)
    assert len(model.score(feedback_log(5))) == feedback_log(5).rows
    with pytest.raises(OptionError, match="no calibration"):
        model.score(feedback_log(5), calibrated=True)


def test_score_keeps_the_names_of_the_users_columns_and_adds_expected_feedback(run, tmp_path, ultr):
    log = feedback_log(20)
    table = log.to_table()
    names = {"request": "search", "position": "slot", "click": "tap"}
    renamed = table.rename_columns([names.get(name, name) for name in table.column_names])
    renamed = renamed.replace_schema_metadata(table.schema.metadata)
    pq.write_table(renamed, tmp_path / "rows.parquet")
    options = ("--request", "search", "--position", "slot", "--calibrated", "--at-position", "2")
    for out in ("scores.csv", "scores.parquet"):
        printed = ultr("score", run, tmp_path / "rows.parquet", "--out", tmp_path / out, *options)
        assert not printed.returncode, printed.stderr
    scored = pq.read_table(tmp_path / "scores.parquet")
    assert scored.column_names[:2] == ["search", "slot"]
    assert scored.column_names[-2:] == ["score", "expected"]
    assert pyarrow.csv.read_csv(tmp_path / "scores.csv").column_names == scored.column_names
    model = load_model(run)
    np.testing.assert_allclose(scored["expected"], model.score(log, calibrated=True, at_position=2), rtol=1e-6)
    plain = ultr("score", run, tmp_path / "rows.parquet", "--out", tmp_path / "plain.csv", "--at-position", "2")
    assert plain.returncode
    assert "pass --calibrated too" in plain.stderr


def test_an_exported_model_and_its_server_give_expected_feedback(run, tmp_path):
    pytest.importorskip("onnxscript")
    from ultr.serving.export import export_run
    from ultr.serving.exported import load_exported

    exported = export_run(run, tmp_path / "model")
    model, log = load_model(run), feedback_log(10)
    expected = exported.expected(model.score(log), "2")
    np.testing.assert_allclose(expected, model.score(log, calibrated=True, at_position=2), rtol=1e-6)
    about = json.loads((tmp_path / "model" / "model.json").read_text())
    del about["calibration"], about["seal"]
    (tmp_path / "model" / "model.json").write_text(json.dumps(about))
    with pytest.raises(OptionError, match="no calibration"):
        load_exported(tmp_path / "model").expected(np.zeros(2))
    assert "Expected feedback" in (tmp_path / "model" / "README.md").read_text()
