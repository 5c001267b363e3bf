"""Graphs of twins: fixed shapes, operators that accelerators take, float16 and float32 side by side.

It knows ONNX and what providers take, no model. What a twin must keep to is checked here, graph by graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from lesonnx.errors import InputError, LesonnxError
from lesonnx.manifest import Dtype, Target
from lesonnx_export.graph import INLINE_BYTES, TYPES, DenseStore, Graph, StoredTensor

# What the providers of a target take: ONNX Runtime 1.24.2's CoreML (ML programs), and NNAPI besides.
_EVERYWHERE = frozenset(
    {
        *("Add", "Cast", "Clip", "Concat", "Div", "Exp", "MatMul", "Max", "Mul", "ReduceMean", "Relu", "Reshape"),
        *("Sigmoid", "Slice", "Softmax", "Sqrt", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze"),
    }
)
_COREML = _EVERYWHERE | {"LayerNormalization"}
TAKEN: dict[Target, frozenset[str]] = {"ios": _COREML, "desktop": _COREML, "android": _EVERYWHERE}
# Providers know operators up to some version of ONNX: this one all of them.
TWIN_OPSET = 17
# A longer axis fails when CoreML loads the model; more axes it does not reshape, NNAPI not at all.
LONGEST_AXIS = 16384
MOST_AXES = 4
FLOATS = ("float16", "float32")


class TwinStore(DenseStore):
    """The growing ``twins.bin``: weights of all twins, each once. It hashes what it writes."""

    location = "twins.bin"

    def __init__(self, path: Path | None) -> None:
        super().__init__(path)
        self.digest = hashlib.sha256()

    def write(self, array: NDArray[Any]) -> None:
        if not self.rehearsal:
            self.digest.update(np.ascontiguousarray(array).data)
        super().write(array)


@dataclass
class TwinGraph(Graph):
    """A graph for ``rows`` tokens over caches of ``capacity`` tokens.

    Symbolic sizes become numbers. Values carry their type: where float16 meets float32 it is cast up, and a constant
    takes the type of what it is used with. ``half`` is what large products and attention compute in.
    """

    rows: int = 1
    capacity: int = 1
    half: Dtype = "float16"
    opset: int = TWIN_OPSET
    _types: dict[str, Dtype] = field(default_factory=dict)
    # Float constants, stored when their use says of which type.
    _weak: dict[str, NDArray[Any]] = field(default_factory=dict)
    # Values that would be too long side by side, with their lengths: what stands for them can only be split again.
    _joined: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    def _sizes(self, shape: Sequence[int | str]) -> list[int | str]:
        sizes = {"T": self.rows, "S": self.capacity, "R": 1}
        return [sizes.get(size, size) if isinstance(size, str) else size for size in shape]

    def input(self, name: str, dtype: Dtype, shape: Sequence[int | str]) -> str:
        self._types[name] = dtype
        return super().input(name, dtype, self._sizes(shape))

    def output(self, source: str, name: str, dtype: Dtype, shape: Sequence[int | str]) -> str:
        source = self.cast(source, dtype)
        self._types[name] = dtype
        return super().output(source, name, dtype, self._sizes(shape))

    def stored(self, hint: str, tensor: StoredTensor) -> str:
        name = super().stored(hint, tensor)
        self._types[name] = tensor.dtype
        return name

    def constant(self, value: Any, dtype: Dtype = "float32") -> str:
        if dtype not in FLOATS:
            return super().constant(value, dtype)
        name = self.fresh("weak")
        self._weak[name] = np.asarray(value, np.float32)
        return name

    def weight(self, hint: str, array: NDArray[Any]) -> str:
        """A constant in the store, where an equal one is found again."""
        key = f"{array.dtype.name}.{array.shape}.{hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()}"
        if key not in self.store.shared:
            self.store.shared[key] = self.store.add(array)
        return self.stored(hint, self.store.shared[key])

    def cast(self, x: str, dtype: Dtype) -> str:
        """x as another float type; x itself where it has that type or is no float."""
        if x in self._weak:
            return self._strong(x, dtype)
        if self._types.get(x) == dtype or self._types.get(x) not in FLOATS or dtype not in FLOATS:
            return x
        return self.op("Cast", x, to=TYPES[dtype])

    def _strong(self, name: str, dtype: Dtype) -> str:
        array = self._weak[name].astype(dtype)
        made = self.weight("constant", array) if array.nbytes > INLINE_BYTES else super().constant(array, dtype)
        self._types[made] = dtype
        return made

    def ops(self, op_type: str, num_outputs: int, *inputs: str, domain: str = "", **attributes: Any) -> tuple[str, ...]:
        if op_type == "Split":
            return self._slices(*inputs, **attributes)
        if op_type == "Cast":
            found: Dtype = next(name for name, number in TYPES.items() if number == attributes["to"])
        else:
            types = {self._types[name] for name in inputs if self._types.get(name) in FLOATS}
            found = "float32" if "float32" in types or not types else "float16"
            inputs = tuple(self.cast(name, found) for name in inputs)
        names = super().ops(op_type, num_outputs, *inputs, domain=domain, **attributes)
        self._types |= dict.fromkeys(names, found)
        return names

    def _slices(self, x: str, sizes: str, *, axis: int) -> tuple[str, ...]:
        """A split into unequal pieces, which NNAPI does not take, as slices."""
        if x in self._joined:  # by whoever fused them, so into the same lengths
            return tuple(name for name, _ in self._joined[x])
        lengths = onnx.numpy_helper.to_array(next(tensor for tensor in self.initializers if tensor.name == sizes))
        ends = np.cumsum(lengths)
        bounds = zip(ends - lengths, ends, strict=True)
        return tuple(self.slice(x, axis, int(start), int(end)) for start, end in bounds)

    def join(self, pieces: list[tuple[str, int]]) -> str:
        """What a split along the last axis gives back as those pieces; nothing else can be done with it."""
        name = self.fresh("joined")
        self._joined[name] = pieces
        return name

    def slice(self, x: str, axis: int, start: int, end: int) -> str:
        """Elements start to end of an axis."""
        return self.op("Slice", x, *(self.constant([value], "int64") for value in (start, end, axis, 1)))

    def reshape(self, x: str, *shape: int) -> str:
        return self.op("Reshape", x, self.constant(shape, "int64"))

    def model(self) -> onnx.ModelProto:
        used = {name for node in self.nodes for name in node.input}
        self.initializers = [tensor for tensor in self.initializers if tensor.name in used]
        return super().model()


def check_twin(model: onnx.ModelProto, what: str, target: Target) -> None:
    """InputError, naming the first thing, where a twin holds what the target's providers do not take."""
    inputs = {value.name for value in model.graph.input}
    for node in model.graph.node:
        if node.domain or node.op_type not in TAKEN[target]:
            raise InputError(
                f"--accelerate: {what} needs the operator {node.op_type}, which twins for {target} cannot have"
            )
        if node.op_type == "Cast" and node.input[0] in inputs:
            raise LesonnxError(
                f"{what} casts its input {node.input[0]!r}: CoreML takes no Cast without a node before it"
            )
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        first = str(error).strip().splitlines()[-1]
        raise InputError(f"--accelerate: {what} cannot be built of fixed shapes: {first}") from None
    for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        shape = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in value.type.tensor_type.shape.dim]
        if not all(0 < size <= LONGEST_AXIS for size in shape) or len(shape) > MOST_AXES:
            raise InputError(
                f"--accelerate: {what} has a value of shape {shape},"
                f" expected at most {MOST_AXES} axes of 1 to {LONGEST_AXIS}"
            )
    known = {value.name for value in (*inferred.graph.value_info, *inferred.graph.output)}
    if unknown := next((name for node in model.graph.node for name in node.output if name not in known), None):
        raise LesonnxError(f"{what}: the shape of {unknown!r} is not known")
