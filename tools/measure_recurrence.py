"""Times the operators that recurrent layers could be made of, at Qwen3-Next's shape; docs/experiments.md has a table.

    python tools/measure_recurrence.py [--runs 20] [--threads 2]

Each form runs as a model of its own on top of a state, in turns, so that what else the machine does hits all alike.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from lesonnx_export.blocks import Operators, Precision, Step
from lesonnx_export.graph import MICROSOFT, DenseStore, Graph
from lesonnx_export.recurrent import CausalConvolution, GatedDeltaRule

RULE = GatedDeltaRule(num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128)
CONVOLUTION = CausalConvolution(channels=2 * RULE.key_size + RULE.value_size, kernel_size=4)
WIDTHS = (1, 7, 96, 512)
Feed = dict[str, NDArray[np.float32]]
Form = Callable[[Step], None]


class RandomWeights:
    """The convolution's weight, whatever it is called."""

    def __call__(self, name: str, *shape: int) -> NDArray[np.float32]:
        return np.random.default_rng(0).standard_normal(shape, np.float32)


def delta_rule(step: Step) -> None:
    """As exported, by the step's operators."""
    heads = RULE.num_value_heads
    sizes = {"query": RULE.key_size, "key": RULE.key_size, "value": RULE.value_size, "decay": heads, "beta": heads}
    inputs = [step.graph.input(name, "float32", [1, "T", size]) for name, size in sizes.items()]
    step.graph.output(RULE.apply(step, 0, *inputs), "output", "float32", [1, "T", RULE.value_size])


def gated_delta_net(step: Step) -> None:
    """``GatedDeltaNet``, of ONNX Runtime 1.32; its state lies the other way round, which makes no difference here."""
    graph, heads, size = step.graph, RULE.num_value_heads, RULE.key_head_dim

    def heads_of(name: str, count: int) -> str:
        x = graph.input(name, "float32", [1, "T", count * size])
        return graph.op("Reshape", x, graph.constant([-1, count, size], "int64"))

    query, key, value = heads_of("query", 16), heads_of("key", 16), heads_of("value", heads)
    gates = [
        graph.op("Reshape", graph.input(name, "float32", [1, "T", heads]), graph.constant([-1, heads], "int64"))
        for name in ("decay", "beta")
    ]
    past = graph.input("past_recurrent_0", "float32", RULE.shape)
    output, present = graph.ops("GatedDeltaNet", 2, query, key, value, "", *gates, past, domain=MICROSOFT, scale=1.0)
    graph.output(output, "output", "float32", ["T", heads, size])
    graph.output(present, "present_recurrent_0", "float32", RULE.shape)


def convolution(step: Step) -> None:
    """As exported: the taps' products, summed."""
    x = step.graph.input("x", "float32", [1, "T", CONVOLUTION.channels])
    y = CONVOLUTION.apply(step, 0, x, "weight")
    step.graph.output(step.graph.op("Mul", y, step.graph.op("Sigmoid", y)), "y", "float32", [1, "T", 1])


def causal_conv_with_state(step: Step) -> None:
    """``CausalConvWithState`` between transpositions: its channels come first, in its state too."""
    graph, channels = step.graph, CONVOLUTION.channels
    x = graph.op("Transpose", graph.input("x", "float32", [1, "T", channels]), perm=[0, 2, 1])
    past = graph.input("past_convolution_0", "float32", [1, channels, 3])
    weight = graph.weight("weight", step.weights("weight", channels, 1, 4))
    inputs = (x, weight, "", past)
    y, present = graph.ops("CausalConvWithState", 2, *inputs, domain=MICROSOFT, activation="silu")
    graph.output(graph.op("Transpose", y, perm=[0, 2, 1]), "y", "float32", [1, "T", channels])
    graph.output(present, "present_convolution_0", "float32", [1, channels, 3])


FORMS: dict[str, dict[str, tuple[Form, Operators]]] = {
    "delta rule": {
        "LinearAttention (native)": (delta_rule, "native"),
        "plain operators (portable)": (delta_rule, "portable"),
        "GatedDeltaNet": (gated_delta_net, "native"),
    },
    "convolution": {
        "plain operators (both)": (convolution, "native"),
        "CausalConvWithState": (causal_conv_with_state, "native"),
    },
}


def open_form(directory: Path, form: Form, operators: Operators, threads: int) -> Any:
    """A session of that form; None where the installed ONNX Runtime does not have its operator."""
    directory.mkdir(parents=True)
    store = DenseStore(directory / "dense.bin")
    graph = Graph("form", store)
    form(Step(graph, RandomWeights(), Precision(32, 0, operators=operators)))  # type: ignore[arg-type]
    store.close()
    path = directory / "form.onnx"
    path.write_bytes(graph.model().SerializeToString())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001  (ONNX Runtime raises many unrelated types)
        return None


def feed_of(session: Any, width: int) -> Feed:
    random = np.random.default_rng(width)
    feed: Feed = {}
    for value in session.get_inputs():
        shape = [size if isinstance(size, int) else width for size in value.shape]
        feed[value.name] = random.standard_normal(shape, np.float32) * np.float32(0.1)
    if "decay" in feed:
        feed["decay"] = -np.abs(feed["decay"])
        feed["beta"] = np.abs(feed["beta"])
    return feed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    print(
        f"ONNX Runtime {onnxruntime.__version__}, {arguments.threads} threads, median (least) of {arguments.runs}, ms"
    )
    with tempfile.TemporaryDirectory() as directory:
        for what, forms in FORMS.items():
            sessions = {}
            for place, (name, (form, operators)) in enumerate(forms.items()):
                session = open_form(Path(directory) / what / str(place), form, operators, arguments.threads)
                if session is not None:
                    sessions[name] = session
            times: dict[tuple[str, int], list[float]] = {}
            for width in WIDTHS:
                feeds = {name: feed_of(session, width) for name, session in sessions.items()}
                for name, session in sessions.items():
                    session.run(None, feeds[name])
                for _ in range(arguments.runs):
                    for name, session in sessions.items():
                        began = time.perf_counter()
                        session.run(None, feeds[name])
                        times.setdefault((name, width), []).append((time.perf_counter() - began) * 1e3)
            print(f"\n| {what} | " + " | ".join(f"T = {width}" for width in WIDTHS) + " |")
            print("|---" * (len(WIDTHS) + 1) + "|")
            for name in sessions:
                cells = (f"{np.median(times[name, width]):.2f} ({min(times[name, width]):.2f})" for width in WIDTHS)
                print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
