"""A blend of rankers as ONNX: the graphs of its parts side by side, and their weighted sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ultr.rankers.blend import Part
from ultr.serving.exported import OUTPUT


def blend_to_onnx(parts: Sequence[tuple[Part, bytes]]) -> bytes:
    """Return the sum of parts as ONNX; each part comes with its ranker as ONNX, with the same input and output."""
    import onnx
    from onnx import compose, helper, numpy_helper

    first = onnx.load_model_from_string(parts[0][1])
    nodes, constants, terms = [], [], []
    opsets: dict[str, int] = {}
    for number, (part, content) in enumerate(parts):
        prefix = f"part{number}_"
        model = compose.add_prefix(onnx.load_model_from_string(content), prefix, rename_inputs=False)
        if model.functions:
            raise ValueError("the graph of a part has functions")
        opsets |= {each.domain: max(each.version, opsets.get(each.domain, 0)) for each in model.opset_import}
        nodes += model.graph.node
        constants += model.graph.initializer
        for name, value in (("shift", part.shift), ("weight", part.weight)):
            constants.append(numpy_helper.from_array(np.array(value, np.float32), prefix + name))
        last = f"{prefix}shifted"
        nodes.append(helper.make_node("Add", [prefix + OUTPUT, f"{prefix}shift"], [last]))
        if part.link == "log-sigmoid":  # -softplus(-x)
            names = [f"{prefix}{name}" for name in ("negative", "softplus", "linked")]
            for kind, name in zip(("Neg", "Softplus", "Neg"), names, strict=True):
                nodes.append(helper.make_node(kind, [last], [name]))
                last = name
        nodes.append(helper.make_node("Mul", [last, f"{prefix}weight"], [f"{prefix}term"]))
        terms.append(f"{prefix}term")
    nodes.append(helper.make_node("Sum", terms, [OUTPUT]))
    output = helper.make_tensor_value_info(OUTPUT, onnx.TensorProto.FLOAT, ["requests", "items"])
    graph = helper.make_graph(nodes, "blend", list(first.graph.input), [output], constants)
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    blended = helper.make_model(graph, producer_name="ultr", opset_imports=imports, ir_version=first.ir_version)
    onnx.checker.check_model(blended)
    return bytes(blended.SerializeToString())
