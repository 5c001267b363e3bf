"""What the experts get of a memory budget for the process: what everything else leaves, less while that grows.

It knows bytes and the loader, not what they are for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lesonnx.errors import BudgetError
from lesonnx.loader import ExpertLoader

_MEGABYTE = 10**6
_DIFFERING_BYTES = 2 * _MEGABYTE


@dataclass
class ExpertShare:
    """Shares a budget between experts and the rest. Owned by a runner; not thread-safe.

    ``fixed_bytes`` is what the process takes beside experts and what grows; experts need ``least_bytes`` and can use
    ``most_bytes``. ``lent_bytes`` are taken from them for a time.
    """

    loader: ExpertLoader
    budget_bytes: int
    fixed_bytes: int
    least_bytes: int
    most_bytes: int
    lent_bytes: int = 0

    def give(self, cache_bytes: int, capacity_tokens: int, lent_bytes: int = 0) -> None:
        """Leave room for attention caches, and for what is lent. BudgetError in one line; nothing changes then."""
        memory_per_byte = self.loader.engine.memory_per_byte
        left = int((self.budget_bytes - self.fixed_bytes - cache_bytes - lent_bytes) / memory_per_byte)
        if left < self.least_bytes:
            least = math.ceil(self.least_bytes * memory_per_byte)
            needed = round_up(self.fixed_bytes + cache_bytes + lent_bytes + least)
            lent = f", pictures {lent_bytes:,}" if lent_bytes else ""
            raise BudgetError(
                f"the memory budget is {self.budget_bytes:,} bytes; at least {needed:,} bytes are needed (runtime,"
                f" dense parts and a prefill chunk {self.fixed_bytes:,}, attention caches of {capacity_tokens} tokens"
                f" {cache_bytes:,}{lent}, experts {least:,})"
            )
        self.loader.pressure(min(left, self.most_bytes))
        self.lent_bytes = lent_bytes


def round_up(num_bytes: int) -> int:
    """A budget that is enough for so many bytes, in whole megabytes.

    What a process measures of itself differs from run to run, by 0.2 MB where that was tried: 2 MB are added for it.
    """
    return -(-(num_bytes + _DIFFERING_BYTES) // _MEGABYTE) * _MEGABYTE
