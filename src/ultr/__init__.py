"""Unbiased learning to rank from clicks and continuous feedback.

Names are loaded when they are first used, so that `import ultr` is quick and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ultr.datasets import Dataset, load_dataset, ranking_svm, show
    from ultr.dwell import Dwell
    from ultr.errors import UltrError
    from ultr.evaluation import evaluate_scores, mean_with_interval, paired_test
    from ultr.export import export_run
    from ultr.exported import load_exported
    from ultr.labels import Label
    from ultr.lists import ListBatches, Lists
    from ultr.log import Log, read_log, write_log
    from ultr.log.prepare import prepare_lists
    from ultr.models import Model, load_model
    from ultr.offpolicy import compare_values, fit_direct, off_policy_value
    from ultr.preparing import RunConfig
    from ultr.propensity import BiasReport, audit
    from ultr.report import write_report
    from ultr.runs import run_training
    from ultr.scoring import score_file
    from ultr.simulate import User, make_user, simulate_log
    from ultr.sklearn import UnbiasedRanker
    from ultr.training import TrainingOptions

__version__ = "0.1.0"

_MODULE_OF = {
    "BiasReport": "propensity",
    "Dataset": "datasets",
    "Dwell": "dwell",
    "Label": "labels",
    "ListBatches": "lists",
    "Lists": "lists",
    "Log": "log",
    "Model": "models",
    "RunConfig": "preparing",
    "TrainingOptions": "training",
    "UltrError": "errors",
    "UnbiasedRanker": "sklearn",
    "User": "simulate",
    "audit": "propensity",
    "compare_values": "offpolicy",
    "evaluate_scores": "evaluation",
    "export_run": "export",
    "fit_direct": "offpolicy",
    "load_dataset": "datasets",
    "load_exported": "exported",
    "load_model": "models",
    "make_user": "simulate",
    "mean_with_interval": "evaluation",
    "off_policy_value": "offpolicy",
    "paired_test": "evaluation",
    "prepare_lists": "log.prepare",
    "ranking_svm": "datasets",
    "read_log": "log",
    "run_training": "runs",
    "score_file": "scoring",
    "show": "datasets",
    "simulate_log": "simulate",
    "write_log": "log",
    "write_report": "report",
}

__all__ = [
    "BiasReport",
    "Dataset",
    "Dwell",
    "Label",
    "ListBatches",
    "Lists",
    "Log",
    "Model",
    "RunConfig",
    "TrainingOptions",
    "UltrError",
    "UnbiasedRanker",
    "User",
    "__version__",
    "audit",
    "compare_values",
    "evaluate_scores",
    "export_run",
    "fit_direct",
    "load_dataset",
    "load_exported",
    "load_model",
    "make_user",
    "mean_with_interval",
    "off_policy_value",
    "paired_test",
    "prepare_lists",
    "ranking_svm",
    "read_log",
    "run_training",
    "score_file",
    "show",
    "simulate_log",
    "write_log",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"ultr.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'ultr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
