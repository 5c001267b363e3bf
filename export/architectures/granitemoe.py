"""GraniteMoE: four multipliers, a softmax over the chosen experts alone, experts fused as input and output linear."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx_export.architectures.base import Decoder, Routing
from lesonnx_export.blocks import Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.config import Config
from lesonnx_export.expert import ExpertTensors


class Architecture(Decoder):
    """The residual multiplier of what experts give is folded into their weights."""

    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    moe_intermediate_key = "intermediate_size"
    router_name = "router.layer"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.require("attention_bias", (False,), False)
        self.embedding_multiplier = config.number("embedding_multiplier")
        self.logits_scaling = config.positive("logits_scaling")
        self.residual_multiplier = config.number("residual_multiplier")
        self.attention_multiplier = config.number("attention_multiplier")
        config.raw("tie_word_embeddings", None)

    def moe_block(self, weights: Weights, layer_idx: int) -> str:
        return f"layers.{layer_idx}.block_sparse_moe."

    def embed(self, step: Step, ids: str) -> str:
        return step.scaled(super().embed(step, ids), self.embedding_multiplier)

    def attention_scale(self) -> float:
        return self.attention_multiplier

    def attention(self, step: Step, layer_idx: int, x: str) -> str:
        return step.scaled(super().attention(step, layer_idx, x), self.residual_multiplier)

    def router_scores(self, step: Step, layer_idx: int, moe_input: str) -> str:
        name = f"{self.moe_block(step.weights, layer_idx)}{self.router_name}.weight"
        return step.router_linear(moe_input, name, self.num_experts, self.hidden_size)

    def route(self, step: Step, layer_idx: int, moe_input: str) -> Routing:
        routing = self.softmax_of_chosen(step, self.router_scores(step, layer_idx, moe_input))
        return Routing(routing.ids, step.scaled(routing.weights, self.residual_multiplier), routing.scores)

    def expert(self, weights: Weights, layer_idx: int, expert_idx: int) -> ExpertTensors:
        prefix, size, hidden = self.moe_block(weights, layer_idx), self.moe_intermediate_size, self.hidden_size
        fused = weights.item(f"{prefix}input_linear.weight", expert_idx, self.num_experts, 2 * size, hidden)
        down = weights.item(f"{prefix}output_linear.weight", expert_idx, self.num_experts, hidden, size)
        return {"gate_proj": fused[:size], "up_proj": fused[size:], "down_proj": down}

    def logits(self, step: Step, rows: str) -> str:
        return step.scaled(super().logits(step, rows), 1 / self.logits_scaling)
