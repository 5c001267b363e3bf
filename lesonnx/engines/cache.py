"""The kernel engine's memory: a few large page-aligned slabs, and direct reads into them.

It knows bytes and offsets; which expert lies where is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import LoadError
from lesonnx.manifest import PAGE_BYTES


class Slab:
    """Anonymous memory on a page boundary, given to the process only where it is written.

    Any thread may fill a range; whoever allots ranges sees to it that nobody else uses it.
    """

    def __init__(self, num_bytes: int) -> None:
        # Private: what is given back of a shared mapping stays allocated.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._map = mmap.mmap(-1, num_bytes, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages: ordinary ones do
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def give_back(self, first_byte: int, end_byte: int) -> None:
        """Return a range of whole pages to the system: its contents are gone, it may be written again."""
        if first_byte < end_byte and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first_byte, end_byte - first_byte)


class PackFile:
    """A pack opened for reading past the page cache, or through it with the range dropped where that is refused.

    Thread-safe: every read names its own offset.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._direct = False
        self._descriptor = -1
        if hasattr(os, "O_DIRECT"):
            try:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
                self._direct = True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        if not self._direct:
            self._open_buffered()

    def _open_buffered(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDONLY)
        if hasattr(os, "F_NOCACHE"):
            import fcntl

            fcntl.fcntl(self._descriptor, os.F_NOCACHE, 1)

    @property
    def is_direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._direct

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        """Fill ``target`` (whole aligned pages) from an aligned offset; LoadError where the file ends early."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:]], offset_bytes + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self._direct:
                    # Some file systems take the flag and refuse the read.
                    self._direct = False
                    self._open_buffered()
                    continue
                raise
            if count == 0:
                raise LoadError(f"{self._path}: ends at byte {offset_bytes + done:,}, expected more")
            done += count
            if self._direct and done < len(target) and done % PAGE_BYTES:
                raise LoadError(f"{self._path}: ends at byte {offset_bytes + done:,}, expected more")
        if not self._direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset_bytes, len(target), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
