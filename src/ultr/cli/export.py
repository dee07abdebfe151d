"""`ultr export`: write the model of a run as ONNX, with a description of its inputs and a model card."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ultr.cli.messages import words
from ultr.cli.options import Json, Overwrite, plain, print_next


def export(
    run: Annotated[str, typer.Argument(help="A finished run.")],
    out: Annotated[str, typer.Option(help="The folder to write; also a URL.")],
    rows: Annotated[
        str | None,
        typer.Option(help="A log with rows to check the exported scores on, if the run has none.", show_default=False),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Export the model of a run: ONNX with the same scores, a description of its inputs, and a model card."""
    from ultr.serving.export import export_run
    from ultr.utils.stores import fetched

    exported = export_run(fetched(run), out, rows=rows, overwrite=overwrite)
    if as_json:
        about = {key: exported.about.get(key) for key in ("parity", "no_onnx")}
        print(json.dumps({"out": out, "run": run, "files": sorted(exported.files), **about}))
        return
    words.print(plain(f"wrote {out}: {', '.join(sorted(exported.files))}"), soft_wrap=True)
    if not exported.has_onnx:
        words.print(plain(f"no ONNX model: {exported.about['no_onnx']}"), soft_wrap=True)
        words.print(plain(f"to use the model, load {out} with {exported.ranker}"), soft_wrap=True)
        return
    parity = exported.about["parity"]
    largest, allowed = parity["largest_difference"], parity["tolerance"]
    words.print(f"on {parity['rows']:,} real rows, scores differ by at most {largest:.1e} (allowed: {allowed:.1e})")
    print_next("serve", out)
