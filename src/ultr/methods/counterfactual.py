"""Losses of labels, and what corrects them: inverse propensities, known or learned together with the ranker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ultr.bias.counts import item_codes
from ultr.bias.equations import quotient
from ultr.bias.estimators import SCALE
from ultr.bias.logging_policy import STRATA
from ultr.errors import OptionError
from ultr.evaluation.metrics import Gain, discounts_at, ranks_of
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.base import (
    AtLeastZero,
    BiasInputs,
    ClickMethod,
    MaxWeight,
    Method,
    MethodInputs,
    PositionIndex,
    PositionTable,
    ThetaFrom,
    as_limit,
    options_of,
    sortable_positions,
)
from ultr.methods.bias_model import BiasModel
from ultr.methods.losses import (
    gaps,
    lambdarank_weights,
    pairs_of,
    pairwise_loss,
    pointwise_loss,
    preferred_pairs,
    softmax_loss,
)
from ultr.methods.position_model import (
    MAX_WEIGHT,
    PROPENSITY,
    LoggingPositions,
    LoggingStrata,
    PositionModel,
    WithPositions,
    average_with,
    means_of_all,
    numbers,
    sums_in_cells,
)

NEVER_SHOWN = 1e-5  # an item with a smaller propensity has an estimate by the model alone
MANY_CLIPPED = 0.01  # share of rows with limited weights, above which a report warns
THETA_FROM_STRATA = "softmax over clicks, adjusted for strata of the logging score, together with the ranker"
LEAST_RATIO, MOST_RATIO = 0.01, 100.0  # bounds of t⁺ and t⁻
RELEASED_STEP = 0.05  # share of a batch in t⁺ and t⁻, in the released code

# --- Labels as they are -----------------------------------------------------------------------------------------------


class Pointwise(Method):
    """Least squares Σ_i (s_i - c_i)² of the scores s as predictions of the labels c."""

    LEARNS_ALONE = True

    def loss(self, lists: Lists) -> Tensor:
        return pointwise_loss(self.score(lists.features), self.labels(lists), where=lists.where, weights=lists.weights)


class LambdaRank(Method):
    """Pairwise logistic loss times |ΔNDCG|; the gain is linear in the label, and 2^y - 1 for true labels.

    LambdaRank (Burges 2006), without bias correction.
    """

    def loss(self, lists: Lists) -> Tensor:
        scores, labels = self.score(lists.features), self.labels(lists)
        gain: Gain = "exponential" if self.inputs.truth else "linear"
        weights = lambdarank_weights(scores, labels, where=lists.where, gain=gain)
        return pairwise_loss(scores, weights, where=lists.where, weights=lists.weights)


# --- Estimates of relevance -------------------------------------------------------------------------------------------
# Inverse propensity weighting (Joachims et al. 2017; policy-aware: Oosterhuis and de Rijke 2020), correction for trust
# (Vardasbi 2020), and doubly robust estimation (Oosterhuis 2023).


class IPW(WithPositions, ClickMethod):
    """The base class of methods that learn an estimate r̂ of the relevance of each item, by `estimator`:

        ips            r̂ = (c - ζ_k) / α_k                  the propensity of the position that the item had
        policy-aware   r̂ = (c - ζ_k) / ρ                    the mean propensity of the item, over its positions
        dr             r̂ = m + (c - α_k m - ζ_k μ) / ρ      doubly robust: a model m, corrected by the feedback
        dm             r̂ = m                                the direct method: the model alone

    P(c>0) = α_k β + ζ_k, where ζ is 0 unless `trust=clicks`, and α is examination θ otherwise. Both are estimated from
    the log before training, or θ is known (`--propensities`), or both are those of simulated users (`theta=oracle`). ρ
    = E[α_k | item] is the mean over the positions at which the logging ranker shows such an item (`LoggingPositions`).
    m = β μ is the bias model; μ = 1 with `labels=clicks`.

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
        if trusted and not modelled and inputs.propensities is not None and theta != "oracle":
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

    def pointwise_loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        return pointwise_loss(scores, self.relevance(lists), where=lists.where, weights=lists.weights)

    def listwise_loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        return softmax_loss(scores, self.relevance_above_zero(lists), where=lists.where, weights=lists.weights)

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
        return self.pointwise_loss(lists)


class IPWListwise(IPW):
    """Σ_i r̂_i · -log softmax(s)_i: the softmax loss, which is linear in the label and therefore unbiased."""

    def loss(self, lists: Lists) -> Tensor:
        return self.listwise_loss(lists)


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
    """A loss of the target (c_i - ζ_k)/α_k: if P(click) = α_k β + ζ_k, this target has mean β at all positions.

    The `loss` is `pointwise`, least squares, or `listwise`, the softmax loss: it is `ipw-pointwise` or `ipw-listwise`
    with `trust=clicks` (Vardasbi 2020, after Agarwal et al. 2019). α and ζ are estimated from the log before training,
    up to an affine map of relevance β, which does not change the order of items. `theta=oracle` knows both.
    """

    def __init__(
        self, inputs: MethodInputs, *, loss: Literal["pointwise", "listwise"] = "pointwise", **options: Any
    ) -> None:
        super().__init__(inputs, trust="clicks", **options)
        self.listwise = loss == "listwise"

    OPTIONS = {name: IPW.OPTIONS[name] for name in ("theta", "max_weight")} | options_of(__init__)

    def loss(self, lists: Lists) -> Tensor:
        return self.listwise_loss(lists) if self.listwise else self.pointwise_loss(lists)


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


# --- Propensities that are learned together with the ranker -----------------------------------------------------------


class DLA(ClickMethod):
    """Two softmax losses over the clicks of a list, for the ranker s and the logits g of positions.

        Σ over clicks of  exp(g_1 - g_k) · -log softmax(s)_i   +   exp(s_1 - s_i) · -log softmax(g)_k

    Softmax gives P(o_1)/P(o_k) = exp(g_1 - g_k) of examination o, and P(r_1)/P(r_i) = exp(s_1 - s_i) of relevance r,
    where 1 is the first position (for g) or the first item of the list (for s). These weights have no gradient and are
    at most `max_weight`. This is the dual learning algorithm (Ai et al. 2018).
    """

    def __init__(self, inputs: MethodInputs, *, max_weight: MaxWeight = MAX_WEIGHT) -> None:
        super().__init__(inputs)
        self.max_weight = as_limit(max_weight)
        self.index = PositionIndex(inputs.positions)
        self.propensity = PositionTable(len(self.index))

    OPTIONS = options_of(__init__)

    def loss(self, lists: Lists) -> Tensor:
        scores, clicks = self.score(lists.features), self.clicks(lists)
        logits: Tensor = self.propensity(self.index(lists.shown_positions))
        with torch.no_grad():
            seen = (self.propensity.values[0] - logits).exp().clamp(max=self.max_weight)
        ranking = softmax_loss(scores, clicks * seen, where=lists.where, weights=lists.weights)
        return ranking + self.propensity_loss(lists, logits, clicks, scores.detach())

    def propensity_loss(self, lists: Lists, logits: Tensor, clicks: Tensor, scores: Tensor) -> Tensor:
        """Return the loss of the logits of positions."""
        highest = sortable_positions(lists).argmin(-1, keepdim=True)
        relevant = (scores.gather(-1, highest) - scores).exp().clamp(max=self.max_weight)
        return softmax_loss(logits, clicks * relevant, where=lists.where, weights=lists.weights)

    @torch.no_grad()
    def bias(self, batches: Iterable[Lists]) -> dict[str, Any]:
        logits = self.propensity.values
        return {
            "positions": self.index.ids.tolist(),
            "theta": numbers((logits - logits[0]).exp()),
            "theta_from": "dual learning, together with the ranker",
            "theta_scale": "1 at the first position: only ratios are learned",
            "warnings": [],
        }


class UPE(DLA):
    """`DLA` with a propensity model that knows the logging policy. It is learned in two steps, 1 before the others:

        1.  m(x) = score under which the logged order is most likely (Plackett-Luce), z = stratum of m(x) in its list
        2.  Σ over clicks of  -log softmax(g + u)_i,  with the logits g_k of position k and u_z of stratum z
        3.  P(o | do(k)) = Σ_z P(z) P(o | k, z) = exp(g_k) · Σ_z P(z) exp(u_z)    (backdoor adjustment)
        4.  Σ over clicks of  exp(g_1 - g_k) · -log softmax(s)_i,  with the propensities of 3

    It is unconfounded propensity estimation (Luo et al. 2023). A good logging ranker puts relevant items high. `DLA`
    takes a part of this effect of relevance for examination, and its propensities are too steep.

    The confounding effect u takes up the relevance that follows from the logging policy, so that g does not. The sum
    over z in 3 is one factor for all k, and cancels in the weights of 4. These are at most `max_weight`.

    Departures from the paper: its propensity model is a network of embeddings of position and confounder, and here the
    two add up to the logit. `relevance=dual` weights the clicks in 2 by the inverse relevance exp(s_1 - s_i), as in
    `DLA`. The default does not, because u and s both explain relevance until both are learned, and g is then too flat.
    """

    def __init__(
        self, inputs: MethodInputs, *, relevance: Literal["strata", "dual"] = "strata", **options: Any
    ) -> None:
        super().__init__(inputs, **options)
        self.dual = relevance == "dual"
        self.strata, self.effect = LoggingStrata(inputs), PositionTable(STRATA)

    OPTIONS = DLA.OPTIONS | options_of(__init__)

    def estimate_bias(self, log: Log, **given: Unpack[BiasInputs]) -> None:
        self.strata.fit(log, seed=given["seed"])

    @torch.no_grad()
    def bias(self, batches: Iterable[Lists]) -> dict[str, Any]:
        return {**super().bias(batches), "theta_from": THETA_FROM_STRATA, "confounding": numbers(self.effect.values)}

    def propensity_loss(self, lists: Lists, logits: Tensor, clicks: Tensor, scores: Tensor) -> Tensor:
        logits = logits + torch.where(self.strata.several, self.effect(self.strata(lists)), 0.0)
        if self.dual:
            return super().propensity_loss(lists, logits, clicks, scores)
        return softmax_loss(logits, clicks, where=lists.where, weights=lists.weights)


class PairwiseDebias(ClickMethod):
    """Pairs of a click i and no click j, weighted by 1/(t⁺_i t⁻_j), with L_ij = |ΔNDCG_ij| log(1 + exp(-(s_i - s_j))).

        t⁺_k ∝ [Σ over i at k of  L_ij / t⁻_j] ^ 1/(p+1)         t⁻_k ∝ [Σ over j at k of  L_ij / t⁺_i] ^ 1/(p+1)

    each relative to the first position, p = `regularisation`. The sums are means per impression, averaged over batches;
    t⁺ and t⁻ are ratios of these averages. A position without pairs keeps its values. If the first position has no
    pairs, all positions keep their values.

    `variant=released` follows the toolbox ULTRA, so that published numbers can be compared: p = 1, L_ij without
    |ΔNDCG_ij|, and each batch moves t⁺ and t⁻ by 0.05 towards its ratios.
    """

    plus: Tensor
    minus: Tensor
    sums: Tensor
    updates: Tensor

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        regularisation: AtLeastZero | None = None,
        variant: Literal["standard", "released"] = "standard",
    ) -> None:
        super().__init__(inputs)
        self.released = variant == "released"
        default = 1.0 if self.released else 0.0
        self.power = 1 / ((default if regularisation is None else regularisation) + 1)
        self.index = PositionIndex(inputs.positions)
        size = len(self.index)
        self.register_buffer("plus", torch.ones(size))
        self.register_buffer("minus", torch.ones(size))
        self.register_buffer("sums", torch.zeros(3, size))  # loss over t⁻, loss over t⁺, impressions
        self.register_buffer("updates", torch.zeros(()))

    OPTIONS = options_of(__init__)

    def _weights(self, lists: Lists, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return |ΔNDCG| (or 1) of pairs of a click i and no click j [..., i, j], t⁺ of i, and t⁻ of j."""
        place = self.index(lists.shown_positions)
        if self.released:
            change = preferred_pairs(self.clicks(lists), where=lists.where).to(scores.dtype)
        else:
            change = lambdarank_weights(scores, self.clicks(lists), where=lists.where)
        return change, pairs_of(self.plus[place])[0], pairs_of(self.minus[place])[1]

    @torch.no_grad()
    def update(self, lists: Lists) -> None:
        with self.without_dropout():
            scores = self.score(lists.features)
        change, plus_i, minus_j = self._weights(lists, scores)
        losses = change * softplus(-gaps(scores))
        of_click, of_none = (losses / minus_j).sum(-1), (losses / plus_i).sum(-2)
        self.updates += 1
        terms = of_click, of_none, torch.ones_like(scores)
        place, weights = self.index(lists.shown_positions), lists.weights[:, None] * lists.where
        (sums,) = means_of_all((sums_in_cells(terms, place, weights, len(self.index)), weights))
        if self.released:
            self.sums.copy_(sums)
        else:
            average_with(self.sums, sums, self.updates)
        shown = self.sums[2]
        for sums, ratios in ((self.sums[0], self.plus), (self.sums[1], self.minus)):
            means = quotient(sums, shown)
            relative = quotient(means, means[0]).pow(self.power)
            if self.released:
                relative = torch.lerp(ratios, relative, RELEASED_STEP)
            ratios.copy_(torch.where((sums > 0) & (means[0] > 0), relative, ratios).clamp(LEAST_RATIO, MOST_RATIO))

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score(lists.features)
        with torch.no_grad():
            change, plus_i, minus_j = self._weights(lists, scores)
            weights = change / (plus_i * minus_j)
        return pairwise_loss(scores, weights, where=lists.where, weights=lists.weights)

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return {
            "positions": self.index.ids.tolist(),
            "t_plus": numbers(self.plus),
            "t_minus": numbers(self.minus),
            "warnings": [],
        }
