"""The inputs and the artefact of the stage `fit`, which networks and trees have in common."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ultr.errors import DataError, OptionError
from ultr.lists import Lists
from ultr.log import Log
from ultr.log.labels import DEFAULT_LABEL, Label
from ultr.log.table import missing_values
from ultr.methods import Method, MethodInputs, TreeMethod
from ultr.methods.position_model import PositionModel
from ultr.rankers import FeatureEncoder, LinearRanker, Synthesised, fit_encoders, score_rows
from ultr.rankers.boosters import Booster, TreeRanker, is_trees
from ultr.rankers.combined import Blend, Part
from ultr.rankers.matching import load_matched_weights, match_features
from ultr.rankers.model import Model, load_model, save_model
from ultr.training.config import Config, TrainingOptions
from ultr.training.data import Data, Decisions
from ultr.training.examining import Examined, known_theta
from ultr.training.folder import CHECKPOINTS, MODEL, STAGE, fit_folder, part_of
from ultr.training.loop import Listeners
from ultr.utils.distributed import is_main
from ultr.utils.jsonfiles import read_json, write_json

REPORT = "report.json"  # file of a fit
CLICKS_ONLY = "trained on clicks only; '{}' counts as 1 if it is above zero, else as 0"
REPORTED_BATCHES = 20  # batches that the report of a bias model is computed from


@dataclass(frozen=True, eq=False)
class FitInputs:
    """The inputs of a fit: the configuration, the data, what the data decided, and the kind of ranker to train."""

    config: Config
    data: Data
    decisions: Decisions
    kind: str

    @property
    def options(self) -> TrainingOptions:
        return self.config.loop(self.kind)

    @cached_property
    def ranker_options(self) -> dict[str, Any]:
        """The options of the ranker: the layers of a network, or the parameters of the tree library."""
        if is_trees(self.kind):
            return dict(self.config.trees.parameters)
        if self.kind != "mlp":
            return {}
        network = self.config.network
        return {"hidden": list(self.decisions.hidden or ()), "dropout": network.dropout, "norm": network.norm}

    @cached_property
    def indicators(self) -> tuple[int, ...] | None:
        """The indices of features with missing values, which a network recognises; None if it rejects such values.

        Categories have a code for a missing value, and trees recognise missing values themselves.
        """
        config, log = self.config, self.data.train
        if config.data.missing == "error" or is_trees(self.kind):
            return None
        missing = np.isnan(log.features).any(axis=0)
        if config.start_run is not None:  # the features whose missing values that run recognises
            start = load_model(config.start_run)
            missing |= np.isin(log.feature_names, [start.feature_names[i] for i in start.indicators or ()])
        return tuple(i for i in np.flatnonzero(missing).tolist() if i not in log.categories)

    def of_method(self) -> MethodInputs:
        """Return the inputs of a method: its label, ranker, features, positions and known examination."""
        config, data, log = self.config, self.data, self.data.train
        return MethodInputs(
            label=Label(data.label),
            features=len(log.feature_names),
            positions=data.positions,
            categories=log.categories,
            ranker=self.kind,
            ranker_options=self.ranker_options,
            truth=config.simulation.learn_from == "truth",
            propensities=known_theta(config, data),
            feature_names=log.feature_names,
            binary=data.binary,
            indicators=self.indicators or (),
            user=data.user,
        )


@dataclass(frozen=True, eq=False)
class FitPlace:
    """Where the rankers of a run are fitted: its folder, its estimates, what runs share, and who is told."""

    run: Path
    examined: Examined
    shared: Path | None  # folder of bias models for runs with the same data, seed and bias options
    listeners: Listeners

    def folder(self, kind: str) -> Path:
        return fit_folder(self.run, kind)


def uses_examination(method: Method | TreeMethod) -> bool:
    """Return whether a method takes the best estimate of examination of the log."""
    if isinstance(method, TreeMethod):
        positions = method.positions if method.pairs is None else method.pairs.bias_model
        models = [] if positions is None or method.inputs.truth else [positions]
    else:
        models = [model for model in method.modules() if isinstance(model, PositionModel)]
        models = [] if method.inputs.truth else models
    return any(model.theta_from == "auto" and not model.trust_in_clicks for model in models)


def notes_of(config: Config, data: Data, decisions: Decisions) -> list[str]:
    """Return notes on the data of a run: what was changed on reading, which values are missing, what was decided."""
    notes = [*data.train.notes, *decisions.notes]
    if config.label is None and decisions.label != DEFAULT_LABEL:
        notes.append(f"label: {decisions.label} (--label sets another one)")
    if data.found_segment is not None:
        notes.append(f"segments: {data.found_segment}; --segment none switches this off")
    if (missing := missing_values(data.train)) is not None:
        trees = [is_trees(kind) for kind in decisions.rankers]
        how = ["trees choose a branch for them"] * any(trees)
        how += ["networks take the mean of training rows, with an indicator"] * (not all(trees))
        notes.append(f"values of features are missing: {missing}; {', '.join(how)}")
    return notes


@dataclass(frozen=True, eq=False)
class Fitted:
    """The artefact of `fit`: a trained ranker, its scores of the validation rows, and the bias that it estimated."""

    inputs: FitInputs
    ranker: nn.Module
    options: Mapping[str, Any]  # of the ranker, which a method may have changed
    scores: np.ndarray
    report: Mapping[str, Any] | None

    @property
    def kind(self) -> str:
        return self.inputs.kind

    def save(self, folder: Path) -> None:
        """Write the ranker, and the bias that it estimated; the only ranker of a run is later moved to run/model."""
        if is_main():
            write_json(folder / REPORT, {"bias": self.report, "options": dict(self.options)})
            save_ranker(folder / MODEL, self.ranker, self.inputs, self.options)
            _delete_checkpoints(folder)


def _delete_checkpoints(folder: Path) -> None:
    for name in (CHECKPOINTS, STAGE):
        shutil.rmtree(folder / name, ignore_errors=True)


def save_ranker(folder: Path, ranker: nn.Module, inputs: FitInputs, options: Mapping[str, Any]) -> None:
    """Write the files that scoring needs. A sum has the options of its networks in its parts."""
    save_model(
        folder,
        ranker,
        inputs.data.train,
        name=inputs.kind,
        options=options,
        label=inputs.data.label,
        data=inputs.data.fingerprint,
        held_out=inputs.data.validation,
        indicators=inputs.indicators,
    )


def load_fitted(folder: Path, inputs: FitInputs) -> Fitted | None:
    """Load a ranker that was trained before the process was killed; None if there is none."""
    if not (folder / MODEL).is_dir():
        return None
    if is_main():
        _delete_checkpoints(folder)
    ranker, content = load_model(folder).ranker, read_json(folder / REPORT)
    return Fitted(
        inputs, ranker, content["options"], scores_of(ranker, inputs.data.validation.features), content["bias"]
    )


def scores_of(ranker: nn.Module, features: np.ndarray) -> np.ndarray:
    """Return the scores of rows, computed where the ranker is."""
    ranker.eval()
    device = next((parameter.device for parameter in ranker.parameters()), "cpu")
    return score_rows(ranker, features, device=device)


def first_batches(feed: Any) -> Iterable[Lists]:
    """Return the batches that a report of bias is computed from."""
    return (feed(step) for step in range(REPORTED_BATCHES))


# --- Starting from another run ----------------------------------------------------------------------------------------
# Start a run from the ranker of another run: weights matched by feature name and category, or trees to extend.

HINT = "start from a run that has the same method, label, ranker and hidden layers"


def start_from(method: Method, run: Path, log: Log) -> dict[str, Tensor]:
    """Give the ranker of a method, whose encoders are fitted to the log, the weights and normalisation of a run.

    It then has the scores of the run. Return its weights.
    """
    model, ranker = load_model(part_of(run, method.inputs.ranker)), method.serving()
    if isinstance(model.ranker, TreeRanker | Blend):
        raise OptionError("a network cannot start from a run of trees", got=run, hint=HINT)
    if type(model.ranker) is not type(ranker) or _actions(model.ranker) != _actions(ranker):
        raise DataError("the ranker of this run has another kind, or predicts other actions", where=run, hint=HINT)
    try:
        match, weights = match_features(model, log), model.ranker.state_dict()
        load_matched_weights(ranker, weights, match, indicators=model.indicators or ())
    except (KeyError, ValueError) as error:
        raise DataError("the weights of this run have different shapes", where=run, hint=HINT) from error
    return {name: tensor.detach().clone() for name, tensor in ranker.state_dict().items()}


def start_trees(ranker: str, run: Path, log: Log) -> tuple[LinearRanker | None, list[Booster | None]]:
    """Return the anchor of a run that a run of trees extends, if any, and the trees of each part, None if not used."""
    model = load_model(part_of(run, ranker))
    parts = model.ranker.parts if isinstance(model.ranker, Blend) else (Part(model.ranker, ranker),)
    anchor = next((part.ranker for part in parts if isinstance(part.ranker, LinearRanker)), None)
    others = [part for part in parts if part.ranker is not anchor]
    boosters = [part.ranker.booster if part.weight else None for part in others if isinstance(part.ranker, TreeRanker)]
    for booster in boosters:
        if booster is not None and ranker != booster.LIBRARY:
            hint = f"pass --ranker {booster.LIBRARY}"
            raise OptionError(f"the trees of this run are of {booster.LIBRARY}", got=run, hint=hint)
    if len(boosters) < len(others):
        raise OptionError("trees cannot start from a run of a network", got=run, hint=HINT)
    return None if anchor is None else _matched(anchor, model, log), boosters


def _matched(anchor: LinearRanker, model: Model, log: Log) -> LinearRanker:
    """Return a linear ranker that has the scores of the anchor of a model for the features and categories of a log."""
    ranker = LinearRanker(FeatureEncoder(len(log.feature_names), log.categories)).eval()
    fit_encoders(ranker, log.features)
    load_matched_weights(ranker, anchor.state_dict(), match_features(model, log), indicators=())
    return ranker


def _actions(ranker: object) -> tuple[tuple[str, ...], ...] | None:
    return (tuple(ranker.label.actions), ranker.binary) if isinstance(ranker, Synthesised) else None
