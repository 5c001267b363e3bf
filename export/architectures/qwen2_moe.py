"""Qwen2-MoE: biased q/k/v, softmax router, a shared expert weighed by a sigmoid."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx.errors import CheckpointError
from lesonnx_export.architectures.base import FULL, SLIDING, Decoder, Routing
from lesonnx_export.architectures.qwen3_moe import layer_list
from lesonnx_export.blocks import Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.config import Config
from lesonnx_export.expert import ExpertShape, ExpertTensors


class Architecture(Decoder):
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm_topk_prob = config.flag("norm_topk_prob", False)
        self.qkv_bias = config.flag("qkv_bias", True)
        self.windows = self._windows()
        self.decoder_sparse_step = config.integer("decoder_sparse_step", 1)
        self.mlp_only_layers = layer_list(config, "mlp_only_layers", self.num_hidden_layers)
        self.shared_expert_intermediate_size = config.integer("shared_expert_intermediate_size")
        config.raw("intermediate_size", None)
        config.raw("tie_word_embeddings", None)

    def is_moe(self, layer_idx: int) -> bool:
        return layer_idx not in self.mlp_only_layers and (layer_idx + 1) % self.decoder_sparse_step == 0

    def _windows(self) -> list[int | None]:
        """Every layer's window; which have one is said by ``layer_types``, or by a rule where that is left out."""
        config, count = self.config, self.num_hidden_layers
        uses_window = config.flag("use_sliding_window", False)
        window = config.integer("sliding_window", 4096) if uses_window else None
        until = config.integer("max_window_layers", 28)
        usual = [SLIDING if uses_window and idx % 2 == 0 and idx < until else FULL for idx in range(count)]
        types = config.layer_types(count, (SLIDING, FULL), usual)
        if SLIDING in types and window is None:
            raise CheckpointError("config.json: layer_types has sliding windows, use_sliding_window is false")
        config.raw("sliding_window", None)
        return [window if layer_type == SLIDING else None for layer_type in types]

    def sliding_window_of(self, layer_idx: int) -> int | None:
        return self.windows[layer_idx]

    def has_qkv_bias(self) -> bool:
        return self.qkv_bias

    def route(self, step: Step, layer_idx: int, moe_input: str) -> Routing:
        routing = super().route(step, layer_idx, moe_input)
        name = f"layers.{layer_idx}.mlp.shared_expert_gate.weight"
        shared = step.graph.op("Sigmoid", step.router_linear(moe_input, name, 1, self.hidden_size))
        return Routing(routing.ids, routing.weights, routing.scores, shared)

    def shared_expert_shape(self) -> ExpertShape:
        return ExpertShape(self.hidden_size, self.shared_expert_intermediate_size, self.activation)

    def shared_expert(self, weights: Weights, layer_idx: int) -> ExpertTensors:
        return self.mlp(
            weights, f"layers.{layer_idx}.mlp.shared_expert.", self.shared_expert_intermediate_size, self.hidden_size
        )
