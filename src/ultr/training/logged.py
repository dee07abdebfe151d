"""The logged ranking in a comparison on a log: tests of the methods against it, over test requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ultr.evaluation.scores import PairedTest, holm, paired_test
from ultr.training.tasks import WEIGHTS, read_requests

LOGGED = "logged"  # folder of a comparison with the metrics of the logged ranking


@dataclass(frozen=True)
class LoggedTest:
    """The difference of a method to the logged ranking, tested over test requests."""

    requests: PairedTest
    holm: float  # the p value, corrected by Holm's method for the number of methods

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.requests), "holm": self.holm}


def read_logged(comparison: Path) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Return metrics [requests] of the logged ranking, and the weights of the requests; empty if there is no log."""
    metrics = read_requests(comparison / LOGGED)
    return metrics, metrics.pop(WEIGHTS, None)


def against_logged(
    methods: Sequence[Mapping[str, np.ndarray]], logged: Mapping[str, np.ndarray], weights: np.ndarray | None
) -> list[dict[str, LoggedTest]]:
    """Return for each method its tests against the logged ranking by metric; each has its metrics by test request."""
    tested: list[dict[str, LoggedTest]] = [{} for _ in methods]
    for metric, values in logged.items():
        if all(metric in of_method for of_method in methods):
            tests = [paired_test(of_method[metric], values, weights) for of_method in methods]
            for found, test, p in zip(tested, tests, holm([test.p for test in tests]), strict=True):
                found[metric] = LoggedTest(test, p)
    return tested
