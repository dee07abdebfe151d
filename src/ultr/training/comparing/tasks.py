"""The tasks of a comparison: to train and test runs, one by one or together, in any process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ultr.datasets.users import make_user
from ultr.errors import DivergedError
from ultr.evaluation.comparing import logged_scores
from ultr.evaluation.off_policy import load_off_policy_model, request_metrics
from ultr.evaluation.scores import OFF_POLICY
from ultr.log.labels import DEFAULT_LABEL
from ultr.rankers.model import load_model
from ultr.training.config import Config, is_trees
from ultr.training.data import cached_dataset, load_run_data
from ultr.training.examining import VALUES, common_values, has_values, share_values
from ultr.training.folder import MODEL
from ultr.training.gpu.together import run_together
from ultr.training.loop import Listeners
from ultr.training.run import run_training
from ultr.utils.distributed import choose_device
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import read_json, write_json
from ultr.utils.tensors import load_tensors, save_tensors

MOST_TOGETHER = 12  # runs that are trained together on a GPU
DIVERGED = "diverged.json"  # file in the folder of a run that diverged
TEST, REQUESTS = "test.json", "test.safetensors"  # files of a run: means of test metrics, and metrics by request
WEIGHTS = "weights"  # name of the weights of the requests, among the metrics by request


@dataclass(frozen=True)
class RunTask:
    """The task to train one run and evaluate it on test requests; metrics that were computed before are kept.

    A run without metrics only helps to choose a setting: if it diverges, its folder says so, and nothing is raised.
    """

    config: Config
    folder: Path
    shared: Path  # folder of what the runs of a comparison share, such as bias models
    metrics: tuple[str, ...]
    runs: ClassVar[int] = 1

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def finished(self) -> bool:
        if not self.metrics:
            return (self.folder / MODEL).is_dir() or has_diverged(self.folder)
        return set(self.metrics) <= set(read_means(self.folder))

    def perform(self) -> None:
        if not self.metrics and has_diverged(self.folder):
            return
        try:
            listeners = Listeners(on_finding=None)
            run_training(self.config, self.folder, resume=True, shared=self.shared, listeners=listeners)
        except DivergedError as error:
            if self.metrics:
                raise
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / DIVERGED, {"error": str(error)})
        evaluate(self.config, self.folder, self.metrics, self.shared, run=self.folder)


@dataclass(frozen=True)
class RunsTask:
    """The task to train runs of one method with several seeds and learning rates together, and to evaluate them.

    Their bias models are fitted together with those of all seeds below `seeds`, which later runs will need.
    """

    tasks: tuple[RunTask, ...]
    seeds: int = 0

    def __str__(self) -> str:
        return str(self.tasks[0])

    @property
    def runs(self) -> int:
        return len(self.tasks)

    @property
    def finished(self) -> bool:
        return all(task.finished for task in self.tasks)

    def perform(self) -> None:
        configs = [task.config for task in self.tasks]
        later = [configs[0].with_options(seed=seed) for seed in range(self.seeds)]
        with suppress(DivergedError, torch.OutOfMemoryError):  # then they are trained one by one
            run_together(configs, [task.folder for task in self.tasks], self.tasks[0].shared, later)
        for task in self.tasks:
            task.perform()  # evaluates the run


@dataclass(frozen=True)
class SharedTask:
    """The task to make what the runs of a seed share, so that no run waits for another that makes it.

    It is the ranker that orders what simulated users see, and the model of off-policy metrics.
    """

    config: Config
    shared: Path
    runs: ClassVar[int] = 0

    def __str__(self) -> str:
        return f"the shared parts of runs with seed {self.config.seed} on {self.config.data.source}"

    @property
    def finished(self) -> bool:
        return has_values(self.config, self.shared)

    def perform(self) -> None:
        if self.config.selection.startswith(OFF_POLICY):
            share_values(self.config, self.shared)
        else:
            load_run_data(self.config)


def has_diverged(folder: Path) -> bool:
    """Return whether the run that has this folder diverged."""
    return (folder / DIVERGED).is_file()


def grouped(tasks: Sequence[RunTask], seeds: int = 0) -> list[RunTask | RunsTask]:
    """Return tasks such that, on a GPU, runs of networks that differ only in seed and learning rate are one task.

    Later runs will have the `seeds` from 0 on.
    """
    groups: dict[str, list[RunTask]] = {}
    for task in tasks:
        key = str(task.folder)
        if _can_join(task.config) and not task.finished:
            common = task.config.with_options(seed=0, lr=1.0).to_json()
            key = json.dumps([common, str(task.shared), task.metrics], sort_keys=True)
        groups.setdefault(key, []).append(task)
    parts = [group[i : i + MOST_TOGETHER] for group in groups.values() for i in range(0, len(group), MOST_TOGETHER)]
    return [part[0] if len(part) == 1 else RunsTask(tuple(part), seeds) for part in parts]


def _can_join(config: Config) -> bool:
    """Return whether a run can be trained together with others: a network on a GPU."""
    return bool(config.kinds) and not any(map(is_trees, config.kinds)) and _on_gpu(config)


def _on_gpu(config: Config) -> bool:
    return choose_device(config.machine.device).type == "cuda"


# --- Metrics on test requests -----------------------------------------------------------------------------------------


def evaluate(config: Config, folder: Path, metrics: Sequence[str], shared: Path, *, run: Path | None) -> None:
    """Evaluate a run, or the logged ranking (None), by the metrics that its folder does not have yet.

    On a log, all runs and the logged ranking have the same model of off-policy metrics.
    """
    missing = [metric for metric in metrics if metric not in read_means(folder)]
    if not missing:
        return
    device = config.machine.device
    options: dict[str, Any] = {"device": choose_device(device)}
    if config.users is None:
        data = load_run_data(config)
        log = data.test
        options |= {"label": data.label, "segments": data.segments}
        if any(name.startswith(OFF_POLICY) for name in missing):
            options["model"] = common_values(config, shared)
    else:
        dataset = cached_dataset(config.data.source, config.data.folder)
        log = dataset.test
        user = make_user(config.users, **{**config.simulation.user_options, "max_grade": dataset.max_grade})
        options |= {"label": config.label or DEFAULT_LABEL, "user": user}
        options["model"] = None if run is None else load_off_policy_model(run / VALUES)
    assert log is not None  # noqa: S101 - every comparison on a log has test requests
    scores = logged_scores(log) if run is None else load_model(run).score(log, device=device)
    if scores is not None:
        _write_metrics(folder, request_metrics(log, missing, **options)(scores), log.weights)


def _write_metrics(folder: Path, found: dict[str, np.ndarray], weights: np.ndarray | None) -> None:
    """Add metrics by test request, and their means, to the files of a folder."""
    by_request = {**read_requests(folder)[0], **found, **({} if weights is None else {WEIGHTS: weights})}
    means = {name: float(np.average(values, weights=weights)) for name, values in found.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / REQUESTS, overwrite=True) as temporary:
        save_tensors(temporary, {name: torch.from_numpy(values) for name, values in by_request.items()})
    write_json(folder / TEST, {**read_means(folder), **means})


def read_means(folder: Path) -> dict[str, float]:
    """Return metric -> mean over the test requests; empty if nothing is evaluated yet."""
    return read_json(folder / TEST) if (folder / TEST).is_file() else {}


def read_requests(folder: Path) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Return metric -> values by test request, and the weights of the requests; empty if nothing is evaluated yet."""
    path = folder / REQUESTS
    found = {name: values.numpy() for name, values in load_tensors(path).items()} if path.is_file() else {}
    return found, found.pop(WEIGHTS, None)
