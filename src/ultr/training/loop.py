"""The training loop of all networks, rankers and bias models.

All random numbers of a step (its requests, simulated users and dropout) follow from the seed and the step number. A
run that resumes from saved weights, optimizer state and step therefore ends with exactly the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ultr.errors import DataError
from ultr.lists import Lists
from ultr.log import Log
from ultr.methods.base import Learner, Method
from ultr.rankers import Dropout, Masks, fit_encoders
from ultr.training.config import OPTIMIZERS, TrainingOptions
from ultr.training.feed import Feeding, step_seed
from ultr.utils.devices import choose_device
from ultr.utils.distributed import average_gradients
from ultr.utils.stopping import EarlyStopping


@dataclass
class RunState:
    """The progress of a run of networks or trees: its step (for trees, its round) and its best evaluation."""

    step: int = 0
    stopping: EarlyStopping = field(default_factory=EarlyStopping)

    def is_done(self, options: TrainingOptions) -> bool:
        return self.step >= options.steps or self.stopping.is_over(options.patience)


@dataclass(kw_only=True)
class TrainingState(RunState):
    """The state of a run of networks; checkpoints save all of it, so that the run can resume."""

    method: Learner
    optimizer: torch.optim.Optimizer
    best_weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """The results of one evaluation during training; `improved` if it is the best evaluation so far."""

    step: int
    loss: float
    metrics: dict[str, float]
    improved: bool


def check_has_features(log: Log) -> None:
    if not log.feature_names:
        raise DataError("the log has no features to learn from", hint="name the feature columns with --features")


def start(method: Learner, train: Log, options: TrainingOptions) -> TrainingState:
    """Prepare a method for training: fit feature normalisation to the log, move it to the device, make an optimizer."""
    check_has_features(train)
    fit_encoders(method, train.features)
    device = choose_device(options.device)
    method.to(device)
    kind, settings = OPTIMIZERS[options.optimizer], {"lr": options.lr, "weight_decay": options.weight_decay}
    fused = {"fused": True} if device.type == "cpu" else {}  # update all parameters in one pass
    bias_learner = method.bias_learner() if isinstance(method, Method) else None
    fixed = set() if bias_learner is None else set(bias_learner.parameters())
    parameters = [p for p in method.parameters() if p not in fixed]
    return TrainingState(method=method, optimizer=kind(parameters, **settings, **fused))


def train(
    state: TrainingState,
    feed: Feeding,
    evaluate: Callable[[Any], dict[str, float]],
    options: TrainingOptions,
    *,
    select: str,
    larger_is_better: bool = True,
) -> Iterator[Progress]:
    """Train to the last step, or until the metric `select` no longer improves; yield after every evaluation.

    Whenever this generator yields, all steps so far are complete, so the caller can save `state`.
    """
    device = next(state.method.parameters()).device
    total = torch.zeros((), device=device)
    steps = 0
    while not state.is_done(options):
        total += take_step(state, feed(state.step), options)
        steps += 1
        if state.step % options.evaluate_every and state.step < options.steps:
            continue
        loss = float(total) / steps
        total.zero_()
        steps = 0
        if not math.isfinite(loss):
            raise DataError(
                f"training diverged: the loss is {loss} by step {state.step}", hint="lower --lr, or pass --clip 1"
            )
        metrics = evaluate(state.method)
        improved = state.stopping.update(metrics[select] if larger_is_better else -metrics[select], state.step)
        if improved:
            state.best_weights = {name: tensor.detach().clone() for name, tensor in state.method.state_dict().items()}
        yield Progress(state.step, loss, metrics, improved)


def take_step(state: TrainingState, lists: Lists, options: TrainingOptions) -> Tensor:
    """Take one training step; return its loss as a tensor that stays on the device."""
    method, optimizer = state.method, state.optimizer
    method.train()
    for group in optimizer.param_groups:
        group["lr"] = options.learning_rate_at(state.step)
    with torch.no_grad():
        method.update(lists)
    bf16 = torch.autocast(lists.where.device.type, dtype=torch.bfloat16, enabled=options.precision == "bf16")
    with seeded_step(method, lists, options.seed, state.step), bf16:
        loss = method.loss(lists)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    loss = average_gradients(method.parameters(), loss, lists.weights.sum())  # losses are means with these weights
    if options.clip:
        # Each network is clipped on its own: one with large gradients must not slow the others.
        for network in method.children():
            if parameters := [p for p in network.parameters() if p.grad is not None]:
                torch.nn.utils.clip_grad_norm_(parameters, options.clip)
    optimizer.step()
    state.step += 1
    return loss.detach()


@contextmanager
def seeded_step(method: Learner, lists: Lists, seed: int, step: int) -> Iterator[None]:
    """Seed all random numbers inside the block from the seed, the step and the part of the batch."""
    part_seed = step_seed(seed, step, 2, lists.parts[0].number if lists.parts else 0)
    if lists.where.is_cuda:
        torch.cuda.manual_seed(part_seed)
    torch.default_generator.manual_seed(part_seed)  # torch.manual_seed would record a stack trace at each call
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
