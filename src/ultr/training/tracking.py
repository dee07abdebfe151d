"""Log a run to MLflow: its options, its evaluations, its files, and its model as `mlflow.pyfunc`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ultr._version import __version__
from ultr.errors import MissingExtraError, OptionError, OutputError
from ultr.rankers.boosters import is_trees
from ultr.training.checkpoints import read_metrics
from ultr.training.config import RunConfig
from ultr.training.curves import Point, bias_points, evaluation_points
from ultr.training.loop import Progress
from ultr.training.replace import is_being_replaced
from ultr.utils.jsonfiles import read_json, write_json

FILE = "mlflow.json"  # in a run directory: the run in MLflow
ENVIRONMENT = "env"  # the address is that of the environment variable MLFLOW_TRACKING_URI
FILES = ("config.json", "metrics.jsonl", "bias.json")  # the files of a run that are logged
MOST_PARAMS, MOST_METRICS, LONGEST = 100, 1000, 6000  # MLflow's limits of one call, and of the text of a parameter


class Tracker:
    """Logs a run to MLflow: each evaluation, and at the end options, files, bias and model.

    Pass a tracker to `run_training` as `on_progress`. A resumed run continues its run in MLflow, and no step is logged
    twice. A run that replaces another one is logged when it is complete. If several processes train one model, only
    one of them has `writes` set.
    """

    def __init__(self, run: Path, address: str, *, writes: bool = True) -> None:
        self._run, self._writes, self._id = run, writes, ""
        if address == ENVIRONMENT and not (address := os.environ.get("MLFLOW_TRACKING_URI", "")):
            hint = "set it, or pass the address: --mlflow http://HOST:5000"
            raise OptionError("the environment variable MLFLOW_TRACKING_URI is not set", got="--mlflow env", hint=hint)
        if "://" not in address or address.startswith("file:"):
            # MLflow asks for this consent before it writes to a folder.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            with _quiet():
                import mlflow.pyfunc
                from mlflow import MlflowClient
        except ImportError as error:
            raise MissingExtraError("--mlflow", package="mlflow-skinny", extra="mlflow") from error
        self._address, self._pyfunc = address, mlflow.pyfunc
        with _errors(address):
            self._client = MlflowClient(tracking_uri=address)

    def __call__(self, progress: Progress) -> None:
        if not self._writes or is_being_replaced(self._run):
            return
        with _errors(self._address):
            self._begin()
            self._log_evaluations()

    def finish(self) -> None:
        """Log what is missing of a complete run: evaluations, options, files, bias and model."""
        if not self._writes:
            return
        with _errors(self._address), TemporaryDirectory(prefix="ultr-") as folder:
            self._begin()
            self._log_evaluations()
            if not self._logged("bias"):
                self._log(bias_points(self._run))
            for path in (self._run / name for name in FILES):
                if path.is_file():
                    self._client.log_artifact(self._id, str(path))
            extra = "[trees]" if is_trees(self._config.ranker) else ""
            self._pyfunc.save_model(
                f"{folder}/model",
                loader_module="ultr.rankers.pyfunc",
                data_path=str(self._run / "model"),
                pip_requirements=[f"ultr{extra}=={__version__}", "pandas"],
            )
            self._client.log_artifacts(self._id, f"{folder}/model", "model")
            self._client.set_terminated(self._id, "FINISHED")

    def failed(self) -> None:
        """Mark the run as failed in MLflow."""
        if self._id:
            with _errors(self._address):
                self._client.set_terminated(self._id, "FAILED")

    def _begin(self) -> None:
        """Start a run in MLflow and log its options, or continue the one that the run directory names."""
        if self._id:
            return
        from mlflow.entities import Param

        self._config = RunConfig.from_json(read_json(self._run / "config.json"), where=self._run)
        saved = read_json(self._run / FILE) if (self._run / FILE).is_file() else {}
        if saved.get("address") == self._address:
            self._id = str(saved["run"])
            self._client.update_run(self._id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ultr")
            experiment = self._client.get_experiment_by_name(name)
            number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            self._id = self._client.create_run(number, run_name=self._run.name).info.run_id
            write_json(self._run / FILE, {"address": self._address, "run": self._id})
            params = [Param(_key(name), value) for name, value in _flat(self._config.to_json())]
            for first in range(0, len(params), MOST_PARAMS):
                self._client.log_batch(self._id, params=params[first : first + MOST_PARAMS])
        self._step = self._last_step()

    def _last_step(self) -> int:
        """Return the last step whose evaluation is in MLflow; -1 if there is none."""
        history = self._client.get_metric_history(self._id, "rate")
        return max((metric.step for metric in history), default=-1)

    def _logged(self, kind: str) -> bool:
        return any(name.startswith(f"{kind}/") for name in self._client.get_run(self._id).data.metrics)

    def _log_evaluations(self) -> None:
        lines = [line for line in read_metrics(self._run) if line["step"] > self._step]
        self._log(point for line in lines for point in evaluation_points(line, self._config))
        self._step = max([self._step, *(line["step"] for line in lines)])

    def _log(self, points: Iterable[Point]) -> None:
        import time

        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_key(point.tag), float(point.value), now, point.step) for point in points]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + MOST_METRICS])


def _key(name: str) -> str:
    """Return a name with the characters that MLflow allows; `ndcg@10` becomes `ndcg_at_10`."""
    text = name.replace("@", "_at_")
    return "".join(letter if letter.isalnum() or letter in "_-./ " else "_" for letter in text)[:250]


def _flat(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the entries of nested JSON as texts, such as (`training.lr`, `0.02`)."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", str(value)[:LONGEST]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings of MLflow's own code; users of ultr cannot change it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _errors(address: str) -> Iterator[None]:
    """Turn errors of MLflow into an OutputError."""
    from mlflow.exceptions import MlflowException

    try:
        with _quiet():
            yield
    except (MlflowException, OSError) as error:
        brief = " ".join(str(error).split())[:300]
        hint = "check the address; --resume --mlflow logs the rest of a run"
        raise OutputError(f"MLflow cannot log the run ({brief})", where=address, hint=hint) from error
