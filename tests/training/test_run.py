"""Runs: their files and scores, their stages, and runs that are killed and resumed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from conftest import make_shown_log, some_always
from runs import (
    FEEDBACK,
    KNOWN,
    PLAIN,
    Killed,
    contents,
    feedback_log,
    files_of,
    kill,
    killed_at,
    quick,
    scores,
    steps_to,
    weights,
    write_feedback,
)
from ultr.datasets.users import User, simulate_log
from ultr.errors import DataError, UltrError
from ultr.log import read_log, write_log
from ultr.methods import METHODS, bias_model
from ultr.rankers.combined import Blend
from ultr.rankers.model import load_model
from ultr.training.config import TrainingOptions
from ultr.training.data import Decisions, load_run_data
from ultr.training.folder import current_folder, part_of, read_config, read_metrics
from ultr.training.loop import Listeners
from ultr.training.run import run_training

pytest.importorskip("lightgbm")
ESTIMATES = ("ultr.training.examining.estimate_examination", "ultr.methods.position_model.estimate_examination")


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return write_feedback(tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def default(log, tmp_path_factory) -> Path:
    """Return a run of the default: a network and trees, with examination that is estimated."""
    return run_training(quick(log, ranker="auto"), tmp_path_factory.mktemp("default") / "run")


def must_not_run(*_: object, **__: object) -> None:
    raise AssertionError("this stage is done")


# --- The default: a network and trees ---------------------------------------------------------------------------------


def test_the_default_run_has_the_artefacts_of_all_stages(default):
    names = files_of(default)
    assert {name.split("/")[0] for name in names} == {
        *(".lock", "config.json", "decisions.json", "examination.json", "off-policy", "metrics.jsonl"),
        *("fits", "outcome", "bias.json", "model", "reference"),
    }
    of_fits = {tuple(name.split("/")[1:3]) for name in names if name.startswith("fits/")}
    assert of_fits == {(kind, name) for kind in ("mlp", "lightgbm") for name in ("model", "report.json")}
    decisions = Decisions.load(default)
    assert (decisions.rankers, decisions.ranker_name) == (("mlp", "lightgbm"), "mlp + lightgbm")
    assert read_config(default).rankers == "auto"


def test_the_default_run_reads_the_log_once_and_estimates_examination_once(log, tmp_path, monkeypatch):
    import ultr.bias.examination
    import ultr.training.data

    calls: Counter[str] = Counter()

    def counted(name, function):
        return lambda *args, **options: (calls.update([name]), function(*args, **options))[1]

    monkeypatch.setattr("ultr.training.data.read_log", counted("read", ultr.training.data.read_log))
    estimate = ultr.bias.examination.estimate_examination
    for place in ESTIMATES:
        monkeypatch.setattr(place, counted("estimate", estimate))
    run_training(quick(log, ranker="auto"), tmp_path / "run")
    assert calls == {"read": 1, "estimate": 1}


def test_the_ranker_is_the_sum_of_its_parts_with_their_shares(default, log):
    shares = json.loads((default / "bias.json").read_text())["shares"]
    assert shares.keys() == {"mlp", "lightgbm"}
    assert sum(shares.values()) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in shares.values())
    rows = read_log(log)
    parts = {kind: load_model(part_of(default, kind)) for kind in shares}
    assert isinstance(parts["lightgbm"].ranker, Blend)
    whole = within(load_model(default).score(rows), rows)
    summed = {kind: within(model.score(rows), rows) for kind, model in parts.items()}
    by_scores = np.linalg.lstsq(np.stack(list(summed.values()), axis=1), whole, rcond=None)[0]
    np.testing.assert_allclose(sum(w * s for w, s in zip(by_scores, summed.values(), strict=True)), whole, atol=1e-4)
    held_out = load_run_data(read_config(default)).validation
    spreads = [np.sqrt(np.mean(within(model.score(held_out), held_out) ** 2)) for model in parts.values()]
    np.testing.assert_allclose(by_scores * spreads, list(shares.values()), rtol=1e-3, atol=1e-6)


def within(values: np.ndarray, log) -> np.ndarray:
    """Return scores minus their mean in the request."""
    return values - (np.bincount(log.request_of_row, values) / log.lengths)[log.request_of_row]


def test_machine_options_do_not_change_which_rankers_are_trained(default, log, tmp_path):
    chosen = quick(log, ranker="auto", device="cpu", precision="float32", workers=2)
    run = run_training(chosen, tmp_path / "run")
    assert Decisions.load(run).rankers == ("mlp", "lightgbm")
    np.testing.assert_array_equal(scores(run, log), scores(default, log))


def test_options_of_the_network_keep_the_trees(log, tmp_path):
    run = run_training(quick(log, ranker="auto", hidden=(16,), propensities=KNOWN, select=FEEDBACK), tmp_path / "run")
    decisions = Decisions.load(run)
    assert (decisions.rankers, decisions.hidden) == (("mlp", "lightgbm"), (16,))
    assert load_model(part_of(run, "mlp")).ranker is not None


# --- Killed runs ------------------------------------------------------------------------------------------------------


def test_a_run_killed_again_and_again_has_the_same_files(default, log, tmp_path, monkeypatch):
    """Each process comes a stage further; none begins from the start."""
    chosen, run, steps = quick(log, ranker="auto"), tmp_path / "run", []
    moments = [
        "ultr.training.run.examine",
        "ultr.training.examining.fit_off_policy_model",
        "ultr.training.trees.TreeFit.fit",
        "ultr.training.trees.evaluator",
        killed_at(4, "lightgbm"),
        "ultr.training.fitting.save_ranker",
        "ultr.training.trees.TreeFit.relevance",
        "ultr.training.networks.evaluator",
        killed_at(0),
        killed_at(8, "mlp"),
        "ultr.training.run.combine",
        "ultr.training.run.judge",
        "ultr.training.run._write_model",
        "ultr.training.folder.take_name",
    ]
    for number, moment in enumerate(moments):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            listeners = moment
            if isinstance(moment, str):
                patch.setattr(moment, kill)
                listeners = replace(steps_to(steps), checkpoint_seconds=0)
            run_training(chosen, run, resume=number > 0, listeners=listeners)
        assert not run.exists()
    assert run_training(chosen, run, resume=True, listeners=Listeners(on_progress=must_not_run)) == run
    assert contents(run) == contents(default)
    assert list(tmp_path.iterdir()) == [run]
    assert Counter(steps)["mlp", 4] == 0  # it went on from checkpoints
    assert Counter(steps)["mlp", 12] == 1


def test_examination_is_not_estimated_again(default, log, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("ultr.training.networks.NetworkFit.fit", kill)
        run_training(quick(log, ranker="auto"), tmp_path / "run")
    for place in (*ESTIMATES, "ultr.training.examining.fit_off_policy_model"):
        monkeypatch.setattr(place, must_not_run)
    run = run_training(quick(log, ranker="auto"), tmp_path / "run", resume=True)
    assert contents(run) == contents(default)


def test_a_finished_fit_is_not_made_again(default, log, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("ultr.training.run.combine", kill)
        run_training(quick(log, ranker="auto"), tmp_path / "run", listeners=Listeners(checkpoint_seconds=0))
    assert (current_folder(tmp_path / "run") / "fits" / "mlp" / "model").is_dir()
    monkeypatch.setattr("ultr.training.trees.TreeFit._run_bias_stage", must_not_run)
    monkeypatch.setattr("ultr.training.networks.NetworkFit.prepare", must_not_run)
    run = run_training(quick(log, ranker="auto"), tmp_path / "run", resume=True)
    assert contents(run) == contents(default)


@pytest.mark.parametrize(
    ("ranker", "options", "at"),
    [
        ("mlp", {"method": "pairwise-em"}, 6),
        ("mlp", {"method": "ipw-listwise"}, None),
        ("lightgbm", {"method": "pairwise-em", "method_options": {"final": "pairs"}}, 6),
        ("lightgbm", {"method": "direct"}, None),
    ],
)
def test_a_run_killed_in_or_after_its_bias_stage_does_not_repeat_it(ranker, options, at, log, tmp_path, monkeypatch):
    chosen = quick(log, ranker=ranker, **options)
    steps: list[int] = []
    monkeypatch.setattr("ultr.training.biases.BIAS_TRAINING", TrainingOptions(evaluate_every=2))

    def kill_at(progress) -> None:
        steps.append(progress.step)
        if progress.step == at:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        if at is None:
            patch.setattr(f"ultr.training.{'networks' if ranker == 'mlp' else 'trees'}.evaluator", kill)
        run_training(chosen, tmp_path / "run", listeners=Listeners(on_bias_progress=kill_at, checkpoint_seconds=0))
    before = len(steps)
    listeners = Listeners(on_bias_progress=lambda progress: steps.append(progress.step))
    run = run_training(chosen, tmp_path / "run", resume=True, listeners=listeners)
    assert steps[before:] == ([8, 10] if at is not None else [])
    assert contents(run) == contents(run_training(chosen, tmp_path / "whole"))


def test_a_damaged_artefact_of_a_killed_run_is_an_error(log, tmp_path):
    with pytest.raises(Killed):
        run_training(quick(log), tmp_path / "run", listeners=killed_at(4))
    path = current_folder(tmp_path / "run") / "examination.json"
    whole = path.read_text()
    path.write_text(whole.replace("1.0", "1.5", 1))
    with pytest.raises(DataError, match=r"examination\.json: the file has changed"):
        run_training(quick(log), tmp_path / "run", resume=True)
    path.write_text(whole)
    run_training(quick(log), tmp_path / "run", resume=True)


def test_a_run_is_not_resumed_with_other_data(tmp_path):
    path = write_feedback(tmp_path, 80)
    with pytest.raises(Killed):
        run_training(quick(path, select=FEEDBACK, propensities=KNOWN), tmp_path / "run", listeners=killed_at(4))
    before = path.read_bytes()
    write_log(feedback_log(90), path, overwrite=True)
    with pytest.raises(DataError, match="the data has changed since"):
        run_training(quick(path, select=FEEDBACK, propensities=KNOWN), tmp_path / "run", resume=True)
    path.write_bytes(before)
    run_training(quick(path, select=FEEDBACK, propensities=KNOWN), tmp_path / "run", resume=True)


# --- Runs of one ranker -----------------------------------------------------------------------------------------------


USUAL = ("pairwise-em", "pointwise", "lambdarank", "position-feature", "ipw-listwise", "direct", "pal-click", "ubm")


@pytest.mark.parametrize("method", some_always(METHODS, USUAL))
def test_every_method_writes_a_run(method, log, tmp_path):
    options = {"network.steps": 4, "network.evaluate_every": 2, "network.bias_steps": 3, "select": FEEDBACK}
    run = run_training(quick(log, method=method, **options), tmp_path / "run")
    common = {".lock", "config.json", "decisions.json", "metrics.jsonl", "fits/mlp/report.json"}
    common |= {f"model/{name}.json" for name in ("model", "calibration")}
    common |= {f"model/{name}.safetensors" for name in ("rows", "weights")}
    common |= {f"outcome/{name}" for name in ("outcome.json", "requests.parquet", "used.safetensors")}
    names = files_of(run)
    assert common <= names
    learns_bias = method not in ("pointwise", "lambdarank", "position-feature")
    assert ("bias.json" in names) == learns_bias
    assert ("fits/mlp/bias/weights.safetensors" in names) == METHODS[method].has_bias_stage({})
    assert names - common <= {
        *("bias.json", "examination.json", "reference/1.parquet"),
        *("fits/mlp/bias/weights.safetensors", "fits/mlp/bias/evidence.json"),
    }
    lines = read_metrics(run)
    assert [line["step"] for line in lines][-2:] == [2, 4]
    assert all(set(line) == {"ranker", "step", "loss", FEEDBACK} for line in lines)
    rows = read_log(log)
    found = load_model(run).score(rows)
    assert found.shape == (rows.rows,)
    assert np.isfinite(found).all()
    shuffled = replace(rows, features=rows.features[:, ::-1], feature_names=rows.feature_names[::-1])
    np.testing.assert_array_equal(load_model(run).score(shuffled), found)  # features are matched by name


def test_features_of_the_training_log_must_not_be_missing(log, tmp_path):
    run, rows = run_training(quick(log, **PLAIN), tmp_path / "run"), read_log(log)
    partial = replace(rows, features=rows.features[:, :2], feature_names=rows.feature_names[:2])
    with pytest.raises(DataError, match="features that the model was trained on are missing: f2"):
        load_model(run).score(partial)


def test_the_configuration_of_a_run_repeats_it(default, tmp_path):
    again = run_training(read_config(default), tmp_path / "again")
    assert contents(again) == contents(default)


def test_a_run_can_be_trained_on_a_log_or_frame_in_memory(log, tmp_path):
    expected = run_training(quick(log, **PLAIN), tmp_path / "file")
    for name, source in {"log": read_log(log), "frame": pd.read_parquet(log), "table": pq.read_table(log)}.items():
        run = run_training(quick("", **PLAIN), tmp_path / name, source=source)
        assert weights(run).keys() == weights(expected).keys()
        assert all(torch.equal(tensor, weights(expected)[key]) for key, tensor in weights(run).items())


@pytest.mark.parametrize(
    "options",
    [
        {"label": "clik"},
        {"columns": {"position": "psn"}},
        {"method_options": {"theta": "items"}},  # the log has no ids of items
        {"ranker": "mlp,lightgbm", "method": "dla"},
        {"ranker": "mlp,lightgbm", "tree_parameters": {"num_leafs": 3}},
        {"users": "pbm"},  # not a data set
        {"warm_start": "nowhere"},
    ],
)
def test_a_run_that_cannot_begin_leaves_nothing_behind(options, log, tmp_path):
    with pytest.raises(UltrError):
        run_training(quick(log).with_options(**options), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_more_positions_than_a_bias_model_can_have_are_an_error(log, tmp_path, monkeypatch):
    monkeypatch.setattr(bias_model, "MAX_TRAINED_POSITIONS", 3)
    with pytest.raises(DataError, match="bias can be estimated for up to 3 different positions"):
        run_training(quick(log), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_best_step_of_a_log_is_chosen_without_its_true_labels(tmp_path):
    rows, _ = simulate_log(make_shown_log(requests=80), User())
    metrics = []
    for name, relevance in (("with", rows.relevance), ("upside-down", 4 - rows.relevance), ("without", None)):
        source = replace(rows, relevance=relevance)
        run = run_training(quick("", method="pointwise"), tmp_path / name, source=source)
        metrics.append(read_metrics(run))
    assert metrics[0] == metrics[1] == metrics[2]


def test_a_simulated_run_learns_from_fresh_feedback(small_synthetic, tmp_path):
    chosen = quick("synthetic", users="pbm", ranker="linear", select="ndcg@10", steps=20, evaluate_every=10)
    run = run_training(chosen, tmp_path / "run")
    assert [set(line) for line in read_metrics(run)] == [{"ranker", "step", "loss", "ndcg@10"}] * 2
    without = chosen.with_options(users=None)
    with pytest.raises(UltrError, match="pass --users pbm"):
        run_training(without, tmp_path / "other")


# --- Categories and damage --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shops(tmp_path_factory) -> Path:
    table = feedback_log(60).to_table()
    names = np.random.default_rng(0).choice(["x", "y", "z"], len(table))
    path = tmp_path_factory.mktemp("shops") / "log.parquet"
    pq.write_table(table.append_column("shop", [names.tolist()]), path)
    return path


def test_categories_are_matched_by_value_when_scoring(shops, tmp_path):
    model = load_model(run_training(quick(shops, columns={"categorical": ["shop"]}, **PLAIN), tmp_path / "run"))
    assert model.vocabularies["shop"].to_pylist() == ["x", "y", "z"]
    whole = pq.read_table(shops)
    found = []
    for rows in (np.arange(len(whole)), np.arange(len(whole))[::-1]):  # in reverse order the codes are different
        read = read_log(whole.take(rows), categorical="shop")
        ids = np.array(read.request_ids.to_pylist())[read.request_of_row]
        found.append(dict(zip(zip(ids, read.positions, strict=True), model.score(read).tolist(), strict=True)))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    with pytest.raises(DataError, match="trained on are missing"):
        model.score(read_log(shops))


@pytest.mark.parametrize("ranker", ["mlp", "lightgbm"])
def test_a_log_can_have_only_categorical_features(ranker, shops, tmp_path):
    table = pq.read_table(shops).select(["request", "position", "click", "shop"])
    chosen = quick("", ranker=ranker, columns={"categorical": ["shop"]}, **PLAIN)
    model = load_model(run_training(chosen, tmp_path / "run", source=table))
    found = model.score(read_log(table, categorical="shop"))
    assert len({round(float(score), 6) for score in found}) <= 3
    assert np.isfinite(found).all()


def test_folders_that_are_not_a_run_or_are_damaged_are_errors(log, tmp_path):
    with pytest.raises(DataError, match="not a run directory"):
        load_model(tmp_path)
    run = run_training(quick(log, **PLAIN), tmp_path / "run")
    file = run / "model" / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match=r"weights\.safetensors: cannot be read"):
        load_model(run)
    (run / "model" / "model.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="newer version of ultr"):
        load_model(run)
    (run / "model" / "model.json").write_text("[]")
    with pytest.raises(DataError, match="must hold a JSON object, got list"):
        load_model(run)
