"""TensorBoard: each evaluation of a run once, and its bias by position."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import make_shown_log
from ultr.datasets.simulate import simulate_log
from ultr.datasets.users import User
from ultr.errors import MissingExtraError
from ultr.log import write_log
from ultr.training.checkpoints import read_metrics
from ultr.training.config import RunConfig, TrainingOptions
from ultr.training.loop import Progress
from ultr.training.run import run_training
from ultr.training.tensorboard import Board

FAST = ("--hidden", "8", "--steps", "12", "--bias-steps", "5", "--batch", "16", "--evaluate-every", "4")
SELECT = ("--select", "feedback-ndcg@10", "--device", "cpu")


@pytest.fixture(scope="module")
def log_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    log, _ = simulate_log(make_shown_log(requests=60), User())
    write_log(replace(log, relevance=None), path)
    return path


def scalars(run: Path) -> dict[str, dict[int, float]]:
    """Return the curves in TensorBoard by tag; each step of a curve must occur once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    shown = {}
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        assert len(steps) == len(set(steps)), tag
        shown[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return shown


def assert_shows(run: Path) -> None:
    """Check that TensorBoard has the values of metrics.jsonl and bias.json."""
    shown, lines = scalars(run), read_metrics(run)
    metric = "feedback-ndcg@10"
    assert shown[f"validation/{metric}"] == pytest.approx({line["step"]: line[metric] for line in lines}, abs=1e-6)
    losses = {line["step"]: line["loss"] for line in lines if line["loss"] is not None}
    assert shown.get("loss", {}) == pytest.approx(losses, rel=1e-6)
    if (run / "bias.json").is_file():
        bias = json.loads((run / "bias.json").read_text())
        theta = dict(zip(bias["positions"], bias["theta"], strict=True))
        assert shown["bias/theta"] == pytest.approx(theta, rel=1e-6)


@pytest.mark.parametrize(
    ("ranker", "method"),
    [("mlp", "pairwise-em"), ("mlp", "pal-click"), ("lightgbm", "lambdarank"), ("xgboost", "pointwise")],
)
def test_each_evaluation_and_the_bias_are_shown(ranker, method, log_path, tmp_path, ultr):
    run = tmp_path / "run"
    done = ultr(
        *("train", log_path, "--out", run, "--method", method, "--ranker", ranker, "--label", "click"),
        *(*FAST, *SELECT, "--tensorboard"),
    )
    assert done.returncode == 0, done.stderr
    shown = scalars(run)
    if method == "pal-click":
        assert set(shown) == {"loss", "validation/feedback-ndcg@10", "rate", "bias/tower of click"}
        return
    assert_shows(run)
    rate = 0.02 if ranker == "mlp" else 0.1
    of_steps = {step: value for step, value in shown["rate"].items() if step}  # a network is also evaluated before them
    assert of_steps == pytest.approx(dict.fromkeys((4, 8, 12), rate))


def config(log_path: Path, **training) -> RunConfig:
    options = TrainingOptions(steps=12, batch=16, evaluate_every=2, device="cpu", **training)
    return RunConfig(
        data=str(log_path),
        method="dla",
        label="click",
        ranker_options={"hidden": [8]},
        select="feedback-ndcg@10",
        training=options,
    )


class StoppedError(Exception):
    pass


def stopping(at: int, *then):
    def on_progress(progress: Progress) -> None:
        for each in then:
            each(progress)
        if progress.step == at:
            raise StoppedError

    return on_progress


def test_a_resumed_run_has_each_step_once_and_the_learning_rates_of_its_schedule(log_path, tmp_path):
    run, chosen = tmp_path / "run", config(log_path, schedule="linear", warmup=3)
    with pytest.raises(StoppedError):  # evaluations after the last checkpoint are repeated
        run_training(chosen, run, checkpoint_seconds=0.0, on_progress=stopping(4))
    with pytest.raises(StoppedError):
        run_training(chosen, run, resume=True, checkpoint_seconds=1e9, on_progress=stopping(8, Board(run)))
    assert set(scalars(run)["loss"]) == {2, 4, 6, 8}
    board = Board(run)
    run_training(chosen, run, resume=True, on_progress=board)
    board.finish()
    assert [line["step"] for line in read_metrics(run)] == [2, 4, 6, 8, 10, 12]
    assert_shows(run)
    rates = {step: chosen.training.learning_rate_at(step - 1) for step in range(2, 13, 2)}
    assert scalars(run)["rate"] == pytest.approx(rates, rel=1e-6)


def test_a_finished_run_can_be_written_later(log_path, tmp_path, ultr):
    run = run_training(config(log_path), tmp_path / "run")
    assert not (run / "tensorboard").exists()
    for _ in range(2):
        done = ultr("train", log_path, "--out", run, "--resume", "--tensorboard")
        assert done.returncode == 0, done.stderr
        assert_shows(run)


def test_one_of_several_processes_writes(log_path, tmp_path):
    board = Board(tmp_path / "run", writes=False)
    run = run_training(config(log_path), tmp_path / "run", on_progress=board)
    board.finish()
    assert not (run / "tensorboard").exists()


def test_segments_have_separate_curves(log_path, tmp_path):
    run = run_training(config(log_path), tmp_path / "run")
    bias = {"positions": ["1@app", "2@app", "1@web"], "theta": [1.0, 0.5, 0.25], "theta_minus": [0.1], "warnings": []}
    (run / "bias.json").write_text(json.dumps(bias))
    Board(run).finish()
    shown = {tag: values for tag, values in scalars(run).items() if tag.startswith("bias/")}
    assert shown == {"bias/theta@app": {1: 1.0, 2: 0.5}, "bias/theta@web": {1: 0.25}}


def test_a_missing_package_is_an_error_before_training(log_path, tmp_path, ultr, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError):
        Board(tmp_path / "run")
    done = ultr("train", log_path, "--out", tmp_path / "run", "--tensorboard")
    assert done.returncode == 1
    assert "pip install 'ultr[tensorboard]'" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_replaces_another_is_written_when_it_is_complete(log_path, tmp_path):
    run = run_training(config(log_path, seed=1), tmp_path / "run")
    board = Board(run)
    run_training(config(log_path), run, overwrite=True, on_progress=board)
    assert not (run / "tensorboard").exists()
    board.finish()
    assert_shows(run)
