"""`ultr.train`, `evaluate`, `compare`, `audit` and `judgments`: the commands as functions, with the same defaults.

Data is a path, a list of paths, a URL, a `Log`, an Arrow table, or a data frame of pandas or polars.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from ultr.bias import audit as audits
from ultr.bias.audit import BiasReport
from ultr.bias.auto_segment import find_segment
from ultr.bias.count_tables import CLICKS, CountTable, is_count_table, read_counts
from ultr.bias.counts import LogCounts
from ultr.bias.engine_counts import pairs_on_engine
from ultr.bias.examination import Examination, estimate_examination, examination_of_counts
from ultr.bias.propensities import as_propensities, theta_by_id
from ultr.bias.relevance import GRADES, SURE, WEIGHT, Judgments, judge, pairs_of_log
from ultr.checks.pitfalls import Pitfall
from ultr.datasets.base import cache_folder, highest_grade
from ultr.datasets.users import make_user
from ultr.errors import DataError, OptionError, nearest
from ultr.evaluation.comparing import RankerComparison, compare_rankers
from ultr.evaluation.interleaving import Interleaving, evaluate_interleaving
from ultr.evaluation.scores import ranks
from ultr.log import Log, read_log, write_log
from ultr.log.cleaning import OnDuplicates
from ultr.log.columns import ROLES
from ultr.log.labels import Label, click_label, default_label
from ultr.log.prepare.engines import EngineName
from ultr.log.prepare.options import Preparation
from ultr.log.readers import as_table, numeric_columns
from ultr.log.sampling import LogParts, read_for_audit, sample_log
from ultr.log.shards import Manifest, Shards, is_lists
from ultr.log.table import by_segment
from ultr.rankers.model import Model, load_model
from ultr.report.runs import Run, load_run
from ultr.training.comparing.plan import LIMITS, LONGEST
from ultr.training.comparing.plan import compare as run_comparison
from ultr.training.comparing.results import Comparison
from ultr.training.config import make_config
from ultr.training.data import ActionModel, Decisions, columns_for_run, fits_in_memory, read_data
from ultr.training.examining import examination_of
from ultr.training.folder import read_config
from ultr.training.loop import Listeners
from ultr.training.outcome import FreshRequests, fresh_requests, split_of
from ultr.training.run import run_training
from ultr.utils.arguments import check_value
from ultr.utils.display import logger
from ultr.utils.distributed import is_main
from ultr.utils.stores import fetched, kept_here

SAMPLE_ROWS = 100_000  # rows for estimators of examination that need features
FIRST_PLACES = 10  # of a ranking of candidates, some of which were never shown
NEVER_SHOWN = (
    "with all candidates ordered by {name}, {share:.0%} of the first 10 were not shown in their request; "
    "their value comes from the model alone, without feedback"
)
MOST_NUMBERS = 8  # unused columns that show whether an item is the same each time, if there are no features


def _as_source(data: Any) -> tuple[str, Any]:
    """Return the path of data, and the data itself if it is in memory: one of them is empty, or None."""
    if isinstance(data, str | Path):
        return str(data), None
    if isinstance(data, list | tuple) and all(isinstance(each, str | Path) for each in data):
        return ",".join(map(str, data)), None
    return "", data


def _check_columns(columns: Mapping[str, Any], data: Any) -> None:
    """Raise OptionError if a name is not the role of a column, or if the columns of the data are known already."""
    for name in columns:
        if name not in ROLES:
            raise OptionError(f"no argument '{name}'", hint=nearest(name, ROLES))
        if isinstance(data, Log):
            raise OptionError(f"a Log has its columns already, so leave out '{name}'", hint="pass it to read_log")


def warn(pitfall: Pitfall) -> None:
    """Show a problem of the data as a warning of Python."""
    warnings.warn(f"{pitfall.name}: {pitfall.what}; {pitfall.hint}", stacklevel=2)


# --- Train ------------------------------------------------------------------------------------------------------------


def train(
    log: Any,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    listeners: Listeners | None = None,
    **options: Any,
) -> Run:
    """Train a ranker from a log, as `ultr train` does, and return the run.

        run = ultr.train("log.parquet", "run", ranker="mlp", steps=200, **{"network.dropout": 0.1})
        scores = run.score(frame)

    `options` are those that `ultr options` lists, by path or by the last word of the path. `out` is the run directory;
    without it, the files of the run are deleted together with the returned object. Problems of the data are warnings of
    Python, and notes go to the logger `ultr`, unless `listeners` take them.
    """
    path, source = _as_source(log)
    config = make_config(path, **options)
    listeners = listeners or Listeners(on_note=logger.info, on_finding=warn)
    how: dict[str, Any] = {"source": source, "listeners": listeners}
    if out is not None:
        kept = kept_here(out, cache_folder() / "runs", resume=resume, overwrite=overwrite, writes=is_main())
        with kept as folder:
            run_training(config, folder, resume=resume, overwrite=overwrite, all_options=False, **how)
        return load_run(fetched(out))
    temporary = Path(tempfile.mkdtemp(prefix="ultr-"))
    try:
        run = load_run(run_training(config, temporary / "run", **how))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    weakref.finalize(run, shutil.rmtree, temporary, ignore_errors=True)
    return run


# --- Evaluate ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Runs and score columns, compared on the same requests."""

    comparison: RankerComparison
    warnings: Sequence[str]
    notes: Sequence[str]  # what was changed on reading

    def to_json(self) -> dict[str, Any]:
        return {**self.comparison.to_json(), "warnings": list(self.warnings)}


def evaluate(
    runs: Run | str | Path | Sequence[Run | str | Path],
    log: Any,
    *,
    metrics: Sequence[str] | str | None = None,
    score_columns: Sequence[str] = (),
    against: str | None = None,
    label: str | None = None,
    propensities: Any = None,
    split: str = "test",
    users: str = "pbm",
    eta: float = 1.0,
    epsilon: float = 0.1,
    on_duplicates: str | None = None,
    where: Sequence[str] = (),
    stream: str = "auto",
    action_delay: Sequence[str] | None = None,
    time: str | None = None,
    actions_until: str | None = None,
    data_dir: str | Path | None = None,
    device: str = "auto",
    **columns: Any,
) -> Evaluation:
    """Compare runs and columns of scores with each other and with the logged ranking, as `ultr evaluate` does.

    Requests that a run was trained on are left out. Without `metrics`, they are compared by `ndcg@10` on true labels,
    or else by `off-policy-reward@10`. All are compared under one θ: `propensities`, or the estimate of the log.
    Watch times and delayed actions are transformed as for the runs; `action_delay` (`["purchase=7d"]`), with the column
    `time` of the requests, replaces their delays. `columns` name columns by role, as arguments of `read_log`; by
    default they have the names of the training log.
    """
    _check_columns(columns, log)
    check_value("label", label, str | None)
    listed = [runs] if isinstance(runs, Run | str | Path) else list(runs)
    names = [str(run.folder) if isinstance(run, Run) else str(run) for run in listed]
    _check_names([*names, *score_columns])
    places = {name: fetched(name) for name in names}
    models = {name: load_model(place) for name, place in places.items()}
    actions = _actions(places, action_delay, time)
    source = _Source(log, split, data_dir, stream, partial(actions, until=actions_until) if actions else None)
    of_rows = {"where": list(where), "on_duplicates": on_duplicates, **actions.reading}
    rows = {**columns, **{name: value for name, value in of_rows.items() if value}}
    reading = {name: {**columns_for_run(places[name], model, columns), **rows} for name, model in models.items()}
    views = {name: source.parts(reading[name]).viewed(model.view) for name, model in models.items()}
    rankers = {name: views[name].mapped(partial(model.score, device=device)) for name, model in models.items()}
    widest = max(models, key=lambda name: len(models[name].feature_names), default=None)
    parts = source.parts({"missing": "keep", **rows}) if widest is None else views[widest]
    if score_columns:
        parts, scores = source.scores(score_columns, parts, rows)
        rankers |= scores
    whole, segments = parts.log, tuple[str, ...]()
    if "segment" in whole.context:
        whole, segments = by_segment(whole)
        parts = parts.viewed(lambda part: by_segment(part, segments)[0])
    fresh = FreshRequests(np.ones(len(whole), bool), [])
    if names:
        fresh = fresh_requests({name: (places[name], view) for name, view in views.items()}, source.split())
    if metrics is None:
        metrics = "off-policy-reward@10" if whole.relevance is None else "ndcg@10"
    found = compare_rankers(
        whole,
        rankers,
        [name.strip() for name in metrics.split(",")] if isinstance(metrics, str) else list(metrics),
        label=label or _label(models, whole, source.path),
        test=fresh.mask,
        known=None if propensities is None else as_propensities(propensities),
        others=[found for place in places.values() if (found := examination_of(place)) is not None],
        segments=segments,
        user=make_user(users, eta=eta, epsilon=epsilon, max_grade=source.max_grade),
        against=against,
        parts=parts,
        chosen_on=fresh.chosen_on,
    )
    notes = list(whole.notes)
    if whole.hidden is not None and whole.hidden.rows:
        shares = {name: source.never_shown(model, reading[name], whole.hidden.column) for name, model in models.items()}
        notes += [NEVER_SHOWN.format(name=name, share=share) for name, share in shares.items() if share is not None]
    return Evaluation(found, fresh.warnings, notes)


def interleaving(
    log: Any,
    team: str,
    *,
    label: str | None = None,
    where: Sequence[str] = (),
    on_duplicates: OnDuplicates = "error",
    **columns: Any,
) -> Interleaving:
    """Compare rankers by a log of interleaved lists, as `ultr evaluate --team` does.

    `team` is the column with the ranker that picked each item, as team-draft interleaving logs it. `columns` name other
    columns by role, as arguments of `read_log`.
    """
    if isinstance(log, Log):
        raise OptionError("interleaved lists are read from a table or files", hint="pass the source of the log")
    named = {**columns, "features": [], "categorical": [team]}
    read = read_log(log, where=where, on_duplicates=on_duplicates, **named)
    names = np.array(["", *read.vocabularies[team].to_pylist()], object)
    teams = names[read.features[:, 0].astype(np.int64)].tolist()
    return evaluate_interleaving(read, teams, label=label or default_label(read.actions))


def _actions(places: Mapping[str, Path], action_delay: Sequence[str] | None, time: str | None) -> ActionModel:
    """Return how the actions of a log are transformed: as for the runs, which must agree, with these delays."""
    options = {name: ActionModel.of(read_config(place).data) for name, place in places.items()}
    if action_delay is not None:
        options = {name: replace(each, time=None, arrivals=()) for name, each in options.items()}
    if len(set(options.values())) > 1:
        hint = "evaluate them one by one; their watch times and action delays are in the section data of config.json"
        raise OptionError("the runs transform actions differently", got=", ".join(options), hint=hint)
    first = next((Decisions.load(place).actions for place in places.values()), None) or ActionModel()
    if action_delay is None:
        return first
    wanted = make_config(action_delay=list(action_delay), time=time or first.time).data
    return replace(first, **{name: getattr(ActionModel.of(wanted, first), name) for name in ("time", "arrivals")})


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise OptionError("there is nothing to evaluate", hint="pass a run, or --score-column")
    if len(set(names)) < len(names):
        raise OptionError("each run and score column must be given once", got=", ".join(names))


def _label(models: Mapping[str, Model], log: Log, path: str) -> str:
    """Return the label of the runs, or the default label of the data if there are no runs."""
    labels = {model.label for model in models.values()}
    if len(labels) > 1:
        raise OptionError(
            "the runs have different labels", got=", ".join(sorted(labels)), hint="choose one with --label"
        )
    if labels:
        return labels.pop()
    has_label = is_lists(path) and Manifest.load(path).label is not None
    return "label" if has_label else default_label(log.actions)


class _Source:
    """The data to evaluate on, which runs with different columns read differently; their rows are the same."""

    def __init__(
        self,
        data: Any,
        split: str,
        data_dir: str | Path | None,
        stream: str,
        transformed: Callable[[Log], Log] | None,
    ) -> None:
        if stream not in ("auto", "yes", "no"):
            raise OptionError("stream must be auto, yes or no", got=stream)
        self.path, self._data = _as_source(data)
        self._split, self._data_dir, self._transformed = split, data_dir, transformed
        self._parts: dict[str, LogParts] = {}
        self._columns: Mapping[str, Any] = {}  # of the first run
        lists = stream != "no" and bool(self.path) and is_lists(self.path)
        self._shards = Shards(self.path, split) if lists else None
        if self._shards is not None and stream == "auto" and fits_in_memory(self._shards):
            self._shards = None
        if stream == "yes" and self._shards is None:
            raise OptionError("only prepared lists can be streamed", got=self.path, hint="run ultr prepare on it first")
        self.max_grade = 4

    def split(self) -> Any:
        """Return the split of data that has splits; None for a log."""
        return split_of(self.path, self._split, self._data_dir) if self.path else None

    def parts(self, columns: Mapping[str, Any]) -> LogParts:
        """Return the rows of the data: in memory, or on disk if they are streamed."""
        key = json.dumps(columns, sort_keys=True, default=dict)
        if key not in self._parts:
            parts = self._read(columns)
            log, first = parts.log, next(iter(self._parts.values()), parts).log
            if log.rows != first.rows or not log.request_ids.equals(first.request_ids):
                what = "the runs read different requests or positions from the log"
                raise DataError(what, where=self.path or None, hint="name the columns with --request and --position")
            self._parts[key], self._columns = parts, self._columns or columns
        return self._parts[key]

    def _read(self, columns: Mapping[str, Any]) -> LogParts:
        if self._data is not None or self._shards is None:
            log, self.max_grade = self._as_logged(columns)
            return LogParts.of(log if self._transformed is None else self._transformed(log))
        if self._transformed is not None:
            what = "watch times and delayed actions need a log, and not prepared lists"
            raise OptionError(what, where=self.path, hint="pass the log")
        if columns.get("where"):
            hint = "pass --where to ultr prepare"
            raise OptionError("conditions (--where) need a log with named columns", where=self.path, hint=hint)
        self._shards.check_names({role: name for role, name in columns.items() if role in ROLES})
        parts = next(iter(self._parts.values()), None) or LogParts.on_disk(self._shards)
        if parts.log.relevance is not None:
            self.max_grade = highest_grade(parts.log, where=self.path)
        return parts

    def _as_logged(self, columns: Mapping[str, Any]) -> tuple[Log, int]:
        """Return the rows of data in memory, with actions as logged, and the highest grade."""
        if self._data is None:
            return read_data(self.path, split=self._split, data_dir=self._data_dir, columns=columns)
        log = self._data if isinstance(self._data, Log) else read_log(self._data, **columns)
        return log, 4 if log.relevance is None else highest_grade(log, where="the log")

    def never_shown(self, model: Model, columns: Mapping[str, Any], shown: str) -> float | None:
        """Return the share of the first 10 candidates of each request, by a model, that were not shown in it.

        Candidates that were not shown have neither positions nor feedback, so that all rows are read again without
        these. Return None for a log in memory, and for prepared lists: they have only rows that were shown.
        """
        if isinstance(self._data, Log) or self._shards is not None:
            return None
        every = {**columns, "shown": "", "actions": [], "position": "", "relevance": shown, "swaps": ""}
        log, _ = self._as_logged(every)
        first = ranks(log, model.score(model.view(log))) < FIRST_PLACES
        return float((log.true_relevance[first] == 0).mean())

    def scores(
        self, names: Sequence[str], parts: LogParts, named: Mapping[str, Any]
    ) -> tuple[LogParts, dict[str, np.ndarray]]:
        """Return parts with features (those of the scores, if there are no others), and the scores by name."""
        first = next(parts.read())
        if not set(names) <= set(first.feature_names):
            others = {"features": list(names), "categorical": [], "missing": "reject"}
            scored = self.parts({**(self._columns or named), **others})
            parts = parts if first.feature_names else LogParts.of(scored.log)
        else:
            scored = parts
        place = [next(scored.read()).feature_names.index(name) for name in names]
        values = scored.mapped(lambda part: part.features[:, place])
        return parts, {name: values[:, i] for i, name in enumerate(names)}


# --- Compare ----------------------------------------------------------------------------------------------------------


def compare(
    log: Any,
    methods: Sequence[str],
    out: str | Path | None = None,
    *,
    seeds: int = 5,
    reference: str | None = None,
    metrics: Sequence[str] | None = None,
    rates: Sequence[float] = (),
    dropouts: Sequence[float] = (),
    limits: Sequence[float | str] = LIMITS,
    tuning_seeds: int = 3,
    longest: int | None = None,
    jobs: int = 0,
    **options: Any,
) -> Comparison:
    """Compare methods as `ultr compare` does: tune each, train it with the same seeds, and test it on other requests.

        ultr.compare("log.parquet", ["pairwise-em", "pal-click", "lambdarank:from=truth"], seeds=3)

    `options` are those of `ultr.train`. Finished runs in the folder `out` are not repeated.
    """
    with _on_disk(log) as path, _folder(out) as folder:
        config = make_config(path, **options)
        return run_comparison(
            config,
            list(methods),
            folder,
            seeds=seeds,
            reference=reference,
            metrics=metrics,
            rates=rates,
            dropouts=dropouts,
            limits=limits,
            tuning_seeds=tuning_seeds,
            longest=longest or (1 if "steps" in config.network.model_fields_set else LONGEST),
            jobs=jobs,
            on_note=logger.info,
            on_warning=warn,
        )


@contextmanager
def _on_disk(data: Any) -> Iterator[str]:
    """Yield the path of data; data in memory is written to a temporary file."""
    path, source = _as_source(data)
    if path:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ultr-") as folder:
        file = Path(folder) / "log.parquet"
        if isinstance(source, Log):
            write_log(source, file)
        else:
            pq.write_table(as_table(source), file)
        yield str(file)


@contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    """Yield a path, or a temporary folder if it is None."""
    if out is not None:
        with kept_here(out, cache_folder() / "runs", resume=True, overwrite=False, writes=is_main()) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="ultr-") as folder:
        yield Path(folder) / "comparison"


# --- Audit ------------------------------------------------------------------------------------------------------------


def audit(
    log: Any,
    *,
    label: str | None = None,
    propensities: Any = None,
    bootstrap: int = 50,
    sample_rows: int = SAMPLE_ROWS,
    seed: int = 0,
    keep_suspicious: bool = False,
    on_duplicates: OnDuplicates = "error",
    where: Sequence[str] = (),
    **columns: Any,
) -> BiasReport:
    """Estimate the position bias of a log, and say whether the log identifies it, as `ultr bias` does.

        ultr.audit("log.parquet", segment="device")

    A row counts as clicked if its `label` is above 0; the default is the click. Estimators that need features use about
    `sample_rows` rows. A table of counts is a log too: rows with `item`, `position`, `impressions` and `clicks`.
    `columns` name columns by role, as arguments of `read_log`.
    """
    _check_columns(columns, log)
    known = None if propensities is None else as_propensities(propensities)
    if not isinstance(log, Log) and is_count_table(log, columns):
        counts = read_counts(log, where=where, **columns)
        return audit_of_counts(counts, known=known, bootstrap=bootstrap, seed=seed)
    options: dict[str, Any] = {"known": known, "bootstrap": bootstrap, "seed": seed, "keep_suspicious": keep_suspicious}
    if isinstance(log, Log):
        sample = sample_log(log, sample_rows, seed=seed) if log.feature_names else None
        chosen = label or click_label(log.actions)
        return audits.audit(log.without_features(), label=chosen, sample=sample, **options)
    with _on_disk(log) as source:
        reading: dict[str, Any] = {"on_duplicates": on_duplicates, "where": where}
        reading |= _with_segment(source, label, columns, known, reading)
        whole, sample = read_for_audit(source, sample_rows=sample_rows, seed=seed, **reading)
        described = described_rows(source, whole, reading) if sample is None else None
        chosen = label or click_label(whole.actions)
        return audits.audit(whole, label=chosen, sample=sample, described=described, **options)


def audit_of_counts(
    counts: CountTable, *, known: Mapping[str, float] | None = None, bootstrap: int = 50, seed: int = 0
) -> BiasReport:
    """Return the bias report of a table of counts; its intervals take each impression as a request of its own."""
    whole = counts.without_segments().log_counts(seed=seed)
    segments = ((name, part.log_counts(seed=seed)) for name, part in counts.parts() if part.has_clicks)
    options = audits.AuditOptions(CLICKS, bootstrap, seed, known=known or {})
    return audits.audit_counts(whole, segments, options, None)


def described_rows(source: str, log: Log, reading: Mapping[str, Any]) -> Log | None:
    """Return a log without features with some unused numbers as features: they show whether an item changes.

    Return None if the log has none, or if it has no ids of items without queries.
    """
    if log.item_ids is None or "query" in log.context:
        return None
    numbers = numeric_columns(source, log.unused_columns)[:MOST_NUMBERS]
    return read_log(source, **{**reading, "features": numbers}) if numbers else None


# --- Judgments --------------------------------------------------------------------------------------------------------


def _with_segment(
    source: Any, label: str | None, columns: Mapping[str, Any], known: Any, reading: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the columns with the segment that was found, if the user named none and examination is not known."""
    segment = columns.get("segment")
    if segment is None and known is None:
        found = find_segment(source, label=label, columns=columns, **reading)
        segment = None if found is None else found.column
    return {**columns, "segment": "" if segment == "none" else segment}


def judgments(
    log: Any,
    *,
    label: str | None = None,
    grades: int = GRADES,
    cuts: Sequence[float] | None = None,
    weight: float = WEIGHT,
    sure: float = SURE,
    propensities: Any = None,
    seed: int = 0,
    keep_suspicious: bool = False,
    on_duplicates: OnDuplicates = "error",
    where: Sequence[str] = (),
    engine: EngineName | None = None,
    memory: int | None = None,
    master: str | None = None,
    **columns: Any,
) -> Judgments:
    """Estimate the relevance of each pair of a query and an item from feedback, as `ultr judgments` does.

        ultr.judgments("log.parquet", query="search_text", grades=4).table()

    The default `label` is the click. `cuts` are the least relevance of the grades 1, 2, ..., and `sure` is the least
    probability of a sure grade. `weight` is the share of the difference between predicted and clicked attraction that
    is relevance. A table of counts is a log too: rows with `item`, `position`, `impressions` and `clicks`. `columns`
    name columns by role, as arguments of `read_log`. An `engine` counts a log that is larger than memory, all of its
    segments together; it counts rows whose label is above 0, and not amounts.
    """
    _check_columns(columns, log)
    known = None if propensities is None else as_propensities(propensities)
    options: dict[str, Any] = {"grades": grades, "cuts": cuts, "weight": weight, "sure": sure, "seed": seed}
    if not isinstance(log, Log) and is_count_table(log, columns):
        counts = read_counts(log, where=where, **columns)
        return _judged_counts(counts, counts.log_counts(seed=seed), known, {"label": CLICKS, **options})
    if engine is not None:
        path, _ = _as_source(log)
        settings: dict[str, Any] = {"engine": engine, "memory": memory, "master": master, "where": tuple(where)}
        counted = pairs_on_engine(
            path, Preparation(**settings, **columns), label=label, keep_suspicious=keep_suspicious
        )
        options |= {"label": counted.label, "notes": counted.notes}
        return _judged_counts(CountTable(counted.table), counted.counts, known, options)
    if not isinstance(log, Log):
        with _on_disk(log) as source:
            reading: dict[str, Any] = {"on_duplicates": on_duplicates, "where": where}
            log = read_log(source, **reading, **_with_segment(source, label, columns, known, reading))
    chosen, notes = label or click_label(log.actions), list(log.notes)
    if not keep_suspicious:
        log, _, left_out = audits.without_suspicious(log, None, chosen)
        notes += [f"{left_out:,} suspicious requests, such as those of bots, were left out"] if left_out else []
    segments = tuple[str, ...]()
    if "segment" in log.context:
        log, segments = by_segment(log)
    pairs = pairs_of_log(log, chosen)
    if known is not None:
        examination = Examination.known(theta_by_id(known, tuple(pairs.positions.tolist()), segments))
    else:
        examination = estimate_examination(log, Label(chosen), segments=segments, seed=seed)
    return judge(pairs, examination, label=chosen, notes=notes, **options)


def _judged_counts(
    counts: CountTable, log: LogCounts, known: Mapping[str, float] | None, options: Mapping[str, Any]
) -> Judgments:
    pairs, segments = counts.pairs(), counts.segments
    if known is not None:
        examination = Examination.known(theta_by_id(known, tuple(pairs.positions.tolist()), segments))
    else:
        examination = examination_of_counts(log, segments=segments)
    return judge(pairs, examination, **options)
