"""Runs of one method that differ only in seed and learning rate, trained together on a GPU (see `ultr.training.stack`).

Each writes the run directory that it would write alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ultr.bias.logging_policy import share_logging_score
from ultr.lists import ListBatches
from ultr.log import Log
from ultr.methods.bias_model import BiasModel
from ultr.training.bias_stage import BIAS, HELD_OUT_SHARE, BiasTraining, bias_training, save_bias
from ultr.training.checkpoints import wait_for_lock
from ultr.training.config import BIAS_TRAINING, RunConfig, TrainingOptions
from ultr.training.data import cached_run_data
from ultr.training.feed import FeedStack
from ultr.training.finish import Listeners
from ultr.training.loop import TrainingState, train_all
from ultr.training.networks import NetworkRun
from ultr.training.selection import less_is_better
from ultr.training.stack import Stack

SHRINK_AT = 0.6  # share of the learners of a stack that are not done, at which the others are left out
MEMORY_SHARE = 0.4  # share of the free memory of a GPU that the training rows of all runs may take


def make_network_run(config: RunConfig) -> NetworkRun:
    """Return a run of networks, which shares its data in memory with other runs."""
    torch.manual_seed(config.training.seed)
    return NetworkRun(config, cached_run_data(config))


def can_train_together(runs: Sequence[NetworkRun], outs: Sequence[Path]) -> bool:
    """Return whether runs can be one stack: learners of the same shapes, enough requests, and no checkpoints."""
    first = runs[0].run_data
    options = [run.options for run in runs]
    return (
        Stack.can_hold([run.method for run in runs], options)
        and all(run.run_data.stream is None for run in runs)
        and all(run.run_data.train.actions.keys() == first.train.actions.keys() for run in runs)
        and min(len(run.run_data.train) for run in runs) * (1 - HELD_OUT_SHARE) > max(each.batch for each in options)
        and not any((out / "checkpoints").is_dir() for out in outs)
        and all(run.config.warm_start is None for run in runs)
        and _fit(runs)
    )


def _fit(runs: Sequence[NetworkRun]) -> bool:
    """Return whether the training rows of all runs fit in the memory of the GPU, if the device is one."""
    device = _device(runs)
    if device.type != "cuda":
        return True
    logs = {run.run_data.train for run in runs}
    return sum(log.features.nbytes for log in logs) < MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]


def _device(runs: Sequence[NetworkRun]) -> torch.device:
    return next(runs[0].method.parameters()).device


def train_together(
    runs: Sequence[NetworkRun], outs: Sequence[Path], shared: Path, later: Sequence[RunConfig] = ()
) -> None:
    """Train runs together, and write the results of each into its folder.

    `shared` is a folder for bias models: those of the runs, and of runs that will be trained `later`.
    """

    @cache
    def lists() -> dict[Log, ListBatches]:
        logs = list(dict.fromkeys(run.run_data.train for run in runs))  # runs with the same seed share their requests
        return dict(zip(logs, ListBatches.of_each(logs, device=_device(runs)), strict=True))

    _fit_biases(runs, outs, shared, later, lists)
    for run, out in zip(runs, outs, strict=True):
        run.prepare(out, shared, Listeners(), lists()[run.run_data.train])
    options, select = [run.options for run in runs], runs[0].config.selection
    for number, progress in train_all(
        [run.state for run in runs],
        _steps([run.state for run in runs], [run.feed for run in runs], options),
        [run.evaluate for run in runs],
        options[0],
        select=select,
        larger_is_better=not less_is_better(select),
        evaluate_start=runs[0].starts_well,
    ):
        runs[number].record(progress)
    for run in runs:
        run.finish()


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
    runs: Sequence[NetworkRun],
    outs: Sequence[Path],
    shared: Path,
    later: Sequence[RunConfig],
    lists: Callable[[], Mapping[Log, ListBatches]],
) -> None:
    """Fit together the bias models that are not in the folder `shared` yet, and save them there.

    `lists` returns the training requests of the runs on the device.
    """
    needed: dict[Path, NetworkRun] = {}
    for run, out in zip(runs, outs, strict=True):
        if (folder := _bias_folder(run, shared)) is not None and not (out / BIAS).is_dir():
            needed[folder] = run
    if needed:
        for config in later:
            run = make_network_run(config)
            if (folder := _bias_folder(run, shared)) is not None:
                needed.setdefault(folder, run)
    with ExitStack() as locks:
        for folder in sorted(needed):  # in one order, so that processes cannot wait for each other
            locks.enter_context(wait_for_lock(folder))
        missing = {folder: run for folder, run in needed.items() if not folder.is_dir()}
        models = [model for run in missing.values() if (model := run.method.bias_learner()) is not None]
        if len(models) < 2 or not Stack.can_hold(models, [BIAS_TRAINING] * len(models)):
            return  # each run fits its own
        for run in missing.values():
            share_logging_score(run.run_data.train, shared)
        trainings = [_bias_training(run, lists().get(run.run_data.train)) for run in missing.values()]
        _train_biases(trainings)
        for folder, training in zip(missing, trainings, strict=True):
            save_bias(folder, training.model)


def _bias_folder(run: NetworkRun, shared: Path) -> Path | None:
    """Return the folder in `shared` for the bias model of a run; None if it needs none."""
    model = run.method.bias_learner()
    if not isinstance(model, BiasModel) or run.config.bias is not None:
        return None
    return shared / run.config.shared_key(model.settings())


def _bias_training(run: NetworkRun, lists: ListBatches | None) -> BiasTraining:
    user = run.run_data.feeding_user
    training = bias_training(run.method, run.run_data.train, run.config.training, user=user, lists=lists)
    assert training is not None  # noqa: S101 - a BiasModel has a network
    return training


def _train_biases(trainings: Sequence[BiasTraining]) -> None:
    states, options = [training.state for training in trainings], [training.options for training in trainings]
    step = _steps(states, [training.feed for training in trainings], options)
    for _ in train_all(states, step, [training.evaluate for training in trainings], options[0], select="likelihood"):
        pass
    for training in trainings:
        training.finish()
