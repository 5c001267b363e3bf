"""Which expert lies in which slot, and which of those that may be evicted is worth least.

It knows no loads, steps or predictions. Not thread-safe, owned by the scheduler.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lesonnx.allocator import SizeClass, Slab, SlotAllocator
from lesonnx.eviction import ODDS_BITS, ONE, TOP, make_policy
from lesonnx.schedule import LayerShape

# An entry orders experts by value, then by number: ``value << INDEX_BITS | expert``.
INDEX_BITS = 20
INDEX_MASK = (1 << INDEX_BITS) - 1
NONE = (1 << 63) - 1
"""Above every entry."""


class Residency:
    """Slots and values of all experts; experts are numbered layer by layer, a layer's shared one last.

    A value changes only when its layer is visited, so each layer keeps its evictable experts in ascending order, and
    the worst of all is the least of the layers' firsts: no search through the cache.
    """

    def __init__(self, layers: Sequence[LayerShape], budget_bytes: int, policy: str, slab_bytes: int) -> None:
        self.cost: list[int] = []
        self.layer_of: list[int] = []
        self.first: list[int] = []
        for layer, shape in enumerate(layers):
            self.first.append(len(self.cost))
            costs = [shape.cost_bytes] * shape.num_experts + [shape.shared_cost_bytes] * (shape.shared_cost_bytes > 0)
            self.cost += costs
            self.layer_of += [layer] * len(costs)
        if not 0 < len(self.cost) <= INDEX_MASK:
            raise ValueError(f"{len(self.cost)} experts: expected 1 to {INDEX_MASK}")
        self._costs = np.array(self.cost, np.int64)
        sizes = sorted(set(self.cost))
        self._class_of = [sizes.index(cost) for cost in self.cost]
        classes = [
            SizeClass(
                size,
                sum(shape.num_experts for shape in layers if shape.cost_bytes == size),
                sum(shape.shared_cost_bytes == size for shape in layers),
            )
            for size in sizes
        ]
        per_tok = [shape.num_experts_per_tok for shape in layers]
        num_experts = [shape.num_experts for shape in layers]
        self._slots = SlotAllocator(classes, max(per_tok), budget_bytes, slab_bytes)
        self.policy = make_policy(policy, num_experts, per_tok)
        self._numbers = [np.arange(first, first + n) for first, n in zip(self.first, num_experts, strict=True)]
        self.entry = list(range(len(self.cost)))
        """Each expert's entry when its layer was last valued; that of a shared expert is above all others."""
        for first, shape in zip(self.first, layers, strict=True):
            if shape.shared_cost_bytes:
                shared = first + shape.num_experts
                self.entry[shared] = TOP << INDEX_BITS | shared
        self._slot = [-1] * len(self.cost)
        # By slot class and layer: entries that may be evicted, ascending; and their first, NONE if there is none.
        self._evictable: list[list[list[int]]] = [[[] for _ in layers] for _ in sizes]
        self._first_entry = [[NONE] * len(layers) for _ in sizes]

    # ---- values

    def revalue(self, layer: int, visit: int, pinned: set[int]) -> None:
        """The layer was visited: take the policy's values and order its evictable experts, leaving out ``pinned``."""
        first, entry = self.first[layer], self.entry
        entries = (self.policy.values(layer, visit) << INDEX_BITS) + self._numbers[layer]
        entry[first : first + len(entries)] = entries.tolist()
        for by_layer, first_entry in zip(self._evictable, self._first_entry, strict=True):
            if by_layer[layer]:
                ordered = [entry[e] for old in by_layer[layer] if (e := old & INDEX_MASK) not in pinned]
                ordered.sort()
                by_layer[layer] = ordered
                first_entry[layer] = ordered[0] if ordered else NONE

    def worst(self, expert: int) -> int:
        """The least entry of evictable experts whose slots hold ``expert``; -NONE if a slot is free, NONE for none."""
        size_class = self._class_of[expert]
        if self._slots.has_free(size_class):
            return -NONE
        return min([min(first_entry) for first_entry in self._first_entry[size_class:]])

    def offer(self, expert: int) -> None:
        """From here on this expert may be evicted."""
        slot_class, layer = self._slots.class_of[self._slot[expert]], self.layer_of[expert]
        entries = self._evictable[slot_class][layer]
        insort(entries, self.entry[expert])
        self._first_entry[slot_class][layer] = entries[0]

    def withdraw(self, expert: int) -> None:
        """This expert may not be evicted any more, or is about to be."""
        slot_class, layer = self._slots.class_of[self._slot[expert]], self.layer_of[expert]
        entries = self._evictable[slot_class][layer]
        entries.remove(self.entry[expert])
        self._first_entry[slot_class][layer] = entries[0] if entries else NONE

    def expected_new_bytes(self, rows: int, absent: npt.NDArray[np.bool_]) -> list[int]:
        """For each of the coming rows the bytes of ``absent`` experts [n] that it uses first, as far as odds tell.

        A row uses each expert with the policy's odds, whatever other rows use.
        """
        if not absent.any():
            return [0] * rows
        odds = np.zeros(len(self.cost), np.int64)
        for layer, numbers in enumerate(self._numbers):
            odds[numbers[0] : numbers[-1] + 1] = self.policy.odds(layer)
        costs, odds = self._costs[absent], odds[absent]
        first_use, new_bytes = odds, []
        for _ in range(rows):
            new_bytes.append(int(costs @ first_use) >> ODDS_BITS)
            first_use = first_use * (ONE - odds) >> ODDS_BITS
        return new_bytes

    # ---- places

    def take(self, expert: int) -> tuple[int, int]:
        """Give the expert a free slot, which there must be; its slab and byte offset."""
        self._slot[expert] = slot = self._slots.take(self._class_of[expert])
        return self._slots.place[slot]

    def release(self, expert: int) -> None:
        self._slots.release(self._slot[expert])
        self._slot[expert] = -1

    def place(self, expert: int) -> tuple[int, int]:
        return self._slots.place[self._slot[expert]]

    def retired(self, expert: int) -> bool:
        """Whether a smaller budget has taken the expert's slot away."""
        return self._slots.retired(self._slot[expert])

    def resize(self, budget_bytes: int) -> list[int]:
        """Plan the slots for another budget; gives the evictable experts that lie beyond it, ascending."""
        beyond = set(self._slots.resize(budget_bytes))
        return sorted(
            entry & INDEX_MASK
            for by_layer in self._evictable
            for entries in by_layer
            for entry in entries
            if self._slot[entry & INDEX_MASK] in beyond
        )

    def slabs(self) -> list[Slab]:
        return self._slots.slabs()

    def committed_bytes(self) -> int:
        return self._slots.committed_bytes()
