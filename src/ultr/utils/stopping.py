"""Early stopping: stop when evaluations no longer improve."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass
class EarlyStopping:
    """The best evaluation so far, the training step it was made at, and the number of evaluations since then."""

    best: float = -math.inf
    best_step: int = 0
    waited: int = 0

    def update(self, value: float, step: int) -> bool:
        """Record the value of an evaluation (larger is better); return whether it is the best so far."""
        if value > self.best:
            self.best, self.best_step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False

    def is_over(self, patience: int) -> bool:
        """Return whether the last `patience` evaluations brought no improvement; never, if `patience` is 0."""
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
        return EarlyStopping(best, int(content["best_step"]), int(content["waited"]))
