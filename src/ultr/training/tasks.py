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
from ultr.errors import DivergedError, OptionError
from ultr.evaluation.judge import evaluate_requests, load_judge
from ultr.evaluation.judgement import logged_scores
from ultr.evaluation.scores import OFF_POLICY
from ultr.log import Log
from ultr.rankers.boosters import is_trees
from ultr.rankers.model import load_model
from ultr.training.config import RunConfig, with_training
from ultr.training.data import cached_dataset, load_run_data
from ultr.training.run import run_together, run_training
from ultr.training.selection import common_judge, has_judge, share_judge
from ultr.utils.devices import choose_device
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import read_json, write_json
from ultr.utils.tensors import load_tensors, save_tensors

MOST_TOGETHER = 12  # runs that are trained together on a GPU
DIVERGED = "diverged.json"  # file in the folder of a run that diverged
TEST, REQUESTS = "test.json", "test.safetensors"  # files of a run: means of test metrics, and metrics by request
WEIGHTS = "weights"  # name, among the metrics by request of the logged ranking, of the weights of the requests
ONE_JUDGE = "one judge"  # key of a run's means if the judge of its off-policy metrics is that of the whole comparison


@dataclass(frozen=True)
class RunTask:
    """The task to train one run and evaluate it on test requests; metrics that were computed before are kept.

    A run without metrics only helps to choose a setting: if it diverges, its folder says so, and nothing is raised.
    """

    config: dict[str, Any]
    folder: str
    shared: str  # folder of the bias models that the runs of a comparison share
    metrics: tuple[str, ...]
    runs: ClassVar[int] = 1

    def __str__(self) -> str:
        return self.folder

    @property
    def finished(self) -> bool:
        if not self.metrics:
            return (Path(self.folder) / "model").is_dir() or has_diverged(Path(self.folder))
        return set(self.metrics) <= set(_tested(Path(self.folder)))

    def perform(self) -> str:
        folder, config = Path(self.folder), RunConfig.from_json(self.config)
        if not self.metrics and has_diverged(folder):
            return self.folder
        try:
            run_training(config, folder, resume=True, shared=Path(self.shared), on_warning=None)
        except DivergedError as error:
            if self.metrics:
                raise
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / DIVERGED, {"error": str(error)})
        if missing := [metric for metric in self.metrics if metric not in _tested(folder)]:
            found, weights = evaluate_run(config, folder, missing, Path(self.shared))
            _write_tested(folder, found, weights)
        return self.folder


@dataclass(frozen=True)
class LoggedTask:
    """The task to evaluate the logged ranking on the test requests of a log, by the judge that judges all runs."""

    config: dict[str, Any]
    folder: str
    shared: str
    metrics: tuple[str, ...]
    runs: ClassVar[int] = 0

    def __str__(self) -> str:
        return self.folder

    @property
    def finished(self) -> bool:
        return set(self.metrics) <= set(_tested(Path(self.folder)))

    def perform(self) -> str:
        config = RunConfig.from_json(self.config)
        log, segments = _test_requests(config, Path(self.folder))
        if (scores := logged_scores(log)) is not None:
            found = _evaluate(config, log, scores, list(self.metrics), segments, Path(self.shared))
            of_requests = {} if log.weights is None else {WEIGHTS: log.weights}
            _write_tested(Path(self.folder), {**found, **of_requests}, log.weights)
        return self.folder


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

    def perform(self) -> str:
        configs = [RunConfig.from_json(task.config) for task in self.tasks]
        later = [with_training(configs[0], seed=seed) for seed in range(self.seeds)]
        with suppress(DivergedError, torch.OutOfMemoryError):  # then they are trained one by one
            run_together(configs, [Path(task.folder) for task in self.tasks], Path(self.tasks[0].shared), later)
        return [task.perform() for task in self.tasks][-1]  # evaluates them


@dataclass(frozen=True)
class SharedTask:
    """The task to make what the runs of a seed share, so that no two runs make it at the same time.

    It is the ranker that orders what simulated users see, and the judge of off-policy metrics.
    """

    config: dict[str, Any]
    shared: str
    runs: ClassVar[int] = 0

    @property
    def finished(self) -> bool:
        return has_judge(RunConfig.from_json(self.config), Path(self.shared))

    def perform(self) -> str:
        config = RunConfig.from_json(self.config)
        if config.selection.startswith(OFF_POLICY):
            share_judge(config, Path(self.shared))
        else:
            load_run_data(config)
        return f"what the runs with seed {config.training.seed} on {config.data} share"


def has_diverged(folder: Path) -> bool:
    """Return whether the run that has this folder diverged."""
    return (folder / DIVERGED).is_file()


def _on_gpu(config: RunConfig) -> bool:
    return choose_device(config.training.device).type == "cuda"


def grouped(tasks: Sequence[RunTask], seeds: int = 0) -> list[RunTask | RunsTask]:
    """Return tasks such that, on a GPU, runs of networks that differ only in seed and learning rate are one task.

    Later runs will have the `seeds` from 0 on.
    """
    groups: dict[str, list[RunTask]] = {}
    for task in tasks:
        config = RunConfig.from_json(task.config)
        alone = is_trees(config.ranker) or not _on_gpu(config)
        common = with_training(config, seed=0, lr=1.0).to_json()
        key = task.folder if alone or task.finished else json.dumps([common, task.shared, task.metrics], sort_keys=True)
        groups.setdefault(key, []).append(task)
    parts = [group[i : i + MOST_TOGETHER] for group in groups.values() for i in range(0, len(group), MOST_TOGETHER)]
    return [part[0] if len(part) == 1 else RunsTask(tuple(part), seeds) for part in parts]


def evaluate_run(
    config: RunConfig, folder: Path, metrics: list[str], shared: Path
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Return metrics [requests] of a run on the test requests of its data set or log, and the requests' weights."""
    model = load_model(folder)
    if config.users is None:
        log, segments = _test_requests(config, folder)
        scores = model.score(log, device=config.training.device)
        return _evaluate(config, log, scores, metrics, segments, shared), log.weights
    dataset = cached_dataset(config.data, config.data_dir)
    user = make_user(config.users, **{**config.user_options, "max_grade": dataset.max_grade})
    scores, device = model.score(dataset.test, device=config.training.device), choose_device(config.training.device)
    judge = load_judge(folder / "judge")
    options: dict[str, Any] = {"user": user, "label": config.label, "judge": judge, "device": device}
    return evaluate_requests(dataset.test, scores, metrics, **options), dataset.test.weights


def _test_requests(config: RunConfig, folder: Path) -> tuple[Log, tuple[str, ...]]:
    """Return the test requests of a run's log, and the names of their segments."""
    run_data = load_run_data(config)
    if run_data.test is None:
        what, hint = "the run did not hold out test requests of its log", "pass another --out to train it again"
        raise OptionError(what, where=folder, hint=hint)
    return run_data.test, run_data.segments


def _evaluate(
    config: RunConfig, log: Log, scores: np.ndarray, metrics: list[str], segments: tuple[str, ...], shared: Path
) -> dict[str, np.ndarray]:
    """Return metrics [requests] of scores of the test requests of a log; all rankers have the same judge."""
    judge = common_judge(config, shared) if any(name.startswith(OFF_POLICY) for name in metrics) else None
    options: dict[str, Any] = {"label": config.label, "judge": judge, "segments": segments}
    return evaluate_requests(log, scores, metrics, device=choose_device(config.training.device), **options)


def _tested(folder: Path) -> dict[str, float]:
    """Return metric -> mean over test requests; those by another judge than that of the comparison are left out."""
    results = read_json(folder / TEST) if (folder / TEST).is_file() else {}
    one_judge = results.pop(ONE_JUDGE, False)
    return {name: value for name, value in results.items() if one_judge or not name.startswith(OFF_POLICY)}


def _write_tested(folder: Path, found: dict[str, np.ndarray], weights: np.ndarray | None) -> None:
    """Add metrics by test request, and their means, to the files of a run."""
    by_request = {**read_requests(folder), **found}
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / REQUESTS, overwrite=True) as temporary:
        save_tensors(temporary, {name: torch.from_numpy(values) for name, values in by_request.items()})
    means = {name: float(np.average(values, weights=weights)) for name, values in found.items() if name != WEIGHTS}
    write_json(folder / TEST, {**_tested(folder), **means, ONE_JUDGE: True})


def read_requests(folder: Path) -> dict[str, np.ndarray]:
    """Return metric -> values of a run by test request; empty if it has none, as those of old versions."""
    path = folder / REQUESTS
    return {name: values.numpy() for name, values in load_tensors(path).items()} if path.is_file() else {}
