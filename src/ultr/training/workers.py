"""Tasks, such as training runs, in parallel processes."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from ultr.errors import UltrError, UnfinishedError

OnDone = Callable[[int, int, str], None]  # called with the number of finished runs, the number of all, and a name


class Task(Protocol):
    """A piece of work that `Workers` can run in any process."""

    @property
    def runs(self) -> int:
        """The number of training runs."""

    @property
    def finished(self) -> bool:
        """Whether all work of the task was done before, so that it can be skipped."""

    def perform(self) -> str:
        """Do the work that is not done yet; return the name of the task, for progress messages."""


@dataclass
class Stage:
    """Tasks, and a function that returns the stage that follows when all of them are done, if there is one."""

    tasks: Sequence[Task]
    then: Callable[[], Stage | None] = lambda: None
    left: int = 0  # tasks that are not done


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


class Workers:
    """A pool of `jobs` processes that run tasks in parallel. If `jobs` is 1, the calling process runs all tasks.

    `until` is a time limit, as a value of `time.monotonic()`: later no task starts, but running tasks are finished.
    """

    def __init__(self, jobs: int, *, until: float = math.inf) -> None:
        self._jobs, self.until = jobs, until
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, tasks: Sequence[Task], on_done: OnDone) -> None:
        """Run all tasks that are not finished yet; raise UnfinishedError if the time limit comes first."""
        self.run_stages([Stage(tasks)], sum(task.runs for task in tasks), on_done)

    def run_stages(self, stages: Sequence[Stage], total: int, on_done: OnDone) -> None:
        """Run the tasks of all stages, and of those that follow them; `total` is the expected number of their runs."""
        left: deque[tuple[Task, Stage]] = deque()
        done = 0
        for stage in stages:
            begun, finished = _begin(stage)
            left.extend(begun)
            done += finished
        for task, stage, name in self._performed(left):
            done += task.runs
            on_done(done, total, name)
            stage.left -= 1
            if not stage.left and (following := stage.then()) is not None:
                begun, finished = _begin(following)
                left.extendleft(reversed(begun))  # before others, so that fewer tasks wait for the same bias model
                done += finished
        if left:
            raise UnfinishedError(f"the time limit was reached with {done} of {total} runs finished")

    def _performed(self, left: deque[tuple[Task, Stage]]) -> Iterator[tuple[Task, Stage, str]]:
        """Perform the tasks `left`, to which the caller may add; yield each with its stage and name when it is done.

        At the time limit, tasks that are not begun stay in `left`.
        """
        running: dict[Future[str], tuple[Task, Stage]] = {}
        while left or running:
            over = time.monotonic() >= self.until
            if over and not running:
                return
            if left and not running and (self._jobs == 1 or (self._pool is None and len(left) == 1)):
                task, stage = left.popleft()
                yield task, stage, task.perform()
                continue
            while left and not over and len(running) < self._jobs:
                task, stage = left.popleft()
                running[self._started_pool().submit(_perform_safely, task)] = task, stage
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                result = json.loads(future.result())
                if "error" in result:
                    raise UltrError(result["error"])
                yield *running.pop(future), result["done"]

    def _started_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            threads = max(1, (os.cpu_count() or 1) // self._jobs)
            self._pool = ProcessPoolExecutor(self._jobs, context, initializer=_set_threads, initargs=(threads,))
        return self._pool


def _begin(stage: Stage) -> tuple[list[tuple[Task, Stage]], int]:
    """Return the unfinished tasks of a stage, or of those that follow it, and the number of runs finished before."""
    finished = 0
    while True:
        unfinished = [task for task in stage.tasks if not task.finished]
        finished += sum(task.runs for task in stage.tasks) - sum(task.runs for task in unfinished)
        stage.left = len(unfinished)
        if unfinished or (following := stage.then()) is None:
            return [(task, stage) for task in unfinished], finished
        stage = following


def _perform_safely(task: Task) -> str:
    """Run a task in a worker process; return its name or its error as JSON, because not all errors can be pickled."""
    import torch

    try:
        return json.dumps({"done": task.perform()})
    except UltrError as error:
        return json.dumps({"error": f"{task}: {error}"})
    except torch.OutOfMemoryError:
        return json.dumps({"error": f"{task}: the GPU has too little free memory; run fewer at once, with --jobs"})
    finally:
        if torch.cuda.is_available():  # memory that torch keeps for its next task is free for other processes
            gc.collect()
            torch.cuda.empty_cache()


def _set_threads(threads: int) -> None:
    """Limit the threads of this process, also those of linear algebra in NumPy and SciPy."""
    import scipy.linalg  # noqa: F401 - its libraries are limited only once they are loaded
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(threads)
    threadpool_limits(threads)
