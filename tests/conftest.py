"""Bundles of the fixtures and of the sample, exported once a session (a worker of pytest-xdist has its own)."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import fixture

from lesonnx_export.exporter import ExportOptions, export_bundle

MEMORY = Path("/dev/shm")
MEMORY_BYTES = 1 << 30


class BundleFactory:
    """Exports on first use and keeps what it exported. Bundles are shared: copy one before changing it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[tuple[Any, ...], Path] = {}

    def __call__(self, checkpoint: str | Path, bits: int = 32, dense_bits: int | None = None, **options: Any) -> Path:
        """The bundle of a fixture (by name) or of a checkpoint directory."""
        key = (str(checkpoint), bits, dense_bits, *sorted(options.items()))
        if key not in self._made:
            source = fixture(checkpoint) if isinstance(checkpoint, str) else checkpoint
            target = self._root / f"{source.name}_{len(self._made)}"
            chosen = ExportOptions(bits=bits, dense_bits=dense_bits, num_workers=1, **options)  # type: ignore[arg-type]
            self._made[key] = export_bundle(source, target, chosen).bundle
        return self._made[key]


@pytest.fixture(scope="session")
def quick_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in memory where that is to be had, else an ordinary one.

    A load drops what it read from the page cache, and an export waits for the disk after every part: thousands of
    times, in these tests.
    """
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
        with tempfile.TemporaryDirectory(prefix="lesonnx-tests-", dir=MEMORY) as directory:
            yield Path(directory)
    else:
        yield tmp_path_factory.mktemp("quick")


@pytest.fixture
def quick_path(quick_root: Path) -> Iterator[Path]:
    """As pytest's ``tmp_path``, but in memory where that is to be had, and gone after the test."""
    with tempfile.TemporaryDirectory(dir=quick_root) as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def bundle_of(quick_root: Path) -> BundleFactory:
    (quick_root / "bundles").mkdir()
    return BundleFactory(quick_root / "bundles")


@pytest.fixture(scope="session")
def sample_bundle(bundle_of: BundleFactory) -> Path:
    """The sample as the demo exports it: int4 experts, int8 dense parts."""
    return bundle_of("sample", bits=4, dense_bits=8)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on stderr."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


@pytest.fixture
def lesonnx(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Outcome]]:
    """Calls the program's entry point in this process: ``lesonnx("run", bundle, "--prompt", "x")``.

    What libraries and worker processes write to the terminal counts as the program's.
    """
    from lesonnx.cli import main

    kept = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGINT)}

    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["lesonnx", *map(str, arguments)])
        capfd.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code or 0
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    yield call
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte; skips where mounting is not allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("may not mount a small disk here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)
