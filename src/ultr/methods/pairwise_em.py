"""The method `pairwise-em`: EM learns a model of examination and trust, which weights the pairs of a ranking loss.

It follows *Unbiased Learning to Rank with Biased Continuous Feedback* (CIKM 2022), "the paper".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ultr.bias.equations import exact_weights, pair_examined, pair_trust, paper_weights, quotient, relevance_posterior
from ultr.bias.estimators import SCALE
from ultr.datasets.users import User
from ultr.errors import OptionError
from ultr.evaluation.metrics import batch_innermost
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.base import Method, MethodInputs, at_least, one_of
from ultr.methods.bias_model import BiasModel
from ultr.methods.diagnosis import diagnosis
from ultr.methods.losses import gaps, lambdarank_weights, pairwise_loss, preferred_pairs
from ultr.methods.position_model import scale_option

LEAST_THETA = 0.01  # weights of pairs divide by θ, or by this if θ is smaller
MAX_WEIGHT = 10.0  # default of the largest weight of a pair


class PairwiseEM(Method):
    """Pairs of items, weighted so that the expected loss is the loss without bias. Training has three stages:

    1. Examination θ from the log (`theta`: by `strata` of similar items, or by `items`; or by `regression` in stage 2).
    2. The bias model: β and μ by features, θ⁻, ε⁺, ε⁻ by position, until the held-out likelihood stops improving.
    3. The ranker f, with the bias model fixed, by a `loss` that is a sum over pairs of L_ij = log(1 + exp(f_j - f_i)):

        posterior    Σ (r̂_i - r̂_j)⁺ L_ij                       r̂ = E[r | c, x, k]
        opt          ... times |D_i - D_j|, D of DCG            so that it is |ΔDCG_ij| of r̂ in f's order
        ipw          Σ over c_i>c_j of  w_ij L_ij               w = [1 or P(e_j=1)] / (θ_i θ_j)
        bayes-ipw    ... times m_ij                             the share of such pairs with r_i > r_j

    - `weights` of opt are `posterior`, as above, or those of bayes-ipw times |ΔDCG_ij| of the biased feedback: `paper`
      uses Eqs. 14-17 of the paper, `exact` makes the mean of the loss right. `variant=released` is its authors' code.
    - `trust` is in `pairs` of positions (ε⁺, ε⁻: the default with m_ij), `clicks` (irrelevant items are clicked with
      probability ζ_k), `values` (scaled by ρ_k) or `none`.
    - `scale` is the largest θ, which clicks do not determine; `estimated` fits it together with β in stage 2.

    True labels have no bias: only stage 3 is needed, with every item examined and every label trusted.
    """

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        "loss": one_of("loss", "posterior", "opt", "bayes-ipw", "ipw"),
        "weights": one_of("weights", "posterior", "exact", "paper"),
        "theta": one_of("theta", "strata", "items", "regression"),
        "scale": scale_option,
        "trust": one_of("trust", "none", "pairs", "clicks", "values"),
        "targets": one_of("targets", "soft", "sampled"),
        "variant": one_of("variant", "standard", "released"),
        "max_weight": at_least("max_weight", 1),
    }

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        loss: str = "posterior",
        weights: str | None = None,
        theta: str = "strata",
        scale: float | str = SCALE,
        trust: str | None = None,
        targets: str = "soft",
        variant: str = "standard",
        max_weight: float | None = None,
    ) -> None:
        super().__init__(inputs)
        if scale == "estimated" and theta != "regression":
            raise OptionError(
                "scale=estimated needs theta=regression", got=f"theta={theta}", hint="add theta=regression"
            )
        if variant == "released":
            loss, weights, trust = "opt", "paper", "pairs"
        by_value = loss in ("posterior", "opt")
        if inputs.truth:
            weights, trust, variant = None, "none", "standard"
        weights = weights or ("posterior" if by_value else "exact")
        if (weights == "posterior" and not by_value) or (weights != "posterior" and loss == "posterior"):
            hint = f"remove weights={weights}, or use another loss"
            raise OptionError(f"loss={loss} cannot be used with weights={weights}", hint=hint)
        if weights == "posterior" and trust == "pairs":
            hint = "set loss=bayes-ipw without weights, or loss=opt with weights=exact"
            raise OptionError("trust=pairs cannot be used with weights=posterior", hint=hint)
        if weights == "posterior" and max_weight is not None and not inputs.truth:
            what = "max_weight cannot be used with weights=posterior"
            raise OptionError(what, hint="remove max_weight, or use loss=ipw or loss=bayes-ipw")
        self.kind, self.weights, self.released = loss, weights, variant == "released"
        self.max_weight = MAX_WEIGHT if max_weight is None else max_weight
        self.trust = trust or ("pairs" if loss in ("opt", "bayes-ipw") and weights != "posterior" else "none")
        self.bias_model = BiasModel(
            inputs,
            scale=None if scale == "estimated" else float(scale),
            theta_from=theta,
            trust_in_clicks=self.trust == "clicks",
            scaled_values=self.trust == "values",
            pairs=self.trust == "pairs" or weights == "paper",
            sampled=targets == "sampled",
            released=self.released,
        ).eval()

    def estimate_bias(self, log: Log, *, user: User | None, sessions: int, seed: int) -> None:
        if not self.inputs.truth:
            self.bias_model.estimate(log, user=user, sessions=sessions, seed=seed)

    def bias_learner(self) -> BiasModel | None:
        return None if self.inputs.truth else self.bias_model

    def train(self, mode: bool = True) -> PairwiseEM:
        super().train(mode)
        self.bias_model.eval()  # it is fixed while the ranker is trained
        return self

    def loss(self, lists: Lists) -> Tensor:
        scores, labels = self.score(lists.features), self.labels(lists)
        with torch.no_grad():
            if self.weights == "posterior":
                value = self.expected_value(lists, labels)
                if self.kind == "opt":
                    weights = lambdarank_weights(scores, value, where=lists.where, normalise=False)
                else:
                    weights = torch.where(preferred_pairs(value, where=lists.where), gaps(value), 0.0)
            else:
                weights = self.pair_weights(lists, labels).clamp(max=self.max_weight)
                if self.kind == "opt":
                    weights = weights * self._metric_change(lists, labels, scores)
        return pairwise_loss(scores, weights, where=lists.where, weights=lists.weights)

    def expected_value(self, lists: Lists, labels: Tensor) -> Tensor:
        """Return the expected relevance r̂ = E[r | c, x, k] of items with label c, features x and position k.

        r̂ = P(r>0 | c) c/ρ_k if c > 0, else P(r>0 | c) μ(x). The label of a relevant item is μ(x) on average, and ρ_k
        times as large at position k.
        """
        logit, log_value, _ = self.bias_model.predictions(lists.features)
        return self.expected_value_of(labels, self.bias_model.index(lists.shown_positions), logit, log_value)

    def expected_value_of(self, labels: Tensor, place: Tensor, logit: Tensor, log_value: Tensor) -> Tensor:
        """Return r̂ as `expected_value` does, from the index of each position and the predictions of the bias model."""
        model = self.bias_model
        relevant = relevance_posterior(labels > 0, model.theta[place], logit.sigmoid(), model.zeta[place])
        return relevant * torch.where(labels > 0, labels / model.rho[place], log_value.exp())

    def pair_weights(self, lists: Lists, labels: Tensor) -> Tensor:
        """Return the weights [..., i, j] of pairs with c_i > c_j, not clipped by `max_weight`; 0 for other pairs."""
        model = self.bias_model
        logit, _, preference = model.predictions(lists.features)
        place = model.index(lists.shown_positions)
        theta, beta, positive, place = map(
            batch_innermost, (model.theta[place].clamp(min=LEAST_THETA), logit.sigmoid(), labels > 0, place)
        )
        theta_i, theta_j, positive_j = theta[..., :, None], theta[..., None, :], positive[..., None, :]
        i, j = place[..., :, None], place[..., None, :]
        plus, minus = model.plus[i, j], model.minus[i, j]
        if self.released:
            weights = paper_weights(positive_j, theta_i, theta_j, model.theta_minus[j]) * quotient(plus, plus + minus)
        elif self.weights == "paper":
            gamma = gaps(preference).sigmoid()
            if self.trust != "pairs":
                plus, minus = torch.ones_like(plus), torch.zeros_like(minus)
            examined = pair_examined(model.theta_minus[j], plus, minus, gamma, beta[..., :, None])
            weights = paper_weights(positive_j, theta_i, theta_j, examined) * pair_trust(plus, minus, gamma)
        else:
            weights = exact_weights(positive_j, theta_i, theta_j, beta[..., None, :])
            if self.trust == "pairs":  # where c_j = 0 < c_i and both are examined, i is surely above j
                trusted = pair_trust(plus, minus, gaps(preference).sigmoid()) / plus
                weights = weights * torch.where(positive_j, trusted, 1.0)
        return torch.where(preferred_pairs(labels, where=lists.where), weights, 0.0)

    def _metric_change(self, lists: Lists, labels: Tensor, scores: Tensor) -> Tensor:
        """Return |ΔDCG| of swapping i and j in the order of the ranker (`variant=released`: of g).

        It is not divided by the ideal DCG, which is random because labels are.
        """
        if self.released:
            scores = self.bias_model.predictions(lists.features)[2]
        return lambdarank_weights(scores, labels, where=lists.where, normalise=False)

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        if self.inputs.truth:
            return None
        clip = math.inf if self.weights == "posterior" else self.max_weight
        return diagnosis(self.bias_model, batches, weights=self.pair_weights, clip=clip)
