"""What experts are quantized from, opened where the work is done: the checkpoint's tensors, and what calibration kept.

It knows names and places of tensors, nothing of what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lesonnx_export.architectures import make_decoder
from lesonnx_export.architectures.base import Decoder
from lesonnx_export.blas import on_one_thread
from lesonnx_export.checkpoint import Checkpoint, Weights
from lesonnx_export.config import Config
from lesonnx_export.expert import ExpertTensors
from lesonnx_export.statistics import LayerStatistics, StatisticsDirectory


def read_expert(architecture: Decoder, weights: Weights, layer_idx: int, expert_idx: int | None) -> ExpertTensors:
    """An expert's float32 tensors; None asks for the shared one."""
    if expert_idx is None:
        return architecture.shared_expert(weights, layer_idx)
    return architecture.expert(weights, layer_idx, expert_idx)


@dataclass(frozen=True)
class Sources:
    """What experts are quantized from: a checkpoint, and where it was calibrated, the statistics of that."""

    checkpoint: Path
    statistics: Path | None = None

    def open(self) -> ExpertReader:
        """What a task begins with. As many of these work at once as there are cores, each on one thread."""
        on_one_thread()
        return ExpertReader(self)


class ExpertReader:
    """The experts of a checkpoint and what is known of their layers. Not thread-safe."""

    def __init__(self, sources: Sources) -> None:
        checkpoint = Checkpoint(sources.checkpoint)
        self._architecture, self._weights = make_decoder(Config(checkpoint.config)), Weights(checkpoint)
        self._directory = StatisticsDirectory(sources.statistics) if sources.statistics else None
        self._layer: LayerStatistics | None = None

    def tensors(self, layer_idx: int, expert_idx: int | None) -> ExpertTensors:
        """An expert's float32 tensors; None asks for the shared one."""
        return read_expert(self._architecture, self._weights, layer_idx, expert_idx)

    def statistics(self, layer_idx: int) -> LayerStatistics | None:
        """A layer's statistics, those of the last layer kept; None without calibration."""
        if self._directory is None:
            return None
        if self._layer is None or self._layer.layer_idx != layer_idx:
            self._layer = self._directory.layer(layer_idx)
        return self._layer
