"""Qwen3-VL-MoE's text half: Qwen3-MoE on positions of time, height and width, always renormalised.

Its eyes, ``model.visual.``, are no part of the decoder; what they give for its first layers comes in by the segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from lesonnx_export.architectures import qwen3_moe
from lesonnx_export.checkpoint import Checkpoint, Float32, Weights
from lesonnx_export.config import Config
from lesonnx_export.expert import ExpertTensors
from lesonnx_export.rope import Rope, on_three_axes
from lesonnx_export.vision.eyes import Eyes
from lesonnx_export.vision.qwen3_vl_eyes import Qwen3VLEyes

# What transformers takes where mrope_section is left out.
DEFAULT_SECTION = (24, 20, 20)
# Keys of the whole model's configuration that are about pictures.
OF_PICTURES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class Architecture(qwen3_moe.Architecture):
    defaults: ClassVar[dict[str, Any]] = qwen3_moe.Architecture.defaults | {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    }
    default_rope_theta = 500000.0
    of_eyes: Mapping[str, str] = MappingProxyType(
        {r"(model\.)?visual\..*": "vision tower and mergers, left out by --no-vision"}
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm_topk_prob = True
        self.sliding_window = None
        for key in OF_PICTURES:
            config.raw(key, None)

    def _rope(self) -> Rope:
        return on_three_axes(self.config, super()._rope(), DEFAULT_SECTION)

    def eyes(self, checkpoint: Checkpoint) -> Eyes:
        return Qwen3VLEyes.read(checkpoint, self.hidden_size, self.vocab_size, self.num_hidden_layers)

    def eyes_of_shape(self, config: dict[str, Any], directory: Path | None) -> Eyes:
        return Qwen3VLEyes.of_shape(config, self.hidden_size, self.num_hidden_layers, directory)

    def expert(self, weights: Weights, layer_idx: int, expert_idx: int) -> ExpertTensors:
        """As of every family; where the fused tensors are published [experts, inputs, outputs], the other way round."""
        prefix = f"{self.moe_block(weights, layer_idx)}experts."
        count, intermediate, hidden = self.num_experts, self.moe_intermediate_size, self.hidden_size
        gate_up, down = f"{prefix}gate_up_proj", f"{prefix}down_proj"
        if gate_up not in weights or weights.checkpoint.info(gate_up).shape == (count, 2 * intermediate, hidden):
            return super().expert(weights, layer_idx, expert_idx)
        fused = _transposed(weights.item(gate_up, expert_idx, count, hidden, 2 * intermediate))
        return {
            "gate_proj": fused[:intermediate],
            "up_proj": fused[intermediate:],
            "down_proj": _transposed(weights.item(down, expert_idx, count, intermediate, hidden)),
        }


def _transposed(matrix: Float32) -> Float32:
    """The transpose, contiguous; a rehearsal's zeros stay one element."""
    return np.ascontiguousarray(matrix.T) if any(matrix.strides) else matrix.T
