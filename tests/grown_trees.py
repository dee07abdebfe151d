"""Small ensembles of trees of both libraries, with categories, double thresholds and missing values."""

from __future__ import annotations

import numpy as np

from ultr.rankers.boosters import BOOSTERS, Booster, Boosting, TreeRows

NAMES = ("a", "b", "colour", "d")
GROWN = {
    "default": {},
    "missing": {},
    "zero is missing": {"zero_as_missing": True},
    "pruned": {"gamma": 3.0, "max_leaves": 12, "grow_policy": "lossguide"},
}
KINDS = [
    ("lightgbm", "default"),
    ("lightgbm", "missing"),
    ("lightgbm", "zero is missing"),
    ("xgboost", "default"),
    ("xgboost", "missing"),
    ("xgboost", "pruned"),
]
CATEGORIES = 40


def grow(library: str, parameters: dict, *, missing: bool, rounds: int = 8) -> Booster:
    rng = np.random.default_rng(0)
    features = np.round(rng.normal(size=(1500, 4)), 1).astype(np.float32)
    features[:, 2] = rng.integers(0, CATEGORIES - 5, len(features))  # the last five codes are never seen
    label = features[:, 0] + features[:, 3] + 2 * np.isin(features[:, 2], (3, 5, 7, 33)) + rng.normal(size=1500) / 10
    if missing:
        features[rng.random(1500) < 0.1, 0] = np.nan
    objectives = {
        "lightgbm": {"objective": "regression"},
        "xgboost": {"objective": "reg:squarederror", "base_score": 0.7},
    }
    grown: list[Booster] = []
    rows = TreeRows(features, None, NAMES, (2,), label=label.astype(np.float32))
    how = Boosting(rounds, 0.3, parameters=parameters, library_options=objectives[library])
    BOOSTERS[library].grow(rows, how, lambda booster, _: bool(grown.append(booster)))
    return grown[-1]
