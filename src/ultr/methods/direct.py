"""Likelihoods of feedback with examination as a factor: known, or estimated together with relevance by EM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal, Unpack

import torch
from pydantic import Field
from torch import Tensor

from ultr.bias.equations import relevance_posterior, updated
from ultr.bias.estimators import SCALE
from ultr.datasets.users import simulate_log
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.anchor import Part, start_network
from ultr.methods.base import (
    AtLeastZero,
    BiasInputs,
    ClickMethod,
    MethodInputs,
    ThetaFrom,
    at_least_single,
    options_of,
)
from ultr.methods.losses import logistic_loss, product_logistic_loss, reduced
from ultr.methods.position_model import LEAST_THETA, PositionModel, Scale, WithPositions, means_of_all, sums_in_cells
from ultr.rankers.feedback import HURDLES, Hurdle, OrdinalHurdle, Synthesised

POWER = 1.5  # of Tweedie's distribution: variance = mean^1.5, between Poisson (1) and gamma (2)
VALUE_SESSIONS = 10_000  # simulated sessions from which the distribution of values is estimated
LARGEST_LOG_RATE = 20.0  # largest |log| of a predicted mean
ULTRA_STEP = 0.05  # share of a batch in θ of regression EM, with variant=ultra


class Direct(WithPositions):
    """E[c | x, k] = θ_k β(x) μ(x), fitted by `likelihood` with θ known or estimated before; the score is β μ.

        hurdle    P(c>0) = θ_k β by cross-entropy, E[c | c>0] = μ by `values`: the default for values
        binary    P(c>0) = θ_k sigmoid(s): the default for a label that is 0 or 1
        poisson   E[c] = θ_k exp(s), by θ_k exp(s) - c s
        tweedie   the same mean, with variance mean^1.5: many zeros and a continuous rest

    It is what a practitioner writes by hand: log θ is an offset of the regression. `values` of a hurdle are fitted by
    the `gamma` deviance or by `ordinal` regression. If all items are watched, as in a feed that plays by itself, β is 1
    and only the values are learned. Rows are weighted by θ_k^-`row_power`.

    Two options separate the loss of `pairwise-em` from the rest of it: `networks` is how many networks learn side by
    side and are averaged, and `anchor=linear` starts them at a linear model (see `ultr.methods.anchor`).
    """

    LEARNS_ALONE = True

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        likelihood: Literal["hurdle", "binary", "poisson", "tweedie"] | None = None,
        theta: ThetaFrom = "auto",
        values: Literal["gamma", "ordinal"] | None = None,
        row_power: AtLeastZero = 0.0,
        networks: Annotated[int, Field(ge=1, le=8)] = 1,
        anchor: Literal["linear", "none"] = "none",
    ) -> None:
        default = "binary" if inputs.label_is_binary and values is None else "hurdle"
        self.likelihood = likelihood or default
        self.anchored, self.networks = anchor == "linear", networks
        if self.anchored or networks > 1:
            known = inputs.label_is_binary if self.likelihood == "binary" else self.likelihood == "hurdle"
            if inputs.ranker != "mlp" or not known or values == "ordinal":
                what = "anchor=linear and networks need hidden layers, and the default likelihood of the label"
                raise OptionError(what, got=f"{inputs.ranker}, {self.likelihood}", hint="leave them out")
            more = {"networks": networks, "skip": self.anchored}
            inputs = replace(inputs, ranker_options={**inputs.ranker_options, **more})
        super().__init__(inputs)
        self.positions = PositionModel(inputs, theta_from=theta, row_power=row_power)
        if values is not None and self.likelihood != "hurdle":
            hint = "remove one of them, or use likelihood=hurdle"
            raise OptionError(f"values={values} cannot be used with likelihood={likelihood}", hint=hint)
        if self.likelihood == "hurdle":
            kind = HURDLES[values or Hurdle.KIND]
            self.ranker = kind(inputs.make_ranker(outputs=kind.OUTPUTS))
        elif networks > 1:
            self.ranker = Synthesised(inputs.make_ranker(), inputs.label, inputs.binary)

    OPTIONS = options_of(__init__)

    def start_ranker(self, log: Log, *, seed: int) -> None:
        if not self.anchored:
            return
        network = self.ranker.ranker if isinstance(self.ranker, Hurdle | Synthesised) else self.ranker
        parts: tuple[Part, ...] = ("click", "value") if isinstance(self.ranker, Hurdle) else ("click",)
        start_network(network, log, self.inputs.label, self.positions, parts * self.networks, seed=seed)

    def estimate_bias(self, log: Log, **given: Unpack[BiasInputs]) -> None:
        super().estimate_bias(log, **given)
        if isinstance(self.ranker, OrdinalHurdle):
            if given["user"] is not None:
                log, _ = simulate_log(log, given["user"], sessions=VALUE_SESSIONS, seed=given["seed"])
            labels = self.inputs.label(log.actions)
            self.ranker.fit_values(labels[labels > 0])

    def loss(self, lists: Lists) -> Tensor:
        labels, where = self.labels(lists), lists.where
        place = self.positions.index(lists.shown_positions)
        theta, rows = self.positions.theta[place].clamp(LEAST_THETA, 1 - 1e-6), self.positions.row_weights(place)
        if self.likelihood in ("poisson", "tweedie"):
            terms = rows * _mean_deviance(self.score(lists.features), labels, theta, where, kind=self.likelihood)
            return reduced(torch.where(where, terms, 0.0).sum(-1), lists.weights)
        clicked = (labels > 0).to(theta.dtype)
        common = {"where": where, "weights": lists.weights, "item_weights": rows}
        if isinstance(self.ranker, Synthesised):
            logits = at_least_single(self.ranker.outputs(lists.features)).unbind(-2)
            losses = [product_logistic_loss(each[..., 0], theta.logit(), clicked, **common) for each in logits]
            return torch.stack(losses).sum(0)
        if not isinstance(self.ranker, Hurdle):
            return product_logistic_loss(self.score(lists.features), theta.logit(), clicked, **common)
        total = torch.zeros((), device=where.device)
        for outputs in map(at_least_single, self.ranker.by_network(lists.features)):
            value_loss = rows * self.ranker.value_loss(outputs[..., 1:], labels)
            values = reduced(torch.where(where & (labels > 0), value_loss, 0.0).sum(-1), lists.weights)
            total = total + (product_logistic_loss(outputs[..., 0], theta.logit(), clicked, **common) + values)
        return total


def _mean_deviance(scores: Tensor, labels: Tensor, theta: Tensor, where: Tensor, *, kind: str) -> Tensor:
    """Return the deviance by item, up to a constant, of labels with the mean θ exp(s), by Poisson or Tweedie."""
    log_mean = scores.masked_fill(~where, 0.0).clamp(-LARGEST_LOG_RATE, LARGEST_LOG_RATE) + theta.log()
    if kind == "poisson":
        return log_mean.exp() - labels * log_mean
    return ((2 - POWER) * log_mean).exp() / (2 - POWER) - labels * ((1 - POWER) * log_mean).exp() / (1 - POWER)


class RegressionEM(ClickMethod):
    """P(click) = θ_k sigmoid(s(x)). The score s is regressed on the posterior of relevance; θ follows by EM.

    This is regression-based EM (Wang et al. 2018).
    The target is 1 for a click, else (1-θ_k)β / (1-θ_k β) with β = sigmoid(s): `targets=soft`, or a draw with this
    probability (`sampled`), as in Wang et al. Examination θ is known, or is estimated together with s, with its largest
    value at `scale` because clicks do not determine it.

    `variant=ultra` follows the toolbox ULTRA, so that published numbers can be compared: targets=sampled, θ starts at
    0.9 and is not scaled, and each batch moves θ_k by 0.05 towards the mean of P(examined | c) at position k.
    """

    LEARNS_ALONE = True

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        targets: Literal["soft", "sampled"] | None = None,
        scale: Scale | None = None,
        variant: Literal["standard", "ultra"] = "standard",
    ) -> None:
        super().__init__(inputs)
        self.ultra = variant == "ultra"
        if self.ultra and scale is not None:
            what = "scale cannot be used with variant=ultra, which does not scale theta"
            raise OptionError(what, got=scale, hint="remove one of them")
        self.sampled = (targets or ("sampled" if self.ultra else "soft")) == "sampled"
        scale = SCALE if scale is None else scale
        fixed = None if scale == "estimated" else float(scale)
        self.positions = PositionModel(inputs, scale=fixed, theta_from="em" if self.ultra else "regression")

    OPTIONS = options_of(__init__)

    @property
    def draws(self) -> bool:
        return self.sampled

    @torch.no_grad()
    def update(self, lists: Lists) -> None:
        if self.positions.theta_from == "known":
            return
        with self.without_dropout():
            beta = self.score(lists.features).sigmoid()
        self.positions.updates += 1
        place, weights = self.positions.index(lists.shown_positions), lists.weights[:, None] * lists.where
        terms = self.positions.theta_terms(self.clicked(lists), place, beta)
        (means,) = means_of_all((sums_in_cells(terms, place, weights, len(self.positions.index)), weights))
        if self.ultra:
            shown, _, examined, _ = means
            theta = torch.lerp(self.positions.theta, updated(examined, shown, self.positions.theta), ULTRA_STEP)
            self.positions.moved.copy_((theta / self.positions.theta - 1).abs().max())
            self.positions.theta.copy_(theta)
        else:
            self.positions.regress(means)

    def loss(self, lists: Lists) -> Tensor:
        logits = self.score(lists.features)
        theta = self.positions.theta[self.positions.index(lists.shown_positions)]
        with torch.no_grad():
            targets = relevance_posterior(self.clicked(lists), theta, logits.sigmoid())
            targets = torch.bernoulli(targets) if self.sampled else targets
        return logistic_loss(logits, targets, where=lists.where, weights=lists.weights)

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return self.positions.report()
