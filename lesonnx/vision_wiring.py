"""Whether a manifest's vision record fits its model: its parts, what they take and give, and the marks' token ids.

As `wiring`, it reads no model. All errors are ValueError in one line, since pydantic asks for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lesonnx.manifest import Manifest, Part, Qwen3VLVision, Value, Vision

ROLES = ("vision_prepare", "vision_tower")
CHANNELS = 3
# What is added to the hidden state of image tokens behind one of the first layers: an output of the tower [I,H], and,
# spread over the tokens of a step, an input of the part that completes the layer [1,T,H].
DEEPSTACK = "deepstack_"
Declared = dict[str, tuple[str, list[int | str]]]


def deepstack_name(layer_idx: int) -> str:
    """The value that is added behind a layer."""
    return f"{DEEPSTACK}{layer_idx}"


def check_vision(manifest: Manifest, vision: Vision | Qwen3VLVision) -> None:
    """ValueError for a vision record that no host could run as it is stated."""
    if sorted(part.role for part in vision.parts) != sorted(ROLES):
        raise ValueError(f"vision has exactly one part of each role: {', '.join(ROLES)}")
    if any(part.role in ROLES for part in manifest.parts):
        raise ValueError("vision's parts belong into vision.parts")
    if manifest.position_rows != 3:
        raise ValueError("vision: the model's parts take position_ids [1, T], expected [3, 1, T]")
    for name, token in vision.tokens.model_dump().items():
        if token >= manifest.model.vocab_size:
            raise ValueError(f"vision: tokens.{name} is {token}, expected less than {manifest.model.vocab_size}")
    if vision.kind == "minicpmv" and (vision.texts.id_start is None) != (vision.texts.id_end is None):
        raise ValueError("vision: texts has one of id_start and id_end, expected both or none")
    if vision.kind == "qwen3_vl":
        _check_qwen3_vl(manifest, vision)
    pixels: Declared = {"pixel_values": ("float32", [1, CHANNELS, vision.patch_size, "W"])}
    picture: Declared = {"image": ("uint8", ["Y", "X", CHANNELS]), "size": ("int64", [2]), "grid": ("int64", [2])}
    given = ("image_features", *map(deepstack_name, range(vision.deepstack_layers)))
    features: Declared = {name: ("float32", ["I", manifest.model.hidden_size]) for name in given}
    _check(vision.part("vision_prepare"), picture, pixels)
    _check(vision.part("vision_tower"), pixels | {"target_size": ("int64", [2])}, features)


def _check_qwen3_vl(manifest: Manifest, vision: Qwen3VLVision) -> None:
    if vision.min_pixels > vision.max_pixels:
        raise ValueError(f"vision: min_pixels {vision.min_pixels} exceeds max_pixels {vision.max_pixels}")
    if vision.texts.picture.count(vision.texts.placeholder) != 1:
        raise ValueError("vision: texts.picture must have texts.placeholder once")
    taken = sorted(v.name for part in manifest.parts for v in part.inputs if v.name.startswith(DEEPSTACK))
    expected = sorted(map(deepstack_name, range(vision.deepstack_layers)))
    if taken != expected:
        raise ValueError(f"vision: parts take {', '.join(taken) or 'no deepstack'}, expected {', '.join(expected)}")


def _check(part: Part, takes: Declared, gives: Declared) -> None:
    for verb, values, expected in (("takes", part.inputs, takes), ("gives", part.outputs, gives)):
        if _declared(values) != expected:
            raise ValueError(f"part {part.name!r} {verb} {_shown(_declared(values))}, expected {_shown(expected)}")


def _declared(values: list[Value]) -> Declared:
    return {value.name: (value.dtype, value.shape) for value in values}


def _shown(values: Declared) -> str:
    return ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in sorted(values.items()))
