"""The method `pairwise-em`: EM learns a model of examination and trust, which weights the pairs of a ranking loss.

It follows *Unbiased Learning to Rank with Biased Continuous Feedback* (CIKM 2022), "the paper".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

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
from ultr.datasets.users import User
from ultr.errors import OptionError
from ultr.evaluation.metrics import batch_innermost
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.anchor import anchor_of_log
from ultr.methods.base import (
    RELEASED_ACCUMULATOR,
    HeldOutRows,
    Method,
    MethodInputs,
    as_limit,
    at_least,
    at_least_single,
    one_of,
    weight_limit,
)
from ultr.methods.bias_model import BiasModel, with_clicks
from ultr.methods.diagnosis import diagnosis
from ultr.methods.losses import gaps, lambdaloss_weights, lambdarank_weights, pairwise_loss, preferred_pairs, reduced
from ultr.methods.oracle import OracleModel, with_known_theta
from ultr.methods.position_model import LEAST_THETA, scale_option
from ultr.rankers.combined import Combined
from ultr.rankers.encoder import EncodedRanker
from ultr.rankers.mlp import HIDDEN

MAX_WEIGHT = 10.0  # default of the largest weight of a pair


class PairwiseEM(Method):
    """Pairs of items, weighted so that the loss corrects the bias of the feedback.

    The `loss` of the ranker f is a sum over pairs of L_ij = log(1 + exp(f_j - f_i)):

        ipw             Σ over c_i>c_j of  w_ij L_ij                    w = [1 or P(both examined | c_j=0)] / (θ_i θ_j)
        bayes-ipw       Σ over c_i>c_j of  w_ij m_ij L_ij               m = the share of such pairs with r_i > r_j
        opt             Σ over c_i>c_j of  w_ij m_ij |ΔZ_ij| L_ij       ΔZ = the change of a metric of the labels c
        posterior       Σ (r̂_i - r̂_j)⁺ L_ij                            r̂ = E[r | c, x, k]
        opt-posterior   Σ (r̂_i - r̂_j)⁺ |D_i - D_j| L_ij                D of DCG, so that it is |ΔDCG_ij| of r̂

    The first three are the paper's (Eqs. 10 and 14-17), the others are not in it. Training has three stages: θ from the
    log (`theta`: by its best evidence with `auto`, else by `strata` of similar items or by `items`), the bias model
    until the held-out likelihood stops improving, then the ranker. `em=joint` trains all of it at once, as the paper
    does, with θ by `em`. For experiments, `theta=oracle` knows θ of simulated users, and `em=oracle` θ and β.

    - `weights` of the first three are the `paper`'s, or `exact`: then the mean of the loss is right (see `equations`).
    - `trust` is in `pairs` of positions (ε⁺, ε⁻: the default with m_ij), `clicks` (irrelevant items are clicked with
      probability ζ_k), `values` (scaled by ρ_k) or `none`.
    - `delta` is the ΔZ of opt: of `dcg` in f's order, or the weights of `lambdaloss`.
    - `final` is the score: f alone (`pairs`), or `blend`, the default of `posterior` and `opt-posterior`: f plus
      log(β μ), which a second network learns by the likelihood, each divided by its deviation within requests (see
      `Combined`). The errors of the two differ, so that the sum is better than both. Each has half the units.
    - `anchor=linear`, the default of `blend`, starts the ranker at a linear model (see `ultr.methods.anchor`).
    - `row_power` p weights the rows of the bias model by θ_k^-p.
    - `scale` is the largest θ, which clicks do not determine; `estimated` fits it together with β.
    - `variant=released` is the code that the authors released. It changes the defaults to loss=opt, em=joint, theta=em,
      delta=lambdaloss and weights without a limit, has m = ε⁺/(ε⁺+ε⁻) and θ⁻_j in the weights and the order of g in ΔZ,
      trains networks with layer normalisation and no dropout, and leaves out lists without a positive label.

    True labels have no bias: only the ranker is trained, with every item examined and every label trusted.
    """

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        "loss": one_of("loss", "posterior", "opt-posterior", "opt", "bayes-ipw", "ipw"),
        "weights": one_of("weights", "paper", "exact"),
        "em": one_of("em", "staged", "joint", "oracle"),
        "theta": one_of("theta", "auto", "strata", "items", "regression", "em", "oracle"),
        "scale": scale_option,
        "row_power": at_least("row_power", 0),
        "final": one_of("final", "pairs", "blend"),
        "anchor": one_of("anchor", "linear", "none"),
        "trust": one_of("trust", "none", "pairs", "clicks", "values"),
        "targets": one_of("targets", "soft", "sampled"),
        "delta": one_of("delta", "dcg", "lambdaloss"),
        "variant": one_of("variant", "standard", "released"),
        "max_weight": weight_limit,
    }

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        loss: str | None = None,
        weights: str | None = None,
        em: str | None = None,
        theta: str | None = None,
        scale: float | str = SCALE,
        row_power: float = 1.0,
        final: str | None = None,
        anchor: str | None = None,
        trust: str | None = None,
        targets: str = "soft",
        delta: str | None = None,
        variant: str = "standard",
        max_weight: float | str | None = None,
    ) -> None:
        released = variant == "released" and not inputs.truth
        super().__init__(inputs.as_released() if released else inputs)
        inputs = self.inputs
        self.kind = loss or ("opt" if variant == "released" else "posterior")
        self.by_value = self.kind in ("posterior", "opt-posterior")
        self.by_metric = self.kind in ("opt", "opt-posterior")
        _check(self.kind, self.by_value, weights=weights, trust=trust, delta=delta, max_weight=max_weight)
        em = em or ("joint" if released else "staged")
        self.joint = em != "staged" and not inputs.truth
        theta = theta or ("em" if self.joint else "auto")
        if theta == "oracle" and not inputs.truth:
            self.inputs = inputs = with_known_theta(inputs, "theta=oracle")
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
            sampled=targets == "sampled",
            released=released,
            row_power=row_power,
        )
        self.bias_model.accumulator = self.accumulator
        blends = self.by_value and not (self.joint or inputs.truth)
        if final == "blend" and not blends and not inputs.truth:
            hint = "remove final=blend, or use loss=posterior without em=joint"
            raise OptionError(f"final=blend cannot be used with loss={self.kind} and em={em}", hint=hint)
        if blends and final != "pairs":
            self._make_combined(anchored=anchor != "none")
        self.train()

    def _make_combined(self, *, anchored: bool) -> None:
        self.anchored = anchored
        given = self.inputs.ranker_options
        if self.inputs.ranker == "mlp" and "separate" not in given:
            # Two networks of half the width, because each is worse if they have layers in common.
            hidden = [max(1, size // 2) for size in given.get("hidden", HIDDEN)]
            options = {**given, "hidden": hidden, "separate": "first", "skip": anchored}
            self.inputs = replace(self.inputs, ranker_options=options)
        self.ranker = Combined(self.inputs.make_ranker(outputs=Combined.OUTPUTS))

    def balance(self, rows: HeldOutRows) -> None:
        if isinstance(self.ranker, Combined):
            log_theta = None if rows.positions is None else self.bias_model.theta_at(rows.positions).log()
            self.ranker.balance(rows.features, rows.request, rows.labels, log_theta)

    def start_ranker(self, log: Log, *, seed: int) -> None:
        if not (self.anchored and isinstance(self.ranker, Combined)):
            return
        network = self.ranker.ranker
        assert isinstance(network, EncodedRanker)  # noqa: S101 - all networks are
        anchor = anchor_of_log(network.encoder, log, self.inputs.label, self.bias_model, seed=seed)
        if anchor is not None:
            slopes = np.stack([anchor.slopes, anchor.slopes, np.zeros_like(anchor.slopes)])
            constants = np.array([0.0, np.log(anchor.beta / (1 - anchor.beta)), np.log(anchor.value)])
            network.start_at(*(torch.from_numpy(each).to(self.bias_model.theta) for each in (slopes, constants)))

    @classmethod
    def has_bias_stage(cls, options: Mapping[str, Any]) -> bool:
        return bool(options.get("em", "joint" if cls._is_released(options) else "staged") == "staged")

    @classmethod
    def has_dropout(cls, options: Mapping[str, Any]) -> bool:
        return not cls._is_released(options)

    @classmethod
    def limits_weights(cls, options: Mapping[str, Any]) -> bool:
        by_value = options.get("loss", "posterior") in ("posterior", "opt-posterior")
        return super().limits_weights(options) and not (by_value or cls._is_released(options))

    @staticmethod
    def _is_released(options: Mapping[str, Any]) -> bool:
        return options.get("variant") == "released"

    def estimate_bias(self, log: Log, *, user: User | None, sessions: int, seed: int) -> None:
        if not self.inputs.truth:
            self.bias_model.estimate(log, user=user, sessions=sessions, seed=seed)

    def bias_learner(self) -> BiasModel | None:
        return None if self.inputs.truth or self.joint else self.bias_model

    def train(self, mode: bool = True) -> PairwiseEM:
        super().train(mode)
        if not self.joint:
            self.bias_model.eval()  # it is fixed while the ranker is trained
        return self

    @property
    def draws(self) -> bool:
        return self.joint and self.bias_model.draws

    def update(self, lists: Lists) -> None:
        if self.joint:
            self.bias_model.update(lists)

    def loss(self, lists: Lists) -> Tensor:
        labels = self.labels(lists)
        if isinstance(self.ranker, Combined):
            scores, logit, log_value = map(at_least_single, self.ranker.outputs(lists.features))
        else:
            scores = self.score(lists.features)
        with torch.no_grad(), self.bias_model.without_dropout():
            if self.by_value:
                value = self.expected_value(lists, labels)
                if self.by_metric:
                    weights = lambdarank_weights(scores, value, where=lists.where, normalise=False)
                else:
                    weights = torch.where(preferred_pairs(value, where=lists.where), gaps(value), 0.0)
            else:
                weights = self.pair_weights(lists, labels).clamp(max=self.max_weight)
                if self.by_metric:
                    weights = weights * self._metric_change(lists, labels, scores)
        kept = with_clicks(lists, labels) if self.released else lists
        loss = pairwise_loss(scores, weights, where=lists.where, weights=kept.weights)
        if isinstance(self.ranker, Combined):
            loss = loss - self._log_likelihood(lists, labels, logit, log_value)
        return loss + self.bias_model.loss(lists) if self.joint else loss

    def _log_likelihood(self, lists: Lists, labels: Tensor, logit: Tensor, log_value: Tensor) -> Tensor:
        """Return the log-likelihood of clicks, and of the values of clicked items (gamma deviance), per list."""
        logit, log_value = (each.masked_fill(~lists.where, 0.0) for each in (logit, log_value))
        model, positive = self.bias_model, labels > 0
        place = model.index(lists.shown_positions)
        theta = model.theta[place].clamp(LEAST_THETA, 1 - 1e-6)
        clicks = _click_log_likelihood(positive, theta, logit, model.zeta[place])
        values = torch.where(positive, labels / model.rho[place] * torch.exp(-log_value) + log_value, 0.0)
        return reduced(torch.where(lists.where, clicks - values, 0.0).sum(-1), lists.weights)

    def expected_value(self, lists: Lists, labels: Tensor) -> Tensor:
        """Return the expected relevance r̂ = E[r | c, x, k] of items with label c, features x and position k.

        r̂ = P(r>0 | c) c/ρ_k if c > 0, else P(r>0 | c) μ(x). The label of a relevant item is μ(x) on average, and ρ_k
        times as large at position k.
        """
        logit, log_value, _ = self.bias_model.of_lists(lists)
        return self.expected_value_of(labels, self.bias_model.index(lists.shown_positions), logit, log_value)

    def expected_value_of(self, labels: Tensor, place: Tensor, logit: Tensor, log_value: Tensor) -> Tensor:
        """Return r̂ as `expected_value` does, from the index of each position and the predictions of the bias model."""
        model = self.bias_model
        relevant = relevance_posterior(labels > 0, model.theta[place], logit.sigmoid(), model.zeta[place])
        return relevant * torch.where(labels > 0, labels / model.rho[place], log_value.exp())

    def pair_weights(self, lists: Lists, labels: Tensor) -> Tensor:
        """Return the weights [..., i, j] of pairs with c_i > c_j, not clipped by `max_weight`; 0 for other pairs."""
        model = self.bias_model
        logit, _, preference = model.of_lists(lists)
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
            zeta = model.zeta[place]
            above, below = exact_above(theta, beta, zeta), exact_below(positive, theta, beta, zeta)
            weights = above[..., :, None] * below[..., None, :]
            if self.trust == "pairs":  # where c_j = 0 < c_i and both are examined, i is surely above j
                trusted = pair_trust(plus, minus, gaps(preference).sigmoid()) / plus
                weights = weights * torch.where(positive_j, trusted, 1.0)
        return torch.where(preferred_pairs(labels, where=lists.where), weights, 0.0)

    def _metric_change(self, lists: Lists, labels: Tensor, scores: Tensor) -> Tensor:
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
        clip = math.inf if self.by_value else self.max_weight
        return diagnosis(self.bias_model, batches, weights=self.pair_weights, clip=clip)


def _click_log_likelihood(positive: Tensor, theta: Tensor, logit: Tensor, zeta: Tensor) -> Tensor:
    """Return `item_log_likelihood` from the logit of β: in logarithms, so that slopes are right where β is near 0 or 1.

    θ must be above 0 and below 1.
    """
    relevant, other = logsigmoid(logit), logsigmoid(-logit)
    above = torch.logaddexp(theta.log() + relevant, zeta.log() + other)
    below = torch.logaddexp(torch.log1p(-theta) + relevant, torch.log1p(-zeta) + other)
    return torch.where(positive, above, below)


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
