"""The experiment `settling`: what decides where the printed loss of the paper stands.

It crosses where θ and β come from, the limit of the pair weights, the change of the metric in the loss, and the number
of steps; validation requests with true labels choose. The best of each source is then tested.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from ultr.experiments.lab import QUICK, TRUTH, ExperimentResult, Lab, World
from ultr.experiments.paper import DEFAULT, TableRow, rows_of
from ultr.experiments.tables import table_section
from ultr.report.page import Section, Table, Text
from ultr.report.plots import line_plot
from ultr.training.comparing.plan import Entry, Plan, compare_all, run_folder
from ultr.training.comparing.results import Setting
from ultr.training.folder import read_metrics

SOURCES = {"oracle": "known theta and beta", "staged": "staged EM", "joint": "joint EM"}
DELTAS = {"dcg": "Delta DCG", "lambdaloss": "Delta NDCG as released"}
LIMITS = ("2", "3", "5", "10", "none")
STEPS, TOTAL = (700, 3000), 8000  # steps of the ranker after which it is looked at, and steps with the bias model
QUICK_STEPS, QUICK_TOTAL = (50, 100), 450
RATES = (0.005, 0.02)
OTHERS = rows_of(
    DEFAULT, "pairwise-em:variant=released", "pal-click", "pal-click:rows=all", "pal-click:variant=released"
)


def settle(lab: Lab) -> ExperimentResult:
    """Find out what decides where the printed loss stands."""
    available, absent = lab.find(["ml-1m", "synthetic"])
    quick = lab.budget.name == QUICK.name
    limits, deltas = (LIMITS[1::2], ["dcg"]) if quick else (LIMITS, [*DELTAS])
    cells = {
        (source, delta, limit): f"pairwise-em:loss=opt:em={source}:delta={delta}:max_weight={limit}"
        for source, delta, limit in product(SOURCES, deltas, limits)
    }
    worlds = [replace(lab.world(data), select=TRUTH) for data in available]
    plans = {world: _plan(lab, world, [*cells.values()]) for world in worlds}
    tasks = [task for plan in plans.values() for _, stages in plan.courses() for task in next(stages)]
    lab.workers.run(tasks, lab.on_done)
    found = {world: {cell: _course(plan, entry) for cell, entry in cells.items()} for world, plan in plans.items()}
    best = {
        world: {
            source: max((cell for cell in cells if cell[0] == source), key=lambda cell: float(courses[cell].max()))
            for source in SOURCES
        }
        for world, courses in found.items()
    }
    tested, rows = [], {}
    for world, plan in plans.items():
        chosen = [TableRow(f"printed loss, {SOURCES[s]}", cells[cell]) for s, cell in best[world].items()]
        rows[world] = [*OTHERS[:1], *chosen, *OTHERS[1:]]
        entries = [Entry.parse(row.entry) for row in rows[world]]
        tested.append(replace(plan, entries=entries, reference=DEFAULT, metrics=world.metrics))
    compared = dict(zip(worlds, compare_all(tested, lab.workers, lab.on_done), strict=True))
    sections = [
        part
        for world in worlds
        for part in (
            _courses(lab, world, found[world]),
            table_section(f"{world.title}: test", world, compared[world], rows[world]),
        )
    ]
    results = {
        world.title: {
            "validation": {" ".join(cell): course.tolist() for cell, course in found[world].items()},
            "test": compared[world].to_json(),
        }
        for world in worlds
    }
    about = (
        f"{lab.protocol} Here no run stops early: all take {_total(quick):,} steps, bias model included, at a learning "
        f"rate of {' or '.join(f'{rate:g}' for rate in RATES)}. Validation requests with true labels choose."
    )
    title = f"What decides where the printed loss stands (budget: {lab.budget.name})"
    return ExperimentResult("settling", title, about, sections, [], results, absent)


def _total(quick: bool) -> int:
    return QUICK_TOTAL if quick else TOTAL


def _plan(lab: Lab, world: World, entries: list[str]) -> Plan:
    plan = lab.plan(world, entries, reference="")
    steps = _total(lab.budget.name == QUICK.name) - plan.base.network.bias_steps
    base = plan.base.with_options(steps=steps, patience=0)
    out = plan.out.parent / f"settling-{plan.out.name}"
    return replace(plan, base=base, out=out, rates=RATES, dropouts=(), limits=(), longest=1)


def _course(plan: Plan, entry: str) -> np.ndarray:
    """Return the best mean validation metric so far [rates, evaluations] of a cell."""

    def best_so_far(run: Path) -> np.ndarray:
        return np.maximum.accumulate([float(line[plan.base.selection]) for line in read_metrics(run)])

    folders = [[run_folder(plan.out, entry, Setting(lr), seed) for seed in plan.tuning] for lr in plan.rates]
    return np.array([np.mean([best_so_far(run) for run in runs], axis=0) for runs in folders])


def _courses(lab: Lab, world: World, found: dict[tuple[str, str, str], np.ndarray]) -> Section:
    """Return the table and the plot of the best validation metric by cell and number of steps."""
    every = lab.budget.evaluate_every
    steps = QUICK_STEPS if lab.budget.name == QUICK.name else STEPS
    rows: list[list[str]] = []
    lines: dict[str, dict[float, list[float]]] = {}
    for (source, delta, limit), course in found.items():
        at = [float(course[:, : step // every].max()) for step in steps]
        rows.append([SOURCES[source], DELTAS[delta], limit, *(f"{v:.4f}" for v in (*at, float(course.max())))])
        best = course[course.max(1).argmax()]
        lines.setdefault(source, {})[float(course.max())] = [float(value) for value in best]
    head = ["theta and beta", "change of the metric", "limit", *(f"{step:,} steps" for step in steps), "all steps"]
    drawn = {SOURCES[source]: lines[source][max(lines[source])] for source in lines}
    plot = line_plot(
        f"Validation {world.metrics[-1]} of the best limit and metric",
        {name: ([every * (i + 1) for i in range(len(line))], line) for name, line in drawn.items()},
        x="step of the ranker",
        y=f"best {world.metrics[-1]} so far",
    )
    runs = lab.budget.tuning_runs
    note = Text(f"The best step so far; means of {runs} runs that are not tested, at the better of two learning rates.")
    return Section(f"{world.title}: validation", [Table(head, rows), note, plot])
