"""`vision_tower`: MiniCPM-V's vision transformer with its two mergers, from packed patches to image features.

After docs/vision.md; the source is transformers' ``minicpmv4_7``. It knows no prompt and no picture.
"""

from __future__ import annotations

import numpy as np

from lesonnx.manifest import Part
from lesonnx.vision_wiring import CHANNELS
from lesonnx_export.blocks import Precision, Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.graph import DenseStore, Graph
from lesonnx_export.segments import BuiltPart
from lesonnx_export.vision import transformer
from lesonnx_export.vision.vision_config import TowerConfig

TOWER = "model.vision_tower."
MERGER = "model.merger."
PATH = "vision/tower.onnx"
# transformers writes it into the final merger, whatever the config says of the rest.
MERGER_EPS = 1e-6


class VisionStore(DenseStore):
    """The weights of a bundle's eyes, a file of their own: it is mapped only while pictures are read."""

    location = "vision.bin"


def build_tower(config: TowerConfig, weights: Weights, store: DenseStore, precision: Precision) -> BuiltPart:
    """The part, its linear maps in the dense precision; CheckpointError where a tensor is missing or misshapen."""
    step = Step(Graph("vision_tower", store), weights, precision)
    graph, size = step.graph, config.hidden_size
    patch = config.patch_size
    pixels = graph.input("pixel_values", "float32", [1, CHANNELS, patch, "W"])
    height, width = graph.ops(
        "Split", 2, graph.input("target_size", "int64", [2]), graph.constant([1, 1], "int64"), axis=0
    )

    x = _embed(step, config, pixels, height, width)
    for layer_idx in range(config.num_hidden_layers):
        x = _layer(step, config, f"{TOWER}encoder.layers.{layer_idx}", x)
        if layer_idx == config.insert_layer_id:
            height, width = _half(step, height), _half(step, width)
            x = _window_merger(step, config, x, height, width)
    x = transformer.layer_norm(step, x, f"{TOWER}post_layernorm", size, config.layer_norm_eps)
    features = _merger(step, config, x, _half(step, height), _half(step, width))
    graph.output(features, "image_features", "float32", ["I", config.text_hidden_size])

    part = Part(name="vision_tower", role="vision_tower", path=PATH, inputs=graph.inputs, outputs=graph.outputs)
    return BuiltPart(part, [], graph.model())


def _half(step: Step, count: str) -> str:
    return step.graph.op("Div", count, step.graph.constant([2], "int64"))


def _embed(step: Step, config: TowerConfig, pixels: str, height: str, width: str) -> str:
    """Patches and their positions: [C,h*w,size]. The convolution does not overlap, so it is a product, in float32."""
    graph, size, patch = step.graph, config.hidden_size, config.patch_size
    name = f"{TOWER}embeddings.patch_embedding"
    rows = transformer.patch_rows(step, pixels, CHANNELS, patch)
    matrix = step.weights(f"{name}.weight", size, CHANNELS, patch, patch).reshape(size, -1)
    product = step.float_product(rows, name, matrix)
    embedded = graph.op("Add", product, step.vector(f"{name}.bias", size))
    crops = graph.op("Reshape", embedded, transformer.shape_of(step, -1, graph.op("Mul", height, width), size))
    table = step.shared(
        f"{TOWER}embeddings.position_embedding.weight",
        lambda: step.weights(f"{TOWER}embeddings.position_embedding.weight", config.positions_per_side**2, size),
    )
    places = transformer.nearest_positions(step, height, width, config.positions_per_side)
    return graph.op("Add", crops, graph.op("Gather", table, places))


def _layer(step: Step, config: TowerConfig, name: str, x: str) -> str:
    graph, size, eps = step.graph, config.hidden_size, config.layer_norm_eps
    normed = transformer.layer_norm(step, x, f"{name}.layer_norm1", size, eps)
    mixed = transformer.self_attention(step, normed, f"{name}.self_attn", size, config.num_attention_heads)
    x = graph.op("Add", x, mixed)
    normed = transformer.layer_norm(step, x, f"{name}.layer_norm2", size, eps)
    inner = transformer.linear(step, normed, f"{name}.mlp.fc1", config.intermediate_size, size)
    inner = graph.op("Gelu", inner, approximate=config.gelu)
    return graph.op("Add", x, transformer.linear(step, inner, f"{name}.mlp.fc2", size, config.intermediate_size))


def _window_merger(step: Step, config: TowerConfig, x: str, height: str, width: str) -> str:
    """Four neighbours become one: [C,4*h*w,size] -> [C,h*w,size]."""
    graph, size, name = step.graph, config.hidden_size, f"{TOWER}vit_merger"
    windows = transformer.neighbours(step, x, height, width, size)
    normed = transformer.layer_norm(step, windows, f"{name}.layer_norm1", size, config.layer_norm_eps)
    mixed = transformer.self_attention(step, normed, f"{name}.self_attn", size, config.num_attention_heads)
    windows = graph.op("Add", windows, mixed)
    mean = graph.op("ReduceMean", windows, graph.constant(np.array([1]), "int64"), keepdims=0)
    flat = graph.op("Reshape", windows, transformer.shape_of(step, -1, 4 * size))
    flat = transformer.layer_norm(step, flat, f"{name}.pre_norm", 4 * size, config.layer_norm_eps)
    inner = transformer.linear(step, flat, f"{name}.linear_1", 4 * config.intermediate_size, 4 * size)
    inner = graph.op("Gelu", inner, approximate="tanh")
    merged = transformer.linear(step, inner, f"{name}.linear_2", size, 4 * config.intermediate_size)
    merged = graph.op("Add", merged, mean)
    return graph.op("Reshape", merged, transformer.shape_of(step, -1, graph.op("Mul", height, width), size))


def _merger(step: Step, config: TowerConfig, x: str, height: str, width: str) -> str:
    """Four neighbours become one image token of the text's width: [C,4*h*w,size] -> [C*h*w,H]."""
    graph, wide, name = step.graph, 4 * config.hidden_size, f"{MERGER}mlp.0"
    windows = transformer.neighbours(step, x, height, width, config.hidden_size)
    flat = graph.op("Reshape", windows, transformer.shape_of(step, -1, wide))
    flat = transformer.layer_norm(step, flat, f"{name}.pre_norm", wide, MERGER_EPS)
    inner = graph.op("Gelu", transformer.linear(step, flat, f"{name}.linear_1", wide, wide), approximate="none")
    return transformer.linear(step, inner, f"{name}.linear_2", config.text_hidden_size, wide)


def num_parameters(config: TowerConfig) -> int:
    """The parameters of the tower and its mergers."""
    size, inner, wide = config.hidden_size, config.intermediate_size, 4 * config.hidden_size
    attention = 4 * (size * size + size)
    layer = 4 * size + attention + 2 * size * inner + inner + size
    embeddings = size * (CHANNELS * config.patch_size**2 + 1 + config.positions_per_side**2)
    total = embeddings + config.num_hidden_layers * layer + 2 * size
    if config.insert_layer_id is not None:
        total += 2 * size + attention + 2 * wide + (wide + 1) * 4 * inner + (4 * inner + 1) * size
    return total + 2 * wide + (wide + 1) * wide + (wide + 1) * config.text_hidden_size


def working_bytes(config: TowerConfig, num_patches: int) -> int:
    """About what a run takes for a crop of that many patches, beside the weights.

    Measured at 1,024 to 4,096 patches, as in docs/vision.md: linear in them, since attention keeps no whole scores.
    """
    return 4 * num_patches * (4 * config.intermediate_size + 11 * config.hidden_size)
