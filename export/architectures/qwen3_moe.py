"""Qwen3-MoE: q/k normalised per head, softmax router, dense layers where the config says so."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx.errors import CheckpointError
from lesonnx_export.architectures.base import Decoder
from lesonnx_export.blocks import Step
from lesonnx_export.config import Config


class Architecture(Decoder):
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }
    states_head_dim = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm_topk_prob = config.flag("norm_topk_prob", False)
        config.require("attention_bias", (False,), False)
        uses_window = config.flag("use_sliding_window", False)
        self.sliding_window = config.integer("sliding_window", 4096) if uses_window else None
        config.raw("sliding_window", None)
        self.decoder_sparse_step = config.integer("decoder_sparse_step", 1)
        self.mlp_only_layers = layer_list(config, "mlp_only_layers", self.num_hidden_layers)
        config.raw("intermediate_size", None)
        config.raw("tie_word_embeddings", None)

    def is_moe(self, layer_idx: int) -> bool:
        return layer_idx not in self.mlp_only_layers and (layer_idx + 1) % self.decoder_sparse_step == 0

    def sliding_window_of(self, layer_idx: int) -> int | None:
        return self.sliding_window

    def normalize_qk(self, step: Step, prefix: str, query: str, key: str) -> tuple[str, str]:
        return self.normalize_heads(step, query, f"{prefix}q_norm.weight", key, f"{prefix}k_norm.weight")


def layer_list(config: Config, key: str, num_hidden_layers: int) -> list[int]:
    """A list of layer indices from the config; CheckpointError where it is not one."""
    values = config.raw(key, [])
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < num_hidden_layers for v in values):
        raise CheckpointError(f"config.json: {key} must be a list of layer indices, found {values!r}")
    return values
