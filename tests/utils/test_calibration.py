"""Expected feedback from scores: increasing in the score, in proportion to the factor of the position."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ultr.errors import DataError, OptionError
from ultr.utils.calibration import FILE, Calibration, of_model

FACTORS = {"1": 1.0, "3": 0.25, "1@phone": 0.8, "3@phone": 0.1}
singles = st.integers(-(10**6), 10**6).map(lambda number: number / 1024)


def of(scores, values, factors=FACTORS, **options) -> Calibration:
    return Calibration.of(np.array(scores, float), np.array(values, float), factors, **options)


@st.composite
def calibrations(draw) -> Calibration:
    scores = sorted(draw(st.lists(singles, min_size=1, max_size=6, unique=True)))
    values = np.cumsum(draw(st.lists(st.sampled_from([0.0, 1e-3, 1.0]), min_size=len(scores), max_size=len(scores))))
    return of(scores, values + 1e-6 * (values[-1] == 0))


@given(calibrations(), arrays(np.float32, st.integers(2, 20), elements=singles))
def test_the_order_of_scores_does_not_change_and_ties_stay_ties(calibration, scores):
    scores[0] = scores[-1]
    expected = calibration.expected(scores)
    assert np.isfinite(expected).all()
    assert (expected > 0).all()
    np.testing.assert_array_equal(scores[:, None] < scores, expected[:, None] < expected)


def test_expected_feedback_is_the_factor_of_the_position_times_the_value_between_knots():
    calibration = of([0, 1, 3], [0.1, 0.3, 0.5])
    scores = np.array([0, 0.5, 1, 2, 3], np.float32)
    np.testing.assert_allclose(calibration.expected(scores), [0.1, 0.2, 0.3, 0.4, 0.5], rtol=1e-5)
    np.testing.assert_allclose(calibration.expected(scores, "3"), 0.25 * calibration.expected(scores))
    np.testing.assert_allclose(calibration.expected(np.array([-100.0, 100.0])), [0.1, 0.5], rtol=1e-3)


def test_a_segment_has_its_own_factor_and_others_that_of_the_position():
    calibration, scores = of([0, 1], [0.5, 1]), np.ones(3)
    found = calibration.expected(scores, "3", ["phone", "tv", None])
    np.testing.assert_allclose(found / calibration.g(scores), [0.1, 0.25, 0.25])
    np.testing.assert_allclose(calibration.expected(scores, "3@phone"), 0.1 * calibration.g(scores))
    np.testing.assert_allclose(calibration.expected(scores, None, ["phone"] * 3), 0.8 * calibration.g(scores))


def test_a_probability_is_at_most_one():
    calibration = of([0, 1], [0.5, 1.7], {"1": 0.8}, most=1 / 0.8)
    assert calibration.expected(np.array([1.0]))[0] == pytest.approx(1, rel=1e-5)


def test_unknown_positions_and_models_without_calibration_are_rejected():
    with pytest.raises(OptionError, match="was not in the training log, got '2'"):
        of([0], [1]).factor("2")
    with pytest.raises(OptionError, match="calibrated without positions"):
        of([0], [1], {}).factor("2")
    assert of([0], [1], {}).factor() == 1
    with pytest.raises(OptionError, match="no calibration"):
        of_model(None, "the model")


def test_a_calibration_is_saved_and_damaged_files_are_rejected(tmp_path):
    assert Calibration.load(tmp_path) is None
    calibration = of([0, 1], [0.5, 0.5])
    calibration.save(tmp_path)
    loaded = Calibration.load(tmp_path)
    assert loaded.to_json() == calibration.to_json()
    content = json.loads((tmp_path / FILE).read_text())
    del content["seal"]
    for change in (
        {"scores": [1, 0]},
        {"scores": [0]},
        {"scores": [], "values": []},
        {"values": [1, 0.5]},
        {"values": [0, 1]},
        {"values": ["a", "b"]},
        {"factors": {"1": -1}},
        {"factors": None},
        {"factors": {"1": float("nan")}},
    ):
        (tmp_path / FILE).write_text(json.dumps({**content, **change}))
        with pytest.raises(DataError, match="calibration cannot be read"):
            Calibration.load(tmp_path)
