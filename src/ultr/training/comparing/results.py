"""The results of a comparison of methods: settings, metrics by seed and by request, and paired tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from ultr.errors import DataError
from ultr.evaluation.comparing import LOGGED_RANKING
from ultr.evaluation.scores import Mean, PairedTest, holm, less_is_better, mean_with_interval, paired_test
from ultr.utils.display import table_html

FORMAT = 1


@dataclass(frozen=True)
class Setting:
    """The options of a method that validation requests chose; None: the option of the comparison."""

    lr: float | None = None
    dropout: float | None = None
    max_weight: float | Literal["none"] | None = None  # largest weight of a pair or an item
    longer: int = 1  # times the steps of the comparison, for a method that still improves at its last step

    @property
    def options(self) -> dict[str, Any]:
        """The options of the configuration, as for `Config.with_options`."""
        options = {"lr": self.lr, "dropout": self.dropout, "method.max_weight": self.max_weight}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def name(self) -> str:
        """The name of the folder of the runs with this setting."""
        parts = [f"{name.replace('_', '-')}-{_short(value)}" for name, value in self.to_json().items()]
        return "-".join(parts) or "default"

    def __str__(self) -> str:
        parts = [] if self.lr is None else [f"lr {self.lr:g}"]
        if self.dropout is not None:
            parts.append(f"dropout {self.dropout:g}")
        if self.max_weight is not None:
            parts.append("weights without a limit" if self.max_weight == "none" else f"weights to {self.max_weight:g}")
        if self.longer > 1:
            parts.append(f"{self.longer} times the steps")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the values that are not the default."""
        return {name: value for name, value in asdict(self).items() if value != getattr(Setting, name)}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Setting:
        """Return the setting in a row of a comparison.json."""
        values = {each.name: row[each.name] for each in fields(Setting) if each.name in row}
        try:
            return TypeAdapter(Setting).validate_python(values)
        except ValidationError as error:
            hint = "run ultr compare again"
            raise DataError("a row of the comparison has no valid setting", got=values, hint=hint) from error


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


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
class LoggedTest:
    """The difference of a method to the logged ranking, tested over test requests."""

    requests: PairedTest
    holm: float  # the p value, corrected by Holm's method for the number of methods

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.requests), "holm": self.holm}


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
    steps: Steps | None = None  # None if a run has several rankers
    sessions: int = 0  # simulated sessions that each run learned from, its bias model included
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
        figures = {
            metric: {
                "mean": float(np.mean(values)),
                "deviation": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
                "seeds": values,
                "against": (test := self.against.get(metric)) and test.to_json(),
                "against_logged": (logged := self.against_logged.get(metric)) and logged.to_json(),
            }
            for metric, values in self.results.items()
        }
        about = {"steps": self.steps and asdict(self.steps), "sessions": self.sessions}
        return {"method": self.entry, **self.setting.to_json(), **about, "figures": figures}


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


def with_logged_tests(rows: Sequence[Row], logged: Mapping[str, np.ndarray]) -> list[Row]:
    """Return rows with tests against the logged ranking, whose metrics by test request are `logged`."""
    found: list[dict[str, LoggedTest]] = [{} for _ in rows]
    for metric, values in logged.items():
        if all(metric in row.by_request for row in rows):
            tests = [paired_test(row.by_request[metric], values, row.weights) for row in rows]
            for of_row, test, p in zip(found, tests, holm([test.p for test in tests]), strict=True):
                of_row[metric] = LoggedTest(test, p)
    return [replace(row, against_logged=of_row) for row, of_row in zip(rows, found, strict=True)]


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison, one row per method; `reference` is the method that the others are tested against."""

    rows: list[Row]
    metrics: list[str]
    reference: str
    logged: Mapping[str, Mean] = field(default_factory=dict)  # metric -> mean of the logged ranking; only for logs

    def best(self) -> Row:
        """Return the row of the best method by the first metric."""
        metric = self.metrics[0]
        choose = min if less_is_better(metric) else max
        return choose(self.rows, key=lambda row: float(np.mean(row.results[metric])))

    def _repr_html_(self) -> str:
        rows = [
            [row.entry, *(str(mean_with_interval(np.array(row.results[m]))) for m in self.metrics)] for row in self.rows
        ]
        rows += [[LOGGED_RANKING, *(f"{self.logged[m].mean:.4f}" for m in self.metrics)]] if self.logged else []
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
