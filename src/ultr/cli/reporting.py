"""`ultr report`: pages that people look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ultr.cli.common import Overwrite, words


def report(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs; or the folder of ultr compare, or of ultr bias.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    overwrite: Overwrite = False,
) -> None:
    """Write one page to look at: what was learned, by which data, how good it is, and what bias was found."""
    from ultr.files import refuse_existing
    from ultr.report import write_report

    refuse_existing(out, overwrite=overwrite)
    write_report(runs, out, overwrite=overwrite)
    words.print(f"wrote {out} ({out.stat().st_size / 2**20:.1f} MB): open it in a browser", soft_wrap=True)
