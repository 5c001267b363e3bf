"""Pillow's bicubic resize of 8-bit pictures as ONNX operators, value for value.

After Pillow 13's ``Resample.c``: one axis after the other, each rounded to 8 bits; weights in float64, normalised, then
rounded to 22 bits. Products and sums of whole numbers below 2^53 are exact in float64 in any order, so every machine
gives the same pixels. ONNX's Resize has its weights in float32 and comes only near.
"""

from __future__ import annotations

from collections.abc import Callable

from lesonnx_export.graph import Graph

FLOAT64, INT64, UINT8 = 11, 7, 2
PRECISION_BITS = 22
# The filter's reach to either side, in inputs where it enlarges, in outputs where it shrinks.
REACH = 2.0
# Of a block's inputs, its start and its end (int64 [1]): [end-start, values of one].
Inputs = Callable[[str, str], str]


def resize(graph: Graph, image: str, size: str, block: int) -> str:
    """[Y,X,3] uint8 to ``size`` (int64 [2]: height, width), both multiples of ``block``: [height,width,3] uint8.

    Rows are resized first, unless the height loses more than twice what the width does.
    """
    whole = graph.op("Shape", image, start=0, end=2)
    lost = graph.op("Sub", whole, size)
    lost_height, lost_width = (_scalar(graph, value) for value in _two(graph, lost))
    most = graph.op("Max", graph.op("Mul", lost_width, _integer(graph, 2)), _integer(graph, 0))
    columns_first = graph.op("Greater", lost_height, most)
    turned = [graph.op("Gather", value, graph.constant([1, 0], "int64")) for value in (whole, size)]
    lengths, counts = (
        _two(graph, graph.op("Where", columns_first, straight, other))
        for straight, other in zip((whole, size), turned, strict=True)
    )

    def of_image(start: str, end: str) -> str:
        return graph.choose(
            columns_first,
            lambda: _flat(graph, graph.op("Slice", image, start, end, graph.constant([0], "int64"))),
            lambda: of_second_axis(image, start, end),
            "uint8",
            ["span", "values"],
        )

    def of_second_axis(x: str, start: str, end: str) -> str:
        sliced = graph.op("Slice", x, start, end, graph.constant([1], "int64"))
        return _flat(graph, graph.op("Transpose", sliced, perm=[1, 0, 2]))

    def three_axes(x: str, first: str, second: str) -> str:
        return graph.op("Reshape", x, graph.op("Concat", first, second, graph.constant([3], "int64"), axis=0))

    once = three_axes(_resample(graph, of_image, lengths[0], counts[0], block), counts[0], lengths[1])
    rows = _resample(graph, lambda start, end: of_second_axis(once, start, end), lengths[1], counts[1], block)
    twice = three_axes(rows, counts[1], counts[0])
    return graph.choose(
        columns_first,
        lambda: graph.op("Transpose", twice, perm=[1, 0, 2]),
        lambda: graph.op("Identity", twice),
        "uint8",
        ["height", "width", 3],
    )


def _resample(graph: Graph, inputs: Inputs, length: str, count: str, block: int) -> str:
    """One axis from ``length`` to ``count`` (int64 [1]): uint8 [count / block,block,values].

    It goes by blocks of outputs, so that no more inputs than a block sees are held as float64 at once.
    """
    half = graph.double(0.5)
    scale = graph.op("Div", _double(graph, length), _double(graph, count))
    stretch = graph.op("Max", scale, graph.double(1.0))
    support = graph.op("Mul", stretch, graph.double(REACH))
    sharpness = graph.op("Div", graph.double(1.0), stretch)
    in_block = graph.constant([[place] for place in range(block)], "int64")
    to_bits = graph.double(2.0**-PRECISION_BITS)

    def outputs(number: str) -> str:
        places = graph.op("Add", graph.op("Mul", number, _integer(graph, block)), in_block)
        centers = graph.op("Mul", graph.op("Add", _double(graph, places), half), scale)
        # What each output sees, [block,1], and what the block sees: from its first output's first to its last's last.
        starts = graph.op("Floor", graph.op("Add", graph.op("Sub", centers, support), half))
        ends = graph.op("Floor", graph.op("Add", graph.op("Add", centers, support), half))
        start = graph.op("Max", _edge(graph, starts, 0), graph.constant([0], "int64"))
        end = graph.op("Min", _edge(graph, ends, block - 1), length)
        span = graph.op("Range", _scalar(graph, start), _scalar(graph, end), _integer(graph, 1))
        seen = _double(graph, span)
        distances = graph.op("Mul", graph.op("Add", graph.op("Sub", seen, centers), half), sharpness)
        inside = graph.op("And", graph.op("GreaterOrEqual", seen, starts), graph.op("Less", seen, ends))
        weights = graph.op("Where", inside, _bicubic(graph, distances), graph.double(0.0))
        sums = graph.op("MatMul", _whole(graph, weights), _double(graph, inputs(start, end)))
        levels = graph.op("Floor", graph.op("Add", graph.op("Mul", sums, to_bits), half))
        return graph.op("Cast", graph.op("Clip", levels, graph.double(0.0), graph.double(255.0)), to=UINT8)

    blocks = graph.op("Div", count, graph.constant([block], "int64"))
    return graph.stack(_scalar(graph, blocks), outputs, "uint8", [block, "values"])


def _bicubic(graph: Graph, x: str) -> str:
    """Keys' kernel with a = -0.5, in the order of Pillow's operations; zero from 2 on."""
    x = graph.op("Abs", x)
    near = graph.op("Sub", graph.op("Mul", x, graph.double(1.5)), graph.double(2.5))
    near = graph.op("Add", graph.op("Mul", graph.op("Mul", near, x), x), graph.double(1.0))
    far = graph.op("Add", graph.op("Mul", graph.op("Sub", x, graph.double(5.0)), x), graph.double(8.0))
    far = graph.op("Mul", graph.op("Sub", graph.op("Mul", far, x), graph.double(4.0)), graph.double(-0.5))
    far = graph.op("Where", graph.op("Less", x, graph.double(REACH)), far, graph.double(0.0))
    return graph.op("Where", graph.op("Less", x, graph.double(1.0)), near, far)


def _whole(graph: Graph, weights: str) -> str:
    """Every row over its sum, times 2^22, to the nearest whole number, halves away from zero."""
    total = graph.op("ReduceSum", weights, graph.constant([1], "int64"), keepdims=1)
    scaled = graph.op("Mul", graph.op("Div", weights, total), graph.double(2.0**PRECISION_BITS))
    sizes = graph.op("Floor", graph.op("Add", graph.op("Abs", scaled), graph.double(0.5)))
    return graph.op("Mul", sizes, graph.op("Sign", scaled))


def _two(graph: Graph, pair: str) -> tuple[str, str]:
    """The values of an int64 [2], each as [1]."""
    first, second = graph.ops("Split", 2, pair, graph.constant([1, 1], "int64"), axis=0)
    return first, second


def _flat(graph: Graph, x: str) -> str:
    """[n,m,3] -> [n,m*3]."""
    return graph.op(
        "Reshape", x, graph.op("Concat", graph.op("Shape", x, start=0, end=1), graph.constant([-1], "int64"), axis=0)
    )


def _edge(graph: Graph, column: str, row: int) -> str:
    """One value of a column [n,1] as int64 [1]."""
    return _integers(
        graph,
        graph.op("Squeeze", graph.op("Gather", column, graph.constant([row], "int64")), graph.constant([1], "int64")),
    )


def _scalar(graph: Graph, x: str) -> str:
    return graph.op("Squeeze", x, graph.constant([0], "int64"))


def _integer(graph: Graph, value: int) -> str:
    return graph.constant(value, "int64")


def _integers(graph: Graph, x: str) -> str:
    return graph.op("Cast", x, to=INT64)


def _double(graph: Graph, x: str) -> str:
    return graph.op("Cast", x, to=FLOAT64)
