"""Symmetric blockwise quantization in ``MatMulNBits``'s layout, with scales searched for least squared error.

It knows matrices alone: no model, no file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import CheckpointError
from lesonnx.manifest import Bits

BLOCK_SIZES = (128, 64, 32, 16)
# Candidate scales as shares of the one that just represents a block's extreme value: clipping it a little often costs
# less than rounding all the others coarsely, the more so the fewer the bits. Negative shares give the extreme value the
# shorter side of the codes, which pays with two bits alone: there the sides are -2 and 1.
CANDIDATES: dict[int, tuple[float, ...]] = {
    2: (0.5, 0.65, 0.8, 1.0, 1.1, -0.8, -1.1, -1.4, -1.7, -2.0),
    4: (0.6, 0.68, 0.76, 0.84, 0.92, 1.0, 1.06),
    8: (0.96, 0.98, 1.0),
}
# Then the best scale that was found for the codes becomes a candidate itself, this many times.
REFINEMENTS: dict[int, int] = {2: 2, 4: 2, 8: 0}
# A block without a larger value becomes zeros.
LEAST_VALUE = 1e-30
# Work in pieces that stay in a core's own cache.
PIECE_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix: ``weight`` uint8 [rows, blocks, block_size * bits / 8], ``scales`` float32 [rows, blocks]."""

    weight: NDArray[np.uint8]
    scales: NDArray[np.float32]
    bits: int
    block_size: int


def fitting_block_size(columns: int, wanted: int) -> int:
    """The largest of 128, 64, 32, 16 up to ``wanted`` that divides the columns; 16 (padded) where none does."""
    return next((size for size in BLOCK_SIZES if size <= wanted and columns % size == 0), BLOCK_SIZES[-1])


def quantize(matrix: NDArray[np.float32], bits: Bits, block_size: int, name: str = "matrix") -> QuantizedMatrix:
    """Quantize [rows, columns] to 2, 4 or 8 bits; CheckpointError where the matrix is not finite."""
    rows, columns = matrix.shape
    blocks = -(-columns // block_size)
    if not np.isfinite(matrix).all():
        raise CheckpointError(f"tensor {name!r} holds values that are not finite")
    padded = matrix
    if blocks * block_size != columns:
        padded = np.zeros((rows, blocks * block_size), np.float32)
        padded[:, :columns] = matrix
    weight = np.empty((rows, blocks, block_size * bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    step = max(1, PIECE_ELEMENTS // (blocks * block_size))
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        values = padded[piece].reshape(-1, block_size)
        codes, piece_scales = _search(values, bits)
        if not np.isfinite(piece_scales).all():
            raise CheckpointError(f"tensor {name!r} holds values too large to quantize")
        weight[piece] = pack_bits(codes, bits).reshape(-1, *weight.shape[1:])
        scales[piece] = piece_scales.reshape(-1, blocks)
    return QuantizedMatrix(weight, scales, bits, block_size)


def _search(values: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes (unsigned) and scales of blocks [n, block_size].

    For codes q a block's best scale is <w,q>/<q,q>, which leaves the error |w|^2 - <w,q>^2/<q,q>; so each candidate is
    judged by <w,q>^2/<q,q>. Scales are signed: the extreme value, of either sign, takes the one code more that two's
    complement has on the negative side.
    """
    half = 1 << (bits - 1)
    extreme = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)[:, 0]
    best_gain = np.full(len(values), -1.0, np.float32)
    best_inverse = np.zeros(len(values), np.float32)
    best_scale = np.zeros(len(values), np.float32)
    codes = np.empty_like(values)

    def encode(inverse: NDArray[np.float32]) -> None:
        np.multiply(values, inverse[:, None], out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, np.float32(-half), np.float32(half - 1), out=codes)

    def attempt(inverse: NDArray[np.float32]) -> None:
        encode(inverse)
        product = np.einsum("nb,nb->n", values, codes)
        square = np.maximum(np.einsum("nb,nb->n", codes, codes), np.float32(1))
        scale = product / square
        # In units of the plain scale, so that no square leaves float32.
        gain = (product * full) ** 2 / square
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(best_inverse, inverse, where=better)
        np.copyto(best_scale, scale, where=better)

    full = _inverse(extreme) * np.float32(-half)
    for share in CANDIDATES[bits]:
        attempt(full / np.float32(share))
    for _ in range(REFINEMENTS[bits]):
        attempt(_inverse(best_scale))
    # Encoding the winner once more is cheaper than keeping the codes of each improvement.
    encode(best_inverse)
    codes += np.float32(half)
    return codes.astype(np.uint8), best_scale


def _inverse(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """One over each value; zero for what is next to nothing, whose inverse would leave float32."""
    is_large = np.abs(values) >= LEAST_VALUE
    inverse: NDArray[np.float32] = np.divide(np.float32(1), values, where=is_large, out=np.zeros_like(values))
    return inverse


def pack_bits(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes [..., n] packed along the last axis, the first in the low bits: [..., n * bits / 8]."""
    if bits == 8:
        return codes
    packed = np.zeros((*codes.shape[:-1], codes.shape[-1] * bits // 8), np.uint8)
    for place in range(8 // bits):
        packed |= codes[..., place :: 8 // bits] << (place * bits)
    return packed


def unpack_bits(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The inverse of ``pack_bits``."""
    per_byte = 8 // bits
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * per_byte), np.uint8)
    for place in range(per_byte):
        codes[..., place::per_byte] = (packed >> (place * bits)) & ((1 << bits) - 1)
    return codes


def dequantize(matrix: QuantizedMatrix, columns: int) -> NDArray[np.float32]:
    """The float32 matrix [rows, columns] that the quantized one stands for."""
    codes = unpack_bits(matrix.weight, matrix.bits).astype(np.float32) - (1 << (matrix.bits - 1))
    return (codes * matrix.scales[..., None]).reshape(len(codes), -1)[:, :columns]
