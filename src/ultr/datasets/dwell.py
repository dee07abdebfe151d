"""Simulated dwell times (the seconds that a user spends on a clicked item), with a log-normal distribution by grade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from ultr.datasets.base import by_grade, checked_numbers
from ultr.errors import DataError, OptionError
from ultr.utils.arguments import Seed, check_fields, checked
from ultr.utils.files import existing_file


@dataclass(frozen=True)
class Dwell:
    """Log-normal dwell time, in seconds, of an item of grade y at position k: exp(N(mu_y, sigma_y)) · k^(-decay).

    `mu` and `sigma` are spread evenly over the grades, lowest first, and interpolated. `decay=0`: no effect of k.
    """

    mu: Sequence[float] = (1.2, 2.2, 3.0, 3.7, 4.3)
    sigma: Sequence[float] = (0.9, 0.8, 0.7, 0.6, 0.5)
    decay: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        mu = checked_numbers("mu", self.mu, low=-50, high=50)
        sigma = checked_numbers("sigma", self.sigma, low=0, high=5)
        if len(mu) != len(sigma):
            raise OptionError("'mu' and 'sigma' must have the same length", got=f"{len(mu)} and {len(sigma)}")
        checked_numbers("decay", [self.decay], low=-10, high=10)

    def parameters(self, relevance: Tensor, max_grade: int) -> tuple[Tensor, Tensor]:
        """Return mu and sigma of each item, from its grade `relevance`, which is at most `max_grade`."""
        both = by_grade(tuple(zip(self.mu, self.sigma, strict=True)), relevance, max_grade)
        return both[..., 0], both[..., 1]

    @staticmethod
    @checked
    def fit(seconds: np.ndarray, components: int = 5, *, decay: float = 0.0, seed: Seed = 0) -> Dwell:
        """Fit a Gaussian mixture to the logs of dwell times; each component is a grade, from short to long times."""
        from sklearn.mixture import GaussianMixture

        seconds = np.asarray(seconds, dtype=np.float64).ravel()
        bad = ~(np.isfinite(seconds) & (seconds > 0))
        if bad.any():
            got = f"{seconds[bad][0]} ({int(bad.sum())} such values)"
            raise DataError("dwell times must be positive", got=got, hint="remove their lines from the --dwell-file")
        if components < 1 or len(seconds) < 10 * components:
            what = f"a fit of {components} grades needs at least {10 * components} dwell times"
            raise DataError(what, got=len(seconds), hint="add dwell times to the --dwell-file")
        if (values := len(np.unique(seconds))) < 2 * components:
            what = f"a fit of {components} grades needs at least {2 * components} different dwell times"
            raise DataError(what, got=values, hint="write the times in the --dwell-file with more digits")
        mixture = GaussianMixture(components, random_state=seed % 2**32, n_init=3).fit(np.log(seconds)[:, None])
        order = np.argsort(mixture.means_.ravel())
        sigma = np.sqrt(mixture.covariances_.ravel()[order])
        return Dwell(tuple(mixture.means_.ravel()[order].tolist()), tuple(sigma.tolist()), decay)


def read_dwell_times(path: str | Path) -> np.ndarray:
    """Read dwell times in seconds from a text file, one number per line; a first line of text is skipped."""
    path = existing_file(path)
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    numbers = []
    for i, line in enumerate(lines):
        try:
            numbers.append(float(line))
        except ValueError as error:
            if i > 0:
                what, hint = "dwell times must be one number per line", "correct or remove the line"
                raise DataError(what, where=path, got=f"'{line[:40]}'", hint=hint) from error
    return np.array(numbers)
