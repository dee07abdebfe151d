"""The results of a comparison of methods: metrics by seed and by request, and paired tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ultr.evaluation.scores import Mean, PairedTest, holm, mean_with_interval, paired_test
from ultr.training.entries import Setting
from ultr.training.logged import LoggedTest
from ultr.training.selection import less_is_better
from ultr.utils.html import table_html

FORMAT = 1


@dataclass(frozen=True)
class Difference:
    """The difference of two methods in a metric, tested over seeds and over test requests.

    A p value of `holm` is corrected by Holm's method for the number of methods that are compared with the reference.
    """

    seeds: PairedTest
    requests: PairedTest | None = None  # of the means over seeds; None if they are not known
    holm: tuple[float, float] | None = None  # corrected p values over seeds and over requests

    @property
    def p(self) -> float:
        """The larger p value of the two tests."""
        return max(self.seeds.p, 0.0 if self.requests is None else self.requests.p)

    @property
    def significant(self) -> bool:
        """Whether both tests, corrected if they are, have p < 0.05."""
        return (self.p if self.holm is None else max(self.holm)) < 0.05

    def to_json(self) -> dict[str, Any]:
        requests = None if self.requests is None else asdict(self.requests)
        return {**asdict(self.seeds), "over_requests": requests, "holm": self.holm and list(self.holm)}


@dataclass(frozen=True)
class Steps:
    """The training of a method's runs: medians of the best and the last step, and the runs that took all steps."""

    best: float
    last: float
    bound: int
    at_bound: int  # runs that were still improving when they had taken all steps


@dataclass(frozen=True)
class Row:
    """The results of one method: its setting, its metrics by seed, and tests against the reference method."""

    entry: str
    setting: Setting
    results: dict[str, list[float]]  # metric -> one value per seed
    against: dict[str, Difference] = field(default_factory=dict)  # by metric; empty for the reference method
    by_request: Mapping[str, np.ndarray] = field(default_factory=dict)  # metric -> means over seeds by test request
    steps: Steps | None = None
    sessions: int = 0  # sessions that each run learned from, its bias model included
    weights: np.ndarray | None = None  # of the test requests
    against_logged: Mapping[str, LoggedTest] = field(default_factory=dict)  # by metric; empty if there is no log

    def tested(self, other: Row) -> dict[str, Difference]:
        """Return metric -> paired tests of this method against the method of another row."""
        tests = {}
        for metric, values in self.results.items():
            requests = None
            if metric in self.by_request and metric in other.by_request:
                requests = paired_test(self.by_request[metric], other.by_request[metric], self.weights)
            tests[metric] = Difference(paired_test(np.array(values), np.array(other.results[metric])), requests)
        return tests

    def to_json(self) -> dict[str, Any]:
        summary = {
            metric: {
                "mean": float(np.mean(values)),
                "deviation": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
                "seeds": values,
                "against": self.against[metric].to_json() if metric in self.against else None,
                "against_logged": self.against_logged[metric].to_json() if metric in self.against_logged else None,
            }
            for metric, values in self.results.items()
        }
        about = {"steps": self.steps and asdict(self.steps), "sessions": self.sessions}
        return {"method": self.entry, **self.setting.to_json(), **about, "figures": summary}


def with_tests(rows: Sequence[Row], reference: str) -> list[Row]:
    """Return rows with tests against the row `reference`, p values corrected for the number of other rows."""
    other = next(row for row in rows if row.entry == reference)
    tests = {row.entry: row.tested(other) for row in rows if row is not other}
    for metric in other.results if tests else ():
        found = [test[metric] for test in tests.values()]
        over_seeds = holm([each.seeds.p for each in found])
        over_requests = holm([0.0 if each.requests is None else each.requests.p for each in found])
        for test, each, *corrected in zip(tests.values(), found, over_seeds, over_requests, strict=True):
            test[metric] = replace(each, holm=(corrected[0], corrected[1]))
    return [replace(row, against=tests.get(row.entry, {})) for row in rows]


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison, one row per method; `reference` is the method that the others are tested against."""

    rows: list[Row]
    metrics: list[str]
    reference: str
    logged: Mapping[str, Mean] = field(default_factory=dict)  # metric -> mean of the logged ranking; only for logs

    def best(self) -> Row:
        """Return the row of the best method by the first metric."""
        choose, metric = (min if less_is_better(self.metrics[0]) else max), self.metrics[0]
        return choose(self.rows, key=lambda row: float(np.mean(row.results[metric])))

    def _repr_html_(self) -> str:
        means = ({m: mean_with_interval(np.array(values)) for m, values in row.results.items()} for row in self.rows)
        rows = [[row.entry, *(str(mean[m]) for m in self.metrics)] for row, mean in zip(self.rows, means, strict=True)]
        rows += [["logged ranking", *(f"{self.logged[m].mean:.4f}" for m in self.metrics)]] if self.logged else []
        caption = f"Means over runs, with 95% intervals; the reference is {self.reference}"
        return table_html(["method", *self.metrics], rows, caption)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "metrics": self.metrics,
            "reference": self.reference,
            "logged": {metric: asdict(mean) for metric, mean in self.logged.items()},
            "rows": [row.to_json() for row in self.rows],
        }
