"""The section of a report page on how new rankings differ from the logged ranking, with example requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ultr.evaluation.judgement import LOGGED_RANKING
from ultr.report.parts import Folded, Grid, Heading, Part, Plot, Section, Table, Text
from ultr.report.plots import heat_map, histogram
from ultr.report.run import OLDER, Run
from ultr.training.outcome import RunOutcome


def ranking_section(runs: Sequence[Run]) -> Section:
    """Return a section on the difference between the logged ranking and the new ranking of each run."""
    outcomes = {run.name: run.outcome for run in runs if run.outcome is not None and "moves" in run.outcome.about}
    if not outcomes:
        saved = any(run.outcome is not None for run in runs)
        return Section("Rankings", [Text("The data have no logged ranking." if saved else OLDER)])
    several = len(outcomes) > 1
    caption = "Kendall's τ by request: 1 is the same order, 0 is unrelated, -1 is reversed."
    agreement = {name: outcome.agreement for name, outcome in outcomes.items()}
    parts: list[Part] = [
        Text(f"The new ranking of the validation requests, compared with {LOGGED_RANKING}."),
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
