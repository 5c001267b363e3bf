"""How long a pass of so many rows takes: measured, fading, robust against a few slow ones. Pure integers.

A pass is what it computes and what it waits for reads. It knows no clock: times come in as microseconds. Not
thread-safe, owned by `Pricing`; ``docs/speculation.md`` states the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lesonnx.step_states import REWINDABLE_TOKENS

RECENT = 5
"""The median of the last so many passes of a width counts."""
SETTLED = 3
RATIO_ONE = 1 << 10
UNKNOWN_ROW_EIGHTHS, LEAST_ROW_EIGHTHS = 3, 1
"""Beyond what was measured a further row is taken to cost no less than 3/8 of a single one's pass, and 1/8 where what
was measured is settled: a few quick passes of two rows do not make those of twelve free."""
PRIOR_PASSES = 2
"""What further rows wait for the bytes that they add is begun with what so many plain passes wait for theirs."""
WARM_PASSES = 24
"""Where passes read, so many plain ones come before anything is compared with them: a cold cache makes them wait."""
FADE_SHIFT, PLAIN_FADE_SHIFT = 5, 4
PASS_ONE = 1 << 10


class _Recent:
    """The last few values and their median: of an even number the lower one. Settled: one odd value cannot sway it."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self.median = 0

    @property
    def is_settled(self) -> bool:
        return len(self._values) >= SETTLED

    def add(self, value: int) -> None:
        self._values = [*self._values[1 - RECENT :], value]
        self.median = sorted(self._values)[(len(self._values) - 1) // 2]


class PassTimes:
    """Microseconds of a pass by its rows and by the bytes that its rows but the first are expected to add.

    A pass of several rows is held as a ratio to one of a single row at that time, so what slows both down (another
    program, heat, a longer context) leaves it right. What is known of passes bounds it: wider ones are not quicker, and
    as long as a width is not settled, a further row does not cost more than those before it.
    """

    def __init__(self) -> None:
        self._one = _Recent()
        self._ratios: dict[int, _Recent] = {}
        self._table = [RATIO_ONE] * (REWINDABLE_TOKENS + 1)
        self._least = list(self._table)
        self._tabulate()
        # Fading sums over passes of one row: their number, their waiting, what they read.
        self._passes = 0
        self._num_plain = 0
        self._stall_us = 0
        self._read_bytes = 0
        self._mean_stall_us = 0
        self._mean_read_bytes = 0
        # And over passes of several: what they waited longer, and what their further rows were expected to add.
        self._extra_stall_us = 0
        self._extra_bytes = 0

    @property
    def is_known(self) -> bool:
        """Whether enough passes of one row were measured: without them there is nothing to compare with."""
        return self._one.is_settled and (not self._read_bytes or self._num_plain >= WARM_PASSES)

    def forget(self, rows: int) -> None:
        """What was measured of passes of so many rows counts no more."""
        self._ratios.pop(rows, None)

    def took(self, rows: int, pass_us: int, stall_us: int, read_bytes: int, new_bytes: Sequence[int]) -> None:
        """A pass is over. ``stall_us`` of it were spent waiting for reads; ``read_bytes`` were read meanwhile.

        ``new_bytes``: what each row was expected to add, the first one's own first; used of passes of several rows.
        """
        compute_us = max(1, pass_us - stall_us)
        if rows == 1:
            self._one.add(compute_us)
            self._num_plain = min(self._num_plain + 1, WARM_PASSES)
            self._passes += PASS_ONE - (self._passes >> PLAIN_FADE_SHIFT)
            self._stall_us += stall_us - (self._stall_us >> PLAIN_FADE_SHIFT)
            self._read_bytes += read_bytes - (self._read_bytes >> PLAIN_FADE_SHIFT)
            self._mean_stall_us = self._stall_us * PASS_ONE // max(1, self._passes)
            self._mean_read_bytes = self._read_bytes * PASS_ONE // max(1, self._passes)
            return
        if not self.is_known:
            return
        ratio = max(RATIO_ONE, compute_us * RATIO_ONE // self._one.median)
        self._ratios.setdefault(rows, _Recent()).add(ratio)
        self._tabulate()
        self._extra_stall_us += stall_us - self._mean_stall_us - (self._extra_stall_us >> FADE_SHIFT)
        self._extra_bytes += sum(new_bytes[1:rows]) - (self._extra_bytes >> FADE_SHIFT)

    def pass_us(self, rows: int, extra_bytes: int = 0) -> int:
        """What a pass of ``rows`` is expected to take if its rows but the first add ``extra_bytes``."""
        us = self._one.median * self._table[rows] // RATIO_ONE + self._mean_stall_us
        if extra_bytes:
            stall_us = max(0, PRIOR_PASSES * self._mean_stall_us + self._extra_stall_us)
            us += extra_bytes * stall_us // max(1, PRIOR_PASSES * self._mean_read_bytes + self._extra_bytes)
        return us

    def least_us(self, rows: int) -> int:
        """The least that a pass of ``rows`` or more is expected to take."""
        return self._one.median * self._least[rows] // RATIO_ONE + self._mean_stall_us

    def _tabulate(self) -> None:
        """By rows, a pass of so many by one of a single row: measured, or between measured ones; within bounds."""
        for rows in range(2, len(self._table)):
            ratio = self._measured(rows)
            is_settled = rows in self._ratios and self._ratios[rows].is_settled
            for width, recent in self._ratios.items():
                if width > rows and recent.is_settled:
                    ratio = min(ratio, recent.median)
                elif width < rows and recent.is_settled and not is_settled:
                    ratio = min(ratio, self._beyond(rows, width))
            self._table[rows] = ratio
        self._least = list(accumulate(reversed(self._table), min))[::-1]

    def _measured(self, rows: int) -> int:
        """The ratio that was measured, or that on the line through measured neighbours."""
        if rows in self._ratios:
            return self._ratios[rows].median
        above = min((width for width in self._ratios if width > rows), default=0)
        below = max((width for width in self._ratios if width < rows), default=1)
        if not above:
            return self._beyond(rows, below)
        low = self._ratios[below].median if below > 1 else RATIO_ONE
        return low + (self._ratios[above].median - low) * (rows - below) // (above - below)

    def _beyond(self, rows: int, width: int) -> int:
        """The ratio on the line from the single row through a narrower width, where further rows cost something."""
        if width == 1:
            return RATIO_ONE + RATIO_ONE * (rows - 1) * UNKNOWN_ROW_EIGHTHS // 8
        recent = self._ratios[width]
        least = LEAST_ROW_EIGHTHS if recent.is_settled else UNKNOWN_ROW_EIGHTHS
        line = (recent.median - RATIO_ONE) * (rows - width) // (width - 1)
        return recent.median + max(line, RATIO_ONE * (rows - width) * least // 8)
