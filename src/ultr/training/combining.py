"""The stage `combine`: the ranker of a run from its fits, with the share of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from ultr.bias.examination import Examination
from ultr.log.labels import Label
from ultr.methods.base import PositionIndex
from ultr.methods.position_model import LEAST_THETA
from ultr.rankers.combined import Blend, Part, likely_weights, spread_within
from ultr.training.config import is_trees
from ultr.training.data import Data
from ultr.training.fitting import Fitted
from ultr.utils.calibration import Calibration

# The validation requests chose the steps and rounds of the parts too, so that their likelihood flatters the part that
# fitted them best. Shares are as if this many other clicks had shown that equal ones are best.
EQUAL_CLICKS = 1000


@dataclass(frozen=True, eq=False)
class Ranker:
    """The artefact of `combine`: the ranker of a run, and its scores of the validation rows; later its calibration."""

    ranker: nn.Module
    scores: np.ndarray
    shares: dict[str, float] = field(default_factory=dict)  # kind of ranker -> its share; empty with one ranker
    calibration: Calibration | None = None


def combine(fits: Sequence[Fitted], data: Data, examination: Examination | None) -> Ranker:
    """Return the ranker of a run: its only fit, or the sum of a network and trees.

    Scores are divided by their deviation within requests. The likelihood of the feedback on the validation rows, given
    each request, decides the shares, which few clicks leave near equal; they are equal if no feedback is known.
    """
    if len(fits) == 1:
        return Ranker(fits[0].ranker, fits[0].scores)
    request = torch.from_numpy(np.ascontiguousarray(data.validation.request_of_row))
    spreads = [float(spread_within(torch.from_numpy(fit.scores), request)) for fit in fits]
    columns = np.column_stack([fit.scores / spread for fit, spread in zip(fits, spreads, strict=True)])
    shares = _shares(torch.from_numpy(columns).double(), request, _feedback(data, examination))
    # Trees come first, as `Model` and the converters of a sum expect them.
    trees_first = sorted(zip(fits, shares, spreads, strict=True), key=lambda each: not is_trees(each[0].kind))
    parts = [
        replace(part, weight=part.weight * weight / spread)
        for fit, weight, spread in trees_first
        for part in _parts(fit)
        if weight  # what has no share costs time when the model scores
    ]
    kinds = (fit.kind for fit in fits)
    return Ranker(Blend(parts), columns @ shares, dict(zip(kinds, shares, strict=True)))


def _shares(columns: Tensor, request: Tensor, feedback: tuple[Tensor, Tensor] | None) -> list[float]:
    """Return the share of each column of scores in their sum."""
    equal = [1 / columns.shape[1]] * columns.shape[1]
    if feedback is None:
        return equal
    apart = sum(spread_within(column, request).square() for column in (columns - columns.mean(1, keepdim=True)).T)
    weights = likely_weights(columns, request, *feedback, ridge=EQUAL_CLICKS * float(apart))
    return (weights / weights.sum()).tolist() if weights.any() else equal


def _parts(fit: Fitted) -> tuple[Part, ...]:
    if isinstance(fit.ranker, Blend):
        return fit.ranker.parts
    return (Part(fit.ranker, fit.kind, fit.options, indicators=fit.inputs.indicators),)


def _feedback(data: Data, examination: Examination | None) -> tuple[Tensor, Tensor] | None:
    """Return labels and log θ of the validation rows; None if either is unknown."""
    log, label = data.validation, Label(data.label)
    if examination is None or log.positions is None or not set(label.actions) <= set(log.actions):
        return None
    place = PositionIndex(examination.positions)(torch.from_numpy(log.positions))
    theta = torch.from_numpy(examination.cautious().theta)[place].clamp(min=LEAST_THETA)
    return torch.from_numpy(np.asarray(label(log.actions), np.float64)), theta.log()
