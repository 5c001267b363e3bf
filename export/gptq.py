"""Rounding a matrix for the inputs it will see: GPTQ with searched block scales, then descent on the same error.

The error of a matrix W rounded to Q is ``tr((W - Q) M (W - Q)^T)``, M the second moments of its inputs. It knows
matrices and moments, no expert.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import CheckpointError
from lesonnx.manifest import Bits
from lesonnx_export.quantize import PIECE_ELEMENTS, QuantizedMatrix, pack_bits

Float32 = NDArray[np.float32]
# As in `quantize`: a block's scale as shares of the one that just represents its extreme value.
SHARES: dict[int, tuple[float, ...]] = {
    2: (0.4, 0.55, 0.7, 0.85, 1.0, 1.15, -0.7, -0.9, -1.1, -1.35, -1.65, -2.0),
    4: (0.6, 0.7, 0.8, 0.9, 1.0),
    8: (0.97, 1.0),
}
# What the diagonal of the moments is raised by, as a share of its mean. Far more than a Cholesky decomposition needs:
# a tenth of the error is weighed as if all inputs were alike, so that a text of another kind than the calibration text
# does not meet columns that were given up.
DAMPING = 0.3
# Rounds of scales by least squares and of descent over all codes, after GPTQ.
ROUNDS = 4
LEAST_SCALE = np.float32(1e-20)


def round_matrices(
    matrices: Float32, moments: Float32, bits: Bits, block_size: int, names: list[str], rounds: int = ROUNDS
) -> list[QuantizedMatrix]:
    """Quantize [B,R,K] by moments [B,K,K] to 2, 4 or 8 bits; CheckpointError for values that are not finite.

    The same input gives the same bytes.
    """
    rows, columns = matrices.shape[1:]
    sizes = np.abs(matrices).max(axis=(1, 2))
    for name, size in zip(names, sizes, strict=True):
        if not np.isfinite(size):
            raise CheckpointError(f"tensor {name!r} holds values that are not finite")
    # In units of the largest value, so that nothing leaves float32 on the way.
    units = np.where(sizes > 0, sizes, np.float32(1))[:, None, None].astype(np.float32)
    blocks = -(-columns // block_size)
    padding = blocks * block_size - columns
    exact = np.pad(matrices / units, ((0, 0), (0, 0), (0, padding)))
    damped = np.pad(_damped(moments), ((0, 0), (0, padding), (0, padding)))
    # Columns of the padding are alone with themselves: their zeros stay zeros.
    damped[:, range(columns, columns + padding), range(columns, columns + padding)] = 1
    codes, scales = _compensated(exact, damped, bits, block_size)
    for _ in range(rounds):
        scales = _fitted_scales(exact, damped, codes, scales)
        codes = _descended(exact, damped, codes, scales, bits)
    if rounds:
        scales = _fitted_scales(exact, damped, codes, scales)
    with np.errstate(over="ignore"):
        scales *= units
    half = 1 << (bits - 1)
    found = []
    for index, name in enumerate(names):
        if not np.isfinite(scales[index]).all():
            raise CheckpointError(f"tensor {name!r} holds values too large to quantize")
        packed = pack_bits((codes[index] + half).astype(np.uint8), bits).reshape(rows, blocks, -1)
        found.append(QuantizedMatrix(packed, scales[index], bits, block_size))
    return found


def _damped(moments: Float32) -> Float32:
    """Moments of mean diagonal 1, the diagonal raised; the identity where there are none."""
    size = moments.shape[-1]
    mean = np.einsum("bkk->b", moments)[:, None, None] / np.float32(size)
    has_any = mean > 0
    scaled = np.divide(moments, mean, where=has_any, out=np.zeros_like(moments))
    damped: Float32 = scaled + np.where(has_any, np.float32(DAMPING), np.float32(1)) * np.eye(size, dtype=np.float32)
    return damped


def _compensated(exact: Float32, moments: Float32, bits: Bits, block_size: int) -> tuple[Float32, Float32]:
    """GPTQ (Frantar et al., 2022): column by column, the error of one is made good by those that follow.

    Gives codes [B,R,K], signed, as floats, and scales [B,R,K / block_size].
    """
    batch, rows, columns = exact.shape
    # The upper triangular U with M^-1 = U^T U.
    inverse = np.linalg.inv(moments.astype(np.float64))
    uppers = np.linalg.cholesky(inverse).transpose(0, 2, 1).astype(np.float32)
    codes = np.empty_like(exact)
    scales = np.empty((batch, rows, columns // block_size), np.float32)
    step = max(16, PIECE_ELEMENTS // (block_size * len(SHARES[bits])))
    for index, upper in enumerate(uppers):
        # Columns first: each step then works on whole stretches of memory.
        left = np.ascontiguousarray(exact[index].T)
        for block in range(columns // block_size):
            which = slice(block * block_size, (block + 1) * block_size)
            errors = np.empty((block_size, rows), np.float32)
            for start in range(0, rows, step):
                piece = slice(start, start + step)
                found = _best_block(left[which, piece], upper[which, which], bits)
                scales[index, piece, block], errors[:, piece] = found[1:]
                codes[index, piece, which] = found[0].T
            left[which.stop :] -= upper[which, which.stop :].T @ errors
    return codes, scales


def _best_block(values: Float32, triangle: Float32, bits: Bits) -> tuple[Float32, Float32, Float32]:
    """Codes [b,R], scale [R] and the errors [b,R] to be passed on of one block of columns [b,R].

    The scale is chosen when the block begins, on what it holds by then: every candidate rounds the whole block, with
    compensation, and each row takes the one that leaves the least error.
    """
    half = np.float32(1 << (bits - 1))
    extreme = np.take_along_axis(values, np.abs(values).argmax(axis=0)[None], axis=0)[0]
    candidates = _away_from_zero(extreme / -half) * np.array(SHARES[bits], np.float32)[:, None]
    trial = np.repeat(values[:, None], len(candidates), axis=1)
    codes, errors = np.empty_like(trial), np.empty_like(trial)
    for column in range(len(values)):
        np.clip(np.rint(trial[column] / candidates), -half, half - 1, out=codes[column])
        errors[column] = (trial[column] - codes[column] * candidates) / triangle[column, column]
        trial[column + 1 :] -= errors[column] * triangle[column, column + 1 :, None, None]
    best = np.einsum("csr,csr->sr", errors, errors).argmin(axis=0)
    rows = np.arange(len(best))
    return codes[:, best, rows], candidates[best, rows], errors[:, best, rows]


def _fitted_scales(exact: Float32, moments: Float32, codes: Float32, scales: Float32) -> Float32:
    """The scales of least error for given codes: a least-squares problem of a row's blocks, for each row."""
    batch, rows, num_blocks = scales.shape
    split = codes.reshape(batch, rows, num_blocks, -1)
    size = split.shape[-1]
    target = ((exact @ moments) * codes).reshape(split.shape).sum(axis=3)
    square = np.empty((batch, rows, num_blocks, num_blocks), np.float32)
    for block in range(num_blocks):
        seen = split[:, :, block] @ moments[:, block * size : (block + 1) * size]
        square[:, :, block] = (seen * codes).reshape(split.shape).sum(axis=3)
    # Blocks whose codes are all zero keep their scale, whatever it is.
    is_empty = ~split.any(axis=3)
    diagonal = np.arange(num_blocks)
    square[:, :, diagonal, diagonal] += np.where(is_empty, np.float32(1), np.float32(0))
    target = np.where(is_empty, scales, target)
    fitted = np.linalg.solve(square.astype(np.float64), target.astype(np.float64)[..., None])[..., 0]
    return fitted.astype(np.float32)


def _descended(exact: Float32, moments: Float32, codes: Float32, scales: Float32, bits: int) -> Float32:
    """One sweep of coordinate descent: each code in turn becomes the best one, all others as they are."""
    columns = exact.shape[2]
    size = columns // scales.shape[2]
    half = np.float32(1 << (bits - 1))
    gradient = np.ascontiguousarray(((codes * np.repeat(scales, size, axis=2) - exact) @ moments).transpose(2, 0, 1))
    new = np.ascontiguousarray(codes.transpose(2, 0, 1))
    for block in range(columns // size):
        which = slice(block * size, (block + 1) * size)
        scale = _away_from_zero(scales[:, :, block])
        within = np.ascontiguousarray(moments[:, which, which].transpose(1, 2, 0))[..., None]
        slope = gradient[which]
        moved = np.empty_like(slope)
        for column in range(size):
            old = new[which.start + column]
            best = np.clip(np.rint(old - slope[column] / (within[column, column] * scale)), -half, half - 1)
            moved[column] = (best - old) * scale
            new[which.start + column] = best
            # What was before this column is not looked at again.
            slope[column + 1 :] += moved[column] * within[column, column + 1 :]
        passed_on = moments[:, which.stop :, which] @ moved.transpose(1, 0, 2)
        gradient[which.stop :] += passed_on.transpose(1, 0, 2)
    return np.ascontiguousarray(new.transpose(1, 2, 0))


def _away_from_zero(scales: Float32) -> Float32:
    """Scales that can be divided by: those of blocks that hold nothing become tiny ones."""
    return np.where(np.abs(scales) < LEAST_SCALE, LEAST_SCALE, scales)
