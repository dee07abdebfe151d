"""MLflow: the options, evaluations, files and model of a run, each once, in a store of files."""

from __future__ import annotations

import json
import sys

import numpy as np
import pandas as pd
import pytest

from ultr.errors import DataError, MissingExtraError, OptionError, OutputError
from ultr.rankers.model import load_model
from ultr.rankers.pyfunc import ScoredRows
from ultr.training.checkpoints import read_metrics
from ultr.training.config import RunConfig, TrainingOptions
from ultr.training.run import run_training
from ultr.training.tracking import Tracker, _flat, _key

METRIC = "feedback-ndcg@10"


@pytest.fixture(scope="module")
def frame():
    rng, rows = np.random.default_rng(0), 480
    return pd.DataFrame(
        {
            "request": np.arange(rows) // 6,
            "position": np.arange(rows) % 6 + 1,
            "click": rng.integers(0, 2, rows),
            "price": np.where(rng.random(rows) < 0.1, np.nan, rng.normal(size=rows)),
            "shop": rng.choice(["a", "b", "c"], rows),
        }
    )


@pytest.fixture(scope="module")
def run(frame, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    frame.to_parquet(folder / "log.parquet")
    return run_training(config(folder / "log.parquet"), folder / "run", on_warning=None)


def config(log) -> RunConfig:
    training = TrainingOptions(steps=12, bias_steps=5, batch=16, evaluate_every=4, device="cpu")
    columns = {"features": ["price"], "categorical": ["shop"]}
    options = {"ranker_options": {"hidden": [8]}, "columns": columns, "select": METRIC}
    return RunConfig(data=str(log), label="click", training=training, **options)


def test_a_model_scores_a_frame_by_the_names_of_columns(run, frame):
    model = load_model(run)
    scores = ScoredRows(model).predict(frame[["shop", "price"]].assign(other=1).iloc[::-1])
    from ultr.log import read_log

    log = read_log(frame, features=["price"], categorical=["shop"])
    np.testing.assert_allclose(scores[::-1], model.score(log), rtol=1e-6)
    with pytest.raises(DataError, match="no column 'price', which was a feature in training"):
        ScoredRows(model).predict(frame[["shop"]])


def test_names_and_options_fit_mlflow():
    assert _key("validation/ndcg@10") == "validation/ndcg_at_10"
    assert _key("bias/theta@phone: é") == "bias/theta_at_phone_ é"
    assert list(_flat({"a": {"b": 1, "c": [1, 2]}, "d": None, "e": {}})) == [
        *(("a.b", "1"), ("a.c", "[1, 2]"), ("d", "None"), ("e", "{}")),
    ]


def test_without_mlflow_the_install_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ultr\[mlflow\]'"):
        Tracker(tmp_path, str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(OptionError, match="MLFLOW_TRACKING_URI is not set"):
        Tracker(tmp_path, "env")


@pytest.mark.filterwarnings("ignore")  # of MLflow's own code
class TestStore:
    @pytest.fixture(scope="class")
    def client(self, tmp_path_factory):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
            mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
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

    def test_a_run_is_logged_once_although_it_was_resumed(self, client, frame, tmp_path):
        import mlflow

        frame.to_parquet(tmp_path / "log.parquet")
        options, run = config(tmp_path / "log.parquet"), tmp_path / "run"
        tracker = Tracker(run, client.tracking_uri)

        def until_killed(progress):
            tracker(progress)
            if progress.step == 8:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_training(options, run, on_progress=until_killed, checkpoint_seconds=0, on_warning=None)
        tracker.failed()
        assert self.shown(client, run)[0].info.status == "FAILED"
        for _ in range(2):  # the second time, the run is complete
            tracker = Tracker(run, client.tracking_uri)
            run_training(options, run, resume=True, on_progress=tracker, on_warning=None)
            tracker.finish()
        tracked, curves = self.shown(client, run)
        assert tracked.info.status == "FINISHED"
        assert tracked.info.run_name == "run"
        assert tracked.data.params["training.steps"] == "12"
        lines = read_metrics(run)
        assert curves["validation/feedback-ndcg_at_10"] == pytest.approx({line["step"]: line[METRIC] for line in lines})
        bias = json.loads((run / "bias.json").read_text())
        assert curves["bias/theta"] == pytest.approx(dict(zip(bias["positions"], bias["theta"], strict=True)))
        files = {file.path for file in client.list_artifacts(tracked.info.run_id)}
        assert files == {"config.json", "metrics.jsonl", "bias.json", "model"}
        local = client.download_artifacts(tracked.info.run_id, "model", str(tmp_path))
        scores = mlflow.pyfunc.load_model(local).predict(frame)
        np.testing.assert_allclose(scores, ScoredRows(load_model(run)).predict(frame))

    def test_the_command_logs_to_a_folder(self, client, ultr, frame, tmp_path):
        frame.to_parquet(tmp_path / "log.parquet")
        small = ("--steps", 4, "--bias-steps", 2, "--hidden", 4, "--evaluate-every", 2, "--features", "price")
        options = (*small, "--mlflow", client.tracking_uri)
        done = ultr("train", tmp_path / "log.parquet", "--out", tmp_path / "run", *options)
        assert done.returncode == 0, done.stderr
        assert self.shown(client, tmp_path / "run")[0].info.status == "FINISHED"

    def test_an_address_that_does_not_answer_is_an_error(self, client, run, monkeypatch):
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with pytest.raises(OutputError, match="MLflow cannot log the run"):
            Tracker(run, "http://127.0.0.1:9").finish()
