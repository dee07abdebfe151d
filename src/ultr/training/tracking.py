"""Follow a run while it trains, in TensorBoard and in MLflow. Neither changes which model is trained, nor stops it.

Both show the same curves: the evaluations of each ranker by step, and the bias of the run by position.
"""

from __future__ import annotations

import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ultr._version import __version__
from ultr.bias.propensities import BIAS_FILE
from ultr.errors import MissingExtraError, OptionError, OutputError, UltrError, redact
from ultr.log.table import SLOT, position_id, rows_and_columns
from ultr.training.config import Config, flat
from ultr.training.data import DECISIONS, Decisions
from ultr.training.folder import CONFIG, METRICS, MODEL, current_folder, read_config, read_metrics
from ultr.training.loop import Progress
from ultr.utils.files import output_errors
from ultr.utils.jsonfiles import read_json, write_json

BOARD = "tensorboard"  # folder of a run
FILE = "mlflow.json"  # file of a run that names its run in MLflow
ENVIRONMENT = "env"  # the address is that of the environment variable MLFLOW_TRACKING_URI
FILES = (CONFIG, DECISIONS, METRICS, BIAS_FILE)  # the files of a run that MLflow gets
MOST_PARAMS, MOST_METRICS, LONGEST = 100, 1000, 6000  # MLflow's limits of one call, and of the text of a parameter
BY_POSITION = ("theta", "theta_minus", "zeta", "alpha", "rho", "t_plus", "t_minus")  # in bias.json


# MLflow's limits on a request, unless the user has set them: by default, an outage would delay a run by minutes.
LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class Tolerant:
    """A tracker whose failures are warnings, so that an outage never costs a run.

    After a failure, the tracker is used again only when the run is complete, to log the rest. So an outage delays a run
    twice at most. If several processes train one model, only one of them `writes`.
    """

    def __init__(self, tracker: Board | Tracker, warn: Callable[[str], None], *, writes: bool = True) -> None:
        self._tracker, self._warn, self._writes = tracker, warn, writes
        self._has_failed = False

    def __call__(self, progress: Progress) -> None:
        if not self._has_failed:
            self._try(self._tracker, progress)

    def finish(self) -> None:
        self._try(self._tracker.finish)

    def failed(self) -> None:
        if not self._has_failed:
            self._try(self._tracker.failed)

    def _try(self, action: Callable[..., None], *arguments: Any) -> None:
        if not self._writes:
            return
        try:
            action(*arguments)
        except UltrError as error:
            if not self._has_failed:
                self._warn(str(error))
            self._has_failed = True


# --- Curves -----------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A point of a curve; `step` is a step of training, or a position."""

    tag: str
    value: float
    step: int


def evaluation_points(line: Mapping[str, Any], config: Config) -> Iterator[Point]:
    """Yield the metrics, the loss and the learning rate of an evaluation, a line of metrics.jsonl."""
    kind, step = line["ranker"], line["step"]
    rate = config.loop(kind).learning_rate_at(max(0, step - 1))
    for name, value in {**line, "rate": rate}.items():
        # Trees with a library's own objective have no loss.
        if name not in ("ranker", "step") and value is not None and math.isfinite(value):
            yield Point(f"{kind}/{name}" if name in ("loss", "rate") else f"{kind}/validation/{name}", value, step)


def bias_points(run: Path) -> Iterator[Point]:
    """Yield all estimates by position in bias.json, if the run has one; the tag names the segment, if any."""
    if not (run / BIAS_FILE).is_file():
        return
    bias = read_json(run / BIAS_FILE)
    columns = {name: bias[name] for name in BY_POSITION if name in bias}
    columns |= {f"tower of {name}": values for name, values in bias.get("towers", {}).items()}
    for name, values in columns.items():
        if len(values) != len(bias["positions"]):
            continue
        for slot, value in zip(bias["positions"], values, strict=True):
            position, separator, segment = str(slot).partition("@")
            row, step = "", position_id(position)
            if SLOT.fullmatch(position):  # a curve over columns for each row
                row, step = f" row {rows_and_columns(step)[0]}", rows_and_columns(step)[1]
            if value is not None and math.isfinite(value):
                yield Point(f"bias/{name}{row}{separator}{segment}", value, step)


# --- TensorBoard ------------------------------------------------------------------------------------------------------


class Board:
    """A TensorBoard writer for a run: it writes each evaluation, and at the end the estimated bias.

    Pass a board to `Listeners` as `on_progress`. When a run is resumed, the board deletes its old files and writes all
    evaluations again, so that each step occurs once.
    """

    def __init__(self, run: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("--tensorboard", package="tensorboard", extra="tensorboard") from error
        self._new_writer, self._run = SummaryWriter, run
        self._writer: Any = None

    def __call__(self, progress: Progress) -> None:
        with output_errors(self._run / BOARD):
            if self._writer is None:
                self._begin()
            else:
                line = {"ranker": progress.ranker, "step": progress.step, "loss": progress.loss, **progress.metrics}
                self._add(evaluation_points(line, self._config))
            self._writer.flush()

    def finish(self) -> None:
        """Write the bias of the run, if it has one, and all evaluations, if no evaluation was written before."""
        if self._writer is None:
            self._begin()
        self._writer.close()
        self._open()  # the folder of the run has its final name now
        self._add(bias_points(self._run))
        self._writer.close()

    def failed(self) -> None:
        """Do nothing: TensorBoard does not know whether a run has failed."""

    def _begin(self) -> None:
        run = current_folder(self._run)
        shutil.rmtree(run / BOARD, ignore_errors=True)
        self._config = read_config(run)
        self._open()
        for line in read_metrics(run):
            self._add(evaluation_points(line, self._config))

    def _open(self) -> None:
        self._writer = self._new_writer(str(current_folder(self._run) / BOARD))

    def _add(self, points: Iterable[Point]) -> None:
        for point in points:
            self._writer.add_scalar(point.tag, point.value, point.step)


# --- MLflow -----------------------------------------------------------------------------------------------------------


class Tracker:
    """Logs a run to MLflow: each evaluation, and at the end options, files, bias and model.

    Pass a tracker to `Listeners` as `on_progress`. A resumed run continues its run in MLflow, and no step is logged
    twice.
    """

    def __init__(self, run: Path, address: str) -> None:
        self._run, self._id = run, ""
        if address == ENVIRONMENT and not (address := os.environ.get("MLFLOW_TRACKING_URI", "")):
            hint = "set it, or pass the address: --mlflow http://HOST:5000"
            raise OptionError("the environment variable MLFLOW_TRACKING_URI is not set", got="--mlflow env", hint=hint)
        for name, value in LIMITS.items():
            os.environ.setdefault(name, value)
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
        try:
            self._client = MlflowClient(tracking_uri=address)
        except Exception as error:  # those of MLflow and of its stores
            hint = "pass a URL such as http://HOST:5000, or a folder"
            raise OptionError(f"MLflow cannot use the address ({_brief(error)})", got=address, hint=hint) from error

    def __call__(self, progress: Progress) -> None:
        with _errors(self._address):
            self._begin()
            self._log_evaluations()

    def finish(self) -> None:
        """Log what is missing of a complete run: evaluations, options, files, bias and model."""
        with _errors(self._address), TemporaryDirectory(prefix="ultr-") as folder:
            self._begin()
            self._log_evaluations()
            if not any(name.startswith("bias/") for name in self._client.get_run(self._id).data.metrics):
                self._log(bias_points(self._run))
            for path in (self._run / name for name in FILES):
                if path.is_file():
                    self._client.log_artifact(self._id, str(path))
            extra = "trees" if "xgboost" in Decisions.load(self._run).rankers else "train"
            self._pyfunc.save_model(
                f"{folder}/model",
                loader_module="ultr.rankers.model",
                data_path=str(self._run / MODEL),
                pip_requirements=[f"ultr[{extra}]=={__version__}", "pandas"],
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

        run = current_folder(self._run)
        self._config, self._last = read_config(run), dict[str, int]()
        saved, address = read_json(run / FILE) if (run / FILE).is_file() else {}, redact(self._address)
        if saved.get("address") == address:
            self._id = str(saved["run"])
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ultr")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        created = self._client.create_run(number, run_name=self._run.name).info.run_id
        params = [Param(_key(path), redact(str(value))[:LONGEST]) for path, value in flat(self._config.to_json())]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(created, params=params[first : first + MOST_PARAMS])
        write_json(run / FILE, {"address": address, "run": created})
        self._id = created

    def _log_evaluations(self) -> None:
        lines = [line for line in read_metrics(current_folder(self._run)) if line["step"] > self._last_step(line)]
        self._log(point for line in lines for point in evaluation_points(line, self._config))
        self._last |= {line["ranker"]: line["step"] for line in lines}

    def _last_step(self, line: Mapping[str, Any]) -> int:
        """Return the last step whose evaluation is in MLflow, of the ranker of this line; -1 if there is none."""
        kind = line["ranker"]
        if kind not in self._last:
            history = self._client.get_metric_history(self._id, f"{kind}/rate")
            self._last[kind] = max((metric.step for metric in history), default=-1)
        return self._last[kind]

    def _log(self, points: Iterable[Point]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_key(point.tag), float(point.value), now, point.step) for point in points]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + MOST_METRICS])


def _key(name: str) -> str:
    """Return a name with the characters that MLflow allows; `ndcg@10` becomes `ndcg_at_10`."""
    text = name.replace("@", "_at_")
    return "".join(letter if letter.isalnum() or letter in "_-./ " else "_" for letter in text)[:250]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings of MLflow's own code; users of ultr cannot change it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


@contextmanager
def _errors(address: str) -> Iterator[None]:
    """Turn all errors of MLflow into an OutputError."""
    try:
        with _quiet():
            yield
    except Exception as error:
        hint = "check the address; training continues without MLflow, and --resume --mlflow logs what is missing"
        raise OutputError(f"MLflow cannot log the run ({_brief(error)})", where=address, hint=hint) from error
