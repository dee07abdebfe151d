"""Compare methods: tune each on validation requests, train it with several seeds, and evaluate it on test requests.

Every training run has its own directory under `runs/`. Finished runs are not repeated, so a comparison can be stopped,
resumed with the same call, and extended by more methods or seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ultr.checks.pitfalls import Pitfall
from ultr.errors import OptionError, UltrError, UnfinishedError, nearest
from ultr.evaluation.scores import judging_metric, less_is_better, mean_with_interval
from ultr.log.labels import DEFAULT_LABEL
from ultr.methods import METHODS, Method, parse_options, thresholds
from ultr.rankers.networks import HIDDEN
from ultr.training.checking import check, check_pairs
from ultr.training.comparing.results import Comparison, Row, Setting, Steps, with_logged_tests, with_tests
from ultr.training.comparing.tasks import (
    OnDone,
    RunsTask,
    RunTask,
    SharedTask,
    Workers,
    default_jobs,
    evaluate,
    grouped,
    has_diverged,
    read_means,
    read_requests,
)
from ultr.training.config import AUTO, Config, MethodOptions, is_trees, make_config
from ultr.training.data import decide, load_run_data
from ultr.training.examining import best_evaluation
from ultr.training.fitting import CLICKS_ONLY, notes_of
from ultr.training.folder import MODEL, read_metrics
from ultr.utils.files import output_errors
from ultr.utils.jsonfiles import write_json

TEST_SHARE = 0.2  # share of a log's requests that are held out for the final test
SESSIONS = 30_000  # simulated sessions of the log that all methods of a run learn from
PATIENCE = 10  # evaluations of a network without improvement after which a run of a comparison stops
DEFAULT_RATES = (0.005, 0.01, 0.02, 0.05)  # learning rates to choose from, for networks
TREE_RATES = (0.05, 0.1)  # learning rates to choose from, for trees
LIMITS = (2.0, 3.0, 5.0, "none")  # largest weights to choose from, besides the default of a method
FIRST_TUNING_SEED = 1000  # seeds from here on choose settings; those from 0 on are tested
LAG = 1.5  # a run that needs the bias model of another begins after the first runs of the next plan
LONGEST = 4  # times the given steps that a method may have if it still improves at its last step
COMPARISON = "comparison.json"  # file with the results
LOGGED = "logged"  # folder of a comparison with the metrics of the logged ranking


@dataclass(frozen=True)
class Entry:
    """A row of a comparison: a method and its options, separated by colons, such as `pairwise-em:loss=opt`.

    `from=truth` and `from=no-bias` are upper bounds. `ranker=lightgbm` names the ranker; `ranker=auto` trains what
    `ultr train` trains by default, with the options of the comparison as they are: nothing is tuned.
    """

    text: str
    method: str
    learn_from: str
    options: Mapping[str, Any]
    kinds: tuple[str, ...]  # of rankers; empty: the data decide

    @staticmethod
    def parse(text: str, kinds: Sequence[str] = ("mlp",)) -> Entry:
        """Parse the text of a row; `kinds` are the rankers of the comparison, which are used if the text names none."""
        name, _, rest = text.strip().partition(":")
        named = {"from": "feedback", "ranker": "+".join(kinds) or AUTO}
        options: dict[str, str] = {}
        for part in filter(None, rest.split(":")):
            key, equals, value = part.partition("=")
            if not equals:
                raise OptionError("an option of a method must have the form key=value", got=f"'{part}'")
            (named if key in named else options)[key] = value
        chosen = make_config(ranker=named["ranker"].replace("+", ",")).kinds
        parsed = parse_options(name, options, others=[*named], ranker=(chosen or ("mlp",))[0])
        return Entry(text.strip(), name, named["from"], parsed, chosen)

    @property
    def kind(self) -> str | None:
        """The kind of ranker; None if there are several."""
        return self.kinds[0] if len(self.kinds) == 1 else None

    @property
    def network(self) -> type[Method] | None:
        """The class of the method, if the ranker is one network."""
        return None if self.kind is None or is_trees(self.kind) else METHODS[self.method]

    @property
    def has_bias_stage(self) -> bool:
        """Whether steps of the network go to a bias model, before those of the ranker."""
        corrects = self.learn_from != "truth"
        return corrects and self.network is not None and self.network.has_bias_stage(self.options)

    def config(self, base: Config, setting: Setting, seed: int) -> Config:
        """Return the configuration of a run of this method with a setting.

        All networks have as many steps in total: a method without a bias stage also has the steps of the bias model.
        """
        method = MethodOptions(name=self.method, **self.options)
        options = {"ranker": self.kinds or AUTO, "learn_from": self.learn_from, "seed": seed, **setting.options}
        config = base.model_copy(update={"method": method}).with_options(**options)
        if self.kind is None:
            return config
        loop = config.loop(self.kind)
        options = {"steps": loop.steps}
        if self.network is not None:
            options["steps"] += 0 if self.has_bias_stage else loop.bias_steps
            defaults = {"patience": PATIENCE, "hidden": HIDDEN}
            options |= {name: value for name, value in defaults.items() if name not in base.network.model_fields_set}
        return config.with_options(**{**options, "steps": options["steps"] * setting.longer})

    def tuned(self) -> tuple[str, ...]:
        """Return the names of what can be chosen for this method: the learning rate, for networks also others."""
        if self.kind is None or self.network is None:
            return () if self.kind is None else ("lr",)
        names = ["lr"] + ["dropout"] * self.network.has_dropout(self.options)
        limits = self.learn_from != "truth" and self.network.limits_weights(self.options)
        return (*names, *(["max_weight"] if limits else []))


def run_folder(out: Path, entry: str, setting: Setting, seed: int) -> Path:
    """Return the folder of a run below the folder of its comparison; `entry` is the text of its row."""
    safe = "".join(c if c.isalnum() or c in "-=." else "_" for c in entry)
    return out / "runs" / safe / setting.name / f"seed-{seed}"


@dataclass(frozen=True)
class Plan:
    """The plan of a comparison: the methods, the data, the number of seeds, and what is chosen for each method.

    The learning rate is chosen first, then dropout at this rate, then the largest weight at both, each by the mean
    selection metric of the best steps of runs with `tuning_seeds` other seeds than the tested ones. A method of which
    at least half of the tested runs still improve at their last step is trained anew with twice the steps, up to
    `longest` times the steps.
    """

    base: Config
    entries: Sequence[Entry]
    out: Path
    seeds: int = 5
    rates: Sequence[float] = ()  # learning rates to choose from; empty: the defaults of the ranker
    dropouts: Sequence[float] = ()  # to choose from besides that of `base`
    limits: Sequence[float | str] = LIMITS  # largest weights to choose from besides the default of a method
    tuning_seeds: int = 3
    longest: int = 1
    metrics: Sequence[str] = ()  # on test requests; empty: on a log, as in a run, else ndcg@10 and reward@10
    reference: str = ""  # empty: the first entry
    shared: Path | None = None  # folder of the bias models and off-policy models that runs share; None: in `out`
    settings: Mapping[str, Setting] = field(default_factory=dict)  # of entries that are not to be tuned

    def __post_init__(self) -> None:
        if not self.metrics:
            default = (judging_metric(self.base.selection),) if self.base.users is None else ("ndcg@10", "reward@10")
            object.__setattr__(self, "metrics", default)
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

    def choices(self, entry: Entry) -> dict[str, list[Any]]:
        """Return what is chosen for a method, in this order: name -> values; the default, None, comes first."""
        dropouts = [None, *(value for value in self.dropouts if value != self.base.network.dropout)]
        values: dict[str, list[Any]] = {
            "lr": [*self.rates_for(entry)],
            "dropout": dropouts,
            "max_weight": [None, *self.limits],
        }
        return {name: values[name] for name in entry.tuned() if len(values[name]) > 1}

    def rates_for(self, entry: Entry) -> Sequence[float]:
        return self.rates or (DEFAULT_RATES if entry.network else TREE_RATES)

    def stages(self, entry: Entry) -> Generator[Sequence[RunTask | RunsTask], None, Setting]:
        """Yield the tasks of a method, stage by stage, each of which needs the results of the one before.

        They are the runs for each choice, then the tested runs, then those with more steps. Return the setting.
        """
        known = self.settings.get(entry.text)
        setting = known or Setting(self.rates_for(entry)[0] if entry.tuned() else None)
        for name, values in () if known else self.choices(entry).items():
            candidates = [replace(setting, **{name: value}) for value in values]
            yield grouped(
                [self._task(entry, each, seed, ()) for each in candidates for seed in self.tuning], self.seeds
            )
            setting = self._best(entry, candidates)
        yield grouped(self._tests(entry, setting))
        while 2 * setting.longer <= self.longest and self._still_improves(entry, setting):
            setting = replace(setting, longer=2 * setting.longer)
            yield grouped(self._tests(entry, setting))
        return setting

    def setting(self, entry: Entry) -> Setting:
        """Return the setting of a method's tested runs, all of which must be finished."""
        stages = self.stages(entry)
        while True:
            try:
                next(stages)
            except StopIteration as end:
                return Setting() if end.value is None else end.value

    def _best(self, entry: Entry, candidates: Sequence[Setting]) -> Setting:
        """Return the candidate with the best mean selection metric of its runs, which must be finished."""
        best = min if less_is_better(self.base.selection) else max

        def mean_metric(setting: Setting) -> float:
            folders = [run_folder(self.out, entry.text, setting, seed) for seed in self.tuning]
            if any(map(has_diverged, folders)):
                return math.inf if best is min else -math.inf
            return float(np.mean([line[select] for select, line in map(best_evaluation, folders)]))

        return best(candidates, key=mean_metric)

    def _still_improves(self, entry: Entry, setting: Setting) -> bool:
        """Return whether half of the tested runs with a setting still improved at the end."""
        steps = self._steps(entry, setting)
        return steps is not None and 2 * steps.at_bound >= self.seeds

    def _steps(self, entry: Entry, setting: Setting) -> Steps | None:
        """Return the steps of the tested runs with a setting; None if they have several rankers."""
        if entry.kind is None:
            return None
        loop = entry.config(self.base, setting, 0).loop(entry.kind)
        folders = self._tested_folders(entry, setting)
        best = [int(best_evaluation(folder)[1]["step"]) for folder in folders]
        last = [int(read_metrics(folder)[-1]["step"]) for folder in folders]
        stops_at = loop.steps - (loop.patience or 0) * loop.evaluate_every  # a best step until here ends a run
        at_bound = sum(step > stops_at or step >= loop.steps for step in best)
        return Steps(float(np.median(best)), float(np.median(last)), loop.steps, at_bound)

    def _sessions(self, entry: Entry, steps: Steps | None) -> int:
        """Return the number of simulated sessions that a run learned from; new feedback at each step counts again."""
        config = entry.config(self.base, Setting(), 0)
        if config.users is None or config.sessions_drawn or entry.kind is None or steps is None:
            return config.sessions_drawn
        loop = config.loop(entry.kind)
        return round((steps.last + 2 * loop.bias_steps * entry.has_bias_stage) * loop.batch)

    def courses(self) -> list[tuple[int, Generator[Sequence[RunTask | RunsTask], None, Setting], int]]:
        """Return, for each entry, the number of entries of its method before it, its stages, and its number of runs.

        The first entry of a method comes first.

        Entries of one method are apart, because they may wait for each other's bias model.
        """
        seen: Counter[str] = Counter()
        courses = []
        for entry in self.entries:
            courses.append((seen[entry.method], self.stages(entry), self.runs(entry)))
            seen[entry.method] += 1
        return sorted(courses, key=itemgetter(0))

    def shared_tasks(self) -> list[SharedTask]:
        """Return the tasks that make what runs with simulated users share, for seeds that no run has used."""
        tuning = self.tuning if any(map(self.choices, self.entries)) else ()
        seeds = [] if self.base.users is None else [*tuning, *range(self.seeds)]
        new = [seed for seed in seeds if not any((self.out / "runs").glob(f"*/*/seed-{seed}/{MODEL}"))]
        return [SharedTask(self.base.with_options(seed=seed), self._shared) for seed in new]

    def evaluate_logged(self) -> None:
        """Evaluate the logged ranking on the test requests of a log."""
        if self.base.users is None:
            config = self.entries[0].config(self.base, Setting(), 0)
            evaluate(config, self.out / LOGGED, self.metrics, self._shared, run=None)

    @property
    def _shared(self) -> Path:
        return self.shared or self.out / "bias"

    def _tests(self, entry: Entry, setting: Setting) -> list[RunTask]:
        return [self._task(entry, setting, seed, self.metrics) for seed in range(self.seeds)]

    def _tested_folders(self, entry: Entry, setting: Setting) -> list[Path]:
        return [run_folder(self.out, entry.text, setting, seed) for seed in range(self.seeds)]

    def _task(self, entry: Entry, setting: Setting, seed: int, metrics: Sequence[str]) -> RunTask:
        folder = run_folder(self.out, entry.text, setting, seed)
        return RunTask(entry.config(self.base, setting, seed), folder, self._shared, tuple(metrics))

    def runs(self, entry: Entry) -> int:
        """Return the number of runs of a method without those with more steps.

        A run that is part of several choices counts for each.
        """
        choices = {} if entry.text in self.settings else self.choices(entry)
        return sum(map(len, choices.values())) * self.tuning_seeds + self.seeds

    def result(self) -> Comparison:
        """Read the test metrics of the finished runs, and return them with paired tests."""
        reference = self.reference or self.entries[0].text
        logged, weights = read_requests(self.out / LOGGED)
        rows = with_logged_tests([self._row(entry) for entry in self.entries], logged)
        means = {m: mean_with_interval(logged[m], weights) for m in self.metrics if m in logged}
        rows = with_tests(rows, reference) if self.seeds > 1 else rows
        return Comparison(rows, list(self.metrics), reference, means)

    def _row(self, entry: Entry) -> Row:
        setting = self.setting(entry)
        folders = self._tested_folders(entry, setting)
        means = [read_means(folder) for folder in folders]
        by_request, weights = zip(*map(read_requests, folders), strict=True)
        known = [metric for metric in self.metrics if all(metric in values for values in by_request)]
        steps = self._steps(entry, setting)
        return Row(
            entry.text,
            setting,
            {metric: [of_run[metric] for of_run in means] for metric in self.metrics},
            by_request={metric: np.mean([values[metric] for values in by_request], axis=0) for metric in known},
            steps=steps,
            sessions=self._sessions(entry, steps),
            weights=weights[0],
        )


def compare(
    base: Config,
    methods: Sequence[str],
    out: Path,
    *,
    jobs: int = 0,
    on_done: OnDone = lambda *_: None,
    on_note: Callable[[str], None] = lambda _: None,
    on_warning: Callable[[Pitfall], None] = lambda _: None,
    **options: Any,
) -> Comparison:
    """Compare methods, and write the results to comparison.json in the folder `out`.

    `options` are those of `Plan`, such as `seeds`. Options that are not set in `base` have the defaults of a
    comparison: the ranker is a network, and simulated users give `SESSIONS` sessions once. Before any run starts,
    `on_note` gets sentences about the data and the methods, and `on_warning` each problem of a log.
    """
    base = _with_defaults(base)
    plan = Plan(base, [Entry.parse(text, base.kinds) for text in methods], out, **options)
    if not (out / COMPARISON).is_file():
        _check(plan, on_note, on_warning)
    existed = out.exists()
    try:
        with Workers(jobs or default_jobs()) as workers:
            (result,) = compare_all([plan], workers, on_done)
    except UltrError:
        with suppress(OSError):  # a folder that is not empty stays
            if not existed:
                out.rmdir()
        raise
    write_json(out / COMPARISON, result.to_json())
    return result


def _check(plan: Plan, on_note: Callable[[str], None], on_warning: Callable[[Pitfall], None]) -> None:
    """Look for problems of a log; raise DataError if a method cannot learn from it."""
    label, entries = plan.base.label or DEFAULT_LABEL, plan.entries
    if plan.base.users is None:
        config = entries[0].config(plan.base, Setting(), 0)
        data = load_run_data(config)
        label = data.label
        for each in (entry.config(plan.base, Setting(), 0) for entry in entries):
            for kind in decide(each, data).rankers:
                check_pairs(each, kind, data.train)
        for note in notes_of(config, data, decide(config, data)):
            on_note(note)
        for pitfall in check(config, data):
            on_warning(pitfall)
    on_clicks = [e.text for e in entries if thresholds(e.method, label, e.options, ranker=e.kind or "mlp")]
    if on_clicks:
        on_note(f"{', '.join(on_clicks)}: {CLICKS_ONLY.format(label)}")


def _with_defaults(base: Config) -> Config:
    """Return a configuration with the defaults of a comparison, and one selection metric, also for upper bounds."""
    options: dict[str, Any] = {"select": base.selection}
    if "rankers" not in base.model_fields_set:
        options["ranker"] = "mlp"
    if base.users is not None and "sessions" not in base.simulation.model_fields_set:
        options["sessions"] = SESSIONS
    if base.users is None and "test" not in base.data.model_fields_set:
        options["test"] = TEST_SHARE
    return base.with_options(**options)


def compare_all(plans: Sequence[Plan], workers: Workers, on_done: OnDone = lambda *_: None) -> list[Comparison]:
    """Make several comparisons: train the runs that choose settings, then those that are evaluated."""
    for plan in plans:
        with output_errors(plan.out):
            plan.out.mkdir(parents=True, exist_ok=True)
        plan.evaluate_logged()
    shared = [task for plan in plans for task in plan.shared_tasks()]
    if len(shared) > 1:
        with suppress(UnfinishedError):  # the next call raises it, with the number of runs
            workers.run(shared, lambda *_: None)
    courses = [
        (i + LAG * (number > 0), stages, runs)
        for i, plan in enumerate(plans)
        for number, stages, runs in plan.courses()
    ]
    ordered = [(stages, runs) for _, stages, runs in sorted(courses, key=itemgetter(0))]
    workers.run_stages(ordered, on_done)
    return [plan.result() for plan in plans]
