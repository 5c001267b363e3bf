"""What ``lesonnx inspect`` says of the parts of a bundle that read pictures; to import it needs no ONNX Runtime."""

from __future__ import annotations

from typing import Any

from lesonnx.bundle import Bundle
from lesonnx.errors import BundleError
from lesonnx.manifest import AnyVision
from lesonnx.memory import format_bytes
from lesonnx.vision.rules import views

# Height and width of a photo of 12 megapixels.
PHOTO = (3000, 4000)


def vision_facts(bundle: Bundle) -> dict[str, Any] | None:
    """What reads pictures and what it takes; None for a bundle without eyes."""
    vision = bundle.manifest.vision
    if vision is None:
        return None
    return {
        "kind": vision.kind,
        "parts": [{"name": part.name, "role": part.role} for part in vision.parts],
        "bits": vision_bits(bundle),
        "num_parameters": vision.num_parameters,
        "bytes": vision_bytes(bundle),
        "working_bytes": vision.working_bytes,
        "photo_bytes": photo_bytes(bundle, vision),
        "separator": vision.texts.separator,
        **_seen_at(vision),
    }


def _seen_at(vision: AnyVision) -> dict[str, int]:
    """What says in how many pixels a picture is seen."""
    if vision.kind == "qwen3_vl":
        return {"min_pixels": vision.min_pixels, "max_pixels": vision.max_pixels}
    return {"scale_resolution": vision.scale_resolution, "max_slice_nums": vision.max_slice_nums}


def vision_bytes(bundle: Bundle) -> int:
    """Bytes of what reads pictures, graphs and weights; 0 without."""
    vision = bundle.manifest.vision
    paths = {vision.data, *(part.path for part in vision.parts)} if vision else set()
    return sum(bundle.file(path).stat().st_size for path in paths)


def photo_bytes(bundle: Bundle, vision: AnyVision) -> int:
    """What a run asks experts for while it reads a photo of 12 megapixels."""
    from lesonnx.vision.album import Shown, reading_bytes

    return reading_bytes(bundle, [Shown("", *PHOTO, tuple(views(*PHOTO, vision)), None)])


def vision_bits(bundle: Bundle) -> int | None:
    """The bits that the tower's linear maps have; None without eyes, or without the ``onnx`` package to read that."""
    vision = bundle.manifest.vision
    if vision is None:
        return None
    try:
        import onnx

        from lesonnx.ort import first_line
    except ImportError:
        return None
    path = bundle.part_file(vision.part("vision_tower"))
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except Exception as error:  # noqa: BLE001  (protobuf's own types, which differ by its implementation)
        raise BundleError(f"{path}: not readable as an ONNX model: {first_line(error)}") from None
    found = (attribute.i for node in graph.node for attribute in node.attribute if attribute.name == "bits")
    return next(found, 32)


def vision_line(bundle: Bundle) -> str:
    """One line on what reads pictures."""
    facts = vision_facts(bundle)
    if facts is None:
        return "not taken"
    if "max_pixels" in facts:
        seen = f"in {facts['min_pixels']:,} to {facts['max_pixels']:,} pixels"
    else:
        side, most = facts["scale_resolution"], facts["max_slice_nums"]
        seen = f"at about {side}x{side}, {'unsliced' if most == 1 else f'in up to {most} slices'}"
    return (
        f"{facts['kind']}, {count(facts['num_parameters'])} parameters in {format_bytes(facts['bytes'])};"
        f" seen {seen}; at most {format_bytes(facts['photo_bytes'])} while a photo of 12 megapixels is read"
    )


def count(number: int) -> str:
    """A number of parameters for people."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
