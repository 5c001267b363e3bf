"""`vision_tower` of Qwen3-VL: a vision transformer with rotary positions, its merger, and those behind inner layers.

After docs/vision.md; the source is transformers' ``qwen3_vl_moe``. Patches go through it row by row: attention sees all
of a picture anyway, so the order of 2 x 2 blocks that transformers has them in matters to the mergers alone. A picture
is a film of two alike frames there, so the kernel of the patch embedding is summed over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from lesonnx.errors import CheckpointError
from lesonnx.manifest import Part
from lesonnx.vision_wiring import CHANNELS, deepstack_name
from lesonnx_export.blocks import Precision, Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.config import FLOAT32_MOST, Config
from lesonnx_export.graph import DenseStore, Graph
from lesonnx_export.rope import inverse_frequencies
from lesonnx_export.segments import BuiltPart
from lesonnx_export.vision import transformer
from lesonnx_export.vision.tower import PATH

VISUAL = "model.visual."
# transformers writes both into the model, whatever the config says.
EPS = 1e-6
MERGE: Final = 2


@dataclass(frozen=True)
class TowerConfig:
    """The sizes of the tower. ``deepstack_layers``: behind which of its layers features are taken, beside the last."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    frames: int
    positions_per_side: int
    rope_theta: float
    deepstack_layers: tuple[int, ...]
    text_hidden_size: int
    token_patches: Literal[2] = MERGE

    @classmethod
    def read(cls, raw: dict[str, Any], text_hidden_size: int, num_text_layers: int) -> TowerConfig:
        """From a checkpoint's config.json; CheckpointError names what is malformed or not computed here."""
        inner = raw.get("vision_config")
        if not isinstance(inner, dict):
            raise CheckpointError("config.json: vision_config must be an object")
        config = Config({**inner, "model_type": "qwen3_vl_moe_vision"})
        config.require("in_channels", (CHANNELS,), CHANNELS)
        config.require("spatial_merge_size", (MERGE,), MERGE)
        config.require("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        config.require("out_hidden_size", (text_hidden_size,), 3584)
        rope = config.raw("rope_parameters", None) or {}
        theta = rope.get("rope_theta", 10000.0) if isinstance(rope, dict) else None
        if not isinstance(theta, int | float) or isinstance(theta, bool) or not 1 <= theta <= FLOAT32_MOST:
            raise CheckpointError(
                f"config.json: vision_config: rope_theta must be a number of at least 1, found {theta!r:.100}"
            )
        if rope.get("rope_type", "axial") not in ("axial", "default"):
            raise CheckpointError(f"config.json: vision_config: rope_type {rope['rope_type']!r:.100} is not supported")
        hidden, heads = config.integer("hidden_size", 1152), config.integer("num_heads", 16)
        if hidden % (4 * heads):
            raise CheckpointError(
                f"config.json: vision_config: hidden_size {hidden} is no multiple of 4 x {heads} heads"
            )
        positions, layers = config.integer("num_position_embeddings", 2304), config.integer("depth", 27)
        if int(positions**0.5) ** 2 != positions:
            raise CheckpointError(
                f"config.json: vision_config: num_position_embeddings is {positions}, expected a square number"
            )
        behind = config.raw("deepstack_visual_indexes", [8, 16, 24])
        if (
            not isinstance(behind, list)
            or not all(type(idx) is int and 0 <= idx < layers for idx in behind)
            or behind != sorted(set(behind))
        ):
            raise CheckpointError(
                "config.json: vision_config: deepstack_visual_indexes must be numbers of its layers, ascending,"
                f" found {behind!r:.100}"
            )
        if len(behind) > num_text_layers:
            raise CheckpointError(
                f"config.json: vision_config: {len(behind)} deepstack_visual_indexes, expected at most"
                f" {num_text_layers}, the layers of text"
            )
        return cls(
            hidden_size=hidden,
            intermediate_size=config.integer("intermediate_size", 4304),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            patch_size=config.integer("patch_size", 16),
            frames=config.integer("temporal_patch_size", 2),
            positions_per_side=int(positions**0.5),
            rope_theta=float(theta),
            deepstack_layers=tuple(behind),
            text_hidden_size=text_hidden_size,
        )


def build_tower(config: TowerConfig, weights: Weights, store: DenseStore, precision: Precision) -> BuiltPart:
    """The part, its linear maps in the dense precision; CheckpointError where a tensor is missing or misshapen."""
    step = Step(Graph("vision_tower", store), weights, precision)
    graph, size = step.graph, config.hidden_size
    pixels = graph.input("pixel_values", "float32", [1, CHANNELS, config.patch_size, "W"])
    height, width = graph.ops(
        "Split", 2, graph.input("target_size", "int64", [2]), graph.constant([1, 1], "int64"), axis=0
    )
    half_height, half_width = (graph.op("Div", side, graph.constant([MERGE], "int64")) for side in (height, width))

    x = _embed(step, config, pixels, height, width)
    angles = _angles(step, config, x, height, width)
    deepstack: list[str] = []
    for layer_idx in range(config.num_hidden_layers):
        x = _layer(step, config, f"{VISUAL}blocks.{layer_idx}.", x, angles)
        if layer_idx in config.deepstack_layers:
            name = f"{VISUAL}deepstack_merger_list.{len(deepstack)}."
            wide = _side_by_side(step, x, half_height, half_width, size)
            wide = transformer.layer_norm(step, wide, f"{name}norm", 4 * size, EPS)
            deepstack.append(_merged(step, config, name, wide))
    x = transformer.layer_norm(step, x, f"{VISUAL}merger.norm", size, EPS)
    wide = _side_by_side(step, x, half_height, half_width, size)
    shape: list[int | str] = ["I", config.text_hidden_size]
    graph.output(_merged(step, config, f"{VISUAL}merger.", wide), "image_features", "float32", shape)
    for level, features in enumerate(deepstack):
        graph.output(features, deepstack_name(level), "float32", shape)

    part = Part(name="vision_tower", role="vision_tower", path=PATH, inputs=graph.inputs, outputs=graph.outputs)
    return BuiltPart(part, [], graph.model())


def _side_by_side(step: Step, x: str, height: str, width: str, size: int) -> str:
    """2 x 2 neighbours as one row: [C,4*h*w,size] -> [C*h*w,4*size]."""
    windows = transformer.neighbours(step, x, height, width, size)
    return step.graph.op("Reshape", windows, transformer.shape_of(step, -1, 4 * size))


def _embed(step: Step, config: TowerConfig, pixels: str, height: str, width: str) -> str:
    """Patches and their positions: [C,h*w,size]. The convolution does not overlap, so it is a product, in float32."""
    graph, size, patch, frames = step.graph, config.hidden_size, config.patch_size, config.frames
    name = f"{VISUAL}patch_embed.proj"
    rows = transformer.patch_rows(step, pixels, CHANNELS, patch)
    kernel = step.weights(f"{name}.weight", size, CHANNELS, frames, patch, patch)
    # A rehearsal's zeros stay one element.
    matrix = kernel.sum(axis=2).reshape(size, -1) if any(kernel.strides) else kernel[:, :, 0].reshape(size, -1)
    embedded = graph.op("Add", step.float_product(rows, name, matrix), step.vector(f"{name}.bias", size))
    count = graph.op("Mul", height, width)
    crops = graph.op("Reshape", embedded, transformer.shape_of(step, -1, count, size))
    return graph.op("Add", crops, _positions(step, config, height, width, count))


def _positions(step: Step, config: TowerConfig, height: str, width: str, count: str) -> str:
    """The position table, stretched to the grid by linear interpolation, corner on corner: [h*w,size]."""
    graph, size, side = step.graph, config.hidden_size, config.positions_per_side
    name = f"{VISUAL}pos_embed.weight"
    planes = np.ascontiguousarray(step.weights(name, side * side, size).T).reshape(1, size, side, side)
    shape = transformer.shape_of(step, 1, size, height, width)
    stretched = graph.op(
        "Resize",
        graph.weight(name, planes),
        "",
        "",
        shape,
        mode="linear",
        coordinate_transformation_mode="align_corners",
    )
    flat = graph.op("Reshape", stretched, transformer.shape_of(step, size, count))
    return graph.op("Transpose", flat, perm=[1, 0])


def _angles(step: Step, config: TowerConfig, x: str, height: str, width: str) -> tuple[str, str]:
    """Cosines and sines [C,h*w,d/2] of patches, d the size of a head: half of them turn by row, half by column."""
    graph, head_dim = step.graph, config.hidden_size // config.num_attention_heads
    frequencies = graph.constant(inverse_frequencies(config.rope_theta, head_dim // 2))

    def along(count: str, before: str, after: str) -> str:
        scalar = graph.op("Squeeze", count, graph.constant([0], "int64"))
        places = graph.op("Range", graph.constant(0, "int64"), scalar, graph.constant(1, "int64"))
        column = graph.op("Unsqueeze", graph.op("Cast", places, to=1), graph.constant([1], "int64"))
        turned = graph.op("Mul", column, frequencies)
        placed = graph.op("Reshape", turned, transformer.shape_of(step, before, after, head_dim // 4))
        return graph.op("Expand", placed, transformer.shape_of(step, height, width, head_dim // 4))

    one = graph.constant([1], "int64")
    both = graph.op("Concat", along(height, height, one), along(width, one, width), axis=-1)
    flat = graph.op("Reshape", both, transformer.shape_of(step, 1, -1, head_dim // 2))
    crops = graph.op("Shape", x, start=0, end=1)
    spread = graph.op("Expand", flat, transformer.shape_of(step, crops, 1, 1))
    return graph.op("Cos", spread), graph.op("Sin", spread)


def _layer(step: Step, config: TowerConfig, name: str, x: str, angles: tuple[str, str]) -> str:
    graph, size, inner = step.graph, config.hidden_size, config.intermediate_size
    normed = transformer.layer_norm(step, x, f"{name}norm1", size, EPS)
    x = graph.op("Add", x, _attention(step, config, f"{name}attn.", normed, angles))
    normed = transformer.layer_norm(step, x, f"{name}norm2", size, EPS)
    wide = graph.op("Gelu", transformer.linear(step, normed, f"{name}mlp.linear_fc1", inner, size), approximate="tanh")
    return graph.op("Add", x, transformer.linear(step, wide, f"{name}mlp.linear_fc2", size, inner))


def _attention(step: Step, config: TowerConfig, name: str, x: str, angles: tuple[str, str]) -> str:
    """Full attention inside each picture, queries and keys turned by their patch's place: [C,N,size]."""
    graph, size, heads = step.graph, config.hidden_size, config.num_attention_heads
    fused = transformer.linear(step, x, f"{name}qkv", 3 * size, size)
    query, key, value = graph.ops("Split", 3, fused, graph.constant([size] * 3, "int64"), axis=-1)
    query, key = (graph.op("RotaryEmbedding", part, *angles, num_heads=heads) for part in (query, key))
    mixed = transformer.mixed_heads(step, query, key, value, size, heads)
    return transformer.linear(step, mixed, f"{name}proj", size, size)


def _merged(step: Step, config: TowerConfig, name: str, wide: str) -> str:
    """Four patches side by side [I,4*size], normalised, become one row of the text's width."""
    columns = 4 * config.hidden_size
    inner = transformer.linear(step, wide, f"{name}linear_fc1", columns, columns)
    inner = step.graph.op("Gelu", inner, approximate="none")
    return transformer.linear(step, inner, f"{name}linear_fc2", config.text_hidden_size, columns)


def num_parameters(config: TowerConfig) -> int:
    """The parameters of the tower and its mergers, as the checkpoint has them."""
    size, inner, wide = config.hidden_size, config.intermediate_size, 4 * config.hidden_size
    layer = 4 * size + 4 * (size * size + size) + 2 * size * inner + inner + size
    embeddings = size * (CHANNELS * config.frames * config.patch_size**2 + 1 + config.positions_per_side**2)
    merger = (wide + 1) * wide + (wide + 1) * config.text_hidden_size
    levels = len(config.deepstack_layers)
    return embeddings + config.num_hidden_layers * layer + (levels + 1) * merger + 2 * size + levels * 2 * wide


def working_bytes(config: TowerConfig, num_patches: int) -> int:
    """About what a run takes for a picture of that many patches, beside the weights.

    Measured at 256 to 4,096 patches, see docs/vision.md: as of MiniCPM-V's tower, with turned queries and keys.
    """
    return 4 * num_patches * (4 * config.intermediate_size + 13 * config.hidden_size)
