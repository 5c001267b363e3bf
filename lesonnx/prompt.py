"""Tokens to run, with what is known of them beside their ids: positions, and pictures that some of them stand for.

It knows neither texts nor how pictures are read; see docs/bundle.md, Vision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float32]


class ImageRow(NamedTuple):
    """What an image token stands for: a row of a picture's features. ``key`` is the picture's, see `Picture`."""

    key: str
    row: int


@dataclass(frozen=True)
class Prompt:
    """A stretch of tokens to run after each other.

    ``position_ids`` int64 [3,L] are time, height and width; None for text, which counts on from the sequence before it.
    ``image_rows`` says of each image token, by its place from 0, what it stands for; other tokens are not in it.
    ``features`` are float32 [I,H] by a picture's key: of the pictures that were read so far; [I,(1+D)*H] where more of
    them is added behind each of the first D layers.
    """

    token_ids: Sequence[int]
    position_ids: NDArray[np.int64] | None = None
    image_rows: Mapping[int, ImageRow] = field(default_factory=dict)
    features: Mapping[str, Features] = field(default_factory=dict)

    @classmethod
    def of(cls, tokens: Sequence[int] | Prompt) -> Prompt:
        """A prompt as it is, or one of text tokens."""
        return tokens if isinstance(tokens, Prompt) else cls(tokens)

    def __len__(self) -> int:
        return len(self.token_ids)

    def part(self, start: int, stop: int | None = None) -> Prompt:
        """The tokens from ``start`` up to ``stop`` (None: the end); positions stay what they are in the whole."""
        stop = len(self) if stop is None else min(stop, len(self))
        positions = None if self.position_ids is None else self.position_ids[:, start:stop]
        rows = {place - start: row for place, row in self.image_rows.items() if start <= place < stop}
        return Prompt(self.token_ids[start:stop], positions, rows, self.features)

    def keys_from(self, start: int) -> list[str]:
        """The pictures that the tokens from ``start`` on need, each once, in their order."""
        return list(dict.fromkeys(row.key for place, row in sorted(self.image_rows.items()) if place >= start))

    def with_features(self, features: Mapping[str, Features]) -> Prompt:
        """The same prompt, with these pictures read."""
        return replace(self, features=features)

    def write_features(self, hidden: NDArray[np.float32], deepstack: NDArray[np.float32] | None = None) -> None:
        """Put features over the rows of ``hidden`` [L,H] of image tokens, and into those of ``deepstack`` [D,L,H].

        All other rows of ``deepstack``, where there is one, become zero. KeyError for a picture that was not read.
        """
        size = hidden.shape[1]
        if deepstack is not None:
            deepstack[...] = 0
        for place, (key, row) in self.image_rows.items():
            features = self.features[key][row]
            hidden[place] = features[:size]
            if deepstack is not None:
                deepstack[:, place] = features[size:].reshape(-1, size)
