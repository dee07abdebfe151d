"""Unbiased learning to rank from clicks and from continuous feedback such as dwell time.

Each public name is imported when it is first used, so that `import ultr` is quick and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ultr._version import __version__
from ultr.errors import missing_for_training

if TYPE_CHECKING:
    from ultr.api import audit, compare, evaluate, interleaving, judgments, train
    from ultr.bias.audit import BiasReport
    from ultr.bias.judgment_files import write_judgments
    from ultr.bias.relevance import Judgments
    from ultr.datasets import Dataset, load_dataset, ranking_svm, show
    from ultr.datasets.users import Dwell, User, make_user, simulate_log
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
    from ultr.training.config import Config, make_config
    from ultr.training.outcome import feature_importance
    from ultr.training.run import run_training

_MODULE_OF = {
    "BiasReport": "bias.audit",
    "Config": "training.config",
    "Dataset": "datasets",
    "Dwell": "datasets.users",
    "Judgments": "bias.relevance",
    "Label": "log.labels",
    "ListBatches": "lists",
    "Lists": "lists",
    "Log": "log",
    "Model": "rankers.model",
    "UltrError": "errors",
    "UnbiasedRanker": "sklearn",
    "User": "datasets.users",
    "audit": "api",
    "compare": "api",
    "compare_values": "evaluation.off_policy",
    "evaluate": "api",
    "evaluate_scores": "evaluation.scores",
    "export_run": "serving.export",
    "feature_importance": "training.outcome",
    "fit_direct": "evaluation.off_policy",
    "interleaving": "api",
    "judgments": "api",
    "load_dataset": "datasets",
    "load_exported": "serving.exported",
    "load_model": "rankers.model",
    "load_run": "report",
    "make_config": "training.config",
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
    "simulate_log": "datasets.users",
    "train": "api",
    "write_judgments": "bias.judgment_files",
    "write_log": "log",
    "write_report": "report",
}

__all__ = [
    "BiasReport",
    "Config",
    "Dataset",
    "Dwell",
    "Judgments",
    "Label",
    "ListBatches",
    "Lists",
    "Log",
    "Model",
    "UltrError",
    "UnbiasedRanker",
    "User",
    "__version__",
    "audit",
    "compare",
    "compare_values",
    "evaluate",
    "evaluate_scores",
    "export_run",
    "feature_importance",
    "fit_direct",
    "interleaving",
    "judgments",
    "load_dataset",
    "load_exported",
    "load_model",
    "load_run",
    "make_config",
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
    "train",
    "write_judgments",
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
