"""`ultr evaluate`: judge the models of runs, and score columns, on a log or data set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ultr.cli import options
from ultr.cli import training_options as shared
from ultr.cli.messages import words
from ultr.cli.options import free_path, named_columns, plain, print_next, print_notes, print_table
from ultr.errors import DataError, OptionError

SHOWN_POSITIONS = 20  # positions whose examination is printed, at most
GUESS = "this log cannot confirm how often users look at each position, so the interval is too narrow"
NO_OTHERS: Mapping[str, Judgement] = {}
SIGNIFICANT = 0.05  # a p value below this makes a difference clear

if TYPE_CHECKING:
    import numpy as np

    from ultr.evaluation.judgement import Judged, Judgement
    from ultr.log import Log
    from ultr.log.parts import LogParts
    from ultr.rankers.model import Model


def evaluate(
    runs: Annotated[
        list[str] | None, typer.Argument(help="Finished runs. Without --data, the last argument is the data.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help=f"Data with feedback or true labels: a log ({options.SOURCES}; separate several by commas), "
            "prepared lists, or a data set.",
        ),
    ] = None,
    score_column: Annotated[
        list[str] | None,
        typer.Option(help="A column of the log with scores to judge next to the runs; may be repeated."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="The run or score column that the others are tested against.", show_default="the logged ranking"
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Metrics, comma-separated. ndcg@10 uses true labels, feedback-ndcg@10 logged feedback, and "
            "off-policy-reward@10 logged feedback corrected for bias.",
            show_default="ndcg@10 with true labels, else off-policy-reward@10",
        ),
    ] = None,
    propensities: Annotated[
        Path | None,
        typer.Option(
            help="CSV or Parquet file of known examination, for off-policy metrics: columns position,propensity. "
            "Default: one estimate, from requests of the log that are not judged."
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Label of off-policy and feedback metrics.", show_default="that of the runs")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a data set: train, validation or test.")] = "test",
    users: Annotated[
        str, typer.Option(help="Simulated users for reward metrics: pbm, trust, cascade, clickbait or watch.")
    ] = "pbm",
    eta: options.Eta = 1.0,
    epsilon: options.Epsilon = 0.1,
    request: options.RequestColumn = None,
    position: options.PositionColumn = None,
    item: options.ItemColumn = None,
    features: options.FeatureColumns = None,
    categorical: options.CategoricalColumns = None,
    actions: options.ActionColumns = None,
    query: options.QueryColumn = None,
    segment: options.SegmentColumn = None,
    randomised: options.RandomisedColumn = None,
    relevance: options.RelevanceColumn = None,
    on_duplicates: Annotated[
        str | None,
        typer.Option(help="Repeated rows of a request, as for ultr train.", show_default="as for the training log"),
    ] = None,
    where: options.Where = None,
    stream: Annotated[
        str,
        typer.Option(help="Read features of prepared lists in parts: yes, no, or auto (yes if memory is too small)."),
    ] = "auto",
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Judge runs and score columns on the same requests, next to the logged ranking.

    For each, print the mean of each metric over requests with its 95% interval, and the difference to the logged
    ranking (or to --against). p values are from paired tests over requests, corrected by Holm's method for the number
    of rankers. Off-policy metrics use one estimate of examination for all rankers. Requests that a run was trained on
    are left out. Intervals do not include errors of examination. The columns of a log have the names of the training
    log, unless options name others.
    """
    from ultr.bias.propensities import read_propensities
    from ultr.datasets.users import make_user
    from ultr.evaluation.judgement import judge_rankers, other_examinations
    from ultr.log.segments import by_segment
    from ultr.rankers.model import load_model
    from ultr.training.data import columns_for_run
    from ultr.training.fresh import fresh_requests, split_of
    from ultr.utils.stores import fetched

    named = named_columns(locals())
    of_rows = {"where": list(where or ()), "on_duplicates": on_duplicates}
    rows: dict[str, Any] = {name: value for name, value in of_rows.items() if value}
    folders = list(runs or [])
    if data is None:
        if not folders:
            raise OptionError("there are no data to judge on", hint="pass a log with --data")
        data = folders.pop()
    columns = list(score_column or [])
    _check_names([*folders, *columns])
    places = {name: fetched(name) for name in folders}
    models = {name: load_model(place) for name, place in places.items()}
    source = _Source(data, split, data_dir, stream)
    reading = {name: {**columns_for_run(places[name], model, named), **rows} for name, model in models.items()}
    with words.status(plain(f"reading {data} and scoring it ...")):
        views = {name: source.parts(reading[name]).viewed(model.view) for name, model in models.items()}
        rankers = {n: views[n].mapped(partial(model.score, device=device)) for n, model in models.items()}
        widest = max(models, key=lambda name: len(models[name].feature_names), default=None)
        parts = source.parts({"missing": "keep", **named, **rows}) if widest is None else views[widest]
        if columns:
            parts, scores = source.scores(columns, parts, {**named, **rows})
            rankers |= scores
    log, segments = parts.log, tuple[str, ...]()
    if "segment" in log.context:
        log, segments = by_segment(log)
        parts = parts.viewed(lambda part: by_segment(part, segments)[0])
    fresh, warnings = None, list[str]()
    if folders:
        seen = {name: (places[name], view) for name, view in views.items()}
        fresh, warnings = fresh_requests(seen, split_of(data, split, data_dir))
    judge = partial(
        judge_rankers,
        log,
        rankers,
        [name.strip() for name in (metrics or _default_metric(log)).split(",")],
        label=label or _label(models, data, named),
        judged=fresh,
        segments=segments,
        user=make_user(users, eta=eta, epsilon=epsilon, max_grade=source.max_grade),
        against=against,
        parts=parts,
    )
    judged = judge(known=None if propensities is None else read_propensities(propensities))
    others = {name: judge(known=theta) for name, theta in other_examinations(judged).items()}
    print_notes(log.notes)
    for warning in warnings:
        words.print(plain(f"warning: {warning}"), soft_wrap=True)
    if as_json:
        print(json.dumps({"data": data, **_as_json(judged, others), "warnings": warnings}))
        return
    print_judgement(judged, data, others)
    if folders:
        print_next("report", *folders, out=free_path("report.html"))


def _as_json(judged: Judgement, others: Mapping[str, Judgement]) -> dict[str, Any]:
    return {**judged.to_json(), "with_other_bias": {name: other.to_json() for name, other in others.items()}}


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise OptionError("there is nothing to judge", hint="pass a run, or --score-column")
    if len(set(names)) < len(names):
        raise OptionError("each run and score column must be given once", got=", ".join(names))


class _Source:
    """The data to judge on, which runs with different columns read differently; their rows are the same."""

    def __init__(self, data: str, split: str, data_dir: Path | None, stream: str) -> None:
        from ultr.log.shards import Shards, is_lists
        from ultr.training.data import fits_in_memory

        if stream not in ("auto", "yes", "no"):
            raise OptionError("--stream must be auto, yes or no", got=stream)
        self._data, self._split, self._data_dir = data, split, data_dir
        self._parts: dict[str, LogParts] = {}
        self._columns: Mapping[str, Any] = {}  # of the first run
        self._shards = Shards(data, split) if stream != "no" and is_lists(data) else None
        if self._shards is not None and stream == "auto" and fits_in_memory(self._shards):
            self._shards = None
        if stream == "yes" and self._shards is None:
            raise OptionError("only prepared lists can be streamed", got=data, hint="run ultr prepare on it first")
        self.max_grade = 4

    def parts(self, columns: Mapping[str, Any]) -> LogParts:
        """Return the rows of the data: in memory, or on disk if they are streamed."""
        key = json.dumps(columns, sort_keys=True, default=dict)
        if key not in self._parts:
            parts = self._read(columns)
            log, first = parts.log, next(iter(self._parts.values()), parts).log
            if log.rows != first.rows or not log.request_ids.equals(first.request_ids):
                what = "the runs read different requests or positions from the log"
                raise DataError(what, where=self._data, hint="name the columns with --request and --position")
            self._parts[key], self._columns = parts, self._columns or columns
        return self._parts[key]

    def _read(self, columns: Mapping[str, Any]) -> LogParts:
        from ultr.datasets.base import highest_grade
        from ultr.log.parts import LogParts
        from ultr.log.schema import ROLES
        from ultr.training.data import read_data

        if self._shards is None:
            log, self.max_grade = read_data(self._data, split=self._split, data_dir=self._data_dir, columns=columns)
            return LogParts.of(log)
        if columns.get("where"):
            hint = "pass --where to ultr prepare"
            raise OptionError("conditions (--where) need a log with named columns", where=self._data, hint=hint)
        self._shards.check_names({role: name for role, name in columns.items() if role in ROLES})
        parts = next(iter(self._parts.values()), None) or LogParts.on_disk(self._shards)
        if parts.log.relevance is not None:
            self.max_grade = highest_grade(parts.log, where=self._data)
        return parts

    def scores(
        self, names: Sequence[str], parts: LogParts, named: Mapping[str, Any]
    ) -> tuple[LogParts, dict[str, np.ndarray]]:
        """Return parts with features (those of the scores, if there are no others), and the scores by name."""
        from ultr.log.parts import LogParts

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


def _default_metric(log: Log) -> str:
    return "off-policy-reward@10" if log.relevance is None else "ndcg@10"


def _label(models: Mapping[str, Model], data: str, named: Mapping[str, Any]) -> str:
    """Return the label of the runs, or the default label of the data if there are no runs."""
    labels = {model.label for model in models.values()}
    if len(labels) > 1:
        raise OptionError(
            "the runs have different labels", got=", ".join(sorted(labels)), hint="choose one with --label"
        )
    columns = {role: name for role, name in named.items() if role != "where"}
    return labels.pop() if labels else shared.label_for(data, columns, users=None)


def verdicts(judged: Judgement, others: Mapping[str, Judgement] = NO_OTHERS) -> Iterator[str]:
    """Yield a sentence for each ranker that is compared: whether it is better by the first metric, and by how much.

    `others` are judgements with less and more position bias, if the log cannot confirm the estimate.
    """
    from ultr.evaluation.scores import OFF_POLICY
    from ultr.training.selection import less_is_better

    metric = next(iter(next(iter(judged.rankers.values()))))
    for name, values in judged.rankers.items():
        test, holm = values[metric].difference, values[metric].holm
        if test is None or holm is None:
            continue
        sign = -1 if less_is_better(metric) else 1
        than = "better than" if sign * test.difference > 0 else "worse than"
        verdict = than if holm < SIGNIFICANT else "not clearly better or worse than"
        guessed = not judged.confirmed and metric.startswith(OFF_POLICY)
        with_bias = {bias: other.rankers[name][metric] for bias, other in others.items() if guessed}
        if guessed and holm < SIGNIFICANT:
            signs = {each.difference.difference > 0 for each in with_bias.values() if each.difference is not None}
            verdict = f"{'probably' if signs <= {test.difference > 0} else 'perhaps'} {verdict}"
        size = ""
        if change := _changes(values[metric]):
            size = f" ({change[0]}, 95% interval {change[1]} to {change[2]})"
        found = [f"{shown[0]} with {bias}" for bias, other in with_bias.items() if (shown := _changes(other))]
        guess = f"; {GUESS}" if guessed else ""
        guess += f"; it would be {' and '.join(found)} the position bias" if found else ""
        yield f"{name} is {verdict} {judged.against} by {metric}{size}{guess}"


def _changes(value: Judged) -> tuple[str, ...]:
    """Return the difference to the reference and its interval, in % of the reference; empty if that is 0."""
    test = value.difference
    reference = 0.0 if test is None else value.mean.mean - test.difference
    if test is None or reference <= 0:
        return ()
    return tuple(f"{each / reference:+.1%}" for each in (test.difference, test.low, test.high))


def _theta_text(theta: Mapping[str, float]) -> str:
    """Return θ of the first positions, for each segment if there are several."""
    by_segment: dict[str, list[str]] = {}
    for name, value in theta.items():
        by_segment.setdefault(name.partition("@")[2], []).append(f"{value:.3g}")
    most = SHOWN_POSITIONS // len(by_segment)
    texts = []
    for segment, values in by_segment.items():
        more = " ..." if len(values) > most else ""
        texts.append(f"{f'{segment}: ' if segment else ''}{' '.join(values[:most])}{more}")
    return "; ".join(texts)


def print_judgement(judged: Judgement, data: str, others: Mapping[str, Judgement] = NO_OTHERS) -> None:
    """Print a table with a row for each metric and ranker, and what it says in words (see `verdicts`)."""
    if judged.theta:
        how = "as given" if judged.known else "each request has an estimate from others; check it with ultr bias"
        words.print(plain(f"one examination for all rankers: {_theta_text(judged.theta)} ({how})"), soft_wrap=True)
    tested = any(value.difference for values in judged.rankers.values() for value in values.values())
    title = f"{data}: {judged.requests:,} requests"
    if tested:
        title += f". Differences to {judged.against}: paired tests over requests, p corrected by Holm's method"
    table = Table(title=plain(title), title_justify="left")
    table.add_column("metric", no_wrap=True)
    table.add_column("ranker", no_wrap=True)
    for heading in ("mean", "95% interval", *(("difference", "95% interval", "p over requests") if tested else ())):
        table.add_column(heading, justify="right")
    for metric in next(iter(judged.rankers.values())):
        for name, values in judged.rankers.items():
            value, test = values[metric], values[metric].difference
            cells = [f"{value.mean.mean:.4f}", f"{value.mean.low:.4f} to {value.mean.high:.4f}"]
            if test is not None:
                cells += [f"{test.difference:+.4f}", f"{test.low:+.4f} to {test.high:+.4f}", f"{value.holm:.2g}"]
            table.add_row(metric, plain(name), *cells)
    print_table(table)
    for sentence in verdicts(judged, others):
        words.print(plain(sentence), soft_wrap=True)
    clicks = [
        f"{value.effective_clicks:,.0f} ({plain(name)}, {metric})"
        for name, values in judged.rankers.items()
        for metric, value in values.items()
        if value.effective_clicks is not None
    ]
    if clicks:
        words.print(f"effective sample sizes, in clicks: {', '.join(clicks)}", soft_wrap=True)
