"""Experiments that compare methods in tables: Tables 1 and 2 of the paper (CIKM 2022), trees, and the printed loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ultr.experiments.lab import (
    QUICK,
    TRUTH,
    Claim,
    ExperimentResult,
    Lab,
    World,
    claim_above,
    claim_above_all,
    claim_level,
    corrected,
    row_of,
)
from ultr.experiments.paper import (
    BAYES,
    BEYOND1,
    BEYOND2,
    CUTOFFS,
    DEFAULT,
    DEFAULT_ROW,
    IPW,
    OPT,
    TABLE1,
    TABLE2,
    TableRow,
    rows_of,
)
from ultr.report.comparison import comparison_plots
from ultr.report.page import Section, Table, Text
from ultr.report.plots import line_plot
from ultr.training.comparing.plan import TREE_RATES, Entry, Plan, compare_all, run_folder
from ultr.training.comparing.results import Comparison, Row, Setting
from ultr.training.folder import read_metrics

BASELINES = ("pal-click", "dla")  # those that gains in the paper are shown over


def table_section(title: str, world: World, result: Comparison, rows: Sequence[TableRow]) -> Section:
    """Return the table and a plot of a data set: our results with gains over the reference, and those in the paper."""
    shown = {row.entry for row in result.rows}
    rows = [row for row in rows if row.entry in shown]
    metrics = [metric.capitalize().replace("Ndcg", "NDCG") for metric in world.metrics]
    last = metrics[-1]
    reference = next(row for row in rows if row.entry == result.reference)
    head = ["method", "entry", "setting", "best step", *metrics, f"{last} over {reference.name}", "p over runs"]
    head += ["p over requests"]
    baseline = next((row for row in rows if row.entry in BASELINES and world.data in row.printed), None)
    if baseline is not None:
        head += [f"{last} over {baseline.name}", *(f"paper {metric}" for metric in metrics)]
        head += [f"paper, over {baseline.name}"]
    lines = []
    base = float(np.mean(row_of(result, result.reference).results[world.metrics[-1]]))
    for row in rows:
        ours = row_of(result, row.entry)
        cells = [row.name, row.entry, str(ours.setting), _steps(ours)]
        for metric in world.metrics:
            values = ours.results[metric]
            star = "*" if metric in ours.against and ours.against[metric].significant else ""
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            cells.append(f"{np.mean(values):.4f} ± {spread:.4f}{star}")
        cells.append(f"{np.mean(ours.results[world.metrics[-1]]) / base - 1:+.2%}")
        test = ours.against.get(world.metrics[-1])
        cells += ["", ""] if test is None or test.holm is None else [f"{p:.2g}" for p in test.holm]
        if test is None or test.requests is None:
            cells[-1] = ""
        if baseline is not None:
            theirs = float(np.mean(row_of(result, baseline.entry).results[world.metrics[-1]]))
            cells.append(f"{np.mean(ours.results[world.metrics[-1]]) / theirs - 1:+.2%}")
            if (printed := row.printed.get(world.data)) is None:
                cells += [""] * (len(CUTOFFS) + 1)
            else:
                cells += [f"{mean:.4f} ± {deviation:.4f}" for mean, deviation in printed]
                cells.append(f"{printed[-1][0] / baseline.printed[world.data][-1][0] - 1:+.2%}")
        lines.append(cells)
    sessions = [row.sessions for row in result.rows]
    counted = f"{min(sessions):,} to {max(sessions):,}" if min(sessions) < max(sessions) else f"{max(sessions):,}"
    learned = Text(f"Sessions that a run of a row learned from: {counted}.")
    return Section(title, [Table(head, lines), learned, *comparison_plots(result.to_json())[-1:]])


def _steps(row: Row) -> str:
    """Return the median best step of a method's runs, with how many runs still improved at the last one."""
    if row.steps is None:
        return ""
    late = f" ({row.steps.at_bound} runs still improved at {row.steps.bound:,})" if row.steps.at_bound else ""
    return f"{row.steps.best:,.0f}{late}"


# --- Tables 1 and 2: our results, next to those in the paper ----------------------------------------------------------

BASELINES1 = [row.entry for row in TABLE1 if row.entry not in (OPT, BAYES, IPW)]
BASELINES2 = ["dla", "regression-em", "pairwise-debias"]


def table1(lab: Lab) -> ExperimentResult:
    """Repeat Table 1: methods that learn from continuous labels (clicks and dwell time)."""
    available, absent = lab.find(["yahoo", "ml-1m", "mq2007", "synthetic"])
    title, worlds = "Table 1: continuous labels", lab.worlds(available)
    return _table(lab, "table1", title, worlds, (DEFAULT_ROW, *TABLE1), BEYOND1, _claims1, absent)


def table2(lab: Lab) -> ExperimentResult:
    """Repeat Table 2: methods that learn from clicks."""
    available, absent = lab.find(["yahoo", "mslr-web30k", "mq2007", "synthetic"])
    title, worlds = "Table 2: clicks", lab.worlds(available, clicks=True)
    return _table(lab, "table2", title, worlds, (DEFAULT_ROW, *TABLE2), BEYOND2, _claims2, absent)


def _claims1(world: World, result: Comparison) -> list[Claim]:
    data, metric = world.title, world.metrics[-1]
    entries = [row.entry for row in result.rows]
    others = [e for e in entries if e.startswith(("pal-click", "pointwise", "lambdarank")) and "from=" not in e]
    harm = "A shallow tower on dwell time harms: PAL-Click above PAL-Click + PAL-DwellTime"
    claims = [
        claim_above_all("The default beats PAL-Click and the lower bounds", data, result, DEFAULT, others, metric),
        claim_above(
            "LambdaRank on biased labels is worse than pointwise", data, result, "pointwise", "lambdarank", metric
        ),
        claim_above(harm, data, result, "pal-click", "pal-click-dwell", metric),
        claim_above_all("loss_opt beats every baseline", data, result, OPT, BASELINES1, metric),
        claim_above("loss_Bayes-IPW improves on loss_IPW (MovieLens: similar)", data, result, BAYES, IPW, metric),
        claim_above("loss_opt improves on loss_Bayes-IPW", data, result, OPT, BAYES, metric),
    ]
    if "pal-click:rows=all" in entries:
        text = "A shallow tower on dwell time also harms if it is learned from all rows"
        claims.insert(3, claim_above(text, data, result, "pal-click:rows=all", "pal-click-dwell:rows=all", metric))
    return claims


def _claims2(world: World, result: Comparison) -> list[Claim]:
    data, metric = world.title, world.metrics[-1]
    competitive = "loss_opt is competitive on clicks: not below the best of DLA, Regression EM, Pairwise Debiasing"
    return [
        claim_above("The default beats the lower bound", data, result, DEFAULT, "lambdarank", metric),
        claim_level(competitive, data, result, OPT, BASELINES2, metric),
        claim_above("loss_Bayes-IPW improves on loss_IPW", data, result, BAYES, IPW, metric),
        claim_above("loss_opt improves on loss_Bayes-IPW (Yahoo: similar)", data, result, OPT, BAYES, metric),
        claim_above("loss_opt beats the lower bound", data, result, OPT, "lambdarank", metric),
    ]


def _table(
    lab: Lab,
    name: str,
    title: str,
    worlds: Sequence[World],
    rows: Sequence[TableRow],
    beyond: Sequence[TableRow],
    claims_of: Callable[[World, Comparison], list[Claim]],
    absent: dict[str, str],
) -> ExperimentResult:
    """Compare the methods in each world; rows `beyond` those of the paper only with the first selection."""
    every_row = (*rows, *beyond) if lab.budget.beyond else rows
    found: dict[World, Comparison] = {}
    for select in dict.fromkeys(world.select for world in worlds):
        entries = [row.entry for row in (rows if found else every_row)]
        found |= lab.compare([world for world in worlds if world.select == select], entries, reference=DEFAULT)
    compared = {world: found[world] for world in worlds}
    about = (
        f"{lab.protocol} Mean ± standard deviation over runs. * marks a difference from the default with p < 0.05 both "
        "over runs and over test requests, in paired tests that Holm's method corrects for the number of rows."
    )
    sections = [table_section(world.title, world, result, every_row) for world, result in compared.items()]
    tested = compared.items() if lab.seeds > 1 else ()
    claims = corrected([claim for world, result in tested for claim in claims_of(world, result)])
    results: dict[str, Any] = {}
    for world, result in compared.items():
        printed = {row.entry: [*map(list, row.printed[world.data])] for row in every_row if world.data in row.printed}
        results[world.title] = {**result.to_json(), "paper": printed}
    return ExperimentResult(name, f"{title} (budget: {lab.budget.name})", about, sections, claims, results, absent)


# --- Trees ------------------------------------------------------------------------------------------------------------
# `pairwise-em` with boosted trees, compared with the objectives of LightGBM and XGBoost.

TREE_RUNS = 5
QUICK_ROUNDS = 50
OURS = {"lightgbm": "pairwise-em:final=pairs", "xgboost": "pairwise-em:final=pairs:ranker=xgboost"}
OUR_ROWS = (
    TableRow("posterior pairs, LightGBM", OURS["lightgbm"]),
    TableRow("posterior pairs, XGBoost", OURS["xgboost"]),
    TableRow("likelihood, LightGBM", "pairwise-em"),
    TableRow("opt-posterior, LightGBM", "pairwise-em:loss=opt-posterior:final=pairs"),
    TableRow("loss_opt, LightGBM", "pairwise-em:loss=opt"),
)
ON_CLICKS = {
    "lightgbm": (
        TableRow("LightGBM lambdarank, clicks", "lambdarank:labels=click"),
        TableRow("LightGBM lambdarank + position, clicks", "lambdarank:labels=click:correction=own"),
    ),
    "xgboost": (
        TableRow("XGBoost rank:ndcg, clicks", "lambdarank:labels=click:ranker=xgboost"),
        TableRow("XGBoost lambdarank_unbiased, clicks", "lambdarank:labels=click:correction=own:ranker=xgboost"),
    ),
}
ON_VALUES = {
    "lightgbm": (
        *ON_CLICKS["lightgbm"],  # LightGBM rejects continuous labels: its best result on clicks or buckets counts
        TableRow("LightGBM lambdarank, buckets", "lambdarank:labels=buckets"),
        TableRow("LightGBM lambdarank + position, buckets", "lambdarank:labels=buckets:correction=own"),
        TableRow("LightGBM regression", "pointwise"),
    ),
    "xgboost": (
        TableRow("XGBoost rank:ndcg, values", "lambdarank:ranker=xgboost"),
        TableRow("XGBoost lambdarank_unbiased, values", "lambdarank:correction=own:ranker=xgboost"),
        TableRow("XGBoost regression", "pointwise:ranker=xgboost"),
    ),
}


def library_rows(world: World) -> dict[str, tuple[TableRow, ...]]:
    """Return library -> rows with its own objectives, for the kind of label of a world."""
    if not world.clicks:
        return ON_VALUES
    return {library: (*ON_CLICKS[library], ON_VALUES[library][-1]) for library in OURS}


def tree_tables(lab: Lab) -> ExperimentResult:
    """Compare boosted trees on all available data sets, with continuous labels and with clicks."""
    available, absent = lab.find(["ml-1m", "mq2007", "synthetic"])
    worlds = [world for clicks in (False, True) for world in lab.worlds(available, clicks=clicks)]
    rows = {world: [*OUR_ROWS, *(row for others in library_rows(world).values() for row in others)] for world in worlds}
    plans = [_tree_plan(lab, world, [row.entry for row in rows[world]]) for world in worlds]
    compared = dict(zip(worlds, compare_all(plans, lab.workers, lab.on_done), strict=True))
    base, rates = plans[0].base, " or ".join(f"{rate:g}" for rate in plans[0].rates)
    about = (
        f"{plans[0].seeds} runs; the {base.simulation.sessions:,} sessions of a run are drawn once. The learning rate "
        f"({rates}) and the number of rounds (at most {base.trees.rounds}) were selected on validation requests. "
        "Mean ± standard deviation over runs; * marks a difference from posterior pairs with LightGBM with p < 0.05 "
        "both over runs and over test requests, in paired tests that Holm's method corrects for the number of rows."
    )
    kinds = {True: "clicks", False: "continuous label"}
    sections = [
        table_section(f"{world.title}, {kinds[world.clicks]}", world, result, rows[world])
        for world, result in compared.items()
    ]
    tested = compared.items() if plans[0].seeds > 1 else ()
    claims = corrected([claim for world, result in tested for claim in _tree_claims(world, result)])
    results = {world.name: result.to_json() for world, result in compared.items()}
    title = f"Trees: LightGBM and XGBoost (budget: {lab.budget.name})"
    return ExperimentResult("trees", title, about, sections, claims, results, absent)


def _tree_plan(lab: Lab, world: World, entries: Sequence[str]) -> Plan:
    quick = lab.budget is QUICK
    plan = lab.plan(world, [], reference="")
    return replace(
        plan,
        longest=1,
        base=plan.base.with_options(ranker="lightgbm", **({"steps": QUICK_ROUNDS} if quick else {})),
        entries=[Entry.parse(entry, ["lightgbm"]) for entry in entries],
        out=lab.out / "runs" / lab.budget.name / "trees" / world.name,
        seeds=lab.runs or (2 if quick else TREE_RUNS),
        rates=TREE_RATES[1:2] if quick else TREE_RATES,
    )


def _tree_claims(world: World, result: Comparison) -> list[Claim]:
    data, metric = world.title, world.metrics[-1]
    claims = []
    for library, rows in library_rows(world).items():
        others, name = [row.entry for row in rows], {"lightgbm": "LightGBM", "xgboost": "XGBoost"}[library]
        if world.clicks:
            text = f"On clicks, posterior pairs in {name} are not below the best of its own options"
            claims.append(claim_level(text, data, result, OURS[library], others, metric))
        else:
            text = f"On continuous labels, posterior pairs in {name} beat each of its own options"
            claims.append(claim_above_all(text, data, result, OURS[library], others, metric))
    return claims


# --- The printed loss -------------------------------------------------------------------------------------------------
# What decides where the printed loss of the paper stands. The experiment crosses where θ and β come from, the limit of
# the pair weights, the change of the metric in the loss, and the number of steps; validation requests with true labels
# choose. The best of each source is then tested.

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
    plans = {world: _settling_plan(lab, world, [*cells.values()]) for world in worlds}
    tasks = [task for plan in plans.values() for _, stages, _ in plan.courses() for task in next(stages)]
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


def _settling_plan(lab: Lab, world: World, entries: list[str]) -> Plan:
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
