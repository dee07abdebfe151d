"""Examination and trust bias of pairs, learned by EM.

After *Unbiased Learning to Rank with Biased Continuous Feedback* (CIKM 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ultr.bias import exact_weights, pair_examined, pair_trust, paper_weights, quotient, relevance_posterior
from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log import Log
from ultr.losses import gaps, lambdarank_weights, pairwise_loss, preferred_pairs
from ultr.methods.base import Method, MethodInputs, at_least, one_of
from ultr.methods.bias_model import BiasModel
from ultr.methods.diagnosis import diagnosis
from ultr.methods.position_model import SCALE, scale_option
from ultr.metrics import batch_innermost
from ultr.simulate import User

LEAST_THETA = 0.01  # in a weight
MAX_WEIGHT = 10.0  # of a pair


class PairwiseEM(Method):
    """Pairs of the feedback, weighed so that their loss is what it would be without bias. In three stages:

    1. θ from the log (`theta`: strata of the logging score, or items that recur; or `regression`, in stage 2).
    2. The bias model: β and μ by features, θ⁻, ε⁺, ε⁻ by position, until held-out requests are explained no better.
    3. The ranker f, with the bias model held:

        posterior    Σ (r̂_i - r̂_j)⁺ L_ij                       r̂ = E[r | c, x, k]
        opt          ... times |D_i - D_j|, D of DCG            so that it is |ΔDCG_ij| of r̂ in f's order
        ipw          Σ over c_i>c_j of  w_ij L_ij               w = [1 or P(e_j=1)] / (θ_i θ_j)
        bayes-ipw    ... times m_ij                             the share of pairs seen so that are so

    `weights` of opt are `posterior`, as above; or, as in the paper, those of bayes-ipw times |ΔDCG_ij| of the biased
    feedback. Of these, `paper` takes Eqs. 14-17 as printed, `exact` what makes the mean of the loss right;
    `variant=released` follows the authors' code. `trust` is of `pairs` of positions (ε⁺, ε⁻: default where m_ij
    weighs), of `clicks` (ζ_k of the irrelevant are clicked), of `values` (scaled by ρ_k) or `none`. `scale` is θ where
    it is largest, which clicks cannot tell; `estimated` leaves it to the form of β in stage 2. True labels have no
    bias: they are learned from as if all had been examined and can be trusted, in stage 3 alone.
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
            raise OptionError("a scale is estimated along with theta", mend="add theta=regression")
        if variant == "released":
            loss, weights, trust = "opt", "paper", "pairs"
        by_value = loss in ("posterior", "opt")
        if inputs.truth:
            weights, trust, variant = None, "none", "standard"
        weights = weights or ("posterior" if by_value else "exact")
        if (weights == "posterior" and not by_value) or (weights != "posterior" and loss == "posterior"):
            raise OptionError(f"loss={loss} does not go with weights={weights}", mend="leave one of them out")
        if weights == "posterior" and trust == "pairs":
            raise OptionError("trust in pairs is for weights that correct pairs", mend="add weights=exact")
        if weights == "posterior" and max_weight is not None and not inputs.truth:
            raise OptionError("max_weight clips weights that correct pairs", mend="add weights=exact, or leave it out")
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

    def prepare(self, log: Log, *, user: User | None, sessions: int, seed: int) -> None:
        if not self.inputs.truth:
            self.bias_model.estimate(log, user=user, sessions=sessions, seed=seed)

    def first(self) -> BiasModel | None:
        return None if self.inputs.truth else self.bias_model

    def train(self, mode: bool = True) -> PairwiseEM:
        super().train(mode)
        self.bias_model.eval()  # it is held while the ranker learns
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
        """r̂ = E[r | c, x, k]: P(r>0 | c) times c/ρ_k where there is feedback, else times μ(x)."""
        logit, log_value, _ = self.bias_model.predictions(lists.features)
        return self.expected_value_of(labels, self.bias_model.index(lists.shown_positions), logit, log_value)

    def expected_value_of(self, labels: Tensor, place: Tensor, logit: Tensor, log_value: Tensor) -> Tensor:
        """The same, where the places of positions and what the networks predict are at hand."""
        model = self.bias_model
        relevant = relevance_posterior(labels > 0, model.theta[place], logit.sigmoid(), model.zeta[place])
        return relevant * torch.where(labels > 0, labels / model.rho[place], log_value.exp())

    def pair_weights(self, lists: Lists, labels: Tensor) -> Tensor:
        """The weight of each pair with c_i > c_j, before it is clipped; 0 for other pairs."""
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
        """|ΔDCG| of swapping i and j in the ranker's order (released: in g's); not normalised by its random ideal."""
        if self.released:
            scores = self.bias_model.predictions(lists.features)[2]
        return lambdarank_weights(scores, labels, where=lists.where, normalise=False)

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        if self.inputs.truth:
            return None
        clip = math.inf if self.weights == "posterior" else self.max_weight
        return diagnosis(self.bias_model, batches, weights=self.pair_weights, clip=clip)
