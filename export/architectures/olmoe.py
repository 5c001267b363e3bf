"""OLMoE: q/k normalised over their full width, softmax router."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx_export.architectures.base import Decoder
from lesonnx_export.blocks import Step
from lesonnx_export.config import Config


class Architecture(Decoder):
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "pad_token_id": 1,
        "eos_token_id": 50279,
    }
    moe_intermediate_key = "intermediate_size"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm_topk_prob = config.flag("norm_topk_prob", False)
        config.require("attention_bias", (False,), False)
        self.clip_qkv = None if config.raw("clip_qkv", None) is None else config.number("clip_qkv")
        config.raw("tie_word_embeddings", None)

    def normalize_qk(self, step: Step, prefix: str, query: str, key: str) -> tuple[str, str]:
        query_size = self.num_attention_heads * self.head_dim
        kv_size = self.num_key_value_heads * self.head_dim
        return (
            self.clip(step, step.norm(query, f"{prefix}q_norm.weight", query_size, self.rms_norm_eps)),
            self.clip(step, step.norm(key, f"{prefix}k_norm.weight", kv_size, self.rms_norm_eps)),
        )

    def shape_value(self, step: Step, value: str) -> str:
        return self.clip(step, value)

    def clip(self, step: Step, x: str) -> str:
        if self.clip_qkv is None:
            return x
        return step.graph.op("Clip", x, step.graph.constant(-self.clip_qkv), step.graph.constant(self.clip_qkv))
