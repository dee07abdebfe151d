"""Boosted trees: pairs weighed by a bias model beside what LightGBM and XGBoost have of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ultr.compare import TREE_RATES, Comparison, Entry, Plan, compare_all
from ultr.experiments.claims import Claim, claim_above_all, claim_level
from ultr.experiments.lab import QUICK, TITLES, Lab, Outcome, World
from ultr.experiments.paper import TableRow
from ultr.experiments.tables import table_section
from ultr.plots import write_dot_plot
from ultr.training import TREE_TRAINING

RUNS = 5
SESSIONS, MORE_SESSIONS = 20_000, {"ml-1m": 60_000}  # of users, drawn once
QUICK_SESSIONS, QUICK_ROUNDS = 2_000, 50
OURS = {"lightgbm": "pairwise-em", "xgboost": "pairwise-em:ranker=xgboost"}


def _row(name: str, entry: str) -> TableRow:
    return TableRow(name, entry)


OUR_ROWS = (
    _row("posterior pairs, LightGBM", OURS["lightgbm"]),
    _row("posterior pairs, XGBoost", OURS["xgboost"]),
    _row("loss_opt, LightGBM", "pairwise-em:loss=opt"),
)
ON_CLICKS = {
    "lightgbm": (
        _row("LightGBM lambdarank, clicks", "lambdarank:labels=click"),
        _row("LightGBM lambdarank + position, clicks", "lambdarank:labels=click:correction=own"),
    ),
    "xgboost": (
        _row("XGBoost rank:ndcg, clicks", "lambdarank:labels=click:ranker=xgboost"),
        _row("XGBoost lambdarank_unbiased, clicks", "lambdarank:labels=click:correction=own:ranker=xgboost"),
    ),
}
ON_VALUES = {
    "lightgbm": (
        *ON_CLICKS["lightgbm"],  # as it refuses continuous labels: the better of clicks and buckets counts
        _row("LightGBM lambdarank, buckets", "lambdarank:labels=buckets"),
        _row("LightGBM lambdarank + position, buckets", "lambdarank:labels=buckets:correction=own"),
        _row("LightGBM regression", "pointwise"),
    ),
    "xgboost": (
        _row("XGBoost rank:ndcg, values", "lambdarank:ranker=xgboost"),
        _row("XGBoost lambdarank_unbiased, values", "lambdarank:correction=own:ranker=xgboost"),
        _row("XGBoost regression", "pointwise:ranker=xgboost"),
    ),
}


def libraries_own(world: World) -> dict[str, tuple[TableRow, ...]]:
    """What each library has for the kind of label."""
    if not world.clicks:
        return ON_VALUES
    return {library: (*ON_CLICKS[library], ON_VALUES[library][-1]) for library in OURS}


def tree_tables(lab: Lab) -> Outcome:
    """Both kinds of label, on every set that is here."""
    here, absent = lab.find(["ml-1m", "mq2007", "synthetic"])
    worlds = [World(data, clicks=clicks) for clicks in (False, True) for data in here]
    rows = {world: [*OUR_ROWS, *(row for own in libraries_own(world).values() for row in own)] for world in worlds}
    plans = [_plan(lab, world, [row.entry for row in rows[world]]) for world in worlds]
    found = dict(zip(worlds, compare_all(plans, lab.workers, lab.on_done), strict=True))
    lab.out.mkdir(parents=True, exist_ok=True)
    plots = []
    for world, result in found.items():
        plots.append(f"trees-{world.data}-{'clicks' if world.clicks else 'continuous'}.svg")
        write_dot_plot(lab.out / plots[-1], result)
    sessions = ", ".join(dict.fromkeys(f"{plan.base.sessions:,} ({plan.base.data})" for plan in plans))
    base, rates = plans[0].base, " or ".join(f"{rate:g}" for rate in plans[0].rates)
    about = (
        f"{plans[0].seeds} runs, each of {sessions} sessions drawn once; rate {rates} and rounds, "
        f"{base.training.steps} at most, by validation. Mean ± deviation over runs; * differs from posterior pairs "
        "with LightGBM, p < 0.05, paired."
    )
    sections = [about, *(_section(world, result, rows[world]) for world, result in found.items())]
    claims = (
        [claim for world, result in found.items() for claim in _claims(world, result)] if plans[0].seeds > 1 else []
    )
    figures = {world.name: result.to_json() for world, result in found.items()}
    title = f"Trees: LightGBM and XGBoost (budget: {lab.budget.name})"
    return Outcome("trees", title, sections, claims, figures, absent, plots)


def _plan(lab: Lab, world: World, entries: Sequence[str]) -> Plan:
    quick = lab.budget is QUICK
    plan = lab.plan(world, [], reference="", rate_of={})
    training = replace(TREE_TRAINING, bias_steps=plan.base.training.bias_steps, device=lab.device)
    base = replace(
        plan.base,
        ranker="lightgbm",
        ranker_options={},
        sessions=QUICK_SESSIONS if quick else MORE_SESSIONS.get(world.data, SESSIONS),
        training=replace(training, steps=QUICK_ROUNDS) if quick else training,
    )
    return replace(
        plan,
        base=base,
        entries=[Entry.parse(entry, "lightgbm") for entry in entries],
        out=lab.out / "runs" / lab.budget.name / "trees" / world.name,
        seeds=lab.runs or (2 if quick else RUNS),
        rates=TREE_RATES[1:2] if quick else TREE_RATES,
    )


def _section(world: World, result: Comparison, rows: Sequence[TableRow]) -> str:
    kind = "clicks" if world.clicks else "continuous label"
    return table_section(f"{TITLES.get(world.data, world.data)}, {kind}", world, result, rows)


def _claims(world: World, result: Comparison) -> list[Claim]:
    data, metric = TITLES.get(world.data, world.data), world.metrics[-1]
    found = []
    for library, own in libraries_own(world).items():
        others, name = [row.entry for row in own], {"lightgbm": "LightGBM", "xgboost": "XGBoost"}[library]
        if world.clicks:
            text = f"On clicks, posterior pairs in {name} are not below the best of its own options"
            found.append(claim_level(text, data, result, OURS[library], others, metric))
        else:
            text = f"On continuous labels, posterior pairs in {name} beat each of its own options"
            found.append(claim_above_all(text, data, result, OURS[library], others, metric))
    return found
