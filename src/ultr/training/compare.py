"""Compare methods: tune each on validation requests, train it with several seeds, and evaluate it on test requests.

Every training run has its own directory under `runs/`. Finished runs are not repeated, so a comparison can be stopped,
resumed with the same call, and extended by more methods or seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ultr.bias.pitfalls import Pitfall
from ultr.errors import OptionError, UltrError, UnfinishedError, nearest
from ultr.evaluation.scores import mean_with_interval
from ultr.methods import METHODS
from ultr.rankers.boosters import is_trees
from ultr.training.checkpoints import read_metrics
from ultr.training.comparison import Comparison, Row, Steps, with_tests
from ultr.training.config import RunConfig, with_training
from ultr.training.entries import Entry, Setting, run_folder
from ultr.training.logged import LOGGED, against_logged, read_logged
from ultr.training.selection import best_evaluation, less_is_better
from ultr.training.tasks import TEST, LoggedTask, RunTask, SharedTask, grouped, has_diverged, read_requests
from ultr.training.traps import traps_of_log
from ultr.training.workers import OnDone, Stage, Workers, default_jobs
from ultr.utils.files import output_errors
from ultr.utils.jsonfiles import read_json, write_json

TEST_SHARE = 0.2  # share of a log's requests that are held out for the final test
SESSIONS = 30_000  # simulated sessions of the log that all methods of a run learn from
PATIENCE = 10  # evaluations without improvement after which a run of a comparison stops
DEFAULT_RATES = (0.005, 0.01, 0.02, 0.05)  # learning rates to choose from, for networks
TREE_RATES = (0.05, 0.1)  # learning rates to choose from, for trees
LIMITS = (2.0, 3.0, 5.0, "none")  # largest weights to choose from, besides the default of a method
FIRST_TUNING_SEED = 1000  # seeds from here on choose settings; those from 0 on are tested
LAG = 1.5  # a run that needs the bias model of another begins after the first runs of the next plan
LONGEST = 4  # times the given steps that a method may have if it still improves at its last step


@dataclass(frozen=True)
class Plan:
    """The plan of a comparison: the methods, the data, the number of seeds, and what is chosen for each method.

    The learning rate is chosen first, then dropout at this rate, then the largest weight at both, each by the mean
    selection metric of the best steps of runs with `tuning_seeds` other seeds than the tested ones. A method of which
    at least half of the tested runs still improve at their last step is trained anew with twice the steps, up to
    `longest` times the steps.
    """

    base: RunConfig
    entries: Sequence[Entry]
    out: Path
    seeds: int = 5
    rates: Sequence[float] = ()  # learning rates to choose from; empty: the defaults of the ranker
    dropouts: Sequence[float] = ()  # to choose from besides that of `base`
    limits: Sequence[float | str] = ()  # largest weights to choose from besides the default of a method
    tuning_seeds: int = 3
    longest: int = 1
    metrics: Sequence[str] = ("ndcg@10", "reward@10")
    reference: str = ""  # empty: the first entry
    shared: Path | None = None  # folder of the bias models and judges that runs share; None: in `out`

    def __post_init__(self) -> None:
        names = [entry.text for entry in self.entries]
        if self.reference and self.reference not in names:
            hint = nearest(self.reference, names)
            raise OptionError(f"the reference '{self.reference}' is not among the methods", hint=hint)
        if self.seeds < 1 or self.tuning_seeds < 1:
            got = f"{self.seeds} and {self.tuning_seeds}"
            raise OptionError("'seeds' and 'tuning_seeds' must be at least 1", got=got)

    @property
    def tuning(self) -> range:
        """The seeds that choose settings."""
        return range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + self.tuning_seeds)

    def rates_for(self, entry: Entry) -> Sequence[float]:
        return self.rates or (TREE_RATES if is_trees(entry.ranker or self.base.ranker) else DEFAULT_RATES)

    def choices(self, entry: Entry) -> list[tuple[str, list[Any]]]:
        """Return what is chosen for a method, in this order: (name, values); the default, None, comes first."""
        dropouts = [None, *(value for value in self.dropouts if value != self.base.ranker_options.get("dropout"))]
        values: dict[str, list[Any]] = {
            "lr": list(self.rates_for(entry)),
            "dropout": dropouts,
            "max_weight": [None, *self.limits],
        }
        return [(name, values[name]) for name in entry.tuned(self.base) if len(values[name]) > 1]

    def candidates(self, entry: Entry, number: int) -> list[Setting]:
        """Return the settings of which the choice with this number, counted from 0, takes the best."""
        name, values = self.choices(entry)[number]
        before = self.setting_after(entry, number)
        return [replace(before, **{name: value}) for value in values]

    def setting_after(self, entry: Entry, number: int) -> Setting:
        """Return the setting after this number of choices, whose runs must be finished."""
        if not number:
            return Setting(self.rates_for(entry)[0])

        def mean_metric(setting: Setting) -> float:
            folders = [run_folder(self.out, entry, setting, seed) for seed in self.tuning]
            if any(map(has_diverged, folders)):
                return math.inf if best is min else -math.inf
            return float(np.mean([line[select] for select, line in map(best_evaluation, folders)]))

        best = min if less_is_better(self.base.selection) else max
        return best(self.candidates(entry, number - 1), key=mean_metric)

    def setting(self, entry: Entry) -> Setting:
        """Return the setting of a method's tested runs, whose tuning must be finished."""
        setting = self.setting_after(entry, len(self.choices(entry)))
        while 2 * setting.longer <= self.longest and self._still_improves(entry, setting):
            setting = replace(setting, longer=2 * setting.longer)
        return setting

    def _still_improves(self, entry: Entry, setting: Setting) -> bool:
        """Return whether the tested runs with a setting are finished, and half of them still improved at the end."""
        if not all(task.finished for task in self._tests(entry, setting)):
            return False
        return 2 * self._steps(entry, setting).at_bound >= self.seeds

    def _steps(self, entry: Entry, setting: Setting) -> Steps:
        training = self._config(entry, setting, 0).training
        folders = [run_folder(self.out, entry, setting, seed) for seed in range(self.seeds)]
        best = [int(best_evaluation(folder)[1]["step"]) for folder in folders]
        last = [int(read_metrics(folder)[-1]["step"]) for folder in folders]
        waits = (training.patience or 0) * training.evaluate_every
        stops_at = training.steps - waits  # a best step until here ends a run
        at_bound = sum(step > stops_at or step >= training.steps for step in best)
        return Steps(float(np.median(best)), float(np.median(last)), training.steps, at_bound)

    def _sessions(self, entry: Entry, steps: Steps) -> int:
        """Return the number of sessions that a run learned from; new feedback at each step counts each time."""
        if self.base.users is None or self.base.sessions:
            return self.base.sessions
        training = self.base.training
        staged = not is_trees(entry.ranker or self.base.ranker) and METHODS[entry.method].has_bias_stage(entry.options)
        return round((steps.last + (2 * training.bias_steps if staged else 0)) * training.batch)

    @property
    def turns(self) -> list[tuple[int, Entry]]:
        """The entries, and which of the entries of its method each is; the first of every method come first.

        Those of one method are apart, because they may wait for each other's bias model.
        """
        seen: Counter[str] = Counter()
        numbered = []
        for entry in self.entries:
            seen[entry.method] += 1
            numbered.append((seen[entry.method], entry))
        return sorted(numbered, key=itemgetter(0))

    def shared_tasks(self) -> list[SharedTask | LoggedTask]:
        """Return the tasks that make what runs share, for seeds that no run has used; on a log, the test judge."""
        if self.base.users is None:
            first = replace(with_training(self.base, seed=0), ranker=self.entries[0].ranker or self.base.ranker)
            return [LoggedTask(first.to_json(), str(self.out / LOGGED), self._shared, tuple(self.metrics))]
        seeds = [*self.tuning, *range(self.seeds)] if any(map(self.choices, self.entries)) else [*range(self.seeds)]
        new = [s for s in seeds if not any((self.out / "runs").glob(f"*/*/seed-{s}/model"))]
        return [SharedTask(with_training(self.base, seed=s).to_json(), self._shared) for s in new]

    @property
    def _shared(self) -> str:
        return str(self.shared or self.out / "bias")

    def tuning_tasks(self, entry: Entry, number: int) -> list[RunTask]:
        """Return the tasks that train a method with each candidate of a choice."""
        settings = self.candidates(entry, number)
        return [self._task(entry, setting, seed, ()) for setting in settings for seed in self.tuning]

    def final_tasks(self, entry: Entry) -> list[RunTask]:
        """Return the tasks that train a method with its setting and all seeds, and test it."""
        return self._tests(entry, self.setting(entry))

    def _tests(self, entry: Entry, setting: Setting) -> list[RunTask]:
        return [self._task(entry, setting, seed, self.metrics) for seed in range(self.seeds)]

    def _config(self, entry: Entry, setting: Setting, seed: int) -> RunConfig:
        config = entry.config(self.base, setting, seed)
        return with_training(config, steps=setting.longer * entry.steps(self.base))

    def _task(self, entry: Entry, setting: Setting, seed: int, metrics: Sequence[str]) -> RunTask:
        folder = run_folder(self.out, entry, setting, seed)
        return RunTask(self._config(entry, setting, seed).to_json(), str(folder), self._shared, tuple(metrics))

    def stages(self) -> list[tuple[int, Stage]]:
        """Return for each of `turns` the stage that begins its tuning, or its test; a stage makes the one after it."""
        return [(turn, self._stage(entry, 0)) for turn, entry in self.turns]

    def _stage(self, entry: Entry, number: int) -> Stage:
        if number < len(self.choices(entry)):
            return Stage(grouped(self.tuning_tasks(entry, number), self.seeds), lambda: self._stage(entry, number + 1))
        setting = self.setting(entry)

        def extended() -> Stage | None:
            return self._stage(entry, number) if self.setting(entry) != setting else None

        return Stage(grouped(self._tests(entry, setting)), extended)

    @property
    def runs(self) -> int:
        """The number of runs without extensions; one that is part of several choices counts for each."""
        choices = sum(len(values) for entry in self.entries for _, values in self.choices(entry))
        return choices * self.tuning_seeds + len(self.entries) * self.seeds

    def result(self) -> Comparison:
        """Read the test metrics of the finished runs, and return them with paired tests."""
        reference = self.reference or self.entries[0].text
        logged, weights = read_logged(self.out)
        rows = [replace(self._row(entry), weights=weights) for entry in self.entries]
        for i, tests in enumerate(against_logged([row.by_request for row in rows], logged, weights)):
            rows[i] = replace(rows[i], against_logged=tests)
        means = {m: mean_with_interval(logged[m], weights) for m in self.metrics if m in logged}
        rows = with_tests(rows, reference) if self.seeds > 1 else rows
        return Comparison(rows, list(self.metrics), reference, means)

    def _row(self, entry: Entry) -> Row:
        setting = self.setting(entry)
        folders = [run_folder(self.out, entry, setting, seed) for seed in range(self.seeds)]
        by_seed, by_request = [read_json(folder / TEST) for folder in folders], [*map(read_requests, folders)]
        known = [metric for metric in self.metrics if all(metric in values for values in by_request)]
        steps = self._steps(entry, setting)
        return Row(
            entry.text,
            setting,
            {metric: [results[metric] for results in by_seed] for metric in self.metrics},
            by_request={metric: np.mean([values[metric] for values in by_request], axis=0) for metric in known},
            steps=steps,
            sessions=self._sessions(entry, steps),
        )


def compare(
    base: RunConfig,
    methods: Sequence[str],
    out: Path,
    *,
    seeds: int = 5,
    rates: Sequence[float] = (),
    dropouts: Sequence[float] = (),
    limits: Sequence[float | str] = LIMITS,
    tuning_seeds: int = 3,
    longest: int = 1,
    metrics: Sequence[str] | None = None,
    reference: str | None = None,
    jobs: int = 0,
    on_done: OnDone = lambda *_: None,
    on_warning: Callable[[Pitfall], None] = lambda _: None,
) -> Comparison:
    """Compare methods as `Plan` says, and write the results to comparison.json in the folder `out`.

    `rates` are the learning rates to choose from; if empty, `DEFAULT_RATES`, or `TREE_RATES` for trees. `on_warning` is
    called with each problem of a log, before any run starts.
    """
    base = replace(base, select=base.selection)  # one selection metric for all methods, also upper bounds
    metrics = list(metrics or ([base.select] if base.users is None else ["ndcg@10", "reward@10"]))
    if base.users is None:
        base = replace(base, judged=TEST_SHARE)
    plan = Plan(
        base,
        [Entry.parse(text, base.ranker) for text in methods],
        out,
        seeds=seeds,
        rates=rates,
        dropouts=dropouts,
        limits=limits,
        tuning_seeds=tuning_seeds,
        longest=longest,
        metrics=metrics,
        reference=reference or "",
    )
    if base.users is None and not (out / "comparison.json").is_file():
        configs = [entry.config(base, Setting(plan.rates_for(entry)[0]), 0) for entry in plan.entries]
        for pitfall in traps_of_log(configs):
            on_warning(pitfall)
    existed = out.exists()
    try:
        with Workers(jobs or default_jobs()) as workers:
            (result,) = compare_all([plan], workers, on_done)
    except UltrError:
        with suppress(OSError):  # a folder that is not empty stays
            if not existed:
                out.rmdir()
        raise
    write_json(out / "comparison.json", result.to_json())
    return result


def compare_all(plans: Sequence[Plan], workers: Workers, on_done: OnDone = lambda *_: None) -> list[Comparison]:
    """Make several comparisons: train the runs that choose settings, then those that are evaluated."""
    for plan in plans:
        with output_errors(plan.out):
            plan.out.mkdir(parents=True, exist_ok=True)
    shared = [task for plan in plans for task in plan.shared_tasks()]
    if len(shared) > 1 or any(isinstance(task, LoggedTask) for task in shared):
        with suppress(UnfinishedError):  # the next call raises it, with the number of runs
            workers.run(shared, lambda *_: None)
    stages = sorted(
        [(i + LAG * (turn > 1), stage) for i, plan in enumerate(plans) for turn, stage in plan.stages()],
        key=itemgetter(0),
    )
    workers.run_stages([stage for _, stage in stages], sum(plan.runs for plan in plans), on_done)
    return [plan.result() for plan in plans]
