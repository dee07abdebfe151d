"""Runs of one method that differ only in seed and learning rate, trained together on a GPU.

Each writes the run directory that it would write alone. A step of a small network leaves most of a GPU idle, so a step
of ten learners takes two to four times that of one. Each learns as it would alone, up to rounding: from its own
batches, with its own random numbers and its own learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ultr.bias.logging_policy import share_logging_score
from ultr.errors import OutputError
from ultr.lists import ListBatches, Lists
from ultr.log import Log
from ultr.methods.base import Learner
from ultr.methods.bias_model import BiasModel
from ultr.rankers import Dropout, GivenMask
from ultr.training.biases import BIAS, HELD_OUT_SHARE, BiasTraining, bias_training, save_bias
from ultr.training.config import BIAS_TRAINING, Config, TrainingOptions
from ultr.training.examining import Examined, examine
from ultr.training.feed import FeedStack, noise_of
from ultr.training.fitting import FitPlace
from ultr.training.folder import MODEL, find_folder, fit_folder, has_checkpoint, wait_for_lock
from ultr.training.graphs import GraphedSteps
from ultr.training.loop import Listeners, TrainingState, precision, train_all, trained_networks
from ultr.training.networks import NetworkFit
from ultr.training.run import Plan, finish, make_cached_plan, run_training
from ultr.utils.optimisation import FlatAdagrad

SHRINK_AT = 0.6  # share of the learners of a stack that are not done, at which the others are left out
MEMORY_SHARE = 0.4  # share of the free memory of a GPU that the training rows of all runs may take

# --- Several learners as one ------------------------------------------------------------------------------------------


class Stack:
    """Learners of one kind with stacked parameters [learners, ...]; the tensors of each learner are views of these.

    `options` differ at most in their seeds and learning rates.
    """

    def __init__(self, learners: Sequence[Learner], options: Sequence[TrainingOptions]) -> None:
        first, self._options = learners[0], list(options)
        self.learners = list(learners)
        of_each = [{**dict(each.named_parameters()), **dict(each.named_buffers())} for each in learners]
        names = {id(tensor): name for name, tensor in of_each[0].items()}
        networks = [[names[id(p)] for p in network] for network in trained_networks(first)]
        trained = {name for network in networks for name in network}
        stacked = {
            name: torch.stack([tensors[name].detach() for tensors in of_each])
            for name, tensor in of_each[0].items()
            if tensor.is_floating_point()
        }
        self._trained = {name: tensor.requires_grad_() for name, tensor in stacked.items() if name in trained}
        self._fixed = {name: tensor for name, tensor in stacked.items() if name not in trained}
        self._shared = {name: tensor for name, tensor in of_each[0].items() if name not in stacked}
        device = next(iter(stacked.values())).device
        self._rates = torch.tensor([each.lr for each in options], device=device)
        self._optimizer = FlatAdagrad(
            [[self._trained[name] for name in network] for network in networks],
            lr=self._rates.clone(),
            weight_decay=options[0].weight_decay,
            clip=options[0].clip,
            accumulator=first.accumulator,
            runs=len(learners),
        )
        for number, tensors in enumerate(of_each):
            for name, tensor in stacked.items():
                tensors[name].data = tensor.detach()[number]
        self._call = _Call(first)

    def only(self, numbers: list[int]) -> Stack:
        """Return a stack of some of these learners, in their present state."""
        stack = Stack([self.learners[i] for i in numbers], [self._options[i] for i in numbers])
        stack._optimizer.copy_sums(self._optimizer, numbers)
        return stack

    @staticmethod
    def can_hold(learners: Sequence[Learner], options: Sequence[TrainingOptions]) -> bool:
        """Return whether learners can be trained together: by Adagrad, with the same shapes, without draws."""
        first = learners[0].state_dict()
        shapes = {name: tensor.shape for name, tensor in first.items()}
        whole = {name: tensor for name, tensor in first.items() if not tensor.is_floating_point()}
        return all(
            each.optimizer == "adagrad"
            and not learner.draws
            and {name: tensor.shape for name, tensor in learner.state_dict().items()} == shapes
            and all(torch.equal(learner.state_dict()[name], tensor) for name, tensor in whole.items())
            for learner, each in zip(learners, options, strict=True)
        )

    def steps(self, feed: FeedStack, first: int = 0) -> Callable[[], Tensor]:
        """Return a function that takes the next step of all learners and returns their losses [learners]."""
        device, number, factor = self._rates.device, first, 1.0
        graphed = GraphedSteps(feed, self.work, device) if device.type == "cuda" else None

        def step() -> Tensor:
            nonlocal number, factor
            options = self._options[0]
            if (new := options.learning_rate_at(number) / options.lr) != factor:
                factor = new
                for group in self._optimizer.param_groups:
                    group["lr"].copy_(self._rates * factor)
            losses = self.work(feed(number)) if graphed is None else graphed.take(number, graphed.choose(number))
            number += 1
            return losses

        return step

    def work(self, lists: Lists) -> Tensor:
        """Take a step of all learners with lists [learners · requests, length]; return their losses [learners]."""
        self.learners[0].train()
        count, masks = len(self.learners), self._masks(lists)
        tensors = {name: _by_learner(values, count) for name, values in _tensors(lists).items()}
        actions = {name: _by_learner(values, count) for name, values in lists.actions.items()}

        def call(what: str, trained: dict[str, Tensor]) -> Tensor:
            def of_one(
                trained: dict[str, Tensor],
                fixed: dict[str, Tensor],
                masks: dict[str, Tensor],
                tensors: dict[str, Tensor],
                actions: dict[str, Tensor],
            ) -> Tensor:
                own = {f"learner.{name}": value for name, value in {**trained, **fixed, **self._shared}.items()}
                batch = Lists(**tensors, actions=actions, parts=lists.parts)
                result: Tensor = functional_call(self._call, own, (what, batch, masks))
                return result

            return vmap(of_one)(trained, self._fixed, masks, tensors, actions)

        with torch.no_grad():
            call("update", self._trained)
        self._optimizer.zero_grad(set_to_none=True)
        with precision(lists.where.device, self._options[0]):
            losses = call("loss", self._trained)
            losses.sum().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return losses.detach()

    def _masks(self, lists: Lists) -> dict[str, Tensor]:
        """Draw the dropout masks of all learners; the keys are the names of the dropout layers."""
        dropouts = [(name, m) for name, m in self.learners[0].named_modules() if isinstance(m, Dropout)]
        if not any(module.p and module.training for _, module in dropouts):
            return {}
        noise, masks = noise_of(lists), {}
        for layer, (name, module) in enumerate(dropouts):
            if module.p and module.training:
                masks[name] = _by_learner(module.drawn(noise, layer), len(self.learners))
        return masks


class _Call(nn.Module):
    """A module that calls `update` or `loss` of a learner with the given dropout masks."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self.learner = learner

    def forward(self, what: str, lists: Lists, masks: dict[str, Tensor]) -> Tensor:
        for name, mask in masks.items():
            self.learner.get_submodule(name).masks = GivenMask(mask)  # type: ignore[assignment]
        try:
            if what == "loss":
                return self.learner.loss(lists)
            self.learner.update(lists)
            return lists.weights.sum()
        finally:
            for name in masks:
                self.learner.get_submodule(name).masks = None  # type: ignore[assignment]


def _tensors(lists: Lists) -> dict[str, Tensor]:
    names = ("features", "where", "weights", "positions", "relevance")
    return {name: value for name in names if (value := getattr(lists, name)) is not None}


def _by_learner(values: Tensor, count: int) -> Tensor:
    return values.view(count, -1, *values.shape[1:])


# --- Runs -------------------------------------------------------------------------------------------------------------


def _fit_of(plan: Plan) -> NetworkFit:
    (fit,) = plan.fits
    assert isinstance(fit, NetworkFit)  # noqa: S101 - only runs of networks are trained together
    return fit


@dataclass(frozen=True, eq=False)
class Run:
    """A run of a network: its plan, and the folder in which it is trained."""

    plan: Plan
    folder: Path

    @property
    def fit(self) -> NetworkFit:
        return _fit_of(self.plan)

    @property
    def of_fit(self) -> Path:
        return fit_folder(self.folder, self.fit.inputs.kind)

    @property
    def log(self) -> Log:
        return self.fit.inputs.data.train


def run_together(configs: Sequence[Config], outs: Sequence[Path], shared: Path, later: Sequence[Config] = ()) -> None:
    """Train or resume runs of networks that differ only in seed and learning rate, together if they can be.

    The folder of each run has the same content as after `run_training`, up to rounding. The bias models of runs that
    will be trained `later` are fitted too, in the folder `shared`.
    """
    folders = [find_folder(out, resume=True, overwrite=False) for out in outs]
    left = [number for number, folder in enumerate(folders) if not folder.is_complete]
    for number, folder in enumerate(folders):
        if number not in left:
            folder.finish()
    runs = [Run(make_cached_plan(configs[number]), folders[number].path) for number in left]
    if len(runs) < 2 or not can_train_together(runs):
        for config, out in zip(configs, outs, strict=True):
            run_training(config, out, resume=True, shared=shared, listeners=Listeners(on_finding=None))
        return
    with ExitStack() as writing:
        for number, run in zip(left, runs, strict=True):
            if writing.enter_context(folders[number].writing(run.plan.config)):
                raise OutputError("another process has finished this run", where=outs[number], hint="start again")
        train_together(runs, shared, later)


def can_train_together(runs: Sequence[Run]) -> bool:
    """Return whether runs can be one stack: learners of the same shapes, enough requests, and no checkpoints."""
    if any(len(run.plan.fits) > 1 for run in runs):
        return False
    first = runs[0].log
    options = [run.fit.options for run in runs]
    return (
        Stack.can_hold([run.fit.method for run in runs], options)
        and all(run.plan.data.stream is None for run in runs)
        and not any(run.fit.method.by_item and run.log.item_ids is not None for run in runs)
        and all(run.log.actions.keys() == first.actions.keys() for run in runs)
        and min(len(run.log) for run in runs) * (1 - HELD_OUT_SHARE) > max(each.batch for each in options)
        and not any(has_checkpoint(run.of_fit) or (run.of_fit / MODEL).is_dir() for run in runs)
        and all(run.plan.config.training.warm_start is None for run in runs)
        and _fit_in_memory(runs)
    )


def _fit_in_memory(runs: Sequence[Run]) -> bool:
    """Return whether the training rows of all runs fit in the memory of the GPU, if the device is one."""
    device = _device(runs)
    if device.type != "cuda":
        return True
    logs = {run.log for run in runs}
    return sum(log.features.nbytes for log in logs) < MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]


def _device(runs: Sequence[Run]) -> torch.device:
    return next(runs[0].fit.method.parameters()).device


def train_together(runs: Sequence[Run], shared: Path, later: Sequence[Config] = ()) -> None:
    """Train runs together, and write the results of each into its folder.

    `shared` is a folder for what runs share: examination, and the bias models of the runs and of those trained `later`.
    """

    @cache
    def lists() -> dict[Log, ListBatches]:
        logs = list(dict.fromkeys(run.log for run in runs))  # runs with the same seed share their requests
        return dict(zip(logs, ListBatches.of_each(logs, device=_device(runs)), strict=True))

    examined = []
    for run in runs:
        plan = run.plan
        plan.decisions.save(run.folder)
        examined.append(examine(plan.config, plan.data, run.folder, shared, needed=plan.needs_examination))
    runs = [replace(run, plan=run.plan.corrected(found)) for run, found in zip(runs, examined, strict=True)]
    _fit_biases(runs, examined, shared, later, lists)
    for run, found in zip(runs, examined, strict=True):
        run.fit.prepare(FitPlace(run.folder, found, shared, Listeners()), lists()[run.log])
    fits = [run.fit for run in runs]
    options = [fit.options for fit in fits]
    for number, progress in train_all(
        [fit.state for fit in fits],
        _steps([fit.state for fit in fits], [fit.feed for fit in fits], options),
        [fit.evaluate for fit in fits],
        options[0],
        select=runs[0].plan.config.selection,
        evaluate_start=fits[0].starts_well,
    ):
        fits[number].record(progress)
    for run, found in zip(runs, examined, strict=True):
        finish(run.plan, run.folder, found, [run.fit.finish()], Listeners(on_finding=None))


def _steps(
    states: Sequence[TrainingState], feeds: Sequence[Any], options: Sequence[TrainingOptions]
) -> Callable[[], Tensor]:
    """Return a function that takes the next step of the learners that are not done, and returns the losses of all.

    When many are done, the stack becomes smaller, because its step takes as long whether they are done or not.
    """
    stack = Stack([state.method for state in states], options)
    members, step = list(range(len(states))), stack.steps(FeedStack(feeds))
    losses = torch.zeros(len(states), device=next(states[0].method.parameters()).device)

    def take() -> Tensor:
        nonlocal stack, members, step
        running = [number for number in members if not states[number].is_done(options[number])]
        if 0 < len(running) <= SHRINK_AT * len(members):
            stack = stack.only([members.index(number) for number in running])
            step = stack.steps(FeedStack([feeds[number] for number in running]), first=states[running[0]].step)
            members = running
        losses[members] = step()
        for number in running:
            states[number].step += 1
        return losses

    return take


def _fit_biases(
    runs: Sequence[Run],
    examined: Sequence[Examined],
    shared: Path,
    later: Sequence[Config],
    lists: Callable[[], Mapping[Log, ListBatches]],
) -> None:
    """Fit together the bias models that are not in the folder `shared` yet, and save them there.

    `lists` returns the training requests of the runs on the device.
    """
    needed: dict[Path, tuple[Plan, Examined]] = {}
    for run, found in zip(runs, examined, strict=True):
        if (folder := _bias_folder(run.plan, shared)) is not None and not (run.of_fit / BIAS).is_dir():
            needed[folder] = run.plan, found
    if needed:
        for config in later:
            plan = make_cached_plan(config)
            if (folder := _bias_folder(plan, shared)) is not None and folder not in needed:
                found = examine(config, plan.data, None, shared, needed=plan.needs_examination)
                needed[folder] = plan.corrected(found), found
    with ExitStack() as locks:
        for folder in sorted(needed):  # in one order, so that processes cannot wait for each other
            locks.enter_context(wait_for_lock(folder))
        missing = {folder: each for folder, each in needed.items() if not folder.is_dir()}
        learners = [_fit_of(plan).method.bias_learner() for plan, _ in missing.values()]
        models = [learner for learner in learners if isinstance(learner, BiasModel)]
        if len(models) < 2 or not Stack.can_hold(models, [BIAS_TRAINING] * len(models)):
            return  # each run fits its own
        for plan, _ in missing.values():
            share_logging_score(_fit_of(plan).inputs.data.train, shared)
        trainings = []
        for plan, found in missing.values():
            fit, here = _fit_of(plan), lists().get(_fit_of(plan).inputs.data.train)
            training = bias_training(
                fit.method, fit.inputs.data, fit.options, examination=found.examination, lists=here
            )
            assert training is not None  # noqa: S101 - a BiasModel has a network
            trainings.append(training)
        _train_biases(trainings)
        for folder, model in zip(missing, models, strict=True):
            save_bias(folder, model)


def _bias_folder(plan: Plan, shared: Path) -> Path | None:
    """Return the folder in `shared` for the bias model of a run; None if it needs none."""
    model = _fit_of(plan).method.bias_learner()
    if not isinstance(model, BiasModel) or plan.config.examination.bias is not None:
        return None
    return shared / plan.config.shared_key(_fit_of(plan).inputs.kind, plan.data.label, model.settings())


def _train_biases(trainings: Sequence[BiasTraining]) -> None:
    states, options = [training.state for training in trainings], [training.options for training in trainings]
    step = _steps(states, [training.feed for training in trainings], options)
    for _ in train_all(states, step, [training.evaluate for training in trainings], options[0], select="likelihood"):
        pass
    for training in trainings:
        training.finish()
