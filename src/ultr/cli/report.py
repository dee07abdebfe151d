"""`ultr report`: write an HTML page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ultr.cli.options import Overwrite, words


def report(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs, or one folder from ultr compare or ultr bias.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    overwrite: Overwrite = False,
) -> None:
    """Write one HTML page about runs: data, learning curves, metrics, bias and changed rankings.

    p values are from paired tests over validation requests, for runs with the same requests and the same estimate of
    examination. To compare other runs, use ultr evaluate.
    """
    from ultr.report import write_report
    from ultr.utils.files import check_output

    check_output(out, overwrite=overwrite)
    write_report(runs, out, overwrite=overwrite)
    words.print(f"wrote {out} ({out.stat().st_size / 2**20:.1f} MB): open it in a browser", soft_wrap=True)
