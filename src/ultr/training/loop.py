"""The training loop of all networks, rankers and bias models.

All random numbers of a step (its requests, simulated users and dropout) follow from the seed and the step number. A
run that resumes from saved weights, optimizer state and step therefore ends with exactly the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ultr.checks.pitfalls import Pitfall
from ultr.errors import DataError, DivergedError
from ultr.evaluation.scores import less_is_better
from ultr.lists import Lists, Part
from ultr.log import Log
from ultr.methods.base import Learner, Method
from ultr.rankers import DeviceMask, Dropout, Masks, fit_encoders
from ultr.rankers.networks import EncodedRanker
from ultr.training.config import TrainingOptions
from ultr.training.feed import Feeding, noise_of, step_seed
from ultr.training.graphs import GraphedSteps
from ultr.utils.distributed import average_gradients, choose_device
from ultr.utils.optimisation import AnyOptimizer, EarlyStopping, clip_gradients, make_optimizer, set_rate

Evaluate = Callable[[Any], Mapping[str, Tensor | float]]  # a learner -> its metrics on held-out requests


@dataclass
class RunState:
    """The progress of a run of networks or trees: its step (for trees, its round) and its best evaluation."""

    step: int = 0
    stopping: EarlyStopping = field(default_factory=EarlyStopping)

    def is_done(self, options: TrainingOptions) -> bool:
        return self.step >= options.steps or self.stopping.is_over(options.patience or 0)


@dataclass(kw_only=True)
class TrainingState(RunState):
    """The state of a run of networks; checkpoints save all of it, so that the run can resume."""

    method: Learner
    optimizer: AnyOptimizer
    best_weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """The results of one evaluation during training; `improved` if it is the best evaluation so far."""

    step: int
    loss: float
    metrics: dict[str, float]
    improved: bool
    ranker: str = ""  # the kind of ranker that is trained


@dataclass(frozen=True)
class Listeners:
    """The functions that a run calls, and the least number of seconds between checkpoints."""

    on_note: Callable[[str], None] = lambda _: None  # gets what was changed on reading, and what was decided
    on_finding: Callable[[Pitfall], None] | None = lambda _: None  # gets problems of the data; None: do not look
    on_bias_progress: Callable[[Progress], None] = lambda _: None
    on_progress: Callable[[Progress], None] = lambda _: None
    checkpoint_seconds: float = 10.0


def check_has_features(log: Log) -> None:
    if not log.feature_names:
        raise DataError("the log has no features to learn from", hint="name the feature columns with --features")


def start(
    method: Learner, train: Log, options: TrainingOptions, *, warm_start: Callable[[], None] = lambda: None
) -> TrainingState:
    """Prepare a method for training: fit feature normalisation to the log, move it to the device, make an optimizer.

    `warm_start` sets weights; it is called before the optimizer is made, because it may change their shapes.
    """
    check_has_features(train)
    fit_encoders(method, train.features)
    warm_start()
    device = choose_device(options.device)
    method.to(device)
    settings = {"lr": options.lr, "weight_decay": options.weight_decay, "clip": options.clip}
    settings["accumulator"] = method.accumulator
    optimizer = make_optimizer(options.optimizer, trained_networks(method), device=device, **settings)
    return TrainingState(method=method, optimizer=optimizer)


def trained_networks(method: Learner) -> list[list[nn.Parameter]]:
    """Return the parameters of each network of a method that is trained; its bias model is not."""
    bias_learner = method.bias_learner() if isinstance(method, Method) else None
    fixed = set() if bias_learner is None else set(bias_learner.parameters())
    networks = [
        [p for p in network.parameters() if p.requires_grad and p not in fixed] for network in method.children()
    ]
    return [network for network in networks if network]


def train(
    state: TrainingState,
    feed: Feeding,
    evaluate: Evaluate,
    options: TrainingOptions,
    *,
    select: str,
    evaluate_start: bool = False,
) -> Iterator[Progress]:
    """Train to the last step, or until the metric `select` no longer improves; yield after every evaluation.

    Whenever this generator yields, all steps so far are complete, so the caller can save `state`. With
    `evaluate_start`, the weights before the first step are evaluated too, and may be the best.
    """
    graphed = graphed_steps(state, feed, options) if choose_device(options.device).type == "cuda" else None

    def step() -> Tensor:
        return take_step(state, feed(state.step), options) if graphed is None else graphed()

    steps = train_all(
        [state], lambda: step().view(1), [evaluate], options, select=select, evaluate_start=evaluate_start
    )
    for _, progress in steps:
        yield progress


def train_all(
    states: Sequence[TrainingState],
    step: Callable[[], Tensor],
    evaluate: Sequence[Evaluate],
    options: TrainingOptions,
    *,
    select: str,
    evaluate_start: bool = False,
) -> Iterator[tuple[int, Progress]]:
    """Train several learners as `train` does: `step` takes a step of all and returns their losses.

    Yield the index of a learner and its progress, for each learner that is not done, after every evaluation.
    """
    new = [number for number, state in enumerate(states) if evaluate_start and not state.best_weights]
    found = [evaluate[number](states[number].method) for number in new]
    for number, metrics in zip(new, as_numbers(found, select), strict=True):
        yield number, _progress(states[number], math.nan, metrics, select)
    total = torch.zeros(len(states), device=next(states[0].method.parameters()).device)
    steps = 0
    while running := [number for number, state in enumerate(states) if not state.is_done(options)]:
        total += step()
        steps += 1
        now = states[running[0]].step
        if now % options.evaluate_every and now < options.steps:
            continue
        losses = [value / steps for value in total.tolist()]
        total.zero_()
        steps = 0
        for number in running:
            if not math.isfinite(losses[number]):
                what = f"training diverged: the loss is {losses[number]} by step {now}"
                raise DivergedError(what, hint="lower network.lr, or set network.clip=1")
        found = [evaluate[number](states[number].method) for number in running]
        for number, metrics in zip(running, as_numbers(found, select), strict=True):
            yield number, _progress(states[number], losses[number], metrics, select)


def _progress(state: TrainingState, loss: float, metrics: dict[str, float], select: str) -> Progress:
    """Return the progress of an evaluation; if it is the best one, keep the weights."""
    improved = state.stopping.update(-metrics[select] if less_is_better(select) else metrics[select], state.step)
    if improved:
        state.best_weights = {n: tensor.detach().clone() for n, tensor in state.method.state_dict().items()}
    return Progress(state.step, loss, metrics, improved)


def as_numbers(found: Sequence[Mapping[str, Tensor | float]], select: str) -> list[dict[str, float]]:
    """Return metrics as numbers, which are copied from a GPU all at once, because each copy waits for its work.

    Raise DataError if a value of the metric `select` is not finite.
    """
    tensors = [value for metrics in found for value in metrics.values() if isinstance(value, Tensor)]
    copied = iter(torch.stack([value.double() for value in tensors]).tolist() if tensors else ())
    numbers = [
        {name: next(copied) if isinstance(value, Tensor) else value for name, value in metrics.items()}
        for metrics in found
    ]
    for metrics in numbers:
        if not math.isfinite(metrics[select]):
            hint = "scale the label or the true labels down, or lower network.lr"
            raise DataError(f"'{select}' must be finite on held-out requests", got=metrics[select], hint=hint)
    return numbers


def take_step(state: TrainingState, lists: Lists, options: TrainingOptions) -> Tensor:
    """Take one training step; return its loss as a tensor that stays on the device."""
    set_rate(state.optimizer, options.learning_rate_at(state.step))
    with seeded_step(state.method, lists, options.seed, state.step):
        loss = work_of_step(state, lists, options)
    state.step += 1
    return loss


def graphed_steps(state: TrainingState, feed: Feeding, options: TrainingOptions) -> Callable[[], Tensor]:
    """Return a function that takes the next training step on a GPU as `take_step` does, but as one CUDA graph."""
    device = next(state.method.parameters()).device

    def work(lists: Lists) -> Tensor:
        with masked(state.method, lists, options.seed, state.step):
            return work_of_step(state, lists, options)

    graphed = GraphedSteps(feed, work, device)
    rate = math.nan

    def step() -> Tensor:
        nonlocal rate
        if (new := options.learning_rate_at(state.step)) != rate:
            set_rate(state.optimizer, rate := new)
        batch = graphed.choose(state.step)
        if state.method.draws:
            seed_generators(device, options.seed, state.step, batch.parts)
        loss = graphed.take(state.step, batch)
        state.step += 1
        return loss

    return step


def work_of_step(state: TrainingState, lists: Lists, options: TrainingOptions) -> Tensor:
    """Do the work of a training step, once its random numbers and learning rate are set; return its loss."""
    method, optimizer = state.method, state.optimizer
    method.train()
    with torch.no_grad():
        method.update(lists)
    optimizer.zero_grad(set_to_none=True)
    with precision(lists.where.device, options):
        loss = method.loss(lists)
        loss.backward()  # type: ignore[no-untyped-call]
    loss = average_gradients(method.parameters(), loss, lists.weights.sum())  # losses are means with these weights
    clip_gradients(optimizer, trained_networks(method), options.clip)
    optimizer.step()
    return loss.detach()


@contextmanager
def precision(device: torch.device, options: TrainingOptions) -> Iterator[None]:
    """Compute matrix products with the precision of the options, in a `with` block."""
    before = torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled
    half = options.precision == "bf16"
    if options.precision == "tf32" or (options.precision == "auto" and device.type == "cuda"):
        torch.set_float32_matmul_precision("high")
    has_onednn = half and device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if has_onednn and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # oneDNN would fail with a warning, and torch would no longer use it in this process for any precision.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.mkldnn.enabled = before[1]


# --- Random numbers ---------------------------------------------------------------------------------------------------


@contextmanager
def seeded_step(method: Learner, lists: Lists, seed: int, step: int) -> Iterator[None]:
    """Seed all random numbers inside the block from the seed, the step and the part of the batch."""
    seed_generators(lists.where.device, seed, step, lists.parts)
    with masked(method, lists, seed, step):
        yield


def seed_generators(device: torch.device, seed: int, step: int, parts: tuple[Part, ...]) -> None:
    """Seed torch's own generators, for methods that draw their targets."""
    part_seed = step_seed(seed, step, 2, parts[0].number if parts else 0)
    if device.type == "cuda":
        torch.cuda.manual_seed(part_seed)
    torch.default_generator.manual_seed(part_seed)  # torch.manual_seed would record a stack trace at each call


@contextmanager
def masked(method: Learner, lists: Lists, seed: int, step: int) -> Iterator[None]:
    """Let all dropout of a method use masks of this step, in a `with` block; on a GPU they follow from the lists' key.

    Lists that are not the batch of a step have torch's own dropout. On a CPU, networks do not compute padding.
    """
    dropouts = [module for module in method.modules() if isinstance(module, Dropout)]
    if dropouts and lists.key is not None:
        noise = lru_cache(maxsize=1)(lambda: noise_of(lists))  # made at the first draw
        for layer, module in enumerate(dropouts):
            module.masks = DeviceMask(noise, layer)
    elif dropouts and lists.parts:
        seeds = [step_seed(seed, step, 2, 1 + part.number) for part in lists.parts]
        masks = Masks(lists.parts, seeds, lists.where)
        for module in dropouts:
            module.masks = masks
    networks = [module for module in method.modules() if isinstance(module, EncodedRanker)]
    if lists.key is None and not bool(lists.where.all()):
        for network in networks:
            network.items = lists.where
    try:
        yield
    finally:
        for module in dropouts:
            module.masks = None
        for network in networks:
            network.items = None
