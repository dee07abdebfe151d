"""A run: from a configuration to a run directory with a model that scores."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import nn

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
    write_json,
)
from ultr.datasets import DATASETS, Dataset, load_dataset, ranking_svm, show
from ultr.errors import DataError, OptionError, OutputError, nearest
from ultr.evaluation import FEEDBACK, evaluate_scores
from ultr.files import atomic_path, fingerprint
from ultr.labels import DEFAULT_LABEL, Label
from ultr.log import Log, read_log
from ultr.methods import Method, MethodInputs, make_method
from ultr.metrics import parse_metric
from ultr.rankers import FeatureEncoder, WithConstants, make_ranker
from ultr.simulate import User, make_user, simulate_log
from ultr.training import Feed, Progress, TrainingOptions, TrainingState, choose_device, score_rows, start, train

FORMAT = 1
LearnFrom = Literal["feedback", "truth", "no-bias"]
DEFAULT_METHOD = "lambdarank"
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
    initial = ranking_svm(dataset.train, share=config.share, seed=seed)
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


def method_inputs(config: RunConfig, log: Log) -> MethodInputs:
    return MethodInputs(
        label=Label(config.label),
        features=len(log.feature_names),
        positions=() if log.positions is None else tuple(np.unique(log.positions).tolist()),
        categories={log.feature_names.index(n): len(values) + 1 for n, values in log.vocabularies.items()},
        ranker=config.ranker,
        ranker_options=config.ranker_options,
        truth=config.learn_from == "truth",
    )


def run_training(
    config: RunConfig,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    warm_start: Path | None = None,
    log: Log | None = None,
    checkpoint_seconds: float = 10.0,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Train as configured into `out`, going on from its last checkpoint if `resume`; returns `out`.

    A `log` that is at hand is learned from in place of the one that the configuration names.
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
    method = make_method(config.method, method_inputs(config, prepared.train), **config.method_options)
    if warm_start is not None:
        _start_from(method, warm_start)
    state = start(method, prepared.train, config.training)
    with locked(out):
        if overwrite and not resume:
            _empty(out)
        write_json(out / "config.json", config.to_json())
        _train(config, prepared, state, out, checkpoint_seconds, on_progress)
    return out


def _empty(run: Path) -> None:
    for path in run.iterdir():
        if path.name != ".lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _train(
    config: RunConfig,
    prepared: Prepared,
    state: TrainingState,
    out: Path,
    checkpoint_seconds: float,
    on_progress: Callable[[Progress], None],
) -> None:
    method = state.method
    load_checkpoint(out, state)
    rewind_metrics(out, state.step)
    device = choose_device(config.training.device)
    feed = Feed(
        prepared.train,
        batch=config.training.batch,
        seed=config.training.seed,
        device=device,
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
    if (bias := method.bias()) is not None:
        write_json(out / "bias.json", bias)
    save_model(out / "model", method, config, prepared)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)


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
    own = method.ranker.state_dict()
    if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in own.items()}:
        raise DataError(
            "its ranker has another shape", where=run, mend="start from a run with the same features and ranker"
        )
    method.ranker.load_state_dict(weights)


@dataclass(frozen=True, eq=False)
class Model:
    """A ranker that scores, the features it takes, and the label it was trained for."""

    ranker: nn.Module
    feature_names: tuple[str, ...]
    label: str
    vocabularies: Mapping[str, Any] = field(default_factory=dict)  # categorical feature -> its values, as for Log

    def score(self, log: Log, *, device: str = "cpu") -> np.ndarray:
        """A score for each row of a log with the same features, in any order."""
        return self.score_features(self.columns_of(log), device=device)

    def score_features(self, features: np.ndarray, *, device: str = "cpu") -> np.ndarray:
        """A score for each row of features, which are those of the model in its order."""
        chosen = choose_device(device)
        return score_rows(self.ranker.to(chosen), features, device=chosen)

    def columns_of(self, log: Log) -> np.ndarray:
        if log.feature_names == self.feature_names and not self.vocabularies:
            return log.features
        place = {name: i for i, name in enumerate(log.feature_names)}
        lacking = [name for name in self.feature_names if name not in place]
        if lacking:
            shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
            raise DataError(
                f"the data lacks features the model was trained on: {shown}", mend="name them with --features"
            )
        columns = log.features[:, [place[name] for name in self.feature_names]]
        for i, name in enumerate(self.feature_names):
            if (name in self.vocabularies) != (name in log.vocabularies):
                raise DataError(f"'{name}' should be a category here as in training", mend="name it with --categorical")
            if name in self.vocabularies:
                translation = np.append(0, self.codes_of(name, log.vocabularies[name]))
                columns[:, i] = translation[columns[:, i].astype(np.int64)]
        return columns

    def codes_of(self, name: str, values: Any) -> np.ndarray:
        """The codes of values of a categorical feature, 0 for those that training never saw."""
        found = pc.index_in(pa.array(values).cast(pa.string()), value_set=self.vocabularies[name])
        return np.asarray(pc.fill_null(found, -1).to_numpy(zero_copy_only=False) + 1)


def save_model(folder: Path, method: Method, config: RunConfig, prepared: Prepared) -> None:
    serving = method.serving()
    constants = len(serving.constants) if isinstance(serving, WithConstants) else 0
    description = {
        "format": FORMAT,
        "ranker": config.ranker,
        "ranker_options": dict(config.ranker_options),
        "feature_names": list(prepared.train.feature_names),
        "vocabularies": {name: values.to_pylist() for name, values in prepared.train.vocabularies.items()},
        "constants": constants,
        "label": config.label,
        "data": prepared.fingerprint,
    }
    with atomic_path(folder, overwrite=True, folder=True) as temporary:
        save_tensors(temporary / "weights.safetensors", serving.state_dict())
        write_json(temporary / "model.json", description)


def load_model(run: str | Path) -> Model:
    """The model of a finished run."""
    folder = Path(run) / "model"
    about = read_json(folder / "model.json")
    if about.get("format") != FORMAT:
        raise DataError("the model is of another version", where=folder, got=about.get("format"), mend="train again")
    try:
        names, constants = tuple(about["feature_names"]), int(about["constants"])
        vocabularies = {name: pa.array(values, pa.string()) for name, values in about["vocabularies"].items()}
        categories = {names.index(name): len(values) + 1 for name, values in vocabularies.items()}
        encoder = FeatureEncoder(len(names) + constants, categories)
        ranker = make_ranker(about["ranker"], encoder, **about["ranker_options"])
        if constants:
            ranker = WithConstants(ranker, torch.zeros(constants))
        ranker.load_state_dict(load_tensors(folder / "weights.safetensors"))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DataError(f"the model cannot be loaded ({error})", where=folder, mend="train again") from error
    return Model(ranker.eval(), names, str(about["label"]), vocabularies)


def write_scores(log: Log, scores: np.ndarray, path: Path, *, overwrite: bool = False) -> None:
    """The keys of each row and its score, as Parquet."""
    keys = replace(log.without_features(), actions={}, weights=None).to_table()
    with atomic_path(path, overwrite=overwrite) as temporary:
        pq.write_table(keys.append_column("score", pa.array(scores)), temporary)


def with_training(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, training=replace(config.training, **changes))
