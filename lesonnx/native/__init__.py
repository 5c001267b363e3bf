"""Where the expert kernel's library is, and which instruction set it uses.

It does not load the library at import, and knows nothing of experts: the operator is in the C files beside it, and
``lesonnx.native.library`` calls the plain functions.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_NAMES = {"win32": "liblesonnx.dll", "darwin": "liblesonnx.dylib"}


def library_path() -> Path | None:
    """The built library beside this file, or the one that LESONNX_LIBRARY names; None where there is none."""
    path = Path(os.environ.get("LESONNX_LIBRARY") or Path(__file__).parent / _NAMES.get(sys.platform, "liblesonnx.so"))
    return path if path.is_file() else None


def isa() -> str | None:
    """The instruction set in use, e.g. ``avx512vnni``; None without a library.

    Raises InputError if LESONNX_ISA names one that this machine does not have.
    """
    from lesonnx.native.library import Library

    path = library_path()
    return None if path is None else Library(path).isa()
