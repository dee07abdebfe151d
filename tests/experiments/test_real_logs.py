"""The page about real logs: what its benchmark computes, on logs whose users are known."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from bias.worlds import THETA, world
from ultr.bias.counts import clicked_rows, impressions
from ultr.experiments.lab import as_json, pages, provenance
from ultr.log import Log


@pytest.fixture(scope="module")
def bench():
    path = Path(__file__).parents[2] / "benchmarks" / "real_logs.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_real_logs", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.FEW, module.DRAWS = 0, 400
    module.MODELS = {name: module.MODELS[name] for name in ("pbm", "cascade")}
    module.WITH_FEATURES = ("pbm",)
    return module


@pytest.fixture(scope="module")
def log():
    return world("rankers", requests=800)


def small(positions, items, queries, clicks=None, relevance=None) -> Log:
    """Return a log of lists with equal lengths, given [requests, items]."""
    positions, items = np.array(positions), np.array(items)
    return Log(
        features=np.zeros((positions.size, 0), np.float32),
        offsets=np.arange(len(positions) + 1) * positions.shape[1],
        request_ids=pa.array(np.arange(len(positions))),
        feature_names=(),
        positions=positions.ravel(),
        actions={"click": np.zeros(positions.size) if clicks is None else np.array(clicks, float).ravel()},
        item_ids=pa.array(items.ravel()),
        context={"query": pa.array(queries)},
        relevance=None if relevance is None else np.array(relevance, float).ravel(),
    )


def test_features_come_from_the_first_requests_alone(bench):
    log = small([[1, 2]] * 5, [["a", "b"], ["b", "a"], ["a", "b"], ["a", "c"], ["a", "b"]], ["q", "q", "q", "r", "r"])
    before = np.array([True, True, False, True, False])
    made = bench.production_features(log, impressions(log, clicked_rows(log, "click")), before)
    assert made.feature_names == bench.FEATURES
    a, b = [1.5, 1, 2, 2], [1.5, 1, 2, 1]  # mean and best position, times shown, queries
    np.testing.assert_array_equal(made.features[4:6], [a, b])
    np.testing.assert_array_equal(made.features[6:8], [[1, 1, 1, 2], [2, 2, 1, 1]])
    np.testing.assert_array_equal(made.features[9], [np.nan, np.nan, 0, 1])  # b was not shown for r


def test_a_session_is_in_one_half_and_in_one_part_of_a_split(bench, log, monkeypatch):
    session = np.random.default_rng(0).integers(0, 200, len(log))
    log = replace(log, context={**log.context, "session": pa.array(session)})
    half = bench.halves(bench.visits(log))
    assert 0.4 < half.mean() < 0.6
    assert not set(session[half]) & set(session[~half])
    made, split = [], bench.split_requests
    monkeypatch.setattr(bench, "split_requests", lambda *given, **seed: made.append(split(*given, **seed)) or made[-1])
    bench.click_models(log, 1)
    sessions = [set(session[part.numpy()]) for part in made[0]]
    assert sum(map(len, sessions)) == len(set.union(*sessions))
    assert [len(part) / len(log) for part in made[0]] == pytest.approx([0.7, 0.1, 0.2], abs=0.05)


def test_past_clicks_are_those_of_the_first_requests_over_the_expected_ones(bench):
    log = small([[1, 2]] * 3, [["a", "b"], ["b", "a"], ["a", "b"]], ["q"] * 3, clicks=[[1, 0], [0, 1], [1, 1]])
    seen, before = impressions(log, clicked_rows(log, "click")), np.array([True, True, False])
    made = bench.with_past_clicks(seen, before, bench.production_features(log, seen, before))
    # click rates are 1/2 and 1/2, so one click is expected of each item
    np.testing.assert_allclose(made.features[4:6, -1], [(2 + 1) / (1 + 1), (0 + 1) / (1 + 1)])


def test_no_feature_and_no_model_reads_grades(bench, log):
    grades = np.random.default_rng(0).integers(0, 5, log.rows).astype(float)
    graded, before = replace(log, relevance=grades), bench.halves(bench.visits(log))
    seen = impressions(log, clicked_rows(log, "click"))
    with_grades, without = (bench.production_features(each, seen, before).features for each in (graded, log))
    np.testing.assert_array_equal(with_grades, without)
    estimates = [bench.examination(each, bootstrap=4)[0] for each in (graded, log)]
    for name, each in estimates[1].items():
        np.testing.assert_array_equal(each.theta, estimates[0][name].theta)


def test_estimates_of_examination_are_near_the_truth(bench, log):
    estimates, pool = bench.examination(log, bootstrap=8)
    assert pool.tolist() == [0, 1, 2, 3, 4]
    for name in ("harvest", "items", "pbm, plain EM", "pbm, click model"):
        np.testing.assert_allclose(estimates[name].theta, THETA / THETA[0], rtol=0.3, err_msg=name)
    assert (estimates["items"].low[1:] < estimates["items"].theta[1:]).all()


def test_equal_grades_give_examination_if_relevance_depends_on_the_grade_alone(bench):
    rng = np.random.default_rng(0)
    grade = rng.integers(0, 3, (1500, 5))
    items = 10 * np.arange(5) + grade
    clicks = rng.random(grade.shape) < THETA * np.array([0.1, 0.4, 0.8])[grade]
    log = small([[1, 2, 3, 4, 5]] * 1500, items, rng.integers(0, 9, 1500), clicks, grade)
    log = replace(log, item_ids=pa.array(rng.integers(0, 9, log.rows)))  # so that items say nothing
    estimates, _ = bench.examination(log, bootstrap=3)
    for name in bench.GRADED:
        np.testing.assert_allclose(estimates[name].theta, THETA / THETA[0], rtol=0.25, err_msg=name)


def test_the_gain_of_a_model_has_an_interval_over_queries(bench):
    query, rows = np.repeat(np.arange(40), 5), np.full(200, 10.0)
    gain = np.where(query < 20, 1.0, 0.5) * rows
    figures = bench.gain_figures([(query, -3 * rows, gain, rows), (query, -4 * rows, gain + rows, rows)], 40)
    assert figures["log_likelihood"] == pytest.approx(-3.5)
    assert figures["gain"] == pytest.approx((0.75 + 1.75) / 2)
    assert (figures["smallest"], figures["largest"]) == (pytest.approx(0.75), pytest.approx(1.75))
    error = 0.25 / np.sqrt(40)  # of the mean over queries, whose deviation is 1/4
    assert figures["high"] - figures["low"] == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_click_models_have_the_likelihood_that_the_package_reports(bench, log):
    (figures,) = [each for each in bench.click_models(log, 1) if each["model"] == "pbm"]
    quality = bench.compare_click_models(log, ["pbm"])
    assert figures["log_likelihood"] == pytest.approx(quality.models[0].log_likelihood, rel=1e-5)
    assert figures["gain"] == figures["low"] == figures["high"] == 0


def test_clicks_move_with_the_examination_of_the_new_position(bench):
    log = small([[1, 2, 4], [1, 2, 4]], [["a", "b", "c"]] * 2, ["q", "q"], clicks=[[0, 0, 1], [1, 0, 0]])
    theta = np.array([1.0, 0.5, 0.3, 0.1])
    same = bench.clicks_if_ranked(log, np.zeros(6), theta)
    np.testing.assert_allclose(same, [1, 1])
    turned = bench.clicks_if_ranked(log, np.array([0, 1, 2, 0, 1, 2]), theta)
    np.testing.assert_allclose(turned, [1 / 0.1, 0.1 / 1])


def test_items_without_features_are_left_out(bench):
    log = small([[1, 2]] * 4, [["a", "b"], ["b", "a"], ["a", "c"], ["d", "c"]], ["q"] * 4, clicks=[[1, 0]] * 4)
    before = np.array([True, True, False, False])
    described = bench.production_features(log, impressions(log, clicked_rows(log, "click")), before)
    kept = bench.of_known_items(described, before)
    assert (kept.item_ids.to_pylist(), kept.request_ids.to_pylist()) == (["a"], [2])


def sample_of_slots(rates, requests=6000) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    slot = rng.integers(0, 3, requests)
    columns = {"item": rng.integers(0, 10, requests), "position": slot + 1, "request": np.arange(requests)}
    data = pd.DataFrame(columns | {"click": (rng.random(requests) < np.array(rates)[slot]).astype(int), "query": "all"})
    data["timestamp"] = np.arange(requests)
    return pd.concat([data.assign(policy=policy) for policy in ("random", "bts")])


@pytest.mark.parametrize(("rates", "clear"), [((0.05, 0.05, 0.05), False), ((0.09, 0.05, 0.02), True)])
def test_a_sample_with_equal_slots_has_no_clear_bias(bench, rates, clear):
    _, results = bench.open_bandit(sample_of_slots(rates), bootstrap=20)
    assert results["random"]["summary"]["how biased"].startswith("no clear bias") != clear
    assert (results["random"]["p"] < 0.01) == clear


def test_a_sample_is_read_from_its_folder(bench, tmp_path):
    for policy in ("random", "bts"):
        folder = tmp_path / policy / "men"
        folder.mkdir(parents=True)
        (folder / "men.csv").write_text("timestamp,item_id,position,click,other\n2019,4,1,0,x\n2020,5,3,1,y\n")
        (folder / "item_context.csv").write_text("item_id\n4\n")
    data = bench.read_open_bandit(tmp_path)
    assert data[["item", "position", "click", "request"]].to_numpy().tolist() == [
        [4, 1, 0, 0], [5, 3, 1, 1], [4, 1, 0, 2], [5, 3, 1, 3],
    ]  # fmt: skip
    assert data["policy"].tolist() == ["bts", "bts", "random", "random"]
    assert set(data["query"]) == {"men"}


def test_the_page_has_all_logs_and_says_which_are_absent(bench, log, monkeypatch):
    monkeypatch.setattr(bench, "trained", lambda log, fold: log.features[:, 0])
    monkeypatch.setattr(bench, "judged_scores", lambda half, bootstrap: scores_of_pairs(bench))
    graded = replace(log, relevance=np.random.default_rng(0).integers(0, 5, log.rows).astype(float))
    result = bench.made({"clara2": graded}, None, bootstrap=10, splits=1, folds=2)
    files = pages(as_json(result, provenance("a command")))
    page = files["real-logs.md"]
    assert list(files) == ["real-logs.md", "real-logs-1.svg"]
    assert "Open Bandit is missing: run `pip download" in page
    assert "yandex is missing" in page
    assert "**Caution.** It is not documented who graded" in page
    theta = result.results["clara2"]["examination"]["estimates"]["items"]["theta"]
    assert f"| items | {theta[1]:.3f} [" in page


def scores_of_pairs(bench) -> dict:
    each = {"ndcg@10": [0.9, 0.8, 0.95], "difference": [0.01, -0.02, 0.03], "tau": [0.4, 0.3, 0.5]}
    agreement = {f"{name}, cut by shares": {"sure": 0.25, "all": 0.5} for name in bench.SCORES}
    agreement["judgments"] = {"sure": 0.75, "all": 0.625}
    return {"results": dict.fromkeys(bench.SCORES, each), "agreement": agreement, "queries": 483, "sure": 0.04}


def test_the_table_of_item_scores_has_the_figures_of_the_benchmark_of_judgments(bench):
    table = bench.item_scores(scores_of_pairs(bench))
    rows = {row[0]: row[1:] for row in table.rows}
    ndcg, gain, tau = "0.9000 [0.8000, 0.9500]", "+0.0100 [-0.0200, +0.0300]", "0.400 [0.300, 0.500]"
    assert rows["`ultr judgments`"] == [ndcg, gain, tau, "75.0%", "62.5%"]
    assert rows["logged order"] == [ndcg, "", tau, "25.0%", "50.0%"]
