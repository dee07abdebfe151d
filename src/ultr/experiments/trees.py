"""The experiment `trees`: pairwise-em with boosted trees, compared with the objectives of LightGBM and XGBoost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ultr.experiments.lab import QUICK, Claim, ExperimentResult, Lab, World, claim_above_all, claim_level, corrected
from ultr.experiments.paper import TableRow
from ultr.experiments.tables import table_section
from ultr.training.comparing.plan import TREE_RATES, Entry, Plan, compare_all
from ultr.training.comparing.results import Comparison

RUNS = 5
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


def baselines(world: World) -> dict[str, tuple[TableRow, ...]]:
    """Return library -> rows with its own objectives, for the kind of label of a world."""
    if not world.clicks:
        return ON_VALUES
    return {library: (*ON_CLICKS[library], ON_VALUES[library][-1]) for library in OURS}


def tree_tables(lab: Lab) -> ExperimentResult:
    """Compare boosted trees on all available data sets, with continuous labels and with clicks."""
    available, absent = lab.find(["ml-1m", "mq2007", "synthetic"])
    worlds = [world for clicks in (False, True) for world in lab.worlds(available, clicks=clicks)]
    rows = {world: [*OUR_ROWS, *(row for others in baselines(world).values() for row in others)] for world in worlds}
    plans = [_plan(lab, world, [row.entry for row in rows[world]]) for world in worlds]
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
    claims = corrected([claim for world, result in tested for claim in _claims(world, result)])
    results = {world.name: result.to_json() for world, result in compared.items()}
    title = f"Trees: LightGBM and XGBoost (budget: {lab.budget.name})"
    return ExperimentResult("trees", title, about, sections, claims, results, absent)


def _plan(lab: Lab, world: World, entries: Sequence[str]) -> Plan:
    quick = lab.budget is QUICK
    plan = lab.plan(world, [], reference="")
    return replace(
        plan,
        longest=1,
        base=plan.base.with_options(ranker="lightgbm", **({"steps": QUICK_ROUNDS} if quick else {})),
        entries=[Entry.parse(entry, ["lightgbm"]) for entry in entries],
        out=lab.out / "runs" / lab.budget.name / "trees" / world.name,
        seeds=lab.runs or (2 if quick else RUNS),
        rates=TREE_RATES[1:2] if quick else TREE_RATES,
    )


def _claims(world: World, result: Comparison) -> list[Claim]:
    data, metric = world.title, world.metrics[-1]
    claims = []
    for library, rows in baselines(world).items():
        others, name = [row.entry for row in rows], {"lightgbm": "LightGBM", "xgboost": "XGBoost"}[library]
        if world.clicks:
            text = f"On clicks, posterior pairs in {name} are not below the best of its own options"
            claims.append(claim_level(text, data, result, OURS[library], others, metric))
        else:
            text = f"On continuous labels, posterior pairs in {name} beat each of its own options"
            claims.append(claim_above_all(text, data, result, OURS[library], others, metric))
    return claims
