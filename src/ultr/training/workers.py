"""Tasks, such as training runs, in parallel processes."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from typing import Protocol

from ultr.errors import UltrError, UnfinishedError


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

    def run(self, tasks: Sequence[Task], on_done: Callable[[int, int, str], None]) -> None:
        """Run all tasks that are not finished yet; raise UnfinishedError if the time limit comes first."""
        total = sum(task.runs for task in tasks)
        unfinished = [task for task in tasks if not task.finished]
        done = total - sum(task.runs for task in unfinished)
        for runs, name in self._results(unfinished):
            done += runs
            on_done(done, total, name)
        if done < total:
            raise UnfinishedError(f"the time limit was reached with {done} of {total} runs finished")

    def _results(self, tasks: Sequence[Task]) -> Iterator[tuple[int, str]]:
        if self._jobs == 1 or len(tasks) < 2:
            yield from ((task.runs, task.perform()) for task in tasks if time.monotonic() < self.until)
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            threads = max(1, (os.cpu_count() or 1) // self._jobs)
            self._pool = ProcessPoolExecutor(self._jobs, context, initializer=_set_threads, initargs=(threads,))
        pool, left = self._pool, iter(tasks)
        running: dict[Future[str], int] = {}
        while True:
            free = self._jobs - len(running) if time.monotonic() < self.until else 0
            running |= {pool.submit(_perform_safely, task): task.runs for task in islice(left, free)}
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                result = json.loads(future.result())
                if "error" in result:
                    raise UltrError(result["error"])
                yield running.pop(future), result["done"]


def _perform_safely(task: Task) -> str:
    """Run a task in a worker process; return its name or its error as JSON, because not all errors can be pickled."""
    try:
        return json.dumps({"done": task.perform()})
    except UltrError as error:
        return json.dumps({"error": f"{task}: {error}"})


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
