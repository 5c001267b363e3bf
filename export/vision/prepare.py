"""`vision_prepare`: an upright 8-bit RGB picture resized, cut, scaled and packed, as the processor does it.

It knows how pixels are scaled and packed; which sizes and grids, `lesonnx.vision.cutting` says.
"""

from __future__ import annotations

import numpy as np

from lesonnx.manifest import Part
from lesonnx.vision_wiring import CHANNELS
from lesonnx_export.graph import DenseStore, Graph
from lesonnx_export.segments import BuiltPart
from lesonnx_export.vision.resample import resize
from lesonnx_export.vision.vision_config import Pixels

PATH = "vision/prepare.onnx"


def build_prepare(patch_size: int, pixels: Pixels, store: DenseStore) -> BuiltPart:
    """The part; it has no weights, so the store stays as it is."""
    graph = Graph("vision_prepare", store)
    image = graph.input("image", "uint8", ["Y", "X", CHANNELS])
    size = graph.input("size", "int64", [2])
    grid = graph.input("grid", "int64", [2])
    resized = resize(graph, image, size, patch_size)
    packed = _pack(graph, resized, size, grid, patch_size)
    mean, std = (np.asarray(values, np.float64).reshape(1, CHANNELS, 1, 1) for values in (pixels.mean, pixels.std))
    # In float32 the quotient is the processor's float64 product rounded; the product would not be.
    scaled = graph.op("Div", graph.op("Cast", packed, to=1), graph.constant(1 / pixels.rescale_factor))
    values = graph.op("Div", graph.op("Sub", scaled, graph.constant(mean)), graph.constant(std))
    graph.output(values, "pixel_values", "float32", [1, CHANNELS, patch_size, "W"])
    part = Part(name="vision_prepare", role="vision_prepare", path=PATH, inputs=graph.inputs, outputs=graph.outputs)
    return BuiltPart(part, [], graph.model())


def _pack(graph: Graph, image: str, size: str, grid: str, patch_size: int) -> str:
    """[y,x,3] -> [1,3,P,W]: the crops of the grid row by row, patches of each row by row."""
    rows, columns = graph.ops("Split", 2, grid, graph.constant([1, 1], "int64"), axis=0)
    patches = graph.op("Div", size, graph.op("Mul", grid, graph.constant(patch_size, "int64")))
    high, wide = graph.ops("Split", 2, patches, graph.constant([1, 1], "int64"), axis=0)
    side = graph.constant([patch_size], "int64")
    shape = graph.op("Concat", rows, high, side, columns, wide, side, graph.constant([CHANNELS], "int64"), axis=0)
    packed = graph.op("Transpose", graph.op("Reshape", image, shape), perm=[6, 2, 0, 3, 1, 4, 5])
    return graph.op("Reshape", packed, graph.constant([1, CHANNELS, patch_size, -1], "int64"))
