"""Match the features of a trained model with those of a log: features by name, and categories by value.

All code that uses a trained model on another log goes through `match_features`: scoring translates the rows of the log
(`columns`), and training that starts from the model translates its weights (`load_matched_weights`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from ultr.errors import DataError
from ultr.log import Log
from ultr.log.columns import Missing, category_codes, feature_matrix
from ultr.rankers.networks import EncodedRanker, FeatureEncoder


class HasFeatures(Protocol):
    """A log or a model: the names of its features, and the values of categorical ones (code is index + 1)."""

    @property
    def feature_names(self) -> tuple[str, ...]: ...

    @property
    def vocabularies(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, eq=False)
class FeatureMatch:
    """For each feature of a trained model its column in a log; for each code of the log the model's code.

    A value that the model does not know has its code 0. The log may have more features than the model.
    """

    trained: HasFeatures
    log: HasFeatures
    places: np.ndarray
    codes: Mapping[str, np.ndarray]

    @property
    def is_identity(self) -> bool:
        """Whether rows of the log can be passed to the model as they are."""
        same = all(np.array_equal(codes, np.arange(len(codes))) for codes in self.codes.values())
        return same and self.trained.feature_names == self.log.feature_names

    @property
    def extends(self) -> bool:
        """Whether the log has the features of the model, and the model's codes; new values have codes after them."""
        known = (codes[: len(self.trained.vocabularies[name]) + 1] for name, codes in self.codes.items())
        same = all(np.array_equal(codes, np.arange(len(codes))) for codes in known)
        return same and self.trained.feature_names == self.log.feature_names

    def columns(self, features: np.ndarray) -> np.ndarray:
        """Return rows of the log with the columns and codes of the model."""
        if self.is_identity:
            return features
        columns = features[:, self.places]
        for i, name in enumerate(self.trained.feature_names):
            if name in self.codes:
                columns[:, i] = self.codes[name][columns[:, i].astype(np.int64)]
        return columns


def match_features(trained: HasFeatures, log: HasFeatures) -> FeatureMatch:
    """Match the features of a trained model with those of a log.

    Raise DataError if the log has not all features of the model, or has numbers in place of categories.
    """
    place = {name: i for i, name in enumerate(log.feature_names)}
    if missing := [name for name in trained.feature_names if name not in place]:
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        what = f"features that the model was trained on are missing: {names}"
        raise DataError(what, hint="name their columns with --features")
    codes = {}
    for name in trained.feature_names:
        if (name in trained.vocabularies) != (name in log.vocabularies):
            what = f"'{name}' must be {'a category' if name in trained.vocabularies else 'a number'}, as in training"
            raise DataError(what, hint="name the categorical features of training with --categorical")
        if name in trained.vocabularies:
            values = pa.array(log.vocabularies[name]).cast(pa.string())
            indices = pc.index_in(values, value_set=pa.array(trained.vocabularies[name], pa.string()))
            codes[name] = np.append(0, pc.fill_null(indices, -1).to_numpy(zero_copy_only=False) + 1)
    return FeatureMatch(trained, log, np.array([place[name] for name in trained.feature_names], np.int64), codes)


def extended_log(trained: HasFeatures, log: Log) -> Log:
    """Return a log with the features and codes of a model; values that the model does not know have codes after them.

    Trees cannot be translated to other codes, so those that are trained further need such a log.
    """
    match, vocabularies = match_features(trained, log), dict(log.vocabularies)
    if match.extends:
        return log
    features = log.features[:, match.places]
    for i, name in enumerate(trained.feature_names):
        if name not in match.codes:
            continue
        codes, known = match.codes[name].copy(), pa.array(trained.vocabularies[name], pa.string())
        new = np.flatnonzero(codes == 0)[1:]  # the first is code 0, a missing value
        codes[new] = len(known) + 1 + np.arange(len(new))
        features[:, i] = codes[features[:, i].astype(np.int64)]
        values = pa.array(log.vocabularies[name]).cast(pa.string()).take(pa.array(new - 1))
        vocabularies[name] = pa.concat_arrays([known, values])
    vocabularies = {name: vocabularies[name] for name in trained.vocabularies}
    return replace(log, features=features, feature_names=trained.feature_names, vocabularies=vocabularies)


# --- Weights ----------------------------------------------------------------------------------------------------------


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load saved weights into a module with the same features; embeddings get the sizes of the saved ones."""
    resize_embeddings(module, weights)
    module.load_state_dict(weights)


def resize_embeddings(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give the embeddings of a module the sizes that they have in saved weights.

    A default size follows from the number of categories, but a model that started from another keeps the size there.
    """
    for prefix, ranker in _rankers(module):
        for i in ranker.encoder.categories:
            saved = weights.get(f"{prefix}encoder.embeddings.{i}.weight")
            if saved is not None and saved.ndim == 2:
                ranker.resize_embedding(i, saved.shape[1])


@torch.no_grad()
def load_matched_weights(
    module: nn.Module, weights: Mapping[str, Tensor], match: FeatureMatch, *, indicators: Sequence[int] = ()
) -> None:
    """Load weights that were saved for the model's features into a module for the features of the log.

    Embeddings are taken by value: a new value starts as one that was not in training. A feature that the model does not
    have starts with weights of 0, so the module has the scores of the model. `indicators` are the indices of the
    features whose missing values the saved ranker recognises. Raise ValueError if other weights have other shapes.
    """
    matched = dict(weights)
    names, log_names = match.trained.feature_names, match.log.feature_names
    for prefix, ranker in _rankers(module):
        encoder, key = ranker.encoder, f"{prefix}encoder."
        embeddings = {name: matched.pop(f"{key}embeddings.{names.index(name)}.weight") for name in match.codes}
        sizes = {name: embedding.shape[1] for name, embedding in embeddings.items()}
        for name, size in sizes.items():
            ranker.resize_embedding(log_names.index(name), size)
        for i in encoder.categories:
            saved = embeddings.get(log_names[i])
            new = encoder.embedding(i) if saved is None else saved[torch.from_numpy(match.codes[log_names[i]])]
            matched[f"{key}embeddings.{i}.weight"] = new.detach().clone()
        layers = [f"{prefix}{layer}.weight" for layer in ranker.first_layers()]
        extra = encoder.features - len(log_names)
        inputs = _inputs(log_names, encoder.indicators.tolist(), _sizes(encoder, log_names), extra)
        saved_inputs = _inputs(names, [], sizes, extra)
        if weights[layers[0]].shape[1] > len(saved_inputs):
            saved_inputs = _inputs(names, indicators, sizes, extra)
        if weights[layers[0]].shape[1] != len(saved_inputs):
            raise ValueError("the saved network has a different number of inputs")
        unused = weights[f"{key}inverse_deviation"] == 0  # numbers that were constant in training start as new ones
        place = {name: i for i, name in enumerate(saved_inputs) if not (i < len(unused) and unused[i])}
        source = torch.tensor([place.get(name, -1) for name in inputs])
        known, numbers = source >= 0, len(encoder.mean)
        for part in ("mean", "inverse_deviation"):  # the first inputs; those of new features are fitted to the log
            values = getattr(encoder, part).cpu().clone()
            values[known[:numbers]] = weights[f"{key}{part}"][source[:numbers][known[:numbers]]]
            matched[f"{key}{part}"] = values
        for layer in layers:
            values = weights[layer].new_zeros(len(weights[layer]), len(inputs))
            values[:, known] = weights[layer][:, source[known]]
            matched[layer] = values
    expected = {name: tensor.shape for name, tensor in module.state_dict().items()}
    if {name: tensor.shape for name, tensor in matched.items()} != expected:
        raise ValueError("the saved network has different layers")
    module.load_state_dict(matched)


def _rankers(module: nn.Module) -> Iterator[tuple[str, EncodedRanker]]:
    for name, ranker in module.named_modules():
        if isinstance(ranker, EncodedRanker):
            yield f"{name}." if name else "", ranker


def _sizes(encoder: FeatureEncoder, names: Sequence[str]) -> dict[str, int]:
    return {names[i]: encoder.dimension(i) for i in encoder.categories}


def _inputs(names: Sequence[str], indicators: Sequence[int], sizes: Mapping[str, int], extra: int) -> list[object]:
    """Return a name for each input of the first layer, in the order in which `FeatureEncoder` has them."""
    return [
        *(("number", name) for name in names if name not in sizes),
        *(("appended", i) for i in range(extra)),
        *(("missing", names[i]) for i in sorted(indicators)),
        *(("category", name, i) for name in names if name in sizes for i in range(sizes[name])),
    ]


# --- Rows of a table --------------------------------------------------------------------------------------------------
# The features of the rows of an Arrow table, in the order and codes of a trained model.


@dataclass(frozen=True)
class Features:
    """The features of rows: their names, and the values of categorical ones."""

    feature_names: tuple[str, ...]
    vocabularies: Mapping[str, Any]


def features_of(
    trained: HasFeatures,
    table: pa.Table,
    features: Sequence[str],
    categorical: Sequence[str],
    *,
    missing: Missing,
    where: object,
) -> np.ndarray:
    """Return features [rows, features] for a trained model: its features by name, and its categories by value.

    `features` are the columns with numbers or lists of numbers. Spark sends this function to its workers.
    """
    matrix, names = np.empty((table.num_rows, 0), np.float32), tuple[str, ...]()
    if features:
        matrix, names = feature_matrix(table, tuple(features), where=where, missing=missing)
    vocabularies = {}
    for name in categorical:
        codes, vocabularies[name] = category_codes(table[name], name, where)
        matrix, names = np.column_stack([matrix, codes]), (*names, name)
    return match_features(trained, Features(names, vocabularies)).columns(matrix)
