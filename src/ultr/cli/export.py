"""`ultr export`: write the model of a run as ONNX, with a description of its inputs and a model card."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ultr.cli.messages import words
from ultr.cli.options import Json, Overwrite, print_next


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
    words.say(f"wrote {out}: {', '.join(sorted(exported.files))}")
    if not exported.has_onnx:
        words.say(f"no ONNX model: {exported.about['no_onnx']}")
        words.say(f"to use the model, load {out} with {exported.ranker}")
        return
    parity = exported.about["parity"]
    largest, allowed = parity["largest_difference"], parity["tolerance"]
    words.say(f"on {parity['rows']:,} real rows, scores differ by at most {largest:.1e} (allowed: {allowed:.1e})")
    print_next("serve", out)
