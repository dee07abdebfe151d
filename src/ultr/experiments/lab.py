"""Settings that all experiments share (data, budget, output folder), and the form of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ultr.datasets import load_dataset
from ultr.datasets.initial import Logging
from ultr.errors import AbsentError, DataError, MissingExtraError
from ultr.experiments.claims import Claim, claim_parts, claims_text
from ultr.experiments.paper import CUTOFFS
from ultr.report.page import write_page
from ultr.report.parts import Notes, Section, Table, Text
from ultr.training.compare import DEFAULT_RATES, LIMITS, LONGEST, SESSIONS, Plan, compare_all
from ultr.training.comparison import Comparison
from ultr.training.config import RunConfig, TrainingOptions
from ultr.training.entries import Entry
from ultr.training.workers import Workers
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import write_json

TITLES = {
    "yahoo": "Yahoo! LETOR set 1",
    "mslr-web30k": "MSLR-WEB30K",
    "ml-1m": "MovieLens-1M",
    "mq2007": "MQ2007",
    "synthetic": "Default data (synthetic)",
}


@dataclass(frozen=True)
class Budget:
    """The network and the amount of training that every method of an experiment gets."""

    name: str
    hidden: tuple[int, ...]
    dropout: float
    steps: int  # largest number of steps after a bias model; a method without one may also take its steps
    bias_steps: int  # largest number of steps of the bias model
    evaluate_every: int
    patience: int  # evaluations without improvement after which a run stops
    sessions: int  # of the log that all methods of a run learn from
    runs: int  # of each method
    rates: tuple[float, ...]  # learning rates to choose from
    dropouts: tuple[float, ...]  # to choose from besides `dropout`
    limits: tuple[float | str, ...]  # largest weights to choose from besides the default of a method
    tuning_runs: int  # runs of each setting to choose from
    longest: int  # times its steps that a method may take if it still improves
    selections: tuple[str, ...]  # of tables, see `SELECTIONS`
    beyond: bool  # add rows that are not in the paper


OFF_POLICY, TRUTH = "off-policy", "truth"
SELECTIONS = {OFF_POLICY: "without true labels", TRUTH: "with true labels"}  # how steps and settings are chosen
FULL = Budget(
    name="full",
    hidden=(512, 256, 128),
    dropout=0.3,
    steps=3000,
    bias_steps=3000,
    evaluate_every=100,
    patience=6,
    sessions=SESSIONS,
    runs=10,
    rates=DEFAULT_RATES,
    dropouts=(0.0,),
    limits=LIMITS,
    tuning_runs=3,
    longest=LONGEST,
    selections=(OFF_POLICY, TRUTH),
    beyond=True,
)
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

    @property
    def name(self) -> str:
        """The name of the folder of the runs in this world."""
        kind = "clicks" if self.clicks else f"continuous-delta-{self.delta:g}"
        users = "" if self.users == "pbm" else f"-{self.users}"
        sessions = f"-{self.sessions}-sessions" if self.sessions else "-new-sessions"
        logging = "" if self.logging == "linear" else f"-{self.logging}-logging"
        return f"{self.data}/{kind}-eta-{self.eta:g}{users}{sessions}{logging}-{self.select}"

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
        base = RunConfig(
            data=world.data,
            users=world.users,
            sessions=world.sessions,
            logging=world.logging,
            user_options={"eta": world.eta, "epsilon": 0.1},
            label=world.label,
            ranker_options={"hidden": list(budget.hidden), "dropout": budget.dropout, "norm": "none"},
            data_dir=self.data_dir,
            select=world.metrics[-1] if world.select == TRUTH else "off-policy-gain@10",
            training=TrainingOptions(
                steps=budget.steps,
                bias_steps=budget.bias_steps,
                evaluate_every=budget.evaluate_every,
                patience=budget.patience,
                device=self.device,
            ),
        )
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
        blocks = [f"# {self.title}", self.about, *map(_markdown, self.sections), *self._missing()]
        return "\n\n".join([*blocks, *([claims_text(self.claims)] if self.claims else [])]) + "\n"

    def _missing(self) -> list[str]:
        return [f"{TITLES.get(name, name)} is missing: {why}" for name, why in self.absent.items()]

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
                sections.append(Section("Missing data", [Notes(self._missing())]))
            write_page(out / f"{self.name}.html", self.title, self.about, sections, overwrite=True)


def _markdown(section: Section) -> str:
    blocks = [f"## {section.title}"]
    for part in section.parts:
        if isinstance(part, Text):
            blocks.append(part.text)
        elif isinstance(part, Table):
            blocks += [*([part.caption] if part.caption else []), table_text(part.head, part.rows)]
    return "\n\n".join(blocks)


def table_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])
