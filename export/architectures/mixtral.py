"""Mixtral: softmax router whose chosen weights sum to one, experts named w1 (gate), w3 (up), w2 (down)."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx_export.architectures.base import Decoder
from lesonnx_export.checkpoint import Weights
from lesonnx_export.config import Config


class Architecture(Decoder):
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    default_rope_theta = 1e6
    moe_intermediate_key = "intermediate_size"
    expert_names = ("w1", "w3", "w2")
    states_head_dim = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm_topk_prob = True
        self.sliding_window = None if config.raw("sliding_window", None) is None else config.integer("sliding_window")
        config.raw("tie_word_embeddings", None)

    def sliding_window_of(self, layer_idx: int) -> int | None:
        return self.sliding_window

    def moe_block(self, weights: Weights, layer_idx: int) -> str:
        # transformers 5 calls the block "mlp" where its experts are fused.
        block = "mlp" if f"layers.{layer_idx}.mlp.gate.weight" in weights else "block_sparse_moe"
        return f"layers.{layer_idx}.{block}."
