"""Qwen3.5-MoE as the whole vision-language checkpoint names itself: its language model."""

from __future__ import annotations

from lesonnx_export.architectures import qwen3_5_moe_text


class Architecture(qwen3_5_moe_text.Architecture):
    pass
