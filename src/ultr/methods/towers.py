"""Shallow towers: position explains a part of the feedback beside the ranker, and is left out when it serves.

Zhao et al. (2019, "Recommending what video to watch next") add the tower to the prediction; PAL (Guo et al. 2019)
multiplies by it. On the synthesised label, or on its actions, each predicted by an output of one network and put
together by the label's own expression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import elu, softplus

from ultr.errors import OptionError, nearest
from ultr.lists import Lists
from ultr.log import Log
from ultr.losses import logistic_loss, pointwise_loss, product_logistic_loss
from ultr.methods.base import (
    FeedbackMethod,
    MethodInputs,
    PositionIndex,
    PositionTable,
    at_least,
    at_least_single,
    one_of,
)
from ultr.methods.position_model import numbers
from ultr.rankers import Dropout, FeatureEncoder, Synthesised
from ultr.simulate import User, simulate_log

DIMENSIONS, UNITS = 8, 16  # of a tower that takes in context
SCALE_SESSIONS = 2000  # of users, in which the scale of an action is looked at
ALL = ("all",)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split("+"))
    if not all(names):
        raise OptionError("names are joined by +", got=f"'{text}'", mend="for example click+dwell")
    return names


def _share(text: str) -> float:
    value = at_least("position_dropout", 0)(text)
    if value >= 1:
        raise OptionError("'position_dropout' should be below 1", got=f"'{text}'")
    return value


class Tower(nn.Module):
    """A number for each position, and where there is context one more for both together, by a small network.

    In training the position is hidden with probability `dropout`, as if unknown, so that the ranker does not leave all
    to it. Starts at zero everywhere.
    """

    def __init__(self, inputs: MethodInputs, *, context: tuple[str, ...], dropout: float) -> None:
        super().__init__()
        for name in context:
            if name not in inputs.feature_names:
                mend = nearest(name, inputs.feature_names)
                raise OptionError(f"no feature '{name}' to enter the tower as context", mend=mend)
        self.index = PositionIndex(inputs.positions)
        self.hide = Dropout(dropout)
        size = len(self.index) + 1  # the last is for a position that is hidden
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
        found: Tensor = self.table(place)
        if self.embedding is None:
            return found
        beside = self.hidden(torch.cat([self.embedding(place), self.context(lists.features)], dim=-1))
        by_context: Tensor = self.output(elu(beside)).squeeze(-1)
        return found + by_context

    def by_position(self, batches: Iterable[Lists]) -> Tensor:
        """Its value at each position, with context its mean over the rows there."""
        if self.embedding is None:
            return self.table.values[:-1]
        total = torch.zeros(2, len(self.index), device=self.table.weight.device)
        for lists in batches:
            place, found = self.index(lists.shown_positions)[lists.where], self(lists)[lists.where]
            total.index_add_(1, place, torch.stack([found, torch.ones_like(found)]))
        return total[0] / total[1].clamp(min=1)


class _Towers(FeedbackMethod):
    """What the methods of this file share: whether towers multiply, and their options."""

    MULTIPLIES: ClassVar[bool]
    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {"context": _names, "position_dropout": _share}

    def _report(self, towers: Mapping[str, Tower], batches: Iterable[Lists]) -> dict[str, Any]:
        lists, first = list(batches), next(iter(towers.values()))
        self.eval()
        with torch.no_grad():
            found = {name: tower.by_position(lists) for name, tower in towers.items()}
        if self.MULTIPLIES:
            found = {name: values.sigmoid() for name, values in found.items()}
        return {
            "positions": first.index.ids.tolist(),
            "tower": "multiplies" if self.MULTIPLIES else "adds",
            "towers": {name: numbers(values) for name, values in found.items()},
            "warnings": [],
        }


class _Synthesize(_Towers):
    """Least squares on the label, of the score with the tower."""

    def __init__(
        self, inputs: MethodInputs, *, context: tuple[str, ...] = (), position_dropout: float | None = None
    ) -> None:
        super().__init__(inputs)
        self.tower = Tower(inputs, context=context, dropout=_default_dropout(position_dropout, self.MULTIPLIES))

    def loss(self, lists: Lists) -> Tensor:
        scores, tower = self.score(lists.features), self.tower(lists)
        predicted = scores * tower.sigmoid() if self.MULTIPLIES else scores + tower
        return pointwise_loss(predicted, self.labels(lists), where=lists.where, weights=lists.weights)

    def bias(self, batches: Iterable[Lists]) -> dict[str, Any] | None:
        return self._report({"label": self.tower}, batches)


class SumSynthesize(_Synthesize):
    """c ≈ s(x) + b_k."""

    MULTIPLIES = False


class PalSynthesize(_Synthesize):
    """c ≈ s(x) · sigmoid(b_k)."""

    MULTIPLIES = True


class _Tasks(_Towers):
    """Every action of the label by an output of its own, some with a tower; scores are Φ of the predictions without.

    Where the label reads clicks, what follows one is learned from the rows that were clicked (`rows=all`: from every
    row, zero without a click).
    """

    TOWERS: ClassVar[tuple[str, ...]] = ()  # actions that have one; none named: clicks
    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        **_Towers.OPTIONS,
        "towers": _names,
        "rows": one_of("rows", "clicked", "all"),
    }
    ranker: Synthesised

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        towers: tuple[str, ...] | None = None,
        rows: str = "clicked",
        context: tuple[str, ...] = (),
        position_dropout: float | None = None,
    ) -> None:
        super().__init__(inputs)
        actions = inputs.label.actions
        self.after_click = rows == "clicked"
        self.ranker = Synthesised(inputs.make_ranker(outputs=len(actions)), inputs.label, inputs.binary)
        chosen = towers or self.TOWERS or ("click" if "click" in actions else actions[0],)
        chosen = actions if chosen == ALL else chosen
        for name in chosen:
            if name not in actions:
                raise OptionError(f"the label has no action '{name}' for a tower", mend=nearest(name, actions))
        dropout = _default_dropout(position_dropout, self.MULTIPLIES)
        towers_of = {_key(name): Tower(inputs, context=context, dropout=dropout) for name in chosen}
        self.towers = nn.ModuleDict(towers_of)

    def prepare(self, log: Log, *, user: User | None, sessions: int, seed: int) -> None:
        """Find the scale of actions that are not 0 or 1: the root of their mean square."""
        if user is not None:
            log, _ = simulate_log(log.without_features(), user, sessions=SCALE_SESSIONS, seed=seed)
        self.inputs.label(log.actions)  # which refuses what it cannot be made of
        for i, name in enumerate(self.inputs.label.actions):
            if name not in self.ranker.binary:
                learned = log.actions[name][self._learned(name, log.actions, np.ones(log.rows, bool))]
                squares = np.square(learned, dtype=np.float64)
                self.ranker.scale[i] = max(float(np.mean(squares)) ** 0.5, 1e-6) if len(squares) else 1

    def loss(self, lists: Lists) -> Tensor:
        outputs = at_least_single(self.ranker.outputs(lists.features)).unbind(-1)
        total = torch.zeros((), device=lists.features.device)
        for i, (name, output) in enumerate(zip(self.inputs.label.actions, outputs, strict=True)):
            tower = self.towers[_key(name)](lists) if _key(name) in self.towers else None
            target = lists.actions[name].to(output.dtype)
            common = {"where": self._learned(name, lists.actions, lists.where), "weights": lists.weights}
            if name in self.ranker.binary:
                total = total + self._click_loss(output, tower, target, common)
            else:
                total = total + self._value_loss(output, tower, target / self.ranker.scale[i], common)
        return total

    def _learned(self, name: str, actions: Mapping[str, Any], where: Any) -> Any:
        """The rows that an action is learned from."""
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
    """P(click) = sigmoid(s(x) + b_k); the other actions without a tower."""

    MULTIPLIES = False


class PalClick(_Tasks):
    """P(click) = sigmoid(s(x)) · sigmoid(b_k); the other actions without a tower."""

    MULTIPLIES = True


class PalClickDwell(PalClick):
    """As PAL-Click, with a multiplying tower on every other action too, such as dwell time."""

    TOWERS = ALL


def _key(action: str) -> str:
    """The name of an action's tower among modules, which have names of their own that an action may bear."""
    return f"on {action}"


def _default_dropout(given: float | None, multiplies: bool) -> float:
    """A tenth, as in Zhao et al., where the tower adds; none in PAL."""
    return given if given is not None else 0.0 if multiplies else 0.1
