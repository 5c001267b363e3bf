"""Writing a text file whole: beside its target, then renamed over it. It knows no content."""

from __future__ import annotations

from pathlib import Path

from lesonnx.errors import InputError


def write_whole(path: Path, text: str, what: str) -> None:
    """Write a text so that a reader finds all of it or what was there before; InputError names ``what`` and the path.

    A link is followed. What is no regular file (a device, a pipe) is written to, never replaced.
    """
    target = path.resolve()
    partial = target.with_name(f"{target.name}.partial")
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path}: the {what} cannot be written: {error.strerror or error}") from None
