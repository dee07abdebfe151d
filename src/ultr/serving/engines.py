"""Trees for search engines: model files for Vespa, Solr, Elasticsearch and OpenSearch, and templates of their features.

Engines compare and add in float32 (Vespa in double), and each has its own comparison:

Vespa                            x < t
Solr (module ltr)                x <= float32(t + 1e-6)
Elasticsearch and OpenSearch     x < t (plugin ltr, model/xgboost+json)

So each threshold is moved to the float32 next to it that sends every float32 value to the same side.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ultr.errors import DataError
from ultr.rankers.boosters import Booster
from ultr.serving.forests import Tree, UnsupportedTreesError, forest_of

MAX_NODES = 500_000  # of all trees together
MAX_DEPTH = 200  # parsers of JSON have a limit
FILL_IN = "FILL_IN"  # marks what the user must write
DISTIL = "pass --distill LOG, which learns smaller trees from the scores"
SLACK = np.float32(1e-6)  # Solr adds it to each threshold
LARGEST = np.finfo(np.float32).max
RANK_FEATURE = re.compile(r"[A-Za-z_]\w*\([\w.,: -]*\)(\.\w+)*")  # of Vespa, such as bm25(title) or attribute(price)


class Branch(NamedTuple):
    """A split: x < `below` goes left, or at a split by categories, a value that is one of them; else right."""

    feature: str
    below: np.float32
    missing_left: bool
    left: Any  # Branch, or float: a leaf
    right: Any
    categories: tuple[int, ...] = ()  # codes


@dataclass(frozen=True)
class EngineFeature:
    """A feature that an engine computes: a number, or whether a category has a value, as 1 or 0."""

    name: str
    column: int  # of the model
    code: int | None = None  # of the value of the category; None for a number, and for a category in Vespa
    value: str | None = None


@dataclass(frozen=True, eq=False)
class EngineTrees:
    """Trees with the features of an engine, in its form."""

    trees: Sequence[Any]  # each a Branch or a leaf
    features: Sequence[EngineFeature]  # those that the trees use, in the order of the model
    vocabularies: Mapping[int, tuple[str, ...]]

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """Return the scores of rows of the model's features, where code 0 is a missing category."""
        columns = {each.name: _values(each, rows, self.vocabularies) for each in self.features}
        total, places = np.zeros(len(rows)), np.arange(len(rows))
        for tree in self.trees:
            waiting = [(tree, places)]
            while waiting:
                node, chosen = waiting.pop()
                if not len(chosen):
                    continue
                if not isinstance(node, Branch):
                    total[chosen] += node
                    continue
                values = columns[node.feature][chosen]
                goes_left = np.isin(values, node.categories) if node.categories else values < node.below
                goes_left = np.where(np.isnan(values), node.missing_left, goes_left)
                waiting += [(node.left, chosen[goes_left]), (node.right, chosen[~goes_left])]
        return total


def engine_trees(
    boosters: Sequence[tuple[Booster, float]],
    names: Sequence[str],
    vocabularies: Mapping[str, Sequence[str]],
    engine: str,
) -> EngineTrees:
    """Return the weighted sum of boosters in the form of an engine.

    Raise UnsupportedTreesError if the engine cannot express the trees.
    """
    values = {names.index(name): tuple(values) for name, values in vocabularies.items()}
    columns = _names(names, engine)
    one_hot = None if engine == "vespa" else lambda column, code: f"{columns[column]}:{values[column][code - 1]}"
    trees: list[Any] = []
    base = 0.0
    for booster, weight in boosters:
        forest = forest_of(booster)
        if unsupported := sorted(forest.zero_is_missing - set(booster.categorical)):
            what = f"{engine} cannot treat zero as a missing value, as the trees do for '{names[unsupported[0]]}'"
            raise UnsupportedTreesError(what, hint=f"train without zero_as_missing, or {DISTIL}")
        for tree in forest.trees:
            weighted = replace(tree, leaves=weight * tree.leaves)
            trees.append(_branch(weighted, 0 if len(tree.feature) else ~0, columns, values, one_hot, forest.zero))
        base += weight * forest.base
    trees += [base] if base or not trees else []
    used = {node.feature for tree in trees for node in _branches(tree)}
    every = [
        feature
        for column in range(len(names))
        for feature in _features(column, columns[column], values.get(column), one_hot)
    ]
    features = [feature for feature in every if feature.name in used]
    if len({feature.name for feature in features}) < len(features):
        what = f"two features have the same name in {engine}"
        raise DataError(what, got=[feature.name for feature in features][:10], hint="rename a feature, and train again")
    return EngineTrees(trees, features, values)


def _features(
    column: int, name: str, values: Sequence[str] | None, one_hot: Callable[[int, int], str] | None
) -> list[EngineFeature]:
    if values is None or one_hot is None:
        return [EngineFeature(name, column)]
    return [EngineFeature(one_hot(column, code), column, code, value) for code, value in enumerate(values, start=1)]


def _values(feature: EngineFeature, rows: np.ndarray, vocabularies: Mapping[int, Sequence[str]]) -> np.ndarray:
    """Return the values of a feature in an engine."""
    column = rows[:, feature.column].astype(np.float32)
    if feature.code is not None:
        return np.asarray(column == feature.code, np.float32)
    return np.where(column == 0, np.float32(np.nan), column) if feature.column in vocabularies else column


def _branch(
    tree: Tree,
    number: int,
    names: Sequence[str],
    values: Mapping[int, Sequence[str]],
    one_hot: Callable[[int, int], str] | None,
    zero: float,
    depth: int = 0,
) -> Any:
    """Return a node of a tree as a Branch, or as a float; a negative number is a leaf."""
    if number < 0:
        return float(tree.leaves[~number])
    if depth > MAX_DEPTH:
        raise UnsupportedTreesError(
            f"a tree is deeper than {MAX_DEPTH} splits", hint=f"train with max_depth, or {DISTIL}"
        )
    left, right = (
        _branch(tree, int(to[number]), names, values, one_hot, zero, depth + 1) for to in (tree.left, tree.right)
    )
    column, missing_left = int(tree.feature[number]), bool(tree.missing_left[number])
    if number not in tree.categories:
        return Branch(names[column], _below(tree.threshold[number], tree.strict, zero), missing_left, left, right)
    every = range(1, len(values[column]) + 1)
    chosen = tuple(code for code in every if code in set(tree.categories[number].tolist()))
    if missing_left:  # an unknown value must go left too, so that those of the other side are listed
        chosen, left, right = tuple(code for code in every if code not in chosen), right, left
    if one_hot is None:
        return Branch(names[column], np.float32(0), False, left, right, chosen) if chosen else right
    node = right
    for code in reversed(chosen):
        node = Branch(one_hot(column, code), np.float32(0.5), True, node, left)
    return node


def _below(threshold: float, strict: bool, zero: float) -> np.float32:
    """Return the float32 t with which x < t for the same float32 x as x <= threshold (x < threshold if `strict`).

    Values x up to the distance `zero` from zero count as zero.
    """
    if 0 < abs(threshold) <= zero:
        threshold, strict = (zero, False) if threshold > 0 else (-zero, True)
    with np.errstate(over="ignore"):
        below = np.float32(threshold)
    if (float(below) < threshold) if strict else (float(below) <= threshold):
        below = np.nextafter(below, np.float32(np.inf))
    return np.clip(below, -LARGEST, LARGEST)


def _branches(node: Any) -> Iterator[Branch]:
    """Yield the branches of a tree; those that are in it several times, only once."""
    waiting, seen = [node], set[int]()
    while waiting:
        branch = waiting.pop()
        if isinstance(branch, Branch) and id(branch) not in seen:
            seen.add(id(branch))
            yield branch
            waiting += [branch.left, branch.right]


class _Count:
    """The number of nodes that were written, and the number of the next one in its tree."""

    def __init__(self) -> None:
        self.all = self.of_tree = 0

    def next(self, depth: int) -> int:
        self.all, self.of_tree = self.all + 1, self.of_tree + 1
        if self.all > MAX_NODES or depth > MAX_DEPTH:
            what = f"the trees need more than {MAX_NODES:,} nodes or {MAX_DEPTH} levels"
            raise UnsupportedTreesError(f"{what}, because each value of a set of categories is a split", hint=DISTIL)
        return self.of_tree - 1


# --- Vespa ------------------------------------------------------------------------------------------------------------


def _names(names: Sequence[str], engine: str) -> list[str]:
    """Return the names of features in an engine; those of Vespa are rank features or names of functions."""
    if engine != "vespa":
        return list(names)
    found: list[str] = []
    for name in names:
        plain = name if RANK_FEATURE.fullmatch(name) else _identifier(name)
        found.append(plain if plain not in found else f"{plain}_{len(found)}")
    return found


def _identifier(name: str) -> str:
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{plain}" if plain[:1].isdigit() or not plain else plain


def vespa_files(model: EngineTrees, names: Sequence[str], name: str) -> dict[str, str]:
    """Return the model as a JSON file for `lightgbm("NAME.json")`, and a rank profile that uses it.

    The JSON has the form of LightGBM's `dump_model`. Vespa reads `<=` as `<`, so it is not a model for LightGBM.
    """
    for values in model.vocabularies.values():
        for value in values:
            if re.search(r'["\\\x00-\x1f]', value):
                hint = "replace quotes, backslashes and control characters in the log, and train again"
                raise UnsupportedTreesError("Vespa cannot compare with this category", got=repr(value), hint=hint)
    columns, name = _names(names, "vespa"), _identifier(name)
    place = {feature.name: feature.column for feature in model.features}
    count = _Count()

    def written(node: Any, depth: int = 0) -> dict[str, Any]:
        count.next(depth)
        if not isinstance(node, Branch):
            return {"leaf_value": node}
        threshold = "||".join(str(code - 1) for code in node.categories) if node.categories else float(node.below)
        return {
            "split_feature": place[node.feature],
            "threshold": threshold,
            "decision_type": "==" if node.categories else "<=",
            "default_left": node.missing_left,
            "missing_type": "NaN",
            "left_child": written(node.left, depth + 1),
            "right_child": written(node.right, depth + 1),
        }

    infos: dict[str, Any] = {
        column: {"min_value": 0, "max_value": 0, "values": list(range(len(model.vocabularies.get(i, ()))))}
        for i, column in enumerate(columns)
    }
    content = {
        "name": "tree",
        "version": "v4",
        "objective": "regression",
        "feature_names": columns,
        "feature_infos": infos,
        "pandas_categorical": [
            list(model.vocabularies[i]) for i in sorted(model.vocabularies) if model.vocabularies[i]
        ],
        "tree_info": [{"tree_index": i, "tree_structure": written(tree)} for i, tree in enumerate(model.trees)],
    }
    return {f"{name}.json": json.dumps(content), f"{name}.profile": _profile(model, names, name)}


def _profile(model: EngineTrees, names: Sequence[str], name: str) -> str:
    lines = [
        f"# Put {name}.json into models/ and this file into schemas/SCHEMA/ of the application package.",
        f"# Replace each {FILL_IN} by an expression that has the value of the feature in the log.",
        "# A field of type float or double without a value is a missing value (NaN). A category is a string attribute.",
        f"rank-profile {name} {{",
    ]
    for feature in model.features:
        if not RANK_FEATURE.fullmatch(feature.name):
            original = names[feature.column]
            comment = "" if feature.name == original else f"  # {json.dumps(original)}"
            lines += [
                f"    function {feature.name}() {{{comment}",
                f"        expression: attribute({FILL_IN})",
                "    }",
            ]
    lines += [
        "    first-phase {",
        f"        expression: nativeRank  # {FILL_IN}: what chooses the candidates",
        "    }",
        "    second-phase {",
        f'        expression: lightgbm("{name}.json")',
        "    }",
        "}",
    ]
    return "\n".join(lines) + "\n"


# --- Solr -------------------------------------------------------------------------------------------------------------


def solr_files(model: EngineTrees, _names: Sequence[str], name: str) -> dict[str, str]:
    """Return a MultipleAdditiveTreesModel, and a template of its features."""
    count = _Count()

    def written(node: Any, depth: int = 0) -> dict[str, Any]:
        count.next(depth)
        if not isinstance(node, Branch):
            return {"value": _float32(node)}
        return {
            "feature": node.feature,
            "threshold": _float32(_solr_threshold(node.below)),
            "missing": "left" if node.missing_left else "right",
            "left": written(node.left, depth + 1),
            "right": written(node.right, depth + 1),
        }

    trees = [{"weight": "1", "root": written(tree)} for tree in model.trees]
    content = {
        "store": name,
        "class": "org.apache.solr.ltr.model.MultipleAdditiveTreesModel",
        "name": name,
        "features": [{"name": feature.name} for feature in model.features],
        "params": {"isNullSameAsZero": False, "trees": trees},
    }
    features = [{"store": name, "name": feature.name, **_solr_feature(feature)} for feature in model.features]
    return {"solr-model.json": json.dumps(content), "solr-features.json": json.dumps(features, indent=2) + "\n"}


def _solr_feature(feature: EngineFeature) -> dict[str, Any]:
    package = "org.apache.solr.ltr.feature"
    if feature.value is not None:
        query = f"{{!term f={FILL_IN}}}{feature.value}"
        return {"class": f"{package}.SolrFeature", "params": {"fq": [query]}}
    return {"class": f"{package}.FieldValueFeature", "params": {"field": FILL_IN, "defaultValue": "NaN"}}


def _solr_threshold(below: np.float32) -> np.float32:
    """Return the t for which float32(t + 1e-6) is the float32 before `below`, or the closest one before that."""
    wanted = np.nextafter(below, np.float32(-np.inf))
    near = np.float32(wanted - SLACK)
    lower, higher = (np.nextafter(near, np.float32(side)) for side in (-np.inf, np.inf))
    reached = {float(t + SLACK): t for t in (np.nextafter(lower, np.float32(-np.inf)), lower, near, higher)}
    return reached[max(each for each in reached if each <= wanted)]


def _float32(value: float | np.float32) -> str:
    return repr(float(np.float32(value)))


# --- Elasticsearch and OpenSearch -------------------------------------------------------------------------------------


def ltr_files(model: EngineTrees, _names: Sequence[str], name: str) -> dict[str, str]:
    """Return the request that creates a model of the type model/xgboost+json, and a template of its feature set."""
    count = _Count()

    def written(node: Any, depth: int = 0) -> dict[str, Any]:
        number = count.next(depth)
        if not isinstance(node, Branch):
            return {"nodeid": number, "leaf": float(np.float32(node))}
        children = [written(node.left, depth + 1), written(node.right, depth + 1)]
        yes, no = (child["nodeid"] for child in children)
        return {
            "nodeid": number,
            "depth": depth,
            "split": node.feature,
            "split_condition": float(node.below),
            "yes": yes,
            "no": no,
            "missing": yes if node.missing_left else no,
            "children": children,
        }

    trees = []
    for tree in model.trees:
        count.of_tree = 0
        trees.append(written(tree))
    created = {"model": {"name": name, "model": {"type": "model/xgboost+json", "definition": json.dumps(trees)}}}
    features = [
        {"name": feature.name, "params": [], "template_language": "mustache", "template": _ltr_template(feature)}
        for feature in model.features
    ]
    return {
        "ltr-model.json": json.dumps(created),
        "ltr-features.json": json.dumps({"featureset": {"features": features}}, indent=2) + "\n",
    }


def _ltr_template(feature: EngineFeature) -> dict[str, Any]:
    if feature.value is not None:
        return {"constant_score": {"filter": {"term": {FILL_IN: feature.value}}}}
    factor = {"field": FILL_IN}
    has_value = {"exists": {"field": FILL_IN}}  # without a value, nothing matches: the feature is missing
    return {"function_score": {"query": has_value, "field_value_factor": factor, "boost_mode": "replace"}}


Files = Callable[[EngineTrees, Sequence[str], str], dict[str, str]]
ENGINES: dict[str, Files] = {
    "vespa": vespa_files,
    "solr": solr_files,
    "elasticsearch": ltr_files,
    "opensearch": ltr_files,
}
