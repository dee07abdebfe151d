"""The only training loop.

All that is random in a step follows from the seed and the number of the step: which requests, what simulated users do,
what dropout drops. So a run that was stopped goes on to the same bits from its weights, its optimizer and its step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ultr.arguments import Seed, check_fields, checked
from ultr.errors import DataError, OptionError, nearest
from ultr.feeding import Feed, Feeding, step_seed
from ultr.lists import ListBatches, Lists, as_device
from ultr.log import Log
from ultr.methods.base import Learner, Method
from ultr.processes import average_gradients, is_first, local_rank, take_from_first
from ultr.rankers import Dropout, FeatureEncoder, Masks
from ultr.rankers.boosters import is_trees
from ultr.simulate import User

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
BIAS_HELD_OUT = 0.1  # share of training requests by which the fit of a bias model is judged
SCHEDULES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class TrainingOptions:
    """How a method is trained."""

    steps: int = 1000
    batch: int = 256  # lists a step
    optimizer: str = "adagrad"
    lr: float = 0.02
    schedule: str = "constant"
    warmup: int = 0  # steps over which the rate rises
    clip: float = 5.0  # of the gradient's norm, for each network apart; 0: none
    weight_decay: float = 0.0
    evaluate_every: int = 50
    patience: int = 0  # evaluations without improvement before stopping; 0: never
    bias_steps: int = 3000  # at most, of a bias model that comes before the ranker
    seed: Seed = 0
    device: str = "auto"
    precision: Literal["float32", "bf16"] = "float32"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.optimizer not in OPTIMIZERS:
            raise OptionError(f"no optimizer '{self.optimizer}'", mend=nearest(self.optimizer, OPTIMIZERS))
        if self.schedule not in SCHEDULES:
            raise OptionError(f"no schedule '{self.schedule}'", mend=nearest(self.schedule, SCHEDULES))
        if self.precision not in ("float32", "bf16"):
            raise OptionError("precision should be float32 or bf16", got=f"'{self.precision}'")
        for name in ("steps", "batch", "evaluate_every", "bias_steps"):
            if getattr(self, name) < 1:
                raise OptionError(f"'{name}' should be 1 or more", got=getattr(self, name))
        for name in ("warmup", "clip", "weight_decay", "patience", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise OptionError(f"'{name}' should be 0 or more", got=getattr(self, name))
        if not 0 < self.lr < math.inf:
            raise OptionError("the learning rate should be above 0", got=self.lr)

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warm = min(1.0, (step + 1) / (self.warmup + 1))
        done = min(1.0, max(0, step - self.warmup) / max(1, self.steps - self.warmup))
        shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[self.schedule]
        return self.lr * warm * shape


TREE_TRAINING = TrainingOptions(steps=500, lr=0.1, evaluate_every=10, patience=5)
BIAS_TRAINING = TrainingOptions(lr=0.03, evaluate_every=25, patience=40)


def usual_training(ranker: str) -> TrainingOptions:
    """How a ranker, by its name, is trained where nothing else is said: a step of trees is a round."""
    return TREE_TRAINING if is_trees(ranker) else TrainingOptions()


@checked
def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = f"cuda:{local_rank() % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    return as_device(name)


@dataclass
class TrainingState:
    """All that a run needs to go on from where it is."""

    method: Learner
    optimizer: torch.optim.Optimizer
    step: int = 0
    best: float = -math.inf
    best_step: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    waited: int = 0  # evaluations since the best


@dataclass(frozen=True)
class Progress:
    """What is reported at each evaluation."""

    step: int
    loss: float
    figures: dict[str, float]
    improved: bool


@dataclass(frozen=True, eq=False)
class Streamed:
    """Requests that do not fit in memory: what steps are fed by, and some that are no part of it."""

    feed: Callable[[TrainingOptions], Feeding]
    held_out: Log


def check_has_features(log: Log) -> None:
    if not log.feature_names:
        raise DataError("the log has no features to learn from", mend="name them with --features")


def start(method: Learner, train: Log, options: TrainingOptions) -> TrainingState:
    """A method ready for training: features normalised by the training log, on its device, with an optimizer."""
    check_has_features(train)
    for module in method.modules():
        if isinstance(module, FeatureEncoder):
            module.fit(train.features)
    device = choose_device(options.device)
    method.to(device)
    kind, settings = OPTIMIZERS[options.optimizer], {"lr": options.lr, "weight_decay": options.weight_decay}
    fused = {"fused": True} if device.type == "cpu" else {}  # one pass over the parameters
    already = method.first() if isinstance(method, Method) else None
    kept = set() if already is None else set(already.parameters())
    return TrainingState(method, kind([p for p in method.parameters() if p not in kept], **settings, **fused))


def train(
    state: TrainingState,
    feed: Feeding,
    evaluate: Callable[[Any], dict[str, float]],
    options: TrainingOptions,
    *,
    select: str,
    larger_is_better: bool = True,
) -> Iterator[Progress]:
    """Train to the last step, or until the selection metric no longer improves; yields after every evaluation.

    Between two yields the state is that of whole steps, so that a caller may save it.
    """
    device = next(state.method.parameters()).device
    total = torch.zeros((), device=device)
    since = 0
    while state.step < options.steps and not (options.patience and state.waited >= options.patience):
        total += take_step(state, feed(state.step), options)
        since += 1
        if state.step % options.evaluate_every and state.step < options.steps:
            continue
        loss = float(total) / since
        total.zero_()
        since = 0
        if not math.isfinite(loss):
            raise DataError(
                f"training diverged: the loss is {loss} by step {state.step}", mend="lower --lr or set --clip"
            )
        figures = evaluate(state.method)
        value = figures[select] if larger_is_better else -figures[select]
        improved = value > state.best
        if improved:
            state.best, state.best_step, state.waited = value, state.step, 0
            state.best_weights = {name: tensor.detach().clone() for name, tensor in state.method.state_dict().items()}
        else:
            state.waited += 1
        yield Progress(state.step, loss, figures, improved)


def fit_first(
    method: Method,
    log: Log,
    options: TrainingOptions,
    *,
    user: User | None = None,
    stream: Streamed | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> None:
    """Let a method learn what comes before its ranker: from the whole log, then step by step, as far as held-out
    requests gain by it. Its rate and steps are its own, so that those of the ranker can be tuned apart.

    Where the log is a sample of a `stream`, the steps are taken on that.
    """
    seed, device = options.seed, choose_device(options.device)
    if is_first():
        method.prepare(log, user=user, sessions=options.bias_steps * options.batch, seed=seed)
    take_from_first(method.state_dict().values())
    model = method.first()
    if model is None or next(model.parameters(), None) is None:
        return
    own = replace(
        BIAS_TRAINING,
        steps=options.bias_steps,
        batch=options.batch,
        seed=step_seed(seed, 0, 3),
        device=options.device,
        precision=options.precision,
    )
    if stream is None:
        learned, judged_requests = held_out_requests(log, seed)
        lists, held = ListBatches(log, device=device), len(judged_requests)
        feed: Feeding = Feed(lists, batch=own.batch, seed=own.seed, user=user, requests=learned)
        judged = Feed(lists, batch=256, seed=own.seed, user=user, requests=judged_requests)
    else:
        feed, held = stream.feed(own), len(stream.held_out)
        judged = Feed(ListBatches(stream.held_out, device=device), batch=256, seed=own.seed)
    judged_lists = [judged(step) for step in range(max(1, min(8, held // 128)))]
    state = start(model, log, own)

    def evaluate(model: Any) -> dict[str, float]:
        model.eval()
        return dict(model.held_out_figures(judged_lists))

    for progress in train(state, feed, evaluate, own, select="likelihood"):
        on_progress(progress)
    model.load_state_dict(state.best_weights)


def held_out_requests(log: Log, seed: int) -> tuple[np.ndarray | None, np.ndarray]:
    """The requests a bias model learns from, None where that is all, and those it is judged by.

    A request that stands in the log several times is on one side alone.
    """
    which = np.unique(np.asarray(log.request_ids), return_inverse=True)[1]
    requests = int(which.max()) + 1
    order = np.random.default_rng(seed).permutation(requests)
    held = max(1, round(BIAS_HELD_OUT * requests))
    if requests == len(log):
        return (np.sort(order[held:]) if held < requests else None), np.sort(order[:held])
    is_held = np.isin(which, order[:held])
    return (np.flatnonzero(~is_held) if held < requests else None), np.flatnonzero(is_held)


def take_step(state: TrainingState, lists: Lists, options: TrainingOptions) -> Tensor:
    """One step of the method and its optimizer; the loss stays on the device."""
    method, optimizer = state.method, state.optimizer
    method.train()
    for group in optimizer.param_groups:
        group["lr"] = options.rate_at(state.step)
    with torch.no_grad():
        method.update(lists)
    bf16 = torch.autocast(lists.where.device.type, dtype=torch.bfloat16, enabled=options.precision == "bf16")
    with drawn_for(method, lists, options.seed, state.step), bf16:
        loss = method.loss(lists)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    loss = average_gradients(method.parameters(), loss, lists.weights.sum())  # every loss is a mean by these weights
    if options.clip:
        # Each network is clipped apart: one with large gradients must not slow the others.
        for network in method.children():
            if parameters := [p for p in network.parameters() if p.grad is not None]:
                torch.nn.utils.clip_grad_norm_(parameters, options.clip)
    optimizer.step()
    state.step += 1
    return loss.detach()


@contextmanager
def drawn_for(method: Learner, lists: Lists, seed: int, step: int) -> Iterator[None]:
    """Let what is drawn in a step follow from the seed, its number and the part of the batch."""
    own = step_seed(seed, step, 2, lists.parts[0].number if lists.parts else 0)
    if lists.where.is_cuda:
        torch.cuda.manual_seed(own)
    torch.default_generator.manual_seed(own)  # torch.manual_seed would note a stack trace each time, for a GPU to come
    dropouts = [module for module in method.modules() if isinstance(module, Dropout)]
    if dropouts and lists.parts:
        seeds = [step_seed(seed, step, 2, 1 + part.number) for part in lists.parts]
        masks = Masks(lists.parts, seeds, lists.where.device)
        for module in dropouts:
            module.masks = masks
    try:
        yield
    finally:
        for module in dropouts:
            module.masks = None
