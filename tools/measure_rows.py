"""Which dense operators of ONNX Runtime's CPU provider give a row other bits when several rows run together.

    python tools/measure_rows.py [--threads N]

Each operator is run on 16 rows at once, on its first 2, 3, 5 and 8, and row by row; a row's output by itself is what it
is compared with. What differs is why a verify pass may round otherwise than plain decoding (docs/speculation.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[np.float32]
WIDTHS = (2, 3, 5, 8, 16)
HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, PAST = 256, 8, 2, 32, 40


@dataclass
class Case:
    """An operator with its weights: ``x`` [1,T,width] in, ``y`` out."""

    name: str
    model: onnx.ModelProto
    width: int
    has_past: bool = False


def one_node(name: str, node: onnx.NodeProto, weights: dict[str, NDArray[np.generic]], width: int = HIDDEN) -> Case:
    """A case of one node from ``x`` to ``y``."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "T", width])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    stored = [numpy_helper.from_array(value, key) for key, value in weights.items()]
    graph = helper.make_graph([node], "case", inputs, outputs, stored)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return Case(name, helper.make_model(graph, opset_imports=opsets, ir_version=10), width)


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Every operator that dense parts hold and that mixes numbers of a row (elementwise ones cannot differ)."""
    for n in (512, 33):
        weight = rng.normal(0, 0.05, (HIDDEN, n)).astype(np.float32)
        yield one_node(f"MatMul float32, {HIDDEN} x {n}", helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": weight})
    for bits in (2, 4, 8):
        for block, level in ((32, 4), (64, 4), (128, 4), (32, 0)):
            blob = rng.integers(0, 256, (512, HIDDEN // block, block * bits // 8)).astype(np.uint8)
            scales = rng.uniform(0.001, 0.01, 512 * HIDDEN // block).astype(np.float32)
            node = helper.make_node(
                "MatMulNBits",
                ["x", "w", "s"],
                ["y"],
                domain="com.microsoft",
                K=HIDDEN,
                N=512,
                bits=bits,
                block_size=block,
                accuracy_level=level,
            )
            name = f"MatMulNBits {bits} bits, block {block}, accuracy level {level}"
            yield one_node(name, node, {"w": blob, "s": scales})
    scale = rng.normal(1, 0.1, HIDDEN).astype(np.float32)
    yield one_node("RMSNormalization", helper.make_node("RMSNormalization", ["x", "w"], ["y"], axis=-1), {"w": scale})
    yield one_node("LayerNormalization", helper.make_node("LayerNormalization", ["x", "w"], ["y"]), {"w": scale})
    yield one_node("Softmax", helper.make_node("Softmax", ["x"], ["y"], axis=-1), {})
    yield one_node("ReduceSum", helper.make_node("ReduceSum", ["x", "a"], ["y"]), {"a": np.array([-1], np.int64)})
    yield attention()


def attention() -> Case:
    """GroupQueryAttention on a cache of float32, packed queries, keys and values, `PAST` tokens before the rows."""
    width = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
    node = helper.make_node(
        "GroupQueryAttention",
        ["x", "", "", "past_key", "past_value", "seqlens_k", "total"],
        ["y", "key", "value"],
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
    )
    cache = [1, KV_HEADS, "S", HEAD_SIZE]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "T", width]),
        helper.make_tensor_value_info("past_key", TensorProto.FLOAT, cache),
        helper.make_tensor_value_info("past_value", TensorProto.FLOAT, cache),
        helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [1]),
        helper.make_tensor_value_info("total", TensorProto.INT32, []),
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "key", "value")]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "case", inputs, outputs)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return Case("GroupQueryAttention, 40 tokens before", model, width, has_past=True)


def run(session: onnxruntime.InferenceSession, case: Case, rows: Array, past: tuple[Array, Array]) -> list[Array]:
    """The outputs for rows [T,width], and the cache behind them."""
    feeds: dict[str, NDArray[np.generic]] = {"x": rows[None]}
    if case.has_past:
        total = past[0].shape[2] + len(rows)
        feeds |= {"past_key": past[0], "past_value": past[1], "seqlens_k": np.array([total - 1], np.int32)}
        feeds["total"] = np.array(total, np.int32)
    found: list[Array] = session.run(None, feeds)
    return found


def main() -> None:
    """Print a line an operator."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=0)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = parser.parse_args().threads
    rng = np.random.default_rng(1)
    print(f"onnxruntime {onnxruntime.__version__}; share of values with other bits, by rows run together")
    for case in cases(rng):
        session = onnxruntime.InferenceSession(case.model.SerializeToString(), options, ["CPUExecutionProvider"])
        rows = rng.normal(0, 1, (max(WIDTHS), case.width)).astype(np.float32)
        cache = [rng.normal(0, 1, (1, KV_HEADS, PAST, HEAD_SIZE)).astype(np.float32) for _ in range(2)]
        singles, past = [], (cache[0], cache[1])
        for row in rows:
            found = run(session, case, row[None], past)
            singles.append(found[0][0])
            past = (found[1], found[2]) if case.has_past else past
        single = np.concatenate(singles)
        shares, most = [], 0.0
        for width in WIDTHS:
            together = run(session, case, rows[:width], (cache[0], cache[1]))[0][0]
            shares.append(float((together.view(np.uint32) != single[:width].view(np.uint32)).mean()))
            most = max(most, float(np.abs(together - single[:width]).max() / np.abs(single[:width]).max()))
        found_shares = " ".join(f"{width}: {share:4.0%}" for width, share in zip(WIDTHS, shares, strict=True))
        print(f"{case.name:45} {found_shares}   at most {most:.1e} of the greatest value")


if __name__ == "__main__":
    main()
