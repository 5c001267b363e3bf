"""The stage model of a kind of expert: one ``lesonnx.Experts`` node that takes the weights as an input.

It knows nothing of where experts lie in a pack or in the cache: the runner says so at every run.
"""

from __future__ import annotations

from typing import Any

from onnx import ModelProto, TensorProto, helper

from lesonnx.manifest import ExpertKind

DOMAIN = "lesonnx"
OPERATOR_VERSION = 1
OPSET_VERSION = 21
IR_VERSION = 10


def stage_model(kind: ExpertKind, slots: int) -> ModelProto:
    """The single-node model that computes any experts of ``kind``.

    Inputs: ``hidden`` [T, H] float32, ``cache`` [bytes] uint8, ``offsets`` [n] int64, ``row_starts`` [n + 1] int64,
    ``rows`` [m] int64 (flat ``t * slots + slot``). Output: ``expert_out`` [T, slots, H] float32, of which only the
    named rows are written. ``slots`` is ``num_experts_per_tok`` for routed experts and 1 for a shared one.
    """
    if slots < 1:
        raise ValueError(f"slots is {slots}, expected at least 1")
    attributes: dict[str, Any] = {
        "slots": slots,
        "hidden_size": kind.hidden_size,
        "intermediate_size": kind.intermediate_size,
        "expert_bytes": kind.length_bytes,
        "activation": kind.activation,
        "alpha": float(kind.alpha),
        "limit": float(kind.limit),
    }
    for name, matrix in kind.matrices.items():
        short = name.removesuffix("_proj")
        scales, bias = matrix.scales_offset_bytes, matrix.bias_offset_bytes
        attributes |= {
            f"{short}_bits": matrix.bits,
            f"{short}_block_size": matrix.block_size,
            f"{short}_weight_offset": matrix.weight_offset_bytes,
            f"{short}_scales_offset": -1 if scales is None else scales,
            f"{short}_bias_offset": -1 if bias is None else bias,
        }
    inputs = [
        helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["T", kind.hidden_size]),
        helper.make_tensor_value_info("cache", TensorProto.UINT8, ["cache_bytes"]),
        helper.make_tensor_value_info("offsets", TensorProto.INT64, ["n"]),
        helper.make_tensor_value_info("row_starts", TensorProto.INT64, ["n_plus_1"]),
        helper.make_tensor_value_info("rows", TensorProto.INT64, ["m"]),
    ]
    output = helper.make_tensor_value_info("expert_out", TensorProto.FLOAT, ["T", slots, kind.hidden_size])
    node = helper.make_node("Experts", [i.name for i in inputs], ["expert_out"], domain=DOMAIN, **attributes)
    graph = helper.make_graph([node], "experts", inputs, [output])
    opsets = [helper.make_opsetid("", OPSET_VERSION), helper.make_opsetid(DOMAIN, OPERATOR_VERSION)]
    return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets, producer_name="lesonnx")
