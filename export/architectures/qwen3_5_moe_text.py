"""Qwen3.5-MoE's language model: Qwen3-Next with its recurrence's projections apart, routing always renormalised."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx_export.architectures import qwen3_next
from lesonnx_export.checkpoint import Float32, Weights, one_above_other
from lesonnx_export.config import Config


class Architecture(qwen3_next.Architecture):
    defaults: ClassVar[dict[str, Any]] = qwen3_next.Architecture.defaults | {
        "vocab_size": 248320,
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    }
    skipped = qwen3_next.Architecture.skipped | {
        r"(model\.)?visual\..*": "vision tower, not part of the language model",
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm_topk_prob = True

    def projections(self, weights: Weights, prefix: str) -> tuple[Float32, Float32]:
        rule, hidden, heads = self.delta_rule, self.hidden_size, self.delta_rule.num_value_heads
        qkv = weights(f"{prefix}in_proj_qkv.weight", self.convolution.channels, hidden)
        z = weights(f"{prefix}in_proj_z.weight", rule.value_size, hidden)
        b, a = (weights(f"{prefix}in_proj_{name}.weight", heads, hidden) for name in "ba")
        return one_above_other([qkv, z]), one_above_other([b, a])
