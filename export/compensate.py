"""Quantizing an expert for what it does on calibration text, and what that costs. It knows one expert at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lesonnx.manifest import ExpertKind
from lesonnx_export.expert import ExpertTensors
from lesonnx_export.quantize import QuantizedMatrix, dequantize, quantize
from lesonnx_export.statistics import LayerStatistics

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class QuantizedExpert:
    """What goes into a pack: ``matrices`` by name (only those of 2, 4 or 8 bits), ``biases`` by "gate_proj.bias" …

    Rows of gate and up may come in another order than the checkpoint's, together with the columns of down: the expert
    computes the same, but its parts belong together.
    """

    matrices: dict[str, QuantizedMatrix]
    biases: dict[str, Float32]

    def tensors(self, kind: ExpertKind) -> dict[str, Float32]:
        """The float32 tensors that it stands for."""
        values = {name: dequantize(matrix, kind.matrices[name].columns) for name, matrix in self.matrices.items()}
        return values | self.biases


def quantize_expert(
    kind: ExpertKind,
    tensors: ExpertTensors,
    statistics: LayerStatistics | None,
    expert_idx: int | None,
    name: str = "expert",
) -> QuantizedExpert:
    """Quantize an expert (None: the shared one) to the bits and blocks of its kind, for the rows it read.

    Without statistics every matrix is rounded by itself. The same input gives the same bytes in every process.
    CheckpointError where the tensors are not finite.
    """
    matrices = {
        matrix_name: quantize(tensors[matrix_name], matrix.bits, matrix.block_size, f"{name}.{matrix_name}")
        for matrix_name, matrix in kind.matrices.items()
        if matrix.bits != 32
    }
    return QuantizedExpert(matrices, biases_of(tensors))


def biases_of(tensors: ExpertTensors) -> dict[str, Float32]:
    """An expert's biases, where it has any."""
    return {name: values for name, values in tensors.items() if name.endswith(".bias")}


def expected_loss(
    kind: ExpertKind,
    tensors: ExpertTensors,
    quantized: QuantizedExpert,
    statistics: LayerStatistics,
    expert_idx: int | None,
) -> float:
    """The rise of the model's KL per token (nats) that one expert's error is expected to cause; losses add up."""
    rows = statistics.rows(expert_idx)
    if not len(rows.inputs):
        return 0.0
    difference = apply_expert(kind, {**tensors, **quantized.tensors(kind)}, rows.inputs)
    difference -= apply_expert(kind, tensors, rows.inputs)
    squares = np.einsum("nh,nh->n", difference, difference, dtype=np.float64)
    return float(statistics.sensitivity * (squares * rows.weights.astype(np.float64) ** 2).sum() / statistics.num_tokens)


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
        return np.float32(0.5) * gate * (np.float32(1) + np.tanh(inner)) * up
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
