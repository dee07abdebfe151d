"""The paper's experiments, each by its name: what is run, and how it is put beside what was printed."""

from __future__ import annotations

from collections.abc import Callable

from ultr.experiments.abtest import live_test
from ultr.experiments.figures import figure3, figure4, figure5
from ultr.experiments.lab import FULL, QUICK, Budget, Lab, Outcome
from ultr.experiments.tables import table1, table2
from ultr.experiments.trees import tree_tables

__all__ = ["EXPERIMENTS", "FULL", "QUICK", "Budget", "Lab", "Outcome"]

EXPERIMENTS: dict[str, Callable[[Lab], Outcome]] = {
    "table1": table1,
    "table2": table2,
    "figure3": figure3,
    "figure4": figure4,
    "figure5": figure5,
    "live": live_test,
    "trees": tree_tables,
}
