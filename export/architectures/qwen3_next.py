"""Qwen3-Next: Qwen2-MoE's experts behind Gated DeltaNet in three of four layers and gated attention in the fourth."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from lesonnx_export.architectures import qwen2_moe
from lesonnx_export.blocks import Step
from lesonnx_export.checkpoint import Float32, Weights, one_above_other
from lesonnx_export.config import Config
from lesonnx_export.recurrent import LINEAR_ATTENTION_SINCE, CausalConvolution, GatedDeltaRule
from lesonnx_export.rope import Rope, make_rope

# What transformers adds to the squared length of queries and keys of the delta rule.
UNIT_EPSILON = 1e-6
LAYER_TYPES = ("linear_attention", "full_attention")


class Architecture(qwen2_moe.Architecture):
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    }
    norm_offset = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.require("attention_bias", (False,), False)
        config.require("hidden_act", ("silu",), "silu")
        interval = config.integer("full_attention_interval", 4)
        usual = [LAYER_TYPES[(layer_idx + 1) % interval == 0] for layer_idx in range(self.num_hidden_layers)]
        self.layer_types = config.layer_types(self.num_hidden_layers, LAYER_TYPES, usual)
        self.delta_rule = GatedDeltaRule(
            config.integer("linear_num_key_heads"),
            config.integer("linear_num_value_heads"),
            config.integer("linear_key_head_dim"),
            config.integer("linear_value_head_dim"),
        )
        channels = 2 * self.delta_rule.key_size + self.delta_rule.value_size
        self.convolution = CausalConvolution(channels, config.integer("linear_conv_kernel_dim"))
        if "linear_attention" in self.layer_types:
            self.replays = {"replay_convolution": self.convolution, "replay_recurrent": self.delta_rule}
            self.native_operators_since = LINEAR_ATTENTION_SINCE

    def _windows(self) -> list[int | None]:
        self.config.require("use_sliding_window", (False,), False)
        return [None] * self.num_hidden_layers

    def _head_dim(self) -> int:
        return self.config.integer("head_dim")

    def _rope(self) -> Rope:
        return make_rope(self.config, self.head_dim, default_theta=self.default_rope_theta, default_partial=0.25)

    # -- attention ---------------------------------------------------------------------------------------------------

    def attention(self, step: Step, layer_idx: int, x: str) -> str:
        if self.layer_types[layer_idx] == "linear_attention":
            return self.linear_attention(step, layer_idx, x)
        return self.gated_attention(step, layer_idx, x)

    def gated_attention(self, step: Step, layer_idx: int, x: str) -> str:
        """Attention whose output is multiplied by the sigmoid of a further map of x [1,T,H]; q and its gate are one."""
        graph, hidden, size = step.graph, self.hidden_size, self.head_dim
        prefix = f"layers.{layer_idx}.self_attn."
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        both = step.weights(f"{prefix}q_proj.weight", 2 * heads * size, hidden).reshape(heads, 2, size, hidden)
        matrices = {
            "query": both[:, 0].reshape(-1, hidden),
            "gate": both[:, 1].reshape(-1, hidden),
            "key": step.weights(f"{prefix}k_proj.weight", kv_heads * size, hidden),
            "value": step.weights(f"{prefix}v_proj.weight", kv_heads * size, hidden),
        }
        lengths = [len(matrix) for matrix in matrices.values()]
        product = step.product(x, f"{prefix}qkv_proj.weight", one_above_other(list(matrices.values())))
        query, gate, key, value = graph.ops("Split", 4, product, graph.constant(lengths, "int64"), axis=-1)
        query, key = self.normalize_qk(step, prefix, query, key)
        mixed = step.attention(
            layer_idx,
            step.rotate(query, self.rope, heads, size),
            step.rotate(key, self.rope, kv_heads, size),
            value,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size,
        )
        mixed = graph.op("Mul", mixed, graph.op("Sigmoid", gate))
        return step.linear(mixed, f"{prefix}o_proj.weight", hidden, heads * size)

    def normalize_qk(self, step: Step, prefix: str, query: str, key: str) -> tuple[str, str]:
        size, eps, offset = self.head_dim, self.rms_norm_eps, self.norm_offset
        return (
            step.head_norm(query, f"{prefix}q_norm.weight", self.num_attention_heads, size, eps, offset),
            step.head_norm(key, f"{prefix}k_norm.weight", self.num_key_value_heads, size, eps, offset),
        )

    # -- Gated DeltaNet ----------------------------------------------------------------------------------------------

    def linear_attention(self, step: Step, layer_idx: int, x: str) -> str:
        """Gated DeltaNet of normalised x [1,T,H]: convolved q, k and v, the delta rule, a norm gated by z."""
        graph, rule, hidden = step.graph, self.delta_rule, self.hidden_size
        prefix = f"layers.{layer_idx}.linear_attn."
        qkvz, ba = self.projections(step.weights, prefix)
        projected = step.product(x, f"{prefix}in_proj_qkvz.weight", qkvz)
        sizes = graph.constant([self.convolution.channels, rule.value_size], "int64")
        qkv, z = graph.ops("Split", 2, projected, sizes, axis=-1)
        qkv = _silu(step, self.convolution.apply(step, layer_idx, qkv, f"{prefix}conv1d.weight"))
        sizes = graph.constant([rule.key_size, rule.key_size, rule.value_size], "int64")
        query, key, value = graph.ops("Split", 3, qkv, sizes, axis=-1)
        decay, beta = self._gates(step, prefix, x, ba)
        # Unit length, and for queries the scale of their products: sqrt(1/d) twice.
        query = self._unit(step, query, rule.key_head_dim**-1.0)
        key = self._unit(step, key, rule.key_head_dim**-0.5)
        mixed = rule.apply(step, layer_idx, query, key, value, decay, beta)
        mixed = step.head_norm(
            mixed, f"{prefix}norm.weight", rule.num_value_heads, rule.value_head_dim, self.rms_norm_eps
        )
        mixed = graph.op("Mul", mixed, _silu(step, z))
        return step.linear(mixed, f"{prefix}out_proj.weight", hidden, rule.value_size)

    def projections(self, weights: Weights, prefix: str) -> tuple[Float32, Float32]:
        """The rows of q, k, v and z, and those of b and a; the checkpoint has them key head by key head."""
        rule, hidden = self.delta_rule, self.hidden_size
        served = rule.num_value_heads // rule.num_key_heads
        value = served * rule.value_head_dim

        def gather(name: str, sizes: list[int]) -> Float32:
            matrix = weights(f"{prefix}{name}.weight", rule.num_key_heads * sum(sizes), hidden)
            heads = matrix.reshape(rule.num_key_heads, sum(sizes), hidden)
            pieces = np.split(heads, np.cumsum(sizes)[:-1], axis=1)
            return one_above_other([piece.reshape(-1, hidden) for piece in pieces])

        return gather("in_proj_qkvz", [rule.key_head_dim] * 2 + [value] * 2), gather("in_proj_ba", [served] * 2)

    def _gates(self, step: Step, prefix: str, x: str, ba: Float32) -> tuple[str, str]:
        """Decay ``-exp(A_log) softplus(a + dt_bias)`` and beta ``sigmoid(b)``: [1,T,value heads].

        In float32 always: what they get wrong, the state carries through all that follows.
        """
        graph, heads = step.graph, self.delta_rule.num_value_heads
        product = step.float_product(x, f"{prefix}in_proj_ba.weight", ba)
        b, a = graph.ops("Split", 2, product, graph.constant([heads, heads], "int64"), axis=-1)
        factor = graph.constant(-np.exp(step.weights(f"{prefix}A_log", heads)))
        a = graph.op("Add", a, graph.constant(step.weights(f"{prefix}dt_bias", heads)))
        return graph.op("Mul", graph.op("Softplus", a), factor), graph.op("Sigmoid", b)

    def _unit(self, step: Step, x: str, factor: float) -> str:
        """Every key head divided by the square root of its mean square, times ``factor``: [1,T,heads*size]."""
        graph, size = step.graph, self.delta_rule.key_head_dim
        heads = graph.op("Reshape", x, graph.constant([1, -1, self.delta_rule.num_key_heads, size], "int64"))
        scale = graph.constant(np.full(size, factor, np.float32))
        heads = graph.op("RMSNormalization", heads, scale, axis=-1, epsilon=UNIT_EPSILON / size)
        return graph.op("Reshape", heads, graph.constant([1, -1, self.delta_rule.key_size], "int64"))


def _silu(step: Step, x: str) -> str:
    return step.graph.op("Mul", x, step.graph.op("Sigmoid", x))
