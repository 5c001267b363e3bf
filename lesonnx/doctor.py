"""What this machine offers: runtime, expert engine, cores, memory and flash, and what would make it faster.

It measures; it knows nothing of bundles beyond that their biggest file is an expert pack.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from lesonnx.errors import InputError, LesonnxError
from lesonnx.native import library_path
from lesonnx.native.library import Library
from lesonnx.vision.pictures import has_pillow, readable_formats

READ_BYTES = 4 << 20
PAGE_BYTES = 4096


@dataclass(frozen=True)
class FlashReading:
    """Sequential reads of one file."""

    path: str
    bytes_per_second: float
    direct: bool  # False: the file system refuses direct reads, and the page cache may have helped


@dataclass(frozen=True)
class Diagnosis:
    """What ``lesonnx doctor`` found; None where something could not be measured."""

    onnxruntime_version: str
    engine: str
    engine_reason: str
    isa: str | None
    isas: list[str]
    cores: int
    memory_bytes: int | None
    available_bytes: int | None
    memory_bytes_per_second: float
    memory_bytes_per_second_one_core: float
    flash: FlashReading | None
    pillow: bool  # decodes pictures where it is installed
    picture_formats: list[str]
    advice: list[str]


def usable_cores() -> int:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_sizes() -> tuple[int | None, int | None]:
    """Bytes of memory, and of those available now; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return fields.get("MemTotal"), fields.get("MemAvailable")
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    except (AttributeError, OSError, ValueError):
        return None, None


def memory_bandwidth(library: Library | None, threads: int, length_bytes: int = 256 << 20, repeats: int = 7) -> float:
    """Bytes per second that ``threads`` threads read from memory together: the best of ``repeats`` passes.

    The buffer is far larger than any cache. Without the library NumPy reads it, a little slower.
    """
    buffer = np.ones(length_bytes // 8, np.uint64)
    part = len(buffer) // threads

    def read(index: int) -> None:
        piece = buffer[index * part : (index + 1) * part]
        if library is None:
            np.bitwise_or.reduce(piece)
        else:
            library.read_memory(piece.ctypes.data, piece.nbytes)

    best = 0.0
    for _ in range(repeats):
        workers = [threading.Thread(target=read, args=(index,)) for index in range(1, threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        read(0)
        for worker in workers:
            worker.join()
        best = max(best, part * threads * 8 / (time.perf_counter() - start))
    return best


def flash_bandwidth(path: Path, limit_bytes: int = 512 << 20, limit_seconds: float = 2.0) -> FlashReading:
    """Reads ``path`` from its start in pieces of 4 MiB, past the page cache where the file system allows.

    Stops at either limit or the file's end; pieces shorter than a page at the end are not read. Raises InputError for a
    file of less than one page, LesonnxError if it cannot be read.
    """
    size = path.stat().st_size // PAGE_BYTES * PAGE_BYTES
    if size == 0:
        raise InputError(f"{path}: {path.stat().st_size} bytes, expected at least {PAGE_BYTES} to measure flash")
    buffer = mmap.mmap(-1, READ_BYTES)  # page-aligned, as direct reads need
    direct = getattr(os, "O_DIRECT", 0)
    for flags in (direct, 0) if direct else (0,):
        try:
            descriptor = os.open(path, os.O_RDONLY | flags)
        except OSError:
            continue
        try:
            if not flags and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            speed = _read_speed(descriptor, buffer, size, limit_bytes, limit_seconds)
            return FlashReading(str(path), speed, flags != 0)
        except OSError as error:
            if not flags:
                raise LesonnxError(f"{path}: {error.strerror}") from None
        finally:
            os.close(descriptor)
    raise LesonnxError(f"{path}: cannot be opened for reading")


def _read_speed(descriptor: int, buffer: mmap.mmap, size: int, limit_bytes: int, limit_seconds: float) -> float:
    at, start = 0, time.perf_counter()
    while at < min(size, limit_bytes) and time.perf_counter() - start < limit_seconds:
        view = memoryview(buffer)[: min(READ_BYTES, size - at)]
        # macOS's Python has preadv as well; without it a copy is made.
        count = os.preadv(descriptor, [view], at) if hasattr(os, "preadv") else len(os.pread(descriptor, len(view), at))
        if count <= 0:
            break
        at += count
    return at / (time.perf_counter() - start)


def biggest_pack(bundle: Path) -> Path | None:
    """The bundle's biggest expert pack, or the path itself if it is a file."""
    if bundle.is_file():
        return bundle
    packs = sorted(bundle.glob("experts/*/*.pack"), key=lambda pack: pack.stat().st_size)
    return packs[-1] if packs else None


def expert_engine() -> tuple[str, str, Library | None]:
    """The engine that ``--engine auto`` takes, why, and the library if there is one."""
    path = library_path()
    if path is None:
        return "session", "the kernel's library is not built", None
    import onnxruntime as ort

    try:
        library = Library(path)
        library.isa()
        ort.SessionOptions().register_custom_ops_library(str(path))
    except Exception as error:  # noqa: BLE001 (onnxruntime's own classes have no common base)
        return "session", str(error).splitlines()[0], None
    return "kernel", f"{path.name} is built and ONNX Runtime takes it", library


def _advice(engine: str, isa: str | None, isas: list[str], cores: int, flash: FlashReading | None) -> list[str]:
    advice = []
    if engine == "session":
        advice.append("install a C compiler and lesonnx again: the kernel loads experts at the speed of the read alone")
    elif isa != isas[0]:
        advice.append(f"unset LESONNX_ISA: this processor has {isas[0]}, {isa} is in use")
    elif isa == "portable":
        advice.append("this processor has no vector instructions that the kernel knows; it runs the reference code")
    if cores == 1:
        advice.append("one core only: loads and compute take turns; allow the process more cores")
    if sys.platform == "linux":
        try:
            pages = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        except OSError:
            pages = ""
        if "[never]" in pages:
            advice.append("transparent huge pages are off: `madvise` lets the expert cache use them")
    if flash is not None and not flash.direct:
        advice.append("the bundle's file system refuses direct reads: reads pass through the page cache")
    if flash is not None and flash.direct and flash.bytes_per_second < 1e9:
        advice.append("flash reads under 1 GB/s: a larger --expert-budget or fewer bits save more than any schedule")
    return advice


def diagnose(bundle: Path | None = None) -> Diagnosis:
    """Measures this machine, and flash at ``bundle`` (a directory, or any big file).

    Takes about two seconds. Raises InputError if the bundle has no expert pack.
    """
    import onnxruntime as ort

    engine, reason, library = expert_engine()
    cores = usable_cores()
    isas = library.isas() if library else []
    isa = library.isa() if library else None
    flash = None
    if bundle is not None:
        pack = biggest_pack(bundle)
        if pack is None:
            raise InputError(f"{bundle}: no experts/*/*.pack found, expected a bundle")
        flash = flash_bandwidth(pack)
    total, available = memory_sizes()
    one = memory_bandwidth(library, 1)
    return Diagnosis(
        onnxruntime_version=ort.__version__,
        engine=engine,
        engine_reason=reason,
        isa=isa,
        isas=isas,
        cores=cores,
        memory_bytes=total,
        available_bytes=available,
        memory_bytes_per_second=max(one, memory_bandwidth(library, cores)),
        memory_bytes_per_second_one_core=one,
        flash=flash,
        pillow=has_pillow(),
        picture_formats=readable_formats(),
        advice=_advice(engine, isa, isas, cores, flash),
    )


@click.command()
@click.argument("bundle", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(bundle: Path | None, as_json: bool) -> None:
    """Show what this machine offers, and what would make it faster.

    With BUNDLE, flash is measured where the bundle lies.
    """
    found = diagnose(bundle)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found), indent=1))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    def gigabytes(count: float | None) -> str:
        return "unknown" if count is None else f"{count / 1e9:.1f} GB"

    table = Table(show_header=False, box=None)
    table.add_row("ONNX Runtime", found.onnxruntime_version)
    table.add_row("expert engine", f"{found.engine} ({found.engine_reason})")
    table.add_row("instruction set", f"{found.isa or 'none'} (of {', '.join(found.isas) or 'none'})")
    table.add_row("cores", str(found.cores))
    table.add_row("memory", f"{gigabytes(found.memory_bytes)}, {gigabytes(found.available_bytes)} available")
    one, every = found.memory_bytes_per_second_one_core, found.memory_bytes_per_second
    table.add_row("memory bandwidth", f"{gigabytes(every)}/s on all cores, {gigabytes(one)}/s on one")
    if found.flash is not None:
        how = "direct reads" if found.flash.direct else "buffered reads"
        table.add_row("flash bandwidth", f"{gigabytes(found.flash.bytes_per_second)}/s ({how} of {found.flash.path})")
    more = "Pillow" if found.pillow else "without Pillow; for more formats: pip install 'lesonnx[vision]'"
    table.add_row("pictures", escape(f"{', '.join(found.picture_formats)} ({more})"))
    for line in found.advice:
        table.add_row("faster", line)
    Console(soft_wrap=True).print(table)
