"""The kernel's plain C functions through ctypes: for tests, the bench and `lesonnx doctor`.

The runner does not use it: ONNX Runtime loads the library itself. Calls release the interpreter lock and are
thread-safe.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

import numpy as np

from lesonnx.errors import InputError, LesonnxError
from lesonnx.manifest import ExpertKind, ExpertMatrix

ACTIVATIONS = {"swiglu": 0, "geglu": 1, "reglu": 2, "swiglu_clamped": 3}
_MESSAGE_BYTES = 256


class Matrix(ctypes.Structure):
    """``lesonnx_matrix``."""

    _fields_ = [
        (name, c_int64)
        for name in ("rows", "columns", "bits", "block_size", "weight_offset", "scales_offset", "bias_offset")
    ]


class Kind(ctypes.Structure):
    """``lesonnx_kind``."""

    _fields_ = [
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("expert_bytes", c_int64),
        ("activation", c_int64),
        ("alpha", c_float),
        ("limit", c_float),
        ("gate", Matrix),
        ("up", Matrix),
        ("down", Matrix),
    ]


class Batch(ctypes.Structure):
    """``lesonnx_batch``."""

    _fields_ = [
        ("hidden", c_void_p),
        ("tokens", c_int64),
        ("slots", c_int64),
        ("cache", c_void_p),
        ("cache_bytes", c_int64),
        ("offsets", c_void_p),
        ("num_experts", c_int64),
        ("row_starts", c_void_p),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("output", c_void_p),
    ]


def matrix_struct(matrix: ExpertMatrix) -> Matrix:
    """The C struct of a manifest's matrix; absent offsets become -1."""
    scales, bias = matrix.scales_offset_bytes, matrix.bias_offset_bytes
    return Matrix(
        matrix.rows,
        matrix.columns,
        matrix.bits,
        matrix.block_size,
        matrix.weight_offset_bytes,
        -1 if scales is None else scales,
        -1 if bias is None else bias,
    )


def kind_struct(kind: ExpertKind) -> Kind:
    """The C struct of a manifest's kind of expert."""
    return Kind(
        kind.hidden_size,
        kind.intermediate_size,
        kind.length_bytes,
        ACTIVATIONS[kind.activation],
        kind.alpha,
        kind.limit,
        matrix_struct(kind.gate_proj),
        matrix_struct(kind.up_proj),
        matrix_struct(kind.down_proj),
    )


def _floats(array: np.ndarray, name: str) -> np.ndarray:
    if array.dtype != np.float32 or not array.flags.c_contiguous:
        raise LesonnxError(f"{name}: expected contiguous float32, got {array.dtype}")
    return array


class Library:
    """The loaded library. Holds no state of its own but the choice of instruction set, which is the process's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.c = ctypes.CDLL(str(path))
        except OSError as error:
            raise LesonnxError(f"{path}: cannot be loaded: {error}") from None
        self.c.lesonnx_isa.restype = c_char_p
        self.c.lesonnx_isas.restype = c_char_p
        self.c.lesonnx_use_isa.argtypes = [c_char_p]
        self.c.lesonnx_use_isa.restype = c_int
        self.c.lesonnx_read_memory.argtypes = [c_void_p, c_size_t]
        self.c.lesonnx_read_memory.restype = c_uint64
        self.c.lesonnx_matmul.argtypes = [
            POINTER(Matrix), c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_char_p, c_size_t,
        ]  # fmt: skip
        self.c.lesonnx_experts.argtypes = [POINTER(Kind), POINTER(Batch), c_void_p, c_void_p, c_char_p, c_size_t]

    def isa(self) -> str:
        """The instruction set in use; InputError if LESONNX_ISA names one that is not there."""
        name = self.c.lesonnx_isa()
        if name is None:
            raise InputError(f"LESONNX_ISA: expected one of {', '.join(self.isas())}")
        return str(name.decode())

    def isas(self) -> list[str]:
        """The instruction sets of this machine, best first."""
        return str(self.c.lesonnx_isas().decode()).split()

    def use_isa(self, name: str | None) -> None:
        """Uses ``name`` from the next call on, in the whole process; None chooses again."""
        if self.c.lesonnx_use_isa(None if name is None else name.encode()):
            raise InputError(f"instruction set {name!r}: expected one of {', '.join(self.isas())}")

    def read_memory(self, address: int, length_bytes: int) -> int:
        """Reads memory as fast as one thread can; returns a checksum."""
        return int(self.c.lesonnx_read_memory(address, length_bytes))

    def matmul(self, matrix: ExpertMatrix, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
        """``x`` [m, columns] times the matrix that lies in the bytes ``weights``: float32 [m, rows]."""
        out = np.empty((x.shape[0], matrix.rows), np.float32)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        status = self.c.lesonnx_matmul(
            matrix_struct(matrix), weights.ctypes.data, weights.nbytes, _floats(x, "x").ctypes.data, x.shape[0],
            out.ctypes.data, message, _MESSAGE_BYTES,
        )  # fmt: skip
        if status:
            raise LesonnxError(message.value.decode())
        return out

    def experts(
        self,
        kind: ExpertKind,
        slots: int,
        hidden: np.ndarray,
        cache: np.ndarray,
        offsets: Sequence[int] | np.ndarray,
        row_starts: Sequence[int] | np.ndarray,
        rows: Sequence[int] | np.ndarray,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """What the operator computes, on the calling thread: float32 [T, slots, H]; unnamed rows stay as in ``out``."""
        if out is None:
            out = np.zeros((hidden.shape[0], slots, kind.hidden_size), np.float32)
        at, starts, flat = (np.ascontiguousarray(values, np.int64) for values in (offsets, row_starts, rows))
        if hidden.shape[1] != kind.hidden_size or len(starts) != len(at) + 1:
            raise LesonnxError(f"hidden {hidden.shape} or row_starts {starts.shape} has the wrong shape")
        batch = Batch(
            _floats(hidden, "hidden").ctypes.data, hidden.shape[0], slots, cache.ctypes.data, cache.nbytes,
            at.ctypes.data, len(at), starts.ctypes.data, flat.ctypes.data, len(flat), out.ctypes.data,
        )  # fmt: skip
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        if self.c.lesonnx_experts(kind_struct(kind), batch, None, None, message, _MESSAGE_BYTES):
            raise LesonnxError(message.value.decode())
        return out
