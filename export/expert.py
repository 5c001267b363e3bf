"""The bytes of an expert and its own ONNX model: the layout of a kind, one expert's page-aligned bytes, its subgraph.

It knows ``ExpertKind`` and matrices, not families nor files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from lesonnx.manifest import (
    MATRIX_NAMES,
    TENSOR_ALIGNMENT_BYTES,
    Activation,
    Bits,
    ExpertKind,
    ExpertMatrix,
)
from lesonnx_export.graph import IR_VERSION, MICROSOFT, OPSET, external_tensor
from lesonnx_export.quantize import QuantizedMatrix, fitting_block_size

PACK_NAME = "experts.pack"
# An expert's float32 tensors: "gate_proj", "up_proj", "down_proj" and, where there are biases, "gate_proj.bias" …
ExpertTensors = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class ExpertShape:
    """What an architecture says of its experts; bits and blocks are the exporter's choice."""

    hidden_size: int
    intermediate_size: int
    activation: Activation = "swiglu"
    has_bias: bool = False
    alpha: float = 1.702
    limit: float = 7.0

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """[out, in] of a projection."""
        shape = (self.intermediate_size, self.hidden_size)
        return shape[::-1] if name == "down_proj" else shape

    @property
    def num_parameters(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size


class MatrixPrecision(NamedTuple):
    """Bits of a matrix and the block size that is wanted; a narrow matrix gets a smaller one (`fitting_block_size`)."""

    bits: Bits
    block_size: int


class ExpertPrecision(NamedTuple):
    """The precision of an expert, matrix by matrix."""

    gate_proj: MatrixPrecision
    up_proj: MatrixPrecision
    down_proj: MatrixPrecision

    @classmethod
    def uniform(cls, bits: Bits, block_size: int) -> ExpertPrecision:
        """All three alike."""
        return cls(*[MatrixPrecision(bits, block_size)] * 3)


def make_kind(name: str, shape: ExpertShape, bits: Bits, block_size: int, stage: str | None = None) -> ExpertKind:
    """The layout of experts whose matrices are all of one precision."""
    return make_mixed_kind(name, shape, ExpertPrecision.uniform(bits, block_size), stage)


def make_mixed_kind(name: str, shape: ExpertShape, precision: ExpertPrecision, stage: str | None = None) -> ExpertKind:
    """The layout: the three weights first, then everything small (scales, biases) side by side, 64-byte aligned."""
    end = 0

    def place(num_bytes: int) -> int:
        nonlocal end
        start = -(-end // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
        end = start + num_bytes
        return start

    fields: dict[str, dict[str, int]] = {}
    for matrix_name in MATRIX_NAMES:
        rows, columns = shape.matrix_shape(matrix_name)
        bits, block_size = getattr(precision, matrix_name)
        block = 0 if bits == 32 else fitting_block_size(columns, block_size)
        plain = ExpertMatrix.model_construct(rows=rows, columns=columns, bits=bits, block_size=block)
        fields[matrix_name] = {"rows": rows, "columns": columns, "bits": bits, "block_size": block}
        fields[matrix_name]["weight_offset_bytes"] = place(plain.weight_bytes)
        fields[matrix_name]["_scales_bytes"] = plain.scales_bytes
    for matrix in fields.values():
        if scales_bytes := matrix.pop("_scales_bytes"):
            matrix["scales_offset_bytes"] = place(scales_bytes)
    for matrix in fields.values():
        if shape.has_bias:
            matrix["bias_offset_bytes"] = place(matrix["rows"] * 4)
    return ExpertKind(
        name=name,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        activation=shape.activation,
        alpha=shape.alpha,
        limit=shape.limit,
        length_bytes=end,
        stage=stage,
        **{matrix_name: ExpertMatrix(**matrix) for matrix_name, matrix in fields.items()},  # type: ignore[arg-type]
    )


def expert_bytes(
    kind: ExpertKind, tensors: ExpertTensors, quantized: Mapping[str, QuantizedMatrix]
) -> NDArray[np.uint8]:
    """One expert as it lies in the pack: uint8 [cost_bytes], zero between tensors and behind the last.

    ``quantized`` has the matrices of 2, 4 or 8 bits, ``tensors`` those of float32 and the biases.
    """
    block = np.zeros(kind.cost_bytes, np.uint8)

    def put(offset: int, array: NDArray[np.generic]) -> None:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        block[offset : offset + raw.size] = raw

    for matrix_name, matrix in kind.matrices.items():
        if matrix.scales_offset_bytes is None:
            put(matrix.weight_offset_bytes, tensors[matrix_name])
        else:
            put(matrix.weight_offset_bytes, quantized[matrix_name].weight)
            put(matrix.scales_offset_bytes, quantized[matrix_name].scales)
        if matrix.bias_offset_bytes is not None:
            put(matrix.bias_offset_bytes, tensors[f"{matrix_name}.bias"])
    return block


class ExpertModel:
    """The ONNX model of the experts of a kind in one pack: ``x`` [N, H] -> ``y`` [N, H], float32.

    One graph serves every expert of the pack; only the offsets of its external data differ.
    """

    def __init__(self, kind: ExpertKind) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: list[tuple[onnx.TensorProto, int]] = []
        gate = self._linear("x", kind.gate_proj, "gate_proj")
        up = self._linear("x", kind.up_proj, "up_proj")
        hidden = self._activate(kind, gate, up)
        self._linear(hidden, kind.down_proj, "down_proj", output="y")
        rows = "N"
        graph = helper.make_graph(
            self._nodes,
            kind.name,
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [rows, kind.hidden_size])],
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [rows, kind.hidden_size])],
            [tensor for tensor, _ in self._tensors],
        )
        domains = sorted({node.domain for node in self._nodes if node.domain})
        opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in domains)]
        self._model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="lesonnx")

    def _op(self, op_type: str, *inputs: str, output: str = "", domain: str = "", **attributes: Any) -> str:
        name = output or f"{op_type.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op_type, inputs, [name], domain=domain, **attributes))
        return name

    def _tensor(self, name: str, dtype: str, shape: tuple[int, ...], offset_bytes: int) -> str:
        tensor = external_tensor(name, dtype, shape, PACK_NAME, offset_bytes)  # type: ignore[arg-type]
        self._tensors.append((tensor, offset_bytes))
        return name

    def _linear(self, source: str, matrix: ExpertMatrix, name: str, output: str = "") -> str:
        bias = ""
        if matrix.bias_offset_bytes is not None:
            bias = self._tensor(f"{name}.bias", "float32", (matrix.rows,), matrix.bias_offset_bytes)
        if matrix.scales_offset_bytes is None:
            weight = self._tensor(name, "float32", (matrix.rows, matrix.columns), matrix.weight_offset_bytes)
            inputs = [source, weight, *([bias] if bias else [])]
            return self._op("Gemm", *inputs, output=output, transB=1)
        blob = matrix.block_size * matrix.bits // 8
        weight = self._tensor(name, "uint8", (matrix.rows, matrix.num_blocks, blob), matrix.weight_offset_bytes)
        scales = self._tensor(
            f"{name}.scales", "float32", (matrix.rows * matrix.num_blocks,), matrix.scales_offset_bytes
        )
        inputs = [source, weight, scales, *(["", "", bias] if bias else [])]
        return self._op(
            "MatMulNBits",
            *inputs,
            output=output,
            domain=MICROSOFT,
            K=matrix.columns,
            N=matrix.rows,
            bits=matrix.bits,
            block_size=matrix.block_size,
            accuracy_level=4,
        )

    def _activate(self, kind: ExpertKind, gate: str, up: str) -> str:
        if kind.activation == "swiglu":
            return self._op("Mul", self._op("Mul", gate, self._op("Sigmoid", gate)), up)
        if kind.activation == "geglu":
            return self._op("Mul", self._op("Gelu", gate, approximate="tanh"), up)
        if kind.activation == "reglu":
            return self._op("Mul", self._op("Relu", gate), up)
        # gpt-oss: (clamp(u) + 1) * g * sigmoid(alpha * g), with g cut above alone.
        limit, floor, alpha, one = (
            self._constant(name, value)
            for name, value in (("limit", kind.limit), ("floor", -kind.limit), ("alpha", kind.alpha), ("one", 1.0))
        )
        cut_gate = self._op("Min", gate, limit)
        cut_up = self._op("Clip", up, floor, limit)
        swish = self._op("Mul", cut_gate, self._op("Sigmoid", self._op("Mul", cut_gate, alpha)))
        return self._op("Mul", self._op("Add", cut_up, one), swish)

    def _constant(self, name: str, value: float) -> str:
        return self._op("Constant", output=name, value=onnx.numpy_helper.from_array(np.array(value, np.float32)))

    def serialize(self, expert_offset_bytes: int) -> bytes:
        """The model of the expert that starts at that offset of its pack."""
        for tensor, (_, offset_bytes) in zip(self._model.graph.initializer, self._tensors, strict=True):
            for entry in tensor.external_data:
                if entry.key == "offset":
                    entry.value = str(expert_offset_bytes + offset_bytes)
        data: bytes = self._model.SerializeToString()
        return data
