"""A run: from a configuration to a run directory with a model that scores."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from ultr import __version__
from ultr.checkpoint import (
    append_metrics,
    load_checkpoint,
    load_tensors,
    locked,
    read_json,
    read_metrics,
    rewind_metrics,
    save_checkpoint,
    save_tensors,
    waiting_for,
    write_json,
)
from ultr.datasets import DATASETS, Dataset, initial_ranker, load_dataset, show
from ultr.errors import DataError, LabelError, OptionError, OutputError, nearest
from ultr.evaluation import FEEDBACK, evaluate_scores
from ultr.files import atomic_path, fingerprint
from ultr.labels import DEFAULT_LABEL, Label
from ultr.lists import ListBatches
from ultr.log import Log, read_log
from ultr.methods import Method, MethodInputs, make_method, thresholds
from ultr.metrics import parse_metric
from ultr.models import save_model
from ultr.rankers import score_rows
from ultr.simulate import User, make_user, simulate_log
from ultr.training import (
    Feed,
    Progress,
    TrainingOptions,
    TrainingState,
    choose_device,
    fit_first,
    start,
    train,
)

FORMAT = 1
BIAS_BATCHES = 20  # of lists in which a bias model is looked at
LearnFrom = Literal["feedback", "truth", "no-bias"]
DEFAULT_METHOD = "pairwise-em"
DEFAULT_SELECT = "feedback-ndcg@10"
MAX_VALIDATION_ROWS = 100_000  # evaluated often while training; enough to tell rankers apart


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
    propensities: Mapping[str, float] | None = None  # known examination by position
    data_dir: str | None = None
    items: int = 10  # shown per request, of a data set
    share: float = 0.01  # of training requests that the initial ranker learns from
    held_out: float = 0.2  # share of a log's requests kept for validation
    judged: float = 0.0  # share of a log's requests kept for test, which neither training nor selection sees
    select: str = DEFAULT_SELECT
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def __post_init__(self) -> None:
        if self.learn_from not in get_args(LearnFrom):
            raise OptionError(
                f"cannot learn from '{self.learn_from}'", mend=nearest(self.learn_from, get_args(LearnFrom))
            )
        if not (self.held_out > 0 and self.judged >= 0 and self.held_out + self.judged < 1):
            got = f"{self.held_out} and {self.judged}"
            raise OptionError("the shares for validation and test should be between 0 and 1 and leave some", got=got)
        if self.learn_from == "no-bias" and self.users is None:
            raise OptionError("a no-bias bound needs simulated users", mend="pass --users pbm")
        Label(self.label)
        parse_metric(self.select.removeprefix(FEEDBACK))

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "ultr": __version__, "torch": torch.__version__, **asdict(self)}

    @staticmethod
    def from_json(content: Mapping[str, Any], *, where: object = None) -> RunConfig:
        if content.get("format") != FORMAT:
            raise DataError("the run is of another version", where=where, got=content.get("format"), mend="train again")
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


def prepare(config: RunConfig) -> Prepared:
    """Read the data of a run; a data set is shown by its initial ranker to simulated users."""
    if config.users is None:
        return _prepare_log(config)
    dataset = cached_dataset(config.data, config.data_dir)
    user = make_user(config.users, **{**config.user_options, "max_grade": dataset.max_grade})
    feeding = user.unbiased() if config.learn_from == "no-bias" else user
    seed = config.training.seed
    initial = initial_ranker(dataset, share=config.share, seed=seed)
    train_log = show(dataset.train, initial(dataset.train.features), items=config.items)
    validation = _at_most(dataset.validation, MAX_VALIDATION_ROWS)
    if config.select.startswith(FEEDBACK):  # judged by what users do with what they are shown
        shown = show(validation, initial(validation.features), items=config.items)
        validation, _ = simulate_log(shown, feeding, seed=seed + 1)
    return Prepared(train_log, validation, dataset.fingerprint, user, feeding)


@lru_cache(maxsize=1)
def cached_dataset(name: str, data_dir: str | None) -> Dataset:
    """The data set of the last run stays at hand for the next."""
    return load_dataset(name, data_dir=data_dir)


def read_data(
    data: str, *, split: str, data_dir: str | Path | None, categorical: list[str] | None = None
) -> tuple[Log, int]:
    """A log, or a split of a data set, with its highest grade."""
    if data == "synthetic" or data in DATASETS or Path(data).is_dir():
        dataset = load_dataset(data, data_dir=data_dir)
        return dataset[split], dataset.max_grade
    log = read_log(data, categorical=categorical or None)
    return log, 4 if log.relevance is None else max(1, int(np.ceil(log.relevance.max())))


def _prepare_log(config: RunConfig) -> Prepared:
    if config.data == "synthetic" or config.data in DATASETS:
        raise OptionError(f"'{config.data}' has true labels and no feedback", mend="pass --users pbm to simulate it")
    prepared = split_log(read_log(config.data, **config.columns), config)
    return replace(prepared, fingerprint=fingerprint(Path(config.data)))


def split_log(log: Log, config: RunConfig) -> Prepared:
    """A log's requests for training, and those held out for validation and test, by the seed."""
    order = np.random.default_rng(config.training.seed).permutation(len(log))
    held = max(1, round(config.held_out * len(log)))
    judged = held + (max(1, round(config.judged * len(log))) if config.judged else 0)
    if judged >= len(log):
        raise DataError(f"a log needs more than {judged} requests: some are held out", got=len(log))
    validation = _at_most(log.select(np.sort(order[:held])), MAX_VALIDATION_ROWS)
    test = log.select(np.sort(order[held:judged])) if config.judged else None
    learned = log.select(np.sort(order[judged:]))
    if config.learn_from == "feedback":
        Label(config.label)(learned.actions)  # refuse labels that cannot be computed before any step is taken
    return Prepared(learned, validation, f"{len(log)}-{log.rows}", test=test)


def _at_most(log: Log, rows: int) -> Log:
    """The log, or random requests of it with about so many rows."""
    if log.rows <= rows:
        return log
    order = np.random.default_rng(0).permutation(len(log))
    fits = max(1, int(np.searchsorted(np.cumsum(log.lengths[order]), rows, "right")))
    return log.select(np.sort(order[:fits]))


def method_inputs(config: RunConfig, log: Log, user: User | None = None) -> MethodInputs:
    return MethodInputs(
        label=Label(config.label),
        features=len(log.feature_names),
        positions=() if log.positions is None else tuple(np.unique(log.positions).tolist()),
        categories={log.feature_names.index(n): len(values) + 1 for n, values in log.vocabularies.items()},
        ranker=config.ranker,
        ranker_options=config.ranker_options,
        truth=config.learn_from == "truth",
        propensities=None if config.propensities is None else {int(k): v for k, v in config.propensities.items()},
        feature_names=log.feature_names,
        binary=_binary(log) if user is None else user.binary_actions,
    )


def _binary(log: Log) -> tuple[str, ...]:
    """The actions of a log that are 0 or 1."""
    return tuple(name for name, values in log.actions.items() if bool(np.isin(values, (0, 1)).all()))


def run_training(
    config: RunConfig,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    warm_start: Path | None = None,
    shared: Path | None = None,
    log: Log | None = None,
    checkpoint_seconds: float = 10.0,
    on_first: Callable[[Progress], None] = lambda _: None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Train as configured into `out`, going on from its last checkpoint if `resume`; returns `out`.

    A `log` that is at hand is learned from in place of the one that the configuration names. Bias models are looked for
    and left in the folder `shared`, if given, for runs that differ in what comes after; `on_first` hears of their fit.
    """
    if out.exists() and not (resume or overwrite):
        raise OutputError("output exists already", where=out, mend="pass --resume or --overwrite, or another path")
    if resume and (out / "model").is_dir():
        return out
    if resume and (out / "config.json").is_file():
        config = RunConfig.from_json(read_json(out / "config.json"), where=out)
    # What cannot be used is refused before anything is written.
    prepared = prepare(config) if log is None else split_log(log, config)
    torch.manual_seed(config.training.seed)
    method = make_method(
        config.method, method_inputs(config, prepared.train, prepared.feeding_user), **config.method_options
    )
    if warm_start is not None:
        _start_from(method, warm_start)
    state = start(method, prepared.train, config.training)
    begun_before = out.exists()
    try:
        with locked(out):
            if overwrite and not resume:
                _empty(out)
            write_json(out / "config.json", config.to_json())
            _train(config, prepared, method, state, out, shared, checkpoint_seconds, on_first, on_progress)
    except (DataError, LabelError):
        if not (begun_before or (out / "checkpoints").is_dir() or read_metrics(out)):
            shutil.rmtree(out, ignore_errors=True)  # it learned nothing: the same command can be given again, mended
        raise
    return out


def _empty(run: Path) -> None:
    for path in run.iterdir():
        if path.name != ".lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _train(
    config: RunConfig,
    prepared: Prepared,
    method: Method,
    state: TrainingState,
    out: Path,
    shared: Path | None,
    checkpoint_seconds: float,
    on_first: Callable[[Progress], None],
    on_progress: Callable[[Progress], None],
) -> None:
    if not load_checkpoint(out, state):
        _fit_first(config, prepared, method, shared, on_first)
        if method.first() is not None:
            save_checkpoint(out, state)
    rewind_metrics(out, state.step)
    device = choose_device(config.training.device)
    feed = Feed(
        ListBatches(prepared.train, device=device),
        batch=config.training.batch,
        seed=config.training.seed,
        user=prepared.feeding_user,
    )
    select = config.select

    def evaluate(method: Method) -> dict[str, float]:
        method.eval()
        scores = score_rows(method.score, prepared.validation.features, device=device)
        return mean_figures(prepared.validation, scores, [select], user=prepared.user, label=config.label)

    saved = time.monotonic()
    for progress in train(
        state, feed, evaluate, config.training, select=select, larger_is_better=not _less_is_better(select)
    ):
        append_metrics(out, {"step": progress.step, "loss": progress.loss, **progress.figures})
        if time.monotonic() - saved >= checkpoint_seconds:
            save_checkpoint(out, state)
            saved = time.monotonic()
        on_progress(progress)
    method.load_state_dict(state.best_weights)
    if (bias := method.bias(feed(step) for step in range(BIAS_BATCHES))) is not None:
        cut = thresholds(config.method, config.label, config.method_options)
        write_json(out / "bias.json", {**bias, "label": f"{config.label} > 0" if cut else config.label})
    save_model(out / "model", method, prepared.train, data=prepared.fingerprint)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)


def _fit_first(
    config: RunConfig,
    prepared: Prepared,
    method: Method,
    shared: Path | None,
    on_progress: Callable[[Progress], None],
) -> None:
    """Fit what comes before the ranker, or take it from a run with the same data, seed and options of it."""
    model = method.first()

    def fit() -> None:
        fit_first(method, prepared.train, config.training, user=prepared.feeding_user, on_progress=on_progress)

    if shared is None or model is None:
        fit()
        return
    own = config.training
    training = TrainingOptions(seed=own.seed, batch=own.batch, bias_steps=own.bias_steps)
    about = asdict(replace(config, method_options={}, ranker_options={}, select=DEFAULT_SELECT, training=training))
    key = hashlib.sha256(json.dumps([about, model.settings()], sort_keys=True).encode()).hexdigest()[:16]
    with waiting_for(shared / key):
        kept = shared / f"{key}.safetensors"
        if kept.is_file():
            model.load_state_dict(load_tensors(kept))
            return
        fit()
        with atomic_path(kept, overwrite=True) as temporary:
            save_tensors(temporary, model.state_dict())


def mean_figures(
    log: Log, scores: np.ndarray, metrics: list[str], *, user: User | None, label: str
) -> dict[str, float]:
    figures = evaluate_scores(log, scores, metrics, user=user, label=label)
    return {name: float(np.average(values, weights=log.weights)) for name, values in figures.items()}


def best_evaluation(run: Path) -> tuple[str, dict[str, Any]]:
    """The selection metric of a run, and its best evaluation by it."""
    select = RunConfig.from_json(read_json(run / "config.json"), where=run).select
    choose = min if _less_is_better(select) else max
    return select, choose(read_metrics(run), key=lambda line: float(line[select]))


def _less_is_better(metric: str) -> bool:
    return metric.removeprefix(FEEDBACK) == "arp"


def _start_from(method: Method, run: Path) -> None:
    """Take the weights of another run's ranker, which must be of the same shape."""
    weights = load_tensors(run / "model" / "weights.safetensors")
    own = method.serving()  # whose ranker is the method's
    if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in own.state_dict().items()}:
        raise DataError(
            "its ranker has another shape", where=run, mend="start from a run with the same features and ranker"
        )
    own.load_state_dict(weights)


def with_training(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, training=replace(config.training, **changes))
