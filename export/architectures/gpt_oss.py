"""gpt-oss: attention sinks, a sliding window in every other layer, YaRN, biases everywhere, clamped SwiGLU experts.

Experts come fused: in bfloat16 as [in, out] with gate and up interleaved, or in MXFP4 as [out, in] blocks and scales.
"""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx.manifest import Activation
from lesonnx_export.architectures.base import FULL, SLIDING, Decoder, Routing
from lesonnx_export.blocks import Step
from lesonnx_export.checkpoint import Float32, Weights
from lesonnx_export.config import Config
from lesonnx_export.expert import ExpertShape, ExpertTensors
from lesonnx_export.prequantized import mxfp4_item
from lesonnx_export.rope import Rope, make_rope

LAYER_TYPES = (SLIDING, FULL)
# What the original release leaves unsaid.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class Architecture(Decoder):
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
    default_rope_theta = 150000.0
    moe_intermediate_key = "intermediate_size"
    router_name = "router"
    quantization_methods: ClassVar[frozenset[str]] = frozenset({"fp8", "mxfp4"})

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.require("attention_bias", (True,), True)
        config.require("experts_per_token", (None, self.num_experts_per_tok), None)
        self.sliding_window = config.integer("sliding_window")
        self.alpha = config.number("swiglu_alpha")
        self.limit = config.number("swiglu_limit")
        count = self.num_hidden_layers
        usual = [LAYER_TYPES[idx % 2] for idx in range(count)]
        self.layer_types = config.layer_types(count, LAYER_TYPES, usual)
        for key in ("initial_context_length", "rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta"):
            config.raw(key, None)  # the original release's words for what rope_parameters says
        config.raw("tie_word_embeddings", None)

    def _activation(self) -> Activation:
        self.config.require("hidden_act", ("silu",), "silu")
        return "swiglu_clamped"

    def _head_dim(self) -> int:
        return self.config.integer("head_dim")

    def _rope(self) -> Rope:
        if not self.config.raw("rope_parameters", None) and not self.config.raw("rope_scaling", None):
            self.config.values["rope_parameters"] = dict(YARN)
        return make_rope(self.config, self.head_dim, default_theta=self.default_rope_theta)

    def has_qkv_bias(self) -> bool:
        return True

    def has_output_bias(self) -> bool:
        return True

    def sliding_window_of(self, layer_idx: int) -> int | None:
        return self.sliding_window if self.layer_types[layer_idx] == SLIDING else None

    def sinks(self, step: Step, prefix: str) -> str:
        return step.vector(f"{prefix}sinks", self.num_attention_heads)

    def router_scores(self, step: Step, layer_idx: int, moe_input: str) -> str:
        prefix = f"{self.moe_block(step.weights, layer_idx)}{self.router_name}."
        return step.router_linear(
            moe_input, f"{prefix}weight", self.num_experts, self.hidden_size, bias=f"{prefix}bias"
        )

    def route(self, step: Step, layer_idx: int, moe_input: str) -> Routing:
        return self.softmax_of_chosen(step, self.router_scores(step, layer_idx, moe_input))

    def expert_shape(self) -> ExpertShape:
        return ExpertShape(
            self.hidden_size,
            self.moe_intermediate_size,
            self.activation,
            has_bias=True,
            alpha=self.alpha,
            limit=self.limit,
        )

    def expert(self, weights: Weights, layer_idx: int, expert_idx: int) -> ExpertTensors:
        prefix, experts = f"{self.moe_block(weights, layer_idx)}experts.", self.num_experts
        size, hidden = self.moe_intermediate_size, self.hidden_size
        gate_up: Float32
        down: Float32
        if f"{prefix}gate_up_proj_blocks" in weights:
            gate_up = mxfp4_item(weights, f"{prefix}gate_up_proj", expert_idx, experts, 2 * size, hidden)
            down = mxfp4_item(weights, f"{prefix}down_proj", expert_idx, experts, hidden, size)
        else:
            gate_up = weights.item(f"{prefix}gate_up_proj", expert_idx, experts, hidden, 2 * size).T
            down = weights.item(f"{prefix}down_proj", expert_idx, experts, size, hidden).T
        bias = weights.item(f"{prefix}gate_up_proj_bias", expert_idx, experts, 2 * size)
        return {
            "gate_proj": gate_up[0::2],
            "up_proj": gate_up[1::2],
            "down_proj": down,
            "gate_proj.bias": bias[0::2],
            "up_proj.bias": bias[1::2],
            "down_proj.bias": weights.item(f"{prefix}down_proj_bias", expert_idx, experts, hidden),
        }
