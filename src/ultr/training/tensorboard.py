"""Write the evaluations and the bias of a run for TensorBoard, into the folder `tensorboard` of the run."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ultr.errors import MissingExtraError
from ultr.training.checkpoints import read_metrics
from ultr.training.config import RunConfig
from ultr.training.curves import Point, bias_points, evaluation_points
from ultr.training.loop import Progress
from ultr.training.replace import is_being_replaced
from ultr.utils.files import output_errors
from ultr.utils.jsonfiles import read_json

FOLDER = "tensorboard"


class Board:
    """A TensorBoard writer for a run: it writes each evaluation, and at the end the estimated bias.

    Pass a board to `run_training` as `on_progress`. When a run is resumed, the board deletes its old files and writes
    all evaluations again, so that each step occurs once. A run that replaces another one is written when it is
    complete. If several processes train one model, only one of them has `writes` set.
    """

    def __init__(self, run: Path, *, writes: bool = True) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("--tensorboard", package="tensorboard", extra="tensorboard") from error
        self._new_writer, self._run, self._writes = SummaryWriter, run, writes
        self._writer: Any = None

    def __call__(self, progress: Progress) -> None:
        if not self._writes or is_being_replaced(self._run):
            return
        with output_errors(self._run / FOLDER):
            if self._writer is None:
                self._begin()
            else:
                line = {"step": progress.step, "loss": progress.loss, **progress.metrics}
                self._add(evaluation_points(line, self._config))
            self._writer.flush()

    def finish(self) -> None:
        """Write the bias of the run, if it has one, and all evaluations, if no evaluation was written before."""
        if not self._writes:
            return
        if self._writer is None:
            self._begin()
        self._add(bias_points(self._run))
        self._writer.close()

    def failed(self) -> None:
        """Do nothing: TensorBoard does not know whether a run has failed."""

    def _begin(self) -> None:
        shutil.rmtree(self._run / FOLDER, ignore_errors=True)
        self._config = RunConfig.from_json(read_json(self._run / "config.json"), where=self._run)
        self._writer = self._new_writer(str(self._run / FOLDER))
        for line in read_metrics(self._run):
            self._add(evaluation_points(line, self._config))

    def _add(self, points: Iterable[Point]) -> None:
        for point in points:
            self._writer.add_scalar(point.tag, point.value, point.step)
