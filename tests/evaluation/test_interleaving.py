"""Interleaved lists: counts, tests, decisions, and what `ultr bias` makes of such a log."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from ultr import audit, interleaving, read_log
from ultr.errors import DataError, OptionError
from ultr.evaluation.comparing import DEPLOY, REJECT, UNCLEAR
from ultr.evaluation.interleaving import evaluate_interleaving

THETA = 1 / np.arange(1, 9) ** 0.7
RELEVANCE = np.linspace(0.8, 0.05, 30)


def drafted(requests: int, *, noise: dict[str, float], fair: bool = True, seed: int = 0) -> pd.DataFrame:
    """Return a log of team-draft interleaving of two rankers, which see relevance with noise of their own."""
    rng = np.random.default_rng(seed)
    rows = []
    for request in range(requests):
        orders = {team: np.argsort(-(RELEVANCE + sd * rng.normal(size=30))).tolist() for team, sd in noise.items()}
        shown: list[tuple[int, str]] = []
        while len(shown) < len(THETA):
            for team in rng.permutation(list(noise)) if fair else noise:
                taken = {item for item, _ in shown}
                shown.append((next(item for item in orders[team] if item not in taken), str(team)))
        for k, (item, team) in enumerate(shown, start=1):
            click = int(rng.random() < THETA[k - 1] * RELEVANCE[item])
            rows.append({"request": request, "position": k, "item": item, "click": click, "team": team})
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def frame():
    return drafted(1500, noise={"new": 0.1, "old": 0.5})


def test_wins_and_the_sign_test_are_those_of_scipy(frame):
    found = interleaving(frame, "team").tests[0]
    credit = frame.pivot_table(index="request", columns="team", values="click", aggfunc="sum")
    wins, losses = int((credit["new"] > credit["old"]).sum()), int((credit["new"] < credit["old"]).sum())
    assert (found.first, found.second, found.wins, found.losses) == ("new", "old", wins, losses)
    assert found.ties == 1500 - wins - losses
    test = binomtest(wins, wins + losses)
    interval = test.proportion_ci(0.95, method="exact")
    assert found.p == pytest.approx(test.pvalue)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert found.difference.difference == pytest.approx((credit["new"] - credit["old"]).mean())
    assert found.decision.action == DEPLOY
    assert found.decision.worse < 0.01


def test_the_order_of_the_teams_only_changes_signs(frame):
    found = interleaving(frame, "team").tests[0]
    other = interleaving(frame.assign(team=frame["team"].map({"new": "z", "old": "a"})), "team").tests[0]
    assert (other.first, other.wins, other.losses) == ("a", found.losses, found.wins)
    assert other.difference.difference == pytest.approx(-found.difference.difference)
    assert other.decision.action == REJECT


def test_equal_rankers_are_told_apart_in_one_of_twenty_logs():
    found = [interleaving(drafted(150, noise={"a": 0.2, "b": 0.2}, seed=seed), "team").tests[0] for seed in range(60)]
    wrong = sum(not test.difference.low <= 0 <= test.difference.high for test in found)
    assert wrong <= 9  # of 60, 3 are expected; more than 9 have a probability below 0.1%
    assert any(test.decision.action == UNCLEAR and test.decision.requests for test in found)


def test_three_teams_are_compared_in_pairs_and_rows_without_a_team_count_for_none(frame):
    table = frame.assign(team=frame["team"].where(frame["position"] != 8, None))
    table.loc[(table["request"] % 2 == 0) & (table["team"] == "old"), "team"] = "third"
    tests = interleaving(table, "team").tests
    assert [(test.first, test.second) for test in tests] == [("new", "old"), ("new", "third")]
    assert [test.requests for test in tests] == [750, 750]
    assert all(test.holm >= test.difference.p for test in tests)


def test_a_team_that_always_picks_first_is_a_warning():
    unfair = interleaving(drafted(100, noise={"new": 0.3, "old": 0.3}, fair=False), "team")
    assert unfair.warnings[0].startswith("new picked first in 100.0% of the requests")
    assert not interleaving(drafted(100, noise={"new": 0.3, "old": 0.3}), "team").warnings


def test_requests_of_one_query_are_not_independent(frame):
    by_request = interleaving(frame, "team").tests[0].difference
    doubled = pd.concat([frame.assign(query=frame["request"]), frame.assign(query=frame["request"], request=-1)])
    doubled.loc[doubled["request"] == -1, "request"] = frame["request"].to_numpy() + 10_000
    by_query = interleaving(doubled, "team").tests[0].difference
    assert by_query.high - by_query.low == pytest.approx(by_request.high - by_request.low, rel=0.01)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), min_size=2, max_size=30))
def test_credit_is_complete_whatever_the_rows_are(rows):
    table = pd.DataFrame(rows, columns=["team", "click"])
    table["request"], table["position"] = np.arange(len(rows)) // 2, np.arange(len(rows)) % 2
    if not (table.groupby("request")["team"].nunique() > 1).any():
        with pytest.raises(DataError, match="teams"):
            interleaving(table, "team")
        return
    found = interleaving(table, "team")
    test = found.tests[0]
    assert 0 <= test.low <= test.share <= test.high <= 1
    assert test.wins + test.losses + test.ties == test.requests
    json.dumps(found.to_json(), allow_nan=False)


def test_wrong_teams_are_errors(frame):
    with pytest.raises(DataError, match="2 to 20 teams, got 30"):
        interleaving(frame, "item")
    log = read_log(frame)
    with pytest.raises(OptionError, match="from a table or files"):
        interleaving(log, "team")
    with pytest.raises(DataError, match="one team for each row"):
        evaluate_interleaving(log, ["a", "b"], label="click")


def test_interleaved_lists_move_items_so_that_examination_is_identified_under_an_assumption():
    frame = drafted(4000, noise={"new": 0.1, "old": 0.5}, seed=1)
    report = audit(frame, features=[], bootstrap=50)
    assert report.verdict.status == "identified under an assumption"
    inside = (report.anchor.low <= THETA) & (report.anchor.high >= THETA)
    assert inside.mean() >= 0.75


def test_the_command_prints_a_decision_and_a_table(ultr, frame, tmp_path):
    frame.to_parquet(tmp_path / "log.parquet", index=False)
    done = ultr("evaluate", tmp_path / "log.parquet", "--team", "team")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("new: deploy: +")
    assert "share of wins" in done.stdout
    found = json.loads(ultr("evaluate", "--data", tmp_path / "log.parquet", "--team", "team", "--json").stdout)
    assert found["tests"][0]["decision"]["action"] == DEPLOY
    done = ultr("evaluate", "run", tmp_path / "log.parquet", "--team", "team")
    assert (done.returncode, "--team cannot be combined with runs" in done.stderr) == (2, True)
