"""What is known of positions alone: how often they are examined, and how often clicked without relevance."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ultr.bias import quotient, scoring_terms, sums_by_cell, updated
from ultr.errors import DataError, OptionError
from ultr.examination import LEAST, Examination, estimate_examination
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.base import ClickMethod, Learner, MethodInputs, PositionIndex
from ultr.processes import summed
from ultr.simulate import User

SCALE = 0.7  # of θ where it is largest, which clicks cannot tell
WARM_UP = 20  # updates in which θ is the ratio of click rates, its starting value
FORGET = 0.6  # the n-th batch weighs n^-0.6 among the statistics
MAX_WEIGHT = 20.0  # of a click
FEW_CLICKS = 100
MOVING = 1e-3
BATCH_MOVING = 1e-2  # of θ that follows batches, which differ
THETA_FROM = {
    "known": "known propensities",
    "strata": "EM over strata of the logging score",
    "items": "EM over items that recur",
    "regression": "regression EM, along with the networks",
}


def average_in(sums: Tensor, terms: Iterable[Tensor], place: Tensor, weights: Tensor, updates: Tensor) -> None:
    """Average the sums by place of a batch's terms, `updates` batches having come with it, into those before."""
    (means,) = means_of_all((sums_in_cells(terms, place, weights, sums.shape[1]), weights))
    sums.lerp_(means, updates.pow(-FORGET))


def sums_in_cells(terms: Iterable[Tensor], cells: Tensor, weights: Tensor, size: int) -> Tensor:
    """The sums of each term by cell [terms, size], by weight."""
    return torch.stack([sums_by_cell(term * weights, cells, size) for term in terms])


def means_of_all(*parts: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Sums over a batch of what has the given weights, as means, over the batches of all processes; in one exchange."""
    flat = [values for found, weights in parts for values in (found.view(-1), weights.sum().view(1))]
    totals = iter(torch.split(summed(torch.cat(flat)), [len(values) for values in flat]))
    return [next(totals).view_as(found) / next(totals).clamp(min=1e-9) for found, _ in parts]


def scale_option(text: str) -> float | str:
    """Reads the option `scale`: a number, or the word that leaves it to the data."""
    if text == "estimated":
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise OptionError("'scale' should be above 0 and at most 1, or 'estimated'", got=f"'{text}'")
    return value


class PositionModel(Learner):
    """P(c>0) = θ_k β + ζ_k (1 - β): θ and ζ by position, for whatever β a method has.

    They are known, or estimated from the log before anything else (`theta_from` strata or items), or θ is regressed
    along with β (`regression`), by Fisher's scoring with its largest value held at `scale`.
    """

    theta: Tensor
    zeta: Tensor
    sums: Tensor
    updates: Tensor
    moved: Tensor
    impressions: Tensor
    clicks: Tensor
    shown: Tensor

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        scale: float | None = SCALE,
        theta_from: str = "strata",
        trust_in_clicks: bool = False,
    ) -> None:
        super().__init__()
        self.inputs, self.scale, self.trust_in_clicks = inputs, scale, trust_in_clicks
        self.theta_from = theta_from if inputs.propensities is None else "known"
        self.index = PositionIndex(inputs.positions)
        size = len(self.index)
        start = torch.full((size,), 1.0 if inputs.truth else scale or 1.0)
        if inputs.propensities is not None:
            lacking = [k for k in self.index.ids.tolist() if k not in inputs.propensities]
            if lacking:
                raise DataError(
                    "a position has no propensity", got=lacking[0], mend="give one for every position shown"
                )
            start = torch.tensor([inputs.propensities[k] for k in self.index.ids.tolist()])
        buffers = {
            "theta": start,
            "zeta": torch.zeros(size),
            "sums": torch.zeros(4, size),  # shown, clicks, and the two terms of scoring, averaged over batches
            "updates": torch.zeros(()),
            "moved": torch.zeros(()),  # of θ, relatively, in its last iteration
            "impressions": torch.zeros(size),  # that θ was estimated from, by position
            "clicks": torch.zeros(size),
            "shown": torch.zeros(size),  # impressions in the log, by position
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("theta_from", "scale", "trust_in_clicks")}

    def estimate(self, log: Log, *, user: User | None, sessions: int, seed: int) -> None:
        """Take θ and ζ from the log, unless they are known or come with the networks."""
        if log.positions is not None:
            rows = np.ones(log.rows) if log.weights is None else np.repeat(log.weights, log.lengths)
            ids, place = np.unique(log.positions, return_inverse=True)
            shown = torch.from_numpy(np.bincount(place, rows))
            self.shown[self.index(torch.from_numpy(ids).to(self.index.ids.device))] = shown.to(self.shown)
        if self.theta_from in ("regression", "known"):
            return
        found = estimate_examination(
            log,
            self.inputs.label,
            user=user,
            sessions=sessions,
            seed=seed,
            trust=self.trust_in_clicks,
            by_item=self.theta_from == "items",
            categories=self.inputs.categories,
        )
        self.take(found)

    def take(self, examination: Examination) -> None:
        """Hold θ and ζ at what was estimated, with θ - ζ at its scale: β grows by as much as that shrinks."""
        places = self.index(torch.tensor(examination.positions, device=self.index.ids.device))
        slope = (self.scale or 1.0) * (examination.theta - examination.zeta)
        for name, values in {
            "theta": examination.zeta + slope,
            "zeta": examination.zeta,
            "impressions": examination.impressions,
            "clicks": examination.clicks,
        }.items():
            getattr(self, name)[places] = values.to(self.theta)
        self.moved.fill_(examination.moved)

    def theta_terms(self, positive: Tensor, place: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        """What a step of θ follows from: shown, clicked, and the two terms of scoring."""
        return torch.ones_like(beta), positive.to(beta.dtype), *scoring_terms(positive, self.theta[place], beta)

    def regress(self, means: Tensor) -> None:
        """A step of θ, given the means of its terms by place; the count of updates has been raised before."""
        self.sums.lerp_(means, self.updates.pow(-FORGET))
        shown, clicks, scored, expected = self.sums
        warm = self.updates <= WARM_UP
        theta = torch.where(warm, quotient(clicks, shown), updated(scored, expected, self.theta))
        largest = torch.where(shown > 0, theta, 0.0).max()
        held = quotient(theta, largest) * (self.scale or 1.0)  # as clicks tell ratios alone
        theta = (torch.where(warm, held, theta) if self.scale is None else held).clamp(LEAST, 1)
        theta = torch.where(shown > 0, theta, self.theta)
        self.moved.copy_((theta / self.theta - 1).abs().max())
        self.theta.copy_(theta)

    def report(self) -> dict[str, Any]:
        """θ, where it comes from and what it rests on."""
        return {
            "positions": self.index.ids.tolist(),
            "theta": numbers(self.theta),
            "theta_from": THETA_FROM[self.theta_from],
            "theta_scale": self._scale_text(),
            "impressions": numbers(self.impressions),
            "clicks": numbers(self.clicks),
            **({"zeta": numbers(self.zeta)} if self.trust_in_clicks else {}),
            "warnings": [{"name": name, "what": what} for name, what in self.warnings()],
        }

    def warnings(self) -> Iterable[tuple[str, str]]:
        few = [k for k, n in zip(self.index.ids.tolist(), self.clicks.tolist(), strict=True) if n < FEW_CLICKS]
        if few and bool((self.impressions > 0).any()):
            yield (
                "few clicks",
                f"theta rests on fewer than {FEW_CLICKS} clicks at positions {', '.join(map(str, few[:10]))}",
            )
        if float(self.moved) > (BATCH_MOVING if self.theta_from == "regression" else MOVING):
            yield "theta not settled", f"it still moved by {float(self.moved):.1%} in its last iteration"

    def _scale_text(self) -> str:
        if self.theta_from == "known":
            return "as known"
        if self.scale is None:
            return "estimated by the form of beta, weakly"
        return f"{self.scale:g} where it is largest, by convention: clicks tell ratios alone"


class WeighedClicks(ClickMethod):
    """A method that corrects clicks by what is known of their positions before it learns anything else."""

    def __init__(self, inputs: MethodInputs, positions: PositionModel, *, max_weight: float) -> None:
        super().__init__(inputs)
        self.positions, self.max_weight = positions, max_weight

    def prepare(self, log: Log, *, user: User | None, sessions: int, seed: int) -> None:
        self.positions.estimate(log, user=user, sessions=sessions, seed=seed)

    def first(self) -> PositionModel:
        return self.positions

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return self.positions.report()


def numbers(values: Tensor) -> list[float]:
    """For a report."""
    return [round(value, 5) for value in values.flatten().tolist()]
