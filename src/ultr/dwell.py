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

from ultr.arguments import Seed, check_fields, checked
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
        check_fields(self)
        mu, sigma = (
            checked_numbers("mu", self.mu, low=-50, high=50),
            checked_numbers("sigma", self.sigma, low=0, high=5),
        )
        if len(mu) != len(sigma):
            raise OptionError("dwell needs as many sigma as mu", got=f"{len(sigma)} and {len(mu)}")
        checked_numbers("decay", [self.decay], low=-10, high=10)

    def parameters(self, relevance: Tensor, max_grade: int) -> tuple[Tensor, Tensor]:
        """Mu and sigma of each item."""
        both = by_grade(tuple(zip(self.mu, self.sigma, strict=True)), relevance, max_grade)
        return both[..., 0], both[..., 1]

    @staticmethod
    @checked
    def fit(seconds: np.ndarray, components: int = 5, *, decay: float = 0.0, seed: Seed = 0) -> Dwell:
        """Fit a Gaussian mixture to log dwell times; the component of the shortest becomes the lowest grade."""
        from sklearn.mixture import GaussianMixture

        seconds = np.asarray(seconds, dtype=np.float64).ravel()
        bad = ~(np.isfinite(seconds) & (seconds > 0))
        if bad.any():
            got = f"{seconds[bad][0]} ({int(bad.sum())} such values)"
            raise DataError("dwell times should be positive", got=got, mend="drop those from the --dwell-file")
        if components < 1 or len(seconds) < 10 * components:
            what, mend = f"{components} components need {10 * components} dwell times or more", "bring more of them"
            raise DataError(what, got=len(seconds), mend=f"{mend} in the --dwell-file")
        if (values := len(np.unique(seconds))) < 2 * components:
            mend = "give dwell times as they were measured in the --dwell-file"
            raise DataError(f"{components} components need {2 * components} different ones", got=values, mend=mend)
        mixture = GaussianMixture(components, random_state=seed % 2**32, n_init=3).fit(np.log(seconds)[:, None])
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
                what, mend = "dwell times should be one number per line", "mend or drop the line"
                raise DataError(what, where=path, got=f"'{line[:40]}'", mend=mend) from error
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


def check_grades(relevance: Tensor, max_grade: int) -> None:
    if relevance.numel() and not bool(((relevance >= 0) & (relevance <= max_grade)).all()):
        raise DataError(
            f"grades should be 0 to {max_grade}",
            got=f"{float(relevance.min())} to {float(relevance.max())}",
            mend="give the user the data's max_grade",
        )


def checked_lists(relevance: Tensor, positions: Tensor, where: Tensor | None) -> Tensor:
    """Grades in single or double precision, if what else is said of the items goes with them."""
    given = {"relevance": relevance, "positions": positions, "where": where}
    shapes = [list(tensor.shape) for tensor in given.values() if tensor is not None]
    dtypes = [tensor.dtype for tensor in given.values() if tensor is not None]
    if not relevance.ndim or any(shape != shapes[0] for shape in shapes) or relevance.is_complex():
        raise DataError("grades, positions and where should be numbers of one shape", got=f"{shapes} of {dtypes}")
    if positions.dtype not in (torch.int32, torch.int64) or (where is not None and where.dtype != torch.bool):
        raise DataError("positions should be whole numbers, and where true or false", got=dtypes)
    return relevance if relevance.dtype in (torch.float32, torch.float64) else relevance.float()


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
