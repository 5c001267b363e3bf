"""What can be wrong with checkpoints of each family: one line that names it, exit code 2, nothing left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import FIXTURES, Tensors, derive, read_config
from conftest import Outcome

from lesonnx.errors import CheckpointError
from lesonnx_export.architectures import make_decoder
from lesonnx_export.checkpoint import Checkpoint
from lesonnx_export.config import LARGEST, LARGEST_OF, Config
from lesonnx_export.plan import ExportOptions, make_plan
from lesonnx_export.sizes import sizes_of

Call = Callable[..., Outcome]
ALL = sorted(path.name for path in FIXTURES.iterdir())
HUGE = 1 << 31

# Fixture, what is changed in its config, what the error mentions.
BAD_CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "groups that do not divide": ("deepseek_v3", {"n_group": 3}, "num_experts 8 is not a multiple of n_group 3"),
    "no group chosen": ("deepseek_v3", {"topk_group": 0}, "topk_group must be a whole number of at least 1"),
    "more groups chosen than there are": ("deepseek_v3", {"n_group": 2, "topk_group": 3}, "topk_group 3 exceeds"),
    "groups with too few experts": ("deepseek_v3", {"n_group": 8, "topk_group": 1}, "exceeds the 1 experts of"),
    "latent of an odd size": ("deepseek_v3", {"kv_lora_rank": 13}, "is not a multiple of 8"),
    "layers without end": ("deepseek_v3", {"num_hidden_layers": HUGE}, "num_hidden_layers is 2147483648, expected at"),
    "prediction heads without end": ("deepseek_v3", {"num_nextn_predict_layers": HUGE}, "num_nextn_predict_layers"),
    "a hidden size that fills memory": ("deepseek_v3", {"hidden_size": HUGE}, "hidden_size is 2147483648"),
    "a size beyond all": ("deepseek_v3", {"moe_intermediate_size": 10**30}, "moe_intermediate_size"),
    "a number beyond float32": ("deepseek_v3", {"routed_scaling_factor": 1e308}, "a number that float32 holds"),
    "a factor that is text": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "yarn", "factor": "4", "mscale_all_dim": 1.0}},
        "factor must be a positive number",
    ),
    "a scale that is text": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": "1", "mscale_all_dim": "1"}},
        "must be a positive number",
    ),
    "too few layer types": ("gemma4_text", {"layer_types": ["full_attention"]}, "layer_types must be"),
    "a cap of zero": ("gemma4_text", {"final_logit_softcapping": 0}, "final_logit_softcapping must be a positive"),
    "a cap of text": ("gemma4_text", {"final_logit_softcapping": "30"}, "final_logit_softcapping must be a number"),
    "heads of text": (
        "gemma4_text",
        {"attention_k_eq_v": True, "num_global_key_value_heads": "two"},
        "num_global_key_value_heads must be a whole number",
    ),
    "sizes of a layer": (
        "gemma4_text",
        {"per_layer_config": {"0": {"head_dim": 12}}},
        "head_dim must be a multiple of 8",
    ),
    "key heads of a layer": (
        "gemma4_text",
        {"per_layer_config": {"0": {"num_key_value_heads": 3}}},
        "is not a multiple of num_key_value_heads 3",
    ),
    "logits divided by nothing": ("granitemoe", {"logits_scaling": 0}, "logits_scaling must be a positive number"),
    "a window of nothing": ("gpt_oss", {"sliding_window": 0}, "sliding_window must be a whole number"),
    "a method that is a list": ("gpt_oss", {"quantization_config": ["mxfp4"]}, "quantization_config of method"),
    "divisors of text": (
        "phimoe",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": ["1"] * 8, "long_factor": [1.0] * 8}},
        "short_factor must be a positive number, found '1'",
    ),
    "a window of text": ("phimoe", {"sliding_window": "all"}, "sliding_window must be a whole number"),
    "an end that is a list": (
        "ernie4_5_moe",
        {"moe_layer_end_index": [1]},
        "moe_layer_end_index must be a whole number",
    ),
    "counts of nothing": ("hunyuan_v1_moe", {"moe_topk": []}, "moe_topk differs from layer to layer"),
    "counts that are lists": ("hunyuan_v1_moe", {"moe_topk": [[1], [2]]}, "moe_topk differs from layer to layer"),
    "a layout of lists": ("smallthinker", {"rope_layout": [[1], [1], [1], [1]]}, "rope_layout must be"),
    "value heads that do not divide": ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads"),
    "no layer in full": ("qwen3_next", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
    "a base of one": (
        "qwen3_moe",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1}},
        "rope_theta must be",
    ),
    "a window of a fraction": (
        "qwen3_moe",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0.5}},
        "original_max_position_embeddings must be at least 2",
    ),
    "architectures that are lists": (
        "smallthinker",
        {"model_type": None, "architectures": [[1]]},
        "model_type must be",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs(lesonnx: Call, tmp_path: Path, case: str) -> None:
    name, changes, mentions = BAD_CONFIGS[case]
    derive(name, tmp_path / "checkpoint", config=lambda values: {**values, **changes})
    outcome = lesonnx("export", tmp_path / "checkpoint", tmp_path / "bundle", "--workers", 1)
    assert outcome.code == 2, outcome.err
    assert mentions in outcome.error
    assert len(outcome.error) < 1000
    assert os.listdir(tmp_path) == ["checkpoint"]


def change_tensor(name: str, change: Callable[[Any], Any]) -> Callable[[Tensors], Tensors]:
    """A tensor changed, the first whose name ends so; gone where the change gives None."""

    def edit(tensors: Tensors) -> Tensors:
        key = next(key for key in sorted(tensors) if key.endswith(name))
        changed = change(tensors[key])
        kept = {other: value for other, value in tensors.items() if other != key}
        return kept if changed is None else {**kept, key: changed}

    return edit


BLOCKS, SCALES = "experts.gate_up_proj_blocks", "experts.gate_up_proj_scales"
BAD_TENSORS: dict[str, tuple[str, Callable[[Tensors], Tensors], tuple[str, ...]]] = {
    "blocks without scales": ("gpt_oss_mxfp4", change_tensor(SCALES, lambda _: None), (SCALES, "is missing")),
    "scales without blocks": ("gpt_oss_mxfp4", change_tensor(BLOCKS, lambda _: None), ("gate_up_proj", "is missing")),
    "blocks of another shape": (
        "gpt_oss_mxfp4",
        change_tensor(BLOCKS, lambda x: x[:, 1:].copy()),
        (BLOCKS, "has shape"),
    ),
    "scales of another shape": (
        "gpt_oss_mxfp4",
        change_tensor(SCALES, lambda x: x[..., 1:].copy()),
        (SCALES, "has shape"),
    ),
    "scales that are floats": (
        "gpt_oss_mxfp4",
        change_tensor(SCALES, lambda x: x.astype(np.float32)),
        (SCALES, "is F32, expected U8"),
    ),
    "bytes where weights belong": (
        "gpt_oss",
        change_tensor("experts.gate_up_proj", lambda x: np.zeros(x.shape, np.uint8)),
        ("experts.gate_up_proj", "is U8, expected one of"),
    ),
    "float8 without scales": (
        "qwen3_moe_fp8",
        change_tensor("weight_scale_inv", lambda _: None),
        ("scale_inv", "missing"),
    ),
    "float8 scales of another shape": (
        "qwen3_moe_fp8",
        change_tensor("weight_scale_inv", lambda x: np.zeros((*x.shape, 2), np.float32)),
        ("weight_scale_inv", "has shape"),
    ),
    "float8 scales of bytes": (
        "qwen3_moe_fp8",
        change_tensor("weight_scale_inv", lambda x: np.zeros(x.shape, np.uint8)),
        ("weight_scale_inv", "is U8, expected one of"),
    ),
    "a float8 norm": (
        "qwen3_moe_fp8",
        change_tensor("input_layernorm.weight", lambda x: x.astype(ml_dtypes.float8_e4m3fn)),
        ("input_layernorm", "expected a matrix"),
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors(lesonnx: Call, tmp_path: Path, case: str) -> None:
    name, change, mentions = BAD_TENSORS[case]
    derive(name, tmp_path / "checkpoint", tensors=change)
    outcome = lesonnx("export", tmp_path / "checkpoint", tmp_path / "bundle", "--workers", 1)
    assert outcome.code == 2, outcome.err
    assert all(text in outcome.error for text in mentions), outcome.error
    assert os.listdir(tmp_path) == ["checkpoint"]


VALUES: list[Any] = [None, True, 0, -1, 3, HUGE, 10**30, 0.5, 1e308, "", "silu", [], [[1]], {}, {"a": 1}, [None]]


@pytest.mark.parametrize("name", ALL)
def test_any_value_of_any_key(name: str) -> None:
    """What a config says is exported or refused in one line; no other exception comes of it."""
    checkpoint = Checkpoint(FIXTURES / name)
    original = read_config(name)
    places = [(key,) for key in original]
    places += [(key, inner) for key in original if isinstance(original[key], dict) for inner in original[key]]
    refused = 0
    for number, place in enumerate(places):
        for turn, value in enumerate(VALUES):
            changed = {**original, place[0]: value}
            if len(place) == 2:
                changed = {**original, place[0]: {**original[place[0]], place[1]: value}}
            checkpoint.config = changed
            try:
                # A whole rehearsal takes long: for each key with one of the values.
                if turn == number % len(VALUES):
                    make_plan(checkpoint, ExportOptions())
                else:
                    make_decoder(Config(changed))
            except CheckpointError as error:
                message = str(error)
                refused += "\n" not in message and len(message) < 1000
    # Sizes, counts and rotary settings refuse most of these values, keys that training used none.
    assert refused > 3 * len(places)


@pytest.mark.parametrize("text_config", [3, [], "x", [{}]])
def test_a_text_config_that_is_no_object(lesonnx: Call, tmp_path: Path, text_config: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**read_config("qwen3_moe"), "text_config": text_config}), encoding="utf-8")
    outcome = lesonnx("inspect", "--shape", path)
    assert outcome.code == 2
    assert "text_config must be an object" in outcome.error


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "moe_intermediate_size", "vocab_size", "num_experts"]
)
def test_a_shape_of_the_largest_sizes_takes_no_memory(key: str) -> None:
    config = {
        **read_config("qwen3_moe"),
        "num_hidden_layers": 1,
        "layer_types": None,
        key: LARGEST_OF.get(key, LARGEST),
    }
    sizes = sizes_of(config, ExportOptions())
    assert sizes.num_parameters > 10**6
    assert Config(config).integer(key) == config[key]
