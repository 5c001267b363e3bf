"""What a float run over calibration text keeps of a MoE layer: the rows its experts read, and who read them.

The rows themselves, not their moments: a layer's rows take less than the moments of all its experts would, and from
them follow the moments of both halves of an expert and its true output. It knows files and arrays, no model.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import InputError

# Rows of the whole layer that an expert is rounded for beside its own, and what one of them weighs against its own.
BORROWED_ROWS = 256
BORROWED_WEIGHT = 1.0
Float32 = NDArray[np.float32]
SUMMARY_NAME = "calibration.json"
FORMAT_VERSION = 1
# The largest input of a layer becomes at most this: inside float16's range with room for sums of none.
LARGEST_STORED = 2.0**15


@dataclass(frozen=True)
class ExpertRows:
    """The calibration rows that an expert read: ``inputs`` [n,H] and the weight [n] its output got in the sum."""

    inputs: Float32
    weights: Float32


@dataclass(frozen=True)
class LayerStatistics:
    """One MoE layer in a float run over ``num_tokens`` tokens of calibration text. Immutable: any thread may read it.

    ``inputs`` float16 [n,H] times ``input_scale`` is what the experts read; ``topk_ids`` int32 [n,k] and
    ``topk_weights`` float32 [n,k] are the router's choice; ``shared_weights`` float32 [n] weighs the shared expert
    where there is one. ``sensitivity``: the expected rise of the model's KL per token (nats) for a mean squared error
    of 1 (of a token, summed over its H values) in this layer's combined expert output.
    """

    layer_idx: int
    inputs: NDArray[np.float16]
    input_scale: float
    topk_ids: NDArray[np.int32]
    topk_weights: Float32
    shared_weights: Float32 | None
    sensitivity: float
    num_experts: int

    @property
    def num_tokens(self) -> int:
        return len(self.inputs)

    @cached_property
    def expert_tokens(self) -> NDArray[np.int64]:
        """How many tokens used each expert: [E]."""
        return np.bincount(self.topk_ids.reshape(-1), minlength=self.num_experts).astype(np.int64)

    def rows(self, expert_idx: int | None) -> ExpertRows:
        """The rows of an expert, in the order of the text; None asks for the shared one, which read all."""
        if expert_idx is None:
            if self.shared_weights is None:
                raise ValueError(f"layer {self.layer_idx} has no shared expert")
            return ExpertRows(self._inputs(slice(None)), self.shared_weights)
        tokens, slots = np.nonzero(self.topk_ids == expert_idx)
        return ExpertRows(self._inputs(tokens), self.topk_weights[tokens, slots])

    def rows_with_others(self, expert_idx: int | None) -> ExpertRows:
        """The rows of an expert, and some that others read: spread over the text, each counts a quarter of its own.

        An expert that the text used little, or never, is then rounded for what its layer reads.
        """
        own = self.rows(expert_idx)
        count = min(BORROWED_ROWS, self.num_tokens)
        others = self._inputs(np.arange(count) * self.num_tokens // count)
        own_square = float(np.mean(np.square(own.weights, dtype=np.float64))) if len(own.weights) else 0.0
        weight = np.sqrt(own_square or 1.0) * BORROWED_WEIGHT
        weights = np.concatenate([own.weights, np.full(count, weight, np.float32)])
        return ExpertRows(np.concatenate([own.inputs, others]), weights)

    def _inputs(self, which: Any) -> Float32:
        chosen: Float32 = self.inputs[which].astype(np.float32)
        chosen *= np.float32(self.input_scale)
        return chosen


def to_stored(inputs: Float32) -> tuple[NDArray[np.float16], float]:
    """Rows as float16 and the power of two that they are to be multiplied by."""
    largest = float(np.abs(inputs).max(initial=0.0))
    scale = 2.0 ** max(-120, int(np.ceil(np.log2(largest / LARGEST_STORED)))) if largest > 0 else 1.0
    return (inputs * np.float32(1 / scale)).astype(np.float16), scale


class StatisticsDirectory:
    """The statistics of a calibration run on disk: a directory a layer, and a summary that is written last.

    Arrays are mapped when read, so that worker processes share them. Another process on the same file system may read
    what a finished run wrote; one process writes.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def is_complete(self) -> bool:
        """Whether a calibration run has finished here."""
        return (self.directory / SUMMARY_NAME).is_file()

    def write_layer(
        self,
        layer_idx: int,
        inputs: Float32,
        topk_ids: NDArray[np.int64],
        topk_weights: Float32,
        shared_weights: Float32 | None,
    ) -> float:
        """Write what a layer's experts read and the router chose; gives the scale of the stored inputs."""
        place = self._layer(layer_idx)
        place.mkdir(parents=True, exist_ok=True)
        stored, scale = to_stored(inputs)
        np.save(place / "inputs.npy", stored)
        np.save(place / "topk_ids.npy", topk_ids.astype(np.int32))
        np.save(place / "topk_weights.npy", topk_weights)
        if shared_weights is not None:
            np.save(place / "shared_weights.npy", shared_weights)
        return scale

    def finish(self, summary: dict[str, Any]) -> None:
        """State that all is written.

        ``summary`` holds ``num_experts``, ``num_tokens`` and by layer ``input_scale`` and ``sensitivity``.
        """
        temporary = self.directory / f"{SUMMARY_NAME}.partial"
        temporary.write_text(json.dumps({"version": FORMAT_VERSION, **summary}, indent=1), encoding="utf-8")
        temporary.replace(self.directory / SUMMARY_NAME)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What ``finish`` wrote. InputError where the run did not finish or another version wrote it."""
        path = self.directory / SUMMARY_NAME
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path}: not readable as calibration statistics: {error}") from None
        if not isinstance(document, dict):
            raise InputError(f"{path}: expected a JSON object, found {type(document).__name__}")
        if document.get("version") != FORMAT_VERSION:
            raise InputError(f"{path}: version {document.get('version')!r}, expected {FORMAT_VERSION}")
        for name in ("num_experts", "num_tokens"):
            if type(document.get(name)) is not int or document[name] < 1:
                raise InputError(f"{path}: {name} is {document.get(name)!r}, expected a whole number above 0")
        if not isinstance(document.get("layers"), dict):
            raise InputError(f"{path}: layers is not a JSON object")
        return document

    def _facts(self, layer_idx: int) -> dict[str, float]:
        """The numbers that the summary has of a layer; InputError where it has none, or they are no finite ones."""
        path = self.directory / SUMMARY_NAME
        facts = self.summary["layers"].get(str(layer_idx))
        if facts is None:
            raise InputError(f"{path}: has no layer {layer_idx}")
        for name in ("input_scale", "sensitivity"):
            value: Any = facts.get(name) if isinstance(facts, dict) else None
            # No number of a calibration needs more digits than float64 has.
            if type(value) not in (int, float) or not -1e308 < value < 1e308 or (name == "input_scale" and value <= 0):
                raise InputError(f"{path}: layer {layer_idx}: {name} is {value!r}, expected a finite number")
        return {name: float(facts[name]) for name in ("input_scale", "sensitivity")}

    def check(self, layer_idx: int, hidden_size: int, num_experts: int, num_slots: int, has_shared: bool) -> None:
        """Read all of a layer. InputError names the file that is not what a layer of these sizes has."""
        summary, path = self.summary, self.directory / SUMMARY_NAME
        if summary["num_experts"] != num_experts:
            raise InputError(f"{path}: num_experts is {summary['num_experts']}, expected {num_experts}")
        self._facts(layer_idx)
        rows = int(summary["num_tokens"])
        wanted: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            "inputs": (np.float16, (rows, hidden_size)),
            "topk_ids": (np.int32, (rows, num_slots)),
            "topk_weights": (np.float32, (rows, num_slots)),
        }
        if has_shared:
            wanted["shared_weights"] = np.float32, (rows,)
        for name, (dtype, shape) in wanted.items():
            path, array = self._layer(layer_idx) / f"{name}.npy", self._read(layer_idx, name)
            if array.dtype != dtype or array.shape != shape:
                raise InputError(
                    f"{path}: is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} {list(shape)}"
                )
            # Minimum and maximum show NaN and infinity without a second array.
            least, most = float(array.min()), float(array.max())
            if not (math.isfinite(least) and math.isfinite(most)):
                raise InputError(f"{path}: holds values that are not finite")
            if name == "topk_ids" and not 0 <= least <= most < num_experts:
                raise InputError(f"{path}: holds experts {least:.0f} to {most:.0f}, expected 0 to {num_experts - 1}")

    def layer(self, layer_idx: int) -> LayerStatistics:
        """A layer's statistics. InputError where the files are not whole."""
        facts = self._facts(layer_idx)
        has_shared = (self._layer(layer_idx) / "shared_weights.npy").is_file()
        return LayerStatistics(
            layer_idx=layer_idx,
            inputs=self._read(layer_idx, "inputs"),
            input_scale=facts["input_scale"],
            topk_ids=self._read(layer_idx, "topk_ids"),
            topk_weights=self._read(layer_idx, "topk_weights"),
            shared_weights=self._read(layer_idx, "shared_weights") if has_shared else None,
            sensitivity=facts["sensitivity"],
            num_experts=self.summary["num_experts"],
        )

    def _layer(self, layer_idx: int) -> Path:
        return self.directory / f"layer_{layer_idx:03d}"

    def _read(self, layer_idx: int, name: str) -> NDArray[Any]:
        path = self._layer(layer_idx) / f"{name}.npy"
        try:
            array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError, EOFError, OverflowError, MemoryError, RecursionError) as error:
            raise InputError(f"{path}: not readable as calibration statistics: {error}") from None
        return array
