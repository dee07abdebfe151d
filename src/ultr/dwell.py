"""How long users stay: log-normal dwell times by grade, and tables by grade in general."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ultr.errors import DataError, OptionError
from ultr.files import existing_file


@dataclass(frozen=True)
class Dwell:
    """Log-normal dwell time by grade: exp(N(mu_y, sigma_y)) · k^(-decay); `decay=0` is free of position.

    The components are spread evenly over the grades; between two of them mu and sigma are interpolated.
    """

    mu: Sequence[float] = (1.2, 2.2, 3.0, 3.7, 4.3)
    sigma: Sequence[float] = (0.9, 0.8, 0.7, 0.6, 0.5)
    decay: float = 0.0

    def __post_init__(self) -> None:
        mu, sigma = checked_numbers("mu", self.mu), checked_numbers("sigma", self.sigma, low=0)
        if len(mu) != len(sigma):
            raise OptionError("dwell needs as many sigma as mu", got=f"{len(sigma)} and {len(mu)}")
        checked_numbers("decay", [self.decay], low=-10, high=10)

    def parameters(self, relevance: Tensor, max_grade: int) -> tuple[Tensor, Tensor]:
        """Mu and sigma of each item."""
        both = by_grade(tuple(zip(self.mu, self.sigma, strict=True)), relevance, max_grade)
        return both[..., 0], both[..., 1]

    @staticmethod
    def fit(seconds: np.ndarray, components: int = 5, *, decay: float = 0.0, seed: int = 0) -> Dwell:
        """Fit a Gaussian mixture to log dwell times; the component of the shortest becomes the lowest grade."""
        from sklearn.mixture import GaussianMixture

        seconds = np.asarray(seconds, dtype=np.float64).ravel()
        bad = ~(np.isfinite(seconds) & (seconds > 0))
        if bad.any():
            raise DataError("dwell times should be positive", got=f"{seconds[bad][0]} ({int(bad.sum())} such values)")
        if components < 1 or len(seconds) < 10 * components:
            raise DataError(f"{components} components need {10 * components} dwell times or more", got=len(seconds))
        mixture = GaussianMixture(components, random_state=seed, n_init=3).fit(np.log(seconds)[:, None])
        order = np.argsort(mixture.means_.ravel())
        sigma = np.sqrt(mixture.covariances_.ravel()[order])
        return Dwell(tuple(mixture.means_.ravel()[order].tolist()), tuple(sigma.tolist()), decay)


def read_dwell_times(path: str | Path) -> np.ndarray:
    """Dwell times in seconds, one per line of a text file; a heading line is passed over."""
    path = existing_file(path)
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    numbers = []
    for i, line in enumerate(lines):
        try:
            numbers.append(float(line))
        except ValueError as error:
            if i > 0:
                raise DataError(
                    "dwell times should be one number per line", where=path, got=f"'{line[:40]}'"
                ) from error
    return np.array(numbers)


def checked_numbers(
    name: str, values: Sequence[float], *, low: float = -math.inf, high: float = math.inf
) -> tuple[float, ...]:
    """Finite numbers within bounds, one at least."""
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise OptionError(f"'{name}' should be numbers", got=repr(values)) from error
    if not numbers or not all(math.isfinite(number) and low <= number <= high for number in numbers):
        bounds = f" from {low:g} to {high:g}" if math.isfinite(high) else f" from {low:g}" if math.isfinite(low) else ""
        raise OptionError(f"'{name}' should be finite numbers{bounds}", got=repr(values))
    return numbers


def by_grade(values: Sequence[Any], relevance: Tensor, max_grade: int) -> Tensor:
    """Values (or rows of values) spread evenly over the grades 0 to `max_grade`, interpolated in between."""
    table = device_table(tuple(values), relevance.dtype, relevance.device)
    last = len(table) - 1
    place = (relevance * (last / max_grade)).clamp(0, last)
    low = place.long()
    part = place - low
    part = part.view(*part.shape, *[1] * (table.ndim - 1))
    return table[low].lerp(table[(low + 1).clamp(max=last)], part.expand(*relevance.shape, *table.shape[1:]))


@lru_cache(maxsize=256)
def device_table(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table on its device, sent there once."""
    return torch.tensor(values, dtype=dtype, device=device)
