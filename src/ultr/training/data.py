"""The stage `read`: the requests of a run, and what they decide.

A log is read once and split; a data set is shown to simulated users; prepared lists are read or streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from ultr.bias.after_click import AfterClick, corrected, trust_of
from ultr.bias.auto_segment import FEATURES, Segment, choose_segment, segment_candidates
from ultr.checks.pitfalls import suspicious_requests
from ultr.datasets import DATASETS, GENERATED, Dataset, highest_grade, load_dataset, randomise, show
from ultr.datasets.initial import RANDOM_SHARE, initial_rankers
from ultr.datasets.users import User, make_user, simulate_log
from ultr.errors import DataError, OptionError, UltrError
from ultr.evaluation.comparing import logged_scores
from ultr.evaluation.scores import FEEDBACK, OFF_POLICY
from ultr.lists import ListBatches
from ultr.log import Log, read_log
from ultr.log.build import decayed_by_time
from ultr.log.columns import Missing, check_features
from ultr.log.delays import Arrival, arrivals, parse_pairs, parse_time, with_arrived
from ultr.log.labels import DEFAULT_LABEL, Label, click_label, default_label
from ultr.log.sampling import PART_SAMPLE_BYTES, PART_SAMPLE_ROWS, LogParts, sample_log
from ultr.log.shards import Shards, concatenate_logs, is_lists
from ultr.log.sources import Source, is_source, open_source
from ultr.log.splits import queries_of, request_hashes, split_by_query, split_by_time
from ultr.log.table import by_segment
from ultr.log.watch import WatchModel
from ultr.rankers.matching import extended_log
from ultr.rankers.model import Model, load_model
from ultr.rankers.networks import HIDDEN
from ultr.training.config import Config, DataOptions, TrainingOptions, is_trees, trains_trees_too
from ultr.training.feed import Feed, Feeding
from ultr.training.folder import read_config
from ultr.training.stream import Stream
from ultr.utils.distributed import choose_device, local_size, size
from ultr.utils.jsonfiles import check_format, content_errors, load_tensors, read_json, write_json
from ultr.utils.memory import available_memory
from ultr.utils.stores import fetched

MAX_VALIDATION_ROWS = 100_000  # validation requests are evaluated often, so more rows would take too long
LARGEST_LABEL = 1e12  # largest label, because labels are squared in single precision
GROUPED = 10  # held-out requests with one item that are ranked as one list
CACHED_NUMBERS = 1 << 29  # features of the logs that a process keeps for its next runs
MEMORY_SHARE = 0.5  # lists that need more than this share of the available memory are streamed
SMALL_LOG, FEW_FEATURES = 100_000, 32  # rows and features; with fewer, a small network ranks as well or better
SMALL_NETWORK = (128, 64, 32)  # its hidden layers
FORMAT = 1  # of decisions.json
DECISIONS = "decisions.json"  # file of a run
OUTCOME, USED = "outcome", "used.safetensors"  # folder in a run, and the file of hashes in it


# --- Actions ----------------------------------------------------------------------------------------------------------
# Actions as they would be if users had been observed for longer. Delayed actions are counted by what has arrived, and
# watch times that were cut are continued, before a label is computed: all methods and metrics see the same actions.


@dataclass(frozen=True)
class ActionModel:
    """The estimates that transform the actions of logs: how they arrive, and how watch times are distributed."""

    time: str | None = None  # column
    arrivals: tuple[Arrival, ...] = ()
    watch: WatchModel | None = None

    @staticmethod
    def of(options: DataOptions, known: ActionModel | None = None) -> ActionModel:
        """Return the model of these options, not fitted except for the parts that `known` has by the same options."""
        known = known or ActionModel()
        times = parse_pairs(options.action_times, "action_times", "purchase=bought_at")
        wanted = arrivals(options.delays, times)
        same = {(each.action, each.delay, each.column): each for each in known.arrivals}
        fitted = tuple(same.get((each.action, each.delay, each.column), each) for each in wanted)
        watch = None
        if options.watch is not None:
            columns = (options.duration, options.censored)
            watch = WatchModel(options.watch, *columns, options.capped, options.remove_duration)
            watch = known.watch if known.watch is not None and known.watch.like(watch) else watch
        return ActionModel(options.time if wanted else None, fitted, watch)

    def __bool__(self) -> bool:
        return bool(self.arrivals) or self.watch is not None

    @property
    def reading(self) -> dict[str, Any]:
        """The arguments of `read_log` for a log to transform."""
        times = [each.column for each in self.arrivals if each.column is not None]
        extra = list(dict.fromkeys([*times, *(() if self.watch is None else self.watch.columns)]))
        return {**({"time": self.time} if self.time else {}), **({"extra": extra} if extra else {})}

    def arrived(self, log: Log, until: str | None = None) -> tuple[Log, ActionModel]:
        """Return a log by what has arrived of delayed actions, and the model with the curves of these."""
        if not self.arrivals:
            return log, self
        log, fitted = with_arrived(log, self.arrivals, None if until is None else parse_time(until))
        return log, replace(self, arrivals=fitted)

    def continued(self, log: Log, trained: np.ndarray) -> tuple[Log, ActionModel]:
        """Return a log with transformed watch times, and the model of them, fitted to its `trained` requests."""
        if self.watch is None:
            return log, self
        watch = self.watch if self.watch.groups else self.watch.fit(log.select(trained))
        log = replace(watch(log), notes=(*log.notes, watch.describe(log)))
        return log, replace(self, watch=watch)

    def __call__(self, log: Log, until: str | None = None) -> Log:
        """Return a log with transformed actions, by a model that is fitted."""
        log, _ = self.arrived(log, until)
        return log if self.watch is None else self.watch(log)


# --- The data of a run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Data:
    """The data of a run: train, validation and test requests, and the simulated users if there are any."""

    train: Log
    validation: Log
    fingerprint: str
    user: User | None = None  # simulated user for metrics such as reward@10
    feeding_user: User | None = None  # simulated user who gives new feedback at each training step
    label: str = DEFAULT_LABEL
    test: Log | None = None  # requests that chose nothing, which judge the run
    segment: str | None = None  # column of the segments
    found_segment: Segment | None = None  # if the log decided on the segment
    segments: tuple[str, ...] = ()  # names of the segments; examination is estimated for each
    all_positions: tuple[int, ...] | None = None  # of all prepared lists; `train` may be a sample of them
    all_binary: tuple[str, ...] | None = None  # actions that are only 0 or 1 in all prepared lists
    stream: Callable[..., Feeding] | None = None  # batches of streamed lists; `train` is a sample of them
    suspicious: Any = None  # ids of the requests that `drop_suspicious` left out, as an Arrow array; None: not dropped
    initial: Callable[[np.ndarray], np.ndarray] | None = None  # features -> scores that simulated users saw items by
    actions: ActionModel | None = None  # by which delayed actions and watch times were transformed
    as_logged: Data | None = None  # before `corrected`

    def corrected(self, actions: Mapping[str, AfterClick]) -> Data:
        """Return the data to learn from: actions after the click are divided by the trust in their position."""
        trust = trust_of(actions, self.positions)
        if not trust:
            return self
        train, validation = (corrected(log, trust) for log in (self.train, self.validation))
        stream = self.stream and partial(self.stream, also=lambda log: corrected(log, trust))
        binary = self.all_binary and tuple(name for name in self.all_binary if name not in trust)
        return replace(self, train=train, validation=validation, stream=stream, all_binary=binary, as_logged=self)

    def logged_scores(self, log: Log) -> np.ndarray | None:
        """Return scores of the rows of a log that reproduce the logged order; None if there is no logged order."""
        scores = logged_scores(log)
        return self.initial(log.features) if scores is None and self.initial is not None else scores

    def feed(self, options: TrainingOptions, lists: ListBatches | None = None) -> Feeding:
        """Return the source of training batches; `lists` are the training requests, if the device has them."""
        if self.stream is not None:
            return self.stream(options)
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


# --- What the data decide ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decisions:
    """Decisions that the data made where the user did not: an artefact of the run (decisions.json)."""

    label: str
    rankers: tuple[str, ...]
    hidden: tuple[int, ...] | None = None  # sizes of the layers of the network
    segment: str | None = None
    segments: tuple[str, ...] = ()  # its values, in the order of position ids
    streamed: bool = False
    notes: tuple[str, ...] = ()  # why a part of the default is left out, in sentences
    data: str = ""  # the fingerprint of the data
    actions: ActionModel | None = None  # by which delayed actions and watch times are transformed

    @property
    def ranker_name(self) -> str:
        """The rankers, for people."""
        return " + ".join(self.rankers)

    def save(self, run: Path) -> None:
        write_json(run / DECISIONS, {"format": FORMAT, **asdict(self)})

    @staticmethod
    def load(run: Path) -> Decisions:
        content = read_json(run / DECISIONS)
        check_format(content, FORMAT, what="the run", where=run / DECISIONS, hint="train again")
        with content_errors("the decisions of the run cannot be read", where=run, hint="train again"):
            return TypeAdapter(Decisions).validate_python(content)


def decide(config: Config, data: Data) -> Decisions:
    """Return what the data decide: rankers, sizes of hidden layers, and the label and segment that were found."""
    start = None if config.start_run is None else Decisions.load(config.start_run)
    rankers, note = _choose_rankers(config, data, start)
    hidden = config.network.hidden
    if hidden is None and "mlp" in rankers:
        endless = data.feeding_user is not None or data.stream is not None
        hidden = HIDDEN if endless else network_sizes(data.train.rows, len(data.train.feature_names))
        hidden = hidden if start is None else start.hidden or hidden
    notes = () if note is None else (note,)
    streamed = data.stream is not None
    found = (data.segment, data.segments, streamed, notes, data.fingerprint, data.actions)
    return Decisions(data.label, rankers, hidden, *found)


def network_sizes(rows: int, features: int) -> tuple[int, ...]:
    """Return the sizes of the hidden layers of a network for a log of this size."""
    return SMALL_NETWORK if rows < SMALL_LOG or features < FEW_FEATURES else HIDDEN


def _choose_rankers(config: Config, data: Data, start: Decisions | None) -> tuple[tuple[str, ...], str | None]:
    """Return the kinds of rankers to train, and a sentence if a part of the default is left out."""
    if config.kinds:
        return config.kinds, None
    if start is not None:
        return start.rankers, None
    if not trains_trees_too(config):
        return ("mlp",), None
    why = None
    if size() > 1:
        why = "several processes train networks only"
    elif data.stream is not None:
        why = "they need the whole log in memory, and its lists are streamed"
    elif not all(map(find_spec, ("lightgbm", "numba"))):
        why = "lightgbm or numba is not installed; run: pip install 'ultr[train]'"
    if why is None:
        return ("mlp", "lightgbm"), None
    return ("mlp",), f"the ranker is a network without trees: {why}"


# --- Reading ------------------------------------------------------------------------------------------------------


def load_run_data(config: Config, source: Any = None, *, decided: Decisions | None = None) -> Data:
    """Read the data of a run, once. `source` is a log, frame or table in memory, in place of `config.data.source`.

    With simulated users, an initial ranker sets the order that they see. `decided` are the decisions of a run that is
    resumed, so that it streams its lists and transforms actions as before.
    """
    if config.users is None:
        start = config.start_run
        before = decided or (None if start is None else Decisions.load(start))
        actions = ActionModel.of(config.data, None if before is None else before.actions)
        data = _read_training_log(config, source, actions, streamed=None if decided is None else decided.streamed)
        if start is None or not any(map(is_trees, config.kinds or Decisions.load(start).rankers)):
            return data
        model = load_model(start)  # its trees have its features, and its codes of categories
        test = None if data.test is None else extended_log(model, data.test)
        train, validation = extended_log(model, data.train), extended_log(model, data.validation)
        return replace(data, train=train, validation=validation, test=test)
    simulation = config.simulation
    dataset = cached_dataset(config.data.source, config.data.folder)
    user = make_user(config.users, **{**simulation.user_options, "max_grade": dataset.max_grade})
    feeding: User | None = user.unbiased() if simulation.learn_from == "no-bias" else user
    seed = config.seed
    rankers = initial_rankers(dataset, kind=simulation.logging, share=simulation.share, seed=seed)
    train_log = _shown(dataset.train, rankers, user, config)
    validation = _validation(dataset)
    if config.selection.startswith((FEEDBACK, OFF_POLICY)):  # metrics from feedback
        shown = _shown(validation, rankers, user, config)
        if config.sessions_drawn:
            share = config.data.validation
            least = max(len(shown), round(config.sessions_drawn * share / (1 - share)))
            shown = _drawn(shown, least, seed + 1, config)
        seen_by = user if config.selection.startswith(OFF_POLICY) else feeding or user
        validation, _ = simulate_log(shown, seen_by, seed=seed + 1)
    if config.sessions_drawn:
        drawn = _drawn(train_log, config.sessions_drawn, seed, config)
        train_log, feeding = simulate_log(drawn, feeding or user, seed=seed)[0], None
    label = config.label or DEFAULT_LABEL
    return Data(train_log, validation, dataset.fingerprint, user, feeding, label, initial=rankers[0])


def _shown(log: Log, rankers: Sequence[Callable[[np.ndarray], np.ndarray]], user: User, config: Config) -> Log:
    """Return the requests of a log as each ranker shows them; with several rankers, items have ids."""
    if config.simulation.logging in ("both", "randomised") and not config.sessions_drawn:
        what = f"logging={config.simulation.logging} needs a log that is drawn once"
        raise OptionError(what, got="new feedback at each step", hint="set simulation.sessions to a number above 0")
    if len(rankers) > 1:
        log = replace(log, item_ids=pa.array(np.arange(log.rows)))
    shown = [show(log, ranker(log.features), items=config.simulation.items) for ranker in rankers]
    together = shown[0] if len(shown) == 1 else concatenate_logs(shown)
    return replace(together, positions=user.placed(together.shown_positions("a simulation")))


def _drawn(log: Log, sessions: int, seed: int, config: Config) -> Log:
    """Return a log of this number of sessions: each request as often as any other, up to one, in a random order."""
    drawn = log.select(np.resize(np.random.default_rng(seed).permutation(len(log)), sessions))
    return randomise(drawn, RANDOM_SHARE, seed=seed) if config.simulation.logging == "randomised" else drawn


_RUN_DATA: dict[str, Data] = {}  # key of a configuration -> its data, the last used at the end


def cached_run_data(config: Config) -> Data:
    """Return the data of a run; runs of other methods and learning rates on the same data share it."""
    key = config.data_key()
    data = _RUN_DATA.pop(key, None) or load_run_data(config)
    _RUN_DATA[key] = data
    while len(_RUN_DATA) > 1 and sum(each.train.features.size for each in _RUN_DATA.values()) > CACHED_NUMBERS:
        _RUN_DATA.pop(next(iter(_RUN_DATA)))
    return data


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
    elif data in GENERATED or data in DATASETS or not is_source(data):
        if columns and columns.get("where"):
            raise OptionError("conditions (--where) need a log with named columns", got=data, hint="leave out --where")
        dataset = load_dataset(data, data_dir=data_dir)
        return dataset[split], dataset.max_grade
    return read_log(data, **(columns or {})), None


def _read_training_log(config: Config, source: Any, actions: ActionModel, *, streamed: bool | None) -> Data:
    if isinstance(source, Log):
        return split_log(source, config, actions=actions)
    options = config.data
    if source is not None:
        log, found = _read_once(source, config, **{"time": options.time, **actions.reading})
        return split_log(log, config, found, actions)
    if options.source in GENERATED or options.source in DATASETS:
        hint = "pass --users pbm to simulate users"
        raise OptionError(f"'{options.source}' has true labels but no feedback", hint=hint)
    if is_lists(options.source):
        if actions:
            what = "watch times and delayed actions need a log, and not prepared lists"
            raise OptionError(what, got=options.source, hint="pass the log, or leave out data.watch and action_delay")
        return _read_lists(config, streamed)
    if options.stream == "yes":
        hint = "run ultr prepare on it first"
        raise OptionError("only prepared lists can be streamed", got=options.source, hint=hint)
    files, time = _files(config)
    log, found = _read_once(files, config, **{"time": time, **actions.reading})
    if options.decay is not None:
        log = decayed_by_time(log, options.decay)
    return replace(split_log(log, config, found, actions), fingerprint=files.fingerprint())


def _files(config: Config) -> tuple[Source, str | None]:
    """Return the files of a log, and the name of the column with times, if any is known."""
    files, time = open_source(config.data.source).only(config.data.where), config.data.time
    return files.by_day() if config.data.decay is not None and time is None else (files, time)


def fingerprint_of(config: Config) -> str:
    """Return the fingerprint that the data of a run on a log or prepared lists has now; rows are not read."""
    source = config.data.source
    return Shards(source).fingerprint if is_lists(source) else _files(config)[0].fingerprint()


def _read_once(
    source: Any, config: Config, *, time: str | None, extra: Sequence[str] = ()
) -> tuple[Log, Segment | None]:
    """Read a log together with the columns that may be its segment, and look for a segment if the user named none."""
    options = config.data
    named = options.columns.named()
    rows: dict[str, Any] = {"on_duplicates": options.on_duplicates, "where": options.where, "time": time}
    rows |= {"missing": _missing(config), "extra": extra}
    known = config.examination
    if "segment" in named or known.propensities is not None:
        return read_log(source, **rows, **named), None
    if known.bias is not None:
        return read_log(source, **rows, **{**named, **segment_of_run(known.bias)}), None
    try:
        where = options.source if isinstance(source, Source) else source
        roles, names = segment_candidates(where, time=time, columns=named)
    except UltrError:
        roles, names = None, []  # reading the log reports the error
    if roles is None or not names:
        return read_log(source, **rows, **named), None
    further = [*roles.categorical, *(name for name in names if name not in roles.categorical)]
    log = read_log(source, **rows, **{**named, "features": list(roles.features), "categorical": further})
    found = choose_segment(_only(log, {*roles.features[:FEATURES], *names}), names, label=config.label)
    return _with_segment(log, found, kept=(*roles.features, *roles.categorical)), found


def _with_segment(log: Log, found: Segment | None, *, kept: Sequence[str]) -> Log:
    """Return a log with one of its categories as the segment, and only the features that are `kept`."""
    log, all_features = _only(log, kept), log
    context, columns = dict(log.context), {**log.columns, "categorical": [n for n in kept if n in log.vocabularies]}
    if found is not None:
        place = all_features.feature_names.index(found.column)
        codes = all_features.features[log.offsets[:-1], place].astype(np.int64)
        values = all_features.vocabularies[found.column].cast(pa.string())
        context["segment"] = values.take(pa.array(codes - 1, mask=codes == 0))
        columns["segment"] = found.column
    return replace(log, context=context, columns={role: names for role, names in columns.items() if names})


def _only(log: Log, names: Collection[str]) -> Log:
    """Return a log with only the features that have these names."""
    places = [i for i, name in enumerate(log.feature_names) if name in names]
    if len(places) == len(log.feature_names):
        return log
    vocabularies = {name: values for name, values in log.vocabularies.items() if name in names}
    feature_names = tuple(log.feature_names[i] for i in places)
    return replace(log, features=log.features[:, places], feature_names=feature_names, vocabularies=vocabularies)


def segment_of_run(bias: str) -> dict[str, str]:
    """Return the segment column of the run that --bias names, as an argument of `read_log`; {} if it has none."""
    run = fetched(bias)
    segment = Decisions.load(run).segment if (run / DECISIONS).is_file() else None
    return {} if segment is None else {"segment": segment}


def _missing(config: Config) -> Missing:
    only_trees = bool(config.kinds) and all(map(is_trees, config.kinds))
    return "keep" if only_trees or config.data.missing == "mean" else "reject"


def _read_lists(config: Config, streamed: bool | None) -> Data:
    """Read prepared lists: the training lists into memory, or only a sample of them and a stream of all."""
    if config.data.drop_suspicious:
        hint = "pass --drop-suspicious to ultr prepare, and leave out data.drop_suspicious"
        raise OptionError("suspicious requests are left out when lists are prepared", got=config.data.source, hint=hint)
    shards = Shards(config.data.source, decay=config.data.decay)
    shards.check_names(config.data.columns.named())
    if config.data.where or config.data.split == "time":
        what = "the rows and splits of prepared lists cannot be changed"
        raise OptionError(what, where=config.data.source, hint="pass --where and --split time to ultr prepare")
    about = shards.manifest
    label = config.label or ("label" if about.label is not None else default_label(about.actions))
    rows = min(PART_SAMPLE_ROWS, PART_SAMPLE_BYTES // shards.row_bytes)
    held_out = Shards(config.data.source, "validation", decay=config.data.decay)
    validation = sample_log(held_out.sample(MAX_VALIDATION_ROWS, 0), MAX_VALIDATION_ROWS)
    tested = config.data.test and "test" in about.splits
    test = Shards(config.data.source, "test").sample(rows, 0) if tested else None
    if streamed is None:
        stream = config.data.stream
        streamed = stream == "yes" or (stream == "auto" and not fits_in_memory(shards))
    train = _checked(shards.sample(rows, config.seed) if streamed else shards.read_all(), config)
    if config.simulation.learn_from == "feedback":
        _check_label(train, label, config)
    segments: tuple[str, ...] = ()
    segment = config.data.columns.named().get("segment", train.columns.get("segment"))
    if segment:
        train, segments = by_segment(train)

    def view(log: Log) -> Log:
        log = _checked(log, config)
        return by_segment(log, segments)[0] if segments else log

    validation = in_groups(view(validation))

    def feed(options: TrainingOptions, also: Callable[[Log], Log] = lambda log: log) -> Feeding:
        def seen(log: Log) -> Log:
            return also(view(log))

        device = choose_device(options.device)
        return Stream(
            shards, batch=options.batch, seed=options.seed, device=device, workers=config.machine.workers, view=seen
        )

    return Data(
        train,
        validation,
        shards.fingerprint,
        label=label,
        segment=segment or None,
        test=None if test is None else in_groups(view(test)),
        segments=segments,
        all_positions=None if segments else about.positions,
        all_binary=about.binary,
        stream=feed if streamed else None,
    )


def _checked(log: Log, config: Config) -> Log:
    """Return prepared lists; raise DataError if a value is missing and the configuration rejects such values."""
    check_features(log.features, list(log.feature_names), where=config.data.source, missing=_missing(config))
    return log


def fits_in_memory(shards: Shards) -> bool:
    """Return whether one copy of the lists per process takes less than `MEMORY_SHARE` of the free memory."""
    return shards.rows * shards.row_bytes * local_size() < MEMORY_SHARE * available_memory()


def split_log(
    log: Log,
    config: Config,
    found: Segment | None = None,
    actions: ActionModel = ActionModel(),
) -> Data:
    """Split a log into train, validation and test requests: its queries at random, or its requests by time.

    A random split into train and validation requests follows from the seed. Test requests are the same for all seeds,
    so that no seed can choose a setting on them. In a split by time, the last requests are for testing, and those
    before them for validation. `actions` are transformed, by estimates of the train requests where it has none.
    """
    options, label = config.data, config.label or _default_label(log, config)
    log, actions = actions.arrived(log, options.actions_until)
    log, suspicious = _without_suspicious(log, label) if options.drop_suspicious else (log, None)
    segments: tuple[str, ...] = ()
    segment = log.columns.get("segment") or options.columns.named().get("segment")
    if segment:
        log, segments = by_segment(log)
    if options.split == "time":
        trained, held_out, tested = split_by_time(log, options.validation, options.test)
    else:
        trained, held_out, tested = random_split(log, config)
    if not (len(trained) and len(held_out)):
        count = len(held_out) + len(tested)
        what = f"a log needs more than {count} requests, because {count} are held out from training"
        hint = "collect more requests; all requests of a query, or of a time, are on one side of the split"
        raise DataError(what, where=options.source or None, got=len(log), hint=hint)
    log, actions = actions.continued(log, trained)
    log = replace(log, extra={})
    train = log.select(trained)
    if config.simulation.learn_from == "feedback":
        _check_label(train, label, config)
    return Data(
        train,
        in_groups(sample_log(log.select(held_out), MAX_VALIDATION_ROWS)),
        f"{len(log)}-{log.rows}",
        label=label,
        test=in_groups(log.select(tested)) if len(tested) else None,
        segment=segment or None,
        found_segment=found,
        segments=segments,
        suspicious=suspicious,
        actions=actions or None,
    )


def _default_label(log: Log, config: Config) -> str:
    """Return the label of a log for which the user gave none: quantiles of watch times are a label by themselves."""
    quantiles = config.data.watch if config.data.remove_duration else None
    return default_label(log.actions) if quantiles is None else click_label([quantiles])


def _without_suspicious(log: Log, label: str) -> tuple[Log, Any]:
    """Return the log without requests with impossible click rates, and their ids."""
    dropped = suspicious_requests(log, np.asarray(Label(label)(log.actions)) > 0)
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
    columns: dict[str, Any] = {"columns": model.columns, "categorical": list(model.vocabularies) or None}
    return {**columns, "missing": model.missing, "on_duplicates": read_config(run).data.on_duplicates, **named}


def _check_label(log: Log, label: str, config: Config) -> None:
    """Raise DataError before training if no label is positive, or if a label is too large."""
    highest = float(np.max(Label(label)(log.actions)))
    where = config.data.source or None
    hint = f"check --label '{label}', and the columns of its actions"
    if not highest > 0:
        raise DataError("no training request has a positive label", where=where, hint=hint)
    if highest > LARGEST_LABEL:
        hint = f"scale the label down, as in --label '({label}) / 1e9'"
        raise DataError(
            f"labels above {LARGEST_LABEL:g} are too large to learn from", where=where, got=highest, hint=hint
        )


# --- Requests that a run has used -------------------------------------------------------------------------------------


def read_used(run: Path) -> dict[str, np.ndarray] | None:
    """Return the hashes of the requests that a run was `trained` on and `selected` on; None if it has not saved them.

    Runs whose lists were streamed have not.
    """
    path = run / OUTCOME / USED
    if not path.is_file():
        return None
    tensors = load_tensors(path)
    return {name: tensors[name].numpy() for name in ("trained", "selected")}


def used_requests(run: Path, log: Log | LogParts) -> tuple[np.ndarray, np.ndarray] | None:
    """Return masks of the requests of a log that a run was trained on, and that it was selected on."""
    if (used := read_used(run)) is None:
        return None
    model = load_model(run)
    hashes = (LogParts.of(log) if isinstance(log, Log) else log).mapped(lambda part: request_hashes(model.view(part)))
    return np.isin(hashes, used["trained"]), np.isin(hashes, used["selected"])


def random_split(log: Log, config: Config) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the requests for training, validation and testing, chosen at random.

    A query that the run `warm_start` was trained on stays for training, and one that it was selected on for
    validation. Else validation would favour that run, which may know its requests.
    """
    used = None if config.start_run is None else used_requests(config.start_run, log)
    if used is None:
        return _split(log, config)
    query = queries_of(log)
    trained, selected = (np.bincount(query, mask)[query] > 0 for mask in used)
    new = np.flatnonzero(~(trained | selected))
    parts = _split(log.select(new), config) if len(new) else (new, new, new)
    learned, held_out, tested = (new[part] for part in parts)
    learned = np.union1d(learned, np.flatnonzero(trained))
    held_out = np.union1d(held_out, np.flatnonzero(selected & ~trained))
    return (learned, held_out, tested) if len(learned) and len(held_out) else _split(log, config)


def _split(log: Log, config: Config) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shares = (config.data.validation, config.data.test)
    wanted = [max(1, round(share * len(log))) if share else 0 for share in shares]
    tested, others = split_by_query(log, wanted[1:], seed=0) if wanted[1] else (np.arange(0), np.arange(len(log)))
    chosen, rest = split_by_query(log.select(others) if len(tested) else log, wanted[:1], seed=config.seed)
    return others[rest], others[chosen], tested
