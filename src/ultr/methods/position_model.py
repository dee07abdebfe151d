"""Positions: examination θ and trust ζ at each, and which items the logging ranker shows at which position."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Unpack

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from ultr.bias.equations import examined_though_zero, quotient, scoring_terms, sums_by_cell, updated
from ultr.bias.estimators import SCALE, SMALLEST
from ultr.bias.examination import SOURCES, Examination, estimate_examination
from ultr.bias.logging_policy import STRATA, logging_score, policy_network
from ultr.bias.propensities import theta_by_id
from ultr.datasets.users import User
from ultr.errors import OptionError
from ultr.lists import ListBatches, Lists
from ultr.log import Log
from ultr.log.table import IN_LIST, SHIFT, as_shown, slot
from ultr.methods.base import BiasInputs, FeedbackMethod, Learner, MethodInputs, PositionIndex
from ultr.rankers import FeatureEncoder, LinearRanker
from ultr.utils.distributed import summed

WARM_UP = 20  # first updates, in which θ is the ratio of click rates, its starting value
FORGET = 0.6  # the n-th batch has weight n^-0.6 in the averaged statistics
MAX_WEIGHT = 20.0  # default of the largest weight of a click
FEW_CLICKS = 100  # θ of a position with fewer clicks is uncertain
MOVING = 1e-3  # θ has not converged if its last relative change is larger
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


def simulated_user(inputs: MethodInputs, option: str) -> User:
    """Return the simulated user whose examination the `option` of a method takes as known, for experiments."""
    if inputs.user is None:
        raise OptionError(f"{option} needs simulated users", hint="pass --users pbm, or another value")
    if not inputs.user.by_own_position:
        what = f"{option} needs users whose examination depends on the position alone"
        raise OptionError(what, got=type(inputs.user).__name__, hint="pass --users pbm, or remove this option")
    return inputs.user


class PositionModel(Learner):
    """Examination θ and trust ζ by position in P(c>0) = θ_k β + ζ_k (1 - β), for any model of relevance β.

    They are known, or estimated from the log before training (`theta_from` auto, strata or items), or are those of the
    simulated users (`oracle`; ζ is 0 unless `trust_in_clicks`), or θ is learned with β: by Fisher's scoring with its
    largest value fixed at `scale` (`regression`), or by the M-step of the paper of `pairwise-em`, θ_k = mean of [c>0] +
    [c=0] t at position k (`em`).

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
        zeta = torch.zeros(size)
        if theta_from == "oracle" and not inputs.truth:
            user, self.theta_from = simulated_user(inputs, "theta=oracle"), "known"
            start = user.theta(self.index.ids)
            if trust_in_clicks:
                start, zeta = user.click_levels(self.index.ids)
        buffers = {
            "theta": start,
            "zeta": zeta,
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

    @property
    def step(self) -> Tensor | None:
        """The share α of the n-th batch, if ratios of batches are averaged: n^-0.6 if `printed`."""
        return self.updates.pow(-FORGET) if self.printed else None

    def ratio(self, sums: Tensor, means: Tensor, previous: Tensor) -> Tensor:
        """Average two means of a batch with `sums` of the batches before, and return the new value of their ratio.

        With a `step` α, it is instead  previous (1-α) + α (the ratio of the batch)  (Eq. 20). A cell without data keeps
        its value in both forms.
        """
        average_with(sums, means, self.updates)
        if self.step is not None:
            return torch.lerp(previous, updated(means[0], means[1], previous), self.step)
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
            yield "theta not converged", f"theta changed by {float(self.moved):.1%} in its last iteration"

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


# --- The positions that the logging ranker gives to items -------------------------------------------------------------
# The logging ranker is recovered from the log (`bias.logging_policy`). A stratum holds items that it found equally
# good: a range of its score, less the mean score of the list. Within a list, only differences of scores decide about
# positions.

ROWS_IN_CELL = 20  # mean number of rows that a position of a stratum should have
UNUSED = 1e30  # the edge of a stratum that no score reaches
PRIOR_IMPRESSIONS = 10.0  # weight of the stratum in the positions of an item, in impressions
PROPENSITY = "propensity of items"  # name of ρ among the actions of a log


class LoggingStrata(nn.Module):
    """A module from lists to the stratum of each item, 0 to STRATA - 1; all items are in stratum 0 before `fit`.

    The model of the logging ranker is a part of it, as buffers, so that no optimizer changes it.
    """

    edges: Tensor
    by_network: Tensor

    def __init__(self, inputs: MethodInputs) -> None:
        super().__init__()
        self.index = PositionIndex(inputs.positions)
        self.linear = _fixed(LinearRanker(FeatureEncoder(inputs.features, inputs.categories)))
        self.network = _fixed(policy_network(inputs.features, inputs.categories))
        self.register_buffer("by_network", torch.zeros(()))  # 1 if the network is the model, and not the linear score
        self.register_buffer("edges", torch.full((STRATA - 1,), UNUSED))
        self.eval()

    def train(self, mode: bool = True) -> LoggingStrata:
        """Keep the module in evaluation mode: the score of the logging ranker has no dropout."""
        return super().train(False)

    @property
    def several(self) -> Tensor:
        """Whether there is more than one stratum: a single one explains nothing, and its gradients are rounding."""
        return self.edges[0] < UNUSED / 2

    @torch.no_grad()
    def forward(self, lists: Lists) -> Tensor:
        score = torch.where(self.by_network > 0, self.network(lists.features), self.linear(lists.features))
        score = torch.where(lists.where, score, 0.0)
        mean = score.sum(-1, keepdim=True) / lists.where.sum(-1, keepdim=True).clamp(min=1)
        return ((score - mean)[..., None] > self.edges).sum(-1)

    def fit(self, log: Log, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Recover the logging ranker and set the strata to quantiles; return the stratum and place of each row.

        The place is the index of the position. There are fewer strata if the log is small.
        """
        positions = log.shown_positions("the policy of the logging ranker")
        logged = logging_score(log, seed=seed, device=self.edges.device)
        linear = isinstance(logged.ranker, LinearRanker)
        (self.linear if linear else self.network).load_state_dict(logged.ranker.state_dict())
        self.by_network.fill_(not linear)
        request = log.request_of_row
        score = logged.score.astype(np.float64)
        score -= (np.bincount(request, score) / np.maximum(1, log.lengths))[request]
        count = int(np.clip(log.rows // (ROWS_IN_CELL * len(self.index)), 1, STRATA))
        ordered, cuts = np.sort(score), np.arange(1, count) * log.rows // count
        edges = torch.from_numpy((ordered[cuts - 1] + ordered[cuts]) / 2)  # between two scores, so that none is on it
        self.edges.fill_(UNUSED)[: count - 1] = edges.to(self.edges)
        places = self.index(torch.from_numpy(np.ascontiguousarray(positions)).to(self.index.ids.device))
        return np.searchsorted(self.edges.cpu().numpy(), score), places.cpu().numpy()


class LoggingPositions(nn.Module):
    """The positions at which the logging ranker shows the items of each stratum: rows of the log by both."""

    counts: Tensor

    def __init__(self, inputs: MethodInputs) -> None:
        super().__init__()
        self.strata = LoggingStrata(inputs)
        self.register_buffer("counts", torch.ones(STRATA, len(self.strata.index)))

    def fit(self, log: Log, *, seed: int) -> None:
        """Count the rows of a log by stratum and position."""
        stratum, place = self.strata.fit(log, seed=seed)
        cells = np.bincount(stratum * self.counts.shape[1] + place, _row_weights(log), self.counts.numel())
        self.counts.copy_(torch.from_numpy(cells.reshape(self.counts.shape)))

    def propensity(self, lists: Lists, alpha: Tensor) -> Tensor:
        """Return ρ = E[α_k | stratum] of each item, given α by position."""
        return (self.counts @ alpha / self.counts.sum(1).clamp(min=1e-9))[self.strata(lists)]

    @torch.no_grad()
    def by_item(self, log: Log, items: np.ndarray, alpha: Tensor) -> np.ndarray:
        """Return ρ of each row: that of its stratum, times the ratio of α and ρ over other impressions of the item.

        `items` are codes 0, 1, ... of rows. The ratio is drawn to 1 as by `PRIOR_IMPRESSIONS` average impressions, so
        that an item that occurs once has the ρ of its stratum.
        """
        batches, weights = ListBatches(log, device=alpha.device), _row_weights(log)
        weights = weights / max(weights.mean(), 1e-9)
        here, mean = np.zeros((2, log.rows))
        for requests, lists in batches.by_length():
            rows = batches.rows(requests, lists.where)[lists.where].cpu().numpy()
            here[rows] = alpha[self.strata.index(lists.shown_positions)][lists.where].cpu().numpy()
            mean[rows] = self.propensity(lists, alpha)[lists.where].cpu().numpy()
        others = [np.bincount(items, weights * each)[items] - weights * each for each in (here, mean)]
        prior = PRIOR_IMPRESSIONS * np.average(mean, weights=weights)
        ratio = (others[0] + prior) / np.maximum(others[1] + prior, 1e-9)
        return np.asarray(mean * ratio, np.float32)


class LoggingWeights(LoggingPositions):
    """Weights of items that make the position independent of the stratum, as if positions were given by chance:

    w = min(P(k) / P(k | stratum), `max_weight`), divided by its mean over the rows of the log
    """

    def __init__(self, inputs: MethodInputs, *, max_weight: float) -> None:
        super().__init__(inputs)
        self.max_weight = max_weight

    def forward(self, lists: Lists) -> Tensor:
        shares = self.counts / self.counts.sum()
        independent = shares.sum(1, keepdim=True) * shares.sum(0)
        ratios = torch.where(shares > 0, independent / shares, 1.0).clamp(max=self.max_weight)
        table = ratios / (shares * ratios).sum()
        return table[self.strata(lists), self.strata.index(lists.shown_positions)]


def _row_weights(log: Log) -> np.ndarray:
    return np.ones(log.rows) if log.weights is None else np.repeat(log.weights, log.lengths).astype(np.float64)


def _fixed(module: nn.Module) -> nn.Module:
    """Turn the parameters of a module into buffers."""
    for part in module.modules():
        values: dict[str, Any] = dict(part.named_parameters(recurse=False))
        for name, value in values.items():
            delattr(part, name)
            part.register_buffer(name, value.detach().clone())
    return module
