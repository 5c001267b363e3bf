"""Experts rounded for the rows they read: nearer on rows of the same kind, whatever the activation, used or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from lesonnx.errors import CheckpointError
from lesonnx.manifest import Activation
from lesonnx_export.compensate import QuantizedExpert, expected_loss, quantize_expert
from lesonnx_export.expert import (
    ExpertModel,
    ExpertPrecision,
    ExpertShape,
    MatrixPrecision,
    expert_bytes,
    make_kind,
    make_mixed_kind,
)
from lesonnx_export.feedforward import apply_expert
from lesonnx_export.statistics import LayerStatistics

HIDDEN, INTERMEDIATE, EXPERTS, SLOTS = 64, 48, 4, 2
ACTIVATIONS: list[Activation] = ["swiglu", "geglu", "reglu", "swiglu_clamped"]


def shape_of(activation: Activation, has_bias: bool = False) -> ExpertShape:
    return ExpertShape(HIDDEN, INTERMEDIATE, activation, has_bias)


def tensors_of(shape: ExpertShape, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        rows, columns = shape.matrix_shape(name)
        tensors[name] = (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)
        if shape.has_bias:
            tensors[f"{name}.bias"] = rng.standard_normal(rows).astype(np.float32)
    return tensors


def statistics_of(num_tokens: int = 800, seed: int = 0, experts: int = EXPERTS) -> LayerStatistics:
    """Rows that lie mostly in a quarter of the directions, off the origin; the last expert of more is never used."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(9).standard_normal((HIDDEN // 4, HIDDEN))
    rows = rng.standard_normal((num_tokens, HIDDEN // 4)) @ mixing + 0.3 * rng.standard_normal((num_tokens, HIDDEN))
    ids = np.argsort(rng.random((num_tokens, EXPERTS)), axis=1)[:, :SLOTS]
    weights = rng.dirichlet(np.ones(SLOTS), num_tokens)
    return LayerStatistics(
        layer_idx=3,
        inputs=((rows + mixing[0]) / 4).astype(np.float16),
        input_scale=1.0,
        topk_ids=ids.astype(np.int32),
        topk_weights=weights.astype(np.float32),
        shared_weights=rng.random(num_tokens).astype(np.float32),
        sensitivity=2.0,
        num_experts=experts,
    )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("bits", "gain"), [(2, 0.7), (4, 0.6)])
@pytest.mark.parametrize("expert_idx", [2, None])
def test_less_is_lost_on_rows_of_the_same_kind(
    bits: Any, gain: float, activation: Activation, has_bias: bool, expert_idx: int | None
) -> None:
    shape = shape_of(activation, has_bias)
    kind, tensors = make_kind("kind", shape, bits, 32), tensors_of(shape)
    other = statistics_of(seed=1)
    plain, ours = (quantize_expert(kind, tensors, known, expert_idx) for known in (None, statistics_of()))
    losses = [expected_loss(kind, tensors, found, other, expert_idx) for found in (plain, ours)]
    assert 0 < losses[1] < gain * losses[0]


def test_biases_take_up_what_rounding_shifts() -> None:
    shape = shape_of("swiglu_clamped", has_bias=True)
    kind, tensors, known = make_kind("kind", shape, 2, 32), tensors_of(shape), statistics_of()
    found = quantize_expert(kind, tensors, known, 1)
    rows = statistics_of(seed=1).rows(1)
    squares = rows.weights**2

    def shift(approximate: dict[str, Any]) -> float:
        difference = apply_expert(kind, approximate, rows.inputs) - apply_expert(kind, tensors, rows.inputs)
        return float(np.linalg.norm(squares @ difference / squares.sum()))

    assert shift(found.tensors(kind)) < 0.3 * shift({**found.tensors(kind), **{n: tensors[n] for n in found.biases}})
    plain = quantize_expert(kind, tensors, None, 1)
    assert all(np.array_equal(plain.biases[name], tensors[name]) for name in plain.biases)


def test_an_expert_that_was_never_used_is_rounded_for_its_layer() -> None:
    shape = shape_of("swiglu")
    kind, tensors, known = make_kind("kind", shape, 2, 32), tensors_of(shape), statistics_of(experts=EXPERTS + 1)
    assert known.expert_tokens[EXPERTS] == 0
    assert expected_loss(kind, tensors, quantize_expert(kind, tensors, None, EXPERTS), known, EXPERTS) == 0
    other = statistics_of(seed=1)
    plain, ours = (quantize_expert(kind, tensors, given, EXPERTS) for given in (None, known))
    # Judged as if it were used after all.
    assert expected_loss(kind, tensors, ours, other, 0) < 0.7 * expected_loss(kind, tensors, plain, other, 0)


def test_precisions_may_differ_within_an_expert() -> None:
    precision = ExpertPrecision(MatrixPrecision(2, 32), MatrixPrecision(32, 0), MatrixPrecision(4, 16))
    kind, tensors = make_mixed_kind("kind", shape_of("swiglu"), precision), tensors_of(shape_of("swiglu"))
    found = quantize_expert(kind, tensors, statistics_of(), 0)
    assert {name: (m.bits, m.block_size) for name, m in found.matrices.items()} == {
        "gate_proj": (2, 32),
        "down_proj": (4, 16),
    }
    exact = make_kind("kind", shape_of("swiglu"), 32, 0)
    assert quantize_expert(exact, tensors, statistics_of(), 0) == QuantizedExpert({}, {})


def test_the_loss_is_that_of_the_layers_sum() -> None:
    """What all experts are said to lose is the squared error of their weighted sum, where their errors are unlike."""
    shape, known = shape_of("swiglu"), statistics_of()
    kind = make_kind("kind", shape, 4, 32)
    total, sums = 0.0, np.zeros((known.num_tokens, HIDDEN))
    for expert_idx in range(EXPERTS):
        tensors = tensors_of(shape, expert_idx)
        found = quantize_expert(kind, tensors, None, expert_idx)
        total += expected_loss(kind, tensors, found, known, expert_idx)
        rows = known.rows(expert_idx)
        used = (known.topk_ids == expert_idx).any(axis=1)
        error = apply_expert(kind, found.tensors(kind), rows.inputs) - apply_expert(kind, tensors, rows.inputs)
        sums[used] += error * rows.weights[:, None]
    assert total == pytest.approx(known.sensitivity * (sums**2).sum(axis=1).mean(), rel=0.15)


def test_the_same_input_gives_the_same_bytes() -> None:
    shape = shape_of("geglu", has_bias=True)
    kind, tensors = make_kind("kind", shape, 2, 16), tensors_of(shape)
    one, other = (quantize_expert(kind, tensors, statistics_of(), 1) for _ in range(2))
    for name, matrix in one.matrices.items():
        assert np.array_equal(matrix.weight, other.matrices[name].weight)
        assert np.array_equal(matrix.scales, other.matrices[name].scales)
    assert all(np.array_equal(one.biases[name], other.biases[name]) for name in one.biases)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_formulas_are_those_of_the_experts_model(activation: Activation, has_bias: bool, tmp_path: Any) -> None:
    shape = shape_of(activation, has_bias)
    kind, tensors = make_kind("kind", shape, 32, 0), tensors_of(shape)
    (tmp_path / "experts.pack").write_bytes(expert_bytes(kind, tensors, {}).tobytes())
    (tmp_path / "expert.onnx").write_bytes(ExpertModel(kind).serialize(0))
    x = 3 * np.random.default_rng(0).standard_normal((9, HIDDEN)).astype(np.float32)
    (expected,) = onnxruntime.InferenceSession(str(tmp_path / "expert.onnx")).run(None, {"x": x})
    assert np.abs(apply_expert(kind, tensors, x) - expected).max() < 1e-4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_too_large_is_refused() -> None:
    shape = shape_of("swiglu")
    tensors = tensors_of(shape)
    known, kind = replace(statistics_of(), input_scale=1e30), make_kind("kind", shape, 2, 32)
    with pytest.raises(CheckpointError, match=r"layer 3 expert 0\.gate_proj: what it reads"):
        quantize_expert(kind, tensors, known, 0, "layer 3 expert 0")
