"""What an expert computes, in float32 on NumPy: the formulas of `ExpertKind`, for calibration. It knows one expert."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lesonnx.manifest import ExpertKind

Float32 = NDArray[np.float32]


def apply_expert(kind: ExpertKind, tensors: Mapping[str, Float32], inputs: Float32) -> Float32:
    """An expert's output [n,H] on inputs [n,H], in float32."""
    return linear(tensors, "down_proj", hidden(kind, tensors, inputs))


def hidden(kind: ExpertKind, tensors: Mapping[str, Float32], inputs: Float32) -> Float32:
    """What the down projection reads: [n, intermediate_size]. See `ExpertKind` for the activations."""
    gate, up = (linear(tensors, name, inputs) for name in ("gate_proj", "up_proj"))
    if kind.activation == "swiglu":
        return gate * sigmoid(gate) * up
    if kind.activation == "geglu":
        inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate * gate * gate)
        gelu = np.float32(0.5) * gate * (np.float32(1) + np.tanh(inner))
        return np.asarray(gelu * up, np.float32)
    if kind.activation == "reglu":
        return np.maximum(gate, np.float32(0)) * up
    limit = np.float32(kind.limit)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + np.float32(1)) * gate * sigmoid(np.float32(kind.alpha) * gate)


def sigmoid(x: Float32) -> Float32:
    """The logistic function, without overflow: it is a shifted hyperbolic tangent."""
    half = np.float32(0.5)
    shifted: Float32 = half * np.tanh(half * x) + half
    return shifted


def linear(tensors: Mapping[str, Float32], name: str, x: Float32) -> Float32:
    """``x W^T``, and the bias where there is one."""
    product: Float32 = x @ tensors[name].T
    bias = tensors.get(f"{name}.bias")
    if bias is not None:
        product += bias
    return product
