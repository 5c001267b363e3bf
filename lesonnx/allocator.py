"""Where experts lie in the cache: slabs cut into slots, planned once from the budget.

It knows no experts, only sizes: an expert takes one slot of its own size or a larger one. Pure integer arithmetic, no
clock, no memory of its own; not thread-safe, owned by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lesonnx.errors import BudgetError

PAGE_BYTES = 4096
SLAB_BYTES = 1 << 30
"""The longest slab: a Java buffer ends below 2 GiB."""


class SizeClass(NamedTuple):
    """Experts of one size. ``slot_bytes`` is a whole number of pages; ``routed`` and ``pinned`` count experts."""

    slot_bytes: int
    routed: int
    pinned: int


class Slab(NamedTuple):
    """One buffer of the cache: its ``length_bytes`` now, cut into slots of ``slot_bytes``."""

    length_bytes: int
    slot_bytes: int


def plan_slots(budget_bytes: int, classes: Sequence[SizeClass], at_once: int) -> list[int]:
    """How many slots each class gets; together they never exceed ``budget_bytes``.

    ``classes`` ascend by size; ``at_once`` is the most routed experts one row of a layer requires. Pinned experts get a
    slot each (one a class where the budget is too small), the largest routed class gets ``at_once``, and the rest is
    shared out in proportion to the bytes of the experts without a slot, so every layer can hold the same share of its
    experts; what rounding leaves goes to the largest class first, since its slots serve all. A budget too small for
    even that becomes slots of the largest size.

    Raises BudgetError when not even one expert of the largest size fits.
    """
    pages = budget_bytes // PAGE_BYTES
    sizes = [c.slot_bytes // PAGE_BYTES for c in classes]
    largest_routed = max((i for i, c in enumerate(classes) if c.routed), default=len(classes) - 1)
    for pinned in ([c.pinned for c in classes], [min(1, c.pinned) for c in classes]):
        slots = pinned
        slots[largest_routed] += min(at_once, classes[largest_routed].routed)
        rest = pages - sum(n * size for n, size in zip(slots, sizes, strict=True))
        if rest >= 0:
            break
    else:
        count = min(pages // sizes[-1], sum(c.routed + c.pinned for c in classes))
        if count < 1:
            raise BudgetError(f"expert budget of {budget_bytes} bytes: one expert takes {classes[-1].slot_bytes} bytes")
        return [0] * (len(classes) - 1) + [count]
    missing = [c.routed + c.pinned - n for c, n in zip(classes, slots, strict=True)]
    total = sum(n * size for n, size in zip(missing, sizes, strict=True))
    left = rest
    for i, size in enumerate(sizes):
        share = min(missing[i], rest * missing[i] // total) if total else 0
        slots[i] += share
        missing[i] -= share
        left -= share * size
    for i in reversed(range(len(sizes))):
        more = min(missing[i], left // sizes[i])
        slots[i] += more
        left -= more * sizes[i]
    return slots


class SlotAllocator:
    """Slots by class, in slabs of at most ``SLAB_BYTES`` that each hold one class.

    A slot is a number: those of class 0 first, then those of class 1, and so on. The budget given here is the largest
    there will ever be, so slabs keep their numbers and never grow beyond their first length; a smaller budget takes
    slots away from the end of every class, where a host can give memory back.

    Fragmentation is bounded: slots of a class never break up. What is lost is less than one slot a class at the end of
    the budget, and the difference between a slot and a smaller expert that lies in it.
    """

    def __init__(
        self, classes: Sequence[SizeClass], at_once: int, budget_bytes: int, slab_bytes: int = SLAB_BYTES
    ) -> None:
        if not classes or any(c.slot_bytes <= 0 or c.slot_bytes % PAGE_BYTES for c in classes):
            raise ValueError("every class needs a size that is a whole number of pages")
        if any(a.slot_bytes >= b.slot_bytes for a, b in pairwise(classes)):
            raise ValueError("classes must ascend by size")
        if classes[-1].slot_bytes > min(slab_bytes, SLAB_BYTES):
            raise BudgetError(f"an expert of {classes[-1].slot_bytes} bytes does not fit a slab of {slab_bytes} bytes")
        self._classes = list(classes)
        self._at_once = at_once
        self._largest_budget_bytes = budget_bytes
        counts = plan_slots(budget_bytes, classes, at_once)
        self._base: list[int] = []  # first slot of each class
        self._first_slab: list[int] = []
        self._per_slab = [min(slab_bytes, SLAB_BYTES) // c.slot_bytes for c in classes]
        self.class_of: list[int] = []
        """The class of each slot."""
        self.place: list[tuple[int, int]] = []
        """Slab and byte offset of each slot."""
        slab = 0
        for i, (size_class, count) in enumerate(zip(classes, counts, strict=True)):
            self._base.append(len(self.place))
            self._first_slab.append(slab)
            per = self._per_slab[i]
            self.place += [(slab + n // per, n % per * size_class.slot_bytes) for n in range(count)]
            self.class_of += [i] * count
            slab += -(-count // per)
        self._counts = counts
        self._limit = list(counts)  # slots of each class in force
        self._taken = [False] * len(self.place)
        self._free = [list(range(base + n - 1, base - 1, -1)) for base, n in zip(self._base, counts, strict=True)]
        self._occupied_bytes = 0

    def slabs(self) -> list[Slab]:
        """Every slab there will ever be, by number, with its present length (0: give it back)."""
        slabs: list[Slab] = []
        for i, size_class in enumerate(self._classes):
            per = self._per_slab[i]
            for start in range(0, self._counts[i], per):
                count = min(per, self._counts[i] - start)
                used = [n for n in range(count) if start + n < self._limit[i] or self._taken[self._base[i] + start + n]]
                slabs.append(Slab((used[-1] + 1 if used else 0) * size_class.slot_bytes, size_class.slot_bytes))
        return slabs

    def committed_bytes(self) -> int:
        """Slots in force, and slots taken away whose expert is still needed."""
        total = 0
        for i, size_class in enumerate(self._classes):
            base, limit = self._base[i], self._limit[i]
            late = sum(self._taken[base + limit : base + self._counts[i]])
            total += (limit + late) * size_class.slot_bytes
        return total

    def retired(self, slot: int) -> bool:
        """Whether a smaller budget has taken this slot away."""
        i = self.class_of[slot]
        return slot - self._base[i] >= self._limit[i]

    def has_free(self, size_class: int) -> bool:
        """Whether ``take`` would find a slot."""
        return any(self._free[size_class:])

    def take(self, size_class: int) -> int:
        """A free slot of the smallest class that holds ``size_class``, the latest given back; -1 if there is none."""
        for free in self._free[size_class:]:
            if free:
                slot = free.pop()
                self._taken[slot] = True
                return slot
        return -1

    def release(self, slot: int) -> None:
        """Give a slot back; one that was taken away by a smaller budget is gone."""
        self._taken[slot] = False
        if not self.retired(slot):
            self._free[self.class_of[slot]].append(slot)

    def resize(self, budget_bytes: int) -> list[int]:
        """Plan again for another budget; gives the taken slots beyond the new ends, ascending.

        Raises BudgetError as ``plan_slots`` does, changing nothing.
        """
        counts = plan_slots(min(budget_bytes, self._largest_budget_bytes), self._classes, self._at_once)
        self._limit = [min(n, most) for n, most in zip(counts, self._counts, strict=True)]
        beyond: list[int] = []
        for i, base in enumerate(self._base):
            end = base + self._limit[i]
            # Kept in the order of use, then what growth brought, so that the same events give the same places.
            kept = [slot for slot in self._free[i] if slot < end]
            known = set(kept)
            grown = [slot for slot in range(end - 1, base - 1, -1) if not self._taken[slot] and slot not in known]
            self._free[i] = grown + kept
            beyond += [slot for slot in range(end, base + self._counts[i]) if self._taken[slot]]
        return beyond
