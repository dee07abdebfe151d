"""The inputs of a method, from the configuration and the data of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ultr.bias.propensities import read_bias_theta, theta_by_id
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.summary import missing_values
from ultr.methods import MethodInputs
from ultr.rankers.boosters import is_trees
from ultr.rankers.mlp import HIDDEN
from ultr.rankers.model import load_model
from ultr.training.config import RunConfig
from ultr.training.data import RunData
from ultr.utils.jsonfiles import read_json
from ultr.utils.stores import fetched

SMALL_LOG, HIDDEN_OF_SMALL_LOG = 100_000, (128, 64, 32)  # rows; with fewer, a small network ranks as well or better


def known_theta(config: RunConfig, run_data: RunData) -> dict[int, float] | None:
    """Return position id -> known probability of being seen, from `config.propensities` or `config.bias`, or None."""
    theta = config.propensities if config.bias is None else read_bias_theta(fetched(config.bias))
    return None if theta is None else theta_by_id(theta, run_data.positions, run_data.segments)


def notes_of(config: RunConfig, run_data: RunData) -> list[str]:
    """Return the notes about the data of a run: what was changed on reading, and which values are missing."""
    notes = list(run_data.train.notes)
    if (missing := missing_values(run_data.train)) is not None:
        how = "trees choose a branch for them"
        if not is_trees(config.ranker):
            how = "they count as the mean of training rows, with an indicator"
        notes.append(f"values of features are missing: {missing}; {how}")
    return notes


def missing_features(config: RunConfig, log: Log) -> tuple[int, ...] | None:
    """Return the indices of features with missing values, which a network recognises; None if it rejects such values.

    Categories have a code for a missing value, and trees recognise missing values themselves.
    """
    if config.missing == "error" or is_trees(config.ranker):
        return None
    missing = np.isnan(log.features).any(axis=0)
    if config.warm_start is not None:  # the features whose missing values that run recognises
        start = load_model(config.warm_start)
        missing |= np.isin(log.feature_names, [start.feature_names[i] for i in start.indicators or ()])
    return tuple(i for i in np.flatnonzero(missing).tolist() if i not in log.categories)


def with_hidden_layers(config: RunConfig, run_data: RunData) -> RunConfig:
    """Return the configuration with the hidden layers of an mlp, if they were not chosen: by the rows of the log.

    A run that starts from another one has the layers of that run. Simulated users and streams have rows without end.
    """
    if config.ranker != "mlp" or "hidden" in config.ranker_options:
        return config
    if config.warm_start is not None:
        start = RunConfig.from_json(read_json(Path(config.warm_start) / "config.json"), where=config.warm_start)
        sizes = start.ranker_options.get("hidden", HIDDEN)
    else:
        endless = run_data.feeding_user is not None or run_data.stream is not None
        sizes = HIDDEN if endless or run_data.train.rows >= SMALL_LOG else HIDDEN_OF_SMALL_LOG
    return replace(config, ranker_options={**config.ranker_options, "hidden": list(sizes)})


def method_inputs(config: RunConfig, run_data: RunData) -> MethodInputs:
    """Return the inputs of a method: its label, ranker, features, positions and known examination."""
    log = run_data.train
    return MethodInputs(
        label=Label(config.label),
        features=len(log.feature_names),
        positions=run_data.positions,
        categories=log.categories,
        ranker=config.ranker,
        ranker_options=config.ranker_options,
        truth=config.learn_from == "truth",
        propensities=known_theta(config, run_data),
        feature_names=log.feature_names,
        binary=run_data.binary,
        indicators=missing_features(config, run_data.train) or (),
        user=run_data.user,
    )
