"""Building one ONNX graph: nodes, small constants inside the file, weights in an external data file.

It knows ONNX and the operators' plain forms, but no model and no bundle.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from lesonnx.errors import LesonnxError
from lesonnx.manifest import TENSOR_ALIGNMENT_BYTES, Dtype, Value

# Opset 23 has RMSNormalization and RotaryEmbedding; ONNX Runtime 1.24 (iOS) and later run it on the CPU.
OPSET = 23
IR_VERSION = 10
MICROSOFT = "com.microsoft"
TYPES: dict[Dtype, int] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "bool": TensorProto.BOOL,
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
}
# Larger constants go to the external data file.
INLINE_BYTES = 1024
# A part must hold what it names even where a graph optimiser would fold it, and protobuf ends at 2 GiB.
PROTOBUF_LIMIT_BYTES = 2**31 - 1


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that already lies in the external data file."""

    offset_bytes: int
    length_bytes: int
    dtype: Dtype
    shape: tuple[int, ...]


class DenseStore:
    """The growing ``dense.bin`` of an export. Single writer; without a path it rehearses: sizes are counted, no more.

    Tensors stored under a key can be found again, which is how a tied head shares the embedding's bytes.
    """

    location = "dense.bin"

    def __init__(self, path: Path | None, start_bytes: int = 0) -> None:
        self.end_bytes = start_bytes
        self.shared: dict[str, StoredTensor] = {}
        self._file: BinaryIO | None = None
        if path is not None:
            # What a broken run wrote behind the last finished part goes.
            self._file = path.open("r+b" if path.exists() else "w+b")
            self._file.truncate(start_bytes)
            self._file.seek(start_bytes)

    @property
    def rehearsal(self) -> bool:
        return self._file is None

    def begin(self, dtype: Dtype, shape: tuple[int, ...]) -> StoredTensor:
        """Room for a tensor at the end; its bytes follow by ``write``."""
        start = -(-self.end_bytes // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
        length = math.prod(shape) * np.dtype(dtype).itemsize
        if self._file is not None:
            self._file.write(b"\0" * (start - self.end_bytes))
        self.end_bytes = start + length
        return StoredTensor(start, length, dtype, shape)

    def write(self, array: NDArray[Any]) -> None:
        if self._file is not None:
            self._file.write(np.ascontiguousarray(array).data)

    def add(self, array: NDArray[Any]) -> StoredTensor:
        """Store a whole array; only its own bytes are written, never a copy in memory of more."""
        dtype = array.dtype.name
        if dtype not in TYPES:
            raise LesonnxError(f"cannot store a tensor of type {dtype}")
        stored = self.begin(dtype, array.shape)
        self.write(array)
        return stored

    def sync(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass
class Graph:
    """One ONNX graph under construction. Values are named by strings, as ONNX does."""

    name: str
    store: DenseStore
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    opset: int = OPSET
    _constants: dict[tuple[str, tuple[int, ...], bytes], str] = field(default_factory=dict)
    _count: int = 0

    def fresh(self, hint: str) -> str:
        self._count += 1
        return f"{hint}_{self._count}"

    def input(self, name: str, dtype: Dtype, shape: Sequence[int | str]) -> str:
        """A graph input; asking again for the same name gives the same one."""
        if all(value.name != name for value in self.inputs):
            self.inputs.append(Value(name=name, dtype=dtype, shape=list(shape)))
        return name

    def output(self, source: str, name: str, dtype: Dtype, shape: Sequence[int | str]) -> str:
        """Give a value of the graph to the outside under a name, which is its name from then on."""
        self.nodes.append(helper.make_node("Identity", [source], [name], name=self.fresh("give")))
        self.outputs.append(Value(name=name, dtype=dtype, shape=list(shape)))
        return name

    def op(self, op_type: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """A node with one output, whose name it gives. An empty string leaves an optional input out."""
        return self.ops(op_type, 1, *inputs, domain=domain, **attributes)[0]

    def ops(self, op_type: str, num_outputs: int, *inputs: str, domain: str = "", **attributes: Any) -> tuple[str, ...]:
        """A node with several outputs."""
        names = tuple(self.fresh(op_type.lower()) for _ in range(num_outputs))
        self.nodes.append(helper.make_node(op_type, inputs, names, name=names[0], domain=domain, **attributes))
        return names

    def stack(self, count: str, body: Callable[[str], str], dtype: Dtype, shape: Sequence[int | str]) -> str:
        """What ``body`` gives for every number (int64, a scalar) below ``count``, stacked on a new first axis.

        The nodes that ``body`` makes may use any value that is there before; each result has ``dtype`` and ``shape``.
        """
        inputs = [Value(name=self.fresh("number"), dtype="int64", shape=[]), self._go()]

        def outputs() -> list[Value]:
            given = Value(name=body(inputs[0].name), dtype=dtype, shape=list(shape))
            return [self._go(self.op("Identity", inputs[1].name)), given]

        return self.op("Loop", count, "", body=self._subgraph(inputs, outputs))

    def choose(
        self,
        condition: str,
        then: Callable[[], str],
        otherwise: Callable[[], str],
        dtype: Dtype,
        shape: Sequence[int | str],
    ) -> str:
        """One of two values by a scalar condition; the nodes of the other are not run. As ``stack`` otherwise."""

        def branch(make: Callable[[], str]) -> onnx.GraphProto:
            return self._subgraph([], lambda: [Value(name=make(), dtype=dtype, shape=list(shape))])

        return self.op("If", condition, then_branch=branch(then), else_branch=branch(otherwise))

    def _go(self, name: str = "") -> Value:
        """A loop's condition, which goes through it untouched."""
        return Value(name=name or self.fresh("go"), dtype="bool", shape=[])

    def _subgraph(self, inputs: list[Value], make: Callable[[], list[Value]]) -> onnx.GraphProto:
        """The nodes that ``make`` adds, as a graph inside this one, whose names they share."""
        nodes, self.nodes = self.nodes, []
        outputs = make()
        made, self.nodes = self.nodes, nodes
        return helper.make_graph(
            made, self.fresh("inner"), [value_info(v) for v in inputs], [value_info(v) for v in outputs]
        )

    def constant(self, value: Any, dtype: Dtype = "float32") -> str:
        """A constant inside the file (small) or in the store; equal small ones are one."""
        array = np.asarray(value, dtype=dtype)
        if array.nbytes > INLINE_BYTES:
            return self.weight("constant", array)
        return self._inline(array)

    def double(self, value: float) -> str:
        """A float64 constant, for arithmetic inside a part: no value between parts has that type."""
        return self._inline(np.asarray(value, np.float64))

    def _inline(self, array: NDArray[Any]) -> str:
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._constants[key] = self.fresh("constant")
            self.initializers.append(numpy_helper.from_array(array, name))
        return self._constants[key]

    def weight(self, hint: str, array: NDArray[Any]) -> str:
        """A weight in the external data file."""
        return self.stored(hint, self.store.add(array))

    def stored(self, hint: str, tensor: StoredTensor) -> str:
        """An initializer over bytes that lie in the store already."""
        name = self.fresh(hint)
        self.initializers.append(
            external_tensor(name, tensor.dtype, tensor.shape, self.store.location, tensor.offset_bytes)
        )
        return name

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._without_identities(),
            self.name,
            [value_info(value) for value in self.inputs],
            [value_info(value) for value in self.outputs],
            self.initializers,
        )
        domains = {node.domain for node in graph.node} - {""}
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(domain, 1) for domain in sorted(domains))]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="lesonnx")
        if model.ByteSize() > PROTOBUF_LIMIT_BYTES:
            raise LesonnxError(f"{self.name}: the graph itself is larger than protobuf allows")
        return model

    def _without_identities(self) -> list[onnx.NodeProto]:
        """Rename what an output's Identity copies, where nothing forbids it, so that no run pays for a copy."""
        given = {value.name for value in (*self.inputs, *self.outputs)} | {tensor.name for tensor in self.initializers}
        rename: dict[str, str] = {}
        kept = []
        for node in self.nodes:
            source = node.input[0] if node.op_type == "Identity" else ""
            if source and source not in given and source not in rename:
                rename[source] = node.output[0]
            else:
                kept.append(node)
        for node in kept:
            node.input[:] = [rename.get(name, name) for name in node.input]
            node.output[:] = [rename.get(name, name) for name in node.output]
        return kept


def value_info(value: Value) -> onnx.ValueInfoProto:
    """The ONNX declaration of a value; strings in the shape become symbolic dimensions."""
    return helper.make_tensor_value_info(value.name, TYPES[value.dtype], value.shape)


def external_tensor(
    name: str, dtype: Dtype, shape: Sequence[int], location: str, offset_bytes: int
) -> onnx.TensorProto:
    """An initializer whose bytes lie at an offset of a file beside the model."""
    tensor = TensorProto(name=name, data_type=TYPES[dtype], dims=list(shape))
    tensor.data_location = TensorProto.EXTERNAL
    length = int(np.prod(shape)) * np.dtype(dtype).itemsize
    for key, value in (("location", location), ("offset", offset_bytes), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor
