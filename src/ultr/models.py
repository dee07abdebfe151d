"""Models: what is left of a run when it has learned, from features to scores and nothing of the bias."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from ultr.arguments import checked
from ultr.checkpoint import load_tensors, read_json, save_tensors, write_json
from ultr.errors import DataError, OptionError
from ultr.files import atomic_path
from ultr.formats import check_format
from ultr.labels import Label
from ultr.log import Log
from ultr.log.build import Missing
from ultr.methods import Method, MethodInputs
from ultr.rankers import FeatureEncoder, Synthesised, WithConstants, make_ranker, score_rows
from ultr.rankers.boosters import BOOSTERS, Booster, TreeRanker, is_trees
from ultr.training import choose_device

FORMAT = 1
MAX_LAYERS = 1000
ROWS, ROWS_KEPT = "rows.safetensors", 512


@dataclass(frozen=True, eq=False)
class Model:
    """A ranker that scores, the features it takes, and the label it was trained for."""

    ranker: nn.Module
    feature_names: tuple[str, ...]
    label: str
    vocabularies: Mapping[str, Any] = field(default_factory=dict)  # categorical feature -> its values, as for Log

    @property
    def missing(self) -> Missing:
        """Whether missing values are kept, as trees have branches for them, or refused."""
        return "keep" if isinstance(self.ranker, TreeRanker) else "refuse"

    @checked
    def score(self, log: Log, *, device: str = "cpu") -> np.ndarray:
        """A score for each row of a log with the same features, in any order."""
        return self.score_features(self.columns_of(log), device=device)

    @checked
    def score_features(self, features: np.ndarray, *, device: str = "cpu") -> np.ndarray:
        """A score for each row of features, which are those of the model in its order."""
        chosen, width = choose_device(device), len(self.feature_names)
        if features.ndim != 2 or features.shape[1] != width:
            raise DataError(f"features should be [rows, {width}], as in training", got=list(features.shape))
        with np.errstate(over="ignore"):  # what is too large counts as other outliers do
            features = features.astype(np.float32, copy=False)
        return score_rows(self.ranker.to(chosen), features, device=chosen)

    def view(self, log: Log) -> Log:
        """The log with the model's features alone, in its order and with its codes."""
        features, names = self.columns_of(log), self.feature_names
        return replace(log, features=features, feature_names=names, vocabularies=self.vocabularies)

    def columns_of(self, log: Log) -> np.ndarray:
        if log.feature_names == self.feature_names and not self.vocabularies:
            return log.features
        place = {name: i for i, name in enumerate(log.feature_names)}
        lacking = [name for name in self.feature_names if name not in place]
        if lacking:
            shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
            raise DataError(
                f"the data lacks features the model was trained on: {shown}", mend="name them with --features"
            )
        columns = log.features[:, [place[name] for name in self.feature_names]]
        for i, name in enumerate(self.feature_names):
            if (name in self.vocabularies) != (name in log.vocabularies):
                raise DataError(f"'{name}' should be a category here as in training", mend="name it with --categorical")
            if name in self.vocabularies:
                translation = np.append(0, self.codes_of(name, log.vocabularies[name]))
                columns[:, i] = translation[columns[:, i].astype(np.int64)]
        return columns

    def codes_of(self, name: str, values: Any) -> np.ndarray:
        """The codes of values of a categorical feature, 0 for those that training never saw."""
        found = pc.index_in(pa.array(values).cast(pa.string()), value_set=self.vocabularies[name])
        return np.asarray(pc.fill_null(found, -1).to_numpy(zero_copy_only=False) + 1)


def save_model(folder: Path, method: Method, log: Log, *, data: str, held_out: Log | None = None) -> None:
    """Write what scoring needs of a method that has learned from a log, and some rows of what was held out."""
    serving, inputs = method.serving(), method.inputs
    constants = len(serving.constants) if isinstance(serving, WithConstants) else 0
    description = {
        "format": FORMAT,
        "ranker": inputs.ranker,
        "ranker_options": dict(inputs.ranker_options),
        "feature_names": list(log.feature_names),
        "vocabularies": {name: values.to_pylist() for name, values in log.vocabularies.items()},
        "constants": constants,
        "binary": list(serving.binary) if isinstance(serving, Synthesised) else None,
        "label": inputs.label.expression,
        "data": data,
    }
    with atomic_path(folder, overwrite=True, folder=True) as temporary:
        save_tensors(temporary / "weights.safetensors", serving.state_dict())
        _save_rows(temporary, held_out)
        write_json(temporary / "model.json", description)


def save_trees(
    folder: Path,
    booster: Booster,
    rounds: int,
    inputs: MethodInputs,
    log: Log,
    *,
    data: str,
    held_out: Log | None = None,
) -> None:
    """Write what scoring needs of trees: the library's own file, and what its columns are."""
    description = {
        "format": FORMAT,
        "ranker": inputs.ranker,
        "feature_names": list(log.feature_names),
        "vocabularies": {name: values.to_pylist() for name, values in log.vocabularies.items()},
        "label": inputs.label.expression,
        "data": data,
        "rounds": rounds,
    }
    with atomic_path(folder, overwrite=True, folder=True) as temporary:
        booster.save(temporary / booster.FILE, rounds=rounds)
        description["sha256"] = _sha256(temporary / booster.FILE)
        _save_rows(temporary, held_out)
        write_json(temporary / "model.json", description)


def _save_rows(folder: Path, log: Log | None) -> None:
    """Keep features of rows spread over a log, to try the model on where it goes."""
    if log is not None and log.rows:
        rows = log.features[spread(log.rows, ROWS_KEPT)]
        save_tensors(folder / ROWS, {"features": torch.from_numpy(np.array(rows, np.float32))})


def spread(count: int, most: int) -> np.ndarray:
    """So many places of `count`, at most, evenly spread."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def kept_rows(run: str | Path) -> np.ndarray | None:
    """The rows [rows, features] that a run has kept of what was held out; None if it keeps none."""
    path = Path(run) / "model" / ROWS
    if not path.is_file():
        return None
    rows = load_tensors(path).get("features")
    if rows is None or rows.ndim != 2 or not len(rows):
        raise DataError("there are no rows of features in it", where=path, mend="train again")
    return np.asarray(rows.numpy(), np.float32)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load_trees(folder: Path, about: Mapping[str, Any], categorical: tuple[int, ...]) -> TreeRanker:
    """Trees from a library's file, which must be the one that was written: libraries do not check all they read."""
    library = BOOSTERS[about["ranker"]]
    path = folder / library.FILE
    if not path.is_file() or _sha256(path) != about["sha256"]:
        raise DataError(
            "the trees are not those that were written", where=path, mend="train again, or restore the file"
        )
    return TreeRanker(library.load(path, categorical))


def _network(about: Mapping[str, Any], inputs: int, categories: Mapping[int, int], constants: int) -> nn.Module:
    label, binary, options = Label(about["label"]), about.get("binary"), dict(about["ranker_options"])
    if len(options.get("hidden", ())) > MAX_LAYERS:
        raise ValueError(f"{len(options['hidden']):,} layers, where {MAX_LAYERS} are the most")
    outputs = 1 if binary is None else len(label.actions)
    ranker = make_ranker(about["ranker"], FeatureEncoder(inputs, categories), outputs=outputs, **options)
    if binary is not None:
        ranker = Synthesised(ranker, label, binary)
    return WithConstants(ranker, torch.zeros(constants)) if constants else ranker


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@checked
def load_model(run: str | Path) -> Model:
    """The model of a finished run."""
    folder = Path(run) / "model"
    about = read_json(folder / "model.json")
    check_format(about, FORMAT, what="the model", where=folder, mend="train again")
    try:
        names, constants = tuple(about["feature_names"]), int(about.get("constants", 0))
        vocabularies = {name: pa.array(values, pa.string()) for name, values in about["vocabularies"].items()}
        categories = {names.index(name): len(values) + 1 for name, values in vocabularies.items()}
        if is_trees(about["ranker"]):
            trees = _load_trees(folder, about, tuple(sorted(categories)))
            return Model(trees.eval(), names, str(about["label"]), vocabularies)
        weights = load_tensors(folder / "weights.safetensors")
        if not all(isinstance(name, str) for name in about["feature_names"]) or len(names) + constants < 1:
            raise TypeError("its features are not named")
        if constants != weights.get("constants", torch.empty(0)).numel():
            raise ValueError("its constants are not those it describes")
        with torch.device("meta"):  # shapes that the file does not have are refused before they take memory
            expected = _network(about, len(names) + constants, categories, constants).state_dict()
        if _kinds(expected) != _kinds(weights):
            raise ValueError("its weights are not those of the network it describes")
        ranker = _network(about, len(names) + constants, categories, constants)
        ranker.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OptionError, OverflowError) as error:
        raise DataError(f"the model cannot be loaded ({error})", where=folder, mend="train again") from error
    return Model(ranker.eval(), names, str(about["label"]), vocabularies)
