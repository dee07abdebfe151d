"""Finished runs: load them, and make the sections of the report page of one run or of several."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ultr.bias.propensities import BIAS_FILE
from ultr.errors import AbsentError, redact
from ultr.evaluation.comparing import LOGGED_RANKING
from ultr.evaluation.importance import FeatureImportance
from ultr.evaluation.scores import FEEDBACK, OFF_POLICY, Mean, PairedTest, holm, less_is_better
from ultr.log import Log, read_log
from ultr.rankers.model import Model, load_model
from ultr.report.bias import bias_section
from ultr.report.page import (
    Answers,
    Card,
    Cards,
    Code,
    Folded,
    Grid,
    Heading,
    Headline,
    Notes,
    Part,
    Plot,
    Section,
    Table,
    Text,
)
from ultr.report.plots import drop_plot, heat_map, histogram, interval_plot, line_plot
from ultr.training.config import Config, flat, train_command
from ultr.training.data import Decisions, columns_for_run
from ultr.training.examining import VALUES, best_evaluation
from ultr.training.folder import CONFIG, MODEL, read_config, read_metrics
from ultr.training.outcome import LOGGED, RunOutcome, read_outcome, value_of_run
from ultr.training.tradeoff import read_trade_off
from ultr.utils.arguments import checked
from ultr.utils.display import facts_html
from ultr.utils.jsonfiles import read_json

# --- Finished runs ----------------------------------------------------------------------------------------------------

LIBRARIES = ("ultr", "torch", "lightgbm", "xgboost")  # whose versions config.json has


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run, with the content of its files; `name` is its name in reports. `run.score(log)` scores rows."""

    name: str
    folder: Path
    config: Config
    decisions: Decisions  # what the data decided: label, rankers, segment
    versions: Mapping[str, str]
    metrics: list[dict[str, Any]]
    bias: Mapping[str, Any] | None
    outcome: RunOutcome
    off_policy: Mapping[str, Any] | None = None  # the description of the model that estimated its off-policy metrics

    @cached_property
    def model(self) -> Model:
        """The trained model."""
        return load_model(self.folder)

    def score(self, data: Any, *, device: str = "cpu", **columns: Any) -> np.ndarray:
        """Return scores of the rows of a log, which may be in memory or a file; rows of a log are in its own order.

        Columns have the names of the training log, unless `columns` name others, as arguments of `read_log`.
        """
        if not isinstance(data, Log):
            data = read_log(data, **columns_for_run(self.folder, self.model, columns))
        return self.model.score(data, device=device)

    @cached_property
    def value(self) -> tuple[str, float, int]:
        """The name of the metric that judges the run, its value for the saved model, and the best step."""
        return value_of_run(self.folder)

    @cached_property
    def selection(self) -> str:
        """The name of the metric that chose the best step."""
        return best_evaluation(self.folder)[0]

    def best(self, kind: str) -> tuple[float, int]:
        """Return the best value of the selection metric that a ranker had in training, and its step."""
        metric, line = best_evaluation(self.folder, kind)
        return float(line[metric]), int(line["step"])

    def curve(self, kind: str, name: str) -> tuple[list[int], list[float]]:
        """Return the steps of the evaluations of a ranker, and its loss or a metric at each."""
        lines = [line for line in self.metrics if line["ranker"] == kind]
        return [line["step"] for line in lines], [line[name] for line in lines]

    @property
    def data(self) -> str:
        """The data, for people."""
        return redact(self.config.data.source) or "in memory"

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts about the training data that the run has saved."""
        facts: Mapping[str, Any] = self.outcome.about["data"]
        return facts

    @property
    def about(self) -> str:
        """The method and the rankers, for people."""
        return f"{self.config.method.name}, {self.decisions.ranker_name}"

    @property
    def warnings(self) -> list[str]:
        of_data = self.outcome.about["warnings"]
        return [f"{w['name']}: {w['what']}" for w in [*of_data, *(self.bias or {}).get("warnings", [])]]

    @property
    def true_theta(self) -> tuple[list[str], list[float]] | None:
        """Positions and their true examination by simulated users; None if users were not simulated."""
        if "true_theta" not in self.facts:
            return None
        return self.facts["by_position"]["positions"], self.facts["true_theta"]

    def _repr_html_(self) -> str:
        metric, value, _ = self.value
        users = f", users {self.config.users}" if self.config.users else ""
        facts = {
            f"{metric} on {self.outcome.split}": f"{value:.4f}",
            "method, ranker": self.about,
            "data": f"{self.data}{users}",
            "label": self.decisions.label,
            "theta from": str((self.bias or {}).get("theta_from", "not estimated")),
        }
        return facts_html(f"Run {self.name}", facts, self.warnings)

    @property
    def importance(self) -> list[FeatureImportance]:
        """The most important features, most important first; empty if the run has not saved them."""
        return [FeatureImportance(**each) for each in self.outcome.about["importance"].get("features", [])]


def load_runs(folders: Sequence[Path], names: Sequence[str] = ()) -> list[Run]:
    """Load finished runs, each with a different name: one of `names`, or else the name of its folder."""
    return [load_run(folder, name) for folder, name in zip(folders, names or _names(folders), strict=True)]


@checked
def load_run(folder: str | Path, name: str | None = None) -> Run:
    """Load a finished run; a notebook shows a summary of it. `name` is its name in reports (default: the folder's)."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise AbsentError("this folder is not a run", where=folder, hint="pass a folder that ultr train wrote")
    outcome = read_outcome(folder)
    if not (folder / MODEL).is_dir() or outcome is None:
        raise AbsentError("the run is not finished", where=folder, hint="finish it with ultr train --resume")
    content = read_json(folder / CONFIG)
    versions: dict[str, str] = {key: content[key] for key in LIBRARIES if key in content}
    files = (folder / BIAS_FILE, folder / VALUES / "model.json")
    bias, off_policy = (read_json(path) if path.is_file() else None for path in files)
    return Run(
        name or _absolute(folder).name,
        folder,
        read_config(folder),
        Decisions.load(folder),
        versions,
        read_metrics(folder),
        bias,
        outcome,
        off_policy,
    )


def _absolute(folder: Path) -> Path:
    """Return an absolute path in which a symlink keeps its own name."""
    return folder.resolve() if ".." in folder.parts else folder.absolute()


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: the last parts of its path as given, as many as make all names different."""
    parts = [_absolute(folder).parts for folder in folders]
    for last in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-last:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(names, start=1)]


# --- The answer -------------------------------------------------------------------------------------------------------
# The answer at the top of a report, in words: is the new ranker better, by how much, how sure, and what to do.


def answer(runs: Sequence[Run], why_not: str | None) -> tuple[Headline, Answers] | None:
    """Return the decision and its reasons; `why_not` says why runs cannot be compared with each other, if they cannot.

    The best run is compared with the logged ranking, or with the next best run if there is no logged ranking. Return
    None if neither can be compared.
    """
    metric = runs[0].value[0]
    evaluated = [run for run in runs if metric in run.outcome.results]
    if not evaluated:
        return None
    if why_not is not None:
        command = _evaluate_command(evaluated, "LOG")
        questions = {f"Is {run.name} better than {LOGGED_RANKING}?": _against_logged_text(run) for run in evaluated}
        alone = {question: text for question, text in questions.items() if text is not None}
        return Headline("Which run is best: not known here", f"{why_not}."), Answers({**alone, "What to do?": command})
    sign = -1 if less_is_better(metric) else 1
    ranked = sorted(evaluated, key=lambda run: -sign * _mean(run, metric))
    best = ranked[0]
    against = against_logged(best, metric)
    other, before = LOGGED_RANKING, _mean(best, LOGGED + metric) if against is not None else np.nan
    if against is None:
        if len(ranked) == 1:
            return None
        other, before = ranked[1].name, _mean(ranked[1], metric)
        against = _test(best, ranked[1], metric)
    verdict, better, worse = _verdict(best, metric, against)
    means = f"{metric}: {_mean(best, metric):.4f} instead of {before:.4f}"
    change = change_text(against.difference, before)
    what = f"With {best.name}, {_quantity(metric)} is {change} than with {other} ({means})."
    answers = {"Is it better?": f"{verdict}. {what}"}
    if len(ranked) > 1 and other == LOGGED_RANKING:
        test = _test(best, ranked[1], metric)
        change = change_text(test.difference, _mean(ranked[1], metric))
        sure = "" if test.significant else ", which may be chance"
        than = f"{_quantity(metric)} is {change} than with {ranked[1].name}"
        answers["Which run is best?"] = f"{best.name}: {than}{sure}."
    answers["How sure?"] = _how_sure(best, metric, against, before)
    answers["What to do?"] = _what_to_do(best, better=better, worse=worse)
    who, good = f" on {best.name}" if len(runs) > 1 else "", better and _is_confirmed(best, metric)
    if (decision := best.outcome.decision(metric)) is None:
        return Headline(f"Is {best.name} better than {other}? {verdict}.", good=good), Answers(answers)
    reason = f"{decision.reason[:1].upper()}{decision.reason[1:]}."
    return Headline(f"Decision{who}: {decision.action}", reason, good), Answers(answers)


def _verdict(run: Run, metric: str, against: PairedTest) -> tuple[str, bool, bool]:
    """Return whether a run is better in a test, in words; and whether it is clearly better, or clearly worse."""
    sign = -1 if less_is_better(metric) else 1
    better = sign * against.low > 0 and sign * against.high > 0
    worse = sign * against.high < 0 and sign * against.low < 0
    if better and not _is_confirmed(run, metric):
        return "Probably, if the estimated examination is right", better, worse
    return ("Yes" if better else "No") if better or worse else "Not clear", better, worse


def _against_logged_text(run: Run) -> str | None:
    """Return words that compare a run with the logged ranking, by its own label, metric and examination."""
    metric = run.value[0]
    if (against := against_logged(run, metric)) is None:
        return None
    before = _mean(run, LOGGED + metric)
    low, high = (_relative(value, before) for value in (against.low, against.high))
    what = f"{_quantity(metric)} ({run.decisions.label}) is {change_text(against.difference, before)}"
    verdict = _verdict(run, metric, against)[0]
    return f"{verdict}: {what} (95% interval {low} to {high})."


def against_logged(run: Run, metric: str) -> PairedTest | None:
    """Return the paired test of a run's ranking against the logged ranking; None if one was not evaluated."""
    if not {metric, LOGGED + metric} <= set(run.outcome.results):
        return None
    return run.outcome.test(metric, run.outcome, LOGGED + metric)


def _test(first: Run, second: Run, metric: str) -> PairedTest:
    return first.outcome.test(metric, second.outcome, metric)


def _mean(run: Run, name: str) -> float:
    return float(np.average(run.outcome.results[name], weights=run.outcome.weights))


def _quantity(metric: str) -> str:
    name, _, first = metric.removeprefix(OFF_POLICY).removeprefix(FEEDBACK).partition("@")
    if name != "reward":
        return "the quality of the ranking"
    return f"the expected feedback on the first {first} items" if first else "the expected feedback"


def change_text(difference: float, before: float) -> str:
    size = f"{abs(difference / before):.1%}" if before else f"{abs(difference):.4f}"
    return f"{size} {'higher' if difference > 0 else 'lower'}"


def _relative(difference: float, before: float) -> str:
    return f"{difference / before:+.1%}" if before else f"{difference:+.4f}"


def _how_sure(run: Run, metric: str, test: PairedTest, before: float) -> str:
    low, high = (_relative(value, before) for value in (test.low, test.high))
    parts = [f"The 95% interval is {low} to {high}, over {test.requests:,} {run.outcome.split} requests"]
    if metric.startswith(OFF_POLICY):
        bias: Mapping[str, Any] = run.bias or {}
        error = bias.get("theta_standard_error")
        known = f" (standard error {error:.0%})" if error is not None else ""
        source = f", from {bias['theta_from']}{known}" if "theta_from" in bias else ""
        parts.append(f"it is an estimate from logged feedback, and depends on the estimated examination{source}")
        if not _is_confirmed(run, metric):
            parts.append(
                "nothing confirms it, so the interval covers half to one and a half times this position bias: "
                "plan an experiment with ultr explore"
            )
    elif metric.startswith(FEEDBACK):
        parts.append("it uses logged feedback with its position bias, and favours the logged ranking")
    if run.warnings:
        number = len(run.warnings)
        parts.append(f"read the {number} warnings below" if number > 1 else "read the warning below")
    return f"{'; '.join(parts)}."


def _is_confirmed(run: Run, metric: str) -> bool:
    """Return whether chance or the user confirms the examination that a metric depends on."""
    return run.outcome.confirmed or not metric.startswith(OFF_POLICY)


def _what_to_do(run: Run, *, better: bool, worse: bool) -> str:
    folder = shlex.quote(str(run.folder))
    if better:
        check = f"Evaluate it on a later log (ultr evaluate {folder} --data LATER_LOG)"
        return f"{check}; if it stays better, test it with a part of the users (ultr export {folder} --out model)."
    if worse:
        return "Keep the ranker in production. Look for missing features, and compare methods with ultr compare."
    return "Collect more requests before you decide, or compare methods with ultr compare."


# --- Rankings ---------------------------------------------------------------------------------------------------------
# The section of a report page on how new rankings differ from the logged ranking, with example requests.


def ranking_section(runs: Sequence[Run]) -> Section:
    """Return a section on the difference between the logged ranking and the new ranking of each run."""
    outcomes = {run.name: run.outcome for run in runs if "moves" in run.outcome.about}
    if not outcomes:
        return Section("Rankings", [])
    several = len(outcomes) > 1
    caption = "Kendall's τ by request: 1 is the same order, 0 is unrelated, -1 is reversed."
    agreement = {name: outcome.agreement for name, outcome in outcomes.items()}
    parts: list[Part] = [
        Text(f"The new ranking of {_requests(runs)}, compared with {LOGGED_RANKING}."),
        histogram("Agreement", agreement, np.linspace(-1, 1, 21), x="τ", caption=caption),
        Table(
            ["run", "mean τ", "same first item", "same order of all items"],
            [[name, *_agreement_cells(outcome)] for name, outcome in outcomes.items()],
        ),
        Grid([_moves(f"Moves of items: {name}" if several else "Moves of items", o) for name, o in outcomes.items()]),
    ]
    for number, (name, outcome) in enumerate(outcomes.items()):
        parts.append(Heading(f"Example requests: {name}" if several else "Example requests"))
        examples = outcome.about["examples"]
        parts += [_example(example, open_=number == 0 and i == 0) for i, example in enumerate(examples)]
    return Section("Rankings", parts)


def _agreement_cells(outcome: RunOutcome) -> list[str]:
    tau = outcome.agreement[np.isfinite(outcome.agreement)]
    if not len(tau):
        return ["-", "-", "-"]
    return [f"{tau.mean():.3f}", f"{outcome.about['moves']['first_kept']:.0%}", f"{np.mean(tau > 1 - 1e-9):.0%}"]


def _moves(title: str, outcome: RunOutcome) -> Plot:
    moves = outcome.about["moves"]
    ranks = [str(k) for k in range(1, moves["deepest"] + 1)]
    columns = [*ranks, *(["below"] if any(row[-1] > 0 for row in moves["shares"]) else [])]
    return heat_map(
        title,
        [row[: len(columns)] for row in moves["shares"]],
        columns=columns,
        rows=ranks,
        x="new rank",
        y="logged rank",
        caption="For each logged rank, the share of its items at each new rank.",
        largest=None,
    )


def _example(example: Mapping[str, Any], *, open_: bool) -> Folded:
    items = example["items"]
    extra = [name for name in ("label", "relevance") if name in items[0]]
    titles = {"label": "logged feedback", "relevance": "true label"}
    rows = [
        [
            item["item"],
            str(item["after"]),
            str(item["before"]),
            _arrow(item["before"] - item["after"]),
            f"{item['score']:.3f}",
            *(f"{item[name]:.3g}" for name in extra),
        ]
        for item in items
    ]
    head = ["item", "new rank", "logged rank", "moved", "score", *(titles[name] for name in extra)]
    title = f"request {example['request']}: {example['why']} (τ = {example['agreement']:.2f})"
    return Folded(title, [Table(head, rows)], open=open_)


def _arrow(by: int) -> str:
    return "=" if by == 0 else f"{'▲' if by > 0 else '▼'} {abs(by)}"


# --- Sections ---------------------------------------------------------------------------------------------------------
# Sections of the report page of one run, or of several runs side by side.


def run_sections(runs: Sequence[Run]) -> list[Section]:
    """Return all sections of the page of these runs."""
    return [
        _summary(runs),
        _data(runs),
        learning_section(runs),
        _metrics(runs),
        *_trade_offs(runs),
        bias_of_runs(runs),
        *_calibration(runs),
        *_features(runs),
        ranking_section(runs),
        _configuration(runs),
    ]


# --- Summary ----------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[Run]) -> Section:
    cards = []
    for run in runs:
        metric, value, step = run.value
        lines = [f"{metric} on {run.outcome.split}" + ("" if len(run.decisions.rankers) > 1 else f", at step {step:,}")]
        if (test := against_logged(run, metric)) is not None:
            p = f" (p = {test.p:.2g} over requests)" if len(runs) == 1 else ""
            lines.append(f"{test.difference:+.4f} compared with {LOGGED_RANKING}{p}")
        lines += [run.about, f"label: {run.decisions.label}"]
        cards.append(Card(run.name, f"{value:.4f}", lines))
    metrics = list(dict.fromkeys(run.value[0] for run in runs))
    why_not = _difference(runs, metrics[0]) if len(metrics) == 1 else "the runs have different metrics"
    words = answer(runs, why_not)
    picture = _difference_plots(runs) or [_interval_plot(runs, m) for m in metrics if _means(runs, m)][:1]
    parts: list[Part] = [*picture, Cards(cards)] if words is None else [words[0], *picture, words[1], Cards(cards)]
    warnings = [f"{run.name}: {warning}" for run in runs for warning in run.warnings]
    parts.append(Notes(warnings) if warnings else Notes(["No warnings."], good=True))
    parts.append(Text(" ".join(_explanations(metrics))))
    return Section("Summary", parts)


def _difference_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return a plot of how much better than the logged ranking each run is; empty if no run can be compared with it."""
    rows, metrics = {}, []
    for run in runs:
        metric = run.value[0]
        test = against_logged(run, metric)
        if test is not None and (before := _mean(run, LOGGED + metric)) and np.isfinite((test.low, test.high)).all():
            sign = -1 if less_is_better(metric) else 1
            ends = sorted(sign * end / abs(before) for end in (test.low, test.high))
            rows[run.name] = (sign * test.difference / abs(before), ends[0], ends[1])
            metrics.append(metric)
    if not rows:
        return []
    caption = (
        f"{' and '.join(dict.fromkeys(metrics))} on {_requests(runs)}, with 95% intervals; right of zero is better."
    )
    return [interval_plot(f"Compared with {LOGGED_RANKING}", rows, x="change", caption=caption, change=True)]


def _requests(runs: Sequence[Run]) -> str:
    """Return which requests evaluate runs, in words: test requests, validation requests, or both."""
    return " and ".join(dict.fromkeys(f"{run.outcome.split} requests" for run in runs))


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


# The rows of the table about the data of runs.
FACTS: dict[str, Callable[[Run], str]] = {
    "data": lambda run: run.data,
    "users": lambda run: run.config.users or "as logged",
    "trained on": lambda run: run.config.simulation.learn_from,
    "label": lambda run: run.decisions.label,
    "requests": lambda run: f"{run.facts['requests']:,}" + (" (a sample)" if run.facts["sample"] else ""),
    "rows": lambda run: f"{run.facts['rows']:,}",
    "items per request": lambda run: _items(**run.facts["items"]),
    "features": lambda run: f"{run.facts['features']:,}",
    "evaluated on": lambda run: f"{run.outcome.about['split']['requests']:,} {run.outcome.split} requests",
    "fingerprint": lambda run: run.facts["fingerprint"][:24],
}


def _items(least: int, most: int, mean: float) -> str:
    return f"{most:,}" if least == most else f"{least:,} to {most:,}, {mean:.1f} on average"


def _data(runs: Sequence[Run]) -> Section:
    texts = {name: [text(run) for run in runs] for name, text in FACTS.items()}
    parts: list[Part] = [Table(["", *(run.name for run in runs)], [[name, *cells] for name, cells in texts.items()])]
    shown: dict[str, list[Plot]] = {}
    for run in runs:
        if run.facts.get("by_position", {}).get("rates") and run.facts["fingerprint"] not in shown:
            where = "" if len(runs) == 1 else f": {run.data}"
            shown[run.facts["fingerprint"]] = _by_position(run.facts["by_position"], where)
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


def bias_of_runs(runs: Sequence[Run]) -> Section:
    """Return a section with the position bias that each run estimated."""
    return bias_section({run.name: (run.bias, run.true_theta) for run in runs})


# --- Learning and metrics ---------------------------------------------------------------------------------------------


def learning_section(runs: Sequence[Run]) -> Section:
    """Return a section with the learning curves of runs, one for each of their rankers."""
    rankers = [(_ranker_name(run, kind, runs), run, kind) for run in runs for kind in run.decisions.rankers]
    plots, names = [], [name for name, _, _ in rankers]
    for metric in dict.fromkeys(run.selection for run in runs):
        lines = {name: run.curve(kind, metric) for name, run, kind in rankers if run.selection == metric}
        caption = "On validation requests. The model of the best step is used."
        plots.append(line_plot(metric, lines, x="step", y=metric, caption=caption, order=names))
    curves = {name: run.curve(kind, "loss") for name, run, kind in rankers}
    if losses := {name: curve for name, curve in curves.items() if any(loss is not None for loss in curve[1])}:
        caption = "Mean training loss since the previous evaluation. Losses of different methods are not comparable."
        plots.append(line_plot("loss", losses, x="step", y="loss", caption=caption, order=names))
    rows = []
    for name, run, kind in rankers:
        value, step = run.best(kind)
        rows.append([name, run.selection, f"{value:.4f}", f"{step:,}", _end(run, kind)])
    return Section("Learning", [Grid(plots), Table(["ranker", "selected by", "best", "at step", "stopped"], rows)])


def _ranker_name(run: Run, kind: str, runs: Sequence[Run]) -> str:
    """Return the name of a ranker on a page: that of its run, of its kind if there are several, or both."""
    if len(run.decisions.rankers) == 1:
        return run.name
    return kind if len(runs) == 1 else f"{run.name}: {kind}"


def _end(run: Run, kind: str) -> str:
    last, planned = run.curve(kind, "step")[0][-1], run.config.loop(kind).steps
    return f"after all {planned:,} steps" if last >= planned else f"early, at step {last:,} of {planned:,}"


def _metrics(runs: Sequence[Run]) -> Section:
    parts: list[Part] = []
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.outcome.about["metrics"]))
    for metric in metrics:
        rows, difference = _means(runs, metric), _difference(runs, metric)
        tests = [] if difference else _tests(runs, metric)
        parts.append(_interval_plot(runs, metric))
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
                    f"The values of {metric} cannot be compared: {difference}. This command compares the runs "
                    "on the same requests, under one estimate of examination:"
                )
            )
            sources = {run.config.data.source for run in runs}
            parts.append(Code(_evaluate_command(runs, sources.pop() if len(sources) == 1 else "LOG")))
    chosen = "The step of a run was chosen on these requests, so its selection metric is slightly too good."
    selected = [chosen] if any(run.outcome.split == "validation" for run in runs) else []
    parts.append(Text(" ".join([*_explanations(metrics), *selected])))
    return Section("Metrics", parts)


def _interval_plot(runs: Sequence[Run], metric: str) -> Plot:
    rows = {name: (m.mean, m.low, m.high) for name, m in _means(runs, metric).items()}
    return interval_plot(metric, rows, x=metric, caption=f"Mean over {_requests(runs)}, 95% interval.")


def _difference(runs: Sequence[Run], metric: str) -> str | None:
    """Return why a metric of several runs cannot be compared, in words; None if it can be."""
    evaluated = [run for run in runs if metric in run.outcome.results]
    return next((why for a, b in pairwise(evaluated) if (why := _differ(a, b, metric)) is not None), None)


def _differ(a: Run, b: Run, metric: str) -> str | None:
    """Return in what the evaluations of two runs differ, in words; None if they can be compared."""
    first, second = (outcome.about["data"]["fingerprint"] for outcome in (a.outcome, b.outcome))
    reasons = {
        "have different data": first != second,
        "have different labels": a.decisions.label != b.decisions.label,
        "were evaluated on different requests": a.outcome.requests != b.outcome.requests,
        "were evaluated under different estimates of examination": (
            metric.startswith(OFF_POLICY) and a.off_policy != b.off_policy
        ),
    }
    why = next((why for why, differs in reasons.items() if differs), None)
    return None if why is None else f"{a.name} and {b.name} {why}"


def _evaluate_command(runs: Sequence[Run], data: str) -> str:
    """Return the command that compares runs on the same requests of a log."""
    label = ["--label", "LABEL"] if len({run.decisions.label for run in runs}) > 1 else []
    return shlex.join(["ultr", "evaluate", *(str(run.folder) for run in runs), "--data", data, *label])


def _means(runs: Sequence[Run], metric: str) -> dict[str, Mean]:
    """Return name -> mean of a metric, for each run, and once for the logged ranking of the same requests."""
    means = {}
    logged: list[Run] = []
    for run in runs:
        outcome = run.outcome
        if metric not in outcome.results:
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
    evaluated = [run for run in runs if metric in run.outcome.results]
    for a, b in combinations(evaluated, 2):
        tests.append((b.name, a.name, b.outcome.test(metric, a.outcome, metric)))
    return tests


def _trade_offs(runs: Sequence[Run]) -> list[Section]:
    """Return a section with the trade-off of the two goals of each run; none if no run has two goals."""
    parts: list[Part] = []
    for run in runs:
        if (found := read_trade_off(run.folder)) is not None:
            parts.append(trade_off_plot(found, "Two goals" if len(runs) == 1 else run.name))
            rows = [
                [name, *(f"{mean.mean:.4f} [{mean.low:.4f}, {mean.high:.4f}]" for mean in pair)]
                for name, pair in found["values"].items()
            ]
            caption = f"{found['metric']} of each goal on the test requests, with 95% intervals."
            parts.append(Table(["weights of the goals", *found["goals"]], rows, caption))
    return [Section("Trade-off", parts)] if parts else []


def trade_off_plot(found: Mapping[str, Any], title: str) -> Plot:
    """Return a plot of the values of rankers for two goals (`read_trade_off`)."""
    values = {name: (first.mean, second.mean) for name, (first, second) in found["values"].items()}
    curve = [values.pop(name) for name in found["weightings"]]
    lines = {"other weights": ([x for x, _ in curve], [y for _, y in curve])}
    lines |= {name: ([x], [y]) for name, (x, y) in values.items()}
    first, second = found["goals"]
    caption = (
        "Each point of the line is a ranker with other weights of the two goals, estimated off policy on the test "
        "requests. A ranker below the line and to its left loses on both goals."
    )
    return line_plot(title, lines, x=f"{first}, by request", y=f"{second}, by request", caption=caption)


# --- Calibration ------------------------------------------------------------------------------------------------------


def _calibration(runs: Sequence[Run]) -> list[Section]:
    """Return a section with expected and mean feedback of runs; none if no run is calibrated."""
    calibrated = [(run, found) for run in runs if (found := run.outcome.calibration) is not None]
    if not calibrated:
        return []
    titles = ["Reliability" if len(runs) == 1 else f"Reliability: {run.name}" for run, _ in calibrated]
    plots = [reliability_plot(title, run) for title, (run, _) in zip(titles, calibrated, strict=True)]
    rows = [[run.name, f"{found['error']:.1%}", f"{found['chance']:.1%}"] for run, found in calibrated]
    groups = [f"{run.name}: {group}" for run, found in calibrated for group in found["groups"]]
    caption = "The mean error of expected feedback, relative to the mean feedback; by chance: of feedback as expected."
    parts: list[Part] = [Grid(plots), Table(["", "calibration error", "by chance"], rows, caption)]
    return [Section("Calibration", [*parts, Notes(groups)] if groups else parts)]


def reliability_plot(title: str, run: Run) -> Plot:
    """Return a plot of mean feedback by expected feedback, of a run that is calibrated."""
    found = run.outcome.calibration
    assert found is not None  # noqa: S101 - the caller checks it
    bins = found["bins"]
    right = [0.0, max(bins["expected"] + bins["mean"])]
    lines = {"mean feedback": (bins["expected"], bins["mean"]), "as expected": (right, right)}
    bands = {"mean feedback": (bins["low"], bins["high"])}
    caption = f"Rows of {run.outcome.split} requests by their expected feedback where they were shown, 95% intervals."
    axes = {"x": "expected feedback", "y": f"mean of {run.decisions.label}"}
    return line_plot(title, lines, **axes, caption=caption, bands=bands, dashed=["as expected"], from_zero=True)


# --- Features ---------------------------------------------------------------------------------------------------------


def _features(runs: Sequence[Run]) -> list[Section]:
    """Return a section with the importance of features; none if no run has it."""
    parts: list[Part] = []
    for run in runs:
        if not run.importance:
            continue
        metric = run.selection
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
    settings = [_settings(run) for run in runs]
    names = list(dict.fromkeys(name for setting in settings for name in setting))
    rows = [[name, *(setting.get(name, "") for setting in settings)] for name in names]
    head, differing = ["", *(run.name for run in runs)], [row for row in rows if len(set(row[1:])) > 1]
    if differing:
        parts.append(Table(head, differing, "Settings that differ between the runs."))
    parts.append(Folded("All settings", [Table(head, [row for row in rows if any(row[1:])])]))
    return Section("Configuration", parts)


def _settings(run: Run) -> dict[str, str]:
    """Return the options of a run by path, what its data decided, and the versions of libraries, as texts."""
    decided = {f"decided.{name}": value for name, value in asdict(run.decisions).items()}
    settings = {**dict(flat(run.config.model_dump(mode="json"))), **decided, **run.versions}
    return {name: "" if value in (None, {}, [], ()) else str(value) for name, value in settings.items()}
