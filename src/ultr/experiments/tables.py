"""Tables 1 and 2 of the paper: every method tuned alike, beside what was printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ultr.compare import Comparison
from ultr.experiments.claims import Claim, claim_above, claim_above_all, claim_level, row_of
from ultr.experiments.lab import TITLES, Lab, Outcome, World, markdown_table
from ultr.experiments.paper import (
    BAYES,
    BEYOND1,
    BEYOND2,
    CUTOFFS,
    IPW,
    OPT,
    TABLE1,
    TABLE2,
    TableRow,
)
from ultr.plots import write_dot_plot

BASELINES1 = [row.entry for row in TABLE1 if row.entry not in (OPT, BAYES, IPW)]
BASELINES2 = ["dla", "regression-em", "pairwise-debias"]


def table1(lab: Lab) -> Outcome:
    """Continuous labels."""
    here, absent = lab.find(["yahoo", "ml-1m", "mq2007", "synthetic"])
    rows = TABLE1 + (BEYOND1 if lab.budget.beyond else ())
    found = lab.compare([World(data) for data in here], [row.entry for row in rows], reference="pal-click")
    claims = [claim for world, result in found.items() for claim in _claims1(world, result)] if lab.seeds > 1 else []
    return _outcome(lab, "table1", "Table 1: continuous labels", rows, found, claims, absent)


def table2(lab: Lab) -> Outcome:
    """Clicks."""
    here, absent = lab.find(["yahoo", "mslr-web30k", "mq2007", "synthetic"])
    rows = TABLE2 + (BEYOND2 if lab.budget.beyond else ())
    worlds = [World(data, clicks=True) for data in here]
    found = lab.compare(worlds, [row.entry for row in rows], reference="dla")
    claims = [claim for world, result in found.items() for claim in _claims2(world, result)] if lab.seeds > 1 else []
    return _outcome(lab, "table2", "Table 2: clicks", rows, found, claims, absent)


def _claims1(world: World, result: Comparison) -> list[Claim]:
    data, metric = TITLES.get(world.data, world.data), world.metrics[-1]
    entries = {row.entry for row in result.rows}
    harm = "A shallow tower on dwell time harms: PAL-Click above PAL-Click + PAL-DwellTime"
    found = [
        claim_above(
            "LambdaRank on biased labels is worse than pointwise", data, result, "pointwise", "lambdarank", metric
        ),
        claim_above(harm, data, result, "pal-click", "pal-click-dwell", metric),
        claim_above_all("loss_opt beats every baseline", data, result, OPT, BASELINES1, metric),
        claim_above("loss_Bayes-IPW improves on loss_IPW (MovieLens: similar)", data, result, BAYES, IPW, metric),
        claim_above("loss_opt improves on loss_Bayes-IPW", data, result, OPT, BAYES, metric),
    ]
    if "pal-click:rows=all" in entries:
        text = "The same, dwell learned from all rows"
        found.insert(2, claim_above(text, data, result, "pal-click:rows=all", "pal-click-dwell:rows=all", metric))
    return found


def _claims2(world: World, result: Comparison) -> list[Claim]:
    data, metric = TITLES.get(world.data, world.data), world.metrics[-1]
    competitive = "loss_opt is competitive on clicks: not below the best of DLA, Regression EM, Pairwise Debiasing"
    return [
        claim_level(competitive, data, result, OPT, BASELINES2, metric),
        claim_above("loss_Bayes-IPW improves on loss_IPW", data, result, BAYES, IPW, metric),
        claim_above("loss_opt improves on loss_Bayes-IPW (Yahoo: similar)", data, result, OPT, BAYES, metric),
        claim_above("loss_opt beats the lower bound", data, result, OPT, "lambdarank", metric),
    ]


def _outcome(
    lab: Lab,
    name: str,
    title: str,
    rows: Sequence[TableRow],
    found: dict[World, Comparison],
    claims: list[Claim],
    absent: dict[str, str],
) -> Outcome:
    lab.out.mkdir(parents=True, exist_ok=True)
    plots = []
    for world, result in found.items():
        plots.append(f"{name}-{world.data}.svg")
        write_dot_plot(lab.out / plots[-1], result)
    b = lab.budget
    network = "-".join(map(str, b.hidden))
    about = (
        f"{lab.seeds} runs, rate from {', '.join(f'{r:g}' for r in b.rates)} by validation, {network}, "
        f"{b.steps} steps of 256 lists. Mean ± deviation over runs; * differs from the reference, p < 0.05, paired."
    )
    titles = {world: TITLES.get(world.data, world.data) for world in found}
    sections = [about, *(table_section(titles[world], world, result, rows) for world, result in found.items())]
    figures: dict[str, Any] = {
        world.data: {**result.to_json(), "paper": _printed(rows, world.data)} for world, result in found.items()
    }
    return Outcome(name, f"{title} (budget: {b.name})", sections, claims, figures, absent, plots)


def _printed(rows: Sequence[TableRow], data: str) -> dict[str, Any]:
    return {row.entry: [list(pair) for pair in row.printed[data]] for row in rows if data in row.printed}


def table_section(title: str, world: World, result: Comparison, rows: Sequence[TableRow]) -> str:
    """A data set's table: what was found, and what was printed, each with the gain over the reference."""
    in_paper = any(world.data in row.printed for row in rows)
    metrics = [metric.capitalize().replace("Ndcg", "NDCG") for metric in world.metrics]
    last = metrics[-1]
    reference = next(row for row in rows if row.entry == result.reference)
    heads = ["method", "as", "rate", *metrics, f"{last} over {reference.name}"]
    if in_paper:
        heads += [f"paper {metric}" for metric in metrics] + [f"paper, over {reference.name}"]
    lines = []
    base = float(np.mean(row_of(result, result.reference).figures[world.metrics[-1]]))
    for row in rows:
        got = row_of(result, row.entry)
        cells = [row.name, f"`{row.entry}`", f"{got.lr:g}"]
        for metric in world.metrics:
            values = got.figures[metric]
            star = "*" if metric in got.against and got.against[metric].significant else ""
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            cells.append(f"{np.mean(values):.4f} ± {spread:.4f}{star}")
        cells.append(f"{np.mean(got.figures[world.metrics[-1]]) / base - 1:+.2%}")
        if in_paper:
            printed = row.printed.get(world.data)
            if printed is None:
                cells += [""] * (len(CUTOFFS) + 1)
            else:
                cells += [f"{mean:.4f} ± {deviation:.4f}" for mean, deviation in printed]
                cells.append(f"{printed[-1][0] / reference.printed[world.data][-1][0] - 1:+.2%}")
        lines.append(cells)
    return f"## {title}\n\n" + markdown_table(heads, lines)
