"""How often drafts are right: measured by position and by the drafter's own confidence. Pure integers.

It knows no tokens and no time. Not thread-safe, owned by `Pricing`; ``docs/speculation.md`` states the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from lesonnx.eviction import ONE
from lesonnx.speculative.drafter import MAX_DRAFT_TOKENS

FIRST_ODDS = ONE // 2
PRIOR_SAMPLES = 2
COUNT_LIMIT = 64
"""Counts are halved when so many have been judged, so what is long ago fades."""
CONFIDENCE_SHIFT = 10
NUM_BINS = ONE >> CONFIDENCE_SHIFT


class _Counts:
    """How many drafts of one kind were judged and how many were right, both fading."""

    def __init__(self) -> None:
        self._judged = 0
        self._right = 0

    def odds(self, prior: int) -> int:
        """Of `ONE`; the prior counts as `PRIOR_SAMPLES` drafts."""
        return (self._right * ONE + PRIOR_SAMPLES * prior) // (self._judged + PRIOR_SAMPLES)

    def judge(self, is_right: bool) -> None:
        self._judged += 1
        self._right += is_right
        if self._judged == COUNT_LIMIT:
            self._judged >>= 1
            self._right >>= 1


class Acceptance:
    """The odds that a draft's slot is accepted, given that all slots before it are."""

    def __init__(self) -> None:
        self._by_position = [_Counts() for _ in range(MAX_DRAFT_TOKENS)]
        self._by_confidence = [_Counts() for _ in range(NUM_BINS)]
        # Both as odds, made anew with each judgement. What is not known of a slot is taken from the one before it; a
        # drafter's word counts half until it is measured, which costs nothing: unverified drafts are judged too.
        self._odds = [FIRST_ODDS] * MAX_DRAFT_TOKENS
        middle = 1 << CONFIDENCE_SHIFT >> 1
        self._bin_priors = [((number << CONFIDENCE_SHIFT) + middle) // 2 for number in range(NUM_BINS)]
        self._bin_odds = list(self._bin_priors)

    def odds(self, slot: int, confidence: Sequence[int] | None) -> int:
        """Of `ONE`: by the slot's confidence where the drafter gives one, else by position."""
        if confidence is None:
            return self._odds[slot]
        return self._bin_odds[min(confidence[slot] >> CONFIDENCE_SHIFT, NUM_BINS - 1)]

    def judge(self, drafted: int, accepted: int, confidence: Sequence[int] | None) -> None:
        """Of ``drafted`` tokens the first ``accepted`` were right; behind the first wrong one nothing is known."""
        for slot in range(min(drafted, accepted + 1)):
            self._by_position[slot].judge(slot < accepted)
            if confidence is not None:
                number = min(confidence[slot] >> CONFIDENCE_SHIFT, NUM_BINS - 1)
                self._by_confidence[number].judge(slot < accepted)
                self._bin_odds[number] = self._by_confidence[number].odds(self._bin_priors[number])
        before = FIRST_ODDS
        for slot, counts in enumerate(self._by_position):
            self._odds[slot] = before = counts.odds(before)
