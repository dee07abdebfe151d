"""Settings that all experiments share (data, budget, output folder), and the form of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ultr.datasets import load_dataset
from ultr.errors import AbsentError, DataError, MissingExtraError
from ultr.experiments.claims import Claim, claim_parts, claims_text
from ultr.experiments.paper import CUTOFFS
from ultr.report.page import write_page
from ultr.report.parts import Notes, Section, Table, Text
from ultr.training.compare import DEFAULT_RATES, Comparison, Entry, Plan, compare_all
from ultr.training.config import RunConfig, TrainingOptions
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
    steps: int
    bias_steps: int  # largest number of steps of the bias model
    rates: tuple[float, ...]  # learning rates to choose from
    runs: int  # of each method
    beyond: bool  # add rows that are not in the paper


FULL = Budget("full", (512, 256, 128), 0.3, 700, 3000, DEFAULT_RATES, 10, True)
QUICK = Budget("quick", (64, 32), 0.1, 150, 300, (0.02, 0.05), 3, False)


@dataclass(frozen=True)
class World:
    """A simulated setting: data set, label, severity of position bias, weight of dwell time, users, and sessions."""

    data: str
    clicks: bool = False  # the label is the click; otherwise it is continuous
    eta: float = 1.0  # severity of position bias; 0: none
    delta: float = 3.0  # a continuous label is click + dwell / exp(delta)
    users: str = "pbm"  # the simulated users, by name
    sessions: int = 0  # of the one log that every method of a run learns from; 0: new feedback at each step

    @property
    def name(self) -> str:
        kind = "clicks" if self.clicks else f"continuous-delta-{self.delta:g}"
        users = "" if self.users == "pbm" else f"-{self.users}"
        sessions = f"-{self.sessions}-sessions" if self.sessions else ""
        return f"{self.data}/{kind}-eta-{self.eta:g}{users}{sessions}"

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
    sessions: int = 0  # of the one log that every method of a run learns from; 0: new feedback at each step
    on_done: Callable[[int, int, str], None] = lambda *_: None

    @property
    def seeds(self) -> int:
        return self.runs or self.budget.runs

    def world(self, data: str, *, clicks: bool = False, eta: float = 1.0, delta: float = 3.0) -> World:
        """Return a world with the users and the number of sessions of this call."""
        return World(data, clicks, eta, delta, self.users, self.sessions)

    @property
    def feedback(self) -> str:
        """The feedback that methods learn from, in words."""
        users = "" if self.users == "pbm" else f" Users: {self.users}."
        if self.sessions:
            return f"Every method of a run learns from the same {self.sessions:,} sessions, drawn once.{users}"
        return f"Users give new feedback at each step, also to bias models, so methods differ in sessions.{users}"

    def plan(self, world: World, entries: Iterable[str], *, reference: str, rate_of: Mapping[str, float]) -> Plan:
        """Return the plan to compare the methods `entries` in a world."""
        budget = self.budget
        base = RunConfig(
            data=world.data,
            users=world.users,
            sessions=world.sessions,
            user_options={"eta": world.eta, "epsilon": 0.1},
            label=world.label,
            ranker_options={"hidden": list(budget.hidden), "dropout": budget.dropout, "norm": "none"},
            data_dir=self.data_dir,
            select=world.metrics[-1],
            training=TrainingOptions(
                steps=budget.steps, bias_steps=budget.bias_steps, evaluate_every=50, device=self.device
            ),
        )
        return Plan(
            base,
            [Entry.parse(entry) for entry in entries],
            self.out / "runs" / budget.name / world.name,
            seeds=self.seeds,
            rates=budget.rates,
            rate_of=rate_of,
            metrics=world.metrics,
            reference=reference,
        )

    def compare(
        self,
        worlds: Sequence[World],
        entries: Sequence[str],
        *,
        reference: str,
        rate_of: Mapping[World, Mapping[str, float]] | None = None,
    ) -> dict[World, Comparison]:
        """Compare the methods in each world; learning rates that are not in `rate_of` are tuned in that world."""
        plans = [self.plan(w, entries, reference=reference, rate_of=(rate_of or {}).get(w, {})) for w in worlds]
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
            rows = ["| " + " | ".join(row) + " |" for row in (part.head, *part.rows)]
            rows.insert(1, "|" + "---|" * len(part.head))
            blocks += [*([part.caption] if part.caption else []), "\n".join(rows)]
    return "\n\n".join(blocks)
