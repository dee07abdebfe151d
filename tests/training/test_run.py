"""Runs: their files, resumed and killed runs, and scores."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from conftest import make_shown_log
from ultr.datasets.simulate import simulate_log
from ultr.datasets.users import User
from ultr.errors import DataError, OptionError, OutputError, UltrError
from ultr.log import read_log, write_log
from ultr.methods import METHODS, bias_model, make_method, position_model
from ultr.rankers.model import load_model
from ultr.training.checkpoints import load_checkpoint, lock_run, read_metrics, save_checkpoint
from ultr.training.config import RunConfig, TrainingOptions
from ultr.training.data import RunData, load_run_data
from ultr.training.inputs import method_inputs
from ultr.training.loop import start
from ultr.training.run import run_training
from ultr.training.selection import best_evaluation

FAST = {"steps": 30, "bias_steps": 10, "batch": 16, "evaluate_every": 5, "device": "cpu"}


@pytest.fixture
def log_path(tmp_path):
    log, _ = simulate_log(make_shown_log(requests=80), User())
    write_log(replace(log, relevance=None), tmp_path / "log.parquet")
    return tmp_path / "log.parquet"


def config(path, **changes) -> RunConfig:
    training = TrainingOptions(**{**FAST, **changes.pop("training", {})})
    return RunConfig(data=str(path), ranker_options={"hidden": [8]}, training=training, **changes)


def files_of(run) -> set[str]:
    return {p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file()}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_has_all_files_and_scores(method, log_path, tmp_path):
    run = run_training(config(log_path, method=method), tmp_path / "run")
    written = {".lock", "config.json", "metrics.jsonl", "model/model.json", "model/weights.safetensors"}
    written |= {"judge/judge.json", "judge/direct.safetensors", "model/rows.safetensors"}
    written |= {"outcome/outcome.json", "outcome/requests.parquet", "outcome/used.safetensors"}
    learns_bias = method not in ("pointwise", "lambdarank", "position-feature")
    written |= {"bias.json"} if learns_bias else set()
    written |= {"bias/weights.safetensors", "bias/evidence.json"} if METHODS[method].has_bias_stage({}) else set()
    assert files_of(run) == written
    first = [0] if method == "pairwise-em" else []  # the anchor is evaluated, too
    assert [line["step"] for line in read_metrics(run)] == [*first, 5, 10, 15, 20, 25, 30]
    assert all(set(line) == {"step", "loss", "off-policy-gain@10"} for line in read_metrics(run))
    log = read_log(log_path)
    scores = load_model(run).score(log)
    assert scores.shape == (log.rows,)
    assert np.isfinite(scores).all()
    shuffled = replace(log, features=log.features[:, ::-1], feature_names=log.feature_names[::-1])
    np.testing.assert_array_equal(load_model(run).score(shuffled), scores)  # features are matched by name
    partial = replace(log, features=log.features[:, :2], feature_names=log.feature_names[:2])
    with pytest.raises(DataError, match="features that the model was trained on are missing: f2"):
        load_model(run).score(partial)


def test_the_configuration_is_read_back_equal_and_repeats_the_run(log_path, tmp_path):
    first = run_training(config(log_path), tmp_path / "one")
    again = RunConfig.from_json(json.loads((first / "config.json").read_text()))
    second = run_training(again, tmp_path / "two")
    assert (first / "model" / "weights.safetensors").read_bytes() == (
        second / "model" / "weights.safetensors"
    ).read_bytes()


def test_an_existing_run_is_an_error_or_resumed_or_replaced(log_path, tmp_path):
    run = run_training(config(log_path), tmp_path / "run")
    before = (run / "model" / "weights.safetensors").read_bytes()
    with pytest.raises(OutputError, match="--resume or --overwrite"):
        run_training(config(log_path), run)
    run_training(config(log_path, training={"device": "auto"}), run, resume=True)  # the run is finished
    assert (run / "model" / "weights.safetensors").read_bytes() == before
    run_training(config(log_path, training={"seed": 9}), run, overwrite=True)
    assert (run / "model" / "weights.safetensors").read_bytes() != before


def test_a_run_is_not_resumed_with_other_options(log_path, tmp_path):
    """Also after its end: the caller would take the old run for one with the new options."""
    run = run_training(config(log_path), tmp_path / "run")
    other = config(f"{log_path}2", label="click", select="feedback-ndcg@10", training={"lr": 0.5, "seed": 9})
    words = (
        r"the log \(.*2; the run has .*\), --label \(click; the run has click \+ dwell / exp\(3\)\), --select \(.*, "
    )
    with pytest.raises(
        OptionError, match=words + r"--lr \(0.5; the run has 0.02\), --seed \(9; the run has 0\); leave"
    ):
        run_training(other, run, resume=True)
    run_training(other, run, resume=True, chosen=["batch", "steps"])  # all others are those of the run


@pytest.mark.parametrize(
    "changes", [{"label": "clik"}, {"method": "nothing"}, {"columns": {"position": "psn"}}, {"ranker": "tree"}]
)
def test_a_run_that_cannot_begin_leaves_nothing_behind(changes, log_path, tmp_path):
    with pytest.raises(UltrError):
        run_training(replace(config(log_path), **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_processes_do_not_train_in_one_folder(log_path, tmp_path):
    with lock_run(tmp_path / "run"), pytest.raises(OutputError, match="another process"):
        run_training(config(log_path), tmp_path / "run", resume=True)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "adamw"])
def test_a_checkpoint_brings_back_every_bit(optimizer, tmp_path):
    log, _ = simulate_log(make_shown_log(), User())
    options = TrainingOptions(optimizer=optimizer, device="cpu", batch=8)
    inputs = method_inputs(config("x"), RunData(log, log, ""))

    def state_after(steps, state):
        from ultr.lists import ListBatches
        from ultr.training.feed import Feed
        from ultr.training.loop import take_step

        feed = Feed(ListBatches(log), batch=8, seed=0)
        while state.step < steps:
            take_step(state, feed(state.step), options)
        return state

    def fresh(seed):
        torch.manual_seed(seed)
        return start(make_method("lambdarank", inputs), log, options)

    whole = state_after(12, fresh(0))
    half = state_after(7, fresh(0))
    half.best_weights = dict(half.method.state_dict())
    save_checkpoint(tmp_path, half)
    resumed = fresh(99)
    assert load_checkpoint(tmp_path, resumed)
    assert resumed.step == 7
    for a, b in zip(
        state_after(12, resumed).method.state_dict().values(), whole.method.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)


def test_an_incomplete_last_line_of_metrics_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_training_validation_and_test_requests_of_a_log_are_disjoint(log_path):
    parts = load_run_data(config(log_path, judged=0.3))
    ids = [set(part.request_ids.to_pylist()) for part in (parts.train, parts.validation, parts.test)]
    assert [len(i) for i in ids] == [40, 16, 24]
    assert len(set.union(*ids)) == 80
    assert load_run_data(config(log_path)).test is None


def test_the_best_evaluation_is_by_the_runs_own_metric(log_path, tmp_path):
    run = run_training(config(log_path, select="feedback-arp"), tmp_path / "run")
    select, best = best_evaluation(run)
    assert select == "feedback-arp"
    assert best[select] == min(line[select] for line in read_metrics(run))


def test_the_best_step_of_a_log_is_chosen_without_its_true_labels(tmp_path):
    log, _ = simulate_log(make_shown_log(requests=80), User())
    runs = [
        run_training(config("", method="pointwise"), tmp_path / name, log=replace(log, relevance=relevance))
        for name, relevance in (("with", log.relevance), ("upside-down", 4 - log.relevance), ("without", None))
    ]
    assert read_metrics(runs[0]) == read_metrics(runs[1]) == read_metrics(runs[2])


def test_a_model_with_constants_can_be_started_from(log_path, tmp_path):
    first = run_training(config(log_path, method="position-feature"), tmp_path / "one")
    still = config(log_path, method="position-feature", training={"steps": 1, "evaluate_every": 1, "lr": 1e-9})
    second = run_training(still, tmp_path / "two", warm_start=first)
    a, b = (load_file(run / "model" / "weights.safetensors") for run in (first, second))
    assert len(a) > 3
    for name in a:
        torch.testing.assert_close(a[name], b[name])


def test_a_warm_start_takes_the_weights_of_another_run(log_path, tmp_path):
    first = run_training(config(log_path), tmp_path / "one")
    second = run_training(
        config(log_path, training={"steps": 1, "evaluate_every": 1, "lr": 1e-9}), tmp_path / "two", warm_start=first
    )
    log = read_log(log_path)
    np.testing.assert_allclose(load_model(second).score(log), load_model(first).score(log), atol=1e-5)
    with pytest.raises(DataError, match="weights of other shapes"):
        run_training(replace(config(log_path), ranker_options={"hidden": [16]}), tmp_path / "three", warm_start=first)


def test_a_simulated_run_learns_from_fresh_feedback(tmp_path):
    simulated = RunConfig(
        data="synthetic",
        users="pbm",
        ranker="linear",
        select="ndcg@10",
        training=TrainingOptions(steps=20, bias_steps=20, batch=64, evaluate_every=10, device="cpu"),
    )
    run = run_training(simulated, tmp_path / "run")
    assert [set(line) for line in read_metrics(run)] == [{"step", "loss", "ndcg@10"}] * 2
    for changes, message in [
        ({"users": None}, "pass --users pbm"),
        ({"learn_from": "no-bias", "users": None}, "needs simulated users"),
        ({"learn_from": "love"}, "'learn_from' must be one of"),
        ({"held_out": 0.0}, "'held_out' must be above 0"),
        ({"held_out": 0.6, "judged": 0.4}, "their sum below 1"),
        ({"select": "ndgc@10"}, "did you mean 'ndcg'"),
    ]:
        with pytest.raises(OptionError, match=message):
            run_training(replace(simulated, **changes), tmp_path / "other")


def test_categories_are_matched_by_value_when_scoring(tmp_path):
    log, _ = simulate_log(make_shown_log(requests=60), User())
    table = log.to_table().drop(["relevance"])
    shops = np.random.default_rng(0).choice(["x", "y", "z"], log.rows)
    pq.write_table(table.append_column("shop", [shops.tolist()]), tmp_path / "log.parquet")
    run = run_training(config(tmp_path / "log.parquet", columns={"categorical": ["shop"]}), tmp_path / "run")
    model = load_model(run)
    assert sorted(model.vocabularies["shop"].to_pylist()) == ["x", "y", "z"]
    whole = pq.read_table(tmp_path / "log.parquet")
    scores = []
    for rows in (np.arange(log.rows), np.arange(log.rows)[::-1]):  # in reverse order the codes are different
        read = read_log(whole.take(rows), categorical="shop")
        ids = np.array(read.request_ids.to_pylist())[read.request_of_row]
        scores.append(dict(zip(zip(ids, read.positions, strict=True), model.score(read).tolist(), strict=True)))
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    with pytest.raises(DataError, match="trained on are missing"):
        model.score(read_log(tmp_path / "log.parquet"))


@pytest.mark.parametrize("ranker", ["mlp", "lightgbm"])
def test_a_log_can_have_only_categorical_features(ranker, tmp_path):
    log, _ = simulate_log(make_shown_log(requests=60, features=1), User())
    table = log.to_table().drop(["relevance", "features"])
    shops = np.random.default_rng(0).choice(["x", "y", "z"], log.rows)
    pq.write_table(table.append_column("shop", [shops.tolist()]), tmp_path / "log.parquet")
    only = config(tmp_path / "log.parquet", columns={"categorical": ["shop"]}, ranker=ranker)
    run = run_training(replace(only, ranker_options={}) if ranker == "lightgbm" else only, tmp_path / "run")
    read = read_log(tmp_path / "log.parquet", categorical="shop")
    scores = load_model(run).score(read)
    assert len({round(float(score), 6) for score in scores}) <= 3
    assert np.isfinite(scores).all()


def test_folders_that_are_not_a_run_or_are_damaged_are_errors(log_path, tmp_path):
    with pytest.raises(DataError, match="not a run directory"):
        load_model(tmp_path)
    run = run_training(config(log_path), tmp_path / "run")
    weights = run / "model" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(DataError, match=r"weights\.safetensors: cannot be read"):
        load_model(run)
    (run / "model" / "model.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="newer version of ultr"):
        load_model(run)
    (run / "model" / "model.json").write_text("[]")
    with pytest.raises(DataError, match="must hold a JSON object, got list"):
        load_model(run)


def test_more_positions_than_a_bias_model_can_have_are_an_error(log_path, tmp_path, monkeypatch):
    monkeypatch.setattr(bias_model, "MAX_TRAINED_POSITIONS", 3)
    with pytest.raises(DataError, match="bias can be estimated for up to 3 different positions"):
        run_training(config(log_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_whose_bias_cannot_be_estimated_leaves_nothing_behind(log_path, tmp_path):
    with pytest.raises(DataError, match="name their column with --item"):
        run_training(config(log_path, method_options={"theta": "items"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    kept = run_training(config(log_path), tmp_path / "kept")
    with pytest.raises(DataError, match="item ids"):
        run_training(config(log_path, method_options={"theta": "items"}), kept, overwrite=True)
    assert kept.is_dir()


def test_a_run_that_fails_after_its_bias_stage_keeps_the_bias_model_and_resumes(log_path, tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise DataError("the disk caught fire")

    with monkeypatch.context() as patch:
        patch.setattr("ultr.training.networks.judge_of", fail)
        with pytest.raises(DataError, match="fire"):
            run_training(config(log_path), tmp_path / "run")
    assert (tmp_path / "run" / "bias").is_dir()
    refitted = []
    run_training(config(log_path), tmp_path / "run", resume=True, on_bias_progress=refitted.append)
    assert not refitted
    whole = run_training(config(log_path), tmp_path / "whole")
    weights = [load_file(run / "model" / "weights.safetensors") for run in (tmp_path / "run", whole)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


class Killed(BaseException):
    """Stands for the end of a process, which no code handles."""


@pytest.mark.parametrize(
    ("method", "ranker", "at"),
    [
        ("pairwise-em", "mlp", 6),
        ("ipw-listwise", "mlp", None),
        pytest.param("pairwise-em", "lightgbm", None, marks=pytest.mark.long),
        ("direct", "lightgbm", None),
    ],
)
def test_a_run_killed_in_or_after_its_bias_stage_does_not_repeat_finished_parts(
    method, ranker, at, log_path, tmp_path, monkeypatch
):
    if ranker != "mlp":
        pytest.importorskip(ranker)
    settings = {"training": {"bias_steps": 10, "steps": 5}, "method": method, "ranker": ranker}
    settings |= {"method_options": {"em": "trees"}} if (method, ranker) == ("pairwise-em", "lightgbm") else {}
    options = replace(config(log_path, **settings), ranker_options={"hidden": [8]} if ranker == "mlp" else {})
    estimates, steps = [], []
    estimate = position_model.PositionModel.estimate
    monkeypatch.setattr(
        position_model.PositionModel, "estimate", lambda self, *a, **b: (estimates.append(1), estimate(self, *a, **b))
    )
    monkeypatch.setattr("ultr.training.bias_stage.BIAS_TRAINING", TrainingOptions(evaluate_every=2))

    def kill(progress):
        steps.append(progress.step)
        if progress.step == at:
            raise Killed

    with monkeypatch.context() as patch:
        if at is None:
            patch.setattr(f"ultr.training.{'networks' if ranker == 'mlp' else 'trees'}.judge_of", raised(Killed))
        with pytest.raises(Killed):
            run_training(options, tmp_path / "run", on_bias_progress=kill, checkpoint_seconds=0)
    before = len(steps)
    run_training(options, tmp_path / "run", resume=True, on_bias_progress=lambda progress: steps.append(progress.step))
    assert len(estimates) == 1
    assert steps[before:] == ([8, 10] if at is not None else [])
    assert not (tmp_path / "run" / "bias-stage").exists()
    whole = run_training(options, tmp_path / "whole")
    for name in ("bias.json", "metrics.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()


def raised(error):
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_run_resumed_from_a_checkpoint_says_how_theta_was_estimated(log_path, tmp_path):
    def kill(progress):
        if progress.step == 10:
            raise Killed

    with pytest.raises(Killed):
        run_training(config(log_path), tmp_path / "run", on_progress=kill, checkpoint_seconds=0)
    run = run_training(config(log_path), tmp_path / "run", resume=True)
    whole = run_training(config(log_path), tmp_path / "whole")
    assert (run / "bias.json").read_bytes() == (whole / "bias.json").read_bytes()


def test_a_damaged_estimate_of_a_killed_run_is_made_again(log_path, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("ultr.training.networks.judge_of", raised(Killed))
        with pytest.raises(Killed):
            run_training(config(log_path, method="ipw-listwise"), tmp_path / "run")
    (tmp_path / "run" / "bias-stage" / "estimate" / "weights.safetensors").write_bytes(b"broken")
    run = run_training(config(log_path, method="ipw-listwise"), tmp_path / "run", resume=True)
    assert (run / "model").is_dir()
