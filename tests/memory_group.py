"""A control group that bounds memory, for tests: made beside or below this process's own, and gone afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


class NoGroupError(Exception):
    """Why no group can be made here."""


@dataclass(frozen=True)
class MemoryGroup:
    """A group of control group version 1 or 2. Processes join by writing 0 to ``joining``."""

    directory: Path
    version: int

    @property
    def joining(self) -> Path:
        return self.directory / "cgroup.procs"

    def killed(self) -> int:
        """How many processes the system killed for passing the limit."""
        path = self.directory / ("memory.events" if self.version == 2 else "memory.oom_control")
        return int(dict(line.split() for line in path.read_text().splitlines())["oom_kill"])


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group of that limit, swap included; NoGroupError where the system has none or does not let us.

    It lies within whatever bounds this process, so joining it never means more memory.
    """
    own = _own_groups()
    if "memory" in own:
        version, parent = 1, CGROUP / "memory" / own["memory"]
        limits = {"memory.limit_in_bytes": limit_bytes, "memory.memsw.limit_in_bytes": limit_bytes}
    elif "" in own:
        # Version 2 lets only groups without processes of their own have bounded children: ours is a brother.
        version, parent = 2, (CGROUP / own[""]).parent
        limits = {"memory.max": limit_bytes, "memory.swap.max": 0}
        if not own[""] or "memory" not in _words(parent / "cgroup.subtree_control"):
            raise NoGroupError(f"{parent} gives its groups no memory controller")
    else:
        raise NoGroupError("this system has no control groups for memory")
    group = MemoryGroup(parent / f"lesonnx-test-{os.getpid()}", version)
    try:
        group.directory.mkdir()
    except OSError as error:
        raise NoGroupError(f"{group.directory} cannot be made: {error.strerror}") from None
    try:
        for name, value in limits.items():
            path = group.directory / name
            if path.exists():  # swap is counted on some systems only
                path.write_text(str(value))
        yield group
    except PermissionError as error:
        raise NoGroupError(f"{error.filename}: {error.strerror}") from None
    finally:
        _remove(group.directory)


def _own_groups() -> dict[str, str]:
    """This process's groups by controller ("" for version 2), as paths below the hierarchy's root."""
    groups = {}
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        _, controllers, name = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), name.lstrip("/"))
    return groups


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _remove(directory: Path) -> None:
    # The system lets go of a killed process's group a moment after its end.
    for _ in range(100):
        try:
            directory.rmdir()
        except OSError:
            time.sleep(0.02)
        else:
            return
    directory.rmdir()
