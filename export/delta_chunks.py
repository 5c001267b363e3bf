"""The gated delta rule in plain operators, chunk by chunk: for any ONNX Runtime that runs the rest of a bundle.

It knows shapes and arithmetic, no family and no state of a host's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from lesonnx_export.checkpoint import Float32
from lesonnx_export.graph import Graph

# Tokens of a chunk; of 16, 32 and 64 none is faster for prompts, and this one does the least arithmetic.
CHUNK_TOKENS = 16


@dataclass(frozen=True)
class HeadSizes:
    """Heads of keys, values and state alike, and the lengths of their keys and values."""

    num_heads: int
    key: int
    value: int


def delta_chunks(
    graph: Graph, sizes: HeadSizes, past: str, query: str, key: str, value: str, decay: str, beta: str
) -> tuple[str, str]:
    """Output [1,T,heads*value size] and the next state, from the state before and packed heads [1,T,heads*size].

    With G the sum of g (``decay``) up to a token, from its chunk's beginning, and S the state there, the d of a chunk
    (see `GatedDeltaRule`) solve (I + L) D = beta (V - exp(G) K S), L[i,j] = beta_i exp(G_i - G_j) k_i.k_j for j < i. So
    the inverse and what follows from it are computed for all chunks at once, and what needs S by a Scan: D, the output
    exp(G) Q S + A D with A[i,j] = exp(G_i - G_j) q_i.k_j for j <= i, and the next S. Tokens that fill the last chunk up
    are zero, and so change nothing.
    """

    def integers(*values: int) -> str:
        return graph.constant(values, "int64")

    num_tokens = graph.op("Shape", decay, start=1, end=2)
    size = graph.op("Min", num_tokens, integers(CHUNK_TOKENS))
    count = graph.op("Div", graph.op("Sub", graph.op("Add", num_tokens, size), integers(1)), size)
    missing = graph.op("Sub", graph.op("Mul", count, size), num_tokens)
    padding = graph.op("Concat", integers(0, 0, 0, 0), missing, integers(0), axis=0)

    def split(x: str, head_dim: int) -> str:
        """[1,T,heads*size] -> [chunks, heads, tokens, size]."""
        shape = graph.op("Concat", count, size, integers(sizes.num_heads, head_dim), axis=0)
        return graph.op("Transpose", graph.op("Reshape", graph.op("Pad", x, padding), shape), perm=[0, 2, 1, 3])

    def transposed(x: str) -> str:
        return graph.op("Transpose", x, perm=[0, 1, 3, 2])

    q, k, v = split(query, sizes.key), split(key, sizes.key), split(value, sizes.value)
    g, beta = split(decay, 1), split(beta, 1)
    sums = graph.op("CumSum", g, graph.constant(2, "int64"))
    # Above the diagonal the differences are positive and may overflow: zero before and after.
    differences = graph.op("Trilu", graph.op("Sub", sums, transposed(sums)), upper=0)
    decays = graph.op("Trilu", graph.op("Exp", differences), upper=0)
    keys = transposed(k)
    lower = graph.op("Mul", graph.op("Mul", graph.op("MatMul", k, keys), decays), beta)
    inverse = _inverse(graph, lower, size)
    since = graph.op("Exp", sums)
    last = graph.op("ReduceSum", g, integers(2), keepdims=1)
    scanned = {
        "retrieve": graph.op("MatMul", inverse, graph.op("Mul", k, graph.op("Mul", beta, since))),
        "written": graph.op("MatMul", inverse, graph.op("Mul", v, beta)),
        "queries": graph.op("Mul", q, since),
        "inside": graph.op("Mul", graph.op("MatMul", q, keys), decays),
        "keys": transposed(graph.op("Mul", k, graph.op("Exp", graph.op("Sub", last, sums)))),
        "decay": graph.op("Exp", last),
    }
    body = _scan_body(sizes, list(scanned))
    state = graph.op("Squeeze", past, integers(0))
    state, output = graph.ops("Scan", 2, state, *scanned.values(), body=body, num_scan_inputs=len(scanned))
    output = graph.op("Transpose", output, perm=[0, 2, 1, 3])
    output = graph.op("Reshape", output, integers(1, -1, sizes.num_heads * sizes.value))
    output = graph.op("Slice", output, integers(0), num_tokens, integers(1))
    return output, graph.op("Unsqueeze", state, integers(0))


def _scan_body(sizes: HeadSizes, names: list[str]) -> GraphProto:
    """One chunk: D = written - retrieve S, the output queries S + inside D, the next S = decay S + keys D."""
    heads, key, value = sizes.num_heads, sizes.key, sizes.value
    shapes: dict[str, list[int | str]] = {
        "retrieve": [heads, "C", key],
        "written": [heads, "C", value],
        "queries": [heads, "C", key],
        "inside": [heads, "C", "C"],
        "keys": [heads, key, "C"],
        "decay": [heads, 1, 1],
    }
    state: list[int | str] = [heads, key, value]

    def info(name: str, shape: list[int | str]) -> ValueInfoProto:
        return helper.make_tensor_value_info(f"scan_{name}", TensorProto.FLOAT, shape)

    def node(op_type: str, one: str, other: str, output: str) -> NodeProto:
        return helper.make_node(op_type, [f"scan_{one}", f"scan_{other}"], [f"scan_{output}"])

    nodes = [
        node("MatMul", "retrieve", "state", "retrieved"),
        node("Sub", "written", "retrieved", "difference"),
        node("MatMul", "queries", "state", "before"),
        node("MatMul", "inside", "difference", "within"),
        node("Add", "before", "within", "output"),
        node("Mul", "state", "decay", "kept"),
        node("MatMul", "keys", "difference", "added"),
        node("Add", "kept", "added", "next"),
    ]
    inputs = [info("state", state), *(info(name, shapes[name]) for name in names)]
    return helper.make_graph(nodes, "chunk", inputs, [info("next", state), info("output", [heads, "C", value])])


def _inverse(graph: Graph, lower: str, size: str) -> str:
    """The inverse of I + ``lower``, strictly lower triangular matrices [..,size,size], size at most CHUNK_TOKENS.

    Blocks on the diagonal are inverted, then twice as large ones from them:
    [[A, 0], [M, B]] has the inverse [[A', 0], [-B' M A', B']]. As exact as forward substitution.
    """
    square = graph.op("Concat", size, size, axis=0)

    def cut(matrix: Float32) -> str:
        return graph.op("Slice", graph.constant(matrix), graph.constant([0, 0], "int64"), square)

    index = np.arange(CHUNK_TOKENS)
    inverse = cut(np.eye(CHUNK_TOKENS, dtype=np.float32))
    width = 1
    while width < CHUNK_TOKENS:
        same = index[:, None] // (2 * width) == index // (2 * width)
        below = (index[:, None] // width % 2 == 1) & (index // width % 2 == 0)
        block = graph.op("Mul", lower, cut((same & below).astype(np.float32)))
        if width > 1:
            block = graph.op("MatMul", graph.op("MatMul", inverse, block), inverse)
        inverse = graph.op("Sub", inverse, block)
        width *= 2
    return inverse
