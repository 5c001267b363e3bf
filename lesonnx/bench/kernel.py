"""`lesonnx bench kernel`: the expert kernel beside a MatMulNBits session, in one run on this machine.

Cold: experts are visited in turn, and there are more of them than caches hold. Hot: one expert again and again. Both
sides run through ONNX Runtime with bound inputs and outputs, in alternation, and the lower quartile is taken: other
work on the machine only ever adds time. A run has as many experts as a layer computes for a token of common models;
the kernel takes them all at once, sessions one after another.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from lesonnx import native
from lesonnx.doctor import memory_bandwidth, usable_cores
from lesonnx.errors import InputError
from lesonnx.manifest import ExpertKind, ExpertMatrix, page_ceil
from lesonnx.native.library import Library

TENSOR_ALIGNMENT = 64
COLD_BYTES = 128 << 20  # at least so many bytes of experts lie between two visits


@dataclass(frozen=True)
class Measurement:
    """One line of the table. Times are milliseconds (lower quartile) of a run of ``experts`` experts, ``rows`` each."""

    bits: int
    rows: int
    threads: int
    experts: int
    kernel_cold_ms: float
    session_cold_ms: float
    kernel_hot_ms: float
    session_hot_ms: float
    gigabytes_per_second: float  # the kernel's, cold
    bandwidth_share: float  # of what as many threads read from memory in this run


def random_kind(bits: int, block: int, hidden: int, intermediate: int) -> tuple[ExpertKind, np.ndarray]:
    """A SwiGLU kind and the bytes of a random expert of it, its length rounded up to pages."""
    rng = np.random.default_rng(bits)
    at = 0
    records: dict[str, ExpertMatrix] = {}
    for name, rows, columns in (
        ("gate_proj", intermediate, hidden),
        ("up_proj", intermediate, hidden),
        ("down_proj", hidden, intermediate),
    ):
        blocks = -(-columns // block)
        weight, at = at, at + rows * blocks * block * bits // 8
        scales = -(-at // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        at = -(-(scales + rows * blocks * 4) // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        record = {"rows": rows, "columns": columns, "bits": bits, "block_size": block}
        offsets = {"weight_offset_bytes": weight, "scales_offset_bytes": scales}
        records[name] = ExpertMatrix.model_validate(record | offsets)
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "length_bytes": at}
    kind = ExpertKind.model_validate({"name": "bench", "activation": "swiglu"} | sizes | records)
    expert = rng.integers(0, 256, page_ceil(at), np.uint8)
    for matrix in kind.matrices.values():
        scale = np.full(matrix.scales_bytes // 4, 1 / 2 ** (bits - 1) / np.sqrt(matrix.columns), np.float32)
        start = matrix.scales_offset_bytes or 0
        expert[start : start + scale.nbytes] = scale.view(np.uint8)
    return kind, expert


def last_level_cache_bytes() -> int:
    """The biggest cache that Linux reports; 32 MiB where it reports none."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith(("K", "M")):
            sizes.append(int(text[:-1]) << (10 if text.endswith("K") else 20))
    return max(sizes, default=32 << 20)


def _options(threads: int) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _alternate(runs: list[Callable[[int], None]], turns: int) -> list[float]:
    """Lower quartile, in milliseconds, of each of ``runs``, called in alternation with turn 0, 1, 2, ..."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(turns):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run(turn)
            taken.append(time.perf_counter() - start)
    return [float(np.quantile(taken, 0.25)) * 1e3 for taken in times]


def _first(run: Callable[[int], None], turn: int) -> None:
    run(0)


class _Case:
    """Sessions and bindings of one width of weights and one number of threads."""

    def __init__(self, library: Library, kind: ExpertKind, slab: np.ndarray, stride: int, threads: int) -> None:
        import onnxruntime as ort

        from lesonnx.bench.session_model import session_model
        from lesonnx_export.stage import stage_model

        self.kind, self.slab, self.count = kind, slab, len(slab) // stride
        self.offsets = np.arange(self.count, dtype=np.int64) * stride
        options = _options(threads)
        options.register_custom_ops_library(str(library.path))
        providers = ["CPUExecutionProvider"]
        self.kernel = ort.InferenceSession(stage_model(kind, 1).SerializeToString(), options, providers=providers)
        model = session_model(kind, slab[:stride]).SerializeToString()
        self.sessions = [ort.InferenceSession(model, _options(threads), providers=providers) for _ in range(self.count)]

    def bind(self, rows: int, experts: int) -> tuple[Callable[[int], None], Callable[[int], None]]:
        """Functions that compute the turn-th group of ``experts`` experts, by kernel and by sessions."""
        hidden_size = self.kind.hidden_size
        hidden = np.random.default_rng(0).standard_normal((rows * experts, hidden_size)).astype(np.float32)
        out = np.zeros((rows * experts, 1, hidden_size), np.float32)
        starts = np.arange(experts + 1, dtype=np.int64) * rows
        indices = np.arange(rows * experts, dtype=np.int64)
        groups = self.count // experts
        keep = (hidden, out, starts, indices)

        def bind_kernel(group: int) -> Any:
            binding = self.kernel.io_binding()
            offsets = self.offsets[group * experts : (group + 1) * experts]
            for name, array in (
                ("hidden", hidden), ("cache", self.slab), ("offsets", offsets), ("row_starts", starts),
                ("rows", indices),
            ):  # fmt: skip
                binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            binding.bind_output("expert_out", "cpu", 0, np.float32, out.shape, out.ctypes.data)
            return binding

        def bind_session(index: int) -> Any:
            part = slice(index % experts * rows, (index % experts + 1) * rows)
            binding = self.sessions[index].io_binding()
            x, y = hidden[part], out[part, 0]
            binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
            binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
            return binding

        kernel_bindings = [bind_kernel(group) for group in range(groups)]
        session_bindings = [bind_session(index) for index in range(groups * experts)]

        def run_kernel(turn: int) -> None:
            self.kernel.run_with_iobinding(kernel_bindings[turn % groups])

        def run_sessions(turn: int) -> None:
            first = turn % groups * experts
            for index in range(first, first + experts):
                self.sessions[index].run_with_iobinding(session_bindings[index])

        run_kernel.keep = keep  # type: ignore[attr-defined]  # the arrays that the bindings point into
        return run_kernel, run_sessions


def measure(
    bits: list[int], rows: list[int], threads: list[int], experts: int, hidden: int, intermediate: int, block: int
) -> tuple[dict[int, float], list[Measurement]]:
    """Memory bandwidth (bytes per second) by thread count, and the measurements.

    Raises InputError without the kernel's library or the exporter's packages.
    """
    path = native.library_path()
    if path is None:
        raise InputError("bench kernel: the kernel's library is not built; install a C compiler and lesonnx again")
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise InputError("bench kernel: needs the exporter's packages: pip install 'lesonnx[export]'") from None
    library = Library(path)
    bandwidth = {count: memory_bandwidth(library, count) for count in threads}
    measurements = []
    for width in bits:
        kind, expert = random_kind(width, block, hidden, intermediate)
        cold_bytes = max(4 * last_level_cache_bytes(), COLD_BYTES)
        count = max(2, -(-cold_bytes // (len(expert) * experts))) * experts
        slab = np.tile(expert, count)
        for thread_count in threads:
            case = _Case(library, kind, slab, len(expert), thread_count)
            for row_count in rows:
                runs = list(case.bind(row_count, experts))
                # A turn for every cold group, and for about a second.
                _alternate(runs, 2)
                probe = sum(_alternate(runs, 4))
                turns = int(np.clip(1000 / probe, 11, max(11, 2 * count // experts)))
                cold = _alternate(runs, turns)
                # Each twice in a row, and the second counts: its weights are in the caches as far as they fit.
                twice: list[Callable[[int], None]] = [partial(_first, run) for run in runs for _ in range(2)]
                hot = _alternate(twice, min(turns, 50))
                again = memory_bandwidth(library, thread_count, repeats=2)
                bandwidth[thread_count] = max(bandwidth[thread_count], again)
                speed = kind.length_bytes * experts / cold[0] * 1e3
                measurements.append(
                    Measurement(
                        width, row_count, thread_count, experts, cold[0], cold[1], hot[1], hot[3], speed / 1e9, 0.0
                    )
                )  # fmt: skip
            del case
    # Memory is measured again beside every line, so its speed is known only now.
    shares = [m.gigabytes_per_second * 1e9 / bandwidth[m.threads] for m in measurements]
    return bandwidth, [replace(m, bandwidth_share=share) for m, share in zip(measurements, shares, strict=True)]


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> list[int]:
    if value is None:
        return sorted({1, usable_cores()})
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"{value!r}: expected positive numbers separated by commas")
    return numbers


@click.command()
@click.option("--bits", default="4,8,2", callback=_numbers, help="Widths of weights.", show_default=True)
@click.option("--rows", default="1,2,4,8,16,64", callback=_numbers, help="Rows for each expert.", show_default=True)
@click.option("--threads", default=None, callback=_numbers, help="Thread counts.  [default: 1 and all cores]")
@click.option(
    "--experts", default=8, type=click.IntRange(1, 64), help="Experts in one run, as a layer has.", show_default=True
)
@click.option("--hidden-size", default=2048, type=click.IntRange(16), show_default=True)
@click.option("--intermediate-size", default=512, type=click.IntRange(16), show_default=True)
@click.option("--block-size", default="128", type=click.Choice(["16", "32", "64", "128"]), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def kernel(
    bits: list[int], rows: list[int], threads: list[int], experts: int, hidden_size: int,
    intermediate_size: int, block_size: str, as_json: bool,
) -> None:  # fmt: skip
    """Time the expert kernel beside MatMulNBits sessions, weights cold and hot."""
    if not set(bits) <= {2, 4, 8}:
        raise click.BadParameter(f"{bits}: expected 2, 4 or 8", param_hint="--bits")
    bandwidth, measurements = measure(bits, rows, threads, experts, hidden_size, intermediate_size, int(block_size))
    isa = native.isa()
    if as_json:
        import onnxruntime as ort

        document = {
            "isa": isa,
            "onnxruntime_version": ort.__version__,
            "cores": os.cpu_count(),
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "block_size": int(block_size),
            "memory_bytes_per_second": {str(count): round(value) for count, value in bandwidth.items()},
            "rows": [asdict(measurement) for measurement in measurements],
        }
        click.echo(json.dumps(document, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Expert {hidden_size} x {intermediate_size}, block {block_size}, {isa}; milliseconds")
    for heading in (
        "bits", "rows", "threads", "kernel cold", "session cold", "ratio", "kernel hot", "session hot", "ratio", "GB/s",
        "of memory",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for m in measurements:
        table.add_row(
            str(m.bits), str(m.rows), str(m.threads), f"{m.kernel_cold_ms:.3f}", f"{m.session_cold_ms:.3f}",
            f"{m.kernel_cold_ms / m.session_cold_ms:.2f}", f"{m.kernel_hot_ms:.3f}", f"{m.session_hot_ms:.3f}",
            f"{m.kernel_hot_ms / m.session_hot_ms:.2f}", f"{m.gigabytes_per_second:.1f}", f"{m.bandwidth_share:.0%}",
        )  # fmt: skip
    console = Console(width=max(Console().width, 110))  # the table is worth a long line
    console.print(table)
    speeds = ", ".join(f"{value / 1e9:.1f} GB/s on {count}" for count, value in bandwidth.items())
    console.print(f"memory reads in this run: {speeds} thread(s)")
