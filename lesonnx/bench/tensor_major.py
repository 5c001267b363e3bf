"""Experts as a checkpoint stores them, tensor by tensor: a temporary copy, and an engine that loads from it.

It shows what contiguous packs save: here an expert is six reads at six places instead of one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from lesonnx.bundle import Bundle, Expert
from lesonnx.engines.kernel import KernelEngine
from lesonnx.errors import InputError, LesonnxError, LoadError
from lesonnx.manifest import PAGE_BYTES, ExpertKind, ExpertLayer, page_ceil

# What stays free on the disk beside the copy.
SPARE_BYTES = 1 << 30


def tensor_ranges(kind: ExpertKind) -> list[tuple[int, int]]:
    """Offset in the expert and length of each of its tensors, in the order in which they lie."""
    ranges = []
    for matrix in kind.matrices.values():
        ranges.append((matrix.weight_offset_bytes, matrix.weight_bytes))
        if matrix.scales_offset_bytes is not None:
            ranges.append((matrix.scales_offset_bytes, matrix.scales_bytes))
        if matrix.bias_offset_bytes is not None:
            ranges.append((matrix.bias_offset_bytes, matrix.rows * 4))
    return sorted(ranges)


def room_problem(bundle: Bundle, directory: Path) -> str | None:
    """Why a copy does not fit there, in a few words; None where it does. InputError where there is no directory."""
    if not directory.is_dir():
        raise InputError(f"--temp {directory}: no such directory")
    free = shutil.disk_usage(directory).free
    needed = bundle.expert_bytes + SPARE_BYTES
    return None if free >= needed else f"{directory} has {free:,} bytes free, the copy needs {needed:,}"


def copy_file(directory: Path, layer_idx: int) -> Path:
    return directory / f"layer_{layer_idx:03d}.tensors"


def write_copy(bundle: Bundle, directory: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Write every layer tensor by tensor: each tensor of all routed experts side by side, then the shared expert's.

    LesonnxError where the disk does not take it.
    """
    try:
        _write_layers(bundle, directory, progress)
    except OSError as error:
        raise LesonnxError(f"{directory}: the tensor-major copy cannot be written: {error.strerror or error}") from None


def _write_layers(bundle: Bundle, directory: Path, progress: Callable[[int], None]) -> None:
    for layer in bundle.manifest.expert_layers:
        pack = memoryview(bundle.pack_file(layer.layer_idx).read_bytes())
        with copy_file(directory, layer.layer_idx).open("wb") as file:
            for base, stride, count, kind in _groups(bundle, layer):
                for offset, length in tensor_ranges(kind):
                    for place in range(count):
                        start = base + place * stride + offset
                        file.write(pack[start : start + length])
            file.flush()
            os.fsync(file.fileno())
            _drop(file.fileno(), 0, 0)
        descriptor = os.open(bundle.pack_file(layer.layer_idx), os.O_RDONLY)
        _drop(descriptor, 0, 0)
        os.close(descriptor)
        progress(len(pack))


def _groups(bundle: Bundle, layer: ExpertLayer) -> list[tuple[int, int, int, ExpertKind]]:
    """Where experts of one kind begin in the pack, their stride and number."""
    kinds = bundle.manifest.expert_kinds
    stride = kinds[layer.kind].cost_bytes
    groups = [(0, stride, layer.num_experts, kinds[layer.kind])]
    if layer.shared_kind is not None:
        groups.append((layer.num_experts * stride, stride, 1, kinds[layer.shared_kind]))
    return groups


def _drop(descriptor: int, offset_bytes: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset_bytes, num_bytes, os.POSIX_FADV_DONTNEED)


class TensorMajorEngine(KernelEngine):
    """The kernel engine over such a copy: buffered reads, a tensor at a time, each range dropped after it."""

    name = "kernel"

    def __init__(self, bundle: Bundle, directory: Path) -> None:
        super().__init__(bundle)
        self._files = {
            layer.layer_idx: os.open(copy_file(directory, layer.layer_idx), os.O_RDONLY)
            for layer in bundle.manifest.expert_layers
        }
        # By expert: offset in its copy, offset in the expert, length.
        self._reads: dict[int, list[tuple[int, int, int]]] = {}
        for layer in bundle.manifest.expert_layers:
            at = 0
            experts = [expert for expert in bundle.experts if expert.layer_idx == layer.layer_idx]
            for shared in (False, True):
                group = [expert for expert in experts if (expert.expert_idx is None) == shared]
                if not group:
                    continue
                for offset, length in tensor_ranges(group[0].kind):
                    for expert in group:
                        self._reads.setdefault(expert.number, []).append((at, offset, length))
                        at += length

    def load(self, expert: Expert, slab: int, offset_bytes: int) -> int:
        memory, start, _ = self._slabs[slab]
        first = start + offset_bytes
        view = self._memory[memory].view[first : first + expert.cost_bytes]
        descriptor = self._files[expert.layer_idx]
        num_bytes = 0
        for at, offset, length in self._reads[expert.number]:
            done = 0
            while done < length:
                count = os.preadv(descriptor, [view[offset + done : offset + length]], at + done)
                if count == 0:
                    raise LoadError(f"{expert}: the tensor-major copy ends at byte {at + done:,}")
                done += count
            start = at // PAGE_BYTES * PAGE_BYTES
            _drop(descriptor, start, page_ceil(at + length) - start)
            num_bytes += length
        self._places[expert.number] = (memory, first)
        return num_bytes

    def close(self) -> None:
        super().close()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
