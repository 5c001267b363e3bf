"""ONNX Runtime as this package uses it: version check, threads, session options, bindings.

It knows no bundle, only how a manifest states the values of a part.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from lesonnx.errors import BundleError, LesonnxError
from lesonnx.manifest import Part, Positions, Selection, Twin

_ERROR_SEVERITY = 3
# What ONNX Runtime calls types that have another name here.
_ORT_TYPES = {"float32": "float"}


def check_version(at_least: str) -> None:
    """BundleError where the installed ONNX Runtime is older than a bundle needs."""
    if _version(onnxruntime.__version__) < _version(at_least):
        raise BundleError(f"the bundle needs ONNX Runtime {at_least} or later, found {onnxruntime.__version__}")


def _version(text: str) -> tuple[int, ...]:
    numbers = []
    for piece in text.split(".")[:3]:
        digits = "".join(ch for ch in piece if ch.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def session_options(*, optimise: bool, num_threads: int | None = None) -> onnxruntime.SessionOptions:
    """Options that every session shares: threads that sleep when there is nothing to do, no arena, no memory pattern.

    Each session has threads of its own, ``num_threads`` of them (None: one a core). The one pool that all
    could share always spins between runs, which Python cannot turn off: it takes a core from the reading threads, and
    from whatever else runs. An arena a session would keep each part's largest prefill activations for good.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads or num_cores()
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = _ERROR_SEVERITY
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    return options


def open_session(
    path: Path,
    options: onnxruntime.SessionOptions,
    providers: Iterable[str | tuple[str, dict[str, str]]] | None = ("CPUExecutionProvider",),
) -> onnxruntime.InferenceSession:
    """A session of a model file, with these providers or none; BundleError where ONNX Runtime does not take it.

    None for ``providers``: the options name them.
    """
    listed = None if providers is None else list(providers)
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=listed, disable_fallback=True)
    except Exception as error:  # noqa: BLE001  (ONNX Runtime raises many unrelated types)
        raise BundleError(f"{path}: ONNX Runtime does not take it: {first_line(error)}") from None


def check_part(session: onnxruntime.InferenceSession, part: Part | Twin | Selection | Positions, path: Path) -> None:
    """BundleError where a part's model does not take and give what the manifest says of it."""
    for stated, found, what in (
        (part.inputs, session.get_inputs(), "input"),
        (part.outputs, session.get_outputs(), "output"),
    ):
        by_name = {value.name: (value.type, list(value.shape)) for value in found}
        for value in stated:
            expected = (f"tensor({_ORT_TYPES.get(value.dtype, value.dtype)})", value.shape)
            if by_name.get(value.name) != expected:
                type_and_shape = by_name.get(value.name)
                there = "not there" if type_and_shape is None else f"{type_and_shape[0]} {type_and_shape[1]}"
                raise BundleError(f"{path}: {what} {value.name!r} is {there}, expected {expected[0]} {expected[1]}")
        if surplus := sorted(set(by_name) - {value.name for value in stated}):
            raise BundleError(f"{path}: {what} {surplus[0]!r} is not in the manifest")


def first_line(error: BaseException) -> str:
    """An exception's message on one line."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", " ".join(str(error).split()))
    return text if len(text) <= 400 else f"{text[:200]} … {text[-200:]}"


class Binding:
    """A session bound to arrays that stay where they are: a run reads and writes them in place.

    Owns nothing but keeps the arrays alive. Not thread-safe.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
    ) -> None:
        self._session = session
        self._arrays = [*inputs.values(), *outputs.values()]
        self._binding = session.io_binding()
        try:
            for name, array in inputs.items():
                self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            for name, array in outputs.items():
                self._binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        except Exception as error:  # noqa: BLE001  (ONNX Runtime raises many unrelated types)
            raise BundleError(f"a part does not take what the manifest says: {first_line(error)}") from None

    def run(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # noqa: BLE001  (ONNX Runtime raises many unrelated types)
            raise LesonnxError(f"ONNX Runtime failed in a step: {first_line(error)}") from None


def empty_aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array on a 64-byte boundary, zeroed."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    aligned: NDArray[Any] = raw[start : start + size].view(dtype).reshape(shape)
    return aligned
