"""Click models: the exact likelihood of the clicks of a list, as pure functions of the logits of its items.

    PBM      position-based model                    Richardson et al. 2007
    cascade  cascade model                           Craswell et al. 2008
    UBM      user browsing model                     Dupret & Piwowarski 2008
    DBN      dynamic Bayesian network                Chapelle & Zhang 2009
    SDBN     DBN with γ = 1, the simplified DBN      Chapelle & Zhang 2009
    CCM      click chain model                       Guo et al. 2009

In each model the user clicks an examined item with the probability a of its attraction: c_k = E_k A_k. The models
differ in the examination E. So a model has two functions, and all else follows from them:

    P(E_k = 1 | c_1 .. c_{k-1})      gives P(c_k | c_1 .. c_{k-1}), and the product of these is the likelihood of a list
    P(E_k = 1)                       gives P(c_k = 1), the probability before any click is known

The items of a list are in the order in which they were shown, with padding at the end. Everything is computed in log
space, from logits. An examination that is certain has the logit +inf, and nothing is subtracted from 1, so results are
accurate for logits of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from ultr.errors import OptionError, nearest

MAX_UBM_POSITIONS = 1_000  # its table has a number for each pair of positions


class ClickModel:
    """A click model of lists with a number of `positions`. It has no state: logits and parameters are arguments.

    - `logits`: `OUTPUTS` tensors [lists, items]: the logit of attraction and, for two outputs, of satisfaction;
    - `parameters`: the logits of the model's own parameters, a vector of `size` numbers;
    - `place`: the index of each item's position, 0 to positions - 1.
    """

    OUTPUTS: ClassVar[int] = 1

    def __init__(self, positions: int) -> None:
        self.positions = positions

    @property
    def size(self) -> int:
        """The number of the model's own parameters."""
        return 0

    def modelled(self, clicked: Tensor, where: Tensor) -> Tensor:
        """Return True for the items whose clicks have a probability in this model."""
        return where

    def examined_after(self, clicked: Tensor, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> Tensor:
        """Return the logit of P(E_k = 1 | clicks above k)."""
        raise NotImplementedError

    def examined(self, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> Tensor:
        """Return log P(E_k = 1), before any click is known."""
        raise NotImplementedError

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return the probabilities that the parameters stand for, by name."""
        return {}


class PBM(ClickModel):
    """P(E_k) = θ_k, whatever was clicked."""

    @property
    def size(self) -> int:
        return self.positions

    def examined_after(self, clicked: Tensor, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> Tensor:
        return parameters[place]

    def examined(self, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> Tensor:
        return logsigmoid(parameters[place])

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        return {"theta": parameters.sigmoid()}


class UBM(ClickModel):
    """P(E_k | clicks above) = γ[k, k'], where k' < k is the position of the last click above k, 0 if there is none."""

    def __init__(self, positions: int) -> None:
        super().__init__(positions)
        if positions > MAX_UBM_POSITIONS:
            what = f"the user browsing model is for up to {MAX_UBM_POSITIONS:,} positions"
            raise OptionError(what, got=f"{positions:,}", hint="drop the rows of the last positions, or use dbn")

    @property
    def size(self) -> int:
        return self.positions * (self.positions + 1)

    def examined_after(self, clicked: Tensor, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> Tensor:
        last = torch.where(clicked, place + 1, 0).cummax(-1).values
        last = torch.cat([torch.zeros_like(last[..., :1]), last[..., :-1]], dim=-1)
        return parameters[place * (self.positions + 1) + last]

    def examined(self, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> Tensor:
        attraction = logits[0]
        before = torch.full_like(attraction, -torch.inf)  # log P(the last click is on j), for each item j
        none = torch.zeros_like(attraction[..., :1])  # log P(no click)
        state, last = torch.cat([none, before], -1), torch.cat([torch.zeros_like(place[..., :1]), place + 1], -1)
        steps = []
        for k in range(attraction.shape[-1]):
            gamma = parameters[place[..., k : k + 1] * (self.positions + 1) + last]
            none = no_click_logit(gamma, attraction[..., k : k + 1])
            steps.append((state + logsigmoid(gamma)).logsumexp(-1))
            clicked_here = (state + logsigmoid(-none)).logsumexp(-1)
            state = state + logsigmoid(none)
            state[..., k + 1] = clicked_here
        return torch.stack(steps, -1)

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        return {"gamma": parameters.sigmoid().view(self.positions, self.positions + 1)}


class Chain(ClickModel):
    """The first item is examined. After each examined item the user goes on to the next one, or leaves."""

    def goes_on(self, logits: Sequence[Tensor], parameters: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return logits: to go on after no click (None: certain, else one number), and after a click [lists, items]."""
        raise NotImplementedError

    def examined_after(self, clicked: Tensor, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> Tensor:
        # With g the logit to go on and u = logit P(E_k | clicks above) - g, Bayes' rule after no click on k gives
        #   u' = log sigmoid(u + log(1-a) + log sigmoid(g))        and without g, where it is certain: u' = u + log(1-a)
        none, click = self.goes_on(logits, parameters)
        factor = logsigmoid(-logits[0])
        if none is not None:
            factor, click = factor + logsigmoid(none), click - none
        u = torch.full_like(logits[0][..., 0], torch.inf)
        steps = [u]
        for clicked_here, factor_here, after_click in zip(
            *(x.unbind(-1) for x in (clicked, factor, click)), strict=True
        ):
            after_none = u + factor_here if none is None else logsigmoid(u + factor_here)
            u = torch.where(clicked_here, after_click, after_none)
            steps.append(u)
        examined = torch.stack(steps[:-1], -1)
        return examined if none is None else examined + none

    def examined(self, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> Tensor:
        none, click = self.goes_on(logits, parameters)
        after_none = logsigmoid(-logits[0]) + (0.0 if none is None else logsigmoid(none))
        step = torch.logaddexp(logsigmoid(logits[0]) + logsigmoid(click), after_none)
        return torch.cat([torch.zeros_like(step[..., :1]), step[..., :-1].cumsum(-1)], dim=-1)


class Cascade(Chain):
    """The user reads the list up to the first click. Items after it have no probability: they are not modelled."""

    def modelled(self, clicked: Tensor, where: Tensor) -> Tensor:
        return where & (clicked.cumsum(-1) - clicked.long() == 0)

    def goes_on(self, logits: Sequence[Tensor], parameters: Tensor) -> tuple[Tensor | None, Tensor]:
        return None, torch.full_like(logits[0], -torch.inf)

    def examined_after(self, clicked: Tensor, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> Tensor:
        return torch.full_like(logits[0], torch.inf)


class SDBN(Chain):
    """After no click the user goes on; after a click with probability 1 - s, where s is the item's satisfaction."""

    OUTPUTS = 2

    def goes_on(self, logits: Sequence[Tensor], parameters: Tensor) -> tuple[Tensor | None, Tensor]:
        return None, -logits[1]


class DBN(Chain):
    """The user goes on with probability γ after no click, and with γ (1 - s) after a click."""

    OUTPUTS = 2

    @property
    def size(self) -> int:
        return 1

    def goes_on(self, logits: Sequence[Tensor], parameters: Tensor) -> tuple[Tensor | None, Tensor]:
        gamma = parameters[0]
        return gamma, -torch.logaddexp(logits[1] + softplus(-gamma), -gamma)

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        return {"gamma": parameters[0].sigmoid()}


class CCM(Chain):
    """The user goes on with probability α_1 after no click, and with α_2 (1 - a) + α_3 a after a click.

    The attraction a is the relevance of the paper: it is also the probability that a clicked item satisfies.
    """

    @property
    def size(self) -> int:
        return 3

    def goes_on(self, logits: Sequence[Tensor], parameters: Tensor) -> tuple[Tensor | None, Tensor]:
        satisfied, unsatisfied = logsigmoid(logits[0]), logsigmoid(-logits[0])
        after_2, after_3 = parameters[1], parameters[2]
        log_on = torch.logaddexp(unsatisfied + logsigmoid(after_2), satisfied + logsigmoid(after_3))
        log_off = torch.logaddexp(unsatisfied + logsigmoid(-after_2), satisfied + logsigmoid(-after_3))
        return parameters[0], log_on - log_off

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        return {f"alpha{i + 1}": parameters[i].sigmoid() for i in range(3)}


MODELS: dict[str, type[ClickModel]] = {
    "cascade": Cascade,
    "ccm": CCM,
    "dbn": DBN,
    "pbm": PBM,
    "sdbn": SDBN,
    "ubm": UBM,
}


def make_click_model(name: str, positions: int) -> ClickModel:
    """Make the click model that has this name in the table `MODELS`."""
    if name not in MODELS:
        raise OptionError(f"no click model '{name}'", hint=nearest(name, MODELS))
    return MODELS[name](positions)


def checked_names(text: str) -> list[str]:
    """Return the names of click models in a comma-separated text; raise OptionError if one is unknown or repeated."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        make_click_model(name, 1)
    if len(set(names)) < len(names):
        raise OptionError("each click model must be named once", got=text)
    return names


def no_click_logit(examination: Tensor, attraction: Tensor) -> Tensor:
    """Return the logit of 1 - e a, the probability of no click, for the logits of e and a.

        log((1 - e a) / (e a)) = log(x + y + x y),  x = (1 - e) / e,  y = (1 - a) / a

    The terms of this sum are positive, so nothing cancels.
    """
    return torch.logaddexp(softplus(-attraction) - examination, -attraction)


def conditional_log_likelihood(
    model: ClickModel,
    clicked: Tensor,
    logits: Sequence[Tensor],
    *,
    where: Tensor,
    place: Tensor,
    parameters: Tensor,
) -> Tensor:
    """Return log P(c_k | c_1 .. c_{k-1}) of each item; zero for padding and for items that are not modelled.

    The sum over a list is the exact log-likelihood of its clicks.
    """
    clicked, logits, place = _masked(clicked, logits, place, where)
    none = no_click_logit(model.examined_after(clicked, logits, parameters, place), logits[0])
    return torch.where(model.modelled(clicked, where), logsigmoid(torch.where(clicked, -none, none)), 0.0)


def log_examination(
    model: ClickModel, logits: Sequence[Tensor], *, where: Tensor, place: Tensor, parameters: Tensor
) -> Tensor:
    """Return log P(E_k = 1) of each item before any click is known; zero for padding."""
    _, logits, place = _masked(where, logits, place, where)
    return torch.where(where, model.examined(logits, parameters, place), 0.0)


def marginal_log_likelihood(
    model: ClickModel,
    clicked: Tensor,
    logits: Sequence[Tensor],
    *,
    where: Tensor,
    place: Tensor,
    parameters: Tensor,
) -> Tensor:
    """Return log P(c_k) of each item before any other click is known; zero for padding."""
    clicked, logits, place = _masked(clicked, logits, place, where)
    click = model.examined(logits, parameters, place) + logsigmoid(logits[0])
    return torch.where(where, torch.where(clicked, click, log1mexp(click)), 0.0)


def log1mexp(values: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x <= 0, where x = 0 counts as the largest number below zero."""
    values = values.clamp(max=-torch.finfo(values.dtype).tiny)
    near = values > -0.6931  # log 2: each form is accurate on its own side
    close = torch.where(near, values, -1.0).expm1().neg().log()
    return torch.where(near, close, torch.log1p(-torch.where(near, -1.0, values).exp()))


def _masked(
    clicked: Tensor, logits: Sequence[Tensor], place: Tensor, where: Tensor
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    return clicked & where, tuple(each.masked_fill(~where, 0.0) for each in logits), torch.where(where, place, 0)
