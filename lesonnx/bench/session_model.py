"""An expert as a MatMulNBits model: what the kernel is compared with, in the bench and in tests.

The exporter writes its own, with external data; this one carries its weights and needs no bundle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lesonnx.manifest import ExpertKind

if TYPE_CHECKING:
    from onnx import ModelProto


def session_model(kind: ExpertKind, expert: np.ndarray) -> ModelProto:
    """The model ``x`` [m, H] -> ``y`` [m, H] of the expert whose bytes are ``expert``, accuracy_level 4.

    Raises ImportError without the ``onnx`` package, ValueError for an activation other than SwiGLU or a bias.
    """
    from onnx import TensorProto, helper, numpy_helper

    if kind.activation != "swiglu" or any(matrix.bias_offset_bytes is not None for matrix in kind.matrices.values()):
        raise ValueError("only SwiGLU without biases")
    initializers, nodes = [], []

    def linear(name: str, source: str, target: str) -> None:
        matrix = kind.matrices[name]
        start = matrix.weight_offset_bytes
        weight = expert[start : start + matrix.weight_bytes]
        if matrix.scales_offset_bytes is None:
            values = weight.view(np.float32).reshape(matrix.rows, matrix.columns)
            initializers.append(numpy_helper.from_array(np.ascontiguousarray(values.T), f"{name}.weight"))
            nodes.append(helper.make_node("MatMul", [source, f"{name}.weight"], [target]))
            return
        scales = expert[matrix.scales_offset_bytes : matrix.scales_offset_bytes + matrix.scales_bytes].view(np.float32)
        packed = weight.reshape(matrix.rows, matrix.num_blocks, -1)
        initializers.append(numpy_helper.from_array(packed, f"{name}.weight"))
        initializers.append(numpy_helper.from_array(scales, f"{name}.scales"))
        inputs = [source, f"{name}.weight", f"{name}.scales"]
        attributes: dict[str, Any] = {
            "accuracy_level": 4,
            "K": matrix.columns,
            "N": matrix.rows,
            "bits": matrix.bits,
            "block_size": matrix.block_size,
        }
        node = helper.make_node("MatMulNBits", inputs, [target], domain="com.microsoft", **attributes)
        nodes.append(node)

    linear("gate_proj", "x", "gate")
    linear("up_proj", "x", "up")
    nodes.append(helper.make_node("Sigmoid", ["gate"], ["sigmoid"]))
    nodes.append(helper.make_node("Mul", ["gate", "sigmoid"], ["silu"]))
    nodes.append(helper.make_node("Mul", ["silu", "up"], ["hidden"]))
    linear("down_proj", "hidden", "y")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["m", kind.hidden_size]) for name in "xy"]
    graph = helper.make_graph(nodes, "expert", values[:1], values[1:], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)
