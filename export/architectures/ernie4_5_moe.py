"""ERNIE 4.5 MoE: interleaved rotary positions, a softmax router with a selection bias, shared experts."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx_export.architectures.base import Decoder, Routing
from lesonnx_export.blocks import Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.config import Config
from lesonnx_export.expert import ExpertShape, ExpertTensors
from lesonnx_export.routers import choose


class Architecture(Decoder):
    """Several shared experts are one of their summed width, as the checkpoint has them; there may be none."""

    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 103424,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 6,
        "num_experts": 64,
        "n_shared_experts": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    default_rope_theta = 500000.0
    rope_interleave = True
    states_head_dim = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.require("use_bias", (False,), False)
        config.require("moe_gate_act", ("softmax",), "softmax")
        self.n_shared_experts = config.integer("n_shared_experts") if config.raw("n_shared_experts", 0) else 0
        self.moe_layer_start_index = (
            config.integer("moe_layer_start_index", 1) if config.raw("moe_layer_start_index", 1) else 0
        )
        end = config.raw("moe_layer_end_index", -1)
        self.moe_layer_end_index = self.num_hidden_layers - 1 if end == -1 else config.integer("moe_layer_end_index", 0)
        self.moe_layer_interval = config.integer("moe_layer_interval", 1)
        self.moe_norm_min = config.number("moe_norm_min", 1e-12)
        for key in ("intermediate_size", "tie_word_embeddings", "moe_capacity", "num_nextn_predict_layers"):
            config.raw(key, None)

    def is_moe(self, layer_idx: int) -> bool:
        inside = self.moe_layer_start_index <= layer_idx <= self.moe_layer_end_index
        return inside and (layer_idx + 1) % self.moe_layer_interval == 0

    def _choice(self, step: Step, layer_idx: int, scores: str) -> str:
        """What experts are chosen by: probabilities with the selection bias, which lies as [1,E]."""
        name = f"{self.moe_block(step.weights, layer_idx)}moe_statics.e_score_correction_bias"
        bias = step.shared(name, lambda: step.weights(name, 1, self.num_experts))
        return step.graph.op("Add", scores, bias)

    def router_scores(self, step: Step, layer_idx: int, moe_input: str) -> str:
        return self._choice(step, layer_idx, super().router_scores(step, layer_idx, moe_input))

    def route(self, step: Step, layer_idx: int, moe_input: str) -> Routing:
        graph = step.graph
        scores = super().router_scores(step, layer_idx, moe_input)
        choice = self._choice(step, layer_idx, scores)
        ids, weights = choose(step, choice, scores, self.num_experts_per_tok)
        total = graph.op("ReduceSum", weights, graph.constant([-1], "int64"), keepdims=1)
        weights = graph.op("Div", weights, graph.op("Max", total, graph.constant(self.moe_norm_min)))
        shared = step.column(moe_input, 1.0) if self.n_shared_experts else None
        return Routing(ids, weights, choice, shared)

    def shared_expert_shape(self) -> ExpertShape | None:
        if not self.n_shared_experts:
            return None
        return ExpertShape(self.hidden_size, self.moe_intermediate_size * self.n_shared_experts, self.activation)

    def shared_expert(self, weights: Weights, layer_idx: int) -> ExpertTensors:
        prefix, hidden = f"{self.moe_block(weights, layer_idx)}shared_experts.", self.hidden_size
        return self.mlp(weights, prefix, self.moe_intermediate_size * self.n_shared_experts, hidden)
