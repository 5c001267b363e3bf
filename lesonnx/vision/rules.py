"""A bundle's rules for pictures, by the kind of its vision record: sizes, memory, text, positions; pure.

It knows which kinds there are; the rules themselves are in modules of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from lesonnx.manifest import AnyVision
from lesonnx.vision import canvas, cutting, placeholders, qwen3_vl
from lesonnx.vision.canvas import Integers
from lesonnx.vision.cutting import View


def views(height: int, width: int, vision: AnyVision) -> list[View]:
    """How a picture of ``height`` x ``width`` pixels is seen; InputError for one that the model cannot see."""
    if vision.kind == "qwen3_vl":
        return qwen3_vl.views(height, width, vision)
    return cutting.views(height, width, vision)


def working_bytes(view: View, vision: AnyVision) -> int:
    """What the tower takes for a crop of a view, beside its weights."""
    if vision.kind == "qwen3_vl":
        return qwen3_vl.working_bytes(view, vision)
    return vision.working_bytes


def expand(text: str, pictures: Sequence[Sequence[View]], vision: AnyVision) -> str:
    """A prompt with one placeholder a picture as it is tokenized; InputError for any other number of placeholders."""
    if vision.kind == "qwen3_vl":
        return qwen3_vl.expand(text, pictures, vision)
    return placeholders.expand(text, pictures, vision)


def positions(token_ids: Sequence[int] | Integers, pictures: Sequence[Sequence[View]], vision: AnyVision) -> Integers:
    """Time, height and width [3, L] of a prompt's tokens; InputError where its image tokens are not the pictures'."""
    if vision.kind == "qwen3_vl":
        return qwen3_vl.positions(token_ids, pictures, vision)
    return canvas.positions(token_ids, pictures, vision)
