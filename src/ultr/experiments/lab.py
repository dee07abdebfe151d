"""Where the experiments are made: on which data, with what budget, into which folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ultr.checkpoint import write_json
from ultr.compare import DEFAULT_RATES, Comparison, Entry, Plan, Workers, compare_all
from ultr.datasets import load_dataset
from ultr.errors import AbsentError, DataError, MissingExtraError
from ultr.experiments.claims import Claim, claims_text
from ultr.experiments.paper import CUTOFFS
from ultr.files import atomic_path
from ultr.preparing import RunConfig
from ultr.training import TrainingOptions

TITLES = {
    "yahoo": "Yahoo! LETOR set 1",
    "mslr-web30k": "MSLR-WEB30K",
    "ml-1m": "MovieLens-1M",
    "mq2007": "MQ2007",
    "synthetic": "Default data (synthetic)",
}


@dataclass(frozen=True)
class Budget:
    """What every method is given alike."""

    name: str
    hidden: tuple[int, ...]
    dropout: float
    steps: int
    bias_steps: int  # at most
    rates: tuple[float, ...]
    runs: int
    beyond: bool  # whether there are rows that are not in the paper


FULL = Budget("full", (512, 256, 128), 0.3, 700, 3000, DEFAULT_RATES, 10, True)
QUICK = Budget("quick", (64, 32), 0.1, 150, 300, (0.02, 0.05), 3, False)


@dataclass(frozen=True)
class World:
    """A data set, the kind of label, how severe the position bias is and how much dwell time weighs."""

    data: str
    clicks: bool = False
    eta: float = 1.0
    delta: float = 3.0

    @property
    def name(self) -> str:
        kind = "clicks" if self.clicks else f"continuous-delta-{self.delta:g}"
        return f"{self.data}/{kind}-eta-{self.eta:g}"

    @property
    def label(self) -> str:
        return "click" if self.clicks else f"click + dwell / exp({self.delta:g})"

    @property
    def metrics(self) -> list[str]:
        return [f"{'ndcg' if self.clicks else 'reward'}@{k}" for k in CUTOFFS]


@dataclass(frozen=True)
class Lab:
    """The folder of the experiments, what every run is given, and who performs them."""

    out: Path
    budget: Budget
    workers: Workers
    runs: int = 0  # of each method; 0: as the budget says
    data: tuple[str, ...] = ()  # sets to use; none: those of the experiment
    data_dir: str | None = None
    device: str = "auto"
    on_done: Callable[[int, int, str], None] = lambda *_: None

    @property
    def seeds(self) -> int:
        return self.runs or self.budget.runs

    def plan(self, world: World, entries: Iterable[str], *, reference: str, rate_of: Mapping[str, float]) -> Plan:
        budget = self.budget
        base = RunConfig(
            data=world.data,
            users="pbm",
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
        """The methods in each of the worlds: rates tuned there, unless they are given."""
        plans = [self.plan(w, entries, reference=reference, rate_of=(rate_of or {}).get(w, {})) for w in worlds]
        return dict(zip(worlds, compare_all(plans, self.workers, self.on_done), strict=True))

    def find(self, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Which of the data sets are here, and of those that are not, where to get them and where to put them.

        One that is here and cannot be read is an error: it must not be taken for absent.
        """
        here, absent = [], {}
        for name in self.data or names:
            try:
                load_dataset(name, data_dir=self.data_dir)  # once, so that runs find it prepared
                here.append(name)
            except (AbsentError, MissingExtraError) as error:
                absent[name] = str(error)
        if not here:
            raise DataError("none of the data sets is here", got="; ".join(absent.values()))
        return here, absent


@dataclass(frozen=True)
class Outcome:
    """What an experiment came to: its text, its claims and its figures."""

    name: str
    title: str
    sections: list[str]
    claims: list[Claim]
    figures: dict[str, Any]
    absent: dict[str, str] = field(default_factory=dict)
    plots: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The outcome as Markdown."""
        parts = [f"# {self.title}", *self.sections]
        if self.plots:
            parts.append("Plots: " + ", ".join(self.plots))
        parts += [f"{TITLES.get(name, name)} is absent: {why}" for name, why in self.absent.items()]
        return "\n\n".join([*parts, *([claims_text(self.claims)] if self.claims else [])]) + "\n"

    def to_json(self) -> dict[str, Any]:
        claims = [vars(claim) for claim in self.claims]
        return {"title": self.title, "figures": self.figures, "claims": claims, "absent": self.absent}

    def write(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / f"{self.name}.json", self.to_json())
        with atomic_path(out / f"{self.name}.md", overwrite=True) as temporary:
            temporary.write_text(self.text())


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
