"""The method `pairwise-em`: EM learns a model of examination and trust, which weights the pairs of a ranking loss.

It follows *Unbiased Learning to Rank with Biased Continuous Feedback* (CIKM 2022), "the paper".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ultr.errors import OptionError
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.anchor import Part, start_network
from ultr.methods.base import HeldOutRows, Method, MethodInputs, at_least_single, options_of
from ultr.methods.bias_model import with_clicks
from ultr.methods.losses import gaps, lambdarank_weights, pairwise_loss, preferred_pairs, reduced
from ultr.methods.pair_weights import EXPECTED, PairWeights
from ultr.methods.position_model import LEAST_THETA
from ultr.rankers.combined import Combined


class PairwiseEM(PairWeights, Method):
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
    does, with θ by `em`. `em=printed` does so with averages as printed: of the ratios of batches (Eq. 20), where
    `joint` has the ratio of averaged sums. Its default is `targets=sampled`. For experiments, `theta=oracle` knows θ
    of simulated users (and ζ, with `trust=clicks`), and `em=oracle` θ and β.

    - `weights` of the first three are the `paper`'s, or `exact`: then the mean of the loss is right (see `equations`).
    - `trust` is in `pairs` of positions (ε⁺, ε⁻: the default with m_ij), `clicks` (irrelevant items are clicked with
      probability ζ_k), `values` (scaled by ρ_k) or `none`. Without `pairs`, ε⁺ = 1 and ε⁻ = 0.
    - `targets` of the networks β and g are the posteriors (`soft`), or draws from them (`sampled`).
    - `delta` is the ΔZ of opt: of `dcg` in f's order, or the weights of `lambdaloss`.
    - `final` is the score: f alone (`pairs`), or `blend`, the default of `posterior` and `opt-posterior`: f plus
      log(β μ), which a second network learns by the likelihood, each divided by its deviation within requests (see
      `Combined`). The errors of the two differ, so that the sum is better than both. Each has half the units.
    - `anchor=linear`, the default of `blend`, starts the ranker at a linear model (see `ultr.methods.anchor`).
    - `row_power` p weights the rows of the bias model by θ_k^-p.
    - `scale` is the largest θ, which clicks do not determine; `estimated` fits it together with β.
    - `variant=released` is the code that the authors released. It changes the defaults to loss=opt, em=joint, theta=em,
      delta=lambdaloss, targets=sampled and weights without a limit, has m = ε⁺/(ε⁺+ε⁻) and θ⁻_j in the weights and the
      order of g in ΔZ, trains networks with layer normalisation and no dropout, gives pairs the weight 1 in the loss of
      g, and leaves out lists without a positive label. The n-th batch moves θ, θ⁻, ε⁺ and ε⁻ by 0.05 n^-0.05 towards
      its ratios, of hidden states that are drawn too. It is for networks only.

    True labels have no bias: only the ranker is trained, with every item examined and every label trusted.
    """

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        final: Literal["pairs", "blend"] | None = None,
        anchor: Literal["linear", "none"] | None = None,
        variant: Literal["standard", "released"] = "standard",
        **options: Any,
    ) -> None:
        Method.__init__(self, inputs.as_released() if variant == "released" and not inputs.truth else inputs)
        self.set_up(variant=variant, **options)
        inputs = self.inputs
        blends = self.by_value and not (self.joint or inputs.truth)
        if final == "blend" and not blends and not inputs.truth:
            hint = "remove final=blend, or use loss=posterior with em=staged"
            what = f"final=blend cannot be used with loss={self.kind} and em={options.get('em') or 'staged'}"
            raise OptionError(what, hint=hint)
        if blends and final != "pairs":
            self._make_combined(anchored=anchor != "none")
        self.train()

    OPTIONS = PairWeights.OPTIONS | options_of(__init__)

    def _make_combined(self, *, anchored: bool) -> None:
        self.anchored = anchored
        if self.inputs.ranker == "mlp" and "separate" not in self.inputs.ranker_options:
            # Two networks of half the width, because each is worse if they have layers in common.
            self.inputs = self.inputs.with_half_the_units(separate="first", skip=anchored)
        self.ranker = Combined(self.inputs.make_ranker(outputs=Combined.OUTPUTS))

    def balance(self, rows: HeldOutRows) -> None:
        if isinstance(self.ranker, Combined):
            log_theta = None if rows.positions is None else self.bias_model.theta_at(rows.positions).log()
            self.ranker.balance(rows.features, rows.request, rows.labels, log_theta)

    def start_ranker(self, log: Log, *, seed: int) -> None:
        if self.anchored and isinstance(self.ranker, Combined):
            parts: tuple[Part, ...] = ("score", "click", "value")
            start_network(self.ranker.ranker, log, self.inputs.label, self.bias_model, parts, seed=seed)

    @classmethod
    def has_bias_stage(cls, options: Mapping[str, Any]) -> bool:
        default = "joint" if options.get("variant") == "released" else "staged"
        return bool(options.get("em", default) == "staged")

    @classmethod
    def has_dropout(cls, options: Mapping[str, Any]) -> bool:
        return options.get("variant") != "released"

    @classmethod
    def limits_weights(cls, options: Mapping[str, Any]) -> bool:
        by_value = options.get("loss", "posterior") in ("posterior", "opt-posterior")
        return super().limits_weights(options) and not (by_value or options.get("variant") == "released")

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
                value = lists.actions[EXPECTED] if EXPECTED in lists.actions else self.expected_value(lists, labels)
                if self.by_metric:
                    weights = lambdarank_weights(scores, value, where=lists.where, normalise=False)
                else:
                    weights = torch.where(preferred_pairs(value, where=lists.where), gaps(value), 0.0)
            else:
                weights = self.pair_weights(lists, labels).clamp(max=self.max_weight)
                if self.by_metric:
                    weights = weights * self.metric_change(lists, labels, scores)
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
        values = model.value_deviance(labels, place, log_value)
        return reduced(torch.where(lists.where, clicks - values, 0.0).sum(-1), lists.weights)


def _click_log_likelihood(positive: Tensor, theta: Tensor, logit: Tensor, zeta: Tensor) -> Tensor:
    """Return `item_log_likelihood` from the logit of β: in logarithms, so that slopes are right where β is near 0 or 1.

    θ must be above 0 and below 1.
    """
    relevant, other = logsigmoid(logit), logsigmoid(-logit)
    above = torch.logaddexp(theta.log() + relevant, zeta.log() + other)
    below = torch.logaddexp(torch.log1p(-theta) + relevant, torch.log1p(-zeta) + other)
    return torch.where(positive, above, below)
