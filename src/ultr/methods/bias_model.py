"""The bias model, which is trained before the ranker: relevance by features, examination and trust by position.

EM trains it, with networks for parameters that depend on features and sufficient statistics for those that depend on
position. Each step regresses the networks on the posteriors, and averages the statistics of a batch with those of the
batches before (online EM, Cappé and Moulines 2009). A position that is not in a batch keeps its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ultr.bias.counts import check_positions
from ultr.bias.equations import (
    PairModel,
    drawn_states,
    examined_though_zero,
    examined_zero_terms,
    item_log_likelihood,
    pair_log_likelihood,
    pair_posterior,
    pair_trust,
    preference_target,
    quotient,
    released_target,
    relevance_posterior,
    sums_by_cell,
    trust_terms,
)
from ultr.bias.examination import MAX_TRAINED_POSITIONS, Examination
from ultr.lists import Lists
from ultr.methods.base import MethodInputs
from ultr.methods.losses import gaps, lambdaloss_weights, pairs_of, preferred_pairs, reduced
from ultr.methods.position_model import PositionModel, means_of_all, numbers, simulated_user, sums_in_cells
from ultr.rankers import FeatureEncoder, make_ranker
from ultr.rankers.feedback import LARGEST_LOG_VALUE
from ultr.utils.distributed import summed

NETWORK = {"hidden": (128, 64), "dropout": 0.3}
TRUST_PRIOR = (0.95, 0.05)  # ε⁺ and ε⁻ of two positions that no request has together
PAIR_SHARE = 0.1  # weight of a pair relative to an item in the loss of the networks
RELEASED_PAIR_SHARE = 1.0
RELEASED_STEP, RELEASED_FORGET = 0.05, 0.05  # the n-th batch has the share 0.05 n^-0.05 in θ, θ⁻, ε⁺ and ε⁻
RELEASED_START = 0.2  # θ⁻ before the first update, in the code that the paper's authors released


def with_clicks(lists: Lists, labels: Tensor) -> Lists:
    """Return lists in which those without a positive label have weight 0; unchanged if no list has one."""
    clicked = ((labels > 0) & lists.where).any(-1)
    return replace(lists, weights=torch.where(clicked | ~clicked.any(), lists.weights, 0.0))


def _shared(inputs: MethodInputs) -> nn.Module:
    kind, encoder = inputs.bias_ranker or inputs.ranker, FeatureEncoder(inputs.features, inputs.categories)
    return make_ranker(kind, encoder, outputs=3, **(NETWORK if kind == "mlp" else {}))


class BiasModel(PositionModel):
    """The model  P(c>0) = θ_k β(x) + ζ_k (1 - β(x)),  E[c | c>0] = ρ_k μ(x)  of items, and Eq. 13 of pairs.

    `scaled_values` lets the value of a click depend on position, by ρ. `pairs` learns ε⁺, ε⁻ and g of
    `equations.pair_probability`, with γ_ij = sigmoid(g_i - g_j). Without `trust_in_pairs` it learns g alone, and ε⁺ = 1
    and ε⁻ = 0 are constants. The networks β, μ and g share all but the last layer.

    `released` follows the code that the paper's authors released: separate networks like the ranker, θ⁻ starts at 0.2,
    g learns only from pairs with c_i > c_j, weighted as in LambdaLoss, and lists without a positive label are left out.
    A pair has weight 1, and each batch moves θ, θ⁻, ε⁺ and ε⁻ by a small step towards its own ratios. With `sampled`,
    these ratios are of hidden states that are drawn from their posteriors.
    """

    rho: Tensor
    theta_minus: Tensor
    plus: Tensor
    minus: Tensor
    item_sums: Tensor
    pair_sums: Tensor
    held_out: Tensor

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        scaled_values: bool = False,
        pairs: bool = False,
        trust_in_pairs: bool = True,
        sampled: bool = False,
        released: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(inputs, **{"scale": 1.0, "row_power": 1.0, **options})
        self.scaled_values, self.pairs, self.sampled, self.released = scaled_values, pairs, sampled, released
        self.trust_in_pairs = pairs and trust_in_pairs
        self.pair_share = RELEASED_PAIR_SHARE if released else PAIR_SHARE
        self.network = inputs.make_ranker(outputs=3) if released else _shared(inputs)  # logit of β, log of μ, g
        check_positions(size := len(self.index), MAX_TRAINED_POSITIONS)
        buffers = {
            "rho": torch.ones(size),
            "theta_minus": torch.full((size,), RELEASED_START) if released else self.theta.clone(),
            "item_sums": torch.zeros(4, size),
            "pair_sums": torch.zeros(4, size * size if self.trust_in_pairs else 0),
            "held_out": torch.zeros(2),  # log-likelihood of clicks with β(x), and with one β for all
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)
        constant = pairs and not trust_in_pairs
        for name, trust in zip(("plus", "minus"), (1.0, 0.0) if constant else TRUST_PRIOR, strict=True):
            self.register_buffer(name, torch.full((size, size), trust), persistent=not constant)

    def weights_at(self, weights: Mapping[str, Tensor], places: Tensor) -> dict[str, Tensor]:
        """Return the weights of another bias model, whose positions at `places` are the positions of this one."""
        taken = {**weights, "index.ids": self.index.ids}
        for name in ("theta", "zeta", "sums", "impressions", "clicks", "shown", "rho", "theta_minus", "item_sums"):
            taken[name] = weights[name][..., places]
        for name in {"plus", "minus"} & weights.keys():
            taken[name] = weights[name][places][:, places]
        if (sums := weights["pair_sums"]).numel():
            by_pair = sums.view(len(sums), *weights["plus"].shape)
            taken["pair_sums"] = by_pair[:, places][..., places].reshape(len(sums), -1)
        return taken

    def take(self, examination: Examination) -> None:
        super().take(examination)
        self.theta_minus.copy_(self.theta)
        explained, slope = self.zeta * self.impressions, (self.theta - self.zeta) * self.impressions
        self._start_at(float((self.clicks - explained).sum()) / max(float(slope.sum()), 1e-9))

    def _start_at(self, beta: float) -> None:
        """Start with this β for all items, so that random initial weights do not dominate a small log."""
        if self.released:
            return
        last = [module for module in self.network.modules() if isinstance(module, nn.Linear)][-1]
        with torch.no_grad():
            last.weight[:2] = 0
            last.bias[0] = torch.tensor(beta).clamp(0.001, 0.999).logit()

    @property
    def draws(self) -> bool:
        return self.sampled

    @property
    def step(self) -> Tensor | None:
        released = self.released and not self.printed
        return RELEASED_STEP * self.updates.pow(-RELEASED_FORGET) if released else super().step

    def settings(self) -> dict[str, Any]:
        names = ("scaled_values", "pairs", "trust_in_pairs", "sampled", "released", "printed")
        return {**super().settings(), **{name: getattr(self, name) for name in names}}

    def labels(self, lists: Lists) -> Tensor:
        return self.inputs.labels_of(lists)

    def predictions(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logit of β, the log of μ, and g of each item. Not in half precision, as pairs need their order."""
        with torch.autocast(features.device.type, enabled=False):
            outputs = self.network(features)
        return outputs[..., 0], outputs[..., 1].clamp(-LARGEST_LOG_VALUE, LARGEST_LOG_VALUE), outputs[..., 2]

    def of_lists(self, lists: Lists) -> tuple[Tensor, Tensor, Tensor]:
        """Return the `predictions` for the items of lists."""
        return self.predictions(lists.features)

    def loss(self, lists: Lists) -> Tensor:
        """Return the loss of regression on the posteriors (the networks' M-step); its gradient is the likelihood's.

        β by cross-entropy, μ by the gamma deviance of positive labels c/μ + log μ, g by cross-entropy over pairs.
        """
        logit, log_value, preference = self.of_lists(lists)
        labels, place = self.labels(lists), self.index(lists.shown_positions)
        positive = labels > 0
        if self.released:
            lists = with_clicks(lists, labels)
        with torch.no_grad():
            beta = logit.sigmoid()
            target = self._target(relevance_posterior(positive, self.theta[place], beta, self.zeta[place]))
        item = binary_cross_entropy_with_logits(logit, target, reduction="none")
        item = item + self.value_deviance(labels, place, log_value)
        loss = (self._row_weights(place, lists) * item).sum(-1)
        if self.pairs:
            gap = gaps(preference)
            with torch.no_grad():
                pair, preferred, counts = self._pairs(lists, labels, place, beta, gap)
                if self.released:
                    target = released_target(pairs_of(positive)[1], pair, pairs_of(self.theta_minus[place])[1])
                    counts = lambdaloss_weights(preference, labels, where=lists.where)
                else:
                    target = preference_target(preferred, pair.gamma, pair_posterior(pair))
                target = self._target(target)
            cross = binary_cross_entropy_with_logits(gap, target, reduction="none")
            loss = loss + self.pair_share * (counts * cross).sum((-2, -1))
        return reduced(loss, lists.weights)

    def value_deviance(self, labels: Tensor, place: Tensor, log_value: Tensor) -> Tensor:
        """Return the gamma deviance of the values of clicked items, up to a constant; 0 for other items."""
        return torch.where(labels > 0, labels / self.rho[place] * torch.exp(-log_value) + log_value, 0.0)

    def _target(self, probability: Tensor) -> Tensor:
        return torch.bernoulli(probability) if self.sampled else probability

    def _row_weights(self, place: Tensor, lists: Lists) -> Tensor:
        return torch.where(lists.where, self.row_weights(place), 0.0)

    def _pairs(
        self, lists: Lists, labels: Tensor, place: Tensor, beta: Tensor, gap: Tensor
    ) -> tuple[PairModel, Tensor, Tensor]:
        """Return, for all pairs [..., i, j]: parameters, True where c_i > c_j, 1 for different items, else 0."""
        (theta_i, theta_j), (where_i, where_j), (i, j) = map(pairs_of, (self.theta[place], lists.where, place))
        pair = PairModel(theta_i, theta_j, self.plus[i, j], self.minus[i, j], gap.sigmoid(), pairs_of(beta)[0])
        apart = ~torch.eye(place.shape[-1], dtype=torch.bool, device=place.device)
        counts = (where_i & where_j & apart).to(beta.dtype)
        return pair, preferred_pairs(labels, where=lists.where), counts

    def update(self, lists: Lists) -> None:
        """Update θ⁻, ρ, θ, ε⁺ and ε⁻ from the statistics of a batch and of earlier batches."""
        if not (self.pairs or self.scaled_values or self.theta_learned):
            return  # no parameter of this model depends on these statistics
        labels, place = self.labels(lists), self.index(lists.shown_positions)
        if self.released:
            lists = with_clicks(lists, labels)
        with self.without_dropout():
            logit, log_value, preference = self.of_lists(lists)
        beta, positive, size = logit.sigmoid(), labels > 0, len(self.index)
        weights = lists.weights[:, None] * lists.where
        examined = examined_zero_terms(positive, self.theta[place], beta)
        draws = self.released and self.sampled
        if draws:
            examined = torch.bernoulli(examined[0]), examined[1]
        values = torch.where(positive, labels, 0.0), torch.where(positive, log_value.exp(), 0.0)
        parts = [(sums_in_cells((*examined, *values), place, weights, size), weights)]
        if self.theta_learned:
            terms = self.theta_terms(positive, place, beta)
            if draws and self.theta_from == "em":
                terms = (*terms[:2], torch.where(positive, 1.0, examined[0]), terms[3])
            parts.append((sums_in_cells(terms, place, weights, size), weights))
        if self.trust_in_pairs:
            pair, preferred, counts = self._pairs(lists, labels, place, beta, gaps(preference))
            counts, (i, j) = counts * lists.weights[:, None, None], pairs_of(place)
            posterior = drawn_states(pair_posterior(pair)) if draws else pair_posterior(pair)
            terms = trust_terms(preferred, posterior)
            parts.append((sums_in_cells(terms, i * size + j, counts, size * size), counts))
        self._average_in(means_of_all(*parts))

    def _average_in(self, means: list[Tensor]) -> None:
        """Update the parameters from the `means` of a batch: of items, of θ if it is learned, of pairs if they are."""
        self.updates += 1
        self.theta_minus.copy_(self.ratio(self.item_sums[:2], means[0][:2], self.theta_minus))
        if self.scaled_values:
            rho = self.ratio(self.item_sums[2:], means[0][2:], self.rho).clamp(0.01, 100)
            self.rho.copy_(rho / rho.gather(0, self.theta.argmax(0, keepdim=True)))
        if self.theta_learned:
            self.regress(means[1])
        if self.trust_in_pairs:
            sums, batch = (each.view(4, *self.plus.shape) for each in (self.pair_sums, means[-1]))
            self.take_trust(self.ratio(sums[:2], batch[:2], self.plus), self.ratio(sums[2:], batch[2:], self.minus))

    def take_trust(self, plus: Tensor, minus: Tensor) -> None:
        """Set ε⁺ and ε⁻, from 0.01 to 0.99; ε⁻ is at most ε⁺."""
        self.plus.copy_(plus.clamp(0.01, 0.99))
        self.minus.copy_(torch.minimum(minus.clamp(0.01, 0.99), self.plus))

    @torch.no_grad()
    def held_out_metrics(self, batches: list[Lists]) -> dict[str, Tensor]:
        """Return mean log-likelihoods per list; `held_out` stores that of clicks, with β(x) and with one β for all.

        On a GPU nothing waits for them, because many models may be evaluated one after another.
        """
        parts = [self.log_likelihood(lists) for lists in batches]
        exposures = ((self.theta[self.index(lists.shown_positions)], lists.where) for lists in batches)
        count, clicked, exposure, *totals = self._over_all(
            [self.theta.new_full((), len(lists)) for lists in batches],
            [((self.labels(lists) > 0) & lists.where).sum() for lists in batches],
            [torch.where(where, exposure, 0.0).sum() for exposure, where in exposures],
            *([part[name].sum() for part in parts] for name in parts[0]),
        )
        metrics = {name: total / count for name, total in zip(parts[0], totals, strict=True)}
        beta = (clicked / exposure.clamp(min=1e-9)).clamp(1e-6, 0.999)
        (constant,) = self._over_all([self._click_likelihood(lists, beta).sum() for lists in batches])
        self.held_out.copy_(torch.stack([metrics["clicks"], constant / count]))
        return {"likelihood": torch.stack(list(metrics.values())).sum(), **metrics}

    def _over_all(self, *quantities: Sequence[Tensor]) -> Tensor:
        """Return the sum of each quantity over all batches of all processes."""
        return summed(torch.stack([torch.stack(list(values)).sum().to(self.theta.dtype) for values in quantities]))

    def _click_likelihood(self, lists: Lists, beta: Tensor) -> Tensor:
        place = self.index(lists.shown_positions)
        likelihood = item_log_likelihood(self.labels(lists) > 0, self.theta[place], beta, self.zeta[place])
        return (self._row_weights(place, lists) * likelihood).sum(-1)

    @torch.no_grad()
    def log_likelihood(self, lists: Lists) -> dict[str, Tensor]:
        """Return the log-likelihood per list of clicks, of values of clicked items (gamma deviance), and of pairs."""
        labels, place = self.labels(lists), self.index(lists.shown_positions)
        logit, log_value, preference = self.of_lists(lists)
        beta, values = logit.sigmoid(), -self.value_deviance(labels, place, log_value)
        weights = self._row_weights(place, lists)
        likelihoods = {"clicks": self._click_likelihood(lists, beta), "values": (weights * values).sum(-1)}
        if self.pairs:
            pair, preferred, counts = self._pairs(lists, labels, place, beta, gaps(preference))
            likelihoods["pairs"] = self.pair_share * (counts * pair_log_likelihood(preferred, pair)).sum((-2, -1))
        return likelihoods


# --- The bias of simulated users --------------------------------------------------------------------------------------
# A bias model that knows simulated users, for experiments: what a method would gain from perfect estimates.

MARGIN = 10.0  # difference of g between neighbouring grades, so that γ is nearly 0 or 1


class OracleModel(BiasModel):
    """The true θ by position, and the true β and μ by grade. ε⁺, ε⁻ and θ⁻ are estimated from these, as by EM."""

    by_grade: Tensor

    def __init__(self, inputs: MethodInputs, **options: Any) -> None:
        user = simulated_user(inputs, "em=oracle")
        super().__init__(inputs, **{**options, "theta_from": "oracle"})
        self.network = nn.Identity()
        grades = torch.arange(user.max_grade + 1.0)
        value = user.value_of_click(grades, torch.ones_like(grades, dtype=torch.int64), inputs.label)
        outputs = user.attracted(grades).logit(), value.clamp(min=1e-6).log(), MARGIN * grades
        self.register_buffer("by_grade", torch.stack(outputs, -1))

    def of_lists(self, lists: Lists) -> tuple[Tensor, Tensor, Tensor]:
        logit, log_value, preference = self.by_grade[lists.true_relevance.long()].unbind(-1)
        return logit, log_value, preference

    def loss(self, lists: Lists) -> Tensor:
        return torch.zeros((), device=lists.features.device)  # there is nothing to learn by gradients


# --- Diagnosis --------------------------------------------------------------------------------------------------------
# Report a trained bias model: its parameters, statistics of them over some lists, and warnings of problems.

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
KINDS = ("both above zero", "one above zero")


class Tally:
    """Sums over lists, from which the report of a bias model is computed."""

    def __init__(self, model: BiasModel) -> None:
        size, device = len(model.index), model.theta.device
        self.model = model
        self.betas: list[Tensor] = []
        self.ts: list[Tensor] = []
        self.zeros = torch.zeros(2, size, device=device)  # items with label 0 by position: Σ t, number
        self.trust = torch.zeros(2, size * size, device=device)  # by pair of positions: Σ m, number of item pairs
        self.weights: tuple[list[Tensor], ...] = tuple([] for _ in KINDS)

    def add(self, lists: Lists, weights: Tensor) -> None:
        model, labels = self.model, self.model.labels(lists)
        place, size = model.index(lists.shown_positions), len(model.index)
        logit, _, preference = model.of_lists(lists)
        beta, zero = logit.sigmoid(), lists.where & (labels <= 0)
        t = examined_though_zero(model.theta[place], beta)[zero]
        self.betas.append(beta[lists.where])
        self.ts.append(t)
        self.zeros += torch.stack([sums_by_cell(values, place[zero], size) for values in (t, torch.ones_like(t))])
        preferred = preferred_pairs(labels, where=lists.where)
        _, lower_positive = pairs_of(labels > 0)
        both = preferred & lower_positive
        for kind, chosen in zip(self.weights, (both, preferred & ~lower_positive), strict=True):
            kind.append(weights[chosen])
        if model.trust_in_pairs:
            i, j = pairs_of(place)
            m = pair_trust(model.plus[i, j], model.minus[i, j], gaps(preference).sigmoid())
            pairs = (torch.where(both, m, 0.0), both.float())
            self.trust += torch.stack([sums_by_cell(values, i * size + j, size * size) for values in pairs])


@torch.no_grad()
def diagnosis(
    model: BiasModel, batches: Iterable[Lists], *, weights: Callable[[Lists, Tensor], Tensor], clip: float
) -> dict[str, Any]:
    """Return θ and the other parameters of a bias model, statistics of them over some lists, and warnings.

    `weights` returns the pair weights of lists, given their labels; `clip` is the largest weight that training uses.
    """
    model.eval()
    tally, size = Tally(model), len(model.index)
    for lists in batches:
        tally.add(lists, weights(lists, model.labels(lists)))
    report: dict[str, Any] = {
        **model.report(),
        "theta_minus": numbers(quotient(*tally.zeros)),
        "beta": _quantiles(tally.betas),
        "t": _quantiles(tally.ts),
        "pairs": {name: _kind(parts, clip) for name, parts in zip(KINDS, tally.weights, strict=True)},
        "held_out_log_likelihood": dict(zip(("beta of x", "one beta"), numbers(model.held_out), strict=True)),
    }
    if model.scaled_values:
        report["rho"] = numbers(model.rho)
    if model.trust_in_pairs:
        report |= {
            "eps_plus": _matrix(model.plus),
            "eps_minus": _matrix(model.minus),
            "m": _matrix(quotient(*tally.trust).view(size, size)),  # 0 for positions without such pairs
        }
    report["warnings"] = [{"name": name, "what": what} for name, what in _warnings(model, report)]
    return report


def _warnings(model: BiasModel, report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if report["beta"]["0.05"] > 0.9 or report["t"]["0.95"] < 0.02:
        what = "almost all items count as relevant, or almost no unclicked items as examined"
        yield "collapse", f"{what}: theta may be too low"
    yield from model.warnings()
    with_x, without = model.held_out.tolist()
    if with_x < without:
        yield "divergence", "the model explains held-out clicks worse with features than without"
    for name, kind in report["pairs"].items():
        if kind["clipped"] > 0.01:
            yield "weights clipped", f"{kind['clipped']:.1%} of the pairs (labels: {name}) weigh more than max_weight"
        if kind["pairs"] > 100 and kind["effective_share"] < 0.05:
            few = f"a few pairs (labels: {name}) dominate"
            yield "weights uneven", f"{few}: the effective number of pairs is {kind['effective_share']:.1%} of all"
    if model.trust_in_pairs:
        right, all_right, wrong, all_wrong = model.pair_sums
        reversed_ = (quotient(wrong, all_wrong) > quotient(right, all_right)) & (all_right > 0) & (all_wrong > 0)
        if bool(reversed_.any()):
            pairs = f"{int(reversed_.sum())} pairs of positions"
            yield "trust reversed", f"eps- would exceed eps+ for {pairs}; it is set to eps+ there"


def _kind(parts: list[Tensor], clip: float) -> dict[str, float]:
    weights = torch.cat(parts).double() if parts else torch.zeros(0)
    clipped, pairs = weights.clamp(max=clip), len(weights)
    squares = float(clipped.square().sum())
    return {
        "pairs": pairs,
        "effective_share": round(float(clipped.sum()) ** 2 / (pairs * squares), 4) if squares else 0.0,
        "clipped": round(int((weights > clip).sum()) / pairs, 4) if pairs else 0.0,
        "largest": round(float(weights.max()), 2) if pairs else 0.0,
    }


def _quantiles(parts: list[Tensor]) -> dict[str, float]:
    values = torch.cat(parts)[: 1 << 20] if parts else torch.zeros(0)
    if not len(values):
        return {str(q): 0.0 for q in QUANTILES}
    quantiles = values.float().cpu().quantile(torch.tensor(QUANTILES))
    return {str(q): round(v, 4) for q, v in zip(QUANTILES, quantiles.tolist(), strict=True)}


def _matrix(values: Tensor) -> list[list[float]]:
    return [numbers(row) for row in values]
