"""Writing a layer's experts: quantized in worker processes, each expert straight to its place in the layer's pack.

It knows where experts lie and who does the work, not what the parts around them are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lesonnx.errors import LesonnxError
from lesonnx.manifest import ExpertKind
from lesonnx_export.architectures import make_decoder
from lesonnx_export.architectures.base import Decoder
from lesonnx_export.checkpoint import Checkpoint, Weights
from lesonnx_export.config import Config
from lesonnx_export.expert import PACK_NAME, ExpertModel, ExpertTensors, expert_bytes
from lesonnx_export.workers import run_tasks

# Experts a task takes at a time: few enough for a smooth progress bar, enough to make the hand-over cheap.
EXPERTS_A_TASK = 4


def layer_directory(root: Path, layer_idx: int) -> Path:
    """Where a layer's experts lie in a bundle."""
    return root / "experts" / f"layer_{layer_idx:03d}"


@dataclass(frozen=True)
class LayerPlan:
    """The experts of one layer and their kinds; the shared expert, where there is one, is the last of the pack."""

    layer_idx: int
    num_experts: int
    kind: ExpertKind
    shared_kind: ExpertKind | None

    @property
    def pack_bytes(self) -> int:
        shared = self.shared_kind.cost_bytes if self.shared_kind else 0
        return self.num_experts * self.kind.cost_bytes + shared

    @property
    def places(self) -> list[int | None]:
        """Every expert of the pack in order; None is the shared one."""
        return [*range(self.num_experts), *([None] if self.shared_kind else [])]

    def offset_bytes(self, expert_idx: int | None) -> int:
        return (self.num_experts if expert_idx is None else expert_idx) * self.kind.cost_bytes

    def kind_of(self, expert_idx: int | None) -> ExpertKind:
        kind = self.shared_kind if expert_idx is None else self.kind
        if kind is None:
            raise LesonnxError(f"layer {self.layer_idx} has no shared expert")
        return kind


def read_expert(architecture: Decoder, weights: Weights, layer_idx: int, expert_idx: int | None) -> ExpertTensors:
    """An expert's float32 tensors; None asks for the shared one."""
    if expert_idx is None:
        return architecture.shared_expert(weights, layer_idx)
    return architecture.expert(weights, layer_idx, expert_idx)


@dataclass(frozen=True)
class _Task:
    """Some experts of a layer, and the pack that they go to."""

    pack: Path
    plan: LayerPlan
    places: list[int | None]


def _open_checkpoint(directory: Path) -> Callable[[_Task], int]:
    """What a worker process begins with."""
    checkpoint = Checkpoint(directory)
    architecture, weights = make_decoder(Config(checkpoint.config)), Weights(checkpoint)
    return lambda task: _write_experts(architecture, weights, task)


def _write_experts(architecture: Decoder, weights: Weights, task: _Task) -> int:
    """Read, quantize and write some experts; gives the bytes written."""
    written, plan = 0, task.plan
    descriptor = os.open(task.pack, os.O_WRONLY)
    try:
        for expert_idx in task.places:
            name = f"layer {plan.layer_idx} expert {'shared' if expert_idx is None else expert_idx}"
            tensors = read_expert(architecture, weights, plan.layer_idx, expert_idx)
            block = expert_bytes(plan.kind_of(expert_idx), tensors, name)
            view = memoryview(block.data)
            offset = plan.offset_bytes(expert_idx)
            while view:
                count = os.pwrite(descriptor, view, offset)
                view, offset = view[count:], offset + count
            written += block.nbytes
        os.fsync(descriptor)
        # What is written is not read again: leave the page cache to the checkpoint.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return written


def write_models(root: Path, plan: LayerPlan) -> int:
    """Every expert's own .onnx beside the pack; gives the bytes written."""
    directory = layer_directory(root, plan.layer_idx)
    models = {id(kind): ExpertModel(kind) for kind in (plan.kind, plan.shared_kind) if kind is not None}
    written = 0
    for expert_idx in plan.places:
        name = "shared.onnx" if expert_idx is None else f"expert_{expert_idx:03d}.onnx"
        data = models[id(plan.kind_of(expert_idx))].serialize(plan.offset_bytes(expert_idx))
        (directory / name).write_bytes(data)
        written += len(data)
    return written


def write_packs(
    checkpoint_directory: Path,
    root: Path,
    plans: Sequence[LayerPlan],
    num_workers: int,
    progress: Callable[[int], None],
) -> Generator[LayerPlan, None, None]:
    """Write the layers' packs with several processes; yields a layer once all of it is on disk.

    ``progress`` is called with bytes as they are written. Closing the iterator ends the processes.
    """
    open_tasks: dict[int, int] = {}
    with closing(
        run_tasks(_open_checkpoint, checkpoint_directory, _tasks(root, plans, open_tasks), num_workers)
    ) as done:
        for task, num_bytes in done:
            progress(num_bytes)
            layer_idx = task.plan.layer_idx
            open_tasks[layer_idx] -= 1
            if open_tasks[layer_idx] == 0:
                write_models(root, task.plan)
                yield task.plan


def _tasks(root: Path, plans: Sequence[LayerPlan], open_tasks: dict[int, int]) -> Iterator[_Task]:
    """Begin each layer's pack and deal its experts out; ``open_tasks`` counts what is not done of a layer."""
    for plan in plans:
        directory = layer_directory(root, plan.layer_idx)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / PACK_NAME).open("wb") as file:
            file.truncate(plan.pack_bytes)
        starts = range(0, len(plan.places), EXPERTS_A_TASK)
        open_tasks[plan.layer_idx] = len(starts)
        for start in starts:
            yield _Task(directory / PACK_NAME, plan, plan.places[start : start + EXPERTS_A_TASK])
