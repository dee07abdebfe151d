"""Sections of the report page of one run, or of several runs side by side."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations, pairwise
from typing import Any

from ultr.evaluation.judgement import LOGGED_RANKING
from ultr.evaluation.scores import FEEDBACK, OFF_POLICY, Mean, PairedTest, holm
from ultr.report.answer import against_logged, answer
from ultr.report.bias import bias_section
from ultr.report.parts import Card, Cards, Code, Grid, Heading, Notes, Part, Plot, Section, Table, Text
from ultr.report.plots import drop_plot, interval_plot, line_plot
from ultr.report.rankings import ranking_section
from ultr.report.run import OLDER, Run
from ultr.training.command import train_command
from ultr.training.outcome import LOGGED


def run_sections(runs: Sequence[Run]) -> list[Section]:
    """Return all sections of the page of these runs."""
    return [
        _summary(runs),
        _data(runs),
        learning_section(runs),
        _metrics(runs),
        bias_of_runs(runs),
        *_features(runs),
        ranking_section(runs),
        _configuration(runs),
    ]


# --- Summary ----------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[Run]) -> Section:
    cards = []
    for run in runs:
        metric, value, step = run.selected
        lines = [f"{metric} on validation, at step {step:,}"]
        if (test := against_logged(run, metric)) is not None:
            p = f" (p = {test.p:.2g} over requests)" if len(runs) == 1 else ""
            lines.append(f"{test.difference:+.4f} compared with {LOGGED_RANKING}{p}")
        lines += [f"{run.config.method}, {run.config.ranker_name}", f"label: {run.config.label}"]
        cards.append(Card(run.name, f"{value:.4f}", lines))
    metrics = list(dict.fromkeys(run.selected[0] for run in runs))
    why_not = _difference(runs, metrics[0]) if len(metrics) == 1 else "the runs were selected by different metrics"
    words = answer(runs, why_not)
    parts: list[Part] = [] if words is None else [words]
    parts += [Cards(cards), Grid([_interval_plot(runs, m) for m in metrics if _means(runs, m)])]
    warnings = [f"{run.name}: {warning}" for run in runs for warning in run.warnings]
    parts.append(Notes(warnings) if warnings else Notes(["No warnings."], good=True))
    parts.append(Text(" ".join(_explanations(metrics))))
    return Section("Summary", parts)


def _explanations(metrics: Iterable[str]) -> list[str]:
    """Return a sentence for each metric that says what it measures."""
    sentences = []
    for metric in sorted(metrics):
        if metric.startswith(OFF_POLICY):
            sentences.append(
                f"{metric} estimates the feedback that the ranking would get, from logged feedback corrected for "
                "position bias. It covers only items that were shown."
            )
        elif metric.startswith(FEEDBACK):
            sentences.append(f"{metric} uses logged feedback with its position bias, so it favours the logged ranking.")
        else:
            sentences.append(f"{metric} uses true labels.")
    return sentences


# --- Data -------------------------------------------------------------------------------------------------------------


def _data(runs: Sequence[Run]) -> Section:
    rows: dict[str, list[str]] = {
        "data": [run.config.data for run in runs],
        "users": [run.config.users or "as logged" for run in runs],
        "trained on": [run.config.learn_from for run in runs],
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
    """Return plots by position: the share of items with each action, and the mean of continuous actions."""
    at, caption = seen["positions"], "As logged, with position bias."
    rates = {name: (at, values) for name, values in seen["rates"].items()}
    title, y = f"Feedback by position{where}", "share of impressions"
    plots = [line_plot(title, rates, x="position", y=y, caption=caption, from_zero=True)]
    if means := {name: (at, values) for name, values in seen["means"].items() if values != seen["rates"][name]}:
        title = f"Mean of continuous actions{where}"
        plots.append(line_plot(title, means, x="position", y="mean over impressions", caption=caption, from_zero=True))
    return plots


def _facts(runs: Sequence[Run]) -> dict[str, list[str]]:
    def cells(text: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return ["not saved" if run.outcome is None else text(run.outcome.about) for run in runs]

    return {
        "requests": cells(lambda a: f"{a['data']['requests']:,}" + (" (a sample)" if a["data"]["sample"] else "")),
        "rows": cells(lambda a: f"{a['data']['rows']:,}"),
        "items per request": cells(
            lambda a: "{least:,} to {most:,}, {mean:.1f} on average".format(**a["data"]["items"])
        ),
        "features": cells(lambda a: f"{a['data']['features']:,}"),
        "validation requests": cells(lambda a: f"{a['validation']['requests']:,}"),
        "fingerprint": cells(lambda a: a["data"]["fingerprint"][:24]),
    }


def bias_of_runs(runs: Sequence[Run]) -> Section:
    """Return a section with the position bias that each run estimated."""
    return bias_section({run.name: (run.bias, run.true_theta) for run in runs})


# --- Learning and metrics ---------------------------------------------------------------------------------------------


def learning_section(runs: Sequence[Run]) -> Section:
    """Return a section with the learning curves of runs."""
    plots, names = [], [run.name for run in runs]
    for metric in dict.fromkeys(run.selected[0] for run in runs):
        lines = {
            run.name: ([line["step"] for line in run.metrics], [line[metric] for line in run.metrics])
            for run in runs
            if run.selected[0] == metric
        }
        caption = "On validation requests. The model of the best step is used."
        plots.append(line_plot(metric, lines, x="step", y=metric, caption=caption, order=names))
    losses = {
        run.name: ([line["step"] for line in run.metrics], [line["loss"] for line in run.metrics])
        for run in runs
        if any(line.get("loss") is not None for line in run.metrics)
    }
    if losses:
        caption = "Mean training loss since the previous evaluation. Losses of different methods are not comparable."
        plots.append(line_plot("loss", losses, x="step", y="loss", caption=caption, order=names))
    rows = [[run.name, run.selected[0], f"{run.selected[1]:.4f}", f"{run.selected[2]:,}", _end(run)] for run in runs]
    return Section("Learning", [Grid(plots), Table(["run", "selected by", "best", "at step", "stopped"], rows)])


def _end(run: Run) -> str:
    last, planned = int(run.metrics[-1]["step"]), run.config.training.steps
    return f"after all {planned:,} steps" if last >= planned else f"early, at step {last:,} of {planned:,}"


def _metrics(runs: Sequence[Run]) -> Section:
    evaluated = [run for run in runs if run.outcome is not None]
    if not evaluated:
        return Section("Metrics", [Text(OLDER)])
    parts: list[Part] = []
    metrics = list(dict.fromkeys(m for run in evaluated if run.outcome for m in run.outcome.about["metrics"]))
    for metric in metrics:
        rows, difference = _means(evaluated, metric), _difference(evaluated, metric)
        tests = [] if difference else _tests(evaluated, metric)
        parts.append(_interval_plot(evaluated, metric))
        cells = [[name, f"{m.mean:.4f}", f"{m.low:.4f} to {m.high:.4f}", f"{m.requests:,}"] for name, m in rows.items()]
        parts.append(Table(["", metric, "95% interval", "requests"], cells))
        if tests:
            corrected = holm([test.p for _, _, test in tests])
            differences = [
                [f"{a} minus {b}", f"{t.difference:+.4f}", f"{t.low:+.4f} to {t.high:+.4f}", f"{p:.2g}"]
                for (a, b, t), p in zip(tests, corrected, strict=True)
            ]
            marked = [i for i, p in enumerate(corrected) if p < 0.05]
            caption = "Two rankings of the same requests, paired tests over requests. Marked: p < 0.05. "
            caption += "p is corrected for the number of tests by Holm's method."
            parts.append(Table(["pair", "difference", "95% interval", "p over requests"], differences, caption, marked))
        elif difference:
            parts.append(
                Text(
                    f"The values of {metric} cannot be compared: {difference}. This command judges the runs "
                    "on the same requests, under one estimate of examination:"
                )
            )
            parts.append(Code(_evaluate_command(evaluated)))
    selected = "The step of each run was selected on these requests, so its selection metric is slightly too good."
    parts.append(Text(" ".join([*_explanations(metrics), selected])))
    if len(evaluated) < len(runs):
        parts.append(Text(f"{', '.join(r.name for r in runs if r.outcome is None)}: {OLDER}"))
    return Section("Metrics", parts)


def _interval_plot(runs: Sequence[Run], metric: str) -> Plot:
    rows = {name: (m.mean, m.low, m.high) for name, m in _means(runs, metric).items()}
    return interval_plot(metric, rows, x=metric, caption="Mean over validation requests, 95% interval.")


def _difference(runs: Sequence[Run], metric: str) -> str | None:
    """Return why a metric of several runs cannot be compared, in words; None if it can be."""
    evaluated = [run for run in runs if run.outcome is not None and metric in run.outcome.results]
    return next((why for a, b in pairwise(evaluated) if (why := _differ(a, b, metric)) is not None), None)


def _differ(a: Run, b: Run, metric: str) -> str | None:
    """Return in what the evaluations of two runs differ, in words; None if they can be compared."""
    if a.outcome is None or b.outcome is None:
        return "the evaluation of a run was not saved"
    first, second = (outcome.about["data"]["fingerprint"] for outcome in (a.outcome, b.outcome))
    reasons = {
        "have different data": first != second,
        "have different labels": a.config.label != b.config.label,
        "were evaluated on different requests": a.outcome.requests != b.outcome.requests,
        "were judged under different estimates of examination": metric.startswith(OFF_POLICY) and a.judge != b.judge,
    }
    why = next((why for why, differs in reasons.items() if differs), None)
    return None if why is None else f"{a.name} and {b.name} {why}"


def _evaluate_command(runs: Sequence[Run]) -> str:
    """Return the command that judges runs on the same requests; `LOG` stands for them if the runs have several logs."""
    data = {run.config.data for run in runs}
    labels = {run.config.label for run in runs}
    label = ["--label", "LABEL"] if len(labels) > 1 else []
    words = ["ultr", "evaluate", *(str(run.folder) for run in runs), "--data", data.pop() if len(data) == 1 else "LOG"]
    return shlex.join([*words, *label])


def _means(runs: Sequence[Run], metric: str) -> dict[str, Mean]:
    """Return name -> mean of a metric, for each run, and once for the logged ranking of the same requests."""
    means = {}
    logged: list[Run] = []
    for run in runs:
        outcome = run.outcome
        if outcome is None or metric not in outcome.results:
            continue
        if LOGGED + metric in outcome.results and all(_differ(run, other, metric) for other in logged):
            name = LOGGED_RANKING if not logged else f"{LOGGED_RANKING} ({run.name})"
            means[name] = outcome.mean(LOGGED + metric)
            logged.append(run)
        means[run.name] = outcome.mean(metric)
    return means


def _tests(runs: Sequence[Run], metric: str) -> list[tuple[str, str, PairedTest]]:
    """Return (name, other name, paired test): runs, which can be compared, against the logged ranking and in pairs."""
    against = ((run.name, LOGGED_RANKING, against_logged(run, metric)) for run in runs)
    tests = [(name, before, test) for name, before, test in against if test is not None]
    evaluated = [(run, run.outcome) for run in runs if run.outcome is not None and metric in run.outcome.results]
    for (a, first), (b, second) in combinations(evaluated, 2):
        tests.append((b.name, a.name, second.test(metric, first, metric)))
    return tests


# --- Features ---------------------------------------------------------------------------------------------------------


def _features(runs: Sequence[Run]) -> list[Section]:
    """Return a section with the importance of features; none if no run has it."""
    parts: list[Part] = []
    for run in runs:
        if not run.importance:
            continue
        metric = run.selected[0]
        rows = {each.feature: (each.drop, each.low, each.high) for each in run.importance}
        title = "Importance" if len(runs) == 1 else run.name
        caption = f"Fall of {metric} if the values of a feature are permuted on validation requests, 95% interval."
        parts.append(drop_plot(title, rows, x=f"fall of {metric}", caption=caption))
        if any(each.gain is not None for each in run.importance):
            table = [[each.feature, f"{each.gain or 0:.1%}"] for each in run.importance]
            parts.append(Table(["feature", "share of the gain of all splits"], table))
    return [Section("Features", parts)] if parts else []


# --- Configuration ----------------------------------------------------------------------------------------------------


def _configuration(runs: Sequence[Run]) -> Section:
    parts: list[Part] = [Text("These commands repeat the runs; on the same machine, the weights are identical.")]
    for run in runs:
        command, not_in_command = train_command(run.config, out=run.name.split("/")[-1])
        if len(runs) > 1:
            parts.append(Heading(run.name))
        parts.append(Code(command))
        parts += [Notes([f"not in the command: {what}" for what in not_in_command])] if not_in_command else []
    settings = [_flat({**asdict(run.config), **run.versions}) for run in runs]
    names = list(dict.fromkeys(name for setting in settings for name in setting))
    rows = [[name, *(setting.get(name, "") for setting in settings)] for name in names]
    marked = [i for i, row in enumerate(rows) if len(set(row[1:])) > 1]
    caption = "Marked: settings that differ between the runs." if len(runs) > 1 else ""
    parts.append(Table(["", *(run.name for run in runs)], rows, caption, marked))
    return Section("Configuration", parts)


def _flat(content: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return nested settings as a flat mapping, with names such as `training.steps`."""
    settings: dict[str, str] = {}
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            settings |= _flat(value, f"{before}{name}.")
        else:
            settings[before + name] = "" if value is None or value == {} else str(value)
    return settings
