"""Tasks in stages, one after another or in parallel, with a time limit."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from ultr.errors import OptionError, UltrError, UnfinishedError
from ultr.training.comparing import tasks as working
from ultr.training.comparing.tasks import Workers


@dataclass
class Work:
    """A task that only remembers that it was performed; `wait_for` is another task that must be performed before."""

    name: str
    performed: list[str]
    finished: bool = False
    runs: int = 1
    wait_for: Work | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __str__(self) -> str:
        return self.name

    def perform(self) -> None:
        if self.wait_for is not None:
            assert self.wait_for.done.wait(30)
        self.performed.append(self.name)
        self.finished = True
        self.done.set()


class Refused(Work):
    def perform(self) -> None:
        raise OptionError("too steep")


@pytest.fixture
def threads(monkeypatch):
    """Threads in place of processes, so that this process sees what tasks do."""
    monkeypatch.setattr(working, "ProcessPoolExecutor", lambda jobs, *_, **__: ThreadPoolExecutor(jobs))


@pytest.fixture
def performed():
    return []


def works(performed, names):
    return [Work(name, performed) for name in names]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_stage_begins_when_the_one_before_is_done_and_before_other_works(performed, threads, jobs):
    first, other, second = works(performed, "abc")
    other.wait_for = second if jobs == 2 else None
    progress = []

    def stages():
        yield [first]
        assert performed[0] == "a"
        yield [second]

    with Workers(jobs) as workers:
        workers.run_stages([(stages(), 2), ([[other]], 1)], lambda *event: progress.append(event))
    assert performed == ["a", "c", "b"]
    assert progress[0] == (1, 3, "a")
    assert [event[:2] for event in progress[1:]] == [(2, 3), (3, 3)]
    assert {event[2] for event in progress[1:]} == {"b", "c"}


def test_finished_tasks_are_skipped_and_counted(performed):
    tasks = works(performed, "abcd")
    tasks[0].finished = tasks[1].finished = True
    tasks[1].runs = 3
    progress = []
    with Workers(1) as workers:
        workers.run_stages([([tasks[:2], tasks[2:3]], 5), ([tasks[3:]], 1)], lambda *event: progress.append(event))
        workers.run(tasks, lambda *_: pytest.fail("a finished task was performed"))
    assert performed == ["c", "d"]
    assert progress == [(5, 6, "c"), (6, 6, "d")]


def test_a_stage_that_was_not_expected_counts_when_it_begins(performed):
    tasks, progress = works(performed, "abcd"), []
    with Workers(1) as workers:
        workers.run_stages([([tasks[:1], tasks[1:3]], 1), ([tasks[3:]], 1)], lambda *event: progress.append(event))
    assert progress == [(1, 4, "a"), (2, 4, "b"), (3, 4, "c"), (4, 4, "d")]


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_task_begins_after_the_time_limit(performed, threads, jobs):
    with (
        pytest.raises(UnfinishedError, match="the time limit was reached with 0 of 4 runs finished") as stopped,
        Workers(jobs, until=time.monotonic() - 1) as workers,
    ):
        workers.run(works(performed, "abcd"), lambda *_: None)
    assert not performed
    assert stopped.value.exit_code == 3


@pytest.mark.parametrize("jobs", [1, 2])
def test_tasks_that_run_at_the_time_limit_are_finished_and_a_later_call_performs_the_others(
    performed, threads, monkeypatch, jobs
):
    tasks = works(performed, map(str, range(20)))

    def clock():
        return 10.0 if len(performed) >= 4 else 0.0

    monkeypatch.setattr(working, "time", SimpleNamespace(monotonic=clock))
    with pytest.raises(UnfinishedError, match=r"of 20 runs") as stopped, Workers(jobs, until=5.0) as workers:
        workers.run(tasks, lambda *_: None)
    done = len(performed)
    assert 4 <= done <= 4 + 2 * jobs
    assert f"with {done} of 20" in str(stopped.value)
    with Workers(jobs) as workers:
        workers.run(tasks, lambda *_: None)
    assert sorted(performed) == sorted(task.name for task in tasks)


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_a_task_stops_the_work_and_names_the_task(performed, threads, jobs):
    tasks = [Refused("first", performed), *works(performed, "ab")]
    with pytest.raises(UltrError, match="too steep") as refused, Workers(jobs) as workers:
        workers.run(tasks, lambda *_: None)
    assert not isinstance(refused.value, UnfinishedError)
    assert ("first" in str(refused.value)) == (jobs == 2)


def test_parallel_runs_have_enough_memory(monkeypatch):
    assert working.default_jobs() >= 1
    pages = 8 * 2**30 // working.os.sysconf("SC_PAGE_SIZE")
    real = working.os.sysconf
    monkeypatch.setattr(working.os, "sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else real(name))
    monkeypatch.setattr(working.os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert working.default_jobs() == 2  # of 8 GiB, half at 1.5 each
    pages *= 100
    assert working.default_jobs() == 10
