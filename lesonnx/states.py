"""The tensors a sequence carries from step to step: attention caches that grow, rewind by stating a smaller length.

It knows the manifest's states, not the parts that use them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import BundleError, ContextError
from lesonnx.manifest import Manifest, State

# Attention caches grow by this many tokens at a time.
GROWTH_TOKENS = 512


class LayerStates:
    """All states of one sequence. Owned by a runner; not thread-safe.

    ``position_ids`` values and lengths live in arrays that parts are bound to, so a step only writes numbers.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._states = manifest.states
        self.max_tokens = manifest.model.max_position_embeddings
        self.num_tokens = 0
        self.capacity_tokens = 0
        self.arrays: dict[str, NDArray[Any]] = {}
        self.seqlens_k = np.zeros(1, np.int32)
        self.total_sequence_length = np.zeros((), np.int32)
        for state in self._states:
            if not state.kind.startswith("attention_"):
                raise BundleError(f"state {state.name!r} is of kind {state.kind!r}, which this lesonnx does not run")

    def capacity_for(self, num_tokens: int) -> int:
        """The capacity that holds that many tokens."""
        return min(-(-num_tokens // GROWTH_TOKENS) * GROWTH_TOKENS, max(self.max_tokens, num_tokens))

    def bytes_at(self, capacity_tokens: int) -> int:
        """What the states take at a capacity."""
        return sum(
            int(np.prod(self._shape(state, capacity_tokens))) * np.dtype(state.dtype).itemsize for state in self._states
        )

    @staticmethod
    def _shape(state: State, capacity_tokens: int) -> tuple[int, ...]:
        return tuple(capacity_tokens if size == "S" else int(size) for size in state.shape)

    def reserve(self, num_tokens: int) -> None:
        """Make room for that many tokens in all; arrays may move. ContextError beyond the model's context."""
        if num_tokens > self.max_tokens:
            raise ContextError(f"{num_tokens} tokens do not fit the model's context of {self.max_tokens}")
        if num_tokens <= self.capacity_tokens:
            return
        capacity = self.capacity_for(num_tokens)
        for state in self._states:
            grown = np.zeros(self._shape(state, capacity), state.dtype)
            if self.num_tokens:
                grown[:, :, : self.num_tokens] = self.arrays[state.name][:, :, : self.num_tokens]
            self.arrays[state.name] = grown
        self.capacity_tokens = capacity

    def begin(self, num_rows: int) -> None:
        """State the lengths of a step of that many rows; room must have been reserved."""
        total = self.num_tokens + num_rows
        self.seqlens_k[0] = total - 1
        self.total_sequence_length[...] = total

    def commit(self, num_rows: int) -> None:
        """The step's rows are part of the sequence."""
        self.num_tokens += num_rows

    def rewind(self, num_tokens: int) -> None:
        """Go back to the first ``num_tokens`` tokens: attention needs no more than the smaller number."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot rewind to {num_tokens} of {self.num_tokens} tokens")
        self.num_tokens = num_tokens
