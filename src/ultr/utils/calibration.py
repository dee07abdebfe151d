"""A calibration: an increasing map from scores to expected values, which does not change their order.

The expected feedback on an item with the score s at the position k is factor_k · g(s). g is linear between knots. Files
and servers read it without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ultr.errors import OptionError
from ultr.utils.jsonfiles import check_format, content_errors, read_json, write_json

FORMAT = 1
FILE = "calibration.json"
MAX_KNOTS = 10_000  # of a file
LEAST = 1e-4  # the smallest value of a knot, relative to the largest: room for lower scores
SLOPE = 1e-6  # the least slope of g, relative to its largest value and to the distance of the outer knots
AGAIN = "train the run again, and export it again"


@dataclass(frozen=True, eq=False)
class Calibration:
    """The knots of g, and a factor for each position (`3`, or `3@phone` with segments); none without positions."""

    scores: np.ndarray  # [knots], increasing
    values: np.ndarray  # [knots], positive, not falling
    factors: Mapping[str, float]

    @classmethod
    def of(cls, scores: np.ndarray, values: np.ndarray, factors: Mapping[str, float], *, most: float = np.inf) -> Self:
        """Return a calibration with these knots; values are at most `most`, such as 1 for a probability."""
        top = float(values.max())
        return cls(scores, np.clip(values, LEAST * top, most), factors)

    def g(self, scores: np.ndarray) -> np.ndarray:
        """Return g at scores; scores that differ by more than 1e-9 of the span of the knots stay different."""
        s, (first, last) = np.asarray(scores, np.float64), self.scores[[0, -1]]
        span = float(last - first) or 1.0
        inside = (np.clip(s, first, last) - first) / span
        outside = np.log1p(np.maximum(s - last, 0) / span) - np.log1p(np.maximum(first - s, 0) / span)
        values: np.ndarray = np.interp(s, self.scores, self.values) + SLOPE * self.values[-1] * (inside + outside)
        return values

    def factor(self, position: str | None = None) -> float:
        """Return the factor of a position; without one, that of the first."""
        if position is None or (not self.factors and position == ""):
            return next(iter(self.factors.values()), 1.0)
        if (found := self.factors.get(position)) is None:
            if not self.factors:
                what = "the run was calibrated without positions, so a position cannot be passed"
                raise OptionError(what, got=position, hint="leave the position out")
            known = list(self.factors)
            hint = f"pass one of {', '.join(known[:10])}{', ...' if len(known) > 10 else ''}"
            raise OptionError("the position was not in the training log", got=repr(position)[:100], hint=hint)
        return found

    def expected(
        self, scores: np.ndarray, position: str | None = None, segments: Sequence[str | None] | None = None
    ) -> np.ndarray:
        """Return the expected feedback on items with these scores at a position; without one, at the first.

        `segments` has the segment of each row, if it is known; a position that has a factor for it uses that one.
        """
        factor = self.factor(position)
        if segments is None or not self.factors:
            return np.asarray(factor * self.g(scores))
        name = next(iter(self.factors)) if position is None else position
        factors = [self.factors.get(f"{name}@{segment}", factor) for segment in segments]
        return np.asarray(np.array(factors) * self.g(scores))

    def to_json(self) -> dict[str, Any]:
        return {"scores": self.scores.tolist(), "values": self.values.tolist(), "factors": dict(self.factors)}

    @classmethod
    def from_json(cls, content: Any, *, where: object) -> Self:
        """Return the calibration in the content of a file, which may be damaged or hostile."""
        with content_errors("the calibration cannot be read", where=where, hint=AGAIN):
            scores, values = (np.array(content[name], np.float64) for name in ("scores", "values"))
            factors = {str(name): float(value) for name, value in content["factors"].items()}
            if scores.shape != values.shape or scores.ndim != 1 or not 1 <= len(scores) <= MAX_KNOTS:
                raise ValueError("there must be as many scores as values")
            numbers = np.concatenate([scores, values, [*factors.values()]])
            if not np.isfinite(numbers).all() or (np.diff(scores) <= 0).any() or (np.diff(values) < 0).any():
                raise ValueError("scores and values must be finite and increase")
            if values[0] <= 0 or min(factors.values(), default=1.0) <= 0:
                raise ValueError("values and factors must be positive")
            return cls(scores, values, factors)

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, {"format": FORMAT, **self.to_json()})

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Return the calibration in the folder of a model; None if there is none, as in those of older versions."""
        if not (path := folder / FILE).is_file():
            return None
        content = read_json(path)
        check_format(content, FORMAT, what="the calibration", where=path, hint=AGAIN)
        return cls.from_json(content, where=path)


def of_model(calibration: Calibration | None, where: object) -> Calibration:
    """Return a calibration; raise OptionError if a model has none."""
    if calibration is None:
        what = "the model has no calibration: it is from an older version, or its validation requests had no feedback"
        raise OptionError(what, where=where, hint=AGAIN)
    return calibration
