"""Tables 1 and 2 of the paper behind pairwise-em (CIKM 2022): our results, next to those in the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ultr.experiments.lab import (
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
)
from ultr.report.comparison import comparison_plots
from ultr.report.page import Section, Table, Text
from ultr.training.comparing.results import Comparison, Row

BASELINES1 = [row.entry for row in TABLE1 if row.entry not in (OPT, BAYES, IPW)]
BASELINES2 = ["dla", "regression-em", "pairwise-debias"]
BASELINES = ("pal-click", "dla")  # those that gains in the paper are shown over


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
