"""`ultr evaluate`: compare the models of runs, and score columns, on a log or data set."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultr.cli import options
from ultr.cli.messages import plain, with_options, words
from ultr.cli.options import (
    free_path,
    new_table,
    print_next,
    print_notes,
    print_table,
    print_warnings,
    without_none,
)
from ultr.errors import OptionError, UnfinishedError

SHOWN_POSITIONS = 20  # positions whose examination is printed, at most
RANGE = "nothing confirms how often users look, so intervals cover half to one and a half times this bias"

if TYPE_CHECKING:
    from ultr.evaluation.comparing import RankerComparison


@with_options("columns", options.COLUMNS)
def evaluate(
    *,
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
    team: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A column with the ranker that picked each item of interleaved lists: compare these rankers.",
        ),
    ] = None,
    qrels: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Relevance judgments (qrels, CSV or Parquet): evaluate files of scores (TREC runs, or tables with "
            "query, item and score) by metrics named as in ir_measures, such as nDCG@10 or P(rel=2)@10.",
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
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            help="Label of off-policy and feedback metrics; several are summed.",
            show_default="the label of the runs",
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a data set: train, validation or test.")] = "test",
    users: Annotated[
        str,
        typer.Option(
            help="Simulated users for reward metrics: pbm, trust, cascade, dcm, clickbait, watch, grid or carousel."
        ),
    ] = "pbm",
    eta: options.Eta = 1.0,
    epsilon: options.Epsilon = 0.1,
    columns: dict[str, str],
    on_duplicates: Annotated[
        str | None,
        typer.Option(help="Repeated rows of a request, as for ultr train.", show_default="as for the training log"),
    ] = None,
    where: options.Where = None,
    action_delay: options.ActionDelay = None,
    time: options.Time = None,
    actions_until: options.ActionsUntil = None,
    stream: Annotated[
        str,
        typer.Option(help="Read features of prepared lists in parts: yes, no, or auto (yes if memory is too small)."),
    ] = "auto",
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    fail_unless: Annotated[
        str | None,
        typer.Option(help="Exit with code 3 unless the decision on each ranker is deploy (or test: test or deploy)."),
    ] = None,
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="Exit with code 3 if the decision on a ranker is: do not deploy.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Compare runs and score columns on the same requests, next to the logged ranking, and say what to do.

    The first line is a decision: deploy, test, collect more requests, or do not deploy. Then, for each ranker, the mean
    of each metric over requests with its 95% interval, and the difference to the logged ranking (or to --against).
    p values are from paired tests over requests, corrected by Holm's method for the number of rankers. Off-policy
    metrics use one estimate of examination for all rankers, and intervals have its error. If neither random
    requests nor known propensities confirm it, they cover half to one and a half times the position bias. Requests
    that a run was trained on, or that chose its step, are left out. Columns have the names of the training log, unless
    options name others.
    """
    from ultr import api
    from ultr.bias.propensities import read_propensities

    if fail_unless not in (None, "deploy", "test"):
        raise OptionError("--fail-unless must be deploy or test", got=fail_unless)
    columns, label = without_none(columns), options.sum_of_labels(labels)
    folders = list(runs or [])
    if qrels is not None:
        if data is not None or score_column or team is not None:
            raise OptionError("--qrels evaluates files of scores", hint="leave out --data, --score-column and --team")
        _evaluate_judged(qrels, folders, metrics, against, as_json=as_json)
        return
    if data is None:
        if not folders:
            raise OptionError("there is no data to evaluate on", hint="pass a log with --data")
        data = folders.pop()
    if team is not None:
        if folders or score_column or fail_unless or fail_if_worse:
            what = "--team cannot be combined with runs, --score-column or --fail-..."
            raise OptionError(what, hint="pass only the log")
        rows: dict[str, Any] = {"where": where or (), "on_duplicates": on_duplicates or "error"}
        _evaluate_teams(data, team, {"label": label, **rows, **columns}, as_json=as_json)
        return
    known = None if propensities is None else read_propensities(propensities)
    with words.status(f"reading {data} and scoring it ..."):
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
            action_delay=action_delay,
            time=time,
            actions_until=actions_until,
            stream=stream,
            data_dir=data_dir,
            device=device,
            **columns,
        )
    print_notes(found.notes)
    print_warnings(found.warnings)
    if as_json:
        print(json.dumps({"data": data, **found.to_json()}))
    else:
        print_comparison(found.comparison, data)
        if folders:
            print_next("report", *folders, out=free_path("report.html"))
    if not _passes(found.comparison, fail_unless, or_worse=fail_if_worse):
        raise typer.Exit(UnfinishedError.exit_code)


def _evaluate_judged(qrels: str, files: list[str], metrics: str | None, against: str | None, *, as_json: bool) -> None:
    """Compare files of scores by relevance judgments, and print a decision on each, and a table."""
    from ultr.evaluation.judged import compare_judged, read_qrels, read_run, split_measures

    if not files:
        raise OptionError("there are no scores to evaluate", hint="pass files of scores before --qrels")
    if len(set(files)) < len(files):
        raise OptionError("each file of scores must be given once", got=", ".join(files))
    with words.status(f"reading {qrels} ..."):
        runs = {name: read_run(name) for name in files}
        found = compare_judged(read_qrels(qrels), runs, split_measures(metrics or "nDCG@10"), against=against)
    if as_json:
        print(json.dumps({"data": qrels, **found.to_json()}))
        return
    print_comparison(found, qrels)


def _evaluate_teams(data: str, team: str, settings: dict[str, Any], *, as_json: bool) -> None:
    """Compare the rankers of interleaved lists, and print a decision on each pair, and a table."""
    from ultr import api

    with words.status(f"reading {data} ..."):
        found = api.interleaving(data, team, **settings)
    print_warnings(found.warnings)
    if as_json:
        print(json.dumps({"data": data, **found.to_json()}))
        return
    for test in found.tests:
        words.say(f"{test.first}: {test.decision}")
    title = f"{data}: {found.requests:,} requests with interleaved lists; feedback: {found.label}"
    headings = ("requests", "wins", "losses", "share of wins", "95% interval", "feedback", "95% interval", "p")
    table = new_table(plain(title), names=("ranker", "against"), numbers=headings)
    for test in found.tests:
        difference = test.difference
        counts = [f"{count:,}" for count in (test.requests, test.wins, test.losses)]
        share = [f"{test.share:.1%}", f"{test.low:.1%} to {test.high:.1%}"]
        change = [f"{difference.difference:+.4f}", f"{difference.low:+.4f} to {difference.high:+.4f}"]
        table.add_row(plain(test.first), plain(test.second), *counts, *share, *change, f"{test.holm:.2g}")
    print_table(table)


def _passes(found: RankerComparison, least: str | None, *, or_worse: bool) -> bool:
    """Return whether the decision on every ranker is `deploy`, or at least `test`, and none is not to deploy."""
    from ultr.evaluation.comparing import DEPLOY, REJECT, TEST

    decisions = [found.decision(name) for name in found.rankers if name != found.against]
    actions = {None if decision is None else decision.action for decision in decisions}
    if or_worse and REJECT in actions:
        return False
    return least is None or actions <= ({DEPLOY} if least == "deploy" else {DEPLOY, TEST})


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


def print_comparison(found: RankerComparison, data: str) -> None:
    """Print the decision on each ranker, and a table with a row for each metric and ranker."""
    for name in found.rankers:
        if (decision := found.decision(name)) is not None:
            words.say(f"{name}: {decision}")
    if found.theta:
        how = found.evidence if found.confirmed else f"{found.evidence}; {RANGE}"
        words.say(f"one examination for all rankers: {_theta_text(found.theta)} ({how})")
    tested = any(value.difference for values in found.rankers.values() for value in values.values())
    title = f"{data}: {found.requests:,} requests"
    if tested:
        title += f". Differences to {found.against}: paired tests over requests, p corrected by Holm's method"
    numbers = ["mean", "95% interval"]
    if tested:
        numbers += ["difference", "95% interval", "p over requests"]
    table = new_table(plain(title), names=("metric", "ranker"), numbers=numbers)
    for metric in next(iter(found.rankers.values())):
        for name, values in found.rankers.items():
            value, test = values[metric], values[metric].difference
            cells = [f"{value.mean.mean:.4f}", f"{value.mean.low:.4f} to {value.mean.high:.4f}"]
            if test is not None:
                cells += [f"{test.difference:+.4f}", f"{test.low:+.4f} to {test.high:+.4f}", f"{value.holm:.2g}"]
            table.add_row(metric, plain(name), *cells)
    print_table(table)
    alone = [
        f"{name} {mean.mean:.4f} ({mean.low:.4f} to {mean.high:.4f})"
        for name, values in found.rankers.items()
        for value in values.values()
        if (mean := value.random_order) is not None
    ]
    if alone:
        words.say(f"from requests in random order alone, without examination: {', '.join(alone)}")
    clicks = [
        f"{value.effective_clicks:,.0f} ({name}, {metric})"
        for name, values in found.rankers.items()
        for metric, value in values.items()
        if value.effective_clicks is not None
    ]
    if clicks:
        words.say(f"effective sample sizes, in clicks: {', '.join(clicks)}")
