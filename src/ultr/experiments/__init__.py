"""The experiments of `ultr reproduce`, by name.

All but `settling`, `trees` and `worlds` repeat experiments of the paper behind pairwise-em (CIKM 2022, see `paper.py`).
Each trains methods and reports their results, next to the results in the paper if there are any.
"""

from __future__ import annotations

from collections.abc import Callable

from ultr.experiments.figures import figure3, figure4, figure5
from ultr.experiments.lab import FULL, QUICK, SELECTIONS, Budget, ExperimentResult, Lab
from ultr.experiments.live import live_test
from ultr.experiments.tables import settle, table1, table2, tree_tables
from ultr.experiments.worlds import compare_worlds

__all__ = ["EXPERIMENTS", "FULL", "QUICK", "SELECTIONS", "Budget", "ExperimentResult", "Lab"]

EXPERIMENTS: dict[str, Callable[[Lab], ExperimentResult]] = {
    "table1": table1,
    "table2": table2,
    "figure3": figure3,
    "figure4": figure4,
    "figure5": figure5,
    "live": live_test,
    "settling": settle,
    "trees": tree_tables,
    "worlds": compare_worlds,
}
