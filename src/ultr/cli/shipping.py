"""Commands that take a model to where it is used: export."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ultr.cli.common import Overwrite, plain, words


def export(
    run: Annotated[Path, typer.Argument(help="A finished run.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    rows: Annotated[
        str | None,
        typer.Option(help="A log to try the model on, where the run has kept no rows of its own.", show_default=False),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Export a run's model: ONNX that scores as the run does, what its inputs are, and a model card."""
    from ultr.export import export_run

    exported = export_run(run, out, rows=rows, overwrite=overwrite)
    words.print(plain(f"wrote {out}: {', '.join(sorted(exported.files))}"), soft_wrap=True)
    if not exported.has_onnx:
        words.print(plain(f"no ONNX: {exported.about['no_onnx']}"), soft_wrap=True)
        words.print(plain(f"next: load {out} with {exported.ranker}"), soft_wrap=True)
        return
    parity = exported.about["parity"]
    off, allowed = parity["largest_difference"], parity["tolerance"]
    words.print(f"on {parity['rows']:,} real rows, scores differ by {off:.1e} at most; {allowed:.1e} is allowed")
    words.print(plain(f"next: ultr serve {shlex.quote(str(out))}"), soft_wrap=True)
