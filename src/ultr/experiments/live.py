"""A simulated live test (A/B test): each ranker serves a random part of the traffic, and learns from it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from ultr.datasets import Dataset, initial_ranker, show
from ultr.datasets.users import User, simulate_log
from ultr.errors import DataError, OptionError, OutputError, UnfinishedError, nearest
from ultr.evaluation.scores import mean_with_interval
from ultr.experiments.lab import DIRECTION, HELD, NOT, REVERSED, TITLES, Claim, ExperimentResult, Lab
from ultr.experiments.paper import DEFAULT, LIVE_LIFT, OPT
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.shards import concatenate_logs
from ultr.rankers.model import load_model
from ultr.report.page import Section, Table
from ultr.report.plots import line_plot
from ultr.training.comparing.plan import Entry
from ultr.training.comparing.results import Setting
from ultr.training.comparing.tasks import OnDone, Workers
from ultr.training.config import Config, flat, make_config
from ultr.training.data import Data, cached_dataset
from ultr.training.loop import Listeners
from ultr.training.run import make_plan, run_training
from ultr.utils.jsonfiles import read_json, write_json

# --- Lift -------------------------------------------------------------------------------------------------------------
# Lift: the relative difference between the means of two buckets (random parts of the traffic), with a test.

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Arm:
    """The mean of a metric over the sessions of a bucket, and the variance of this mean."""

    mean: float
    variance: float


@dataclass(frozen=True)
class Lift:
    """The relative difference of a bucket's mean from the control's, its 95% interval and two-sided p value."""

    lift: float
    low: float
    high: float
    p: float


def lift_of(treated: Arm, control: Arm) -> Lift:
    """Return the lift between independent buckets: the interval by the delta method, p by Welch's test.

    Buckets have so many sessions that the normal distribution can replace Student's t.
    """
    if not control.mean > 0:
        raise DataError(
            "the control bucket has no feedback", got=f"a mean of {control.mean:g}", hint="raise 'sessions'"
        )
    ratio = treated.mean / control.mean
    margin = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    margin *= math.sqrt(treated.variance + ratio**2 * control.variance) / control.mean
    error = math.sqrt(treated.variance + control.variance)
    difference = abs(treated.mean - control.mean)
    p = math.erfc(difference / error / math.sqrt(2)) if error else float(difference == 0)
    return Lift(ratio - 1, ratio - 1 - margin, ratio - 1 + margin, p)


def arm_of(days: Sequence[Mapping[str, Any]]) -> Arm:
    """Return the mean of a bucket over days, each day with the same weight, and the variance of this mean."""
    means, variances = zip(*((day["mean"], day["variance"] / day["sessions"]) for day in days), strict=True)
    return Arm(sum(means) / len(days), sum(variances) / len(days) ** 2)


def lifts_between(treated: list[dict[str, Any]], control: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the lift over all days but day 0, when all buckets have the same ranker, and the lift of each day."""

    def lift(of: slice) -> dict[str, float]:
        expected, base = (sum(day["expected"] for day in days[of]) for days in (treated, control))
        return {**asdict(lift_of(arm_of(treated[of]), arm_of(control[of]))), "expected": expected / base - 1}

    return {**lift(slice(1, None)), "by_day": [lift(slice(day, day + 1)) for day in range(len(control))]}


def over_runs(lifts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean lift over runs with its 95% interval (Student's t); one run has no interval."""
    means = {}
    for kind, key in (("sampled", "lift"), ("expected", "expected")):
        mean = mean_with_interval(np.array([lift[key] for lift in lifts]), confidence=CONFIDENCE)
        low, high = (end if math.isfinite(end) else None for end in (mean.low, mean.high))
        means[kind] = {"mean": mean.mean, "low": low, "high": high, "runs": mean.requests}
    return means


# --- Live test --------------------------------------------------------------------------------------------------------
# On day 0, the initial ranker of the data serves every bucket. After each day, the model of a bucket is trained on the
# bucket's log, starting from its weights of the previous day, and serves the next day. The first bucket is the control.
# The metric is the label, summed over the items of a session. The lift of a bucket is its relative gain over the
# control.
#
# out/run-0/options.json                  the options of the run
# out/run-0/pal-click/day-03/ranker/      the run directory of the model that serves on day 3
# out/run-0/pal-click/day-03/traffic.json the metric of the bucket on day 3
# out/live.json                           the results of all runs

LABEL = "click + dwell / exp(3) + 2 * like + 3 * share"
ENTRIES = ("pal-click", "pal-click", "pairwise-em", "pairwise-em:loss=opt", "pointwise", "lambdarank")
LEAST_SESSIONS = 30  # per bucket and day; the variance of fewer sessions is too uncertain
ONE_REQUEST = 1e-9  # so small a held-out share is one request, which every run needs; nothing is selected by it
TRAFFIC, FEEDBACK, TRAINING = range(3)  # codes for the purpose of random numbers, as parts of their seeds


BASE = make_config("synthetic", label=LABEL, ranker="mlp", hidden=(128, 64), dropout=0.1, steps=300, bias_steps=1000)


@dataclass(frozen=True)
class LiveOptions:
    """The options of a live test."""

    base: Config = BASE  # data set, label, network, steps per day, severity of position bias, seed and device
    days: int = 10  # after day 0
    sessions: int = 4000  # mean number per bucket and day
    entries: Sequence[str] = ENTRIES  # one per bucket, the control first; a repeated entry is an A/A test
    like: Sequence[float] = (0.01, 0.03, 0.06, 0.12, 0.2)  # probability after a click, by grade
    share: Sequence[float] = (0.005, 0.01, 0.02, 0.04, 0.08)
    rates: Mapping[str, float] = field(default_factory=dict)  # entry -> learning rate, where it is not that of `base`
    window: int = 0  # number of last days in the training data; 0: all days

    def __post_init__(self) -> None:
        for name, least in {"days": 1, "window": 0, "sessions": LEAST_SESSIONS}.items():
            if getattr(self, name) < least:
                raise OptionError(f"'{name}' must be at least {least}", got=getattr(self, name))
        if len(self.entries) < 2:
            raise OptionError("'entries' must have a control and at least one other entry", got=len(self.entries))
        for text in self.entries:
            if Entry.parse(text).learn_from == "no-bias":
                raise OptionError("live users have position bias", got=text, hint="pass from=feedback or from=truth")
        for text in self.rates:
            if text not in self.entries:
                raise OptionError(f"'rates' has an unknown entry '{text}'", hint=nearest(text, self.entries))
        for bucket in range(len(self.entries)):
            self.config(bucket, 1, self.base.seed)
        actions = self.user(1).actions
        for action in Label(self.label).actions:
            if action not in actions:
                raise OptionError(f"simulated users have no action '{action}'", hint=nearest(action, actions))

    @property
    def label(self) -> str:
        return self.base.label or LABEL

    @property
    def buckets(self) -> tuple[str, ...]:
        """The names of the buckets: their entries, with `(A/A)` after a repeated entry."""
        names: list[str] = []
        for i, text in enumerate(self.entries):
            before = list(self.entries[:i]).count(text)
            names.append(f"{text} (A/A)" if before == 1 else f"{text} (A/A {before})" if before else text)
        return tuple(names)

    def dataset(self) -> Dataset:
        return cached_dataset(self.base.data.source, self.base.data.folder)

    def user(self, max_grade: int) -> User:
        """Return the simulated user, for true labels from 0 to `max_grade`."""
        further = {"like": self.like, "share": self.share}
        return User(eta=self.base.simulation.eta, max_grade=max_grade, further=further)

    def config(self, bucket: int, day: int, seed: int) -> Config:
        """Return a bucket's configuration for a day; the last step is used, as no unbiased metric could select one."""
        text, steps = self.entries[bucket], self.base.network.steps
        setting = Setting(self.rates.get(text, self.base.network.lr))
        config = Entry.parse(text).config(self.base, setting, _seed(seed, day, TRAINING))
        return config.with_options(
            label=self.label, held_out=ONE_REQUEST, select="feedback-ndcg@10", steps=steps, evaluate_every=steps
        )

    def to_json(self) -> dict[str, Any]:
        """Return all options by name, or by path if they are those of a configuration."""
        own = {name: value for name, value in vars(self).items() if name != "base"}
        options: dict[str, Any] = json.loads(json.dumps({**own, **dict(flat(self.base.model_dump(mode="json")))}))
        return options


@dataclass(frozen=True, eq=False)
class Traffic:
    """The requests, the simulated users and the ranker of day 0, which are the same for all buckets of a run."""

    options: LiveOptions
    seed: int
    train: Log
    candidates: Log  # `train` without features; item ids are row numbers of `train`
    user: User
    first_scores: np.ndarray  # of the rows of `train`, by the ranker of day 0

    @staticmethod
    def make(options: LiveOptions, run: int) -> Traffic:
        dataset, seed = options.dataset(), options.base.seed + run
        train = dataset.train
        candidates = replace(train.without_features(), item_ids=pa.array(np.arange(train.rows)), weights=None)
        user = options.user(dataset.max_grade)
        return Traffic(options, seed, train, candidates, user, initial_ranker(dataset, seed=seed)(train.features))

    def shown(self, ranker: Path | None) -> Log:
        """Return all requests as the model in a run directory ranks them; if `ranker` is None, the ranker of day 0."""
        base = self.options.base
        scores = self.first_scores
        if ranker is not None:
            scores = load_model(ranker).score(self.train, device=base.machine.device)
        return show(self.candidates, scores, items=base.simulation.items)

    def served(self, shown: Log, bucket: int, day: int) -> Log:
        """Simulate the sessions of a bucket on a day; return their log, without features and with new request ids."""
        rng = np.random.default_rng(_seed(self.seed, day, TRAFFIC))
        total = self.options.sessions * len(self.options.entries)
        requests, buckets = rng.integers(len(shown), size=total), rng.integers(len(self.options.entries), size=total)
        chosen = np.flatnonzero(buckets == bucket)
        sessions = replace(shown.select(requests[chosen]), request_ids=pa.array(day * total + chosen))
        return simulate_log(sessions, self.user, seed=_seed(self.seed, day, FEEDBACK, bucket))[0]

    def expected(self, shown: Log) -> float:
        """Return the exact expectation of the metric of a session, over uniformly drawn requests and user behaviour."""
        relevance, positions = torch.from_numpy(shown.true_relevance), torch.from_numpy(shown.positions)
        return float(self.user.expected(relevance, positions, self.options.label).double().sum()) / len(shown)

    def training_log(self, logs: Sequence[Log]) -> Log:
        """Return the logs of several days as one log, with features."""
        log, train = concatenate_logs(logs), self.train
        features = train.features[log.item_ids.to_numpy()]
        return replace(log, features=features, feature_names=train.feature_names, vocabularies=train.vocabularies)

    def theta(self, ranker: Path | None) -> dict[str, Any] | None:
        """Return the examination θ that a ranker learned, and the largest relative error of θ_k / θ_1; or None."""
        if ranker is None or not (ranker / "bias.json").is_file():
            return None
        bias = read_json(ranker / "bias.json")
        multiplied = bias.get("towers", {}).get("click") if bias.get("tower") == "multiplies" else None
        learned = bias.get("theta", multiplied)
        if learned is None:
            return None
        true = self.user.theta(torch.tensor(bias["positions"]), torch.float64).numpy()
        theta = np.array(learned)
        error = float(np.abs(theta / theta[0] / (true / true[0]) - 1).max()) if theta[0] > 0 else None
        return {"positions": bias["positions"], "learned": learned, "error": error}


class Bucket:
    """One bucket of a run: a random part of the traffic, served by its own ranker."""

    def __init__(self, traffic: Traffic, number: int, folder: Path) -> None:
        self.traffic, self.number = traffic, number
        self.folder = _bucket_folder(traffic.options, folder, number)
        self._logs: dict[int, Log] = {}

    def day(self, day: int) -> dict[str, Any]:
        """Return the metrics of a day from traffic.json; if the file is missing, train a ranker and serve the day."""
        record = _record(self.folder, day)
        if not record.is_file():
            if day:
                self._train(day)
            shown = self.traffic.shown(self._ranker(day))
            self._logs[day] = log = self.traffic.served(shown, self.number, day)
            theta = self.traffic.theta(self._ranker(day))
            expected = self.traffic.expected(shown)
            metric = metric_of(log, self.traffic.options.label)
            write_json(record, {"day": day, **metric, "expected": expected, "theta": theta})
        content: dict[str, Any] = read_json(record)
        return content

    def _ranker(self, day: int) -> Path | None:
        return self.folder / f"day-{day:02}" / "ranker" if day else None

    def _train(self, day: int) -> None:
        ranker, options = self.folder / f"day-{day:02}" / "ranker", self.traffic.options
        if (ranker / "model").is_dir():
            return
        first = max(0, day - options.window) if options.window else 0
        self._logs = {d: self._log(d) for d in range(first, day)}
        log = self.traffic.training_log(list(self._logs.values()))
        config = options.config(self.number, day, self.traffic.seed)
        if (before := self._ranker(day - 1)) is not None:
            config = config.with_options(warm_start=str(before))
        run_training(config, ranker, source=log, resume=True)

    def _log(self, day: int) -> Log:
        """Return the log of a day; if another process served the day, simulate it again with the same result."""
        if day not in self._logs:
            return self.traffic.served(self.traffic.shown(self._ranker(day)), self.number, day)
        return self._logs[day]


def _bucket_folder(options: LiveOptions, run: Path, bucket: int) -> Path:
    return run / "".join(c if c.isalnum() or c in "-=." else "_" for c in options.buckets[bucket])


def _record(bucket: Path, day: int) -> Path:
    return bucket / f"day-{day:02}" / "traffic.json"


def metric_of(log: Log, label: str) -> dict[str, Any]:
    """Return mean and variance over sessions of the summed label, and the sum of each action per session."""
    sums = np.add.reduceat(np.asarray(Label(label)(log.actions), np.float64), log.offsets[:-1])
    actions = {name: float(values.sum(dtype=np.float64)) / len(log) for name, values in log.actions.items()}
    return {"sessions": len(log), "mean": float(sums.mean()), "variance": float(sums.var(ddof=1)), "actions": actions}


def run_one(options: LiveOptions, out: Path, run: int) -> dict[str, Any]:
    """Return the metrics of all days and buckets of a run, and lifts; its folder is `run-N` of `out`.

    Finished days are not repeated. If the process is killed, the same call continues and gives the same result.
    """
    traffic, folder = Traffic.make(options, run), out / f"run-{run}"
    names, buckets = options.buckets, dict[str, list[dict[str, Any]]]()
    for number, name in enumerate(names):
        bucket = Bucket(traffic, number, folder)
        buckets[name] = [bucket.day(day) for day in range(options.days + 1)]
    lifts = {name: lifts_between(buckets[name], buckets[names[0]]) for name in names[1:]}
    return {"run": run, "seed": traffic.seed, "buckets": buckets, "lifts": lifts}


def _check_methods(traffic: Traffic) -> None:
    """Raise an error before training if one of the methods cannot be trained."""
    log = traffic.training_log([traffic.served(traffic.shown(None), 0, 0)])
    for bucket in range(len(traffic.options.entries)):
        config = traffic.options.config(bucket, 1, traffic.seed)
        make_plan(config, Data(log, log, "", label=traffic.options.label), Listeners(on_finding=None))


def _same_options(traffic: Traffic, folder: Path) -> None:
    """Raise OutputError if the folder was made with other options or data; `days` and the folder of data may differ."""
    options = {**traffic.options.to_json(), "days": None, "data.folder": None}
    options["fingerprint"] = traffic.options.dataset().fingerprint
    path = folder / "options.json"
    if not path.is_file():
        write_json(path, options)
    saved = read_json(path)
    if changed := sorted(name for name in options if saved.get(name) != options[name]):
        what = f"the folder was made with '{changed[0]}' = {saved.get(changed[0])}"
        raise OutputError(what, where=folder, got=options[changed[0]], hint="choose another folder")


@dataclass(frozen=True, eq=False)
class LiveResult:
    """The results of all runs of a live test."""

    options: LiveOptions
    runs: Sequence[Mapping[str, Any]]  # results of `run_one`

    @property
    def lifts(self) -> dict[str, dict[str, Any]]:
        """Bucket -> mean lift over runs, of the simulated sessions and in exact expectation, in total and by day."""
        return {name: self._lift(name) for name in self.options.buckets[1:]}

    def _lift(self, name: str) -> dict[str, Any]:
        lifts = [run["lifts"][name] for run in self.runs]
        days = range(self.options.days + 1)
        by_day = [[lift["by_day"][day] for lift in lifts] for day in days]
        return {**over_runs(lifts), "by_day": [{"day": day, **over_runs(by_day[day])} for day in days]}

    @property
    def course(self) -> dict[str, list[dict[str, Any]]]:
        """Bucket -> for each day, the mean over runs of the live metric (exact expectation) and of the error of θ."""
        return {name: [self._day(name, day) for day in range(self.options.days + 1)] for name in self.options.buckets}

    def _day(self, name: str, day: int) -> dict[str, Any]:
        days = [run["buckets"][name][day] for run in self.runs]
        errors = [one["theta"]["error"] for one in days if one["theta"] and one["theta"]["error"] is not None]
        expected = float(np.mean([one["expected"] for one in days]))
        return {"day": day, "expected": expected, "theta_error": float(np.mean(errors)) if errors else None}

    def to_json(self) -> dict[str, Any]:
        return {
            "options": self.options.to_json(),
            "control": self.options.buckets[0],
            "lifts": self.lifts,
            "course": self.course,
            "runs": list(self.runs),
        }


@dataclass(frozen=True)
class BucketTask:
    """The task to serve all days of a bucket; no day starts after `until`, a value of `time.monotonic()`."""

    options: LiveOptions
    out: str
    run: int
    bucket: int
    until: float
    runs: ClassVar[int] = 1

    @property
    def folder(self) -> Path:
        return Path(self.out) / f"run-{self.run}"

    @property
    def finished(self) -> bool:
        return _record(_bucket_folder(self.options, self.folder, self.bucket), self.options.days).is_file()

    def __str__(self) -> str:
        return str(_bucket_folder(self.options, self.folder, self.bucket))

    def perform(self) -> None:
        bucket = Bucket(Traffic.make(self.options, self.run), self.bucket, self.folder)
        for day in range(self.options.days + 1):
            if time.monotonic() < self.until:
                bucket.day(day)


def run_live(
    options: LiveOptions,
    out: Path,
    *,
    runs: int = 1,
    workers: Workers | None = None,
    on_done: OnDone = lambda *_: None,
) -> LiveResult:
    """Run the live test `runs` times with different seeds, and write the results to live.json in `out`.

    The `workers` train and serve the buckets; by default, this process does.
    """
    if runs < 1:
        raise OptionError("'runs' must be at least 1", got=runs)
    for run in range(runs):
        traffic = Traffic.make(options, run)
        _check_methods(traffic)
        _same_options(traffic, out / f"run-{run}")
    workers = workers or Workers(1)
    pairs = [(run, bucket) for run in range(runs) for bucket in range(len(options.entries))]
    tasks = [BucketTask(options, str(out), run, bucket, workers.until) for run, bucket in pairs]
    workers.run(tasks, on_done)
    if (done := sum(task.finished for task in tasks)) < len(tasks):
        raise UnfinishedError(f"the time limit was reached with {done} of {len(tasks)} buckets finished")
    results = [run_one(options, out, run) for run in range(runs)]
    result = LiveResult(options, results)
    write_json(out / "live.json", result.to_json())
    return result


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


# --- The experiment ---------------------------------------------------------------------------------------------------
# A simulated A/B test, as in the paper behind pairwise-em (CIKM 2022): the relative gain (lift) over PAL-Click.

FULL_LIVE = LiveOptions(BASE.with_options(hidden=(512, 256, 128), dropout=0.3, steps=300, bias_steps=1500), 10, 6000)
QUICK_LIVE = LiveOptions(BASE.with_options(hidden=(64, 32), dropout=0.1, steps=100, bias_steps=200), 7, 1000)
LIVE_RUNS = {"full": 5, "quick": 2}


def live_test(lab: Lab) -> ExperimentResult:
    """Run the live test: simulated users click, dwell, like and share; rankers learn daily from their own traffic."""
    available, absent = lab.find(["synthetic"])
    if len(available) > 1:
        raise DataError("the live test takes one data set", got=", ".join(available), hint="pass one with --data")
    options = QUICK_LIVE if lab.budget.name == "quick" else FULL_LIVE
    base = options.base.with_options(data=available[0], data_dir=lab.data_dir, device=lab.device)
    options = replace(options, base=base)
    folder = lab.out / "runs" / lab.budget.name / available[0] / "live"
    runs = lab.runs or LIVE_RUNS[lab.budget.name]
    result = run_live(options, folder, runs=runs, workers=lab.workers, on_done=lab.on_done)
    about = (
        f"{runs} runs of {options.days} days after day 0, {options.sessions} sessions per bucket and day, "
        f"{TITLES.get(available[0], available[0])}. The live metric is {options.label}, summed over a session. "
        f"Lifts are over {options.buckets[0]}, days 1 to {options.days}, in exact expectation and in sampled traffic, "
        f"with 95% intervals over runs. The paper's A/B test over seven days had a lift of {LIVE_LIFT:+.2%}."
    )
    sections = [_lifts(result), _days(result)]
    title = f"Live test (budget: {lab.budget.name})"
    return ExperimentResult("live", title, about, sections, _claims(result), result.to_json(), absent)


def _lifts(result: LiveResult) -> Section:
    rows = []
    for name, lift in result.lifts.items():
        by_run = [run["lifts"][name] for run in result.runs]
        tests = ", ".join(f"{one['lift']:+.1%} (p = {one['p']:.2g})" for one in by_run)
        rows.append([name, _interval(lift["expected"]), _interval(lift["sampled"]), tests])
    days = list(range(result.options.days + 1))
    lines = {
        name: (days, [100 * day["expected"]["mean"] for day in lift["by_day"]]) for name, lift in result.lifts.items()
    }
    title = f"Lift over {result.options.buckets[0]} by day"
    plot = line_plot(title, lines, x="day", y="exact expectation, %", categories=True, order=result.options.buckets)
    return Section("Lift", [Table(["bucket", "exact", "sampled", "test of each run"], rows), plot])


def _interval(lift: dict[str, float]) -> str:
    ends = "" if lift["low"] is None else f" [{lift['low']:+.2%}, {lift['high']:+.2%}]"
    return f"{lift['mean']:+.2%}{ends}"


def _days(result: LiveResult) -> Section:
    days = list(range(result.options.days + 1))
    rows, errors, lines = [], [], {}
    for name, course in result.course.items():
        lines[name] = (days, [day["expected"] for day in course])
        rows.append([name, *(f"{day['expected']:.3f}" for day in course)])
        if any(day["theta_error"] is not None for day in course):
            cells = ["" if day["theta_error"] is None else f"{day['theta_error']:.0%}" for day in course]
            errors.append([name, *cells])
    head = ["bucket", *(f"day {day}" for day in days)]
    plot = line_plot("The live metric by day", lines, x="day", y="exact expectation", categories=True)
    metric = Table(head, rows, "The live metric in exact expectation, means over runs")
    return Section("Day by day", [plot, metric, Table(head, errors, "Largest error of theta_k / theta_1")])


def _claims(result: LiveResult) -> list[Claim]:
    """Check the claims that our methods raise the live metric over PAL-Click, over all days and on the last day."""
    data, claims = TITLES.get(source := result.options.base.data.source, source), []
    for name, entry in (("loss_opt", OPT), ("The default", DEFAULT)):
        lift = result.lifts[entry]
        last = f"{name} still has a lift on the last day, when it learns from its own log"
        for text, over in (
            (f"{name} lifts the live metric over PAL-Click", lift["expected"]),
            (last, lift["by_day"][-1]["expected"]),
        ):
            claims.append(Claim(text, data, _verdict(over), _interval(over)))
    return claims


def _verdict(lift: dict[str, float]) -> str:
    if lift["mean"] > 0:
        return HELD if lift["low"] is not None and lift["low"] > 0 else DIRECTION
    return REVERSED if lift["high"] is not None and lift["high"] < 0 else NOT
