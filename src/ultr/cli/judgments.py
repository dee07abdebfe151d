"""`ultr judgments`: estimate the relevance of pairs of a query and an item from feedback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ultr.cli import options
from ultr.cli.messages import with_options, words
from ultr.cli.options import new_table, print_notes, print_table, without_none
from ultr.errors import OptionError

if TYPE_CHECKING:
    from ultr.bias.relevance import Judgments


@with_options("columns", options.columns(*options.LOG_COLUMNS) | options.FOUND_SEGMENT)
def judgments(
    *,
    log: options.AnyLog,
    out: Annotated[str, typer.Option(help="The file to write; also a URL.")],
    format: Annotated[
        str | None,
        typer.Option(
            help="csv, parquet, qrels, opensearch, quepid or ranklib.", show_default="by the name of the file"
        ),
    ] = None,
    labels: options.ClickLabels = None,
    grades: Annotated[int, typer.Option(help="The highest grade.", min=1, max=30)] = 3,
    cuts: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Least relevance of the grades 1, 2, ..., such as 0.02,0.1,0.3.",
            show_default="gains 2^grade - 1 about proportional to relevance",
        ),
    ] = None,
    weight: Annotated[
        float,
        typer.Option(
            help="Share of the difference between clicks and production's prediction that is relevance. "
            "1: only clicks count, where there are enough.",
            min=0.0,
            max=1.0,
        ),
    ] = 0.2,
    sure: Annotated[float, typer.Option(help="Least probability of the grade of a sure pair.", min=0.0, max=1.0)] = 0.6,
    keep_unsure: Annotated[
        bool, typer.Option("--keep-unsure", help="Also write unsure pairs in formats that cannot mark them.")
    ] = False,
    columns: dict[str, str],
    on_duplicates: options.OnDuplicates = "error",
    where: options.Where = None,
    propensities: Annotated[
        Path | None, typer.Option(help="CSV or Parquet file of known examination: columns position,propensity.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Engine that counts a log larger than memory: duckdb or spark.", show_default="in memory"),
    ] = None,
    memory: options.Memory = None,
    master: options.Master = None,
    seed: options.Seed = 0,
    keep_suspicious: Annotated[
        bool, typer.Option(help="Keep suspicious requests, such as those of bots, in the estimates.")
    ] = False,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Turn feedback into relevance judgments of queries and items, with grades, intervals and the evidence."""
    from ultr import api
    from ultr.bias.judgment_files import format_of, write_judgments
    from ultr.bias.propensities import read_propensities
    from ultr.utils.files import check_output

    chosen = format_of(out, format)
    check_output(out, overwrite=overwrite)
    points = None if cuts is None else _numbers(cuts)
    source = options.one_source(log)
    options.check_engine(engine, memory=memory, master=master)
    reading = {"on_duplicates": on_duplicates, "engine": engine, "memory": options.bytes_of(memory), "master": master}
    with words.status(f"reading {source} and estimating relevance ..."):
        found = api.judgments(
            source,
            label=options.sum_of_labels(labels),
            grades=grades,
            cuts=points,
            weight=weight,
            sure=sure,
            propensities=None if propensities is None else read_propensities(propensities),
            seed=seed,
            keep_suspicious=keep_suspicious,
            where=where or (),
            **{**reading, **without_none(columns)},
        )
        written = write_judgments(found, out, format=chosen, keep_unsure=keep_unsure, overwrite=overwrite)
    if as_json:
        print(json.dumps({"out": out, "format": chosen, "written": written, **found.summary()}))
        return
    print_notes(found.notes)
    _print_summary(found)
    words.say(f"wrote {out}: {written:,} of {len(found):,} pairs ({chosen})")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError("--cuts must be numbers", got=f"'{text}'", hint="separate them by commas") from error


def _print_summary(found: Judgments) -> None:
    facts = found.summary()
    words.say(f"feedback: {facts['label']} > 0; examination from {facts['examination']}")
    share = facts["sure"] / facts["pairs"]
    words.say(f"{facts['sure']:,} of {facts['pairs']:,} pairs have enough evidence for a grade ({share:.1%})")
    table = new_table("Sure pairs by grade", numbers=("grade", "relevance from", "pairs"))
    for grade, (cut, count) in enumerate(zip((0.0, *found.cuts), facts["grades"], strict=True)):
        table.add_row(str(grade), f"{cut:.3g}", f"{count:,}")
    print_table(table)
