"""`ultr prepare`: from an impression log of any size to shards of lists that training streams."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    SegmentColumn,
    plain,
    print_table,
    progress_bar,
    words,
)
from ultr.errors import OptionError

if TYPE_CHECKING:
    from ultr.log.shards import Manifest


def prepare(
    source: Annotated[
        str, typer.Argument(help="A log, one row per item shown: Parquet (file, folder, 'a*.parquet'), CSV.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the lists.")],
    engine: Annotated[str, typer.Option(help="duckdb, or spark.")] = "duckdb",
    request: RequestColumn = None,
    position: PositionColumn = None,
    features: FeatureColumns = None,
    categorical: CategoricalColumns = None,
    actions: ActionColumns = None,
    relevance: Annotated[str | None, typer.Option(help="Column of true labels, where they are known.")] = None,
    weight: Annotated[str | None, typer.Option(help="Column of the request's weight.")] = None,
    item: Annotated[str | None, typer.Option(help="Column of the item's id.")] = None,
    query: Annotated[str | None, typer.Option(help="Column of the query: items recur within one.")] = None,
    segment: SegmentColumn = None,
    randomised: Annotated[str | None, typer.Option(help="Column that marks requests in random order.")] = None,
    events: Annotated[
        str | None, typer.Option(help="Actions in a table of their own, joined by request and item.")
    ] = None,
    event_request: Annotated[str | None, typer.Option(help="Column of the events' request.")] = None,
    event_item: Annotated[str | None, typer.Option(help="Column of the events' item.")] = None,
    event_type: Annotated[str | None, typer.Option(help="Column that names the action of an event.")] = None,
    event_value: Annotated[str | None, typer.Option(help="Column of how much of it; 1 if not given.")] = None,
    label: Annotated[str | None, typer.Option(help="Also write a label, e.g. 'click + dwell / exp(3)'.")] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="Only rows that meet this, e.g. 'country = de'. Repeatable.")
    ] = None,
    min_items: Annotated[int, typer.Option(help="Drop requests with fewer items.", min=1)] = 1,
    max_items: Annotated[int | None, typer.Option(help="Keep only so many items of a list.", min=1)] = None,
    keep_clickless: Annotated[
        float, typer.Option(help="Share of requests without feedback to keep; those kept weigh 1/share.")
    ] = 1.0,
    split: Annotated[str, typer.Option(help="hash: by the request's id; time: the latest are held out.")] = "hash",
    time: Annotated[str | None, typer.Option(help="Column of the time, for --split time.")] = None,
    validation: Annotated[float, typer.Option(help="Share of requests for validation.", min=0, max=1)] = 0.1,
    test: Annotated[float, typer.Option(help="Share of requests for testing.", min=0, max=1)] = 0.1,
    validation_from: Annotated[str | None, typer.Option(help="Validate on requests from this time on.")] = None,
    test_from: Annotated[str | None, typer.Option(help="Test on requests from this time on.")] = None,
    memory: Annotated[str | None, typer.Option(help="What DuckDB may use, e.g. 4GB; half of what is free.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of DuckDB; all cores if not given.", min=1)] = None,
    master: Annotated[str | None, typer.Option(help="Where Spark runs, e.g. local[4]; or SPARK_MASTER.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Group a log by request into shards of lists, split for training and testing; any size, DuckDB or Spark."""
    # Every parameter but these is an option of `Preparation` by the same name.
    options: dict[str, Any] = dict(locals())
    for own in ("source", "out", "overwrite", "as_json"):
        del options[own]
    from ultr.labels import Label
    from ultr.log.prepare import prepare_lists

    options["where"] = tuple(where or ())
    options["memory"] = None if memory is None else _bytes(memory)
    with progress_bar() as bar:
        task = bar.add_task("starting", total=None, figure="rows")

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        manifest = prepare_lists(source, out, overwrite=overwrite, progress=progress, **options)
    for note in manifest.about["notes"]:
        words.print(f"[yellow]note:[/] {plain(note)}", soft_wrap=True)
    if as_json:
        print(json.dumps(asdict(manifest)))
        return
    _print(manifest)
    dropped = manifest.about["requests_dropped"]
    left_out = f"; {dropped:,} requests left out" if dropped else ""
    what = f"{len(manifest.features)} features, actions {', '.join(manifest.actions) or 'none'}"
    lacks_usual = manifest.label is None and not set(Label().actions) <= set(manifest.actions)
    label_option = f" --label {manifest.actions[0]}" if lacks_usual and manifest.actions else ""
    command = f"ultr train {out}{label_option} --out my-run"
    words.print(plain(f"wrote {out}: {what}{left_out}\nnext: {command}"), soft_wrap=True)


def _bytes(text: str) -> int:
    from ultr.memory import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise OptionError("a size reads 512MB or 4GB", got=f"'{text}'") from error


def _print(manifest: Manifest) -> None:
    table = Table(title="Lists", title_justify="left")
    table.add_column("split")
    for heading in ("requests", "rows", "longest", "with feedback"):
        table.add_column(heading, justify="right")
    for split, counts in manifest.splits.items():
        share = counts["with_feedback"] / counts["requests"]
        figures = (f"{counts[name]:,}" for name in ("requests", "rows", "longest"))
        table.add_row(split, *figures, f"{share:.1%}")
    print_table(table)
