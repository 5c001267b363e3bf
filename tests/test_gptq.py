"""Rounding for inputs: less error where the inputs are, the layout of `quantize`, nothing of the scale of things."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lesonnx.errors import CheckpointError
from lesonnx_export.gptq import round_matrices
from lesonnx_export.quantize import BLOCK_SIZES, QuantizedMatrix, dequantize, quantize

Float32 = NDArray[np.float32]


def weights(rows: int, columns: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def inputs(num_rows: int, columns: int) -> Float32:
    """Inputs as models have them: alike in a few directions, some columns larger than others."""
    rng = np.random.default_rng(1)
    mixing = rng.standard_normal((columns // 4, columns)) * rng.lognormal(0, 0.7, columns)
    mixed: Float32 = (rng.standard_normal((num_rows, columns // 4)) @ mixing).astype(np.float32)
    return mixed + rng.standard_normal((num_rows, columns)).astype(np.float32)


def rounded(matrix: Float32, moments: Float32, bits: Any, block_size: int, **options: Any) -> QuantizedMatrix:
    return round_matrices(matrix[None], moments[None], bits, block_size, ["matrix"], **options)[0]


def error(matrix: Float32, found: QuantizedMatrix, x: Float32) -> float:
    difference = matrix - dequantize(found, matrix.shape[1])
    return float(((x @ difference.T) ** 2).sum())


@pytest.mark.parametrize(("bits", "gain"), [(2, 0.6), (4, 0.6), (8, 0.6)])
@pytest.mark.parametrize("block_size", [128, 32])
def test_outputs_are_nearer_than_by_plain_rounding(bits: Any, block_size: int, gain: float) -> None:
    matrix, x = weights(48, 128), inputs(600, 128)
    unseen = inputs(1200, 128)[600:]
    found = rounded(matrix, x.T @ x, bits, block_size)
    assert error(matrix, found, unseen) < gain * error(matrix, quantize(matrix, bits, block_size), unseen)


def test_descent_and_fitted_scales_add_to_compensation() -> None:
    matrix, x = weights(48, 128), inputs(600, 128)
    alone, whole = (rounded(matrix, x.T @ x, 2, 64, rounds=rounds) for rounds in (0, 3))
    assert error(matrix, whole, x) < 0.95 * error(matrix, alone, x)


def test_without_moments_the_weights_count() -> None:
    """An expert that nothing is known of is rounded for inputs that are all alike."""
    matrix = weights(16, 64)
    found = rounded(matrix, np.zeros((64, 64), np.float32), 4, 32)
    plain = quantize(matrix, 4, 32)
    assert ((matrix - dequantize(found, 64)) ** 2).sum() < 1.05 * ((matrix - dequantize(plain, 64)) ** 2).sum()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_padding_stays_zero(bits: Any, block_size: int) -> None:
    matrix, x = weights(8, 72), inputs(100, 72)
    found = rounded(matrix, x.T @ x, bits, block_size)
    padded = -(-72 // block_size) * block_size
    assert found.weight.shape == (8, padded // block_size, block_size * bits // 8)
    assert not dequantize(found, padded)[:, 72:].any()
    assert error(matrix, found, x) <= error(matrix, quantize(matrix, bits, block_size), x)


def test_matrices_of_a_batch_do_not_know_of_each_other() -> None:
    x = inputs(200, 64)
    batch = np.stack([weights(8, 64, seed) for seed in range(3)])
    moments = np.stack([x.T @ x, np.eye(64, dtype=np.float32), np.zeros((64, 64), np.float32)])
    together = round_matrices(batch, moments, 2, 32, ["a", "b", "c"])
    for found, matrix, moment in zip(together, batch, moments, strict=True):
        alone = rounded(matrix, moment, 2, 32)
        assert np.array_equal(found.weight, alone.weight)
        assert np.allclose(found.scales, alone.scales, rtol=1e-5)


@pytest.mark.parametrize("exponent", [-90, 90])
def test_magnitude_does_not_matter(exponent: int) -> None:
    matrix, x = weights(8, 64), inputs(100, 64)
    expected = rounded(matrix, x.T @ x, 2, 32)
    found = rounded(np.ldexp(matrix, exponent), x.T @ x, 2, 32)
    assert np.array_equal(found.weight, expected.weight)
    assert np.array_equal(found.scales, np.ldexp(expected.scales, exponent))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_stay_zeros(bits: Any) -> None:
    matrix, x = weights(8, 64), inputs(100, 64)
    matrix[2], matrix[3, 32:] = 0, 0
    found = dequantize(rounded(matrix, x.T @ x, bits, 32), 64)
    assert np.isfinite(found).all()
    assert np.abs(found[2]).max() < 1e-12
    assert not dequantize(rounded(np.zeros((4, 64), np.float32), x.T @ x, bits, 32), 64).any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    matrix = weights(4, 32)
    matrix[1, 3] = value
    with pytest.raises(CheckpointError, match="'matrix' holds values that are not finite"):
        rounded(matrix, np.eye(32, dtype=np.float32), 4, 32)


def test_the_largest_values_are_kept() -> None:
    matrix = np.full((1, 16), 3e38, np.float32)
    found = dequantize(rounded(matrix, np.eye(16, dtype=np.float32), 2, 16), 16)
    assert np.allclose(found, matrix, rtol=1e-5)
