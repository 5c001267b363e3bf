"""OLMoE: q/k normalised over their full width, softmax router."""

from __future__ import annotations

from lesonnx_export.architectures.base import Decoder
from lesonnx_export.blocks import Step
from lesonnx_export.config import Config


class Architecture(Decoder):
    default_rms_norm_eps = 1e-5
    default_num_experts = 64
    default_num_experts_per_tok = 8
    moe_intermediate_key = "intermediate_size"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm_topk_prob = config.flag("norm_topk_prob", False)
        config.require("attention_bias", (False,), False)
        config.require("clip_qkv", (None,), None)
        config.raw("tie_word_embeddings", None)

    def normalize_qk(self, step: Step, prefix: str, query: str, key: str) -> tuple[str, str]:
        query_size = self.num_attention_heads * self.head_dim
        kv_size = self.num_key_value_heads * self.head_dim
        return (
            step.norm(query, f"{prefix}q_norm.weight", query_size, self.rms_norm_eps),
            step.norm(key, f"{prefix}k_norm.weight", kv_size, self.rms_norm_eps),
        )
