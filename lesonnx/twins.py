"""Twins at run time: sessions of dense parts on an accelerator, and a step's segment as twin, cache rows and selection.

It knows the manifest's twins and a provider's name, not the schedule nor what flows between parts: the runner does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from lesonnx import ort
from lesonnx.bundle import Bundle
from lesonnx.errors import BundleError, InputError
from lesonnx.manifest import Manifest, Provider, Target, Twin
from lesonnx.manifest import Twins as Record
from lesonnx.providers import CPU, ON_THE_PROCESSOR, installed
from lesonnx.states import LayerStates
from lesonnx.twin_wiring import LOGITS_PREFIX, rows_name

Arrays = Mapping[str, NDArray[Any]]
# Whether twins run: where their providers are installed, never, or on the CPU provider (slower: to try them).
MODES = ("auto", "off", "cpu")
# What this host is in a manifest's lists.
TARGET: Target = "desktop"


class TwinWidth:
    """The twins of one width of steps, open. Not thread-safe; owns their sessions and what they hand to each other."""

    def __init__(
        self,
        manifest: Manifest,
        record: Record,
        rows: int,
        twins: Mapping[str, onnxruntime.InferenceSession],
        others: Mapping[str, onnxruntime.InferenceSession],
    ) -> None:
        self.rows = rows
        self.capacity_tokens = record.capacity_tokens
        self._manifest = manifest
        self._record = record
        self._twins = twins
        self._others = others
        self._given: dict[str, NDArray[Any]] = {}
        # What computes them, bound to the positions of one buffer.
        self._positions: tuple[NDArray[np.int64], ort.Binding] | None = None
        # Between a twin and its selection, or the caches: the same for every segment.
        self._between: dict[tuple[str, str, tuple[int, ...]], NDArray[Any]] = {}
        for value in record.positions.outputs:
            shape = tuple(rows if size == "T" else int(size) for size in value.shape)
            self._given[value.name] = ort.empty_aligned(shape, value.dtype)

    @property
    def has_head(self) -> bool:
        return "head" in self._twins

    def begin(self, position_ids: NDArray[np.int64], total_sequence_length: NDArray[np.int32]) -> None:
        """Compute what all twins of a step take: angles of the positions, and which slots of the caches are seen."""
        if self._positions is not None and self._positions[0] is position_ids:
            self._positions[1].run()
            return
        record = self._record.positions
        known: Arrays = {"position_ids": position_ids, "total_sequence_length": total_sequence_length}
        inputs = {value.name: known[value.name] for value in record.inputs}
        binding = ort.Binding(self._others[record.path], inputs, self._given)
        self._positions = (position_ids, binding)
        binding.run()

    def bind(self, part: str, inputs: Arrays, outputs: Arrays, states: LayerStates) -> BoundTwin:
        """A segment's twin between the arrays of a step; valid as long as these and the caches stay where they are."""
        twin, known = self._twin(part), dict(inputs) | self._given
        caches = {rows_name(s.output): s.name for s in self._manifest.states if s.part == part}
        given, rows = {}, {}
        for number, value in enumerate(twin.outputs):
            if value.name in outputs:
                given[value.name] = outputs[value.name]
                continue
            shape = tuple(int(size) for size in value.shape)
            kind = (str(number) if value.name in caches else value.name, value.dtype, shape)
            if kind not in self._between:
                self._between[kind] = ort.empty_aligned(shape, value.dtype)
            given[value.name] = self._between[kind]
            if value.name in caches:
                rows[caches[value.name]] = given[value.name]
        binding = ort.Binding(self._twins[part], {v.name: known[v.name] for v in twin.inputs}, given)
        select = next(selection for selection in self._record.selections if selection.part == part)
        routing = {value.name: outputs[value.name] for value in select.outputs}
        selection = ort.Binding(self._others[select.path], {v.name: given[v.name] for v in select.inputs}, routing)
        return BoundTwin(binding, selection, rows, states)

    def bind_head(self, inputs: Arrays, logits: NDArray[np.float32], states: LayerStates) -> BoundTwin:
        """The head's twin; the pieces of ``logits`` [1,V] lie side by side."""
        twin, known = self._twin("head"), dict(inputs) | self._given
        caches = {rows_name(s.output): s.name for s in self._manifest.states if s.part == "head"}
        given: dict[str, NDArray[Any]] = {}
        start = 0
        for value in twin.outputs:
            if value.name.startswith(LOGITS_PREFIX):
                size = int(value.shape[-1])
                given[value.name] = logits[:, start : start + size]
                start += size
            else:
                given[value.name] = ort.empty_aligned(tuple(int(size) for size in value.shape), value.dtype)
        rows = {state: given[name] for name, state in caches.items()}
        binding = ort.Binding(self._twins["head"], {v.name: known[v.name] for v in twin.inputs}, given)
        return BoundTwin(binding, None, rows, states)

    def _twin(self, part: str) -> Twin:
        twin = self._record.of(part, self.rows)
        if twin is None:
            raise ValueError(f"{part} has no twin of {self.rows} rows")
        return twin


class BoundTwin:
    """A twin between the arrays of a step: runs it, puts its rows into the caches, and selects experts."""

    def __init__(self, twin: ort.Binding, selection: ort.Binding | None, rows: Arrays, states: LayerStates) -> None:
        self._twin = twin
        self._selection = selection
        self._rows = rows
        self._states = states

    def run(self) -> None:
        self._twin.run()
        self._states.write_rows(self._rows)
        if self._selection is not None:
            self._selection.run()


class Twins:
    """The twins of a bundle that can be used here, by width; none of them where the bundle or the machine has none.

    ``notes`` says, a line each, why some are not used.
    """

    def __init__(self, bundle: Bundle, mode: str = "auto", num_threads: int | None = None) -> None:
        if mode not in MODES:
            raise InputError(f"accelerate is {mode!r}, expected one of {', '.join(MODES)}")
        self.notes: list[str] = []
        self.widths: dict[int, TwinWidth] = {}
        self._bundle = bundle
        self._threads = num_threads
        record = bundle.manifest.twins
        if mode == "cpu" and record is None:
            raise InputError(f"{bundle.directory}: has no twins; export with --accelerate dense")
        if record is not None and mode != "off":
            data = bundle.file(record.data)
            if not data.stat().st_size:
                raise BundleError(f"{data}: is empty, expected the weights of twins")
            # Sessions copy what they need of it.
            self._data = (data.name, np.memmap(data, np.uint8, "r"))
            self._open(record, mode)

    @property
    def capacity_tokens(self) -> int:
        """What attention caches must hold from the start; 0 without twins."""
        return next((width.capacity_tokens for width in self.widths.values()), 0)

    def for_step(self, num_rows: int, states: LayerStates) -> TwinWidth | None:
        """The twins that a step of that many rows may use: its width is theirs, and caches have their capacity."""
        width = self.widths.get(num_rows)
        return width if width is not None and states.capacity_tokens == width.capacity_tokens else None

    def _open(self, record: Record, mode: str) -> None:
        providers = self._providers(record, mode)
        if not providers:
            return
        manifest = self._bundle.manifest
        sizes = {len(value.shape) for value in record.positions.inputs if value.name == "position_ids"}
        if sizes - {3 if manifest.position_rows == 3 else 2}:
            self.notes.append("twins take one position a token and the model has three: dense parts run without them")
            return
        others = {}
        for other in record.helpers:
            if other.path not in others:
                others[other.path] = self._session(other.path, Provider(name=CPU), 1)
                ort.check_part(others[other.path], other, self._bundle.file(other.path))
        for rows in sorted({twin.rows for twin in record.parts}):
            twins = [twin for twin in record.parts if twin.rows == rows]
            for provider in providers:
                try:
                    opened = {twin.part: self._session(twin.path, provider, self._threads) for twin in twins}
                except BundleError as error:
                    self.notes.append(f"steps of {rows} tokens do not use {provider.name}: {error}")
                    continue
                for twin in twins:
                    ort.check_part(opened[twin.part], twin, self._bundle.file(twin.path))
                self.widths[rows] = TwinWidth(manifest, record, rows, opened, others)
                break

    def _providers(self, record: Record, mode: str) -> Sequence[Provider]:
        """Those to try, the best first."""
        if mode == "cpu":
            return [Provider(name=CPU)]
        listed = {p.name: p for twin in record.parts for p in twin.providers.get(TARGET, [])}
        found, notes = installed(listed.values(), onnxruntime.get_available_providers())
        self.notes += [f"{note}: dense parts run without it" for note in notes]
        return found

    def session_options(self, num_threads: int | None, falls_back: bool) -> onnxruntime.SessionOptions:
        """Options of a twin's session; without ``falls_back`` one that the provider does not take whole is refused."""
        options = ort.session_options(optimise=True, num_threads=num_threads)
        # CoreML of ONNX Runtime 1.24 fails on weights in a file beside the model, and takes them from memory.
        name, mapped = self._data
        options.add_external_initializers_from_files_in_memory([name], [mapped], [len(mapped)])
        if not falls_back:
            # A twin of which the CPU provider would run a piece is slower than the plain part: better none.
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        return options

    def _session(self, path: str, provider: Provider, num_threads: int | None) -> onnxruntime.InferenceSession:
        options = self.session_options(num_threads, falls_back=provider.name in ON_THE_PROCESSOR)
        return ort.open_session(self._bundle.file(path), options, [(provider.name, dict(provider.options))])
