"""Runs of trees: files, resumed runs, scores, the final ranker, and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost

from runs import FEEDBACK, KNOWN, PLAIN, Killed, files_of, killed_at, quick, scores, steps_to, write_feedback
from ultr.errors import DataError, OptionError, UltrError
from ultr.log import read_log, write_log
from ultr.methods.trees import leaves_for
from ultr.rankers import score_rows
from ultr.rankers.boosters import BOOSTERS, TreeRanker
from ultr.rankers.model import load_model
from ultr.training.config import Config
from ultr.training.data import decide, load_run_data
from ultr.training.fitting import FitInputs
from ultr.training.folder import read_metrics
from ultr.training.run import run_training
from ultr.training.trees import TreeFit
from ultr.utils.jsonfiles import read_json, write_json

FILES = {"lightgbm": "lightgbm.txt", "xgboost": "xgboost.json"}


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return write_feedback(tmp_path_factory.mktemp("log"), 200)


def config(log: object, ranker: str = "lightgbm", **options) -> Config:
    """Return the configuration of a fast run: examination is known unless a bias is named."""
    known = {} if "bias" in options else {"propensities": KNOWN}
    return quick(log, **{"ranker": ranker, "rounds": 12, "select": FEEDBACK, **known, **options})


@pytest.mark.parametrize("ranker", BOOSTERS)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("pairwise-em", {"final": "pairs"}),
        ("pairwise-em", {"loss": "opt"}),
        ("pairwise-em", {"loss": "opt-posterior", "final": "pairs"}),
        ("direct", {"likelihood": "tweedie", "anchor": "none"}),
        ("pairwise-em", {"loss": "bayes-ipw"}),
        ("lambdarank", {"labels": "buckets", "correction": "own"}),
        ("pointwise", {}),
    ],
)
def test_a_run_has_all_files_and_the_library_reads_its_model(ranker, method, options, log, tmp_path):
    run = run_training(config(log, ranker, method=method, method_options=options), tmp_path / "run")
    names = files_of(run)
    assert {"model/model.json", "model/rows.safetensors", f"model/{FILES[ranker]}"} <= names
    assert ("bias.json" in names) == (method in ("pairwise-em", "direct"))
    assert [line["step"] for line in read_metrics(run)] == [4, 8, 12]
    losses = [line["loss"] for line in read_metrics(run)]
    assert losses == sorted(losses, reverse=True) if method == "pairwise-em" else losses == [None] * 3
    rows = read_log(log)
    found = load_model(run).score(rows)
    path = run / "model" / FILES[ranker]
    if ranker == "lightgbm":
        expected = lightgbm.Booster(model_file=str(path)).predict(rows.features, raw_score=True)
    else:
        booster = xgboost.Booster(model_file=str(path))
        matrix = xgboost.DMatrix(rows.features, feature_names=booster.feature_names)
        expected = booster.predict(matrix, output_margin=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    shuffled = replace(rows, features=rows.features[:, ::-1], feature_names=rows.feature_names[::-1])
    np.testing.assert_array_equal(load_model(run).score(shuffled), found)


def test_the_best_rounds_are_kept_and_patience_stops(log, tmp_path, monkeypatch):
    values = iter([0.1, 0.5, 0.3, 0.2, 0.9])
    monkeypatch.setattr("ultr.training.trees.evaluator", lambda *_: lambda _: {FEEDBACK: next(values)})
    run = run_training(config(log, **PLAIN, rounds=50, patience=2), tmp_path / "run")
    assert [line["step"] for line in read_metrics(run)] == [4, 8, 12, 16]  # the second is the best
    assert read_json(run / "model" / "model.json")["rounds"] == 8
    assert lightgbm.Booster(model_file=str(run / "model" / "lightgbm.txt")).current_iteration() == 8


@pytest.mark.parametrize("ranker", BOOSTERS)
@pytest.mark.parametrize(
    ("method", "options"), [("pairwise-em", {"final": "pairs"}), ("lambdarank", {"labels": "click"})]
)
def test_a_killed_run_resumes_to_the_same_trees(ranker, method, options, log, tmp_path):
    chosen = config(log, ranker, method=method, method_options=options)
    whole = scores(run_training(chosen, tmp_path / "whole"), log)
    with pytest.raises(Killed):
        run_training(chosen, tmp_path / "half", listeners=killed_at(8))
    steps: list[tuple[str, int]] = []
    again = run_training(chosen, tmp_path / "half", resume=True, listeners=steps_to(steps))
    resumed = [8, 12] if method == "pairwise-em" else [4, 8, 12]  # a library's own objective starts again
    assert steps == [(ranker, step) for step in resumed]
    np.testing.assert_allclose(scores(again, log), whole, rtol=1e-5, atol=1e-6)
    assert [line["step"] for line in read_metrics(again)] == [4, 8, 12]


@pytest.mark.parametrize("ranker", BOOSTERS)
def test_the_same_seed_gives_the_same_file(ranker, log, tmp_path):
    chosen = config(log, ranker, method_options={"final": "pairs"})
    runs = [run_training(chosen, tmp_path / name) for name in ("one", "two")]
    first, second = ((run / "model" / FILES[ranker]).read_bytes() for run in runs)
    assert first == second


# --- The final ranker -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blend(log, tmp_path_factory) -> Path:
    return run_training(config(log, select="auto"), tmp_path_factory.mktemp("blend") / "run")


@pytest.mark.parametrize("ranker", BOOSTERS)
@pytest.mark.parametrize("method", ["pairwise-em", "direct"])
def test_trees_of_values_are_the_sum_of_trees_of_clicks_and_of_values(method, ranker, log, tmp_path):
    run = run_training(config(log, ranker, method=method, select="auto", patience=0), tmp_path / "run")
    model, rows = load_model(run), read_log(log)
    names = [part.name for part in model.ranker.parts]
    assert names[-1] == "linear"
    assert names[:-1] in ([ranker], [ranker, ranker])  # trees of values may not be better than none
    assert ranker == "xgboost" or len(names) == 3
    assert all(part.weight == 1 for part in model.ranker.parts)
    expected = sum(score_rows(part.ranker, rows.features).astype(float) for part in model.ranker.parts)
    np.testing.assert_allclose(model.score(rows), expected, rtol=1e-4, atol=1e-5)
    assert [line["step"] for line in read_metrics(run)] == [0, 4, 8, 12, 16, 20, 24]
    assert np.isfinite(model.score_features(np.full((2, len(model.feature_names)), np.nan, np.float32))).all()


def test_trees_of_a_binary_label_without_an_anchor_are_one_file(log, tmp_path):
    run = run_training(config(log, label="click", method_options={"anchor": "none"}), tmp_path / "run")
    assert isinstance(load_model(run).ranker, TreeRanker)
    assert (run / "model" / "lightgbm.txt").is_file()


@pytest.mark.parametrize("options", [{"scale": 0.9}, {"trust": "none"}, {"em": "staged"}])
def test_options_that_change_no_pairs_keep_the_trees_of_the_likelihood(options, log, tmp_path):
    runs = [
        run_training(config(log, method_options=given), tmp_path / name)
        for name, given in (("plain", {}), ("given", options))
    ]
    plain, given = (load_model(run) for run in runs)
    assert [part.name for part in given.ranker.parts][-1] == "linear"
    np.testing.assert_array_equal(plain.score(read_log(log)), given.score(read_log(log)))


@pytest.mark.parametrize("options", [{"row_power": 2}, {"loss": "ipw"}, {"theta": "regression"}, {"trust": "values"}])
def test_the_likelihood_has_no_options_of_pairs(options, log, tmp_path):
    with pytest.raises(OptionError, match="final=likelihood does not use pairs"):
        run_training(config(log, method_options={**options, "final": "likelihood"}), tmp_path / "run")


@pytest.mark.parametrize(("clicks", "leaves"), [(0, 4), (10_000, 4), (100_000, 8), (1_000_000, 16), (10**8, 31)])
def test_trees_have_more_leaves_the_more_clicks_there_are(clicks, leaves):
    assert leaves_for(clicks) == leaves


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"weight": float("inf")}, "finite"),
        ({"ranker": "mlp"}, "cannot be read"),
    ],
)
def test_a_damaged_part_of_a_blend_is_an_error(change, what, blend):
    path = blend / "model" / "model.json"
    content = path.read_bytes()
    about = read_json(path)
    about["parts"][1] |= change
    write_json(path, about)
    try:
        with pytest.raises(DataError, match=what):
            load_model(blend)
    finally:
        path.write_bytes(content)


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tree_parameters": {"objective": "binary"}}, "cannot be set as a parameter"),
        ({"tree_parameters": {"num_leafs": 3}}, "no parameter 'num_leafs'; did you mean"),
        ({"tree_parameters": {"num_leaves": 1}}, r"LightGBM: Check failed.*num_leaves"),
        ({"ranker": "xgboost", "tree_parameters": {"max_depth": "abc"}}, r"XGBoost: Invalid Parameter.*max_depth"),
        ({"method": "lambdarank"}, "whole numbers up to 30.*method.labels to buckets"),
        ({"stream": "yes"}, "only prepared lists can be streamed"),
    ],
)
def test_an_error_leaves_no_run_behind(options, match, log, tmp_path):
    with pytest.raises(UltrError, match=match):
        run_training(config(log, **options), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_log_without_pairs_is_an_error(log, tmp_path):
    with pytest.raises(DataError, match="no pairs to learn from"):
        run_training(config(log, loss="ipw", label="click * 0 + 1"), tmp_path / "run")


@pytest.mark.parametrize("final", ["pairs", "likelihood"])
def test_constant_features_are_an_error(final, log, tmp_path):
    rows = read_log(log)
    write_log(replace(rows, features=np.ones_like(rows.features)), tmp_path / "flat.parquet")
    with pytest.raises(DataError, match=r"no feature to split rows by.*check that features vary"):
        run_training(config(tmp_path / "flat.parquet", method_options={"final": final}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_processes_and_streams_are_for_networks(log, monkeypatch):
    chosen = config(log)
    data = load_run_data(chosen)
    with pytest.raises(OptionError, match="whole log in memory"):
        TreeFit(FitInputs(chosen, replace(data, stream=object()), decide(chosen, data), "lightgbm"))
    monkeypatch.setattr("ultr.training.trees.size", lambda: 2)
    with pytest.raises(OptionError, match="one process"):
        TreeFit(FitInputs(chosen, data, decide(chosen, data), "lightgbm"))


@pytest.mark.parametrize("ranker", BOOSTERS)
def test_a_changed_model_file_is_an_error(ranker, log, tmp_path):
    run = run_training(config(log, ranker, **PLAIN), tmp_path / "run")
    path = run / "model" / FILES[ranker]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="file of trees is missing or was changed"):
        load_model(run)


def test_a_changed_checkpoint_is_not_used(log, tmp_path):
    pairs = {"method_options": {"final": "pairs"}}
    with pytest.raises(Killed):
        run_training(config(log, **pairs), tmp_path / "run", listeners=killed_at(8))
    for file in (tmp_path / "run.partial").glob("fits/lightgbm/checkpoints/*/lightgbm.txt"):
        file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match="changed since it was written"):
        run_training(config(log, **pairs), tmp_path / "run", resume=True)


# --- Missing values and categories ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("ranker", [*BOOSTERS, "mlp"])
def test_missing_values_and_categories_are_learned_from(ranker, tmp_path):
    data = frame()
    options = {"label": "click", "columns": {"categorical": "colour"}, "tree_parameters": {"max_depth": 3}}
    options |= {"trees.rounds": 30, "network.steps": 60, "network.lr": 0.1, "network.evaluate_every": 20}
    run = run_training(quick("", ranker=ranker, **PLAIN, **options), tmp_path / "run", source=data)
    model = load_model(run)
    assert model.missing == "keep"
    found = model.score(read_log(data, categorical="colour", missing="keep"))
    liked = (np.isnan(data["feature_gap"]) | (data["colour"] == "green")).to_numpy()
    assert np.quantile(found[liked], 0.1) > np.quantile(found[~liked], 0.9)
    unseen = read_log(data.assign(colour="violet"), categorical="colour", missing="keep")
    assert np.isfinite(model.score(unseen)).all()  # an unknown category counts as missing
    with pytest.raises(DataError, match="missing"):
        run_training(quick("", ranker="mlp", missing="error"), tmp_path / "no", source=data)
