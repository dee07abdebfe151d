"""The flavour `pyfunc` of MLflow: `mlflow.pyfunc.load_model(uri).predict(frame)` scores the rows of a pandas frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ultr.errors import DataError, nearest
from ultr.log.readers import as_table
from ultr.rankers.model import Model, load_model
from ultr.rankers.rows import features_of


class ScoredRows:
    """A model that scores frames. Columns are matched by name with the features of training, others are ignored."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def predict(self, frame: Any, params: dict[str, Any] | None = None) -> np.ndarray:
        """Return the score of each row of a pandas frame."""
        names, present = self.model.feature_names, [str(name) for name in frame.columns]
        if absent := [name for name in names if name not in present]:
            what = f"the frame has no column '{absent[0]}', which was a feature in training"
            raise DataError(what, hint=nearest(absent[0], present))
        categorical = [name for name in names if name in self.model.vocabularies]
        numeric = [name for name in names if name not in self.model.vocabularies]
        table, missing = as_table(frame[list(names)]), self.model.missing
        rows = features_of(self.model, table, numeric, categorical, missing=missing, where="the frame")
        return self.model.score_features(rows)


def _load_pyfunc(path: str) -> ScoredRows:
    """Load the folder `model` of a run. MLflow calls this function."""
    return ScoredRows(load_model(Path(path).parent))
