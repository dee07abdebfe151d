"""Several methods under one budget: each tuned alike on validation, run with the same seeds, judged on test.

Every run has a directory of its own under `runs/`; what is finished is not run again, so a comparison can be stopped,
resumed and extended.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ultr.checkpoint import read_json, write_json
from ultr.errors import OptionError, UltrError, UnfinishedError, nearest
from ultr.evaluation import PairedTest, mean_with_interval, paired_test
from ultr.files import output_errors
from ultr.judging import load_judge
from ultr.methods import parse_options
from ultr.models import load_model
from ultr.preparing import RunConfig, cached_dataset, prepare
from ultr.rankers import RANKERS
from ultr.rankers.boosters import BOOSTERS, is_trees
from ultr.runs import best_evaluation, run_training, with_training
from ultr.simulate import make_user
from ultr.stages import less_is_better, mean_figures
from ultr.training import usual_training

FORMAT = 1
JUDGED = 0.2  # share of a log's requests that only the final figures see
DEFAULT_RATES = (0.005, 0.01, 0.02, 0.05)
TREE_RATES = (0.05, 0.1)


@dataclass(frozen=True)
class Entry:
    """A row of a comparison: a method with its options, such as `lambdarank:from=no-bias`."""

    text: str
    method: str
    learn_from: str
    options: Mapping[str, Any]
    ranker: str = ""  # none: that of the comparison

    @staticmethod
    def parse(text: str, ranker: str = "mlp") -> Entry:
        """Read a row whose ranker, unless it names one (`:ranker=lightgbm`), is that of the comparison."""
        name, _, rest = text.strip().partition(":")
        parts = [part for part in rest.split(":") if part]
        own = [part for part in parts if not part.startswith(("from=", "ranker="))]
        learn_from = [part.removeprefix("from=") for part in parts if part.startswith("from=")]
        rankers = [part.removeprefix("ranker=") for part in parts if part.startswith("ranker=")]
        known = [*RANKERS, *BOOSTERS]
        if rankers and rankers[-1] not in known:
            raise OptionError(f"no ranker '{rankers[-1]}'", mend=nearest(rankers[-1], known))
        chosen = rankers[-1] if rankers else ""
        options = parse_options(name, own, beside=["from", "ranker"], ranker=chosen or ranker)
        return Entry(text.strip(), name, learn_from[-1] if learn_from else "feedback", options, chosen)

    def config(self, base: RunConfig, lr: float, seed: int) -> RunConfig:
        own = {} if self.ranker in ("", base.ranker) else {"ranker": self.ranker, "ranker_options": {}}
        options = {"method": self.method, "method_options": self.options, "learn_from": self.learn_from, **own}
        config = replace(base, **options)  # type: ignore[arg-type]
        if is_trees(config.ranker) != is_trees(base.ranker):  # a step of trees is a round: another budget
            usual = usual_training(config.ranker)
            budget = {name: getattr(usual, name) for name in ("steps", "evaluate_every", "patience")}
            config = with_training(config, **budget)
        return with_training(config, lr=lr, seed=seed)


@dataclass(frozen=True)
class Row:
    """What a method came to: its rate, its figures by seed, and how it differs from the reference."""

    entry: str
    lr: float
    figures: dict[str, list[float]]  # metric -> one figure a seed
    against: dict[str, PairedTest]  # metric -> paired test over seeds, empty for the reference

    def tested(self, other: Row) -> dict[str, PairedTest]:
        """How it differs from another row, seed by seed."""
        return {m: paired_test(np.array(v), np.array(other.figures[m])) for m, v in self.figures.items()}

    def to_json(self) -> dict[str, Any]:
        summary = {
            metric: {
                "mean": float(np.mean(values)),
                "deviation": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
                "seeds": values,
                "against": vars(self.against[metric]) if metric in self.against else None,
            }
            for metric, values in self.figures.items()
        }
        return {"method": self.entry, "lr": self.lr, "figures": summary}


@dataclass(frozen=True)
class Comparison:
    """The rows of a comparison, the metrics judged, and the row they are compared with."""

    rows: list[Row]
    metrics: list[str]
    reference: str

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "metrics": self.metrics,
            "reference": self.reference,
            "rows": [row.to_json() for row in self.rows],
        }


class Task(Protocol):
    """A piece of work that any process can do."""

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""

    def perform(self) -> str:
        """Do what is not done, and say what that was."""


@dataclass(frozen=True)
class RunTask:
    """One run, to be trained unless it is, and judged on test unless it is."""

    config: dict[str, Any]
    folder: str
    shared: str  # bias models of the comparison
    metrics: tuple[str, ...]

    def __str__(self) -> str:
        return self.folder

    @property
    def finished(self) -> bool:
        if not self.metrics:
            return (Path(self.folder) / "model").is_dir()
        judged = Path(self.folder) / "test.json"
        return judged.is_file() and set(self.metrics) <= set(read_json(judged))

    def perform(self) -> str:
        folder, config = Path(self.folder), RunConfig.from_json(self.config)
        run_training(config, folder, resume=True, shared=Path(self.shared))
        known = read_json(folder / "test.json") if (folder / "test.json").is_file() else {}
        if missing := [metric for metric in self.metrics if metric not in known]:
            write_json(folder / "test.json", {**known, **evaluate_run(config, folder, missing)})
        return self.folder


@dataclass(frozen=True)
class Plan:
    """A comparison to make: which methods, on what, with how many seeds, and how their rates are found."""

    base: RunConfig
    entries: Sequence[Entry]
    out: Path
    seeds: int = 5
    rates: Sequence[float] = ()  # to choose from, by validation; none: the usual ones of its ranker
    rate_of: Mapping[str, float] = field(default_factory=dict)  # by entry, where it is chosen already
    tuning_seeds: int = 1
    metrics: Sequence[str] = ("ndcg@10", "reward@10")
    reference: str = ""  # the first entry

    def __post_init__(self) -> None:
        names = [entry.text for entry in self.entries]
        if self.reference and self.reference not in names:
            mend = nearest(self.reference, names)
            raise OptionError(f"the reference '{self.reference}' is not among the methods", mend=mend)
        if self.seeds < 1 or self.tuning_seeds < 1:
            raise OptionError("a comparison needs one seed or more", got=f"{self.seeds} seeds")

    @property
    def tuning(self) -> range:
        return range(min(self.tuning_seeds, self.seeds))

    def rates_for(self, entry: Entry) -> Sequence[float]:
        return self.rates or (TREE_RATES if is_trees(entry.ranker or self.base.ranker) else DEFAULT_RATES)

    def tuning_tasks(self) -> list[RunTask]:
        entries = [entry for entry in self.entries if entry.text not in self.rate_of]
        tried = [(e, lr) for e in entries if len(self.rates_for(e)) > 1 for lr in self.rates_for(e)]
        return [
            self._task(e, lr, seed, ()) for e, lr in sorted(tried, key=lambda pair: pair[1]) for seed in self.tuning
        ]

    def final_tasks(self, rate_of: Mapping[str, float]) -> list[RunTask]:
        chosen = [(e, rate_of[e.text], seed) for e in self.entries for seed in range(self.seeds)]
        return [self._task(e, lr, seed, self.metrics) for e, lr, seed in chosen]

    def _task(self, entry: Entry, lr: float, seed: int, metrics: Sequence[str]) -> RunTask:
        folder = run_folder(self.out, entry, lr, seed)
        return RunTask(entry.config(self.base, lr, seed).to_json(), str(folder), str(self.out / "bias"), tuple(metrics))

    def rates_chosen(self) -> dict[str, float]:
        """The rate of each entry: with the best selection metric, as a mean over the tuning seeds."""
        return {e.text: self.rate_of[e.text] if e.text in self.rate_of else self._best_rate(e) for e in self.entries}

    def _best_rate(self, entry: Entry) -> float:
        def validated(lr: float) -> float:
            best = [best_evaluation(run_folder(self.out, entry, lr, seed)) for seed in self.tuning]
            return float(np.mean([line[select] for select, line in best]))

        rates = self.rates_for(entry)
        if len(rates) == 1:
            return rates[0]
        return min(rates, key=validated) if less_is_better(self.base.selection) else max(rates, key=validated)

    def result(self, rate_of: Mapping[str, float]) -> Comparison:
        """What the finished runs come to."""
        figures = {}
        for e in self.entries:
            judged = [read_json(run_folder(self.out, e, rate_of[e.text], s) / "test.json") for s in range(self.seeds)]
            figures[e.text] = {metric: [figure[metric] for figure in judged] for metric in self.metrics}
        reference = self.reference or self.entries[0].text
        rows = [Row(e.text, rate_of[e.text], figures[e.text], {}) for e in self.entries]
        if self.seeds > 1:
            of = next(row for row in rows if row.entry == reference)
            rows = [row if row is of else replace(row, against=row.tested(of)) for row in rows]
        return Comparison(rows, list(self.metrics), reference)


def compare(
    base: RunConfig,
    methods: Sequence[str],
    out: Path,
    *,
    seeds: int = 5,
    rates: Sequence[float] = (),
    tuning_seeds: int = 1,
    metrics: Sequence[str] | None = None,
    reference: str | None = None,
    jobs: int = 0,
    on_done: Callable[[int, int, str], None] = lambda *_: None,
) -> Comparison:
    """Tune each method's learning rate on validation, run it with all seeds, and compare on test.

    Rates that are not given are the usual ones of each ranker.
    """
    base = replace(base, select=base.selection)  # the same for all, bounds among them
    metrics = list(metrics or ([base.select] if base.users is None else ["ndcg@10", "reward@10"]))
    if base.users is None:
        base = replace(base, judged=JUDGED)
    entries = [Entry.parse(text, base.ranker) for text in methods]
    plan = Plan(
        base,
        entries,
        out,
        seeds=seeds,
        rates=rates,
        tuning_seeds=tuning_seeds,
        metrics=metrics,
        reference=reference or "",
    )
    existed = out.exists()
    try:
        with Workers(jobs or default_jobs()) as workers:
            (result,) = compare_all([plan], workers, on_done)
    except UltrError:
        with suppress(OSError):  # there is something in it
            if not existed:
                out.rmdir()
        raise
    write_json(out / "comparison.json", result.to_json())
    return result


def compare_all(
    plans: Sequence[Plan], workers: Workers, on_done: Callable[[int, int, str], None] = lambda *_: None
) -> list[Comparison]:
    """Make several comparisons at once: first all that their rates are chosen by, then all other runs."""
    for plan in plans:
        with output_errors(plan.out):
            plan.out.mkdir(parents=True, exist_ok=True)
    workers.run([task for plan in plans for task in plan.tuning_tasks()], on_done)
    rate_of = [plan.rates_chosen() for plan in plans]
    workers.run([task for plan, rates in zip(plans, rate_of, strict=True) for task in plan.final_tasks(rates)], on_done)
    return [plan.result(rates) for plan, rates in zip(plans, rate_of, strict=True)]


def run_folder(out: Path, entry: Entry, lr: float, seed: int) -> Path:
    safe = "".join(c if c.isalnum() or c in "-=." else "_" for c in entry.text)
    return out / "runs" / safe / f"lr-{lr:g}" / f"seed-{seed}"


def evaluate_run(config: RunConfig, folder: Path, metrics: list[str]) -> dict[str, float]:
    """Figures of a run on the test requests of its data set, or on those of its log kept for test."""
    model = load_model(folder)
    segments: tuple[str, ...] = ()
    if config.users is None:
        prepared = prepare(config)
        log, user, segments = prepared.test, None, prepared.segments
        if log is None:
            raise OptionError(
                "the run kept no requests of its log for test", where=folder, mend="compare into another folder"
            )
    else:
        dataset = cached_dataset(config.data, config.data_dir)
        log = dataset.test
        user = make_user(config.users, **{**config.user_options, "max_grade": dataset.max_grade})
    scores = model.score(log, device=config.training.device)
    judge = load_judge(folder / "judge")
    return mean_figures(log, scores, metrics, user=user, label=config.label, judge=judge, segments=segments)


def default_jobs() -> int:
    """As many runs side by side as there are cores, ten at most: small networks leave a GPU idle between their steps.

    They are given half of the memory, at 1.5 GiB each, which is what the largest public data sets need.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = math.inf
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(10, cores, int(min(memory / 2 / (1.5 * 2**30), 10))))


class Workers:
    """Processes that perform tasks; with one job, this process does it all.

    After `until`, by the monotonic clock, none is begun; those that are on their way are finished.
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
        """Perform what is not finished; raises `UnfinishedError` if the time is up before."""
        waiting = [task for task in tasks if not task.finished]
        done = len(tasks) - len(waiting)
        for what in self._results(waiting):
            done += 1
            on_done(done, len(tasks), what)
        if done < len(tasks):
            raise UnfinishedError(f"the time is up with {done} of {len(tasks)} runs finished")

    def _results(self, tasks: Sequence[Task]) -> Iterator[str]:
        if self._jobs == 1 or len(tasks) < 2:
            yield from (task.perform() for task in tasks if time.monotonic() < self.until)
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            threads = max(1, (os.cpu_count() or 1) // self._jobs)
            self._pool = ProcessPoolExecutor(self._jobs, context, initializer=_set_threads, initargs=(threads,))
        pool, left = self._pool, iter(tasks)
        waiting: set[Future[str]] = set()
        while True:
            free = self._jobs - len(waiting) if time.monotonic() < self.until else 0
            waiting |= {pool.submit(_perform_safely, task) for task in islice(left, free)}
            if not waiting:
                return
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                result = json.loads(future.result())
                if "error" in result:
                    raise UltrError(result["error"])
                yield result["done"]


def _perform_safely(task: Task) -> str:
    """Errors with their own constructors do not travel between processes; their messages do."""
    try:
        return json.dumps({"done": task.perform()})
    except UltrError as error:
        return json.dumps({"error": f"{task}: {error}"})


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def interval(values: Sequence[float]) -> tuple[float, float]:
    mean = mean_with_interval(np.array(values))
    return mean.low, mean.high
