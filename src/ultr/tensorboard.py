"""A run's evaluations and bias for TensorBoard, in run/tensorboard."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ultr.checkpoint import read_json, read_metrics
from ultr.errors import MissingExtraError
from ultr.preparing import RunConfig
from ultr.rankers.boosters import is_trees
from ultr.replacing import is_being_replaced
from ultr.training import Progress

FOLDER = "tensorboard"
BY_POSITION = ("theta", "theta_minus", "zeta", "alpha", "rho", "t_plus", "t_minus")  # of bias.json


class Board:
    """Writes each evaluation of a run as it comes, and its bias at the end; `run_training` calls it as `on_progress`.

    It begins with all evaluations that the run has by then, in place of what was there: a run that was stopped and goes
    on has each step once. One that replaces another is shown when it has. Of several processes, one `writes`.
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
        if self._writer is None:
            self._begin()
        else:
            self._add({"step": progress.step, "loss": progress.loss, **progress.figures})
        self._writer.flush()

    def finish(self) -> None:
        """Write the bias that was learned, if it was, and all evaluations if none was heard of: of a finished run."""
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
        self._scalar("rate", training.lr if is_trees(self._config.ranker) else training.rate_at(step - 1), step)

    def _scalar(self, tag: str, value: float | None, step: int) -> None:
        if value is not None and math.isfinite(value):  # trees of a library's own objective tell no loss
            self._writer.add_scalar(tag, value, step)


def _by_position(bias: Mapping[str, Any]) -> Iterable[tuple[str, int, float]]:
    """What bias.json has for each position: a tag, with the segment if there is one, the position, and the value."""
    columns = {name: bias[name] for name in BY_POSITION if name in bias}
    columns |= {f"tower of {name}": values for name, values in bias.get("towers", {}).items()}
    for name, values in columns.items():
        if len(values) != len(bias["positions"]):
            continue
        for slot, value in zip(bias["positions"], values, strict=True):
            position, at, segment = str(slot).partition("@")
            yield f"bias/{name}{at}{segment}", int(position), value
