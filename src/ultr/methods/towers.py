"""Shallow towers: a small model of position explains a part of the feedback, and is not used in serving.

The oldest such model is an embedding of the position that is an input of the ranker (`PositionFeature`).

Zhao et al. (2019, "Recommending what video to watch next") add the tower to the prediction; PAL (Guo et al. 2019)
multiplies by it. The ranker and its towers learn the label, or each action of the label: one network then has an output
for each action, and the label's expression combines the predictions.

If a good ranker wrote the log, position and relevance are correlated, and a tower may learn a part of relevance. Three
options are against that: weights after Hager et al. (2025, "Unidentified and Confounded? Understanding Two-Tower
Models for Unbiased Learning to Rank"), gradient reversal and dropout after Zhang et al. (2023, "Towards Disentangling
Relevance and Bias in Unbiased Learning to Rank"), and a start at estimated examination.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Unpack

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import elu, softplus

from ultr.datasets.users import simulate_log
from ultr.errors import OptionError, nearest
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.anchor import Part, start_network
from ultr.methods.base import (
    POSITION_SPEED,
    RELEASED_ACCUMULATOR,
    AtLeastZero,
    BiasInputs,
    FeedbackMethod,
    MaxWeight,
    Method,
    MethodInputs,
    Names,
    PositionIndex,
    PositionTable,
    as_limit,
    at_least_single,
    options_of,
)
from ultr.methods.losses import logistic_loss, pointwise_loss, product_logistic_loss
from ultr.methods.position_model import LEAST_THETA, MAX_WEIGHT, LoggingWeights, PositionModel, numbers
from ultr.rankers import Dropout, FeatureEncoder, MLPRanker, Synthesised, WithConstants

DIMENSIONS, UNITS = 8, 16  # size of the embedding of a position, and of the hidden layer in a tower with context
SCALE_SESSIONS = 2000  # simulated sessions from which the scale of an action is estimated
ALL = ("all",)  # towers=all: a tower for each action
PositionDropout = Annotated[float, Field(ge=0, lt=1)]


class Tower(nn.Module):
    """A number for each position plus, if `context` names features, the output of a small network of both.

    In training the position is hidden with probability `dropout`, so that the ranker does not rely on the tower for
    everything. All outputs start at zero.
    """

    def __init__(self, inputs: MethodInputs, *, context: tuple[str, ...], dropout: float) -> None:
        super().__init__()
        for name in context:
            if name not in inputs.feature_names:
                hint = nearest(name, inputs.feature_names)
                raise OptionError(f"the context '{name}' is not a feature of the log", hint=hint)
        self.index = PositionIndex(inputs.positions)
        self.hide = Dropout(dropout)
        size = len(self.index) + 1  # the last entry is for a hidden position
        self.table = PositionTable(size)
        self.embedding: nn.Module | None = None
        if context:
            places = [inputs.feature_names.index(name) for name in context]
            self.embedding = nn.Embedding(size, DIMENSIONS)
            self.context = FeatureEncoder(inputs.features, inputs.categories, only=places)
            self.hidden = nn.Linear(DIMENSIONS + self.context.width, UNITS)
            self.output = nn.Linear(UNITS, 1, bias=False)
            nn.init.zeros_(self.output.weight)

    def forward(self, lists: Lists) -> Tensor:
        place = self.index(lists.shown_positions)
        if self.hide.p:
            shown = self.hide(torch.ones(place.shape, device=place.device)) > 0
            place = torch.where(shown, place, len(self.index))
        by_position: Tensor = self.table(place)
        if self.embedding is None:
            return by_position
        hidden = self.hidden(torch.cat([self.embedding(place), self.context(lists.features)], dim=-1))
        by_context: Tensor = self.output(elu(hidden)).squeeze(-1)
        return by_position + by_context

    @torch.no_grad()
    def start_at(self, values: Tensor) -> None:
        """Set the numbers of positions; that of a hidden position is their mean."""
        self.table.weight.copy_(torch.cat([values, values.mean(0, keepdim=True)]) / POSITION_SPEED)

    def by_position(self, batches: Iterable[Lists]) -> Tensor:
        """Return the tower's output [positions]; with context, its mean over the rows of `batches` at each position."""
        if self.embedding is None:
            return self.table.values[:-1]
        total = torch.zeros(2, len(self.index), device=self.table.weight.device)
        for lists in batches:
            place, output = self.index(lists.shown_positions)[lists.where], self(lists)[lists.where]
            total.index_add_(1, place, torch.stack([output, torch.ones_like(output)]))
        return total[0] / total[1].clamp(min=1)


class Adversary(nn.Module):
    """A line v · b + w that predicts the relevance sigmoid(s) from the output b of a tower, by cross-entropy.

    Its gradient for the tower is multiplied by -`strength`: the adversary learns to predict relevance, and the tower
    learns not to help it (Ganin and Lempitsky 2015). The score s gets no gradient.
    """

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.strength, self.line = strength, PositionTable(2)

    def forward(self, tower: Tensor, scores: Tensor, *, where: Tensor, weights: Tensor) -> Tensor:
        reversed_tower = tower.detach() - self.strength * (tower - tower.detach())  # equals the tower, but the gradient
        logits = self.line.values[0] * reversed_tower + self.line.values[1]
        return logistic_loss(logits, scores.detach().sigmoid(), where=where, weights=weights)


class _Towers(FeedbackMethod):
    """The base class of methods with towers, which multiply the prediction or add to it."""

    LEARNS_ALONE = True
    MULTIPLIES: ClassVar[bool]

    def _report(self, towers: Mapping[str, Tower], batches: Iterable[Lists]) -> dict[str, Any]:
        lists, first = list(batches), next(iter(towers.values()))
        self.eval()
        with torch.no_grad():
            outputs = {name: tower.by_position(lists) for name, tower in towers.items()}
        if self.MULTIPLIES:
            outputs = {name: values.sigmoid() for name, values in outputs.items()}
        return {
            "positions": first.index.ids.tolist(),
            "tower": "multiplies" if self.MULTIPLIES else "adds",
            "towers": {name: numbers(values) for name, values in outputs.items()},
            "warnings": [],
        }


class _Synthesize(_Towers):
    """Least squares on the label, which the score and the tower predict together."""

    def __init__(
        self, inputs: MethodInputs, *, context: Names = (), position_dropout: PositionDropout | None = None
    ) -> None:
        super().__init__(inputs)
        self.tower = Tower(inputs, context=context, dropout=_default_dropout(position_dropout, self.MULTIPLIES))

    OPTIONS = options_of(__init__)

    def loss(self, lists: Lists) -> Tensor:
        scores, tower = self.score(lists.features), self.tower(lists)
        predicted = scores * tower.sigmoid() if self.MULTIPLIES else scores + tower
        return pointwise_loss(predicted, self.labels(lists), where=lists.where, weights=lists.weights)

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return self._report({"label": self.tower}, batches)


class SumSynthesize(_Synthesize):
    """The label is predicted as c ≈ s(x) + b_k: score of features x plus tower of position k."""

    MULTIPLIES = False


class PalSynthesize(_Synthesize):
    """The label is predicted as c ≈ s(x) · sigmoid(b_k): score of features x times tower of position k."""

    MULTIPLIES = True


class _Tasks(_Towers):
    """One output for every action of the label, some with a tower; scores combine the predictions without towers.

    If the label uses clicks, the other actions are learned from clicked rows. With `rows=all` they are learned from all
    rows, where rows without a click have zero. `variant=released` is the baseline in the code that the authors of the
    CIKM 2022 paper released: rows=all, and a network for each action, with layer normalisation and no dropout.

    - `sample_weights=logging` weights the rows of actions with a tower by P(k) / P(k | stratum) (`LoggingWeights`).
    - `reversal` is the strength of an `Adversary` of each tower of an action that is 0 or 1.
    - `start=theta` starts towers at known or estimated examination θ: at logit θ_k if they multiply; else at
      log θ_k/θ_1, the log odds ratio of clicks if they are rare. Towers that add to other values start at zero.
    - `anchor=linear` gives the ranker what the default of `pairwise-em` has: the same linear start (see
      `ultr.methods.anchor`) and two networks with half the units, which learn side by side and are averaged.
    """

    TOWERS: ClassVar[tuple[str, ...]] = ()  # the actions with a tower; if empty, click or the first action
    ranker: Synthesised

    @classmethod
    def has_dropout(cls, options: Mapping[str, Any]) -> bool:
        return options.get("variant") != "released"

    @classmethod
    def limits_weights(cls, options: Mapping[str, Any]) -> bool:
        return super().limits_weights(options) and options.get("sample_weights") == "logging"

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        context: Names = (),
        position_dropout: PositionDropout | None = None,
        towers: Names | None = None,
        rows: Literal["clicked", "all"] | None = None,
        variant: Literal["standard", "released"] = "standard",
        reversal: AtLeastZero = 0.0,
        sample_weights: Literal["none", "logging"] = "none",
        max_weight: MaxWeight = MAX_WEIGHT,
        start: Literal["zero", "theta"] = "zero",
        anchor: Literal["linear", "none"] = "none",
    ) -> None:
        released, self.anchored = variant == "released", anchor == "linear"
        if self.anchored and (released or inputs.ranker != "mlp"):
            hint = "remove anchor=linear, or use a network and variant=standard"
            raise OptionError("anchor=linear cannot be used with this ranker or variant", hint=hint)
        if self.anchored:
            inputs = inputs.with_half_the_units(networks=2, skip=True)
        super().__init__(inputs.as_released() if released else inputs)
        inputs, actions = self.inputs, inputs.label.actions
        self.accumulator = RELEASED_ACCUMULATOR if released else 0.0
        self.after_click = (rows or ("all" if released else "clicked")) == "clicked"
        self.ranker = Synthesised(inputs.make_ranker(outputs=len(actions)), inputs.label, inputs.binary)
        chosen = towers or self.TOWERS or ("click" if "click" in actions else actions[0],)
        chosen = actions if chosen == ALL else chosen
        for name in chosen:
            if name not in actions:
                raise OptionError(f"the tower '{name}' is not an action of the label", hint=nearest(name, actions))
        dropout = _default_dropout(position_dropout, self.MULTIPLIES)
        towers_of = {_key(name): Tower(inputs, context=context, dropout=dropout) for name in chosen}
        self.towers = nn.ModuleDict(towers_of)
        weighted, at_theta = sample_weights == "logging", start == "theta"
        reversed_of = [_key(name) for name in chosen if reversal and name in self.ranker.binary]
        self.adversaries = nn.ModuleDict({key: Adversary(reversal) for key in reversed_of})
        self.sample_weights = LoggingWeights(inputs, max_weight=as_limit(max_weight)) if weighted else None
        self.starts_towers = at_theta
        self.start = PositionModel(inputs) if at_theta or self.anchored else None

    OPTIONS = options_of(__init__)

    def estimate_bias(self, log: Log, **given: Unpack[BiasInputs]) -> None:
        """Estimate the scale of each action that is not 0 or 1: the root mean square of its values.

        Also estimate the sample weights, and the θ at which towers start, if the options ask for them.
        """
        if self.sample_weights is not None:
            self.sample_weights.fit(log, seed=given["seed"])
        if self.start is not None:
            self.start.estimate(log, **given)
        if self.start is not None and self.starts_towers:
            self._start_towers(self.start.theta)
        if given["user"] is not None:
            log, _ = simulate_log(log.without_features(), given["user"], sessions=SCALE_SESSIONS, seed=given["seed"])
        self.inputs.label(log.actions)  # raises an error if the label cannot be computed from the actions
        for i, name in enumerate(self.inputs.label.actions):
            if name not in self.ranker.binary:
                learned = log.actions[name][self._learned(name, log.actions, np.ones(log.rows, bool))]
                squares = np.square(learned, dtype=np.float64)
                self.ranker.scale[i] = max(float(np.mean(squares)) ** 0.5, 1e-6) if len(squares) else 1

    def _start_towers(self, theta: Tensor) -> None:
        theta = theta.clamp(LEAST_THETA, 1 - 1e-6)
        values = theta.logit() if self.MULTIPLIES else theta.log() - theta[0].log()
        for name in self.inputs.label.actions:
            if _key(name) in self.towers and (self.MULTIPLIES or name in self.ranker.binary):
                self.towers[_key(name)].start_at(values)  # type: ignore[operator]

    def start_ranker(self, log: Log, *, seed: int) -> None:
        network = self.ranker.ranker
        if not self.anchored or self.start is None or not isinstance(network, MLPRanker):
            return
        parts: list[Part] = ["click" if _key(name) in self.towers else "none" for name in self.inputs.label.actions]
        start_network(network, log, self.inputs.label, self.start, parts * 2, seed=seed)

    def loss(self, lists: Lists) -> Tensor:
        by_network = at_least_single(self.ranker.outputs(lists.features)).unbind(-2)
        return torch.stack([self._loss(outputs.unbind(-1), lists) for outputs in by_network]).sum(0)

    def _loss(self, all_outputs: Sequence[Tensor], lists: Lists) -> Tensor:
        total = torch.zeros((), device=lists.features.device)
        sample_weights = None if self.sample_weights is None else self.sample_weights(lists)
        for i, (name, output) in enumerate(zip(self.inputs.label.actions, all_outputs, strict=True)):
            tower = self.towers[_key(name)](lists) if _key(name) in self.towers else None
            target = lists.actions[name].to(output.dtype)
            common = {"where": self._learned(name, lists.actions, lists.where), "weights": lists.weights}
            if tower is not None and _key(name) in self.adversaries:
                total = total + self.adversaries[_key(name)](tower, output, **common)
            if tower is not None and sample_weights is not None:
                common["item_weights"] = sample_weights
            if name in self.ranker.binary:
                total = total + self._click_loss(output, tower, target, common)
            else:
                total = total + self._value_loss(output, tower, target / self.ranker.scale[i], common)
        return total

    def _learned(self, name: str, actions: Mapping[str, Any], where: Any) -> Any:
        """Return a mask of the rows that the action `name` is learned from."""
        after = self.after_click and name != "click" and "click" in self.inputs.label.actions
        return where & (actions["click"] > 0) if after else where

    def _click_loss(self, output: Tensor, tower: Tensor | None, target: Tensor, common: dict[str, Tensor]) -> Tensor:
        if tower is None:
            return logistic_loss(output, target, **common)
        if self.MULTIPLIES:
            return product_logistic_loss(output, tower, target, **common)
        return logistic_loss(output + tower, target, **common)

    def _value_loss(self, output: Tensor, tower: Tensor | None, target: Tensor, common: dict[str, Tensor]) -> Tensor:
        predicted = softplus(output)
        if tower is not None:
            predicted = predicted * tower.sigmoid() if self.MULTIPLIES else predicted + tower
        return pointwise_loss(predicted, target, **common)

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        named = {name: self.towers[_key(name)] for name in self.inputs.label.actions if _key(name) in self.towers}
        return self._report({name: tower for name, tower in named.items() if isinstance(tower, Tower)}, batches)


class SumClick(_Tasks):
    """P(click) = sigmoid(s(x) + b_k) with a tower b of position k; the other actions have no tower."""

    MULTIPLIES = False


class PalClick(_Tasks):
    """P(click) = sigmoid(s(x)) · sigmoid(b_k) with a tower b of position k; the other actions have no tower."""

    MULTIPLIES = True


class PalClickDwell(PalClick):
    """`PalClick` with a tower that multiplies for every other action too, such as dwell time."""

    TOWERS = ALL


class PositionFeature(Method):
    """Least squares on the label, from features and an embedding of the position; scores are for the first position.

    It is the oldest bias correction. The network can combine position and features in any way, so fixing the position
    may not rank by relevance.
    """

    LEARNS_ALONE = True

    def __init__(self, inputs: MethodInputs) -> None:
        super().__init__(inputs)
        self.ranker = inputs.make_ranker(extra_features=DIMENSIONS)
        self.index = PositionIndex(inputs.positions)
        self.positions = nn.Embedding(len(self.index), DIMENSIONS)

    def score_at(self, features: Tensor, place: Tensor) -> Tensor:
        embedded = self.positions(place).expand(*features.shape[:-1], DIMENSIONS)
        return at_least_single(self.ranker(torch.cat([features, embedded], dim=-1)))

    def score(self, features: Tensor) -> Tensor:
        return self.score_at(features, torch.zeros((), dtype=torch.int64, device=features.device))

    def serving(self) -> nn.Module:
        return WithConstants(self.ranker, self.positions.weight.detach()[0])  # loaded weights also set the embedding

    def loss(self, lists: Lists) -> Tensor:
        scores = self.score_at(lists.features, self.index(lists.shown_positions))
        return pointwise_loss(scores, self.labels(lists), where=lists.where, weights=lists.weights)


def _key(action: str) -> str:
    """Return the key of an action's tower in the ModuleDict, where some names, such as `pop`, are reserved."""
    return f"on {action}"


def _default_dropout(dropout: float | None, multiplies: bool) -> float:
    """Return the dropout if given, else 0.1 for towers that add (Zhao et al.), and 0 for towers that multiply (PAL)."""
    return dropout if dropout is not None else 0.0 if multiplies else 0.1
