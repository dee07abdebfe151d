"""What a run is, and its data: read, shown to simulated users or split, before anything is learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ultr import __version__
from ultr.arguments import check_fields, taken
from ultr.datasets import DATASETS, Dataset, highest_grade, initial_ranker, load_dataset, show
from ultr.errors import DataError, OptionError, nearest
from ultr.evaluation import FEEDBACK, OFF_POLICY, parse_any_metric
from ultr.feeding import Feed, Feeding, Stream
from ultr.files import fingerprint
from ultr.formats import check_format
from ultr.labels import DEFAULT_LABEL, Label
from ultr.lists import ListBatches
from ultr.log import Log, read_log
from ultr.log.build import Missing
from ultr.log.schema import NAMES
from ultr.log.segments import by_segment
from ultr.log.shards import Shards, is_lists
from ultr.memory import available_memory
from ultr.processes import local_size
from ultr.rankers.boosters import is_trees, library_version
from ultr.simulate import User, make_user, simulate_log
from ultr.training import Streamed, TrainingOptions, choose_device

FORMAT = 1
LearnFrom = Literal["feedback", "truth", "no-bias"]
DEFAULT_METHOD = "pairwise-em"
COLUMNS = (*NAMES, "actions", "features", "categorical")  # of a log, that can be named
AUTO = "auto"  # selection: off policy from a log, on the feedback of users where they are simulated
Streaming = Literal["auto", "yes", "no"]
MAX_VALIDATION_ROWS = 100_000  # evaluated often while training; enough to tell rankers apart
SAMPLE_ROWS, SAMPLE_BYTES = 1_000_000, 256 << 20  # of shards, where all of a log is asked for: to find examination by
LARGEST_LABEL = 1e12  # labels are squared, in single precision
TREE_SESSIONS = 20_000  # of simulated users, that trees learn from
MEMORY_SHARE = 0.5  # of what there is, that lists may take before they are streamed


@dataclass(frozen=True)
class RunConfig:
    """Everything needed to repeat a run."""

    data: str  # a log; or, with users, a data set with true labels
    method: str = DEFAULT_METHOD
    method_options: Mapping[str, Any] = field(default_factory=dict)
    learn_from: LearnFrom = "feedback"
    label: str = DEFAULT_LABEL
    ranker: str = "mlp"
    ranker_options: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)  # of a log, as for read_log
    users: str | None = None
    user_options: Mapping[str, Any] = field(default_factory=dict)
    propensities: Mapping[str, float] | None = None  # known examination by position, or `position@segment`
    data_dir: str | None = None
    items: int = 10  # shown per request, of a data set
    share: float = 0.01  # of training requests that the initial ranker learns from
    held_out: float = 0.2  # share of a log's requests kept for validation
    judged: float = 0.0  # share of a log's requests kept for test, which neither training nor selection sees
    select: str = AUTO
    stream: Streaming = "auto"  # prepared lists: read while training, or first into memory; auto: by what fits
    sessions: int = 0  # drawn once from simulated users; 0: fresh feedback each step, or for trees as many as usual
    bias: str | None = None  # a run, or its bias.json, to take what is known of bias from
    workers: int = 0  # threads that read while training; 0: as cores allow
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("data", "data_dir", "bias"):
            taken(name, getattr(self, name), str | Path | None)
        if unknown := next((name for name in self.columns if name not in COLUMNS), None):
            raise OptionError(f"a log has no column called {unknown!r}", mend=nearest(unknown, COLUMNS))
        if self.learn_from not in get_args(LearnFrom):
            raise OptionError(
                f"cannot learn from '{self.learn_from}'", mend=nearest(self.learn_from, get_args(LearnFrom))
            )
        if not (self.held_out > 0 and self.judged >= 0 and self.held_out + self.judged < 1):
            got = f"{self.held_out} and {self.judged}"
            raise OptionError("the shares for validation and test should be between 0 and 1 and leave some", got=got)
        if self.stream not in get_args(Streaming):
            raise OptionError("'stream' should be auto, yes or no", got=f"'{self.stream}'")
        if self.sessions < 0:
            raise OptionError("'sessions' should be 0 or more", got=self.sessions)
        if self.bias is not None and self.propensities is not None:
            raise OptionError("examination is known from propensities or from a bias, not both", mend="leave one out")
        if self.workers < 0:
            raise OptionError("'workers' should be 0 or more", got=self.workers)
        if self.learn_from == "no-bias" and self.users is None:
            raise OptionError("a no-bias bound needs simulated users", mend="pass --users pbm")
        Label(self.label)
        parse_any_metric(self.selection)

    @property
    def sessions_drawn(self) -> int:
        """How many sessions of simulated users there are; 0 where they are asked at each step."""
        return self.sessions or (TREE_SESSIONS if self.users is not None and is_trees(self.ranker) else 0)

    @property
    def selection(self) -> str:
        """The metric that the best step is chosen by."""
        if self.select != AUTO:
            return self.select
        own = self.users is None and self.learn_from == "feedback"
        return f"{OFF_POLICY}reward@10" if own else f"{FEEDBACK}ndcg@10"

    def to_json(self) -> dict[str, Any]:
        versions = {"ultr": __version__, "torch": torch.__version__, **library_version(self.ranker)}
        return {"format": FORMAT, **versions, **asdict(self)}

    @staticmethod
    def from_json(content: Mapping[str, Any], *, where: object = None) -> RunConfig:
        check_format(content, FORMAT, what="the run", where=where, mend="train again")
        names = {f.name for f in fields(RunConfig)}
        known = {name: value for name, value in content.items() if name in names}
        try:
            return RunConfig(**{**known, "training": TrainingOptions(**known["training"])})
        except (TypeError, KeyError) as error:
            raise DataError(f"the configuration cannot be read ({error})", where=where, mend="train again") from error


@dataclass(frozen=True, eq=False)
class Prepared:
    """The data of a run: what is learned from, what is held out, and who the users are, if they are simulated."""

    train: Log
    validation: Log
    fingerprint: str
    user: User | None = None  # shown the rankings that are evaluated
    feeding_user: User | None = None  # whose fresh feedback is learned from
    test: Log | None = None  # of a log, if a share of it is to be judged on
    segments: tuple[str, ...] = ()  # that examination differs between
    positions: tuple[int, ...] | None = None  # and actions that are 0 or 1, where they are known of all requests
    binary: tuple[str, ...] | None = None
    stream: Streamed | None = None  # what is learned from where it does not fit in memory: `train` is a sample of it
    initial: Callable[[np.ndarray], np.ndarray] | None = None  # the ranker that showed a data set

    def logged_scores(self) -> np.ndarray | None:
        """Scores by which validation is in its logged order, if it has one."""
        log = self.validation
        if log.positions is not None:  # in whose order rows are
            return np.repeat(log.offsets[:-1], log.lengths) - np.arange(log.rows, dtype=np.float64)
        return None if self.initial is None else self.initial(log.features)

    def feed(self, options: TrainingOptions) -> Feeding:
        """The lists of each step."""
        if self.stream is not None:
            return self.stream.feed(options)
        lists = ListBatches(self.train, device=choose_device(options.device))
        return Feed(lists, batch=options.batch, seed=options.seed, user=self.feeding_user)


def prepare(config: RunConfig) -> Prepared:
    """Read the data of a run; a data set is shown by its initial ranker to simulated users."""
    if config.users is None:
        return _prepare_log(config)
    dataset = cached_dataset(config.data, config.data_dir)
    user = make_user(config.users, **{**config.user_options, "max_grade": dataset.max_grade})
    feeding: User | None = user.unbiased() if config.learn_from == "no-bias" else user
    seed = config.training.seed
    initial = initial_ranker(dataset, share=config.share, seed=seed)
    train_log = show(dataset.train, initial(dataset.train.features), items=config.items)
    validation = _at_most(dataset.validation, MAX_VALIDATION_ROWS)
    if config.selection.startswith((FEEDBACK, OFF_POLICY)):  # judged by what users do with what they are shown
        shown = show(validation, initial(validation.features), items=config.items)
        validation, _ = simulate_log(shown, feeding or user, seed=seed + 1)
    if config.sessions_drawn:
        order = np.random.default_rng(seed).permutation(len(train_log))
        drawn = train_log.select(np.resize(order, config.sessions_drawn))
        train_log, feeding = simulate_log(drawn, feeding or user, seed=seed)[0], None
    return Prepared(train_log, validation, dataset.fingerprint, user, feeding, initial=initial)


@lru_cache(maxsize=1)
def cached_dataset(name: str, data_dir: str | None) -> Dataset:
    """The data set of the last run stays at hand for the next."""
    return load_dataset(name, data_dir=data_dir)


def read_data(
    data: str, *, split: str, data_dir: str | Path | None, columns: Mapping[str, Any] | None = None
) -> tuple[Log, int]:
    """A log with its columns as they are named, or a split of a data set; and the highest grade."""
    log, highest = read_rows(data, split=split, data_dir=data_dir, columns=columns)
    if highest is None:
        highest = 4 if log.relevance is None else highest_grade(log, where=data)
    return log, highest


def read_rows(
    data: str, *, split: str, data_dir: str | Path | None, columns: Mapping[str, Any] | None = None
) -> tuple[Log, int | None]:
    """The same where grades may be any: the highest is told if the data set says it."""
    if is_lists(data):
        data = str(Path(data) / split)
    elif data == "synthetic" or data in DATASETS or (Path(data).is_dir() and not is_lists(Path(data).parent)):
        dataset = load_dataset(data, data_dir=data_dir)
        return dataset[split], dataset.max_grade
    return read_log(data, **(columns or {})), None


def _prepare_log(config: RunConfig) -> Prepared:
    if config.data == "synthetic" or config.data in DATASETS:
        raise OptionError(f"'{config.data}' has true labels and no feedback", mend="pass --users pbm to simulate it")
    if is_lists(config.data):
        return _prepare_lists(config)
    if config.stream == "yes":
        raise OptionError("only prepared lists are streamed", got=config.data, mend="make them with ultr prepare")
    _refuse_too_large(Path(config.data))
    missing: Missing = "keep" if is_trees(config.ranker) else "refuse"
    prepared = split_log(read_log(config.data, missing=missing, **config.columns), config)
    return replace(prepared, fingerprint=fingerprint(Path(config.data)))


def _refuse_too_large(path: Path) -> None:
    """Say what to do with a log that memory cannot hold, before it is full."""
    files = [path] if path.suffix.lower() in (".parquet", ".pq") else sorted(path.glob("*.parquet"))
    try:
        footers = [pq.read_metadata(file) for file in files if file.is_file()]
    except (pa.ArrowException, OSError):
        return  # the reader says what is wrong
    size = sum(footer.row_group(i).total_byte_size for footer in footers for i in range(footer.num_row_groups))
    if size > available_memory():
        got = f"{size / 2**30:.1f} GiB where {available_memory() / 2**30:.1f} are free"
        raise DataError("the log does not fit in memory", where=path, got=got, mend="make lists with ultr prepare")


def _prepare_lists(config: RunConfig) -> Prepared:
    """The splits of prepared lists: in memory, or a sample of what is learned from, and a stream of it."""
    shards = Shards(config.data)
    shards.check_names(config.columns)
    about, seed = shards.manifest, config.training.seed
    rows = min(SAMPLE_ROWS, SAMPLE_BYTES // shards.row_bytes)
    validation = _at_most(Shards(config.data, "validation").sample(MAX_VALIDATION_ROWS, 0), MAX_VALIDATION_ROWS)
    test = Shards(config.data, "test").sample(rows, 0) if config.judged else None
    streamed = config.stream == "yes" or (config.stream == "auto" and not _fits(shards))
    learned = shards.sample(rows, seed) if streamed else shards.read_all()
    if config.learn_from == "feedback":
        _check_label(learned, config)
    segments: tuple[str, ...] = ()
    if config.columns.get("segment"):
        learned, segments = by_segment(learned)
    view = partial(_viewed, segments=segments)
    validation = view(validation)

    def feed(options: TrainingOptions) -> Feeding:
        device = choose_device(options.device)
        return Stream(shards, batch=options.batch, seed=options.seed, device=device, workers=config.workers, view=view)

    return Prepared(
        learned,
        validation,
        shards.fingerprint,
        test=None if test is None else view(test),
        segments=segments,
        positions=None if segments else about.positions,
        binary=about.binary,
        stream=Streamed(feed, validation) if streamed else None,
    )


def _viewed(log: Log, segments: tuple[str, ...]) -> Log:
    return by_segment(log, segments)[0] if segments else log


def _fits(shards: Shards) -> bool:
    """Whether all requests, once for each process on this machine, leave memory for the rest."""
    return shards.rows * shards.row_bytes * local_size() < MEMORY_SHARE * available_memory()


def split_log(log: Log, config: RunConfig) -> Prepared:
    """A log's requests for training, and those held out for validation and test, by the seed."""
    log, segments = by_segment(log) if config.columns.get("segment") else (log, ())
    order = np.random.default_rng(config.training.seed).permutation(len(log))
    held = max(1, round(config.held_out * len(log)))
    judged = held + (max(1, round(config.judged * len(log))) if config.judged else 0)
    if judged >= len(log):
        what = f"a log needs more than {judged} requests: some are held out"
        raise DataError(what, where=config.data or None, got=len(log), mend="collect more of them")
    validation = _at_most(log.select(np.sort(order[:held])), MAX_VALIDATION_ROWS)
    test = log.select(np.sort(order[held:judged])) if config.judged else None
    learned = log.select(np.sort(order[judged:]))
    if config.learn_from == "feedback":
        _check_label(learned, config)
    return Prepared(learned, validation, f"{len(log)}-{log.rows}", test=test, segments=segments)


def _check_label(log: Log, config: RunConfig) -> None:
    """Refuse labels that nothing can be learned from before any step is taken."""
    highest = float(np.max(Label(config.label)(log.actions)))
    where, mend = config.data or None, f"check --label '{config.label}', and the actions"
    if not highest > 0:
        raise DataError("no label of the requests to learn from is positive", where=where, mend=mend)
    if highest > LARGEST_LABEL:
        mend = f"scale it down, as in --label '({config.label}) / 1e9'"
        raise DataError(
            f"labels above {LARGEST_LABEL:g} are too large to learn from", where=where, got=highest, mend=mend
        )


def _at_most(log: Log, rows: int) -> Log:
    """The log, or random requests of it with about so many rows."""
    if log.rows <= rows:
        return log
    order = np.random.default_rng(0).permutation(len(log))
    fits = max(1, int(np.searchsorted(np.cumsum(log.lengths[order]), rows, "right")))
    return log.select(np.sort(order[:fits]))
