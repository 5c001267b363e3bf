"""Qwen3-VL's eyes: the tower, the processor and the marks of a checkpoint, read and held against each other."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from lesonnx.errors import CheckpointError
from lesonnx.manifest import Part, Qwen3VLTexts, Qwen3VLTokens, Qwen3VLVision
from lesonnx_export.blocks import Precision
from lesonnx_export.checkpoint import Checkpoint, Weights
from lesonnx_export.graph import DenseStore
from lesonnx_export.segments import BuiltPart
from lesonnx_export.tokenizer import TOKENIZER_JSON, load_tokenizer
from lesonnx_export.vision import qwen3_vl
from lesonnx_export.vision.prepare import build_prepare
from lesonnx_export.vision.processor import PREPROCESSOR, PROCESSOR, Settings
from lesonnx_export.vision.separator import separator_of
from lesonnx_export.vision.vision_config import Pixels

TYPES = re.compile(r"Qwen[23]VLImageProcessor(Pil|Fast)?")
# What transformers takes for keys that are left out.
DEFAULTS: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
}
# What Qwen3-VL's checkpoints have instead.
PUBLISHED: dict[str, Any] = DEFAULTS | {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": 16,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}
# Larger is no processor's, and would only exhaust whoever believes it.
MOST_PIXELS = 1 << 28
# By their key in config.json, with transformers' default.
MARKS = {"image_token_id": 151655, "vision_start_token_id": 151652, "vision_end_token_id": 151653}


@dataclass(frozen=True)
class Qwen3VLEyes:
    """`Eyes` of Qwen3-VL."""

    tower: qwen3_vl.TowerConfig
    pixels: Pixels
    min_pixels: int
    max_pixels: int
    tokens: Qwen3VLTokens
    texts: Qwen3VLTexts
    notes: Sequence[str] = ()
    names: Sequence[str] = ("vision_prepare", "vision_tower")
    kind: Literal["qwen3_vl"] = "qwen3_vl"

    @classmethod
    def read(cls, checkpoint: Checkpoint, hidden_size: int, vocab_size: int, num_layers: int) -> Qwen3VLEyes:
        """Those of a checkpoint; CheckpointError in one line for what is missing or cannot be computed."""
        tower = qwen3_vl.TowerConfig.read(checkpoint.config, hidden_size, num_layers)
        settings = Settings.of(checkpoint.directory, DEFAULTS)
        for key, expected in (
            ("patch_size", tower.patch_size), ("merge_size", tower.token_patches), ("temporal_patch_size", tower.frames)
        ):  # fmt: skip
            settings.require(key, expected)
        least, most = _bounds(settings)
        tokens, placeholder, picture = _marks(checkpoint, vocab_size)
        separator, note = separator_of(checkpoint.directory, picture)
        texts = Qwen3VLTexts(placeholder=placeholder, picture=picture, separator=separator)
        return cls(
            tower,
            settings.pixels(TYPES, "a Qwen2VLImageProcessor"),
            least,
            most,
            tokens,
            texts,
            (note,) if note else (),
        )

    @classmethod
    def of_shape(cls, config: dict[str, Any], hidden_size: int, num_layers: int, directory: Path | None) -> Qwen3VLEyes:
        """Those of a config.json alone, for sizes: the marks are made up, and the processor where it is not there.

        Then it is the one that Qwen3-VL is published with.
        """
        tower = qwen3_vl.TowerConfig.read(config, hidden_size, num_layers)
        known = directory is not None and any((directory / name).is_file() for name in (PROCESSOR, PREPROCESSOR))
        settings = Settings.of(directory, DEFAULTS) if directory is not None and known else Settings("", PUBLISHED)
        least, most = _bounds(settings)
        texts = Qwen3VLTexts(placeholder="?", picture="?")
        return cls(tower, settings.pixels(TYPES, ""), least, most, Qwen3VLTokens(image=0), texts)

    @property
    def skipped(self) -> Mapping[str, str]:
        return MappingProxyType({})

    @property
    def deepstack_layers(self) -> int:
        return len(self.tower.deepstack_layers)

    def build(self, name: str, weights: Weights, store: DenseStore, precision: Precision) -> BuiltPart:
        if name == "vision_prepare":
            return build_prepare(self.tower.patch_size, self.pixels, store)
        return qwen3_vl.build_tower(self.tower, weights, store, precision)

    def record(self, parts: list[Part], data: str) -> Qwen3VLVision:
        return Qwen3VLVision(
            kind=self.kind,
            parts=parts,
            data=data,
            patch_size=self.tower.patch_size,
            token_patches=self.tower.token_patches,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            deepstack_layers=self.deepstack_layers,
            tokens=self.tokens,
            texts=self.texts,
            num_parameters=qwen3_vl.num_parameters(self.tower),
            working_bytes=qwen3_vl.working_bytes(self.tower, self.max_pixels // self.tower.patch_size**2),
        )


def _bounds(settings: Settings) -> tuple[int, int]:
    """The least and the most pixels of a picture: of ``size``, or ``min_pixels`` and ``max_pixels``, which win."""
    size = settings.values["size"]
    if not isinstance(size, dict):
        raise settings.wrong("size", "an object with shortest_edge and longest_edge")
    least = settings.values.get("min_pixels", size.get("shortest_edge"))
    most = settings.values.get("max_pixels", size.get("longest_edge"))
    if type(least) is not int or type(most) is not int or not 0 < least <= most <= MOST_PIXELS:
        raise settings.wrong("size", f"shortest_edge and longest_edge, pixels from 1 to {MOST_PIXELS}, in this order")
    return least, most


def _marks(checkpoint: Checkpoint, vocab_size: int) -> tuple[Qwen3VLTokens, str, str]:
    """The image token's id and text, and the text that stands for a picture in a message."""
    directory = checkpoint.directory
    if not (directory / TOKENIZER_JSON).is_file():
        raise CheckpointError(f"{directory}: no {TOKENIZER_JSON}, without which the marks around pictures have no text")
    tokenizer = load_tokenizer(directory / TOKENIZER_JSON)
    added = {int(id_): token.content for id_, token in tokenizer.get_added_tokens_decoder().items()}
    ids, texts = [], []
    for key, default in MARKS.items():
        id_ = checkpoint.config.get(key, default)
        if type(id_) is not int or not 0 <= id_ < vocab_size:
            raise CheckpointError(f"config.json: {key} must be a token id below {vocab_size}, found {id_!r:.100}")
        if id_ not in added:
            raise CheckpointError(f"config.json: {key} is {id_}, which is no added token of {TOKENIZER_JSON}")
        ids.append(id_)
        texts.append(added[id_])
    image, start, end = texts
    together = f"{start}{image * 2}{end}"
    expected = [ids[1], ids[0], ids[0], ids[2]]
    found: list[int] = tokenizer.encode(together, add_special_tokens=False).ids
    if found != expected:
        raise CheckpointError(f"{TOKENIZER_JSON}: {json.dumps(together)} is {found}, expected {expected}")
    return Qwen3VLTokens(image=ids[0]), image, f"{start}{image}{end}"
