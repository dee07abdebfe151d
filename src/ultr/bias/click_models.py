"""Click models: the exact likelihood of the clicks of a list, as pure functions of the logits of its items.

    PBM      position-based model                    Richardson et al. 2007
    cascade  cascade model                           Craswell et al. 2008
    UBM      user browsing model                     Dupret & Piwowarski 2008
    DBN      dynamic Bayesian network                Chapelle & Zhang 2009
    DCM      dependent click model                   Guo et al. 2009 (WSDM)
    SDBN     DBN with γ = 1, the simplified DBN      Chapelle & Zhang 2009
    CCM      click chain model                       Guo et al. 2009 (WWW)

In each model the user clicks an examined item with the probability a of its attraction: c_k = E_k A_k. The models
differ in the examination E. So a model has two functions, and all else follows from them:

    P(E_k = 1 | c_1 .. c_{k-1})      gives P(c_k | c_1 .. c_{k-1}), and the product of these is the likelihood of a list
    P(E_k = 1)                       gives P(c_k = 1), the probability before any click is known

The items of a list are in the order in which they were shown, with padding at the end. Everything is computed in log
space, from logits. An examination that is certain has the logit +inf, and nothing is subtracted from 1, so results are
accurate for logits of any size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, logsigmoid, softplus

from ultr.bias.counts import Impressions, clicked_rows, impressions
from ultr.bias.identification import ROWS, TRAINED, TUNED
from ultr.errors import DataError, OptionError, nearest
from ultr.log import Log
from ultr.log.sampling import sample_log
from ultr.log.splits import split_by_query
from ultr.rankers import FeatureEncoder, fit_encoders, make_ranker
from ultr.utils.optimisation import EarlyStopping

MAX_UBM_POSITIONS = 1_000  # its table has a number for each pair of positions


class ClickModel:
    """A click model of lists with a number of `positions`. It has no state: logits and parameters are arguments.

    - `logits`: `OUTPUTS` tensors [lists, items]: the logit of attraction and, for two outputs, of satisfaction;
    - `parameters`: the logits of the model's own parameters, a vector of `size` numbers;
    - `place`: the index of each item's position, 0 to positions - 1.
    """

    OUTPUTS: ClassVar[int] = 1
    SIZE: ClassVar[int] = 0  # of models whose number of parameters does not depend on the positions

    def __init__(self, positions: int) -> None:
        self.positions = positions

    @property
    def size(self) -> int:
        """The number of the model's own parameters."""
        return self.SIZE

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

    def goes_on(self, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return logits: to go on after no click (None: certain, else one number), and after a click [lists, items]."""
        raise NotImplementedError

    def examined_after(self, clicked: Tensor, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> Tensor:
        # With g the logit to go on and u = logit P(E_k | clicks above) - g, Bayes' rule after no click on k gives
        #   u' = log sigmoid(u + log(1-a) + log sigmoid(g))        and without g, where it is certain: u' = u + log(1-a)
        none, click = self.goes_on(logits, parameters, place)
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
        none, click = self.goes_on(logits, parameters, place)
        after_none = logsigmoid(-logits[0]) + (0.0 if none is None else logsigmoid(none))
        step = torch.logaddexp(logsigmoid(logits[0]) + logsigmoid(click), after_none)
        return torch.cat([torch.zeros_like(step[..., :1]), step[..., :-1].cumsum(-1)], dim=-1)


class Cascade(Chain):
    """The user reads the list up to the first click. Items after it have no probability: they are not modelled."""

    def modelled(self, clicked: Tensor, where: Tensor) -> Tensor:
        return where & (clicked.cumsum(-1) - clicked.long() == 0)

    def goes_on(self, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> tuple[Tensor | None, Tensor]:
        return None, torch.full_like(logits[0], -torch.inf)

    def examined_after(self, clicked: Tensor, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> Tensor:
        return torch.full_like(logits[0], torch.inf)


class DCM(Chain):
    """After no click the user goes on; after a click at position k with probability λ_k."""

    @property
    def size(self) -> int:
        return self.positions

    def goes_on(self, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> tuple[Tensor | None, Tensor]:
        return None, parameters[place]

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        return {"lambda": parameters.sigmoid()}


class SDBN(Chain):
    """After no click the user goes on; after a click with probability 1 - s, where s is the item's satisfaction."""

    OUTPUTS = 2

    def goes_on(self, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> tuple[Tensor | None, Tensor]:
        return None, -logits[1]


class DBN(Chain):
    """The user goes on with probability γ after no click, and with γ (1 - s) after a click."""

    OUTPUTS, SIZE = 2, 1

    def goes_on(self, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> tuple[Tensor | None, Tensor]:
        gamma = parameters[0]
        return gamma, -torch.logaddexp(logits[1] + softplus(-gamma), -gamma)

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        return {"gamma": parameters[0].sigmoid()}


class CCM(Chain):
    """The user goes on with probability α_1 after no click, and with α_2 (1 - a) + α_3 a after a click.

    The attraction a is the relevance of the paper: it is also the probability that a clicked item satisfies.
    """

    SIZE = 3

    def goes_on(self, logits: Sequence[Tensor], parameters: Tensor, place: Tensor) -> tuple[Tensor | None, Tensor]:
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
    "dcm": DCM,
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
    model: ClickModel, clicked: Tensor, logits: Sequence[Tensor], *, where: Tensor, place: Tensor, parameters: Tensor
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
    model: ClickModel, clicked: Tensor, logits: Sequence[Tensor], *, where: Tensor, place: Tensor, parameters: Tensor
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


# --- Quality on held-out requests -------------------------------------------------------------------------------------
# The quality of click models on held-out requests: fit each model to a log, and compare how well it predicts clicks.
#
# The attraction (and satisfaction) of an item is a function of its features. In a log without features it is a
# parameter of each item under its query, as in the papers, with a normal prior. Everything is fitted by the exact
# likelihood, with mini-batches, and training stops when the likelihood of other requests no longer improves.

BATCH, LEAST_BATCH = 512, 16  # lists per step; a small log has smaller batches
STEPS = 48  # steps of an epoch, at least
EPOCHS = 12  # at most; the learning rate falls to zero over them
PATIENCE = 3  # epochs without improvement before training stops
# The learning rates of Adam: of parameters of items and of the model (with the root of the batch), and of a network.
LEARNING_RATE, NETWORK_RATE = 0.05, 0.005
PRIOR = 1.0  # the precision of the normal prior of an item's logit around the mean logit
HIDDEN = (32, 16)  # units of the network of features
ROWS_AT_ONCE = 1 << 18  # rows, with padding, that are gathered or evaluated at once


@dataclass(frozen=True)
class ModelQuality:
    """How well a click model predicts the clicks of held-out requests, by likelihood and by perplexity.

    - `log_likelihood`: the mean of log P(c_k | clicks above k) over impressions. Items that a model leaves out (for
      cascade, those after the first click) do not count, so cascade is not comparable with the other models here;
    - `per_list`: the mean over lists of the log-likelihood of all clicks of the list;
    - `perplexity`: exp(-mean log P(c_k)) at each position, where P(c_k) is known before any click, and the mean over
      positions (Dupret & Piwowarski 2008; Chuklin et al. 2015). 1 is perfect, 2 is a coin;
    - `conditional_perplexity`: the same with P(c_k | clicks above k).
    """

    model: str
    log_likelihood: float
    per_list: float
    perplexity: float
    conditional_perplexity: float
    modelled: float  # share of the held-out impressions that count in the likelihood
    epochs: int
    seconds_per_epoch: float  # the median, without evaluation
    parameters: dict[str, Any]  # the model's own parameters


@dataclass(frozen=True)
class QualityReport:
    """The quality of several click models on the same held-out requests."""

    attraction: str  # "items" or "features"
    fitted: int  # requests
    stopping: int  # requests that stop the training
    held_out: int  # requests
    models: tuple[ModelQuality, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Batch:
    """Some lists, padded, with items in the order of their positions."""

    clicked: Tensor
    where: Tensor
    place: Tensor
    inputs: Tensor  # item numbers [lists, items], or features [lists, items, features]
    weights: Tensor

    @property
    def given(self) -> dict[str, Any]:
        return {"clicked": self.clicked, "where": self.where, "place": self.place}


class ClickLists:
    """The clicks of a log as tensors, without padding; `batch(requests)` returns padded lists."""

    def __init__(self, seen: Impressions, features: np.ndarray | None) -> None:
        self.positions = seen.positions
        items = seen.items if features is None else None
        self.items = 0 if items is None else int(items.max(initial=-1)) + 1
        columns = [seen.clicked, seen.place, np.zeros(len(seen.place)) if items is None else items]
        self._rows = torch.from_numpy(np.column_stack(columns).astype(np.int64))
        self._lengths = torch.from_numpy(np.array(seen.lengths, np.int64))
        self._first = self._lengths.cumsum(0) - self._lengths
        self._features = None if features is None else torch.from_numpy(np.array(features))
        self._weights = torch.from_numpy(np.array(seen.weights)).float()
        self.longest = int(self._lengths.max())

    def batch(self, requests: Tensor) -> Batch:
        lengths = self._lengths[requests]
        slots = torch.arange(int(lengths.max()))
        where = slots < lengths[:, None]
        rows = torch.where(where, self._first[requests][:, None] + slots, 0)
        clicked, place, item = self._rows[rows].unbind(-1)
        inputs = item if self._features is None else self._features[rows]
        return Batch(clicked > 0, where, place, inputs, self._weights[requests])

    def batches(self, requests: Tensor, size: int) -> Iterator[Batch]:
        """Yield the requests in batches, which are parts of larger blocks, because small operations cost the most."""
        block = max(1, ROWS_AT_ONCE // (size * self.longest)) * size
        for some in torch.split(requests, block):
            whole = self.batch(some)
            fields = [torch.split(values, size) for values in vars(whole).values()]
            yield from (Batch(*parts) for parts in zip(*fields, strict=True))

    def total_weight(self, requests: Tensor) -> float:
        return float(self._weights[requests].sum())


class Fit(nn.Module):
    """A click model with its own parameters and with the logits of items, by item or by features."""

    def __init__(self, model: ClickModel, lists: ClickLists, log: Log, fitted: Tensor) -> None:
        super().__init__()
        self.model = model
        self.own = nn.Parameter(torch.zeros(model.size))
        self.network: nn.Module | None = None
        if lists.items:
            self.mean = nn.Parameter(torch.zeros(model.OUTPUTS))
            self.table = nn.Parameter(torch.zeros(lists.items, model.OUTPUTS))
        else:
            sizes = {log.feature_names.index(name): len(values) + 1 for name, values in log.vocabularies.items()}
            encoder = FeatureEncoder(len(log.feature_names), sizes)
            self.network = make_ranker("mlp", encoder, hidden=HIDDEN, outputs=model.OUTPUTS)
            fit_encoders(self.network, log.select(fitted.numpy()).features)

    def groups(self, *, total_weight: float, batch: int) -> list[dict[str, Any]]:
        """Return the parameters for Adam, whose weight decay is the prior: it adds to the gradient of the mean loss."""
        rate = LEARNING_RATE * math.sqrt(batch / BATCH)
        if self.network is not None:
            items = {"params": list(self.network.parameters()), "lr": NETWORK_RATE}
        else:
            items = {"params": [self.table], "lr": rate, "weight_decay": PRIOR / total_weight}
        others = [p for name, p in self.named_parameters() if name in ("own", "mean") and p.numel()]
        return [items, *([{"params": others, "lr": rate}] if others else [])]

    def logits(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the logits of items."""
        if self.network is None:
            return (self.mean + embedding(batch.inputs, self.table)).unbind(-1)
        outputs: Tensor = self.network(batch.inputs)
        return outputs.unbind(-1) if outputs.ndim == 3 else (outputs,)

    def loss(self, batch: Batch) -> Tensor:
        given = {"logits": self.logits(batch), "parameters": self.own, **batch.given}
        terms = conditional_log_likelihood(self.model, **given).sum(-1)
        return -(batch.weights @ terms) / batch.weights.sum()


def compare_click_models(
    log: Log,
    models: Sequence[str],
    *,
    label: str = "click",
    seed: int = 0,
    batch: int | None = None,
    epochs: int = EPOCHS,
) -> QualityReport:
    """Fit click models to 70% of the requests, stop by another 10%, and return their quality on the rest.

    Requests are split by query if attraction depends on features. If it is a parameter of each item under its query,
    they are split at random, because a held-out query would have no parameters.
    """
    by_item = not log.feature_names
    if by_item and log.item_ids is None:
        hint = "name the column of item ids with --item, or feature columns with --features"
        raise DataError("click models need items that recur, or features", hint=hint)
    log = sample_log(log, ROWS, seed=seed)
    seen = impressions(log, clicked_rows(log, label), seed=seed)
    lists = ClickLists(seen, None if by_item else log.features)
    parts = split_requests(seen, None if by_item else log, seed=seed)
    made = [make_click_model(name, len(lists.positions)) for name in models]
    results = [
        fit_and_evaluate(model, lists, log, parts, name=name, seed=seed, batch=batch, epochs=epochs)[0]
        for name, model in zip(models, made, strict=True)
    ]
    fitted, stopping, held_out = map(len, parts)
    return QualityReport("items" if by_item else "features", fitted, stopping, held_out, tuple(results))


def split_requests(seen: Impressions, log: Log | None, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the requests to fit a model to, to stop its training, and to evaluate it.

    With a log they are split by query, else at random, by the groups of `HeldOut`.
    """
    if log is None:
        part = np.digitize(seen.group, np.array([TRAINED, TUNED]) * (int(seen.group.max()) + 1))
        parts = [np.flatnonzero(part == i) for i in range(3)]
    else:
        counts = [max(1, round(share * len(log))) for share in (1 - TUNED, TUNED - TRAINED)]
        parts = split_by_query(log, counts, seed=seed)[::-1]
    if not all(map(len, parts)):
        got = f"{len(seen.lengths)} requests"
        raise DataError("there are too few requests or queries to hold some out", got=got, hint="use a larger log")
    fitted, stopping, held_out = map(torch.from_numpy, parts)
    return fitted, stopping, held_out


def fit_and_evaluate(
    model: ClickModel,
    lists: ClickLists,
    log: Log,
    parts: tuple[Tensor, Tensor, Tensor],
    *,
    name: str,
    seed: int = 0,
    batch: int | None = None,
    epochs: int = EPOCHS,
) -> tuple[ModelQuality, Fit]:
    """Fit a click model to the first part of the requests, stop by the second, and evaluate it on the third."""
    fitted, stop, held_out = parts
    batch = batch or min(BATCH, max(LEAST_BATCH, len(fitted) // STEPS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fit = Fit(model, lists, log, fitted)
        groups = fit.groups(total_weight=lists.total_weight(fitted), batch=batch)
        optimizer = torch.optim.Adam(groups, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / epochs)
        stopping = EarlyStopping()
        best = fit.state_dict()
        seconds = []
        for epoch in range(epochs):
            started = time.perf_counter()
            for part in lists.batches(fitted[torch.randperm(len(fitted))], batch):
                optimizer.zero_grad()
                torch.autograd.backward(fit.loss(part))
                optimizer.step()
            seconds.append(time.perf_counter() - started)
            schedule.step()
            if stopping.update(evaluated(fit, lists, stop)["log_likelihood"], epoch + 1):
                best = {key: value.clone() for key, value in fit.state_dict().items()}
            if stopping.is_over(PATIENCE):
                break
    fit.load_state_dict(best)
    own = {key: values.tolist() for key, values in model.named(fit.own.detach()).items()}
    quality = evaluated(fit, lists, held_out)
    return ModelQuality(
        name, **quality, epochs=len(seconds), seconds_per_epoch=float(np.median(seconds)), parameters=own
    ), fit


@torch.no_grad()
def evaluated(fit: Fit, lists: ClickLists, requests: Tensor) -> dict[str, float]:
    """Return the likelihood and the perplexities of some requests, named as in `ModelQuality`."""
    positions = len(lists.positions)
    sums = torch.zeros(4, positions, dtype=torch.float64)  # by position: log P(c|above), its rows, log P(c), its rows
    count = 0.0
    for batch in lists.batches(requests, max(1, ROWS_AT_ONCE // lists.longest)):
        given = {**batch.given, "logits": fit.logits(batch), "parameters": fit.own}
        weights = batch.weights[:, None].double()
        modelled = fit.model.modelled(batch.clicked, batch.where)
        terms = [
            conditional_log_likelihood(fit.model, **given).double() * weights,
            modelled * weights,
            marginal_log_likelihood(fit.model, **given).double() * weights,
            batch.where * weights,
        ]
        sums.index_add_(1, batch.place.flatten(), torch.stack(terms).flatten(1))
        count += float(weights.sum())
    conditional, modelled_rows, marginal, rows = sums

    def perplexity(total: Tensor, number: Tensor) -> float:
        seen = number > 0
        return float((-total[seen] / number[seen]).exp().mean())

    return {
        "log_likelihood": float(conditional.sum() / modelled_rows.sum()),
        "per_list": float(conditional.sum()) / count,
        "perplexity": perplexity(marginal, rows),
        "conditional_perplexity": perplexity(conditional, modelled_rows),
        "modelled": float(modelled_rows.sum() / rows.sum()),
    }
