"""The positions of a sequence so far: one a token, or three (time, height, width) where pictures lie on a canvas.

It knows no tokens: where a picture's lie, `vision.canvas` says.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Room is made for this many tokens more than are there, or for twice as many.
_GROWTH_TOKENS = 512


class Positions:
    """Positions [R,n] of a sequence of n tokens, R being 1 or 3. Owned by a runner; not thread-safe."""

    def __init__(self, num_rows: int) -> None:
        self._rows = np.empty((num_rows, 0), np.int64)
        # The greatest position up to each token, of any row: what follows a picture counts on from there.
        self._greatest = np.empty(0, np.int64)
        self.num_tokens = 0

    @property
    def num_rows(self) -> int:
        """How many positions a token has."""
        return len(self._rows)

    def next(self, num_tokens: int) -> NDArray[np.int64]:
        """Positions [1,n], alike in all rows, of so many tokens of text, or generated ones, after the sequence."""
        first = int(self._greatest[self.num_tokens - 1]) + 1 if self.num_tokens else 0
        return np.arange(first, first + num_tokens)[None]

    def append(self, positions: NDArray[np.int64]) -> None:
        """Tokens have run with positions [R,n], or [1,n] as `next` gives them."""
        first, total = self.num_tokens, self.num_tokens + positions.shape[1]
        if total > len(self._greatest):
            more = max(total + _GROWTH_TOKENS, 2 * len(self._greatest)) - len(self._greatest)
            self._rows = np.pad(self._rows, ((0, 0), (0, more)))
            self._greatest = np.pad(self._greatest, (0, more))
        self._rows[:, first:total] = positions
        greatest = self._greatest[first:total]
        if len(positions) == 1:
            # Text goes up from the greatest of all.
            greatest[...] = positions[0]
        else:
            np.maximum.accumulate(positions.max(axis=0), out=greatest)
            if first:
                np.maximum(greatest, self._greatest[first - 1], out=greatest)
        self.num_tokens = total

    def rewind(self, num_tokens: int) -> None:
        """The sequence goes back to its first tokens, whose positions do not change."""
        self.num_tokens = min(self.num_tokens, num_tokens)

    def common(self, positions: NDArray[np.int64] | None, num_tokens: int) -> int:
        """How many of the first ``num_tokens`` tokens have the positions [R,L]; None: those of text from 0 on."""
        if positions is None:
            positions = np.arange(num_tokens)[None]
        count = min(num_tokens, self.num_tokens)
        differ = (self._rows[:, :count] != positions[:, :count]).any(axis=0)
        return int(differ.argmax()) if differ.any() else count
