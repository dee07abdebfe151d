"""`ultr score`: score the rows of a file with the model of a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultr.cli import options
from ultr.cli.messages import progress_bar, words
from ultr.cli.options import columns_text, plain, print_next, print_notes

if TYPE_CHECKING:
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
    device: options.Device = "auto",
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Score the rows of a file of any size with the model of a run; write request, item, position and score.

    The columns have the names of the training log, unless options name others.
    """
    from ultr.rankers.model import load_model
    from ultr.serving.scoring import score_file
    from ultr.utils.stores import fetched

    model, first = load_model(fetched(run)), dict[str, Any]()

    def on_start(rows: Log) -> None:
        first.update(columns=dict(rows.columns), notes=list(rows.notes))
        _print_columns(rows)

    with progress_bar() as bar:
        task = bar.add_task("rows", total=None, figure="")
        scores = score_file(
            model,
            options.one_source(candidates),
            out,
            request=request,
            position=position,
            item=item,
            features=features,
            where=where or (),
            on_start=on_start,
            overwrite=overwrite,
            device=device,
            on_progress=lambda done, rows: bar.update(task, completed=done, total=rows),
        )
    if as_json:
        print(json.dumps({"out": out, "run": run, "scores": scores, **first}))
        return
    words.print(f"wrote {out}: {scores:,} scores", soft_wrap=True)
    print_next("serve", run)


def _print_columns(first: Log) -> None:
    if first.columns:
        words.print(plain(f"columns: {columns_text(first.columns)}"), soft_wrap=True)
    print_notes(first.notes)
