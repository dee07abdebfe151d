"""A page for one run or several side by side, from what their folders hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from ultr.commands import train_command
from ultr.evaluation import FEEDBACK, OFF_POLICY, mean_with_interval, paired_test
from ultr.outcomes import LOGGED
from ultr.report.bias import bias_section
from ultr.report.parts import Card, Cards, Code, Grid, Heading, Notes, Part, Plot, Section, Table, Text
from ultr.report.plots import interval_plot, line_plot
from ultr.report.rankings import ranking_section
from ultr.report.run import BEFORE, OLDER, Run


def run_sections(runs: Sequence[Run]) -> list[Section]:
    return [
        _summary(runs),
        _data(runs),
        learning_section(runs),
        _metrics(runs),
        bias_of_runs(runs),
        ranking_section(runs),
        _configuration(runs),
    ]


# --- Summary ----------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[Run]) -> Section:
    cards = []
    for run in runs:
        metric, value, step = run.selected
        lines = [f"{metric}, validation, at step {step:,}"]
        if (test := _against_logged(run)) is not None:
            lines.append(f"{test.difference:+.4f} against {BEFORE} (p = {test.p:.2g})")
        lines += [f"{run.config.method}, {run.config.ranker}", f"label: {run.config.label}"]
        cards.append(Card(run.name, f"{value:.4f}", lines))
    metrics = list(dict.fromkeys(run.selected[0] for run in runs))
    parts: list[Part] = [Cards(cards), Grid([_interval_plot(runs, m) for m in metrics if _means(runs, m)])]
    warnings = [f"{run.name}: {warning}" for run in runs for warning in run.warnings]
    parts.append(Notes(warnings) if warnings else Notes(["No method warns of its bias model."], good=True))
    parts.append(Text(" ".join(_how_judged(metrics))))
    return Section("Summary", parts)


def _against_logged(run: Run) -> Any:
    metric = run.selected[0]
    if run.outcome is None or LOGGED + metric not in run.outcome.figures:
        return None
    figures = run.outcome.figures
    return paired_test(figures[metric], figures[LOGGED + metric], run.outcome.weights)


def _how_judged(metrics: Iterable[str]) -> list[str]:
    """What kinds of metrics say, and what not."""
    found = []
    for metric in sorted(metrics):
        if metric.startswith(OFF_POLICY):
            found.append(
                f"{metric} is what users are expected to do with the ranking, by their logged feedback and how likely "
                "they were to look: an estimate, for items that were shown."
            )
        elif metric.startswith(FEEDBACK):
            found.append(
                f"{metric} is judged by logged feedback and has its position bias: it favours the logged ranking."
            )
        else:
            found.append(f"{metric} is judged by true labels.")
    return found


# --- Data -------------------------------------------------------------------------------------------------------------


def _data(runs: Sequence[Run]) -> Section:
    rows: dict[str, list[str]] = {
        "data": [run.config.data for run in runs],
        "users": [run.config.users or "as logged" for run in runs],
        "learned from": [run.config.learn_from for run in runs],
        "label": [run.config.label for run in runs],
        **_facts(runs),
    }
    parts: list[Part] = [Table(["", *(run.name for run in runs)], [[name, *cells] for name, cells in rows.items()])]
    shown: dict[str, list[Plot]] = {}
    for run in runs:
        facts = {} if run.outcome is None else run.outcome.about["data"]
        if facts.get("by_position", {}).get("rates") and facts["fingerprint"] not in shown:
            where = "" if len(runs) == 1 else f": {run.config.data}"
            shown[facts["fingerprint"]] = _by_position(facts["by_position"], where)
    if shown:
        parts.append(Grid([plot for plots in shown.values() for plot in plots]))
    return Section("Data", parts)


def _by_position(seen: Mapping[str, Any], where: str) -> list[Plot]:
    """What the log shows of its actions: how often, and how much."""
    at, caption = seen["positions"], "What the log shows, with all its bias."
    rates = {name: (at, values) for name, values in seen["rates"].items()}
    title, y = f"Feedback by position{where}", "share of impressions"
    plots = [line_plot(title, rates, x="position", y=y, caption=caption, from_zero=True)]
    if much := {name: (at, values) for name, values in seen["means"].items() if values != seen["rates"][name]}:
        title = f"Mean of what is not 0 or 1{where}"
        plots.append(line_plot(title, much, x="position", y="mean over impressions", caption=caption, from_zero=True))
    return plots


def _facts(runs: Sequence[Run]) -> dict[str, list[str]]:
    def cells(say: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return ["not kept" if run.outcome is None else say(run.outcome.about) for run in runs]

    return {
        "requests": cells(lambda a: f"{a['data']['requests']:,}" + (" (a sample)" if a["data"]["sample"] else "")),
        "rows": cells(lambda a: f"{a['data']['rows']:,}"),
        "items of a request": cells(
            lambda a: "{least:,} to {most:,}, {mean:.1f} on average".format(**a["data"]["items"])
        ),
        "features": cells(lambda a: f"{a['data']['features']:,}"),
        "validation requests": cells(lambda a: f"{a['validation']['requests']:,}"),
        "fingerprint": cells(lambda a: a["data"]["fingerprint"][:24]),
    }


def bias_of_runs(runs: Sequence[Run]) -> Section:
    return bias_section({run.name: (run.bias, _true_theta(run)) for run in runs})


def _true_theta(run: Run) -> tuple[list[str], list[float]] | None:
    """The examination of simulated users."""
    if run.outcome is None or "true_theta" not in run.outcome.about["data"]:
        return None
    facts = run.outcome.about["data"]
    return facts["by_position"]["positions"], facts["true_theta"]


# --- Learning and metrics ---------------------------------------------------------------------------------------------


def learning_section(runs: Sequence[Run]) -> Section:
    plots, names = [], [run.name for run in runs]
    for metric in dict.fromkeys(run.selected[0] for run in runs):
        lines = {
            run.name: ([line["step"] for line in run.metrics], [line[metric] for line in run.metrics])
            for run in runs
            if run.selected[0] == metric
        }
        caption = "On validation; the best step is the one that was kept."
        plots.append(line_plot(metric, lines, x="step", y=metric, caption=caption, order=names))
    losses = {
        run.name: ([line["step"] for line in run.metrics], [line["loss"] for line in run.metrics])
        for run in runs
        if any(line.get("loss") is not None for line in run.metrics)
    }
    if losses:
        caption = "Of training, since the step before. Losses of different methods do not compare."
        plots.append(line_plot("loss", losses, x="step", y="loss", caption=caption, order=names))
    rows = [[run.name, run.selected[0], f"{run.selected[1]:.4f}", f"{run.selected[2]:,}", _end(run)] for run in runs]
    return Section("Learning", [Grid(plots), Table(["run", "selected by", "best", "at step", "ended"], rows)])


def _end(run: Run) -> str:
    last, planned = int(run.metrics[-1]["step"]), run.config.training.steps
    return f"after all {planned:,} steps" if last >= planned else f"early, at step {last:,} of {planned:,}"


def _metrics(runs: Sequence[Run]) -> Section:
    judged = [run for run in runs if run.outcome is not None]
    if not judged:
        return Section("Metrics", [Text(OLDER)])
    parts: list[Part] = []
    metrics = list(dict.fromkeys(m for run in judged if run.outcome for m in run.outcome.about["metrics"]))
    for metric in metrics:
        rows, tests = _means(judged, metric), _tests(judged, metric)
        parts.append(_interval_plot(judged, metric))
        cells = [[name, f"{m.mean:.4f}", f"{m.low:.4f} to {m.high:.4f}", f"{m.requests:,}"] for name, m in rows.items()]
        parts.append(Table(["", metric, "95% interval", "requests"], cells))
        if tests:
            differences = [
                [f"{a} less {b}", f"{t.difference:+.4f}", f"{t.low:+.4f} to {t.high:+.4f}", f"{t.p:.2g}"]
                for a, b, t in tests
            ]
            marked = [i for i, (_, _, t) in enumerate(tests) if t.significant]
            caption = "The same requests under two rankings. Marked: p < 0.05, each test by itself."
            parts.append(Table(["pair", "difference", "95% interval", "p"], differences, caption, marked))
    chosen = "The step of each run was chosen on these requests, so that its own metric is a little too good."
    parts.append(Text(" ".join([*_how_judged(metrics), chosen])))
    if len(judged) < len(runs):
        parts.append(Text(f"{', '.join(r.name for r in runs if r.outcome is None)}: {OLDER}"))
    return Section("Metrics", parts)


def _interval_plot(runs: Sequence[Run], metric: str) -> Plot:
    rows = {name: (m.mean, m.low, m.high) for name, m in _means(runs, metric).items()}
    return interval_plot(metric, rows, x=metric, caption="Mean over validation requests, 95% interval.")


def _comparable(a: Run, b: Run) -> bool:
    """Whether metrics are of the same requests, by the same label."""
    if a.outcome is None or b.outcome is None:
        return False
    kept = (r.outcome.about["data"]["fingerprint"] for r in (a, b) if r.outcome)
    return len(set(kept)) == 1 and a.config.label == b.config.label and a.outcome.requests == b.outcome.requests


def _means(runs: Sequence[Run], metric: str) -> dict[str, Any]:
    found = {}
    logged: list[Run] = []
    for run in runs:
        outcome = run.outcome
        if outcome is None or metric not in outcome.figures:
            continue
        if LOGGED + metric in outcome.figures and not any(_comparable(run, other) for other in logged):
            name = BEFORE if not logged else f"{BEFORE} ({run.name})"
            found[name] = mean_with_interval(outcome.figures[LOGGED + metric], outcome.weights)
            logged.append(run)
        found[run.name] = mean_with_interval(outcome.figures[metric], outcome.weights)
    return found


def _tests(runs: Sequence[Run], metric: str) -> list[tuple[str, str, Any]]:
    found = []
    for run in runs:
        outcome = run.outcome
        if outcome and metric in outcome.figures and LOGGED + metric in outcome.figures:
            test = paired_test(outcome.figures[metric], outcome.figures[LOGGED + metric], outcome.weights)
            found.append((run.name, BEFORE, test))
    for a, b in combinations(runs, 2):
        if (
            _comparable(a, b)
            and a.outcome
            and b.outcome
            and metric in a.outcome.figures
            and metric in b.outcome.figures
        ):
            test = paired_test(b.outcome.figures[metric], a.outcome.figures[metric], a.outcome.weights)
            found.append((b.name, a.name, test))
    return found


# --- Configuration ----------------------------------------------------------------------------------------------------


def _configuration(runs: Sequence[Run]) -> Section:
    parts: list[Part] = [Text("What repeats each run; the same seed on the same machine gives the same bits.")]
    for run in runs:
        command, unsaid = train_command(run.config, out=run.name.split("/")[-1])
        if len(runs) > 1:
            parts.append(Heading(run.name))
        parts.append(Code(command))
        parts += [Notes([f"no option says that {words}" for words in unsaid])] if unsaid else []
    settings = [_flat({**asdict(run.config), **run.versions}) for run in runs]
    names = list(dict.fromkeys(name for found in settings for name in found))
    rows = [[name, *(found.get(name, "") for found in settings)] for name in names]
    marked = [i for i, row in enumerate(rows) if len(set(row[1:])) > 1]
    caption = "Marked: where the runs differ." if len(runs) > 1 else ""
    parts.append(Table(["", *(run.name for run in runs)], rows, caption, marked))
    return Section("Configuration", parts)


def _flat(content: Mapping[str, Any], before: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{before}{name}.")
        else:
            found[before + name] = "" if value is None or value == {} else str(value)
    return found
