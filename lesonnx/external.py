"""Which files an ONNX model says its weights are in: read from its bytes, since a session does not tell.

It knows one record of the format, and no graph.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

# An entry of a tensor's `external_data`: key "location" (field 1), then the path (field 2), which here is shorter than
# 128 bytes, so that its length is one byte. All writers put fields in the order of their numbers.
_LOCATION = re.compile(rb"\x0a\x08location\x12([\x01-\x7f])", re.DOTALL)


def external_files(path: Path) -> set[str]:
    """The paths, relative to the model's own directory, as they are written there; empty for one without any."""
    if not path.stat().st_size:
        return set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = {data[match.end() : match.end() + match[1][0]] for match in _LOCATION.finditer(data)}
    return {name.decode(errors="replace") for name in found}
