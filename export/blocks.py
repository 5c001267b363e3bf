"""The building blocks of dense parts: norms, linear maps, embedding, rotary positions, attention with its states.

A `Step` is one part under construction. It knows no family; the precision of dense weights is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lesonnx.errors import CheckpointError
from lesonnx.manifest import Dtype, State
from lesonnx_export.checkpoint import Float32, Weights, one_above_other
from lesonnx_export.graph import MICROSOFT, Graph, StoredTensor
from lesonnx_export.quantize import fitting_block_size, quantize
from lesonnx_export.rope import Rope

DenseBits = Literal[4, 8, 32]
FloatKvBits = Literal[16, 32]
Operators = Literal["native", "portable"]
# The largest piece of an embedding or head that is held at once, in elements.
CHUNK_ELEMENTS = 1 << 24
# The inputs of every part that attends; hosts fill them by these names.
POSITION_IDS = "position_ids"
PAST_LENGTH = "seqlens_k"
TOTAL_LENGTH = "total_sequence_length"


@dataclass(frozen=True)
class Precision:
    """How dense parts store weights (bits, and the block that shares a scale) and attention caches, and compute.

    ``operators``: recurrences by ONNX Runtime's own operator, or by plain ones that older versions have too.
    """

    dense_bits: DenseBits
    block_size: int
    kv_bits: FloatKvBits = 32
    operators: Operators = "native"


@dataclass
class Step:
    """One part under construction: its graph, the checkpoint's weights, its states, and inputs made on first use.

    Shapes: T tokens of the step; activations [1,T,features] or [T,features], float32.
    """

    graph: Graph
    weights: Weights
    precision: Precision
    states: list[State] = field(default_factory=list)
    _rotary: dict[bytes, tuple[str, str]] = field(default_factory=dict)

    # -- weights ---------------------------------------------------------------------------------------------------

    def shared(self, key: str, make: Callable[[], Float32]) -> str:
        """A float32 weight that several parts use: its bytes are stored once, under a key."""
        store = self.graph.store
        if key not in store.shared:
            store.shared[key] = store.add(make())
        return self.graph.stored(key, store.shared[key])

    def norm(self, x: str, name: str, size: int, eps: float, offset: float = 0.0) -> str:
        """RMS normalisation over the last axis with the weight of that name, to which ``offset`` is added."""

        def make() -> Float32:
            weight = self.weights(name, size)
            return weight + np.float32(offset) if offset else weight

        weight = self.shared(name, make)
        return self.graph.op("RMSNormalization", x, weight, axis=-1, epsilon=eps)

    def unit_norm(self, x: str, size: int, eps: float) -> str:
        """RMS normalisation over the last axis without a weight."""
        ones = self.graph.constant(np.ones(size, np.float32))
        return self.graph.op("RMSNormalization", x, ones, axis=-1, epsilon=eps)

    def linear(self, x: str, name: str, rows: int, columns: int, bias: str | None = None) -> str:
        """``x W^T (+ b)``, W [rows, columns] of the checkpoint, in the dense parts' precision."""
        return self.fused_linear(x, [(name, rows, bias)], columns)

    def fused_linear(self, x: str, parts: Sequence[tuple[str, int, str | None]], columns: int) -> str:
        """Several linear maps (weight, rows, bias) of one input as one product, side by side in the output."""
        matrices = [self.weights(name, rows, columns) for name, rows, _ in parts]
        matrix = matrices[0] if len(matrices) == 1 else one_above_other(matrices)
        del matrices
        bias = ""
        if parts[0][2] is not None:
            biases = [self.weights(str(name), rows) for _, rows, name in parts]
            bias = self.graph.constant(np.concatenate(biases))
        return self.product(x, parts[0][0], matrix, bias)

    def head_linear(self, x: str, hint: str, matrices: Float32) -> str:
        """A linear map of its own for every head: x [1,T,heads,n], matrices [heads,m,n] -> [1,T,heads,m]."""
        graph, num_heads = self.graph, len(matrices)
        if self.precision.dense_bits == 32:
            by_head = graph.op("Transpose", x, perm=[0, 2, 1, 3])
            product = graph.op("MatMul", by_head, graph.weight(hint, np.ascontiguousarray(matrices.transpose(0, 2, 1))))
            return graph.op("Transpose", product, perm=[0, 2, 1, 3])
        heads = graph.ops("Split", num_heads, x, graph.constant([1] * num_heads, "int64"), axis=2)
        products = [
            self.product(head, f"{hint}.{index}", matrix)
            for index, (head, matrix) in enumerate(zip(heads, matrices, strict=True))
        ]
        return graph.op("Concat", *products, axis=2)

    def product(self, x: str, hint: str, matrix: Float32, bias: str = "") -> str:
        """``x W^T (+ b)`` of a matrix [rows, columns] in the dense parts' precision; ``hint`` names it."""
        if self.precision.dense_bits == 32:
            product = self.float_product(x, hint, matrix)
            return self.graph.op("Add", product, bias) if bias else product
        rows, columns = matrix.shape
        weight, scales = self._store_quantized(hint, iter([matrix]), rows, columns)
        return self._matmul_nbits(x, hint, weight, scales, columns, bias)

    def router_linear(self, x: str, name: str, rows: int, columns: int, bias: str | None = None) -> str:
        """``x W^T (+ b)`` in float32 whatever the precision of the rest: routing must not move."""
        weight = self.shared(f"{name}.T", lambda: np.ascontiguousarray(self.weights(name, rows, columns).T))
        product = self.graph.op("MatMul", x, weight)
        return product if bias is None else self.graph.op("Add", product, self.vector(bias, rows))

    def vector(self, name: str, size: int) -> str:
        """A small float32 weight as it is: a bias, sinks."""
        return self.shared(name, lambda: self.weights(name, size))

    def scaled(self, x: str, factor: float) -> str:
        """x times a constant; x itself where that is 1."""
        return x if factor == 1 else self.graph.op("Mul", x, self.graph.constant(factor))

    def column(self, rows: str, value: float) -> str:
        """[T,1] of one value, for as many rows as ``rows`` [T,n] has."""
        graph = self.graph
        shape = graph.op("Shape", rows, start=0, end=1)
        shape = graph.op("Concat", shape, graph.constant([1], "int64"), axis=0)
        return graph.op("Expand", graph.constant(value), shape)

    def float_product(self, x: str, hint: str, matrix: Float32) -> str:
        """``x W^T`` in float32 whatever the precision of the rest."""
        return self.graph.op("MatMul", x, self.graph.weight(hint, matrix.T))

    def _store_quantized(
        self, hint: str, chunks: Iterator[Float32], rows: int, columns: int
    ) -> tuple[StoredTensor, StoredTensor]:
        """Quantize a matrix that comes in chunks of rows: the stored codes [rows, bytes] and scales [rows, blocks]."""
        bits = self.precision.dense_bits
        if bits == 32:
            raise ValueError("float weights are stored as they are")
        store = self.graph.store
        block_size = fitting_block_size(columns, self.precision.block_size)
        blocks = -(-columns // block_size)
        codes = store.begin("uint8", (rows, blocks * block_size * bits // 8))
        scales = np.empty((rows, blocks), np.float32)
        start = 0
        for chunk in chunks:
            if not store.rehearsal:
                quantized = quantize(chunk, bits, block_size, hint)
                store.write(quantized.weight)
                scales[start : start + len(chunk)] = quantized.scales
            start += len(chunk)
        return codes, store.add(scales)

    def _matmul_nbits(
        self, x: str, hint: str, codes: StoredTensor, scales: StoredTensor, columns: int, bias: str = ""
    ) -> str:
        rows, blocks = scales.shape
        blob = codes.shape[1] // blocks
        inputs = [
            x,
            self.graph.stored(hint, _reshaped(codes, (rows, blocks, blob))),
            self.graph.stored(f"{hint}.scales", _reshaped(scales, (rows * blocks,))),
            *(["", "", bias] if bias else []),
        ]
        return self.graph.op(
            "MatMulNBits",
            *inputs,
            domain=MICROSOFT,
            K=columns,
            N=rows,
            bits=self.precision.dense_bits,
            block_size=fitting_block_size(columns, self.precision.block_size),
            accuracy_level=4,
        )

    # -- embedding and head ------------------------------------------------------------------------------------------

    def _vocabulary_matrix(self, name: str, key: str, rows: int, columns: int) -> None:
        """Store an embedding or head in chunks, under a key, so that a tied head finds the embedding's bytes."""
        store = self.graph.store
        if key in store.shared:
            return
        chunks = self.weights.chunks(name, max(1, CHUNK_ELEMENTS // columns), rows, columns)
        if self.precision.dense_bits == 32:
            store.shared[key] = store.begin("float32", (rows, columns))
            for chunk in chunks:
                store.write(chunk)
            return
        if columns % fitting_block_size(columns, self.precision.block_size):
            raise CheckpointError(
                f"hidden_size {columns} is not a multiple of 16: export with --dense-bits 32, which needs no blocks"
            )
        store.shared[key], store.shared[f"{key}.scales"] = self._store_quantized(name, chunks, rows, columns)

    def embedding(self, ids: str, name: str, rows: int, columns: int) -> str:
        """Rows of the embedding: ids [1,T] -> [1,T,columns]."""
        self._vocabulary_matrix(name, name, rows, columns)
        shared = self.graph.store.shared
        table = self.graph.stored(name, shared[name])
        if self.precision.dense_bits == 32:
            return self.graph.op("Gather", table, ids)
        return self.graph.op(
            "GatherBlockQuantized",
            table,
            ids,
            self.graph.stored(f"{name}.scales", shared[f"{name}.scales"]),
            domain=MICROSOFT,
            bits=self.precision.dense_bits,
            block_size=fitting_block_size(columns, self.precision.block_size),
            quantize_axis=1,
            gather_axis=0,
        )

    def head(self, x: str, name: str, rows: int, columns: int) -> str:
        """Logits of rows [R,columns] -> [R,rows]."""
        self._vocabulary_matrix(name, name, rows, columns)
        shared = self.graph.store.shared
        if self.precision.dense_bits == 32:
            return self.graph.op("Gemm", x, self.graph.stored(name, shared[name]), transB=1)
        return self._matmul_nbits(x, name, shared[name], shared[f"{name}.scales"], columns)

    # -- positions and attention -------------------------------------------------------------------------------------

    def rotary(self, rope: Rope) -> tuple[str, str]:
        """Cosines and sines [1,T,r/2] of the positions, computed once a part."""
        if rope.key not in self._rotary:
            graph = self.graph
            angles = graph.op("Mul", self._positions(rope), self._frequencies(rope))
            cosines, sines = graph.op("Cos", angles), graph.op("Sin", angles)
            if (rope.attention_factor, rope.long_attention_factor) != (1, 1):
                factor = graph.constant(rope.attention_factor)
                if rope.long_inverse_frequencies is not None:
                    factor = graph.op("Where", self._is_long(rope), graph.constant(rope.long_attention_factor), factor)
                cosines, sines = graph.op("Mul", cosines, factor), graph.op("Mul", sines, factor)
            self._rotary[rope.key] = (cosines, sines)
        return self._rotary[rope.key]

    def _positions(self, rope: Rope) -> str:
        """Positions [1,T,1], or [1,T,r/2] where a token has three of which each frequency takes one; float32."""
        graph = self.graph
        if rope.axes is None:
            positions = graph.op("Cast", graph.input(POSITION_IDS, "int64", [1, "T"]), to=1)
            return graph.op("Unsqueeze", positions, graph.constant([-1], "int64"))
        positions = graph.op("Cast", graph.input(POSITION_IDS, "int64", [3, 1, "T"]), to=1)
        chosen = graph.op("Gather", positions, graph.constant(rope.axes, "int64"), axis=0)
        return graph.op("Transpose", chosen, perm=[1, 2, 0])

    def _frequencies(self, rope: Rope) -> str:
        """Inverse frequencies [r/2]; of kinds that depend on it, at the sequence's length with this step."""
        graph = self.graph
        plain, factor = graph.constant(rope.inverse_frequencies), rope.dynamic_factor
        if rope.long_inverse_frequencies is not None:
            return graph.op("Where", self._is_long(rope), graph.constant(rope.long_inverse_frequencies), plain)
        if factor is None:
            return plain
        total = graph.op("Cast", graph.input(TOTAL_LENGTH, "int32", []), to=1)
        original = float(rope.original_max_position_embeddings)
        exceeding = graph.op("Max", total, graph.constant(original))
        stretch = graph.op(
            "Sub", graph.op("Mul", exceeding, graph.constant(factor / original)), graph.constant(factor - 1)
        )
        exponents = -np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(max(1, rope.rotary_dim - 2))
        return graph.op("Mul", plain, graph.op("Pow", stretch, graph.constant(exponents)))

    def _is_long(self, rope: Rope) -> str:
        """Whether the sequence, with this step, exceeds the original window: a scalar."""
        original = self.graph.constant(rope.original_max_position_embeddings, "int32")
        return self.graph.op("Greater", self.graph.input(TOTAL_LENGTH, "int32", []), original)

    def rotate(self, x: str, rope: Rope | None, num_heads: int, head_dim: int, *, interleaved: bool = False) -> str:
        """Rotary embedding of the leading values of every head of [1,T,heads*size]: halves, or pairs, are rotated."""
        if rope is None:
            return x
        partial: dict[str, Any] = {"rotary_embedding_dim": rope.rotary_dim} if rope.rotary_dim < head_dim else {}
        return self.graph.op(
            "RotaryEmbedding", x, *self.rotary(rope), num_heads=num_heads, interleaved=int(interleaved), **partial
        )

    def head_norm(self, x: str, name: str, num_heads: int, head_dim: int, eps: float, offset: float = 0.0) -> str:
        """RMS normalisation of every head by itself: [1,T,heads*size]; without a weight where the name is empty."""
        graph = self.graph
        split = graph.op("Reshape", x, graph.constant([1, -1, num_heads, head_dim], "int64"))
        normed = self.norm(split, name, head_dim, eps, offset) if name else self.unit_norm(split, head_dim, eps)
        return graph.op("Reshape", normed, graph.constant([1, -1, num_heads * head_dim], "int64"))

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
        """Causal grouped-query attention over the layer's cache: [1,T,heads*size]; declares the layer's two states.

        ``scale`` of the products is ``head_dim ** -0.5`` if None; a token sees the last ``sliding_window`` tokens,
        itself included; ``sinks`` [heads] are logits of a further key whose value is zero.
        """
        graph = self.graph
        shape: list[int | str] = [1, num_kv_heads, "S", head_dim]
        dtype: Dtype = "float16" if self.precision.kv_bits == 16 else "float32"
        past = [graph.input(f"past_{name}_{layer_idx}", dtype, shape) for name in ("key", "value")]
        output, present_key, present_value = graph.ops(
            "GroupQueryAttention",
            3,
            query,
            key,
            value,
            *past,
            graph.input(PAST_LENGTH, "int32", [1]),
            graph.input(TOTAL_LENGTH, "int32", []),
            *(["", "", "", "", sinks] if sinks else []),
            domain=MICROSOFT,
            num_heads=num_heads,
            kv_num_heads=num_kv_heads,
            scale=head_dim**-0.5 if scale is None else scale,
            **({} if sliding_window is None else {"local_window_size": sliding_window}),
        )
        for name, present in (("key", present_key), ("value", present_value)):
            graph.output(present, f"present_{name}_{layer_idx}", dtype, shape)
            self.states.append(
                State(
                    name=f"{name}_{layer_idx}",
                    kind="attention_key" if name == "key" else "attention_value",
                    layer_idx=layer_idx,
                    part=graph.name,
                    input=f"past_{name}_{layer_idx}",
                    output=f"present_{name}_{layer_idx}",
                    dtype=dtype,
                    shape=shape,
                )
            )
        return output


def _reshaped(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """The same stored bytes under another shape."""
    return StoredTensor(tensor.offset_bytes, tensor.length_bytes, tensor.dtype, shape)
