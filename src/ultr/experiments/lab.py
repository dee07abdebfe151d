"""Settings (data, budget, output folder), claims and results, also as pages: the parts that all experiments share."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ultr._version import __version__
from ultr.datasets import load_dataset
from ultr.datasets.initial import Logging
from ultr.errors import AbsentError, DataError, MissingExtraError
from ultr.evaluation.scores import LIKELIHOOD, holm
from ultr.experiments.paper import CUTOFFS
from ultr.report.page import Grid, Heading, Notes, Part, Plot, Section, Table, Text, write_page
from ultr.report.plots import svg
from ultr.training.comparing.plan import DEFAULT_RATES, LIMITS, LONGEST, SESSIONS, Entry, Plan, compare_all
from ultr.training.comparing.results import Comparison, Difference, Row
from ultr.training.comparing.tasks import Workers
from ultr.training.config import make_config
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import write_json

# --- Claims -----------------------------------------------------------------------------------------------------------
# Check claims of the paper behind pairwise-em (CIKM 2022) with paired tests over runs.

HELD, DIRECTION, NOT, REVERSED = "held", "in direction only", "did not hold", "reversed"


@dataclass(frozen=True)
class Claim:
    """A claim on one data set, the verdict on it, and the test results behind the verdict."""

    text: str
    data: str
    verdict: str
    evidence: str
    difference: float | None = None  # that the claim says is positive; None: the verdict is not by one difference
    p: float = 1.0  # the larger of the p values over runs and over requests
    is_level: bool = False  # the claim says only that the difference is not negative


def verdict_of(difference: float, p: float, *, is_level: bool = False) -> str:
    """Return the verdict on the claim that a difference with this p value is positive, or not negative."""
    if is_level:
        return REVERSED if difference < 0 and p < 0.05 else HELD
    if difference > 0:
        return HELD if p < 0.05 else DIRECTION
    return REVERSED if p < 0.05 else NOT


def corrected(claims: Sequence[Claim]) -> list[Claim]:
    """Return claims with verdicts by p values that Holm's method corrects for the number of claims on a data set."""
    result = list(claims)
    for data in dict.fromkeys(claim.data for claim in claims):
        where = [i for i, claim in enumerate(claims) if claim.data == data and claim.difference is not None]
        for i, p in zip(where, holm([claims[i].p for i in where]), strict=True):
            claim, difference = claims[i], claims[i].difference or 0.0
            verdict = verdict_of(difference, p, is_level=claim.is_level)
            evidence = f"{claim.evidence}; corrected for {len(where)} claim{'s' * (len(where) > 1)} p = {p:.2g}"
            result[i] = replace(claim, verdict=verdict, evidence=evidence)
    return result


def difference(result: Comparison, above: str, below: str, metric: str) -> tuple[Difference, str]:
    """Return the paired tests of a metric of `above` minus that of `below`, and a text about the result."""
    tests = row_of(result, above).tested(row_of(result, below))[metric]
    test, p = tests.seeds, f"p = {tests.seeds.p:.2g}"
    if tests.requests is not None:
        p += f" over runs, {tests.requests.p:.2g} over requests"
    return tests, f"{above} minus {below} {test.difference:+.4f} [{test.low:+.4f}, {test.high:+.4f}], {p}"


def claim_above(text: str, data: str, result: Comparison, above: str, below: str, metric: str) -> Claim:
    """Check the claim that the method `above` is better than the method `below`."""
    test, evidence = difference(result, above, below, metric)
    gap = test.seeds.difference
    return Claim(text, data, verdict_of(gap, test.p), evidence, gap, test.p)


def claim_above_all(text: str, data: str, result: Comparison, above: str, others: Sequence[str], metric: str) -> Claim:
    """Check the claim that the method `above` is better than each of the others; the worst verdict counts."""
    tests = {other: difference(result, above, other, metric) for other in others}
    gaps = {other: test.seeds.difference for other, (test, _) in tests.items()}
    verdicts = [verdict_of(gaps[other], test.p) for other, (test, _) in tests.items()]
    worst = max(verdicts, key=(HELD, DIRECTION, NOT, REVERSED).index)
    nearest = min(gaps, key=lambda other: gaps[other])
    not_below = [other for other, verdict in zip(tests, verdicts, strict=True) if verdict != HELD]
    evidence = f"nearest: {tests[nearest][1]}"
    if not_below:
        evidence += f"; not significantly above: {', '.join(not_below)}"
    p = tests[nearest][0].p if gaps[nearest] <= 0 else max(test.p for test, _ in tests.values())  # it needs all of them
    return Claim(text, data, worst, evidence, gaps[nearest], p)


def claim_level(text: str, data: str, result: Comparison, method: str, others: Sequence[str], metric: str) -> Claim:
    """Check the claim that a method is not significantly worse than the best of the others."""
    best = max(others, key=lambda other: float(np.mean(row_of(result, other).results[metric])))
    test, evidence = difference(result, method, best, metric)
    gap = test.seeds.difference
    return Claim(text, data, verdict_of(gap, test.p, is_level=True), evidence, gap, test.p, is_level=True)


def row_of(result: Comparison, entry: str) -> Row:
    """Return the row of a comparison with the text `entry`, a method and its options."""
    return next(row for row in result.rows if row.entry == entry)


def claims_text(claims: Sequence[Claim]) -> str:
    """Return the claims as Markdown: under each claim, a list with the verdict on each data set."""
    lines = ["## Claims"]
    for text in dict.fromkeys(claim.text for claim in claims):
        lines.append(f"\n{text}:\n")
        lines += [f"- {c.data}: **{c.verdict}**. {c.evidence}" for c in claims if c.text == text]
    return "\n".join(lines)


def claim_parts(claims: Sequence[Claim]) -> list[Part]:
    """Return the claims as parts of a page: under each claim, a note with the verdict on each data set."""
    parts: list[Part] = []
    for text in dict.fromkeys(claim.text for claim in claims):
        parts.append(Heading(text))
        same = (c for c in claims if c.text == text)
        parts += [Notes([f"{c.data}: {c.verdict}. {c.evidence}"], good=c.verdict == HELD) for c in same]
    return parts


# --- Settings and results ---------------------------------------------------------------------------------------------
# Settings that all experiments share (data, budget, output folder), and the form of their results.

TITLES = {
    "yahoo": "Yahoo! LETOR set 1",
    "mslr-web30k": "MSLR-WEB30K",
    "ml-1m": "MovieLens-1M",
    "mq2007": "MQ2007",
    "synthetic": "Default data (synthetic)",
    "synthetic-trees": "Generated from trees",
}

OFF_POLICY, TRUTH = "off-policy", "truth"
SELECTIONS = {OFF_POLICY: "without true labels", TRUTH: "with true labels"}  # how steps and settings are chosen


@dataclass(frozen=True)
class Budget:
    """The network and the amount of training that every method of an experiment gets; the default is the full one."""

    name: str = "full"
    hidden: tuple[int, ...] = (512, 256, 128)
    dropout: float = 0.3
    steps: int = 3000  # largest number of steps after a bias model; a method without one may also take its steps
    bias_steps: int = 3000  # largest number of steps of the bias model
    evaluate_every: int = 100
    patience: int = 6  # evaluations without improvement after which a run stops
    sessions: int = SESSIONS  # of the log that all methods of a run learn from
    runs: int = 10  # of each method
    rates: tuple[float, ...] = DEFAULT_RATES  # learning rates to choose from
    dropouts: tuple[float, ...] = (0.0,)  # to choose from besides `dropout`
    limits: tuple[float | str, ...] = LIMITS  # largest weights to choose from besides the default of a method
    tuning_runs: int = 3  # runs of each setting to choose from
    longest: int = LONGEST  # times its steps that a method may take if it still improves
    selections: tuple[str, ...] = (OFF_POLICY, TRUTH)  # of tables, see `SELECTIONS`
    beyond: bool = True  # add rows that are not in the paper


CURVES: Mapping[str, tuple[float, ...]] = {  # examination by position, from 1
    "reciprocal": tuple(1 / k for k in range(1, 21)),
    "fold": (0.9, 0.85, 0.8, 0.3, 0.25, 0.2, 0.15, 0.1, 0.1, 0.1),
    "rare": tuple(0.3 * 0.8**k for k in range(20)),
}
NETWORK = ("hidden", "dropout", "steps", "bias_steps", "evaluate_every", "patience")  # of a budget
FULL = Budget()
QUICK = Budget(
    name="quick",
    hidden=(64, 32),
    dropout=0.1,
    steps=150,
    bias_steps=300,
    evaluate_every=50,
    patience=3,
    sessions=5000,
    runs=3,
    rates=(0.02, 0.05),
    dropouts=(),
    limits=(),
    tuning_runs=1,
    longest=1,
    selections=(OFF_POLICY,),
    beyond=False,
)


@dataclass(frozen=True)
class World:
    """A simulated setting: data set, label, severity of position bias, weight of dwell time, users, and sessions."""

    data: str
    clicks: bool = False  # the label is the click; otherwise it is continuous
    eta: float = 1.0  # severity of position bias; 0: none
    delta: float = 3.0  # a continuous label is click + dwell / exp(delta)
    users: str = "pbm"  # the simulated users, by name
    sessions: int = SESSIONS  # of the one log that every method of a run learns from; 0: new feedback at each step
    logging: Logging = "linear"  # the ranker that orders what users see, by name
    select: str = OFF_POLICY  # how steps and settings are chosen, see `SELECTIONS`
    items: int = 10  # that users see
    curve: str = ""  # name of the examination by position, see `CURVES`; empty: that of the users

    @property
    def name(self) -> str:
        """The name of the folder of the runs in this world."""
        kind = "clicks" if self.clicks else f"continuous-delta-{self.delta:g}"
        users = "" if self.users == "pbm" else f"-{self.users}"
        sessions = f"-{self.sessions}-sessions" if self.sessions else "-new-sessions"
        logging = "" if self.logging == "linear" else f"-{self.logging}-logging"
        shown = f"{f'-{self.curve}' if self.curve else ''}{f'-{self.items}-items' if self.items != 10 else ''}"
        return f"{self.data}/{kind}-eta-{self.eta:g}{users}{shown}{sessions}{logging}-{self.select}"

    @property
    def title(self) -> str:
        return f"{TITLES.get(self.data, self.data)}, selected {SELECTIONS[self.select]}"

    @property
    def label(self) -> str:
        if self.clicks:
            return "click"
        return "click + dwell" if self.users == "watch" else f"click + dwell / exp({self.delta:g})"

    @property
    def metrics(self) -> list[str]:
        return [f"{'ndcg' if self.clicks else 'reward'}@{k}" for k in CUTOFFS]


@dataclass(frozen=True)
class Lab:
    """The settings of all experiments of one call: output folder, budget, worker processes and data."""

    out: Path
    budget: Budget
    workers: Workers
    runs: int = 0  # of each method; 0: the number in the budget
    data: tuple[str, ...] = ()  # data sets; empty: those of the experiment
    data_dir: str | None = None
    device: str = "auto"
    users: str = "pbm"
    sessions: int | None = None  # of the log that every method learns from; 0: new at each step; None: the budget's
    logging: Logging = "linear"
    selections: tuple[str, ...] = ()  # of tables; empty: those of the budget
    on_done: Callable[[int, int, str], None] = lambda *_: None

    @property
    def seeds(self) -> int:
        return self.runs or self.budget.runs

    def world(self, data: str, *, clicks: bool = False, eta: float = 1.0, delta: float = 3.0) -> World:
        """Return a world with the users, sessions and logging ranker of this call, and its first selection."""
        sessions = self.budget.sessions if self.sessions is None else self.sessions
        select = (self.selections or self.budget.selections)[0]
        return World(data, clicks, eta, delta, self.users, sessions, self.logging, select)

    def worlds(self, data: Iterable[str], *, clicks: bool = False) -> list[World]:
        """Return the worlds of a table: for each data set, one for each selection."""
        selections = self.selections or self.budget.selections
        return [replace(self.world(name, clicks=clicks), select=select) for name in data for select in selections]

    @property
    def protocol(self) -> str:
        """How methods are trained, tuned and tested, in words."""
        budget, sessions = self.budget, self.world("").sessions
        feedback = f"All methods of a run learn from the same {sessions:,} sessions, bias models included. "
        if not sessions:
            feedback = "Users give new feedback at each step, also to bias models, so methods differ in sessions. "
        chosen = ["learning rate", *(["dropout"] if budget.dropouts else [])]
        chosen += ["largest weight of a pair or item"] if budget.limits else []
        tuning = f"{budget.tuning_runs} other runs" if budget.tuning_runs > 1 else "another run"
        return (
            feedback
            + f"At most {budget.steps + budget.bias_steps:,} steps of 256 lists, bias model included; a run stops "
            f"after {budget.patience * budget.evaluate_every:,} steps without improvement. "
            + (f"A method that still improves then has up to {budget.longest} times the steps. " * (budget.longest > 1))
            + f"What is chosen for each method on validation requests, by {tuning} of each candidate: "
            f"{', '.join(chosen)}. {self.seeds} tested runs; network {'-'.join(map(str, budget.hidden))}; "
            f"users: {self.users}; logging ranker: {self.logging}."
        )

    def plan(self, world: World, entries: Iterable[str], *, reference: str) -> Plan:
        """Return the plan to compare the methods `entries` in a world."""
        budget = self.budget
        network = {name: getattr(budget, name) for name in NETWORK}
        users = {name: getattr(world, name) for name in ("users", "eta", "sessions", "logging", "items")}
        users["user_options"] = {"examination": CURVES[world.curve]} if world.curve else {}
        select = world.metrics[-1] if world.select == TRUTH else LIKELIHOOD
        base = make_config(world.data, data_dir=self.data_dir, **users, ranker="mlp", **network)
        base = base.with_options(label=world.label, select=select, device=self.device)
        return Plan(
            base,
            [Entry.parse(entry) for entry in entries],
            self.out / "runs" / budget.name / world.name,
            seeds=self.seeds,
            rates=budget.rates,
            dropouts=budget.dropouts,
            limits=budget.limits,
            tuning_seeds=budget.tuning_runs,
            longest=budget.longest,
            metrics=world.metrics,
            reference=reference,
            shared=self.out / "runs" / budget.name / "bias",  # of all worlds: the names have all that matters
        )

    def compare(self, worlds: Sequence[World], entries: Sequence[str], *, reference: str) -> dict[World, Comparison]:
        """Compare the methods in each world, in which each is tuned."""
        plans = [self.plan(world, entries, reference=reference) for world in worlds]
        return dict(zip(worlds, compare_all(plans, self.workers, self.on_done), strict=True))

    def find(self, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the names of the available data sets, and name -> where to get it and put it for the absent ones.

        A data set that exists but cannot be read raises an error.
        """
        available, absent = [], {}
        for name in self.data or names:
            try:
                load_dataset(name, data_dir=self.data_dir)  # now, so that all runs find it in the cache
                available.append(name)
            except (AbsentError, MissingExtraError) as error:
                absent[name] = str(error)
        if not available:
            raise DataError("none of the data sets is available", hint="; ".join(absent.values()))
        return available, absent


@dataclass(frozen=True)
class ExperimentResult:
    """The result of an experiment: plots and tables by section, claims with their verdicts, and all numbers."""

    name: str
    title: str
    about: str
    sections: list[Section]
    claims: list[Claim]
    results: dict[str, Any]
    absent: dict[str, str] = field(default_factory=dict)  # data set -> where to get it and where to put it

    def text(self) -> str:
        """Return the result as Markdown, without plots."""
        return _markdown({**as_json(self, {}), "absent": self._absent_titles()})

    def _absent_titles(self) -> dict[str, str]:
        return {TITLES.get(name, name): why for name, why in self.absent.items()}

    def to_json(self) -> dict[str, Any]:
        claims = [vars(claim) for claim in self.claims]
        return {"title": self.title, "figures": self.results, "claims": claims, "absent": self.absent}

    def write(self, out: Path, *, page: bool = True) -> None:
        """Write NAME.json, NAME.md and, if `page`, NAME.html into a folder."""
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / f"{self.name}.json", self.to_json())
        with atomic_path(out / f"{self.name}.md", overwrite=True) as temporary:
            temporary.write_text(self.text())
        if page:
            sections = [*self.sections, Section("Claims", claim_parts(self.claims))]
            if self.absent:
                sections.append(Section("Missing data", [Notes(_missing(self._absent_titles()))]))
            write_page(out / f"{self.name}.html", self.title, self.about, sections, overwrite=True)


def _missing(absent: Mapping[str, str]) -> list[str]:
    return [f"{name} is missing: {why}" for name, why in absent.items()]


def _markdown(
    content: Mapping[str, Any],
    notes: Sequence[str] = (),
    draw: Callable[[Mapping[str, Any]], list[str]] = lambda _: [],
) -> str:
    """Return a result, from `as_json`, as Markdown; `draw` returns the blocks of a plot."""
    blocks = [f"# {content['title']}", content["about"], *notes]
    for section in content["sections"]:
        blocks.append(f"## {section['title']}")
        for part in section["parts"]:
            if part["kind"] == Plot.KIND:
                blocks += draw(part)
            elif part["kind"] == Table.KIND:
                blocks += [*([part["caption"]] if part["caption"] else []), table_text(part["head"], part["rows"])]
            else:
                blocks.append(part["text"])
    blocks += _missing(content["absent"])
    if content["claims"]:
        blocks.append(claims_text([Claim(**claim) for claim in content["claims"]]))
    return "\n\n".join(blocks) + "\n"


def table_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


# --- Pages of the documentation ---------------------------------------------------------------------------------------
# The results of experiments in the documentation: a page and plots, all made from one JSON file.
#
# NAME.json    the numbers, tables, plots and claims, and how they were made: command, commit, date and machine
# NAME.md      the page, with NAME-1.svg, NAME-2.svg, ...

COMMIT = "GIT_COMMIT"  # environment variable with the commit, for a copy of the sources without their history


def write_docs(result: ExperimentResult, folder: Path, command: str) -> None:
    """Write the page of an experiment, its plots, and the JSON file that they are made from."""
    folder.mkdir(parents=True, exist_ok=True)
    content = as_json(result, provenance(command))
    write_json(folder / f"{result.name}.json", content)
    files = pages(content)
    for old in folder.glob(f"{result.name}-*.svg"):
        if old.name not in files:  # of a result with more plots
            old.unlink()
    for name, text in files.items():
        with atomic_path(folder / name, overwrite=True) as temporary:
            temporary.write_text(text, encoding="utf-8")


def provenance(command: str) -> dict[str, str]:
    """Return how results are made: command, version, commit, date and machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "command": command,
        "version": __version__,
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{gpu}, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
    }


def _commit() -> str:
    """Return the commit of the sources, of which a checkout has the history next to its folder `src`."""
    if given := os.environ.get(COMMIT):
        return given
    history = Path(__file__).parents[3] / ".git"
    try:
        head = (history / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:12]
        branch = head.removeprefix("ref: ")
        if (history / branch).is_file():
            return (history / branch).read_text().strip()[:12]
        packed = (line.split(" ") for line in (history / "packed-refs").read_text().splitlines())
        return next((words[0][:12] for words in packed if words[1:] == [branch]), "unknown")
    except OSError:
        return "unknown"


def as_json(result: ExperimentResult, made: Mapping[str, str]) -> dict[str, Any]:
    """Return an experiment's result as JSON values from which `pages` makes its page and plots."""
    sections = [{"title": section.title, "parts": [*_parts(section.parts)]} for section in result.sections]
    return {"name": result.name, "about": result.about, "made": dict(made), **result.to_json(), "sections": sections}


def _parts(parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    for part in parts:
        if isinstance(part, Grid):
            yield from _parts(part.plots)
        elif isinstance(part, Text | Table | Plot):
            yield {"kind": part.KIND, **asdict(part)}


def pages(content: Mapping[str, Any]) -> dict[str, str]:
    """Return file name -> text of the page and plots of an experiment, from the content of its JSON file."""
    made, name = content["made"], content["name"]
    files: dict[str, str] = {}

    def draw(plot: Mapping[str, Any]) -> list[str]:
        file = f"{name}-{len(files) + 1}.svg"
        files[file] = svg(plot["title"], plot["figure"], plot["height"])
        return [f"![{plot['title']}]({file})", *([plot["caption"]] if plot["caption"] else [])]

    note = (
        f"Made by `{made['command']}` from commit {made['commit']} (ultr {made['version']}) on {made['date']}: "
        f"{made['machine']}. The numbers are in [{name}.json]({name}.json)."
    )
    return {f"{name}.md": _markdown(content, [note], draw), **files}
