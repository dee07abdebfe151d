"""The importance of the features of a run, estimated on requests that it was not trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from ultr.errors import DataError
from ultr.evaluation.importance import REPEATS, FeatureImportance, permutation_importance, rows_to_score, tree_gains
from ultr.evaluation.judge import Judge, load_judge, request_metrics
from ultr.log import Log
from ultr.log.sampling import sample_log
from ultr.log.segments import by_segment
from ultr.rankers import score_rows
from ultr.rankers.boosters import TreeRanker
from ultr.rankers.model import load_model
from ultr.training.config import RunConfig
from ultr.training.data import RunData
from ultr.training.selection import JUDGE, less_is_better
from ultr.utils.arguments import Seed, checked
from ultr.utils.jsonfiles import read_json

SAVED = 20  # most features in the outcome of a run


@checked
def feature_importance(
    run: str | Path,
    log: Log,
    *,
    metric: str | None = None,
    rows: int | None = None,
    repeats: int = REPEATS,
    seed: Seed = 0,
) -> list[FeatureImportance]:
    """Return how much a metric of a run falls if a feature is permuted, the most important feature first.

    The log must have requests that the run was not trained on. The default metric is the selection metric of the run:
    without true labels, its judge estimates the feedback off policy. At most about `rows` rows of random requests are
    used; by default as many as take seconds. Trees also have the gain of each feature.
    """
    run = Path(run)
    model, config = load_model(run), RunConfig.from_json(read_json(run / "config.json"), where=run)
    log = model.view(log)
    log, segments = by_segment(log) if config.columns.get("segment") else (log, ())
    options: dict[str, Any] = {"label": model.label, "judge": load_judge(run / JUDGE), "segments": segments}
    return _importance(config, log, model.ranker, options, metric=metric, rows=rows, repeats=repeats, seed=seed)


def importance_of_run(config: RunConfig, run_data: RunData, ranker: nn.Module, judge: Judge | None) -> dict[str, Any]:
    """Return the importance of features on validation requests, for the outcome of a run; empty if it is not estimated.

    It is estimated for logs. Runs of a comparison and of simulated users are many, and nobody looks at their features.
    """
    if config.users is not None or config.judged or not run_data.validation.feature_names:
        return {}
    options: dict[str, Any] = {"label": config.label, "judge": judge, "segments": run_data.segments}
    found = _importance(config, run_data.validation, ranker, options, most=SAVED)
    return {"metric": config.selection, "features": [asdict(each) for each in found]}


def _importance(
    config: RunConfig,
    log: Log,
    ranker: nn.Module,
    options: Mapping[str, Any],
    *,
    metric: str | None = None,
    rows: int | None = None,
    repeats: int = REPEATS,
    seed: int = 0,
    most: int | None = None,
) -> list[FeatureImportance]:
    """Return the importance of features; `options` are those of `request_metrics`."""
    if repeats < 1 or (rows is not None and rows < 1):
        raise DataError("'rows' and 'repeats' must be at least 1", got=f"{rows} and {repeats}")
    chosen = metric or config.selection
    part = sample_log(log, rows or rows_to_score(len(log.feature_names), repeats), seed=seed)
    device = next((parameter.device for parameter in ranker.parameters()), "cpu")
    sign = -1 if less_is_better(chosen) else 1

    metrics = request_metrics(part, [chosen], keep=True, **options)

    gains = tree_gains(ranker, len(log.feature_names)) if isinstance(ranker, TreeRanker) else None
    ranker.eval()
    return permutation_importance(
        part,
        lambda features: score_rows(ranker, features, device=device),
        lambda scores: sign * metrics(scores)[chosen],
        gains=gains,
        repeats=repeats,
        seed=seed,
        most=most,
    )
