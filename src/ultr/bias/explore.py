"""Plan the cheapest experiment that identifies examination θ_k, the probability that a user looks at position k.

A request of the experiment has an *arm*, drawn by a hash of its id. The control shows the order of production. A swap
`1-3` shows the item that production ranks at 1 at position 3, and that of 3 at 1 (`ultr.log.swaps`). Production's item
p has P(click) = θ_k r_p at position k, so its clicks in two arms compare two positions, whatever its relevance r_p is.

- A swap of positions a and b loses (θ_a - θ_b)(r_a - r_b) clicks per request.
- With n_pk requests that show item p at k, the information about log θ_k and log r_p is that of a log-linear model with
  the weights n_pk c / (1 - c), c = θ_k r_p. The variance of log(θ_k / θ_1) is convex in the numbers of requests.

The shares of the arms are those that lose the fewest clicks for the wanted precision of θ.
"""

from __future__ import annotations

import csv
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from scipy.optimize import isotonic_regression, minimize

from ultr.bias.audit import BiasReport
from ultr.bias.identification import MOST_IMPRESSIONS, NORMAL, NOT, rounded_up
from ultr.errors import DataError, OptionError
from ultr.log.swaps import CONTROL, parse_swap, swap_text
from ultr.utils.arguments import Within, checked
from ultr.utils.files import atomic_path, existing_file

PlanName = Literal["neighbours", "first", "top3", "shuffle"]
PLANS: dict[PlanName, str] = {
    "neighbours": "swaps two neighbours",
    "first": "swaps position 1 with another one",
    "top3": "shuffles the first three positions",
    "shuffle": "shows all items in random order",
}
HASHES = 1 << 32  # number of hashes of request ids
MOST_POSITIONS = 30  # positions that swaps compare
MOST_CHANCE = 0.95  # of a click; a higher estimate would promise too much precision
DIGITS = 3  # significant digits of the number of requests, which is rounded up
FEWEST = 1e-9
MOST_REQUESTS = 1e15
DRAWS = 200  # of the clicks of the log, for the error of the loss

# --- Traffic ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Traffic:
    """The traffic that an experiment gets: what is known before it about each position, in their order."""

    positions: np.ndarray
    shown: np.ndarray  # share of the requests that show an item there
    theta: np.ndarray  # examination, relative to the first position
    relevance: np.ndarray  # P(click) of the item that production ranks there if it is shown at the first position
    impressions: float = math.inf  # of the most shown position, behind the click rates
    assumed: bool = False  # whether θ is the worst case, because the log does not identify it

    @property
    def clicks(self) -> float:
        """Clicks per request."""
        return float(self.shown @ (self.theta * self.relevance))

    def targets(self) -> int:
        """Return how many of the first positions have most of the impressions; these are estimated."""
        covered = np.cumsum(self.shown) / self.shown.sum()
        enough = int(np.searchsorted(covered, MOST_IMPRESSIONS - 1e-9)) + 1
        return min(max(2, enough), len(self.positions), MOST_POSITIONS)


def traffic_of(report: BiasReport) -> Traffic:
    """Return the traffic of the log that a bias report is about.

    θ is the estimate of the report if the log identifies it, and otherwise the worst case (`worst_case`).
    """
    if len(report.positions) < 2:
        what, hint = "an experiment needs a log with two or more positions", "name their column with --position"
        raise DataError(what, got=f"{len(report.positions)}", hint=hint)
    rate = np.maximum(report.rate, 0.5 / np.maximum(report.impressions, 1.0))  # a position without clicks may get one
    most = float(report.impressions.max())
    shown = report.impressions / most
    if report.verdict.status == NOT:
        return _with_theta(report.positions, shown, rate, np.sqrt(rate), most, assumed=True)
    propensities = report.propensities()
    theta = np.array([propensities[k] for k in report.positions.tolist()])
    return _with_theta(report.positions, shown, rate, theta, most, assumed=False)


def worst_case(traffic: Traffic) -> Traffic:
    """Return the same click rates with the examination for which swaps lose the most clicks: the square root of them.

    With click rates c, a swap of a and b loses c_a + c_b - (θ_b r_a + θ_a r_b). The product of the terms in brackets
    is c_a c_b, so their sum is at least 2 √(c_a c_b), and that if θ = r = √c. The sum is also the clicks on the two
    items at their new positions, so that no other examination needs more requests.
    """
    rate = traffic.theta * traffic.relevance
    return _with_theta(traffic.positions, traffic.shown, rate, np.sqrt(rate), traffic.impressions, assumed=True)


def _with_theta(
    positions: np.ndarray, shown: np.ndarray, rate: np.ndarray, theta: np.ndarray, impressions: float, *, assumed: bool
) -> Traffic:
    """Return traffic whose relevance is the click rate divided by θ, smoothed so that it never rises down the list.

    Without smoothing, chance would make some swaps look free.
    """
    theta = theta / theta[0]
    relevance = isotonic_regression(rate / theta, weights=shown * theta, increasing=False).x
    return Traffic(positions, shown, theta, relevance, impressions, assumed)


def _redrawn(traffic: Traffic, rng: np.random.Generator) -> Traffic:
    """Return the traffic as another log of the same size would show it, with the same examination."""
    expected = traffic.impressions * traffic.shown * traffic.theta * traffic.relevance
    clicks = np.maximum(rng.normal(expected, np.sqrt(expected)), 0.5)
    rate = clicks / traffic.impressions / traffic.shown
    again = _with_theta(traffic.positions, traffic.shown, rate, traffic.theta, traffic.impressions, assumed=False)
    return worst_case(again) if traffic.assumed else again


# --- Loss and precision of arms ---------------------------------------------------------------------------------------


def loss_of_arm(traffic: Traffic, places: Sequence[int]) -> float:
    """Return the clicks that an arm loses per request; `places` are indices of positions, in the order of the arm."""
    before, after = list(places), [*places[1:], places[0]]
    lost = traffic.relevance[before] @ (traffic.theta[before] - traffic.theta[after])
    return float(traffic.shown[before].min() * lost)


def loss_of_shuffle(traffic: Traffic) -> float:
    """Return the clicks that a request in random order loses, over requests of all lengths."""
    shown = np.minimum.accumulate(traffic.shown)
    share = shown - np.append(shown[1:], 0.0)  # of the requests that end at each position
    items = np.arange(1, len(shown) + 1)
    as_logged = np.cumsum(traffic.theta * traffic.relevance)
    in_random_order = np.cumsum(traffic.theta) * np.cumsum(traffic.relevance) / items
    return float(share @ (as_logged - in_random_order))


def variances(
    traffic: Traffic, arms: Sequence[Sequence[int]], requests: np.ndarray, control: float, *, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the variance of log(θ_k / θ_1) of the first `width` positions, and its derivatives.

    `requests` has the number of requests of each arm, `control` that of the control. The derivatives are by the number
    of requests of each arm [positions, arms], and by that of the control [positions].
    """
    chance = np.minimum(np.outer(traffic.relevance[:width], traffic.theta[:width]), MOST_CHANCE)
    of_click = chance / (1 - chance)  # information of one impression of item p at position k
    cells = [_cells(traffic, arm) for arm in arms]
    weights = np.diag(control * traffic.shown[:width] * np.diag(of_click))
    for (before, after, shown), number in zip(cells, requests, strict=True):
        weights[before, after] += number * shown * of_click[before, after]
    of_item = np.maximum(weights.sum(1), FEWEST)
    information = np.diag(weights.sum(0)) - weights.T @ (weights / of_item[:, None])
    inverse = np.zeros((width, width))
    inverse[1:, 1:] = np.linalg.pinv(information[1:, 1:], hermitian=True)
    # Column k of `solved` is the solution for log θ_k; the relevance of item p follows from its equation.
    solved = inverse
    of_relevance = -(weights @ solved) / of_item[:, None]
    slopes = [
        -shown * (of_click[before, after, None] * (solved[after] + of_relevance[before]) ** 2).sum(0)
        for before, after, shown in cells
    ]
    of_control = -((traffic.shown[:width] * np.diag(of_click))[:, None] * (solved + of_relevance) ** 2).sum(0)
    return inverse.diagonal(), np.array(slopes).reshape(len(cells), width).T, of_control


def _cells(traffic: Traffic, places: Sequence[int]) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the positions of the items of an arm before and after it, and the share of requests that show them."""
    before = np.array(places)
    return before, np.roll(before, -1), float(traffic.shown[before].min())


# --- Plans ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ExplorationPlan:
    """An experiment: its arms and their probabilities, and what it takes and costs."""

    name: PlanName
    swaps: tuple[str, ...]  # the arms that change the order; () for a shuffle
    shares: np.ndarray  # probability of each of these arms; the rest of the requests are the control
    positions: tuple[int, ...]  # θ of these is estimated as precisely as wanted
    half_widths: np.ndarray  # of the 95% intervals of θ at these positions, relative to θ; 0 at the first
    precision: float  # the largest half-width that was asked for
    share: float  # share of the requests whose order is changed
    requests: int  # requests of the experiment, with the control
    lost_per_request: float  # expected clicks, over all requests of the experiment
    lost_share: float  # expected share of all clicks
    lost_error: float  # standard error of this share, from the number of clicks in the log
    most_lost_share: float  # the share with the examination for which the plan loses the most clicks

    @property
    def lost_clicks(self) -> float:
        """The clicks that the whole experiment loses."""
        return self.requests * self.lost_per_request

    def days(self, requests_per_day: float) -> float:
        return self.requests / requests_per_day


@checked
def make_plan(
    name: PlanName,
    traffic: Traffic,
    *,
    precision: Annotated[float, Within(0.01, 1)] = 0.1,
    share: Annotated[float, Within(0.001, 0.5)] = 0.1,
) -> ExplorationPlan:
    """Return the plan `name` that estimates θ to within `precision`, and changes the order of a `share` of requests."""
    variance = (math.log1p(precision) / NORMAL) ** 2
    width = min(3, len(traffic.positions)) if name == "top3" else traffic.targets()
    arms, shares = _arms(name, width), np.zeros(0)
    if name == "shuffle":
        reached = _variances_of_shuffle(traffic, width) / share  # of one request
    else:
        experiment = _Experiment(traffic, arms, width, variance, share)
        numbers = experiment.enough(np.ones(len(arms)))
        if name != "top3":
            numbers = experiment.cheapest(numbers)
        shares = numbers * share / numbers.sum()
        reached = variances(traffic, arms, shares, 1 - share, width=width)[0]
    needed = float(reached.max()) / variance
    if not np.isfinite(needed) or needed > MOST_REQUESTS:
        hint = "name the actions with --actions, or pass a log with more clicks"
        raise DataError("the log has too few clicks to plan an experiment", hint=hint)
    requests, lost = rounded_up(needed, DIGITS), _lost(traffic, arms, shares, share)
    return ExplorationPlan(
        name=name,
        swaps=tuple(swap_text(traffic.positions[list(arm)].tolist()) for arm in arms),
        shares=shares,
        positions=tuple(traffic.positions[:width].tolist()),
        half_widths=np.expm1(NORMAL * np.sqrt(reached / requests)),
        precision=precision,
        share=share,
        requests=requests,
        lost_per_request=lost,
        lost_share=lost / traffic.clicks,
        lost_error=_error_of_lost(traffic, arms, shares, share),
        most_lost_share=max(lost, _lost(worst_case(traffic), arms, shares, share)) / traffic.clicks,
    )


def _lost(traffic: Traffic, arms: Sequence[Sequence[int]], shares: np.ndarray, share: float) -> float:
    """Return the expected clicks that a plan loses per request; without arms, a `share` of requests is shuffled."""
    if not arms:
        return share * loss_of_shuffle(traffic)
    return float(shares @ [loss_of_arm(traffic, arm) for arm in arms])


def _error_of_lost(traffic: Traffic, arms: Sequence[Sequence[int]], shares: np.ndarray, share: float) -> float:
    """Return the standard error of the share of clicks that a plan loses."""
    if not np.isfinite(traffic.impressions):
        return 0.0
    rng = np.random.default_rng(0)
    drawn = [_redrawn(traffic, rng) for _ in range(DRAWS)]
    return float(np.std([_lost(each, arms, shares, share) / each.clicks for each in drawn]))


def fastest(plans: Iterable[ExplorationPlan]) -> ExplorationPlan:
    """Return the plan of swaps that needs the fewest requests, among those that estimate the most positions."""
    return min((plan for plan in plans if plan.swaps), key=lambda plan: (-len(plan.positions), plan.requests))


def _arms(name: str, width: int) -> list[tuple[int, ...]]:
    """Return the arms of a plan as indices of positions."""
    if name == "neighbours":
        return [(k, k + 1) for k in range(width - 1)]
    if name == "first" or (name == "top3" and width < 3):
        return [(0, k) for k in range(1, width)]
    return [(0, 1), (0, 2), (1, 2), (0, 1, 2), (0, 2, 1)] if name == "top3" else []


def _variances_of_shuffle(traffic: Traffic, width: int) -> np.ndarray:
    """Return the variance of log(θ_k / θ_1) from one request in random order."""
    mean = float(np.average(traffic.relevance, weights=traffic.shown))
    chance = np.minimum(traffic.theta[:width] * mean, MOST_CHANCE)
    of_rate = (1 - chance) / chance / traffic.shown[:width]
    return np.append(0.0, of_rate[1:] + of_rate[0])


@dataclass(frozen=True, eq=False)
class _Experiment:
    """Arms in a `share` of the requests, which estimate θ of the first `width` positions with a `variance`."""

    traffic: Traffic
    arms: Sequence[Sequence[int]]
    width: int
    variance: float
    share: float

    def variances(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the variances with these numbers of requests of the arms, and their derivatives by these numbers."""
        control = float(numbers.sum()) * (1 - self.share) / self.share
        found, slopes, of_control = variances(self.traffic, self.arms, numbers, control, width=self.width)
        return found, slopes + (of_control * (1 - self.share) / self.share)[:, None]

    def enough(self, numbers: np.ndarray) -> np.ndarray:
        """Return numbers in the same proportions that are just enough: a variance falls as their inverse."""
        return np.asarray(numbers * self.variances(numbers)[0].max() / self.variance)

    def cheapest(self, start: np.ndarray) -> np.ndarray:
        """Return the numbers of requests of the arms that lose the fewest clicks and are enough.

        Each request also has a price, the mean loss of the arms, because it makes the experiment longer. The variables
        are logarithms relative to `start`: the objective and the constraints are then of a similar size.
        """
        lost = np.maximum([loss_of_arm(self.traffic, arm) for arm in self.arms], 0.0)
        price = lost.mean() or 1.0
        cost = (lost + price) * start / ((lost + price) @ start)

        def slack(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            numbers = start * np.exp(logs)
            found, by_number = self.variances(numbers)
            found = np.maximum(found[1:], 1e-300)
            return np.log(self.variance / found), -by_number[1:] * numbers / found[:, None]

        solution = minimize(
            lambda logs: (cost @ np.exp(logs), cost * np.exp(logs)),
            np.zeros(len(self.arms)),
            jac=True,
            method="SLSQP",
            bounds=[(-8.0, 8.0)] * len(self.arms),
            constraints={"type": "ineq", "fun": lambda logs: slack(logs)[0], "jac": lambda logs: slack(logs)[1]},
            options={"maxiter": 300, "ftol": 1e-9},
        )
        numbers = self.enough(start * np.exp(solution.x))
        return numbers if cost @ (numbers / start) < 1 else start


# --- Table of arms ----------------------------------------------------------------------------------------------------
# The table that a service applies: ranges of the hash of a request id, and the arm of each range.

HEADER = ("from", "to", "swap", "probability")


def request_hash(request_id: object) -> int:
    """Return the hash of a request id: CRC-32 of its text in UTF-8, as `zlib.crc32` computes it.

    >>> request_hash("request-17") == zlib.crc32(b"request-17")
    True
    """
    return zlib.crc32(str(request_id).encode())


@dataclass(frozen=True)
class SwapTable:
    """Arms by ranges of the request hash: range i is `starts[i]` (included) to `starts[i + 1]`, the last to 2^32."""

    starts: tuple[int, ...]
    swaps: tuple[str, ...]

    @staticmethod
    def of(plan: ExplorationPlan) -> SwapTable:
        """Return the table of a plan of swaps; the control is the last range."""
        if not plan.swaps:
            hint = "choose neighbours, first or top3, or show random orders and mark them with --randomised"
            raise OptionError(f"the plan '{plan.name}' has no swaps for a table", hint=hint)
        ends = np.rint(np.cumsum(plan.shares) * HASHES).astype(np.int64).tolist()
        ranges = [(start, swap) for start, end, swap in zip([0, *ends], ends, plan.swaps, strict=False) if end > start]
        return SwapTable((*(start for start, _ in ranges), ends[-1]), (*(swap for _, swap in ranges), CONTROL))

    @staticmethod
    def read(path: str | Path) -> SwapTable:
        """Read a table that `write` wrote; raise DataError if its ranges do not cover all hashes once."""
        path = existing_file(path)
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        try:
            ranges = sorted((int(row["from"]), int(row["to"]), (row["swap"] or "").strip()) for row in rows)
        except (KeyError, TypeError, ValueError) as error:
            hint = "write the table again with ultr explore --out"
            raise DataError(f"a table of swaps needs the columns {','.join(HEADER)}", where=path, hint=hint) from error
        starts, ends = [start for start, _, _ in ranges], [end for _, end, _ in ranges]
        if not ranges or [*starts, HASHES] != [0, *ends] or any(a >= b for a, b in pairwise([*starts, HASHES])):
            hint = "write the table again with ultr explore --out"
            raise DataError("the ranges of hashes must cover 0 to 2^32 once", where=path, hint=hint)
        for swap in (swap for _, _, swap in ranges):
            parse_swap(swap, where=path)
        return SwapTable(tuple(starts), tuple(swap for _, _, swap in ranges))

    @property
    def probabilities(self) -> tuple[float, ...]:
        return tuple((end - start) / HASHES for start, end in pairwise([*self.starts, HASHES]))

    def write(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the table as CSV; the probability is the exact one of the range."""
        ends = [*self.starts[1:], HASHES]
        with atomic_path(path, overwrite=overwrite) as temporary, temporary.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(HEADER)
            for row in zip(self.starts, ends, self.swaps, self.probabilities, strict=True):
                writer.writerow([*row[:3], f"{row[3]:.10f}"])

    def draw(self, request_ids: Iterable[object]) -> np.ndarray:
        """Return the arm of each request, as texts."""
        hashes = np.fromiter((request_hash(each) for each in request_ids), np.int64)
        return np.array(self.swaps, object)[np.searchsorted(self.starts, hashes, side="right") - 1]
