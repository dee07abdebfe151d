"""ONNX graphs that are made here: of trees of LightGBM and XGBoost, and of sums of rankers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ultr.rankers.boosters import Booster
from ultr.rankers.combined import Part
from ultr.serving.exported import INPUT, OUTPUT
from ultr.serving.forests import Forest, Tree, UnsupportedTreesError, forest_of

# --- Trees ------------------------------------------------------------------------------------------------------------
# The ONNX model compares and adds in double precision, as LightGBM does. Thresholds of LightGBM are doubles: rounded to
# float32, they would send a value on a threshold to the other side.

OPSET, ML_OPSET, IR_VERSION = 18, 3, 8
MAX_NODES = 2_000_000


def trees_to_onnx(booster: Booster, features: int) -> bytes:
    """Return trees as ONNX, from `features`, float32 [requests, items, features], to `scores` [requests, items]."""
    return _model(forest_of(booster), features)


class _Nodes:
    """The attributes of TreeEnsembleRegressor: lists with one entry for each node of each tree."""

    def __init__(self) -> None:
        names = ("treeids", "nodeids", "featureids", "modes", "truenodeids", "falsenodeids", "missing", "values")
        self.columns: dict[str, list[Any]] = {name: [] for name in names}
        self.targets: dict[str, list[Any]] = {"treeids": [], "nodeids": [], "weights": []}

    def add(self, number: int, tree: Tree) -> None:
        """Add a tree: its splits in order, then its leaves, then the further comparisons of splits by categories."""
        splits, leaves = len(tree.feature), len(tree.leaves)
        node_of = (
            np.where(tree.left < 0, splits + ~tree.left, tree.left),
            np.where(tree.right < 0, splits + ~tree.right, tree.right),
        )
        mode, more = "BRANCH_LT" if tree.strict else "BRANCH_LEQ", splits + leaves
        for split in range(splits):
            feature, missing = int(tree.feature[split]), int(tree.missing_left[split])
            yes, no = int(node_of[0][split]), int(node_of[1][split])
            if split not in tree.categories:
                self._node(number, split, feature, mode, yes, no, missing, float(tree.threshold[split]))
                continue
            values, node = tree.categories[split].tolist() or [-1], split  # -1 is never equal: codes are not negative
            for i, value in enumerate(values):
                last = i == len(values) - 1
                self._node(number, node, feature, "BRANCH_EQ", yes, no if last else more, missing, float(value))
                node, more = more, more + (not last)
        for leaf, weight in enumerate(tree.leaves.tolist()):
            self._node(number, splits + leaf, 0, "LEAF", 0, 0, 0, 0.0)
            for name, value in (("treeids", number), ("nodeids", splits + leaf), ("weights", weight)):
                self.targets[name].append(value)
        if len(self.columns["values"]) > MAX_NODES:
            what = (
                f"the trees need more than {MAX_NODES:,} nodes in ONNX, which has one node for each category of a split"
            )
            raise UnsupportedTreesError(what, hint="train with fewer categories, rounds or leaves")

    def _node(self, *entries: Any) -> None:
        for column, value in zip(self.columns.values(), entries, strict=True):
            column.append(value)

    def attributes(self, helper: Any, double: int, base: float) -> dict[str, Any]:
        def tensor(name: str, values: Iterable[float]) -> Any:
            listed = list(values)
            return helper.make_tensor(name, double, [len(listed)], listed)

        columns, targets = dict(self.columns), self.targets
        missing, values = columns.pop("missing"), columns.pop("values")
        return {
            **{f"nodes_{name}": entries for name, entries in columns.items()},
            "nodes_missing_value_tracks_true": missing,
            "nodes_values_as_tensor": tensor("nodes_values", values),
            "target_treeids": targets["treeids"],
            "target_nodeids": targets["nodeids"],
            "target_ids": [0] * len(targets["nodeids"]),
            "target_weights_as_tensor": tensor("target_weights", targets["weights"]),
            "base_values_as_tensor": tensor("base_values", [base]),
            "n_targets": 1,
            "aggregate_function": "SUM",
        }


def _model(forest: Forest, features: int) -> bytes:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes = _Nodes()
    for number, tree in enumerate(forest.trees):
        nodes.add(number, tree)
    zeros = np.array([np.nan if i in forest.zero_is_missing else 0.0 for i in range(features)])
    constants = {
        "row_shape": np.array([-1, features], np.int64),
        "nearly_zero": np.array(forest.zero),
        "zeros": zeros,
        "first": np.array([0], np.int64),
        "end": np.array([2], np.int64),
    }
    steps = [
        helper.make_node("Reshape", [INPUT, "row_shape"], ["float_rows"]),
        helper.make_node("Cast", ["float_rows"], ["rows"], to=TensorProto.DOUBLE),
        helper.make_node("Abs", ["rows"], ["sizes"]),
        helper.make_node("LessOrEqual", ["sizes", "nearly_zero"], ["are_zero"]),
        helper.make_node("Where", ["are_zero", "zeros", "rows"], ["known_rows"]),
    ]
    attributes = nodes.attributes(helper, TensorProto.DOUBLE, forest.base)
    steps += [
        helper.make_node("TreeEnsembleRegressor", ["known_rows"], ["sums"], domain="ai.onnx.ml", **attributes),
        helper.make_node("Shape", [INPUT], ["shape"]),
        helper.make_node("Slice", ["shape", "first", "end"], ["list_shape"]),
        helper.make_node("Reshape", ["sums", "list_shape"], [OUTPUT], allowzero=1),
    ]
    graph = helper.make_graph(
        steps,
        "trees",
        [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["requests", "items", features])],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["requests", "items"])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
    model = helper.make_model(graph, producer_name="ultr", opset_imports=opsets, ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


# --- Sums of rankers --------------------------------------------------------------------------------------------------
# A blend of rankers as ONNX: the graphs of its parts side by side, and their weighted sum.


def blend_to_onnx(parts: Sequence[tuple[Part, bytes]]) -> bytes:
    """Return the sum of parts as ONNX; each part comes with its ranker as ONNX, with the same input and output."""
    import onnx
    from onnx import compose, helper, numpy_helper

    first = onnx.load_model_from_string(parts[0][1])
    nodes = []
    constants = []
    terms = []
    opsets: dict[str, int] = {}
    for number, (part, content) in enumerate(parts):
        prefix = f"part{number}_"
        model = compose.add_prefix(onnx.load_model_from_string(content), prefix, rename_inputs=False)
        if model.functions:
            raise ValueError("the graph of a part has functions")
        opsets |= {each.domain: max(each.version, opsets.get(each.domain, 0)) for each in model.opset_import}
        nodes += model.graph.node
        constants += model.graph.initializer
        constants.append(numpy_helper.from_array(np.array(part.weight, np.float32), f"{prefix}weight"))
        nodes.append(helper.make_node("Mul", [prefix + OUTPUT, f"{prefix}weight"], [f"{prefix}term"]))
        terms.append(f"{prefix}term")
    nodes.append(helper.make_node("Sum", terms, [OUTPUT]))
    output = helper.make_tensor_value_info(OUTPUT, onnx.TensorProto.FLOAT, ["requests", "items"])
    graph = helper.make_graph(nodes, "blend", list(first.graph.input), [output], constants)
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    blended = helper.make_model(graph, producer_name="ultr", opset_imports=imports, ir_version=first.ir_version)
    onnx.checker.check_model(blended)
    return bytes(blended.SerializeToString())
