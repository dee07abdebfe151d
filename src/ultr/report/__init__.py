"""Reports of runs, of comparisons and of the bias of a log. Each is one HTML file that can be viewed offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ultr.bias.propensities import BIAS_FILE, read_bias_file
from ultr.errors import AbsentError, OptionError
from ultr.report.bias import log_sections
from ultr.report.comparison import comparison_sections, read_comparison
from ultr.report.figures import plot_bias, plot_comparison
from ultr.report.page import write_page
from ultr.report.run import load_run, load_runs
from ultr.report.runs import run_sections
from ultr.utils.arguments import check_value, checked
from ultr.utils.jsonfiles import content_errors

MOST_IN_TITLE = 3  # a title has the names of up to this many runs

__all__ = ["load_run", "plot_bias", "plot_comparison", "write_bias_page", "write_comparison_page", "write_report"]


@checked
def write_report(
    folders: Sequence[str | Path], out: str | Path, *, names: Sequence[str] = (), overwrite: bool = False
) -> Path:
    """Write a page about one run, several runs side by side, or a folder that `ultr compare` or `ultr bias` wrote.

    `names` are the names of the runs on the page, in order; without them, runs have the names of their folders.
    """
    paths = [Path(check_value("folders", folder, str | Path)) for folder in folders]
    if not paths:
        raise OptionError("a report needs at least one run", hint="pass the folders that ultr train wrote")
    for path in paths:
        if not path.is_dir():
            raise AbsentError("the folder does not exist", where=path, hint="pass a folder that ultr train wrote")
    if names and (len(names) != len(paths) or len(set(names)) < len(names)):
        got = f"{len(names)} names for {len(paths)} runs" if len(names) != len(paths) else ", ".join(names)
        raise OptionError("each run must have a name of its own", got=got, hint="pass one --name for each run")
    if len(paths) == 1 and (paths[0] / "comparison.json").is_file():
        return write_comparison_page(paths[0], Path(out), overwrite=overwrite)
    if len(paths) == 1 and (paths[0] / BIAS_FILE).is_file() and not (paths[0] / "config.json").is_file():
        content = read_bias_file(paths[0] / BIAS_FILE)
        return write_bias_page(content, Path(out), source=str(paths[0]), overwrite=overwrite)
    runs = load_runs(paths, names)
    title = " and ".join(run.name for run in runs) if len(runs) <= MOST_IN_TITLE else f"{len(runs)} runs"
    lede = ", ".join(dict.fromkeys(f"{run.config.method} on {run.config.data}" for run in runs))
    with content_errors("the files of the runs cannot be read", where=", ".join(map(str, paths)), hint="train again"):
        sections = run_sections(runs)
    return write_page(Path(out), title, lede, sections, overwrite=overwrite)


def write_comparison_page(folder: Path, out: Path, *, overwrite: bool = False) -> Path:
    """Write a page about a comparison, given the folder that `ultr compare` wrote."""
    result = read_comparison(folder)
    with content_errors("the comparison cannot be read", where=folder, hint="run ultr compare again"):
        sections = comparison_sections(result, folder)
        lede = f"{len(result['rows'])} methods; the reference is {result['reference']}"
    return write_page(out, f"Comparison: {folder.name}", lede, sections, overwrite=overwrite)


def write_bias_page(report: Mapping[str, Any], out: Path, *, source: str, overwrite: bool = False) -> Path:
    """Write a page about the position bias of a log; `report` is the result of `BiasReport.to_json`."""
    with content_errors("the bias report cannot be read", where=source, hint="run ultr bias again"):
        sections = log_sections(report)
        lede = f"{report['requests']:,} requests; feedback: {report['label']} > 0"
    return write_page(out, f"Bias of {Path(source).name}", lede, sections, overwrite=overwrite)
