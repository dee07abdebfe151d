"""`ultr bias`: estimate the position bias of a log."""

from __future__ import annotations

import csv
import json
import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultr.cli import options
from ultr.cli.messages import plain, progress_bar, with_options, words
from ultr.cli.options import (
    free_path,
    new_table,
    pages_can_be_made,
    print_next,
    print_notes,
    print_table,
    print_warning,
    without_none,
)
from ultr.errors import OptionError

if TYPE_CHECKING:
    from ultr.bias.audit import BiasReport
    from ultr.bias.click_models import QualityReport
    from ultr.log import Log

TABLE = "propensities.csv"
NOTE = "a table of counts: intervals take each impression as a request of its own, and bots are not left out"
MOST_ROWS = 30  # largest number of positions in a printed table
MOST_COLUMNS = 12  # of a grid that are printed


@with_options("columns", options.columns(*options.LOG_COLUMNS) | options.FOUND_SEGMENT)
def bias(
    *,
    log: Annotated[list[str], typer.Argument(help=f"A log, as Parquet, CSV, JSONL or Arrow: {options.SOURCES}.")],
    labels: options.ClickLabels = None,
    columns: dict[str, str],
    on_duplicates: options.OnDuplicates = "error",
    where: options.Where = None,
    action_delay: options.ActionDelay = None,
    time: options.Time = None,
    propensities: Annotated[
        Path | None, typer.Option(help="CSV or Parquet file of known examination: columns position,propensity.")
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(help="Click models to compare on held-out requests: pbm, ubm, dbn, sdbn, dcm, cascade, ccm."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder for propensities.csv, bias.json and bias.html; also a URL.")
    ] = None,
    bootstrap: Annotated[int, typer.Option(help="Bootstrap resamples for the confidence intervals.", min=10)] = 50,
    sample: Annotated[int, typer.Option(help="Rows to use in estimators that need features.", min=1000)] = 100_000,
    engine: Annotated[
        str | None,
        typer.Option(help="Engine that counts a log larger than memory: duckdb or spark.", show_default="in memory"),
    ] = None,
    memory: options.Memory = None,
    master: options.Master = None,
    seed: options.Seed = 0,
    keep_suspicious: Annotated[bool, typer.Option(help="Keep suspicious requests, such as requests by bots.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also print all estimates by position, and how well they agree.")
    ] = False,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Estimate examination (the probability that a position is seen), and say whether the log identifies it."""
    from ultr.bias.click_models import checked_names
    from ultr.bias.identification import NOT
    from ultr.bias.propensities import read_propensities
    from ultr.utils.files import check_output

    columns = without_none(columns)
    names = [] if models is None else checked_names(models)
    if out is not None:
        check_output(out, overwrite=overwrite, folder=True)
    source, label = options.one_source(log), options.sum_of_labels(labels)
    known = None if propensities is None else read_propensities(propensities)
    audited = _Audit(sample=sample, bootstrap=bootstrap, seed=seed, keep_suspicious=keep_suspicious, known=known)
    rows: dict[str, Any] = {"where": _conditions(source, tuple(where or ()), action_delay, time, columns)}
    options.check_engine(engine, memory=memory, master=master)
    if engine is None:
        rows["on_duplicates"] = on_duplicates
        if known is None:
            with words.status(f"reading {source} ..."):
                columns = options.with_segment(source, columns, label=label, **rows)
        found = audited.in_memory(source, label, names, {**rows, **columns})
    else:
        if on_duplicates != "error":
            hint = "leave it out, or merge repeated rows with ultr prepare --on-duplicates"
            got = f"--on-duplicates {on_duplicates}"
            raise OptionError("an engine does not merge repeated rows", got=got, hint=hint)
        settings = {"engine": engine, "memory": options.bytes_of(memory), "master": master, **rows, **columns}
        found = audited.on_engine(source, label, names, settings)
    report, quality, sampled = found.report, found.quality, found.sampled
    content = report.to_json()
    if quality is not None:
        content["click_models"] = quality.to_json()
    if out is not None:
        _write(report, content, out, source, overwrite=overwrite)
    if as_json:
        print(json.dumps(content))
        return
    read = f"{report.requests + report.left_out:,} requests with {found.rows:,} rows"
    words.say(f"{read}; feedback: {report.label} > 0")
    print_notes(found.notes)
    _print_summary(report)
    _print_actions(report)
    if verbose:
        _print_details(report)
    if quality is not None:
        _print_models(quality)
    if out is not None:
        words.say(f"wrote {out}")
        _print_table_note(report)
    if sampled is not None:  # rankers need features
        warned = {name for pitfall in report.pitfalls for name in pitfall.features}
        print_next(
            *("train", source),
            bias=None if report.verdict.status == NOT else out,
            columns={**columns, **_features_without(warned, sampled)},
            label=_label_to_learn(label, found.actions),
            where=where,
            action_delay=action_delay,
            set=[f"on_duplicates={on_duplicates}"] * (on_duplicates != "error") + [f"time={time}"] * bool(action_delay),
            out=free_path("run"),
        )


def _conditions(
    source: str, where: tuple[str, ...], action_delay: list[str] | None, time: str | None, columns: dict[str, Any]
) -> tuple[str, ...]:
    """Return the conditions on rows, with the one that their requests are old enough for delays, which is printed."""
    from ultr.log.delays import old_enough, parse_pairs

    if not action_delay:
        return where
    if time is None:
        raise OptionError("--action-delay needs the times of requests", hint="name their column with --time")
    delays = parse_pairs(action_delay, "--action-delay", "--action-delay purchase=7d")
    condition = old_enough(source, delays, time=time, where=where, **columns)
    words.say(f"requests that are old enough for their actions: {condition}")
    return (*where, condition)


@dataclass(frozen=True)
class _Found:
    """The results of an audit, and what is printed about the log."""

    report: BiasReport
    quality: QualityReport | None
    sampled: Log | None  # requests with features
    actions: Iterable[str]
    rows: int
    notes: Iterable[str]


def _label_to_learn(label: str | None, actions: Iterable[str]) -> str:
    """Return the label of the next command, and say which actions it does not use."""
    from ultr.log.labels import Label, click_label, default_label, is_time

    names = list(actions)
    chosen = label or default_label(names)
    timed = [name for name in names if is_time(name) and name not in Label(chosen).actions]
    if label is None and timed:  # clicks alone would rank items that users leave at once as those that they like
        chosen = f"{chosen} + {_weighted(timed[0], actions)}"
        alone = click_label(timed[:1])
        words.say(f"the next command trains for '{chosen}'; for {timed[0]} alone, use --label {shlex.quote(alone)}")
    if unused := [name for name in names if name not in Label(chosen).actions]:
        how = f"--label can add them, each with its weight: --label '{chosen} + {_weighted(unused[0], actions)}'"
        words.say(f"the label '{chosen}' does not use {', '.join(unused)}; {how}")
    return chosen


def _weighted(name: str, actions: Any) -> str:
    """Return an action with a weight: twice that of a click, or, for amounts, so that the mean amount counts as 1."""
    from ultr.log.labels import click_label

    values = actions[name] if isinstance(actions, Mapping) else None
    positive = None if values is None else values[values > 0]
    if positive is None or not len(positive) or (positive == 1).all():
        return f"2 * {click_label([name])}"
    return f"{click_label([name])} / {float(positive.mean()):.2g}"


@dataclass(frozen=True, kw_only=True)
class _Audit:
    """The audit of a log, in memory or on an engine."""

    sample: int
    bootstrap: int
    seed: int
    keep_suspicious: bool
    known: dict[str, float] | None

    def in_memory(self, source: str, label: str | None, models: list[str], reading: dict[str, Any]) -> _Found:
        from ultr.api import described_rows
        from ultr.bias.audit import audit, with_click_models, without_suspicious
        from ultr.bias.count_tables import is_count_table
        from ultr.log.labels import click_label
        from ultr.log.sampling import read_for_audit

        if is_count_table(source, reading):
            return self._of_counts(source, label, models, reading)
        with words.status(f"reading {source} ..."):
            whole, sampled = read_for_audit(source, sample_rows=self.sample, seed=self.seed, **reading)
        label = click_label(whole.actions) if label is None else label
        quality = None
        if models:  # before the estimate of examination, which takes longer
            kept = (whole, sampled) if self.keep_suspicious else without_suspicious(whole, sampled, label)[:2]
            quality = self._click_models(kept[1] or kept[0], models, label)
        settings: dict[str, Any] = {"known": self.known, "bootstrap": self.bootstrap, "seed": self.seed}
        if sampled is None:
            settings["described"] = described_rows(source, whole, reading)
        with words.status("estimating examination ..."):
            report = audit(whole, label=label, sample=sampled, keep_suspicious=self.keep_suspicious, **settings)
        return _Found(with_click_models(report, quality), quality, sampled, whole.actions, whole.rows, whole.notes)

    def _of_counts(self, source: str, label: str | None, models: list[str], reading: dict[str, Any]) -> _Found:
        from ultr.api import audit_of_counts
        from ultr.bias.count_tables import CLICKS, read_counts

        if models or label is not None:
            name = "--models" if models else "--label"
            raise OptionError(f"{name} needs the rows of a log, and not a table of counts", hint="leave it out")
        with words.status(f"reading {source} ..."):
            counts = read_counts(source, **{role: each for role, each in reading.items() if role != "on_duplicates"})
        with words.status("estimating examination ..."):
            report = audit_of_counts(counts, known=self.known, bootstrap=self.bootstrap, seed=self.seed)
        return _Found(report, None, None, [CLICKS], len(counts.table), [NOTE])

    def on_engine(self, source: str, label: str | None, models: list[str], settings: dict[str, Any]) -> _Found:
        from ultr.bias.audit import with_click_models
        from ultr.bias.engine_counts import count_on_engine
        from ultr.log.prepare.options import Preparation

        with progress_bar("starting"):
            counts = count_on_engine(
                source,
                Preparation(**settings),
                label=label,
                sample_rows=self.sample,
                keep_suspicious=self.keep_suspicious,
            )
        quality = self._click_models(counts.kept_sample() or counts.sample, models, counts.label) if models else None
        with words.status("estimating examination ..."):
            report = counts.report(known=self.known, bootstrap=self.bootstrap, seed=self.seed)
        sampled = counts.sample if counts.sample.feature_names else None
        return _Found(
            with_click_models(report, quality), quality, sampled, counts.sample.actions, counts.rows, counts.notes
        )

    def _click_models(self, log: Log, models: list[str], label: str) -> QualityReport:
        from ultr.bias.click_models import compare_click_models

        with words.status("fitting click models ..."):
            return compare_click_models(log, models, label=label, seed=self.seed)


def _features_without(warned: set[str], log: Log | None) -> dict[str, str]:
    """Return the feature columns without those that a warning names, if there are some, as options of `ultr train`."""
    if log is None or not warned:
        return {}
    columns = {role: log.columns.get(role, []) for role in ("features", "categorical")}
    if inside := sorted(warned - {name for names in columns.values() for name in names}):
        what = f"'{inside[0]}' is in a column of lists; to train without it, write a log without this feature"
        words.say(what)
    return {role: ",".join(n for n in names if n not in warned) for role, names in columns.items() if names}


def _print_summary(report: BiasReport) -> None:
    from ultr.bias.audit import summary

    for name, text in summary(report).items():
        words.print(f"[bold]{name}:[/] {plain(text)}", soft_wrap=True)
    _print_grid(report)
    for name, part in report.segments.items():
        what = f"{part.verdict.status}; {summary(part)['how biased']}"
        words.say(f"segment '{name}' ({part.requests:,} requests): {what}")
    if report.contexts:
        _print_contexts(report)
    for pitfall in report.pitfalls:
        print_warning(pitfall)


def _print_actions(report: BiasReport) -> None:
    """Print how actions after the click depend on the position."""
    from ultr.log.table import as_shown

    if not report.actions:
        return
    table = new_table("Actions after a click, relative to the first position", numbers=("position", *report.actions))
    positions = next(iter(report.actions.values())).positions
    for i, position in enumerate(positions[:MOST_ROWS]):
        cells = (_cell(each.tau[i], each.low[i], each.high[i]) for each in report.actions.values())
        table.add_row(str(as_shown(position)), *cells)
    print_table(table)


def _print_grid(report: BiasReport) -> None:
    """Print examination by row and column, if the log has a grid."""
    from ultr.log.table import as_shown, by_row, is_grid

    if report.anchor is None or not is_grid(report.positions):
        return
    rows, columns, values = by_row(report.positions.tolist(), report.anchor.theta.tolist())
    title = f"Examination by row and column, relative to {as_shown(report.reference)}"
    table = new_table(title, names=("",), numbers=columns[:MOST_COLUMNS])
    for name, row in zip(rows[:MOST_ROWS], values, strict=False):
        cells = ("-" if value is None or not math.isfinite(value) else f"{value:.2f}" for value in row[:MOST_COLUMNS])
        table.add_row(name, *cells)
    print_table(table)
    if len(rows) > MOST_ROWS or len(columns) > MOST_COLUMNS:
        words.say(f"the grid has {len(rows)} rows and {len(columns)} columns (--json prints all)")


def _print_contexts(report: BiasReport) -> None:
    """Print which columns of segments matter, and how much: the column with the largest differences first."""
    from ultr.bias.sharing import told_position

    title = f"Looks at position {told_position(report.positions.tolist())}, over the average"
    table = new_table(title, names=("column", "value"), numbers=("times", "95% interval"))
    for column, deviation in sorted(report.contexts.items(), key=lambda each: -each[1]["size"]):
        values = deviation["ratios"] if deviation["size"] else {}
        for value, (middle, low, high) in [*values.items()][:MOST_ROWS]:
            table.add_row(plain(column), plain(value or "missing"), f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
        if not values:
            table.add_row(plain(column), "no difference was found", "", "")
    print_table(table)


def _print_details(report: BiasReport) -> None:
    from ultr.bias.identification import INTERVALS
    from ultr.log.table import as_shown

    _print_estimates(report, title=f"Examination relative to position {as_shown(report.reference)}, with 95% intervals")
    words.say(INTERVALS)
    for note in report.notes:
        words.say(f"note: {note}")
    for refutation in report.refutations:
        result = "passed" if refutation.passed else "failed"
        words.say(f"test '{refutation.name}' {result}: {refutation.text}")
    for test in report.agreements:
        result = "agree within sampling error" if test.agree else "differ"
        where = f"difference {test.typical:.0%} on average over impressions, largest at position {test.position}"
        words.say(f"{test.first} and {test.second} {result} ({where})")
    if report.links is not None:
        groups, weakest = len(report.links["components"]), report.links["weakest"]
        linked = "link all positions" if groups == 1 else f"leave {groups} groups of positions without a link"
        words.say(f"items shown at several positions {linked} (link: clicks on items shown at both)")
        if weakest is not None:
            (first, second), clicks = weakest["positions"], weakest["clicks"]
            words.say(f"the weakest link is between positions {first} and {second}: {clicks:.0f} clicks")
    if report.explained is not None:
        share, requests = max(0, report.explained), report.sampled_requests
        words.say(f"features explain {share:.0%} of the logged order ({requests:,} requests)")
    for name, part in report.segments.items():
        _print_estimates(part, title=f"Segment '{plain(name)}' ({part.requests:,} requests)")


def _print_estimates(report: BiasReport, *, title: str) -> None:
    """Print the estimates, with a row for each position, or for each group of positions that share one estimate."""
    from ultr.bias.audit import rows_of

    ratio = ("rate/theta",) if report.anchor else ()
    table = new_table(title, numbers=("position", "shown", "rate", *report.estimates, *ratio))
    rows = rows_of(report)
    for row in rows[:MOST_ROWS]:
        cells = [_cell(each.theta[row.at], each.low[row.at], each.high[row.at]) for each in report.estimates.values()]
        if report.anchor is not None:
            cells.append(f"{row.rate / report.anchor.theta[row.at]:.3f}")
        table.add_row(row.positions, f"{row.shown:,.0f}", f"{row.rate:.2%}", *cells)
    held_out = [result.held_out for result in report.estimates.values()]
    if any(value is not None for value in held_out):
        likelihoods = ["" if value is None else f"{value:.5f}" for value in held_out]
        table.add_section()
        table.add_row("held-out", "log-lik.", "", *likelihoods)
    print_table(table)
    if len(rows) > MOST_ROWS:
        words.say(f"and {len(rows) - MOST_ROWS} more positions (--json prints all)")


def _print_models(quality: QualityReport) -> None:
    """Print the likelihood and perplexity of click models on held-out requests, the best likelihood first."""
    headings = ("log-lik. per impression", "per list", "perplexity", "conditional perplexity", "epochs", "s/epoch")
    table = new_table(f"Click models on {quality.held_out:,} held-out requests", names=("model",), numbers=headings)
    for each in sorted(quality.models, key=lambda each: (each.modelled < 1, -each.log_likelihood)):
        numbers = (each.log_likelihood, each.per_list, each.perplexity, each.conditional_perplexity)
        mark = "*" if each.modelled < 1 else ""
        table.add_row(
            each.model + mark, *(f"{value:.5f}" for value in numbers), str(each.epochs), f"{each.seconds_per_epoch:.2f}"
        )
    print_table(table)
    by = "a parameter of each item under its query" if quality.attraction == "items" else "a network of features"
    words.say(f"attraction: {by}; perplexity: mean over positions, before any click is known")
    for each in quality.models:
        if each.modelled < 1:
            what = f"only items up to the first click count ({each.modelled:.0%} of the impressions)"
            words.say(f"* {each.model}: {what}: its likelihood is not comparable with the others")


def _cell(theta: float, low: float, high: float) -> str:
    if not math.isfinite(theta):
        return "-"
    return f"{theta:.3f}" + (plain(f" [{low:.3f}, {high:.3f}]") if low < high else "")


def _print_table_note(report: BiasReport) -> None:
    """Print a note if the table of propensities has no estimates, or estimates that cannot be confirmed."""
    from ultr.bias.identification import NOT

    if not (report.propensities() or any(part.propensities() for part in report.segments.values())):
        words.say(f"note: {TABLE} is not written, because examination could not be estimated")
    elif report.verdict.status == NOT:
        words.say(f"note: {TABLE} has estimates that this log cannot confirm")


def _write(report: BiasReport, content: dict[str, Any], out: str, source: str, *, overwrite: bool) -> None:
    """Write bias.json (for `ultr train --bias`), propensities.csv (for `--propensities`) and the page bias.html.

    There is no propensities.csv if there is no estimate.
    """
    from ultr.bias.propensities import write_bias_file
    from ultr.log.table import as_shown
    from ultr.report import write_bias_page
    from ultr.utils.files import atomic_path

    with atomic_path(out, overwrite=overwrite, folder=True) as folder:
        write_bias_file(folder, content)
        tables = {"": report.propensities(), **{name: part.propensities() for name, part in report.segments.items()}}
        rows = [(as_shown(k), f"{v:.6g}", name) for name, table in tables.items() for k, v in table.items()]
        columns = 3 if report.segments else 2  # an empty segment stands for all segments without own rows
        if rows:
            with (folder / TABLE).open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerows(row[:columns] for row in [("position", "propensity", "segment"), *rows])
        if pages_can_be_made():
            write_bias_page(content, folder / "bias.html", source=source)
