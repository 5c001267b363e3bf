"""The tensors a sequence carries from step to step: attention caches that grow, and states of fixed shape.

Attention rewinds by stating a smaller length; `StepStates` says how far the others go back. It knows the manifest's
states, not the sessions of the parts that use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import ContextError
from lesonnx.manifest import Manifest, State
from lesonnx.step_states import RunPart, StepStates

# Attention caches grow by this many tokens at a time.
GROWTH_TOKENS = 512


class LayerStates:
    """All states of one sequence. Owned by a runner; not thread-safe.

    ``position_ids`` values and lengths live in arrays that parts are bound to, so a step only writes numbers.
    Attention caches hold ``least_capacity_tokens`` from the start.
    """

    def __init__(self, manifest: Manifest, least_capacity_tokens: int = 0) -> None:
        self._states = [state for state in manifest.states if state.is_attention]
        self._fixed = StepStates(manifest)
        self.max_tokens = manifest.model.max_position_embeddings
        self.num_tokens = 0
        self.capacity_tokens = 0
        self._least_capacity_tokens = least_capacity_tokens
        self.arrays: dict[str, NDArray[Any]] = {}
        self.seqlens_k = np.zeros(1, np.int32)
        self.total_sequence_length = np.zeros((), np.int32)

    def capacity_for(self, num_tokens: int) -> int:
        """The capacity that holds that many tokens."""
        if num_tokens <= self._least_capacity_tokens:
            return self._least_capacity_tokens
        return min(-(-num_tokens // GROWTH_TOKENS) * GROWTH_TOKENS, max(self.max_tokens, num_tokens))

    def bytes_at(self, capacity_tokens: int) -> int:
        """What the states take at a capacity."""
        caches = sum(
            int(np.prod(self._shape(state, capacity_tokens))) * np.dtype(state.dtype).itemsize for state in self._states
        )
        return caches + self._fixed.num_bytes

    def working_bytes(self, num_rows: int) -> int:
        """What recurrent layers take for themselves inside a step of that many rows."""
        return self._fixed.working_bytes(num_rows)

    @staticmethod
    def _shape(state: State, capacity_tokens: int) -> tuple[int, ...]:
        return tuple(capacity_tokens if size == "S" else int(size) for size in state.shape)

    def reserve(self, num_tokens: int) -> None:
        """Make room for that many tokens in all; arrays may move. ContextError beyond the model's context."""
        if num_tokens > self.max_tokens:
            raise ContextError(f"{num_tokens} tokens do not fit the model's context of {self.max_tokens}")
        if num_tokens <= self.capacity_tokens:
            return
        self._fixed.allocate()
        capacity = self.capacity_for(num_tokens)
        for state in self._states:
            grown = np.zeros(self._shape(state, capacity), state.dtype)
            if self.num_tokens:
                grown[:, :, : self.num_tokens] = self.arrays[state.name][:, :, : self.num_tokens]
            self.arrays[state.name] = grown
        self.capacity_tokens = capacity

    @property
    def side(self) -> int:
        """Which of the buffers of fixed shape the next step reads: bindings hold for one side."""
        return self._fixed.side

    def inputs(self, part_name: str) -> dict[str, NDArray[Any]]:
        """The arrays that a part reads its states from, by its names; valid until `reserve` or a turn of the side."""
        caches = {state.input: self.arrays[state.name] for state in self._states if state.part == part_name}
        return caches | self._fixed.inputs(part_name)

    def outputs(self, part_name: str, num_rows: int) -> dict[str, NDArray[Any]]:
        """The arrays that a part writes its states to in a step of that many rows; valid as those it reads."""
        caches = {state.output: self.arrays[state.name] for state in self._states if state.part == part_name}
        return caches | self._fixed.outputs(part_name, num_rows)

    def write_rows(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Put a step's rows [1, heads, T, size] into attention caches, by the states' names: twins do not."""
        for name, array in rows.items():
            self.arrays[name][:, :, self.num_tokens : self.num_tokens + array.shape[2]] = array

    def begin(self, num_rows: int) -> None:
        """State the lengths of a step of that many rows; room must have been reserved."""
        total = self.num_tokens + num_rows
        self.seqlens_k[0] = total - 1
        self.total_sequence_length[...] = total
        self._fixed.begin(self.num_tokens)

    def commit(self, num_rows: int) -> None:
        """The step's rows are part of the sequence."""
        self.num_tokens += num_rows
        self._fixed.commit(self.num_tokens)

    def reachable(self, num_tokens: int) -> int:
        """The most tokens, at most ``num_tokens``, to which `rewind` can go back."""
        return self._fixed.reachable(num_tokens)

    def rewind(self, num_tokens: int, run: RunPart) -> None:
        """Go back to the first ``num_tokens`` tokens; ``run`` runs a replay part on arrays. InputError out of reach.

        Attention needs no more than the smaller number.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot rewind to {num_tokens} of {self.num_tokens} tokens")
        self._fixed.rewind(num_tokens, run)
        self.num_tokens = num_tokens
