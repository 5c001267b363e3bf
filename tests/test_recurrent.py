"""Convolutions and Gated DeltaNet as exported: both sets of operators, the delta rule by its definition, layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from checkpoints import (
    RECURRENT,
    Config,
    Tensors,
    derive,
    fixture,
    fuse_experts,
    nest_text_config,
    prefix_with,
    read_reference,
)
from conftest import BundleFactory, Outcome
from numpy.typing import NDArray
from test_parity import ENGINES_HERE, assert_reference, assert_same_bundle, logits_of

from lesonnx.bundle import Bundle
from lesonnx.errors import BundleError, CheckpointError
from lesonnx.ort import check_version
from lesonnx_export.blocks import Operators, Precision, Step
from lesonnx_export.checkpoint import Checkpoint, Weights
from lesonnx_export.exporter import ExportOptions, make_plan
from lesonnx_export.graph import DenseStore, Graph
from lesonnx_export.recurrent import LINEAR_ATTENTION_SINCE, GatedDeltaRule

OPERATORS: tuple[Operators, ...] = ("native", "portable")
WITH_DELTA_RULE = ("qwen3_next", "qwen3_5_moe_text")
Array = NDArray[np.float32]
RULE = GatedDeltaRule(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=24)


@pytest.mark.parametrize("chunk", [1, 7, 24, 96])
@pytest.mark.parametrize("engine", ENGINES_HERE)
@pytest.mark.parametrize("name", WITH_DELTA_RULE)
def test_portable_operators_give_the_reference(bundle_of: BundleFactory, name: str, engine: str, chunk: int) -> None:
    assert_reference(bundle_of(name, operators="portable"), name, engine=engine, prefill_chunk_tokens=chunk)


@pytest.mark.parametrize("name", RECURRENT)
def test_the_manifest_asks_for_the_onnxruntime_that_is_needed(bundle_of: BundleFactory, name: str) -> None:
    needed = {operators: Bundle(bundle_of(name, operators=operators)).manifest for operators in OPERATORS}
    assert needed["portable"].onnxruntime_at_least == "1.24"
    assert needed["native"].onnxruntime_at_least == ("1.25.1" if name in WITH_DELTA_RULE else "1.24")
    with_float16_caches = Bundle(bundle_of(name, kv_bits=16)).manifest
    assert with_float16_caches.onnxruntime_at_least == "1.29"


@pytest.mark.parametrize("name", WITH_DELTA_RULE)
def test_portable_bundles_hold_plain_operators_of_recurrences(bundle_of: BundleFactory, name: str) -> None:
    for operators, expected in (("native", True), ("portable", False)):
        bundle = Bundle(bundle_of(name, operators=operators))
        texts = [bundle.part_file(part).read_bytes() for part in bundle.manifest.parts]
        assert any(b"LinearAttention" in text for text in texts) == expected


def test_operators_are_chosen_on_the_command_line(lesonnx: Callable[..., Outcome], tmp_path: Path) -> None:
    checkpoint, target = fixture("qwen3_next"), tmp_path / "bundle"
    outcome = lesonnx("export", checkpoint, target, "--bits", "32", "--operators", "portable", "--workers", "1")
    assert outcome.code == 0, outcome.err
    assert Bundle(target).manifest.onnxruntime_at_least == "1.24"
    shown = lesonnx("inspect", target).out
    assert "replay_recurrent" in shown
    assert "past, key, value, decay, beta" in shown
    outcome = lesonnx("export", checkpoint, tmp_path / "other", "--operators", "fast")
    assert outcome.code == 2
    assert "'fast' is not one of 'native', 'portable'" in outcome.err


# -- the delta rule by itself ------------------------------------------------------------------------------------------


def rule_session(directory: Path, operators: Operators) -> onnxruntime.InferenceSession:
    """A part that is the delta rule and nothing else."""
    sizes = {"query": RULE.key_size, "key": RULE.key_size, "value": RULE.value_size, "decay": 4, "beta": 4}
    store = DenseStore(directory / "dense.bin")
    graph = Graph("rule", store)
    step = Step(graph, None, Precision(32, 0, operators=operators))  # type: ignore[arg-type]
    inputs = [graph.input(name, "float32", [1, "T", size]) for name, size in sizes.items()]
    graph.output(RULE.apply(step, 0, *inputs), "output", "float32", [1, "T", RULE.value_size])
    store.close()
    if operators == "native":
        try:
            check_version(LINEAR_ATTENTION_SINCE)
        except BundleError as error:
            pytest.skip(str(error))
    (directory / "rule.onnx").write_bytes(graph.model().SerializeToString())
    return onnxruntime.InferenceSession(str(directory / "rule.onnx"), providers=["CPUExecutionProvider"])


def random_rows(count: int, seed: int, *, hard: bool) -> dict[str, Array]:
    """``hard``: all keys alike and never forgotten, or forgotten at once, which is where inverses lose digits."""
    random = np.random.default_rng(seed)
    keys = random.standard_normal((2, count, 2, RULE.key_head_dim)).astype(np.float32)
    if hard:
        keys[1] = keys[1, :1]
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    decay = -random.random((1, count, 4)) * (60 * (random.random((1, count, 4)) < 0.2) if hard else 0.5)
    beta = np.ones((1, count, 4)) if hard else random.random((1, count, 4))
    return {
        "query": keys[0].reshape(1, count, -1),
        "key": keys[1].reshape(1, count, -1),
        "value": random.standard_normal((1, count, RULE.value_size)).astype(np.float32),
        "decay": decay.astype(np.float32),
        "beta": beta.astype(np.float32),
    }


def by_definition(rows: dict[str, Array], state: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The recurrence token by token, in float64."""
    count, heads = rows["decay"].shape[1], RULE.num_value_heads
    query, key = (rows[name].reshape(count, 2, -1).repeat(2, axis=1).astype(np.float64) for name in ("query", "key"))
    value = rows["value"].reshape(count, heads, -1)
    s = state[0].astype(np.float64)
    outputs = np.empty(value.shape)
    for t in range(count):
        s = s * np.exp(rows["decay"][0, t].astype(np.float64))[:, None, None]
        d = rows["beta"][0, t][:, None] * (value[t] - np.einsum("hkv,hk->hv", s, key[t]))
        s = s + key[t][:, :, None] * d[:, None, :]
        outputs[t] = np.einsum("hkv,hk->hv", s, query[t])
    return outputs.reshape(1, count, -1), s[None]


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("operators", OPERATORS)
def test_the_delta_rule(tmp_path: Path, operators: Operators, hard: bool) -> None:
    session = rule_session(tmp_path, operators)
    for count in (1, 2, 15, 16, 17, 96, 200):
        rows = random_rows(count, count, hard=hard)
        state = np.random.default_rng(count).standard_normal(tuple(map(int, RULE.shape))).astype(np.float32)
        output, present = session.run(["output", "present_recurrent_0"], rows | {"past_recurrent_0": state})
        expected, after = by_definition(rows, state)
        assert np.abs(output - expected).max() < 2e-5
        assert np.abs(present - after).max() < 2e-5


# -- what real checkpoints look like -----------------------------------------------------------------------------------


def as_vision_language(tensors: Tensors) -> Tensors:
    """As Qwen3.5's checkpoints are: a vision tower and a further-tokens head beside the language model."""
    renamed = prefix_with("model.language_model.", "lm_head.")(fuse_experts(tensors))
    extra = np.ones((4, 4), np.float32)
    return renamed | {"model.visual.blocks.0.attn.qkv.weight": extra, "mtp.layers.0.mlp.gate.weight": extra}


@pytest.mark.parametrize("nested_type", ["qwen3_5_moe_text", "qwen3_5_moe"])
def test_the_whole_vision_language_checkpoint(bundle_of: BundleFactory, tmp_path: Path, nested_type: str) -> None:
    def nest(config: Config) -> Config:
        nested = nest_text_config(config)
        nested["text_config"]["model_type"] = nested_type
        rope = {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
        nested["text_config"]["rope_parameters"] |= rope
        return nested | {"model_type": "qwen3_5_moe", "vision_config": {"depth": 1}}

    checkpoint = derive("qwen3_5_moe_text", tmp_path / "vl", config=nest, tensors=as_vision_language)
    bundle = bundle_of(checkpoint)
    assert_reference(bundle, "qwen3_5_moe_text")
    assert_same_bundle(bundle_of, "qwen3_5_moe_text", checkpoint)
    skipped = Bundle(bundle).manifest.skipped_tensors
    assert set(skipped) == {"model.visual.blocks.0.attn.qkv.weight", "mtp.layers.0.mlp.gate.weight"}


@pytest.mark.parametrize("name", WITH_DELTA_RULE)
def test_layer_types_follow_from_the_interval(bundle_of: BundleFactory, tmp_path: Path, name: str) -> None:
    def leave_out(config: Config) -> Config:
        kept = {key: value for key, value in config.items() if key not in ("layer_types", "norm_topk_prob")}
        return kept | {"full_attention_interval": 4}

    checkpoint = derive(name, tmp_path / "interval", config=leave_out)
    assert_same_bundle(bundle_of, name, checkpoint)


def test_biased_convolutions(bundle_of: BundleFactory, tmp_path: Path) -> None:
    """Biases of zero change nothing, others do: no fixture has any."""

    def with_biases(value: float) -> Any:
        def add(tensors: Tensors) -> Tensors:
            biases = {}
            for key, weight in tensors.items():
                if ".conv." in key:
                    biases[key.replace(".weight", ".bias")] = np.full(len(weight), value, weight.dtype)
            return tensors | biases

        return add

    bundles = {}
    for value in (0.0, 0.5):
        checkpoint = derive(
            "lfm2_moe",
            tmp_path / str(value),
            config=lambda config: config | {"conv_bias": True},
            tensors=with_biases(value),
        )
        bundles[value] = bundle_of(checkpoint)
    assert_reference(bundles[0.0], "lfm2_moe")
    with pytest.raises(AssertionError):
        assert_reference(bundles[0.5], "lfm2_moe")


BAD = {
    "lfm2_moe": [
        ({"layer_types": ["conv"]}, "layer_types must be 4 of conv, full_attention, found"),
        ({"layer_types": ["conv", "mamba", "conv", "conv"]}, "layer_types must be 4 of"),
        ({"layer_types": None}, "layer_types is missing"),
        ({"conv_L_cache": 1}, "a convolution over 1 token"),
        ({"conv_bias": True}, "conv.in_proj.bias"),
    ],
    "qwen3_next": [
        ({"linear_num_key_heads": 3}, "linear_num_value_heads 4 is not a multiple of linear_num_key_heads 3"),
        ({"linear_num_key_heads": 4}, r"in_proj_qkvz.weight' has shape \[192, 64\], expected"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor leaves 64 of 32 values to rotate"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"full_attention_interval": 0}, "full_attention_interval must be a whole number of at least 1"),
    ],
}


@pytest.mark.parametrize(("name", "change", "message"), [(name, *case) for name in BAD for case in BAD[name]])
def test_bad_configurations(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    checkpoint = derive(name, tmp_path / "bad", config=lambda config: config | change)
    with pytest.raises(CheckpointError, match=message) as caught:
        make_plan(Checkpoint(checkpoint), ExportOptions())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", RECURRENT)
def test_quantized_dense_parts_stay_near(bundle_of: BundleFactory, name: str) -> None:
    """8 bits move the logits, as much as those of other families or less (qwen2_moe: a fifth of their spread)."""
    expected = read_reference(name)["logits"]
    logits = logits_of(bundle_of(name, dense_bits=8), read_reference(name)["input_ids"].tolist())
    assert 0.001 < (logits - expected).std() / expected.std() < 0.15


def test_rehearsals_read_nothing(tmp_path: Path) -> None:
    """The plan of a checkpoint is walked through on zeros of the right shapes."""
    weights = Weights(Checkpoint(derive("qwen3_next", tmp_path / "plan")), rehearsal=True)
    plan = make_plan(weights.checkpoint, ExportOptions(), weights)
    assert set(plan.part_names[-2:]) == {"replay_convolution", "replay_recurrent"}


def test_a_target_decides_what_is_used(lesonnx: Callable[..., Outcome], tmp_path: Path) -> None:
    """iOS's package has ONNX Runtime 1.24.2: portable operators by themselves, one line where a choice needs more."""
    checkpoint, target = fixture("qwen3_next"), tmp_path / "ios"
    options = ("--bits", "32", "--workers", "1", "--target", "ios")
    assert lesonnx("export", checkpoint, target, *options).code == 0
    assert Bundle(target).manifest.onnxruntime_at_least == "1.24"
    for chosen in (("--operators", "native"), ("--kv-bits", "16"), ("--kv-bits", "8")):
        outcome = lesonnx("export", checkpoint, tmp_path / "other", *options, *chosen)
        assert outcome.code == 2
        assert f"{' '.join(chosen)} needs ONNX Runtime 1.2" in outcome.error
        assert not (tmp_path / "other").exists()
