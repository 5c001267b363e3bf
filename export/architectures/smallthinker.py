"""SmallThinker: the router reads a layer's input, before attention; ReLU experts; some layers without positions.

From its published modelling code: no class of transformers computes it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx.errors import CheckpointError
from lesonnx.manifest import Activation
from lesonnx_export.architectures.base import Decoder, Routing
from lesonnx_export.blocks import Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.config import Config
from lesonnx_export.rope import Rope
from lesonnx_export.routers import normalized


class Architecture(Decoder):
    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-6}
    default_rope_theta = 1.5e6
    moe_intermediate_key = "moe_ffn_hidden_size"
    router_name = "primary_router"
    expert_names = ("gate", "up", "down")
    routes_before_mixing = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.router_softmax = config.flag("moe_primary_router_apply_softmax", False)
        self.has_positions = self._layout("rope_layout", 1)
        self.has_window = self._layout("sliding_window_layout", 0)
        self.sliding_window_size = config.integer("sliding_window_size") if any(self.has_window) else None
        if not all(self._layout("moe_layer_layout", 1)):
            raise CheckpointError("config.json: moe_layer_layout has layers without experts, which is not supported")
        config.require("moe_enable_early_router", (True,), True)
        config.require("moe_enable_secondary_experts", (False,), False)
        for key in ("sliding_window_size", "tie_word_embeddings", "hidden_act", "moe_num_secondary_experts"):
            config.raw(key, None)

    def _activation(self) -> Activation:
        return "reglu"

    def _head_dim(self) -> int:
        return self.config.integer("head_dim")

    def _layout(self, key: str, default: int) -> list[bool]:
        """A list with 0 or 1 for each layer."""
        values = self.config.raw(key, [default] * self.num_hidden_layers)
        if (
            not isinstance(values, list)
            or len(values) != self.num_hidden_layers
            or not all(value in (0, 1) for value in values)
        ):
            raise CheckpointError(f"config.json: {key} must be {self.num_hidden_layers} of 0, 1; found {values!r:.200}")
        return [bool(value) for value in values]

    def moe_block(self, weights: Weights, layer_idx: int) -> str:
        return f"layers.{layer_idx}.block_sparse_moe."

    def rope_of(self, layer_idx: int) -> Rope | None:
        return self.rope if self.has_positions[layer_idx] else None

    def sliding_window_of(self, layer_idx: int) -> int | None:
        return self.sliding_window_size if self.has_window[layer_idx] else None

    def router_scores(self, step: Step, layer_idx: int, moe_input: str) -> str:
        name = f"{self.moe_block(step.weights, layer_idx)}{self.router_name}.weight"
        return step.router_linear(moe_input, name, self.num_experts, self.hidden_size)

    def route(self, step: Step, layer_idx: int, moe_input: str) -> Routing:
        scores = self.router_scores(step, layer_idx, moe_input)
        if self.router_softmax:
            return self.softmax_of_chosen(step, scores)
        graph = step.graph
        count = graph.constant([self.num_experts_per_tok], "int64")
        chosen, ids = graph.ops("TopK", 2, scores, count, axis=-1, largest=1, sorted=1)
        return Routing(ids, normalized(step, graph.op("Sigmoid", chosen)), scores)
