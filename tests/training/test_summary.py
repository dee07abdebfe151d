"""What a run says about bias, for reports of several kinds."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from conftest import make_shown_log
from ultr.bias.examination import SOURCES
from ultr.bias.propensities import write_bias_file
from ultr.log.segments import SHIFT
from ultr.training.config import RunConfig
from ultr.training.data import RunData
from ultr.training.summary import FEATURES_ALONE, bias_summary, origin_of_theta

LOG = make_shown_log(requests=50)
DATA = RunData(LOG, LOG, "")
CONFIG = RunConfig(data="log.csv")
REPORT = {
    "positions": [1, 2, 3, 4],
    "theta": [0.7, 0.35, 0.14, 0.07],
    "theta_from": "100 requests in random order",
    "theta_standard_error": 0.05,
}


def test_it_says_how_users_look_and_from_which_evidence():
    assert bias_summary(REPORT, CONFIG, DATA) == {
        "users": "compared with position 1, they look 0.50 times as often at 2, 0.20 at 3",
        "evidence": "100 requests in random order, with a standard error of 5.0%",
    }


def test_an_imprecise_estimate_asks_for_more_requests():
    said = bias_summary({**REPORT, "theta_standard_error": 0.45}, CONFIG, DATA)
    assert said["would help"] == "more requests: about 2,000 in all for a standard error of 10%"  # 50 · 4.5² = 1,013


@pytest.mark.parametrize("ids", [False, True])
def test_an_estimate_from_features_alone_asks_for_random_order_and_ids(ids):
    log = replace(LOG, item_ids=pa.array(range(LOG.rows)) if ids else None)
    report = {**REPORT, "theta_from": SOURCES["strata"], "theta_standard_error": None}
    advice = bias_summary(report, CONFIG, replace(DATA, train=log))["would help"]
    assert "--randomised" in advice
    assert ("--item" in advice) is not ids


@pytest.mark.parametrize("known", [{"users": "pbm"}, {"propensities": {"1": 1.0}}])
def test_nothing_would_help_if_examination_is_known_or_simulated(known):
    report = {**REPORT, "theta_from": SOURCES["strata"], "theta_standard_error": None}
    assert "would help" not in bias_summary(report, replace(CONFIG, **known), DATA)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"theta_from": "9 requests in random order", "theta_standard_error": 0.1, "theta": []},
            "9 requests in random",
        ),
        ({"verdict": {"status": "identified", "anchor": "items"}}, "the estimate 'items' of ultr bias"),
        ({"verdict": {"status": "not identified", "anchor": "regression-em"}}, FEATURES_ALONE),
        ({"verdict": {"status": "identified", "anchor": "known"}}, None),
        ({}, None),
    ],
)
def test_examination_from_another_folder_keeps_its_origin(content, expected, tmp_path):
    write_bias_file(tmp_path, content)
    found = origin_of_theta(replace(CONFIG, bias=str(tmp_path)))
    assert found.get("theta_from", "").startswith(expected or "")
    assert bool(found) is (expected is not None)
    assert found == origin_of_theta(replace(CONFIG, bias=str(tmp_path / "bias.json")))
    assert origin_of_theta(CONFIG) == {}


def test_segments_trust_and_the_choice_of_the_ranker_are_named():
    places = [1, 2, (1 << SHIFT) + 1, (1 << SHIFT) + 2]
    report = {**REPORT, "positions": places, "rho": [1, 0.9, 0.8, 0.8], "final": {"ranker": "blend"}}
    said = bias_summary(report, CONFIG, replace(DATA, segments=("mobile", "desk@top")))
    assert said["users"] == (
        "mobile: compared with position 1, they look 0.50 times as often at 2; "
        "desk@top: compared with position 1, they look 0.50 times as often at 2"
    )
    assert said["trust"].startswith("higher positions are trusted more")
    assert said["ranker"].startswith("the sum of")


def test_only_the_first_of_many_segments_are_told():
    places = [(number << SHIFT) + position for number in range(5) for position in (1, 2)]
    report = {**REPORT, "positions": places, "theta": [0.8, 0.4] * 5}
    said = bias_summary(report, CONFIG, replace(DATA, segments=tuple("abcde")))["users"]
    assert "c: compared with position 1, they look 0.50 times as often at 2; and 2 more segments" in said
    assert "d:" not in said


def test_one_position_has_nothing_to_compare():
    said = bias_summary({**REPORT, "positions": [1], "theta": [0.7]}, CONFIG, DATA)
    assert said["users"] == "they look at one position"
