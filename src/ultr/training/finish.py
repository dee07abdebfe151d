"""Write the results of a run, of networks or trees, after training."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ultr.evaluation.judge import Judge
from ultr.lists import Lists
from ultr.log.suspicious import write_suspicious
from ultr.rankers.model import save_model
from ultr.training.bias_progress import STAGE
from ultr.training.bias_stage import write_bias_report
from ultr.training.config import RunConfig
from ultr.training.data import RunData
from ultr.training.feed import Feeding
from ultr.training.importance import importance_of_run
from ultr.training.inputs import missing_features
from ultr.training.loop import Progress
from ultr.training.outcome import write_outcome
from ultr.utils.stages import begin_stage


@dataclass(frozen=True)
class Listeners:
    """The functions that a run calls after each evaluation, and the least number of seconds between checkpoints."""

    on_bias_progress: Callable[[Progress], None] = lambda _: None
    on_progress: Callable[[Progress], None] = lambda _: None
    checkpoint_seconds: float = 10.0


def finish_run(
    config: RunConfig,
    run_data: RunData,
    out: Path,
    *,
    scores: np.ndarray,
    judge: Judge | None,
    feed: Feeding,
    bias: Callable[[Iterable[Lists]], dict[str, Any] | None],
    ranker: nn.Module,
    ranker_options: Mapping[str, Any],
) -> None:
    """Write outcome, bias and, last, the model, which marks a complete run. `scores` are of the validation rows.

    `ranker_options` are those of the ranker, which a method may have changed.
    """
    begin_stage("writing the results")
    if run_data.suspicious is not None:
        write_suspicious(out, run_data.suspicious)
    importance = importance_of_run(config, run_data, ranker, judge)
    write_outcome(config, run_data, scores, judge, out, importance=importance)
    write_bias_report(config, run_data, bias, feed, out)
    save_model(
        out / "model",
        ranker,
        run_data.train,
        name=config.ranker,
        options=ranker_options,
        label=config.label,
        data=run_data.fingerprint,
        held_out=run_data.validation,
        indicators=missing_features(config, run_data.train),
    )
    for folder in ("checkpoints", STAGE):
        shutil.rmtree(out / folder, ignore_errors=True)
