"""The weights of pairs of items: the bias model behind them, and the loss that they belong to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Literal, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from ultr.bias.equations import (
    exact_above,
    exact_below,
    pair_examined,
    pair_trust,
    paper_weights,
    quotient,
    relevance_posterior,
)
from ultr.bias.estimators import SCALE
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.base import (
    RELEASED_ACCUMULATOR,
    AtLeastZero,
    BiasInputs,
    Learner,
    MaxWeight,
    MethodInputs,
    Relevance,
    as_limit,
    options_of,
)
from ultr.methods.bias_model import BiasModel, OracleModel, diagnosis
from ultr.methods.losses import gaps, lambdaloss_weights, lambdarank_weights, pairs_of, preferred_pairs
from ultr.methods.position_model import LEAST_THETA, Scale
from ultr.rankers import scores_on_device

MAX_WEIGHT = 10.0  # default of the largest weight of a pair
EXPECTED = "expected relevance of pairwise-em"  # name of r̂ among the actions of a log


class PairWeights(Learner):
    """The weights w_ij of pairs in the losses of `pairwise-em`, which networks and trees share.

    `ultr.methods.pairwise_em` explains the options. The weights are those of labels c, and come from the bias model,
    which is trained before the ranker, or together with it (`joint`).
    """

    _given = False  # whether another model of relevance has taken the place of the bias model

    def __init__(self, inputs: MethodInputs, **options: Any) -> None:
        nn.Module.__init__(self)
        self.inputs = inputs
        self.set_up(**options)

    def set_up(
        self,
        *,
        loss: Literal["posterior", "opt-posterior", "opt", "bayes-ipw", "ipw"] | None = None,
        weights: Literal["paper", "exact"] | None = None,
        em: Literal["staged", "joint", "printed", "oracle"] | None = None,
        theta: Literal["auto", "strata", "items", "regression", "em", "oracle"] | None = None,
        scale: Scale = SCALE,
        row_power: AtLeastZero = 1.0,
        trust: Literal["none", "pairs", "clicks", "values"] | None = None,
        targets: Literal["soft", "sampled"] | None = None,
        delta: Literal["dcg", "lambdaloss"] | None = None,
        variant: Literal["standard", "released"] = "standard",
        max_weight: MaxWeight | None = None,
    ) -> None:
        """Check the options, and make the bias model."""
        inputs = self.inputs
        released = variant == "released" and not inputs.truth
        self.kind = loss or ("opt" if variant == "released" else "posterior")
        self.by_value = self.kind in ("posterior", "opt-posterior")
        self.by_metric = self.kind in ("opt", "opt-posterior")
        _check(self.kind, self.by_value, weights=weights, trust=trust, delta=delta, max_weight=max_weight)
        em = em or ("joint" if released else "staged")
        self.joint = em != "staged" and not inputs.truth
        theta = theta or ("em" if self.joint else "auto")
        if scale == "estimated" and theta != "regression":
            hint = "add theta=regression"
            raise OptionError("scale=estimated needs theta=regression", got=f"theta={theta}", hint=hint)
        self.weights = "exact" if inputs.truth else weights or "paper"
        self.released, self.delta = released, delta or ("lambdaloss" if released else "dcg")
        max_weight = max_weight or ("none" if released else MAX_WEIGHT)
        self.max_weight = as_limit(max_weight)
        default_trust = "pairs" if self.kind in ("opt", "bayes-ipw") else "none"
        self.trust = "none" if inputs.truth else trust or default_trust
        self.accumulator = RELEASED_ACCUMULATOR if released else 0.0
        kind = OracleModel if em == "oracle" and not inputs.truth else BiasModel
        self.bias_model = kind(
            inputs,
            scale=None if scale == "estimated" else float(scale),
            theta_from=theta,
            trust_in_clicks=self.trust == "clicks",
            scaled_values=self.trust == "values",
            pairs=not (self.by_value or inputs.truth) and (self.trust == "pairs" or self.weights == "paper"),
            trust_in_pairs=self.trust == "pairs",
            sampled=(targets or ("sampled" if released or em == "printed" else "soft")) == "sampled",
            released=released,
            row_power=row_power,
            printed=em == "printed",
        )
        self.bias_model.accumulator = self.accumulator

    OPTIONS: ClassVar[dict[str, Any]] = options_of(set_up)

    def estimate_bias(self, log: Log, **given: Unpack[BiasInputs]) -> None:
        if not self.inputs.truth:
            self.bias_model.estimate(log, **given)

    def bias_learner(self) -> BiasModel | None:
        return None if self.inputs.truth or self.joint else self.bias_model

    def labels(self, lists: Lists) -> Tensor:
        return self.inputs.labels_of(lists)

    def with_targets(self, log: Log) -> Log:
        """Return a log with r̂ of each row, unless the bias model is trained together with the ranker."""
        if self.joint or self.inputs.truth or not self.by_value:
            return log
        model = self.bias_model.eval()
        predictions = scores_on_device(
            lambda rows: torch.stack(model.predictions(rows)[:2], -1), log.features, device=model.theta.device
        )
        logit, log_value = predictions.unbind(-1)
        return self._with_expected(log, logit.sigmoid(), log_value.exp())

    @property
    def takes_relevance(self) -> bool:
        return self.by_value and self.bias_learner() is not None and self.trust == "none"

    def with_relevance(self, log: Log, relevance: Relevance) -> Log:
        """Return a log with r̂ of each row by another model of relevance, in place of that of the bias model."""
        self._given, theta = True, self.bias_model.theta
        return self._with_expected(
            log, torch.from_numpy(relevance.beta).to(theta), torch.from_numpy(relevance.value).to(theta)
        )

    def _with_expected(self, log: Log, beta: Tensor, value: Tensor) -> Log:
        device = self.bias_model.theta.device
        labels = torch.from_numpy(np.asarray(self.inputs.label(log.actions), np.float32)).to(device)
        positions = torch.from_numpy(log.shown_positions("the expected relevance")).to(device)
        expected = self.expected_value_of(labels, self.bias_model.index(positions), beta, value)
        return replace(log, actions={**log.actions, EXPECTED: expected.cpu().numpy()})

    def expected_value(self, lists: Lists, labels: Tensor) -> Tensor:
        """Return the expected relevance r̂ = E[r | c, x, k] of items with label c, features x and position k.

        r̂ = P(r>0 | c) c/ρ_k if c > 0, else P(r>0 | c) μ(x). The label of a relevant item is μ(x) on average, and ρ_k
        times as large at position k.
        """
        logit, log_value, _ = self.bias_model.of_lists(lists)
        place = self.bias_model.index(lists.shown_positions)
        return self.expected_value_of(labels, place, logit.sigmoid(), log_value.exp())

    def expected_value_of(self, labels: Tensor, place: Tensor, beta: Tensor, value: Tensor) -> Tensor:
        """Return r̂ as `expected_value` does, from the index of each position, β and μ."""
        model = self.bias_model
        relevant = relevance_posterior(labels > 0, model.theta[place], beta, model.zeta[place])
        return relevant * torch.where(labels > 0, labels / model.rho[place], value)

    def pair_weights(self, lists: Lists, labels: Tensor) -> Tensor:
        """Return the weights [..., i, j] of pairs with c_i > c_j, not clipped by `max_weight`; 0 for other pairs."""
        model = self.bias_model
        logit, _, preference = model.of_lists(lists)
        place = model.index(lists.shown_positions)
        theta, beta, positive = model.theta[place].clamp(min=LEAST_THETA), logit.sigmoid(), labels > 0
        (theta_i, theta_j), (_, positive_j), (i, j) = map(pairs_of, (theta, positive, place))
        plus, minus = model.plus[i, j], model.minus[i, j]
        if self.released:
            weights = paper_weights(positive_j, theta_i, theta_j, model.theta_minus[j]) * quotient(plus, plus + minus)
        elif self.weights == "paper":
            gamma = gaps(preference).sigmoid()
            examined = pair_examined(model.theta_minus[j], plus, minus, gamma, pairs_of(beta)[0])
            weights = paper_weights(positive_j, theta_i, theta_j, examined) * pair_trust(plus, minus, gamma)
        else:
            zeta = model.zeta[place]
            above, below = exact_above(theta, beta, zeta), exact_below(positive, theta, beta, zeta)
            weights = pairs_of(above)[0] * pairs_of(below)[1]
            if self.trust == "pairs":  # where c_j = 0 < c_i and both are examined, i is surely above j
                trusted = pair_trust(plus, minus, gaps(preference).sigmoid()) / plus
                weights = weights * torch.where(positive_j, trusted, 1.0)
        return torch.where(preferred_pairs(labels, where=lists.where), weights, 0.0)

    def metric_change(self, lists: Lists, labels: Tensor, scores: Tensor) -> Tensor:
        """Return |ΔZ| of swapping i and j in the order of the ranker (`variant=released`: of g).

        That of DCG is not divided by the ideal DCG, which is random because labels are.
        """
        if self.released:
            scores = self.bias_model.of_lists(lists)[2]
        if self.delta == "lambdaloss":
            return lambdaloss_weights(scores, labels, where=lists.where)
        return lambdarank_weights(scores, labels, where=lists.where, normalise=False)

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        if self.inputs.truth:
            return None
        if self._given:
            return self.bias_model.report()
        clip = math.inf if self.by_value else self.max_weight
        return diagnosis(self.bias_model, batches, weights=self.pair_weights, clip=clip)


def _check(loss: str, by_value: bool, **given: Any) -> None:
    """Raise OptionError if an option is given that the loss does not use."""
    unused = ("weights", "max_weight") if by_value else ()
    if loss != "opt":
        unused = (*unused, "delta")
    for name in unused:
        if (value := given[name]) is not None:
            shown = f"{value:g}" if isinstance(value, float) else value
            what = f"{name}={shown} cannot be used with loss={loss}"
            hint = "use loss=opt" if name == "delta" else "use loss=opt, bayes-ipw or ipw"
            raise OptionError(what, hint=f"remove {name}, or {hint}")
    if by_value and given["trust"] == "pairs":
        hint = "use loss=opt or bayes-ipw, or trust=clicks or values"
        raise OptionError(f"trust=pairs cannot be used with loss={loss}", hint=hint)
