"""The page about a comparison of methods, from comparison.json and from the run directories that still exist."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultr.evaluation.comparing import LOGGED_RANKING
from ultr.evaluation.scores import less_is_better
from ultr.report.page import Answers, Card, Cards, Grid, Headline, Part, Plot, Section, Table, Text
from ultr.report.plots import dot_plot
from ultr.report.runs import Run, bias_of_runs, change_text, learning_section, load_run
from ultr.training.comparing.plan import run_folder
from ultr.training.comparing.results import FORMAT, Setting
from ultr.training.folder import MODEL
from ultr.utils.jsonfiles import check_format, read_json


def read_comparison(folder: Path) -> dict[str, Any]:
    """Read comparison.json, which `ultr compare` wrote to a folder."""
    result = read_json(folder / "comparison.json")
    check_format(result, FORMAT, what="the comparison", where=folder, hint="run ultr compare again")
    return result


LEVEL = 0.05  # p values below this are called sure


def comparison_sections(result: Mapping[str, Any], folder: Path) -> list[Section]:
    """Return the sections of a comparison: plots, tables, and learning curves and bias of each method's first run."""
    headline, answers = _answer(result)
    first, *others = comparison_plots(result)
    more: list[Part] = [Cards(_best(result)), Grid(others)] if others else []
    sections = [
        Section("Comparison", [headline, first, answers, *more]),
        _table(result),
    ]
    runs = _first_runs(result, folder)
    return [*sections, learning_section(runs), bias_of_runs(runs)] if runs else sections


def _answer(result: Mapping[str, Any]) -> tuple[Headline, Answers]:
    """Return which method is best by the first metric; and in words how sure that is, and what to do."""
    metric = result["metrics"][0]
    sign = -1 if less_is_better(metric) else 1
    best = max(result["rows"], key=lambda row: sign * row["figures"][metric]["mean"])
    means = {row["method"]: row["figures"][metric]["mean"] for row in result["rows"]}
    reference, found = result["reference"], best["figures"][metric]
    answers: dict[str, str] = {}
    sure = True
    if found["against"] is not None:
        p_values = [p for p in _p_values(found["against"]) if p is not None]
        sure = all(p < LEVEL for p in p_values)
        chance = "" if sure else ", which may be chance"
        change = change_text(found["against"]["difference"], means[reference])
        answers["How sure?"] = f"It is {change} than {reference}{chance} (p = {max(p_values):.2g})."
    elif len(means) > 1:
        answers["How sure?"] = "It is the reference; the table has the tests of the other methods against it."
    if (test := found.get("against_logged")) is not None:
        better = sign * test["difference"] > 0 and test["holm"] < LEVEL
        sure = sure and better
        change = change_text(test["difference"], result["logged"][metric]["mean"])
        clear = "Yes" if better else "Not clear" if test["holm"] >= LEVEL else "No"
        answers[f"Is it better than {LOGGED_RANKING}?"] = f"{clear}: it is {change} (p = {test['holm']:.2g})."
    do = "Collect more requests, or run more seeds (--seeds)."
    if sure:
        setting = str(Setting.from_json(best))
        do = f"Train {best['method']}{f' ({setting})' if setting else ''} with ultr train; evaluate it on a later log."
    answers["What to do?"] = do
    headline = Headline(f"Best method: {best['method']}", f"By {metric}: {found['mean']:.4f}.", good=sure)
    return headline, Answers(answers)


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
        rows, marked, logged = [], [], result.get("logged", {}).get(metric)
        for i, row in enumerate(result["rows"]):
            summary = row["figures"][metric]
            test = summary["against"]
            cells = [f"{summary['mean']:.4f}", f"{summary['deviation']:.4f}", str(Setting.from_json(row))]
            p_values = [None, None] if test is None else _p_values(test)
            cells += ["" if test is None else f"{test['difference']:+.4f}"]
            cells += ["" if p is None else f"{p:.2g}" for p in p_values]
            if logged is not None:
                test_of_logged = summary["against_logged"]
                cells += (
                    [f"{test_of_logged['difference']:+.4f}", f"{test_of_logged['holm']:.2g}"]
                    if test_of_logged
                    else ["", ""]
                )
            rows.append([row["method"], *cells])
            if test is not None and all(p < 0.05 for p in p_values if p is not None):
                marked.append(i)
        head = ["method", metric, "standard deviation", "setting", f"minus {result['reference']}"]
        head += ["p over runs", "p over requests"]
        caption = "Marked: p < 0.05 in paired tests over runs and over test requests, corrected by Holm's method."
        if logged is not None:
            head += [f"minus {LOGGED_RANKING}", "p over requests"]
            rows.append([LOGGED_RANKING, f"{logged['mean']:.4f}", *[""] * (len(head) - 2)])
            caption += f" All runs and {LOGGED_RANKING} have the same requests, and one estimate of examination."
        parts.append(Table(head, rows, caption, marked))
    runs = len(result["rows"][0]["figures"][result["metrics"][0]]["seeds"])
    parts.append(Text(f"{runs} runs of each method, with the setting that was best on validation requests."))
    return Section("Table", parts)


def _p_values(test: Mapping[str, Any]) -> list[float | None]:
    """Return the p values over runs and over requests, corrected if they are."""
    over_requests = test.get("over_requests")
    over_runs, by_request = test.get("holm") or (test["p"], over_requests and over_requests["p"])
    return [over_runs, by_request if over_requests else None]


def _first_runs(result: Mapping[str, Any], folder: Path) -> list[Run]:
    """Return the first run of each method with its selected setting, if the run directory still exists."""
    runs = []
    for row in result["rows"]:
        run = run_folder(folder, row["method"], Setting.from_json(row), 0)
        if (run / MODEL).is_dir():
            runs.append(load_run(run, row["method"]))
    return runs
