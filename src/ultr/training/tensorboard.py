"""Write the evaluations and the bias of a run for TensorBoard, into the folder `tensorboard` of the run."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ultr.errors import MissingExtraError
from ultr.rankers.boosters import is_trees
from ultr.training.checkpoints import read_metrics
from ultr.training.config import RunConfig
from ultr.training.loop import Progress
from ultr.training.replace import is_being_replaced
from ultr.utils.files import output_errors
from ultr.utils.jsonfiles import read_json

FOLDER = "tensorboard"
BY_POSITION = ("theta", "theta_minus", "zeta", "alpha", "rho", "t_plus", "t_minus")  # in bias.json


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
                self._add({"step": progress.step, "loss": progress.loss, **progress.metrics})
            self._writer.flush()

    def finish(self) -> None:
        """Write the bias of the run, if it has one, and all evaluations, if no evaluation was written before."""
        if not self._writes:
            return
        if self._writer is None:
            self._begin()
        path = self._run / "bias.json"
        for tag, position, value in _by_position(read_json(path)) if path.is_file() else ():
            self._scalar(tag, value, position)
        self._writer.close()

    def _begin(self) -> None:
        shutil.rmtree(self._run / FOLDER, ignore_errors=True)
        self._config = RunConfig.from_json(read_json(self._run / "config.json"), where=self._run)
        self._writer = self._new_writer(str(self._run / FOLDER))
        for line in read_metrics(self._run):
            self._add(line)

    def _add(self, line: Mapping[str, Any]) -> None:
        step, training = line["step"], self._config.training
        for name, value in line.items():
            if name != "step":
                self._scalar(name if name == "loss" else f"validation/{name}", value, step)
        self._scalar(
            "rate", training.lr if is_trees(self._config.ranker) else training.learning_rate_at(step - 1), step
        )

    def _scalar(self, tag: str, value: float | None, step: int) -> None:
        if value is not None and math.isfinite(value):  # trees with a library's own objective have no loss
            self._writer.add_scalar(tag, value, step)


def _by_position(bias: Mapping[str, Any]) -> Iterable[tuple[str, int, float]]:
    """Yield (tag, position, value) for all estimates by position in bias.json; the tag names the segment, if any."""
    columns = {name: bias[name] for name in BY_POSITION if name in bias}
    columns |= {f"tower of {name}": values for name, values in bias.get("towers", {}).items()}
    for name, values in columns.items():
        if len(values) != len(bias["positions"]):
            continue
        for slot, value in zip(bias["positions"], values, strict=True):
            position, separator, segment = str(slot).partition("@")
            yield f"bias/{name}{separator}{segment}", int(position), value
