"""The drafter ``ngram``: what followed when the last tokens stood there before, in the prompt or in the output.

It knows tokens and no model. ``docs/speculation.md`` states it exactly; ``tests/data/speculation.json`` has vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lesonnx.eviction import ONE
from lesonnx.speculative.drafter import MAX_DRAFT_TOKENS, NO_DRAFT, Draft, DraftSampler

LEAST_MATCH = 2
"""A single token that was there before foretells too little."""
MOST_MATCH = 16
"""Longer matches are as good as one of this length: of them the most recent counts."""
MOST_CANDIDATES = 16
"""Earlier places that are looked at, the most recent ones."""


class NgramDrafter:
    """Prompt lookup: finds the longest suffix of the sequence that occurs earlier, and proposes what followed it.

    Each token is indexed once: the place where its pair (the token before it and itself) ended last, chained to the
    place before that. Memory is two numbers a token; a proposal looks at `MOST_CANDIDATES` places at most.
    """

    name = "ngram"
    max_tokens = MAX_DRAFT_TOKENS
    is_free = True
    layer_idxs: tuple[int, ...] = ()

    def __init__(self) -> None:
        # By pair, the last place where it ends; by place, the one before with the same pair (-1: none).
        self._last: dict[int, int] = {}
        self._before: list[int] = []

    def propose(self, token_ids: Sequence[int], max_tokens: int, sampler: DraftSampler) -> Draft:
        """As `Drafter.propose`; ``sampler`` is not used: there is nothing to choose by."""
        if len(token_ids) < len(self._before):
            self.rewind(0)
        self._index(token_ids)
        place, length = self._longest_match(token_ids)
        if length < LEAST_MATCH or max_tokens < 1:
            return NO_DRAFT
        known = len(token_ids) - 1 - place
        # A copy may run into what it has just written: a period goes on.
        drafted = list(token_ids[place + 1 : place + 1 + max_tokens])
        while len(drafted) < max_tokens:
            drafted.append(drafted[len(drafted) - known])
        # With every token that is right, the match is one longer.
        lengths = [min(length + slot, MOST_MATCH) for slot in range(len(drafted))]
        return Draft(drafted, confidence=[ONE * matched // (matched + 1) for matched in lengths])

    def _index(self, token_ids: Sequence[int]) -> None:
        """Take in what has come since the last call."""
        for place in range(len(self._before), len(token_ids)):
            if place == 0:
                self._before.append(-1)
                continue
            pair = token_ids[place - 1] << 32 | token_ids[place]
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = place

    def _longest_match(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Where the longest earlier match of the suffix ends, the most recent of equals, and its length; 0 for none."""
        end = len(token_ids) - 1
        best, best_length = -1, 0
        place = self._before[end] if end >= 0 else -1
        for _ in range(MOST_CANDIDATES):
            if place < 0 or best_length == MOST_MATCH:
                break
            # The pair is the same.
            length = LEAST_MATCH
            while length < MOST_MATCH and length <= place and token_ids[place - length] == token_ids[end - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self._before[place]
        return best, best_length

    def observe(self, position: int, layer_outputs: NDArray[np.float32]) -> None:
        """Never called: it reads no layers."""

    def rewind(self, num_tokens: int) -> None:
        """Forget everything where the sequence becomes shorter than what is indexed: the next proposal begins anew."""
        if num_tokens < len(self._before):
            self._last.clear()
            self._before.clear()

    def close(self) -> None:
        """Nothing to free."""
