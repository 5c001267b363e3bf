"""The families beyond those of test_parity, and settings of all: float bundles against what transformers computed.

`tools/make_family_references.py` made the references that are not of the shared fixtures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    FIXTURES,
    Config,
    Tensors,
    derive,
    fuse_experts,
    nest_text_config,
    prefix_with,
    read_config,
    read_reference,
    read_tensors,
)
from conftest import BundleFactory, Outcome
from test_parity import TOLERANCE, assert_reference, assert_same_bundle, greedy, logits_of

from lesonnx.bundle import Bundle
from lesonnx.engines import ENGINES
from lesonnx.model import SCHEDULES
from lesonnx_export.checkpoint import Checkpoint
from lesonnx_export.transformers4 import to_transformers4

FAMILIES = (
    *("granitemoe", "granitemoeshared", "gpt_oss", "gpt_oss_mxfp4", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    *("glm4_moe_lite", "ernie4_5_moe", "hunyuan_v1_moe", "phimoe", "gemma4_text", "smallthinker", "qwen3_moe_fp8"),
)
CHUNKS = (1, 7, 24, 96)
# Rotary positions that depend on the sequence's length are what they are only if a prompt runs at once: keys that
# were cached at a shorter length keep its angles, in transformers as well.
LENGTH_DEPENDENT = ("dynamic", "longrope")


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FAMILIES)
def test_reference(bundle_of: BundleFactory, name: str, schedule: str, chunk: int) -> None:
    assert_reference(bundle_of(name), name, schedule=schedule, prefill_chunk_tokens=chunk)


@pytest.mark.parametrize("name", FAMILIES)
def test_sessions_give_the_same_tokens(bundle_of: BundleFactory, name: str) -> None:
    assert_reference(bundle_of(name), name, engine="session", prefill_chunk_tokens=24)


@pytest.mark.parametrize("name", FAMILIES)
def test_schedules_and_budgets_do_not_change_a_bit(bundle_of: BundleFactory, name: str) -> None:
    bundle = bundle_of(name, bits=4)
    least = Bundle(bundle).least_budget_bytes
    prompt = read_reference(name)["input_ids"][:40].tolist()
    engines = [engine for engine in ENGINES if engine != "auto"]
    for engine in engines:
        common: dict[str, Any] = {"engine": engine, "prefill_chunk_tokens": 13}
        expected = logits_of(bundle, prompt, schedule="resident", **common)
        assert np.isfinite(expected).all()
        for options in (
            {"schedule": "on-demand", "expert_budget_bytes": least},
            {"schedule": "les", "expert_budget_bytes": 2 * least},
        ):
            assert logits_of(bundle, prompt, **options, **common).tobytes() == expected.tobytes(), (engine, options)


# -- layouts -----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"num_shards": 3},
    "model.language_model": {"config": nest_text_config, "tensors": prefix_with("model.language_model.", "lm_head.")},
    "no_prefix": {"tensors": prefix_with("", "lm_head.")},
    "transformers_4": {"config": to_transformers4},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_layout_does_not_matter(bundle_of: BundleFactory, tmp_path: Path, name: str, layout: str) -> None:
    if (name, layout) == ("gemma4_text", "transformers_4"):
        pytest.skip("rotary settings by layer type, which transformers 4 cannot say")
    if (name, layout) == ("smallthinker", "model.language_model"):
        pytest.skip("known by its architecture alone, which a nested config does not repeat")
    checkpoint = derive(name, tmp_path / layout, **LAYOUTS[layout])
    assert_same_bundle(bundle_of, name, checkpoint)
    reference = read_reference(name)
    prompt = reference["input_ids"][: int(reference["greedy_prompt_len"])].tolist()
    assert greedy(bundle_of(checkpoint), prompt, 10) == reference["greedy_ids"][:10].tolist()


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe"])
def test_fused_experts(bundle_of: BundleFactory, tmp_path: Path, name: str) -> None:
    """As transformers 5 holds them: gate and up of all experts in one tensor [E, 2 I, H]."""
    checkpoint = derive(name, tmp_path / "fused", tensors=fuse_experts)
    assert not any(".experts.0." in key for key in fuse_experts(read_tensors(name)))
    assert_same_bundle(bundle_of, name, checkpoint)


def test_float8_blocks_with_partial_edges(tmp_path: Path) -> None:
    """Blocks that divide neither rows nor columns; read whole, by item and by rows."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 20, 50)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, (2, 3, 4)).astype(np.float32)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 16]}}
    added = {"model.x": values, "model.x_scale_inv": scales, "model.y": values[0], "model.y_scale_inv": scales[0]}
    directory = derive("qwen3_moe", tmp_path / "c", config=lambda c: c | config, tensors=lambda t: t | added)
    checkpoint = Checkpoint(directory)
    expected = values.astype(np.float32) * np.repeat(np.repeat(scales, 8, 1), 16, 2)[:, :20, :50]
    assert checkpoint.scale_shape("x") == (2, 3, 4)
    assert np.array_equal(checkpoint.read("x"), expected)
    assert np.array_equal(checkpoint.read("x", 1), expected[1])
    assert np.array_equal(np.concatenate(list(checkpoint.rows("y", 7))), expected[0])


def test_mxfp4_is_converted_exactly(bundle_of: BundleFactory, tmp_path: Path) -> None:
    """The same values as bfloat16 tensors in the other orientation: not a byte of the weights differs."""
    fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([fp4, -fp4])

    def unpack(tensors: Tensors) -> Tensors:
        plain = {}
        for key, value in tensors.items():
            if key.endswith("_blocks"):
                scales = tensors[key.replace("_blocks", "_scales")].astype(np.int32) - 127
                codes = np.stack([value & 15, value >> 4], axis=-1).reshape(*value.shape[:-1], -1)
                matrix = np.ldexp(table[codes], scales[..., None]).reshape(*value.shape[:2], -1)
                swapped = np.ascontiguousarray(matrix.transpose(0, 2, 1))
                plain[key.removesuffix("_blocks")] = swapped.astype(ml_dtypes.bfloat16)
            elif not key.endswith("_scales"):
                plain[key] = value
        return plain

    def forget(config: Config) -> Config:
        return {key: value for key, value in config.items() if key != "quantization_config"}

    checkpoint = derive("gpt_oss_mxfp4", tmp_path / "plain", config=forget, tensors=unpack)
    assert_same_bundle(bundle_of, "gpt_oss_mxfp4", checkpoint)


# -- settings ----------------------------------------------------------------------------------------------------------

with np.load(FIXTURES.parent / "variants.npz") as _arrays:
    VARIANTS = {name: _arrays[name] for name in _arrays.files if not name.endswith("_config")}
    CHANGES = {name: json.loads(str(_arrays[f"{name}_config"])) for name in VARIANTS}


@pytest.mark.parametrize("name", VARIANTS)
def test_settings(bundle_of: BundleFactory, tmp_path: Path, name: str) -> None:
    """The last 32 of 96 logits: behind every window that the settings name, sliding or rotary."""
    checkpoint_name, changes = CHANGES[name]
    # The context that a host accepts is another matter than the window that scaling starts from.
    checkpoint = derive(checkpoint_name, tmp_path / name, config=lambda config: config | changes)
    prompt = read_reference(checkpoint_name)["input_ids"].tolist()
    for chunk in (96,) if name in LENGTH_DEPENDENT else CHUNKS:
        logits = past_the_context(bundle_of(checkpoint), prompt, prefill_chunk_tokens=chunk)
        assert np.abs(logits[-32:] - VARIANTS[name]).max() < TOLERANCE, chunk
    unchanged = logits_of(bundle_of(checkpoint_name), prompt, prefill_chunk_tokens=96)
    assert np.abs(unchanged[-32:] - VARIANTS[name]).max() > 0.01, "the setting changes nothing here"


def past_the_context(bundle: Path, prompt: list[int], **options: Any) -> Any:
    import lesonnx

    with lesonnx.load(bundle, **options) as model:
        model.runner.states.max_tokens = max(model.runner.states.max_tokens, len(prompt))
        return model.runner.prefill(prompt, all_logits=True)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("qwen3_moe", {"quantization_config": {"quant_method": "awq"}}, "method 'awq' is not converted for qwen3_moe"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "mxfp4"}}, "(only fp8)"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors'"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must be 4 of"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("phimoe", {"num_experts_per_tok": 3}, "sparsemixer chooses 2"),
        ("hunyuan_v1_moe", {"num_experts": [8, 8, 16]}, "num_experts differs from layer to layer"),
        ("gemma4_text", {"enable_moe_block": False}, "enable_moe_block is False"),
        ("gemma4_text", {"hidden_size_per_layer_input": 64}, "hidden_size_per_layer_input is 64"),
        ("smallthinker", {"rope_layout": [1, 0]}, "rope_layout must be 4 of 0, 1"),
        ("smallthinker", {"moe_enable_early_router": False}, "moe_enable_early_router is False"),
        ("qwen3_moe", {"model_type": "qwen3_mo"}, "the nearest is qwen3_moe"),
    ],
)
def test_refused_by_name(
    lesonnx: Callable[..., Outcome], tmp_path: Path, name: str, changes: Config, said: str
) -> None:
    checkpoint = derive(name, tmp_path / "c", config=lambda config: config | changes)
    outcome = lesonnx("export", checkpoint, tmp_path / "bundle")
    assert (outcome.code, said in outcome.error) == (2, True), outcome.error
    assert not (tmp_path / "bundle").exists()


def test_heads_for_more_tokens_are_skipped_by_name(bundle_of: BundleFactory, tmp_path: Path) -> None:
    def add_layer(tensors: Tensors) -> Tensors:
        last = {k.replace("layers.2.", "layers.3."): v for k, v in tensors.items() if ".layers.2." in k}
        return tensors | last | {"model.layers.3.eh_proj.weight": tensors["model.layers.2.mlp.gate.weight"]}

    checkpoint = derive("deepseek_v3", tmp_path / "c", tensors=add_layer)
    assert read_config("deepseek_v3")["num_nextn_predict_layers"] == 1
    skipped = Bundle(bundle_of(checkpoint)).manifest.skipped_tensors
    assert "model.layers.3.eh_proj.weight" in skipped
    assert set(skipped) == set(add_layer(read_tensors("deepseek_v3"))) - set(read_tensors("deepseek_v3"))
    assert_same_bundle(bundle_of, "deepseek_v3", checkpoint)
