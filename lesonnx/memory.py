"""Sizes in bytes as people write them, and what the system says of this process's memory. It knows no model."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from lesonnx.errors import InputError

# glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
LARGE_BUFFER_BYTES = 1 << 17
AUTO_SHARE = 0.7
_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
# By controllers: the limit, and what counts against it.
_GROUP_FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
_UNITS = {"": 1, "B": 1}
for _place, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1000**_place, f"{_letter}B": 1000**_place, f"{_letter}IB": 1024**_place}


def parse_bytes(text: str) -> int:
    """A size such as ``3GB`` (10^9), ``2GiB`` (2^30), ``1.5M`` or ``4096``; InputError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise InputError(f"{text!r} is not a size; write bytes or a unit, such as 3GB, 500MiB or 4096")
    num_bytes = float(match[1]) * _UNITS[match[2].upper()]
    if num_bytes >= 1 << 62:
        raise InputError(f"{text[:40]!r} is more than any memory holds")
    return int(num_bytes)


def format_bytes(num_bytes: float) -> str:
    """A size for people, decimal units: ``1.67 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _status(key: str) -> int | None:
    """A line of /proc/self/status in bytes; None where the system has none."""
    return _number(Path("/proc/self/status"), rf"^{key}:\s+(\d+) kB$", 1024)


def auto_budget_bytes() -> int:
    """A memory budget that leaves room for others: seven tenths of what the system could give this process now.

    What is available is Linux's own estimate (``MemAvailable``), or less where a control group bounds the process.
    """
    available = _number(Path("/proc/meminfo"), r"^MemAvailable:\s+(\d+) kB$", 1024)
    if available is None:
        raise InputError("this system does not say how much memory is available; give a size instead of auto")
    return int(AUTO_SHARE * (max(0, min([available, *_group_rooms()])) + current_bytes()))


def _group_rooms() -> Iterator[int]:
    """What the control groups of this process still allow, from its own up to the outermost that can be seen."""
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        # Version 2 has one hierarchy, without controllers in its line; version 1 has one for memory.
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = _CGROUP / controllers
        limit_file, used_file = _GROUP_FILES[controllers]
        group = root / name.lstrip("/")
        for directory in (group, *group.parents):
            limit = _number(directory / limit_file, r"^(\d+)$", 1)
            used = _number(directory / used_file, r"^(\d+)$", 1)
            if limit is not None and used is not None:
                yield limit - used
            if directory == root:
                break


def _number(path: Path, pattern: str, unit_bytes: int) -> int | None:
    """A number of a file of the system's, in bytes; None where it is not there."""
    try:
        match = re.search(pattern, path.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * unit_bytes if match else None


def return_freed_memory() -> None:
    """Have glibc give large freed buffers back to the system at once; does nothing on other systems.

    Left alone, its threshold adapts to what a program frees, so that the activations of one large prefill chunk stay
    in the heap; and glibc before 2.38 does not use freed aligned blocks again, which is what ONNX Runtime asks for.
    Together that was 140 MB on the Qwen3-30B shape, of a process whose every byte could hold experts.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BUFFER_BYTES)


def current_bytes() -> int:
    """Resident memory of this process; the peak where the system does not tell the present."""
    return _status("VmRSS") or peak_bytes()


def peak_bytes() -> int:
    """The most resident memory that this process had, as the system reports it (``VmHWM`` on Linux)."""
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
