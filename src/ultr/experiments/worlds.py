"""The experiment `worlds`: which method is best for which users, log and label, and how far the default is from it.

It is a selection of the product of data sets, users, sizes of the log, labels and logging rankers, in which every value
occurs often. Half of the cells may be used to choose defaults; the others are only reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ultr.datasets.initial import RANDOM_SHARE, Logging, initial_rankers
from ultr.datasets.users import make_user
from ultr.evaluation.off_policy import request_metrics
from ultr.evaluation.scores import mean_with_interval, paired_test
from ultr.experiments.lab import OFF_POLICY, QUICK, TITLES, ExperimentResult, Lab, World, row_of
from ultr.experiments.paper import DEFAULT
from ultr.report.page import Section, Table, Text
from ultr.report.plots import heat_map
from ultr.training.comparing.plan import SESSIONS, Plan, compare_all
from ultr.training.comparing.results import Comparison
from ultr.training.data import cached_dataset

BOUND = "pairwise-em:theta=oracle"
METHODS = (
    DEFAULT,
    BOUND,
    "pairwise-em:loss=opt-posterior",
    "pairwise-em:loss=opt",
    "pairwise-em:loss=bayes-ipw",
    "pairwise-em:loss=ipw",
    "direct",
    "doubly-robust",
    "pal-click",
    "sum-click",
    "regression-em",
    "dla",
    "pairwise-debias",
    "ubm",
    "ccm",
    "pointwise",
    "lambdarank",
)
ONLY_CLICKS = ("regression-em", "dla", "pairwise-debias", "ubm", "ccm")
ONLY_VALUES = ("sum-click",)
KNOWN_THETA = ("pbm", "trust", "clickbait", "watch")  # users whose examination does not depend on other clicks
USERS: tuple[tuple[str, float], ...] = (
    ("pbm", 0.0),
    ("pbm", 0.5),
    ("pbm", 1.0),
    ("pbm", 2.0),
    ("trust", 1.0),
    ("cascade", 1.0),
    ("watch", 1.0),
    ("clickbait", 1.0),
)
DATA = ("synthetic", "ml-1m", "mq2007")
LOGGINGS: tuple[Logging, ...] = ("linear", "network", "both", "randomised")
SIZES = (3_000, 300_000)
RATE = 0.01  # learning rate of all methods
SEEDS = 5
SHOWN = 5.0  # largest difference that has a colour of its own, in %
CELLS_OF_DATA = 16  # of each data set
STEEPEST = 2.0  # eta of the users who look least at low places


def cells(data: Sequence[str] = DATA) -> dict[World, bool]:
    """Return the worlds of the grid with these data sets, and whether defaults may be chosen by them.

    Every second one of each data set may choose; it has a counterpart that does not, with the same users, in the next
    data set.
    """
    found = []
    for place, name in enumerate(DATA):
        for number, (users, eta) in enumerate(USERS):
            logging = LOGGINGS[(number + place) % len(LOGGINGS)]
            found.append(World(name, clicks=False, eta=eta, users=users, logging=logging))
        for number, size in enumerate(SIZES):
            for clicks in (False, True):
                users = ("pbm", "trust")[(number + clicks + place) % 2]
                logging = LOGGINGS[(2 * number + clicks + place) % len(LOGGINGS)]
                found.append(World(name, clicks=clicks, users=users, sessions=size, logging=logging))
        for number, (users, eta) in enumerate((("pbm", 1.0), ("pbm", 2.0), ("trust", 1.0), ("cascade", 1.0))):
            logging = LOGGINGS[(number + place + 1) % len(LOGGINGS)]
            found.append(World(name, clicks=True, eta=eta, users=users, logging=logging))
    chooses = [(i + i // CELLS_OF_DATA) % 2 == 0 for i in range(len(found))]
    return {world: chosen for world, chosen in zip(found, chooses, strict=True) if world.data in data}


@dataclass(frozen=True)
class Cell:
    """The result of a cell: its world, the comparison, and the metric of the logging ranker by seed."""

    world: World
    chooses: bool  # whether defaults may be chosen by it
    compared: Comparison
    logged: list[float]

    @property
    def metric(self) -> str:
        return self.world.metrics[-1]

    def mean(self, entry: str) -> float:
        return float(np.mean(row_of(self.compared, entry).results[self.metric]))

    def has(self, entry: str) -> bool:
        return any(row.entry == entry for row in self.compared.rows)

    @property
    def methods(self) -> list[str]:
        """The methods that a user could choose, so not the bound."""
        return [row.entry for row in self.compared.rows if row.entry != BOUND]

    @property
    def first(self) -> str:
        return max(self.methods, key=self.mean)

    def behind(self, entry: str) -> float:
        """Return how far the default is below a method, relative to the default; negative if it is above."""
        return self.mean(entry) / self.mean(DEFAULT) - 1

    def differs(self, entry: str) -> bool:
        """Return whether a method differs from the default in a test paired over seeds, with Holm's correction."""
        if entry == DEFAULT:
            return False
        test = row_of(self.compared, entry).against[self.metric]
        corrected = test.seeds.p if test.holm is None else test.holm[0]
        return corrected < 0.05

    def significantly_behind(self, entry: str) -> bool:
        """Return whether the default is below a method, and the two differ."""
        return self.behind(entry) > 0 and self.differs(entry)

    @property
    def below_logged(self) -> bool:
        """Whether the default is significantly below the ranker that wrote the log, in a test paired over seeds."""
        test = paired_test(np.array(row_of(self.compared, DEFAULT).results[self.metric]), np.array(self.logged))
        return test.difference < 0 and test.p < 0.05

    def spread(self, entry: str) -> float:
        """Return the standard deviation of a method over seeds."""
        return float(np.std(row_of(self.compared, entry).results[self.metric], ddof=1))

    @property
    def is_first(self) -> bool:
        """Whether the default is first, or not significantly below any method."""
        return not any(self.significantly_behind(entry) for entry in self.methods)


def compare_worlds(lab: Lab) -> ExperimentResult:
    """Compare all methods with the default in a grid of simulated worlds."""
    available, absent = lab.find(DATA)
    grid = cells(available)
    if lab.budget.name == QUICK.name:
        few = [*grid.items()][:4]
        grid = {replace(world, sessions=min(world.sessions, QUICK.sessions)): chooses for world, chooses in few}
    plans = [_plan(lab, world) for world in grid]
    compared = compare_all(plans, lab.workers, lab.on_done)
    found = [
        Cell(world, chooses, result, _logged(lab, world, plan))
        for (world, chooses), plan, result in zip(grid.items(), plans, compared, strict=True)
    ]
    title = f"Which method is best in which world (budget: {lab.budget.name})"
    results = {
        _name(cell.world): {"may_choose": cell.chooses, "logging_ranker": cell.logged, **cell.compared.to_json()}
        for cell in found
    }
    sections = [_summary(found), _methods(found), _map(found), _details(found)]
    return ExperimentResult("worlds", title, _about(len(found), plans[0].seeds), sections, [], results, absent)


def _plan(lab: Lab, world: World) -> Plan:
    skipped = {*(ONLY_VALUES if world.clicks else ONLY_CLICKS), *(() if world.users in KNOWN_THETA else (BOUND,))}
    entries = [entry for entry in METHODS if entry not in skipped]
    plan = lab.plan(replace(world, select=OFF_POLICY), entries, reference=DEFAULT)
    seeds = lab.runs or min(SEEDS, lab.budget.runs)
    metrics = world.metrics[-1:]
    return replace(plan, seeds=seeds, rates=(RATE,), dropouts=(), limits=(), longest=1, metrics=metrics)


def _logged(lab: Lab, world: World, plan: Plan) -> list[float]:
    """Return the metric of the logging ranker on the test requests, by seed."""
    dataset = cached_dataset(world.data, lab.data_dir)
    user = make_user(world.users, **{**plan.base.simulation.user_options, "max_grade": dataset.max_grade})
    metric, found = world.metrics[-1], []
    for seed in range(plan.seeds):
        rankers = initial_rankers(dataset, kind=world.logging, share=plan.base.simulation.share, seed=seed)
        values = [
            request_metrics(dataset.test, [metric], user=user, label=world.label)(each(dataset.test.features))
            for each in rankers
        ]
        found.append(float(np.mean([by_request[metric].mean() for by_request in values])))
    return found


def _about(count: int, seeds: int) -> str:
    return (
        f"{count} worlds. A world has a data set; users (pbm with its eta, trust, cascade, watch or clickbait); a "
        "label (values: clicks and dwell time, judged by Reward@10; or clicks, judged by NDCG@10); a number of "
        "sessions; and rankers that ordered what users saw (linear, a network, both, or linear with "
        f"{RANDOM_SHARE:.0%} of the sessions in random order). All methods of a run learn from the same sessions, as "
        f"networks with a learning rate of {RATE:g}; off-policy values, without true labels, choose the step. The "
        "bound is the default with the true examination of the users; it does not know their trust. Tests are paired "
        f"over {seeds} seeds, with Holm's correction. `ultr train` adds trees to the networks of the default; they are "
        "not part of this."
    )


def _name(world: World) -> str:
    users = f"{world.users} {world.eta:g}" if world.users == "pbm" else world.users
    label = "clicks" if world.clicks else "values"
    return f"{TITLES.get(world.data, world.data)}, {users}, {label}, {world.sessions:,}, {world.logging}"


def _summary(found: Sequence[Cell]) -> Section:
    """Return what the default reaches on all cells, and on parts of them."""
    parts: Mapping[str, list[Cell]] = {
        "all": list(found),
        "may choose defaults": [cell for cell in found if cell.chooses],
        "kept apart": [cell for cell in found if not cell.chooses],
        **{f"{n:,} sessions": [c for c in found if c.world.sessions == n] for n in sorted({*SIZES, SESSIONS})},
        **{TITLES.get(name, name): [cell for cell in found if cell.world.data == name] for name in DATA},
    }
    head = [
        "cells",
        "number",
        "first or level with it",
        "below pointwise",
        "below the logging ranker",
        "bound over the default",
    ]
    rows = []
    for name, part in parts.items():
        bounded = [cell.behind(BOUND) for cell in part if cell.has(BOUND)]
        counts = (
            len(part),
            sum(cell.is_first for cell in part),
            sum(cell.significantly_behind("pointwise") for cell in part),
            sum(cell.below_logged for cell in part),
        )
        rows += [[name, *map(str, counts), f"{np.mean(bounded):+.2%}" if bounded else ""]] if part else []
    said = "'below' counts cells in which the default is significantly below. The bound is a mean over cells."
    return Section("The default", [Table(head, rows), Text(f"{said}{_spread(found)}")])


def _spread(found: Sequence[Cell]) -> str:
    """Return how much the default varies over seeds, against PAL-Click, with users who look at the top places."""
    steep = [cell for cell in found if cell.world.eta == STEEPEST]
    if not steep:
        return ""
    ratio = np.mean([cell.spread(DEFAULT) for cell in steep]) / np.mean([cell.spread("pal-click") for cell in steep])
    return f" At eta {STEEPEST:g} the default's standard deviation over seeds is {ratio:.2f} times that of PAL-Click."


def _methods(found: Sequence[Cell]) -> Section:
    """Return how each method differs from the default, over all cells and by data set."""
    head = ["method", "cells", "mean difference", "95% interval", "above it", "of these *", "below it", "of these *"]
    shown = [name for name in DATA if any(cell.world.data == name for cell in found)]
    rows = []
    for entry in (each for each in METHODS if each != DEFAULT):
        part = [cell for cell in found if cell.has(entry)]
        if not part:
            continue
        mean = mean_with_interval(np.array([cell.behind(entry) for cell in part]))
        above, below = ([cell for cell in part if sign * cell.behind(entry) > 0] for sign in (1, -1))
        counts = [f"{n}" for side in (above, below) for n in (len(side), sum(cell.differs(entry) for cell in side))]
        of_data = [[cell.behind(entry) for cell in part if cell.world.data == name] for name in shown]
        by_data = [f"{np.mean(values):+.2%}" if values else "" for values in of_data]
        interval = f"{mean.low:+.2%} to {mean.high:+.2%}"
        rows.append([entry, f"{len(part)}", f"{mean.mean:+.2%}", interval, *counts, *by_data])
    table = Table([*head, *(TITLES.get(name, name) for name in shown)], rows)
    said = (
        "Differences from the default: means over cells, their intervals over cells, and the number of cells in which "
        "a method is above or below the default; * counts those in which the two differ significantly."
    )
    return Section("Against each method", [Text(said), table])


def _map(found: Sequence[Cell]) -> Section:
    entries = [entry for entry in METHODS if entry != DEFAULT]
    plot = heat_map(
        "Difference from the default in %",
        [[100 * cell.behind(entry) if cell.has(entry) else None for entry in entries] for cell in found],
        columns=entries,
        rows=[_name(cell.world) for cell in found],
        x="method",
        y="world",
        caption="Above 0 the method is better than the default.",
        smallest=-SHOWN,
        largest=SHOWN,
    )
    return Section("Who is first where", [plot])


def _details(found: Sequence[Cell]) -> Section:
    head = [
        "world",
        "use",
        "the default",
        "logging ranker",
        "first",
        "first over the default",
        "bound over the default",
    ]
    rows: list[list[str]] = []
    for cell in found:
        star = "*" if cell.significantly_behind(cell.first) else ""
        rows.append(
            [
                _name(cell.world),
                "choose" if cell.chooses else "apart",
                f"{cell.mean(DEFAULT):.4f}",
                f"{np.mean(cell.logged):.4f}",
                cell.first,
                f"{cell.behind(cell.first):+.2%}{star}",
                f"{cell.behind(BOUND):+.2%}" if cell.has(BOUND) else "",
            ]
        )
    return Section("Cell by cell", [Table(head, rows)])
