"""`ultr score`: score the rows of a file with the model of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ultr.cli import options
from ultr.cli.options import columns_text, plain, print_next, print_notes, progress_bar, words

if TYPE_CHECKING:
    from ultr.log import Log


def score(
    run: Annotated[Path, typer.Argument(help="A finished run.")],
    candidates: Annotated[Path, typer.Argument(help="Rows to score: a log; positions and actions are optional.")],
    out: Annotated[Path, typer.Option(help="The file to write (.parquet, .csv).")],
    request: options.RequestColumn = None,
    position: options.PositionColumn = None,
    item: options.ItemColumn = None,
    features: options.FeatureColumns = None,
    device: options.Device = "auto",
    overwrite: options.Overwrite = False,
) -> None:
    """Score the rows of a file of any size with the model of a run; write request, item, position and score.

    The columns have the names of the training log, unless options name others.
    """
    from ultr.rankers.model import load_model
    from ultr.serving.scoring import score_file

    model = load_model(run)
    with progress_bar() as bar:
        task = bar.add_task("rows", total=None, figure="")
        scores = score_file(
            model,
            candidates,
            out,
            request=request,
            position=position,
            item=item,
            features=features,
            on_start=_print_columns,
            overwrite=overwrite,
            device=device,
            on_progress=lambda done, rows: bar.update(task, completed=done, total=rows),
        )
    words.print(f"wrote {out}: {scores:,} scores", soft_wrap=True)
    print_next("serve", run)


def _print_columns(first: Log) -> None:
    if first.columns:
        words.print(plain(f"columns: {columns_text(first.columns)}"), soft_wrap=True)
    print_notes(first.notes)
