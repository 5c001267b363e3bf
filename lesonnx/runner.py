"""One step of the model: token ids in, logits out, walking embed, segments with their experts, and head.

It knows parts, states and the schedule's interface; it samples nothing and decides nothing about loading.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lesonnx import memory, ort
from lesonnx.bundle import Bundle
from lesonnx.drafter_wiring import layer_output_name
from lesonnx.engines import LayerWork
from lesonnx.errors import ContextError, InputError
from lesonnx.expert_share import ExpertShare
from lesonnx.governor import Governor
from lesonnx.history import History
from lesonnx.loader import ExpertLoader, Lookahead
from lesonnx.manifest import Part
from lesonnx.prompt import Prompt
from lesonnx.states import LayerStates
from lesonnx.step_buffers import StepBuffers
from lesonnx.step_states import REWINDABLE_TOKENS
from lesonnx.timeline import DENSE
from lesonnx.twins import Twins, TwinWidth
from lesonnx.vision_wiring import deepstack_name

Logits = NDArray[np.float32]
# What ONNX Runtime and Python take beside what is counted here.
SPARE_BYTES = 48 << 20


class Routing(Protocol):
    """Replaces what the routers say; see ``bench.routing``."""

    def begin_step(self, num_rows: int) -> None:
        """A step of that many rows begins."""

    def ids(self, place: int) -> NDArray[np.int64]:
        """The experts of MoE layer number ``place``: [T,k]."""

    def scores(self, place: int) -> NDArray[np.float32]:
        """A prediction for MoE layer number ``place``: [T,E]."""


class Recorder(Protocol):
    """Is told what the routers say; see ``bench.recorder``."""

    def route(
        self,
        position: int,
        place: int,
        ids: NDArray[np.int64],
        weights: NDArray[np.float32],
        scores: NDArray[np.float32],
        resident: list[bool],
    ) -> None:
        """MoE layer number ``place`` chose ``ids`` [T,k] by ``scores`` [T,E].

        ``resident``: which of its experts are in memory.
        """


@runtime_checkable
class LayerReader(Protocol):
    """Is told what some layers of the model give, step by step; a drafter, see ``speculative.drafter``."""

    layer_idxs: tuple[int, ...]

    def observe(self, position: int, layer_outputs: NDArray[np.float32]) -> None:
        """T tokens have run from ``position`` on: outputs [T, n*H] of ``layer_idxs``, in the runner's buffer."""

    def bytes_at(self, num_tokens: int) -> int:
        """What it keeps for a sequence of that many tokens."""


class Runner:
    """Runs a bundle for one sequence. Not thread-safe; owns the loader; close it to free sessions and experts."""

    def __init__(
        self,
        bundle: Bundle,
        loader: ExpertLoader,
        prefill_chunk_tokens: int | None = None,
        num_threads: int | None = None,
        twins: Twins | None = None,
    ) -> None:
        self.bundle = bundle
        self.loader = loader
        self.prefill_chunk_tokens = prefill_chunk_tokens or bundle.manifest.prefill_chunk_tokens
        self.history = History(bundle.manifest.position_rows)
        # A benchmark's: experts and predictions come from there instead of from the model's own routers.
        self.routing: Routing | None = None
        self.recorder: Recorder | None = None
        # Turns lookahead off where it does not pay; None leaves it on.
        self.governor: Governor | None = None
        # Whether steps with drafts may come: their buffers are then part of what the process takes.
        self.takes_drafts = False
        self._layer_reader: LayerReader | None = None
        self._memory: ExpertShare | None = None
        # The bundle's twins that are open here.
        self.twins = twins or Twins(bundle, "off")
        self.states = LayerStates(bundle.manifest, self.twins.capacity_tokens)
        options = ort.session_options(optimise=True, num_threads=num_threads)
        # A lookahead is a row of a router, run beside the experts.
        single = ort.session_options(optimise=True, num_threads=1)
        self._sessions = {
            part.name: ort.open_session(bundle.part_file(part), single if part.role == "lookahead" else options)
            for part in bundle.manifest.parts
            if part.role != "lookahead" or loader.uses_lookahead
        }
        for part in bundle.manifest.parts:
            if part.name in self._sessions:
                ort.check_part(self._sessions[part.name], part, bundle.part_file(part))
        self._segments = [part for part in bundle.manifest.parts if part.role == "segment"]
        # By the number of the MoE layer before, which they look from.
        self._lookaheads = [
            bundle.manifest.part("lookahead", part.layer_idx).name
            for part in (self._segments[1:] if loader.uses_lookahead else [])
        ]
        # By the number of the MoE layer: what runs behind a router that speaks before its layer mixes tokens.
        mixers = {part.layer_idx: part for part in bundle.manifest.parts if part.role == "mixer"}
        self._mixers = [mixers.get(part.layer_idx) for part in self._segments]
        self._head = bundle.manifest.part("head")
        # Facts of the bundle that every step asks for.
        self._head_carries_states = any(state.part == self._head.name for state in bundle.manifest.states)
        self._has_shared_experts = any(layer.shared_kind is not None for layer in bundle.manifest.expert_layers)
        self._buffers: dict[int, StepBuffers] = {}
        self._step_rows = 0
        # What another model that follows this sequence keeps for so many tokens: a draft model's caches.
        self.bytes_beside: Callable[[int], int] = lambda num_tokens: 0
        # Whose sequence it is: a generation sets it, and one that finds another's there touches nothing any more.
        self.owner: object = None

    def close(self) -> None:
        """Free sessions, states and experts."""
        self.loader.close()
        self._buffers.clear()
        self._sessions.clear()
        self.twins = Twins(self.bundle, "off")
        self.states = LayerStates(self.bundle.manifest)

    @property
    def layer_reader(self) -> LayerReader | None:
        """Who is told what layers give, if anyone: only then are these outputs asked for. Owned by its setter."""
        return self._layer_reader

    @layer_reader.setter
    def layer_reader(self, reader: LayerReader | None) -> None:
        self._layer_reader = reader if reader and reader.layer_idxs else None
        self._buffers.clear()

    @property
    def _layer_idxs(self) -> tuple[int, ...]:
        return self._layer_reader.layer_idxs if self._layer_reader else ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence so far."""
        return self.states.num_tokens

    def rewind(self, num_tokens: int) -> None:
        """Go back to the first ``num_tokens`` tokens of the sequence; InputError where its states do not reach them."""
        self.states.rewind(num_tokens, self._run_alone)
        self.history.rewind(num_tokens)

    def _run_alone(self, name: str, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> None:
        ort.Binding(self._sessions[name], inputs, outputs).run()

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the sequence so far; not to be changed."""
        return self.history.token_ids

    def common_tokens(self, tokens: Sequence[int] | Prompt) -> int:
        """How many tokens of the sequence, to which it can be rewound, a prompt begins with; never its last one."""
        return self.states.reachable(self.history.common(Prompt.of(tokens)))

    def bound_memory(self, memory_budget_bytes: int, expert_budget_bytes: int | None, other_bytes: int = 0) -> None:
        """Bound the process: experts get what is left, less as caches grow. BudgetError if that is too little.

        Call once, with all sessions open and before the first step. ``other_bytes``: what the process will take for
        something else and does not take yet.
        """
        self.warm_up()
        layers_read = len(self._layer_idxs)
        buffers = self.chunk_bytes()
        if self.takes_drafts:
            vocab_bytes = self.bundle.manifest.model.vocab_size * np.dtype(np.float32).itemsize
            rows = REWINDABLE_TOKENS
            buffers += StepBuffers.bytes_for(self.bundle, rows, layers_read) + rows * vocab_bytes
        fixed = memory.current_bytes() + other_bytes + buffers + SPARE_BYTES
        experts = self.bundle.expert_bytes
        least = experts if self.loader.keeps_all else self.bundle.least_budget_bytes
        self._memory = ExpertShare(self.loader, memory_budget_bytes, fixed, least, expert_budget_bytes or experts)
        self._share_memory(self.states.capacity_for(1))

    def chunk_bytes(self) -> int:
        """What a prefill chunk takes beside the states: its arrays, and what parts need inside."""
        chunk = self.prefill_chunk_tokens
        arrays = 2 * StepBuffers.bytes_for(self.bundle, chunk, len(self._layer_idxs))
        return arrays + chunk * self.bundle.manifest.model.vocab_size // 8 + self.states.working_bytes(chunk)

    def warm_up(self) -> None:
        """Run every dense part once on nothing, so that all the weights it maps are counted as this process's.

        What it leaves in the states is written over by the first step.
        """
        self.states.reserve(1)
        self.states.begin(1)
        buffers = self._buffers_for(1)
        for part in self.bundle.manifest.parts:
            if part.role == "head":
                self._logits(buffers, [0])
            elif part.role != "replay" and part.name in self._sessions:
                self._run(buffers, part.name)
        for num_rows, width in self.twins.widths.items():
            buffers = self._buffers_for(num_rows)
            width.begin(buffers.position_ids, self.states.total_sequence_length)
            for place, segment in enumerate(self._segments):
                self._run_segment(buffers, place, segment, width)
            if width.has_head:
                self._logits(buffers, [0], width=width)

    def _share_memory(self, capacity_tokens: int, lent_bytes: int | None = None) -> None:
        """Give the experts what a capacity of attention caches, and what is lent, leaves them."""
        if self._memory is None:
            return
        caches = self.states.bytes_at(capacity_tokens)
        caches += self._layer_reader.bytes_at(capacity_tokens) if self._layer_reader else 0
        caches += self.bytes_beside(capacity_tokens)
        self._memory.give(caches, capacity_tokens, self._memory.lent_bytes if lent_bytes is None else lent_bytes)

    @contextmanager
    def lend(self, num_bytes: int) -> Iterator[None]:
        """Have the experts give way to something else of that size, between two steps; BudgetError where they cannot.

        Does nothing where memory is not bounded.
        """
        if self._memory is None:
            yield
            return
        capacity = self.states.capacity_tokens or self.states.capacity_for(1)
        self._share_memory(capacity, self._memory.lent_bytes + num_bytes)
        try:
            yield
        finally:
            # Caches may have grown meanwhile.
            capacity = max(capacity, self.states.capacity_tokens)
            self._share_memory(capacity, self._memory.lent_bytes - num_bytes)

    def free_chunks(self) -> int:
        """Free the arrays of prefill chunks until the next one; gives the bytes that nobody uses until then."""
        self._drop_wide()
        return self.chunk_bytes() if self.prefill_chunk_tokens > REWINDABLE_TOKENS else 0

    def prefill(self, tokens: Sequence[int] | Prompt, all_logits: bool = False) -> Logits:
        """Append tokens in chunks; gives logits [V] of the last, or of all [n,V]. ContextError before any work."""
        prompt = Prompt.of(tokens)
        if not len(prompt):
            raise InputError("the prompt is empty: at least one token is needed")
        total = self.num_tokens + len(prompt)
        if total > self.states.max_tokens:
            raise ContextError(f"{total} tokens do not fit the model's context of {self.states.max_tokens}")
        rows: list[Logits] = []
        for start in range(0, len(prompt), self.prefill_chunk_tokens):
            chunk = prompt.part(start, start + self.prefill_chunk_tokens)
            last = start + len(chunk) == len(prompt)
            wanted = range(len(chunk)) if all_logits else [len(chunk) - 1] if last else []
            logits = self.step(chunk, list(wanted))
            if len(wanted):
                rows.append(logits)
        return np.concatenate(rows) if all_logits else rows[-1][0]

    def step(self, tokens: Sequence[int] | Prompt, logit_rows: Sequence[int], num_drafts: int = 0) -> Logits:
        """Run T tokens in one pass; logits [R,V] of the rows asked for (no head where there are none).

        The last ``num_drafts`` of them are drafts: then all rows are asked for, their logits are valid until the next
        step, and `keep` must follow.
        """
        prompt = Prompt.of(tokens)
        num_rows = len(prompt)
        self._reserve(self.num_tokens + num_rows)
        buffers = self._buffers_for(num_rows)
        positions = self._fill(buffers, prompt)
        self.states.begin(num_rows)
        self.loader.begin_step(num_rows, num_drafts)
        if self.routing is not None:
            self.routing.begin_step(num_rows)
        # Of steps of one row the governor knows which side is faster, and steps with drafts are not far from them; a
        # prefill has too much to read not to look ahead.
        governor = self.governor if num_rows == 1 else None
        looks_ahead = self.loader.uses_lookahead
        if looks_ahead and self.governor is not None and (governor or num_drafts):
            looks_ahead = self.governor.wants() if governor else self.governor.is_on
        telemetry = self.loader.telemetry
        step_began = began = time.perf_counter()
        self._run(buffers, "embed")
        prompt.write_features(buffers.hidden[0], buffers.deepstack)
        # Twins do not give what drafters read, and what verifies drafts should round as what follows them.
        plain = num_drafts or self._layer_reader
        width = None if plain else self.twins.for_step(num_rows, self.states)
        if width is not None:
            width.begin(buffers.position_ids, self.states.total_sequence_length)
        for place, part in enumerate(self._segments):
            self._run_segment(buffers, place, part, width)
            telemetry.dense_ms += (time.perf_counter() - began) * 1e3
            lookahead = self._lookahead(buffers, place) if looks_ahead else None
            mixer = self._mixers[place]
            before_experts = partial(self._run, buffers, mixer.name) if mixer else None
            self.loader.run_layer(place, self._work(buffers, place), lookahead, before_experts)
            began = time.perf_counter()
        logits = self._logits(buffers, logit_rows, num_drafts, width)
        ended = time.perf_counter()
        telemetry.dense_ms += (ended - began) * 1e3
        if governor is not None:
            governor.took(ended - step_began)
        position = self.num_tokens
        self.states.commit(num_rows)
        self._step_rows = num_rows
        self.history.append(prompt, positions)
        if self._layer_reader:
            self._layer_reader.observe(position, buffers.layer_rows())
        return logits

    def _reserve(self, total: int) -> None:
        """Make room for that many tokens in all."""
        if total > self.states.capacity_tokens:
            # The experts give way before the caches grow: the budget holds at every moment.
            self._share_memory(self.states.capacity_for(total))
            self._buffers.clear()
            self.states.reserve(total)

    def keep(self, num_rows: int) -> None:
        """Of the last step, which had drafts, the first rows stay: the others are gone back over and were no use."""
        self.loader.accept(range(num_rows))
        self.rewind(self.num_tokens - self._step_rows + num_rows)

    def prepare_drafts(self, num_rows: int) -> None:
        """Bind what a step of so many rows needs, so that the first one takes no longer than those after it."""
        self._reserve(self.num_tokens + num_rows)
        buffers = self._buffers_for(num_rows)
        parts = [part.name for part in [*self._segments, *self._mixers] if part is not None]
        for name in ("embed", *parts, *self._lookaheads):
            self._binding(buffers, name)
        self._bind_draft_head(buffers)

    def _fill(self, buffers: StepBuffers, prompt: Prompt) -> NDArray[np.int64]:
        """Put ids and positions where parts read them; gives the positions, as `History` has them."""
        ids = np.asarray(prompt.token_ids, np.int64)
        vocab_size = self.bundle.manifest.model.vocab_size
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise InputError(
                f"token id {int(ids.min() if ids.min() < 0 else ids.max())} is outside 0..{vocab_size - 1}"
            )
        buffers.input_ids[0] = ids
        positions = self.history.positions(prompt)
        buffers.position_ids[...] = positions if buffers.position_ids.ndim == 2 else positions[:, None]
        return positions

    def _work(self, buffers: StepBuffers, place: int) -> LayerWork:
        """What the router of MoE layer number ``place`` asks for."""
        first = self.loader.scheduler.first[place]
        if self.routing is not None:
            buffers.topk_ids[...] = self.routing.ids(place)
        if self.recorder is not None:
            weights = buffers.streams[place % 2].topk_weights
            resident = self.loader.resident(place)
            self.recorder.route(self.num_tokens, place, buffers.topk_ids, weights, buffers.router_scores, resident)
        return LayerWork.make(first, buffers.topk_ids, buffers.moe_input, buffers.expert_out, buffers.shared_out)

    def _lookahead(self, buffers: StepBuffers, place: int) -> Lookahead | None:
        """The prediction of the MoE layer after number ``place``; None where there is none."""
        if place + 1 == len(self._segments):
            return None
        name = self._lookaheads[place]
        if self._has_shared_experts:
            # What an earlier layer left there must not count as this layer's.
            buffers.shared_out.fill(0)

        def scores(ready: NDArray[np.bool_]) -> NDArray[np.float32]:
            buffers.ready[...] = ready
            self._run(buffers, name)
            return buffers.lookahead_scores if self.routing is None else self.routing.scores(place + 1)

        return scores

    def _logits(
        self, buffers: StepBuffers, logit_rows: Sequence[int], num_drafts: int = 0, width: TwinWidth | None = None
    ) -> Logits:
        """The head on some rows; without any it still runs where it carries states, or gives what a drafter reads."""
        vocab_size = self.bundle.manifest.model.vocab_size
        if not logit_rows and not self._head_carries_states and not self._read_of(buffers, self._head):
            return np.empty((0, vocab_size), np.float32)
        rows = logit_rows or [0]
        if num_drafts:
            self._bind_draft_head(buffers).run()
            return buffers.draft_logits
        if len(rows) != 1:
            asked = np.asarray(rows, np.int64)
            logits = np.empty((len(rows), vocab_size), np.float32)
            self._bind_head(buffers, asked, logits).run()
            return logits if logit_rows else logits[:0]
        if width is not None and width.has_head:
            if "head" not in buffers.twins:
                inputs = self._inputs(buffers, self._head, len(self._segments))
                buffers.twins["head"] = width.bind_head(inputs, buffers.logits, self.states)
            buffers.twins["head"].run()
            return buffers.logits[: len(logit_rows)].copy()
        # A decode step's is bound once; its buffer is the runner's, so the caller gets a copy.
        key = (self.states.side, 1)
        if key not in buffers.heads:
            buffers.heads[key] = self._bind_head(buffers, buffers.logit_rows, buffers.logits)
        buffers.logit_rows[0] = rows[0]
        buffers.heads[key].run()
        return buffers.logits[: len(logit_rows)].copy()

    def _bind_draft_head(self, buffers: StepBuffers) -> ort.Binding:
        """The head of every row of a step with drafts."""
        num_rows = buffers.input_ids.size
        key = (self.states.side, num_rows)
        if key not in buffers.heads:
            rows = np.arange(num_rows, dtype=np.int64)
            buffers.heads[key] = self._bind_head(buffers, rows, buffers.draft_logits)
        return buffers.heads[key]

    def _bind_head(self, buffers: StepBuffers, rows: NDArray[np.int64], logits: NDArray[np.float32]) -> ort.Binding:
        inputs = self._inputs(buffers, self._head, len(self._segments)) | {"logit_rows": rows}
        outputs = self.states.outputs(self._head.name, buffers.input_ids.size) | {"logits": logits}
        outputs |= self._read_of(buffers, self._head)
        return ort.Binding(self._sessions[self._head.name], inputs, outputs)

    # -- bindings ----------------------------------------------------------------------------------------------------

    def _buffers_for(self, num_rows: int) -> StepBuffers:
        """The arrays of this width. Drafts share the memory of the widest; of others only the last is kept."""
        if num_rows not in self._buffers:
            if 1 < num_rows < REWINDABLE_TOKENS:
                self._buffers[num_rows] = self._buffers_for(REWINDABLE_TOKENS).first_rows(num_rows)
                return self._buffers[num_rows]
            if num_rows > REWINDABLE_TOKENS:
                self._drop_wide()
            self._buffers[num_rows] = buffers = StepBuffers(self.bundle, num_rows, self._layer_idxs)
            if num_rows == REWINDABLE_TOKENS:
                vocab_size = self.bundle.manifest.model.vocab_size
                buffers.draft_logits = ort.empty_aligned((num_rows, vocab_size), np.float32)
        return self._buffers[num_rows]

    def _drop_wide(self) -> None:
        """Free the arrays of widths that only prefill chunks have."""
        for width in [width for width in self._buffers if width > REWINDABLE_TOKENS]:
            del self._buffers[width]

    def _run_segment(self, buffers: StepBuffers, place: int, part: Part, width: TwinWidth | None) -> None:
        """Segment number ``place``: itself, or its twin where the step has twins."""
        if width is None:
            self._run(buffers, part.name)
            return
        if part.name not in buffers.twins:
            inputs, outputs = self._inputs(buffers, part, place), self._outputs(buffers, part, place)
            buffers.twins[part.name] = width.bind(part.name, inputs, outputs, self.states)
        timeline = self.loader.timeline
        began = time.perf_counter() if timeline else 0.0
        buffers.twins[part.name].run()
        if timeline:
            timeline.span(DENSE, part.name, began, time.perf_counter())

    def _binding(self, buffers: StepBuffers, name: str) -> ort.Binding:
        """A part bound to the arrays of a width."""
        key = (name, self.states.side)
        if key not in buffers.bindings:
            buffers.bindings[key] = self._bind(buffers, name)
        return buffers.bindings[key]

    def _run(self, buffers: StepBuffers, name: str) -> None:
        binding = self._binding(buffers, name)
        timeline = self.loader.timeline
        began = time.perf_counter() if timeline else 0.0
        binding.run()
        if timeline and name not in self._lookaheads:
            timeline.span(DENSE, name, began, time.perf_counter())

    def _bind(self, buffers: StepBuffers, name: str) -> ort.Binding:
        session = self._sessions[name]
        if name == "embed":
            return ort.Binding(session, {"input_ids": buffers.input_ids}, {"hidden": buffers.hidden})
        if name in self._lookaheads:
            place = self._lookaheads.index(name)
            part = self.bundle.manifest.part("lookahead", self._segments[place + 1].layer_idx)
            inputs = self._inputs(buffers, part, place + 1)
            return ort.Binding(session, inputs, {"scores": buffers.lookahead_scores})
        mixers = [mixer.name if mixer else None for mixer in self._mixers]
        if name in mixers:
            place = mixers.index(name)
            part = self.bundle.manifest.part("mixer", self._segments[place].layer_idx)
        else:
            place = next(index for index, part in enumerate(self._segments) if part.name == name)
            part = self._segments[place]
        outputs = self._outputs(buffers, part, place) | self._read_of(buffers, part)
        outputs |= self.states.outputs(name, buffers.input_ids.size)
        return ort.Binding(session, self._inputs(buffers, part, place), outputs)

    @staticmethod
    def _outputs(buffers: StepBuffers, part: Part, place: int) -> dict[str, NDArray[Any]]:
        """The arrays that a segment or mixer writes, beside states."""
        out = buffers.streams[place % 2]
        known: dict[str, NDArray[Any]] = {
            "residual_out": buffers.mixed_residual if part.role == "mixer" else out.residual,
            "moe_input": buffers.moe_input,
            "topk_ids": buffers.topk_ids,
            "topk_weights_out": out.topk_weights,
            "shared_weights_out": out.shared_weights,
            "router_scores": buffers.router_scores,
        }
        return {value.name: known[value.name] for value in part.outputs if value.name in known}

    @staticmethod
    def _read_of(buffers: StepBuffers, part: Part) -> dict[str, NDArray[Any]]:
        """The layer outputs of a part that a drafter reads."""
        given = {value.name for value in part.outputs}
        names = map(layer_output_name, buffers.layer_idxs)
        return {name: array[None] for name, array in zip(names, buffers.layer_outputs, strict=True) if name in given}

    def _inputs(self, buffers: StepBuffers, part: Part, place: int) -> dict[str, NDArray[Any]]:
        """The arrays a part reads; ``place`` counts the segments before it (a mixer's own is behind it)."""
        before = buffers.streams[(place - 1) % 2]
        residual = before.residual
        if part.role == "mixer":
            residual = buffers.streams[place % 2].residual
        elif place and self._mixers[place - 1]:
            residual = buffers.mixed_residual
        known: dict[str, NDArray[Any]] = {
            "hidden": buffers.hidden,
            "residual": residual,
            "topk_weights": before.topk_weights,
            "shared_weights": before.shared_weights,
            "expert_out": buffers.expert_out,
            "shared_out": buffers.shared_out,
            "ready": buffers.ready,
            "position_ids": buffers.position_ids,
            "seqlens_k": self.states.seqlens_k,
            "total_sequence_length": self.states.total_sequence_length,
        }
        known |= {deepstack_name(level): rows[None] for level, rows in enumerate(buffers.deepstack)}
        known |= self.states.inputs(part.name)
        return {value.name: known[value.name] for value in part.inputs if value.name in known}
