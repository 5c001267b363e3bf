"""Processes that do nothing but take processor time, to measure beside: a machine whose cores have other work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Ends by itself when its parent is gone, however that ended.
SPIN = """
import os, sys
parent = int(sys.argv[1])
while os.getppid() == parent:
    for _ in range(1000000):
        pass
"""


@contextmanager
def busy_cores(count: int) -> Iterator[list[int]]:
    """Let ``count`` processes spin, one core each; gives their ids. They are gone at the end."""
    command = [sys.executable, "-S", "-c", SPIN, str(os.getpid())]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
