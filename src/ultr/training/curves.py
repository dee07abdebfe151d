"""The curves of a run that trackers show: its evaluations by step, and its bias by position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ultr.rankers.boosters import is_trees
from ultr.training.config import RunConfig
from ultr.utils.jsonfiles import read_json

BY_POSITION = ("theta", "theta_minus", "zeta", "alpha", "rho", "t_plus", "t_minus")  # in bias.json


class Point(NamedTuple):
    """A point of a curve; `step` is a step of training, or a position."""

    tag: str
    value: float
    step: int


def evaluation_points(line: Mapping[str, Any], config: RunConfig) -> Iterator[Point]:
    """Yield the metrics, the loss and the learning rate of an evaluation, a line of metrics.jsonl."""
    step, training = line["step"], config.training
    rate = training.lr if is_trees(config.ranker) else training.learning_rate_at(step - 1)
    for name, value in {**line, "rate": rate}.items():
        # Trees with a library's own objective have no loss.
        if name != "step" and value is not None and math.isfinite(value):
            yield Point(name if name in ("loss", "rate") else f"validation/{name}", value, step)


def bias_points(run: Path) -> Iterator[Point]:
    """Yield all estimates by position in bias.json, if the run has one; the tag names the segment, if any."""
    if not (run / "bias.json").is_file():
        return
    bias = read_json(run / "bias.json")
    columns = {name: bias[name] for name in BY_POSITION if name in bias}
    columns |= {f"tower of {name}": values for name, values in bias.get("towers", {}).items()}
    for name, values in columns.items():
        if len(values) != len(bias["positions"]):
            continue
        for slot, value in zip(bias["positions"], values, strict=True):
            position, separator, segment = str(slot).partition("@")
            if value is not None and math.isfinite(value):
                yield Point(f"bias/{name}{separator}{segment}", value, int(position))
