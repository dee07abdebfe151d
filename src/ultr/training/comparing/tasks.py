"""Tasks in parallel processes, and those of a comparison: to train and test runs, one by one or together."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from ultr.datasets.users import make_user
from ultr.errors import DivergedError, UltrError, UnfinishedError
from ultr.evaluation.comparing import logged_scores
from ultr.evaluation.off_policy import load_off_policy_model, request_metrics
from ultr.evaluation.scores import OFF_POLICY
from ultr.log.labels import DEFAULT_LABEL
from ultr.rankers.model import load_model
from ultr.training.config import Config, is_trees
from ultr.training.data import cached_dataset, load_run_data
from ultr.training.examining import VALUES, common_values, has_values, share_values
from ultr.training.folder import MODEL
from ultr.training.loop import Listeners
from ultr.training.run import run_training
from ultr.training.together import run_together
from ultr.utils.distributed import choose_device
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import load_tensors, read_json, save_tensors, write_json

MOST_TOGETHER = 12  # runs that are trained together on a GPU
DIVERGED = "diverged.json"  # file in the folder of a run that diverged
TEST, REQUESTS = "test.json", "test.safetensors"  # files of a run: means of test metrics, and metrics by request
WEIGHTS = "weights"  # name of the weights of the requests, among the metrics by request
OnDone = Callable[[int, int, str], None]  # called with the number of finished runs, the number of all, and a name

# --- Processes --------------------------------------------------------------------------------------------------------


class Task(Protocol):
    """A piece of work that `Workers` can run in any process; `str(task)` is its name."""

    @property
    def runs(self) -> int:
        """The number of training runs."""

    @property
    def finished(self) -> bool:
        """Whether all work of the task was done before, so that it can be skipped."""

    def perform(self) -> None:
        """Do the work that is not done yet."""


Stages = Iterable[Sequence[Task]]  # tasks by stage; the tasks of a stage are asked for when the one before is finished


def default_jobs() -> int:
    """Return the default number of parallel runs: the number of cores, at most ten, fewer if memory is short.

    All runs together may use half of the memory. A run is assumed to need 1.5 GiB, as with the largest public data
    sets. Parallel runs also help with one GPU, because a small network leaves it idle between steps.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = math.inf
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(10, cores, int(min(memory / 2 / (1.5 * 2**30), 10))))


class _Course:
    """The stages of some work, and the number of tasks of the current stage that are not done."""

    def __init__(self, stages: Stages, expected: int) -> None:
        self._stages = iter(stages)
        self._expected = expected
        self._begun = 0  # runs of all stages that began
        self.left = 0
        self.skipped = 0  # runs that were finished before

    def next_tasks(self) -> list[tuple[Task, _Course]]:
        """Begin the next stage that is not finished; return its unfinished tasks."""
        for tasks in self._stages:
            self._begun += sum(task.runs for task in tasks)
            unfinished = [task for task in tasks if not task.finished]
            self.skipped += sum(task.runs for task in tasks) - sum(task.runs for task in unfinished)
            if unfinished:
                self.left = len(unfinished)
                return [(task, self) for task in unfinished]
        return []

    @property
    def runs(self) -> int:
        """The number of runs as far as it is known: a stage that nobody expected counts when it begins."""
        return max(self._expected, self._begun)


class Workers:
    """A pool of `jobs` processes that run tasks in parallel. If `jobs` is 1, the calling process runs all tasks.

    `until` is a time limit, as a value of `time.monotonic()`: later no task starts, but running tasks are finished.
    """

    def __init__(self, jobs: int, *, until: float = math.inf) -> None:
        self._jobs = jobs
        self.until = until
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, tasks: Sequence[Task], on_done: OnDone) -> None:
        """Run all tasks that are not finished yet; raise UnfinishedError if the time limit comes first."""
        self.run_stages([([tasks], sum(task.runs for task in tasks))], on_done)

    def run_stages(self, works: Sequence[tuple[Stages, int]], on_done: OnDone) -> None:
        """Run several works, each stage by stage; each comes with its expected number of runs."""
        courses = [_Course(stages, expected) for stages, expected in works]
        left = deque(task for course in courses for task in course.next_tasks())
        done = 0

        def finished() -> int:
            return done + sum(course.skipped for course in courses)

        for task, course in self._performed(left):
            done += task.runs
            course.left -= 1
            following = [] if course.left else course.next_tasks()
            left.extendleft(reversed(following))  # before others, so that fewer tasks wait for the same bias model
            on_done(finished(), sum(course.runs for course in courses), str(task))
        if left:
            total = sum(course.runs for course in courses)
            raise UnfinishedError(f"the time limit was reached with {finished()} of {total} runs finished")

    def _performed(self, left: deque[tuple[Task, _Course]]) -> Iterator[tuple[Task, _Course]]:
        """Perform the tasks `left`, to which the caller may add; yield each when it is done.

        At the time limit, tasks that are not begun stay in `left`.
        """
        running: dict[Future[str | None], tuple[Task, _Course]] = {}
        while left or running:
            over = time.monotonic() >= self.until
            if over and not running:
                return
            if left and not running and (self._jobs == 1 or (self._pool is None and len(left) == 1)):
                task, course = left.popleft()
                task.perform()
                yield task, course
                continue
            while left and not over and len(running) < self._jobs:
                task, course = left.popleft()
                running[self._started_pool().submit(_perform_safely, task)] = task, course
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                if (error := future.result()) is not None:
                    raise UltrError(error)
                yield running.pop(future)

    def _started_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            threads = max(1, (os.cpu_count() or 1) // self._jobs)
            self._pool = ProcessPoolExecutor(self._jobs, context, initializer=_set_threads, initargs=(threads,))
        return self._pool


def _perform_safely(task: Task) -> str | None:
    """Run a task in a worker process; return its error as text, because not all errors can be pickled."""
    try:
        task.perform()
    except UltrError as error:
        return f"{task}: {error}"
    except torch.OutOfMemoryError:
        return f"{task}: the GPU has too little free memory; run fewer at once, with --jobs"
    finally:
        if torch.cuda.is_available():  # memory that torch keeps for its next task is free for other processes
            gc.collect()
            torch.cuda.empty_cache()
    return None


def _set_threads(threads: int) -> None:
    """Limit the threads of this process, also those of linear algebra in NumPy and SciPy."""
    import scipy.linalg  # noqa: F401 - its libraries are limited only once they are loaded
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(threads)
    threadpool_limits(threads)


# --- Tasks of a comparison --------------------------------------------------------------------------------------------


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
