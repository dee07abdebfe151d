"""The features of the rows of an Arrow table, in the order and codes of a trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ultr.log.values import Missing, category_codes, feature_matrix
from ultr.rankers.matching import HasFeatures, match_features


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
