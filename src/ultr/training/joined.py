"""A network and trees on the same log: a run whose ranker is their sum."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ultr.log import Log
from ultr.rankers import score_rows
from ultr.rankers.blend import Blend, Part
from ultr.rankers.combined import likely_share, spread_within
from ultr.rankers.model import network_part
from ultr.training.config import DEFAULT_METHOD, RunConfig, default_training
from ultr.training.replace import successor, take_place
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import read_json

NETWORK, TREES = "mlp", "lightgbm"  # the rankers that `auto` trains
FOLDER = "network"  # of a joined run: the run of its network
# Options that mean something else for trees, or nothing, or follow one ranker.
OF_NETWORKS = {
    *("hidden", "dropout", "norm", "steps", "batch", "lr", "optimizer", "schedule", "warmup", "clip", "weight_decay"),
    *("evaluate_every", "patience", "precision", "workers", "tensorboard", "mlflow", "ranker_options"),
}


def with_trees(config: RunConfig, chosen: Collection[str]) -> list[RunConfig]:
    """Return the configuration of a network, and that of trees that join it, if they can be trained.

    There are no trees if one of the `chosen` options is for networks.
    """
    can = config.users is None and config.learn_from == "feedback" and config.method == DEFAULT_METHOD
    can = can and not config.method_options and config.warm_start is None and config.stream != "yes"
    can = can and os.environ.get("WORLD_SIZE", "1") == "1"  # torchrun trains networks
    if not can or OF_NETWORKS & set(chosen) or not all(map(find_spec, (TREES, "numba"))):
        return [config]
    return [replace(config, both=True), trees_for(config)]


def trees_for(network: RunConfig) -> RunConfig:
    """Return the configuration of the trees that join a network."""
    given = network.training
    training = replace(default_training(TREES), seed=given.seed, device=given.device, bias_steps=given.bias_steps)
    return replace(network, ranker=TREES, ranker_options={}, both=True, training=training)


def network_of(run: Path) -> Path:
    """Return the run of the network of a joined run; any other run itself."""
    return run / FOLDER if (run / FOLDER / "config.json").is_file() else run


def is_joined(run: Path) -> bool:
    return network_of(run) != run


def join(
    run: Path, trees: nn.Module, scores: np.ndarray, validation: Log, feedback: tuple[np.ndarray, np.ndarray] | None
) -> tuple[Blend, np.ndarray, float]:
    """Return the sum of the network of a run and of trees, its scores of the validation rows, and the network's share.

    Scores are divided by their deviation within requests. The likelihood of the `feedback` of the validation rows
    (labels and log θ) decides the share; it is a half if there is none.
    """
    network = network_part(run, validation)
    own = score_rows(network.ranker, validation.features)
    request = torch.from_numpy(np.ascontiguousarray(validation.request_of_row))
    spreads = [float(spread_within(torch.from_numpy(each), request)) for each in (own, scores)]
    columns = [torch.from_numpy(each / spread).double() for each, spread in zip((own, scores), spreads, strict=True)]
    share = 0.5 if feedback is None else likely_share(*columns, *map(torch.from_numpy, feedback))
    of_trees = trees.parts if isinstance(trees, Blend) else (Part(trees, TREES),)
    parts = [replace(part, weight=part.weight * (1 - share) / spreads[1]) for part in of_trees]
    parts.append(replace(network, weight=share / spreads[0]))
    return Blend(parts), (share * columns[0] + (1 - share) * columns[1]).numpy(), share


def finish_successor(run: Path) -> None:
    """Let the complete replacement of a run take its place; trees that join the run keep it as their network."""
    place = successor(run)
    if RunConfig.from_json(read_json(place / "config.json"), where=place).joins:
        with atomic_path(place / FOLDER, overwrite=True, folder=True) as temporary:
            shutil.copytree(run, temporary, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", FOLDER))
    take_place(run)
