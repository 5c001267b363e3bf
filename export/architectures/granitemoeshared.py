"""GraniteMoE with a shared expert beside the routed ones."""

from __future__ import annotations

from typing import Any, ClassVar

from lesonnx_export.architectures import granitemoe
from lesonnx_export.architectures.base import Routing
from lesonnx_export.blocks import Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.config import Config
from lesonnx_export.expert import ExpertShape, ExpertTensors


class Architecture(granitemoe.Architecture):
    defaults: ClassVar[dict[str, Any]] = granitemoe.Architecture.defaults | {"shared_intermediate_size": 1024}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shared_intermediate_size = config.integer("shared_intermediate_size")

    def route(self, step: Step, layer_idx: int, moe_input: str) -> Routing:
        routing = super().route(step, layer_idx, moe_input)
        shared = step.column(moe_input, self.residual_multiplier)
        return Routing(routing.ids, routing.weights, routing.scores, shared)

    def shared_expert_shape(self) -> ExpertShape:
        return ExpertShape(self.hidden_size, self.shared_intermediate_size, self.activation)

    def shared_expert(self, weights: Weights, layer_idx: int) -> ExpertTensors:
        prefix, size = f"layers.{layer_idx}.shared_mlp.", self.shared_intermediate_size
        fused = weights(f"{prefix}input_linear.weight", 2 * size, self.hidden_size)
        down = weights(f"{prefix}output_linear.weight", self.hidden_size, size)
        return {"gate_proj": fused[:size], "up_proj": fused[size:], "down_proj": down}
