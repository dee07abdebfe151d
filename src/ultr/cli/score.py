"""`ultr score`: score the rows of a file with the model of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultr.cli import options
from ultr.cli.messages import progress_bar, words
from ultr.cli.options import columns_text, plain, print_next, print_notes
from ultr.errors import OptionError

if TYPE_CHECKING:
    import numpy as np

    from ultr.log import Log


def score(
    run: Annotated[str, typer.Argument(help="A finished run.")],
    candidates: Annotated[
        list[str], typer.Argument(help=f"Rows to score ({options.SOURCES}); positions and actions are optional.")
    ],
    out: Annotated[str, typer.Option(help="The file to write (.parquet, .csv); also a URL.")],
    request: options.RequestColumn = None,
    position: options.PositionColumn = None,
    item: options.ItemColumn = None,
    features: options.FeatureColumns = None,
    where: options.Where = None,
    engine: Annotated[
        str | None,
        typer.Option(help="spark: score on the workers of Spark, with ONNX; --out is a folder.", show_default="here"),
    ] = None,
    master: options.Master = None,
    device: options.Device = "auto",
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Score the rows of a file of any size with the model of a run; write request, item, position and score.

    The columns have the names of the training log, unless options name others.
    """
    from ultr.utils.stores import fetched

    options.check_engine(engine, master=master)
    if engine not in (None, "spark"):
        raise OptionError("scores are computed here or by Spark", got=f"--engine {engine}", hint="pass --engine spark")
    source, first = options.one_source(candidates), dict[str, Any]()
    settings: dict[str, Any] = {"request": request, "position": position, "item": item, "features": features}
    settings |= {"where": where or (), "overwrite": overwrite}

    def on_start(columns: Mapping[str, Any], notes: Sequence[str]) -> None:
        first.update(columns=dict(columns), notes=list(notes))
        if columns:
            words.print(plain(f"columns: {columns_text(columns)}"), soft_wrap=True)
        print_notes(notes)

    with progress_bar() as bar:
        task = bar.add_task("rows", total=None, figure="")
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
                on_progress=lambda done, rows: bar.update(task, completed=done, total=rows),
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
    words.print(f"wrote {out}: {scores:,} scores; sort the rows of a request by score, highest first", soft_wrap=True)
    if first.get("example"):
        words.print(plain(f"for example, {first['example']}"), soft_wrap=True)
    print_next("serve", run)
