"""The page about a comparison of methods, from comparison.json and from the run directories that still exist."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultr.report.parts import Card, Cards, Part, Plot, Section, Table, Text
from ultr.report.plots import dot_plot
from ultr.report.run import Run, load_run
from ultr.report.runs import bias_of_runs, learning_section
from ultr.training.compare import Entry, run_folder
from ultr.training.selection import less_is_better


def comparison_sections(result: Mapping[str, Any], folder: Path) -> list[Section]:
    """Return the sections of a comparison: plots, tables, and learning curves and bias of each method's first run."""
    sections = [Section("Comparison", [Cards(_best(result)), *comparison_plots(result)]), _table(result)]
    runs = _first_runs(result, folder)
    return [*sections, learning_section(runs), bias_of_runs(runs)] if runs else sections


def comparison_plots(result: Mapping[str, Any]) -> list[Plot]:
    """Return a plot for each metric of a comparison; `result` is the result of `Comparison.to_json`."""
    return [
        dot_plot(
            metric,
            {row["method"]: row["figures"][metric]["seeds"] for row in result["rows"]},
            x=metric,
            caption="On test requests; each dot is a run.",
        )
        for metric in result["metrics"]
    ]


def _best(result: Mapping[str, Any]) -> list[Card]:
    cards = []
    for metric in result["metrics"]:
        means = {row["method"]: row["figures"][metric]["mean"] for row in result["rows"]}
        best = (min if less_is_better(metric) else max)(means, key=lambda name: means[name])
        cards.append(Card(best, f"{means[best]:.4f}", [f"best {metric}"]))
    return cards


def _table(result: Mapping[str, Any]) -> Section:
    parts: list[Part] = []
    for metric in result["metrics"]:
        rows, marked = [], []
        for i, row in enumerate(result["rows"]):
            summary = row["figures"][metric]
            test = summary["against"]
            cells = [f"{summary['mean']:.4f}", f"{summary['deviation']:.4f}", f"{row['lr']:g}"]
            cells += ["", ""] if test is None else [f"{test['difference']:+.4f}", f"{test['p']:.2g}"]
            rows.append([row["method"], *cells])
            if test is not None and test["p"] < 0.05:
                marked.append(i)
        head = ["method", metric, "standard deviation", "learning rate", f"minus {result['reference']}", "p"]
        caption = "Marked: p < 0.05 in a paired test over runs, not corrected for the number of tests."
        parts.append(Table(head, rows, caption, marked))
    runs = len(result["rows"][0]["figures"][result["metrics"][0]]["seeds"])
    parts.append(Text(f"{runs} runs of each method, with the learning rate that was best on validation requests."))
    return Section("Table", parts)


def _first_runs(result: Mapping[str, Any], folder: Path) -> list[Run]:
    """Return the first run of each method at its selected learning rate, if the run directory still exists."""
    runs = []
    for row in result["rows"]:
        run = run_folder(folder, Entry(row["method"], "", "feedback", {}), row["lr"], 0)
        if (run / "config.json").is_file() and (run / "metrics.jsonl").is_file():
            runs.append(load_run(run, row["method"]))
    return runs
