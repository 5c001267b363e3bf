"""What a bundle is held against: a bundle as it is, or a checkpoint, exported in float32 and kept where that is wanted.

It runs nothing.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress

from lesonnx.bundle import Bundle
from lesonnx.errors import InputError
from lesonnx_export.checkpoint import Checkpoint
from lesonnx_export.exporter import ExportOptions, export_bundle

Kind = Literal["bundle", "checkpoint"]


@dataclass(frozen=True)
class OpenedReference:
    """``bundle`` is what runs; ``path`` and ``kind`` what the user named."""

    path: Path
    kind: Kind
    bundle: Bundle


@contextmanager
def opened_reference(path: Path, keep: Path | None, console: Console) -> Iterator[OpenedReference]:
    """Open a reference; a checkpoint's float bundle lies in ``keep``, or is gone at the end.

    InputError where the path is neither bundle nor checkpoint; LesonnxError where the disk has no room for its float
    bundle, four bytes a weight.
    """
    if (path / "manifest.json").exists():
        yield OpenedReference(path, "bundle", Bundle(path))
        return
    if not path.is_dir():
        raise InputError(f"{path}: no such reference; expected a bundle or a checkpoint directory")
    if not (path / "config.json").exists():
        raise InputError(f"{path}: neither a bundle (manifest.json) nor a checkpoint (config.json)")
    name = f"{path.resolve().name}-{_digest(path)[:12]}.bundle"
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if not (keep / name).exists():
            _export(path, keep / name, console)
        yield OpenedReference(path, "checkpoint", Bundle(keep / name))
        return
    with tempfile.TemporaryDirectory(prefix="lesonnx-reference-") as directory:
        _export(path, Path(directory) / name, console)
        yield OpenedReference(path, "checkpoint", Bundle(Path(directory) / name))


def _export(checkpoint: Path, bundle: Path, console: Console) -> None:
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("float reference", total=None)
        export_bundle(
            checkpoint,
            bundle,
            ExportOptions(bits=32),
            progress=lambda what, num_bytes: bar.advance(task, num_bytes),
            announce=lambda plan: bar.update(task, total=plan.total_bytes),
        )


def _digest(path: Path) -> str:
    """Of what a checkpoint is by its configuration and its files' names, sizes and times."""
    checkpoint = Checkpoint(path)
    sha256 = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted({info.file for info in checkpoint.tensors.values()}):
        stat = file.stat()
        sha256.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    tokenizer = path / "tokenizer.json"
    sha256.update(tokenizer.read_bytes() if tokenizer.exists() else b"")
    return sha256.hexdigest()
