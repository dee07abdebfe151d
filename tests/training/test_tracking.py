"""TensorBoard and MLflow: each evaluation of a run once, by ranker, and its bias by position."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ultr.errors import DataError, MissingExtraError, OptionError, OutputError
from ultr.log import read_log
from ultr.rankers.model import ScoredRows, load_model
from ultr.training.config import Config, make_config
from ultr.training.folder import read_config, read_metrics
from ultr.training.loop import Listeners, Progress
from ultr.training.run import run_training
from ultr.training.tracking import LIMITS, Board, Tolerant, Tracker, _key

METRIC = "feedback-ndcg@10"
FAST = ("--set", "hidden=8", "--steps", 12, "--set", "bias_steps=5", "--set", "batch=16", "--set", "network.lr=0.02")
FAST += ("--set", "evaluate_every=4", "--set", f"select={METRIC}", "--device", "cpu", "--label", "click")
TREES = ("--set", "trees.rounds=12", "--set", "trees.evaluate_every=4")


@pytest.fixture(scope="module")
def frame():
    rng, rows = np.random.default_rng(0), 480
    return pd.DataFrame(
        {
            "request": np.arange(rows) // 6,
            "position": np.arange(rows) % 6 + 1,
            "click": rng.integers(0, 2, rows),
            "feature_price": np.where(rng.random(rows) < 0.1, np.nan, rng.normal(size=rows)),
            "feature_age": rng.normal(size=rows),
        }
    )


@pytest.fixture(scope="module")
def log_path(frame, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tracked") / "log.parquet"
    frame.to_parquet(path)
    return path


@pytest.fixture(scope="module")
def run(log_path):
    return run_training(config(log_path), log_path.with_name("run"))


def config(log_path: Path, **options) -> Config:
    training = {"steps": 12, "batch": 16, "evaluate_every": 2, "bias_steps": 5, "select": METRIC, "device": "cpu"}
    given = {"method": "dla", "label": "click", "ranker": "mlp", "hidden": (8,), **training, **options}
    return make_config(str(log_path), **given)


class StoppedError(Exception):
    pass


def stopping(at: int, *then):
    def on_progress(progress: Progress) -> None:
        for each in then:
            each(progress)
        if progress.step == at:
            raise StoppedError

    return on_progress


class TestTensorBoard:
    def scalars(self, run: Path) -> dict[str, dict[int, float]]:
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

    def assert_shows(self, run: Path) -> None:
        """Check that TensorBoard has the values of metrics.jsonl and bias.json, and the learning rates."""
        shown, lines, config = self.scalars(run), read_metrics(run), read_config(run)
        for kind in dict.fromkeys(line["ranker"] for line in lines):
            of_kind = [line for line in lines if line["ranker"] == kind]
            metric = {line["step"]: line[METRIC] for line in of_kind}
            assert shown[f"{kind}/validation/{METRIC}"] == pytest.approx(metric, abs=1e-6)
            losses = {line["step"]: line["loss"] for line in of_kind if line["loss"] is not None}
            assert shown.get(f"{kind}/loss", {}) == pytest.approx(losses, rel=1e-6)
            loop = config.loop(kind)
            rates = {line["step"]: loop.learning_rate_at(max(0, line["step"] - 1)) for line in of_kind}
            assert shown[f"{kind}/rate"] == pytest.approx(rates, rel=1e-6)
        if (run / "bias.json").is_file():
            bias = json.loads((run / "bias.json").read_text())
            theta = dict(zip(bias["positions"], bias["theta"], strict=True))
            assert shown["bias/theta"] == pytest.approx(theta, rel=1e-6)

    @pytest.mark.parametrize(
        ("ranker", "method"),
        [("auto", "pairwise-em"), ("mlp", "pal-click"), ("lightgbm", "lambdarank"), ("xgboost", "pointwise")],
    )
    def test_each_evaluation_of_each_ranker_and_the_bias_are_shown(self, ranker, method, log_path, tmp_path, ultr):
        run = tmp_path / "run"
        options = ("--method", method, "--ranker", ranker, *(TREES if ranker == "auto" else ()))
        done = ultr("train", log_path, "--out", run, *FAST, *options, "--tensorboard")
        assert done.returncode == 0, done.stderr
        shown = self.scalars(run)
        if method == "pal-click":
            assert set(shown) == {"mlp/loss", f"mlp/validation/{METRIC}", "mlp/rate", "bias/tower of click"}
            return
        self.assert_shows(run)
        kinds = ["lightgbm", "mlp"] if ranker == "auto" else [ranker]
        assert [tag.split("/")[0] for tag in shown if tag.endswith("/rate")] == kinds

    def test_a_resumed_run_has_each_step_once_and_the_learning_rates_of_its_schedule(self, log_path, tmp_path):
        run, chosen = tmp_path / "run", config(log_path, schedule="linear", warmup=3)
        with pytest.raises(StoppedError):  # evaluations after the last checkpoint are repeated
            run_training(chosen, run, listeners=Listeners(on_progress=stopping(4), checkpoint_seconds=0.0))
        listeners = Listeners(on_progress=stopping(8, Board(run)), checkpoint_seconds=1e9)
        with pytest.raises(StoppedError):
            run_training(chosen, run, resume=True, listeners=listeners)
        assert set(self.scalars(tmp_path / "run.partial")["mlp/loss"]) == {2, 4, 6, 8}
        board = Board(run)
        run_training(chosen, run, resume=True, listeners=Listeners(on_progress=board))
        board.finish()
        assert [line["step"] for line in read_metrics(run)] == [2, 4, 6, 8, 10, 12]
        self.assert_shows(run)

    def test_a_finished_run_can_be_written_later(self, log_path, tmp_path, ultr):
        run = run_training(config(log_path), tmp_path / "run")
        assert not (run / "tensorboard").exists()
        for _ in range(2):
            done = ultr("train", log_path, "--out", run, "--resume", "--tensorboard")
            assert done.returncode == 0, done.stderr
            self.assert_shows(run)

    def test_one_of_several_processes_writes(self, log_path, tmp_path):
        board = Tolerant(Board(tmp_path / "run"), pytest.fail, writes=False)
        run = run_training(config(log_path), tmp_path / "run", listeners=Listeners(on_progress=board))
        board.finish()
        assert not (run / "tensorboard").exists()

    def test_segments_have_separate_curves(self, log_path, tmp_path):
        run = run_training(config(log_path), tmp_path / "run")
        bias = {"positions": ["1@app", "2@app", "1@web"], "theta": [1.0, 0.5, 0.25], "theta_minus": [0.1]}
        (run / "bias.json").write_text(json.dumps({**bias, "warnings": []}))
        Board(run).finish()
        shown = {tag: values for tag, values in self.scalars(run).items() if tag.startswith("bias/")}
        assert shown == {"bias/theta@app": {1: 1.0, 2: 0.5}, "bias/theta@web": {1: 0.25}}

    def test_a_missing_package_is_an_error_before_training(self, log_path, tmp_path, ultr, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(MissingExtraError):
            Board(tmp_path / "run")
        done = ultr("train", log_path, "--out", tmp_path / "run", "--tensorboard")
        assert done.returncode == 1
        assert "pip install 'ultr[tensorboard]'" in done.stderr
        assert not any(tmp_path.iterdir())

    def test_a_run_that_replaces_another_is_written_while_it_trains(self, log_path, tmp_path):
        run = run_training(config(log_path, seed=1), tmp_path / "run")
        board = Board(run)
        steps = []

        def on_progress(progress):
            board(progress)
            steps.append(set(self.scalars(tmp_path / "run.partial")["mlp/loss"]))

        run_training(config(log_path), run, overwrite=True, listeners=Listeners(on_progress=on_progress))
        assert steps[:2] == [{2}, {2, 4}]
        board.finish()
        self.assert_shows(run)


class TestMLflow:
    pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # warnings of MLflow's own code  # noqa: RUF012

    @pytest.fixture(scope="class")
    def client(self, tmp_path_factory):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
            mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed; make test-long installs it")
            yield mlflow.MlflowClient(tracking_uri=str(tmp_path_factory.mktemp("store")))

    def shown(self, client, run):
        """Return the run in MLflow, and its curves; each step of a curve must occur once."""
        number = json.loads((run / "mlflow.json").read_text())["run"]
        tracked, curves = client.get_run(number), {}
        for name in tracked.data.metrics:
            points = [(metric.step, metric.value) for metric in client.get_metric_history(number, name)]
            assert len(points) == len(dict(points)), name
            curves[name] = dict(points)
        return tracked, curves

    def test_a_run_is_logged_once_although_it_was_resumed(self, client, frame, log_path, tmp_path):
        import mlflow

        options, run = config(log_path, steps=12, evaluate_every=4), tmp_path / "run"
        tracker = Tracker(run, client.tracking_uri)
        listeners = Listeners(on_progress=stopping(8, tracker), checkpoint_seconds=0)
        with pytest.raises(StoppedError):
            run_training(options, run, listeners=listeners)
        tracker.failed()
        assert self.shown(client, tmp_path / "run.partial")[0].info.status == "FAILED"
        for _ in range(2):  # the second time, the run is complete
            tracker = Tracker(run, client.tracking_uri)
            run_training(options, run, resume=True, listeners=Listeners(on_progress=tracker))
            tracker.finish()
        tracked, curves = self.shown(client, run)
        assert tracked.info.status == "FINISHED"
        assert tracked.info.run_name == "run"
        assert tracked.data.params["network.steps"] == "12"
        values = {line["step"]: line[METRIC] for line in read_metrics(run)}
        assert curves["mlp/validation/feedback-ndcg_at_10"] == pytest.approx(values)
        bias = json.loads((run / "bias.json").read_text())
        assert curves["bias/theta"] == pytest.approx(dict(zip(bias["positions"], bias["theta"], strict=True)))
        files = {file.path for file in client.list_artifacts(tracked.info.run_id)}
        assert files == {"config.json", "decisions.json", "metrics.jsonl", "bias.json", "model"}
        local = client.download_artifacts(tracked.info.run_id, "model", str(tmp_path))
        scores = mlflow.pyfunc.load_model(local).predict(frame)
        np.testing.assert_allclose(scores, ScoredRows(load_model(run)).predict(frame))

    def test_the_command_logs_both_rankers_to_a_folder(self, client, ultr, log_path, tmp_path):
        done = ultr("train", log_path, "--out", tmp_path / "run", *FAST, *TREES, "--mlflow", client.tracking_uri)
        assert done.returncode == 0, done.stderr
        tracked, curves = self.shown(client, tmp_path / "run")
        assert tracked.info.status == "FINISHED"
        assert {"mlp/rate", "lightgbm/rate"} <= curves.keys()

    def test_an_address_that_does_not_answer_is_an_error(self, client, run, monkeypatch):
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with pytest.raises(OutputError, match="MLflow cannot log the run"):
            Tracker(run, "http://127.0.0.1:9").finish()
        with pytest.raises(OptionError, match="MLflow cannot use the address"):
            Tracker(run, "gopher://anna:word@host")

    @pytest.mark.parametrize("replies", [False, True], ids=["silent", "refused"])
    def test_an_outage_delays_a_run_by_seconds_and_costs_no_model(
        self, replies, client, ultr, log_path, tmp_path, monkeypatch
    ):
        for name in LIMITS:
            monkeypatch.delenv(name, raising=False)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]  # the system accepts connections, and nothing reads from them
            if replies:
                server.close()
            start = time.monotonic()
            address = f"http://anna:pass:w@rd@127.0.0.1:{port}"
            done = ultr("train", log_path, "--out", tmp_path / "run", *FAST, "--ranker", "mlp", "--mlflow", address)
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - start < 60
        assert load_model(tmp_path / "run").ranker is not None
        (warning,) = [line for line in done.stderr.splitlines() if "MLflow" in line]
        assert warning.startswith(f"warning: http://***@127.0.0.1:{port}: MLflow cannot log the run (")
        assert "w@rd" not in done.stderr
        assert "anna" not in done.stderr

    def test_a_run_is_logged_although_the_server_was_away_for_some_time(self, client, log_path, tmp_path):
        run, tracker, warnings = tmp_path / "run", Tracker(tmp_path / "run", client.tracking_uri), []
        tolerant, there = Tolerant(tracker, warnings.append), tracker._client

        def away_at_the_second_evaluation(progress):
            tracker._client = None if progress.step == 4 else there
            tolerant(progress)

        run_training(config(log_path), run, listeners=Listeners(on_progress=away_at_the_second_evaluation))
        tolerant.finish()
        tracked, curves = self.shown(client, run)
        assert tracked.info.status == "FINISHED"
        assert curves["mlp/validation/feedback-ndcg_at_10"].keys() == {line["step"] for line in read_metrics(run)}
        assert len(warnings) == 1

    def test_files_and_runs_have_no_password(self, client, log_path, tmp_path, monkeypatch):
        secret = f"{client.tracking_uri}?token=word"
        run = run_training(config(log_path), tmp_path / "run")
        tracker = Tracker(run, secret)
        tracker._client = client
        tracker.finish()
        assert json.loads((run / "mlflow.json").read_text())["address"] == secret.replace("word", "***")
        again = Tracker(run, secret)
        again._client = client
        again.finish()
        assert again._id == tracker._id


def test_without_mlflow_the_install_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ultr\[mlflow\]'"):
        Tracker(tmp_path, str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(OptionError, match="MLFLOW_TRACKING_URI is not set"):
        Tracker(tmp_path, "env")

    def test_names_fit_mlflow(self):
        assert _key("mlp/validation/ndcg@10") == "mlp/validation/ndcg_at_10"
        assert _key("bias/theta@phone: é") == "bias/theta_at_phone_ é"


def test_a_model_scores_a_frame_by_the_names_of_columns(run, frame):
    model = load_model(run)
    columns = ["feature_age", "feature_price"]
    scores = ScoredRows(model).predict(frame[columns].assign(other=1).iloc[::-1])
    np.testing.assert_allclose(scores[::-1], model.score(read_log(frame)), rtol=1e-6)
    with pytest.raises(DataError, match="no column 'feature_price', which was a feature in training"):
        ScoredRows(model).predict(frame[["feature_age"]])
