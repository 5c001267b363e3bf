"""The dense parts of a bundle: embed, one segment per MoE layer with the lookahead onto it, and the head.

It walks an architecture's layers and decides where one part ends and the next begins; what a layer computes it leaves
to the architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from lesonnx.drafter_wiring import ROLES
from lesonnx.manifest import Part, State
from lesonnx.vision_wiring import deepstack_name
from lesonnx_export.architectures.base import Decoder, Routing
from lesonnx_export.blocks import Precision, Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.drafter import DSpark
from lesonnx_export.graph import DenseStore, Graph

LOGIT_ROWS = "logit_rows"


@dataclass(frozen=True)
class BuiltPart:
    """A part's entry in the manifest, its states, and its model."""

    part: Part
    states: list[State]
    model: onnx.ModelProto


class PartBuilder:
    """Builds parts one by one into a store; call in the order of ``names``. Single-threaded."""

    # Whether what completes a layer's output gives it to the outside.
    gives_layer_outputs = True

    def __init__(
        self,
        architecture: Decoder,
        weights: Weights,
        store: DenseStore,
        precision: Precision,
        drafter: DSpark | None = None,
        deepstack_layers: int = 0,
    ) -> None:
        self.architecture = architecture
        self.weights = weights
        self.store = store
        self.precision = precision
        self.drafter = drafter
        # Behind so many of the first layers, what a picture's image tokens have more is added.
        self.deepstack_layers = deepstack_layers

    @property
    def names(self) -> list[str]:
        """The parts in the order of the forward pass: embed, segment, lookahead, segment, …, head.

        Then the replays and, where there is a drafter, its parts: they find the head's and the embedding's bytes there.
        """
        names = ["embed"]
        for place, layer_idx in enumerate(self.architecture.moe_layers):
            names.append(f"segment_{layer_idx:03d}")
            if self.architecture.routes_before_mixing:
                names.append(f"mixer_{layer_idx:03d}")
            if place:
                names.append(f"lookahead_{layer_idx:03d}")
        return [*names, "head", *self.architecture.replays, *(ROLES if self.drafter else ())]

    def build(self, name: str) -> BuiltPart:
        """Build the part of that name."""
        role, _, number = (name, "", "") if name in ROLES else name.partition("_")
        step = Step(Graph(name, self.store), self.weights, self.precision)
        layer_idx = int(number) if role in ("segment", "mixer", "lookahead") else None
        if role == "replay":
            self.architecture.replays[name].replay(step)
        elif self.drafter is not None and role in ROLES:
            self.drafter.build(step, role)
        elif role == "embed":
            self._embed(step)
        elif role == "segment":
            self._segment(step, int(number))
        elif role == "mixer":
            self._mixer(step, int(number))
        elif role == "lookahead":
            self._lookahead(step, int(number))
        else:
            self._head(step)
        part = Part(
            name=name,
            role=role,  # type: ignore[arg-type]
            path=f"dense/{name}.onnx",
            layer_idx=layer_idx,
            inputs=step.graph.inputs,
            outputs=step.graph.outputs,
        )
        return BuiltPart(part, step.states, step.graph.model())

    def build_all(self) -> Iterator[BuiltPart]:
        for name in self.names:
            yield self.build(name)

    def _before(self, layer_idx: int) -> int | None:
        """The MoE layer before a layer."""
        return max((idx for idx in self.architecture.moe_layers if idx < layer_idx), default=None)

    def _embed(self, step: Step) -> None:
        ids = step.graph.input("input_ids", "int64", [1, "T"])
        hidden = self.architecture.embed(step, ids)
        step.graph.output(hidden, "hidden", "float32", [1, "T", self.architecture.hidden_size])

    def _segment(self, step: Step, layer_idx: int) -> None:
        architecture, graph = self.architecture, step.graph
        residual = self._enter(step, self._before(layer_idx), layer_idx)
        hidden = architecture.hidden_size
        if architecture.routes_before_mixing:
            graph.output(residual, "residual_out", "float32", [1, "T", hidden])
            router_input = self._rows(step, residual)
        else:
            residual, moe_input = self._mix(step, layer_idx, residual)
            router_input = architecture.router_input(step, layer_idx, residual, moe_input)
        self._route(step, layer_idx, router_input)

    def _route(self, step: Step, layer_idx: int, router_input: str) -> None:
        self._give_routing(step, self.architecture.route(step, layer_idx, router_input))

    def _give_routing(self, step: Step, routing: Routing) -> None:
        """What hosts and the next segment take from a router."""
        graph, slots = step.graph, self.architecture.num_experts_per_tok
        graph.output(routing.ids, "topk_ids", "int64", ["T", slots])
        graph.output(routing.weights, "topk_weights_out", "float32", ["T", slots])
        if routing.shared_weights is not None:
            graph.output(routing.shared_weights, "shared_weights_out", "float32", ["T", 1])
        graph.output(routing.scores, "router_scores", "float32", ["T", self.architecture.num_experts])

    def _mixer(self, step: Step, layer_idx: int) -> None:
        """What comes between a router that speaks early and its experts."""
        residual = step.graph.input("residual", "float32", [1, "T", self.architecture.hidden_size])
        self._mix(step, layer_idx, residual)

    def _mix(self, step: Step, layer_idx: int, residual: str) -> tuple[str, str]:
        """Mix tokens, give what is carried on and what the experts see; both."""
        architecture, graph = self.architecture, step.graph
        residual = architecture.mixer(step, layer_idx, residual)
        moe_input = architecture.moe_input(step, layer_idx, residual)
        carried = architecture.carry(step, layer_idx, residual)
        graph.output(carried, "residual_out", "float32", [1, "T", architecture.residual_size])
        graph.output(moe_input, "moe_input", "float32", ["T", architecture.hidden_size])
        return residual, moe_input

    def _rows(self, step: Step, x: str) -> str:
        """[1,T,H] -> [T,H]."""
        return step.graph.op("Reshape", x, step.graph.constant([-1, self.architecture.hidden_size], "int64"))

    def _head(self, step: Step) -> None:
        architecture, graph = self.architecture, step.graph
        last = self.architecture.num_hidden_layers
        residual = self._enter(step, self._before(last), last)
        rows = graph.op("Gather", residual, graph.input(LOGIT_ROWS, "int64", ["R"]), axis=1)
        flat = graph.op("Reshape", rows, graph.constant([-1, architecture.hidden_size], "int64"))
        graph.output(architecture.logits(step, flat), "logits", "float32", ["R", architecture.vocab_size])

    def _enter(self, step: Step, moe_idx: int | None, until: int) -> str:
        """The residual at the input of layer ``until``: the combine of the MoE layer before, and dense layers between.

        Every layer whose output is completed here also gives it to the outside, for drafters.
        """
        architecture, graph = self.architecture, step.graph
        shape: list[int | str] = [1, "T", architecture.hidden_size]
        if moe_idx is None:
            residual, first = graph.input("hidden", "float32", shape), 0
        else:
            residual, first = self._combine(step, moe_idx), moe_idx + 1
            residual = self._layer_output(graph, residual, moe_idx)
        for layer_idx in range(first, until):
            residual = architecture.dense(step, layer_idx, architecture.mixer(step, layer_idx, residual))
            residual = self._layer_output(graph, residual, layer_idx)
        return residual

    def _layer_output(self, graph: Graph, residual: str, layer_idx: int) -> str:
        shape: list[int | str] = [1, "T", self.architecture.hidden_size]
        if layer_idx < self.deepstack_layers:
            residual = graph.op("Add", residual, graph.input(deepstack_name(layer_idx), "float32", shape))
        if not self.gives_layer_outputs:
            return residual
        return graph.output(residual, f"layer_output_{layer_idx}", "float32", shape)

    def _combine(self, step: Step, layer_idx: int, expert_out: str | None = None) -> str:
        """The output of MoE layer ``layer_idx``.

        Of its experts it takes the sum over slots of weight times output, in the router's order, and the weighted
        shared expert.
        """
        architecture, graph = self.architecture, step.graph
        hidden, slots = architecture.hidden_size, architecture.num_experts_per_tok
        residual = graph.input("residual", "float32", [1, "T", architecture.residual_size])
        expert_out = expert_out or graph.input("expert_out", "float32", ["T", slots, hidden])
        weights = graph.input("topk_weights", "float32", ["T", slots])
        row = graph.op("Unsqueeze", weights, graph.constant([1], "int64"))
        mixed = graph.op("Reshape", graph.op("MatMul", row, expert_out), graph.constant([1, -1, hidden], "int64"))
        if architecture.shared_expert_shape() is not None:
            shared_out = graph.input("shared_out", "float32", ["T", hidden])
            shared = graph.op("Mul", shared_out, graph.input("shared_weights", "float32", ["T", 1]))
            mixed = graph.op("Add", mixed, shared)
        return architecture.combine(step, layer_idx, residual, mixed)

    def _lookahead(self, step: Step, layer_idx: int) -> None:
        """The router of ``layer_idx`` on what is known of the layer before: rows not ``ready`` count as zero.

        A selection, not a product: what is not written yet holds anything, NaN included.
        """
        architecture, graph = self.architecture, step.graph
        hidden, slots = architecture.hidden_size, architecture.num_experts_per_tok
        expert_out = graph.input("expert_out", "float32", ["T", slots, hidden])
        ready = graph.op("Unsqueeze", graph.input("ready", "bool", ["T", slots]), graph.constant([2], "int64"))
        known = graph.op("Where", ready, expert_out, graph.constant(0.0))
        before = self._before(layer_idx)
        if before is None:
            raise ValueError(f"nothing comes before MoE layer {layer_idx} to look from")
        residual = self._combine(step, before, known)
        if architecture.routes_before_mixing:
            router_input = self._rows(step, residual)
        else:
            moe_input = architecture.moe_input(step, layer_idx, residual)
            router_input = architecture.router_input(step, layer_idx, residual, moe_input)
        scores = architecture.router_scores(step, layer_idx, router_input)
        graph.output(scores, "scores", "float32", ["T", architecture.num_experts])
