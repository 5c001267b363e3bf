"""The ``session`` engine: plain ONNX Runtime, a session from each expert's own .onnx. Nothing to compile.

A load reads the expert's bytes, then ONNX Runtime packs them; the session is the cache entry.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lesonnx import ort
from lesonnx.bundle import Bundle, ExpertRef
from lesonnx.engines import ExpertJob
from lesonnx.errors import BundleError

if TYPE_CHECKING:
    import onnxruntime

READ_BYTES = 1 << 20


class SessionEngine:
    """Experts as ONNX Runtime sessions. ``load`` is thread-safe, the rest belongs to one thread."""

    name = "session"

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self.notes: list[str] = []
        # Experts are a handful of nodes: optimising a graph costs more than it brings.
        self._options = ort.session_options(optimise=False)
        self._sessions: dict[ExpertRef, onnxruntime.InferenceSession] = {}

    def load(self, ref: ExpertRef) -> int:
        offset, length = self._bundle.offset_bytes(ref), self._bundle.kind(ref).cost_bytes
        descriptor = os.open(self._bundle.pack_file(ref.layer_idx), os.O_RDONLY)
        try:
            # A plain read first: faulting a mapping in page by page is far slower than one sequential read.
            self._read(descriptor, offset, length, ref)
            self._sessions[ref] = ort.open_session(self._bundle.model_file(ref), self._options)
            # The session has its own packed copy: do not keep a second one in the page cache.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        return length

    @staticmethod
    def _read(descriptor: int, offset: int, length: int, ref: ExpertRef) -> None:
        end = offset + length
        while offset < end:
            block = os.pread(descriptor, min(READ_BYTES, end - offset), offset)
            if not block:
                raise BundleError(f"{ref}: the pack ends at byte {offset:,}, expected {end:,}")
            offset += len(block)

    def compute(self, jobs: list[ExpertJob], hidden: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        slots = out.shape[1]
        flat = out.reshape(-1, out.shape[2])
        for job in jobs:
            x = hidden[job.rows // slots] if len(hidden) > 1 else hidden
            flat[job.rows] = self._sessions[job.ref].run(None, {"x": x})[0]

    def evict(self, ref: ExpertRef) -> None:
        del self._sessions[ref]

    def close(self) -> None:
        self._sessions.clear()
