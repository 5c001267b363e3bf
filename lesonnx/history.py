"""What a sequence has run so far: its tokens, their positions, and the pictures that some of them stand for.

It knows nothing of states: how far these go back, they say themselves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lesonnx.positions import Positions
from lesonnx.prompt import ImageRow, Prompt


class History:
    """Tokens that have run, in order. Owned by a runner; not thread-safe.

    ``position_rows``: how many positions a token has, see `Manifest.position_rows`.
    """

    def __init__(self, position_rows: int) -> None:
        self.token_ids: list[int] = []
        self._positions = Positions(position_rows)
        self._image_rows: dict[int, ImageRow] = {}

    def positions(self, prompt: Prompt) -> NDArray[np.int64]:
        """Positions [R,L] of what runs next: its own, or [1,L] alike in all rows. ValueError where they do not fit."""
        if prompt.position_ids is None:
            return self._positions.next(len(prompt))
        expected = (self._positions.num_rows, len(prompt))
        if prompt.position_ids.shape != expected:
            raise ValueError(f"position_ids are {list(prompt.position_ids.shape)}, expected {list(expected)}")
        return prompt.position_ids

    def append(self, prompt: Prompt, positions: NDArray[np.int64]) -> None:
        """These tokens have run, with the positions that `positions` gave."""
        first = len(self.token_ids)
        self._image_rows |= {first + place: row for place, row in prompt.image_rows.items()}
        self.token_ids += prompt.token_ids
        self._positions.append(positions)

    def rewind(self, num_tokens: int) -> None:
        """Only the first tokens have run."""
        if num_tokens < len(self.token_ids) and self._image_rows:
            self._image_rows = {place: row for place, row in self._image_rows.items() if place < num_tokens}
        del self.token_ids[num_tokens:]
        self._positions.rewind(num_tokens)

    def common(self, prompt: Prompt) -> int:
        """How many tokens a prompt begins with that have run: the same ids, for the same pictures, at the same places.

        The prompt's last token never counts, since it must run.
        """
        count = 0
        for ours, theirs in zip(self.token_ids, prompt.token_ids[:-1], strict=False):
            if ours != theirs:
                break
            count += 1
        shown = {place for place in (*self._image_rows, *prompt.image_rows) if place < count}
        differ = (place for place in shown if self._image_rows.get(place) != prompt.image_rows.get(place))
        return self._positions.common(prompt.position_ids, min(differ, default=count))
