"""`ultr evaluate`: compare the models of runs, and score columns, on a log or data set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ultr.cli import options
from ultr.cli.messages import words
from ultr.cli.options import free_path, named_columns, plain, print_next, print_notes, print_table, print_warnings
from ultr.errors import OptionError

SHOWN_POSITIONS = 20  # positions whose examination is printed, at most
GUESS = "this log cannot confirm how often users look at each position, so the interval is too narrow"
NO_OTHERS: Mapping[str, RankerComparison] = {}
SIGNIFICANT = 0.05  # a p value below this makes a difference clear

if TYPE_CHECKING:
    from ultr.evaluation.comparing import RankerComparison, RankerValue


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
        typer.Option(help="A column of the log with scores to compare with the runs; may be repeated."),
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
            "Default: one estimate, from requests of the log that are not test requests."
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
    """Compare runs and score columns on the same requests, next to the logged ranking.

    For each, print the mean of each metric over requests with its 95% interval, and the difference to the logged
    ranking (or to --against). p values are from paired tests over requests, corrected by Holm's method for the number
    of rankers. Off-policy metrics use one estimate of examination for all rankers. Requests that a run was trained on
    are left out. Intervals do not include errors of examination. The columns of a log have the names of the training
    log, unless options name others.
    """
    from ultr import api
    from ultr.bias.propensities import read_propensities

    folders = list(runs or [])
    if data is None:
        if not folders:
            raise OptionError("there is no data to evaluate on", hint="pass a log with --data")
        data = folders.pop()
    known = None if propensities is None else read_propensities(propensities)
    columns = named_columns(locals())
    with words.status(plain(f"reading {data} and scoring it ...")):
        found = api.evaluate(
            folders,
            data,
            metrics=metrics,
            score_columns=score_column or (),
            against=against,
            label=label,
            propensities=known,
            split=split,
            users=users,
            eta=eta,
            epsilon=epsilon,
            on_duplicates=on_duplicates,
            where=where or (),
            stream=stream,
            data_dir=data_dir,
            device=device,
            **columns,
        )
    print_notes(found.notes)
    print_warnings(found.warnings)
    if as_json:
        print(json.dumps({"data": data, **found.to_json()}))
        return
    print_comparison(found.comparison, data, found.with_other_bias)
    if folders:
        print_next("report", *folders, out=free_path("report.html"))


def verdicts(found: RankerComparison, others: Mapping[str, RankerComparison] = NO_OTHERS) -> Iterator[str]:
    """Yield a sentence for each ranker that is compared: whether it is better by the first metric, and by how much.

    `others` are comparisons with less and more position bias, if the log cannot confirm the estimate.
    """
    from ultr.evaluation.scores import OFF_POLICY
    from ultr.training.examining import less_is_better

    metric = next(iter(next(iter(found.rankers.values()))))
    for name, values in found.rankers.items():
        test, holm = values[metric].difference, values[metric].holm
        if test is None or holm is None:
            continue
        sign = -1 if less_is_better(metric) else 1
        than = "better than" if sign * test.difference > 0 else "worse than"
        verdict = than if holm < SIGNIFICANT else "not clearly better or worse than"
        guessed = not found.confirmed and metric.startswith(OFF_POLICY)
        with_bias = {bias: other.rankers[name][metric] for bias, other in others.items() if guessed}
        if guessed and holm < SIGNIFICANT:
            signs = {each.difference.difference > 0 for each in with_bias.values() if each.difference is not None}
            verdict = f"{'probably' if signs <= {test.difference > 0} else 'perhaps'} {verdict}"
        size = ""
        if change := _changes(values[metric]):
            size = f" ({change[0]}, 95% interval {change[1]} to {change[2]})"
        changes = [f"{shown[0]} with {bias}" for bias, other in with_bias.items() if (shown := _changes(other))]
        guess = f"; {GUESS}" if guessed else ""
        guess += f"; it would be {' and '.join(changes)} the position bias" if changes else ""
        yield f"{name} is {verdict} {found.against} by {metric}{size}{guess}"


def _changes(value: RankerValue) -> tuple[str, ...]:
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


def print_comparison(found: RankerComparison, data: str, others: Mapping[str, RankerComparison] = NO_OTHERS) -> None:
    """Print a table with a row for each metric and ranker, and what it says in words (see `verdicts`)."""
    if found.theta:
        how = "as given" if found.known else "each request has an estimate from others; check it with ultr bias"
        words.print(plain(f"one examination for all rankers: {_theta_text(found.theta)} ({how})"), soft_wrap=True)
    tested = any(value.difference for values in found.rankers.values() for value in values.values())
    title = f"{data}: {found.requests:,} requests"
    if tested:
        title += f". Differences to {found.against}: paired tests over requests, p corrected by Holm's method"
    table = Table(title=plain(title), title_justify="left")
    table.add_column("metric", no_wrap=True)
    table.add_column("ranker", no_wrap=True)
    for heading in ("mean", "95% interval", *(("difference", "95% interval", "p over requests") if tested else ())):
        table.add_column(heading, justify="right")
    for metric in next(iter(found.rankers.values())):
        for name, values in found.rankers.items():
            value, test = values[metric], values[metric].difference
            cells = [f"{value.mean.mean:.4f}", f"{value.mean.low:.4f} to {value.mean.high:.4f}"]
            if test is not None:
                cells += [f"{test.difference:+.4f}", f"{test.low:+.4f} to {test.high:+.4f}", f"{value.holm:.2g}"]
            table.add_row(metric, plain(name), *cells)
    print_table(table)
    for sentence in verdicts(found, others):
        words.print(plain(sentence), soft_wrap=True)
    clicks = [
        f"{value.effective_clicks:,.0f} ({plain(name)}, {metric})"
        for name, values in found.rankers.items()
        for metric, value in values.items()
        if value.effective_clicks is not None
    ]
    if clicks:
        words.print(f"effective sample sizes, in clicks: {', '.join(clicks)}", soft_wrap=True)
