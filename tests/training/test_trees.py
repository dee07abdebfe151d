"""Runs of trees: files, resumed runs, scores and comparisons, from the command line and with UnbiasedRanker."""

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
from ultr.datasets.simulate import simulate_log
from ultr.datasets.users import User
from ultr.errors import DataError, OptionError, UltrError
from ultr.log import read_log, write_log
from ultr.rankers import score_rows
from ultr.rankers.blend import Blend
from ultr.rankers.boosters import BOOSTERS
from ultr.rankers.model import load_model
from ultr.training.checkpoints import read_metrics
from ultr.training.compare import compare
from ultr.training.config import TREE_TRAINING, RunConfig
from ultr.training.data import load_run_data
from ultr.training.entries import Entry, Setting
from ultr.training.run import run_training
from ultr.training.trees import TreeRun
from ultr.utils.jsonfiles import write_json

FAST = {"steps": 12, "bias_steps": 10, "batch": 16, "evaluate_every": 4, "patience": 0, "device": "cpu"}
FILES = {"lightgbm": "lightgbm.txt", "xgboost": "xgboost.json"}


@pytest.fixture
def log_path(tmp_path):
    log, _ = simulate_log(make_shown_log(requests=200), User())
    write_log(replace(log, relevance=None), tmp_path / "log.parquet")
    return tmp_path / "log.parquet"


def config(path, ranker="lightgbm", **changes) -> RunConfig:
    """A configuration of fast runs: examination is known unless a bias is named, and selection is by feedback."""
    training = replace(TREE_TRAINING, **{**FAST, **changes.pop("training", {})})
    known = {} if "bias" in changes else {"propensities": {str(k): 1 / k for k in range(1, 20)}}
    options = {"select": "feedback-ndcg@10", **known, **changes}
    return RunConfig(data=str(path), ranker=ranker, training=training, **options)


def files_of(run) -> set[str]:
    return {p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file()}


@pytest.mark.parametrize("ranker", BOOSTERS)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("pairwise-em", {"final": "pairs"}),
        ("pairwise-em", {"loss": "opt"}),
        ("pairwise-em", {"loss": "opt-posterior", "final": "pairs"}),
        ("direct", {}),
        ("pairwise-em", {"loss": "bayes-ipw"}),
        ("pairwise-em", {"em": "trees", "loss": "bayes-ipw"}),
        ("lambdarank", {"labels": "buckets", "correction": "own"}),
        ("pointwise", {}),
    ],
)
def test_a_run_has_all_files_and_the_library_reads_its_model(ranker, method, options, log_path, tmp_path):
    run = run_training(config(log_path, ranker, method=method, method_options=options), tmp_path / "run")
    model = {"model/model.json", "model/rows.safetensors", f"model/{FILES[ranker]}"}
    common = {".lock", "config.json", "metrics.jsonl", "outcome/outcome.json", "outcome/requests.parquet"}
    common |= {"outcome/used.safetensors"}
    others = files_of(run) - common - model
    assert not common - files_of(run)
    assert ("bias.json" in others) == (method in ("pairwise-em", "direct"))
    assert all(name.startswith("bias") for name in others)
    assert [line["step"] for line in read_metrics(run)] == [4, 8, 12]
    losses = [line["loss"] for line in read_metrics(run)]
    assert losses == sorted(losses, reverse=True) if method == "pairwise-em" else losses == [None] * 3
    log = read_log(log_path)
    scores = load_model(run).score(log)
    path = run / "model" / FILES[ranker]
    if ranker == "lightgbm":
        expected = lightgbm.Booster(model_file=str(path)).predict(log.features, raw_score=True)
    else:
        booster = xgboost.Booster(model_file=str(path))
        matrix = xgboost.DMatrix(log.features, feature_names=booster.feature_names)
        expected = booster.predict(matrix, output_margin=True)
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-6)
    shuffled = replace(log, features=log.features[:, ::-1], feature_names=log.feature_names[::-1])
    np.testing.assert_array_equal(load_model(run).score(shuffled), scores)


def test_the_best_rounds_are_kept_and_patience_stops(log_path, tmp_path, monkeypatch):
    values = iter([0.1, 0.5, 0.3, 0.2, 0.9])
    monkeypatch.setattr("ultr.training.trees.evaluator", lambda *_: lambda _: {"feedback-ndcg@10": next(values)})
    chosen = config(log_path, method="pointwise", select="feedback-ndcg@10", training={"steps": 50, "patience": 2})
    run = run_training(chosen, tmp_path / "run")
    assert [line["step"] for line in read_metrics(run)] == [4, 8, 12, 16]  # the second is the best
    assert json.loads((run / "model" / "model.json").read_text())["rounds"] == 8
    assert lightgbm.Booster(model_file=str(run / "model" / "lightgbm.txt")).current_iteration() == 8


@pytest.mark.parametrize("ranker", BOOSTERS)
@pytest.mark.parametrize("method", ["pairwise-em", "lambdarank"])
def test_a_stopped_run_resumes_to_the_same_trees(ranker, method, log_path, tmp_path):
    options = {} if method == "pairwise-em" else {"labels": "click"}
    chosen = config(log_path, ranker, method=method, method_options=options)
    whole = load_model(run_training(chosen, tmp_path / "whole")).score(read_log(log_path))

    def stop(progress):
        if progress.step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(chosen, tmp_path / "half", checkpoint_seconds=0, on_progress=stop)
    assert not (tmp_path / "half" / "model").exists()
    steps = []
    again = run_training(chosen, tmp_path / "half", resume=True, on_progress=lambda p: steps.append(p.step))
    assert steps == ([8, 12] if method == "pairwise-em" else [4, 8, 12])  # a library's own objective starts again
    np.testing.assert_allclose(load_model(again).score(read_log(log_path)), whole, rtol=1e-5, atol=1e-6)
    assert [line["step"] for line in read_metrics(again)] == [4, 8, 12]
    assert not (again / "checkpoints").exists()


@pytest.mark.parametrize("ranker", BOOSTERS)
def test_the_same_seed_gives_the_same_file(ranker, log_path, tmp_path):
    chosen = config(log_path, ranker, method_options={"final": "pairs"})
    runs = [run_training(chosen, tmp_path / name) for name in ("one", "two")]
    first, second = ((run / "model" / FILES[ranker]).read_bytes() for run in runs)
    assert first == second


@pytest.fixture
def blend(log_path, tmp_path):
    return run_training(config(log_path, method_options={"anchor": "none"}), tmp_path / "blend")


def test_a_blend_has_a_linear_part_by_default(log_path, tmp_path):
    model, log = load_model(run_training(config(log_path), tmp_path / "run")), read_log(log_path)
    *trees, anchor = model.ranker.parts
    assert (anchor.name, anchor.link) == ("linear", "identity")
    assert len(trees) == 3
    assert all(part.weight >= 0 for part in model.ranker.parts)
    expected = sum(score_rows(Blend([part]), log.features).astype(float) for part in model.ranker.parts)
    np.testing.assert_allclose(model.score(log), expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(model.score_features(np.full((2, len(model.feature_names)), np.nan, np.float32))).all()


def test_the_ranker_is_the_sum_of_pairs_and_likelihood_each_divided_by_its_spread(blend, log_path):
    model, log = load_model(blend), read_log(log_path)
    assert isinstance(model.ranker, Blend)
    pairs, click, value = model.ranker.parts
    assert [part.link for part in model.ranker.parts] == ["identity", "log-sigmoid", "identity"]
    assert click.weight == value.weight
    s = [score_rows(part.ranker, log.features).astype(float) + part.shift for part in model.ranker.parts]
    likelihood = -np.log1p(np.exp(-s[1])) + s[2]
    np.testing.assert_allclose(model.score(log), pairs.weight * s[0] + click.weight * likelihood, rtol=1e-4, atol=1e-5)
    validation = load_run_data(RunConfig.from_json(json.loads((blend / "config.json").read_text()))).validation
    request = np.repeat(np.arange(len(validation)), validation.lengths)
    for weight, ranker in ((pairs.weight, Blend([pairs])), (click.weight, Blend([click, value]))):
        values = score_rows(ranker, validation.features).astype(float) / weight
        means = np.bincount(request, values) / validation.lengths
        assert weight == pytest.approx(1 / np.std(values - means[request]), rel=1e-3)


def test_the_final_ranker_can_be_chosen_on_validation_requests(log_path, tmp_path):
    run = run_training(config(log_path, method_options={"final": "auto"}), tmp_path / "run")
    final = json.loads((run / "bias.json").read_text())["final"]
    assert set(final["values"]) == {"pairs", "likelihood", "blend"}
    assert final["values"][final["ranker"]] == max(final["values"].values())


@pytest.mark.parametrize(("options", "ranker"), [({"em": "network"}, "lightgbm"), ({"loss": "ipw"}, "lightgbm")])
def test_a_blend_needs_trees_of_relevance(options, ranker, log_path, tmp_path):
    with pytest.raises(OptionError, match="final=blend needs trees"):
        run_training(config(log_path, ranker, method_options={**options, "final": "blend"}), tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"link": "exp"}, "must be one of"),
        ({"weight": float("inf")}, "finite"),
        ({"ranker": "mlp"}, "cannot be read"),
    ],
)
def test_a_damaged_part_of_a_blend_is_an_error(change, what, blend):
    path = blend / "model" / "model.json"
    about = json.loads(path.read_text())
    about["parts"][1] |= change
    write_json(path, {key: value for key, value in about.items() if key != "seal"})
    with pytest.raises(DataError, match=what):
        load_model(blend)


@pytest.mark.long
def test_the_bias_can_come_from_another_run(log_path, tmp_path):
    first = run_training(config(log_path, propensities=None, select="auto"), tmp_path / "first")
    assert (first / "judge" / "judge.json").is_file()
    assert set(read_metrics(first)[0]) == {"step", "loss", "off-policy-gain@10"}
    fitted = []
    taken = run_training(
        config(log_path, "xgboost", bias=str(first)), tmp_path / "taken", on_bias_progress=fitted.append
    )
    assert not fitted  # the bias model was loaded
    theta = json.loads((first / "bias.json").read_text())["theta"]
    assert json.loads((taken / "bias.json").read_text())["theta"] == theta
    by_file = run_training(
        config(log_path, bias=str(first / "bias.json")), tmp_path / "file", on_bias_progress=fitted.append
    )
    assert fitted  # only examination was loaded
    assert json.loads((by_file / "bias.json").read_text())["theta"] == pytest.approx(theta)
    origin = json.loads((first / "bias.json").read_text())["theta_from"]
    assert json.loads((by_file / "bias.json").read_text())["theta_from"] == origin
    with pytest.raises(DataError, match="is for another label"):
        run_training(config(log_path, bias=str(first), label="click"), tmp_path / "no")
    with pytest.raises(DataError, match="does not fit this run"):
        run_training(config(log_path, bias=str(first), method_options={"loss": "bayes-ipw"}), tmp_path / "no")
    with pytest.raises(DataError, match="no examination by position"):
        run_training(config(log_path, bias=str(first / "config.json")), tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_trees_of_a_bias_model_are_loaded_too(log_path, tmp_path):
    options = {"em": "trees", "loss": "bayes-ipw"}
    first = run_training(config(log_path, method_options=options), tmp_path / "first")
    second = run_training(config(log_path, method_options=options, bias=str(first)), tmp_path / "second")
    assert (first / "model" / "lightgbm.txt").read_bytes() == (second / "model" / "lightgbm.txt").read_bytes()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"method": "dla"}, "no method 'dla' for lightgbm"),
        ({"method_options": {"variant": "released"}}, "no option 'variant'"),
        ({"ranker_options": {"objective": "binary"}}, "cannot be set as a parameter"),
        ({"ranker_options": {"num_leafs": 3}}, "no parameter 'num_leafs'; did you mean"),
        ({"method": "lambdarank"}, "whole numbers up to 30.*labels=buckets"),
        ({"ranker_options": {"num_leaves": 1}}, r"LightGBM: Check failed.*num_leaves"),
        ({"ranker": "xgboost", "ranker_options": {"max_depth": "abc"}}, r"XGBoost: Invalid Parameter.*max_depth"),
        ({"bias": "x", "propensities": {"1": 0.5}}, "given twice"),
        ({"stream": "yes"}, "only prepared lists can be streamed"),
        ({"sessions": -1}, "'sessions' must be at least 0"),
    ],
)
def test_an_error_leaves_no_run_behind(changes, match, log_path, tmp_path):
    with pytest.raises(UltrError, match=match):
        run_training(config(log_path, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_log_without_pairs_is_an_error(log_path, tmp_path):
    log = read_log(log_path)
    actions = {name: np.ones_like(values) for name, values in log.actions.items()}
    write_log(replace(log, actions=actions), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="no pairs to learn from"):
        run_training(config(tmp_path / "none.parquet", method_options={"loss": "ipw"}), tmp_path / "run")


@pytest.mark.parametrize("em", ["network", "trees"])
def test_constant_features_are_an_error(em, log_path, tmp_path):
    log = read_log(log_path)
    write_log(replace(log, features=np.ones_like(log.features)), tmp_path / "flat.parquet")
    with pytest.raises(DataError, match=r"no feature to split rows by.*check that features vary"):
        run_training(config(tmp_path / "flat.parquet", method_options={"em": em}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_processes_and_streams_are_for_networks(log_path, tmp_path, monkeypatch):
    run_data = load_run_data(config(log_path))
    with pytest.raises(OptionError, match="whole log in memory"):
        TreeRun(config(log_path), replace(run_data, stream=object()))
    monkeypatch.setattr("ultr.training.trees.size", lambda: 2)
    with pytest.raises(OptionError, match="one process"):
        TreeRun(config(log_path), run_data)


@pytest.mark.parametrize("ranker", BOOSTERS)
def test_a_changed_model_file_is_an_error(ranker, log_path, tmp_path):
    run = run_training(config(log_path, ranker, method="pointwise"), tmp_path / "run")
    path = run / "model" / FILES[ranker]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="file of trees is missing or was changed"):
        load_model(run)


# --- Simulated users ----------------------------------------------------------------------------------------------


def test_sessions_are_drawn_once_with_every_request_about_equally_often():
    chosen = RunConfig(data="synthetic", users="pbm", ranker="lightgbm", sessions=4000)
    run_data = load_run_data(chosen)
    assert len(run_data.train) == 4000
    assert run_data.feeding_user is None
    times = np.unique(np.asarray(run_data.train.request_ids), return_counts=True)[1]
    assert set(times) <= {1, 2}
    assert load_run_data(replace(chosen, sessions=0)).train.rows > run_data.train.rows  # the default number of sessions
    assert replace(chosen, ranker="mlp", sessions=0).sessions_drawn == 0


def test_entries_name_their_rankers():
    entry = Entry.parse("lambdarank:labels=click:ranker=xgboost:correction=own", "lightgbm")
    assert (entry.ranker, entry.options) == ("xgboost", {"labels": "click", "correction": "own"})
    base = RunConfig(data="synthetic", users="pbm", ranker_options={"hidden": [8]})
    mixed = entry.config(base, Setting(0.1), 3)
    assert (mixed.ranker, mixed.ranker_options, mixed.training.steps) == ("xgboost", {}, TREE_TRAINING.steps)
    assert Entry.parse("dla").config(base, Setting(0.1), 3).ranker_options == {"hidden": [8]}
    with pytest.raises(OptionError, match="no ranker 'lightgmb'; did you mean 'lightgbm'"):
        Entry.parse("pairwise-em:ranker=lightgmb")
    with pytest.raises(OptionError, match="no method 'dla' for xgboost"):
        Entry.parse("dla:ranker=xgboost")


def test_a_comparison_can_have_networks_and_trees(log_path, tmp_path):
    base = config(log_path)
    entries = ["pairwise-em", "pairwise-em:loss=opt-posterior", "pointwise:ranker=xgboost", "pointwise:ranker=linear"]
    base = replace(base, training=replace(base.training, bias_steps=20))
    result = compare(base, entries, tmp_path / "out", seeds=1, rates=[0.1], jobs=1)
    assert [row.entry for row in result.rows] == entries
    assert len(list((tmp_path / "out" / "bias").glob("*/weights.safetensors"))) == 1  # shared by the first two


# --- Command line and scikit-learn --------------------------------------------------------------------------------


def frame(requests: int = 150) -> pd.DataFrame:
    """Feedback of users who click items with one category, and items with a missing value."""
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
    assert json.loads(done.stdout)["rankers"][str(run)]["feedback-ndcg@5"]["mean"] > 0.8
    done = ultr("train", path, "--label", "click", "--missing", "error", "--out", tmp_path / "network")
    assert done.returncode == 1
    assert "missing" in done.stderr


def test_parameters_are_for_trees(ultr, log_path, tmp_path):
    done = ultr("train", log_path, "--ranker-option", "num_leaves=3", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "--ranker-option is for trees" in done.stderr
    done = ultr("train", log_path, "--ranker", "lightgbm", "--ranker-option", "num_leaves", "--out", tmp_path / "run")
    assert "a parameter must have the form key=value" in done.stderr


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
    unseen = data.assign(colour="violet")  # an unknown category counts as missing
    assert np.isfinite(estimator.predict(unseen)).all()
