"""How a checkpoint's image processor treats pictures, read from its files and held against what the graphs compute.

It knows the keys that transformers' processors share and those of ``MiniCPMV4_6ImageProcessor``; it reads no picture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lesonnx.errors import CheckpointError
from lesonnx_export.checkpoint import read_json
from lesonnx_export.config import FLOAT32_MOST
from lesonnx_export.vision.vision_config import Pixels, TowerConfig

PROCESSOR = "processor_config.json"
PREPROCESSOR = "preprocessor_config.json"
TYPES = re.compile(r"MiniCPMV4_[67]ImageProcessor(Pil|Fast)?")
BICUBIC = 3  # as Pillow numbers its filters
# What transformers takes for keys that are left out.
DEFAULTS: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_slice_nums": 9,
    "scale_resolution": 448,
    "patch_size": 14,
    "slice_mode": True,
    "downsample_mode": "16x",
    "use_image_id": True,
}
# Larger is no processor's, and would only exhaust whoever believes it.
LARGEST = {"scale_resolution": 1 << 13, "max_slice_nums": 1 << 8}


@dataclass(frozen=True)
class Processor:
    """How pictures are cut and scaled; ``max_slice_nums`` is 1 where they are not cut."""

    pixels: Pixels
    scale_resolution: int
    max_slice_nums: int
    use_image_id: bool


def read_processor(directory: Path, tower: TowerConfig) -> Processor:
    """The processor of a checkpoint directory; CheckpointError in one line for what is missing or not computed here.

    ``processor_config.json`` holds it in transformers 5, ``preprocessor_config.json`` in 4; the former wins.
    """
    return Settings.of(directory).processor(tower)


@dataclass(frozen=True)
class Settings:
    """The keys of an image processor, and the file that they are in."""

    source: str
    values: dict[str, Any]

    @classmethod
    def of(cls, directory: Path, defaults: Mapping[str, Any] = MappingProxyType(DEFAULTS)) -> Settings:
        """Those of a checkpoint directory; CheckpointError where it has none. ``defaults`` are for keys left out."""
        outer = read_json(directory / PROCESSOR) if (directory / PROCESSOR).is_file() else {}
        inner = outer.get("image_processor")
        source = PROCESSOR
        if inner is None:
            if not (directory / PREPROCESSOR).is_file():
                raise CheckpointError(
                    f"{directory}: no {PREPROCESSOR} and no image_processor in {PROCESSOR}, which say how pictures are"
                    " prepared"
                )
            inner, source = read_json(directory / PREPROCESSOR), PREPROCESSOR
        if not isinstance(inner, dict):
            raise CheckpointError(f"{PROCESSOR}: image_processor must be an object, found {inner!r:.100}")
        # The processor around it may say otherwise than the image processor of this one thing.
        if outer.get("use_image_id") is not None:
            inner = inner | {"use_image_id": outer["use_image_id"]}
        return cls(source, {**defaults, **{key: value for key, value in inner.items() if value is not None}})

    @classmethod
    def usual(cls, tower: TowerConfig) -> Settings:
        """What a processor for a tower has where none is known."""
        mode = "4x" if tower.insert_layer_id is None else "16x"
        return cls("processor", DEFAULTS | {"patch_size": tower.patch_size, "downsample_mode": mode})

    def processor(self, tower: TowerConfig) -> Processor:
        """What they mean for a tower; CheckpointError for what it cannot be given."""
        pixels = self.pixels(TYPES, "a MiniCPMV4_6ImageProcessor")
        for key in ("patch_size", "downsample_mode"):
            self.require(key, Settings.usual(tower).values[key])
        slices = self._count("max_slice_nums")
        return Processor(
            pixels=pixels,
            scale_resolution=self._count("scale_resolution"),
            max_slice_nums=slices if self._flag("slice_mode") else 1,
            use_image_id=self._flag("use_image_id"),
        )

    def pixels(self, types: re.Pattern[str], expected: str) -> Pixels:
        """How it scales pixels; CheckpointError unless it is of such a type, and resizes as `vision_prepare` does."""
        name = self.values.get("image_processor_type")
        if name is not None and not (isinstance(name, str) and types.fullmatch(name)):
            raise self.wrong("image_processor_type", expected)
        for key in ("do_resize", "do_rescale", "do_normalize"):
            if self.values[key] is not True:
                raise self.wrong(key, "true")
        if self.values["resample"] != BICUBIC or isinstance(self.values["resample"], bool):
            raise self.wrong("resample", f"{BICUBIC} (bicubic)")
        return Pixels(
            self._number("rescale_factor"), self._triple("image_mean"), self._triple("image_std", positive=True)
        )

    def require(self, key: str, expected: object) -> None:
        """CheckpointError for a setting that is not the tower's."""
        if self.values[key] != expected:
            raise self.wrong(key, f"{expected!r} as in config.json")

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """What to raise for a setting."""
        found = f"{self.values[key]!r:.100}"
        return CheckpointError(f"{self.source}: {key} is {found}, expected {expected}")

    def _flag(self, key: str) -> bool:
        value = self.values[key]
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def _count(self, key: str) -> int:
        value, most = self.values[key], LARGEST[key]
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(key, f"a whole number from 1 to {most}")
        return value

    def _number(self, key: str) -> float:
        if not _is_number(self.values[key], positive=True):
            raise self.wrong(key, "a positive number")
        return float(self.values[key])

    def _triple(self, key: str, positive: bool = False) -> tuple[float, float, float]:
        values = self.values[key]
        is_list = isinstance(values, list) and len(values) == 3
        if not is_list or not all(_is_number(value, positive) for value in values):
            raise self.wrong(key, f"three {'positive ' if positive else ''}numbers")
        red, green, blue = map(float, values)
        return red, green, blue


def _is_number(value: object, positive: bool) -> bool:
    """Whether float32 holds it."""
    least = 2.0**-120 if positive else -FLOAT32_MOST
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= FLOAT32_MOST
