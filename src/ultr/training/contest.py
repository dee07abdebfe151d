"""Two kinds of ranker on the same log: the one that is better on the validation requests keeps the name of the run."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ultr.bias.propensities import BIAS_FILE, read_bias_file, write_bias_file
from ultr.training.config import DEFAULT_METHOD, RunConfig, default_training
from ultr.training.outcome import value_of_run
from ultr.training.replace import drop_successor, is_rival, successor, take_place
from ultr.training.selection import less_is_better
from ultr.utils.jsonfiles import read_json

NETWORK, TREES = "mlp", "lightgbm"  # the rankers that `auto` chooses from
# Options that mean something else for trees, or nothing, or follow one ranker.
OF_NETWORKS = {
    *("hidden", "dropout", "norm", "steps", "batch", "lr", "optimizer", "schedule", "warmup", "clip", "weight_decay"),
    *("evaluate_every", "patience", "precision", "workers", "tensorboard", "mlflow", "ranker_options"),
}
CHOSEN = "chosen"  # name of the sentence in the summary of bias.json


def finish_successor(run: Path) -> None:
    """Let the complete replacement of a run take its place; a rival only if it is better."""
    if not is_rival(run):
        take_place(run)
        return
    values = {folder: value_of_run(folder)[1] for folder in (run, successor(run))}
    metric = value_of_run(run)[0]
    best = (min if less_is_better(metric) else max)(values, key=lambda folder: values[folder])
    _write_choice(best, metric, values)
    if best == run:
        drop_successor(run)
    else:
        take_place(run)


def with_rivals(config: RunConfig, chosen: Collection[str]) -> list[RunConfig]:
    """Return the configuration of a network, and that of trees on the same log, if they can be trained.

    There are no trees if one of the `chosen` options is for networks.
    """
    can = config.users is None and config.learn_from == "feedback" and config.method == DEFAULT_METHOD
    can = can and not config.method_options and config.warm_start is None and config.stream != "yes"
    can = can and os.environ.get("WORLD_SIZE", "1") == "1"  # torchrun trains networks
    if not can or OF_NETWORKS & set(chosen) or find_spec(TREES) is None:
        return [config]
    given = config.training
    training = replace(default_training(TREES), seed=given.seed, device=given.device, bias_steps=given.bias_steps)
    return [config, replace(config, ranker=TREES, ranker_options={}, training=training)]


def is_decided(run: Path, first: str) -> bool:
    """Return whether a finished run has no rival to come: its ranker was chosen, or is not the `first` candidate."""
    return _ranker(run) != first or CHOSEN in _summary(run)


def _ranker(run: Path) -> str:
    return str(read_json(run / "config.json")["ranker"])


def _summary(run: Path) -> dict[str, str]:
    return dict(read_bias_file(run / BIAS_FILE).get("summary", {})) if (run / BIAS_FILE).is_file() else {}


def _write_choice(best: Path, metric: str, values: dict[Path, float]) -> None:
    """Write the choice into the summary of bias.json, which `ultr train` and reports print."""
    if (best / BIAS_FILE).is_file():
        told = ", ".join(f"{_ranker(run)} {value:.4f}" for run, value in values.items())
        summary = {**_summary(best), CHOSEN: f"{_ranker(best)}, by {metric} on validation requests ({told})"}
        write_bias_file(best, {**read_bias_file(best / BIAS_FILE), "summary": summary})
