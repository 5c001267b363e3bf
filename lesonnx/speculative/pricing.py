"""How many drafted tokens to verify: as many as make tokens come fastest, none where drafting does not pay.

Pure integers and no clock: the host says what passes took, so the golden vectors of ``tests/data/speculation.json``
replay on every host. ``docs/speculation.md`` states the arithmetic. Not thread-safe, owned by a speculator.
"""

from __future__ import annotations

from collections.abc import Sequence

from lesonnx.eviction import ODDS_BITS, ONE
from lesonnx.speculative.acceptance import Acceptance
from lesonnx.speculative.pass_times import PassTimes

MARGIN = 8
"""Drafting must be faster by one part in so many, since what it is compared with is measured roughly."""
PLAIN_AGAIN_PASSES = 64
"""After so many passes with drafts one runs without, to measure again what they are compared with."""
ALLOWANCE_SHIFT = 6
"""Drafts may cost at most one part in 64 of all time, beyond what they gain."""
MOST_CHARGED = 2
"""A pass counts for at most so many times what it was expected to take, if the one with drafts before it did not."""
SLACK_PASSES, CREDIT_PASSES = 4, 16
"""In plain passes: what drafts may cost at once, and how much of what they gained counts against later losses."""
FIRST_INTERVAL, LAST_INTERVAL = 32, 2048
"""Where drafting does not pay, it is tried again after so many passes; each time in vain doubles them."""
PROBE_ODDS = ONE // 4
TREND_PASSES = 2
"""Plain passes that a drafter that costs is taken to gain each time, before it is known."""
UNKNOWN_DRAFT_SHIFT = 3
"""As long as no draft was measured, one is taken to cost an eighth of a plain pass."""
DRAFT_FADE_SHIFT = 3


class Pricing:
    """Chooses lengths by measured acceptance and measured time; bounded in what a wrong choice can cost.

    For each token of the sequence: `ask` how many tokens a drafter should propose, `choose` how many of its draft to
    verify, and `passed` when the pass is over; `judge` what became of drafts.
    """

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.times = PassTimes()
        self._draft_us = 0
        # What turns with a draft that cost lost on the mean; below 0: gained.
        self._trend_us = 0
        self._debt_us = 0
        self._since_plain = 0
        self._since_draft = 0
        self._interval = FIRST_INTERVAL
        self._is_probe = False
        # Whether the last pass with drafts took far longer than expected.
        self._was_odd = False

    @property
    def may_draft(self) -> bool:
        """Whether a length above 0 is possible at all: else nothing that it would be chosen by need be found out."""
        if not self.times.is_known or self._since_plain >= PLAIN_AGAIN_PASSES:
            return False
        return self._debt_us <= SLACK_PASSES * self.times.pass_us(1)

    def ask(self, most: int, is_free: bool, new_bytes: Sequence[int]) -> int:
        """How many tokens to have drafted, at most ``most``; 0: the drafter is not asked.

        ``new_bytes``: what each of ``most`` + 1 rows is expected to add to what is read; empty where that is not known.
        """
        self._is_probe = False
        if is_free or most < 1:
            return most
        # Where it should pay by what slots are worth on the whole and has not, drafts are paid for, then not verified.
        if self._trend_us > 0 and self._since_draft < self._interval:
            return 0
        length = self._longest(most, None, new_bytes, self._expected_draft_us(), in_order=False)
        self._is_probe = self._is_probe or (length > 0 and self._trend_us > 0)
        return length

    def choose(
        self, drafted: int, confidence: Sequence[int] | None, is_free: bool, is_drawn: bool, new_bytes: Sequence[int]
    ) -> int:
        """How many of ``drafted`` tokens to verify. Other values as in `ask`; a draft that was paid for counts no more.

        ``is_drawn``: the tokens were drawn, so the choice may not depend on what comes behind the slot it is about, or
        the target's distribution would be lost: it stops at the first drop.
        """
        if drafted < 1:
            return 0
        if is_free:
            return self._longest(drafted, confidence, new_bytes, 0, in_order=is_drawn)
        least = 1 if self._is_probe else 0
        return self._best(drafted, confidence, new_bytes, 0, least, in_order=is_drawn)

    def passed(
        self,
        rows: int,
        pass_us: int,
        stall_us: int,
        read_bytes: int,
        new_bytes: Sequence[int],
        new_tokens: int,
        draft_us: int | None,
    ) -> None:
        """A pass is over, with what it took and gave. ``draft_us``: None unless a drafter that costs ran."""
        plain_us = self.times.pass_us(1)
        has_drafted = rows > 1 or draft_us is not None
        charged_us = 0
        if has_drafted:
            # What another program did to a pass is not the drafts' fault: it happens to plain ones too. What happens
            # twice in a row is.
            most_us = MOST_CHARGED * self.times.pass_us(rows, sum(new_bytes[1:rows]))
            charged_us = pass_us if self._was_odd else min(pass_us, most_us)
            self._was_odd = pass_us > most_us
        if self._is_probe:
            # It was tried since what is known of it may be wrong.
            self.times.forget(rows)
        self.times.took(rows, pass_us, stall_us, read_bytes, new_bytes)
        self._since_plain = 0 if rows == 1 else self._since_plain + 1
        if self._debt_us > 0:
            self._debt_us = max(0, self._debt_us - (pass_us >> ALLOWANCE_SHIFT))
        self._since_draft = 0 if has_drafted else self._since_draft + 1
        lost_us = charged_us + (draft_us or 0) - new_tokens * plain_us
        if has_drafted:
            self._settle(lost_us, plain_us)
        if draft_us is not None:
            before_us = self._trend_us or -TREND_PASSES * plain_us
            self._trend_us = lost_us if self._is_probe else before_us + ((lost_us - before_us) >> DRAFT_FADE_SHIFT)
            self._draft_us += (draft_us - self._draft_us) >> DRAFT_FADE_SHIFT if self._draft_us else draft_us

    def _settle(self, lost_us: int, plain_us: int) -> None:
        """A pass with drafts lost so much against plain ones, or gained."""
        self._debt_us = max(self._debt_us + lost_us, -CREDIT_PASSES * plain_us)
        if lost_us <= 0:
            self._interval = FIRST_INTERVAL
        elif self._is_probe:
            self._interval = min(2 * self._interval, LAST_INTERVAL)

    def judge(self, drafted: int, accepted: int, confidence: Sequence[int] | None) -> None:
        """What became of a draft's first ``drafted`` tokens: verified, or held against what came without them."""
        self.acceptance.judge(drafted, accepted, confidence)

    def _longest(
        self, most: int, confidence: Sequence[int] | None, new_bytes: Sequence[int], draft_us: int, in_order: bool
    ) -> int:
        """The best length where nothing has been paid yet; none where the debt is too large, a probe now and then."""
        if not self.may_draft:
            return 0
        length = self._best(most, confidence, new_bytes, draft_us, 0, in_order)
        if length or self._since_draft < self._interval:
            return length
        if self.acceptance.odds(0, confidence) < PROBE_ODDS:
            return 0
        self._is_probe = True
        return self._best(most, confidence, new_bytes, draft_us, 1, in_order)

    def _best(
        self,
        most: int,
        confidence: Sequence[int] | None,
        new_bytes: Sequence[int],
        draft_us: int,
        least: int,
        in_order: bool,
    ) -> int:
        """The length from ``least`` to ``most`` with most expected tokens by expected time."""
        best, best_gain, best_us = 0, ONE, self.times.pass_us(1)
        survival, gain, extra_bytes = ONE, ONE, 0
        for length in range(1, most + 1):
            survival = survival * self.acceptance.odds(length - 1, confidence) >> ODDS_BITS
            gain += survival
            extra_bytes += new_bytes[length] if new_bytes else 0
            us = self.times.pass_us(length + 1, extra_bytes) + draft_us
            # The first length must beat drafting nothing clearly, unless it is wanted in any case.
            margin = 0 if best else 1
            if (best == 0 and least) or gain * best_us * MARGIN > best_gain * us * (MARGIN + margin):
                best, best_gain, best_us = length, gain, us
            elif in_order:
                break
            # No length behind can have more than all of its tokens, or take less than the least.
            if length < most and (gain + survival * (most - length)) * best_us <= best_gain * (
                self.times.least_us(length + 2) + draft_us
            ):
                break
        return best

    def _expected_draft_us(self) -> int:
        return self._draft_us or self.times.pass_us(1) >> UNKNOWN_DRAFT_SHIFT
