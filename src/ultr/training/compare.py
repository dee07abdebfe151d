"""Compare methods: tune the learning rate of each on validation requests, train with several seeds, evaluate on test.

Every training run has its own directory under `runs/`. Finished runs are not repeated, so a comparison can be stopped,
resumed with the same call, and extended by more methods or seeds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ultr.datasets import initial_ranker
from ultr.datasets.users import make_user
from ultr.errors import OptionError, UltrError, nearest
from ultr.evaluation.judge import load_judge
from ultr.evaluation.scores import PairedTest, paired_test
from ultr.methods import parse_options
from ultr.rankers import RANKERS
from ultr.rankers.boosters import BOOSTERS, is_trees
from ultr.rankers.model import load_model
from ultr.training.config import RunConfig, default_training, with_training
from ultr.training.data import cached_dataset, load_run_data
from ultr.training.run import best_evaluation, run_together, run_training
from ultr.training.selection import less_is_better, mean_metrics
from ultr.training.workers import OnDone, Stage, Workers, default_jobs
from ultr.utils.devices import choose_device
from ultr.utils.files import output_errors
from ultr.utils.jsonfiles import read_json, write_json

FORMAT = 1
MOST_TOGETHER = 10  # runs that are trained together on a GPU
TEST_SHARE = 0.2  # share of a log's requests that are held out for the final test
DEFAULT_RATES = (0.005, 0.01, 0.02, 0.05)  # learning rates to choose from, for networks
TREE_RATES = (0.05, 0.1)  # learning rates to choose from, for trees


@dataclass(frozen=True)
class Entry:
    """A row of a comparison: a method and its options, separated by colons, such as `pairwise-em:loss=opt`."""

    text: str
    method: str
    learn_from: str
    options: Mapping[str, Any]
    ranker: str = ""  # empty: the ranker of the comparison

    @staticmethod
    def parse(text: str, ranker: str = "mlp") -> Entry:
        """Parse the text of a row, such as `lambdarank:ranker=lightgbm`; `ranker` is used if the text names none."""
        name, _, rest = text.strip().partition(":")
        parts = [part for part in rest.split(":") if part]
        method_options = [part for part in parts if not part.startswith(("from=", "ranker="))]
        learn_from = [part.removeprefix("from=") for part in parts if part.startswith("from=")]
        rankers = [part.removeprefix("ranker=") for part in parts if part.startswith("ranker=")]
        names = [*RANKERS, *BOOSTERS]
        if rankers and rankers[-1] not in names:
            raise OptionError(f"no ranker '{rankers[-1]}'", hint=nearest(rankers[-1], names))
        row_ranker = rankers[-1] if rankers else ""
        options = parse_options(name, method_options, others=["from", "ranker"], ranker=row_ranker or ranker)
        return Entry(text.strip(), name, learn_from[-1] if learn_from else "feedback", options, row_ranker)

    def config(self, base: RunConfig, lr: float, seed: int) -> RunConfig:
        ranker = {} if self.ranker in ("", base.ranker) else {"ranker": self.ranker, "ranker_options": {}}
        options = {"method": self.method, "method_options": self.options, "learn_from": self.learn_from, **ranker}
        config = replace(base, **options)  # type: ignore[arg-type]
        if is_trees(config.ranker) != is_trees(base.ranker):  # trees have fewer, longer steps (rounds)
            default = default_training(config.ranker)
            budget = {name: getattr(default, name) for name in ("steps", "evaluate_every", "patience")}
            config = with_training(config, **budget)
        return with_training(config, lr=lr, seed=seed)


@dataclass(frozen=True)
class Row:
    """The results of one method: its learning rate, its metrics by seed, and tests against the reference method."""

    entry: str
    lr: float
    results: dict[str, list[float]]  # metric -> one value per seed
    against: dict[str, PairedTest]  # metric -> paired test over seeds; empty for the reference method

    def tested(self, other: Row) -> dict[str, PairedTest]:
        """Return metric -> paired test of this method against the method of another row, over the seeds."""
        return {m: paired_test(np.array(v), np.array(other.results[m])) for m, v in self.results.items()}

    def to_json(self) -> dict[str, Any]:
        summary = {
            metric: {
                "mean": float(np.mean(values)),
                "deviation": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
                "seeds": values,
                "against": vars(self.against[metric]) if metric in self.against else None,
            }
            for metric, values in self.results.items()
        }
        return {"method": self.entry, "lr": self.lr, "figures": summary}


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison, one row per method; `reference` is the method that the others are tested against."""

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


@dataclass(frozen=True)
class RunTask:
    """The task to train one run and evaluate it on test requests; metrics that were computed before are kept."""

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
            return (Path(self.folder) / "model").is_dir()
        path = Path(self.folder) / "test.json"
        return path.is_file() and set(self.metrics) <= set(read_json(path))

    def perform(self) -> str:
        folder, config = Path(self.folder), RunConfig.from_json(self.config)
        run_training(config, folder, resume=True, shared=Path(self.shared))
        results = read_json(folder / "test.json") if (folder / "test.json").is_file() else {}
        if missing := [metric for metric in self.metrics if metric not in results]:
            write_json(folder / "test.json", {**results, **evaluate_run(config, folder, missing)})
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
        run_together(configs, [Path(task.folder) for task in self.tasks], Path(self.tasks[0].shared), later)
        return [task.perform() for task in self.tasks][-1]  # evaluates them


@dataclass(frozen=True)
class InitialTask:
    """The task to fit the ranker that orders what simulated users see, so that no two runs fit it at the same time."""

    data: str
    data_dir: str | None
    share: float
    seed: int
    runs: ClassVar[int] = 0
    finished: ClassVar[bool] = False

    def perform(self) -> str:
        initial_ranker(cached_dataset(self.data, self.data_dir), share=self.share, seed=self.seed)
        return f"initial ranker {self.seed} of {self.data}"


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


@dataclass(frozen=True)
class Plan:
    """The plan of a comparison: the methods, the data, the number of seeds, and the choice of learning rates."""

    base: RunConfig
    entries: Sequence[Entry]
    out: Path
    seeds: int = 5
    rates: Sequence[float] = ()  # learning rates to choose from on validation; empty: the defaults of the ranker
    rate_of: Mapping[str, float] = field(default_factory=dict)  # entry -> learning rate that is given, not tuned
    tuning_seeds: int = 1
    metrics: Sequence[str] = ("ndcg@10", "reward@10")
    reference: str = ""  # empty: the first entry

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
        return range(min(self.tuning_seeds, self.seeds))

    def rates_for(self, entry: Entry) -> Sequence[float]:
        return self.rates or (TREE_RATES if is_trees(entry.ranker or self.base.ranker) else DEFAULT_RATES)

    @property
    def in_turn(self) -> list[Entry]:
        """The entries such that those of one method are apart, because they may wait for each other's bias model."""
        seen: Counter[str] = Counter()
        numbered = []
        for entry in self.entries:
            seen[entry.method] += 1
            numbered.append((seen[entry.method], entry))
        return [entry for _, entry in sorted(numbered, key=lambda pair: pair[0])]

    def initial_tasks(self) -> list[InitialTask]:
        """Return the tasks that fit the initial rankers of the seeds that no run has used yet."""
        seeds = [s for s in range(self.seeds) if not any((self.out / "runs").glob(f"*/*/seed-{s}/model"))]
        base = self.base
        return [] if base.users is None else [InitialTask(base.data, base.data_dir, base.share, s) for s in seeds]

    def tuning_tasks(self, entry: Entry) -> list[RunTask]:
        """Return the tasks that train a method with each learning rate to choose from."""
        rates = () if entry.text in self.rate_of else self.rates_for(entry)
        return [self._task(entry, lr, seed, ()) for lr in rates if len(rates) > 1 for seed in self.tuning]

    def final_tasks(self, entry: Entry) -> list[RunTask]:
        """Return the tasks that train a method at its chosen learning rate with all seeds, and test it."""
        lr = self.rate_chosen(entry)
        return [self._task(entry, lr, seed, self.metrics) for seed in range(self.seeds)]

    def _task(self, entry: Entry, lr: float, seed: int, metrics: Sequence[str]) -> RunTask:
        folder = run_folder(self.out, entry, lr, seed)
        return RunTask(entry.config(self.base, lr, seed).to_json(), str(folder), str(self.out / "bias"), tuple(metrics))

    def rate_chosen(self, entry: Entry) -> float:
        """Return the given learning rate of a method, or the one with the best mean metric over tuning seeds."""

        def mean_metric(lr: float) -> float:
            best = [best_evaluation(run_folder(self.out, entry, lr, seed)) for seed in self.tuning]
            return float(np.mean([line[select] for select, line in best]))

        rates = (self.rate_of[entry.text],) if entry.text in self.rate_of else self.rates_for(entry)
        if len(rates) == 1:
            return rates[0]
        return min(rates, key=mean_metric) if less_is_better(self.base.selection) else max(rates, key=mean_metric)

    def stages(self) -> list[Stage]:
        """Return for each method the tasks that choose its learning rate, which those that test it follow."""

        def stage(entry: Entry) -> Stage:
            return Stage(grouped(self.tuning_tasks(entry), self.seeds), lambda: grouped(self.final_tasks(entry)))

        return [stage(entry) for entry in self.in_turn]

    @property
    def runs(self) -> int:
        """The number of all runs; a run that chooses the learning rate and is tested counts twice."""
        return sum(len(self.tuning_tasks(entry)) + self.seeds for entry in self.entries)

    def result(self) -> Comparison:
        """Read the test metrics of the finished runs, and return them with paired tests."""
        rows = []
        for e in self.entries:
            lr = self.rate_chosen(e)
            by_seed = [read_json(run_folder(self.out, e, lr, seed) / "test.json") for seed in range(self.seeds)]
            rows.append(Row(e.text, lr, {m: [results[m] for results in by_seed] for m in self.metrics}, {}))
        reference = self.reference or self.entries[0].text
        if self.seeds > 1:
            other = next(row for row in rows if row.entry == reference)
            rows = [row if row is other else replace(row, against=row.tested(other)) for row in rows]
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
    on_done: OnDone = lambda *_: None,
) -> Comparison:
    """Compare methods, and write the results to comparison.json in the folder `out`.

    `rates` are the learning rates to choose from; if empty, `DEFAULT_RATES`, or `TREE_RATES` for trees.
    """
    base = replace(base, select=base.selection)  # one selection metric for all methods, also upper bounds
    metrics = list(metrics or ([base.select] if base.users is None else ["ndcg@10", "reward@10"]))
    if base.users is None:
        base = replace(base, judged=TEST_SHARE)
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
        with suppress(OSError):  # a folder that is not empty stays
            if not existed:
                out.rmdir()
        raise
    write_json(out / "comparison.json", result.to_json())
    return result


def compare_all(plans: Sequence[Plan], workers: Workers, on_done: OnDone = lambda *_: None) -> list[Comparison]:
    """Make several comparisons: train the runs that choose learning rates, then those that are evaluated."""
    for plan in plans:
        with output_errors(plan.out):
            plan.out.mkdir(parents=True, exist_ok=True)
    initial = list(dict.fromkeys(task for plan in plans for task in plan.initial_tasks()))
    if len(initial) > 1:
        workers.run(initial, lambda *_: None)
    stages = [stage for plan in plans for stage in plan.stages()]
    workers.run_stages(stages, sum(plan.runs for plan in plans), on_done)
    return [plan.result() for plan in plans]


def run_folder(out: Path, entry: Entry, lr: float, seed: int) -> Path:
    safe = "".join(c if c.isalnum() or c in "-=." else "_" for c in entry.text)
    return out / "runs" / safe / f"lr-{lr:g}" / f"seed-{seed}"


def evaluate_run(config: RunConfig, folder: Path, metrics: list[str]) -> dict[str, float]:
    """Return the metrics of a run on the test requests of its data set, or on the held-out test requests of its log."""
    model = load_model(folder)
    segments: tuple[str, ...] = ()
    if config.users is None:
        run_data = load_run_data(config)
        log, user, segments = run_data.test, None, run_data.segments
        if log is None:
            what, hint = "the run did not hold out test requests of its log", "pass another --out to train it again"
            raise OptionError(what, where=folder, hint=hint)
    else:
        dataset = cached_dataset(config.data, config.data_dir)
        log = dataset.test
        user = make_user(config.users, **{**config.user_options, "max_grade": dataset.max_grade})
    scores = model.score(log, device=config.training.device)
    judge = load_judge(folder / "judge")
    device = choose_device(config.training.device)
    options: dict[str, Any] = {"user": user, "label": config.label, "judge": judge, "segments": segments}
    return mean_metrics(log, scores, metrics, device=device, **options)
