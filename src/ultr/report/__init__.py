"""Reports of runs, of comparisons and of the bias of a log: HTML files that can be viewed offline, and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ultr.bias.audit import BiasReport
from ultr.bias.propensities import BIAS_FILE, read_bias_file
from ultr.errors import AbsentError, OptionError, UltrError, nearest
from ultr.evaluation.off_policy import OffPolicyValue
from ultr.evaluation.scores import Mean, mean_with_interval
from ultr.report.bias import Truth, estimates_plot, examination_plot, log_sections
from ultr.report.comparison import comparison_plots, comparison_sections, read_comparison
from ultr.report.page import Plot, missing_packages, write_page
from ultr.report.plots import interval_plot
from ultr.report.runs import load_run, load_runs, run_sections
from ultr.training.comparing.results import Comparison
from ultr.utils.arguments import check_value, checked
from ultr.utils.jsonfiles import content_errors

# --- Figures for notebooks --------------------------------------------------------------------------------------------


@checked
def plot_bias(source: object, *, truth: Mapping[int, float] | None = None) -> Any:
    """Return a plotly figure of examination by position.

    `source` is the result of `audit`, a fitted `UnbiasedRanker`, or a folder that `ultr bias` or `ultr train` wrote.
    `truth` is the true examination by position, for simulated users. A run with simulated users knows it.
    """
    true: Truth = None if truth is None else ([str(k) for k in truth], list(truth.values()))
    if isinstance(source, BiasReport):
        return _figure(estimates_plot(source.to_json(), truth=true))
    if isinstance(source, str | Path):
        folder = Path(check_value("source", source, str | Path))
        if not (folder / BIAS_FILE).is_file():
            hint = "pass a folder that ultr bias wrote, or a run of a method that estimates bias"
            raise AbsentError(f"the folder has no {BIAS_FILE}", where=folder, hint=hint)
        content = read_bias_file(folder / BIAS_FILE)
        with content_errors(f"{BIAS_FILE} cannot be read", where=folder, hint="run ultr bias or ultr train again"):
            if "estimates" in content:
                return _figure(estimates_plot(content, truth=true))
            if true is None and (folder / "config.json").is_file():
                true = load_run(folder).true_theta
            return _figure(_of_run(content, true))
    bias = getattr(source, "bias_", None)
    if not isinstance(bias, Mapping):
        hint = "pass the result of ultr.audit, a fitted UnbiasedRanker, or the folder of ultr bias or ultr train"
        raise OptionError("there is no estimate of bias", got=type(source).__name__, hint=hint)
    return _figure(_of_run(bias, true))


def _of_run(bias: Mapping[str, Any], truth: Truth) -> Plot:
    if "theta" not in bias:
        raise OptionError("the method does not estimate examination", hint="use for example method='pairwise-em'")
    return examination_plot(bias, truth)


@checked
def plot_comparison(source: object, metric: str | None = None) -> Any:
    """Return a plotly figure that compares rankers in a metric, with 95% intervals.

    `source` is a folder that `ultr compare` wrote, or a mapping from the names of rankers to their values: arrays with
    one value per request (`evaluate_scores`), results of `mean_with_interval`, or of `off_policy_value`. `metric` is
    the metric of a comparison to plot (default: its first), or the name of the axis.
    """
    if isinstance(source, Comparison | str | Path):
        if isinstance(source, Comparison):
            result, where = source.to_json(), None
        else:
            where = Path(check_value("source", source, str | Path))
            result = read_comparison(where)
        with content_errors("the comparison cannot be read", where=where, hint="run ultr compare again"):
            plots = {plot.title: plot for plot in comparison_plots(result)}
        chosen = next(iter(plots)) if metric is None else metric
        if chosen not in plots:
            raise OptionError(f"the comparison has no metric '{chosen}'", hint=nearest(chosen, plots))
        return _figure(plots[chosen])
    if not isinstance(source, Mapping) or not source:
        hint = "pass a folder that ultr compare wrote, or a dict from names to values by request"
        raise OptionError("there is nothing to compare", got=type(source).__name__, hint=hint)
    rows = {str(name): _interval(values) for name, values in source.items()}
    return _figure(interval_plot(metric or "Comparison", rows, x=metric or ""))


def _interval(values: Any) -> tuple[float, float, float]:
    if isinstance(values, OffPolicyValue):
        return values.value, values.low, values.high
    mean = values if isinstance(values, Mean) else mean_with_interval(values)
    return mean.mean, mean.low, mean.high


def _figure(plot: Plot) -> Any:
    if missing := missing_packages():
        raise UltrError(f"a figure needs {' and '.join(missing)}", hint=f"run: pip install {' '.join(missing)}")
    import plotly.graph_objects as go

    layout = {"title": {"text": plot.title}, "template": "plotly_white", "height": plot.height + 60}
    return go.Figure({"data": plot.figure["data"], "layout": {**plot.figure["layout"], **layout}})


# --- Pages ------------------------------------------------------------------------------------------------------------

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
    lede = ", ".join(dict.fromkeys(f"{run.config.method.name} on {run.data}" for run in runs))
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
