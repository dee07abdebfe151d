"""`ultr report`: write an HTML page about runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ultr.cli.messages import plain, words
from ultr.cli.options import Json, Overwrite, free_path, new_table, print_next, print_table

if TYPE_CHECKING:
    from ultr.report.runs import Run


def report(
    runs: Annotated[list[str], typer.Argument(help="Finished runs, or one folder from ultr compare or ultr bias.")],
    out: Annotated[str, typer.Option(help="The HTML file to write; also a URL.")] = "report.html",
    name: Annotated[
        list[str] | None, typer.Option(help="Name of a run on the page; one for each run, in their order.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write one HTML page about runs: whether they are better, data, learning curves, metrics, bias and rankings.

    p values are from paired tests over validation requests, for runs with the same requests and the same estimate of
    examination. To compare other runs, use ultr evaluate.
    """
    from ultr.report import load_run, write_report
    from ultr.utils.files import check_output
    from ultr.utils.stores import as_path, as_url, fetched

    check_output(out, overwrite=overwrite)
    folders = [fetched(run) for run in runs]
    write_report(folders, out, names=name or (), overwrite=overwrite)
    loaded = [(run, load_run(run, run.name)) for run in folders if (run / "model").is_dir()]
    if as_json:
        importance = {str(path): [asdict(each) for each in run.importance] for path, run in loaded}
        print(json.dumps({"out": str(out), "runs": runs, "importance": importance}))
        return
    for path, run in loaded:
        _print_importance(path, run)
    size = "" if as_url(out) else f" ({as_path(out).stat().st_size / 2**20:.1f} MB)"
    words.say(f"wrote {out}{size}: open it in a browser")
    if len(runs) == 1 and (folders[0] / "model").is_dir():
        print_next("export", runs[0], out=free_path("model"))


def _print_importance(folder: Path, run: Run) -> None:
    """Print the importance of the features of a run, if it has saved it."""
    if not run.importance:
        return
    title = f"Importance of features in {folder}: fall of {run.selection}"
    has_gain = run.importance[0].gain is not None
    numbers = ["fall", "95% interval"] + ["gain"] * has_gain
    table = new_table(title, names=("feature",), numbers=numbers)
    for each in run.importance:
        gain = (f"{each.gain or 0:.1%}",) if has_gain else ()
        table.add_row(plain(each.feature), f"{each.drop:+.4f}", f"{each.low:+.4f} to {each.high:+.4f}", *gain)
    print_table(table)
