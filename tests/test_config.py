"""config.json under one spelling: aliases, nesting, defaults, and keys that change what is computed."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import FAMILIES, RECURRENT, nest_text_config, read_config, spell_as_transformers_4

from lesonnx.errors import CheckpointError
from lesonnx_export.architectures import make_decoder, supported
from lesonnx_export.config import Config

SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_experts",
    "num_experts_per_tok",
    "head_dim",
    "max_position_embeddings",
)


def shape_of(config: dict[str, Any]) -> dict[str, Any]:
    decoder = make_decoder(Config(config))
    return {key: getattr(decoder, key) for key in SHAPE} | {"rope": decoder.rope.key}


def test_supported_families() -> None:
    assert {read_config(name)["model_type"] for name in FAMILIES + RECURRENT} <= set(supported())


@pytest.mark.parametrize("name", FAMILIES + RECURRENT)
def test_spellings_say_the_same(name: str) -> None:
    config = read_config(name)
    expected = shape_of(config)
    assert shape_of(spell_as_transformers_4(config)) == expected
    assert shape_of(nest_text_config(config)) == expected
    assert shape_of(nest_text_config(spell_as_transformers_4(config))) == expected


@pytest.mark.parametrize("name", FAMILIES + RECURRENT)
def test_every_key_of_a_real_config_is_accounted_for(name: str) -> None:
    for config in (read_config(name), spell_as_transformers_4(read_config(name))):
        read = Config(config)
        make_decoder(read).has_qkv_bias()
        assert read.unread() == []


def test_unread_names_what_might_matter() -> None:
    config = Config(read_config("qwen3_moe") | {"logit_scale": 0.5, "harmless": None, "off": False})
    make_decoder(config)
    assert config.unread() == ["logit_scale"]


def test_a_family_fills_in_what_a_config_leaves_out() -> None:
    decoder = make_decoder(Config({"model_type": "qwen3_moe", "head_dim": 128}))
    assert (decoder.hidden_size, decoder.num_experts, decoder.num_key_value_heads) == (2048, 128, 4)
    assert decoder.config.defaulted >= {"hidden_size", "num_experts", "num_key_value_heads"}
    # Null is not left out: transformers then takes as many key/value heads as there are heads.
    decoder = make_decoder(Config({"model_type": "qwen3_moe", "head_dim": 128, "num_key_value_heads": None}))
    assert decoder.num_key_value_heads == decoder.num_attention_heads


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("hidden_size", "64"),
        ("hidden_size", None),
        ("num_local_experts", -1),
        ("num_experts_per_tok", 17),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", float("nan")),
        ("norm_topk_prob", 1),
        ("hidden_act", "gelu"),
        ("hidden_act", 3),
        ("hidden_act", ["silu"]),
        ("head_dim", 12),
        ("mlp_only_layers", [3]),
        ("mlp_only_layers", "0"),
        ("mlp_only_layers", [True]),
        ("rope_parameters", {"rope_theta": -1}),
        ("rope_parameters", {"rope_theta": float("inf")}),
        ("rope_parameters", "default"),
        ("attention_bias", True),
        ("use_sliding_window", "yes"),
        ("text_config", 3),
        ("model_type", 3),
    ],
)
def test_bad_values_are_named(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match="config.json") as caught:
        make_decoder(Config(read_config("qwen3_moe") | {key: value}))
    assert {"num_local_experts": "num_experts", "rope_parameters": "rope"}.get(key, key) in str(caught.value)


@pytest.mark.parametrize(("value", "expected"), [(None, []), (3, [3]), ([3, 5], [3, 5])])
def test_token_ids(value: Any, expected: list[int]) -> None:
    assert Config({"eos_token_id": value}).token_ids("eos_token_id") == expected


@pytest.mark.parametrize("value", [-1, "3", [1, None], True, 2.0])
def test_token_ids_that_are_none(value: Any) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id"):
        Config({"eos_token_id": value}).token_ids("eos_token_id")
