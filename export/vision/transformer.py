"""What vision transformers share: patches as rows, layer norms, attention inside each picture, 2 x 2 neighbours.

It knows no family. Activations are [C,N,H]: C crops of N patches each, row-major.
"""

from __future__ import annotations

import numpy as np

from lesonnx_export.blocks import Step
from lesonnx_export.graph import MICROSOFT


def shape_of(step: Step, *sizes: int | str) -> str:
    """A shape for Reshape: numbers, and names of int64 [1]."""
    graph = step.graph
    if all(isinstance(size, int) for size in sizes):
        return graph.constant(list(sizes), "int64")
    return graph.op("Concat", *(graph.constant([s], "int64") if isinstance(s, int) else s for s in sizes), axis=0)


def patch_rows(step: Step, pixel_values: str, channels: int, patch_size: int) -> str:
    """Packed patches [1,channels,P,N*P] -> [N,channels*P*P], in the order of a convolution's weights."""
    graph = step.graph
    split = graph.op("Reshape", pixel_values, shape_of(step, channels, patch_size, -1, patch_size))
    by_patch = graph.op("Transpose", split, perm=[2, 0, 1, 3])
    return graph.op("Reshape", by_patch, shape_of(step, -1, channels * patch_size * patch_size))


def layer_norm(step: Step, x: str, name: str, size: int, eps: float) -> str:
    """Layer normalisation over the last axis, with ``name``.weight and ``name``.bias."""
    weight, bias = step.vector(f"{name}.weight", size), step.vector(f"{name}.bias", size)
    return step.graph.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=eps)


def linear(step: Step, x: str, name: str, rows: int, columns: int) -> str:
    """A linear map with bias, in the precision of dense parts."""
    return step.linear(x, f"{name}.weight", rows, columns, f"{name}.bias")


def self_attention(step: Step, x: str, name: str, size: int, num_heads: int) -> str:
    """Full attention inside each row of a batch: [B,N,size] -> [B,N,size]."""
    graph = step.graph
    parts = [(f"{name}.{key}_proj.weight", size, f"{name}.{key}_proj.bias") for key in "qkv"]
    query, key, value = graph.ops(
        "Split", 3, step.fused_linear(x, parts, size), graph.constant([size] * 3, "int64"), axis=-1
    )
    mixed = mixed_heads(step, query, key, value, size, num_heads)
    return linear(step, mixed, f"{name}.out_proj", size, size)


def mixed_heads(step: Step, query: str, key: str, value: str, size: int, num_heads: int) -> str:
    """The products of attention, without its maps: three times [B,N,size] -> [B,N,size]."""
    return step.graph.op(
        "MultiHeadAttention",
        query,
        key,
        value,
        domain=MICROSOFT,
        num_heads=num_heads,
        scale=(size // num_heads) ** -0.5,
    )


def neighbours(step: Step, x: str, height: str, width: str, size: int) -> str:
    """2 x 2 neighbours side by side: [C,h*w,size] -> [C*h/2*w/2,4,size]; height and width are those of the output."""
    graph = step.graph
    grid = graph.op("Reshape", x, shape_of(step, -1, height, 2, width, 2, size))
    windows = graph.op("Transpose", grid, perm=[0, 1, 3, 2, 4, 5])
    return graph.op("Reshape", windows, shape_of(step, -1, 4, size))


def nearest_positions(step: Step, height: str, width: str, per_side: int) -> str:
    """Entries [h*w] of a table of per_side x per_side: patch (i, j) takes (floor(i*n/h), floor(j*n/w))."""
    graph = step.graph

    def along(count: str) -> str:
        scalar = graph.op("Squeeze", count, graph.constant([0], "int64"))
        places = graph.op("Range", graph.constant(0, "int64"), scalar, graph.constant(1, "int64"))
        return graph.op("Div", graph.op("Mul", places, graph.constant(per_side, "int64")), count)

    rows = graph.op("Mul", along(height), graph.constant(per_side, "int64"))
    grid = graph.op("Add", graph.op("Unsqueeze", rows, graph.constant([1], "int64")), along(width))
    return graph.op("Reshape", grid, graph.constant(np.array([-1]), "int64"))
