"""The bias report of a run and its sentences, for reports of several kinds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from conftest import make_shown_log
from ultr.bias.examination import SOURCES, Examination
from ultr.bias.propensities import write_bias_file
from ultr.bias.sharing import Deviation
from ultr.log.table import SHIFT
from ultr.training.combining import Ranker
from ultr.training.config import make_config
from ultr.training.data import Data
from ultr.training.summary import FEATURES_ALONE, write_bias_report
from ultr.utils.jsonfiles import read_json

LOG = make_shown_log(requests=50)
DATA = Data(LOG, LOG, "")
CONFIG = make_config("log.csv")
REPORT = {
    "positions": [1, 2, 3, 4],
    "theta": [0.7, 0.35, 0.14, 0.07],
    "theta_from": "100 requests in random order",
    "theta_standard_error": 0.05,
}
ALONE = {**REPORT, "theta_from": SOURCES["strata"], "theta_standard_error": None}


@pytest.fixture
def written(tmp_path):
    """Write a report, and return what is in bias.json; None if there is no such file."""

    def write(report, config=CONFIG, data=DATA, shares=None, examination=None) -> dict[str, Any] | None:
        fits: Any = [SimpleNamespace(kind="mlp", report=report)]
        ranker: Any = Ranker(None, None, shares or {})
        write_bias_report(config, data, fits, ranker, examination, tmp_path)
        return read_json(tmp_path / "bias.json") if (tmp_path / "bias.json").is_file() else None

    return write


def test_it_has_how_users_look_and_from_which_evidence(written):
    assert written(REPORT)["summary"] == {
        "users": "compared with position 1, they look 0.50 times as often at 2, 0.20 at 3",
        "evidence": "100 requests in random order, with a standard error of 5.0%",
    }
    assert written(REPORT)["label"] == "click + dwell / exp(3)"


def test_a_method_without_bias_has_no_report(written):
    assert written(None) is None


def test_methods_of_clicks_alone_say_so_in_the_label(written):
    assert written(REPORT, make_config("x", method="dla"))["label"] == "click + dwell / exp(3) > 0"


def test_an_imprecise_estimate_asks_for_more_requests(written):
    advice = written({**REPORT, "theta_standard_error": 0.45})["summary"]["would help"]
    assert "about 20 times as many, for a standard error of 10%" in advice  # 4.5² = 20.25


@pytest.mark.parametrize("ids", [False, True])
def test_an_estimate_from_features_alone_asks_for_random_order_and_ids(ids, written):
    log = replace(LOG, item_ids=pa.array(range(LOG.rows)) if ids else None)
    advice = written(ALONE, data=replace(DATA, train=log))["summary"]["would help"]
    assert "--randomised" in advice
    assert ("--item" in advice) is not ids


@pytest.mark.parametrize("known", [{"users": "pbm"}, {"propensities": {"1": 1.0}}])
def test_nothing_would_help_if_examination_is_known_or_simulated(known, written):
    assert "would help" not in written(ALONE, CONFIG.with_options(**known))["summary"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"theta_from": "9 requests in random order", "theta_standard_error": 0.1, "theta": []},
            "9 requests in random order",
        ),
        ({"verdict": {"status": "identified", "anchor": "items"}}, "the estimate 'items' of ultr bias"),
        ({"verdict": {"status": "not identified", "anchor": "regression-em"}}, FEATURES_ALONE),
        ({"verdict": {"status": "identified", "anchor": "known"}}, REPORT["theta_from"]),
        ({}, REPORT["theta_from"]),
    ],
)
def test_examination_from_another_folder_keeps_its_origin(content, expected, written, tmp_path):
    folder = tmp_path / "bias"
    folder.mkdir()
    write_bias_file(folder, content)
    for path in (folder, folder / "bias.json"):
        assert written(REPORT, CONFIG.with_options(bias=str(path)))["theta_from"] == expected


def test_segments_and_trust_are_named(written):
    places = [1, 2, (1 << SHIFT) + 1, (1 << SHIFT) + 2]
    report = {**REPORT, "positions": places, "rho": [1, 0.9, 0.8, 0.8]}
    content = written(report, data=replace(DATA, segments=("mobile", "desk@top")))
    assert content["positions"] == ["1@mobile", "2@mobile", "1@desk@top", "2@desk@top"]
    assert content["summary"]["users"] == (
        "mobile: compared with position 1, they look 0.50 times as often at 2; "
        "desk@top: compared with position 1, they look 0.50 times as often at 2"
    )
    assert content["summary"]["trust"].startswith("higher positions are trusted more")


def test_the_shares_of_two_rankers_are_written(written):
    shares = {"mlp": 0.25, "lightgbm": 0.75}
    content = written(REPORT, shares=shares)
    assert content["shares"] == shares
    assert content["summary"]["ranker"].startswith("the sum of a network (25%) and lightgbm (75%)")


def test_only_the_first_of_many_segments_are_named(written):
    places = [(number << SHIFT) + position for number in range(5) for position in (1, 2)]
    report = {**REPORT, "positions": places, "theta": [0.8, 0.4] * 5}
    users = written(report, data=replace(DATA, segments=tuple("abcde")))["summary"]["users"]
    assert "c: compared with position 1, they look 0.50 times as often at 2; and 2 more segments" in users
    assert "d:" not in users


def test_one_position_has_nothing_to_compare(written):
    users = written({**REPORT, "positions": [1], "theta": [0.7]})["summary"]["users"]
    assert users == "they look at one position"


def test_columns_on_which_examination_depends_are_told(written):
    ratios = {"phone": (0.8, 0.7, 0.9), "": (1.2, 1.1, 1.3)}
    found = replace(Examination.known({1: 1.0}), deviations=(Deviation(0.2, ratios), Deviation(0.0, ratios)))
    report = written(REPORT, data=replace(DATA, segment="device,login"), examination=found)
    assert report["contexts"]["device"]["ratios"]["phone"] == [0.8, 0.7, 0.9]
    assert report["summary"]["contexts"] == (
        "by 'device', looks at position 5 over the average: phone 0.80 (0.70 to 0.90), missing 1.20 (1.10 to 1.30); "
        "no difference was found between the values of 'login'"
    )
