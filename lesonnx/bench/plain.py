"""What a plain ONNX Runtime user would write: a session from an expert's own file when it is needed, gone after use.

It is the ladder's first row. Without ``drop``, the system's page cache keeps what was read: the warm figure.
"""

from __future__ import annotations

import os
from pathlib import Path

from lesonnx import ort
from lesonnx.bundle import Bundle, Expert
from lesonnx.engines.session import SessionEngine


class PlainEngine(SessionEngine):
    """Sessions by path, nothing else. With ``drop``, an expert's pages leave the page cache with its session."""

    name = "plain"

    def __init__(self, bundle: Bundle, drop: bool = True) -> None:
        super().__init__(bundle)
        self.drop = drop

    def load(self, expert: Expert, slab: int, offset_bytes: int) -> int:
        self._sessions[expert.number] = ort.open_session(self._bundle.model_file(expert), self._options)
        return expert.cost_bytes

    def evict(self, expert: Expert) -> None:
        # Pages that a session has mapped cannot be dropped, so they go after it.
        super().evict(expert)
        if self.drop:
            drop_pages(self._bundle.pack_file(expert.layer_idx), expert.offset_bytes, expert.cost_bytes)


def drop_pages(path: Path, offset_bytes: int = 0, num_bytes: int = 0) -> None:
    """Take a range of a file (0 bytes: to its end) out of the page cache, where the system offers that."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, offset_bytes, num_bytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
