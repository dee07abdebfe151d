"""A live test of rankers, simulated: competing rankers serve random buckets of traffic and learn from their own logs.

Day 0 is served by the data's initial ranker in every bucket. After each day a bucket's model is trained on the bucket's
own log, from the weights of the day before, and serves the next day. The first bucket is the control; the others are
judged by their lift over it in the label summed over the items of a session.

out/run-0/options.json                  what the run was made with
out/run-0/pal-click/day-03/ranker/      the run directory of the model that serves the day, from the log of days before
out/run-0/pal-click/day-03/traffic.json what became of the day
out/live.json                           the result
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ultr.checkpoint import read_json, write_json
from ultr.compare import Entry, Workers
from ultr.datasets import initial_ranker, show
from ultr.errors import OptionError, OutputError, UnfinishedError, nearest
from ultr.experiments.lift import lifts_between, over_runs
from ultr.labels import Label
from ultr.log import Log
from ultr.models import load_model
from ultr.preparing import Prepared, RunConfig, cached_dataset
from ultr.runs import learner_of, run_training
from ultr.simulate import User, simulate_log
from ultr.training import TrainingOptions

LABEL = "click + dwell / exp(3) + 2 * like + 3 * share"
ENTRIES = ("pal-click", "pal-click", "pairwise-em:loss=opt", "pointwise", "lambdarank")
LEAST_SESSIONS = 30  # of a bucket and day: fewer have no variance to speak of
ONE_REQUEST = 1e-9  # share of a log held out; a run needs one, and here none is selected by it
TRAFFIC, FEEDBACK, TRAINING = range(3)  # what a seed is drawn for

OnDone = Callable[[int, int, str], None]


@dataclass(frozen=True)
class LiveOptions:
    """What is served, to whom, and how it learns. All buckets have the same budget, seed and network."""

    data: str = "synthetic"
    data_dir: str | None = None
    days: int = 10  # served by rankers that learn, after day 0
    sessions: int = 4000  # a bucket and day, on average
    entries: Sequence[str] = ENTRIES  # one a bucket, the control first; the same again is an A/A test
    label: str = LABEL
    like: Sequence[float] = (0.01, 0.03, 0.06, 0.12, 0.2)  # given a click, by grade
    share: Sequence[float] = (0.005, 0.01, 0.02, 0.04, 0.08)
    eta: float = 1.0  # severity of position bias
    hidden: Sequence[int] = (128, 64)
    dropout: float = 0.1
    steps: int = 300  # a day
    bias_steps: int = 1000
    batch: int = 256
    lr: float = 0.02
    rates: Mapping[str, float] = field(default_factory=dict)  # of entries with a learning rate of their own
    window: int = 0  # last days that are learned from; 0: all
    seed: int = 0
    device: str = "auto"
    items: int = 10

    def __post_init__(self) -> None:
        for name, least in {"days": 1, "items": 1, "window": 0, "seed": 0, "sessions": LEAST_SESSIONS}.items():
            if getattr(self, name) < least:
                raise OptionError(f"'{name}' should be {least} or more", got=getattr(self, name))
        if len(self.entries) < 2:
            raise OptionError("a live test needs a control and another entry", got=len(self.entries))
        for text in self.entries:
            if Entry.parse(text).learn_from == "no-bias":
                raise OptionError("live users have position bias", got=text, mend="learn from=feedback or from=truth")
        for text in self.rates:
            if text not in self.entries:
                raise OptionError(f"no entry '{text}' to have a rate", mend=nearest(text, self.entries))
        for bucket in range(len(self.entries)):
            self.config(bucket, 1, self.seed)
        actions = self.user(1).actions
        for action in Label(self.label).actions:
            if action not in actions:
                raise OptionError(f"users do not '{action}'", mend=nearest(action, actions))

    @property
    def buckets(self) -> tuple[str, ...]:
        """The names of the buckets: their entries, and `... (A/A)` where one comes again."""
        names: list[str] = []
        for i, text in enumerate(self.entries):
            again = list(self.entries[:i]).count(text)
            names.append(f"{text} (A/A)" if again == 1 else f"{text} (A/A {again})" if again else text)
        return tuple(names)

    def user(self, max_grade: int) -> User:
        return User(eta=self.eta, max_grade=max_grade, further={"like": self.like, "share": self.share})

    def config(self, bucket: int, day: int, seed: int) -> RunConfig:
        """How the ranker that serves a bucket on a day is trained: to the last step, as nothing unbiased selects."""
        training = TrainingOptions(
            steps=self.steps,
            batch=self.batch,
            evaluate_every=self.steps,
            bias_steps=self.bias_steps,
            device=self.device,
        )
        network = {"hidden": list(self.hidden), "dropout": self.dropout}
        base = RunConfig(
            self.data,
            label=self.label,
            ranker_options=network,
            held_out=ONE_REQUEST,
            select="feedback-ndcg@10",
            training=training,
        )
        text = self.entries[bucket]
        return Entry.parse(text).config(base, self.rates.get(text, self.lr), _seed(seed, day, TRAINING))


@dataclass(frozen=True, eq=False)
class Traffic:
    """What the buckets of a run share: requests, users, and the ranker of day 0."""

    options: LiveOptions
    seed: int
    train: Log
    candidates: Log  # the rows of `train` by number, as item ids, without features
    user: User
    first_scores: np.ndarray

    @staticmethod
    def make(options: LiveOptions, run: int) -> Traffic:
        dataset = cached_dataset(options.data, options.data_dir)
        seed, train = options.seed + run, dataset.train
        candidates = replace(train.without_features(), item_ids=pa.array(np.arange(train.rows)), weights=None)
        user = options.user(dataset.max_grade)
        return Traffic(options, seed, train, candidates, user, initial_ranker(dataset, seed=seed)(train.features))

    def shown(self, ranker: Path | None) -> Log:
        """Every request as the ranker of a run directory shows it, or that of day 0."""
        device = self.options.device
        scores = self.first_scores if ranker is None else load_model(ranker).score(self.train, device=device)
        return show(self.candidates, scores, items=self.options.items)

    def served(self, shown: Log, bucket: int, day: int) -> Log:
        """What the users of a bucket were shown and did on a day, without features; each session has an id."""
        rng = np.random.default_rng(_seed(self.seed, day, TRAFFIC))
        total = self.options.sessions * len(self.options.entries)
        requests, buckets = rng.integers(len(shown), size=total), rng.integers(len(self.options.entries), size=total)
        own = np.flatnonzero(buckets == bucket)
        sessions = replace(shown.select(requests[own]), request_ids=pa.array(day * total + own))
        return simulate_log(sessions, self.user, seed=_seed(self.seed, day, FEEDBACK, bucket))[0]

    def expected(self, shown: Log) -> float:
        """The exact mean of the live metric: over all requests, which are drawn alike, and all that users may do."""
        relevance, positions = torch.from_numpy(shown.true_relevance), torch.from_numpy(shown.positions)
        return float(self.user.expected(relevance, positions, self.options.label).double().sum()) / len(shown)

    def learned_from(self, logs: Sequence[Log]) -> Log:
        """The logs of some days as one, with features."""
        lengths = np.concatenate([log.lengths for log in logs])
        rows = np.concatenate([log.item_ids.to_numpy() for log in logs])
        return replace(
            self.train,
            features=self.train.features[rows],
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            request_ids=pa.concat_arrays([log.request_ids for log in logs]),
            positions=np.concatenate([log.positions for log in logs if log.positions is not None]),
            actions={name: np.concatenate([log.actions[name] for log in logs]) for name in self.user.actions},
            relevance=np.concatenate([log.true_relevance for log in logs]),
            item_ids=pa.array(rows),
            weights=None,
        )

    def theta(self, ranker: Path | None) -> dict[str, Any] | None:
        """Examination by position as a ranker learned it, if it did, and the largest relative error of θ_k / θ_1."""
        if ranker is None or not (ranker / "bias.json").is_file():
            return None
        bias = read_json(ranker / "bias.json")
        multiplied = bias.get("towers", {}).get("click") if bias.get("tower") == "multiplies" else None
        learned = bias.get("theta", multiplied)
        if learned is None:
            return None
        true = self.user.theta(torch.tensor(bias["positions"]), torch.float64).numpy()
        found = np.array(learned)
        error = float(np.abs(found / found[0] / (true / true[0]) - 1).max()) if found[0] > 0 else None
        return {"positions": bias["positions"], "learned": learned, "error": error}


class Bucket:
    """One bucket of a run, from day to day; it holds the logs of its own days alone."""

    def __init__(self, traffic: Traffic, number: int, folder: Path) -> None:
        self.traffic, self.number = traffic, number
        self.folder = _bucket_folder(traffic.options, folder, number)
        self._logs: dict[int, Log] = {}

    def day(self, day: int) -> dict[str, Any]:
        """What became of a day; it is served unless it was, by a ranker that is trained unless it was."""
        record = _record(self.folder, day)
        if not record.is_file():
            if day:
                self._train(day)
            shown = self.traffic.shown(self._ranker(day))
            self._logs[day] = log = self.traffic.served(shown, self.number, day)
            theta = self.traffic.theta(self._ranker(day))
            expected = self.traffic.expected(shown)
            about = {"day": day, **metric_of(log, self.traffic.options.label), "expected": expected, "theta": theta}
            write_json(record, about)
        found: dict[str, Any] = read_json(record)
        return found

    def _ranker(self, day: int) -> Path | None:
        return self.folder / f"day-{day:02}" / "ranker" if day else None

    def _train(self, day: int) -> None:
        ranker, options = self.folder / f"day-{day:02}" / "ranker", self.traffic.options
        if (ranker / "model").is_dir():
            return
        first = max(0, day - options.window) if options.window else 0
        self._logs = {d: self._log(d) for d in range(first, day)}
        log = self.traffic.learned_from(list(self._logs.values()))
        config = options.config(self.number, day, self.traffic.seed)
        run_training(config, ranker, log=log, warm_start=self._ranker(day - 1), resume=True)

    def _log(self, day: int) -> Log:
        """A day's log: what it was when the day was served, drawn again if that was in another process."""
        if day not in self._logs:
            return self.traffic.served(self.traffic.shown(self._ranker(day)), self.number, day)
        return self._logs[day]


def _bucket_folder(options: LiveOptions, run: Path, bucket: int) -> Path:
    return run / "".join(c if c.isalnum() or c in "-=." else "_" for c in options.buckets[bucket])


def _record(bucket: Path, day: int) -> Path:
    return bucket / f"day-{day:02}" / "traffic.json"


def metric_of(log: Log, label: str) -> dict[str, Any]:
    """The label summed over each session: its mean and variance over sessions, and each action's mean a session."""
    sums = np.add.reduceat(np.asarray(Label(label)(log.actions), np.float64), log.offsets[:-1])
    actions = {name: float(values.sum(dtype=np.float64)) / len(log) for name, values in log.actions.items()}
    return {"sessions": len(log), "mean": float(sums.mean()), "variance": float(sums.var(ddof=1)), "actions": actions}


def run_one(options: LiveOptions, out: Path, run: int, on_done: OnDone = lambda *_: None) -> dict[str, Any]:
    """One replication, in the folder `run-N` of `out`: every bucket's days, and lifts over the control.

    What is finished there is not done again, so that the same call goes on after a kill, to the same result.
    """
    traffic, folder = Traffic.make(options, run), out / f"run-{run}"
    _check_methods(traffic)
    _same_options(traffic, folder)
    names, days = options.buckets, range(options.days + 1)
    buckets: dict[str, list[dict[str, Any]]] = {}
    for number, name in enumerate(names):
        bucket = Bucket(traffic, number, folder)
        buckets[name] = []
        for day in days:
            buckets[name].append(bucket.day(day))
            on_done(number * len(days) + day + 1, len(names) * len(days), f"{folder.name}, {name}, day {day}")
    control = buckets[names[0]]
    lifts = {name: lifts_between(buckets[name], control) for name in names[1:]}
    return {"run": run, "seed": traffic.seed, "buckets": buckets, "lifts": lifts}


def _check_methods(traffic: Traffic) -> None:
    """Refuse entries that cannot be made ahead of any work."""
    log = traffic.learned_from([traffic.served(traffic.shown(None), 0, 0)])
    for bucket in range(len(traffic.options.entries)):
        config = traffic.options.config(bucket, 1, traffic.seed)
        learner_of(config, Prepared(log, log, ""))


def _same_options(traffic: Traffic, folder: Path) -> None:
    """Refuse a folder made with other options; days may be added."""
    fingerprint = cached_dataset(traffic.options.data, traffic.options.data_dir).fingerprint
    own = json.loads(
        json.dumps({**asdict(traffic.options), "days": None, "data_dir": None, "fingerprint": fingerprint})
    )
    kept = folder / "options.json"
    if not kept.is_file():
        write_json(kept, own)
    before = read_json(kept)
    if changed := sorted(name for name in own if before.get(name) != own[name]):
        what = f"the folder was made with another '{changed[0]}'"
        raise OutputError(what, where=folder, got=own[changed[0]], mend="choose another folder")


@dataclass(frozen=True, eq=False)
class LiveResult:
    """The replications of a live test, and lifts over them."""

    options: LiveOptions
    runs: Sequence[Mapping[str, Any]]  # as from `run_one`

    @property
    def lifts(self) -> dict[str, dict[str, Any]]:
        """By bucket, over runs: the lift as sampled and in exact expectation, and the daily course."""
        return {name: self._lift(name) for name in self.options.buckets[1:]}

    def _lift(self, name: str) -> dict[str, Any]:
        lifts = [run["lifts"][name] for run in self.runs]
        days = range(self.options.days + 1)
        by_day = [[lift["by_day"][day] for lift in lifts] for day in days]
        return {**over_runs(lifts), "by_day": [{"day": day, **over_runs(by_day[day])} for day in days]}

    @property
    def course(self) -> dict[str, list[dict[str, Any]]]:
        """By bucket and day, means over runs: the live metric in exact expectation, and the error of θ."""
        return {name: [self._day(name, day) for day in range(self.options.days + 1)] for name in self.options.buckets}

    def _day(self, name: str, day: int) -> dict[str, Any]:
        days = [run["buckets"][name][day] for run in self.runs]
        errors = [one["theta"]["error"] for one in days if one["theta"] and one["theta"]["error"] is not None]
        expected = float(np.mean([one["expected"] for one in days]))
        return {"day": day, "expected": expected, "theta_error": float(np.mean(errors)) if errors else None}

    def to_json(self) -> dict[str, Any]:
        return {
            "options": {**asdict(self.options), "entries": list(self.options.entries)},
            "control": self.options.buckets[0],
            "lifts": self.lifts,
            "course": self.course,
            "runs": list(self.runs),
        }


@dataclass(frozen=True)
class BucketTask:
    """All days of a bucket, for any process to serve; it begins none after `until`, by the monotonic clock."""

    options: LiveOptions
    out: str
    run: int
    bucket: int
    until: float

    @property
    def folder(self) -> Path:
        return Path(self.out) / f"run-{self.run}"

    @property
    def finished(self) -> bool:
        return _record(_bucket_folder(self.options, self.folder, self.bucket), self.options.days).is_file()

    def perform(self) -> str:
        bucket = Bucket(Traffic.make(self.options, self.run), self.bucket, self.folder)
        for day in range(self.options.days + 1):
            if time.monotonic() < self.until:
                bucket.day(day)
        return str(bucket.folder)


def run_live(
    options: LiveOptions,
    out: Path,
    *,
    runs: int = 1,
    workers: Workers | None = None,
    on_done: OnDone = lambda *_: None,
) -> LiveResult:
    """The live test, replicated with seeds of their own; the result is also written to `live.json` of `out`.

    With `workers`, buckets are served side by side; they have nothing to do with one another.
    """
    if runs < 1:
        raise OptionError("there should be one run or more", got=runs)
    if workers is not None:
        for run in range(runs):
            traffic = Traffic.make(options, run)
            _check_methods(traffic)
            _same_options(traffic, out / f"run-{run}")
        pairs = [(run, bucket) for run in range(runs) for bucket in range(len(options.entries))]
        tasks = [BucketTask(options, str(out), run, bucket, workers.until) for run, bucket in pairs]
        workers.run(tasks, on_done)
        if left := [task for task in tasks if not task.finished]:
            raise UnfinishedError(f"the time is up with {len(tasks) - len(left)} of {len(tasks)} buckets finished")
    found = [
        run_one(options, out, run, lambda done, total, what, run=run: on_done(run * total + done, runs * total, what))  # type: ignore[misc]
        for run in range(runs)
    ]
    result = LiveResult(options, found)
    write_json(out / "live.json", result.to_json())
    return result


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
