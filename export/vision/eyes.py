"""What an export does about pictures: which parts there are, from which settings, and their record in the manifest.

`Eyes` is the seam between a family, which knows its tower and its processor, and the export, which knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lesonnx.manifest import AnyVision, Part
from lesonnx_export.blocks import Precision
from lesonnx_export.checkpoint import Weights
from lesonnx_export.graph import DenseStore
from lesonnx_export.segments import BuiltPart


class Eyes(Protocol):
    """A family's eyes, read and checked whole. Immutable."""

    @property
    def kind(self) -> str:
        """That of their record."""

    @property
    def notes(self) -> Sequence[str]:
        """Lines for the export's report."""

    @property
    def skipped(self) -> Mapping[str, str]:
        """Tensors of them that no part uses: a pattern for the canonical name -> the reason."""

    @property
    def names(self) -> Sequence[str]:
        """Their parts, in the order in which they are built into one store."""

    @property
    def deepstack_layers(self) -> int:
        """Behind how many of the decoder's first layers their tower has something to add."""

    def build(self, name: str, weights: Weights, store: DenseStore, precision: Precision) -> BuiltPart:
        """The part of that name."""

    def record(self, parts: list[Part], data: str) -> AnyVision:
        """The manifest's record of the parts that were built; ``data`` is the file of their weights."""
