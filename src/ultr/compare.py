"""Several methods under one budget: each tuned alike on validation, run with the same seeds, judged on test.

Every run has a directory of its own under `runs/`; what is finished is not run again, so a comparison can be stopped,
resumed and extended.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ultr.checkpoint import read_json, write_json
from ultr.errors import OptionError, UltrError, nearest
from ultr.evaluation import FEEDBACK, PairedTest, mean_with_interval, paired_test
from ultr.methods import parse_options
from ultr.models import load_model
from ultr.runs import (
    RunConfig,
    best_evaluation,
    cached_dataset,
    mean_figures,
    prepare,
    run_training,
    with_training,
)
from ultr.simulate import make_user

JUDGED = 0.2  # share of a log's requests that only the final figures see
DEFAULT_RATES = (0.005, 0.01, 0.02, 0.05)


@dataclass(frozen=True)
class Entry:
    """A row of a comparison: a method with its options, such as `lambdarank:from=no-bias`."""

    text: str
    method: str
    learn_from: str
    options: Mapping[str, Any]

    @staticmethod
    def parse(text: str) -> Entry:
        name, _, rest = text.strip().partition(":")
        parts = [part for part in rest.split(":") if part]
        own = [part for part in parts if not part.startswith("from=")]
        learn_from = [part.removeprefix("from=") for part in parts if part not in own]
        options = parse_options(name, own, beside=["from"])
        return Entry(text.strip(), name, learn_from[-1] if learn_from else "feedback", options)

    def config(self, base: RunConfig, lr: float, seed: int) -> RunConfig:
        config = replace(base, method=self.method, method_options=self.options, learn_from=self.learn_from)  # type: ignore[arg-type]
        return with_training(config, lr=lr, seed=seed)


@dataclass(frozen=True)
class Row:
    """What a method came to: its rate, its figures by seed, and how it differs from the reference."""

    entry: str
    lr: float
    figures: dict[str, list[float]]  # metric -> one figure a seed
    against: dict[str, PairedTest]  # metric -> paired test over seeds, empty for the reference

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
        return {"metrics": self.metrics, "reference": self.reference, "rows": [row.to_json() for row in self.rows]}


def compare(
    base: RunConfig,
    methods: Sequence[str],
    out: Path,
    *,
    seeds: int = 5,
    rates: Sequence[float] = DEFAULT_RATES,
    tuning_seeds: int = 1,
    metrics: Sequence[str] | None = None,
    reference: str | None = None,
    jobs: int = 0,
    on_done: Callable[[int, int, str], None] = lambda *_: None,
) -> Comparison:
    """Tune each method's learning rate on validation, run it with all seeds, and compare on test.

    The rate is that with the best selection metric, as a mean over the first `tuning_seeds`.
    """
    entries = [Entry.parse(text) for text in methods]
    names = [entry.text for entry in entries]
    reference = reference or names[0]
    if reference not in names:
        raise OptionError(f"the reference '{reference}' is not among the methods", mend=nearest(reference, names))
    if seeds < 1 or not rates or tuning_seeds < 1:
        raise OptionError("a comparison needs one seed and one rate or more", got=f"{seeds} seeds, {len(rates)} rates")
    metrics = list(metrics or ([base.select] if base.users is None else ["ndcg@10", "reward@10"]))
    if base.users is None:
        base = replace(base, judged=JUDGED)
    out.mkdir(parents=True, exist_ok=True)
    tuning = range(min(tuning_seeds, seeds)) if len(rates) > 1 else range(0)
    with Workers(jobs or default_jobs()) as workers:
        tried = [(e, lr, seed) for lr in rates for e in entries for seed in tuning]
        workers.run([_task(base, out, e, lr, seed, metrics) for e, lr, seed in tried], on_done)
        chosen = {e.text: _best_rate(base, out, e, rates, tuning) for e in entries}
        final = [(e, chosen[e.text], seed) for e in entries for seed in range(seeds)]
        workers.run([_task(base, out, e, lr, seed, metrics) for e, lr, seed in final], on_done)
    figures = {
        e.text: {
            m: [read_json(run_folder(out, e, chosen[e.text], s) / "test.json")[m] for s in range(seeds)]
            for m in metrics
        }
        for e in entries
    }
    rows = [Row(name, chosen[name], figures[name], _against(figures, name, reference, seeds)) for name in names]
    result = Comparison(rows, metrics, reference)
    write_json(out / "comparison.json", result.to_json())
    return result


def _against(
    figures: dict[str, dict[str, list[float]]], name: str, reference: str, seeds: int
) -> dict[str, PairedTest]:
    if name == reference or seeds < 2:
        return {}
    return {m: paired_test(np.array(v), np.array(figures[reference][m])) for m, v in figures[name].items()}


def run_folder(out: Path, entry: Entry, lr: float, seed: int) -> Path:
    safe = "".join(c if c.isalnum() or c in "-=." else "_" for c in entry.text)
    return out / "runs" / safe / f"lr-{lr:g}" / f"seed-{seed}"


def _best_rate(base: RunConfig, out: Path, entry: Entry, rates: Sequence[float], tuning: Sequence[int]) -> float:
    def validated(lr: float) -> float:
        best = [best_evaluation(run_folder(out, entry, lr, seed)) for seed in tuning]
        return float(np.mean([line[select] for select, line in best]))

    if len(rates) == 1:
        return rates[0]
    return min(rates, key=validated) if base.select.removeprefix(FEEDBACK) == "arp" else max(rates, key=validated)


@dataclass(frozen=True)
class Task:
    """One run, to be trained and judged in whatever process is free."""

    config: dict[str, Any]
    folder: str
    shared: str  # bias models of the comparison
    metrics: tuple[str, ...]


def _task(base: RunConfig, out: Path, entry: Entry, lr: float, seed: int, metrics: Sequence[str]) -> Task:
    folder = run_folder(out, entry, lr, seed)
    return Task(entry.config(base, lr, seed).to_json(), str(folder), str(out / "bias"), tuple(metrics))


def perform(task: Task) -> str:
    """Train a run, unless it is finished, and write its figures on test, unless they are there."""
    folder = Path(task.folder)
    config = RunConfig.from_json(task.config)
    run_training(config, folder, resume=True, shared=Path(task.shared))
    known = read_json(folder / "test.json") if (folder / "test.json").is_file() else {}
    if missing := [metric for metric in task.metrics if metric not in known]:
        write_json(folder / "test.json", {**known, **evaluate_run(config, folder, missing)})
    return task.folder


def evaluate_run(config: RunConfig, folder: Path, metrics: list[str]) -> dict[str, float]:
    """Figures of a run on the test requests of its data set, or on those of its log kept for test."""
    model = load_model(folder)
    if config.users is None:
        log, user = prepare(config).test, None
        if log is None:
            raise OptionError(
                "the run kept no requests of its log for test", where=folder, mend="compare into another folder"
            )
    else:
        dataset = cached_dataset(config.data, config.data_dir)
        log = dataset.test
        user = make_user(config.users, **{**config.user_options, "max_grade": dataset.max_grade})
    scores = model.score(log, device=config.training.device)
    return mean_figures(log, scores, metrics, user=user, label=config.label)


def default_jobs() -> int:
    """As many runs side by side as there are cores: small networks leave a GPU idle between their steps."""
    return max(1, min(10, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


class Workers:
    """Processes that perform tasks; with one job, this process does it all."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, tasks: Sequence[Task], on_done: Callable[[int, int, str], None]) -> None:
        for done, folder in enumerate(self._results(tasks), start=1):
            on_done(done, len(tasks), folder)

    def _results(self, tasks: Sequence[Task]) -> Iterator[str]:
        if self._jobs == 1 or len(tasks) < 2:
            yield from map(perform, tasks)
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            threads = max(1, (os.cpu_count() or 1) // self._jobs)
            self._pool = ProcessPoolExecutor(self._jobs, context, initializer=_set_threads, initargs=(threads,))
        waiting: set[Future[str]] = {self._pool.submit(perform_safely, task) for task in tasks}
        while waiting:
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                result = json.loads(future.result())
                if "error" in result:
                    raise UltrError(result["error"])
                yield result["folder"]


def perform_safely(task: Task) -> str:
    """Errors with their own constructors do not travel between processes; their messages do."""
    try:
        return json.dumps({"folder": perform(task)})
    except UltrError as error:
        return json.dumps({"error": f"{task.folder}: {error}"})


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def interval(values: Sequence[float]) -> tuple[float, float]:
    mean = mean_with_interval(np.array(values))
    return mean.low, mean.high
