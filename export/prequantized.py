"""Checkpoints that come quantized and are converted exactly: float8 with block scales, and MXFP4.

Every value of either is a float32, so nothing is lost before the exporter's own quantization. It knows formats, not
families.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import CheckpointError
from lesonnx_export.checkpoint import Float32, Weights
from lesonnx_export.config import Config

# The sixteen values of FP4 (e2m1), by code.
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
MXFP4_BLOCK = 32
MXFP4_SCALE_BIAS = 127


def check_quantization(config: Config, methods: frozenset[str]) -> None:
    """CheckpointError for a checkpoint quantized in a way that is not converted."""
    quantization = config.raw("quantization_config", None)
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if not isinstance(method, str) or method not in methods:
        known = ", ".join(sorted(methods))
        raise CheckpointError(
            f"config.json: quantization_config of method {method!r:.100} is not converted for {config.model_type}"
            f" (only {known}); export the unquantized checkpoint"
        )


def mxfp4_item(weights: Weights, name: str, index: int, count: int, rows: int, columns: int) -> Float32:
    """Matrix ``index`` [rows, columns] of ``name_blocks`` [count, rows, columns / 32, 16] and ``name_scales``.

    A byte holds two FP4 values, the low nibble first; a block of 32 along the columns shares a power of two, stored
    with bias 127 (OCP Microscaling Formats 1.0).
    """
    if columns % MXFP4_BLOCK:
        raise CheckpointError(f"{name}: {columns} columns are no multiple of MXFP4's {MXFP4_BLOCK}")
    num_blocks = columns // MXFP4_BLOCK
    blocks: NDArray[Any] = weights.raw_item(f"{name}_blocks", "U8", index, count, rows, num_blocks, MXFP4_BLOCK // 2)
    scales: NDArray[Any] = weights.raw_item(f"{name}_scales", "U8", index, count, rows, num_blocks)
    values = np.empty((rows, num_blocks, MXFP4_BLOCK), np.float32)
    values[..., 0::2] = FP4_VALUES[blocks & 15]
    values[..., 1::2] = FP4_VALUES[blocks >> 4]
    return np.ldexp(values, scales.astype(np.int32)[..., None] - MXFP4_SCALE_BIAS).reshape(rows, columns)
