"""The directory in which an export is written until it is whole, held by one export at a time.

It knows nothing of what is in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lesonnx.errors import InputError


@contextmanager
def held(partial: Path, resume: bool) -> Iterator[None]:
    """Hold the directory: with ``resume`` as it is, else empty. InputError where another process holds it.

    The system lets go of it when the process ends, however it does: nothing is left that somebody would have to remove.
    """
    if resume:
        if not partial.is_dir():
            raise InputError(f"{partial}: nothing to resume; export without --resume")
    elif partial.is_symlink() or not partial.is_dir():
        partial.unlink(missing_ok=True)
        partial.mkdir(exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        _lock(descriptor, partial)
        if not resume:
            for path in partial.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, partial: Path) -> None:
    under_way = f"{partial}: another export to the same bundle is under way; wait for it or choose another name"
    # Some network file systems lock nothing: there it is up to the user, as it would be without this.
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(under_way) from None
    # The other may have ended and renamed the directory in between: what was locked is its bundle then.
    if not partial.exists() or not os.path.samestat(os.fstat(descriptor), partial.stat()):
        raise InputError(under_way)
