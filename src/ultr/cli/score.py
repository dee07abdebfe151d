"""`ultr score`: score the rows of a file with the model of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultr.cli import options
from ultr.cli.messages import progress_bar, with_options, words
from ultr.cli.options import columns_text, print_next, print_notes
from ultr.errors import OptionError

if TYPE_CHECKING:
    import numpy as np

    from ultr.log import Log


@with_options("columns", options.columns("request", "position", "row", "column", "item", "features"))
def score(
    *,
    run: Annotated[str, typer.Argument(help="A finished run.")],
    candidates: Annotated[
        list[str], typer.Argument(help=f"Rows to score ({options.SOURCES}); positions and actions are optional.")
    ],
    out: Annotated[str, typer.Option(help="The file to write (.parquet, .csv); also a URL.")],
    columns: dict[str, str],
    where: options.Where = None,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Add a column `expected`: the expected feedback at a position.")
    ] = False,
    at_position: Annotated[
        str | None, typer.Option(help="The position of --calibrated, such as 3.", show_default="the first")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="spark: score on the workers of Spark, with ONNX; --out is a folder.", show_default="here"),
    ] = None,
    master: options.Master = None,
    device: options.Device = "auto",
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Score the rows of a file of any size with the model of a run; write the ids, the positions and the scores.

    The columns have the names of the training log, unless options name others.
    """
    from ultr.utils.stores import fetched

    options.check_engine(engine, master=master)
    if engine not in (None, "spark"):
        raise OptionError("scores are computed here or by Spark", got=f"--engine {engine}", hint="pass --engine spark")
    source, first = options.one_source(candidates), dict[str, Any]()
    settings: dict[str, Any] = {**columns, "where": where or (), "overwrite": overwrite}
    settings |= {"calibrated": calibrated, "at_position": at_position}

    def on_start(columns: Mapping[str, Any], notes: Sequence[str]) -> None:
        first.update(columns=dict(columns), notes=list(notes))
        if columns:
            words.say(f"columns: {columns_text(columns)}")
        print_notes(notes)

    with progress_bar("rows") as bar:
        if engine is None:
            from ultr.rankers.model import load_model
            from ultr.serving.scoring import first_ranking, score_file

            def on_first(rows: Log, scores: np.ndarray) -> None:
                on_start(rows.columns, rows.notes)
                first["example"] = first_ranking(rows, scores)

            scores = score_file(
                load_model(fetched(run)),
                source,
                out,
                on_start=on_first,
                device=device,
                on_progress=lambda done, rows: bar.update(completed=done, total=rows),
                **settings,
            )
        else:
            from ultr.serving.spark_scoring import score_on_spark

            scores = score_on_spark(
                fetched(run),
                source,
                out,
                master=master,
                on_start=lambda columns: on_start(columns.by_role, columns.notes),
                **settings,
            )
    if as_json:
        print(json.dumps({"out": out, "run": run, "scores": scores, **first}))
        return
    words.say(f"wrote {out}: {scores:,} scores; sort the rows of a request by score, highest first")
    if first.get("example"):
        words.say(f"for example, {first['example']}")
    print_next("serve", run)
