"""States of fixed shape (convolutions, recurrences): a step reads one buffer and writes the other.

So the state before the last step is there until the next one begins, and a step that breaks off has changed nothing. To
go back to a token inside the last step, that state is run again on the step's first rows, which the parts give for
it. It knows the manifest's states and no session: whoever asks for a rewind runs the replay parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lesonnx.errors import InputError
from lesonnx.manifest import Manifest, State

# Rows are kept of steps of at most this many tokens: enough to verify drafts, and a prefill's would take too much.
REWINDABLE_TOKENS = 16
# The values that a recurrent layer has in memory at once, in multiples of its rows: 4.4 were measured.
WORKING_ROWS = 5
Arrays = dict[str, NDArray[Any]]
RunPart = Callable[[str, Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]], None]


class StepStates:
    """The states of fixed shape of one sequence. Owned by `LayerStates`; not thread-safe."""

    def __init__(self, manifest: Manifest) -> None:
        self._states = [state for state in manifest.states if state.replay is not None]
        # Which of the two buffers is the past of the next step; stays 0 where there are no such states.
        self.side = 0
        outputs = {(part.name, value.name): value for part in manifest.parts for value in part.outputs}
        self._row_sizes = {
            name: int(outputs[state.part, name].shape[-1]) for state in self._states for name in state.row_names
        }
        self._buffers: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
        self._rows: Arrays = {}
        # The last step: tokens before it, and with it.
        self._step = (0, 0)

    @property
    def num_bytes(self) -> int:
        """What the buffers and the kept rows take."""
        values = 2 * sum(_size(state) for state in self._states) + REWINDABLE_TOKENS * sum(self._row_sizes.values())
        return values * np.dtype(np.float32).itemsize

    def working_bytes(self, num_rows: int) -> int:
        """What a part takes at most inside a step of that many rows for its layers with such states."""
        rows: dict[str, int] = {}
        for state in self._states:
            size = sum(self._row_sizes[name] for name in state.row_names)
            rows[state.part] = rows.get(state.part, 0) + size
        return WORKING_ROWS * max(rows.values(), default=0) * num_rows * np.dtype(np.float32).itemsize

    def allocate(self) -> None:
        """Make the buffers, zeroed, where they are not there yet."""
        if self._states and not self._buffers:
            for state in self._states:
                one, other = (np.zeros([int(size) for size in state.shape], np.float32) for _ in range(2))
                self._buffers[state.name] = (one, other)
            self._rows = {
                name: np.zeros((1, REWINDABLE_TOKENS, size), np.float32) for name, size in self._row_sizes.items()
            }

    def inputs(self, part_name: str) -> Arrays:
        """What a part reads, by its names; valid until ``side`` changes."""
        return {state.input: self._buffers[state.name][self.side] for state in self._of(part_name)}

    def outputs(self, part_name: str, num_rows: int) -> Arrays:
        """What a part writes in a step of that many rows; valid until ``side`` changes."""
        arrays: Arrays = {}
        for state in self._of(part_name):
            arrays[state.output] = self._buffers[state.name][1 - self.side]
            # One row leaves nothing between the state before and after it.
            if 1 < num_rows <= REWINDABLE_TOKENS:
                arrays |= {name: self._rows[name][:, :num_rows] for name in state.row_names}
        return arrays

    def _of(self, part_name: str) -> list[State]:
        return [state for state in self._states if state.part == part_name]

    def begin(self, num_tokens: int) -> None:
        """A step begins after that many tokens: what it writes over, nobody can go back to."""
        self._step = (num_tokens, num_tokens)

    def commit(self, num_tokens: int) -> None:
        """The step is done, with it there are that many tokens."""
        self._step = (self._step[0], num_tokens)
        self._turn()

    def _turn(self) -> None:
        if self._states:
            self.side = 1 - self.side

    def reachable(self, num_tokens: int) -> int:
        """The most tokens, at most ``num_tokens``, to which a rewind can go."""
        first, last = self._step
        if not self._states or num_tokens == last or (first <= num_tokens < last <= first + REWINDABLE_TOKENS):
            return num_tokens
        return first if first <= num_tokens else 0

    def rewind(self, num_tokens: int, run: RunPart) -> None:
        """Go back to that many tokens; InputError where they cannot be reached."""
        first, last = self._step
        if self.reachable(num_tokens) != num_tokens:
            inside = f"{first} to {last}" if last <= first + REWINDABLE_TOKENS else f"{first} or {last}"
            raise InputError(
                f"cannot rewind to {num_tokens} tokens: the states of this model go back to {inside} tokens, or to 0"
            )
        if not self._states or num_tokens == last:
            return
        if num_tokens == 0:
            for buffers in self._buffers.values():
                buffers[self.side].fill(0)
        elif num_tokens == first:
            # The past of the last step is that of the next one again.
            self._turn()
        else:
            for state in self._states:
                self._replay(state, num_tokens - first, run)
        self._step = (first, num_tokens) if num_tokens > first else (num_tokens, num_tokens)

    def _replay(self, state: State, num_rows: int, run: RunPart) -> None:
        """The state after the first rows of the last step, from the state before it."""
        if state.replay is None:
            return
        buffers = self._buffers[state.name]
        rows = {name: self._rows[output][:, :num_rows] for name, output in state.replay.rows.items()}
        run(state.replay.part, {"past": buffers[1 - self.side], **rows}, {"present": buffers[self.side]})


def _size(state: State) -> int:
    return int(np.prod([int(size) for size in state.shape]))
