"""Whether looking ahead pays here and now: tried against going without, by the clock, again and again.

A prediction costs processor time; where cores are busy or reads are quick it can cost more than the waiting it hides.
It knows steps and their times, not what a prediction is. Tokens do not depend on it.
"""

from __future__ import annotations

from statistics import median

# Steps of each side of a trial, and how long its outcome holds. A side that loses by 12 % costs 1.3 % in all.
TRIAL_STEPS = 8
HOLD_STEPS = 128
# The side in force stays unless the other is this much faster: medians of a few steps are rough.
MARGIN = 0.02


class Governor:
    """Decides step by step; owned by one runner, not thread-safe.

    A round is ``TRIAL_STEPS`` steps with and as many without, in turns, since a cache that warms up makes each step
    faster than the one before; then ``HOLD_STEPS`` with what was faster.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._step = 0
        self._times: dict[bool, list[float]] = {True: [], False: []}

    def wants(self) -> bool:
        """Whether the coming step should look ahead."""
        return self._step % 2 == 0 if self._step < 2 * TRIAL_STEPS else self.is_on

    def took(self, seconds: float) -> None:
        """The step that ``wants`` spoke of took that long."""
        if self._step < 2 * TRIAL_STEPS:
            self._times[self.wants()].append(seconds)
        self._step += 1
        if self._step == 2 * TRIAL_STEPS:
            self._decide()
        elif self._step == 2 * TRIAL_STEPS + HOLD_STEPS:
            self._step = 0

    def _decide(self) -> None:
        with_it, without = median(self._times[True]), median(self._times[False])
        mine, other = (with_it, without) if self.is_on else (without, with_it)
        if other < mine * (1 - MARGIN):
            self.is_on = not self.is_on
        self._times = {True: [], False: []}
