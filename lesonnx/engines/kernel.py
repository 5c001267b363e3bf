"""The ``kernel`` engine: experts computed by the operator ``lesonnx::Experts`` straight from the bytes of the pack.

The cache is a few slabs; a load is one direct read to its place and nothing else.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from lesonnx import native, ort
from lesonnx.bundle import Bundle, Expert
from lesonnx.engines import LayerWork, Rows
from lesonnx.engines.cache import PackFile, Slab
from lesonnx.errors import BundleError, InputError

# Bindings that are kept, by what they are bound to: those of decode steps and of steps with drafts, whose arrays stay.
MAX_BINDINGS = 512
KEPT_ROWS = 16


def why_not(bundle: Bundle) -> str | None:
    """Why the kernel cannot be used for a bundle here; None where it can."""
    if native.library_path() is None:
        return "its library is not built (install a C compiler and install lesonnx again)"
    if any(kind.stage is None for kind in bundle.manifest.expert_kinds):
        return "the bundle has no stages (export it again)"
    return None


class KernelEngine:
    """Experts in slabs. ``load`` is thread-safe, the rest belongs to one thread."""

    name = "kernel"
    memory_per_byte = 1.0

    def __init__(self, bundle: Bundle, num_threads: int | None = None) -> None:
        self.notes: list[str] = []
        self._bundle = bundle
        self._packs = {
            layer.layer_idx: PackFile(bundle.pack_file(layer.layer_idx)) for layer in bundle.manifest.expert_layers
        }
        # Pieces of memory; each slab as piece, first byte and greatest length; each expert's piece and first byte.
        self._memory: list[Slab] = []
        self._slabs: list[tuple[int, int, int]] = []
        self._places: dict[int, tuple[int, int]] = {}
        options = ort.session_options(optimise=False, num_threads=num_threads)
        try:
            options.register_custom_ops_library(str(native.library_path()))
        except Exception as error:  # noqa: BLE001  (ONNX Runtime raises many unrelated types)
            raise InputError(f"the kernel's library cannot be used: {ort.first_line(error)}") from None
        self._stages = [self._open_stage(bundle, kind.stage, options) for kind in bundle.manifest.expert_kinds]
        self._bindings: dict[tuple[int, ...], _RowBinding] = {}

    @staticmethod
    def _open_stage(
        bundle: Bundle, stage: str | None, options: onnxruntime.SessionOptions
    ) -> onnxruntime.InferenceSession:
        if stage is None:
            raise BundleError(f"{bundle.directory}: a kind of expert has no stage; export it again")
        return ort.open_session(bundle.file(stage), options)

    def resize(self, slab_bytes: list[int]) -> None:
        # What is new comes as one piece of memory, so that a batch whose experts lie in several slabs is one run.
        new = slab_bytes[len(self._slabs) :]
        if new:
            self._memory.append(Slab(sum(new)))
            starts = accumulate(new[:-1], initial=0)
            self._slabs += [(len(self._memory) - 1, start, length) for start, length in zip(starts, new, strict=True)]
        for (memory, start, most), length in zip(self._slabs, slab_bytes, strict=False):
            self._memory[memory].give_back(start + length, start + most)

    def load(self, expert: Expert, slab: int, offset_bytes: int) -> int:
        memory, start, _ = self._slabs[slab]
        offset = start + offset_bytes
        self._packs[expert.layer_idx].read_into(
            self._memory[memory].view[offset : offset + expert.cost_bytes], expert.offset_bytes
        )
        self._places[expert.number] = (memory, offset)
        return expert.cost_bytes

    def compute(self, experts: list[Expert], work: LayerWork) -> None:
        # A run takes one kind and one piece of memory: almost always one run, two with a shared expert.
        groups: dict[tuple[int, bool], list[Expert]] = {}
        for expert in experts:
            key = (self._places[expert.number][0], expert.expert_idx is None)
            groups.setdefault(key, []).append(expert)
        for (memory, is_shared), group in groups.items():
            pieces: list[Rows]
            if is_shared:
                pieces = [np.arange(len(work.hidden), dtype=np.int64)]
            else:
                pieces = [work.rows[expert.number] for expert in group]
            self._compute_rows(memory, is_shared, group, pieces, work)

    def _compute_rows(
        self, memory: int, is_shared: bool, group: list[Expert], pieces: list[Rows], work: LayerWork
    ) -> None:
        """The rows of a group. Arrays of steps of few rows are the same every time: bindings are kept."""
        out = work.shared_out if is_shared else work.expert_out
        kind_idx = group[0].kind_idx
        counts = [len(piece) for piece in pieces]
        num_rows = sum(counts)
        key = (kind_idx, memory, len(group), num_rows, id(out), id(work.hidden))
        binding = self._bindings.get(key)
        if binding is None:
            cache = self._memory[memory].array
            binding = _RowBinding(self._stages[kind_idx], work.hidden, cache, out, len(group), num_rows)
            if len(work.hidden) <= KEPT_ROWS:
                if len(self._bindings) >= MAX_BINDINGS:
                    self._bindings.clear()
                self._bindings[key] = binding
        places = self._places
        binding.offsets[:] = [places[expert.number][1] for expert in group]
        if num_rows == len(group):
            binding.row_starts[:] = binding.each
            binding.rows[:] = [piece[0] for piece in pieces]
        else:
            binding.row_starts[1:] = list(accumulate(counts))
            np.concatenate(pieces, out=binding.rows)
        binding.run()

    def evict(self, expert: Expert) -> None:
        del self._places[expert.number]

    def close(self) -> None:
        self._places.clear()
        self._bindings.clear()
        self._memory.clear()
        self._slabs.clear()
        for pack in self._packs.values():
            pack.close()


class _RowBinding(ort.Binding):
    """So many rows of so many experts: arrays to fill in, then run."""

    def __init__(
        self,
        stage: onnxruntime.InferenceSession,
        hidden: NDArray[np.float32],
        cache: NDArray[np.uint8],
        out: NDArray[np.float32],
        num_experts: int,
        num_rows: int,
    ) -> None:
        self.offsets = np.zeros(num_experts, np.int64)
        self.rows = np.zeros(num_rows, np.int64)
        self.row_starts = np.zeros(num_experts + 1, np.int64)
        # Where every expert has one row.
        self.each = np.arange(num_experts + 1, dtype=np.int64)
        # An array whose id names this binding must live as long as it does.
        self._out = out
        inputs = _inputs(hidden, cache, self.offsets, self.row_starts, self.rows)
        super().__init__(stage, inputs, {"expert_out": _with_slots(out)})


def _inputs(
    hidden: NDArray[np.float32], cache: NDArray[np.uint8], offsets: Rows, row_starts: Rows, rows: Rows
) -> dict[str, NDArray[Any]]:
    return {"hidden": hidden, "cache": cache, "offsets": offsets, "row_starts": row_starts, "rows": rows}


def _with_slots(out: NDArray[np.float32]) -> NDArray[np.float32]:
    """[T,slots,H]; a shared expert's output [T,H] has one slot."""
    return out if out.ndim == 3 else out[:, None]
