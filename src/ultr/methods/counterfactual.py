"""Counterfactual methods: estimates of relevance from clicks and the probability of examination."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ultr.bias.counts import item_codes
from ultr.bias.estimators import SCALE
from ultr.errors import OptionError
from ultr.evaluation.metrics import discounts_at, ranks_of
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.base import ClickMethod, MaxWeight, MethodInputs, ThetaFrom, as_limit, options_of
from ultr.methods.bias_model import BiasModel
from ultr.methods.logging_strata import PROPENSITY, LoggingPositions
from ultr.methods.losses import gaps, pairs_of, pairwise_loss, pointwise_loss, softmax_loss
from ultr.methods.position_model import MAX_WEIGHT, PositionModel, WithPositions, numbers

# --- Estimates of relevance -------------------------------------------------------------------------------------------
# Inverse propensity weighting (Joachims et al. 2017; policy-aware: Oosterhuis and de Rijke 2020), correction for trust
# (Vardasbi 2020), and doubly robust estimation (Oosterhuis 2023).

NEVER_SHOWN = 1e-5  # an item with a smaller propensity has an estimate by the model alone
MANY_CLIPPED = 0.01  # share of rows with limited weights, above which a report warns


class IPW(WithPositions, ClickMethod):
    """The base class of methods that learn an estimate r̂ of the relevance of each item, by `estimator`:

        ips            r̂ = (c - ζ_k) / α_k                  the propensity of the position that the item had
        policy-aware   r̂ = (c - ζ_k) / ρ                    the mean propensity of the item, over its positions
        dr             r̂ = m + (c - α_k m - ζ_k μ) / ρ      doubly robust: a model m, corrected by the feedback
        dm             r̂ = m                                the direct method: the model alone

    P(c>0) = α_k β + ζ_k, where ζ is 0 unless `trust=clicks`, and α is examination θ otherwise. Both are estimated from
    the log before training, or θ is known (`--propensities`). ρ = E[α_k | item] is the mean over the positions at which
    the logging ranker shows such an item (`LoggingPositions`). m = β μ is the bias model; μ = 1 with `labels=clicks`.

    Weights 1/α_k and 1/ρ are at most `max_weight`. They are 0 for an item that was never shown: dr has m there.
    """

    ESTIMATOR: ClassVar[str] = "ips"  # the default

    @classmethod
    def has_bias_stage(cls, options: Mapping[str, Any]) -> bool:
        return options.get("estimator", cls.ESTIMATOR) in ("dr", "dm")

    @classmethod
    def limits_weights(cls, options: Mapping[str, Any]) -> bool:
        return super().limits_weights(options) and options.get("estimator", cls.ESTIMATOR) != "dm"

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        estimator: Literal["ips", "policy-aware", "dr", "dm"] | None = None,
        theta: ThetaFrom = "auto",
        trust: Literal["none", "clicks"] = "none",
        labels: Literal["clicks", "values"] = "clicks",
        max_weight: MaxWeight = MAX_WEIGHT,
    ) -> None:
        super().__init__(inputs)
        self.estimator, self.values = estimator or self.ESTIMATOR, labels == "values"
        self.max_weight = as_limit(max_weight)
        trusted, modelled = trust == "clicks", self.has_bias_stage({"estimator": self.estimator})
        if trusted and not modelled and inputs.propensities is not None:
            what = "trust in clicks is estimated together with examination, so it cannot use known propensities"
            hint = "remove --propensities or --bias, or use a method without trust: not affine, and not trust=clicks"
            raise OptionError(what, hint=hint)
        if trusted and not modelled and self.values:
            what = f"trust=clicks cannot be used with values and estimator={self.estimator}"
            raise OptionError(what, hint="use estimator=dr, or labels=clicks")
        model = BiasModel if modelled else PositionModel
        self.positions = model(inputs, scale=SCALE, theta_from=theta, trust_in_clicks=trusted)
        self.by_item = self.estimator in ("policy-aware", "dr")
        self.policy = LoggingPositions(inputs) if self.by_item else None
        self.train()

    OPTIONS = options_of(__init__)

    def train(self, mode: bool = True) -> IPW:
        super().train(mode)
        self.positions.eval()  # it is fixed while the ranker is trained
        return self

    def estimate_policy(self, log: Log, *, seed: int) -> None:
        if self.policy is not None:
            self.policy.fit(log, seed=seed)

    def with_targets(self, log: Log) -> Log:
        """Return a log with ρ of each row by its item, if the log has item ids."""
        if self.policy is None or (items := item_codes(log)) is None:
            return log
        propensity = self.policy.by_item(log, items, self._alpha)
        return replace(log, actions={**log.actions, PROPENSITY: propensity})

    @property
    def _alpha(self) -> Tensor:
        return self.positions.theta - self.positions.zeta

    def propensity(self, lists: Lists) -> Tensor:
        """Return the propensity that feedback is divided by: α_k, or ρ by item or, without item ids, by stratum."""
        if self.policy is None:
            return self._alpha[self.positions.index(lists.shown_positions)]
        known = lists.actions.get(PROPENSITY)
        return self.policy.propensity(lists, self._alpha) if known is None else known

    @torch.no_grad()
    def relevance(self, lists: Lists) -> Tensor:
        """Return r̂ of each item; 0 for padding."""
        positions, place = self.positions, self.positions.index(lists.shown_positions)
        labels = self.labels(lists) if self.values else self.clicks(lists)
        value, predicted = torch.ones_like(labels), torch.zeros_like(labels)
        if isinstance(positions, BiasModel):
            logit, log_value, _ = positions.of_lists(lists)
            value = log_value.exp() if self.values else value
            predicted = logit.sigmoid() * value
        unexplained = labels - self._alpha[place] * predicted - positions.zeta[place] * value
        propensity = self.propensity(lists)
        shown = (propensity > (NEVER_SHOWN if self.by_item else 0)) & (self.estimator != "dm")
        weights = torch.where(shown, propensity.reciprocal().clamp(max=self.max_weight), 0.0)
        return (predicted + weights * unexplained).masked_fill(~lists.where, 0.0)

    def relevance_above_zero(self, lists: Lists) -> Tensor:
        """Return r̂, less its smallest value in the list if that is negative.

        A loss that is linear in r̂ then has a minimum. It stays unbiased up to one constant for all items of the list,
        which draws their scores together, but does not change their order.
        """
        relevance = self.relevance(lists)
        return relevance - relevance.amin(-1, keepdim=True).clamp(max=0)

    @torch.no_grad()
    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        """Return the report of the position model and, by rows of some lists, where r̂ rests on the model."""
        report = self.positions.report()
        if self.positions.trust_in_clicks:
            report["alpha"] = numbers(self._alpha)
        if self.policy is not None:
            propensity = torch.cat([self.propensity(lists)[lists.where] for lists in batches])
            limits = {"clipped": max(1 / self.max_weight, NEVER_SHOWN), "never_shown": NEVER_SHOWN}
            rows = {name: int((propensity <= limit).sum()) for name, limit in limits.items()}
            report["item_propensity"] = {"rows": len(propensity), **rows}
            if rows["clipped"] > MANY_CLIPPED * len(propensity):
                cause = "the model counts for more" if self.estimator == "dr" else "relevance is estimated too low"
                what = f"{rows['clipped']} of {len(propensity)} rows weigh less than 1/propensity, where {cause}"
                report["warnings"].append({"name": "weights clipped", "what": what})
        return report


class IPWPointwise(IPW):
    """Σ_i (s_i - r̂_i)²: least squares on an unbiased label."""

    LEARNS_ALONE = True

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        return pointwise_loss(scores, self.relevance(lists), where=lists.where, weights=lists.weights)


class IPWListwise(IPW):
    """Σ_i r̂_i · -log softmax(s)_i: the softmax loss, which is linear in the label and therefore unbiased."""

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        return softmax_loss(scores, self.relevance_above_zero(lists), where=lists.where, weights=lists.weights)


class IPWLambdaLoss(IPW):
    """Σ_i r̂_i Σ_j |D_i - D_j| log(1 + exp(-(s_i - s_j))) over all other items j, with D = 1/log2(1 + rank).

    |D_i - D_j| is the change of DCG if i and j are swapped and only i has a gain of 1. Ranks are those of the current
    scores. LambdaRank, and LambdaLoss (Wang et al. 2018), sum G_i - G_j over pairs with G_i > G_j; which pairs these
    are depends on both labels, so that IPW would not be unbiased. This sum is linear in the label, as in Oosterhuis and
    de Rijke (2020), and therefore unbiased. It is not divided by the ideal DCG, which biased labels do not give.
    """

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        with torch.no_grad():
            ranks, (relevance, _) = ranks_of(scores, where=lists.where), pairs_of(self.relevance_above_zero(lists))
            change = gaps(discounts_at(ranks, scores.dtype)).abs() * relevance
            where_i, where_j = pairs_of(lists.where)
        pair_weights = torch.where(where_i & where_j, change, 0.0)
        return pairwise_loss(scores, pair_weights, where=lists.where, weights=lists.weights)


class Affine(IPWPointwise):
    """Least squares Σ_i (s_i - (c_i - ζ_k)/α_k)²: if P(click) = α_k β + ζ_k, this target has mean β at all positions.

    It is `ipw-pointwise` with `trust=clicks` (Vardasbi 2020, after Agarwal et al. 2019). α and ζ are estimated from the
    log before training, up to an affine map of relevance β, which does not change the order of items.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {name: IPW.OPTIONS[name] for name in ("theta", "max_weight")}

    def __init__(self, inputs: MethodInputs, **options: Any) -> None:
        super().__init__(inputs, trust="clicks", **options)


class DoublyRobust(IPWPointwise):
    """Least squares Σ_i (s_i - r̂_i)² on the doubly robust estimate of the label itself: `ipw-pointwise` with

    `estimator=dr` and `labels=values`. With right α and ζ, the mean of r̂ over positions and clicks is the relevance of
    an item if ρ is right and not clipped, whatever m is, and also if m is right, whatever ρ is.
    """

    ESTIMATOR = "dr"
    CLICKS_ALONE = False
    OPTIONS: ClassVar[dict[str, Any]] = {name: kind for name, kind in IPW.OPTIONS.items() if name != "labels"}

    def __init__(self, inputs: MethodInputs, **options: Any) -> None:
        super().__init__(inputs, labels="values", **options)
