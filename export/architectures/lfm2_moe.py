"""LFM2-MoE: short convolutions between gates, attention in some layers, a sigmoid router that selects by a bias."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx_export.architectures.base import Decoder, Routing
from lesonnx_export.blocks import Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.config import Config
from lesonnx_export.recurrent import CausalConvolution
from lesonnx_export.routers import choose, normalized

# What transformers adds to the sum of the chosen weights.
SUM_EPSILON = 1e-6


class Architecture(Decoder):
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    default_rope_theta = 1e6
    expert_names = ("w1", "w3", "w2")
    mixer_norm, ffn_norm, final_norm = "operator_norm", "ffn_norm", "embedding_norm"
    output_name = "out_proj"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layer_types = config.layer_types(self.num_hidden_layers, ("conv", "full_attention"))
        self.num_dense_layers = config.integer("num_dense_layers", 0)
        self.norm_topk_prob = config.flag("norm_topk_prob")
        self.use_expert_bias = config.flag("use_expert_bias")
        self.routed_scaling_factor = config.number("routed_scaling_factor")
        self.conv_bias = config.flag("conv_bias")
        self.convolution = CausalConvolution(self.hidden_size, config.integer("conv_L_cache"))
        self.replays = {"replay_convolution": self.convolution} if "conv" in self.layer_types else {}
        config.raw("intermediate_size", None)
        config.raw("tie_word_embeddings", None)

    def is_moe(self, layer_idx: int) -> bool:
        return layer_idx >= self.num_dense_layers

    def moe_block(self, weights: Weights, layer_idx: int) -> str:
        return f"layers.{layer_idx}.feed_forward."

    def attention(self, step: Step, layer_idx: int, x: str) -> str:
        if self.layer_types[layer_idx] == "conv":
            return self.short_convolution(step, layer_idx, x)
        return super().attention(step, layer_idx, x)

    def normalize_qk(self, step: Step, prefix: str, query: str, key: str) -> tuple[str, str]:
        eps = self.rms_norm_eps
        return (
            step.head_norm(query, f"{prefix}q_layernorm.weight", self.num_attention_heads, self.head_dim, eps),
            step.head_norm(key, f"{prefix}k_layernorm.weight", self.num_key_value_heads, self.head_dim, eps),
        )

    def short_convolution(self, step: Step, layer_idx: int, x: str) -> str:
        """``out_proj(C * conv(B * x))``, B, C and x from one linear map of normalised x [1,T,H]."""
        graph, hidden = step.graph, self.hidden_size
        prefix = f"layers.{layer_idx}.conv."
        bias = {name: f"{prefix}{name}.bias" if self.conv_bias else None for name in ("in_proj", "conv", "out_proj")}
        projected = step.linear(x, f"{prefix}in_proj.weight", 3 * hidden, hidden, bias["in_proj"])
        before, after, x = graph.ops("Split", 3, projected, graph.constant([hidden] * 3, "int64"), axis=-1)
        x = graph.op("Mul", before, x)
        x = self.convolution.apply(step, layer_idx, x, f"{prefix}conv.weight", bias["conv"])
        return step.linear(graph.op("Mul", after, x), f"{prefix}out_proj.weight", hidden, hidden, bias["out_proj"])

    def router_scores(self, step: Step, layer_idx: int, moe_input: str) -> str:
        return self._scores(step, layer_idx, moe_input)[1]

    def _scores(self, step: Step, layer_idx: int, moe_input: str) -> tuple[str, str]:
        """Sigmoids [T,E], and what experts are ranked by: the same with a bias that never enters the weights."""
        prefix = self.moe_block(step.weights, layer_idx)
        logits = step.router_linear(moe_input, f"{prefix}{self.router_name}.weight", self.num_experts, self.hidden_size)
        sigmoids = step.graph.op("Sigmoid", logits)
        if not self.use_expert_bias:
            return sigmoids, sigmoids
        name = f"{prefix}expert_bias"
        bias = step.shared(name, lambda: step.weights(name, self.num_experts))
        return sigmoids, step.graph.op("Add", sigmoids, bias)

    def route(self, step: Step, layer_idx: int, moe_input: str) -> Routing:
        sigmoids, scores = self._scores(step, layer_idx, moe_input)
        ids, weights = choose(step, scores, sigmoids, self.num_experts_per_tok)
        if self.norm_topk_prob:
            weights = normalized(step, weights, SUM_EPSILON)
        weights = step.scaled(weights, self.routed_scaling_factor)
        return Routing(ids, weights, scores)
