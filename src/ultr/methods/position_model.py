"""The model of positions: the probability θ that an item is examined, and ζ that an irrelevant item is clicked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Unpack

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ultr.bias.equations import examined_though_zero, quotient, scoring_terms, sums_by_cell, updated
from ultr.bias.estimators import SCALE, SMALLEST
from ultr.bias.examination import SOURCES, Examination, estimate_examination
from ultr.bias.propensities import theta_by_id
from ultr.lists import Lists
from ultr.log import Log
from ultr.log.table import IN_LIST, SHIFT, as_shown, slot
from ultr.methods.base import BiasInputs, FeedbackMethod, Learner, MethodInputs, PositionIndex
from ultr.utils.distributed import summed

WARM_UP = 20  # first updates, in which θ is the ratio of click rates, its starting value
FORGET = 0.6  # the n-th batch has weight n^-0.6 in the averaged statistics
MAX_WEIGHT = 20.0  # default of the largest weight of a click
FEW_CLICKS = 100  # θ of a position with fewer clicks is uncertain
MOVING = 1e-3  # θ has not settled if its last relative change is larger
BATCH_MOVING = 1e-2  # the limit for θ that is updated by batches, which differ
THETA_FROM = {
    **SOURCES,
    "auto": "the best evidence of the log",
    "regression": "regression EM, together with the networks",
    "em": "EM as in the paper, together with the networks",
}
MIN_RELATIVE_THETA = 0.1  # rows are weighted by powers of 1/θ, with θ at least this share of the largest θ
LEAST_THETA = 0.01  # weights divide by θ, or by this if θ is smaller
Scale = Literal["estimated"] | Annotated[float, Field(gt=0, le=1)]
EM_START = 0.9  # θ before the first update by EM


def average_with(sums: Tensor, means: Tensor, updates: Tensor) -> None:
    """Average the means of a batch with `sums` of the batches before; `updates` counts batches."""
    sums.add_((means - sums) * updates.pow(-FORGET))


def sums_in_cells(terms: Iterable[Tensor], cells: Tensor, weights: Tensor, size: int) -> Tensor:
    """Return the weighted sums [terms, size] of each term by the index of its cell, 0 to size - 1."""
    weighted = [term * weights for term in terms]
    if weights.is_cuda:  # sums in a fixed order, so that a resumed run has the same bits
        values = torch.stack([values.reshape(-1) for values in weighted], dim=-1)
        sums = values.new_zeros(size, len(weighted))
        return sums.index_put((cells.reshape(-1),), values, accumulate=True).T.contiguous()
    return torch.stack([sums_by_cell(values, cells, size) for values in weighted])


def means_of_all(*parts: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the means of parts (sums, weights) of a batch over all processes, which exchange their sums once."""
    flat = [values for sums, weights in parts for values in (sums.view(-1), weights.sum().view(1))]
    totals = iter(torch.split(summed(torch.cat(flat)), [len(values) for values in flat]))
    return [next(totals).view_as(sums) / next(totals).clamp(min=1e-9) for sums, _ in parts]


class PositionModel(Learner):
    """Examination θ and trust ζ by position in P(c>0) = θ_k β + ζ_k (1 - β), for any model of relevance β.

    They are known, or estimated from the log before training (`theta_from` auto, strata or items), or θ is learned with
    β: by Fisher's scoring with its largest value fixed at `scale` (`regression`), or by the M-step of the paper of
    `pairwise-em`, θ_k = mean of [c>0] + [c=0] t at position k (`em`).

    A method may weight rows by θ_k^-`row_power`: low positions hold the items that are most like those ranked later,
    but their feedback is the noisiest.
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
        theta_from: str = "auto",
        trust_in_clicks: bool = False,
        row_power: float = 0.0,
        printed: bool = False,
    ) -> None:
        super().__init__()
        self.inputs, self.scale, self.trust_in_clicks, self.row_power = inputs, scale, trust_in_clicks, row_power
        self.theta_from, self.printed = theta_from if inputs.propensities is None else "known", printed
        self.evidence: dict[str, Any] = {}  # the parts of a report that say how θ was estimated, if it was
        self.index = PositionIndex(inputs.positions)
        size = len(self.index)
        start = torch.full((size,), 1.0 if inputs.truth else EM_START if theta_from == "em" else scale or 1.0)
        if inputs.propensities is not None:
            known = {slot(position): theta for position, theta in inputs.propensities.items()}
            start = torch.tensor(list(theta_by_id(known, tuple(self.index.ids.tolist())).values()))
        buffers = {
            "theta": start,
            "zeta": torch.zeros(size),
            "sums": torch.zeros(4, size),  # means over batches of the terms that update θ (`theta_terms`)
            "updates": torch.zeros(()),
            "moved": torch.zeros(()),  # the largest relative change of θ in the last iteration
            "impressions": torch.zeros(size),  # impressions that θ was estimated from, by position
            "clicks": torch.zeros(size),  # clicks that θ was estimated from, by position
            "shown": torch.zeros(size),  # impressions in the training log, by position
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)

    @property
    def theta_learned(self) -> bool:
        """Whether θ is learned from the batches of training, together with the networks."""
        return self.theta_from in ("regression", "em")

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("theta_from", "scale", "trust_in_clicks", "row_power")}

    def row_weights(self, place: Tensor) -> Tensor:
        """Return the row weights θ_k^-p of positions, p = `row_power`, with mean 1 over the log.

        All rows have weight 1 if θ is regressed: weights that depend on θ would pull it down.
        """
        if self.theta_learned or not self.row_power:
            return torch.ones_like(self.theta)[place]
        weights = self.theta.clamp(min=MIN_RELATIVE_THETA * self.theta.max()) ** -self.row_power
        shown = torch.where(self.shown.any(), self.shown, 1.0)
        return (weights * (shown.sum() / (shown * weights).sum()))[place]

    def estimate(self, log: Log, **given: Unpack[BiasInputs]) -> None:
        """Estimate θ and ζ from the log, unless they are known or are regressed together with the networks.

        A given `examination` is the best estimate of this log without trust, which is not made again.
        """
        if log.positions is not None:
            rows = np.ones(log.rows) if log.weights is None else np.repeat(log.weights, log.lengths)
            ids, place = np.unique(log.positions, return_inverse=True)
            shown = torch.from_numpy(np.bincount(place, rows))
            self.shown[self.index(torch.from_numpy(ids).to(self.index.ids.device))] = shown.to(self.shown)
        if self.theta_learned or self.theta_from == "known":
            return
        examination = given.get("examination")
        if examination is None or self.trust_in_clicks or self.theta_from != "auto":
            examination = estimate_examination(
                log,
                self.inputs.label,
                user=given["user"],
                sessions=given["sessions"],
                seed=given["seed"],
                trust=self.trust_in_clicks,
                theta_from=self.theta_from,
                device=self.theta.device,
            )
        self.take(examination)

    def take(self, examination: Examination) -> None:
        """Set θ and ζ to a cautious estimate, with θ - ζ multiplied by `scale` (which divides β by `scale`)."""
        places = self.index(torch.tensor(examination.positions, device=self.index.ids.device))
        estimate = self.theta.clone()
        for theta, of in ((estimate, examination), (self.theta, examination.cautious())):
            slope = (self.scale or 1.0) * (of.theta - of.zeta)
            theta[places] = torch.from_numpy(of.zeta + slope).to(theta)
        for name, values in {
            "zeta": examination.zeta,
            "impressions": examination.impressions,
            "clicks": examination.clicks,
        }.items():
            getattr(self, name)[places] = torch.from_numpy(values).to(self.theta)
        self.moved.fill_(examination.moved)
        error = examination.error
        self.evidence = {
            "theta_from": examination.source,
            **({} if torch.equal(estimate, self.theta) else {"theta": numbers(estimate)}),  # for the report
            **({} if error is None else {"theta_standard_error": round(error, 5)}),
        }

    def theta_at(self, positions: Tensor) -> Tensor:
        """Return θ at positions, at least `LEAST_THETA`."""
        return self.theta[self.index(positions.to(self.theta.device))].clamp(min=LEAST_THETA)

    def theta_terms(self, positive: Tensor, place: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        """Return the terms, by item, that update θ: 1, clicked, and two terms of which θ is the quotient."""
        one, clicked, theta = torch.ones_like(beta), positive.to(beta.dtype), self.theta[place]
        if self.theta_from == "em":
            return one, clicked, torch.where(positive, one, examined_though_zero(theta, beta)), one
        return one, clicked, *scoring_terms(positive, theta, beta)

    def ratio(self, sums: Tensor, means: Tensor, previous: Tensor) -> Tensor:
        """Average two means of a batch with `sums` of the batches before, and return the new value of their ratio.

        If `printed`, it is instead  previous (1-α) + α (the ratio of the batch),  with α = n^-0.6 for the n-th batch
        (Eq. 20). A cell without data keeps its value in both forms.
        """
        average_with(sums, means, self.updates)
        if self.printed:
            return torch.lerp(previous, updated(means[0], means[1], previous), self.updates.pow(-FORGET))
        return updated(sums[0], sums[1], previous)

    def regress(self, means: Tensor) -> None:
        """Update θ from the means [terms, positions] of its terms; the caller has already increased `updates`."""
        if self.theta_from == "em":
            theta = self.ratio(self.sums[2:], means[2:], self.theta).clamp(SMALLEST, 1)
        else:
            average_with(self.sums, means, self.updates)
            shown, clicks, scored, expected = self.sums
            warm = self.updates <= WARM_UP
            theta = torch.where(warm, quotient(clicks, shown), updated(scored, expected, self.theta))
            largest = torch.where(shown > 0, theta, 0.0).max()
            scaled = quotient(theta, largest) * (self.scale or 1.0)  # clicks determine only ratios
            theta = (torch.where(warm, scaled, theta) if self.scale is None else scaled).clamp(SMALLEST, 1)
            theta = torch.where(shown > 0, theta, self.theta)
        self.moved.copy_((theta / self.theta - 1).abs().max())
        self.theta.copy_(theta)

    def report(self) -> dict[str, Any]:
        """Return by position the estimate of θ and the θ that is used, with the data behind them and warnings."""
        return {
            "positions": self.index.ids.tolist(),
            "theta": numbers(self.theta),
            "theta_used": numbers(self.theta),
            "theta_from": THETA_FROM[self.theta_from],
            **self.evidence,
            "theta_scale": self._scale_text(),
            "impressions": numbers(self.impressions),
            "clicks": numbers(self.clicks),
            **({"zeta": numbers(self.zeta)} if self.trust_in_clicks else {}),
            "warnings": [{"name": name, "what": what} for name, what in self.warnings()],
        }

    def warnings(self) -> Iterable[tuple[str, str]]:
        few = [k for k, n in zip(self.index.ids.tolist(), self.clicks.tolist(), strict=True) if n < FEW_CLICKS]
        if few and bool((self.impressions > 0).any()):
            in_list = sorted({k & IN_LIST for k in few})
            positions = ", ".join(str(as_shown(k)) for k in in_list[:10]) + (
                " of some segments" if max(few) >> SHIFT else ""
            )
            yield "few clicks", f"theta is estimated from fewer than {FEW_CLICKS} clicks at positions {positions}"
        if float(self.moved) > (BATCH_MOVING if self.theta_learned else MOVING):
            yield "theta not settled", f"theta still changed by {float(self.moved):.1%} in its last iteration"

    def _scale_text(self) -> str:
        if self.theta_from == "known":
            return "as in the known propensities"
        if self.theta_from == "em":
            return f"as EM finds it from {EM_START:g}"
        if self.scale is None:
            return "estimated from the shape of beta, with little certainty"
        return f"{self.scale:g} at its largest, by convention: clicks determine only ratios"


class WithPositions(FeedbackMethod):
    """A method that corrects feedback by a `PositionModel`, which is known or estimated before training."""

    positions: PositionModel

    def estimate_bias(self, log: Log, **given: Unpack[BiasInputs]) -> None:
        self.positions.estimate(log, **given)

    def bias_learner(self) -> PositionModel:
        return self.positions

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return self.positions.report()


def numbers(values: Tensor) -> list[float]:
    """Return the values as a flat list of numbers with 5 decimals, for a report."""
    return [round(value, 5) for value in values.flatten().tolist()]
