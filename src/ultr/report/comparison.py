"""A page for a comparison of methods, from its `comparison.json` and, where they are there, its runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultr.compare import Entry, interval, run_folder
from ultr.report.parts import Card, Cards, Part, Section, Table, Text
from ultr.report.plots import dot_plot
from ultr.report.run import Run, load_run
from ultr.report.runs import bias_of_runs, learning_section
from ultr.stages import less_is_better


def comparison_sections(result: Mapping[str, Any], folder: Path) -> list[Section]:
    """Methods with their runs, how they differ from the one they are compared with, and the first run of each."""
    sections = [_figures(result), _table(result)]
    runs = _first_runs(result, folder)
    return [*sections, learning_section(runs), bias_of_runs(runs)] if runs else sections


def _figures(result: Mapping[str, Any]) -> Section:
    cards, plots = [], []
    for metric in result["metrics"]:
        figures = {row["method"]: row["figures"][metric] for row in result["rows"]}
        choose = min if less_is_better(metric) else max
        best = choose(figures, key=lambda name: figures[name]["mean"])
        cards.append(Card(best, f"{figures[best]['mean']:.4f}", [f"best {metric}"]))
        dots = {name: (f["seeds"], *_ends(f["seeds"])) for name, f in figures.items()}
        plots.append(dot_plot(metric, dots, x=metric, caption="On test requests; each run a dot."))
    return Section("Comparison", [Cards(cards), *plots])


def _ends(values: list[float]) -> tuple[float, float]:
    return interval(values) if len(values) > 1 else (values[0], values[0])


def _table(result: Mapping[str, Any]) -> Section:
    parts: list[Part] = []
    for metric in result["metrics"]:
        rows, marked = [], []
        for i, row in enumerate(result["rows"]):
            figure = row["figures"][metric]
            test = figure["against"]
            cells = [f"{figure['mean']:.4f}", f"{figure['deviation']:.4f}", f"{row['lr']:g}"]
            cells += ["", ""] if test is None else [f"{test['difference']:+.4f}", f"{test['p']:.2g}"]
            rows.append([row["method"], *cells])
            if test is not None and test["p"] < 0.05:
                marked.append(i)
        head = ["method", metric, "deviation", "rate", f"less {result['reference']}", "p"]
        parts.append(Table(head, rows, "Marked: p < 0.05, paired over runs, each test by itself.", marked))
    runs = len(result["rows"][0]["figures"][result["metrics"][0]]["seeds"])
    parts.append(Text(f"{runs} runs of each method; its rate was chosen on validation."))
    return Section("Table", parts)


def _first_runs(result: Mapping[str, Any], folder: Path) -> list[Run]:
    """The first run of each method, with the rate that was chosen, if its folder is still there."""
    found = []
    for row in result["rows"]:
        run = run_folder(folder, Entry(row["method"], "", "feedback", {}), row["lr"], 0)
        if (run / "config.json").is_file() and (run / "metrics.jsonl").is_file():
            found.append(load_run(run, row["method"]))
    return found
