"""Writing a layer's experts: quantized by whoever does the tasks, each straight to its place in the layer's pack.

It knows where experts lie and who does the work, not what the parts around them are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lesonnx.errors import LesonnxError
from lesonnx.manifest import ExpertKind
from lesonnx_export.blas import on_one_thread
from lesonnx_export.compensate import expected_loss, quantize_expert
from lesonnx_export.executors import RunTasks
from lesonnx_export.expert import PACK_NAME, ExpertModel, expert_bytes
from lesonnx_export.sources import ExpertReader, Sources

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


@dataclass(frozen=True)
class _Task:
    """Some experts of a layer, and the pack that they go to."""

    pack: Path
    plan: LayerPlan
    places: list[int | None]


@dataclass(frozen=True)
class _Written:
    """What a task did: bytes of the pack, and what each expert is expected to lose (none without statistics)."""

    num_bytes: int
    losses: list[float]


@dataclass(frozen=True)
class WrittenLayer:
    """A layer whose pack and models are on disk. ``expected_loss`` is None where nothing was calibrated."""

    plan: LayerPlan
    expected_loss: float | None


def _open_sources(sources: Sources) -> Callable[[_Task], _Written]:
    """What does a task, opened once a process."""
    reader = sources.open()
    return lambda task: _write_experts(reader, task)


def _write_experts(reader: ExpertReader, task: _Task) -> _Written:
    """Read, quantize and write some experts."""
    num_bytes, losses, plan = 0, [], task.plan
    statistics = reader.statistics(plan.layer_idx)
    descriptor = os.open(task.pack, os.O_WRONLY)
    try:
        for expert_idx in task.places:
            name = f"layer {plan.layer_idx} expert {'shared' if expert_idx is None else expert_idx}"
            kind, tensors = plan.kind_of(expert_idx), reader.tensors(plan.layer_idx, expert_idx)
            quantized = quantize_expert(kind, tensors, statistics, expert_idx, name)
            block = expert_bytes(kind, {**tensors, **quantized.biases}, quantized.matrices)
            if statistics is not None:
                losses.append(expected_loss(kind, tensors, quantized, statistics, expert_idx))
            view = memoryview(block.data)
            offset = plan.offset_bytes(expert_idx)
            while view:
                count = os.pwrite(descriptor, view, offset)
                view, offset = view[count:], offset + count
            num_bytes += block.nbytes
        os.fsync(descriptor)
        # What is written is not read again: leave the page cache to the checkpoint.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return _Written(num_bytes, losses)


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
    sources: Sources,
    root: Path,
    plans: Sequence[LayerPlan],
    run_tasks: RunTasks,
    progress: Callable[[int], None],
) -> Generator[WrittenLayer, None, None]:
    """Write the layers' packs with whoever does the tasks; yields a layer once all of it is on disk.

    ``progress`` is called with bytes as they are written. Closing the iterator ends the work.
    """
    open_tasks: dict[int, int] = {}
    losses: dict[int, list[float]] = {}
    tasks = _tasks(root, plans, open_tasks)
    with on_one_thread(), closing(run_tasks(_open_sources, sources, tasks)) as done:
        for task, written in done:
            progress(written.num_bytes)
            layer_idx = task.plan.layer_idx
            losses.setdefault(layer_idx, []).extend(written.losses)
            open_tasks[layer_idx] -= 1
            if open_tasks[layer_idx] == 0:
                write_models(root, task.plan)
                # Rounded once, so that it does not depend on the order in which tasks end.
                yield WrittenLayer(task.plan, math.fsum(losses[layer_idx]) if sources.statistics else None)


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
