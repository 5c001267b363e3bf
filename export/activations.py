"""The float run over calibration text that `statistics` keeps: layer by layer, each of a checkpoint's layers read once.

Every window is one step from an empty context, so no state outlives its part. What flows from part to part is the
residual and the weighted sum of the experts. How much an error in that sum costs is measured on the way: from each
layer on, copies of a few windows run along with noise added to it, and the head says what the noise did.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from lesonnx import ort
from lesonnx.errors import CheckpointError, InputError
from lesonnx.manifest import Part, State
from lesonnx_export.blocks import PAST_LENGTH, POSITION_IDS, TOTAL_LENGTH, Precision
from lesonnx_export.checkpoint import Weights
from lesonnx_export.compare import kl_divergence
from lesonnx_export.expert import ExpertTensors
from lesonnx_export.feedforward import apply_expert
from lesonnx_export.graph import DenseStore
from lesonnx_export.pack import LayerPlan
from lesonnx_export.plan import ExportPlan
from lesonnx_export.segments import LOGIT_ROWS, PartBuilder
from lesonnx_export.sources import read_expert
from lesonnx_export.statistics import StatisticsDirectory

WINDOW_TOKENS = 512
# Windows of random tokens beside the text's, as a share of them: they keep experts fit for what the text is not about,
# which gains more on other texts than three times as much of the same text (docs/quantization.md).
RANDOM_SHARE = 1.0
# Windows that run along with noise from each layer on: with L layers they cost about L / 2 passes each.
NOISY_WINDOWS = 2
# The noise's squared size, as a share of that of what it is added to: between what 2 and 4 bits cost.
NOISE_SHARE = 0.05
# Rows of a window on which the head judges the noise.
JUDGED_ROWS = 128
# Recurrences by operators that every ONNX Runtime has: this runs once.
FLOAT = Precision(32, 128, operators="portable")
Float32 = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]
Progress = Callable[[str, int], None]
ReadExpert = Callable[[LayerPlan, int | None], ExpertTensors]


@dataclass
class Window:
    """A stretch of text on its way through the layers. ``source``: the window it is a noisy copy of, and from where."""

    ids: NDArray[np.int64]
    residual: Float32
    mixed: Float32
    source: tuple[int, int] | None = None


@dataclass
class LayerRows:
    """What a layer's router said of all windows, one after another: rows as in `LayerStatistics`."""

    inputs: Float32
    topk_ids: NDArray[np.int64]
    topk_weights: Float32
    shared_weights: Float32 | None
    starts: list[int] = field(default_factory=list)


class FloatRun:
    """Drives a plan's checkpoint in float32 over windows of token ids. Single-threaded but for the products.

    ``read`` gives an expert's tensors: the checkpoint's own unless the caller has others.
    """

    def __init__(self, plan: ExportPlan, scratch: Path, read: ReadExpert | None = None) -> None:
        self.plan = plan
        self.scratch = scratch
        self.architecture = plan.architecture
        self._weights = Weights(plan.checkpoint)
        self._read = read or (lambda layer, idx: read_expert(plan.architecture, self._weights, layer.layer_idx, idx))

    def begin(self, windows: Sequence[Sequence[int]]) -> list[Window]:
        """Embed windows of token ids."""
        begun = []
        with self._part("embed") as part:
            for ids in windows:
                array = np.asarray(ids, np.int64)
                hidden = np.empty((1, len(ids), self.architecture.hidden_size), np.float32)
                part.run({"input_ids": array[None]}, {"hidden": hidden})
                begun.append(Window(array, hidden, np.zeros_like(hidden[0])))
        return begun

    def route(self, place: int, windows: list[Window]) -> LayerRows:
        """Run MoE layer number ``place`` up to its router, on all windows; their residuals move on."""
        layer, architecture = self.plan.layers[place], self.architecture
        total = sum(len(window.ids) for window in windows)
        slots = architecture.num_experts_per_tok
        rows = LayerRows(
            np.empty((total, architecture.hidden_size), np.float32),
            np.empty((total, slots), np.int64),
            np.empty((total, slots), np.float32),
            np.empty((total, 1), np.float32) if layer.shared_kind is not None else None,
        )
        has_mixer = architecture.routes_before_mixing
        with self._part(f"segment_{layer.layer_idx:03d}") as part:
            start = 0
            for window in windows:
                which = slice(start, start + len(window.ids))
                rows.starts.append(start)
                outputs: Arrays = {"topk_ids": rows.topk_ids[which], "topk_weights_out": rows.topk_weights[which]}
                if rows.shared_weights is not None:
                    outputs["shared_weights_out"] = rows.shared_weights[which]
                if not has_mixer:
                    outputs["moe_input"] = rows.inputs[which]
                self._carry(part, window, outputs, is_first=place == 0)
                start = which.stop
        if has_mixer:
            with self._part(f"mixer_{layer.layer_idx:03d}") as part:
                for window, start in zip(windows, rows.starts, strict=True):
                    self._carry(part, window, {"moe_input": rows.inputs[start : start + len(window.ids)]})
        if not np.isfinite(rows.inputs).all():
            raise CheckpointError(
                f"layer {layer.layer_idx}: what its experts read of the calibration text is not finite"
            )
        return rows

    def _carry(self, part: _OpenPart, window: Window, outputs: Arrays, is_first: bool = False) -> None:
        residual = np.empty((1, len(window.ids), self.architecture.residual_size), np.float32)
        part.run(self._inputs(part, window, is_first), outputs | {"residual_out": residual})
        window.residual = residual

    def _inputs(self, part: _OpenPart, window: Window, is_first: bool = False) -> Arrays:
        """What a part takes: the sum of the experts comes as the first one's output, of weight one."""
        num_rows, slots = len(window.ids), self.architecture.num_experts_per_tok
        expert_out = np.zeros((num_rows, slots, self.architecture.hidden_size), np.float32)
        expert_out[:, 0] = window.mixed
        weights = np.zeros((num_rows, slots), np.float32)
        weights[:, 0] = 1
        return {
            "hidden" if is_first else "residual": window.residual,
            "expert_out": expert_out,
            "topk_weights": weights,
            "shared_out": np.zeros((num_rows, self.architecture.hidden_size), np.float32),
            "shared_weights": np.zeros((num_rows, 1), np.float32),
        }

    def compute(self, place: int, windows: list[Window], rows: LayerRows) -> None:
        """Compute the layer's experts, each once on all its rows, into the windows' sums."""
        layer = self.plan.layers[place]
        mixed = np.zeros_like(rows.inputs)
        for expert_idx in layer.places:
            if expert_idx is None:
                tokens, weights = np.arange(len(mixed)), rows.shared_weights
            else:
                tokens, slots = np.nonzero(rows.topk_ids == expert_idx)
                weights = rows.topk_weights[tokens, slots][:, None]
            if not len(tokens) or weights is None:
                continue
            output = apply_expert(layer.kind_of(expert_idx), self._read(layer, expert_idx), rows.inputs[tokens])
            output *= weights
            mixed[tokens] += output
        for window, start in zip(windows, rows.starts, strict=True):
            window.mixed = mixed[start : start + len(window.ids)].copy()

    @contextmanager
    def judge(self) -> Iterator[Callable[[Window, NDArray[np.int64]], Float32]]:
        """The head: what it gives takes a window and rows [R] of it, and gives logits [R,V]."""
        with self._part("head") as part:

            def logits(window: Window, rows: NDArray[np.int64]) -> Float32:
                found = np.empty((len(rows), self.architecture.vocab_size), np.float32)
                part.run(self._inputs(part, window) | {LOGIT_ROWS: rows}, {"logits": found})
                return found

            yield logits

    @contextmanager
    def _part(self, name: str) -> Iterator[_OpenPart]:
        """Build a dense part in float32, and open it; it leaves nothing behind."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as directory:
            path = Path(directory) / "part.onnx"
            store = DenseStore(Path(directory) / DenseStore.location)
            try:
                built = PartBuilder(self.architecture, self._weights, store, FLOAT).build(name)
            finally:
                store.close()
            path.write_bytes(built.model.SerializeToString())
            session = ort.open_session(path, ort.session_options(optimise=True))
            yield _OpenPart(built.part, built.states, session)
            del session


@dataclass
class _OpenPart:
    """A dense part with a session: run on a window from an empty context."""

    part: Part
    states: list[State]
    session: onnxruntime.InferenceSession

    def run(self, given: Mapping[str, NDArray[Any]], outputs: Arrays) -> None:
        """Run on the inputs that the part takes of those given; states are zeros and go."""
        num_rows = next(iter(given.values())).shape[1]
        known = dict(given)
        # Text alone: where a token has three positions, they are alike.
        shapes = {value.name: value.shape[:-1] for value in self.part.inputs}
        rows = np.arange(num_rows, dtype=np.int64)
        known[POSITION_IDS] = np.broadcast_to(rows, (*map(int, shapes.get(POSITION_IDS, ())), num_rows))
        known[PAST_LENGTH] = np.array([num_rows - 1], np.int32)
        known[TOTAL_LENGTH] = np.array(num_rows, np.int32)
        bound = dict(outputs)
        for state in self.states:
            past = np.zeros([num_rows if size == "S" else int(size) for size in state.shape], state.dtype)
            known[state.input] = past
            # Attention's past and present are one buffer.
            bound[state.output] = past if state.is_attention else np.empty_like(past)
        inputs = {value.name: np.ascontiguousarray(known[value.name]) for value in self.part.inputs}
        ort.Binding(self.session, inputs, bound).run()


def run_calibration(
    plan: ExportPlan,
    ids: Sequence[int],
    directory: Path,
    progress: Progress = lambda what, steps: None,
) -> StatisticsDirectory:
    """Run the checkpoint in float32 over token ids and write its layers' statistics into a directory.

    Windows of 512 tokens, each from an empty context, and as many of random tokens, all of them through a
    layer before the next one; the statistics are of both. A directory in which a run has finished is taken as it is.
    ``progress`` is called with what is done and a count of layers since the last call, ``calibration_steps(plan)`` in
    all. InputError for too short a text; CheckpointError where the model's values are not finite.
    """
    statistics = StatisticsDirectory(directory)
    if statistics.is_complete:
        progress("calibration", calibration_steps(plan))
        return statistics
    length = min(WINDOW_TOKENS, plan.architecture.max_position_embeddings)
    cut = [ids[start : start + length] for start in range(0, len(ids), length)]
    if not cut or len(ids) < 2:
        raise InputError(f"the calibration text has {len(ids)} tokens, at least 2 are needed")
    if not all(0 <= token < plan.architecture.vocab_size for token in ids):
        raise InputError(f"the calibration text has token ids outside 0..{plan.architecture.vocab_size - 1}")
    directory.mkdir(parents=True, exist_ok=True)
    run = FloatRun(plan, directory)
    random = _random_windows(len(cut), min(length, len(ids)), plan.architecture.vocab_size)
    windows = run.begin([*cut, *random])
    num_tokens = sum(len(window.ids) for window in windows)
    num_noisy = min(NOISY_WINDOWS, len(cut))
    noisy = [place * len(cut) // num_noisy for place in range(num_noisy)]
    noise_sizes: dict[int, float] = {}
    facts: dict[str, dict[str, float]] = {}
    for place, layer in enumerate(plan.layers):
        rows = run.route(place, windows)
        shared = None if rows.shared_weights is None else rows.shared_weights[:num_tokens, 0]
        scale = statistics.write_layer(
            layer.layer_idx,
            rows.inputs[:num_tokens],
            rows.topk_ids[:num_tokens],
            rows.topk_weights[:num_tokens],
            shared,
        )
        facts[str(layer.layer_idx)] = {"input_scale": scale}
        run.compute(place, windows, rows)
        copies = [_with_noise(windows[source], source, place) for source in noisy]
        noise_sizes[place] = _mean_square(
            [copy.mixed - windows[source].mixed for copy, source in zip(copies, noisy, strict=True)]
        )
        windows += copies
        progress("calibration", 1)
    for place, rise in enumerate(_rises(run, windows, len(plan.layers))):
        layer_facts = facts[str(plan.layers[place].layer_idx)]
        layer_facts["sensitivity"] = rise / noise_sizes[place] if noise_sizes[place] > 0 else 0.0
    statistics.finish({"num_experts": plan.architecture.num_experts, "num_tokens": num_tokens, "layers": facts})
    progress("calibration", 1)
    return statistics


def _random_windows(num_windows: int, length: int, vocab_size: int) -> list[list[int]]:
    """Windows of random tokens for a text of that many windows; always the same."""
    count = math.ceil(num_windows * RANDOM_SHARE)
    ids: list[list[int]] = np.random.default_rng(0).integers(vocab_size, size=(count, length)).tolist()
    return ids


def calibration_steps(plan: ExportPlan) -> int:
    """How many steps ``progress`` counts."""
    return len(plan.layers) + 1


def _with_noise(window: Window, source: int, place: int) -> Window:
    """A copy whose sum of experts has an error of ``NOISE_SHARE`` of each token's squared size."""
    noise = np.random.default_rng((source, place)).standard_normal(window.mixed.shape, np.float32)
    size = np.linalg.norm(window.mixed, axis=1, keepdims=True) / np.sqrt(np.float32(window.mixed.shape[1]))
    noise *= np.float32(np.sqrt(NOISE_SHARE)) * size
    return Window(window.ids, window.residual, window.mixed + noise, (source, place))


def _mean_square(differences: Sequence[Float32]) -> float:
    """The mean over tokens of the squared size."""
    squares = [np.einsum("nh,nh->n", part, part, dtype=np.float64) for part in differences]
    return float(np.concatenate(squares).mean())


def _rises(run: FloatRun, windows: list[Window], num_layers: int) -> list[float]:
    """The KL per token that the noise added at each layer caused."""
    totals, counts = np.zeros(num_layers), np.zeros(num_layers)
    with run.judge() as logits:
        for source, clean in enumerate(windows):
            copies = [window for window in windows if window.source is not None and window.source[0] == source]
            if not copies:
                continue
            rows = np.unique(np.linspace(0, len(clean.ids) - 1, JUDGED_ROWS).astype(np.int64))
            expected = logits(clean, rows).astype(np.float64)
            for window in copies:
                divergence = kl_divergence(expected, logits(window, rows).astype(np.float64))
                place = window.source[1] if window.source else 0
                totals[place] += divergence.sum()
                counts[place] += len(rows)
    rises: list[float] = (totals / np.maximum(counts, 1)).tolist()
    return rises
