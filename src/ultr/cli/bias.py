"""`ultr bias`: how biased a log is, and what to do about it."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ultr.cli.common import (
    ActionColumns,
    CategoricalColumns,
    FeatureColumns,
    Json,
    Overwrite,
    PositionColumn,
    RequestColumn,
    Seed,
    SegmentColumn,
    pages_can_be_made,
    plain,
    print_table,
    words,
)

if TYPE_CHECKING:
    from ultr.propensity import BiasReport

MOST_ROWS = 30  # positions that are printed
TRAINS_WITH = ("request", "position", "features", "categorical", "actions", "segment")


def bias(
    log: Annotated[Path, typer.Argument(help="A log: Parquet (a file or a folder of shards), CSV or Arrow.")],
    label: Annotated[
        str | None, typer.Option(help="Feedback counts where this is above zero; click if not given.")
    ] = None,
    request: RequestColumn = None,
    position: PositionColumn = None,
    features: FeatureColumns = None,
    categorical: CategoricalColumns = None,
    actions: ActionColumns = None,
    item: Annotated[str | None, typer.Option(help="Column of the item's id.")] = None,
    query: Annotated[str | None, typer.Option(help="Column of the query: items recur within one.")] = None,
    segment: SegmentColumn = None,
    randomised: Annotated[str | None, typer.Option(help="Column that marks requests in random order.")] = None,
    propensities: Annotated[Path | None, typer.Option(help="Known examination: position,propensity.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for propensities.csv, bias.json and bias.html.")] = None,
    bootstrap: Annotated[int, typer.Option(help="Replicates that intervals rest on.", min=10)] = 100,
    sample: Annotated[int, typer.Option(help="Rows that estimates from features rest on.", min=1000)] = 200_000,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Show how examination falls with position, how well the log tells that, and what to do."""
    from ultr.examination import read_propensities
    from ultr.files import refuse_existing
    from ultr.labels import DEFAULT_LABEL
    from ultr.propensity import audit
    from ultr.propensity.identification import NOT
    from ultr.propensity.reading import read_for_audit

    if out is not None:
        refuse_existing(out, overwrite=overwrite, folder=True)
    named = {
        "request": request,
        "position": position,
        "features": features,
        "categorical": categorical,
        "actions": actions,
        "item": item,
        "query": query,
        "segment": segment,
        "randomised": randomised,
    }
    given = {name: value for name, value in named.items() if value is not None}
    with words.status(f"reading {log} ..."):
        light, some = read_for_audit(log, sample_rows=sample, seed=seed, **given)
    if label is None:
        label = "click" if "click" in light.actions else next(iter(light.actions), DEFAULT_LABEL)
    with words.status("estimating examination ..."):
        known = None if propensities is None else read_propensities(propensities)
        report = audit(light, label=label, sample=some, known=known, bootstrap=bootstrap, seed=seed)
    if out is not None:
        _write(report, out, str(log), overwrite=overwrite)
    if as_json:
        print(json.dumps(report.to_json()))
        return
    words.print(f"{light!r}; feedback: {plain(label)} > 0", soft_wrap=True)
    _print(report)
    for name, part in report.segments.items():
        _print_estimates(part, title=f"Segment '{plain(name)}' ({part.requests:,} requests): {part.verdict.status}")
    if out is not None:
        words.print(f"wrote {out}", soft_wrap=True)
    if out is not None and report.verdict.status != NOT:
        options = "".join(f" --{name} {value}" for name, value in given.items() if name in TRAINS_WITH)
        words.print(f"next: ultr train {log} --propensities {out}/propensities.csv{options} --out run", soft_wrap=True)


def _print(report: BiasReport) -> None:
    _print_estimates(report, title=f"Examination relative to position {report.reference}, with 95% intervals")
    for note in report.notes:
        words.print(f"note: {plain(note)}", soft_wrap=True)
    for found in report.agreements:
        how = "agree" if found.agree else "differ"
        where = f"largest difference {found.largest:.0%}, at position {found.position}"
        words.print(f"{found.first} and {found.second} {how} ({where})", soft_wrap=True)
    if report.links is not None:
        parts, weakest = report.links["components"], report.links["weakest"]
        joined = "all positions hang together" if len(parts) == 1 else f"{len(parts)} groups of positions do not meet"
        link = (
            "" if weakest is None else f"; the weakest link is {weakest['positions']}: {weakest['clicks']:.0f} clicks"
        )
        words.print(plain(f"through items that recur, {joined}{link}"), soft_wrap=True)
    if report.explained is not None:
        words.print(
            f"features explain {max(0, report.explained):.0%} of the order ({report.sampled_requests:,} requests)"
        )
    for pitfall in report.pitfalls:
        words.print(
            f"[yellow]warning:[/] {plain(pitfall.name)}: {plain(pitfall.what)}; {plain(pitfall.mend)}", soft_wrap=True
        )
    verdict = report.verdict
    why = "; ".join(verdict.reasons)
    words.print(f"[bold]verdict: {verdict.status}[/] - {verdict.advice}: {plain(why)}", soft_wrap=True)
    if verdict.requests_needed:
        times = verdict.requests_needed / report.requests
        share = f"{times:.1%} of as many as here" if times < 1 else f"{times:.1f} times as many as here"
        words.print(
            f"{verdict.requests_needed:,} requests in random order ({share}) would tell "
            "examination to within 10% at every position",
            soft_wrap=True,
        )


def _print_estimates(report: BiasReport, *, title: str) -> None:
    table = Table(title=title, title_justify="left")
    anchor = report.anchor
    for heading in ("position", "shown", "rate", *report.estimates, *(("rate/theta",) if anchor else ())):
        table.add_column(heading, justify="right")
    for i, position in enumerate(report.positions[:MOST_ROWS].tolist()):
        cells = [_cell(found.theta[i], found.low[i], found.high[i]) for found in report.estimates.values()]
        if anchor is not None:
            cells.append(f"{report.rate[i] / anchor.theta[i]:.3f}")
        table.add_row(str(position), f"{report.impressions[i]:,.0f}", f"{report.rate[i]:.2%}", *cells)
    held = [found.held_out for found in report.estimates.values()]
    if any(value is not None for value in held):
        likelihoods = ["" if value is None else f"{value:.5f}" for value in held]
        table.add_section()
        table.add_row("held-out", "log-lik.", "", *likelihoods)
    print_table(table)
    if len(report.positions) > MOST_ROWS:
        words.print(f"and {len(report.positions) - MOST_ROWS} more positions (--json prints all)")


def _cell(theta: float, low: float, high: float) -> str:
    if not math.isfinite(theta):
        return "-"
    return f"{theta:.3f}" + (plain(f" [{low:.3f}, {high:.3f}]") if low < high else "")


def _write(report: BiasReport, out: Path, source: str, *, overwrite: bool) -> None:
    """The report as data, the propensities as `--propensities` takes them, and a page."""
    from ultr.checkpoint import write_json
    from ultr.files import atomic_path
    from ultr.propensity.audit import FORMAT
    from ultr.report import write_bias_page

    with atomic_path(out, overwrite=overwrite, folder=True) as folder:
        write_json(folder / "bias.json", {"format": FORMAT, **report.to_json()})
        tables = {"": report.propensities(), **{name: part.propensities() for name, part in report.segments.items()}}
        rows = [(k, f"{v:.6g}", name) for name, table in tables.items() for k, v in table.items()]
        columns = 3 if report.segments else 2  # without a segment: for those that have no rows of their own
        with (folder / "propensities.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows(row[:columns] for row in [("position", "propensity", "segment"), *rows])
        if pages_can_be_made():
            write_bias_page(report.to_json(), folder / "bias.html", source=source)
