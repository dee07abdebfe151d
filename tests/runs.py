"""Small logs, quick configurations and processes that end, for tests of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from conftest import make_shown_log
from ultr.datasets.users import User, simulate_log
from ultr.log import Log, read_log, write_log
from ultr.rankers.model import load_model
from ultr.training.config import Config, make_config
from ultr.training.loop import Listeners, Progress
from ultr.utils.files import read_contents

KNOWN = {str(position): 1 / position for position in range(1, 20)}  # examination; its estimate takes a second
FEEDBACK = "feedback-ndcg@10"  # a metric that needs no model of off-policy metrics
QUICK: dict[str, Any] = {
    "ranker": "mlp",
    "hidden": (8,),
    "device": "cpu",
    "network.steps": 12,
    "network.bias_steps": 10,
    "network.batch": 16,
    "network.evaluate_every": 4,
    "trees.rounds": 8,
    "trees.evaluate_every": 4,
    "trees.patience": 0,
}
# The quickest run of a network: no examination, bias model or off-policy metrics.
PLAIN = {"method": "pointwise", "select": FEEDBACK}


class Killed(BaseException):
    """Stands for the end of a process, which no code handles."""


def kill(*_: object, **__: object) -> None:
    raise Killed


def killed_at(step: int, ranker: str | None = None) -> Listeners:
    """Return listeners that save each checkpoint, and end the process at an evaluation of a ranker."""

    def on_progress(progress: Progress) -> None:
        if progress.step == step and ranker in (None, progress.ranker):
            raise Killed

    return Listeners(on_progress=on_progress, checkpoint_seconds=0)


def steps_to(steps: list[tuple[str, int]]) -> Listeners:
    """Return listeners that add the ranker and the step of each evaluation to a list."""
    return Listeners(on_progress=lambda progress: steps.append((progress.ranker, progress.step)))


def quick(source: object, **options: Any) -> Config:
    """Return the configuration of a run that takes about a second; `options` replace those of `QUICK`."""
    return make_config(str(source), **QUICK).with_options(**options)


def feedback_log(requests: int = 80, **options: Any) -> Log:
    """Return the clicks and dwell times of simulated users, without true labels."""
    log, _ = simulate_log(make_shown_log(requests=requests, **options), User())
    return replace(log, relevance=None)


def write_feedback(folder: Path, requests: int = 80) -> Path:
    write_log(feedback_log(requests), folder / "log.parquet")
    return folder / "log.parquet"


def files_of(run: Path) -> set[str]:
    return {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}


def contents(run: Path) -> dict[str, bytes]:
    """Return the contents of all files of a run, by path."""
    return read_contents(run, without=(".lock",))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "weights.safetensors")


def scores(run: Path, log: object) -> np.ndarray:
    return load_model(run).score(log if isinstance(log, Log) else read_log(log))
