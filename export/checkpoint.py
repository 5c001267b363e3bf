"""Reading a Hugging Face checkpoint without torch: config and safetensors, lazily, tensor by tensor, as float32.

It knows file layouts (one file, shards with an index, prefixes) but no model family.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # also registers bfloat16 with numpy, which safetensors asks for by name
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from lesonnx.errors import CheckpointError

FLOAT8 = "F8_E4M3"
FLOAT_DTYPES = {"F32": 4, "F16": 2, "BF16": 2, FLOAT8: 1}
# What a float8 tensor's name gets for its scales: a factor for each block of rows and columns, whatever "inv" says.
SCALE_SUFFIX = "_scale_inv"
# Where the language model's tensors begin, in the spellings seen on the hub.
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
EMBEDDING = "embed_tokens.weight"
INDEX_NAME = "model.safetensors.index.json"
Float32 = NDArray[np.float32]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError names the file when it is missing or not an object."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {_reason(error)}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(document).__name__}")
    return document


def _reason(error: BaseException) -> str:
    """Why, without the path that an OSError repeats."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is, without its data."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * FLOAT_DTYPES.get(self.dtype, 1)


class Checkpoint:
    """A checkpoint directory. Names are canonical: without the language model's prefix ("layers.0.…"), and "lm_head.…".

    Not thread-safe; cheap to open again in another process. Files are mapped only while a tensor is copied out of them,
    so reading a large file leaves nothing of it in the process.
    """

    def __init__(self, directory: Path, anchor: str = EMBEDDING) -> None:
        """Open a directory; ``anchor`` is a tensor by whose place the language model's prefix is known."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such checkpoint directory")
        self.directory = directory
        self._anchor = anchor
        self.config = read_json(directory / "config.json")
        self.tensors = self._canonical(self._scan())

    def _scan(self) -> dict[str, TensorInfo]:
        index_path = self.directory / INDEX_NAME
        if index_path.exists():
            weight_map = read_json(index_path).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index_path}: expected a weight_map of tensor names to files")
            files = sorted({str(name) for name in weight_map.values()})
        else:
            files = ["model.safetensors"]
            weight_map = None
            if not (self.directory / files[0]).exists():
                raise CheckpointError(self._nothing_to_read())
        tensors: dict[str, TensorInfo] = {}
        for name in files:
            if Path(name).name != name:
                raise CheckpointError(f"{index_path}: file name {name!r} leaves the checkpoint")
            tensors |= self._scan_file(self.directory / name)
        for key in weight_map or ():
            if key not in tensors:
                raise CheckpointError(f"{index_path}: names tensor {key!r}, which its file does not hold")
        return tensors

    def _nothing_to_read(self) -> str:
        pickled = sorted(p.name for p in self.directory.glob("*.bin")) + sorted(
            p.name for p in self.directory.glob("*.pt*")
        )
        if pickled:
            return f"{self.directory / pickled[0]}: pickled checkpoints are refused; convert it to safetensors"
        shards = sorted(p.name for p in self.directory.glob("*.safetensors"))
        if shards:
            return f"{self.directory}: holds {shards[0]} but neither model.safetensors nor {INDEX_NAME}"
        return f"{self.directory}: no model.safetensors and no {INDEX_NAME}"

    def _scan_file(self, path: Path) -> dict[str, TensorInfo]:
        if not path.exists():
            raise CheckpointError(f"{path}: shard is missing, {INDEX_NAME} names it")
        try:
            with safe_open(path, framework="numpy") as file:
                found = {}
                for key in file.keys():  # noqa: SIM118  (not a mapping)
                    view = file.get_slice(key)
                    found[key] = TensorInfo(path, key, tuple(view.get_shape()), view.get_dtype())
                return found
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file: {_reason(error)}") from None

    def _canonical(self, tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
        for prefix in PREFIXES:
            if prefix + self._anchor in tensors:
                break
        else:
            raise CheckpointError(f"{self.directory}: no tensor named {self._anchor!r} under any of {list(PREFIXES)}")
        # "language_model.model." has its head beside it, as "language_model.lm_head.".
        beside = "language_model." if prefix == "language_model.model." else prefix
        canonical: dict[str, TensorInfo] = {}
        for key, info in tensors.items():
            canonical[key.removeprefix(prefix if key.startswith(prefix) else beside)] = info
        return canonical

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor; CheckpointError when it is missing."""
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.directory}: tensor {name!r} is missing") from None

    def read(self, name: str, index: int | slice | None = None) -> Float32:
        """A tensor (or one index, or a range, of its first axis) as a fresh contiguous float32 array.

        Float8 tensors are multiplied by their scales, so what is given is what the checkpoint means.
        """
        info = self.info(name)
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{info.file.name}: tensor {info.key!r} is {info.dtype}, expected one of {', '.join(FLOAT_DTYPES)}"
            )
        array = self.raw(name, index).astype(np.float32, order="C")
        if info.dtype == FLOAT8:
            array *= self._scales(name, index, array.shape)
        # Minimum and maximum show NaN and infinity without a second array.
        if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
            raise CheckpointError(f"{info.file}: tensor {info.key!r} holds values that are not finite")
        return array

    def raw(self, name: str, index: int | slice | None = None) -> NDArray[Any]:
        """As ``read``, but in the type in which it is stored, and without scales."""
        info = self.info(name)
        try:
            if info.dtype == FLOAT8:  # which safetensors does not give to numpy
                stored = _mapped_bytes(info).view(ml_dtypes.float8_e4m3fn).reshape(info.shape)
                return np.array(stored if index is None else stored[index], order="C")
            with safe_open(info.file, framework="numpy") as file:
                data = file.get_tensor(info.key) if index is None else file.get_slice(info.key)[index]
                return np.array(data, order="C")
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{info.file}: tensor {info.key!r} cannot be read: {error}") from None

    def scale_shape(self, name: str) -> tuple[int, ...]:
        """The shape that the scales of a float8 tensor must have."""
        *outer, rows, columns = self.info(name).shape
        block_rows, block_columns = self._weight_block_size(name)
        return (*outer, -(-rows // block_rows), -(-columns // block_columns))

    def _weight_block_size(self, name: str) -> tuple[int, int]:
        """The rows and columns that share a scale; CheckpointError where the config does not say."""
        text_config = self.config.get("text_config")
        quantization = self.config.get("quantization_config")
        if quantization is None and isinstance(text_config, dict):
            quantization = text_config.get("quantization_config")
        size = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
        if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
            info = self.info(name)
            raise CheckpointError(
                f"{info.file.name}: tensor {info.key!r} is {info.dtype}, which needs weight_block_size [rows, columns]"
                f" in the quantization_config of config.json, found {size!r}"
            )
        return size[0], size[1]

    def _scales(self, name: str, index: int | slice | None, shape: tuple[int, ...]) -> Float32:
        """The scale of every value that ``read`` gives of a float8 tensor."""
        block_rows, block_columns = self._weight_block_size(name)
        info = self.info(name)
        if isinstance(index, slice) and len(info.shape) == 2:
            rows = np.arange(info.shape[0])[index] // block_rows
            scales = self.read(name + SCALE_SUFFIX)[rows]
        else:
            scales = np.repeat(self.read(name + SCALE_SUFFIX, index), block_rows, axis=-2)[..., : shape[-2], :]
        return np.repeat(scales, block_columns, axis=-1)[..., : shape[-1]]

    def rows(self, name: str, rows_at_once: int) -> Iterator[Float32]:
        """A matrix in chunks of rows, for tensors too large to hold at once."""
        num_rows = self.info(name).shape[0]
        for start in range(0, num_rows, rows_at_once):
            yield self.read(name, slice(start, min(start + rows_at_once, num_rows)))


def _mapped_bytes(info: TensorInfo) -> NDArray[np.uint8]:
    """The bytes of a tensor, mapped: its place is in the file's header."""
    with info.file.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(header_bytes))[info.key]["data_offsets"]
    return np.memmap(info.file, np.uint8, "r", 8 + header_bytes + start, (end - start,))


def one_above_other(matrices: Sequence[Float32]) -> Float32:
    """Matrices of as many columns as one; a rehearsal's zeros stay one element."""
    if any(any(matrix.strides) for matrix in matrices):
        return np.concatenate(matrices)
    return np.broadcast_to(np.float32(0), (sum(map(len, matrices)), *matrices[0].shape[1:]))


class Weights:
    """A checkpoint seen by an architecture: every use states the shape it expects and is recorded.

    A *rehearsal* gives zeros without reading (one element, broadcast), so that a whole export can be walked through in
    a moment to find missing, misshapen and unused tensors before any work is done.
    """

    def __init__(self, checkpoint: Checkpoint, rehearsal: bool = False) -> None:
        self.checkpoint = checkpoint
        self.rehearsal = rehearsal
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Record the use of a tensor; CheckpointError where it is missing or has another shape."""
        info = self.checkpoint.info(name)
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file.name}: tensor {info.key!r} has shape {list(info.shape)}, expected {list(shape)}"
            )
        self.used.add(name)
        if info.dtype == FLOAT8:
            if len(shape) < 2:
                raise CheckpointError(f"{info.file.name}: tensor {info.key!r} is {FLOAT8}, expected a matrix for that")
            self.expect(name + SCALE_SUFFIX, self.checkpoint.scale_shape(name))

    def __call__(self, name: str, *shape: int) -> Float32:
        """The tensor of that name and shape, float32."""
        self.expect(name, shape)
        return self._zeros(shape) if self.rehearsal else self.checkpoint.read(name)

    def item(self, name: str, index: int, *shape: int) -> Float32:
        """One index of the first axis of a tensor of that (whole) shape: an expert of a fused tensor."""
        self.expect(name, shape)
        return self._zeros(shape[1:]) if self.rehearsal else self.checkpoint.read(name, index)

    def raw_item(self, name: str, dtype: str, index: int, *shape: int) -> NDArray[Any]:
        """As ``item``, in the stored type, which must be ``dtype`` (safetensors' word): codes that a family decodes."""
        self.expect(name, shape)
        info = self.checkpoint.info(name)
        if info.dtype != dtype:
            raise CheckpointError(f"{info.file.name}: tensor {info.key!r} is {info.dtype}, expected {dtype}")
        return np.zeros(shape[1:], np.uint8) if self.rehearsal else self.checkpoint.raw(name, index)

    def chunks(self, name: str, rows_at_once: int, *shape: int) -> Iterator[Float32]:
        """A matrix of that shape in chunks of rows."""
        self.expect(name, shape)
        if self.rehearsal:
            for start in range(0, shape[0], rows_at_once):
                yield self._zeros((min(rows_at_once, shape[0] - start), *shape[1:]))
        else:
            yield from self.checkpoint.rows(name, rows_at_once)

    def same(self, one: str, other: str, rows_at_once: int = 256) -> bool:
        """Whether two matrices hold the same values; stops at the first rows that differ."""
        checkpoint = self.checkpoint
        if checkpoint.info(one).shape != checkpoint.info(other).shape:
            return False
        pairs = zip(checkpoint.rows(one, rows_at_once), checkpoint.rows(other, rows_at_once), strict=True)
        return all(np.array_equal(a, b) for a, b in pairs)

    @staticmethod
    def _zeros(shape: tuple[int, ...]) -> Float32:
        return np.broadcast_to(np.float32(0), shape)
