"""Runs of trees: what is written, killed, resumed, scored and compared, from the command line and by UnbiasedRanker."""

from __future__ import annotations

import json
from dataclasses import replace

import lightgbm
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import xgboost

from conftest import make_shown_log
from ultr import UnbiasedRanker
from ultr.boosting import TreeRun
from ultr.checkpoint import read_metrics
from ultr.compare import Entry, compare
from ultr.errors import DataError, OptionError, UltrError
from ultr.log import read_log, write_log
from ultr.models import load_model
from ultr.preparing import RunConfig, prepare
from ultr.rankers.boosters import BOOSTERS
from ultr.runs import run_training
from ultr.simulate import User, simulate_log
from ultr.training import TREE_TRAINING

FAST = {"steps": 12, "bias_steps": 10, "batch": 16, "evaluate_every": 4, "patience": 0, "device": "cpu"}
FILES = {"lightgbm": "lightgbm.txt", "xgboost": "xgboost.json"}


@pytest.fixture
def log_path(tmp_path):
    log, _ = simulate_log(make_shown_log(requests=200), User())
    write_log(replace(log, relevance=None), tmp_path / "log.parquet")
    return tmp_path / "log.parquet"


def config(path, ranker="lightgbm", **changes) -> RunConfig:
    """Examination is known unless a bias is given, and selection is by feedback as it is: to be quick."""
    training = replace(TREE_TRAINING, **{**FAST, **changes.pop("training", {})})
    known = {} if "bias" in changes else {"propensities": {str(k): 1 / k for k in range(1, 20)}}
    usual = {"select": "feedback-ndcg@10", **known}
    return RunConfig(data=str(path), ranker=ranker, training=training, **{**usual, **changes})


def files_of(run) -> set[str]:
    return {p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file()}


@pytest.mark.parametrize("ranker", BOOSTERS)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("pairwise-em", {}),
        ("pairwise-em", {"loss": "opt"}),
        ("pairwise-em", {"loss": "bayes-ipw"}),
        ("pairwise-em", {"em": "trees", "loss": "bayes-ipw"}),
        ("lambdarank", {"labels": "buckets", "correction": "own"}),
        ("pointwise", {}),
    ],
)
def test_a_run_holds_what_it_should_and_the_library_reads_its_model(ranker, method, options, log_path, tmp_path):
    run = run_training(config(log_path, ranker, method=method, method_options=options), tmp_path / "run")
    model = {"model/model.json", "model/rows.safetensors", f"model/{FILES[ranker]}"}
    common = {".lock", "config.json", "metrics.jsonl", "outcome/outcome.json", "outcome/requests.parquet"}
    found = files_of(run) - common - model
    assert not common - files_of(run)
    assert ("bias.json" in found) == (method == "pairwise-em")
    assert all(name.startswith("bias") for name in found)
    assert [line["step"] for line in read_metrics(run)] == [4, 8, 12]
    losses = [line["loss"] for line in read_metrics(run)]
    assert losses == sorted(losses, reverse=True) if method == "pairwise-em" else losses == [None] * 3
    log = read_log(log_path)
    scores = load_model(run).score(log)
    path = run / "model" / FILES[ranker]
    if ranker == "lightgbm":
        own = lightgbm.Booster(model_file=str(path)).predict(log.features, raw_score=True)
    else:
        booster = xgboost.Booster(model_file=str(path))
        own = booster.predict(xgboost.DMatrix(log.features, feature_names=booster.feature_names), output_margin=True)
    np.testing.assert_allclose(scores, own, rtol=1e-6, atol=1e-6)
    shuffled = replace(log, features=log.features[:, ::-1], feature_names=log.feature_names[::-1])
    np.testing.assert_array_equal(load_model(run).score(shuffled), scores)


def test_the_best_rounds_are_kept_and_patience_stops(log_path, tmp_path, monkeypatch):
    figures = iter([0.1, 0.5, 0.3, 0.2, 0.9])
    monkeypatch.setattr("ultr.boosting.evaluator", lambda *_: lambda _: {"feedback-ndcg@10": next(figures)})
    chosen = config(log_path, method="pointwise", select="feedback-ndcg@10", training={"steps": 50, "patience": 2})
    run = run_training(chosen, tmp_path / "run")
    assert [line["step"] for line in read_metrics(run)] == [4, 8, 12, 16]  # the second is best; two more, and no more
    assert json.loads((run / "model" / "model.json").read_text())["rounds"] == 8
    assert lightgbm.Booster(model_file=str(run / "model" / "lightgbm.txt")).current_iteration() == 8


@pytest.mark.parametrize("ranker", BOOSTERS)
@pytest.mark.parametrize("method", ["pairwise-em", "lambdarank"])
def test_a_run_that_was_stopped_goes_on_to_the_same_trees(ranker, method, log_path, tmp_path):
    options = {} if method == "pairwise-em" else {"labels": "click"}
    chosen = config(log_path, ranker, method=method, method_options=options)
    whole = load_model(run_training(chosen, tmp_path / "whole")).score(read_log(log_path))

    def stop(progress):
        if progress.step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(chosen, tmp_path / "half", checkpoint_seconds=0, on_progress=stop)
    assert not (tmp_path / "half" / "model").exists()
    seen = []
    again = run_training(chosen, tmp_path / "half", resume=True, on_progress=lambda p: seen.append(p.step))
    assert seen == ([8, 12] if method == "pairwise-em" else [4, 8, 12])  # a library's own objective starts again
    np.testing.assert_allclose(load_model(again).score(read_log(log_path)), whole, rtol=1e-5, atol=1e-6)
    assert [line["step"] for line in read_metrics(again)] == [4, 8, 12]
    assert not (again / "checkpoints").exists()


@pytest.mark.parametrize("ranker", BOOSTERS)
def test_the_same_seed_gives_the_same_file(ranker, log_path, tmp_path):
    runs = [run_training(config(log_path, ranker), tmp_path / name) for name in ("one", "two")]
    first, second = ((run / "model" / FILES[ranker]).read_bytes() for run in runs)
    assert first == second


@pytest.mark.long
def test_what_is_known_of_bias_can_come_from_another_run(log_path, tmp_path):
    first = run_training(config(log_path, propensities=None, select="auto"), tmp_path / "first")
    assert (first / "judge" / "judge.json").is_file()
    assert set(read_metrics(first)[0]) == {"step", "loss", "off-policy-reward@10"}
    fitted = []
    taken = run_training(config(log_path, "xgboost", bias=str(first)), tmp_path / "taken", on_first=fitted.append)
    assert not fitted  # the whole bias model was taken
    theta = json.loads((first / "bias.json").read_text())["theta"]
    assert json.loads((taken / "bias.json").read_text())["theta"] == theta
    by_file = run_training(config(log_path, bias=str(first / "bias.json")), tmp_path / "file", on_first=fitted.append)
    assert fitted  # only examination was known
    assert json.loads((by_file / "bias.json").read_text())["theta"] == pytest.approx(theta)
    assert json.loads((by_file / "bias.json").read_text())["theta_from"] == "known propensities"
    with pytest.raises(DataError, match="learned for another label"):
        run_training(config(log_path, bias=str(first), label="click"), tmp_path / "no")
    with pytest.raises(DataError, match="of another kind"):
        run_training(config(log_path, bias=str(first), method_options={"loss": "bayes-ipw"}), tmp_path / "no")
    with pytest.raises(DataError, match="no examination by position"):
        run_training(config(log_path, bias=str(first / "config.json")), tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_trees_of_a_bias_model_are_taken_over_too(log_path, tmp_path):
    options = {"em": "trees", "loss": "bayes-ipw"}
    first = run_training(config(log_path, method_options=options), tmp_path / "first")
    second = run_training(config(log_path, method_options=options, bias=str(first)), tmp_path / "second")
    assert (first / "model" / "lightgbm.txt").read_bytes() == (second / "model" / "lightgbm.txt").read_bytes()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"method": "dla"}, "no method 'dla' for lightgbm"),
        ({"method_options": {"variant": "released"}}, "no option 'variant'"),
        ({"ranker_options": {"objective": "binary"}}, "not set by hand"),
        ({"ranker_options": {"num_leafs": 3}}, "no parameter 'num_leafs'; did you mean"),
        ({"method": "lambdarank"}, "whole numbers up to 30.*labels=buckets"),
        ({"ranker_options": {"num_leaves": 1}}, r"LightGBM: Check failed.*num_leaves"),
        ({"ranker": "xgboost", "ranker_options": {"max_depth": "abc"}}, r"XGBoost: Invalid Parameter.*max_depth"),
        ({"bias": "x", "propensities": {"1": 0.5}}, "not both"),
        ({"stream": "yes"}, "only prepared lists are streamed"),
        ({"sessions": -1}, "'sessions' should be 0 or more"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing_behind(changes, match, log_path, tmp_path):
    with pytest.raises(UltrError, match=match):
        run_training(config(log_path, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_log_without_any_pair_is_refused(log_path, tmp_path):
    log = read_log(log_path)
    actions = {name: np.ones_like(values) for name, values in log.actions.items()}
    write_log(replace(log, actions=actions), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="no two items of a request differ"):
        run_training(config(tmp_path / "none.parquet", method_options={"loss": "ipw"}), tmp_path / "run")


@pytest.mark.parametrize("em", ["network", "trees"])
def test_features_that_do_not_vary_are_refused(em, log_path, tmp_path):
    log = read_log(log_path)
    write_log(replace(log, features=np.ones_like(log.features)), tmp_path / "flat.parquet")
    with pytest.raises(DataError, match=r"no feature to split rows by.*check that features vary"):
        run_training(config(tmp_path / "flat.parquet", method_options={"em": em}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_warm_starts_processes_and_streams_are_for_networks(log_path, tmp_path, monkeypatch):
    with pytest.raises(OptionError, match="warm start is for networks"):
        run_training(config(log_path), tmp_path / "run", warm_start=tmp_path)
    prepared = prepare(config(log_path))
    with pytest.raises(OptionError, match="whole log in memory"):
        TreeRun(config(log_path), replace(prepared, stream=object()))
    monkeypatch.setattr("ultr.boosting.size", lambda: 2)
    with pytest.raises(OptionError, match="one process"):
        TreeRun(config(log_path), prepared)


@pytest.mark.parametrize("ranker", BOOSTERS)
def test_a_changed_model_file_is_refused(ranker, log_path, tmp_path):
    run = run_training(config(log_path, ranker, method="pointwise"), tmp_path / "run")
    path = run / "model" / FILES[ranker]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not those that were written"):
        load_model(run)


# --- Simulated users ----------------------------------------------------------------------------------------------


def test_sessions_are_drawn_once_and_every_request_about_as_often():
    chosen = RunConfig(data="synthetic", users="pbm", ranker="lightgbm", sessions=4000)
    prepared = prepare(chosen)
    assert len(prepared.train) == 4000
    assert prepared.feeding_user is None
    times = np.unique(np.asarray(prepared.train.request_ids), return_counts=True)[1]
    assert set(times) <= {1, 2}
    assert prepare(replace(chosen, sessions=0)).train.rows > prepared.train.rows  # as many as usual
    assert replace(chosen, ranker="mlp", sessions=0).sessions_drawn == 0


def test_entries_name_their_rankers():
    entry = Entry.parse("lambdarank:labels=click:ranker=xgboost:correction=own", "lightgbm")
    assert (entry.ranker, entry.options) == ("xgboost", {"labels": "click", "correction": "own"})
    base = RunConfig(data="synthetic", users="pbm", ranker_options={"hidden": [8]})
    mixed = entry.config(base, 0.1, 3)
    assert (mixed.ranker, mixed.ranker_options, mixed.training.steps) == ("xgboost", {}, TREE_TRAINING.steps)
    assert Entry.parse("dla").config(base, 0.1, 3).ranker_options == {"hidden": [8]}
    with pytest.raises(OptionError, match="no ranker 'lightgmb'; did you mean 'lightgbm'"):
        Entry.parse("pairwise-em:ranker=lightgmb")
    with pytest.raises(OptionError, match="no method 'dla' for xgboost"):
        Entry.parse("dla:ranker=xgboost")


def test_networks_and_trees_stand_in_one_comparison(log_path, tmp_path):
    base = config(log_path)
    entries = ["pairwise-em", "pairwise-em:loss=opt", "pointwise:ranker=xgboost", "pointwise:ranker=linear"]
    result = compare(base, entries, tmp_path / "out", seeds=1, rates=[0.1], jobs=1)
    assert [row.entry for row in result.rows] == entries
    assert len(list((tmp_path / "out" / "bias").glob("*/weights.safetensors"))) == 1  # shared by the first two


# --- Command line and scikit-learn --------------------------------------------------------------------------------


def frame(requests: int = 150) -> pd.DataFrame:
    """Users who click what one category, and what one missing value, tells them to."""
    rng = np.random.default_rng(0)
    rows = requests * 5
    data = pd.DataFrame(
        {
            "request": np.repeat(np.arange(requests), 5),
            "position": np.tile(np.arange(1, 6), requests),
            "feature_noise": rng.normal(size=rows),
            "feature_gap": np.where(rng.random(rows) < 0.3, np.nan, rng.normal(size=rows)),
            "colour": rng.choice(["red", "green", "blue", None], rows),
        }
    )
    liked = np.isnan(data["feature_gap"]) | (data["colour"] == "green")
    return data.assign(click=(liked & (rng.random(rows) < 0.8)).astype(int))


@pytest.mark.parametrize("ranker", BOOSTERS)
def test_missing_values_and_categories_are_learned_from(ranker, ultr, tmp_path):
    path, run = tmp_path / "log.parquet", tmp_path / "run"
    frame().to_parquet(path, index=False)
    done = ultr(
        *("train", path, "--label", "click", "--categorical", "colour", "--ranker", ranker, "--out", run),
        *("--steps", 30, "--bias-steps", 10, "--ranker-option", "max_depth=3", "--device", "cpu"),
        *("--select", "feedback-ndcg@5"),
    )
    assert done.returncode == 0, done.stderr
    done = ultr("score", run, path, "--out", tmp_path / "scores.parquet")
    assert done.returncode == 0, done.stderr
    data = frame()
    data["score"] = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    liked = np.isnan(data["feature_gap"]) | (data["colour"] == "green")
    assert data["score"][liked].quantile(0.1) > data["score"][~liked].quantile(0.9)
    done = ultr("evaluate", run, path, "--metrics", "feedback-ndcg@5", "--json")
    assert json.loads(done.stdout)["feedback-ndcg@5"] > 0.8
    done = ultr("train", path, "--label", "click", "--out", tmp_path / "network")
    assert done.returncode == 1  # a network cannot tell what is missing
    assert "--ranker lightgbm" in done.stderr


def test_parameters_are_for_trees(ultr, log_path, tmp_path):
    done = ultr("train", log_path, "--ranker-option", "num_leaves=3", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "--ranker-option is for trees" in done.stderr
    done = ultr("train", log_path, "--ranker", "lightgbm", "--ranker-option", "num_leaves", "--out", tmp_path / "run")
    assert "a parameter reads key=value" in done.stderr


@pytest.mark.parametrize("ranker", BOOSTERS)
def test_the_estimator_learns_trees(ranker):
    data = frame()
    estimator = UnbiasedRanker(
        label="click",
        ranker=ranker,
        ranker_options={"max_depth": 3},
        steps=20,
        bias_steps=10,
        categorical="colour",
        select="feedback-ndcg@5",
    )
    scores = estimator.fit(data).predict(data)
    liked = np.isnan(data["feature_gap"]) | (data["colour"] == "green")
    assert scores[liked].mean() > scores[~liked].mean()
    assert estimator.history_[-1]["step"] <= 20
    assert set(estimator.theta_) == {1, 2, 3, 4, 5}
    assert estimator.score(data) > 0
    unseen = data.assign(colour="violet")  # as if it were missing
    assert np.isfinite(estimator.predict(unseen)).all()
