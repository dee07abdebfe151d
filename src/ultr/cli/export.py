"""`ultr export`: write the model of a run as ONNX, or as trees for a search engine, with a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Annotated, Any

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
    format: Annotated[
        str,
        typer.Option(help="onnx; or trees for vespa, solr, elasticsearch, opensearch, lightgbm or xgboost."),
    ] = "onnx",
    distill: Annotated[
        str | None,
        typer.Option(
            metavar="LOG",
            help="A log: trees learn the scores of the ranker on its rows.",
            show_default="the log of training, if the ranker is not trees alone",
        ),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="folder, or triton: a model in a repository of Triton, named like --out.")
    ] = "folder",
    name: Annotated[str, typer.Option(help="The name of the model in a search engine.")] = "ranker",
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Export the model of a run: ONNX with the same scores, a description of its inputs, and a model card.

    Or trees for a search engine, with templates of its features. A ranker that is not trees alone is replaced by trees
    that learn its scores, and both are compared on other requests.
    """
    from ultr.serving.export import export_run
    from ultr.utils.stores import fetched

    with words.status(f"exporting {run} ...") if format != "onnx" else nullcontext():
        exported = export_run(
            fetched(run),
            out,
            rows=rows,
            format=format,
            distill=distill,
            layout=layout,
            name=name,
            overwrite=overwrite,
        )
    if as_json:
        about = {key: exported.about.get(key) for key in ("parity", "no_onnx", "distilled")}
        print(json.dumps({"out": out, "run": run, "files": sorted(exported.files), **about}))
        return
    words.say(f"wrote {out}: {', '.join(sorted(exported.files))}")
    if format != "onnx":
        _say_trees(exported.about)
        return
    if not exported.has_onnx:
        words.say(f"no ONNX model: {exported.about['no_onnx']}")
        words.say(f"to use the model, load {out} with {exported.ranker}")
        return
    parity = exported.about["parity"]
    largest, allowed = parity["largest_difference"], parity["tolerance"]
    words.say(f"on {parity['rows']:,} real rows, scores differ by at most {largest:.1e} (allowed: {allowed:.1e})")
    print_next("serve", out)


def _say_trees(about: Mapping[str, Any]) -> None:
    """Say how exported trees differ from the ranker of the run, and what to do with them."""
    if distilled := about.get("distilled"):
        words.say(f"the trees learned the scores of the ranker from {distilled['rows']:,} rows of {distilled['log']}")
        if distilled["metric"] is not None:
            values = distilled["values"]
            words.say(
                f"{distilled['metric']}: {values['ranker']:.4f} for the ranker, {values['trees']:.4f} for the trees; "
                f"difference {values['difference']:+.4f} ({values['low']:+.4f} to {values['high']:+.4f})"
            )
        used = "" if distilled["unused"] else ", which the run was trained on"
        words.say(
            f"rank correlation (Kendall's τ) of both: {distilled['agreement']:.3f}, on {distilled['requests']:,} "
            f"requests held out from the trees{used}"
        )
    if about["format_of_trees"] not in ("lightgbm", "xgboost"):
        words.say("replace each FILL_IN in the files with a name from your index")
