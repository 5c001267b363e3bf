"""Gemma 4 with experts (26B-A4B): a dense MLP beside the experts, two kinds of attention, a norm behind every block.

The router sees the residual itself, and what the experts give is normalised before it meets the dense MLP's output. So
both are carried past the experts, side by side.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from lesonnx.errors import CheckpointError
from lesonnx_export.architectures.base import FULL, SLIDING, Decoder, Routing
from lesonnx_export.blocks import Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.config import LARGEST, Config
from lesonnx_export.expert import ExpertTensors
from lesonnx_export.rope import Rope, make_rope
from lesonnx_export.routers import normalized

# A config without rope_parameters means these.
DEFAULT_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


class Architecture(Decoder):
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    activation_key = "hidden_activation"
    skipped = Decoder.skipped | {
        r"(model\.)?(vision_tower|embed_vision|multi_modal_projector)\..*": "sees pictures, not part of the text model",
        r"(model\.)?(audio_tower|embed_audio)\..*": "hears, not part of the text model",
    }

    def __init__(self, config: Config) -> None:
        if not isinstance(config.values.get("rope_parameters"), dict):
            config.values["rope_parameters"] = DEFAULT_ROPES
        super().__init__(config)
        config.require("enable_moe_block", (True,), False)
        config.require("hidden_size_per_layer_input", (0, None), 256)
        config.require("num_kv_shared_layers", (0,), 0)
        config.require("use_double_wide_mlp", (False,), False)
        config.require("attention_bias", (False,), False)
        config.require("use_bidirectional_attention", (None, "vision"), None)
        count = self.num_hidden_layers
        usual = [FULL if (idx + 1) % 6 == 0 else SLIDING for idx in range(count)]
        self.layer_types = config.layer_types(count, (SLIDING, FULL), usual)
        self.sliding_window = config.integer("sliding_window")
        self.attention_k_eq_v = config.flag("attention_k_eq_v", False)
        self.final_logit_softcapping = _softcapping(config)
        self.head_dims, self.kv_heads = self._layer_sizes()
        for size, kv_heads in set(zip(self.head_dims, self.kv_heads, strict=True)):
            self.check_heads(kv_heads, size)
        self.ropes = {
            layer_type: make_rope(
                config,
                self.head_dims[self.layer_types.index(layer_type)],
                default_theta=self.default_rope_theta,
                layer_type=layer_type,
            )
            for layer_type in set(self.layer_types)
        }
        for key in ("vocab_size_per_layer_input", "tie_word_embeddings", "intermediate_size"):
            config.raw(key, None)

    def _head_dim(self) -> int:
        return self.config.integer("head_dim")

    def _rope(self) -> Rope:
        return make_rope(self.config, self.head_dim, default_theta=self.default_rope_theta, layer_type=SLIDING)

    def _layer_sizes(self) -> tuple[list[int], list[int]]:
        """Head size and key-value heads of every layer: full attention has its own of both.

        transformers 5.24 writes them layer by layer, the hub's configs as ``global_head_dim`` and
        ``num_global_key_value_heads``.
        """
        config = self.config
        overrides = config.raw("per_layer_config", None)
        global_dim = config.integer("global_head_dim", 512)
        global_heads = self.num_key_value_heads
        if config.raw("num_global_key_value_heads", None) is not None and self.attention_k_eq_v:
            global_heads = config.integer("num_global_key_value_heads")
        head_dims, kv_heads = [], []
        for idx, layer_type in enumerate(self.layer_types):
            is_full = layer_type == FULL and overrides is None
            own = _own_sizes(overrides, idx)
            head_dims.append(own.get("head_dim", global_dim if is_full else self.head_dim))
            kv_heads.append(own.get("num_key_value_heads", global_heads if is_full else self.num_key_value_heads))
        return head_dims, kv_heads

    def embed(self, step: Step, ids: str) -> str:
        return step.scaled(super().embed(step, ids), math.sqrt(self.hidden_size))

    def mixer(self, step: Step, layer_idx: int, residual: str) -> str:
        x = self.norm(step, residual, f"layers.{layer_idx}.input_layernorm")
        mixed = self.norm(step, self.attention(step, layer_idx, x), f"layers.{layer_idx}.post_attention_layernorm")
        return step.graph.op("Add", residual, mixed)

    def attention(self, step: Step, layer_idx: int, x: str) -> str:
        graph, heads = step.graph, self.num_attention_heads
        is_full = self.layer_types[layer_idx] == FULL
        size, kv_heads = self.head_dims[layer_idx], self.kv_heads[layer_idx]
        prefix = f"layers.{layer_idx}.self_attn."
        sizes = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
        if self.attention_k_eq_v and is_full:
            del sizes["v"]
        fused = step.fused_linear(
            x, [(f"{prefix}{name}_proj.weight", width, None) for name, width in sizes.items()], self.hidden_size
        )
        parts = graph.ops("Split", len(sizes), fused, graph.constant(list(sizes.values()), "int64"), axis=-1)
        query, key, value = parts[0], parts[1], parts[-1]
        eps, rope = self.rms_norm_eps, self.ropes[self.layer_types[layer_idx]]
        mixed = step.attention(
            layer_idx,
            step.rotate(step.head_norm(query, f"{prefix}q_norm.weight", heads, size, eps), rope, heads, size),
            step.rotate(step.head_norm(key, f"{prefix}k_norm.weight", kv_heads, size, eps), rope, kv_heads, size),
            step.head_norm(value, "", kv_heads, size, eps),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size,
            scale=1.0,
            sliding_window=None if is_full else self.sliding_window,
        )
        return step.linear(mixed, f"{prefix}o_proj.weight", self.hidden_size, heads * size)

    # -- experts beside the dense MLP ----------------------------------------------------------------------------------

    def ffn_input(self, step: Step, layer_idx: int, residual: str) -> str:
        return self.norm(step, residual, f"layers.{layer_idx}.pre_feedforward_layernorm_2")

    def router_input(self, step: Step, layer_idx: int, residual: str, moe_input: str) -> str:
        graph, name = step.graph, f"layers.{layer_idx}.router.scale"
        rows = graph.op("Reshape", residual, graph.constant([-1, self.hidden_size], "int64"))
        scale = step.shared(name, lambda: step.weights(name, self.hidden_size) * self.hidden_size**-0.5)
        return graph.op("RMSNormalization", rows, scale, axis=-1, epsilon=self.rms_norm_eps)

    def router_scores(self, step: Step, layer_idx: int, moe_input: str) -> str:
        name = f"layers.{layer_idx}.router.proj.weight"
        logits = step.router_linear(moe_input, name, self.num_experts, self.hidden_size)
        return step.graph.op("Softmax", logits, axis=-1)

    def route(self, step: Step, layer_idx: int, moe_input: str) -> Routing:
        routing = super().route(step, layer_idx, moe_input)
        scales = step.vector(f"layers.{layer_idx}.router.per_expert_scale", self.num_experts)
        weights = step.graph.op("Mul", normalized(step, routing.weights), step.graph.op("Gather", scales, routing.ids))
        return Routing(routing.ids, weights, routing.scores)

    def expert(self, weights: Weights, layer_idx: int, expert_idx: int) -> ExpertTensors:
        prefix, size, hidden = f"layers.{layer_idx}.experts.", self.moe_intermediate_size, self.hidden_size
        fused = weights.item(f"{prefix}gate_up_proj", expert_idx, self.num_experts, 2 * size, hidden)
        down = weights.item(f"{prefix}down_proj", expert_idx, self.num_experts, hidden, size)
        return {"gate_proj": fused[:size], "up_proj": fused[size:], "down_proj": down}

    @property
    def residual_size(self) -> int:
        return 2 * self.hidden_size

    def carry(self, step: Step, layer_idx: int, residual: str) -> str:
        x = self.norm(step, residual, f"layers.{layer_idx}.pre_feedforward_layernorm")
        beside = self.norm(step, self.gated_mlp(step, layer_idx, x), f"layers.{layer_idx}.post_feedforward_layernorm_1")
        return step.graph.op("Concat", residual, beside, axis=-1)

    def combine(self, step: Step, layer_idx: int, carried: str, mixed: str) -> str:
        graph = step.graph
        sizes = graph.constant([self.hidden_size] * 2, "int64")
        residual, beside = graph.ops("Split", 2, carried, sizes, axis=-1)
        experts = self.norm(step, mixed, f"layers.{layer_idx}.post_feedforward_layernorm_2")
        both = self.norm(step, graph.op("Add", beside, experts), f"layers.{layer_idx}.post_feedforward_layernorm")
        return graph.op("Mul", graph.op("Add", residual, both), step.vector(f"layers.{layer_idx}.layer_scalar", 1))

    def logits(self, step: Step, rows: str) -> str:
        logits, cap = super().logits(step, rows), self.final_logit_softcapping
        if cap is None:
            return logits
        return step.scaled(step.graph.op("Tanh", step.scaled(logits, 1 / cap)), cap)


def _softcapping(config: Config) -> float | None:
    """What logits are kept within; None where they are left as they are."""
    if config.raw("final_logit_softcapping", None) is None:
        return None
    return config.positive("final_logit_softcapping")


def _own_sizes(overrides: Any, layer_idx: int) -> dict[str, int]:
    """A layer's entry of ``per_layer_config``; CheckpointError where that is no object of objects."""
    if overrides is None:
        return {}
    own = overrides.get(str(layer_idx), {}) if isinstance(overrides, dict) else None
    if not isinstance(own, dict) or not all(type(value) is int and 0 < value <= LARGEST for value in own.values()):
        raise CheckpointError(f"config.json: per_layer_config of layer {layer_idx} must hold sizes, found {own!r:.100}")
    return own
