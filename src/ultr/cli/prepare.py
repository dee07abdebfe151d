"""`ultr prepare`: group a log of any size into lists, one per request, that training can read piece by piece."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultr.cli import options
from ultr.cli.messages import progress_bar, with_options, words
from ultr.cli.options import free_path, new_table, print_next, print_notes, print_table
from ultr.errors import OptionError

if TYPE_CHECKING:
    from ultr.log.shards import Manifest


@with_options("columns", options.COLUMNS)
def prepare(
    *,
    source: Annotated[
        list[str],
        typer.Argument(
            help=f"A log of any size with one row per item shown, as Parquet, CSV or JSONL: {options.SOURCES}."
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder for the lists; also a URL. With --format, a name in .parquet: a log with a row per item."
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="The source has events, as JSON or Parquet: ubi, ga4, snowplow or metarank."),
    ] = None,
    append: Annotated[
        str | None,
        typer.Option(help="Add the requests to this folder of lists, with its options, in place of --out."),
    ] = None,
    replace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="With --append: replace the requests of this partition, such as date=2026-01-05; may be repeated.",
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="Engine that groups the log: duckdb or spark.")] = "duckdb",
    columns: dict[str, str],
    weight: Annotated[str | None, typer.Option(help="Column with the weight of the request.")] = None,
    events: Annotated[
        str | None, typer.Option(help="A separate table of actions, to join to the log by request and item.")
    ] = None,
    event_request: Annotated[str | None, typer.Option(help="Column of --events with the request.")] = None,
    event_item: Annotated[str | None, typer.Option(help="Column of --events with the item.")] = None,
    event_type: Annotated[str | None, typer.Option(help="Column of --events with the action.")] = None,
    event_value: Annotated[str | None, typer.Option(help="Column of --events with the value; default: 1.")] = None,
    event_id: Annotated[
        str | None,
        typer.Option(
            help="Column of --events with the id of the event; of events with the same id, one counts. Default: "
            "event_id, or else all columns. '': all events count."
        ),
    ] = None,
    event_time: Annotated[str | None, typer.Option(help="Column of --events with the time, for the window.")] = None,
    event_window: Annotated[
        str | None,
        typer.Option(help="Only count events up to this time after their item was shown, e.g. 24h; needs --time."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="Also write a label, e.g. 'click + dwell / exp(3)'.")] = None,
    where: options.Where = None,
    on_duplicates: Annotated[
        str,
        typer.Option(
            help="Rows of a request with the same position: keep or error; with the same item or position: first (keep "
            "the first row) or sum (add up the actions)."
        ),
    ] = "keep",
    min_items: Annotated[int, typer.Option(help="Drop requests with fewer items.", min=1)] = 1,
    max_items: Annotated[int | None, typer.Option(help="Keep at most this number of items per list.", min=1)] = None,
    keep_clickless: Annotated[
        float, typer.Option(help="Share of requests without feedback to keep; they get the weight 1/share.")
    ] = 1.0,
    drop_suspicious: Annotated[
        bool,
        typer.Option(
            "--drop-suspicious",
            help="Leave out requests with impossible click rates (bots); their ids are written to suspicious.csv.",
        ),
    ] = False,
    split: Annotated[
        str, typer.Option(help="hash: split by the id of the request; time: hold out the latest requests.")
    ] = "hash",
    time: Annotated[str | None, typer.Option(help="Column with the time, for --split time and --event-window.")] = None,
    validation: Annotated[float, typer.Option(help="Share of requests for validation.", min=0, max=1)] = 0.1,
    test: Annotated[float, typer.Option(help="Share of requests for testing.", min=0, max=1)] = 0.1,
    validation_from: Annotated[str | None, typer.Option(help="Validate on requests since this time.")] = None,
    test_from: Annotated[str | None, typer.Option(help="Test on requests since this time.")] = None,
    memory: options.Memory = None,
    threads: Annotated[int | None, typer.Option(help="Threads of DuckDB; default: all cores.", min=1)] = None,
    master: options.Master = None,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Group a log of any size into lists, one per request, split for training, validation and testing."""
    # All parameters except those removed here are options of `Preparation` with the same names.
    settings: dict[str, Any] = {**locals(), **columns}
    for name in ("source", "columns", "out", "append", "replace", "overwrite", "as_json"):
        del settings[name]
    if (lists := out or append) is None or (out and append):
        raise OptionError("--out or --append must name the folder of the lists", hint="pass one of them")
    from ultr.log.labels import default_label
    from ultr.log.prepare.pipeline import prepare_lists

    settings["where"] = tuple(where or ())
    settings["memory"] = options.bytes_of(memory)
    if format is not None and append is None and lists.endswith(".parquet"):
        _write_log(options.one_source(source), lists, overwrite, as_json, settings)
        return
    with progress_bar("starting", "rows") as bar:

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(description=stage, completed=done, total=total or None)

        how: dict[str, Any] = {"overwrite": overwrite, "append": append is not None, "replace": replace or ()}
        manifest = prepare_lists(options.one_source(source), lists, progress=progress, **how, **settings)
    print_notes(manifest.about["notes"])
    if as_json:
        print(json.dumps(asdict(manifest)))
        return
    _print(manifest)
    dropped = manifest.about["requests_dropped"]
    left_out = f"; {dropped:,} requests left out" if dropped else ""
    content = f"{len(manifest.features)} features, actions {', '.join(manifest.actions) or 'none'}"
    words.say(f"wrote {lists}: {content}{left_out}")
    if manifest.actions:
        label = None if manifest.label is not None else default_label(manifest.actions)
        print_next("train", lists, label=label, out=free_path("my-run"))


def _write_log(source: str, out: str, overwrite: bool, as_json: bool, settings: dict[str, Any]) -> None:
    """Write the events of a source as a log with one row per item shown."""
    from ultr.log.prepare.pipeline import events_to_log

    with progress_bar("reading events", "rows"):
        events = events_to_log(source, out, overwrite=overwrite, **settings)
    print_notes(events.notes)
    if as_json:
        print(json.dumps({"format": events.name, "counts": events.counts, "notes": events.notes}))
        return
    words.say(f"wrote {out}: {events.counts['rows']:,} items that were shown")
    print_next("describe", out)


def _print(manifest: Manifest) -> None:
    table = new_table("Lists", names=("split",), numbers=("requests", "rows", "longest", "with feedback"))
    for split, counts in manifest.splits.items():
        share = counts["with_feedback"] / counts["requests"]
        table.add_row(split, *(f"{counts[name]:,}" for name in ("requests", "rows", "longest")), f"{share:.1%}")
    print_table(table)
