"""Unbiased learning to rank from clicks and from continuous feedback such as dwell time.

Each public name is imported when it is first used, so that `import ultr` is quick and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ultr._version import __version__
from ultr.errors import missing_for_training

if TYPE_CHECKING:
    from ultr.bias.audit import audit
    from ultr.bias.result import BiasReport
    from ultr.datasets import Dataset, load_dataset, ranking_svm, show
    from ultr.datasets.dwell import Dwell
    from ultr.datasets.simulate import simulate_log
    from ultr.datasets.users import User, make_user
    from ultr.errors import UltrError
    from ultr.evaluation.off_policy import compare_values, fit_direct, off_policy_value
    from ultr.evaluation.scores import evaluate_scores, mean_with_interval, paired_test
    from ultr.lists import ListBatches, Lists
    from ultr.log import Log, read_log, write_log
    from ultr.log.labels import Label
    from ultr.log.prepare.pipeline import prepare_lists
    from ultr.rankers.model import Model, load_model
    from ultr.report import load_run, plot_bias, plot_comparison, write_report
    from ultr.serving.export import export_run
    from ultr.serving.exported import load_exported
    from ultr.serving.scoring import score_file
    from ultr.sklearn import UnbiasedRanker
    from ultr.training.config import RunConfig, TrainingOptions
    from ultr.training.importance import feature_importance
    from ultr.training.run import run_training

_MODULE_OF = {
    "BiasReport": "bias.result",
    "Dataset": "datasets",
    "Dwell": "datasets.dwell",
    "Label": "log.labels",
    "ListBatches": "lists",
    "Lists": "lists",
    "Log": "log",
    "Model": "rankers.model",
    "RunConfig": "training.config",
    "TrainingOptions": "training.config",
    "UltrError": "errors",
    "UnbiasedRanker": "sklearn",
    "User": "datasets.users",
    "audit": "bias.audit",
    "compare_values": "evaluation.off_policy",
    "evaluate_scores": "evaluation.scores",
    "export_run": "serving.export",
    "feature_importance": "training.importance",
    "fit_direct": "evaluation.off_policy",
    "load_dataset": "datasets",
    "load_exported": "serving.exported",
    "load_model": "rankers.model",
    "load_run": "report",
    "make_user": "datasets.users",
    "mean_with_interval": "evaluation.scores",
    "off_policy_value": "evaluation.off_policy",
    "paired_test": "evaluation.scores",
    "plot_bias": "report",
    "plot_comparison": "report",
    "prepare_lists": "log.prepare",
    "ranking_svm": "datasets",
    "read_log": "log",
    "run_training": "training.run",
    "score_file": "serving.scoring",
    "show": "datasets",
    "simulate_log": "datasets.simulate",
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
    "feature_importance",
    "fit_direct",
    "load_dataset",
    "load_exported",
    "load_model",
    "load_run",
    "make_user",
    "mean_with_interval",
    "off_policy_value",
    "paired_test",
    "plot_bias",
    "plot_comparison",
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
        try:
            return getattr(import_module(f"ultr.{_MODULE_OF[name]}"), name)
        except ModuleNotFoundError as error:
            raise missing_for_training(f"ultr.{name}", error) or error from error
    raise AttributeError(f"module 'ultr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
