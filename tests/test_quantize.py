"""Quantization: the error is never above plain rounding, the layout is what ONNX Runtime's own operators read."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from lesonnx.errors import CheckpointError
from lesonnx_export.quantize import (
    BLOCK_SIZES,
    LEAST_VALUE,
    QuantizedMatrix,
    dequantize,
    fitting_block_size,
    pack_bits,
    quantize,
    unpack_bits,
)

BITS = (2, 4, 8)
Matrix = NDArray[np.float32]
bits_strategy = st.sampled_from(BITS)
blocks_strategy = st.sampled_from(BLOCK_SIZES)
# Below the least value a block becomes zeros, whatever the rounding.
values_strategy = st.floats(-100, 100, width=32).map(lambda value: value if abs(value) >= LEAST_VALUE else 0.0)
matrices = arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 70)), elements=values_strategy)


def plain_rounding(matrix: Matrix, bits: int, block_size: int) -> NDArray[np.float64]:
    """The nearest codes for the scale that just represents each block's extreme value: the usual absmax, signed."""
    rows, columns = matrix.shape
    blocks = -(-columns // block_size)
    padded = np.zeros((rows, blocks * block_size))
    padded[:, :columns] = matrix
    values = padded.reshape(-1, block_size)
    half = 1 << (bits - 1)
    extreme = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)
    scale = extreme / -half
    codes = np.clip(np.rint(np.divide(values, scale, where=scale != 0, out=np.zeros_like(values))), -half, half - 1)
    return (codes * scale).reshape(rows, -1)[:, :columns]


def random_matrix(rows: int, columns: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@given(matrices, bits_strategy, blocks_strategy)
@settings(max_examples=100, deadline=None)
def test_error_is_never_above_plain_rounding(matrix: Matrix, bits: Any, block_size: int) -> None:
    got = dequantize(quantize(matrix, bits, block_size), matrix.shape[1]).astype(np.float64)
    plain = plain_rounding(matrix, bits, block_size)
    error, limit = ((got - matrix) ** 2).sum(), ((plain - matrix) ** 2).sum()
    assert error <= limit + 1e-9 * (matrix.astype(np.float64) ** 2).sum()


@pytest.mark.parametrize(("bits", "gain"), [(2, 0.75), (4, 0.9), (8, 0.999)])
def test_searching_pays_on_weights(bits: Any, gain: float) -> None:
    matrix = random_matrix(64, 512)
    got = ((dequantize(quantize(matrix, bits, 128), 512) - matrix) ** 2).sum()
    assert got < gain * ((plain_rounding(matrix, bits, 128) - matrix) ** 2).sum()


@given(st.data(), bits_strategy, blocks_strategy)
@settings(max_examples=60, deadline=None)
def test_representable_matrices_are_exact(data: st.DataObject, bits: Any, block_size: int) -> None:
    half = 1 << (bits - 1)
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)) * block_size
    codes = data.draw(arrays.arrays(np.int8, (rows, columns), elements=st.integers(-half, half - 1)))
    codes.reshape(-1, block_size)[:, 0] = -half  # the code that only the extreme value takes
    scales = 2.0 ** data.draw(
        arrays.arrays(np.int8, (rows, columns // block_size), elements=st.integers(-8, 8))
    ).astype(np.float32)
    matrix = (codes.reshape(rows, -1, block_size) * scales[..., None]).reshape(rows, columns).astype(np.float32)
    assert np.array_equal(dequantize(quantize(matrix, bits, block_size), columns), matrix)


@given(arrays.arrays(np.uint8, st.tuples(st.integers(1, 4), st.just(32))), bits_strategy)
def test_packing_and_unpacking_are_inverse(codes: NDArray[np.uint8], bits: int) -> None:
    codes &= np.uint8((1 << bits) - 1)
    packed = pack_bits(codes, bits)
    assert packed.shape == (len(codes), 32 * bits // 8)
    assert np.array_equal(unpack_bits(packed, bits), codes)


def test_first_code_lies_in_the_low_bits() -> None:
    assert pack_bits(np.array([[1, 2, 3, 0]], np.uint8), 2).tolist() == [[0b00_11_10_01]]
    assert pack_bits(np.array([[0x1, 0xF]], np.uint8), 4).tolist() == [[0xF1]]


@pytest.mark.parametrize("bits", BITS)
def test_zero_blocks_are_zeros(bits: Any) -> None:
    matrix = random_matrix(4, 64)
    matrix[1] = 0
    matrix[2, 16:32] = 0
    quantized = quantize(matrix, bits, 16)
    got = dequantize(quantized, 64)
    assert not got[1].any()
    assert not got[2, 16:32].any()
    assert np.isfinite(quantized.scales).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("exponent", [-90, -100, 0, 100])
def test_magnitude_does_not_matter(bits: Any, exponent: int) -> None:
    """A power of two moves the scales and not one code, as far as float32 goes."""
    matrix = random_matrix(4, 64)
    expected = quantize(matrix, bits, 32)
    got = quantize(np.ldexp(matrix, exponent + 10 * (exponent < 0)), bits, 32)
    assert np.array_equal(got.weight, expected.weight)


@pytest.mark.parametrize("bits", BITS)
def test_subnormal_blocks_are_zeros(bits: Any) -> None:
    quantized = quantize(np.full((1, 16), 1e-45, np.float32), bits, 16)
    assert not dequantize(quantized, 16).any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [3e38, -3e38])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_values_too_large_are_refused(bits: Any, value: float) -> None:
    with pytest.raises(CheckpointError, match="too large"):
        quantize(np.full((1, 16), value, np.float32), bits, 16)


@pytest.mark.parametrize("bits", BITS)
def test_the_padding_of_the_last_block_is_zero(bits: Any) -> None:
    matrix = random_matrix(3, 40)
    quantized = quantize(matrix, bits, 32)
    assert quantized.weight.shape == (3, 2, 32 * bits // 8)
    whole = dequantize(quantized, 64)
    assert not whole[:, 40:].any()
    assert np.array_equal(dequantize(quantized, 40), whole[:, :40])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    matrix = random_matrix(2, 16)
    matrix[1, 3] = value
    with pytest.raises(CheckpointError, match="'layer 3 expert 1'"):
        quantize(matrix, 4, 16, "layer 3 expert 1")


def test_pieces_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_matrix(37, 96)
    whole = quantize(matrix, 4, 32)
    monkeypatch.setattr("lesonnx_export.quantize.PIECE_ELEMENTS", 5 * 96)
    pieces = quantize(matrix, 4, 32)
    assert np.array_equal(whole.weight, pieces.weight)
    assert np.array_equal(whole.scales, pieces.scales)


@pytest.mark.parametrize(
    ("columns", "wanted", "expected"),
    [(256, 128, 128), (192, 128, 64), (96, 128, 32), (48, 128, 16), (256, 32, 32), (40, 128, 16), (7, 128, 16)],
)
def test_fitting_block_size(columns: int, wanted: int, expected: int) -> None:
    assert fitting_block_size(columns, wanted) == expected


# -- what ONNX Runtime makes of it -------------------------------------------------------------------------------------


def session(nodes: list[Any], inputs: list[Any], output: str, constants: dict[str, Any]) -> Any:
    graph = helper.make_graph(
        nodes,
        "test",
        inputs,
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def matmul_nbits(quantized: QuantizedMatrix, x: Matrix) -> Matrix:
    rows, blocks, _ = quantized.weight.shape
    node = helper.make_node(
        "MatMulNBits",
        ["x", "weight", "scales"],
        ["y"],
        domain="com.microsoft",
        K=x.shape[1],
        N=rows,
        bits=quantized.bits,
        block_size=quantized.block_size,
    )
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, x.shape[1]])]
    constants = {"weight": quantized.weight, "scales": quantized.scales.reshape(rows * blocks)}
    result: Matrix = session([node], inputs, "y", constants).run(None, {"x": x})[0]
    return result


@pytest.mark.parametrize("columns", [128, 256, 192, 100])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_matmul_nbits_reads_the_layout(bits: Any, block_size: int, columns: int) -> None:
    quantized = quantize(random_matrix(24, columns), bits, block_size)
    x = random_matrix(5, columns, seed=1)
    expected = x.astype(np.float64) @ dequantize(quantized, columns).astype(np.float64).T
    assert np.abs(matmul_nbits(quantized, x) - expected).max() < 2e-4


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", [4, 8])
def test_gather_block_quantized_reads_the_layout(bits: Any, block_size: int) -> None:
    columns = 256
    quantized = quantize(random_matrix(24, columns), bits, block_size)
    node = helper.make_node(
        "GatherBlockQuantized",
        ["table", "ids", "scales"],
        ["y"],
        domain="com.microsoft",
        bits=bits,
        block_size=block_size,
        quantize_axis=1,
        gather_axis=0,
    )
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, [None])]
    constants = {"table": quantized.weight.reshape(24, -1), "scales": quantized.scales}
    ids = np.array([0, 23, 7, 7], np.int64)
    got = session([node], inputs, "y", constants).run(None, {"ids": ids})[0]
    assert np.array_equal(got, dequantize(quantized, columns)[ids])
