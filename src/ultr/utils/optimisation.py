"""Minimise a loss by L-BFGS, and stop training when evaluations no longer improve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# --- L-BFGS -----------------------------------------------------------------------------------------------------------


def minimise(parameters: Sequence[Tensor], loss: Callable[[], Tensor], *, iterations: int = 100) -> None:
    """Set parameters to values that minimise `loss()`, by scipy's L-BFGS in at most this many iterations.

    The optimizer of torch would first load the compiler of torch, which takes seconds.
    """
    from scipy.optimize import minimize

    def load(values: np.ndarray) -> None:
        start = 0
        with torch.no_grad():
            for each in parameters:
                part = values[start : start + each.numel()]
                each.copy_(torch.from_numpy(part).view_as(each))
                start += each.numel()

    def value_and_slope(values: np.ndarray) -> tuple[float, np.ndarray]:
        load(values)
        value = loss()
        slopes = torch.autograd.grad(value, parameters)
        return value.item(), torch.cat([slope.reshape(-1) for slope in slopes]).double().cpu().numpy()

    start = torch.cat([each.detach().reshape(-1) for each in parameters]).double().cpu().numpy()
    found = minimize(value_and_slope, start, jac=True, method="L-BFGS-B", options={"maxiter": iterations, "maxcor": 20})
    load(found.x)


# --- Early stopping ---------------------------------------------------------------------------------------------------


@dataclass
class EarlyStopping:
    """The best evaluation so far, the training step it was made at, and the number of evaluations without a gain.

    A gain is a value above the one at the last gain, by more than the share `least` of its size.
    """

    best: float = -math.inf
    best_step: int = 0
    waited: int = 0
    least: float = 0.0
    _at_gain: float = -math.inf

    def update(self, value: float, step: int) -> bool:
        """Record the value of an evaluation (larger is better); return whether it is the best so far."""
        margin = self.least * abs(self._at_gain) if math.isfinite(self._at_gain) else 0.0
        if value > self._at_gain + margin:
            self._at_gain, self.waited = value, 0
        else:
            self.waited += 1
        if value <= self.best:
            return False
        self.best, self.best_step = value, step
        return True

    def is_over(self, patience: int) -> bool:
        """Return whether the last `patience` evaluations brought no gain; never, if `patience` is 0."""
        return 0 < patience <= self.waited

    def to_json(self) -> dict[str, Any]:
        return {
            "best": self.best if math.isfinite(self.best) else None,
            "best_step": self.best_step,
            "waited": self.waited,
        }

    @staticmethod
    def from_json(content: dict[str, Any]) -> EarlyStopping:
        best = -math.inf if content["best"] is None else float(content["best"])
        return EarlyStopping(best, int(content["best_step"]), int(content["waited"]), _at_gain=best)
