"""Pages that people look at: runs, comparisons and the bias of a log, each one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ultr.arguments import checked, taken
from ultr.checkpoint import read_json
from ultr.compare import FORMAT
from ultr.errors import AbsentError, OptionError
from ultr.formats import check_format, content_errors
from ultr.propensity.audit import FORMAT as BIAS_FORMAT
from ultr.report.bias import log_sections
from ultr.report.comparison import comparison_sections
from ultr.report.page import write_page
from ultr.report.run import load_runs
from ultr.report.runs import run_sections

__all__ = ["write_bias_page", "write_comparison_page", "write_report"]


@checked
def write_report(folders: Sequence[str | Path], out: str | Path, *, overwrite: bool = False) -> Path:
    """Write a page for a run, for several side by side, or for what `ultr compare` or `ultr bias` wrote."""
    paths = [Path(taken("folders", folder, str | Path)) for folder in folders]
    if not paths:
        raise OptionError("a report needs a run or more", mend="name the folders that ultr train wrote")
    for path in paths:
        if not path.is_dir():
            raise AbsentError("there is no such folder", where=path, mend="name the folder that ultr train wrote")
    if len(paths) == 1 and (paths[0] / "comparison.json").is_file():
        return write_comparison_page(paths[0], Path(out), overwrite=overwrite)
    if len(paths) == 1 and (paths[0] / "propensities.csv").is_file():
        return write_bias_page(read_json(paths[0] / "bias.json"), Path(out), source=str(paths[0]), overwrite=overwrite)
    runs = load_runs(paths)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    lede = ", ".join(dict.fromkeys(f"{run.config.method} on {run.config.data}" for run in runs))
    with content_errors("what the runs hold cannot be shown", where=", ".join(map(str, paths)), mend="train again"):
        sections = run_sections(runs)
    return write_page(Path(out), title, lede, sections, overwrite=overwrite)


def write_comparison_page(folder: Path, out: Path, *, overwrite: bool = False) -> Path:
    """Write a page for a comparison, from its folder."""
    result = read_json(folder / "comparison.json")
    check_format(result, FORMAT, what="the comparison", where=folder, mend="compare again", unmarked=True)
    with content_errors("the comparison cannot be read", where=folder, mend="compare again"):
        sections = comparison_sections(result, folder)
        lede = f"{len(result['rows'])} methods, compared with {result['reference']}"
    return write_page(out, f"Comparison: {folder.name}", lede, sections, overwrite=overwrite)


def write_bias_page(report: Mapping[str, Any], out: Path, *, source: str, overwrite: bool = False) -> Path:
    """Write a page for the bias of a log, as `BiasReport.to_json` has it."""
    check_format(report, BIAS_FORMAT, what="the bias", where=source, mend="run ultr bias again", unmarked=True)
    with content_errors("the bias cannot be read", where=source, mend="run ultr bias again"):
        sections = log_sections(report)
        lede = f"{report['requests']:,} requests; feedback: {report['label']} > 0"
    return write_page(out, f"Bias of {Path(source).name}", lede, sections, overwrite=overwrite)
