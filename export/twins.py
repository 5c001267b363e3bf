"""Twins: the segments and the head once more, for accelerators, with the positions and selections that they need.

It walks the parts as `PartBuilder` does, with a twin's steps; what a layer computes the architecture says. The twins of
a decode step and of a prefill chunk name the same bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from lesonnx.errors import InputError
from lesonnx.manifest import Dtype, Positions, Selection, Target, Twin, Twins
from lesonnx_export.architectures.base import Decoder
from lesonnx_export.blocks import Precision, Step
from lesonnx_export.checkpoint import Weights
from lesonnx_export.graph import Graph
from lesonnx_export.providers import twin_providers
from lesonnx_export.segments import PartBuilder
from lesonnx_export.twin_graph import LONGEST_AXIS, TwinGraph, TwinStore, check_twin
from lesonnx_export.twin_step import Positions as PositionsBuilder
from lesonnx_export.twin_step import RouterCut, TwinStep, num_pieces

# Compiled models are found again by it: letters and digits, at most 64.
COREML_CACHE_KEY = "COREML_CACHE_KEY"
POSITIONS_PATH = "dense/twin_positions.onnx"


@dataclass(frozen=True)
class TwinOptions:
    """What was chosen of twins: where they run, tokens in the cache, the rows of a chunk, and float16 or float32."""

    target: Target
    capacity_tokens: int
    chunk_tokens: int
    float_bits: int

    @property
    def half(self) -> Dtype:
        return "float16" if self.float_bits == 16 else "float32"

    @property
    def widths(self) -> list[int]:
        """The rows of steps that have twins: one, and a whole chunk of a prompt."""
        return sorted({1, self.chunk_tokens})


@dataclass
class BuiltTwins:
    """The manifest's record, and every model by its path."""

    record: Twins
    models: dict[str, onnx.ModelProto]


@dataclass
class _Parts:
    twins: list[Twin] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    models: dict[str, onnx.ModelProto] = field(default_factory=dict)


class TwinBuilder(PartBuilder):
    """Builds all twins of a model into a store. Single-threaded."""

    gives_layer_outputs = False

    def __init__(
        self, architecture: Decoder, weights: Weights, store: TwinStore, precision: Precision, options: TwinOptions
    ) -> None:
        check_family(architecture)
        super().__init__(architecture, weights, store, precision)
        self.options = options
        self.positions = PositionsBuilder(options.capacity_tokens)
        self._linears: dict[int, list[tuple[str, int, int, str | None]]] = {}

    def twins(self, progress: Callable[[int], None] = lambda num_bytes: None) -> BuiltTwins:
        """All of them; InputError where providers would not take one. ``progress`` is told the bytes stored."""
        parts = _Parts()
        for name in [f"segment_{layer_idx:03d}" for layer_idx in self.architecture.moe_layers] + ["head"]:
            before = self.store.end_bytes
            if name != "head":
                self._select(name, parts)
            for rows in [1] if name == "head" else self.options.widths:
                self._twin(name, rows, parts)
            progress(self.store.end_bytes - before)
        graph = Graph("positions", self.store)
        self.positions.build(graph, self.weights, self.precision)
        parts.models[POSITIONS_PATH] = graph.model()
        record = Twins(
            capacity_tokens=self.options.capacity_tokens,
            float_bits=self.options.float_bits,  # type: ignore[arg-type]
            data=f"dense/{TwinStore.location}",
            positions=Positions(path=POSITIONS_PATH, inputs=graph.inputs, outputs=graph.outputs),
            selections=parts.selections,
            parts=parts.twins,
        )
        return BuiltTwins(record, parts.models)

    def _twin(self, name: str, rows: int, parts: _Parts) -> None:
        title, path = f"{name} for {rows} tokens", f"dense/twin_{name}_{rows}.onnx"
        graph = TwinGraph(title, self.store, rows=rows, capacity=self.options.capacity_tokens, half=self.options.half)
        step = TwinStep(graph, self.weights, self.precision, positions=self.positions)
        if name == "head":
            self._head(step)
        else:
            self._segment(step, int(name.partition("_")[2]))
        model = graph.model()
        check_twin(model, f"{self.architecture.model_type}: {title}", self.options.target)
        providers = twin_providers(self.options.target, self.options.float_bits)
        parts.twins.append(
            Twin(part=name, rows=rows, path=path, inputs=graph.inputs, outputs=graph.outputs, providers=providers)
        )
        parts.models[path] = model

    def _select(self, name: str, parts: _Parts) -> None:
        """A segment's router after its linear maps; layers whose routers are alike share a model."""
        layer_idx = int(name.partition("_")[2])
        graph = Graph("selection", self.store)
        step = RouterCut(graph, self.weights, self.precision)
        self._give_routing(step, self.architecture.route(step, layer_idx, "moe_input"))
        if any("moe_input" in node.input for node in graph.nodes):
            raise InputError(f"--accelerate: {self.architecture.model_type}: its router reads more than its logits")
        self._linears[layer_idx] = step.linears
        model = graph.model()
        path = next(
            (path for path, known in parts.models.items() if known == model), f"dense/twin_select_{layer_idx:03d}.onnx"
        )
        parts.models[path] = model
        parts.selections.append(Selection(part=name, path=path, inputs=graph.inputs, outputs=graph.outputs))

    def _route(self, step: Step, layer_idx: int, router_input: str) -> None:
        """A twin ends at the logits: what follows is its selection's."""
        for number, linear in enumerate(self._linears[layer_idx]):
            logits = step.router_linear(router_input, *linear)
            step.graph.output(logits, RouterCut.input_name(number), "float32", ["T", linear[1]])

    def _head(self, step: Step) -> None:
        architecture, graph = self.architecture, step.graph
        last, vocab_size = architecture.num_hidden_layers, architecture.vocab_size
        rows = self._rows(step, self._enter(step, self._before(last), last))
        for piece in range(num_pieces(vocab_size)):
            if isinstance(step, TwinStep):
                step.piece = piece
            size = min(LONGEST_AXIS, vocab_size - piece * LONGEST_AXIS)
            graph.output(architecture.logits(step, rows), f"logits_{piece}", "float32", ["R", size])


def check_family(architecture: Decoder) -> None:
    """InputError, naming why, for families whose segments are not attention and a router behind it."""
    why = ""
    if architecture.replays:
        why = "it has layers with recurrent or convolution states"
    elif architecture.routes_before_mixing:
        why = "its router reads a layer before attention"
    if why:
        raise InputError(f"--accelerate dense does not go with {architecture.model_type}: {why}")


def write_twins(builder: TwinBuilder, directory: Path, progress: Callable[[int], None]) -> Twins:
    """Build and write all twins into an export's directory; what is there of an earlier run is written over."""
    built = builder.twins(progress)
    store = builder.store
    store.sync()
    for path, model in built.models.items():
        if isinstance(store, TwinStore) and any(twin.path == path for twin in built.record.parts):
            key = hashlib.sha256(store.digest.digest() + model.SerializeToString(deterministic=True)).hexdigest()
            model.metadata_props.add(key=COREML_CACHE_KEY, value=key)
        with (directory / path).open("wb") as file:
            file.write(model.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        onnx.checker.check_model(str(directory / path))
    return built.record
