"""GLM-4.5 and 4.6: DeepSeek-V3's router over grouped-query attention with partial rotary positions."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx_export.architectures import deepseek_v3
from lesonnx_export.architectures.base import Decoder
from lesonnx_export.blocks import Step
from lesonnx_export.rope import Rope, make_rope


class Architecture(deepseek_v3.Architecture):
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "num_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    }
    states_head_dim = True

    def _read_attention(self) -> None:
        self.attention_bias = self.config.flag("attention_bias", False)
        self.use_qk_norm = self.config.flag("use_qk_norm", False)

    def _head_dim(self) -> int:
        return Decoder._head_dim(self)

    def _rope(self) -> Rope:
        return make_rope(self.config, self.head_dim, default_theta=self.default_rope_theta, default_partial=0.5)

    def attention(self, step: Step, layer_idx: int, x: str) -> str:
        return Decoder.attention(self, step, layer_idx, x)

    def has_qkv_bias(self) -> bool:
        return self.attention_bias

    def normalize_qk(self, step: Step, prefix: str, query: str, key: str) -> tuple[str, str]:
        if not self.use_qk_norm:
            return query, key
        return self.normalize_heads(step, query, f"{prefix}q_norm.weight", key, f"{prefix}k_norm.weight")
