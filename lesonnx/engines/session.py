"""The ``session`` engine: plain ONNX Runtime, a session from each expert's own .onnx. Nothing to compile.

A load reads the expert's bytes, then ONNX Runtime packs them; the session is the cache entry.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lesonnx import ort
from lesonnx.bundle import Bundle, Expert
from lesonnx.engines import LayerWork
from lesonnx.errors import LoadError

if TYPE_CHECKING:
    import onnxruntime

READ_BYTES = 1 << 20


class SessionEngine:
    """Experts as ONNX Runtime sessions. ``load`` is thread-safe, the rest belongs to one thread."""

    name = "session"
    # Measured: packed copies, their allocator's rounding, and what a session needs beside its weights.
    memory_per_byte = 1.8

    def __init__(self, bundle: Bundle) -> None:
        self.notes: list[str] = []
        self._bundle = bundle
        # Experts are a handful of nodes: optimising a graph costs more than it brings.
        # Hundreds of them may be in memory, so none has threads of its own.
        self._options = ort.session_options(optimise=False, num_threads=1)
        self._sessions: dict[int, onnxruntime.InferenceSession] = {}

    def resize(self, slab_bytes: list[int]) -> None:
        """Sessions lie where ONNX Runtime puts them."""

    def load(self, expert: Expert, slab: int, offset_bytes: int) -> int:
        descriptor = os.open(self._bundle.pack_file(expert.layer_idx), os.O_RDONLY)
        try:
            # A plain read first: faulting a mapping in page by page is far slower than one sequential read.
            self._read(descriptor, expert)
            self._sessions[expert.number] = ort.open_session(self._bundle.model_file(expert), self._options)
            # The session has its own packed copy: do not keep a second one in the page cache.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, expert.offset_bytes, expert.cost_bytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        return expert.cost_bytes

    @staticmethod
    def _read(descriptor: int, expert: Expert) -> None:
        offset, end = expert.offset_bytes, expert.offset_bytes + expert.cost_bytes
        while offset < end:
            block = os.pread(descriptor, min(READ_BYTES, end - offset), offset)
            if not block:
                raise LoadError(f"{expert}: the pack ends at byte {offset:,}, expected {end:,}")
            offset += len(block)

    def compute(self, experts: list[Expert], work: LayerWork) -> None:
        hidden = work.hidden
        slots = work.expert_out.shape[1]
        flat = work.expert_out.reshape(-1, work.expert_out.shape[2])
        for expert in experts:
            session = self._sessions[expert.number]
            if expert.expert_idx is None:
                work.shared_out[...] = session.run(None, {"x": hidden})[0]
                continue
            rows = work.rows[expert.number]
            x = hidden[rows // slots] if len(hidden) > 1 else hidden
            flat[rows] = session.run(None, {"x": x})[0]

    def evict(self, expert: Expert) -> None:
        del self._sessions[expert.number]

    def close(self) -> None:
        self._sessions.clear()
