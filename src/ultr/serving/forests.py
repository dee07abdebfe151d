"""Trees of LightGBM and XGBoost as arrays, translated from the libraries' own files, for other formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ultr.errors import DataError
from ultr.rankers.boosters import Booster

ZERO = float(np.float32(1e-35))  # LightGBM treats values up to this distance from zero as zero
_CATEGORICAL, _DEFAULT_LEFT, _MISSING_IS_ZERO, _MISSING_IS_NAN = 1, 2, 1, 2  # bits of LightGBM's decision_type


class UnsupportedTreesError(DataError):
    """A format cannot express these trees; the library's own file can."""


@dataclass(frozen=True, eq=False)
class Tree:
    """A binary tree as arrays with one entry for each split; a negative child is the leaf ~child.

    A value goes left if value <= threshold, or if value < threshold with `strict`. At a split by categories, a value
    that is one of them goes left. `missing_left` says where missing values go.
    """

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    missing_left: np.ndarray
    leaves: np.ndarray
    categories: Mapping[int, np.ndarray] = field(default_factory=dict)  # split -> the values that go left
    strict: bool = False


@dataclass(frozen=True, eq=False)
class Forest:
    """Trees whose leaves are added to a base.

    Values up to the distance `zero` from zero count as zero; in the columns `zero_is_missing`, zero is a missing value.
    """

    trees: Sequence[Tree]
    base: float
    zero: float
    zero_is_missing: frozenset[int]


def forest_of(booster: Booster) -> Forest:
    """Return the trees of a booster as arrays; raise UnsupportedTreesError if they are of another kind."""
    return _from_lightgbm(booster) if booster.LIBRARY == "lightgbm" else _from_xgboost(booster)


def _from_lightgbm(booster: Booster) -> Forest:
    text = booster.trees.model_to_string(num_iteration=booster.rounds)
    zero_is_missing = set(booster.categorical)
    trees = []
    for part in text.partition("\nend of trees")[0].split("\nTree=")[1:]:
        entries = dict(line.split("=", 1) for line in part.splitlines()[1:] if "=" in line)
        if entries.get("is_linear", "0") != "0":
            raise UnsupportedTreesError("the leaves are linear models", hint="train without linear_tree")
        trees.append(_lightgbm_tree(entries, zero_is_missing))
    return Forest(trees, 0.0, ZERO, frozenset(zero_is_missing))


def _lightgbm_tree(entries: Mapping[str, str], zero_is_missing: set[int]) -> Tree:
    def numbers(name: str, kind: Any) -> np.ndarray:
        return np.array(entries.get(name, "").split(), kind)

    feature, threshold = numbers("split_feature", np.int64), numbers("threshold", np.float64)
    decision = numbers("decision_type", np.int64)
    missing = decision >> 2 & 3
    is_category = decision & _CATEGORICAL == 1
    zero_is_missing |= set(feature[(missing == _MISSING_IS_ZERO) & ~is_category].tolist())
    # A missing value counts as zero if training saw none; it is not in any set of categories.
    missing_left = np.where(missing == 0, threshold >= 0, decision & _DEFAULT_LEFT > 0) & ~is_category
    bounds, words = numbers("cat_boundaries", np.int64), numbers("cat_threshold", np.uint32)
    categories = {}
    for split in np.flatnonzero(is_category).tolist():
        index = int(threshold[split])
        bits = np.unpackbits(words[bounds[index] : bounds[index + 1]].astype("<u4").view(np.uint8), bitorder="little")
        categories[split] = np.flatnonzero(bits)
    return Tree(
        feature,
        threshold,
        numbers("left_child", np.int64),
        numbers("right_child", np.int64),
        missing_left,
        numbers("leaf_value", np.float64),
        categories,
    )


def _from_xgboost(booster: Booster) -> Forest:
    content = json.loads(bytes(booster.trees[: booster.rounds].save_raw("json")))["learner"]
    parameters, boosted = content["learner_model_param"], content["gradient_booster"]
    base = np.array(str(parameters["base_score"]).strip("[]").split(","), np.float32)
    if boosted["name"] != "gbtree" or len(base) != 1 or int(parameters["num_target"]) > 1:
        raise UnsupportedTreesError(f"boosters of type {boosted['name']} with {len(base)} outputs are not supported")
    trees = [_xgboost_tree(tree) for tree in boosted["model"]["trees"]]
    return Forest(trees, float(base[0]), 0.0, frozenset(booster.categorical))


def _xgboost_tree(tree: Mapping[str, Any]) -> Tree:
    left, right = np.array(tree["left_children"], np.int64), np.array(tree["right_children"], np.int64)
    values = np.array(tree["split_conditions"], np.float32).astype(np.float64)
    nodes = [0]  # the nodes that can be reached; others were pruned
    for node in nodes:
        nodes += [int(left[node]), int(right[node])] if left[node] >= 0 else []
    splits = np.array([node for node in nodes if left[node] >= 0], np.int64)
    leaves = np.array([node for node in nodes if left[node] < 0], np.int64)
    number = np.zeros(len(left), np.int64)  # of each node: the index of a split, or ~index of a leaf
    number[splits], number[leaves] = np.arange(len(splits)), ~np.arange(len(leaves))
    reached = set(nodes)
    sets = zip(tree["categories_nodes"], tree["categories_segments"], tree["categories_sizes"], strict=True)
    categories = {
        int(number[node]): np.array(tree["categories"][start : start + size], np.int64)
        for node, start, size in sets
        if node in reached
    }
    turned = np.array(tree["split_type"], np.int64)[splits] == 1  # XGBoost sends the categories of a split right
    to_left, to_right = number[left[splits]], number[right[splits]]
    return Tree(
        np.array(tree["split_indices"], np.int64)[splits],
        values[splits],
        np.where(turned, to_right, to_left),
        np.where(turned, to_left, to_right),
        np.array(tree["default_left"], bool)[splits] ^ turned,
        values[leaves],
        categories,
        strict=True,
    )
