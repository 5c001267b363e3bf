"""Experts: where their tensors lie, and that every expert's own .onnx is a whole model that computes the FFN."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import FAMILIES, read_config, read_tensors
from conftest import BundleFactory
from forward import swiglu
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lesonnx.bundle import Bundle
from lesonnx.manifest import MATRIX_NAMES, PAGE_BYTES, TENSOR_ALIGNMENT_BYTES, ExpertKind
from lesonnx_export.compensate import quantize_expert
from lesonnx_export.expert import PACK_NAME, ExpertModel, ExpertShape, expert_bytes, make_kind
from lesonnx_export.quantize import dequantize, quantize

ACTIVATIONS = ("swiglu", "geglu", "reglu", "swiglu_clamped")
Array = NDArray[np.float64]


def activate(name: str, gate: Array, up: Array, alpha: float, limit: float) -> Array:
    if name == "swiglu":
        return gate / (1 + np.exp(-gate)) * up
    if name == "geglu":
        return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    if name == "reglu":
        return np.maximum(gate, 0) * up
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate / (1 + np.exp(-alpha * gate))


def make_tensors(shape: ExpertShape, seed: int) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    tensors = {}
    for name in MATRIX_NAMES:
        rows, columns = shape.matrix_shape(name)
        tensors[name] = (random.standard_normal((rows, columns)) * 2 / math.sqrt(columns)).astype(np.float32)
        if shape.has_bias:
            tensors[f"{name}.bias"] = random.standard_normal(rows).astype(np.float32)
    return tensors


def reference(shape: ExpertShape, kind: ExpertKind, tensors: dict[str, NDArray[np.float32]], x: Array) -> Array:
    """The FFN in float64 on the weights that the kind can hold."""

    def linear(name: str, values: Array) -> Array:
        matrix = kind.matrices[name]
        weight = tensors[name]
        if matrix.bits != 32:
            weight = dequantize(quantize(weight, matrix.bits, matrix.block_size), matrix.columns)
        bias = tensors[f"{name}.bias"].astype(np.float64) if shape.has_bias else 0.0
        return values @ weight.astype(np.float64).T + bias

    gate, up = linear("gate_proj", x), linear("up_proj", x)
    return linear("down_proj", activate(shape.activation, gate, up, shape.alpha, shape.limit))


def write_pack(directory: Path, kind: ExpertKind, shape: ExpertShape, count: int) -> list[dict[str, Any]]:
    """A pack of some experts with a model beside it for each."""
    experts = [make_tensors(shape, seed) for seed in range(count)]
    pack = b"".join(
        expert_bytes(kind, tensors, quantize_expert(kind, tensors, None, place).matrices).tobytes()
        for place, tensors in enumerate(experts)
    )
    (directory / PACK_NAME).write_bytes(pack)
    model = ExpertModel(kind)
    for place in range(count):
        (directory / f"expert_{place:03d}.onnx").write_bytes(model.serialize(place * kind.cost_bytes))
    return experts


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bits", [32, 8, 4, 2])
def test_model_computes_the_ffn(tmp_path: Path, bits: Any, activation: Any, has_bias: bool) -> None:
    # The limit is low, so that clamping is not left untried.
    shape = ExpertShape(64, 48, activation, has_bias=has_bias, limit=1.5)
    kind = make_kind("stage_0", shape, bits, 32)
    experts = write_pack(tmp_path, kind, shape, 3)
    x = np.random.default_rng(9).standard_normal((5, 64)).astype(np.float32)
    for place, tensors in enumerate(experts):
        path = str(tmp_path / f"expert_{place:03d}.onnx")
        onnx.checker.check_model(path)
        got = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        expected = reference(shape, kind, tensors, x.astype(np.float64))
        # Quantized models round their activations to 8 bits a block as well (accuracy_level 4).
        tolerance = 1e-5 if bits == 32 else 0.03
        assert np.abs(got - expected).max() < tolerance * max(1, np.abs(expected).max())


@given(
    st.integers(1, 200),
    st.integers(1, 200),
    st.sampled_from([2, 4, 8, 32]),
    st.sampled_from([16, 32, 64, 128]),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_layout_is_aligned_and_does_not_overlap(
    hidden: int, intermediate: int, bits: Any, block_size: int, has_bias: bool
) -> None:
    kind = make_kind("stage_0", ExpertShape(hidden, intermediate, has_bias=has_bias), bits, block_size)
    ranges = []
    for matrix in kind.matrices.values():
        ranges.append((matrix.weight_offset_bytes, matrix.weight_bytes))
        if matrix.scales_offset_bytes is not None:
            ranges.append((matrix.scales_offset_bytes, matrix.scales_bytes))
        if matrix.bias_offset_bytes is not None:
            ranges.append((matrix.bias_offset_bytes, matrix.rows * 4))
    assert len(ranges) == 3 * (1 + (bits != 32) + has_bias)
    end = 0
    for start, length in sorted(ranges):
        assert start % TENSOR_ALIGNMENT_BYTES == 0
        assert start - end < TENSOR_ALIGNMENT_BYTES
        assert start >= end
        end = start + length
    assert end == kind.length_bytes
    assert kind.cost_bytes % PAGE_BYTES == 0
    assert 0 <= kind.cost_bytes - kind.length_bytes < PAGE_BYTES
    # What a session keeps after it packed the weights is small and lies together at the end.
    weights_end = max(matrix.weight_offset_bytes + matrix.weight_bytes for matrix in kind.matrices.values())
    small = [matrix.scales_offset_bytes for matrix in kind.matrices.values()]
    assert all(offset is None or offset >= weights_end for offset in small)


@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_expert_of_a_bundle_is_a_model_of_its_own(bundle_of: BundleFactory, name: str, bits: int) -> None:
    bundle = Bundle(bundle_of(name, bits=bits))
    config, tensors = read_config(name), read_tensors(name)
    block, matrices = ("block_sparse_moe", ("w1", "w3", "w2")) if name == "mixtral" else ("mlp", MATRIX_NAMES)
    x = np.random.default_rng(3).standard_normal((4, config["hidden_size"])).astype(np.float32)
    assert len({bundle.model_file(expert) for expert in bundle.experts}) == len(bundle.experts)
    for expert in bundle.experts:
        path = str(bundle.model_file(expert))
        onnx.checker.check_model(path)
        got = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        place = "shared_expert" if expert.expert_idx is None else f"experts.{expert.expert_idx}"
        weights = [
            tensors[f"model.layers.{expert.layer_idx}.{block}.{place}.{matrix}.weight"].astype(np.float64)
            for matrix in matrices
        ]
        expected = swiglu(x.astype(np.float64), *weights)
        assert np.abs(got - expected).mean() < (1e-6 if bits == 32 else 0.3) * np.abs(expected).mean()


def test_a_plain_session_runs_an_expert(bundle_of: BundleFactory) -> None:
    """In a process that knows nothing of lesonnx."""
    bundle = Bundle(bundle_of("qwen2_moe", bits=4))
    script = """
import sys, numpy, onnxruntime
for path in sys.argv[1:]:
    print(onnxruntime.InferenceSession(path).run(None, {"x": numpy.ones((1, 64), "f4")})[0].shape)
"""
    paths = [str(bundle.model_file(expert)) for expert in bundle.experts if expert.layer_idx == 1]
    result = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:-1] == ["(1, 64)"] * len(paths)


def test_an_expert_needs_nothing_but_its_model_and_its_pack(bundle_of: BundleFactory, tmp_path: Path) -> None:
    bundle = Bundle(bundle_of("qwen3_moe", bits=4))
    model = bundle.model_file(bundle.experts[-5])
    for path in (model, model.parent / PACK_NAME):
        shutil.copy(path, tmp_path / path.name)
    x = np.ones((1, 64), np.float32)
    moved = onnxruntime.InferenceSession(str(tmp_path / model.name), providers=["CPUExecutionProvider"])
    stayed = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    assert np.array_equal(moved.run(None, {"x": x})[0], stayed.run(None, {"x": x})[0])


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])
def test_pack_is_float32_rows_of_the_checkpoint(bundle_of: BundleFactory, name: str) -> None:
    """A float bundle is an exact copy: [N,K] float32, where the kind says."""
    bundle = Bundle(bundle_of(name))
    tensors = read_tensors(name)
    for expert in bundle.experts:
        pack = np.fromfile(bundle.pack_file(expert.layer_idx), np.uint8)
        assert expert.offset_bytes % PAGE_BYTES == 0
        place = "shared_expert" if expert.expert_idx is None else f"experts.{expert.expert_idx}"
        for matrix_name, matrix in expert.kind.matrices.items():
            start = expert.offset_bytes + matrix.weight_offset_bytes
            stored = pack[start : start + matrix.weight_bytes].view(np.float32).reshape(matrix.rows, matrix.columns)
            original = tensors[f"model.layers.{expert.layer_idx}.mlp.{place}.{matrix_name}.weight"]
            assert np.array_equal(stored, original.astype(np.float32))
