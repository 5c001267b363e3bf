"""What layers without attention carry from token to token: a causal convolution, and the gated delta rule.

Each takes its state as the tensor ``past``, gives ``present``, and can be replayed: run again, alone, on the first rows
of a step, which is how a host goes back to a token inside it. It knows no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lesonnx.errors import CheckpointError
from lesonnx.manifest import Replay, State
from lesonnx_export.blocks import Step
from lesonnx_export.delta_chunks import HeadSizes, delta_chunks
from lesonnx_export.graph import MICROSOFT, Graph

# The oldest ONNX Runtime with com.microsoft.LinearAttention.
LINEAR_ATTENTION_SINCE = "1.25.1"
PAST, PRESENT = "past", "present"
# No tensor is longer along an axis: an end that means "to the last one".
TO_THE_END = 2**31 - 1


def carry(
    step: Step,
    kind: Literal["convolution", "recurrent"],
    layer_idx: int,
    shape: list[int | str],
    present: str,
    rows: Mapping[str, tuple[str, int]],
) -> None:
    """Declare a layer's state of fixed shape; ``rows``: input of the replay part -> value [1,T,n] of this graph, n."""
    graph = step.graph
    graph.output(present, f"present_{kind}_{layer_idx}", "float32", shape)
    given = {name: f"{kind}_{name}_{layer_idx}" for name in rows}
    for name, (value, size) in rows.items():
        graph.output(value, given[name], "float32", [1, "T", size])
    step.states.append(
        State(
            name=f"{kind}_{layer_idx}",
            kind=kind,
            layer_idx=layer_idx,
            part=graph.name,
            input=f"past_{kind}_{layer_idx}",
            output=f"present_{kind}_{layer_idx}",
            dtype="float32",
            shape=shape,
            replay=Replay(part=f"replay_{kind}", rows=given),
        )
    )


@dataclass(frozen=True)
class CausalConvolution:
    """A convolution along the tokens, each channel by itself; its state is the last ``kernel_size - 1`` inputs.

    In plain operators: ONNX Runtime's ``CausalConvWithState`` takes longer.
    """

    channels: int
    kernel_size: int

    def __post_init__(self) -> None:
        if self.kernel_size < 2:
            raise CheckpointError(f"config.json: a convolution over {self.kernel_size} token is not supported")

    @property
    def shape(self) -> list[int | str]:
        return [1, self.kernel_size - 1, self.channels]

    def apply(self, step: Step, layer_idx: int, x: str, weight: str, bias: str | None = None) -> str:
        """x [1,T,channels] convolved with the weight [channels,1,kernel] (and bias) of that name."""
        graph = step.graph
        inputs = graph.op("Concat", graph.input(f"past_convolution_{layer_idx}", "float32", self.shape), x, axis=1)
        taps = step.weights(weight, self.channels, 1, self.kernel_size)
        total = "" if bias is None else graph.constant(step.weights(bias, self.channels))
        for tap in range(self.kernel_size):
            factor = graph.constant(np.ascontiguousarray(taps[:, 0, tap]))
            product = graph.op("Mul", self._shifted(graph, inputs, tap), factor)
            total = graph.op("Add", total, product) if total else product
        carry(step, "convolution", layer_idx, self.shape, self._last(graph, inputs), {"x": (x, self.channels)})
        return total

    def _shifted(self, graph: Graph, inputs: str, tap: int) -> str:
        """What a tap sees: as many inputs as there are tokens, beginning with number ``tap``."""
        end = tap + 1 - self.kernel_size or TO_THE_END
        return _slice(graph, inputs, tap, end)

    def _last(self, graph: Graph, inputs: str) -> str:
        return _slice(graph, inputs, 1 - self.kernel_size, TO_THE_END)

    def replay(self, step: Step) -> None:
        """The state after the rows ``x``, from the state before."""
        graph = step.graph
        past = graph.input(PAST, "float32", self.shape)
        x = graph.input("x", "float32", [1, "T", self.channels])
        graph.output(self._last(graph, graph.op("Concat", past, x, axis=1)), PRESENT, "float32", self.shape)


@dataclass(frozen=True)
class GatedDeltaRule:
    """The recurrence of Gated DeltaNet (arXiv 2412.06464), heads by themselves, keys of unit length.

    S_t = exp(g_t) S_{t-1} + k_t d_t^T with d_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t); the output is S_t^T q_t.
    Values have ``num_value_heads`` heads, and so have the decay g, beta and the state; queries and keys have
    ``num_key_heads``, each of which serves value heads that lie side by side.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise CheckpointError(
                f"config.json: linear_num_value_heads {self.num_value_heads} is not a multiple of"
                f" linear_num_key_heads {self.num_key_heads}"
            )

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def shape(self) -> list[int | str]:
        return [1, self.num_value_heads, self.key_head_dim, self.value_head_dim]

    @property
    def _row_sizes(self) -> dict[str, int]:
        heads = self.num_value_heads
        return {"key": self.key_size, "value": self.value_size, "decay": heads, "beta": heads}

    def apply(self, step: Step, layer_idx: int, query: str, key: str, value: str, decay: str, beta: str) -> str:
        """Packed heads [1,T,heads*size]; ``decay`` is g, at most 0, ``beta`` in 0..1, both [1,T,value heads]."""
        past = step.graph.input(f"past_recurrent_{layer_idx}", "float32", self.shape)
        rows = {"key": key, "value": value, "decay": decay, "beta": beta}
        output, present = self._recur(step, past, query, rows)
        sizes = self._row_sizes
        carry(step, "recurrent", layer_idx, self.shape, present, {name: (rows[name], sizes[name]) for name in rows})
        return output

    def replay(self, step: Step) -> None:
        """The state after some rows, from the state before; the same operators as in the step, so the same bits."""
        graph = step.graph
        past = graph.input(PAST, "float32", self.shape)
        rows = {name: graph.input(name, "float32", [1, "T", size]) for name, size in self._row_sizes.items()}
        _, present = self._recur(step, past, rows["key"], rows)
        graph.output(present, PRESENT, "float32", self.shape)

    def _recur(self, step: Step, past: str, query: str, rows: Mapping[str, str]) -> tuple[str, str]:
        graph, heads = step.graph, self.num_value_heads
        query, key = self._for_value_heads(graph, query), self._for_value_heads(graph, rows["key"])
        if step.precision.operators == "portable":
            sizes = HeadSizes(heads, self.key_head_dim, self.value_head_dim)
            return delta_chunks(graph, sizes, past, query, key, rows["value"], rows["decay"], rows["beta"])
        output, present = graph.ops(
            "LinearAttention",
            2,
            *(query, key, rows["value"], past, rows["decay"], rows["beta"]),
            domain=MICROSOFT,
            q_num_heads=heads,
            kv_num_heads=heads,
            update_rule="gated_delta",
            scale=1.0,
        )
        return output, present

    def _for_value_heads(self, graph: Graph, x: str) -> str:
        """Every key head as often as there are value heads that it serves: [1,T,value heads*size]."""
        repeats = self.num_value_heads // self.num_key_heads
        if repeats == 1:
            return x
        x = graph.op("Reshape", x, graph.constant([1, -1, self.num_key_heads, 1, self.key_head_dim], "int64"))
        x = graph.op("Expand", x, graph.constant([1, 1, 1, repeats, 1], "int64"))
        return graph.op("Reshape", x, graph.constant([1, -1, self.num_value_heads * self.key_head_dim], "int64"))


def _slice(graph: Graph, x: str, start: int, end: int) -> str:
    """Tokens start to end of [1,T,n]."""
    return graph.op("Slice", x, *(graph.constant([value], "int64") for value in (start, end, 1)))
