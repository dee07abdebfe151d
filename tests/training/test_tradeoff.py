"""Runs with several goals, and with trust after the click: what they learn from, and the curve of two goals."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import ultr
from ultr.bias.after_click import AfterClick
from ultr.errors import DataError, LabelError, UltrError
from ultr.log import read_log
from ultr.report.runs import trade_off_plot
from ultr.training.config import Config, differences, make_config, train_command
from ultr.training.data import split_log
from ultr.training.loop import Listeners
from ultr.training.tradeoff import TRADE_OFF, read_trade_off
from ultr.utils.jsonfiles import write_json
from worlds.actions import FEATURES, actions

COLUMNS = {
    "item": "item",
    "randomised": "random",
    "features": ",".join(FEATURES),
    "actions": "click,purchase,seconds",
}
GOALS = {"click": 1, "purchase": 12}


@pytest.fixture(scope="module")
def world():
    return actions(6000, seed=5, conflict=0.95)


@pytest.fixture(scope="module")
def notes():
    return []


@pytest.fixture(scope="module")
def run(world, notes, tmp_path_factory):
    out, listeners = tmp_path_factory.mktemp("goals") / "run", Listeners(on_note=notes.append)
    options = {"label": GOALS, "ranker": "lightgbm", "columns": COLUMNS, "tradeoff": 3, "trees.rounds": 80}
    return ultr.train(world.log, out, listeners=listeners, **options)


def test_the_curve_is_announced_with_its_cost(run, notes):
    (note,) = [note for note in notes if "trade-off" in note]
    assert note.startswith("ultr report shows the trade-off of click and 12 * purchase (")
    assert note.endswith(" s; --set tradeoff=0 leaves it out)")


def test_the_goals_of_a_run_are_one_label(run):
    assert run.decisions.label == run.config.label == "click + 12 * purchase"
    assert run.config.goals == ("click", "12 * purchase")
    repeated = train_command(run.config)[0]
    assert "--label click --label '12 * purchase'" in repeated
    assert "label=" not in repeated


def test_the_run_learns_from_purchases_without_trust_and_says_so(run, world):
    purchase = run.bias["actions"]["purchase"]
    assert purchase["used"]
    assert purchase["tau"][-1] == pytest.approx(world.tau["purchase"][-1], rel=0.4)
    assert "purchase after a click at position 10" in run.bias["summary"]["after the click"]
    assert {**json.loads((run.folder / "off-policy" / "model.json").read_text())["actions"]} == run.bias["actions"]


def test_the_curve_of_two_goals_goes_from_one_to_the_other(run):
    found = read_trade_off(run.folder)
    assert found["goals"] == ["click", "12 * purchase"]
    assert [*found["values"]] == ["the logged ranking", "100 : 0", "50 : 50", "0 : 100", "the run"]
    clicks, purchases = np.array([[m.mean for m in found["values"][name]] for name in found["weightings"]]).T
    errors = np.array([[m.high - m.low for m in found["values"][name]] for name in found["weightings"]]).T / 4
    assert (np.diff(clicks) < 2 * errors[0][1:]).all()
    assert (np.diff(purchases) > -2 * errors[1][1:]).all()
    assert clicks[0] > 1.1 * clicks[-1]
    assert purchases[-1] > 1.05 * purchases[0]
    of_run = [mean.mean for mean in found["values"]["the run"]]
    line = np.interp(of_run[0], clicks[::-1], purchases[::-1])
    assert of_run[1] > line - 2 * errors[1].max()  # on the line or above it


def test_the_value_of_the_logged_ranking_is_its_feedback_with_trust(run, world):
    judging = np.isin(np.asarray(world.log["request"]), np.array(run.outcome.requests, int))
    clicks, purchases = (float(np.asarray(world.log[name])[judging].sum() / 600) for name in ("click", "purchase"))
    found = [mean.mean for mean in read_trade_off(run.folder)["values"]["the logged ranking"]]
    assert found == pytest.approx([clicks, 12 * purchases], rel=1e-5)
    mean = run.outcome.about["means"]["logged off-policy-reward@10"]["mean"]
    assert mean == pytest.approx(clicks + 12 * purchases, rel=1e-5)


def test_a_report_shows_the_curve(run, tmp_path):
    ultr.write_report([run.folder], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Two goals" in page
    assert "Actions after a click" in page
    plot = trade_off_plot(read_trade_off(run.folder), "Two goals")
    assert [len(trace["x"]) for trace in plot.figure["data"]] == [3, 1, 1]


def test_a_wrong_file_of_the_curve_is_rejected(run, tmp_path):
    content = json.loads((run.folder / TRADE_OFF).read_text())
    content["values"].pop("50 : 50")
    write_json(tmp_path / TRADE_OFF, {name: each for name, each in content.items() if name != "seal"})
    with pytest.raises(DataError, match="has no values of both goals"):
        read_trade_off(tmp_path)
    assert read_trade_off(tmp_path / "other") is None


@pytest.mark.parametrize("options", [{"label": "click + 12 * purchase"}, {"label": GOALS, "tradeoff": 0}])
def test_a_run_with_one_label_or_without_weightings_has_no_curve(options, tmp_path):
    world = actions(600, seed=6)
    run = ultr.train(world.log, tmp_path / "run", ranker="lightgbm", columns=COLUMNS, **{"trees.rounds": 10}, **options)
    assert read_trade_off(run.folder) is None


def test_what_is_learned_from_is_divided_by_trust_and_what_judges_is_not():
    log = read_log(actions(400, seed=7).log, **{**COLUMNS, "features": [*FEATURES], "actions": ["click", "purchase"]})
    data = split_log(log, make_config(label="click + purchase"))
    tau = tuple(1 / np.arange(1, 11.0))
    used = AfterClick(tuple(range(1, 11)), tau, tau, tau, 0.0, used=True, evidence="items")
    assert data.corrected({"purchase": replace(used, used=False)}) is data
    streams = []
    learned = replace(data, stream=lambda _, also: streams.append(also)).corrected({"purchase": used})
    for before, after in ((data.train, learned.train), (data.validation, learned.validation)):
        np.testing.assert_allclose(after.actions["purchase"], before.actions["purchase"] * before.positions, rtol=1e-5)
        np.testing.assert_array_equal(after.actions["click"], before.actions["click"])
    assert learned.test is data.test
    assert learned.as_logged.validation is data.validation
    assert data.binary == ("click", "purchase")
    assert learned.binary == ("click",)
    learned.feed(make_config().loop("mlp"))
    assert streams[0](data.train).actions["purchase"] == pytest.approx(learned.train.actions["purchase"])


@pytest.mark.parametrize(
    ("given", "label", "goals"),
    [
        ("click", "click", ()),
        (["click"], "click", ()),
        (["click", "5 * purchase"], "click + 5 * purchase", ("click", "5 * purchase")),
        ({"click": 1, "seconds > 30": 2}, "click + (2 * (seconds > 30))", ("click", "2 * (seconds > 30)")),
        (["click", "seconds > 30"], "click + (seconds > 30)", ("click", "seconds > 30")),
        ({"a": 1, "b + c": 0.5, "d": 2}, "a + 0.5 * (b + c) + 2 * d", ("a", "0.5 * (b + c)", "2 * d")),
        ({"purchase": 3}, "3 * purchase", ()),
    ],
)
def test_several_labels_are_summed(given, label, goals):
    config = make_config(label=given)
    assert (config.label, config.goals) == (label, goals)
    assert Config.from_json(config.to_json()) == config
    assert config.with_options(seed=1).goals == goals
    assert config.with_options(label="click").goals == ()
    assert make_config(goals=list(goals)).label == (label if goals else None)


@pytest.mark.parametrize(
    "given", [{"click": 0}, {"click": "1"}, {"click": -1}, {"click": float("nan")}, ["click", "1 +"], {1: 2}, [1]]
)
def test_wrong_goals_are_rejected(given):
    with pytest.raises(LabelError):
        make_config(label=given)


@pytest.mark.parametrize("goals", ["click,purchase", 5, [1], ["click", "1 +"]])
def test_wrong_values_of_the_option_goals_are_rejected(goals):
    with pytest.raises(UltrError):
        make_config(goals=goals)


def test_curves_of_the_bias_of_another_run_are_used(run, world, tmp_path):
    options = {"label": GOALS, "ranker": "lightgbm", "columns": COLUMNS, "rounds": 10, "tradeoff": 0}
    update = ultr.train(world.log.slice(0, 8000), tmp_path / "next", bias=str(run.folder), **options)
    assert update.bias["actions"] == run.bias["actions"]


def test_options_that_are_not_given_are_not_set():
    assert not differences(make_config(), make_config(label="a"), unset=True)
