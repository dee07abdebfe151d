"""Simulated users: their examination, clicks and other actions, by position and true relevance.

A user draws feedback (`sample`) and computes its exact expectation (`expected`). Other actions only follow clicks.
Notation: y the grade of an item, k its position, θ_k the probability that it is examined.

| name        | P(click)                                                                      |
|-------------|-------------------------------------------------------------------------------|
| `pbm`       | θ_k^η a_y                                       position-based (Richardson 2007) |
| `trust`     | θ_k^η (ε⁺_k ρ_y + ε⁻_k (1 - ρ_y))               trust-biased (Agarwal 2019)      |
| `cascade`   | a_y Π over positions above of (1 - stop)        cascade (Craswell 2008)          |
| `dcm`       | a_y Π over positions above of (1 - a_y (1 - λ_k^η))   dependent click (Guo 2009) |
| `clickbait` | θ_k^η a_y, where a falls with y while dwell rises: clicks and satisfaction are opposed |
| `watch`     | θ_k^η a_y, where dwell falls with k, as in the code of the CIKM 2022 paper       |
| `grid`      | θ_rc^η a_y at row r and column c, read in the shape of an F (Xie 2019)           |
| `carousel`  | θ_rc^η a_y, where further columns are seen only after a swipe (Rahdari 2022)     |

with ρ_y = (2^y - 1) / (2^max - 1) and a_y = ε + (1 - ε) ρ_y.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ultr.datasets.base import MAX_GRADE, by_grade, check_grades, checked_lists, checked_numbers
from ultr.errors import DataError, LabelError, OptionError, nearest
from ultr.lists import ListBatches
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.table import (
    GRID,
    MOST_GRID_COLUMNS,
    MOST_GRID_ROWS,
    RESERVED,
    grid_ids,
    is_grid,
    rows_and_columns,
)
from ultr.utils.arguments import Seed, check_fields, checked
from ultr.utils.files import existing_file
from ultr.utils.memory import available_memory
from ultr.utils.noise import Noise, normal_like, uniform_like

# --- Dwell times ------------------------------------------------------------------------------------------------------
# Simulated dwell times (the seconds that a user spends on a clicked item), with a log-normal distribution by grade.


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


# --- Users ------------------------------------------------------------------------------------------------------------

LEAST_WATCH = 0.01  # of the two factors of the dwell of a `WatchUser`
LAST_POSITION = 4096  # items after this position are examined as often as at this position
MAX_LOG_DWELL = 80.0  # natural logarithm of the longest dwell time, in seconds, that fits float32
# Share of users who look at positions 1 to 10, from eye tracking (Joachims 2017).
EYE_TRACKING = (0.68, 0.61, 0.48, 0.34, 0.28, 0.20, 0.11, 0.10, 0.08, 0.06)


@dataclass(frozen=True, eq=False)
class Feedback:
    """The simulated actions of users, and the hidden variables (examination, relevance) from which they were drawn."""

    actions: dict[str, Tensor]  # click, dwell, ...: [requests, length] float
    examined: Tensor  # [requests, length] bool
    relevant: Tensor  # [requests, length] bool: whether the user finds the item relevant if it is examined


@dataclass(frozen=True, eq=False, kw_only=True)
class User:
    """A position-based user, and the base class of the others: P(click) = θ_k^η a_y at position k and grade y.

    `examination` is θ from position 1; after its end θ falls as 1/k. `eta` (η) is the severity of position bias (0:
    every item is examined). `epsilon` is a_0, the probability of a click on an examined item of grade 0. `further` maps
    an action that may follow a click, such as like or share, to its probability by grade.
    """

    examination: Sequence[float] = EYE_TRACKING
    eta: float = 1.0
    epsilon: float = 0.1
    max_grade: int = 4
    dwell: Dwell | None = field(default_factory=Dwell)
    further: Mapping[str, Sequence[float]] = field(default_factory=dict)
    attraction: Sequence[float] | None = None  # a_y by grade, instead of the formula with epsilon
    by_own_position: ClassVar[bool] = True  # feedback on an item does not depend on other items

    def __post_init__(self) -> None:
        check_fields(self)
        checked_numbers("examination", self.examination, low=0, high=1)
        if self.attraction is not None:
            checked_numbers("attraction", self.attraction, low=0, high=1)
        for name, probabilities in self.further.items():
            if not isinstance(name, str) or not name.isidentifier() or name in ("click", "dwell", *RESERVED):
                what = "an action name must be a Python identifier that is not yet a column or an action"
                raise OptionError(what, got=repr(name), hint="use a name such as like")
            checked_numbers(name, probabilities, low=0, high=1)
        checked_numbers("eta", [self.eta], low=0)
        checked_numbers("epsilon", [self.epsilon], low=0, high=1)
        checked_numbers("max_grade", [self.max_grade], low=1, high=MAX_GRADE)

    @property
    def actions(self) -> tuple[str, ...]:
        return ("click", *(("dwell",) if self.dwell else ()), *self.further)

    @property
    def binary_actions(self) -> tuple[str, ...]:
        """The names of the actions that are 0 or 1."""
        return ("click", *self.further)

    def unbiased(self) -> User:
        """Return the same user without position bias: everything is examined."""
        return replace(self, eta=0.0)

    def theta(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return θ_k^η of each position k; k = 0 counts as 1, and k above `LAST_POSITION` as `LAST_POSITION`."""
        table = _examination(tuple(self.examination), self.eta, dtype, positions.device)
        return table[positions.clamp(0, LAST_POSITION)]

    def click_levels(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return P(click | relevant) and P(click | not relevant) at each position: θ_k^η and 0 without trust."""
        theta = self.theta(positions)
        return theta, torch.zeros_like(theta)

    def placed(self, positions: np.ndarray) -> np.ndarray:
        """Return the position ids at which the user sees the items that a ranker has put at these positions."""
        if is_grid(positions):
            raise OptionError(
                "these users see a list, and the log has a grid", hint="simulate the users grid or carousel"
            )
        return positions

    def attracted(self, relevance: Tensor) -> Tensor:
        """Return the probability, by its grade, that the user finds an examined item relevant."""
        if self.attraction is not None:
            return by_grade(self.attraction, relevance, self.max_grade)
        return self.epsilon + (1 - self.epsilon) * self.true_relevance(relevance)

    def true_relevance(self, relevance: Tensor) -> Tensor:
        """Return ρ_y = (2^y - 1) / (2^max - 1), where y is the grade of an item and max the highest grade."""
        return (torch.exp2(relevance) - 1) / float(2**self.max_grade - 1)

    @checked
    def click_probability(self, relevance: Tensor, positions: Tensor, *, where: Tensor | None = None) -> Tensor:
        """Return the exact P(click) of each item, and zero for padding."""
        relevance = checked_lists(relevance, positions, where)
        return _masked(self.theta(positions, relevance.dtype) * self.attracted(relevance), where)

    def draw_clicks(
        self, relevance: Tensor, positions: Tensor, generator: torch.Generator | Noise | None, *, where: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the click, examination and relevance of each item; return three boolean tensors, false for padding."""
        examined = _draw(self.theta(positions, relevance.dtype), generator) & where
        relevant = _draw(self.attracted(relevance), generator) & where
        return examined & relevant, examined, relevant

    @checked
    def sample(
        self,
        relevance: Tensor,
        positions: Tensor,
        generator: torch.Generator | Noise | None = None,
        *,
        where: Tensor | None = None,
        check: bool = True,
    ) -> Feedback:
        """Draw the feedback of every item; it is zero for padding.

        `check=False` skips the check of the grades, which would have to wait for a GPU.
        """
        relevance = checked_lists(relevance, positions, where)
        where = torch.ones_like(relevance, dtype=torch.bool) if where is None else where
        if check:
            check_grades(relevance, self.max_grade)
        click, examined, relevant = self.draw_clicks(relevance, positions, generator, where=where)
        actions = {"click": click.to(relevance.dtype)}
        if self.dwell is not None:
            actions["dwell"] = torch.where(click, self.draw_dwell(relevance, positions, generator), 0.0)
        for name, probabilities in self.further.items():
            follows = _draw(by_grade(probabilities, relevance, self.max_grade), generator)
            actions[name] = (click & follows).to(relevance.dtype)
        return Feedback(actions, examined, relevant)

    def draw_dwell(self, relevance: Tensor, positions: Tensor, generator: torch.Generator | Noise | None) -> Tensor:
        """Draw the dwell time that each item has if it is clicked."""
        assert self.dwell is not None  # noqa: S101 - the caller has checked it
        mu, sigma = self.dwell.parameters(relevance, self.max_grade)
        log_scale = self.dwell_scale(positions, relevance.dtype).log()
        log_seconds = mu + sigma * normal_like(relevance, generator) + log_scale
        return log_seconds.clamp(-MAX_LOG_DWELL, MAX_LOG_DWELL).exp()

    def dwell_nodes(self, grade: Tensor) -> tuple[Tensor, Tensor]:
        """Return dwell times of an item of this grade, for a scale of 1, and their probabilities, as a quadrature."""
        z, density = _normal_nodes(14.0, 1 << 15)
        if self.dwell is None:
            return torch.zeros_like(z), density
        mu, sigma = self.dwell.parameters(grade, self.max_grade)
        return torch.exp(mu + sigma * z), density

    def dwell_scale(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the factor k^(-decay) of dwell time at each position k; k above `LAST_POSITION` counts as it."""
        if self.dwell is None or self.dwell.decay == 0:
            return torch.ones((), dtype=dtype, device=positions.device).expand(positions.shape)
        return positions.clamp(1, LAST_POSITION).to(dtype).pow(-self.dwell.decay)

    @checked
    def expected(
        self, relevance: Tensor, positions: Tensor, label: Label | str, *, where: Tensor | None = None
    ) -> Tensor:
        """Return the exact expected label Φ of each item: P(click) · E[Φ | click, y, k] (+ Φ of no action)."""
        relevance = checked_lists(relevance, positions, where)
        click = self.click_probability(relevance, positions, where=where)
        value = self.value_of_click(relevance, positions, label)
        no_action = Label.of(label)({name: np.zeros(1) for name in self.actions})[0]
        return _masked(click * value + (1 - click) * float(no_action), where)

    def value_of_click(self, relevance: Tensor, positions: Tensor, label: Label | str) -> Tensor:
        """Return E[Φ | click], the expected label Φ of each item after a click."""
        scale, scale_index = torch.unique(self.dwell_scale(positions, relevance.dtype), return_inverse=True)
        grade, grade_index = torch.unique(relevance, return_inverse=True)
        check_grades(relevance, self.max_grade)
        table = _click_values(self, Label.of(label), tuple(grade.double().tolist()), tuple(scale.double().tolist()))
        values = table.to(relevance)
        if not bool(values.isfinite().all()):
            raise LabelError(f"label '{Label.of(label).expression}' must be finite", got=float(table.max()))
        return values[grade_index, scale_index]

    def click_values(self, label: Label, grade: tuple[float, ...], scale: tuple[float, ...]) -> Tensor:
        """Return E[Φ | click] as a table [grades, scales] in float64: dwell is integrated, further actions summed."""
        grades, scales = (torch.tensor(values, dtype=torch.float64) for values in (grade, scale))
        nodes = [self.dwell_nodes(each) for each in grades]
        names = list(self.further)
        total = torch.zeros(len(grades), len(scales), dtype=torch.float64)
        for combination in range(2 ** len(names)):
            happens = {name: bool(combination >> i & 1) for i, name in enumerate(names)}
            probability = torch.ones(len(grades), dtype=torch.float64)
            for name in names:
                p = by_grade(self.further[name], grades, self.max_grade)
                probability = probability * (p if happens[name] else 1 - p)
            for g, s in product(range(len(grades)), range(len(scales))):
                dwell, density = nodes[g]
                actions = {name: torch.full_like(dwell, float(happens[name])) for name in names}
                actions["click"] = torch.ones_like(dwell)
                if self.dwell is not None:
                    actions["dwell"] = scales[s] * dwell
                total[g, s] += probability[g] * (label(actions) @ density)
        return total


def _normal_nodes(most: float, count: int) -> tuple[Tensor, Tensor]:
    """Return values of a standard normal variable and their probabilities, for a trapezoid rule.

    It is spectrally exact for smooth functions, and has an error of about 1e-4 at jumps.
    """
    z = torch.linspace(-most, most, count, dtype=torch.float64)
    density = torch.exp(-0.5 * z**2)
    return z, density / density.sum()


_click_values = lru_cache(maxsize=64)(User.click_values)  # every evaluation needs them again


def default_trust(k: Tensor) -> Tensor:
    return 1 - (k.clamp(max=20) + 1) / 100


def default_mistrust(k: Tensor) -> Tensor:
    return 0.65 / k.clamp(min=1, max=10)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrustUser(User):
    """Users who trust the ranking: P(click) of an examined item at position k is ε⁺_k if it is relevant, ε⁻_k if not.

    `trust` and `mistrust` are functions that return ε⁺ and ε⁻ by position. The defaults are those of Vardasbi et al.
    (2020), 1 - (min(k, 20) + 1)/100 and 0.65/min(k, 10). `epsilon` is not used. With `eta=0` everything is examined,
    while trust still depends on position.
    """

    trust: Callable[[Tensor], Tensor] = default_trust
    mistrust: Callable[[Tensor], Tensor] = default_mistrust

    def __post_init__(self) -> None:
        super().__post_init__()
        places = torch.arange(1.0, 101)
        for name, function in (("trust", self.trust), ("mistrust", self.mistrust)):
            try:
                probabilities = torch.as_tensor(function(places)).expand(100).tolist()
            except (TypeError, ValueError, RuntimeError) as error:
                hint = "pass a function from a tensor of positions to a tensor of probabilities"
                raise OptionError(f"'{name}' cannot be called with positions ({error})", hint=hint) from error
            checked_numbers(name, probabilities, low=0, high=1)

    def attracted(self, relevance: Tensor) -> Tensor:
        return self.true_relevance(relevance) if self.attraction is None else super().attracted(relevance)

    def click_levels(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return P(click | relevant) = θ_k^η ε⁺_k and P(click | not relevant) = θ_k^η ε⁻_k at each position."""
        theta, k = self.theta(positions), positions.float()
        return theta * self.trust(k), theta * self.mistrust(k)

    @checked
    def click_probability(self, relevance: Tensor, positions: Tensor, *, where: Tensor | None = None) -> Tensor:
        relevance = checked_lists(relevance, positions, where)
        rho, k = self.attracted(relevance), positions.to(relevance.dtype)
        click_if_examined = self.trust(k) * rho + self.mistrust(k) * (1 - rho)
        return _masked(self.theta(positions, relevance.dtype) * click_if_examined, where)

    def draw_clicks(
        self, relevance: Tensor, positions: Tensor, generator: torch.Generator | Noise | None, *, where: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        examined = _draw(self.theta(positions, relevance.dtype), generator) & where
        relevant = _draw(self.attracted(relevance), generator) & where
        k = positions.to(relevance.dtype)
        believed = _draw(torch.where(relevant, self.trust(k), self.mistrust(k)), generator)
        return examined & believed, examined, relevant


@dataclass(frozen=True, eq=False, kw_only=True)
class CascadeUser(User):
    """Users who examine items by increasing position until one satisfies them or they lose patience.

    `stop` is the probability, by grade, that a clicked item satisfies the user. An unsatisfied user continues with
    probability `patience`. With `eta=0` every item is examined; other values of `eta`, and `examination`, are not used.
    """

    stop: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9)
    patience: float = 0.9
    by_own_position: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_numbers("stop", self.stop, low=0, high=1)
        checked_numbers("patience", [self.patience], low=0, high=1)

    def satisfied(self, relevance: Tensor, positions: Tensor) -> Tensor:
        """Return the probability that a clicked item satisfies the user."""
        return by_grade(self.stop, relevance, self.max_grade)

    def _stops(self, relevance: Tensor, positions: Tensor) -> Tensor:
        """Return the probability that the user stops after an item, if it is examined."""
        satisfied = self.attracted(relevance) * self.satisfied(relevance, positions)
        return 1 - (1 - satisfied) * self.patience

    @checked
    def click_probability(self, relevance: Tensor, positions: Tensor, *, where: Tensor | None = None) -> Tensor:
        relevance = checked_lists(relevance, positions, where)
        where = torch.ones_like(relevance, dtype=torch.bool) if where is None else where
        continues = 1 - self._stops(relevance, positions)
        return _masked(self._reached(continues, positions, where) * self.attracted(relevance), where)

    def draw_clicks(
        self, relevance: Tensor, positions: Tensor, generator: torch.Generator | Noise | None, *, where: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        relevant = _draw(self.attracted(relevance), generator) & where
        satisfied = _draw(self.satisfied(relevance, positions), generator) & relevant
        patient = _draw(torch.full_like(relevance, self.patience), generator)
        continues = (~satisfied & patient).to(relevance.dtype)
        examined = (self._reached(continues, positions, where) > 0.5) & where
        return examined & relevant, examined, relevant

    def _reached(self, continues: Tensor, positions: Tensor, where: Tensor) -> Tensor:
        """Return P(item is reached): the product of `continues` over all items above it; 1 if eta is 0."""
        if self.eta == 0:
            return torch.ones_like(continues)
        last = torch.iinfo(positions.dtype).max
        order = torch.where(where, positions, last).argsort(dim=-1, stable=True)
        ordered = torch.where(where, continues, 1.0).gather(-1, order)
        above = torch.cat([torch.ones_like(ordered[..., :1]), ordered[..., :-1].cumprod(dim=-1)], dim=-1)
        return torch.empty_like(above).scatter_(-1, order, above)


@dataclass(frozen=True, eq=False, kw_only=True)
class DependentUser(CascadeUser):
    """Users of the dependent click model (Guo et al. 2009): they always continue after an item without a click.

    After a click at position k they continue with probability λ_k^η, where λ_k = `go_on` / k. With `eta=0` every item
    is examined. `stop` and `examination` are not used.
    """

    patience: float = 1.0
    go_on: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_numbers("go_on", [self.go_on], low=0, high=1)

    def satisfied(self, relevance: Tensor, positions: Tensor) -> Tensor:
        return 1 - (self.go_on / positions.clamp(min=1).to(relevance.dtype)).pow(self.eta)


def clickbait_user(**options: object) -> User:
    """Return a user who clicks on lower grades more often, but dwells there for a shorter time (clickbait)."""
    return User(**{"attraction": (0.60, 0.50, 0.42, 0.36, 0.32), **options})  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False, kw_only=True)
class WatchUser(User):
    """Position-based users whose dwell depends on position, as in the simulator that the paper's authors released.

    The dwell after a click at position k is w W with w ~ N(2, 0.4) / √(k + 1) and W ~ N(0.1 + 0.9 ρ, (√ρ + 0.1) / √6),
    both at least 0.01, where ρ is the true relevance. The label of that simulator is `click + dwell`.
    """

    def draw_dwell(self, relevance: Tensor, positions: Tensor, generator: torch.Generator | Noise | None) -> Tensor:
        dwell = self._dwell(relevance, normal_like(relevance, generator), normal_like(relevance, generator))
        return dwell * self.dwell_scale(positions, relevance.dtype)

    def dwell_nodes(self, grade: Tensor) -> tuple[Tensor, Tensor]:
        z, density = _normal_nodes(8.0, 401)
        return self._dwell(grade, z[:, None], z).flatten(), (density[:, None] * density).flatten()

    def dwell_scale(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return (positions.clamp(1, LAST_POSITION).to(dtype) + 1).rsqrt()

    def _dwell(self, relevance: Tensor, first: Tensor, second: Tensor) -> Tensor:
        rho = self.true_relevance(relevance)
        watched = 0.1 + 0.9 * rho + (rho.sqrt() + 0.1) / 6**0.5 * second
        return (2 + 0.4 * first).clamp(min=LEAST_WATCH) * watched.clamp(min=LEAST_WATCH)


@dataclass(frozen=True, eq=False, kw_only=True)
class GridUser(User):
    """Users who read a grid of `columns` columns in the shape of an F: first rows broadly, further ones at the left.

    They look at row r and column c with probability θ_rc = scroll^(r - 1) · (1 - skip if r > 1) · s_rc, where

        s_rc = (1 - middle) c^(-d_r) + middle (1 + |c - m|)^(-d_r),    d_r = decay (1 + narrowing (1 - 1/r))

    and m is the middle column. So they may stop after a row, skip a row, or start at the middle, as eye tracking of
    image search shows (Xie et al. 2019, "Grid-based Evaluation Metrics for Web Image Search"). A user stops and skips
    once for all items of a row. Positions are slots of a grid, or ranks 1, 2, ..., which fill the grid row by row.
    `examination` is not used.
    """

    columns: int = 4
    scroll: float = 0.85
    skip: float = 0.1
    decay: float = 0.5
    narrowing: float = 0.6
    middle: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_numbers("columns", [self.columns], low=1, high=MOST_GRID_COLUMNS - 1)
        checked_numbers("scroll, skip and middle", [self.scroll, self.skip, self.middle], low=0, high=1)
        checked_numbers("decay and narrowing", [self.decay, self.narrowing], low=0, high=10)

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row and the column of each position, from 1."""
        in_grid, rank = positions // GRID == 1, positions.clamp(min=1) - 1
        slots = rows_and_columns(positions), (rank // self.columns + 1, rank % self.columns + 1)
        rows, columns = (torch.where(in_grid, slot, of_rank).clamp(min=1) for slot, of_rank in zip(*slots, strict=True))
        return rows.clamp(max=MOST_GRID_ROWS - 1), columns

    def placed(self, positions: np.ndarray) -> np.ndarray:
        if not is_grid(positions) and int(positions.max()) > (most := (MOST_GRID_ROWS - 1) * self.columns):
            raise OptionError(f"a grid has at most {most:,} items", got=int(positions.max()), hint="lower --items")
        return np.asarray(grid_ids(*self.places(torch.from_numpy(positions))).numpy())

    def chances(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the probabilities that users get to a row, that they look at a part of it, and at an item in it."""
        slope = self.decay * (1 + self.narrowing * (1 - 1 / rows))
        from_middle = 1 + (columns - (self.columns + 1) / 2).abs()
        seen = (1 - self.middle) * columns.pow(-slope) + self.middle * from_middle.pow(-slope)
        return self.scroll ** (rows - 1), torch.where(rows > 1, 1 - self.skip, 1.0), seen

    def _chances(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        reached, looked, seen = self.chances(*(place.double() for place in self.places(positions)))
        return reached.pow(self.eta).to(dtype), looked.pow(self.eta).to(dtype), seen.pow(self.eta).to(dtype)

    def theta(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        reached, looked, seen = self._chances(positions, dtype)
        return reached * looked * seen

    def draw_clicks(
        self, relevance: Tensor, positions: Tensor, generator: torch.Generator | Noise | None, *, where: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        reached, looked, seen = self._chances(positions, relevance.dtype)
        of_user, of_row = uniform_like(relevance, generator)[..., :1], uniform_like(relevance, generator)
        of_row = of_row.gather(-1, self.places(positions)[0] % relevance.shape[-1])  # the same for all items of a row
        examined = (of_user < reached) & (of_row < looked) & _draw(seen, generator) & where
        relevant = _draw(self.attracted(relevance), generator) & where
        return examined & relevant, examined, relevant

    def dwell_scale(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the factor r^(-decay) of dwell time at each row r."""
        return super().dwell_scale(self.places(positions)[0], dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class CarouselUser(GridUser):
    """Users who go down rows of carousels, and swipe to see more than the first `visible` items of a row.

    θ_rc = scroll^(r - 1) · (1 - skip if r > 1) · swipe^((c - 1) // visible) · j^(-decay), where j is the place of
    column c among the columns that are visible at once. A user who does not swipe sees none of the further items of a
    row. Rows are left one after the other, and each is browsed on its own, as in the carousel click model (Rahdari,
    Kveton and Brusilovsky 2022).
    """

    columns: int = 12
    decay: float = 0.2
    visible: int = 4
    swipe: float = 0.35

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_numbers("visible", [self.visible], low=1)
        checked_numbers("swipe", [self.swipe], low=0, high=1)

    def chances(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        swipes, place = (columns - 1) // self.visible, (columns - 1) % self.visible + 1
        looked = torch.where(rows > 1, 1 - self.skip, 1.0) * self.swipe**swipes
        return self.scroll ** (rows - 1), looked, place.pow(-self.decay)


USERS: dict[str, Callable[..., User]] = {
    "pbm": User,
    "trust": TrustUser,
    "cascade": CascadeUser,
    "dcm": DependentUser,
    "clickbait": clickbait_user,
    "watch": WatchUser,
    "grid": GridUser,
    "carousel": CarouselUser,
}


@checked
def make_user(name: str, **options: object) -> User:
    """Return a simulated user by its name in `USERS`; `options` are fields of its class."""
    if name not in USERS:
        raise OptionError(f"there is no simulated user '{name}'", hint=nearest(name, USERS))
    try:
        return USERS[name](**options)
    except TypeError as error:
        raise OptionError(f"user '{name}' does not have these options ({error})", got=", ".join(options)) from error


@lru_cache(maxsize=64)
def _examination(theta: tuple[float, ...], eta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return θ_k^η for positions k = 0 to `LAST_POSITION`; after the end of `theta`, θ falls as 1/k."""
    k = torch.arange(LAST_POSITION + 1, dtype=torch.float64).clamp(min=1)
    k_in_table = k.clamp(max=len(theta))
    values = torch.tensor(theta, dtype=torch.float64)[k_in_table.long() - 1]
    return (values * k_in_table / k).pow(eta).to(dtype).to(device)


def _draw(probability: Tensor, generator: torch.Generator | Noise | None) -> Tensor:
    return uniform_like(probability, generator) < probability


def _masked(values: Tensor, where: Tensor | None) -> Tensor:
    return values if where is None else torch.where(where, values, 0.0)


# --- Logs -------------------------------------------------------------------------------------------------------------
# Simulate a log: the feedback of simulated users on the items of requests.

ROW_BYTES = 64  # memory of a simulated row without its features


@checked
def draw_sessions(log: Log, sessions: int, *, seed: Seed = 0) -> Log:
    """Draw `sessions` requests of a log with replacement; they get new ids, and keep the old id as their query."""
    if sessions < 1:
        raise OptionError("'sessions' must be at least 1", got=sessions)
    needed = sessions * log.rows // max(1, len(log)) * (4 * len(log.feature_names) + ROW_BYTES)
    if needed > available_memory():
        got = f"{needed / 2**30:,.0f} GiB needed, {available_memory() / 2**30:.1f} GiB available"
        raise OptionError(f"{sessions:,} sessions do not fit in memory", got=got, hint="lower the number of sessions")
    chosen = np.random.default_rng(seed).integers(len(log), size=sessions)
    drawn = log.select(chosen)
    context = {"query": drawn.request_ids, **drawn.context}
    return replace(drawn, request_ids=pa.array(np.arange(sessions)), context=context)


@checked
def simulate_log(log: Log, user: User, *, seed: Seed = 0, sessions: int | None = None) -> tuple[Log, Feedback]:
    """Draw the feedback of a user on each item of a log, which must have positions and true relevance.

    With `sessions`, that many requests are drawn with replacement and get new ids; otherwise each is used once.
    Users of a grid see items in reading order. Return the log with the drawn actions, and the `Feedback` of each row
    with its hidden variables.
    """
    if log.positions is None or log.relevance is None:
        what = "simulated feedback needs items with positions and true relevance"
        raise DataError(what, hint="give items positions with ultr.show(log, scores)")
    check_grades(torch.from_numpy(log.relevance), user.max_grade)
    log = replace(log, positions=user.placed(log.positions))
    if sessions is not None:
        log = draw_sessions(log, sessions, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    bare = replace(log.without_features(), actions={})
    drawn = Feedback(
        {name: torch.zeros(log.rows) for name in user.actions},
        torch.zeros(log.rows, dtype=torch.bool),
        torch.zeros(log.rows, dtype=torch.bool),
    )
    for requests, lists in ListBatches(bare).by_length():
        feedback = user.sample(lists.true_relevance, lists.shown_positions, generator, where=lists.where, check=False)
        first = torch.from_numpy(log.offsets)[requests]
        rows = (first[:, None] + torch.arange(lists.where.shape[1]))[lists.where]
        drawn.examined[rows] = feedback.examined[lists.where]
        drawn.relevant[rows] = feedback.relevant[lists.where]
        for name, values in feedback.actions.items():
            drawn.actions[name][rows] = values[lists.where].float()
    return replace(log, actions={name: values.numpy() for name, values in drawn.actions.items()}), drawn
