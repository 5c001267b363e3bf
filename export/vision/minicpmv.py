"""MiniCPM-V's eyes: the tower, the processor and the marks of a checkpoint, read and held against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from lesonnx.manifest import Part, Vision, VisionTexts, VisionTokens
from lesonnx.vision.cutting import max_crop_tokens
from lesonnx_export.blocks import Precision
from lesonnx_export.checkpoint import Checkpoint, Weights
from lesonnx_export.graph import DenseStore
from lesonnx_export.segments import BuiltPart
from lesonnx_export.vision import tower as tower_part
from lesonnx_export.vision.marks import read_marks
from lesonnx_export.vision.prepare import build_prepare
from lesonnx_export.vision.processor import PREPROCESSOR, PROCESSOR, Processor, Settings, read_processor
from lesonnx_export.vision.separator import separator_of
from lesonnx_export.vision.vision_config import TowerConfig

WINDOW_MERGER = r"model\.vision_tower\.vit_merger\..*"


@dataclass(frozen=True)
class MiniCPMVEyes:
    """`Eyes` of MiniCPM-V 4.6 and 4.7."""

    tower: TowerConfig
    processor: Processor
    tokens: VisionTokens
    texts: VisionTexts
    notes: Sequence[str] = ()
    names: Sequence[str] = ("vision_prepare", "vision_tower")
    kind: Literal["minicpmv"] = "minicpmv"
    deepstack_layers: int = 0

    @classmethod
    def read(cls, checkpoint: Checkpoint, hidden_size: int, vocab_size: int) -> MiniCPMVEyes:
        """Those of a checkpoint; CheckpointError in one line for what is missing or cannot be computed."""
        tower = TowerConfig.read(checkpoint.config, hidden_size)
        processor = read_processor(checkpoint.directory, tower)
        marks = read_marks(checkpoint.directory, checkpoint.config, vocab_size, processor.use_image_id)
        separator, note = separator_of(checkpoint.directory, marks.texts.placeholder)
        texts = marks.texts.model_copy(update={"separator": separator})
        return cls(tower, processor, marks.tokens, texts, [note] if note else [])

    @classmethod
    def of_shape(cls, config: dict[str, Any], hidden_size: int, directory: Path | None) -> MiniCPMVEyes:
        """Those of a config.json alone, for sizes: the marks are made up, and the processor where it is not there."""
        tower = TowerConfig.read(config, hidden_size)
        known = directory is not None and any((directory / name).is_file() for name in (PROCESSOR, PREPROCESSOR))
        settings = Settings.of(directory) if directory is not None and known else Settings.usual(tower)
        marks = dict.fromkeys(VisionTokens.model_fields, 0)
        texts = {name: "?" for name, field in VisionTexts.model_fields.items() if field.is_required()}
        return cls(tower, settings.processor(tower), VisionTokens(**marks), VisionTexts(**texts))

    @property
    def skipped(self) -> Mapping[str, str]:
        if self.tower.insert_layer_id is None:
            return MappingProxyType({WINDOW_MERGER: "window merger, without use where downsample_mode is 4x"})
        return MappingProxyType({})

    def build(self, name: str, weights: Weights, store: DenseStore, precision: Precision) -> BuiltPart:
        if name == "vision_prepare":
            return build_prepare(self.tower.patch_size, self.processor.pixels, store)
        return tower_part.build_tower(self.tower, weights, store, precision)

    def record(self, parts: list[Part], data: str) -> Vision:
        record = Vision(
            kind=self.kind,
            parts=parts,
            data=data,
            patch_size=self.tower.patch_size,
            token_patches=self.tower.token_patches,
            scale_resolution=self.processor.scale_resolution,
            max_slice_nums=self.processor.max_slice_nums,
            tokens=self.tokens,
            texts=self.texts,
            num_parameters=tower_part.num_parameters(self.tower),
            working_bytes=1,
        )
        num_patches = max_crop_tokens(record) * record.token_patches**2
        return record.model_copy(update={"working_bytes": tower_part.working_bytes(self.tower, num_patches)})
