"""Plots of reports as plotly figures, for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultr.bias.propensities import BIAS_FILE, read_bias_file
from ultr.bias.result import BiasReport
from ultr.errors import AbsentError, OptionError, UltrError, nearest
from ultr.evaluation.off_policy import OffPolicyValue
from ultr.evaluation.scores import Mean, mean_with_interval
from ultr.report.bias import Truth, estimates_plot, examination_plot
from ultr.report.comparison import comparison_plots, read_comparison
from ultr.report.page import missing_packages
from ultr.report.parts import Plot
from ultr.report.plots import interval_plot
from ultr.report.run import load_run
from ultr.training.comparison import Comparison
from ultr.utils.arguments import check_value, checked
from ultr.utils.jsonfiles import content_errors


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
