"""Settings, differences and tests of a comparison."""

from __future__ import annotations

import numpy as np
import pytest

from ultr.errors import DataError
from ultr.evaluation.scores import holm, paired_test
from ultr.training.comparing.results import Comparison, Difference, Row, Setting, with_logged_tests, with_tests


@pytest.mark.parametrize(
    ("setting", "name", "text", "options"),
    [
        (Setting(0.02), "lr-0.02", "lr 0.02", {"lr": 0.02}),
        (
            Setting(0.005, 0.0, 3.0, 2),
            "lr-0.005-dropout-0-max-weight-3-longer-2",
            "lr 0.005, dropout 0, weights to 3, 2 times the steps",
            {"lr": 0.005, "dropout": 0.0, "method.max_weight": 3.0},
        ),
        (
            Setting(0.1, max_weight="none"),
            "lr-0.1-max-weight-none",
            "lr 0.1, weights without a limit",
            {"lr": 0.1, "method.max_weight": "none"},
        ),
        (Setting(), "default", "", {}),
    ],
)
def test_a_setting_has_a_folder_a_text_options_and_json(setting, name, text, options):
    assert (setting.name, str(setting), setting.options) == (name, text, options)
    assert Setting.from_json(setting.to_json()) == setting


@pytest.mark.parametrize("row", [{"lr": "fast"}, {"lr": 0.1, "max_weight": "all"}, {"lr": 0.1, "longer": None}])
def test_a_row_without_a_valid_setting_is_an_error(row):
    with pytest.raises(DataError, match="no valid setting"):
        Setting.from_json(row)


def row(name, seeds, by_request):
    return Row(name, Setting(0.1), {"m": list(seeds)}, by_request={"m": by_request})


def test_a_difference_must_be_significant_over_runs_and_over_requests():
    rng = np.random.default_rng(0)
    requests = rng.normal(size=200)
    base = row("base", [1.0, 1.1, 1.2], requests)
    both = row("both", [2.0, 2.11, 2.2], requests + 1 + rng.normal(size=200) / 10)
    by_runs = row("by runs", [2.0, 2.1, 2.21], requests + rng.normal(size=200))
    by_requests = row("by requests", [0.0, 1.5, 2.9], requests + 1 + rng.normal(size=200) / 10)
    rows = with_tests([base, both, by_runs, by_requests], "base")
    assert rows[0].against == {}
    assert [r.against["m"].significant for r in rows[1:]] == [True, False, False]
    raw = [r.tested(base)["m"] for r in rows[1:]]
    smallest = min(test.seeds.p for test in raw)
    assert min(r.against["m"].holm[0] for r in rows[1:]) == pytest.approx(3 * smallest)
    assert Difference(raw[0].seeds).significant
    assert not Difference(raw[0].seeds, raw[0].requests, holm=(0.04, 0.06)).significant


def test_tests_against_the_logged_ranking_are_over_requests_and_corrected_for_the_number_of_methods():
    rng = np.random.default_rng(0)
    rows = [row(name, [1.0], rng.normal(size=50)) for name in "ab"]
    logged = {"m": rng.normal(size=50), "not of the rows": rng.normal(size=50)}
    expected = [paired_test(each.by_request["m"], logged["m"]) for each in rows]
    found = [each.against_logged["m"] for each in with_logged_tests(rows, logged)]
    assert [test.requests for test in found] == expected
    assert [test.holm for test in found] == holm([test.p for test in expected])


@pytest.mark.parametrize(("metric", "best"), [("reward@10", "high"), ("feedback-arp", "low")])
def test_the_best_method_has_the_best_mean_of_the_first_metric(metric, best):
    rows = [
        Row(name, Setting(0.1), {metric: [value, value], "ndcg@10": [-value, -value]})
        for name, value in (("low", 1.0), ("high", 2.0))
    ]
    assert Comparison(rows, [metric, "ndcg@10"], "low").best().entry == best
