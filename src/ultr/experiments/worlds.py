"""The experiment `worlds`: is the default as good as every method that a user could choose, in simulated worlds?

docs/protocol.md was written before it was run: the question, the margin, the worlds, the seeds, how settings
are chosen, and the tests. A world's result is one file, so that an experiment can be continued on another machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit

from ultr.datasets.initial import Logging, initial_rankers
from ultr.datasets.users import make_user
from ultr.evaluation.off_policy import request_metrics
from ultr.evaluation.scores import LIKELIHOOD, holm
from ultr.experiments.lab import NETWORK, OFF_POLICY, QUICK, TITLES, ExperimentResult, Lab, World, provenance
from ultr.report.page import Section, Table, Text
from ultr.report.plots import heat_map
from ultr.training.comparing.plan import Entry, Plan, compare_all
from ultr.training.comparing.results import Comparison, Row
from ultr.training.config import make_config
from ultr.training.data import cached_dataset, network_sizes
from ultr.utils.jsonfiles import check_format, content_errors, read_json, write_json

FORMAT = 1
MARGIN = 0.01  # of the other method's metric: the default may be this much worse and still counts as level
SEEDS = 20  # logs of the default, and of its closest rivals
FEW = 5  # logs of the other methods
CLOSEST = 5  # rivals with all logs: the best by the first `FEW`
TUNING = 2  # logs that choose the settings of a method
BIAS_STEPS = 1000  # largest number of steps of a bias model; other methods have them too
LONGEST = 2  # times its steps that a method may have if it still improves

DEFAULT = "pairwise-em:ranker=mlp+lightgbm"  # what `ultr train` trains on a log: a network with an anchor, and trees
NETWORK_OF_DEFAULT = "pairwise-em"
KNOWN = "pairwise-em:theta=oracle"
KNOWN_TRUST = "affine:theta=oracle:loss=listwise"
PARTS = (NETWORK_OF_DEFAULT, KNOWN, KNOWN_TRUST)  # not rivals: a part of the default, and known examination and trust
RIVALS = (
    "direct",
    "direct:networks=2",
    "direct:networks=2:anchor=linear",
    "direct:ranker=lightgbm",
    "doubly-robust",
    "pal-click",
    "pal-click:anchor=linear",
    "sum-click",
    "position-feature",
    "pairwise-em:loss=opt",
    "pairwise-em:loss=bayes-ipw",
    "pairwise-em:loss=ipw",
    "pointwise",
    "lambdarank",
    "lambdarank:labels=click:ranker=lightgbm",
    "pointwise:ranker=lightgbm",
)
OF_CLICKS = ("regression-em", "dla", "pairwise-debias", "ipw-listwise", "ubm")
OF_TRUST = ("affine", "affine:loss=listwise", "pairwise-em:trust=clicks")
OF_SEQUENCES = ("cascade", "dcm", "sdbn", "dbn", "ccm")
ONLY_VALUES = ("sum-click",)  # with clicks alone it is `position-feature` by another name
KNOWN_THETA = ("pbm", "trust", "clickbait", "watch")  # users whose examination does not depend on other clicks
SEQUENCES = ("cascade", "dcm")

DATA = ("synthetic", "synthetic-trees", "ml-1m", "mq2007")
LOGGINGS: tuple[Logging, ...] = ("linear", "network", "both", "randomised", "weak", 0.3)
SESSIONS = 8_000
SHOWN = 5.0  # largest difference that has a colour of its own, in %


def worlds_of(name: str) -> list[World]:
    """Return the eight worlds of a data set; the rankers that wrote the logs rotate from one data set to the next."""
    values: dict[str, Any] = {"data": name, "sessions": SESSIONS}
    clicks = {**values, "clicks": True}
    odd = DATA.index(name) % 2
    made = [
        World(**values),
        World(**values, eta=2.0) if odd else World(**values, curve="reciprocal", items=20),
        World(**values, users="trust"),
        World(**values, users="clickbait" if odd else "watch"),
        World(**clicks),
        World(**clicks, users="cascade" if odd else "dcm"),
        World(**{**clicks, "sessions": 50_000}, curve="rare" if odd else "fold"),
        World(**{**clicks, "sessions": 2_000}, users="trust"),
    ]
    loggings = islice(cycle(LOGGINGS), DATA.index(name), None)
    return [replace(world, logging=logging) for world, logging in zip(made, loggings, strict=False)]


def entries_of(world: World) -> list[str]:
    """Return the methods that are compared in a world: the default, its parts, and all rivals that can be used."""
    rivals = [*RIVALS, *(OF_TRUST if world.users == "trust" else ())]
    if world.clicks:
        rivals = [each for each in rivals if each not in ONLY_VALUES]
        rivals += [*OF_CLICKS, *(OF_SEQUENCES if world.users in SEQUENCES else ())]
    known = [*([KNOWN] if world.users in KNOWN_THETA else []), *([KNOWN_TRUST] if world.users == "trust" else [])]
    return [DEFAULT, NETWORK_OF_DEFAULT, *known, *rivals]


def is_rival(entry: str) -> bool:
    return entry not in (DEFAULT, *PARTS)


# --- The result of a world --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Against:
    """The default minus another method, as a share of the method's mean, with its error over logs and requests.

    Logs and test requests are crossed: the variance of the mean is at most the sum of those over logs and requests.
    """

    entry: str
    seeds: int
    difference: float
    error_of_seeds: float
    error_of_requests: float
    requests: int

    @property
    def error(self) -> float:
        return math.hypot(self.error_of_seeds, self.error_of_requests)

    @property
    def freedom(self) -> float:
        """The degrees of freedom of the error (Welch-Satterthwaite)."""
        parts = (self.error_of_seeds**4 / (self.seeds - 1), self.error_of_requests**4 / (self.requests - 1))
        return self.error**4 / max(sum(parts), 1e-300)

    def p_above(self, least: float) -> float:
        """Return the p value of the hypothesis that the true difference is at most `least`."""
        return float(stdtr(self.freedom, -(self.difference - least) / max(self.error, 1e-12)))

    @property
    def p(self) -> float:
        """The two-sided p value of no difference."""
        return 2 * min(self.p_above(0.0), 1 - self.p_above(0.0))

    @property
    def half_width(self) -> float:
        """Half of the width of the 95% interval."""
        return float(stdtrit(self.freedom, 0.975)) * self.error

    @property
    def is_level(self) -> bool:
        """Whether both are within the margin of each other, by two one-sided tests at 5%."""
        return self.p_above(-MARGIN) < 0.05 and 1 - self.p_above(MARGIN) < 0.05


@dataclass(frozen=True)
class WorldResult:
    """All that is kept of a world: the metric of each method by log, and its setting."""

    name: str
    metric: str
    values: Mapping[str, list[float]]  # entry -> metric by log
    settings: Mapping[str, str]
    against: Mapping[str, Against]
    logged: list[float]  # metric of the rankers that wrote the logs
    made: Mapping[str, str]

    def save(self, path: Path) -> None:
        write_json(path, {"format": FORMAT, **asdict(self)})

    @staticmethod
    def load(path: Path) -> WorldResult:
        content = read_json(path)
        check_format(content, FORMAT, what="the result of a world", where=path, hint="remove it and run again")
        with content_errors("the result of a world cannot be read", where=path, hint="remove it and run again"):
            content.pop("format")
            against = {entry: Against(**each) for entry, each in content.pop("against").items()}
            return WorldResult(**content, against=against)

    @property
    def rivals(self) -> list[Against]:
        return [each for entry, each in self.against.items() if is_rival(entry)]

    def mean(self, entry: str) -> float:
        return float(np.mean(self.values[entry]))

    @property
    def not_inferior(self) -> bool:
        """Whether the default is above every rival less the margin, by one-sided tests with Holm's correction."""
        return max(holm([each.p_above(-MARGIN) for each in self.rivals])) < 0.05

    @property
    def verdicts(self) -> dict[str, str]:
        """Return rival -> win, loss, level or open, of the default; wins and losses with Holm's correction."""
        rivals = self.rivals
        corrected = holm([each.p for each in rivals])
        found = {}
        for each, p in zip(rivals, corrected, strict=True):
            verdict = "level" if each.is_level else "open"
            if p < 0.05:
                verdict = "win" if each.difference > 0 else "loss"
            found[each.entry] = verdict
        return found

    @property
    def closest(self) -> Against:
        """The rival with the largest mean."""
        return min(self.rivals, key=lambda each: each.difference)


def world_result(world: World, first: Comparison, more: Comparison, logged: list[float]) -> WorldResult:
    """Return what is kept of a world: of `more`, with all logs, where a method is in it, else of `first`."""
    metric = world.metrics[-1]
    values, settings, against = {}, {}, {}
    for comparison in (first, more):
        default = next(row for row in comparison.rows if row.entry == DEFAULT)
        for row in comparison.rows:
            values[row.entry], settings[row.entry] = row.results[metric], str(row.setting)
            if row is not default:
                against[row.entry] = difference(default, row, metric)
    made = provenance("ultr reproduce worlds")
    return WorldResult(title_of(world), metric, values, settings, against, logged, made)


def difference(default: Row, other: Row, metric: str) -> Against:
    """Return the default minus another method over the same logs and test requests."""
    over_seeds = np.subtract(default.results[metric], other.results[metric])
    over_requests = default.by_request[metric] - other.by_request[metric]
    scale = float(np.mean(other.results[metric]))
    of_seeds, of_requests = (
        float(np.std(each, ddof=1) / len(each) ** 0.5) / scale for each in (over_seeds, over_requests)
    )
    mean = float(over_seeds.mean()) / scale
    return Against(other.entry, len(over_seeds), mean, of_seeds, of_requests, len(over_requests))


def title_of(world: World) -> str:
    users = f"{world.users} {world.eta:g}" if world.users == "pbm" else world.users
    curve = f", {world.curve} curve" if world.curve else ""
    items = f", {world.items} items" if world.items != World.items else ""
    label = "clicks" if world.clicks else "values"
    data = TITLES.get(world.data, world.data)
    return f"{data}, {users}{curve}{items}, {label}, {world.sessions:,}, {world.logging}"


# --- The experiment ---------------------------------------------------------------------------------------------------


def compare_worlds(lab: Lab) -> ExperimentResult:
    """Compare the default with every method that a user could choose, in a grid of simulated worlds."""
    available, absent = lab.find(DATA)
    grid = [world for name in DATA if name in available for world in worlds_of(name)]
    if lab.budget.name == QUICK.name:
        grid = [replace(world, sessions=min(world.sessions, lab.budget.sessions)) for world in (grid[0], grid[4])]
    files = {world: lab.out / "worlds" / f"{world.name.replace('/', '-')}.json" for world in grid}
    missing = [world for world in grid if not files[world].is_file()]
    for name in dict.fromkeys(world.data for world in missing):
        part = [world for world in missing if world.data == name]
        for world, result in zip(part, _results(lab, part), strict=True):
            files[world].parent.mkdir(parents=True, exist_ok=True)
            result.save(files[world])
    found = [(world, WorldResult.load(files[world])) for world in grid]
    title = f"Is the default as good as every other method? (budget: {lab.budget.name})"
    results = {each.name: asdict(each) for _, each in found}
    sections = [_summary(found), _methods(found), _map(found), _details(found)]
    return ExperimentResult("worlds", title, _about(found), sections, [], results, absent)


def _results(lab: Lab, worlds: Sequence[World]) -> list[WorldResult]:
    """Return the results of worlds of one data set; the first one with each label chooses settings for the others."""
    most = lab.runs or (SEEDS if lab.budget.name != QUICK.name else lab.budget.runs)
    plans = [_plan(lab, world, min(FEW, most)) for world in worlds]
    tuning = [next(i for i, other in enumerate(worlds) if other.clicks == world.clicks) for world in worlds]
    chosen = sorted(set(tuning))
    tuned = dict(zip(chosen, compare_all([plans[i] for i in chosen], lab.workers, lab.on_done), strict=True))
    plans = [
        plan
        if i == number
        else replace(plan, settings={row.entry: replace(row.setting, longer=1) for row in tuned[i].rows})
        for number, (plan, i) in enumerate(zip(plans, tuning, strict=True))
    ]
    first = compare_all(plans, lab.workers, lab.on_done)
    longer = [_of_closest(plan, result, most) for plan, result in zip(plans, first, strict=True)]
    more = compare_all(longer, lab.workers, lab.on_done)
    logged = [_logged(lab, world, plan) for world, plan in zip(worlds, longer, strict=True)]
    return [world_result(*each) for each in zip(worlds, first, more, logged, strict=True)]


def _plan(lab: Lab, world: World, seeds: int) -> Plan:
    plan = lab.plan(replace(world, select=OFF_POLICY), entries_of(world), reference=DEFAULT)
    base = make_config(world.data, data_dir=lab.data_dir, label=world.label, select=LIKELIHOOD, device=lab.device)
    base = base.model_copy(update={"simulation": plan.base.simulation})
    plan = replace(plan, seeds=seeds, dropouts=(), limits=(), metrics=world.metrics[-1:])
    if lab.budget.name == QUICK.name:
        network = {name: getattr(lab.budget, name) for name in NETWORK}
        return replace(plan, base=base.with_options(**network), longest=1)
    width = cached_dataset(world.data, lab.data_dir).train.features.shape[1]
    hidden = network_sizes(world.sessions * world.items, width)
    base = base.with_options(hidden=hidden, bias_steps=BIAS_STEPS)
    return replace(plan, base=base, rates=(), tuning_seeds=TUNING, longest=LONGEST)


def _of_closest(plan: Plan, result: Comparison, seeds: int) -> Plan:
    """Return the plan for all logs of the default and of its closest rivals."""
    metric = plan.metrics[-1]
    means = {row.entry: float(np.mean(row.results[metric])) for row in result.rows if is_rival(row.entry)}
    kept = {DEFAULT, *sorted(means, key=means.__getitem__, reverse=True)[:CLOSEST]}
    entries: list[Entry] = [entry for entry in plan.entries if entry.text in kept]
    return replace(plan, entries=entries, seeds=seeds)


def _logged(lab: Lab, world: World, plan: Plan) -> list[float]:
    """Return the metric of the logging ranker on the test requests, by log."""
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


# --- The page ---------------------------------------------------------------------------------------------------------

Found = Sequence[tuple[World, WorldResult]]


def _about(found: Found) -> str:
    made = sorted({(each.made["commit"], each.made["date"], each.made["machine"]) for _, each in found})
    where = "; ".join(f"commit {commit} on {date}, {machine}" for commit, date, machine in made)
    return (
        f"{len(found)} worlds; the [protocol](../protocol.md) was written before they were run. A world has a data "
        "set; users; a label (values: clicks and dwell time, measured by Reward@10; or clicks, measured by NDCG@10); a "
        "number of sessions; and the rankers that ordered what users saw. Differences are the default minus the other "
        "method, in % of the other method, with errors over logs and test requests. A world counts as *non-inferior* "
        f"if the default is above every rival less {MARGIN:.0%}, by one-sided tests at 5% with Holm's correction. "
        f"Worlds were made from {where}."
    )


def _summary(found: Found) -> Section:
    """Return what the default reaches in all worlds, and in parts of them."""
    parts: dict[str, list[WorldResult]] = {"all": [each for _, each in found]}
    for key in ("data", "users", "clicks", "sessions", "logging"):
        for value in dict.fromkeys(getattr(world, key) for world, _ in found):
            name = {"data": TITLES.get(value, value), "clicks": "clicks" if value else "values"}.get(key, f"{value:,}"
                    if isinstance(value, int) else value)  # fmt: skip
            parts[str(name)] = [each for world, each in found if getattr(world, key) == value]
    head = ["worlds", "number", "non-inferior to all", "first", "a rival wins", "mean over the closest rival"]
    rows = []
    for name, part in parts.items():
        closest = np.mean([each.closest.difference for each in part])
        counts = (
            len(part),
            sum(each.not_inferior for each in part),
            sum(each.closest.difference > 0 for each in part),
            sum("loss" in each.verdicts.values() for each in part),
        )
        rows.append([name, *map(str, counts), f"{closest:+.2%}"])
    said = (
        "The closest rival is the best of all rivals in a world by the same logs, so that it is flattered by chance: "
        "the mean over it is too low."
    )
    return Section("The default", [Table(head, rows), Text(said)])


def over_data_sets(found: Found, entry: str) -> tuple[float, float, dict[str, float]]:
    """Return the mean difference over data sets, half of its 95% interval, and the means of data sets.

    Each data set counts once, and only they are independent: the interval is Student's, over their means.
    """
    means = {}
    for name in dict.fromkeys(world.data for world, _ in found):
        values = [
            each.against[entry].difference for world, each in found if world.data == name if entry in each.against
        ]
        if values:
            means[name] = float(np.mean(values))
    every = np.array([*means.values()])
    half = math.inf
    if len(every) > 1:
        half = float(stdtrit(len(every) - 1, 0.975) * np.std(every, ddof=1) / len(every) ** 0.5)
    return float(every.mean()), half, means


def _methods(found: Found) -> Section:
    """Return how the default differs from each method, over data sets and by world."""
    names = list(dict.fromkeys(world.data for world, _ in found))
    head = ["method", "worlds", "mean over data sets", "95% interval", "wins", "level", "open", "losses"]
    rows = []
    for entry in dict.fromkeys(entry for _, each in found for entry in each.against):
        mean, half, means = over_data_sets(found, entry)
        verdicts = [each.verdicts.get(entry, "") for _, each in found if entry in each.against]
        counts = [str(verdicts.count(what)) if is_rival(entry) else "" for what in ("win", "level", "open", "loss")]
        interval = f"{mean - half:+.2%} to {mean + half:+.2%}" if math.isfinite(half) else ""
        by_data = [f"{means[name]:+.2%}" if name in means else "" for name in names]
        rows.append([entry, str(len(verdicts)), f"{mean:+.2%}", interval, *counts, *by_data])
    said = (
        f"The default minus each method. `{NETWORK_OF_DEFAULT}` is the network of the default without its trees; "
        "methods with `theta=oracle` know the true examination of the users, and their trust; these are no rivals. The "
        "interval is over data sets, which are few. Wins and losses of the default are significant at 5% with Holm's "
        f"correction within a world; *level* means within {MARGIN:.0%} both ways by two one-sided tests; *open* is the "
        "rest."
    )
    return Section("Against each method", [Text(said), Table([*head, *(TITLES.get(n, n) for n in names)], rows)])


def _map(found: Found) -> Section:
    entries = list(dict.fromkeys(entry for _, each in found for entry in each.against))
    cells = [
        [-100 * each.against[entry].difference if entry in each.against else None for entry in entries]
        for _, each in found
    ]
    plot = heat_map(
        "Difference from the default in %",
        cells,
        columns=entries,
        rows=[each.name for _, each in found],
        x="method",
        y="world",
        caption="Above 0 the method is better than the default.",
        smallest=-SHOWN,
        largest=SHOWN,
    )
    return Section("Who is first where", [plot])


def _details(found: Found) -> Section:
    head = ["world", "the default", "logging ranker", "closest rival", "the default minus it", "non-inferior to all"]
    head += ["rivals that win"]
    rows = []
    for _, each in found:
        closest = each.closest
        won = ", ".join(entry for entry, verdict in each.verdicts.items() if verdict == "loss")
        shown = f"{closest.difference:+.2%} ± {closest.half_width:.2%}"
        figures = [f"{each.mean(DEFAULT):.4f}", f"{np.mean(each.logged):.4f}", closest.entry, shown]
        rows.append([each.name, *figures, "yes" if each.not_inferior else "no", won])
    return Section(
        "World by world", [Text("Half widths are of 95% intervals over logs and requests."), Table(head, rows)]
    )
