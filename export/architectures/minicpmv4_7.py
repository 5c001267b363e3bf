"""MiniCPM-V 4.7's text half: Qwen3.5-MoE's language model, on positions of time, height and width.

Its eyes, the vision tower and the merger behind it, are no part of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lesonnx_export.architectures import qwen3_5_moe_text
from lesonnx_export.checkpoint import Checkpoint
from lesonnx_export.config import Config
from lesonnx_export.rope import Rope, on_three_axes
from lesonnx_export.vision.eyes import Eyes
from lesonnx_export.vision.minicpmv import MiniCPMVEyes

# What transformers takes where mrope_section is left out.
DEFAULT_SECTION = (11, 11, 10)
# Keys of the whole model's configuration that are about pictures.
OF_PICTURES = (
    *("downsample_mode", "image_size", "insert_layer_id", "merge_kernel_size", "merger_times", "patch_size"),
    *("image_token_id", "image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id"),
    *("video_token_id", "tie_word_embeddings"),
)


class Architecture(qwen3_5_moe_text.Architecture):
    of_eyes: Mapping[str, str] = MappingProxyType(
        {r"(model\.)?(vision_tower|merger)\..*": "vision tower and merger, left out by --no-vision"}
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for key in OF_PICTURES:
            config.raw(key, None)

    def _rope(self) -> Rope:
        return on_three_axes(self.config, super()._rope(), DEFAULT_SECTION)

    def eyes(self, checkpoint: Checkpoint) -> Eyes:
        return MiniCPMVEyes.read(checkpoint, self.hidden_size, self.vocab_size)

    def eyes_of_shape(self, config: dict[str, Any], directory: Path | None) -> Eyes:
        return MiniCPMVEyes.of_shape(config, self.hidden_size, directory)
