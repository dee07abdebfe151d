"""Tables 1 and 2 of the paper behind pairwise-em (CIKM 2022): our results, next to those in the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ultr.experiments.claims import Claim, claim_above, claim_above_all, claim_level, row_of
from ultr.experiments.lab import TITLES, ExperimentResult, Lab, World
from ultr.experiments.paper import BAYES, BEYOND1, BEYOND2, CUTOFFS, IPW, OPT, TABLE1, TABLE2, TableRow
from ultr.report.comparison import comparison_plots
from ultr.report.parts import Section, Table
from ultr.training.compare import Comparison

BASELINES1 = [row.entry for row in TABLE1 if row.entry not in (OPT, BAYES, IPW)]
BASELINES2 = ["dla", "regression-em", "pairwise-debias"]


def table1(lab: Lab) -> ExperimentResult:
    """Repeat Table 1: methods that learn from continuous labels (clicks and dwell time)."""
    available, absent = lab.find(["yahoo", "ml-1m", "mq2007", "synthetic"])
    rows = TABLE1 + (BEYOND1 if lab.budget.beyond else ())
    compared = lab.compare([lab.world(data) for data in available], [row.entry for row in rows], reference="pal-click")
    return _result(lab, "table1", "Table 1: continuous labels", rows, compared, _claims1, absent)


def table2(lab: Lab) -> ExperimentResult:
    """Repeat Table 2: methods that learn from clicks."""
    available, absent = lab.find(["yahoo", "mslr-web30k", "mq2007", "synthetic"])
    rows = TABLE2 + (BEYOND2 if lab.budget.beyond else ())
    worlds = [lab.world(data, clicks=True) for data in available]
    compared = lab.compare(worlds, [row.entry for row in rows], reference="dla")
    return _result(lab, "table2", "Table 2: clicks", rows, compared, _claims2, absent)


def _claims1(world: World, result: Comparison) -> list[Claim]:
    data, metric = TITLES.get(world.data, world.data), world.metrics[-1]
    entries = {row.entry for row in result.rows}
    harm = "A shallow tower on dwell time harms: PAL-Click above PAL-Click + PAL-DwellTime"
    claims = [
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
        claims.insert(2, claim_above(text, data, result, "pal-click:rows=all", "pal-click-dwell:rows=all", metric))
    return claims


def _claims2(world: World, result: Comparison) -> list[Claim]:
    data, metric = TITLES.get(world.data, world.data), world.metrics[-1]
    competitive = "loss_opt is competitive on clicks: not below the best of DLA, Regression EM, Pairwise Debiasing"
    return [
        claim_level(competitive, data, result, OPT, BASELINES2, metric),
        claim_above("loss_Bayes-IPW improves on loss_IPW", data, result, BAYES, IPW, metric),
        claim_above("loss_opt improves on loss_Bayes-IPW (Yahoo: similar)", data, result, OPT, BAYES, metric),
        claim_above("loss_opt beats the lower bound", data, result, OPT, "lambdarank", metric),
    ]


def _result(
    lab: Lab,
    name: str,
    title: str,
    rows: Sequence[TableRow],
    compared: dict[World, Comparison],
    claims_of: Callable[[World, Comparison], list[Claim]],
    absent: dict[str, str],
) -> ExperimentResult:
    budget = lab.budget
    about = (
        f"{lab.seeds} runs of {budget.steps} steps of 256 lists, hidden layers {'-'.join(map(str, budget.hidden))}. "
        f"The learning rate, one of {', '.join(f'{rate:g}' for rate in budget.rates)}, was selected on validation "
        "requests. Mean ± standard deviation over runs; * marks a difference from the reference with p < 0.05, paired. "
        + lab.feedback
    )
    sections = [
        table_section(TITLES.get(world.data, world.data), world, result, rows) for world, result in compared.items()
    ]
    tested = compared.items() if lab.seeds > 1 else ()
    claims = [claim for world, result in tested for claim in claims_of(world, result)]
    results: dict[str, Any] = {
        world.data: {**result.to_json(), "paper": _printed(rows, world.data)} for world, result in compared.items()
    }
    return ExperimentResult(name, f"{title} (budget: {budget.name})", about, sections, claims, results, absent)


def _printed(rows: Sequence[TableRow], data: str) -> dict[str, Any]:
    return {row.entry: [list(pair) for pair in row.printed[data]] for row in rows if data in row.printed}


def table_section(title: str, world: World, result: Comparison, rows: Sequence[TableRow]) -> Section:
    """Return the table and plots of a data set: our results and those in the paper, with gains over the reference."""
    in_paper = any(world.data in row.printed for row in rows)
    metrics = [metric.capitalize().replace("Ndcg", "NDCG") for metric in world.metrics]
    last = metrics[-1]
    reference = next(row for row in rows if row.entry == result.reference)
    head = ["method", "entry", "learning rate", *metrics, f"{last} over {reference.name}"]
    if in_paper:
        head += [f"paper {metric}" for metric in metrics] + [f"paper, over {reference.name}"]
    lines = []
    base = float(np.mean(row_of(result, result.reference).results[world.metrics[-1]]))
    for row in rows:
        ours = row_of(result, row.entry)
        cells = [row.name, row.entry, f"{ours.lr:g}"]
        for metric in world.metrics:
            values = ours.results[metric]
            star = "*" if metric in ours.against and ours.against[metric].significant else ""
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            cells.append(f"{np.mean(values):.4f} ± {spread:.4f}{star}")
        cells.append(f"{np.mean(ours.results[world.metrics[-1]]) / base - 1:+.2%}")
        if in_paper:
            printed = row.printed.get(world.data)
            if printed is None:
                cells += [""] * (len(CUTOFFS) + 1)
            else:
                cells += [f"{mean:.4f} ± {deviation:.4f}" for mean, deviation in printed]
                cells.append(f"{printed[-1][0] / reference.printed[world.data][-1][0] - 1:+.2%}")
        lines.append(cells)
    return Section(title, [Table(head, lines), *comparison_plots(result.to_json())])
