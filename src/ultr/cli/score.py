"""`ultr score`: score the rows of a file with the model of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ultr.cli import options
from ultr.cli.options import progress_bar, words


def score(
    run: Annotated[Path, typer.Argument(help="A finished run.")],
    candidates: Annotated[Path, typer.Argument(help="Rows to score: a log; positions and actions are optional.")],
    out: Annotated[Path, typer.Option(help="The file to write (.parquet, .csv).")],
    request: options.RequestColumn = None,
    features: options.FeatureColumns = None,
    device: options.Device = "auto",
    overwrite: options.Overwrite = False,
) -> None:
    """Score the rows of a file of any size with the model of a run; write request, item, position and score."""
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
            features=features,
            overwrite=overwrite,
            device=device,
            on_progress=lambda done, rows: bar.update(task, completed=done, total=rows),
        )
    words.print(f"wrote {out}: {scores:,} scores", soft_wrap=True)
