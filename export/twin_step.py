"""The building blocks of twins: those of dense parts, in plain operators of fixed shape.

Products with weights and attention are float16 (or float32, if so chosen), the residual, norms, rotary positions and
the router float32, as everywhere: what is rounded there would move the choice of experts. It knows no family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lesonnx.manifest import Dtype
from lesonnx.twin_wiring import LOGITS_OF_ROUTER, rows_name
from lesonnx_export.blocks import POSITION_IDS, Precision, Step
from lesonnx_export.checkpoint import Float32, Weights, one_above_other
from lesonnx_export.graph import Graph
from lesonnx_export.rope import Rope
from lesonnx_export.twin_graph import LONGEST_AXIS, TwinGraph

# Added to the scores of what a token does not see: float16 holds it, and its exponential is zero.
UNSEEN = -30000.0


@dataclass
class Positions:
    """What twins take from the one part that computes it for all: angles of rotary positions, and masks of caches.

    A mask is 0 where a token sees a cached one and `UNSEEN` elsewhere: [1,S], or [T,S] where there is a window.
    """

    capacity: int
    ropes: dict[bytes, tuple[int, Rope]] = field(default_factory=dict)
    windows: set[int | None] = field(default_factory=set)

    def angles(self, graph: Graph, rope: Rope) -> tuple[str, str]:
        """Cosines and sines [1,T,1,r/2] of a twin, as its inputs."""
        number, _ = self.ropes.setdefault(rope.key, (len(self.ropes), rope))
        shape: list[int | str] = [1, "T", 1, rope.rotary_dim // 2]
        return graph.input(f"cosines_{number}", "float32", shape), graph.input(f"sines_{number}", "float32", shape)

    def mask(self, graph: Graph, window: int | None) -> str:
        """The mask of the cache, as an input of a twin."""
        self.windows.add(window)
        return graph.input(*self._mask(window))

    def _mask(self, window: int | None) -> tuple[str, Dtype, list[int | str]]:
        name = "mask" if window is None else f"mask_{window}"
        return name, "float32", [1 if window is None else "T", self.capacity]

    def build(self, graph: Graph, weights: Weights, precision: Precision) -> None:
        """The part that computes them, from ``position_ids`` [1,T], for the CPU."""
        step = Step(graph, weights, precision)
        for number, rope in self.ropes.values():
            for name, angles in zip(("cosines", "sines"), step.rotary(rope), strict=True):
                shaped = graph.op("Unsqueeze", angles, graph.constant([2], "int64"))
                graph.output(shaped, f"{name}_{number}", "float32", [1, "T", 1, rope.rotary_dim // 2])
        positions = graph.input(POSITION_IDS, "int64", [1, "T"])
        column = graph.op("Reshape", positions, graph.constant([-1, 1], "int64"))
        first = graph.op("Slice", column, *(graph.constant([value], "int64") for value in (0, 1, 0)))
        slots = graph.constant(np.arange(self.capacity), "int64")
        past = graph.op("Less", slots, first)
        for window in sorted(self.windows, key=lambda size: size or 0):
            seen = past
            if window is not None:
                earliest = graph.op("Sub", column, graph.constant(window, "int64"))
                seen = graph.op("And", past, graph.op("Greater", slots, earliest))
            mask = graph.op("Where", seen, graph.constant(0.0), graph.constant(UNSEEN))
            graph.output(mask, *self._mask(window))


@dataclass
class RouterCut(Step):
    """A router without its linear maps: their results are inputs, and the maps are noted for whoever computes them."""

    linears: list[tuple[str, int, int, str | None]] = field(default_factory=list)

    def router_linear(self, x: str, name: str, rows: int, columns: int, bias: str | None = None) -> str:
        self.linears.append((name, rows, columns, bias))
        return self.graph.input(self.input_name(len(self.linears) - 1), "float32", ["T", rows])

    @staticmethod
    def input_name(number: int) -> str:
        return f"{LOGITS_OF_ROUTER}_{number}"

    def column(self, rows: str, value: float) -> str:
        return super().column(self.input_name(0), value)


@dataclass
class TwinStep(Step):
    """One twin under construction; ``graph`` is a `TwinGraph`. ``piece``: which part of the logits `head` gives."""

    positions: Positions = field(default_factory=lambda: Positions(1))
    piece: int = 0

    @property
    def twin(self) -> TwinGraph:
        if not isinstance(self.graph, TwinGraph):
            raise TypeError("a twin's step needs a twin's graph")
        return self.graph

    # -- weights ---------------------------------------------------------------------------------------------------

    def norm(self, x: str, name: str, size: int, eps: float, offset: float = 0.0) -> str:
        weight = self.shared(name, lambda: self.weights(name, size) + np.float32(offset))
        return self.graph.op("Mul", self.unit_norm(x, size, eps), weight)

    def unit_norm(self, x: str, size: int, eps: float) -> str:
        """In float32: squares of a residual are beyond float16."""
        graph = self.twin
        x = graph.cast(x, "float32")
        mean = graph.op("ReduceMean", graph.op("Mul", x, x), axes=[-1], keepdims=1)
        return graph.op("Div", x, graph.op("Sqrt", graph.op("Add", mean, graph.constant(eps))))

    def fused_linear(self, x: str, parts: Sequence[tuple[str, int, str | None]], columns: int) -> str:
        """As in dense parts; the matrices are read for the first twin that needs them, and found by the others."""
        if len(parts) > 1 and sum(rows for _, rows, _ in parts) > LONGEST_AXIS:
            products = [(self.fused_linear(x, [part], columns), part[1]) for part in parts]
            return self.twin.join(products)
        key, bias = parts[0][0], ""
        if parts[0][2] is not None:
            bias = self.graph.constant(np.concatenate([self.weights(str(name), rows) for _, rows, name in parts]))
        if self._key(key) in self.graph.store.shared:
            return self._product(x, self._key(key), bias)
        matrices = [self.weights(name, rows, columns) for name, rows, _ in parts]
        return self.product(x, key, matrices[0] if len(matrices) == 1 else one_above_other(matrices), bias)

    def vector(self, name: str, size: int) -> str:
        """As in dense parts; one as long as a vocabulary goes with the piece of the logits that is being made."""
        if size <= LONGEST_AXIS:
            return super().vector(name, size)
        start = self.piece * LONGEST_AXIS
        return self.shared(f"{name}.{self.piece}", lambda: self.weights(name, size)[start : start + LONGEST_AXIS])

    def head_linear(self, x: str, hint: str, matrices: Float32) -> str:
        graph, key = self.twin, self._key(hint)
        self._keep(key, np.ascontiguousarray(matrices.transpose(0, 2, 1)))
        heads = graph.op("Transpose", graph.cast(x, graph.half), perm=[0, 2, 1, 3])
        product = graph.op("MatMul", heads, graph.stored(hint, graph.store.shared[key]))
        return graph.op("Transpose", product, perm=[0, 2, 1, 3])

    def product(self, x: str, hint: str, matrix: Float32, bias: str = "") -> str:
        self._keep(self._key(hint), matrix.T)
        return self._product(x, self._key(hint), bias)

    def float_product(self, x: str, hint: str, matrix: Float32) -> str:
        weight = self.shared(f"{hint}.T.float", lambda: np.ascontiguousarray(matrix.T))
        return self.graph.op("MatMul", self.twin.cast(x, "float32"), weight)

    @staticmethod
    def _key(hint: str) -> str:
        return f"{hint}.T.half"

    def _keep(self, key: str, matrix: Float32) -> None:
        store = self.graph.store
        if key not in store.shared:
            store.shared[key] = store.add(matrix.astype(self.twin.half))

    def _product(self, x: str, key: str, bias: str = "") -> str:
        graph = self.twin
        product = graph.op("MatMul", graph.cast(x, graph.half), graph.stored(key, graph.store.shared[key]))
        return graph.op("Add", product, bias) if bias else product

    def head(self, x: str, name: str, rows: int, columns: int) -> str:
        """A piece of the logits, [R, at most 16384]; the matrix is read once, for all pieces."""
        keys = [self._key(f"{name}.{piece}") for piece in range(num_pieces(rows))]
        if keys[0] not in self.graph.store.shared:
            for key, chunk in zip(keys, self.weights.chunks(name, LONGEST_AXIS, rows, columns), strict=True):
                self._keep(key, chunk.T)
        return self._product(x, keys[self.piece])

    # -- positions and attention -------------------------------------------------------------------------------------

    def rotate(self, x: str, rope: Rope | None, num_heads: int, head_dim: int, *, interleaved: bool = False) -> str:
        if rope is None:
            return x
        graph, half = self.twin, rope.rotary_dim // 2
        cosines, sines = self.positions.angles(graph, rope)
        heads = graph.reshape(graph.cast(x, "float32"), 1, graph.rows, num_heads, head_dim)
        turning = graph.slice(heads, 3, 0, 2 * half) if 2 * half < head_dim else heads
        if interleaved:
            pairs = graph.reshape(turning, graph.rows, num_heads, half, 2)
            one, other = (
                graph.reshape(graph.slice(pairs, 3, n, n + 1), 1, graph.rows, num_heads, half) for n in (0, 1)
            )
        else:
            one, other = (graph.slice(turning, 3, n * half, (n + 1) * half) for n in (0, 1))
        turned = [
            graph.op("Sub", graph.op("Mul", one, cosines), graph.op("Mul", other, sines)),
            graph.op("Add", graph.op("Mul", other, cosines), graph.op("Mul", one, sines)),
        ]
        if interleaved:
            columns = [graph.reshape(part, graph.rows, num_heads, half, 1) for part in turned]
            joined = graph.reshape(graph.op("Concat", *columns, axis=3), 1, graph.rows, num_heads, 2 * half)
        else:
            joined = graph.op("Concat", *turned, axis=3)
        if 2 * half < head_dim:
            joined = graph.op("Concat", joined, graph.slice(heads, 3, 2 * half, head_dim), axis=3)
        return graph.reshape(joined, 1, graph.rows, num_heads * head_dim)

    def attention(
        self,
        layer_idx: int,
        query: str,
        key: str,
        value: str,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        sliding_window: int | None = None,
        sinks: str = "",
    ) -> str:
        """As in dense parts, over a cache that is read only: the step's keys and values are outputs, rows for the host.

        So a step moves as much as it adds. To write them here would need the whole cache as an output, which providers
        copy, and a selection over it. Products with cache and step are apart, so that the cache need not be joined.
        """
        graph, groups, rows = self.twin, num_heads // num_kv_heads, self.twin.rows
        dtype: Dtype = "float16" if self.precision.kv_bits == 16 else "float32"
        query = graph.op("Mul", query, graph.constant(head_dim**-0.5 if scale is None else scale))
        query = graph.reshape(graph.cast(query, graph.half), rows, num_kv_heads, groups, head_dim)
        query = graph.op("Transpose", query, perm=[1, 2, 0, 3])
        query = graph.reshape(query, num_kv_heads, groups * rows, head_dim)

        past, new = [], []
        for name, x in (("key", key), ("value", value)):
            cache = graph.input(f"past_{name}_{layer_idx}", dtype, [1, num_kv_heads, "S", head_dim])
            past.append(graph.cast(graph.reshape(cache, num_kv_heads, graph.capacity, head_dim), graph.half))
            x = graph.op("Transpose", graph.reshape(x, rows, num_kv_heads, head_dim), perm=[1, 0, 2])
            given = graph.reshape(x, 1, num_kv_heads, rows, head_dim)
            graph.output(given, rows_name(f"present_{name}_{layer_idx}"), dtype, [1, num_kv_heads, rows, head_dim])
            new.append(graph.cast(x, graph.half))

        mask_rows = 1 if sliding_window is None else rows
        mask = graph.reshape(self.positions.mask(graph, sliding_window), 1, 1, mask_rows, graph.capacity)
        scores = []
        for keys, length in ((past[0], graph.capacity), (new[0], rows)):
            product = graph.op("MatMul", query, graph.op("Transpose", keys, perm=[0, 2, 1]))
            scores.append(graph.reshape(product, num_kv_heads, groups, rows, length))
        scores[0] = graph.op("Add", scores[0], graph.cast(mask, graph.half))
        if rows > 1:
            scores[1] = graph.op("Add", scores[1], graph.constant(_causal(rows, sliding_window)))
        if sinks:
            sink = graph.reshape(sinks, num_kv_heads, groups, 1, 1)
            column = graph.op("Add", graph.constant(np.zeros((num_kv_heads, groups, rows, 1))), sink)
            scores.append(graph.cast(column, graph.half))
        weights = graph.op("Softmax", graph.op("Concat", *scores, axis=3), axis=3)
        mixed = []
        for values, start, end in ((past[1], 0, graph.capacity), (new[1], graph.capacity, graph.capacity + rows)):
            part = graph.reshape(graph.slice(weights, 3, start, end), num_kv_heads, groups * rows, end - start)
            mixed.append(graph.op("MatMul", part, values))
        output = graph.reshape(graph.op("Add", *mixed), num_kv_heads, groups, rows, head_dim)
        output = graph.op("Transpose", output, perm=[2, 0, 1, 3])
        return graph.reshape(output, 1, rows, num_heads * head_dim)


def num_pieces(vocab_size: int) -> int:
    """Into how many pieces logits are cut."""
    return -(-vocab_size // LONGEST_AXIS)


def _causal(rows: int, window: int | None) -> Any:
    """[T,T]: what a token of a step sees of the step."""
    back = np.subtract.outer(np.arange(rows), np.arange(rows))
    seen = (back >= 0) & (back < (rows if window is None else window))
    return np.where(seen, 0.0, UNSEEN)
