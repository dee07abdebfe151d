"""Early stopping: stop when evaluations no longer improve."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


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
