"""Quantizing an expert for what it does on calibration text, and what that costs. It knows one expert at a time.

Gate and up are rounded for the rows that the expert read. Down then is not the checkpoint's: it is the matrix that
comes nearest to the float output from what the rounded gate and up give it, and that one is rounded for those values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import CheckpointError
from lesonnx.manifest import ExpertKind
from lesonnx_export.expert import ExpertTensors
from lesonnx_export.feedforward import apply_expert, hidden
from lesonnx_export.gptq import round_matrices
from lesonnx_export.quantize import QuantizedMatrix, dequantize, quantize
from lesonnx_export.statistics import LayerStatistics

Float32 = NDArray[np.float32]
# How much the checkpoint's own down projection counts beside the least-squares one, in units of the mean moment.
KEEPING = 0.3


@dataclass(frozen=True)
class QuantizedExpert:
    """What goes into a pack: ``matrices`` by name (only those of 2, 4 or 8 bits), ``biases`` by "gate_proj.bias" …

    Biases may differ from the checkpoint's: they take up what rounding shifts on average.
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

    Without statistics every matrix is rounded by itself. The same input gives the same bytes in every process that
    multiplies with as many threads. CheckpointError where tensors, or what they give, are not finite.
    """
    if statistics is None:
        matrices = {
            matrix_name: quantize(tensors[matrix_name], matrix.bits, matrix.block_size, f"{name}.{matrix_name}")
            for matrix_name, matrix in kind.matrices.items()
            if matrix.bits != 32
        }
        return QuantizedExpert(matrices, _biases(tensors))
    rows = statistics.rows_with_others(expert_idx)
    found: dict[str, QuantizedMatrix] = {}
    biases = _biases(tensors)
    inputs = _Seen(rows.inputs, rows.weights, centred=bool(biases))
    for group in _groups(kind):
        stacked = np.concatenate([tensors[matrix_name] for matrix_name in group])
        rounded = _round(kind, group[0], stacked, inputs, f"{name}.{group[0]}")
        num_rows = kind.intermediate_size
        for place, matrix_name in enumerate(group):
            which = slice(place * num_rows, (place + 1) * num_rows)
            found[matrix_name] = QuantizedMatrix(
                rounded.weight[which], rounded.scales[which], rounded.bits, rounded.block_size
            )
            if biases:
                shift = (tensors[matrix_name] - dequantize(found[matrix_name], kind.hidden_size)) @ inputs.mean
                biases[f"{matrix_name}.bias"] += shift
    if kind.down_proj.bits != 32:
        exact = hidden(kind, tensors, rows.inputs)
        given = hidden(kind, {**tensors, **QuantizedExpert(found, biases).tensors(kind)}, rows.inputs)
        seen, wanted = (_Seen(values, rows.weights, centred=bool(biases)) for values in (given, exact))
        down = tensors["down_proj"]
        found["down_proj"] = _round(kind, "down_proj", _corrected(down, seen, wanted), seen, f"{name}.down_proj")
        if biases:
            rest = down @ wanted.mean - dequantize(found["down_proj"], kind.intermediate_size) @ seen.mean
            biases["down_proj.bias"] += rest
    return QuantizedExpert(found, biases)


class _Seen:
    """What a matrix reads: values [n,K] weighted by row, their second moments and, where a bias can take it, mean."""

    def __init__(self, values: Float32, weights: Float32, centred: bool) -> None:
        squares = weights * weights
        self.mean: Float32 = np.asarray(squares @ values / max(float(squares.sum()), 1e-30), np.float32)
        centre = self.mean if centred else np.zeros_like(self.mean)
        self.weighted: Float32 = (values - centre) * weights[:, None]
        self.moments: Float32 = self.weighted.T @ self.weighted


def _groups(kind: ExpertKind) -> list[tuple[str, ...]]:
    """Gate and up that are to be quantized: together where they are quantized alike."""
    gate, up = kind.gate_proj, kind.up_proj
    if (gate.bits, gate.block_size) == (up.bits, up.block_size):
        return [("gate_proj", "up_proj")] if gate.bits != 32 else []
    return [(name,) for name in ("gate_proj", "up_proj") if kind.matrices[name].bits != 32]


def _round(kind: ExpertKind, matrix_name: str, values: Float32, seen: _Seen, name: str) -> QuantizedMatrix:
    if not np.isfinite(seen.moments).all():
        raise CheckpointError(f"{name}: what it reads of the calibration text is too large to square")
    matrix = kind.matrices[matrix_name]
    return round_matrices(values[None], seen.moments[None], matrix.bits, matrix.block_size, [name])[0]


def _corrected(down: Float32, seen: _Seen, wanted: _Seen) -> Float32:
    """The down projection that gives the wanted output from what is seen: least squares, drawn to the checkpoint's."""
    moments = seen.moments.astype(np.float64)
    size = len(moments)
    keep = KEEPING * np.trace(moments) / size
    if not (np.isfinite(keep) and keep > 0):
        return down
    crossed = (seen.weighted.T @ wanted.weighted).astype(np.float64)
    target = crossed @ down.T.astype(np.float64) + keep * down.T
    corrected: Float32 = np.linalg.solve(moments + keep * np.eye(size), target).T.astype(np.float32)
    return corrected


def _biases(tensors: ExpertTensors) -> dict[str, Float32]:
    """Copies of an expert's biases, where it has any."""
    return {name: values.copy() for name, values in tensors.items() if name.endswith(".bias")}


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
    return float(
        statistics.sensitivity * (squares * rows.weights.astype(np.float64) ** 2).sum() / statistics.num_tokens
    )
