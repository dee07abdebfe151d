"""Load the data of a run: read a log or data set, simulate users if `users` is set, and split the requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ultr.bias.pitfalls import Pitfall, suspicious_requests
from ultr.datasets import DATASETS, Dataset, highest_grade, load_dataset, randomise, show
from ultr.datasets.initial import RANDOM_SHARE, initial_rankers
from ultr.datasets.simulate import simulate_log
from ultr.datasets.users import User, make_user
from ultr.errors import DataError, OptionError
from ultr.evaluation.judgement import logged_scores
from ultr.evaluation.scores import FEEDBACK, OFF_POLICY
from ultr.lists import ListBatches
from ultr.log import Log, read_log
from ultr.log.decay import decayed_by_time
from ultr.log.labels import Label
from ultr.log.parts import SAMPLE_BYTES, SAMPLE_ROWS
from ultr.log.queries import split_by_time
from ultr.log.sampling import sample_log
from ultr.log.segments import by_segment
from ultr.log.shards import Shards, concatenate_logs, is_lists
from ultr.log.sources import Source, is_source, open_source
from ultr.log.values import Missing, check_features
from ultr.rankers.boosters import is_trees
from ultr.rankers.model import Model
from ultr.training.config import DEFAULT_METHOD, RunConfig, TrainingOptions
from ultr.training.feed import Feed, Feeding
from ultr.training.stream import Stream
from ultr.training.used import random_split
from ultr.utils.devices import choose_device
from ultr.utils.distributed import local_size
from ultr.utils.jsonfiles import read_json
from ultr.utils.memory import available_memory

MAX_VALIDATION_ROWS = 100_000  # validation requests are evaluated often, so more rows would take too long
LARGEST_LABEL = 1e12  # largest label, because labels are squared in single precision
GROUPED = 10  # held-out requests with one item that are ranked as one list
CACHED_NUMBERS = 1 << 29  # features of the logs that a process keeps for its next runs
MEMORY_SHARE = 0.5  # lists that need more than this share of the available memory are streamed


@dataclass(frozen=True, eq=False)
class StreamedLists:
    """Training lists that are read while training: a function that returns their batches, and held-out requests."""

    feed: Callable[[TrainingOptions], Feeding]
    held_out: Log


@dataclass(frozen=True, eq=False)
class RunData:
    """The data of a run: training and held-out requests, and the simulated users if there are any."""

    train: Log
    validation: Log
    fingerprint: str
    user: User | None = None  # simulated user for metrics such as reward@10
    feeding_user: User | None = None  # simulated user who gives new feedback at each training step
    test: Log | None = None  # requests of a log that are held out for the final test
    segments: tuple[str, ...] = ()  # names of the segments; examination is estimated for each
    all_positions: tuple[int, ...] | None = None  # of all prepared lists; `train` may be a sample of them
    all_binary: tuple[str, ...] | None = None  # actions that are only 0 or 1 in all prepared lists
    stream: StreamedLists | None = None  # the training lists if they are streamed; `train` is then a sample of them
    suspicious: Any = None  # ids of the requests that `drop_suspicious` left out, as an Arrow array; None: not dropped
    warnings: tuple[Pitfall, ...] = ()  # problems of the data that training reported
    initial: Callable[[np.ndarray], np.ndarray] | None = None  # features -> scores that simulated users saw items by

    def logged_scores(self) -> np.ndarray | None:
        """Return scores of the validation rows that reproduce the logged order; None if there is no logged order."""
        log, initial = self.validation, self.initial
        scores = logged_scores(log)
        return initial(log.features) if scores is None and initial is not None else scores

    def feed(self, options: TrainingOptions, lists: ListBatches | None = None) -> Feeding:
        """Return the source of training batches; `lists` are the training requests, if the device has them."""
        if self.stream is not None:
            return self.stream.feed(options)
        lists = lists or ListBatches(self.train, device=choose_device(options.device))
        return Feed(lists, batch=options.batch, seed=options.seed, user=self.feeding_user)

    @property
    def positions(self) -> tuple[int, ...]:
        """The position ids of the training requests, in increasing order."""
        if self.all_positions is not None:
            return self.all_positions
        return () if self.train.positions is None else tuple(np.unique(self.train.positions).tolist())

    @property
    def binary(self) -> tuple[str, ...]:
        """The names of the actions that are only 0 or 1."""
        if self.feeding_user is not None:
            return self.feeding_user.binary_actions
        if self.all_binary is not None:
            return self.all_binary
        return tuple(name for name, values in self.train.actions.items() if bool(np.isin(values, (0, 1)).all()))


def load_run_data(config: RunConfig) -> RunData:
    """Load the data of a run. With `config.users`, an initial ranker sets the order that simulated users see."""
    if config.users is None:
        return _read_training_log(config)
    dataset = cached_dataset(config.data, config.data_dir)
    user = make_user(config.users, **{**config.user_options, "max_grade": dataset.max_grade})
    feeding: User | None = user.unbiased() if config.learn_from == "no-bias" else user
    seed = config.training.seed
    rankers = initial_rankers(dataset, kind=config.logging, share=config.share, seed=seed)
    train_log = _shown(dataset.train, rankers, config)
    validation = _validation(dataset)
    if config.selection.startswith((FEEDBACK, OFF_POLICY)):  # metrics from feedback
        shown = _shown(validation, rankers, config)
        if config.sessions_drawn:
            least = max(len(shown), round(config.sessions_drawn * config.held_out / (1 - config.held_out)))
            shown = _drawn(shown, least, seed + 1, config)
        seen_by = user if config.selection.startswith(OFF_POLICY) else feeding or user
        validation, _ = simulate_log(shown, seen_by, seed=seed + 1)
    if config.sessions_drawn:
        drawn = _drawn(train_log, config.sessions_drawn, seed, config)
        train_log, feeding = simulate_log(drawn, feeding or user, seed=seed)[0], None
    return RunData(train_log, validation, dataset.fingerprint, user, feeding, initial=rankers[0])


def _shown(log: Log, rankers: Sequence[Callable[[np.ndarray], np.ndarray]], config: RunConfig) -> Log:
    """Return the requests of a log as each ranker shows them; with several rankers, items have ids."""
    if config.logging in ("both", "randomised") and not config.sessions_drawn:
        what = f"logging={config.logging} needs a log that is drawn once"
        raise OptionError(what, got="new feedback at each step", hint="pass --sessions with a number above 0")
    if len(rankers) > 1:
        log = replace(log, item_ids=pa.array(np.arange(log.rows)))
    shown = [show(log, ranker(log.features), items=config.items) for ranker in rankers]
    return shown[0] if len(shown) == 1 else concatenate_logs(shown)


def _drawn(log: Log, sessions: int, seed: int, config: RunConfig) -> Log:
    """Return a log of this number of sessions: each request as often as any other, up to one, in a random order."""
    drawn = log.select(np.resize(np.random.default_rng(seed).permutation(len(log)), sessions))
    return randomise(drawn, RANDOM_SHARE, seed=seed) if config.logging == "randomised" else drawn


_RUN_DATA: dict[str, RunData] = {}  # configuration -> its data, the last used at the end


def cached_run_data(config: RunConfig) -> RunData:
    """Return the data of a run of networks; runs of other methods and learning rates on the same data share it."""
    training = TrainingOptions(seed=config.training.seed, device=config.training.device)
    changes: dict[str, Any] = {"method_options": {}, "ranker_options": {}, "bias": None}
    common = replace(config, method=DEFAULT_METHOD, ranker="mlp", training=training, **changes)
    key = json.dumps(common.to_json(), sort_keys=True)
    found = _RUN_DATA.pop(key, None) or load_run_data(common)
    _RUN_DATA[key] = found
    while len(_RUN_DATA) > 1 and sum(data.train.features.size for data in _RUN_DATA.values()) > CACHED_NUMBERS:
        _RUN_DATA.pop(next(iter(_RUN_DATA)))
    return found


@lru_cache(maxsize=1)
def cached_dataset(name: str, data_dir: str | None) -> Dataset:
    """Load a data set, and keep the last one in memory for the next run."""
    return load_dataset(name, data_dir=data_dir)


@lru_cache(maxsize=1)
def _validation(dataset: Dataset) -> Log:
    return sample_log(dataset.validation, MAX_VALIDATION_ROWS)


def read_data(
    data: str, *, split: str, data_dir: str | Path | None, columns: Mapping[str, Any] | None = None
) -> tuple[Log, int]:
    """Read a log, or a split of a data set; return it and its highest true label (4 without true labels)."""
    log, highest = read_rows(data, split=split, data_dir=data_dir, columns=columns)
    if highest is None:
        highest = 4 if log.relevance is None else highest_grade(log, where=data)
    return log, highest


def read_rows(
    data: str, *, split: str, data_dir: str | Path | None, columns: Mapping[str, Any] | None = None
) -> tuple[Log, int | None]:
    """Read a log, or a split of a data set; return it and the highest true label of the data set (None for a log)."""
    if is_lists(data):
        data = f"{data}/{split}"
    elif data == "synthetic" or data in DATASETS or not is_source(data):
        if columns and columns.get("where"):
            raise OptionError("conditions (--where) need a log with named columns", got=data, hint="leave out --where")
        dataset = load_dataset(data, data_dir=data_dir)
        return dataset[split], dataset.max_grade
    return read_log(data, **(columns or {})), None


def _read_training_log(config: RunConfig) -> RunData:
    if config.data == "synthetic" or config.data in DATASETS:
        raise OptionError(f"'{config.data}' has true labels but no feedback", hint="pass --users pbm to simulate users")
    if is_lists(config.data):
        return _read_lists(config)
    if config.stream == "yes":
        raise OptionError("only prepared lists can be streamed", got=config.data, hint="run ultr prepare on it first")
    source, time = open_source(config.data).only(config.where), config.time
    if config.decay is not None and time is None:
        source, time = source.by_day()
    _check_fits_in_memory(source)
    rows: dict[str, Any] = {"on_duplicates": config.on_duplicates, "where": config.where, "time": time}
    log = read_log(source, missing=_missing(config), **rows, **config.columns)
    if config.decay is not None:
        log = decayed_by_time(log, config.decay)
    return replace(split_log(log, config), fingerprint=source.fingerprint())


def _missing(config: RunConfig) -> Missing:
    return "keep" if is_trees(config.ranker) or config.missing == "mean" else "reject"


def _check_fits_in_memory(source: Source) -> None:
    """Raise DataError if a Parquet log, uncompressed, is larger than the free memory."""
    if source.kind != "Parquet":
        return
    size = source.sum(lambda footer: sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups)))
    if size > available_memory():
        got = f"{size / 2**30:.1f} GiB; {available_memory() / 2**30:.1f} GiB are free"
        raise DataError(
            "the log does not fit in memory", where=source.name, got=got, hint="run ultr prepare on it first"
        )


def _read_lists(config: RunConfig) -> RunData:
    """Read prepared lists: the training lists into memory, or only a sample of them and a stream of all."""
    if config.drop_suspicious:
        hint = "pass --drop-suspicious to ultr prepare, and leave it out here"
        raise OptionError("suspicious requests are left out when lists are prepared", got=config.data, hint=hint)
    shards = Shards(config.data, decay=config.decay)
    shards.check_names(config.columns)
    if config.where or config.split == "time":
        what = "the rows and splits of prepared lists cannot be changed"
        raise OptionError(what, where=config.data, hint="pass --where and --split time to ultr prepare")
    about, seed = shards.manifest, config.training.seed
    rows = min(SAMPLE_ROWS, SAMPLE_BYTES // shards.row_bytes)
    held_out = Shards(config.data, "validation", decay=config.decay)
    validation = sample_log(held_out.sample(MAX_VALIDATION_ROWS, 0), MAX_VALIDATION_ROWS)
    test = Shards(config.data, "test").sample(rows, 0) if config.judged else None
    streamed = config.stream == "yes" or (config.stream == "auto" and not fits_in_memory(shards))
    train = _checked(shards.sample(rows, seed) if streamed else shards.read_all(), config)
    if config.learn_from == "feedback":
        _check_label(train, config)
    segments: tuple[str, ...] = ()
    if config.columns.get("segment"):
        train, segments = by_segment(train)
    view = partial(_view, segments=segments, config=config)
    validation = in_groups(view(validation))

    def feed(options: TrainingOptions) -> Feeding:
        device = choose_device(options.device)
        return Stream(shards, batch=options.batch, seed=options.seed, device=device, workers=config.workers, view=view)

    return RunData(
        train,
        validation,
        shards.fingerprint,
        test=None if test is None else in_groups(view(test)),
        segments=segments,
        all_positions=None if segments else about.positions,
        all_binary=about.binary,
        stream=StreamedLists(feed, validation) if streamed else None,
    )


def _view(log: Log, segments: tuple[str, ...], config: RunConfig) -> Log:
    log = _checked(log, config)
    return by_segment(log, segments)[0] if segments else log


def _checked(log: Log, config: RunConfig) -> Log:
    """Return prepared lists; raise DataError if a value is missing and the configuration rejects such values."""
    check_features(log.features, list(log.feature_names), where=config.data, missing=_missing(config))
    return log


def fits_in_memory(shards: Shards) -> bool:
    """Return whether one copy of the lists per process takes less than `MEMORY_SHARE` of the free memory."""
    return shards.rows * shards.row_bytes * local_size() < MEMORY_SHARE * available_memory()


def split_log(log: Log, config: RunConfig) -> RunData:
    """Split a log into training, validation and test requests: its queries at random, or its requests by time.

    A random split into training and validation follows from the seed. Test requests are the same for all seeds, so that
    no seed can choose a setting on them. In a split by time, the last requests are for testing, and those before them
    for validation.
    """
    log, suspicious = _without_suspicious(log, config) if config.drop_suspicious else (log, None)
    log, segments = by_segment(log) if config.columns.get("segment") else (log, ())
    if config.split == "time":
        learned, held_out, judged = split_by_time(log, config.held_out, config.judged)
    else:
        learned, held_out, judged = random_split(log, config)
    if not (len(learned) and len(held_out)):
        count = len(held_out) + len(judged)
        what = f"a log needs more than {count} requests, because {count} are held out from training"
        hint = "collect more requests; all requests of a query, or of a time, are on one side of the split"
        raise DataError(what, where=config.data or None, got=len(log), hint=hint)
    validation = in_groups(sample_log(log.select(held_out), MAX_VALIDATION_ROWS))
    test = in_groups(log.select(judged)) if config.judged else None
    train = log.select(learned)
    if config.learn_from == "feedback":
        _check_label(train, config)
    name = f"{len(log)}-{log.rows}"
    return RunData(train, validation, name, test=test, segments=segments, suspicious=suspicious)


def _without_suspicious(log: Log, config: RunConfig) -> tuple[Log, Any]:
    """Return the log without requests with impossible click rates, and their ids."""
    dropped = suspicious_requests(log, np.asarray(Label(config.label)(log.actions)) > 0)
    return (log.select(~dropped) if dropped.any() else log), log.request_ids.filter(pa.array(dropped))


def in_groups(log: Log) -> Log:
    """Return a log whose requests all have one item as lists of `GROUPED` items, and any other log as it is.

    The order of one item is always right. Scores of pointwise methods are comparable across requests, so held-out
    requests of one item are ranked together, as if they had been shown as one list at their positions.
    """
    if log.positions is None or len(log) < 2 or log.lengths.max() > 1:
        return log
    group = np.arange(len(log)) // GROUPED
    rows, first = np.lexsort((log.positions, group)), np.flatnonzero(np.diff(group, prepend=-1))
    weights = None if log.weights is None else np.add.reduceat(log.weights, first)
    context = {name: values.take(pa.array(first)) for name, values in log.context.items()}
    offsets, ids = np.append(first, len(log)), log.request_ids.take(pa.array(first))
    ordered = log.regroup(rows, log.offsets)
    return replace(ordered, offsets=offsets, request_ids=ids, weights=weights, context=context)


def columns_for_run(run: Path, model: Model, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `read_log` for data that a model is used on: the columns of its training log, by name.

    `named` are the columns that the user names, by role; they replace those of training.
    """
    config = RunConfig.from_json(read_json(run / "config.json"), where=run)
    columns: dict[str, Any] = {"columns": model.columns, "categorical": list(model.vocabularies) or None}
    if config.users is None and not model.columns:  # of a model of an older version
        columns |= config.columns
    return {**columns, "missing": model.missing, "on_duplicates": config.on_duplicates, **named}


def _check_label(log: Log, config: RunConfig) -> None:
    """Raise DataError before training if no label is positive, or if a label is too large."""
    highest = float(np.max(Label(config.label)(log.actions)))
    where, hint = config.data or None, f"check --label '{config.label}', and the columns of its actions"
    if not highest > 0:
        raise DataError("no training request has a positive label", where=where, hint=hint)
    if highest > LARGEST_LABEL:
        hint = f"scale the label down, as in --label '({config.label}) / 1e9'"
        raise DataError(
            f"labels above {LARGEST_LABEL:g} are too large to learn from", where=where, got=highest, hint=hint
        )
