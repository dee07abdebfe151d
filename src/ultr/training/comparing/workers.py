"""Tasks, such as training runs, in parallel processes."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Protocol

from ultr.errors import UltrError, UnfinishedError

OnDone = Callable[[int, int, str], None]  # called with the number of finished runs, the number of all, and a name


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

    def __init__(self, stages: Stages) -> None:
        self._stages = iter(stages)
        self.left = 0
        self.skipped = 0  # runs that were finished before

    def next_tasks(self) -> list[tuple[Task, _Course]]:
        """Begin the next stage that is not finished; return its unfinished tasks."""
        for tasks in self._stages:
            unfinished = [task for task in tasks if not task.finished]
            self.skipped += sum(task.runs for task in tasks) - sum(task.runs for task in unfinished)
            if unfinished:
                self.left = len(unfinished)
                return [(task, self) for task in unfinished]
        return []


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
        self.run_stages([[tasks]], sum(task.runs for task in tasks), on_done)

    def run_stages(self, works: Sequence[Stages], total: int, on_done: OnDone) -> None:
        """Run several works, each stage by stage; `total` is the expected number of runs."""
        courses = [_Course(stages) for stages in works]
        left = deque(task for course in courses for task in course.next_tasks())
        done = 0

        def finished() -> int:
            return done + sum(course.skipped for course in courses)

        for task, course in self._performed(left):
            done += task.runs
            on_done(finished(), total, str(task))
            course.left -= 1
            if not course.left:  # before others, so that fewer tasks wait for the same bias model
                left.extendleft(reversed(course.next_tasks()))
        if left:
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
    import torch

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
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(threads)
    threadpool_limits(threads)
