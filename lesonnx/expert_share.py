"""What the experts get of a memory budget for the process: what everything else leaves, less while that grows.

It knows bytes and the loader, not what they are for.
"""

from __future__ import annotations

from dataclasses import dataclass

from lesonnx.errors import BudgetError
from lesonnx.loader import ExpertLoader


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
        left = self.budget_bytes - self.fixed_bytes - cache_bytes - lent_bytes
        left = int(left / self.loader.engine.memory_per_byte)
        if left < self.least_bytes:
            lent = f", pictures {lent_bytes:,}" if lent_bytes else ""
            raise BudgetError(
                f"the memory budget is {self.budget_bytes:,} bytes; runtime, dense parts and a prefill chunk may take"
                f" {self.fixed_bytes:,}, attention caches of {capacity_tokens} tokens"
                f" {cache_bytes:,}{lent}, and the experts need at least {self.least_bytes:,}"
            )
        self.loader.pressure(min(left, self.most_bytes))
        self.lent_bytes = lent_bytes
